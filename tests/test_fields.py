"""Vector fields of mazes: frames from stamps, both sources, exact probabilities, the script."""

import dataclasses
import itertools

import numpy as np
import pytest
from conftest import FLOAT32, tiny_policy
from scipy.stats import binomtest, sem

from agents.acting import run_policy
from common.env import EnvConfig, ProcgenVectorEnv
from common.errors import UserError
from maze.field import stamps
from maze.field.decisions import at_decision_square, by_outcome, outcomes, value_agreement
from maze.field.differences import difference
from maze.field.fields import (
    DOWN,
    LEFT,
    RIGHT,
    STAY,
    UP,
    Field,
    both_facings,
    drawn_frames,
    stamp_frames,
    vector_field,
)
from maze.field.reaching import Chain, path_probability, reaching
from maze.level.environment import draw, stock_state
from maze.level.grid import CHEESE, FREE, WALL, Grid, Square

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
    """Stamps rendered here, not those that an earlier version left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        stamps.Stamps.of.cache_clear()
        yield
    stamps.Stamps.of.cache_clear()


def small_level(mode: str, kind: str = "fork", size: int = 5):
    """A generated level with a maze of some size."""
    return next(state for state in (stock_state(mode, seed) for seed in range(500))
                if state.grid.maze_dim == size and state.grid.kind() == kind)


def made_up(rows, seed=0, **changes) -> Field:
    """A field of random probabilities on a maze written down."""
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
    kept = path.read_bytes()
    for content, is_read in ((kept, True), (kept[:1000], False), (b"", False)):
        path.write_bytes(content)
        before = path.stat().st_mtime_ns
        stamps.Stamps.of.cache_clear()
        again = stamps.Stamps.of("easy")
        assert (path.stat().st_mtime_ns == before) == is_read
        for name, values in dataclasses.asdict(rendered).items():
            np.testing.assert_array_equal(getattr(again, name), values)


def test_stamps_refuse_what_they_cannot_draw():
    with pytest.raises(UserError, match="view moves with the mouse"):
        stamp_frames(stock_state("memory", 0))
    with pytest.raises(UserError, match="backgrounds"):
        stamp_frames(stock_state("easy", 0, use_backgrounds=True))
    grid = stock_state("hard", 0).grid
    with pytest.raises(UserError, match="15 x 15"):
        stamps.Stamps.of("easy").frames(grid, [grid.mouse])


@pytest.mark.parametrize("facing", (0, 1))
def test_fields_from_stamps_and_through_set_state_are_equal(facing):
    policy, state = tiny_policy(recurrent=False), small_level("easy")
    composed, drawn = (vector_field(policy, FLOAT32, state, facing=facing, frames=source(state))
                       for source in (stamp_frames, drawn_frames))
    np.testing.assert_array_equal(composed.log_probs, drawn.log_probs)
    np.testing.assert_array_equal(composed.values, drawn.values)
    other = vector_field(policy, FLOAT32, state, facing=1 - facing)
    assert not np.array_equal(composed.log_probs, other.log_probs)
    # The free squares of a maze of 5 x 5 that is a tree, without the one of the cheese.
    assert composed.squares.shape == (9 + 8 - 1, 2)


def test_levels_without_stamps_have_fields_too():
    policy = tiny_policy(recurrent=False)
    for state in (stock_state("memory", 3), stock_state("easy", 3, use_backgrounds=True)):
        some = np.array(state.grid.squares(without_cheese=True))[:3]
        field = vector_field(policy, FLOAT32, state)
        frames = drawn_frames(state)(some, np.zeros(3))
        output = run_policy(policy, FLOAT32, frames, policy.initial_states(3))
        np.testing.assert_allclose(field.log_probs[:3], output.log_probs, atol=1e-5)


def test_directions_are_the_actions_that_move_the_mouse_so():
    field = made_up(MAZE)
    p = np.exp(field.log_probs)
    expected = np.stack([p[:, [0, 1, 2]].sum(1), p[:, 3], p[:, 5], p[:, [6, 7, 8]].sum(1),
                         p[:, [4, 9, 10, 11, 12, 13, 14]].sum(1)], axis=1)
    np.testing.assert_allclose(field.probs, expected)
    np.testing.assert_allclose(field.arrows, np.stack([
        expected[:, RIGHT] - expected[:, LEFT], expected[:, UP] - expected[:, DOWN]], axis=1))
    row = field.row(Square(1, 2))  # the mouse's: free are up and right
    np.testing.assert_allclose(field.effective_probs[row], [
        0, 0, expected[row, UP], expected[row, RIGHT], expected[row, [LEFT, DOWN, STAY]].sum()])
    with pytest.raises(UserError, match="row 0, column 0"):
        field.row(Square(0, 0))


def test_exact_probabilities_are_those_of_real_rollouts():
    """400 episodes of a level, whose last steps are left: every frame is known, so the policy runs
    once on each."""
    policy = tiny_policy(2, recurrent=False)
    num, region, num_steps = 400, 2, 40
    start = small_level("easy", size=3)
    state = start.with_time(start.timeout - num_steps)
    inside = state.grid.region(region)
    fields = both_facings(policy, FLOAT32, state)
    probs, squares = {}, {}
    for field in fields:
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
    exact = reaching(fields, region, num_steps)
    cheese_first = got_cheese & ~region_first
    for counted, probability in ((got_cheese, exact.cheese), (region_first, exact.region_first),
                                 (cheese_first, exact.cheese_first)):
        interval = binomtest(int(counted.sum()), num).proportion_ci(0.999)
        assert 0.2 < probability < 0.8
        assert interval.low <= probability <= interval.high
    assert abs(lengths.mean() - exact.steps) < 3.29 * sem(lengths)


def test_chance_of_a_corridor_is_that_of_a_geometric_wait():
    """The mouse goes right with probability p, else stays: P(there in t steps) = 1 - (1 - p)^t."""
    rows = ["###", "MC#", "###"]
    field = made_up(rows)
    log_probs = np.full((1, 15), -np.inf)
    log_probs[0, [7, 4]] = np.log([0.2, 0.8])
    fields = tuple(dataclasses.replace(field, log_probs=log_probs, facing=side)
                   for side in (0, 1))
    exact = reaching(fields, 1, steps=10)
    assert exact.cheese == pytest.approx(1 - 0.8**10)
    assert exact.steps == pytest.approx(sum(0.8**t for t in range(10)))


def test_facing_decides_where_it_is_the_chains_state():
    """Facing 0 the mouse goes right, facing 1 left: it never gets beyond the second square."""
    grid = Grid.from_rows(["#####", "#####", "M...C", "#####", "#####"])
    squares = np.array(grid.squares(without_cheese=True))
    fields = []
    for side, action in ((0, 7), (1, 1)):
        log_probs = np.full((len(squares), 15), -np.inf)
        log_probs[:, action] = 0
        fields.append(Field(grid, squares, log_probs, np.zeros(len(squares)), side, "none"))
    chain = Chain.of(tuple(fields))
    reached = chain.reaching([Square(2, column) for column in range(5)])
    assert reached.tolist() == [1, 1, 0, 0, 0]
    assert chain.expected_steps() == 500


def test_exact_probabilities_refuse_an_agent_with_memory():
    policy, state = tiny_policy(), small_level("easy", size=3)
    with pytest.raises(UserError, match="without memory"):
        Chain.of(both_facings(policy, FLOAT32, state))


def test_an_agent_that_walked_to_a_square_has_seen_the_way():
    """The field of a GRU against an episode in which the same actions are forced."""
    policy, state = tiny_policy(2), small_level("easy", size=7)
    walked = {side: vector_field(policy, FLOAT32, state, facing=side, memory="walked")
              for side in (0, 1)}
    fresh = vector_field(policy, FLOAT32, state)
    assert walked[0].memory == "walked" and fresh.memory == "start"
    path = state.grid.path(state.grid.mouse, state.grid.cheese)
    env = ProcgenVectorEnv(EnvConfig("maze", "easy"), 1, seed=0)
    env.set_state([state.to_bytes()])
    hidden, side = policy.initial_states(1), 0
    for square, following in itertools.pairwise(path):
        output = run_policy(policy, FLOAT32, env.observe().frames, hidden)
        field = walked[side]
        row = field.row(square)
        np.testing.assert_allclose(field.log_probs[row], output.log_probs[0], atol=2e-5)
        np.testing.assert_allclose(field.values[row], output.values[0], atol=2e-5)
        hidden = output.hidden_states
        step = (following.row - square.row, following.column - square.column)
        side = {(0, 1): 1, (0, -1): 0}.get(step, side)
        env.act(np.array([{(0, -1): 1, (-1, 0): 3, (1, 0): 5, (0, 1): 7}[step]], np.int32))
    env.close()
    assert len(path) > 4
    assert np.abs(walked[side].log_probs[row] - fresh.log_probs[row]).max() > 1e-3
    with pytest.raises(UserError, match="different memories"):
        difference(fresh, walked[0])


def test_a_walked_field_leaves_out_what_lies_behind_the_cheese():
    state = stock_state("easy", 2)
    assert state.grid.kind() == "cheese on the way" and state.grid.cheese != state.grid.corner
    field = vector_field(tiny_policy(), FLOAT32, state, memory="walked")
    with pytest.raises(UserError, match="walked to"):
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
    way_on = ["#####", "#####", "M.C.#", "#####", "#####"]
    field = made_up(way_on)
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
    """Right everywhere, in a corridor with a dead end below its third square."""
    grid = Grid.from_rows(["#####", "#####", "M...C", "##.##", "##.##"])
    squares = np.array(grid.squares(without_cheese=True))
    log_probs = np.full((len(squares), 15), -np.inf)
    log_probs[:, 7] = 0
    values = {(2, 0): 1, (2, 1): 2, (2, 2): 5, (2, 3): 4, (1, 2): 3, (0, 2): 0}
    field = Field(grid, squares, log_probs,
                  np.array([values[tuple(square)] for square in squares.tolist()]), 0, "none")
    # So do the first two and the fourth, beside the cheese; the third has 4 and 3 beside it; the
    # two of the dead end walk into a wall.
    assert value_agreement(field) == pytest.approx(4 / 6)


def test_outcomes_of_a_level_and_what_it_lacks():
    state = small_level("easy")
    policy = tiny_policy(recurrent=False)
    fields = both_facings(policy, FLOAT32, state)
    other = both_facings(tiny_policy(1, recurrent=False), FLOAT32, state)
    found = outcomes(other[0], fields[0], other[1], region=2)
    assert not np.isnan(list(found.values())).any()
    exact = reaching(other, 2)
    assert (found["exact_cheese"], found["expected_steps"]) == (exact.cheese, exact.steps)
    assert found["mean_total_variation"] == difference(fields[0], other[0]).mean_total_variation
    assert outcomes(fields[0], fields[0])["direction_changed"] == 0
    no_fork = outcomes(vector_field(policy, FLOAT32, state.with_cheese(None)))
    missing = {name for name, value in no_fork.items() if np.isnan(value)}
    assert {"p_cheese", "path_cheese", "exact_cheese"} < missing
    assert not {"path_corner", "value_agreement", "stay"} & missing

    arrays, whole = by_outcome([found, no_fork, found], ("stay", "p_cheese"), fewest=2)
    assert whole.tolist() == [0, 2]
    np.testing.assert_array_equal(arrays["p_cheese"], [found["p_cheese"]] * 2)
    with pytest.raises(UserError, match="only 2 of 3 levels have stay, p_cheese"):
        by_outcome([found, no_fork, found], ("stay", "p_cheese"))
