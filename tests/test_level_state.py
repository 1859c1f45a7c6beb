"""States of Procgen levels: reading, writing, and rejection of states that would crash Procgen."""

import contextlib
import gc
import struct
import sys

import numpy as np
import pytest

from common.errors import UserError
from envs.level_state import LevelState
from envs.procgen_env import GAMES_OF_MODE, EnvConfig, ProcgenVectorEnv

NUM_ENVS, STEPS = 4, 40


def play(env, steps, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        env.observe()
        env.act(rng.integers(15, size=NUM_ENVS).astype(np.int32))
    return env.observe()


@pytest.fixture(scope="module")
def states():
    """States of several levels, at the start and within episodes, by game and mode."""
    found = {}
    for mode in ("easy", "hard"):
        for game in GAMES_OF_MODE[mode]:
            with contextlib.closing(ProcgenVectorEnv(EnvConfig(game, mode), NUM_ENVS, 5)) as env:
                at_start = env.get_state()
                play(env, STEPS)
                found[game, mode] = at_start + env.get_state()
    return found


@pytest.fixture(scope="module")
def maze(states):
    return states["maze", "hard"][0]


def with_number(state, name, value, code="i", row=0):
    """Return the bytes of a state with a 4-byte number replaced."""
    at = LevelState.parse(state).offset(name) + 4 * row
    return state[:at] + struct.pack("<" + code, value) + state[at + 4:]


def test_every_game_is_written_back_as_it_was_read(states):
    for (game, mode), group in states.items():
        for data in group:
            state = LevelState.parse(data, game)
            assert state.to_bytes() == data
            assert state.options["distribution_mode"] == ("easy", "hard").index(mode)
            assert 0 <= state.player["x"] <= state.grid.shape[1]
            assert state.tail == data[state.offset("tail"):]
        assert [state.step["cur_time"] == 0 for state in map(LevelState.parse, group)][:4] == [
            True] * 4
    times = [int(LevelState.parse(group[4]).step["cur_time"]) for group in states.values()]
    assert max(times) == STEPS


def test_every_game_returns_to_a_saved_state(states):
    for (game, mode), group in states.items():
        with contextlib.closing(ProcgenVectorEnv(EnvConfig(game, mode), NUM_ENVS, 99)) as env:
            env.set_state(group[:NUM_ENVS])
            play(env, STEPS)
            assert env.get_state() == group[NUM_ENVS:], game


def test_states_cut_anywhere_or_with_more_behind_them_are_refused(states):
    rng = np.random.default_rng(0)
    for group in states.values():
        data = group[-1]
        for length in (0, 1, len(data) - 1, *rng.integers(len(data), size=20)):
            with pytest.raises(UserError, match="not a Procgen state"):
                LevelState.parse(data[:length])
        with pytest.raises(UserError, match="4 bytes after"):
            LevelState.parse(data + data[-4:])


@pytest.mark.parametrize(("name", "value", "what"), [
    ("use_generated_assets", 1, "use_generated_assets is 1"),
    ("distribution_mode", 3, "distribution_mode is 3"),
    ("level_seed_high", 0, "range of levels"),
    ("is_waiting_for_step", 1, "is_waiting"), ("background_index", 9, "background_index is 9"),
    ("main_width", 24, "main_width is 24"), ("visibility", 0x7f800000, "visibility is inf"),
    ("grid", 101, "cell 101"), ("grid", -2**31, "cell -2147483648"),
    ("out_of_bounds_object", 101, "out_of_bounds_object"),
    ("level_generator", 0, "level_generator is not seeded"),
])
def test_what_would_end_procgen_is_refused(maze, name, value, what):
    with pytest.raises(UserError, match=what):
        LevelState.parse(with_number(maze, name, value))


def test_other_kinds_of_state_are_refused(states, maze):
    fork = LevelState.parse(maze).offset("use_easy_jump")
    for data, message in ((states["coinrun", "easy"][0], "its game is coinrun, not maze"),
                          (struct.pack("<i", 1) + maze[4:], "version 1"),
                          (with_number(maze, "entities", 1, row=6), "no player"),
                          (maze[:-1] + b"\0", "no end mark"),
                          (maze[:fork] + bytes(20) + maze[fork:], "fork")):
        with pytest.raises(UserError, match=message):
            LevelState.parse(data, "maze")


def test_environments_refuse_states_that_would_end_the_process(states, maze):
    with contextlib.closing(ProcgenVectorEnv(EnvConfig("maze", "hard"), NUM_ENVS, 5)) as env:
        before = env.get_state()
        for wrong in ([maze] * 3, [maze, maze, b"", maze],
                      [*states["maze", "hard"][:3], states["heist", "hard"][0]]):
            with pytest.raises(UserError):
                env.set_state(wrong)
        assert env.get_state() == before


def test_no_garbage_is_collected_while_a_library_is_opened():
    """Garbage may contain an environment, and closing one at that time would never return."""
    found = []

    def look(phase, info):
        frame, names = sys._getframe(), []
        while frame := frame.f_back:
            names.append(frame.f_code.co_name)
        found.append("dlopen" in names)

    before = gc.get_threshold()
    gc.callbacks.append(look)
    gc.set_threshold(1, 1, 1)
    try:
        ProcgenVectorEnv(EnvConfig("coinrun", "easy"), 1, seed=0).close()
        assert gc.isenabled()
        gc.collect()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(look)
    assert found and not any(found)
