"""Fillings of holes in recorded frames, with the shipped simulator and the real game."""

import contextlib
import dataclasses

import numpy as np
import pytest
import torch
from world_helpers import psnr

from agents.replay import level_states, recorded_game
from common.errors import UserError
from envs.objects import objects_of, single_objects
from envs.procgen_env import StateView
from envs.wide_view import WorldView
from generative.dataset import WindowPlace
from generative.filling import (
    fill,
    filled_start,
    initial_displacements,
    initial_images,
    paint,
    squares_of_cells,
    touched_cells,
    with_cells,
)
from generative.networks import LatentSampler
from generative.rendered_worlds import RenderedWorlds, rendered_world, world_of_images
from generative.spatial import split_state

MODE = LatentSampler("mode")
PIXELS = 64 / 13  # per square
SEEDS = torch.tensor([3, 4])


@pytest.fixture(scope="module")
def simulator(shipped_simulator):
    return shipped_simulator


@pytest.fixture(scope="module")
def folder(hard_recording):
    return hard_recording


def frames_at(folder, places):
    """Return the three initial frames (3, B, C, 64, 64) that end at places."""
    frames = np.stack([folder.array_files(place.episode).frames.rows(
        place.frame - 2, place.frame + 1) for place in places], axis=1)
    return torch.from_numpy(frames).float() / 255


@pytest.fixture(scope="module")
def start(folder, simulator):
    """Initial frames, vectors and worlds of two starts."""
    places = [WindowPlace(0, 12), WindowPlace(1, 20)]
    images = frames_at(folder, places)
    vectors = simulator.encode(images)
    return images, vectors, rendered_world(simulator, vectors, folder, places, SEEDS)


def block(row, column, size=2):
    cells = torch.zeros(2, 8, 8, dtype=torch.bool)
    cells[:, row:row + size, column:column + size] = True
    return cells


def shown_squares(images, hole, world, displacements):
    """Return which pixels show squares of a hole, bool (I, B, 64, 64)."""
    masks = np.zeros((len(images), *hole.shape[:1], 64, 64), bool)
    for number, row, y, x in np.ndindex(masks.shape):
        at = torch.tensor([x, y]) + 0.5 + displacements[number, row] - world.corner[row]
        column, line = (at / PIXELS).floor().int().tolist()
        masks[number, row, y, x] = hole[row, line, column]
    return torch.from_numpy(masks)


def test_a_filling_replaces_the_hole_and_keeps_everything_else(simulator, start):
    images, vectors, world = start
    cells = block(4, 4)
    hole = squares_of_cells(simulator, world, cells)
    assert 9 <= hole.sum() / 2 <= 25  # 16 pixels are 3.25 squares
    new, filled = fill(simulator, images, vectors, world, hole, torch.tensor([1, 2]))
    assert (filled.squares[hole].argmax(dim=-1) != world.squares[hole].argmax(dim=-1)).any()
    assert torch.equal(filled.squares[~hole], world.squares[~hole])
    for name in ("corner", "seeds", "origin", "clock"):
        assert torch.equal(getattr(filled, name), getattr(world, name)), name
    for name in ("places", "velocities", "looks"):
        assert torch.equal(getattr(filled, name)[~hole], getattr(world, name)[~hole]), name

    painted = paint(simulator, images, world, hole, filled)
    shown = shown_squares(images, hole, world, initial_displacements(simulator, images, world))
    changed = (painted != images).any(dim=2)
    assert changed.any() and not changed[~shown].any()

    touched = touched_cells(simulator, world, hole)
    assert (touched >= cells).all() and touched.sum() < 2 * 20
    before, after = (part.unflatten(1, (8, 8, -1)) for part in (vectors, new))
    for row, cells_of in enumerate(touched):
        own, other = before[row], after[row]
        scale = (other * own)[~cells_of].sum() / own[~cells_of].square().sum()
        torch.testing.assert_close(other[~cells_of], scale * own[~cells_of], atol=1e-6, rtol=1e-4)
        assert (other - scale * own)[cells_of].abs().max() > 0.01
    torch.testing.assert_close(new.norm(dim=1), torch.ones(2))


def test_a_filling_depends_on_its_seed_alone(simulator, start):
    images, vectors, world = start
    hole = squares_of_cells(simulator, world, block(4, 4, 4))
    first, again, other = (fill(simulator, images, vectors, world, hole, torch.tensor(seeds))
                           for seeds in ([7, 8], [7, 9], [10, 8]))
    torch.testing.assert_close(first[0][0], again[0][0])
    torch.testing.assert_close(first[0][1], other[0][1])
    assert torch.equal(first[1].squares[0], again[1].squares[0])
    assert not torch.equal(first[1].squares[0], other[1].squares[0])


def test_the_camera_is_that_of_the_recorded_frames(simulator, start):
    images, vectors, world = start
    hole = squares_of_cells(simulator, world, block(2, 2, 4))
    new, filled = fill(simulator, images, vectors, world, hole, torch.tensor([1, 2]))
    recorded = simulator.start_from(vectors, MODE, world=world).env_h
    start = filled_start(simulator, new, filled, vectors)
    own, other = (split_state(state, simulator.config) for state in (start.env_h, recorded))
    for name, tensor in vars(own.camera).items():
        assert torch.equal(tensor, getattr(other.camera, name)), name
    assert not torch.equal(own.canvas, other.canvas)


def test_initial_displacements_are_those_of_the_player(simulator, folder):
    places = [WindowPlace(episode, row) for episode in range(6) for row in (6, 12, 18)
              if row < len(folder.steps(episode))]
    images = frames_at(folder, places)
    vectors = simulator.encode(images)
    world = rendered_world(simulator, vectors, folder, places, torch.arange(len(places)))
    found = initial_displacements(simulator, images, world).numpy()
    for number, place in enumerate(places):
        at = np.array([(state.player["x"], -state.player["y"]) for _, state in level_states(
            folder, place.episode, range(place.frame - 2, place.frame + 1))], float)
        np.testing.assert_allclose(found[:, number], PIXELS * (at - at[-1]), atol=0.8)


def test_painting_a_box_gives_the_games_frames(simulator, folder):
    """All three frames, compared with frames that the game renders without the box."""
    (box,) = [kind for kind in objects_of("coinrun") if kind.name == "box"]
    ratios = []
    with (contextlib.closing(StateView(recorded_game(folder))) as view,
          contextlib.closing(WorldView(recorded_game(folder))) as wide):
        for episode, row in ((0, 12), (1, 20), (2, 12), (3, 14), (4, 12)):
            states = [state for _, state in level_states(folder, episode, range(row - 2, row + 1))]
            images = frames_at(folder, [WindowPlace(episode, row)])
            vectors = simulator.encode(images)
            for thing in single_objects(states[-1], box):
                gone = torch.stack([torch.from_numpy(view.draw(thing.undrawn_in(
                    state).to_bytes())).permute(2, 0, 1)[None].float() / 255 for state in states])
                changed = (gone != images).any(dim=2, keepdim=True).expand_as(images)
                if changed[:, 0, 0].sum(dim=(1, 2)).min() < 15:
                    continue
                world, without = (world_of_images(
                    simulator, vectors, RenderedWorlds.of_states(wide, [state], [row]), "coinrun",
                    SEEDS[:1]) for state in (states[-1], thing.removed_from(states[-1])))
                hole = (world.squares != without.squares).any(dim=-1)
                hole &= squares_of_cells(simulator, world, torch.ones(1, 8, 8, dtype=torch.bool))
                painted = paint(simulator, gone, without, hole, world)
                ratios += [psnr(new[where], expected[where]) - psnr(old[where], expected[where])
                           for new, expected, old, where in zip(painted, images, gone, changed)]
    assert len(ratios) >= 6 and min(ratios) > 5


def test_the_player_stays_in_front_of_a_filled_hole(simulator, start):
    images, _, world = start
    hole = squares_of_cells(simulator, world, block(3, 3))
    walls = torch.zeros_like(world.squares)
    walls[..., 1] = 1
    filled = dataclasses.replace(world, squares=torch.where(hole[..., None], walls, world.squares))
    painted = paint(simulator, images, world, hole, filled)
    same = (painted == images).all(dim=2)
    assert same[:, :, 30:34, 31:33].all()  # the player's body
    assert not same[:, :, 26:29, 25:39].any()  # the squares around it


def test_initial_images_of_a_start_are_like_the_recorded_frames(simulator, start):
    images, vectors, world = start
    begun = simulator.start_from(vectors, MODE, world=world)
    drawn = initial_images(simulator, images[-1], begun)
    assert torch.equal(drawn[-1], images[-1])
    for number in (0, 1):
        for row in (0, 1):
            if not torch.equal(images[number, row], images[-1, row]):
                assert psnr(drawn[number, row], images[number, row]) > psnr(
                    images[-1, row], images[number, row]) + 3


def test_code_of_cells_is_replaced_whatever_its_scale(simulator, start):
    _, vectors, _ = start
    others = torch.flip(vectors, (0,))
    cells = block(4, 2, 3)
    mixed = with_cells(vectors, others, cells)
    start, own, other = (simulator.env_converter(part) for part in (mixed, vectors, others))
    canvas, before, after = (split_state(part[:, :simulator.config.deter_dim],
                                         simulator.config).canvas for part in (start, own, other))
    inner = torch.zeros(8, 8, dtype=torch.bool)
    inner[:2, 6:] = True  # far from the replaced cells
    torch.testing.assert_close(canvas[..., inner], before[..., inner], atol=0.05, rtol=0.05)
    first = slice(0, 8)  # leading coefficients
    replaced = cells[:, None].expand_as(canvas[:, first])
    error = (canvas[:, first][replaced] - after[:, first][replaced]).abs().mean()
    assert error < 0.3 * (before[:, first][replaced] - after[:, first][replaced]).abs().mean()


def test_simulators_without_a_trained_prior_cannot_fill(simulator, start, monkeypatch):
    images, vectors, world = start
    hole = squares_of_cells(simulator, world, block(2, 2))
    monkeypatch.setitem(simulator.prior._buffers, "trained", torch.zeros(()))
    with pytest.raises(UserError, match="prior of this simulator has not been trained"):
        fill(simulator, images, vectors, world, hole, SEEDS)
    monkeypatch.setattr(simulator, "squares", None)
    with pytest.raises(UserError, match="has no worlds"):
        fill(simulator, images, vectors, world, hole, SEEDS)
