"""Worlds beyond the view, rebuilt and played in the real game."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import FLOAT32, SHIPPED

from agents.replay import level_states, recorded_game
from common.errors import UserError
from envs.objects import moving_objects
from envs.rebuild import keys_of
from envs.wide_view import WorldView
from generative import beyond_verification
from generative.beyond_results import LEAST
from generative.beyond_verification import summarise
from generative.dataset import WindowPlace
from generative.rebuilding import Rebuilder
from generative.rebuilt_play import effect_at, occurs, play
from generative.rendered_worlds import RenderedWorlds, world_of_images
from generative.surroundings import DEATH, TURN, VALUE, Rollouts, View, effects

STEPS = 8
SMALL = 0.002  # effects from which on the tests verify, so that there are some


@pytest.fixture(scope="module")
def recording(hard_recording):
    return hard_recording


@pytest.fixture(scope="module")
def simulator(shipped_simulator):
    return shipped_simulator


@pytest.fixture(scope="module")
def study(beyond_study):
    return beyond_study


@pytest.fixture(scope="module")
def verify(recording, study):
    def run(folder):
        with pytest.MonkeyPatch.context() as patch:
            for aim in LEAST:
                patch.setitem(LEAST, aim, SMALL)
            assert beyond_verification.main([*map(str, (
                *SHIPPED, "--data_dir", recording.path,
                "--beyond_dir", study, "--output_dir", folder, "--precision", "float32", "--device",
                "cpu"))]) == 0
        return pd.read_csv(folder / "verified.csv")
    return run


def state_at(recording, episode, row):
    [(_, state)] = level_states(recording, episode, [row])
    return state, recording.episode(episode).hidden_states[row]


def test_playing_on_from_a_state_continues_the_recording(recording, simulator):
    """The agent sees what it saw; what it does next follows from its most likely actions."""
    state, hidden = state_at(recording, 0, 10)
    steps = recording.steps(0)
    found, frames = play(simulator.agent, FLOAT32, recorded_game(recording), [state, state], hidden,
                         STEPS)
    assert (frames[0] == recording.episode(0).frames[10]).all()
    assert found.values[0] == pytest.approx(steps["value"].iloc[10], abs=0.05)
    np.testing.assert_allclose(found.moved[0, 0], steps[["player_x", "player_y"]].iloc[10],
                               atol=1e-4)
    np.testing.assert_allclose(found.values[:, 0], found.values[:, 1], atol=1e-4)
    assert (found.alive[0] == 1).all() and (abs(found.right) <= 1).all()
    assert len(np.unique(found.moved[:, 0, 0])) > 3


def test_an_end_is_a_death_unless_it_is_rewarded(recording, simulator):
    """The agent plays on until the coin, one step of which is left, or without it."""
    episode = next(number for number in range(3) if recording.steps(number)["reward"].max() > 0)
    last = len(recording.steps(episode)) - 2
    rows = range(max(last - 12, 3), last, 3)
    found = [play(simulator.agent, FLOAT32, recorded_game(recording), [state],
                  recording.episode(episode).hidden_states[row], 16)[0]
             for row, state in level_states(recording, episode, rows)]
    ended = [one for one in found if one.alive[-1, 0] == 0]
    assert ended
    for one in ended:
        assert one.death[-1, 0] == 0
        assert np.isnan(one.moved[one.alive[:, 0] == 0]).all()


@pytest.mark.parametrize("error", [0.0, 0.3, -0.3])
def test_a_world_is_aligned_with_the_level_when_the_phase_is_estimated(recording, simulator, error):
    """If the simulator believes that the player is on the other side of a border of squares, the
    world is shifted, so that the rebuilt squares are those of the level."""
    game = recorded_game(recording)
    view, wrong = WorldView(game), 0
    rebuilder = Rebuilder(simulator, game, range(500, 502))
    for row, state in level_states(recording, 0, range(5, 27, 4)):
        frames = recording.episode(0).frames[row - 2:row + 1]
        images = torch.from_numpy(frames).permute(0, 3, 1, 2)[:, None].float() / 255
        rendered = RenderedWorlds.of_states(view, [state], [row])
        moved = dataclasses.replace(rendered, positions=rendered.positions + error)
        # The world as it is, with squares and corner as they would be at the believed position.
        world = world_of_images(simulator, simulator.encode(images), rendered, game.env_name,
                                torch.tensor([0]))
        believed = world_of_images(simulator, simulator.encode(images), moved, game.env_name,
                                   torch.tensor([0])).corner
        shift = np.floor(moved.positions) - np.floor(rendered.positions)
        wrong += int(shift.any())
        seen = dataclasses.replace(world, corner=believed, **{
            name: getattr(world, name).roll((int(shift[0, 1]), -int(shift[0, 0])), dims=(1, 2))
            for name in ("squares", "places", "velocities", "looks")})
        again = rebuilder._aligned(seen, state)
        assert (again.squares == world.squares).all()
    view.close()
    assert wrong or not error


def test_rebuilt_squares_are_those_of_the_level(recording, simulator):
    """Alignment and rebuilding of a recorded view, in whose world the squares in view are read."""
    rebuilder = Rebuilder(simulator, recorded_game(recording), range(500, 510))
    for row in (6, 20):
        state, _ = state_at(recording, 1, row)
        view = View.recorded(simulator, FLOAT32, recording, WindowPlace(1, row), 0, STEPS, 4)
        world = view.worlds(view.noise(torch.tensor([1])))
        built = rebuilder.build(world, state).state
        keys, true = keys_of(built, 39), keys_of(state, 39)
        near = np.s_[15:24, 15:24]
        assert (keys[near] == true[near]).mean() > 0.85


def test_objects_that_touch_the_player_are_left_out(recording, simulator):
    state, _ = state_at(recording, 0, 10)
    rebuilder = Rebuilder(simulator, recorded_game(recording), range(500, 510))
    view = View.recorded(simulator, FLOAT32, recording, WindowPlace(0, 10), 0, STEPS, 4)
    world = rebuilder._aligned(view.worlds(view.noise(torch.tensor([1]))), state)
    squares = world.squares.clone()
    saw, empty = simulator.squares.sprites.first_class, simulator.squares.empty_class
    squares[0, 18:22, 18:22] = empty
    squares[0, 19, 19:22], squares[0, 21, 19] = saw, saw  # the player is in row and column 19
    planted = dataclasses.replace(world, squares=squares)
    places = [{(thing.x, thing.y) for thing in moving_objects(
        rebuilder.build(planted, state, touching).state) if thing.kind == "saw"}
        for touching in (True, False)]
    [(x, y)] = places[0] - places[1]
    player = rebuilder.build(planted, state).state.player
    assert abs(x - player["x"]) < 0.9 and abs(y - player["y"]) < 0.9
    assert places[1] < places[0]


def test_effects_occur_with_their_sign_and_half_of_their_size():
    assert [occurs(*pair) for pair in ((1, 0.5), (1, 0.4), (-1, -2), (-1, 2), (1, np.nan))] == [
        1, 0, 1, 0, 0]
    zero, one = np.zeros((8, 1)), np.ones((8, 1))
    plausible = Rollouts(zero, zero, one, zero, np.zeros((8, 1, 2)))
    rising = np.linspace(0, 7, 8)[:, None]
    changed = dataclasses.replace(plausible, values=rising, right=rising / 7, death=rising / 7)
    assert effect_at(VALUE, 3, changed, plausible) == 3
    assert effect_at(TURN, 2, changed, plausible) == pytest.approx(3.5 / 7)
    for aim in (DEATH, VALUE, TURN):
        (effect,), (step,) = effects(aim, changed, plausible)
        assert effect_at(aim, step, changed, plausible) == effect


def test_effects_of_rebuilt_worlds(verify, study, tmp_path):
    table = verify(tmp_path / "new")
    found = pd.read_csv(study / "counterfactuals.csv")
    size = np.where(found["aim"] == DEATH, found["effect"], found["effect"].abs())
    chosen = found[size >= SMALL]
    assert len(chosen) and table[["view", "aim"]].values.tolist() == (
        chosen[["view", "aim"]].values.tolist())
    np.testing.assert_allclose(table["imagined"], chosen["effect"], rtol=1e-4)
    assert table["rebuilt"].all() and (table["real"] != 0).any()
    for row in table.itertuples():
        assert row.occurs == occurs(row.imagined, row.real)
        assert row.control in (0, pytest.approx(1 / 3), pytest.approx(2 / 3), 1)


def test_worlds_that_cannot_be_rebuilt_are_failures(verify, tmp_path, monkeypatch):
    def fail(*_):
        raise UserError("too little fits")

    monkeypatch.setattr(Rebuilder, "build", fail)
    table = verify(tmp_path / "new")
    assert not table[["rebuilt", "controls_rebuilt", "occurs", "control"]].any(axis=None)
    assert table["real"].isna().all()


def test_the_summary_compares_with_the_controls():
    table = pd.DataFrame({
        "view": range(6), "level_seed": range(6), "aim": [TURN] * 4 + [VALUE] * 2,
        "imagined": [1, 2, 1, 1, 1, 1], "real": [1, 2, 3, 0, 1, np.nan], "real_at_step": 0.0,
        "rebuilt": 1.0, "occurs": [1.0, 1, 1, 0, 1, 0], "occurs_at_step": 0.0, "control": 0.25,
        "controls_rebuilt": 1.0})
    summary = summarise(table, 0).set_index(["aim", "quantity"])["mean"]
    assert summary[TURN, "occurs"] == 0.75 and summary[TURN, "difference"] == 0.5
    assert summary["all", "occurs"] == pytest.approx(4 / 6)
