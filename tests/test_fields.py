"""Vector fields of mazes: frames from stamps and from Procgen, exact probabilities, the script."""

import dataclasses
import io
import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import FLOAT32, FULL, figures_drawn, read_video, tiny_policy
from matplotlib.quiver import Quiver
from PIL import Image
from scipy.stats import binomtest, sem

from agents.acting import run_policy
from agents.agent_file import load_agent, save_agent
from agents.hooks import patched
from common.errors import UserError
from common.results import ResultStore
from envs.maze.grid import CHEESE, FREE, WALL, Grid, Square
from envs.maze.levels import save_levels
from envs.maze.state import draw, stock_state
from envs.procgen_env import EnvConfig, ProcgenVectorEnv
from interventions.maze_words import marked_squares
from interventions.patch_text import parse_patch
from maze import fields
from maze.field import stamps
from maze.field.fields import (
    DOWN,
    LEFT,
    RIGHT,
    STAY,
    UP,
    Field,
    both_facings,
    difference,
    drawn_frames,
    stamp_frames,
    vector_field,
)
from maze.field.outcomes import (
    Chain,
    at_decision_square,
    outcomes,
    path_probability,
    reaching,
    value_agreement,
)
from maze.field.plots import Panel, Style, compared, plot_fields, plot_maps
from maze.field.results import FIELDS_FILES, read_field

MAZE = ["#########",
        "##...####",
        "##.#.####",
        "##.#C..##",
        "##.###.##",
        "##.....##",
        "##.###.##",
        "##M..#.##",
        "#########"]
FORK = ["C###.", ".###.", ".....", ".####", "M####"]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """Use an empty cache, so that stamps of an earlier version are not read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        stamps.Stamps.of.cache_clear()
        yield
    stamps.Stamps.of.cache_clear()


def small_level(mode: str, kind: str = "fork", size: int = 5):
    """Return a generated level of a kind with a maze of `size` squares per side."""
    return next(state for state in (stock_state(mode, seed) for seed in range(500))
                if state.grid.maze_dim == size and state.grid.kind() == kind)


def made_up(rows, seed=0, **changes) -> Field:
    """Return a field of random probabilities on a maze given as rows of text."""
    grid = Grid.from_rows(rows)
    squares = np.array(grid.squares(without_cheese=True))
    rng = np.random.default_rng(seed)
    field = Field(grid, squares, np.log(rng.dirichlet(np.ones(15), len(squares))),
                  rng.normal(size=len(squares)), 0, "none")
    return dataclasses.replace(field, **changes)


@pytest.mark.parametrize("mode", ("easy", "hard"))
def test_frames_from_stamps_are_procgens_pixel_for_pixel(mode):
    state = stock_state(mode, 0)
    rng = np.random.default_rng(1)
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        cells = np.where(rng.random(state.grid.cells.shape) < share, WALL, FREE)
        for row, column in rng.integers(0, len(cells), (3, 2)):
            cells[row, column] = CHEESE
        squares = rng.permutation(np.argwhere(cells == FREE))[:25]
        facing = rng.integers(0, 2, len(squares))
        random = Grid(cells, state.grid.maze_dim, Square(*squares[0]))
        drawn = draw([state.with_grid(dataclasses.replace(
            random, mouse=Square(*square), facing=int(side)))
            for square, side in zip(squares, facing)])
        composed = stamps.Stamps.of(mode).frames(random, squares, facing)
        assert composed.dtype == np.uint8
        np.testing.assert_array_equal(composed, drawn)


def test_stamps_are_kept_by_the_version_of_procgen_and_rendered_again_when_damaged():
    rendered, path = stamps.Stamps.of("easy"), stamps.cache_file("easy")
    assert "0.10.7" in path.name
    kept, arrays = path.read_bytes(), dict(np.load(path))
    file = io.BytesIO()
    np.savez(file, **{**arrays, "cells": arrays["cells"][:1]})
    for content, is_read in ((kept, True), (kept[:1000], False), (file.getvalue(), False)):
        path.write_bytes(content)
        before = path.stat().st_mtime_ns
        stamps.Stamps.of.cache_clear()
        again = stamps.Stamps.of("easy")
        assert (path.stat().st_mtime_ns == before) == is_read
        for name, values in dataclasses.asdict(rendered).items():
            np.testing.assert_array_equal(getattr(again, name), values)


def test_fields_from_stamps_and_through_set_state_are_equal(facing=1):
    policy, state = tiny_policy(recurrent=False), small_level("easy")
    composed, drawn = (vector_field(policy, FLOAT32, state, facing=facing, frames=source(state))
                       for source in (stamp_frames, drawn_frames))
    np.testing.assert_array_equal(composed.log_probs, drawn.log_probs)
    np.testing.assert_array_equal(composed.values, drawn.values)
    other = vector_field(policy, FLOAT32, state, facing=1 - facing)
    assert not np.array_equal(composed.log_probs, other.log_probs)
    # The free squares of a 5 x 5 maze, which form a tree, without the square of the cheese.
    assert composed.squares.shape == (9 + 8 - 1, 2)
    memory = stock_state("memory", 3)  # this mode has no stamps
    some = np.array(memory.grid.squares(without_cheese=True))[:3]
    output = run_policy(policy, FLOAT32, drawn_frames(memory)(some, np.zeros(3)),
                        policy.initial_states(3))
    np.testing.assert_allclose(vector_field(policy, FLOAT32, memory).log_probs[:3],
                               output.log_probs, atol=1e-5)


def test_directions_are_the_actions_that_move_the_mouse_so():
    field = made_up(MAZE)
    p = np.exp(field.log_probs)
    expected = np.stack([p[:, [0, 1, 2]].sum(1), p[:, 3], p[:, 5], p[:, [6, 7, 8]].sum(1),
                         p[:, [4, 9, 10, 11, 12, 13, 14]].sum(1)], axis=1)
    np.testing.assert_allclose(field.probs, expected)
    np.testing.assert_allclose(field.arrows, np.stack([
        expected[:, RIGHT] - expected[:, LEFT], expected[:, UP] - expected[:, DOWN]], axis=1))
    row = field.row(Square(1, 2))  # square of the mouse, which can move up and right
    np.testing.assert_allclose(field.effective_probs[row], [
        0, 0, expected[row, UP], expected[row, RIGHT], expected[row, [LEFT, DOWN, STAY]].sum()])
    with pytest.raises(UserError, match="row 0, column 0"):
        field.row(Square(0, 0))


def test_exact_probabilities_are_those_of_real_rollouts():
    """Compare with 200 episodes of a level; the policy runs only once on each of its frames."""
    policy = tiny_policy(2, recurrent=False, channels=FULL)
    num, region, num_steps = 200, 2, 40
    start = small_level("easy", size=3)
    state = start.with_time(start.timeout - num_steps)
    inside = state.grid.region(region)
    sides = both_facings(policy, FLOAT32, state)
    probs, squares = {}, {}
    for field in sides:
        for row, frame in enumerate(stamp_frames(state)(field.squares, field.facing)):
            probs[frame.tobytes()] = np.exp(field.log_probs[row].astype(float))
            squares[frame.tobytes()] = tuple(field.squares[row])
    rng = np.random.default_rng(0)
    env = ProcgenVectorEnv(EnvConfig("maze", "easy"), num, seed=0)
    env.set_state([state.to_bytes()] * num)
    going, got_cheese, region_first, lengths = (
        np.ones(num, bool), np.zeros(num, bool), np.zeros(num, bool), np.zeros(num, int))
    while going.any():
        frames = [frame.tobytes() for frame in env.observe().frames]
        actions = np.zeros(num, np.int32)
        for i in np.flatnonzero(going):
            region_first[i] |= bool(inside[squares[frames[i]]])
            p = probs[frames[i]]
            actions[i] = rng.choice(15, p=p / p.sum())
        env.act(actions)
        after = env.observe()
        lengths += going
        ended = going & after.first
        got_cheese[ended] = after.rewards[ended] > 0
        going &= ~after.first
    env.close()
    assert lengths.max() == num_steps
    exact = reaching(sides, region, num_steps)
    cheese_first = got_cheese & ~region_first
    for counted, probability in ((got_cheese, exact.cheese), (region_first, exact.region_first),
                                 (cheese_first, exact.cheese_first)):
        interval = binomtest(int(counted.sum()), num).proportion_ci(0.999)
        assert 0.2 < probability < 0.8
        assert interval.low <= probability <= interval.high
    assert abs(lengths.mean() - exact.steps) < 3.29 * sem(lengths)


def chain_of(*actions):
    """Return the Markov chain of a corridor, given the action for each facing of the mouse."""
    grid = Grid.from_rows(["#####", "#####", "M...C", "#####", "#####"])
    squares = np.array(grid.squares(without_cheese=True))
    sides = []
    for side, action in enumerate(actions):
        log_probs = np.full((len(squares), 15), -np.inf)
        log_probs[:, action] = 0
        sides.append(Field(grid, squares, log_probs, np.zeros(len(squares)), side, "none"))
    return Chain.of(sides)


def test_facing_is_part_of_the_chains_state():
    """With facing 0 the mouse goes right, with 1 left, so it never passes the second square."""
    chain = chain_of(7, 1)
    reached = chain.reaching([Square(2, column) for column in range(5)])
    assert reached.tolist() == [1, 1, 0, 0, 0]
    assert chain.expected_steps() == 500


def test_what_comes_before_cannot_be_passed():
    """The mouse always goes right, so it reaches every square before those further right."""
    chain, cheese = chain_of(8, 8), Square(2, 4)
    assert chain.before([cheese], [Square(2, 2)]) == 0
    assert chain.before([Square(2, 2)], [cheese]) == 1
    assert chain.before([cheese], [], steps=3) == 0
    assert chain.before([cheese], [], steps=4) == 1
    assert chain.expected_steps() == 4


def test_an_agent_that_walked_to_a_square_has_seen_the_way():
    """The field of a GRU agent equals its outputs when the actions of the path are forced."""
    policy, state = tiny_policy(2), small_level("easy", size=7)
    walked = [vector_field(policy, FLOAT32, state, facing=side, memory="walked") for side in (0, 1)]
    fresh = vector_field(policy, FLOAT32, state)
    assert walked[0].memory == "walked" and fresh.memory == "start"
    path = state.grid.path(state.grid.mouse, state.grid.cheese)
    env = ProcgenVectorEnv(EnvConfig("maze", "easy"), 1, seed=0)
    env.set_state([state.to_bytes()])
    hidden, side = policy.initial_states(1), 0
    actions = {(0, -1): 1, (-1, 0): 3, (1, 0): 5, (0, 1): 7}
    for square, following in itertools.pairwise(path):
        output = run_policy(policy, FLOAT32, env.observe().frames, hidden)
        row = walked[side].row(square)
        np.testing.assert_allclose(walked[side].log_probs[row], output.log_probs[0], atol=2e-5)
        np.testing.assert_allclose(walked[side].values[row], output.values[0], atol=2e-5)
        hidden = output.hidden_states
        step = (following.row - square.row, following.column - square.column)
        side = {(0, 1): 1, (0, -1): 0}.get(step, side)
        env.act(np.array([actions[step]], np.int32))
    env.close()
    assert len(path) > 4
    assert np.abs(walked[side].log_probs[row] - fresh.log_probs[row]).max() > 1e-3
    with pytest.raises(UserError, match="different memories"):
        difference(fresh, walked[0])


def test_a_walked_field_leaves_out_what_lies_behind_the_cheese():
    state = stock_state("easy", 2)
    assert state.grid.kind() == "cheese on the way" and state.grid.cheese != state.grid.corner
    field = vector_field(tiny_policy(), FLOAT32, state, memory="walked")
    with pytest.raises(UserError, match="unreachable"):
        field.row(state.grid.corner)
    assert len(field.squares) < len(state.grid.squares(without_cheese=True))


def test_difference_is_taken_where_both_fields_have_squares():
    original = made_up(MAZE, 0)
    rows = [row.replace("C", ".") for row in MAZE]
    patched = made_up([rows[0], rows[1].replace("...", "C.."), *rows[2:]], 1)
    before, after = original.probs.copy(), patched.probs.copy()
    found = difference(original, patched)
    shared = [square for square in map(tuple, original.squares.tolist())
              if patched.grid.cells[square] == FREE]
    assert list(map(tuple, found.squares.tolist())) == shared
    delta = np.array([patched.probs[patched.row(square)] - original.probs[original.row(square)]
                      for square in shared])
    np.testing.assert_allclose(found.probs, delta)
    assert found.mean_total_variation == pytest.approx(0.5 * np.abs(delta).sum() / len(shared))
    assert found.published_size == pytest.approx(
        np.sqrt((delta[:, :4]**2).sum()) / (2 * len(shared)))
    np.testing.assert_array_equal((original.probs, patched.probs), (before, after))


def test_path_probability_is_the_geometric_mean_of_the_steps():
    field = made_up(MAZE)
    p = {tuple(square): field.probs[row] for row, square in enumerate(field.squares.tolist())}
    up_twice = p[1, 2][UP] * p[2, 2][UP]
    four_steps = up_twice * p[3, 2][RIGHT] * p[3, 3][RIGHT]
    assert path_probability(field, Square(3, 4)) == pytest.approx(four_steps ** 0.25)
    assert path_probability(field, Square(1, 2)) == pytest.approx(p[1, 2][STAY])
    field = made_up(["#####", "#####", "M.C.#", "#####", "#####"])  # continues after the cheese
    p = field.probs
    assert path_probability(field, Square(2, 3)) == pytest.approx((p[0][RIGHT] * p[1][RIGHT])**0.5)


def test_decision_is_read_at_the_last_common_square():
    field = made_up(FORK)
    row = field.row(Square(2, 0))
    p = field.probs[row]
    assert at_decision_square(field) == pytest.approx({
        "p_cheese": p[UP], "p_corner": p[RIGHT], "p_other": p[[LEFT, DOWN, STAY]].sum(),
        "log_odds": np.log(p[UP] / p[RIGHT]), "entropy": -(p * np.log(p)).sum(),
        "value": field.values[row]})


def test_value_agrees_where_the_likeliest_way_leads_to_the_highest_neighbour():
    """The agent goes right everywhere, in a corridor with a dead end below its third square."""
    grid = Grid.from_rows(["#####", "#####", "M...C", "##.##", "##.##"])
    squares = np.array(grid.squares(without_cheese=True))
    log_probs = np.full((len(squares), 15), -np.inf)
    log_probs[:, [7, 4]] = np.log([0.4, 0.6])  # standing still is not a move
    values = {(2, 0): 1, (2, 1): 2, (2, 2): 5, (2, 3): 4, (1, 2): 3, (0, 2): 0}
    field = Field(grid, squares, log_probs,
                  np.array([values[tuple(square)] for square in squares.tolist()]), 0, "none")
    # The value agrees in the four squares of the corridor, where right has the highest value (4 on
    # the third square, against 2 and 3), but not in the dead end, where right is a wall.
    assert value_agreement(field) == pytest.approx(4 / 6)


def test_outcomes_of_a_level_and_what_it_lacks():
    state = small_level("easy")
    policy = tiny_policy(recurrent=False)
    sides = both_facings(policy, FLOAT32, state)
    other = both_facings(tiny_policy(1, recurrent=False), FLOAT32, state)
    found = outcomes(other[0], sides[0], other[1], region=2)
    assert not np.isnan(list(found.values())).any()
    exact = reaching(other, 2)
    assert (found["exact_cheese"], found["expected_steps"]) == (exact.cheese, exact.steps)
    assert found["mean_total_variation"] == difference(sides[0], other[0]).mean_total_variation
    assert outcomes(sides[0], sides[0])["direction_changed"] == 0
    no_fork = outcomes(vector_field(policy, FLOAT32, state.with_cheese(None)))
    missing = {name for name, value in no_fork.items() if np.isnan(value)}
    assert {"p_cheese", "path_cheese", "exact_cheese"} < missing
    assert not {"path_corner", "value_agreement", "stay"} & missing


SMALL = "0,14"  # seeds of easy levels with a 3 x 3 maze
PATCH = "multiply@embedder.block2.res1.resadd:3-7=-2"


@pytest.fixture(scope="module")
def feed_forward(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("agent") / "model_0.pth"
    save_agent(path, tiny_policy(recurrent=False))
    save_agent(path.with_name("model_64.pth"), tiny_policy(1, recurrent=False))
    return path


def arguments(agent: Path, output: Path, *more: str, levels: str = SMALL) -> list[str]:
    return ["--agent_file", str(agent), "--levels", levels, "--output_dir", str(output),
            "--device", "cpu", "--reference_size", "4", "--facing", "both", *more]


@pytest.fixture(scope="module")
def finished(feed_forward, tmp_path_factory) -> Path:
    """Fields of two levels, computed by one shard each."""
    output = tmp_path_factory.mktemp("fields") / "out"
    for more in (["--shard", "2/2"], ["--shard", "1/2"], ["--join"]):
        assert fields.main(arguments(
            feed_forward, output, "--patch", PATCH, "--num_pictures", "1", "--films", "cheese",
            "checkpoints", "--num_stills", "3", *more)) == 0
    return output


def test_fields_of_a_script_are_those_of_the_agent_with_and_without_patch(finished, feed_forward):
    policy, store = load_agent(feed_forward), ResultStore(finished, FIELDS_FILES)
    table = store.read("differences")
    conditions = list(dict.fromkeys(table["condition"]))
    assert conditions[0] == "unpatched" and len(conditions) == 2
    for condition, patches in zip(conditions, ([], [parse_patch(PATCH)])):
        for level in ("0", "14"):
            state = stock_state("easy", int(level))
            with patched(policy, patches):
                expected = both_facings(policy, FLOAT32, state)
            read = [read_field(store, condition, key) for key in (level, f"{level}_facing_1")]
            for field, (found, moved) in zip(expected, read):
                np.testing.assert_array_equal(found.squares, field.squares)
                np.testing.assert_array_equal(found.log_probs, field.log_probs)
                np.testing.assert_array_equal(found.values, field.values)
                assert found.facing == field.facing
                assert found.grid.to_rows() == state.grid.to_rows()
                assert [size.pictures for size in moved] == [len(field.squares)] * len(patches)
            row = table[(table["condition"] == condition) & (table["level"] == level)].iloc[0]
            assert row["exact_cheese"] == pytest.approx(reaching(expected, 5).cheese, rel=1e-4)
            assert row["facing_variation"] == pytest.approx(
                difference(*expected).mean_total_variation, rel=1e-4)
    change = table[table["condition"] == conditions[1]]["mean_total_variation"]
    assert (change > 0).all()
    arrays = store.read("field", conditions[0], "0")
    assert arrays["squares"].min() == 0 and arrays["squares"].max() == 2  # inner coordinates
    np.testing.assert_allclose(arrays["probs"].sum(axis=1), 1, rtol=1e-5)
    sizes = pd.read_csv(finished / "moved.csv")
    assert sizes["layer"].tolist() == ["embedder.block2.res1.resadd"]
    assert sizes["pictures"].tolist() == [2 * sum(change.index >= 0) * 6]
    assert (sizes[["in_std", "norm", "relative"]] > 0).all(axis=None)


def test_pictures_and_films_are_of_the_levels_that_are_drawn(finished):
    assert {path.name for path in finished.rglob("*_0.png")} == {
        "field_0.png", "maps_0.png", "checkpoints_0.png", "cheese_0.png"}
    for name, num_frames, num_stills in (("checkpoints", 2, 2), ("cheese", 6, 3)):
        frames = read_video(finished / "films" / f"{name}_0.mp4")
        assert len(frames) == num_frames
        with Image.open(finished / "films" / f"{name}_0.png") as stills:
            shown = np.hsplit(np.asarray(stills, np.float64), num_stills)
        # Equal up to video compression; different frames differ by more.
        assert np.abs(shown[-1] - frames[-1]).mean() < 4
        assert np.abs(shown[-1] - frames[0]).mean() > 1.5 * np.abs(shown[-1] - frames[-1]).mean()


def test_a_folder_takes_no_other_levels_of_the_same_name(finished, feed_forward, tmp_path, capsys):
    save_levels(tmp_path / "level_0.json", [stock_state("easy", 0).with_cheese(None)])
    assert fields.main(arguments(
        feed_forward, finished, "--patch", PATCH, "--num_pictures", "1", "--films", "cheese",
        "checkpoints", "--num_stills", "3", levels=str(tmp_path / "level_0.json"))) == 2
    assert ("belongs to another level than the requested level with seed 0"
            in capsys.readouterr().err)


def test_fields_of_an_agent_with_memory_have_no_exact_probabilities(agent_path, tmp_path, capsys):
    store = ResultStore(tmp_path / "out", FIELDS_FILES)
    assert fields.main(arguments(agent_path, store.path, "--memory", "walked", "--num_pictures",
                                 "0", levels="0")) == 0
    header = next(line for line in capsys.readouterr().out.splitlines() if "p_cheese" in line)
    assert header.split() == list(fields._PRINTED)  # pandas cuts wide tables by default
    table = store.read("differences")
    assert table["exact_cheese"].isna().all() and table["p_cheese"].notna().all()
    assert read_field(store, "unpatched", "0")[0].memory == "walked"


def test_pictures_show_the_arrows_of_the_field(tmp_path):
    state = stock_state("easy", 1)
    field, other = (vector_field(tiny_policy(seed, recurrent=False), FLOAT32, state)
                    for seed in (0, 1))
    panels = compared(Panel("a", state.grid, field, draw([state], person_view=True)[0]),
                      Panel("b", state.grid, other))
    with figures_drawn() as figures:
        plot_fields(tmp_path / "net.png", panels, Style(marked=(Square(3, 3),)))
        plot_fields(tmp_path / "all.png", panels[:1], Style(components=True, margin=True))
        plot_maps(tmp_path / "maps.png", state.grid, {"value": field.map(field.values)})

    def arrows(axes):
        return next(each for each in axes.collections if isinstance(each, Quiver))

    original, _, change = figures["net.png"].axes
    net, shown = arrows(original), np.linalg.norm(field.arrows, axis=1) >= 0.05
    np.testing.assert_allclose(np.column_stack([net.U, net.V]), field.arrows[shown])
    np.testing.assert_allclose(np.column_stack([net.X, net.Y]), field.squares[shown][:, ::-1] + 0.5)
    decision = state.grid.decision_square()
    assert [(mark.get_xdata()[0], mark.get_ydata()[0]) for mark in original.lines[-2:]] == [
        (decision.column + 0.5, decision.row + 0.5), (3.5, 3.5)]
    assert f"{difference(field, other).mean_total_variation:.3f}" in change.get_title()
    whole = figures["all.png"].axes[0]
    assert len(arrows(whole).U) == (field.probs[:, :STAY] >= 0.05).sum()
    assert (original.get_xlim(), whole.get_xlim()) == ((2, 13), (0, 15))
    drawn = figures["maps.png"].axes[0].images[-1].get_array()[::-1]
    np.testing.assert_allclose(drawn[tuple(field.squares[0])], field.values[0])


def test_a_patch_at_the_decision_square_changes_the_field_there_alone(feed_forward, tmp_path):
    output = tmp_path / "out"
    assert fields.main(arguments(
        feed_forward, output, "--patch", "zero@embedder.block1.conv,at=decision_square",
        "--num_pictures", "0", levels="0")) == 0
    store = ResultStore(output, FIELDS_FILES)
    before, after = (read_field(store, condition, "0")[0]
                     for condition in dict.fromkeys(store.read("differences")["condition"]))
    change = difference(before, after)
    changed = [Square(*square) for square in change.squares[change.total_variation > 0].tolist()]
    assert changed == [before.grid.decision_square()]
    assert marked_squares([parse_patch("zero@embedder.block1.conv,square=12.3"),
                           parse_patch("zero@embedder.block1.conv")]) == [(12, 3)]
    assert pd.read_csv(output / "moved.csv")["pictures"].tolist() == [2]
