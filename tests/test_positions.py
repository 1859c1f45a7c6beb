"""Positions of the player in every game: in the environment, recordings and figures."""

import contextlib

import numpy as np
import pandas as pd
import pytest
from conftest import FLOAT32, record_arguments, tiny_policy

import record
from agents.acting import load_action_noise
from agents.episodes import PlayOptions, play_episodes
from agents.rollout_files import POSITION_COLUMNS, STEP_COLUMNS, RolloutFolder
from analysis.steps import read_recorded_steps
from envs.level_state import LevelState
from envs.procgen_env import GAMES_OF_MODE, EnvConfig, LevelSlots, ProcgenVectorEnv
from generative.dataset import RolloutDataset

LEFT, STAY, UP, RIGHT = 1, 4, 5, 7


def place(slots):
    """Return the position (x, y) of the player in the first slot."""
    player = slots.player(0)
    return np.array([player["x"], player["y"]])


def ways(game, action, levels=4, steps=4):
    """Return the mean displacement (x, y) of the player under one action, over several levels."""
    slots, found = LevelSlots(EnvConfig(game, "easy"), 1), []
    for level in range(levels):
        slots.start(0, level)
        start = place(slots)
        places = [start]
        while len(places) <= steps and not slots.step(0, action)[1]:
            places.append(place(slots))
        found.append(places[-1] - start)
    slots.close()
    return np.mean(found, axis=0)


@pytest.mark.parametrize("game", GAMES_OF_MODE["easy"])
def test_the_position_moves_as_the_game_does(game):
    """Moving right leads further to the right than moving left. In caveflyer, the ship turns
    instead, and flies upwards."""
    if game == "caveflyer":
        assert ways(game, UP)[1] > ways(game, STAY)[1] + 0.1
    else:
        assert ways(game, RIGHT)[0] > ways(game, LEFT)[0] + 0.5


@pytest.mark.parametrize("game", GAMES_OF_MODE["easy"])
def test_positions_of_an_episode_are_those_of_its_states(game):
    """Compare every step with an environment that takes the same actions; the end has none."""
    config = EnvConfig(game, "easy", 7, 1)
    slots = LevelSlots(config, 1)
    slots.start(0, 7)
    rng = np.random.default_rng(0)
    with contextlib.closing(ProcgenVectorEnv(config, 1, 7)) as env:
        for _ in range(40):
            player = LevelState.parse(env.get_state()[0], game).player
            assert slots.player(0) == player
            action = rng.integers(15)
            env.act(np.array([action], np.int32))
            _, ended = slots.step(0, action)
            assert env.observe().first[0] == ended
            if ended:
                assert slots.player(0) is None
                break
    slots.close()


@pytest.fixture(scope="module")
def recordings(agent_path, tmp_path_factory):
    """Recordings of the same two episodes in 3 x 3 mazes, without and with positions."""
    logdir = tmp_path_factory.mktemp("positions")
    flags = ("--no_videos", "--env_name", "maze", "--num_levels", "1")
    for name, more in (("plain", ()), ("positions", ("--positions",))):
        assert record.main(record_arguments(agent_path, logdir / name, 2, *flags, *more)) == 0
    return [RolloutFolder(logdir / name / "data") for name in ("plain", "positions")]


def test_a_recording_has_columns_of_positions_if_it_is_told(recordings):
    plain, with_them = recordings
    assert "positions" not in plain.description() and with_them.description()["positions"] is True
    levels, noise = [(0, 0), (1, 0)], load_action_noise("maze")
    episodes = play_episodes(tiny_policy(), FLOAT32, EnvConfig("maze", "easy"), levels, 3, 8,
                             PlayOptions(alter_logits=lambda logits, info: noise(logits),
                                         keep_positions=True))
    for episode in episodes:
        ours, theirs = with_them.steps(episode.number), plain.steps(episode.number)
        assert list(ours) == [*STEP_COLUMNS, *POSITION_COLUMNS]
        assert np.array_equal(ours[list(POSITION_COLUMNS)], episode.positions, equal_nan=True)
        pd.testing.assert_frame_equal(ours[list(STEP_COLUMNS)], theirs)
        rows = with_them.steps_file(episode.number).read_text().splitlines()
        assert rows[0].endswith("action,player_x,player_y")
        assert rows[-1].endswith(",,")  # the terminal step has no position
        assert plain.steps_file(episode.number).read_text().splitlines()[0].endswith(",action")
    assert with_them.all_steps([0, 1])["player_x"].notna().sum() == len(
        with_them.all_steps([0, 1])) - 2


def test_windows_have_the_positions_of_their_frames(recordings):
    assert not RolloutDataset(recordings[0].path, 2, 3).has_positions
    dataset = RolloutDataset(recordings[1].path, 2, 3)
    assert dataset.has_positions
    positions = recordings[1].steps(0)[list(POSITION_COLUMNS)].to_numpy(np.float32)
    first = dataset[0].positions.numpy()
    assert np.array_equal(first, positions[:4], equal_nan=True)
    ended = dataset[len(positions) - 3].positions.numpy()  # its last frame is after the end
    assert np.array_equal(ended[:3], positions[-3:], equal_nan=True)
    assert np.isnan(ended[2:]).all() and not np.isnan(ended[:2]).any()


def test_the_position_after_an_episodes_end_is_the_last_one(recordings):
    with_them = read_recorded_steps(recordings[1], 2)
    table = recordings[1].all_steps([0, 1])
    for name in POSITION_COLUMNS:
        values = with_them[name].to_numpy()
        known = table[name].notna().to_numpy()
        assert np.array_equal(values[known], table[name][known])
        ends = np.flatnonzero(~known)
        assert len(ends) == 2 and np.array_equal(values[ends], values[ends - 1])
