"""Worlds of mazes, whose camera is static: recording, drawing, simulation, and counts of mazes."""

import contextlib
import dataclasses
import json

import numpy as np
import pytest
import torch
from conftest import FLOAT32, ROOT, record_arguments, simulator_settings
from torch.nn import functional

import record
import record_gen_samples
from agents.rollout_files import RolloutFolder
from common.game_constants import CHEESE, FRAME_SIZE, FREE, WALL
from envs.level_state import LevelState
from envs.procgen_env import EnvConfig, LevelSlots
from envs.squares import square_keys
from envs.wide_view import WorldView
from generative import train_prior
from generative.batches import align
from generative.config import SimulatorConfig
from generative.dataset import RolloutDataset
from generative.networks import LatentSampler
from generative.prior import static_globals
from generative.prior_losses import (
    draw_block_masks,
    player_loss,
    without_some_players,
    world_loss,
)
from generative.prior_networks import (
    EMBEDDING,
    NUM_GLOBALS,
    PlayerPrior,
    PriorNoise,
    ViewPrior,
    with_player,
)
from generative.runs import open_simulator
from generative.simulator import stack
from generative.squares import StaticSquares, World
from generative.start_optimisation.prior_starts import prior_loss
from generative.template_fit import TemplateFit
from generative.training import SimulatorTraining
from generative.world_data import fit_worlds
from maze import random_starts

AGENT = ROOT / "pretrained" / "maze_confined" / "model.pth"
SIDES = {"easy": 15, "hard": 25}  # squares per side of the view
MODE = LatentSampler("mode")
WORLDS = {"world_squares": 15, "pixels_per_square": 0.0, "prior_widths": (8, 8, 8, 8)}
RIGHT, UP = 7, 5


def world_of(squares):
    """Return the world of a static camera."""
    return World.of(squares, torch.zeros(len(squares), 2))


def psnr(first, second):
    return -10 * (first - second).square().mean(dim=(1, 2, 3)).log10()


def test_the_prior_learns_that_an_object_occurs_once():
    torch.manual_seed(0)
    prior, generator = ViewPrior(8, 2, (8, 8, 8)), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(prior.parameters(), 5e-3)
    noise = PriorNoise(torch.randn(64, EMBEDDING, 8, 8, generator=generator),
                       torch.randn(64, NUM_GLOBALS, generator=generator), *torch.empty(2, 0))
    for _ in range(80):
        places = torch.randint(64, (32,), generator=generator)
        squares = functional.one_hot(places, 64).view(32, 8, 8)
        camera = static_globals(torch.empty(32, NUM_GLOBALS))
        loss = world_loss(prior, squares, camera, generator, is_view=True)[0]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        drawn = prior.sample(noise, torch.arange(16) / 16, camera=static_globals(noise.globals))[0]
    counts = drawn.argmax(dim=-1).sum(dim=(1, 2))
    assert (counts == 1).float().mean() > 0.8


def test_the_player_prior_draws_one_of_the_squares_where_players_stand():
    torch.manual_seed(0)
    prior, generator = PlayerPrior(9, 3), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(prior.parameters(), 1e-2)
    squares = torch.randint(3, (64, 9, 9), generator=generator)
    places = squares.flatten(1) == 2
    for _ in range(150):
        rows = torch.randint(64, (32,), generator=generator)
        loss = player_loss(prior, squares[rows], places[rows].float().multinomial(
            1, generator=generator)[:, 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    worlds = functional.one_hot(squares, 3).float()
    with torch.no_grad():
        drawn = torch.stack([prior.sample(worlds, torch.randn(64, 9, 9, generator=generator))
                             for _ in range(200)], dim=1)
    assert places.gather(1, drawn).float().mean() > 0.98
    share = functional.one_hot(drawn, 81).float().mean(dim=1)[places]
    expected = (1 / places.sum(dim=1, keepdim=True)).expand(64, 81)[places]
    assert (share / expected - 1).abs().mean() < 0.4  # about .25 by chance


def test_the_mark_of_the_player_lies_on_its_square():
    square = torch.tensor([0, 14, 15 * 14, 15 * 7 + 9])
    marked = with_player(torch.zeros(4, 2, 8, 8), square, 15)
    assert marked.shape[1] == 2 + 16 and not marked[:, :2].any()
    for image, number in zip(functional.pixel_shuffle(marked[:, 2:], 4)[:, 0], square.tolist()):
        centre = image.nonzero().float().mean(dim=0).add(0.5).mul(15 / 32)
        assert divmod(number, 15) == tuple(centre.int().tolist())


def test_some_views_in_training_have_no_mark_of_the_player():
    view = torch.randn(600, 2, 8, 8)
    marked = with_player(view, torch.arange(600) % 225, 15)
    kept = without_some_players(marked, torch.Generator().manual_seed(0))
    unmarked = (kept == with_player(view, None, 15)).flatten(1).all(dim=1)
    assert 0.1 < unmarked.float().mean() < 0.2
    assert torch.equal(kept[~unmarked], marked[~unmarked])


@pytest.mark.parametrize("mode", SIDES)
def test_a_drawn_maze_is_the_frame_without_the_mouse(mode):
    num, config = SIDES[mode], EnvConfig("maze", mode)
    fit, worlds, grids = TemplateFit(FRAME_SIZE / num, num), [], []
    with (contextlib.closing(WorldView(config)) as view,
          contextlib.closing(LevelSlots(config, 1)) as slots):
        for level in range(30):
            slots.start(0, level)
            if slots.step(0, UP if level % 2 else RIGHT)[1]:
                continue
            state = LevelState.parse(slots.state(0))
            world, frame = view.draw(state), slots.frames[0]
            assert world.shape == frame.shape
            rows, columns = np.nonzero((world != frame).any(axis=-1))
            assert len(rows)  # the mouse
            place = np.array([columns.mean(), FRAME_SIZE - 1 - rows.mean()]) * num / FRAME_SIZE
            assert abs(place - [state.player["x"], state.player["y"]]).max() < 1
            keys, _ = square_keys(state)
            fit.add(0, world, keys, num / 2, num / 2)
            worlds.append(torch.from_numpy(world / np.float32(255)).permute(2, 0, 1))
            grids.append(keys)
    images, classes = fit.finish()
    assert isinstance(images, StaticSquares) and len(images.templates) == 3
    squares = torch.tensor([[[classes[key, 0] for key in row] for row in grid]
                            for grid in np.stack(grids).tolist()])
    drawn, nowhere = images.paint(world_of(squares)), torch.zeros(len(squares), 2)
    quality = psnr(images(drawn, nowhere), torch.stack(worlds))
    assert quality.min() > 34, quality
    certain = world_of(functional.one_hot(squares, 3).float())
    torch.testing.assert_close(images(images.paint(certain), nowhere), drawn.image)
    assert torch.equal(images.crop(certain, nowhere, 24), drawn.image[..., 20:44, 20:44])
    read, known = images.read(torch.stack(worlds), nowhere, num)
    assert (read.squares == squares)[known].float().mean() > 0.999 and known.float().mean() > 0.95


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    logdir = tmp_path_factory.mktemp("mazes")
    assert record.main(record_arguments(AGENT, logdir, 8, "--env_name", "maze", "--no_videos",
                                        "--worlds")) == 0
    return logdir / "data"


def test_worlds_of_moved_cheese_are_those_of_the_recording(recording):
    """The agent's training moved the cheese, and so does the recording."""
    folder = RolloutFolder(recording)
    assert folder.description()["cheese_region"] == 5
    images, worlds = fit_worlds(folder, range(8), 15)
    drawn = images.paint(world_of(torch.from_numpy(worlds.squares).long())).image
    real = np.stack([folder.world(*place) for place in zip(worlds.episodes, worlds.rows)])
    quality = psnr(drawn, torch.from_numpy(real / np.float32(255)).permute(0, 3, 1, 2))
    assert quality.min() > 34, quality
    # The mouse hides parts of squares.
    frames = np.stack([folder.array_files(episode).frames.rows(row, row + 1)[0]
                       for episode, row in zip(worlds.episodes, worlds.rows)])
    seen = torch.from_numpy(frames / np.float32(255))
    read, known = images.read(seen, torch.zeros(len(seen), 2), 15)
    wrong = (read.squares.numpy() != worlds.squares).sum(axis=(1, 2))
    assert known.all() and (wrong == 0).mean() > 0.95, wrong
    again, same = fit_worlds(folder, range(3), 15, images)
    assert again is images and np.array_equal(same.squares, worlds.squares[:len(same.squares)])


def test_masks_of_mazes_hide_a_block_or_everything():
    known, camera = draw_block_masks(400, 15, torch.Generator().manual_seed(0))
    assert camera.all()
    hidden = known[:, 0] == 0
    sides = [hidden.any(dim=axis).sum(dim=1) for axis in (2, 1)]
    assert torch.equal(hidden.sum(dim=(1, 2)), sides[0] * sides[1]) and (sides[0] > 0).all()
    assert 0.3 < hidden.all(dim=(1, 2)).float().mean() < 0.5
    partly = hidden[~hidden.all(dim=(1, 2))].float().mean(dim=0)
    assert partly.min() > 0 and partly[7, 7] > 0.2  # every square is hidden now and then


def test_a_prior_of_mazes_learns_each_maze_of_a_recording_once(recording):
    _, worlds = fit_worlds(RolloutFolder(recording), range(8), 15)
    assert len(worlds.rows) > 8
    learned = train_prior.worlds_to_learn(worlds, 0.0)
    assert worlds.episodes[learned].tolist() == list(range(8))
    assert len(train_prior.worlds_to_learn(worlds, 3.5)) == len(worlds.rows)


@pytest.fixture(scope="module")
def model_file(recording, tmp_path_factory):
    """A simulator of mazes, trained a little, with its prior."""
    folder = tmp_path_factory.mktemp("runs")
    settings = simulator_settings("tiny-spatial", AGENT, recording, None, WORLDS, max_batches=3,
                                  num_episodes=8)
    run = SimulatorTraining(folder / "run", settings, FLOAT32)
    assert run.train() == 0
    assert train_prior.main([
        "--agent_file", str(AGENT), "--model_file", str(run.newest_checkpoint), "--data_dir",
        str(recording), "--device", "cpu", "--num_world_batches", "3", "--num_start_batches", "3",
        "--batch_size", "4", "--output", str(folder / "prior" / "model.pt")]) == 0
    return folder / "prior" / "model.pt"


@pytest.fixture
def simulator(model_file):
    return open_simulator(model_file, AGENT, SimulatorConfig(), FLOAT32)


@pytest.fixture
def batch(recording, simulator):
    dataset = RolloutDataset(recording, 3, simulator.config.num_sim_steps)
    dataset.attach_worlds(fit_worlds(dataset.folder, range(8), 15, simulator.squares)[1])
    return align(dataset.batch(dataset.windows_with_worlds[:4]), simulator.config)


def test_the_mouse_is_in_the_square_of_the_player(batch):
    blue = batch.initial_images[-1][:, 2] > 150 / 255  # only the mouse
    for image, number in zip(blue, train_prior.player_squares(batch.positions[1], 15).tolist()):
        centre = image.nonzero().float().mean(dim=0).add(0.5).mul(15 / FRAME_SIZE)
        assert divmod(number, 15) == tuple(centre.int().tolist())


def test_starts_in_mazes_have_a_prior_loss(simulator, batch):
    """Without the square of the player, which is unknown."""
    vectors = simulator.encode(batch.initial_images)
    squares = functional.one_hot(batch.world.squares, len(simulator.squares.templates)).float()
    world = dataclasses.replace(batch.world, squares=squares)
    losses = prior_loss(simulator, vectors, world)
    assert losses.shape == (4,) and (losses > 0).all() and np.isfinite(losses).all()
    np.testing.assert_allclose(prior_loss(simulator, vectors[2:], world[2:]), losses[2:], rtol=1e-4)


@torch.no_grad()
def test_both_passes_agree_in_a_maze(simulator, batch):
    whole = simulator(batch, MODE)
    start = simulator.start_from(simulator.encode(batch.initial_images), MODE, world=batch.world)
    start = dataclasses.replace(start, agent_hidden=batch.first_hidden)
    steps = stack(start, simulator.imagine(start, MODE, true_actions=batch.actions))
    for name in ("raw_images", "rewards", "terminal_logits", "death_logits", "env_h"):
        torch.testing.assert_close(getattr(whole, name), getattr(steps, name), atol=2e-4, rtol=1e-3,
                                   msg=name)


@torch.no_grad()
def test_frames_and_memory_depend_on_the_maze(simulator, batch):
    vectors = simulator.encode(batch.initial_images)
    changed = dataclasses.replace(batch.world, squares=batch.world.squares.flip(1))
    first, second = (simulator.imagine(simulator.start_from(vectors, MODE, world=world), MODE, 2)
                     for world in (batch.world, changed))
    assert (first[0].images - second[0].images).abs().max() > 0.3
    assert not torch.equal(first[1].env_h, second[1].env_h)


@torch.no_grad()
def test_the_world_of_a_static_camera_never_moves_on(simulator, batch):
    """All of it lies at the edge of the view, so a moving world would generate squares."""
    evaluations = []
    simulator.prior.worlds.register_forward_hook(lambda *call: evaluations.append(call))
    start = simulator.start_from(simulator.encode(batch.initial_images), MODE, world=batch.world)
    simulator.imagine(start, MODE, 3)
    assert simulator.prior.is_trained and not evaluations


@torch.no_grad()
def test_squares_in_frames_are_read_and_hidden_ones_are_generated(simulator, batch):
    vectors = simulator.encode(batch.initial_images)
    world = simulator.start_from(vectors, MODE, images=batch.initial_images[-1]).world
    assert (world.corner.abs() < 1e-3).all()
    right = world.squares.argmax(dim=-1) == batch.world.squares
    assert right.float().mean() > 0.97

    squares = functional.one_hot(batch.world.squares, world.squares.shape[-1]).float()
    known = torch.ones(4, 15, 15, dtype=torch.bool)
    known[:, 4:9, 3:12] = False
    camera = static_globals(torch.empty(4, 6))
    given = dataclasses.replace(batch.world, squares=squares, seeds=torch.arange(4))
    completed = simulator.prior.completed(given, known, camera).squares
    assert torch.equal(completed[known], squares[known])
    torch.testing.assert_close(completed.sum(dim=-1), torch.ones(4, 15, 15))
    others = simulator.prior.completed(dataclasses.replace(given, seeds=torch.arange(4, 8)), known,
                                       camera).squares
    assert not torch.equal(completed[~known], others[~known])


@pytest.mark.parametrize("flags", [("--recording_rand_init",), ("--num_worlds", "2"),
                                   ("--rendered_worlds",)])
def test_a_simulator_of_mazes_can_be_sampled(flags, model_file, recording, tmp_path, capsys):
    argv = ["--agent_file", str(AGENT), "--model_file", str(model_file), "--data_dir",
            str(recording), "--generated_data_dir", str(tmp_path), "--num_samples", "3",
            "--num_sim_steps", "12", "--device", "cpu", *flags]
    if flags == ("--rendered_worlds",):  # the cheese was moved, so levels cannot be replayed
        assert record_gen_samples.main(argv) == 2
        assert "were edited before they were played" in capsys.readouterr().err
        return
    assert record_gen_samples.main(argv) == 0
    (folder,) = (path.parent for path in tmp_path.rglob("recording.json"))
    for sample in sorted(folder.glob("sample_*")):
        world = np.load(sample / "world.npy")
        assert world.shape == (15, 15, 3) and np.allclose(world.sum(axis=-1), 1, atol=2e-3)


# Counts

MAZE = """
#######
#...#.#
#.###.#
#.....#
#.#.#.#
#.#.#C#
#######"""


def cells_of(text):
    letters = {"#": WALL, ".": FREE, "C": CHEESE}
    return np.array([[letters[letter] for letter in row] for row in text.split()])


def frame_with_mice(*places):
    """Return a frame of 7 x 7 squares with mice at rows and columns."""
    frame = np.zeros((FRAME_SIZE, FRAME_SIZE, 3), np.uint8)
    for row, column in places:
        top, left = ((place + 0.4) * FRAME_SIZE / 7 for place in (row, column))
        frame[int(top):int(top) + 3, int(left):int(left) + 3] = 189, 204, 204
    return frame


@pytest.mark.parametrize(("row", "column", "cell", "broken"), [
    (1, 1, FREE, set()),
    (3, 2, WALL, {"connected", "perfect"}),
    (2, 2, FREE, {"perfect"}),  # two paths
    (5, 5, FREE, {"one_cheese"}),
    (5, 1, CHEESE, {"one_cheese"}),
])
def test_broken_mazes_are_counted(row, column, cell, broken):
    cells = cells_of(MAZE)
    cells[row, column] = cell
    found = random_starts.maze_properties(cells[None])
    assert {name for name, (holds,) in found.items() if not holds} == broken


@pytest.mark.parametrize(("mice", "change", "broken"), [
    ([(1, 1)], None, set()),
    ([], None, {"one_mouse", "reachable", "valid"}),
    ([(1, 1), (5, 3)], None, {"one_mouse", "reachable", "valid"}),
    ([(1, 4)], None, {"one_mouse", "reachable", "valid"}),  # on a wall
    ([(1, 1)], (3, 4), {"connected", "perfect", "reachable", "valid"}),
    ([(1, 5)], (3, 4), {"connected", "perfect", "valid"}),
])
def test_starts_without_a_way_to_the_cheese_are_counted(mice, change, broken):
    cells = cells_of(MAZE)
    if change:
        cells[change] = WALL
    found = random_starts.start_properties(cells[None], frame_with_mice(*mice)[None])
    assert {name for name, (holds,) in found.items() if not holds} == broken


def test_independent_squares_keep_the_frequencies_of_their_place():
    cells = np.stack([cells_of(MAZE), cells_of(MAZE).T, np.full((7, 7), WALL)])
    drawn = random_starts.independent_mazes(cells, 3000, np.random.default_rng(0))
    for cell in (WALL, FREE, CHEESE):
        assert abs((drawn == cell).mean(axis=0) - (cells == cell).mean(axis=0)).max() < 0.05


def test_recorded_mazes_are_mazes(model_file, recording, tmp_path):
    argv = ["--agent_file", str(AGENT), "--model_file", str(model_file), "--data_dir",
            str(recording), "--num_starts", "4", "--output_dir", str(tmp_path), "--device", "cpu"]
    mine = tmp_path / "random_starts.json"
    mine.write_text("mine")
    assert random_starts.main(argv) == 2 and mine.read_text() == "mine"
    mine.unlink()
    assert random_starts.main(argv) == 0
    shares = json.loads((tmp_path / "random_starts.json").read_text())["shares"]
    assert {value for value, *_ in shares["recorded starts"].values()} == {1.0}
    assert shares["completions"]["known_squares_kept"][0] == 1
    assert shares["random starts"]["valid"][0] < 1  # after three batches
    assert (tmp_path / "random_starts.png").is_file()
