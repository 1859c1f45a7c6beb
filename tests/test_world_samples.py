"""Samples of simulators with worlds: random starts, sampled and rendered surroundings, drawn ends
and actions."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from conftest import FLOAT32, ROOT, refusal
from torch.nn import functional

import record_gen_samples
import saliency_experiments
from agents.agent_file import load_agent
from agents.episodes import PlayOptions
from agents.recording import WORLD_INTERVAL
from agents.rollout_files import RolloutFolder
from agents.testbed import Testbed
from common.config import save_settings
from common.files import save_json, sha256
from common.game_constants import ACTION_NAMES
from common.parameters import ParameterSet
from generative import dream_life, optimise_start
from generative.config import SimulatorConfig, TrainingConfig
from generative.dataset import RolloutDataset, WindowPlace
from generative.dream_life import COIN, DEATH, LifeStart
from generative.losses import LossScales
from generative.networks import LatentSampler
from generative.prior_networks import PriorNoise
from generative.published import save_published
from generative.rendered_worlds import rendered_world
from generative.runs import SimulatorRunSettings, open_simulator
from generative.sample_files import SampleFolder
from generative.sampling import Sampler, SamplingPlan, imagined_from
from generative.simulated_game import SimulatedGame
from generative.simulator import Simulator, stack
from generative.start_worlds import prior_sha256
from generative.world_data import fit_worlds

AGENT = ROOT / "pretrained" / "coinrun_hard" / "model.pth"
MODE = LatentSampler("mode")
TINY = ParameterSet("tiny-spatial")
EPISODES, NUM_SQUARES = range(4), 23
NUM_STEPS = 4
SEED = 5
OBJECT_FIELDS = {"places": np.float16, "velocities": np.float16, "looks": np.int16,
                 "clock": np.int64}  # of worlds, and their types in the files


@pytest.fixture(scope="module")
def recording(noisy_recording):
    return noisy_recording


@pytest.fixture(scope="module")
def fitted(recording):
    return fit_worlds(recording, EPISODES, NUM_SQUARES)


def save_simulator(folder, simulator):
    save_published(folder / "model.pt", simulator)
    save_settings(folder, SimulatorRunSettings(
        "t", str(AGENT), sha256(AGENT), "", "", 0, "float32", 0, simulator.config,
        TINY.get(TrainingConfig), LossScales()))


@pytest.fixture(scope="module")
def simulators(recording, fitted, tmp_path_factory):
    """Files of simulators, untrained except for the images of squares: without worlds, with worlds,
    and with a prior that counts as trained."""
    folder, config = tmp_path_factory.mktemp("simulators"), TINY.get(SimulatorConfig)
    files = {}
    for name, squares in (("plain", None), ("untrained", NUM_SQUARES), ("worlds", NUM_SQUARES)):
        torch.manual_seed(0)
        simulator = Simulator(dataclasses.replace(
            config, pixels_per_square=64 / 13, world_squares=squares, num_sim_steps=NUM_STEPS,
            square_classes=squares and len(fitted[0].templates),
            object_looks=fitted[0].looks if squares else None, prior_widths=(8, 8, 8, 8)),
            load_agent(AGENT))
        frames = recording.episode(0).frames[::3]
        simulator.basis.fit(torch.from_numpy(frames).permute(0, 3, 1, 2).float() / 255)
        with torch.no_grad():  # move away from the initial values
            for parameter in simulator.trainable_parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
            if squares:
                simulator.squares.load_state_dict(fitted[0].state_dict())
                for parameter in simulator.prior.parameters():
                    parameter.add_(0.05 * torch.randn_like(parameter))
                simulator.prior.trained.fill_(float(name == "worlds"))
        (folder / name).mkdir()
        save_simulator(folder / name, simulator)
        files[name] = folder / name / "model.pt"
    return files


@pytest.fixture(scope="module")
def simulator(simulators):
    return open_simulator(simulators["worlds"], AGENT, SimulatorConfig(), FLOAT32)


@pytest.fixture(scope="module")
def run(simulators, recording):
    """A function that runs the script and returns its exit status; later flags win."""
    def run_script(save_dir, *more, model="worlds", videos=False):
        return record_gen_samples.main([*map(str, (
            "--agent_file", AGENT, "--model_file", simulators[model], "--interpreting_params_name",
            "tiny-spatial", "--data_dir", recording.path, "--data_save_dir", save_dir,
            "--num_samples", 3, "--num_sim_steps", NUM_STEPS, "--seed", SEED, "--precision",
            "float32", "--device", "cpu", *([] if videos else ["--no_videos"]), *more))])
    return run_script


@pytest.fixture(scope="module")
def informed(run, tmp_path_factory):
    """Samples in two worlds of each start."""
    save_dir = tmp_path_factory.mktemp("informed")
    assert run(save_dir, "--num_worlds", 2) == 0
    return SampleFolder(save_dir / "informed_init")


@pytest.fixture(scope="module")
def random(run, tmp_path_factory):
    save_dir = tmp_path_factory.mktemp("random")
    assert run(save_dir, "--recording_rand_init", "--data_dir", save_dir / "missing") == 0
    return SampleFolder(save_dir / "rand_init")


def assert_reproduced(folder, simulator, numbers=None, worlds=None):
    """Assert that simulations from the files of samples, or in other worlds, give their frames."""
    numbers = folder.numbers() if numbers is None else numbers
    samples = folder.stacked(numbers)
    vectors = torch.from_numpy(samples.bottleneck_vec)
    again = imagined_from(simulator, FLOAT32, vectors, samples.frames.shape[1],
                          folder.worlds(numbers) if worlds is None else worlds)
    for sample, other in zip(again, samples.frames):
        assert np.abs(sample.frames.astype(int) - other).max() <= 1


# Starts and worlds

def test_files_hold_worlds_and_their_seeds(informed, random, simulator):
    classes = simulator.config.square_classes
    for folder, per_start in ((informed, 2), (random, 1)):
        numbers = folder.numbers()
        assert numbers == list(range(3 * per_start))
        seeds = []
        for number in numbers:
            squares = np.load(folder.sample_folder(number) / "world.npy")
            assert squares.dtype == np.float16
            assert squares.shape == (NUM_SQUARES, NUM_SQUARES, classes)
            np.testing.assert_allclose(squares.astype(float).sum(axis=-1), 1, atol=0.01)
            corner = np.load(folder.sample_folder(number) / "world_corner.npy")
            assert corner.dtype == np.float32 and corner.shape == (2,)
            for name, dtype in OBJECT_FIELDS.items():
                field = np.load(folder.sample_folder(number) / f"world_{name}.npy")
                assert field.dtype == dtype
                assert field.shape == (() if name == "clock" else (NUM_SQUARES, NUM_SQUARES))
            origin = json.loads((folder.sample_folder(number) / "origin.json").read_text())
            assert (origin["start"], origin["world"]) == divmod(number, per_start)
            assert origin["ended_at"] is None
            seeds.append(origin["world_seed"])
        assert len(set(seeds)) == len(numbers)
        assert folder.worlds(numbers).seeds.tolist() == seeds
        description = folder.description()
        assert description["prior_sha256"] == prior_sha256(simulator.prior)
        assert description["num_worlds"] == per_start and description["sample_ends"] is False


def test_seeds_fix_worlds(informed, random, run, tmp_path):
    """Neither the number of samples and worlds nor the batch matters."""
    assert run(tmp_path, "--num_samples", 2, "--num_worlds", 3, "--batch_size", 1) == 0
    assert run(tmp_path, "--num_samples", 2, "--recording_rand_init", "--batch_size", 1) == 0
    for folder, name, chosen in ((informed, "informed_init", ([0, 1, 2, 3], [0, 1, 3, 4])),
                                 (random, "rand_init", ([0, 1], [0, 1]))):
        other = SampleFolder(tmp_path / name)
        before, after = folder.worlds(chosen[0]), other.worlds(chosen[1])
        assert torch.equal(before.seeds, after.seeds)
        torch.testing.assert_close(before.squares, after.squares, atol=2e-3, rtol=0)
        torch.testing.assert_close(before.corner, after.corner, atol=1e-3, rtol=0)
        frames = folder.stacked(chosen[0]).frames.astype(int) - other.stacked(chosen[1]).frames
        assert np.abs(frames).max() <= 2
    assert run(tmp_path / "other", "--recording_rand_init", "--seed", SEED + 1) == 0
    other = SampleFolder(tmp_path / "other" / "rand_init").worlds([0, 1, 2])
    assert (other.squares - random.worlds([0, 1, 2]).squares).abs().mean() > 1e-3


def test_worlds_of_a_start_share_the_view_and_differ_beyond_it(informed, simulator):
    samples, worlds = informed.stacked(), informed.worlds(informed.numbers())
    first, second = worlds[::2], worlds[1::2]
    assert torch.equal(first.corner, second.corner)
    np.testing.assert_array_equal(samples.bottleneck_vec[::2], samples.bottleneck_vec[1::2])
    middle, reach = NUM_SQUARES // 2, 6  # squares
    view = np.s_[:, middle - reach + 1:middle + reach, middle - reach + 1:middle + reach]
    same = (first.squares == second.squares).all(dim=-1)
    assert same[view].float().mean() > 0.8  # the untrained encoder misjudges the camera's phase
    beyond = torch.ones_like(same)
    beyond[:, middle - 8:middle + 9, middle - 8:middle + 9] = False
    assert same[beyond].float().mean() < 0.15  # nearly certain classes may agree by chance
    assert (first.squares - second.squares)[beyond].abs().max(dim=-1).values.mean() > 0.01
    frames = samples.frames[:, 0].astype(float)
    of_worlds, of_starts = (np.abs(a - b).mean(axis=(1, 2, 3)) for a, b in (
        (frames[::2], frames[1::2]), (frames[::2], frames[[2, 4, 0]])))
    assert of_worlds.max() < 0.4 * of_starts.min()


def test_squares_in_view_are_those_of_the_recorded_frame(informed, recording, simulator):
    for number in (0, 3):
        origin, world = informed.origin(number), informed.worlds([number])
        frame = recording.episode(origin.episode).frames[origin.frame]
        image = torch.from_numpy(frame).permute(2, 0, 1)[None].float() / 255
        read, known = simulator.squares.read(image, world.corner, NUM_SQUARES)
        assert known.sum() > 100
        assert torch.equal(world.squares.argmax(dim=-1)[known], read.squares[known])
        assert (world.squares.max(dim=-1).values[known] == 1).all()


def test_random_starts_come_from_the_noise_of_their_seeds(random, simulator):
    worlds, samples = random.worlds([0, 1, 2]), random.stacked()
    with torch.no_grad():
        vectors, expected = simulator.sample_starts(simulator.prior.noise(worlds.seeds),
                                                    worlds.seeds)
    np.testing.assert_allclose(samples.bottleneck_vec, vectors, atol=1e-5)
    torch.testing.assert_close(worlds.squares, expected.squares, atol=1e-3, rtol=0)
    torch.testing.assert_close(worlds.corner, expected.corner)
    assert random.origin(1) == dataclasses.replace(random.origin(1), window=None, episode=None)
    assert np.abs(samples.frames[0].astype(int) - samples.frames[1]).mean() > 1


def test_frames_are_reproduced_from_the_files(informed, random, simulator):
    for folder in (informed, random):
        assert_reproduced(folder, simulator)
    worlds = random.worlds(random.numbers())
    assert (worlds.squares[..., simulator.squares.sprites.first_class:] > 0.5).sum() > 20
    for changes in ({"squares": worlds.squares[[1, 2, 0]]}, {"places": worlds.places - 0.4},
                    {"velocities": -worlds.velocities}, {"looks": worlds.looks + 1},
                    {"clock": worlds.clock + 5}):  # each file matters
        changed = dataclasses.replace(worlds, **changes)
        with pytest.raises(AssertionError):
            assert_reproduced(random, simulator, worlds=changed)


def test_samples_of_manual_actions_are_numbered_by_world(informed, run, simulator, tmp_path):
    assert run(tmp_path, "--manual_action", "pattern", "--num_worlds", 2, "--num_samples", 2,
               "--num_sim_steps", 2) == 0
    folder = SampleFolder(tmp_path / "manual_actions")
    assert len(folder.numbers()) == 36
    for number in (0, 8, 9, 30, 35):
        origin = folder.origin(number)
        place, action = divmod(number, 9)
        assert (origin.start, origin.world) == divmod(place, 2)
        assert origin.manual_action == ACTION_NAMES[action]
        assert folder.sample(number).actions.tolist() == [action] * 2
        assert origin.world_seed == informed.origin(place).world_seed
        torch.testing.assert_close(folder.worlds([number]).squares,
                                   informed.worlds([place]).squares, atol=2e-3, rtol=0)


def test_a_video_shows_all_actions_in_a_world(run, tmp_path, monkeypatch):
    written = {}
    monkeypatch.setattr("generative.sampling.write_video", lambda path, frames, _: written.update(
        {path.name: list(frames)}))
    assert run(tmp_path, "--manual_action", "pattern", "--num_worlds", 2, "--num_samples", 2,
               "--num_sim_steps", 2, videos=True) == 0
    assert {name for name in written if name.startswith("start")} == {
        f"start_{number:05d}.mp4" for number in range(4)}
    size = written["sample_00027.mp4"][0].shape[0]
    np.testing.assert_array_equal(written["start_00003.mp4"][1][-size:, :size],
                                  written["sample_00027.mp4"][1])  # down and to the left


# Rendered worlds

def looks(images, squares):
    return images.templates[squares].flatten(-3)


def test_rendered_worlds_are_the_games_squares(recording, fitted, simulator, tmp_path):
    """Worlds of all rows are read off recorded or rendered images, with the same result."""
    images, worlds = fitted
    chosen = worlds[::4]
    places = [WindowPlace(int(episode), int(row))
              for episode, row in zip(chosen.episodes, chosen.rows)]
    vectors = simulator.random_vectors(len(places), torch.Generator().manual_seed(0))
    seeds = torch.arange(len(places))
    world = rendered_world(simulator, vectors, recording, places, seeds)
    found = world.squares.argmax(dim=-1)
    alike = (looks(images, found) - looks(images, torch.from_numpy(chosen.squares).long())).abs()
    wrong = alike.mean(dim=-1) > 0.03
    assert wrong.float().mean() < 0.005
    assert torch.equal(world.squares, functional.one_hot(found, len(images.templates)).float())
    first = images.sprites.first_class
    objects, expected = found * (found >= first), chosen.squares * (chosen.squares >= first)
    assert len(np.unique(expected)) == 3 and np.array_equal(objects, expected)  # both kinds
    for name in ("places", "velocities", "looks"):
        np.testing.assert_allclose(getattr(world, name), getattr(chosen, name), atol=1e-3)
    assert world.clock.tolist() == chosen.rows.tolist()
    copy = RolloutFolder(shutil.copytree(recording.path, tmp_path / "data"))
    for path in copy.path.rglob("world_*.png"):
        path.unlink()
    assert not any(copy.world_rows(episode) for episode in EPISODES)
    replayed = rendered_world(simulator, vectors, copy, places, seeds)
    for name in ("squares", "looks", "clock"):
        assert torch.equal(getattr(replayed, name), getattr(world, name))
    for name in ("places", "velocities"):
        torch.testing.assert_close(getattr(replayed, name), getattr(world, name), atol=1e-3,
                                   rtol=0)
    torch.testing.assert_close(replayed.corner, world.corner, atol=1e-3, rtol=0)


@pytest.mark.parametrize("model", ["worlds", "untrained"])
def test_samples_in_rendered_worlds_show_the_game(model, run, recording, simulators, tmp_path):
    """Rows between recorded worlds are replayed; the prior need not be trained."""
    assert run(tmp_path, "--rendered_worlds", "--num_samples", 4, model=model) == 0
    folder = SampleFolder(tmp_path / "informed_init")
    simulator = open_simulator(simulators[model], AGENT, SimulatorConfig(), FLOAT32)
    origins = [folder.origin(number) for number in range(4)]
    assert any(origin.frame % WORLD_INTERVAL for origin in origins)
    for number, origin in enumerate(origins):
        world = folder.worlds([number])
        frames = recording.episode(origin.episode).frames
        later = min(origin.frame + 6, len(frames) - 2)
        places = recording.steps(origin.episode)[["player_x", "player_y"]].to_numpy()
        moved = (places[later] - places[origin.frame]) * simulator.squares.pixels_per_square
        drawn = simulator.squares(simulator.squares.paint(world),
                                  torch.from_numpy(moved * [1, -1]).float()[None])[0]
        error = (drawn.permute(1, 2, 0) - torch.from_numpy(frames[later] / 255)).abs().mean(dim=-1)
        error[20:44, 20:44] = 0  # the player
        assert (error > 0.15).float().mean() < 0.06
    assert folder.description()["rendered_worlds"] is True
    assert_reproduced(folder, simulator)


# Ends and actions

def test_ends_are_drawn_with_their_probability(simulator):
    plan = SamplingPlan(True, False, (), 4, 3, False, SEED, sample_ends=True)
    sampler = Sampler(simulator, FLOAT32, plan, None, 1)
    terminals, number = np.array([0.1, 0.3, 0.0, 0.5], np.float32), 4000
    ended = [sampler._origin(start, 0, terminals).ended_at for start in range(number)]
    expected = {0: 0.1, 1: 0.9 * 0.3, 2: 0, 3: 0.9 * 0.7 * 0.5, None: 0.9 * 0.7 * 0.5}
    for step, probability in expected.items():
        assert ended.count(step) / number == pytest.approx(probability, abs=0.03)


def test_samples_continue_after_a_drawn_end(informed, run, tmp_path):
    """Ends of different worlds and starts are drawn independently, and change nothing else."""
    assert run(tmp_path, "--num_worlds", 2, "--sample_ends", "--num_samples", 6) == 0
    folder = SampleFolder(tmp_path / "informed_init")
    assert folder.description()["sample_ends"] is True
    np.testing.assert_array_equal(folder.stacked(range(4)).actions,
                                  informed.stacked(range(4)).actions)
    assert np.abs(folder.stacked(range(4)).frames.astype(int)
                  - informed.stacked(range(4)).frames).max() <= 2
    found = [folder.origin(number).ended_at for number in folder.numbers()]
    drawn = [np.random.default_rng([SEED, 4, *divmod(number, 2)]).random(
        NUM_STEPS, np.float32) < folder.sample(number).terminals for number in folder.numbers()]
    assert found == [int(np.argmax(row)) if row.any() else None for row in drawn]


def test_the_agent_samples_its_actions(run, informed, simulator, tmp_path):
    argv = ["--num_worlds", 2, "--sample_actions", "--num_sim_steps", 8]
    assert run(tmp_path / "a", *argv) == 0
    assert run(tmp_path / "b", *argv, "--batch_size", 1) == 0
    assert run(tmp_path / "c", *argv, "--seed", SEED + 1) == 0
    first, again, other = (SampleFolder(tmp_path / name / "informed_init") for name in "abc")
    samples = first.stacked()
    assert first.description()["sample_actions"] is True
    np.testing.assert_array_equal(samples.actions, again.stacked().actions)
    assert (samples.actions != other.stacked().actions)[:, 1:].any()
    greedy = samples.log_probs[:, :-1].argmax(axis=-1)
    assert (samples.actions[:, 1:] != greedy).mean() > 0.02
    assert (samples.actions[::2, 1:] != samples.actions[1::2, 1:]).any()  # worlds differ


def test_actions_are_sampled_with_their_probability(simulator):
    number = 3000
    plan = SamplingPlan(False, False, (), 2, 3, False, SEED, num_worlds=2, sample_actions=True)
    choose = Sampler(simulator, FLOAT32, plan, None, 1)._choose(range(number))
    probs = torch.tensor([0.2, 0.0, 0.5, 0.3])
    first, second = (choose(probs.log().expand(2 * number, 4)) for _ in range(2))
    assert ((first == 0) | (first == 1)).all() and (first.sum(dim=1) == 1).all()
    for actions in (first, second):
        torch.testing.assert_close(actions.mean(dim=0), probs, atol=0.03, rtol=0)
    for pair in ((first, second), (first[::2], first[1::2])):  # steps, and worlds, are independent
        both = (pair[0][:, 2] * pair[1][:, 2]).mean()
        assert float(both) == pytest.approx(0.25, abs=0.03)


# What simulates samples again

def test_saliency_is_computed_in_the_samples_worlds(informed, simulators, recording, tmp_path,
                                                    capsys, monkeypatch):
    monkeypatch.setattr("generative.saliency.run.NOTICEABLE", 0.5)  # of 255
    samples = shutil.copytree(informed.path, tmp_path / "informed_init")
    argv = [*map(str, (
        "--agent_file", AGENT, "--model_file", simulators["worlds"], "--interpreting_params_name",
        "tiny-spatial", "--samples_dir", samples, "--saliency_func_type", "value", "--sample_ids",
        "1", "2", "5", "--common_timesteps", NUM_STEPS - 1,
        "--seed", 5, "--device", "cpu", "--no_videos"))]
    assert saliency_experiments.main(argv) == 0
    assert "do not lead to the recorded frames" not in capsys.readouterr().out
    maps = [np.load(path) for path in sorted(samples.rglob("*value*.npy"))]
    assert maps and all(np.isfinite(array).all() for array in maps)
    shutil.copy(informed.sample_folder(4) / "world.npy", samples / "sample_00001")
    assert saliency_experiments.main([*argv, "--overwrite"]) == 0
    assert "in 1 samples, such as sample 1" in capsys.readouterr().out


def test_combined_samples_take_place_in_the_first_world(informed, simulators, simulator, tmp_path):
    samples = shutil.copytree(informed.path, tmp_path / "informed_init")
    assert saliency_experiments.main([*map(str, (
        "--agent_file", AGENT, "--model_file", simulators["worlds"], "--interpreting_params_name",
        "tiny-spatial", "--samples_dir", samples, "--saliency_func_type", "value", "--sample_ids",
        "4", "1", "--common_timesteps", "1", "--combine_samples_not_iterate", "--seed", 5,
        "--device", "cpu", "--no_videos"))]) == 0
    (path,) = tmp_path.glob("informed_init_mean_of_*")
    folder = SampleFolder(path)
    assert torch.equal(folder.worlds([0]).squares, informed.worlds([4]).squares)
    assert folder.origin(0).world_seed == informed.origin(4).world_seed
    assert folder.description()["world_of_sample"] == 4
    assert_reproduced(folder, simulator)


def test_random_samples_are_combined_by_their_noise(random, run, simulators, simulator, tmp_path):
    """The noise of the mean has unit variance, also if samples share their noise."""
    assert run(tmp_path, "--recording_rand_init", "--manual_action", "up", "down") == 0
    shared = tmp_path / "manual_actions_rand_init"
    seeds = random.worlds([0, 1, 2]).seeds
    for path, chosen, weights in (
            (shutil.copytree(random.path, tmp_path / "rand_init"), (0, 2), (1, 0, 1)),
            (shared, (0, 1, 2), (2, 1, 0))):
        assert saliency_experiments.main([*map(str, (
            "--agent_file", AGENT, "--model_file", simulators["worlds"],
            "--interpreting_params_name", "tiny-spatial", "--samples_dir", path,
            "--saliency_func_type", "value", "--sample_ids", *chosen, "--common_timesteps", "1",
            "--combine_samples_not_iterate", "--seed", 5, "--device", "cpu", "--no_videos"))]) == 0
        (combined,) = tmp_path.glob(f"{path.name}_mean_of_*")
        folder, weights = SampleFolder(combined), torch.tensor(weights).float()
        weights /= weights.norm()
        noise = PriorNoise(*(
            (weights.view(-1, *[1] * (tensor.ndim - 1)) * tensor).sum(dim=0, keepdim=True)
            for tensor in vars(simulator.prior.noise(seeds)).values()))
        assert noise.squares.var() == pytest.approx(1, abs=0.1)
        with torch.no_grad():
            vectors, expected = simulator.sample_starts(noise, seeds[:1])
        world = folder.worlds([0])
        torch.testing.assert_close(world.squares, expected.squares, atol=2e-3, rtol=0)
        torch.testing.assert_close(torch.from_numpy(folder.stacked().bottleneck_vec), vectors,
                                   atol=1e-4, rtol=0)
        assert world.seeds.tolist() == seeds[:1].tolist()
        assert "world_of_sample" not in folder.description()
        assert_reproduced(folder, simulator)


def test_starts_are_optimised_in_the_world_of_their_first_vector(simulators, recording, simulator,
                                                                 tmp_path):
    assert optimise_start.main([*map(str, (
        "--agent_file", AGENT, "--model_file", simulators["worlds"], "--interpreting_params_name",
        "tiny-spatial", "--data_dir", recording.path, "--targets", "value", "--num_starts", 2,
        "--iterations", 2, "--num_recorded", 12, "--step", 2, "--num_sim_steps", NUM_STEPS,
        "--search_space", "vector", "--seed", 5, "--device", "cpu", "--precision", "float32",
        "--no_real_game", "--no_videos", "--output_dir", tmp_path))]) == 0
    with np.load(tmp_path / "recorded.npz") as arrays:
        windows = arrays["windows"].tolist()
    for path in tmp_path.glob("penalty_*"):
        folder = SampleFolder(path)
        seeds = [folder.origin(number).world_seed for number in folder.numbers()]
        assert len(set(seeds)) == 2 and set(seeds) <= set(windows)
        assert_reproduced(folder, simulator)
    assert (tmp_path / "starts.csv").is_file()


def test_deaths_in_the_dream_are_told_apart_by_their_probability():
    ends, deaths = np.array([0.1, 0.2, 0.9]), np.array([0.1, 0.05, 0.3])
    actions, rewards = np.arange(3), np.zeros(3)
    life = dream_life._read_life(rewards, ends, actions, deaths)
    assert (life.outcome, life.step) == (COIN, 2)
    np.testing.assert_allclose(life.probabilities[DEATH], [0.1, 0.145, 0.361])
    np.testing.assert_allclose(life.probabilities[COIN], [0, 0.135, 0.567])
    assert dream_life._read_life(np.eye(3)[2], ends, actions, 0.6 * ends).outcome == DEATH
    assert dream_life._read_life(rewards, ends, actions).outcome == DEATH  # without worlds


def test_dreams_take_place_in_sampled_or_rendered_worlds(recording, simulator, monkeypatch):
    starts, before, taken = [LifeStart(0, 5), LifeStart(1, 9)], Simulator.imagine, []
    monkeypatch.setattr(Simulator, "imagine", lambda self, start, *more: taken.append(
        start.world) or before(self, start, *more))
    for rendered, seed in ((False, 0), (False, 1), (True, 0), (True, 1)):
        lives = dream_life.live_in_dream(simulator, recording, starts, MODE, 10.0, FLOAT32,
                                         rendered, seed)
        assert all(0 <= life.probabilities[DEATH][-1] + life.probabilities[COIN][-1] <= 1.001
                   for life in lives)
    sampled, other, rendered, same = (world.squares for world in taken)
    assert torch.equal(rendered, same)
    assert not torch.allclose(sampled, other, atol=1e-3)
    places = [WindowPlace(start.episode, start.frame) for start in starts]
    expected = rendered_world(simulator, simulator.random_vectors(2), recording, places,
                              torch.zeros(2, dtype=torch.int64))
    assert torch.equal(rendered, expected.squares)
    dataset = RolloutDataset(recording.path, 3, NUM_STEPS)
    table = dream_life.compare_lives(simulator, dataset, starts, MODE, 10.0, FLOAT32, True)
    assert table["dream_death_16"].between(0, 1).all()
    summary = dream_life.summarize(table, 0)["all"]["within_32"]
    assert summary["death"]["expected"] == pytest.approx(table["dream_death_32"].sum())


# Mistakes

@pytest.mark.parametrize("flags", [["--num_worlds", "2"], ["--rendered_worlds"], ["--sample_ends"],
                                   ["--sample_actions"]])
def test_simulators_without_worlds_refuse_their_flags(run, tmp_path, capsys, flags):
    message = refusal(lambda argv: run(tmp_path / "s", *argv, model="plain"), flags, capsys)
    assert f"{flags[0]} needs a simulator with worlds" in message
    assert not (tmp_path / "s").exists()


def test_samples_without_worlds_have_their_old_files(run, tmp_path):
    assert run(tmp_path, model="plain") == 0
    folder = SampleFolder(tmp_path / "informed_init")
    origin = json.loads((folder.sample_folder(0) / "origin.json").read_text())
    assert list(origin) == ["start", "window", "episode", "frame", "manual_action"]
    assert not list(folder.path.rglob("world*"))
    assert not {"num_worlds", "rendered_worlds", "sample_ends", "sample_actions",
                "prior_sha256"} & set(folder.description())
    assert folder.worlds([0, 1]) is None


@pytest.mark.parametrize(("flags", "words"), [
    (["--rendered_worlds", "--num_worlds", "2"], "only one rendered world"),
    (["--rendered_worlds", "--recording_rand_init"], "leave --rendered_worlds or"),
    (["--num_worlds", "2", "--recording_rand_init"], "leave --num_worlds or"),
    (["--sample_actions", "--use_recorded_actions"], "--sample_actions samples the agent's own"),
    (["--sample_actions", "--manual_action", "up"], "--sample_actions samples the agent's own")])
def test_contradictions_are_one_sentence(run, tmp_path, capsys, flags, words):
    assert words in refusal(lambda argv: run(tmp_path / "s", *argv), flags, capsys)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("flags", [[], ["--recording_rand_init"]])
def test_an_untrained_prior_is_refused(run, tmp_path, capsys, flags):
    message = refusal(lambda argv: run(tmp_path / "s", *argv, model="untrained"), flags, capsys)
    assert "has not been trained" in message
    assert ("--rendered_worlds" in message) == (not flags)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(("change", "words"), [
    (lambda settings: settings.pop("env"), "does not say which game was recorded"),
    (lambda settings: settings["env"].update(env_name="heist"),
     "camera of heist in mode hard is not known")])
def test_recordings_that_cannot_be_rendered_are_refused(change, words, run, recording, tmp_path,
                                                        capsys):
    folder = RolloutFolder(shutil.copytree(recording.path, tmp_path / "data"))
    settings = json.loads(folder.description_file.read_text())
    change(settings)
    save_json(folder.description_file, settings)
    argv = ["--rendered_worlds", "--data_dir", folder.path]
    assert words in refusal(lambda argv: run(tmp_path / "s", *argv), argv, capsys)
    assert not (tmp_path / "s").exists()


def test_samples_with_and_without_worlds_do_not_mix(informed, tmp_path):
    folder = SampleFolder(shutil.copytree(informed.path, tmp_path / "copy"))
    for path in folder.sample_folder(2).glob("world*.npy"):
        path.unlink()
    assert folder.sample(2).frames.shape == (NUM_STEPS, 64, 64, 3)
    with pytest.raises(Exception, match=r"sample 2 in .* lacks a world, unlike sample 0"):
        folder.worlds([0, 2])
    assert folder.worlds([2]) is None


def test_older_samples_have_worlds_without_objects(informed, tmp_path):
    folder = SampleFolder(shutil.copytree(informed.path, tmp_path / "copy"))
    for path in folder.path.glob("sample_*/world_*.npy"):
        if path.stem != "world_corner":
            path.unlink()
    world, expected = folder.worlds([0, 1]), informed.worlds([0, 1])
    assert torch.equal(world.squares, expected.squares)
    assert torch.equal(world.seeds, expected.seeds) and torch.equal(world.corner, expected.corner)
    assert not any(getattr(world, name).any() for name in OBJECT_FIELDS)
    assert expected.places.any()


def test_the_simulator_is_played_as_a_game_and_continues_from_its_states(simulator):
    vectors = simulator.random_vectors(3, torch.Generator().manual_seed(0))
    game = SimulatedGame(simulator, FLOAT32,
                         lambda numbers: simulator.start_from(vectors[list(numbers)], MODE))
    testbed = Testbed(simulator.agent.policy, FLOAT32, game, range(3), num_slots=3,
                      options=PlayOptions(greedy=True, max_steps=NUM_STEPS - 1, keep_frames=False))
    with torch.no_grad():
        start = simulator.start_from(vectors, MODE)
        imagined = stack(start, simulator.imagine(start, MODE, NUM_STEPS))
    for row, episode in enumerate(testbed.episodes()):
        np.testing.assert_array_equal(episode.actions, imagined.own_actions[:, row].argmax(-1))
        np.testing.assert_array_equal(episode.rewards, imagined.rewards[:, row])
        assert episode.level_complete == imagined.terminals[:, row].max()
    slots = [0, 1, 2]
    game.reset(slots, slots)
    saved = game.get_state(1)
    game.step(slots, [7, 4, 1])
    expected = game.observe([1])
    game.set_state(0, saved)
    game.set_state(2, saved)
    game.step([2, 0], [4, 8])
    torch.testing.assert_close(game.observe([2]), expected, atol=1e-5, rtol=0)
    assert (game.observe([0]) - expected).abs().max() > 1e-3
    with pytest.raises(ValueError, match="different steps"):
        game.set_state(0, saved)
        game.step([0, 2], [4, 4])
