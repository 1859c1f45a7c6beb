"""Mazes: state bytes, edits, words, level files, texts, searches and pairs; bad input."""

import contextlib
import dataclasses
import itertools
import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from conftest import GOLDEN, ROOT

from common.errors import UserError
from envs.level_state import LevelState
from envs.procgen_env import EnvConfig, ProcgenVectorEnv
from maze import levels
from maze.level.grid import CHEESE, FEATURES, FREE, KINDS, WALL, Grid, Square, fork_features
from maze.level.levels import (
    Filters,
    LevelEntry,
    find_levels,
    from_text,
    load_levels,
    parse_seeds,
    save_levels,
    to_text,
)
from maze.level.state import WORLD_DIMS, MazeState, draw, stock_state
from maze.studies.vectors import cheese_pair, top_right_pair

ACTIONS = {(0, -1): 1, (-1, 0): 3, (1, 0): 5, (0, 1): 7}  # left, down, up, right
STAY = 4


@pytest.fixture(scope="module")
def hundred():
    """The hard levels 0 to 99, which the published figures are about."""
    return [stock_state("hard", seed) for seed in range(100)]


@pytest.fixture(scope="module")
def forks(hundred):
    return [state for state in hundred if state.grid.kind() == "fork"]


@pytest.fixture(scope="module")
def fork(forks):
    return forks[0]


@pytest.fixture(scope="module")
def easy():
    """An easy level with room around its maze."""
    return stock_state("easy", 1)


def grid_of(text, **more):
    return Grid.from_rows(text.split(), **more)


# -------------------------------------------------------------------------------- state and words


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
        assert grid.path(grid.start, grid.corner)[-1] == grid.world(grid.maze_dim - 1,
                                                                   grid.maze_dim - 1)


@pytest.mark.parametrize("mode", WORLD_DIMS)
def test_every_level_is_written_back_as_it_was_read(mode):
    rng, num_levels = np.random.default_rng(0), 200
    with contextlib.closing(ProcgenVectorEnv(EnvConfig("maze", mode), num_levels, 0, 1)) as env:
        env.observe()
        at_start = env.get_state()
        for _ in range(12):
            env.act(rng.integers(15, size=num_levels).astype(np.int32))
            env.observe()
        in_episode = env.get_state()
    for group in (at_start, in_episode):
        states = [MazeState.parse(data) for data in group]
        assert all(state.to_bytes() == data for state, data in zip(states, group))
    assert len({state.level_seed for state in states}) > num_levels * 0.99
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
    assert grid.path(grid.mouse, grid.mouse) == [grid.mouse]
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
    with pytest.raises(UserError, match="no decision square: its corner on the way"):
        grid.decision_square()
    assert grid.departures_from_training() == [
        "there are free squares outside the maze", "the mouse is not at inner (0, 0)"]
    assert grid.departures_from_training(1)[-1] == "cheese lies outside the agent's region"
    assert np.argwhere(grid.region(2)).tolist() == [[3, 3], [3, 4], [4, 3], [4, 4]]
    assert grid.region(7).sum() == 9


def test_decision_square_and_first_steps_of_forks(forks):
    for grid in (state.grid for state in forks):
        decision, (to_cheese, to_corner) = grid.decision_square(), grid.first_steps()
        ways = [grid.path(decision, end) for end in (grid.cheese, grid.corner)]
        assert [way[1] for way in ways] == [to_cheese, to_corner]
        assert set(ways[0]) & set(ways[1]) == {decision}
        assert grid.path(grid.start, grid.cheese)[-len(ways[0])] == decision


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


# ------------------------------------------------------------------------------------------ edits


def changed(before, after):
    """Names of the fields that differ between two states; cells by their square."""
    one, other = before.fields(), after.fields()
    names = {name.rpartition(".")[2] for name in one if one[name] != other[name]} - {"cells"}
    return names | set(map(tuple, np.argwhere(before.grid.cells != after.grid.cells).tolist()))


@pytest.fixture(scope="module")
def moving():
    """A hard level in mid-episode: the mouse has just moved, and faces right."""
    with contextlib.closing(ProcgenVectorEnv(EnvConfig("maze", "hard", 0, 1), 1, 0, 0)) as env:
        env.observe()
        env.act(np.array([7], np.int32))
        env.observe()
        return MazeState.parse(env.get_state()[0])


def test_edits_change_their_bytes_alone(moving):
    grid, before = moving.grid, moving.to_bytes()
    old, far, near = grid.cheese, grid.corner, grid.start
    assert grid.mouse == grid.world(0, 1) and grid.facing == 1

    def names(state):
        after = state.to_bytes()
        assert MazeState.parse(after).to_bytes() == after and len(after) == len(before)
        return changed(moving, state)

    assert names(moving.with_cheese(far)) == {old, far}
    assert moving.with_cheese(far).grid.cheese == far
    assert names(moving.with_cheese(None)) == {old}
    assert names(moving.with_cheese(far, several=True)) == {far}
    assert moving.with_cheese(far, several=True).grid.cheeses == tuple(sorted((old, far)))
    assert names(moving.with_cheese(far, several=True).with_cheese(near)) == {old, near}
    assert names(moving.with_mouse(near)) == {"x", "vx"}
    moved = moving.with_mouse(far)
    assert names(moved) == {"x", "y", "vx"}
    assert moved.level.player["vx"] == 0 != moving.level.player["vx"]
    assert (moved.level.player["x"], moved.level.player["y"]) == (far.column + 0.5, far.row + 0.5)
    assert names(moving.with_facing(0)) == {"is_reflected"}
    assert names(moving.with_time(499)) == {"cur_time"}
    assert (moving.with_time(3, 40).time, moving.with_time(3, 40).timeout) == (3, 40)
    assert names(moving.with_time(3, 40)) == {"cur_time", "timeout"}
    wall, free = Square(0, 0), Square(*near)
    assert names(moving.with_cells({wall: FREE, free: WALL})) == {wall, free}
    edited = moving.with_cells({wall: FREE, free: WALL}).with_cheese(far)
    assert names(moving.with_grid(edited.grid)) == {wall, free, old, far}
    assert moving.with_grid(moving.grid).to_bytes() == before == moving.to_bytes()


def play(state, actions):
    """Rewards and ends of episodes behind each action, from a state on."""
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


@pytest.mark.parametrize("mode", WORLD_DIMS)
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
    with pytest.raises(UserError, match="no way leads"):
        walled.grid.path(start, end)


def test_time_and_several_cheeses_are_played(fork):
    assert play(fork.with_time(498, 500), [STAY, STAY]) == [(0.0, False), (0.0, True)]
    way = fork.grid.path(fork.grid.start, fork.grid.corner)
    both = fork.with_cheese(way[2], several=True).with_cheese(way[4], several=True)
    assert play(both, along(way[:3])) == [(0.0, False), (10.0, True)]
    with pytest.raises(UserError, match="3 cheeses, not one"):
        both.grid.kind()


def test_edits_show_at_once_and_leave_the_original(fork):
    before = fork.to_bytes()
    frames = draw([fork, fork.with_cheese(None), fork.with_mouse(fork.grid.corner),
                   fork.with_facing(1)])
    assert len(np.unique(frames, axis=0)) == 4
    assert fork.to_bytes() == before
    with pytest.raises(ValueError, match="read-only"):
        fork.grid.cells[0, 0] = FREE


# -------------------------------------------------------------------------- files, texts, searches


def test_level_files_and_texts_there_and_back(tmp_path, forks, easy):
    edited = [forks[0].with_facing(1), stock_state("memory", 3, use_backgrounds=True),
              top_right_pair(forks[1])[0].with_cheese(None), easy.with_mouse(easy.grid.corner)]
    save_levels(tmp_path / "levels.json", edited)
    for state in edited:
        save_levels(tmp_path / f"level_{state.level_seed}.json", [state])
    assert [state.to_bytes() for state in load_levels(tmp_path / "levels.json")] == [
        state.to_bytes() for state in edited]
    by_seed = sorted(edited, key=lambda state: state.level_seed)
    assert [state.to_bytes() for state in load_levels(tmp_path)] == [
        state.to_bytes() for state in by_seed]
    for state in (*forks[:5], easy):
        mode = state.distribution_mode
        again = from_text(to_text(state.grid), mode)
        assert again.grid.to_rows() == state.grid.to_rows()
        assert again.grid.maze_dim == state.grid.maze_dim
        assert to_text(again.grid) == to_text(state.grid)
    with pytest.raises(UserError, match="free squares outside"):
        to_text(edited[2].grid)
    entry = dataclasses.asdict(LevelEntry.of(easy))
    del entry["use_backgrounds"], entry["facing"]  # which a file written by hand may lack
    (tmp_path / "mine.json").write_text(json.dumps(entry))
    assert load_levels(tmp_path / "mine.json")[0].to_bytes() == easy.to_bytes()


def test_levels_are_found_by_what_they_are(hundred):
    def found(wanted, **filters):
        return [state.level_seed for state in find_levels(
            "hard", range(100), wanted, Filters(**filters))]

    grids = {state.level_seed: state.grid for state in hundred}
    first = [seed for seed, grid in grids.items() if grid.kind() == "fork"
             and 9 <= grid.maze_dim <= 15 and not grid.region(5)[grid.cheese]][:4]
    assert found(4, size=(9, 15), kind="fork", cheese_outside=5) == first
    assert found(3, cheese_inside=5) == [
        seed for seed, grid in grids.items() if grid.region(5)[grid.cheese]][:3]
    square = grids[9].cheese
    assert found(1, cheese_at=square) == [
        next(seed for seed, grid in grids.items() if grid.cheese == square)]
    assert found(2, free_at=Square(0, 0)) == [
        seed for seed, grid in grids.items() if grid.is_free[0, 0]][:2]
    with pytest.raises(UserError, match="of the 100 levels looked at 0 have"):
        found(1, size=(4, 4))
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


def test_the_script_writes_levels_table_and_pictures(tmp_path, capsys):
    words = ["--levels", "0-9", "--distribution_mode", "hard", "--kind", "fork", "--output_dir",
             str(tmp_path / "out")]
    assert levels.main(words) == 0
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
    assert levels.main(words) == 0  # the same once more
    assert levels.main([*words, "--facing", "1"]) == 2
    assert "another choice of levels" in capsys.readouterr().err
    again = tmp_path / "again"
    assert levels.main(["--levels", str(tmp_path / "out"), "--facing", "1", "--cheese", "none",
                        "--output_dir", str(again), "--view", "agent"]) == 0
    edited = load_levels(again)
    assert [state.level_seed for state in edited] == seeds
    assert all(state.grid.facing == 1 and not state.grid.cheeses for state in edited)


def test_the_script_edits_and_prints(tmp_path, capsys):
    text = tmp_path / "maze.txt"
    text.write_text("..C\n.##\nM..\n")
    words = ["--text", str(text), "--mouse", "6,8", "--cheese", "8,6", "6,7", "--wall", "0,0",
             "--open", "14,0", "--facing", "1", "--output_dir", str(tmp_path / "out")]
    assert levels.main(words) == 0
    (state,) = load_levels(tmp_path / "out")
    assert [row[6:9] for row in state.grid.to_rows()[6:9]] == ["C..", ".##", ".CM"]
    assert state.grid.to_rows()[0][0] == "." and state.grid.facing == 1
    capsys.readouterr()
    assert levels.main(["--levels", "7,54", "--fields"]) == 0
    shown = capsys.readouterr().out
    assert "step.current_level_seed: 54" in shown and "maze_dim: 15" in shown
    assert levels.main(["--levels", "7", "--top_right_path", "--dry_run",
                        "--distribution_mode", "hard"]) == 0
    assert "cheese on the way" in capsys.readouterr().out


# -------------------------------------------------------------------------------------- bad input


def word(name, *values, row=0, code="<i4"):
    """Parse a state in which some values of a field are replaced."""
    def attempt(easy, path):
        data, at = easy.to_bytes(), easy.level.offset(name) + 4 * row
        new = np.array(values, code).tobytes()
        MazeState.parse(data[:at] + new + data[at + len(new):])
    return attempt


def entity(name, value, code="<f4"):
    names = stock_state("easy", 1).level.entities.dtype.names
    return word("entities", value, row=names.index(name), code=code)


def edit(method, *arguments):
    """Arguments may be functions of the grid."""
    return lambda easy, path: getattr(easy, method)(
        *(each(easy.grid) if callable(each) else each for each in arguments))


def text(content, mode="easy"):
    return lambda easy, path: from_text(content, mode)


def file(content=None, **change):
    """Read a level file of this content, or of an entry with some values changed."""
    def attempt(easy, path):
        entry = {**dataclasses.asdict(LevelEntry.of(easy)), **change}
        path.write_text(content or json.dumps(entry))
        load_levels(path)
    return attempt


def with_two_mice(easy, path):
    data, at = easy.to_bytes(), easy.level.offset("entities")
    mouse = data[at:at + easy.level.entities.nbytes]
    MazeState.parse(data[:at - 4] + b"\2\0\0\0" + mouse + data[at:])


@pytest.mark.parametrize(("attempt", "message"), [
    # State bytes that Procgen could not play as a maze.
    (with_two_mice, "2 entities; a maze has one"),
    (word("distribution_mode", 2), "distribution_mode is 2; mazes are"),
    (word("tail", 25, row=1), "world_dim is 25; easy mazes have 15"),
    (word("tail", 8), "maze_dim is 8"), (word("tail", 17), "maze_dim is 17"),
    (word("grid", 25, row=17), "cell at row 1, column 2 is 25"),
    (word("cur_time", 500), "cur_time is 500 of 500 steps"),
    (word("cur_time", -1), "cur_time is -1"),
    (entity("x", float("nan")), "x of the mouse is nan"),
    (entity("y", 2.25), "y of the mouse is 2.25"), (entity("y", 15.5), "y of the mouse is 15.5"),
    (entity("y", 0.5), "mouse cannot be on a wall at row 0, column 2"),
    (entity("grow_rate", 9.0), "grow_rate of the mouse is 9.0, not 1.0"),
    (entity("is_reflected", 2, "<i4"), "facing of the mouse must be 0 or"),
    # Edits.
    (edit("with_cheese", Square(0, 0)), "cheese cannot be at row 0, column 0, which is a wall; the "
                                        "nearest free square is row 3, column 2"),
    (edit("with_cheese", Square(15, 2)), "cheese cannot be at row 15, column 2: rows and columns"),
    (edit("with_cheese", lambda grid: grid.mouse),
     "mouse cannot be on the cheese at row 2, column 2; the nearest free square is"),
    (edit("with_mouse", Square(3, 3)), "mouse cannot be on a wall at row 3, column 3; the"),
    (edit("with_cells", lambda grid: {grid.cheese: WALL}), "the cheese is at"),
    (edit("with_cells", lambda grid: {grid.corner: CHEESE}),
     r"can be made a wall \(51\) or free \(100\), not 2"),
    (edit("with_grid", lambda grid: stock_state("easy", 0).grid),
     "another level than one of 11 in 15"),
    (lambda easy, path: top_right_pair(find_levels(
        "easy", range(100), 1, Filters(size=(15, 15)))[0]), "fills the world"),
    # Texts.
    (text("...\n.x.\nM.."), "'x' at row 1, column 1 .line 2."),
    (text("...\n..\nM.."), "row 1 of the maze .line 2. has 2 squares"),
    (text("..\nM."), "odd number of rows, 3 or more, not 2"),
    (text("...\n...\n..."), "no mouse"),
    (text("M..\n...\nM.."), "mice M at row 2, column 0 and at row 0, column 0"),
    (text("m..\n...\nM.."), "mouse cannot be on the cheese at row 2, column 0"),
    (text("\n".join(["M" + "." * 16] + ["." * 17] * 16)),
     "17 rows, .* easy mazes has 15; choose the mode hard"),
    # Level files.
    (file(version=2), "level.json: it has .*version 2, not 'procgen maze' in version 1"),
    (file(sizes=3), "level.json.*unknown key 'sizes'"), (file(level_seed=-1), "must not be neg"),
    (file(level_seed="1"), "'level_seed' must be a int"), (file(rows=["M"]), "it has 1 rows"),
    (file(distribution_mode="hard"), "15 rows, but the world of hard mazes has 25"),
    (file("[]"), "holds no level"), (file("{"), "level.json"),
    (lambda easy, path: load_levels(path.parent), r"no level file level_<seed>\.json"),
])
def test_wrong_levels_are_refused_in_a_sentence(easy, tmp_path, attempt, message):
    with pytest.raises(UserError, match=message):
        attempt(easy, tmp_path / "level.json")


def test_entries_of_lists_are_named(easy, tmp_path):
    (tmp_path / "two.json").write_text(json.dumps([dataclasses.asdict(LevelEntry.of(easy)), {}]))
    with pytest.raises(UserError, match=r"two.json, level 2: the key 'format' is missing"):
        load_levels(tmp_path / "two.json")


def test_what_a_level_does_not_have_is_not_made_up(easy):
    without = easy.with_cheese(None).grid
    for ask in (without.kind, without.decision_square, lambda: fork_features(without),
                lambda: cheese_pair(easy.with_cheese(None))):
        with pytest.raises(UserError, match="no cheese, not one"):
            ask()
    beside = easy.grid.neighbours(easy.grid.cheese)
    shut = easy.with_cells(dict.fromkeys(beside, WALL)).grid
    with pytest.raises(UserError, match="no way leads from row 2, column 2 to"):
        shut.kind()
    assert not Filters(kind="fork").accept(shut) and not Filters(cheese_inside=5).accept(without)
    assert Filters().accept(without)


@pytest.mark.parametrize("words", [
    ["--levels", "a"], ["--levels", "0-99999999"], ["--levels", "there.json"],
    ["--levels", "0", "--cheese", "0,0"], ["--levels", "0", "--size", "15:15"],
    ["--size", "4:4", "--max_tried", "20"], ["--levels", "0", "0", "--output_dir", "twice"],
    ["--levels", "0", "--text", "maze.txt"], ["--text", "maze.txt"],
    ["--free_at", "99,0", "--levels", "0"], ["--num_levels", "5", "--num_mazes", "6"],
    ["--levels", "7", "--top_right_path"],
])
def test_the_script_refuses_in_a_sentence(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert levels.main(words) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: ") and output.err.count("\n") == 1 and not output.out
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------- fuzz

NUM_SET = 80
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
    """The bytes with a few of them replaced, cut out or put in."""
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
        if rng.random() < 0.9:
            data[at:at + 4] = new
        elif rng.random() < 0.5:
            del data[at:at + int(rng.integers(1, 3000))]
        else:
            data[int(rng.integers(len(data))):0] = new
    return bytes(data)


@pytest.mark.parametrize("parse", [MazeState.parse, lambda data: LevelState.parse(data, "maze")],
                         ids=["as a maze", "as an environment reads it"])
def test_damaged_states_never_end_the_process(parse, tmp_path):
    num_fuzzed = 500
    rng = np.random.default_rng(0)
    whole = [stock_state(mode, seed, bool(seed)).to_bytes()
             for mode in WORLD_DIMS for seed in range(3)]
    accepted = []
    for number in range(num_fuzzed):
        data = damaged(whole[number % len(whole)], rng)
        with contextlib.suppress(UserError):
            parse(data)
            accepted.append(data)
    assert num_fuzzed // 5 < len(accepted) < num_fuzzed * 4 // 5
    np.savez(tmp_path / "states.npz", *[
        np.frombuffer(accepted[place], np.uint8)
        for place in rng.choice(len(accepted), NUM_SET, replace=False)])
    child = subprocess.run([sys.executable, "-c", SET_AND_PLAY, str(tmp_path / "states.npz")],
                           cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert child.stdout == "alive\n", child.stderr[-2000:]
