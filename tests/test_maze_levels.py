"""Mazes: state bytes, edits, options, level files, texts, searches and pairs; bad input."""

import contextlib
import dataclasses
import itertools
import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from conftest import GOLDEN, PATIENCE, ROOT

from common.errors import UserError
from envs.level_state import LevelState
from envs.maze.grid import CHEESE, FEATURES, FREE, KINDS, WALL, Grid, Square, fork_features
from envs.maze.levels import (
    Filters,
    LevelEntry,
    find_levels,
    from_text,
    load_levels,
    parse_seeds,
    save_levels,
)
from envs.maze.state import WORLD_DIMS, MazeState, draw, stock_state
from envs.procgen_env import EnvConfig, ProcgenVectorEnv
from maze import levels
from maze.studies.vectors import cheese_pair, top_right_pair

ACTIONS = {(0, -1): 1, (-1, 0): 3, (1, 0): 5, (0, 1): 7}  # left, down, up, right
STAY = 4


@pytest.fixture(scope="module")
def hundred():
    """The hard levels 0 to 99, which the published figures show."""
    return [stock_state("hard", seed) for seed in range(100)]


@pytest.fixture(scope="module")
def forks(hundred):
    return [state for state in hundred if state.grid.kind() == "fork"]


@pytest.fixture(scope="module")
def fork(forks):
    return forks[0]


@pytest.fixture(scope="module")
def easy():
    """An easy level with free space around its maze."""
    return stock_state("easy", 1)


def grid_of(text, **more):
    return Grid.from_rows(text.split(), **more)


def test_levels_are_those_that_another_reader_found():
    for name, level in json.loads((GOLDEN / "maze_levels.json").read_text()).items():
        mode, seed = name.split("/")
        state = stock_state(mode, int(seed))
        grid = state.grid
        assert (state.level_seed, state.distribution_mode) == (int(seed), mode)
        assert grid.to_rows() == level["rows"], name
        assert (grid.maze_dim, grid.world_dim) == (level["maze_dim"], level["world_dim"])
        assert [grid.mouse.column + 0.5, grid.mouse.row + 0.5] == level["mouse_xy"]
        assert Grid.from_rows(level["rows"], grid.maze_dim).to_rows() == level["rows"]
        assert grid.departures_from_training() == []
        assert grid.corner == grid.world(grid.maze_dim - 1, grid.maze_dim - 1)


@pytest.mark.parametrize("mode", WORLD_DIMS)
def test_every_level_is_written_back_as_it_was_read(mode):
    rng, num_levels = np.random.default_rng(0), 60
    with contextlib.closing(ProcgenVectorEnv(EnvConfig("maze", mode), num_levels, 0, 1)) as env:
        at_start = env.get_state()
        for _ in range(12):
            env.observe()
            env.act(rng.integers(15, size=num_levels).astype(np.int32))
        env.observe()
        in_episode = env.get_state()
    for data in (*at_start, *in_episode):
        assert MazeState.parse(data).to_bytes() == data
    states = [MazeState.parse(data) for data in in_episode]
    assert {0, 1} == {state.grid.facing for state in states}
    assert sum(state.time == 12 for state in states) > num_levels * 0.8


def test_forks_are_as_many_as_published(hundred, forks):
    kinds = [state.grid.kind() for state in hundred]
    assert [kinds.count(kind) for kind in KINDS] == [len(forks), 44, 4] == [52, 44, 4]
    assert sum(not state.grid.region(5)[state.grid.cheese] for state in forks) == 44


def test_paths_go_left_down_up_right_where_there_are_several():
    grid = grid_of("""
        ..C
        ...
        M..""")
    assert not grid.is_tree
    assert any("left, down, up, right" in text for text in grid.departures_from_training())
    assert grid.path(grid.mouse, grid.cheese) == [(0, 0), (1, 0), (2, 0), (2, 1), (2, 2)]
    assert grid.path(grid.cheese, grid.mouse) == [(2, 2), (2, 1), (2, 0), (1, 0), (0, 0)]
    assert grid.distances(grid.mouse).tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]


def test_inner_coordinates_come_from_the_size_and_not_from_walls():
    grid = grid_of("""
        ####...
        ####.##
        ##...##
        ##.#C##
        ##.#.##
        ##M####
        #######""", maze_dim=3)
    assert (grid.margin, grid.start, grid.corner) == (2, (2, 2), (4, 4))
    assert grid.cheese == (3, 4) and grid.inner(grid.cheese) == (1, 2)
    assert grid.world(1, 2) == grid.cheese
    assert grid.kind() == "corner on the way"
    with pytest.raises(UserError, match="no decision square: its kind is 'corner on the way'"):
        grid.decision_square()
    assert grid.departures_from_training() == [
        "there are free squares outside the maze", "the mouse is not at inner (0, 0)"]
    assert grid.departures_from_training(1)[-1] == "cheese lies outside the agent's region"
    assert np.argwhere(grid.region(2)).tolist() == [[3, 3], [3, 4], [4, 3], [4, 4]]
    assert grid.region(7).sum() == 9


def test_features_of_a_fork_by_hand():
    grid = grid_of("""
        .......
        .#.####
        .#.####
        .#####.
        .......
        .#####.
        M##.C..""")
    assert grid.kind() == "fork" and grid.decision_square() == (2, 0)
    assert grid.first_steps() == ((2, 1), (3, 0))
    expected = {"C_D": (np.hypot(2, 4), 6, 10), "C_T": (np.hypot(6, 2), 8, 20),
                "D_T": (np.hypot(4, 6), 10, 10), "C_5x5": (2, 2, 4), "D_5x5": (2, 2, 2)}
    found = fork_features(grid)
    assert tuple(found) == FEATURES and len(FEATURES) == 16
    for ends, values in expected.items():
        assert tuple(found[f"{kind}_{ends}"] for kind in ("euc", "taxi", "steps")) == values, ends
    assert found["cheese_norm"] == 4


def changed(before, after):
    """Return the names of the fields that differ between two states, and the changed squares."""
    one, other = before.fields(), after.fields()
    names = {name.rpartition(".")[2] for name in one if one[name] != other[name]} - {"cells"}
    return names | set(map(tuple, np.argwhere(before.grid.cells != after.grid.cells).tolist()))


@pytest.fixture(scope="module")
def moving():
    """A hard level within an episode: the mouse has just moved, and faces right."""
    with contextlib.closing(ProcgenVectorEnv(EnvConfig("maze", "hard", 0, 1), 1, 0, 0)) as env:
        env.observe()
        env.act(np.array([7], np.int32))
        env.observe()
        return MazeState.parse(env.get_state()[0])


def test_edits_change_their_bytes_alone_and_leave_the_original(moving):
    grid, before = moving.grid, moving.to_bytes()
    old, far, near, wall = grid.cheese, grid.corner, grid.start, Square(0, 0)
    assert grid.mouse == grid.world(0, 1) and grid.facing == 1
    moved, both = moving.with_mouse(far), moving.with_cheese(far, several=True)
    edited = moving.with_cells({wall: FREE, near: WALL}).with_cheese(far)
    for state, names in (
            (moving.with_cheese(far), {old, far}), (moving.with_cheese(None), {old}),
            (both, {far}), (both.with_cheese(near), {old, near}),
            (moving.with_mouse(near), {"x", "vx"}), (moved, {"x", "y", "vx"}),
            (moving.with_facing(0), {"is_reflected"}), (moving.with_time(499), {"cur_time"}),
            (moving.with_time(3, 40), {"cur_time", "timeout"}),
            (moving.with_cells({wall: FREE, near: WALL}), {wall, near}),
            (moving.with_grid(edited.grid), {wall, near, old, far})):
        after = state.to_bytes()
        assert MazeState.parse(after).to_bytes() == after and len(after) == len(before)
        assert changed(moving, state) == names
    assert moving.with_cheese(far).grid.cheese == far
    assert both.grid.cheeses == tuple(sorted((old, far)))
    assert moved.level.player["vx"] == 0 != moving.level.player["vx"]
    assert (moved.level.player["x"], moved.level.player["y"]) == (far.column + 0.5, far.row + 0.5)
    assert (moving.with_time(3, 40).time, moving.with_time(3, 40).timeout) == (3, 40)
    assert moving.with_grid(moving.grid).to_bytes() == before == moving.to_bytes()
    frames = draw([moving, moving.with_cheese(None), moved, moving.with_facing(0)])
    assert len(np.unique(frames, axis=0)) == 4


def play(state, actions):
    """Take actions from a state; return reward and end of the episode after each."""
    with contextlib.closing(ProcgenVectorEnv(EnvConfig("maze", "easy"), 1, 0, 0)) as env:
        env.observe()
        env.set_state([state.to_bytes()])
        found = []
        for action in actions:
            env.observe()
            env.act(np.array([action], np.int32))
            seen = env.observe()
            found.append((float(seen.rewards[0]), bool(seen.first[0])))
        return found


def along(path):
    return [ACTIONS[new.row - old.row, new.column - old.column]
            for old, new in itertools.pairwise(path)]


@pytest.mark.parametrize("mode", ["easy", "hard"])
def test_an_edited_maze_ends_where_its_path_says(mode):
    state = find_levels(mode, range(100), 1, Filters(size=(9, 13), kind="fork"))[0]
    (_, edited), start = top_right_pair(state), state.grid.start
    edited = edited.with_cells({edited.grid.world(1, 0): FREE, edited.grid.world(1, 1): FREE})
    edited, _ = top_right_pair(edited)
    end = Square(edited.grid.world_dim - 1, edited.grid.world_dim - 1)
    edited = edited.with_cheese(end)
    path = edited.grid.path(start, end)
    assert len(path) > edited.grid.maze_dim * 2
    played = play(edited, along(path))
    assert played == [(0.0, False)] * (len(path) - 2) + [(10.0, True)]
    assert play(edited.with_cheese(None), along(path))[-1] == (0.0, False)
    walled = edited.with_cells({path[-3]: WALL})
    assert not any(end for _, end in play(walled, along(path)))
    with pytest.raises(UserError, match="no path leads"):
        walled.grid.path(start, end)


def test_time_and_several_cheeses_are_played(fork):
    assert play(fork.with_time(498, 500), [STAY, STAY]) == [(0.0, False), (0.0, True)]
    way = fork.grid.path(fork.grid.start, fork.grid.corner)
    both = fork.with_cheese(way[2], several=True).with_cheese(way[4], several=True)
    assert play(both, along(way[:3])) == [(0.0, False), (10.0, True)]
    with pytest.raises(UserError, match="3 cheeses, not one"):
        both.grid.kind()


def test_level_files_and_texts_there_and_back(tmp_path, forks, easy):
    edited = [forks[0].with_facing(1), stock_state("memory", 3, use_backgrounds=True),
              top_right_pair(forks[1])[0].with_cheese(None), easy.with_mouse(easy.grid.corner)]
    save_levels(tmp_path / "levels.json", edited)
    assert [state.to_bytes() for state in load_levels(tmp_path / "levels.json")] == [
        state.to_bytes() for state in edited]
    for state in edited:
        save_levels(tmp_path / f"level_{state.level_seed}.json", [state])
    assert [state.to_bytes() for state in load_levels(tmp_path)] == [
        state.to_bytes() for state in sorted(edited, key=lambda state: state.level_seed)]
    for state in (*forks[:5], easy):
        inside = slice(state.grid.margin, state.grid.margin + state.grid.maze_dim)
        text = "\n".join(row[inside] for row in state.grid.to_rows()[inside])
        again = from_text(text, state.distribution_mode)
        assert again.grid.to_rows() == state.grid.to_rows()
        assert again.grid.maze_dim == state.grid.maze_dim
    entry = dataclasses.asdict(LevelEntry.of(easy))
    del entry["use_backgrounds"], entry["facing"]  # optional in files written by hand
    (tmp_path / "mine.json").write_text(json.dumps(entry))
    assert load_levels(tmp_path / "mine.json")[0].to_bytes() == easy.to_bytes()


def test_levels_are_found_by_what_they_are(hundred):
    grids = {state.level_seed: state.grid for state in hundred}
    square = grids[9].cheese
    for wanted, filters, accepts in (
            (4, {"size": (9, 15), "kind": "fork", "cheese_outside": 5}, lambda grid:
             grid.kind() == "fork" and 9 <= grid.maze_dim <= 15
             and not grid.region(5)[grid.cheese]),
            (3, {"cheese_inside": 5}, lambda grid: grid.region(5)[grid.cheese]),
            (1, {"cheese_at": square}, lambda grid: grid.cheese == square),
            (2, {"free_at": Square(0, 0)}, lambda grid: grid.is_free[0, 0])):
        found = find_levels("hard", range(100), wanted, Filters(**filters))
        assert [state.level_seed for state in found] == [
            seed for seed, grid in grids.items() if accepts(grid)][:wanted]
    with pytest.raises(UserError, match="only 0 of the 100 examined levels"):
        find_levels("hard", range(100), 1, Filters(size=(4, 4)))
    assert parse_seeds("3-5, 9,4") == [3, 4, 5, 9]


def test_pairs_differ_by_what_they_are_named_after(fork):
    walked = fork.with_mouse(fork.grid.decision_square())
    with_cheese, without = cheese_pair(walked)
    assert with_cheese.to_bytes() == fork.to_bytes()
    assert without.grid.cheeses == () and without.grid.mouse == fork.grid.start
    opened, as_it_is = top_right_pair(walked)
    assert as_it_is.to_bytes() == fork.to_bytes()
    corner, last = fork.grid.corner, fork.grid.world_dim - 1
    path = opened.grid.path(corner, Square(last, last))
    assert path[last - corner.row] == (last, corner.column)
    assert (opened.grid.cells != fork.grid.cells).sum() == len(path) - 1 == 2 * fork.grid.margin


def test_the_script_writes_levels_table_and_pictures(tmp_path):
    assert levels.main(["--levels", "0-9", "--distribution_mode", "hard", "--kind", "fork",
                        "--output_dir", str(tmp_path / "out")]) == 0
    table = pd.read_csv(tmp_path / "out/levels.csv")
    seeds = [0, 2, 3, 5, 6, 8]
    assert table["level_seed"].tolist() == seeds and set(table["kind"]) == {"fork"}
    for _, row in table.iterrows():
        (state,) = load_levels(tmp_path / f"out/level_{row['level_seed']}.json")
        assert state.to_bytes() == stock_state("hard", row["level_seed"]).to_bytes()
        assert state.grid.cheese == (row["cheese_row"], row["cheese_column"])
        assert state.grid.decision_square() == (row["decision_row"], row["decision_column"])
        assert row[list(FEATURES)].tolist() == pytest.approx(
            list(fork_features(state.grid).values()), 1e-4)
    assert (tmp_path / "out/levels.png").stat().st_size > 10_000
    assert levels.main(["--levels", str(tmp_path / "out"), "--facing", "1", "--cheese", "none",
                        "--output_dir", str(tmp_path / "again"), "--view", "agent"]) == 0
    edited = load_levels(tmp_path / "again")
    assert [state.level_seed for state in edited] == seeds
    assert all(state.grid.facing == 1 and not state.grid.cheeses for state in edited)


def test_the_script_edits_levels(tmp_path):
    text = tmp_path / "maze.txt"
    text.write_text("..C\n.##\nM..\n")
    assert levels.main(["--text", str(text), "--mouse", "6,8", "--cheese", "8,6", "6,7", "--wall",
                        "0,0", "--open", "14,0", "--facing", "1", "--output_dir",
                        str(tmp_path / "out")]) == 0
    (state,) = load_levels(tmp_path / "out")
    assert [row[6:9] for row in state.grid.to_rows()[6:9]] == ["C..", ".##", ".CM"]
    assert state.grid.to_rows()[0][0] == "." and state.grid.facing == 1


@pytest.mark.parametrize(("name", "row", "value", "message"), [
    ("distribution_mode", 0, 2, "distribution_mode is 2; mazes are"),
    ("tail", 1, 25, "world_dim is 25; easy mazes have 15"), ("tail", 0, 8, "maze_dim is 8"),
    ("grid", 17, 25, "row 1, column 2 is 25"), ("cur_time", 0, 500, "is 500 of 500 steps"),
    ("entities", "x", np.nan, "x of the mouse is nan"),
    ("entities", "y", 2.25, "y of the mouse is 2.25"),
    ("entities", "y", 15.5, "y of the mouse is 15.5"),
    ("entities", "y", 0.5, "mouse cannot be on a wall at row 0, column 2")])
def test_states_that_procgen_could_not_play_as_a_maze_are_refused(easy, name, row, value, message):
    if name == "entities":
        row = easy.level.entities.dtype.names.index(row)
    data, at = easy.to_bytes(), easy.level.offset(name) + 4 * row
    new = np.array([value], "<f4" if name == "entities" else "<i4").tobytes()
    with pytest.raises(UserError, match=message):
        MazeState.parse(data[:at] + new + data[at + 4:])


@pytest.mark.parametrize(("attempt", "message"), [
    (lambda easy: easy.with_cheese(Square(0, 0)), "cheese cannot be at row 0, column 0, which is a "
                                                  "wall; the nearest free square is row 3, column"),
    (lambda easy: easy.with_cheese(Square(15, 2)), "row 15, column 2: rows and columns"),
    (lambda easy: easy.with_cheese(easy.grid.mouse), "mouse cannot be on the cheese at row 2"),
    (lambda easy: easy.with_cells({easy.grid.cheese: WALL}), "the cheese is at"),
    (lambda easy: easy.with_cells({easy.grid.corner: CHEESE}), r"a wall \(51\) or free \(100\)"),
    (lambda easy: easy.with_grid(stock_state("easy", 0).grid), "cannot replace one of 11"),
    (lambda _: from_text("...\n.x.\nM..", "easy"), "'x' at row 1, column 1 .line 2."),
    (lambda _: from_text("...\n..\nM..", "easy"), "row 1 of the maze .line 2. has 2 squares"),
    (lambda _: from_text("...\n...\n...", "easy"), "no mouse")])
def test_levels_that_cannot_be_are_refused(easy, attempt, message):
    with pytest.raises(UserError, match=message):
        attempt(easy)


@pytest.mark.parametrize(("change", "message"), [
    ({"version": 2}, "level.json: it has .*version 2, not 'procgen maze' in version 1"),
    ({"sizes": 3}, "level.json.*unknown key 'sizes'"), ({"level_seed": "1"}, "must be a int"),
    ({"distribution_mode": "hard"}, "15 rows, but the world of hard mazes has 25")])
def test_level_files_that_cannot_be_read_are_refused(easy, tmp_path, change, message):
    (tmp_path / "level.json").write_text(json.dumps(
        {**dataclasses.asdict(LevelEntry.of(easy)), **change}))
    with pytest.raises(UserError, match=message):
        load_levels(tmp_path / "level.json")


def test_what_a_level_does_not_have_is_not_made_up(easy):
    without = easy.with_cheese(None).grid
    for ask in (without.kind, without.decision_square, lambda: fork_features(without)):
        with pytest.raises(UserError, match="no cheese, not one"):
            ask()
    shut = easy.with_cells(dict.fromkeys(easy.grid.neighbours(easy.grid.cheese), WALL)).grid
    with pytest.raises(UserError, match="no path leads from row 2, column 2 to"):
        shut.kind()
    assert not Filters(kind="fork").accept(shut) and not Filters(cheese_inside=5).accept(without)


SET_AND_PLAY = """
import sys
import numpy as np
from envs.procgen_env import EnvConfig, ProcgenVectorEnv
env = ProcgenVectorEnv(EnvConfig("maze", "easy"), 1, 0, 0)
env.observe()
with np.load(sys.argv[1]) as states:
    for name in states.files:
        env.set_state([states[name].tobytes()])
        for action in (7, 5):
            env.observe()
            env.act(np.array([action], np.int32))
        env.observe()
        env.get_state()
print("alive")
"""


def damaged(data, rng):
    """Return the bytes of a state with one or two numbers replaced, or bytes removed or added."""
    words = [0, 1, -1, 2, 51, 100, 101, 499, 500, 2**31 - 1, -2**31]
    numbers = [np.nan, np.inf, -np.inf, 0.5, -0.5, 1e-9, 1e9, 7.5]
    data, state = bytearray(data), LevelState.parse(data)
    begins = [(state.offset(name), getattr(state, name).nbytes) for name in (
        "options", "levels", "step", "entities", "drawing", "world", "grid")]
    for _ in range(rng.integers(1, 3)):
        begin, size = begins[rng.integers(len(begins))]
        at = begin + 4 * int(rng.integers(size // 4))
        new = (np.array([rng.choice(words)], "<i4").tobytes(),
               np.array([rng.choice(numbers)], "<f4").tobytes(), rng.bytes(4))[rng.integers(3)]
        end = at + (4 if rng.random() < 0.9 else int(rng.choice([0, 2000])))
        data[at:end] = new
    return bytes(data)


def test_damaged_states_never_end_the_process(tmp_path):
    rng, num_fuzzed = np.random.default_rng(0), 300
    whole = [stock_state(mode, seed, bool(seed)).to_bytes()
             for mode in WORLD_DIMS for seed in range(3)]
    accepted = []
    for number in range(num_fuzzed):
        data = damaged(whole[number % len(whole)], rng)
        with contextlib.suppress(UserError):
            LevelState.parse(data, "maze")
            accepted.append(data)
    assert num_fuzzed // 5 < len(accepted) < num_fuzzed * 4 // 5
    np.savez(tmp_path / "states.npz", *[
        np.frombuffer(accepted[place], np.uint8)
        for place in rng.choice(len(accepted), 60, replace=False)])
    child = subprocess.run([sys.executable, "-c", SET_AND_PLAY, str(tmp_path / "states.npz")],
                           cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert child.stdout == "alive\n", child.stderr[-2000:]
