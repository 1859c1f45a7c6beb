"""The card of generated worlds: random starts, events, contents, and its files.

Simulations are planted: the simulator's networks are untrained, so predictions are replaced by the
recording, by the game, or by noise.
"""

import contextlib
import copy
import dataclasses
import functools
import json
import shutil

import numpy as np
import pytest
import torch
from conftest import FLOAT32, ROOT, refusal
from PIL import Image

import loss_over_time_experiment as script
from agents.agent_file import load_agent
from agents.replay import level_states, recorded_game
from common.config import save_settings
from common.files import sha256
from common.parameters import ParameterSet
from envs.equal_views import CONTENTS, start_layouts
from envs.level_state import LevelState
from envs.objects import objects_of
from envs.procgen_env import LevelSlots
from envs.squares import squares_around
from generative import world_card, world_contents, world_events, world_simulations
from generative.batches import recorded_world
from generative.config import SimulatorConfig, TrainingConfig
from generative.dataset import RolloutDataset
from generative.loss_over_time import SIMULATOR, Means, loss_over_time, window_start
from generative.losses import LossScales
from generative.networks import LatentSampler
from generative.published import save_published
from generative.runs import SimulatorRunSettings, open_simulator
from generative.simulator import Simulator
from generative.squares import World
from generative.world_contents import (
    check_squares,
    have_any,
    name_classes,
    recorded_worlds,
    squares_beyond,
    squares_in_view,
)
from generative.world_data import fit_worlds
from generative.world_simulations import Simulations
from generative.world_tables import as_json, event_probability, ratio_of_means
from stats.association import Estimate

AGENT = ROOT / "pretrained" / "coinrun_hard" / "model.pth"
SHIPPED = ROOT / "pretrained" / "coinrun_hard_simulator" / "model.pt"
MODE = LatentSampler("mode")
TINY = ParameterSet("tiny-spatial")
NUM_EPISODES, NUM_SQUARES = 10, 39
SCALE = 64 / 13
STEPS, NUM_STARTS = 5, 24
MEANS = Means(torch.full((1, 3, 64, 64), 0.5), torch.full((1, 15), 1 / 15))


@pytest.fixture(scope="module")
def recording(noisy_recording):
    return noisy_recording


@pytest.fixture(scope="module")
def dataset(recording):
    return RolloutDataset(recording.path, 3, STEPS)


@pytest.fixture(scope="module")
def fitted(recording):
    return fit_worlds(recording, range(NUM_EPISODES), NUM_SQUARES)


@pytest.fixture(scope="module")
def model_file(recording, fitted, tmp_path_factory):
    """An untrained simulator with worlds, whose prior counts as trained."""
    torch.manual_seed(0)
    simulator = Simulator(dataclasses.replace(
        TINY.get(SimulatorConfig), pixels_per_square=SCALE, world_squares=NUM_SQUARES,
        square_classes=len(fitted[0].templates), object_looks=fitted[0].looks,
        prior_widths=(8, 8, 8, 8)), load_agent(AGENT))
    frames = torch.from_numpy(recording.episode(0).frames[::3])
    simulator.basis.fit(frames.permute(0, 3, 1, 2).float() / 255)
    with torch.no_grad():
        simulator.squares.load_state_dict(fitted[0].state_dict())
        for parameter in simulator.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn_like(parameter))
        for parameter in simulator.prior.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        simulator.prior.trained.fill_(1)
    folder = tmp_path_factory.mktemp("simulator")
    save_published(folder / "model.pt", simulator)
    save_settings(folder, SimulatorRunSettings(
        "t", str(AGENT), sha256(AGENT), "", "", 0, "float32", 0, simulator.config,
        TINY.get(TrainingConfig), LossScales()))
    return folder / "model.pt"


@pytest.fixture(scope="module")
def simulator(model_file):
    return open_simulator(model_file, AGENT, SimulatorConfig(), FLOAT32)


@pytest.fixture(scope="module")
def plain_file(tmp_path_factory):
    """A simulator without worlds."""
    simulator = Simulator(dataclasses.replace(TINY.get(SimulatorConfig),
                                              pixels_per_square=64 / 13), load_agent(AGENT))
    folder = tmp_path_factory.mktemp("plain")
    save_published(folder / "model.pt", simulator)
    save_settings(folder, SimulatorRunSettings(
        "t", str(AGENT), sha256(AGENT), "", "", 0, "float32", 0, simulator.config,
        TINY.get(TrainingConfig), LossScales()))
    return folder / "model.pt"


@pytest.fixture(scope="module")
def shipped():
    return open_simulator(SHIPPED, AGENT, SimulatorConfig(), FLOAT32)


@pytest.fixture(scope="module")
def worlds(simulator, dataset):
    return recorded_worlds(simulator, dataset, np.arange(len(dataset)))


def card_of(simulator, dataset, **more):
    fields = {"windows": np.arange(len(dataset)), "draw": MODE, "compute": FLOAT32, "seed": 0,
              "batch_size": 16, **more}
    return Simulations(simulator, dataset, **fields)


# Statistics

def test_an_event_ends_an_episode_once():
    ends = np.array([[0.5], [0.5], [1.0], [0.3]])
    events = np.array([[0.5], [0.25], [0.5], [0.3]])
    found = event_probability(ends, events)[:, 0]
    np.testing.assert_allclose(found, [0.5, 0.625, 0.75, 0.75])
    np.testing.assert_allclose(event_probability(ends, ends)[:, 0], [0.5, 0.75, 1, 1])


def test_ratios_of_means_compare_groups_of_different_sizes():
    rng = np.random.default_rng(0)
    first, second = rng.random(400) < 0.3, rng.random(900) < 0.6
    found = ratio_of_means(first, -1 - np.arange(400), second, np.arange(900) // 3, 0)
    assert found.value == pytest.approx(first.mean() / second.mean())
    assert found.low < 0.5 < found.high < found.low + 0.25
    assert np.isnan(ratio_of_means(first, -1 - np.arange(400), 0 * second, np.arange(900), 0).value)
    assert as_json({"a": Estimate(1.0, np.nan, 2.0), "b": {"c": np.float32("inf"), "d": 3}}) == {
        "a": {"value": 1.0, "interval_95": [None, 2.0]}, "b": {"c": None, "d": 3}}


# Contents

def world_at(squares, corner):
    return World.of(torch.as_tensor(squares), torch.as_tensor(corner))


def test_squares_in_and_beyond_the_view_of_a_planted_world():
    squares = np.zeros((1, NUM_SQUARES, NUM_SQUARES), np.int64)
    squares[0, 19, 19 + np.arange(-7, 20)] = 100 + np.arange(27)
    corner = np.full((1, 2), 32 - SCALE * 19.5)  # the player is in the middle of its square
    seen = squares_in_view(world_at(squares, corner), SCALE)
    assert set(seen[seen >= 100]) == {100 + 7 + k for k in range(-6, 7)}
    assert (seen >= 0).sum() == 13 ** 2
    beyond = squares_beyond(world_at(squares, corner + 0.3), SCALE).reshape(1, NUM_SQUARES, 13)
    assert beyond[0, 19].tolist() == [100 + 14 + k for k in range(13)]
    shifted = squares_beyond(world_at(squares, corner - [[SCALE, 0]]), SCALE)
    assert (shifted.reshape(1, NUM_SQUARES, 13)[0, 19, -1]) == -1  # outside the world


def test_classes_are_named_after_what_their_squares_hold(dataset, recording, worlds, simulator):
    """Contents of recorded views, by class, are those of the replayed states."""
    named = name_classes(dataset, worlds, simulator.squares)
    assert {"coin", "saw", "box", "wall", "enemy_left", "enemy_right"} <= set(named)
    assert "agent" not in named and named["enemy_left"] == named["enemy_right"]
    numbers = np.concatenate([numbers for name, numbers in named.items() if name != "enemy_left"])
    assert len(numbers) == len(set(numbers.tolist()))
    card = card_of(simulator, dataset, worlds=worlds)
    _, squares, episodes = world_card._named_classes(card)
    kinds = {kind.name: kind for kind in objects_of("coinrun")}
    agree, seen = [], dict.fromkeys(named, 0)
    for episode in range(0, NUM_EPISODES, 3):
        of_episode = squares[episodes == episode]
        for view, (_, state) in zip(of_episode, level_states(recording, episode,
                                                          recording.world_rows(episode))):
            x, y = float(state.player["x"]), float(state.player["y"])
            for name in named:
                kind = kinds[name]
                rows = np.isin(state.entities["type"], kind.entity_types)
                places = np.stack([np.floor(state.entities[axis][rows]) + 0.5 for axis in "xy"], 1)
                cells = np.argwhere(np.isin(state.grid, kind.cells))[:, ::-1] + 0.5
                places = np.concatenate([places, cells])
                near = (np.abs(places - [x, y]) < 6.5).all(axis=1).any()
                agree.append(have_any(view, named[name]) == near)
                seen[name] += near
    assert np.mean(agree) > 0.97 and seen["saw"] and seen["box"] and seen["wall"]


def planted_level(config, level, kinds):
    """Return the world (n, n) around the start of a level, with class 1 + i for kinds[i]."""
    with contextlib.closing(LevelSlots(config, 1)) as slots:
        slots.start(0, level)
        state = LevelState.parse(slots.state(0), config.env_name)
    grid = sum((number + 1) * world_contents._squares_with(state, kind)
               for number, kind in enumerate(kinds))
    player = state.player
    return squares_around(grid, 0, float(player["x"]), float(player["y"]), NUM_SQUARES)


def test_contents_beyond_equal_views_are_those_of_the_levels(dataset, simulator, monkeypatch):
    """Worlds of the levels themselves beat the oracle, and worlds of other levels know nothing."""
    config = recorded_game(dataset.folder)
    levels = config.draw_levels(200, 0)
    kinds = [kind for kind in objects_of("coinrun") if kind.name in ("saw", "lava", "box")]
    classes = {kind.name: np.array([number + 1]) for number, kind in enumerate(kinds)}
    card = card_of(simulator, dataset)
    frames_of = functools.lru_cache(None)(lambda level: planted_level(config, level, kinds))
    asked = []

    def start_frames(config, levels):
        asked.append(levels)
        return np.zeros((len(levels), 64, 64, 3), np.uint8)

    shift = 0

    def own_world(card, frames, numbers):
        squares = np.stack([frames_of(levels[(levels.index(level) + shift) % 200])
                            for level in asked[-1]])
        return world_at(squares, np.full((len(squares), 2), 32 - SCALE * 19.5))

    monkeypatch.setattr(world_card, "start_frames", start_frames)
    monkeypatch.setattr(world_card, "_world_of_level", own_world)
    found = world_card.beyond_equal_views(card, 200, 40, 2, classes)
    assert found["levels"] == 40 and 20 < found["layouts"] < 150
    _, contents = start_layouts(config, levels)
    assert set(CONTENTS["coinrun"]) - set(found) == {"enemy"}  # enemies are no squares
    for name in ("saw", "crate"):
        table = found[name]
        assert table["sampled"].value == table["game"].value
        assert table["skill"].value == 1 and table["oracle_skill"].value < 0.9
        assert abs(table["game"].value - contents[name].mean()) < 0.2
    shift = 7
    found = world_card.beyond_equal_views(card, 200, 40, 2, classes)
    assert found["saw"]["skill"].value < 0.2 and found["crate"]["skill"].value < 0.2


# Random starts

class Replaying(Simulations):
    """Random starts are recorded ones, of other windows than those that are decoded."""

    def random_start(self, numbers):
        windows = np.setdiff1d(self.windows, self.spaced(0))
        batch = self.batch(self.dataset, windows[8 * numbers % len(windows)])
        return self.recorded_start(batch, torch.from_numpy(numbers))


class Scrambled(Simulations):
    """Random starts are uniform random vectors, which give noise."""

    def random_start(self, numbers):
        vectors = self.simulator.random_vectors(len(numbers), torch.Generator().manual_seed(0))
        return self.simulator.start_from(vectors, MODE, seeds=torch.from_numpy(numbers))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Replaying, Scrambled])
def test_random_starts_are_told_from_decoded_ones_only_if_they_differ(kind, dataset, shipped,
                                                                      monkeypatch):
    monkeypatch.setattr(world_card.realism.classifier_auc, "__defaults__", (4,))
    card = kind(shipped, dataset, np.arange(len(dataset)), MODE, FLOAT32, 0, 16)
    found = world_card.random_starts(card, 48, None)
    assert found["recorded_starts"] == 48 and "in_view" not in found
    if kind is Replaying:
        assert found["auc_against_decoded"].low < 0.8  # few frames of few episodes
        assert found["ends_at_step_0"]["random"].value < 0.1
        assert found["known_colours"]["ratio"].low < 1 < found["known_colours"]["ratio"].high
        assert 0.8 < found["neighbour_difference"]["ratio"].value < 1.25
        assert 0.8 < found["value_at_step_0"]["ratio"].value < 1.25
    else:
        assert found["auc_against_decoded"].value > 0.95 and found["auc_against_real"].value > 0.95
        assert found["known_colours"]["random"].high < found["known_colours"]["decoded"].value
        assert found["neighbour_difference"]["ratio"].low > 2


# Events

class Planted(Simulations):
    """Simulations whose probabilities of ends and deaths are given by ``predict(batch)``."""

    def recorded_start(self, batch, seeds):
        self.__dict__["planted"] = batch, seeds
        return None

    def simulate(self, start, num_steps, actions=None):
        self.__dict__["num_steps"] = num_steps
        return []

    def hazards(self, steps):
        return self.__dict__["predict"](*self.__dict__["planted"], self.__dict__["num_steps"])


def planted(simulator, dataset, predict, **more):
    card = Planted(simulator, dataset, np.arange(len(dataset)), MODE, FLOAT32, 0, 16, **more)
    card.__dict__["predict"] = predict
    return card


def test_deaths_are_found_within_one_step_and_not_elsewhere(dataset, shipped):
    def predicted(shift, known=1.0, noise=0.0, seed=0):
        rng = np.random.default_rng(seed)

        def predict(batch, seeds, num_steps):
            ends = batch.terminals.numpy() * (np.cumsum(batch.terminals.numpy(), axis=0) == 1)
            death = known * np.roll(ends * (batch.rewards.numpy() <= 0), shift, axis=0)
            death[slice(shift) if shift > 0 else slice(len(death) + shift, None)] = 0
            return np.maximum(death, 0.01), np.maximum(death, noise * rng.random(death.shape))

        return world_events.recorded_actions(planted(shipped, dataset, predict))

    key = "recall_at_precision_0.8"
    perfect = predicted(0)
    assert perfect["deaths"] >= 2 and perfect["windows_with_a_death"] > perfect["deaths"]
    assert perfect["share_of_deaths"] < 0.05
    for near in (perfect, predicted(1), predicted(-1)):
        assert near["auc_of_a_death"].value == 1 and near[key].value == 1
    early = predicted(-4)
    assert early["auc_of_a_death"].value < 0.6 and early[key].value == 0
    blind = [predicted(0, 0.0, 1.0, seed)["auc_of_a_death"].value for seed in range(4)]
    assert np.mean(blind) == pytest.approx(0.5, abs=0.1)
    ends = perfect["probability_of_an_end"]
    assert ends["with_a_death"].value == pytest.approx(1)
    assert ends["without_an_end"].value < 0.3


@pytest.fixture(scope="module")
def starts(dataset):
    return world_events.choose_starts(dataset, np.arange(len(dataset)), NUM_STARTS, 0)


def test_starts_are_drawn_near_ends_and_anywhere(dataset, starts):
    chosen, near = starts
    assert len(set(chosen.tolist())) == NUM_STARTS == 2 * near.sum()
    for number, soon in zip(chosen.tolist(), near):
        place = dataset.place(number)
        left = dataset.folder.array_files(place.episode).frames.shape[0] - 1 - place.frame
        assert place.frame >= 2 and left >= 1 and (not soon or 4 <= left <= 12)


def test_events_of_the_game_are_calibrated_and_constants_have_no_skill(dataset, shipped, starts,
                                                                       monkeypatch):
    chosen, _ = starts
    real = world_events._real_events(card_of(shipped, dataset), chosen, 16)
    assert 0 < real["death"].sum() < NUM_STARTS and real["coin"].sum() > 0

    def measured(predict, num_worlds=2):
        return world_events.own_actions(planted(shipped, dataset, predict), *starts, num_worlds)

    def game(batch, seeds, num_steps):
        rows = seeds.numpy() // 2
        death, end = (np.zeros((num_steps, len(rows))) for _ in range(2))
        death[5], end[5] = real["death"][rows], real["end"][rows]
        return end, death

    found = measured(game)
    assert found["all"]["starts"] == NUM_STARTS == 2 * found["near_end"]["starts"]
    for name in ("death", "coin"):
        table = found["all"][name]
        assert table["real"] == real[name].sum() == pytest.approx(table["expected"])
        assert table["expected_over_real"].value == pytest.approx(1)
        assert table["skill"].value == 1 and table["auc"].value == 1
        assert table["probability_if_it_occurs"].value == 1
        assert table["probability_otherwise"].value == 0
    monkeypatch.setattr(world_events, "_real_events", lambda *_: real)  # not played again
    none = measured(lambda batch, seeds, num_steps: (np.zeros((num_steps, len(seeds))),) * 2)
    assert none["all"]["death"]["expected_over_real"].value == 0
    assert none["all"]["death"]["skill"].value < 0

    def constant(batch, seeds, num_steps):
        death = np.zeros((num_steps, len(seeds)))
        death[3] = real["death"].mean()
        return death, death

    flat = measured(constant, 1)["all"]["death"]
    assert flat["expected_over_real"].value == pytest.approx(1)
    assert flat["skill"].value == pytest.approx(0) and flat["auc"].value == 0.5


def test_long_rollouts_that_stand_still_are_static(dataset, shipped, starts):
    chosen, near = starts
    card = card_of(shipped, dataset)
    few = chosen[~near][:4]

    class Frozen(Simulations):
        def simulate(self, start, num_steps, actions=None):
            (step,) = super().simulate(start, 1)
            return [dataclasses.replace(step, terminal_logits=step.terminal_logits - 20)
                    ] * num_steps

    frozen = world_events.long_rollouts(Frozen(**vars(card)), few)
    assert frozen["not_ended"] == 4 and frozen["static"]["simulator"].value == 1
    assert frozen["ended"]["simulator"].value < 0.01
    assert frozen["ended"]["difference"].value < -0.3  # the game ends
    assert frozen["black_at_64"]["simulator"].value == pytest.approx(
        frozen["black_at_0"]["simulator"].value)
    assert frozen["game_not_ended"] == 0 or frozen["static"]["game"].value == 0


# Worlds of windows

def test_windows_are_simulated_in_recorded_or_in_sampled_worlds(dataset, simulator, worlds):
    attached = RolloutDataset(dataset.folder.path, 3, STEPS)
    numbers = attached.attach_worlds(worlds)[:6]
    card = card_of(simulator, attached)
    batch = card.batch(attached, numbers)
    start = window_start(simulator, batch, MODE, torch.from_numpy(numbers))
    windows = attached.batch(numbers)
    squares = windows.squares[0].long()
    expected = recorded_world(windows, batch, simulator.config)
    assert torch.equal(start.world.squares, squares)
    torch.testing.assert_close(start.world.corner, expected.corner)
    plain = card.batch(dataset, numbers)
    sampled, again, other = (window_start(simulator, plain, MODE, torch.from_numpy(numbers + more))
                             for more in (0, 0, 10**6))
    assert torch.equal(sampled.world.squares, again.world.squares)
    assert not torch.equal(sampled.world.squares, other.world.squares)
    read, known = simulator.squares.read(plain.initial_images[-1], sampled.world.corner,
                                         NUM_SQUARES)
    assert torch.equal(sampled.world.squares.argmax(-1)[known], read.squares[known])
    assert torch.equal(other.world.squares.argmax(-1)[known], read.squares[known])
    losses = [loss_over_time(simulator, data, numbers, 3, MEANS, MODE, FLOAT32).losses[
        SIMULATOR, "image"] for data in (attached, dataset)]
    assert np.nanmax(np.abs(losses[0] - losses[1])) > 1e-3


def test_a_simulator_with_other_squares_cannot_share_recorded_worlds(simulator, plain_file):
    check_squares(simulator, simulator)
    check_squares(simulator, open_simulator(plain_file, AGENT, SimulatorConfig(), FLOAT32))
    other = copy.deepcopy(simulator)
    other.squares.templates[0] += 0.1
    with pytest.raises(script.UserError, match="other classes of squares"):
        check_squares(simulator, other)


# The script

def arguments(model_file, data, output, *more):
    return list(map(str, (
        "--agent_file", AGENT, "--model_file", model_file, "--data_dir", data,
        "--interpreting_params_name", "tiny-spatial", "--device", "cpu", "--precision", "float32",
        "--output_dir", output, "--unseen", "--num_sim_steps", STEPS, "--num_batches", 1,
        "--batch_size", 8, *more)))


@pytest.fixture
def few_windows(monkeypatch):
    """Measure a third of the rows with worlds, which is a third of the time of the script."""
    monkeypatch.setattr(world_simulations, "START_INTERVAL", 3 * world_simulations.START_INTERVAL)
    monkeypatch.setattr(world_card.realism.classifier_auc, "__defaults__", (4,))


@pytest.mark.slow
@pytest.mark.usefixtures("few_windows")
def test_script_writes_the_worlds(model_file, recording, tmp_path, capsys):
    output = tmp_path / "out"
    assert script.main(arguments(
        model_file, recording.path, output, "--random_starts", 40, "--event_starts", 6,
        "--num_worlds", 2, "--equal_view_levels", 40)) == 0
    assert "recorded episodes: with action noise in 50% of the episodes" in capsys.readouterr().out
    tables = json.loads((output / "worlds.json").read_text())
    assert set(tables) == {"worlds", "random_starts", "own_actions", "recorded_actions",
                           "long_rollouts", "beyond_equal_views"}
    assert tables["worlds"] == "sampled" and tables["own_actions"]["worlds_per_start"] == 2
    assert {"coin", "saw", "box", "wall"} <= set(tables["random_starts"]["in_view"])
    with Image.open(output / "world_samples.png") as image:
        assert 1040 < image.width < 1070 and 1150 < image.height < 1250
        pixels = np.asarray(image).astype(int)
    yellow = (np.abs(pixels - [255, 255, 0]).sum(axis=-1) < 120).sum()
    assert yellow > 64 * 4 * 30
    settings = json.loads((output / "settings.json").read_text())
    assert settings["action_noise"].startswith("with") and not settings["rendered_worlds"]


@pytest.mark.slow
@pytest.mark.usefixtures("few_windows")
def test_script_simulates_windows_in_rendered_worlds(model_file, recording, tmp_path):
    output = tmp_path / "out"
    assert script.main(arguments(model_file, recording.path, output, "--rendered_worlds",
                                 "--event_starts", 4)) == 0
    settings = json.loads((output / "settings.json").read_text())
    data = RolloutDataset(recording.path, 3, STEPS)
    places = [data.place(number) for number in settings["windows"]]
    assert all(place.frame in recording.world_rows(place.episode) for place in places)
    tables = json.loads((output / "worlds.json").read_text())
    assert tables["worlds"] == "recorded" and tables["own_actions"]["worlds_per_start"] == 1
    assert "beyond_equal_views" not in tables


def test_rendered_worlds_need_a_simulator_and_a_recording_with_worlds(
        model_file, plain_file, recording, tmp_path, capsys):
    argv = arguments(plain_file, recording.path, tmp_path / "out", "--rendered_worlds")
    assert "this simulator has no worlds" in refusal(script.main, argv, capsys)
    plain = shutil.copytree(recording.path, tmp_path / "plain")
    for path in plain.rglob("world_*.png"):
        path.unlink()
    argv = arguments(model_file, plain, tmp_path / "out", "--rendered_worlds")
    assert "has no worlds; record it with --worlds" in refusal(script.main, argv, capsys)
    assert not (tmp_path / "out").exists()


def test_too_few_random_starts_are_refused(simulator, dataset):
    with pytest.raises(script.UserError, match="at least 40"):
        world_card.random_starts(card_of(simulator, dataset), 20, None)
