"""Objects of worlds that move or change their look: their motion, images and recognition."""

import contextlib
import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn import functional
from world_helpers import (
    ENEMY,
    HARD,
    NUM_SQUARES,
    PIXELS,
    PLAYER,
    SAW,
    corner_at,
    near,
    psnr,
    slope,
)

from agents.replay import level_states
from agents.rollout_files import POSITION_COLUMNS
from common.game_constants import FRAME_SIZE
from envs.level_state import LevelState, MovingObject
from envs.objects import moving_objects, object_groups
from envs.procgen_env import LevelSlots
from envs.squares import is_empty, is_solid, square_keys, squares_around
from generative.camera import CameraState
from generative.prior import Prior, _parts
from generative.sprites import RESOLUTION
from generative.squares import SquareImages, World
from generative.world_data import fit_worlds, with_objects

WALL, EMPTY, OTHER, SAWS, ENEMIES = range(5)  # classes of ``planted_images``
NO_OP = 4
NUM_EPISODES = 9
WITH_ENEMIES = 1, 8, 13, 14, 22  # hard levels, whose 26 enemies all turn within 40 steps
WHOLE = 141  # squares per side of a world that contains a whole level
GROUPS = object_groups("coinrun")


def planted_images(looks=(1, 2)):
    """Return images of five classes, with the speeds and periods of saws and enemies, and smooth
    sprites."""
    generator = torch.Generator().manual_seed(0)
    images = SquareImages(5, PIXELS, looks)
    sprites = images.sprites
    images.templates.copy_(torch.rand(5, 1, 1, 3, generator=generator).expand_as(images.templates))
    images.templates[[SAWS, ENEMIES]] = images.templates[EMPTY].clone()
    coarse = torch.rand(2 * sum(looks), 4, 3, 3, generator=generator)
    fine = functional.interpolate(coarse, size=RESOLUTION, mode="bilinear")
    edge = torch.sin(torch.pi * (torch.arange(RESOLUTION) + 0.5) / RESOLUTION)
    sprites.images.copy_(fine * edge * edge[:, None] * 0.8)
    sprites.speed.copy_(torch.tensor([0, 0.15]))
    sprites.period.copy_(torch.tensor([1.0, 5.0]))
    sprites.solid[WALL] = 1
    return images


def table_of(objects):
    return pd.DataFrame(map(dataclasses.asdict, objects))


def world_with(squares, objects, images, x, y, clock=0):
    """Return a world (n, n) around (x, y), with objects."""
    classes, *fields = map(torch.from_numpy, with_objects(
        squares.astype(np.uint8), table_of(objects), GROUPS, images, x, y))
    places, velocities, looks = (field[None].float() for field in fields)
    return World.of(classes[None].long(), corner_at(np.float32([[x, y]]), len(squares)),
                    places=places, velocities=velocities, looks=looks.long(),
                    clock=torch.tensor([clock]))


# Motion

@pytest.mark.parametrize("level", WITH_ENEMIES)
@pytest.mark.parametrize("after", [0, 7])
def test_objects_move_and_change_their_images_as_in_the_game(level, after):
    images, states = planted_images((1, 10)), []
    with contextlib.closing(LevelSlots(HARD, 1)) as slots:
        slots.start(0, level)
        states.append(LevelState.parse(slots.state(0)))
        for _ in range(after + 40):
            assert not slots.step(0, NO_OP)[1]
            states.append(LevelState.parse(slots.state(0)))
    keys, outside = square_keys(states[after])
    x, y = (float(states[after].player[axis]) for axis in "xy")
    around = squares_around(keys, outside, x, y, WHOLE)
    classes = np.select([is_solid(around, "coinrun"), is_empty(around)], [WALL, EMPTY], OTHER)
    world = world_with(classes, moving_objects(states[after]), images, x, y, after)
    sprites = images.paint(world).sprites
    times = torch.arange(41)
    columns, velocities = (part[:, 0].numpy() for part in sprites.after(times))
    shown = sprites.weights[0].numpy() > 0
    right = columns - WHOLE // 2 + np.floor(x)  # (41, M)
    up = -(sprites.rows[0].numpy() - WHOLE // 2 + np.floor(-y))
    groups = sprites.groups[0].numpy()
    looks = sprites.looks[0].numpy()
    numbers = (times[:, None] + after).numpy() // np.array([1, 5])[groups] % 2
    real = [state.entities for state in states[after:]]
    turns = 0
    for group, (kind, first) in enumerate(((SAW, 2), (ENEMY, 6))):
        entities = np.stack([rows[rows["type"] == kind] for rows in real])  # (41, objects)
        predicted = np.flatnonzero(shown & (groups == group))
        assert len(predicted) == entities.shape[1]
        for entity in entities.T:
            away = abs(right[0, predicted] - entity["x"][0]) + abs(up[predicted] - entity["y"][0])
            number = predicted[away.argmin()]
            assert away.min() < 0.01
            assert abs(right[:, number] - entity["x"]).max() < 0.15
            np.testing.assert_array_equal(numbers[:, number] + first, entity["image_type"])
            assert looks[number] == group + entity["image_theme"][0]  # there is one look of saws
            same = np.sign(velocities[:, number]) == np.sign(entity["vx"])
            assert same.mean() > 0.9
            turns += (np.diff(np.sign(entity["vx"])) != 0).sum()
            np.testing.assert_allclose(abs(velocities[same, number]), abs(entity["vx"][same]),
                                       atol=1e-3)
    assert turns


def test_an_object_on_a_single_square_of_ground_stands_still():
    squares = np.full((9, 9), EMPTY)
    squares[5, 4] = WALL
    enemy = MovingObject("enemy_left", 0.4, 0.5, -0.15, 0.0, 6, 1)
    images = planted_images()
    world = world_with(squares, [enemy], images, 0.5, 0.5)
    columns, _ = images.paint(world).sprites.after(torch.tensor([0, 3, 30]))
    torch.testing.assert_close(columns[:, 0, 0], torch.full((3,), 4.4), atol=1e-3, rtol=0)


# Images

@pytest.fixture(scope="module")
def folder(noisy_recording):
    return noisy_recording


@pytest.fixture(scope="module")
def fitted(folder):
    return fit_worlds(folder, range(NUM_EPISODES))


def world_at(worlds, chosen):
    """Return recorded worlds in a batch."""
    part = worlds[chosen]
    places, velocities = (torch.from_numpy(field).float() for field in (part.places,
                                                                        part.velocities))
    return World.of(torch.from_numpy(part.squares).long(), corner_at(part.positions),
                    places=places, velocities=velocities,
                    looks=torch.from_numpy(part.looks).long(),
                    clock=torch.from_numpy(part.rows))


def test_speeds_periods_and_grounds_are_those_of_the_game(fitted):
    images, worlds = fitted
    sprites = images.sprites
    assert images.looks[0] == 1 and images.looks[1] > 5
    torch.testing.assert_close(sprites.speed, torch.tensor([0, 0.15]))
    assert sprites.period.tolist() == [1, 5]
    moving = worlds.squares == sprites.first_class + 1
    row, column = np.nonzero(moving.any(axis=0))
    below = worlds.squares[:, 1:][moving[:, :-1]]
    assert sprites.solid[below.astype(int)].all() and len(row) and len(column)
    assert not sprites.solid[images.empty_class] and not sprites.solid[sprites.first_class:].any()


def test_frames_with_objects_are_closer_to_the_games_than_static_ones(folder, fitted):
    """For 16 steps from a recorded world, near saws and enemies."""
    images, worlds = fitted
    first = images.sprites.first_class
    quality = {SAW: [], ENEMY: []}
    for episode in range(NUM_EPISODES):
        rows = worlds.rows[worlds.episodes == episode]
        last = len(folder.steps(episode)) - 2
        start = next((row for row in rows[2:] if row + 16 <= last and (worlds.squares[
            (worlds.episodes == episode) & (worlds.rows == row)][:, 12:27, 12:27] >= first
        ).sum() > 1), None)
        if start is None:
            continue
        world = world_at(worlds, (worlds.episodes == episode) & (worlds.rows == start))
        places = folder.steps(episode)[list(POSITION_COLUMNS)].to_numpy(np.float32)
        moved = (places[start:start + 17] - places[start]) * np.float32([PIXELS, -PIXELS])
        scenery, moved = images.paint(world), torch.from_numpy(moved)
        with_them = images.view(scenery, moved)
        static = images(scenery, moved)
        later = images.view(scenery.at_step(9), moved[9:])
        torch.testing.assert_close(later, with_them[9:])
        frames = torch.from_numpy(folder.episode(episode).frames[start:start + 17]) / 255
        frames = frames.permute(0, 3, 1, 2)
        for frame, drawn, without, (_, state) in zip(
                frames, with_them, static, level_states(folder, episode, range(start, start + 17))):
            for kind, differences in quality.items():
                mask = near(state, [kind]) & ~near(state, [PLAYER])
                if mask.sum() > 10:
                    differences.append([psnr(image[:, mask], frame[:, mask])
                                        for image in (drawn, without)])
    for kind, pairs in quality.items():
        drawn, without = np.array(pairs).T
        assert len(pairs) > 30, (kind, len(pairs))
        assert drawn.mean() > without.mean() + 3, (kind, drawn.mean(), without.mean())
        assert (drawn > without).mean() > 0.9


def test_objects_are_recognised_in_frames(folder, fitted):
    """Half of the enemies in crowded pits overlap, so the recall is that of enemies by themselves.
    """
    images, worlds = fitted
    first, middle = images.sprites.first_class, FRAME_SIZE / 2
    chosen = np.flatnonzero((worlds.squares[:, 13:26, 13:26] >= first).any(axis=(1, 2)))
    world = world_at(worlds, chosen)
    frames = np.concatenate([folder.array_files(int(episode)).frames.rows(int(row), int(row) + 1)
                             for episode, row in zip(worlds.episodes[chosen], worlds.rows[chosen])])
    found, known = images.read(torch.from_numpy(frames).float() / 255, world.corner, NUM_SQUARES)
    numbers = torch.arange(NUM_SQUARES)
    for group, (recall, precision) in enumerate(((0.9, 0.8), (0.7, 0.7))):
        is_real = world.squares == first + group
        is_found = (found.squares == first + group) & known
        at, at_found = (numbers + (one.places if group else 0.5 + 0 * one.places)
                        for one in (world, found))
        right, down = world.corner[:, :, None, None].unbind(dim=1)
        distance = torch.maximum((right + PIXELS * at - middle).abs(),
                                 (down + PIXELS * (numbers[:, None] + 0.5) - middle).abs())
        in_view = is_real & (distance < middle - PIXELS / 2) & (distance > 1.4 * PIXELS)
        matches, alone = [], 0
        for number, row, column in in_view.nonzero().tolist():
            place = at[number, row, column]
            if (is_real & ((at - place).abs() < 1.5))[number, row].sum() > 1:
                continue
            alone += 1
            offsets = (at_found[number, row] - place).abs().where(is_found[number, row], np.inf)
            other = int(offsets.argmin())
            if offsets[other] < 0.5:
                matches.append((float(offsets[other]), bool(
                    (world.velocities[number, row, column] > 0)
                    == (found.velocities[number, row, other] > 0))))
        offsets, agree = np.array(matches).T
        assert alone > 20
        assert len(matches) >= recall * alone, (group, len(matches), alone)
        near_real = functional.max_pool2d(is_real.float(), (1, 3), 1, (0, 1)) > 0
        assert (near_real & is_found).sum() > precision * is_found.sum()
        assert offsets.mean() < 0.15 and agree.mean() > 0.75, (group, offsets.mean(), agree.mean())


def test_gradients_of_views_agree_with_finite_differences():
    """With respect to the probabilities of objects, and their places."""
    images, generator = planted_images(), torch.Generator().manual_seed(1)
    squares = np.full((15, 15), EMPTY)
    squares[9] = WALL
    enemies = [MovingObject("enemy_right", x, 0.5, vx, 0.0, 6, look)
               for x, vx, look in ((-2.7, 0.15, 0), (1.4, -0.11, 1))]
    saw = MovingObject("saw", 3.5, 0.5, 0.0, 0.0, 2, 0)
    world = world_with(squares, [*enemies, saw], images, 0.3, 1.4, 3)
    objects = (world.squares >= SAWS)
    share = torch.where(objects, 0.7, 1.0)[..., None]
    probabilities = share * functional.one_hot(world.squares, 5) + (
        1 - share) * functional.one_hot(torch.tensor(EMPTY), 5)
    weights = torch.randn(6, 3, FRAME_SIZE, FRAME_SIZE, generator=generator)
    moved = torch.tensor([[0.7, -1.2]]) * torch.arange(6)[:, None]

    def total(probabilities, places):
        scenery = images.paint(dataclasses.replace(world, squares=probabilities, places=places))
        return (images.view(scenery, moved).double() * weights).sum()

    inputs = probabilities.requires_grad_(), world.places.requires_grad_()
    gradients = torch.autograd.grad(total(*inputs), inputs)
    assert gradients[1][world.squares == ENEMIES].abs().min() > 0.1
    assert not gradients[1][world.squares != ENEMIES].any()
    assert gradients[0][objects][:, SAWS:].abs().max(dim=1).values.min() > 0.1
    for i, step in ((0, 0.02), (1, 0.002)):
        for seed in range(3):
            direction = torch.randn(inputs[i].shape, generator=generator.manual_seed(seed))
            direction = direction * (objects if i else objects[..., None])
            expected = float((gradients[i] * direction).sum())
            assert slope(total, inputs, i, direction, step) == pytest.approx(
                expected, rel=0.03, abs=0.03 * float(gradients[i][objects].norm()))


def test_an_object_at_a_crate_is_drawn_where_it_is():
    """It is kept in the square to the left, because each square has one class."""
    images, squares = planted_images(), np.full((15, 15), EMPTY)
    squares[9] = WALL
    enemy = MovingObject("enemy_left", 2.6, 0.5, -0.15, 0.0, 6, 1)
    free = world_with(squares, [enemy], images, 0.3, 1.4)
    assert free.squares[0, 8, 9] == ENEMIES
    squares[8, 9] = OTHER
    world = world_with(squares, [enemy], images, 0.3, 1.4)
    assert world.squares[0, 8, 8] == ENEMIES and world.squares[0, 8, 9] == OTHER
    assert float(world.places[0, 8, 8]) == pytest.approx(1.6, abs=1e-3)
    assert world.velocities[0, 8, 8] == -1 and world.looks[0, 8, 8] == 1
    static = World.of(torch.from_numpy(squares)[None], world.corner)
    moved = torch.zeros(30, 2)
    expected = images.sprites.draw(images(images.paint(static), moved),
                                   images.paint(free).sprites, moved - world.corner, 0)
    drawn = images.view(images.paint(world), moved)
    torch.testing.assert_close(drawn, expected, atol=2e-3, rtol=0)  # places have half precision
    assert (drawn - images(images.paint(world), moved)).abs().amax(dim=(1, 2, 3)).min() > 0.1


# Generated worlds

@pytest.fixture(scope="module")
def prior():
    torch.manual_seed(0)
    prior = Prior(NUM_SQUARES, 5, (8, 8, 8), 2, 3, 8)
    with torch.no_grad():  # an untrained prior would generate more objects than can be drawn
        prior.worlds.out[-1].bias.unflatten(0, (5, 4))[SAWS:] = -1e4
    prior.trained.fill_(1)
    return prior


def test_noise_depends_on_seed_and_place(prior):
    seeds = torch.tensor([7, 8])
    here = _parts(prior.place_noise(seeds, torch.zeros(2, 2, dtype=torch.int64)))
    there = _parts(prior.place_noise(seeds, torch.tensor([[5, -3], [5, -3]])))
    for first, second in zip(here, there):
        assert torch.equal(second[..., 3:, :-5], first[..., :-3, 5:])
    assert len(here[0].unique()) > 0.99 * here[0].numel()


@pytest.mark.parametrize("certain", [True, False])
def test_known_objects_stay_when_a_world_moves_on(prior, certain):
    images, squares = planted_images(), np.full((NUM_SQUARES, NUM_SQUARES), EMPTY)
    squares[23] = WALL
    objects = [MovingObject("enemy_right", 11.2, -2.5, 0.1125, 0.0, 6, 1),
               MovingObject("saw", 13.5, -2.5, 0.0, 0.0, 2, 0)]
    world = world_with(squares, objects, images, 0.3, 0.4, 8)
    world = dataclasses.replace(world, seeds=torch.tensor([7]))
    if not certain:
        world = dataclasses.replace(world, squares=functional.one_hot(world.squares, 5).float())
    camera = CameraState(torch.zeros(1, 7), torch.tensor([[1.0, 0, 1, 0]]), torch.zeros(1, 2),
                         torch.tensor([[60.0, 0.0]]), torch.ones(1, 1))
    with torch.no_grad():
        moved = prior.continued(world, camera, PIXELS)
    right, down = moved.origin[0].tolist()
    assert right > 10 and down == 0
    torch.testing.assert_close(moved.corner[0], world.corner[0] + PIXELS * torch.tensor([right, 0]))
    assert moved.clock == world.clock and moved.seeds == world.seeds
    for name in ("squares", "places", "velocities", "looks"):
        before, after = (getattr(one, name) for one in (world, moved))
        assert torch.equal(after[:, :, :-right], before[:, :, right:])
    assert len(moved.places[:, :, -right:].unique()) > right  # new objects have their own places
    first, second = (images.paint(one) for one in (world, moved))
    for step in (0, 5):
        shown = [images.view(scenery.at_step(step), camera.displacement, 40)
                 for scenery in (first, second)]
        torch.testing.assert_close(*shown, atol=1e-4, rtol=0)
        assert (shown[0] - images(first, camera.displacement, 40)).abs().max() > 0.1
