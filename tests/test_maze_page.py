"""python -m maze.page in a real browser: frames equal Procgen's, and outputs equal PyTorch's."""

import csv
import functools
import io
import itertools
import re
from urllib.parse import parse_qs, urlencode

import numpy as np
import pytest
from conftest import FLOAT32, refusal
from page_exports import MAZE_NAME as NAME
from page_exports import MAZE_SEEDS, SHIPPED, needs_browser, small_maze_policy
from page_view import colours, fragment_of, go, pixels, read_script

from agents.acting import run_policy
from agents.agent_file import load_agent, save_agent
from agents.hooks import cached, patched
from agents.networks import NatureEmbedder, Policy, build_policy
from common.errors import UserError
from common.game_constants import ACTION_DIRECTIONS
from envs.maze.grid import FREE, WALL, Square
from envs.maze.levels import Filters, find_levels, from_text, save_levels
from envs.maze.state import MazeState, as_played, draw, stock_state
from envs.procgen_env import EnvConfig, StateView
from interventions.patch_text import open_patches, parse_patch
from interventions.patches import Add, Opening
from maze import page as script
from maze.field.fields import vector_field
from maze.field.outcomes import Chain
from maze.field.page_export import MazePageFolder
from maze.studies.vectors import VECTOR_KINDS, level_vectors
from tools.browser import SHOWN, opened_page

pytestmark = [needs_browser, pytest.mark.slow]
COUNTER = itertools.count()
LAYER = "embedder.block2.res1.resadd"
DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


@pytest.fixture(scope="module")
def policies(maze_export):
    return {name: load_agent(file) for name, file in maze_export.run.items()}


@pytest.fixture(scope="module")
def opened_once(browser, maze_export):
    with opened_page(browser, maze_export.page_file.as_uri(),
                     viewport={"width": 1400, "height": 1000}, color_scheme="light",
                     accept_downloads=True) as page:
        yield page


@pytest.fixture
def page(opened_once, fork):
    """The page, shared by the tests of this module, at a new view of a fork."""
    go(opened_once, fragment(fork, unused=next(COUNTER)))
    return opened_once


def fragment(state, agent=NAME, patches=(), **more) -> str:
    """Return the address fragment of a maze, as ``web/maze/lib/address.js`` writes it."""
    grid = state.grid
    inside = grid.region(grid.world_dim)
    whole = grid.is_free[~inside].any()
    bits = (grid.cells != WALL)[np.ones_like(inside) if whole else inside]
    bits = np.pad(bits, (0, -len(bits) % 6)).reshape(-1, 6) @ (1 << np.arange(5, -1, -1))
    entries = {"agent": agent, "mode": state.distribution_mode, "size": grid.maze_dim,
               "maze": "".join(DIGITS[each] for each in bits), "mouse": "{}.{}".format(*grid.mouse),
               "facing": grid.facing, **more}
    if grid.cheeses:
        entries["cheese"] = "/".join(f"{row}.{column}" for row, column in grid.cheeses)
    return urlencode([*entries.items(), *(("patch", patch) for patch in patches)])


def answers(page) -> dict[str, dict[Square, tuple[np.ndarray, float]]]:
    """Return log-probabilities and value by condition and square, from the CSV file of the page."""
    with page.expect_download() as download:
        page.get_by_role("button", name="Download all numbers (CSV)").click()
    rows = csv.reader(io.StringIO(download.value.path().read_text()))
    assert next(rows)[:5] == ["condition", "row", "column", "value", "log_prob downleft"]
    found = {}
    for condition, row, column, value, *log_probs in rows:
        found.setdefault(condition, {})[Square(int(row), int(column))] = (
            np.array(log_probs, float), float(value))
    return found


def assert_equal(found, field) -> None:
    """Assert that the outputs on the page are those of PyTorch, on the same squares."""
    assert list(found) == [Square(*square) for square in field.squares.tolist()]
    log_probs, values = zip(*found.values())
    np.testing.assert_allclose(log_probs, field.log_probs, rtol=0, atol=1e-4)
    np.testing.assert_allclose(values, field.values, rtol=0, atol=1e-4 * np.abs(
        field.values).max().clip(1))


def canvas_of(page, title: str):
    """Return the canvas of the view with a title."""
    title = page.locator(".title", has_text=re.compile(f"^{title}$"))
    return page.locator("figure", has=title).locator("canvas")


def frame(page) -> np.ndarray:
    """Return the observation that the page shows (64, 64, 3)."""
    return pixels(canvas_of(page, "Observation"))


def maze_text(grid):
    """Return a maze as text, one line per row from top to bottom."""
    inside = slice(grid.margin, grid.margin + grid.maze_dim)
    return "".join(f"{row[inside]}\n" for row in grid.to_rows()[inside])


def text_of(page) -> str:
    """Return the shown maze as text, written by the page."""
    page.get_by_role("button", name="Export this maze").click()
    return page.get_by_role("textbox", name="Maze as text").input_value()


def open_text(page) -> None:
    page.locator("details", has_text="As text").evaluate("each => { each.open = true }")


def at_square(page, state, square) -> tuple[float, float]:
    """Return the position of the centre of a square in the window, in pixels."""
    canvas = page.get_by_role("application")
    canvas.scroll_into_view_if_needed()
    box, grid = canvas.bounding_box(), state.grid
    row, column = grid.inner(square)
    return (box["x"] + (column + 0.5) / grid.maze_dim * box["width"],
            box["y"] + (grid.maze_dim - row - 0.5) / grid.maze_dim * box["height"])


def edited(mode: str, seed: int):
    """Return a level with changed walls and moved mouse and cheese; some have free squares
    outside the maze."""
    state, rng = stock_state(mode, seed), np.random.default_rng(seed)
    grid = state.grid
    inside = grid.region(grid.world_dim)
    places = np.argwhere(inside | (seed % 3 == 0))
    chosen = [Square(*map(int, place)) for place in rng.permutation(places)[:12]]
    state = state.with_cells({square: WALL if grid.is_free[square] else FREE for square in chosen
                              if square not in (grid.mouse, *grid.cheeses)})
    free = rng.permutation(state.grid.squares(without_cheese=True))
    mouse, cheese, *_ = (Square(*map(int, square)) for square in free
                         if tuple(square) != state.grid.mouse)
    state = state.with_mouse(mouse).with_cheese(cheese if seed % 4 else None)
    return state.with_facing(seed % 2)


def test_frames_are_procgens_and_answers_torchs_on_edited_mazes(page, policies):
    cases = [*(("easy", seed, NAME) for seed in range(4)), ("hard", 0, NAME), ("hard", 1, NAME),
             ("easy", 11, SHIPPED)]
    for mode, seed, agent in cases:
        state = edited(mode, seed)
        go(page, fragment(state, agent))
        np.testing.assert_array_equal(frame(page), draw([state])[0])
        found = answers(page)
        assert list(found) == ["original"]
        assert_equal(found["original"], vector_field(policies[agent], FLOAT32, state,
                                                     facing=state.grid.facing))


PATCHES = (
    [f"zero@{LAYER}:3"], ["zero@embedder.fc"], ["zero@embedder.block1.conv"],
    [f"set@{LAYER}:1,2,6-7=2.5,square=7.9/3.3,mapping=centred,others=-0.2"],
    ["set@embedder.block3.maxpool:4=1.5,cell=2.3/0.7", "set@embedder.block3:10=-3"],
    ["set@embedder.block1.res2.conv1:0=4,square=14.0", "multiply@hidden_state=1.5"],
    ["multiply@embedder.block1.res1=positive:2,negative:-0.5"],
    ["multiply@embedder.flatten:100-300=-2,at=off_path"],
    ["clamp@embedder.block2.res2.relu2_out=:0.4", "clamp@fc_policy=-1:1"],
    ["set@fc_value:0=3,squares=8.8/4.6", "multiply@embedder.relufc=2,at=decision_square"],
    ["multiply@all=0.9", "zero@embedder.block2.conv:1,facing=1"])


@pytest.fixture(scope="module")
def fork():
    """A fork level whose maze is smaller than the world, so that the corners differ."""
    return next(state for seed in range(100) if (state := stock_state("easy", seed)).grid.kind()
                == "fork" and 9 <= state.grid.maze_dim < 15)


def opened(policy, state, texts):
    opening = Opening(policy, EnvConfig("maze", state.distribution_mode), None,
                      functools.partial(as_played, [state]))
    return open_patches([parse_patch(text) for text in texts], opening)


@pytest.mark.parametrize("facing", [0, 1])
def test_a_patch_on_the_page_is_the_same_patch_in_python(page, policies, fork, facing):
    policy, state = policies[NAME], fork.with_facing(facing)
    original = vector_field(policy, FLOAT32, state, facing=facing)
    for texts in PATCHES[:3] if facing else PATCHES:
        go(page, fragment(state, patches=texts))
        with patched(policy, opened(policy, state, texts)):
            field = vector_field(policy, FLOAT32, state, facing=facing)
        found = answers(page)
        assert_equal(found["original"], original)
        assert_equal(found["patched"], field)
        moved = np.abs(np.exp(field.log_probs) - np.exp(original.log_probs)).max()
        same = np.array_equal(field.values, original.values)
        assert moved > 1e-3 or not same, texts  # large enough to be detected


def test_the_vectors_of_a_maze_are_those_of_python(page, policies, fork):
    policy = policies[NAME]
    state = fork.with_mouse(fork.grid.squares(without_cheese=True)[-1])  # made at the start anyway
    for texts, vectors in (
            ([f"add@{LAYER}=cheese,coefficient=-1"], [("cheese", LAYER, -1)]),
            ([f"add@{LAYER}=top_right"], [("top_right", LAYER, 1)]),
            (["add@embedder.relu3=cheese,coefficient=0.5", "add@embedder.block1=top_right",
              f"add@{LAYER}:2,4=cheese,cell=5.5/6.6,coefficient=30"],
             [("cheese", "embedder.relu3", 0.5), ("top_right", "embedder.block1.res2.resadd", 1),
              ("cheese", LAYER, 30)])):
        go(page, fragment(state, patches=texts))
        patches = []
        for text, (name, layer, coefficient) in zip(texts, vectors):
            vector = level_vectors(policy, [layer], VECTOR_KINDS[name], [state])[layer][0]
            only = {"channels": (2, 4), "cells": ((5, 5), (6, 6))} if ":2,4" in text else {}
            patches.append(Add(layer, vector, coefficient, **only))
        with patched(policy, patches):
            field = vector_field(policy, FLOAT32, state)
        assert_equal(answers(page)["patched"], field)


def test_patches_are_written_as_python_writes_them(page):
    texts = [*dict.fromkeys(text for texts in PATCHES for text in texts)]
    for text in texts:
        field = page.get_by_role("textbox", name="A patch as text")
        field.fill(text)
        field.press("Enter")
        shown = page.locator("li input.text").last.input_value()
        written, asked = (vars(parse_patch(each)) | {"text": ""} for each in (shown, text))
        assert written == asked
        page.get_by_role("button", name=re.compile("remove patch")).last.click()


def test_pointer_and_keys_edit_the_maze_and_undo_takes_it_back(page, fork):
    open_text(page)
    grid = fork.grid
    walls = [Square(*place) for place in np.argwhere((grid.cells == WALL) & grid.region(
        grid.world_dim)).tolist()]
    free = [square for square in grid.squares(True) if square != grid.mouse]
    above = Square(free[5].row + 1, free[5].column)

    def drag(*squares):
        page.mouse.move(*at_square(page, fork, squares[0]))
        page.mouse.down()
        for square in squares[1:]:
            page.mouse.move(*at_square(page, fork, square))
        page.mouse.up()

    def press(*keys):
        page.get_by_role("application").focus()
        for key in keys:
            page.keyboard.press(key)

    def assert_shown(state):
        assert text_of(page) == maze_text(state.grid)
        page.evaluate("document.activeElement.blur()")

    edits = [
        (lambda: drag(walls[0]), lambda state: state.with_cells({walls[0]: FREE})),
        (lambda: drag(free[0]), lambda state: state.with_cells({free[0]: WALL})),
        (lambda: drag(*walls[2:5]),  # a single edit of several squares
         lambda state: state.with_cells(dict.fromkeys(walls[2:5], FREE))),
        (lambda: drag(grid.mouse, free[3], walls[8], free[5]),  # the wall is skipped
         lambda state: state.with_mouse(free[5])),
        (lambda: drag(grid.cheese, free[7]), lambda state: state.with_cheese(free[7])),
        (lambda: page.get_by_role("button", name="Remove cheese").click(),
         lambda state: state.with_cheese(None)),
        (lambda: press("ArrowRight", "ArrowUp", "Enter"),  # the first key shows the cursor
         lambda state: state.with_cells({above: FREE if state.grid.cells[above] == WALL
                                         else WALL})),
        (lambda: press("f"), lambda state: state.with_facing(1))]
    states = [fork]
    for act, change in edits:
        act()
        states.append(change(states[-1]))
        assert_shown(states[-1])
    page.wait_for_selector(SHOWN)
    np.testing.assert_array_equal(frame(page), draw([states[-1]])[0])
    for state in states[-2::-1]:
        page.keyboard.press("Control+z")
        assert_shown(state)
    for state in states[1:]:
        page.get_by_role("button", name="Redo").click()
        assert_shown(state)


def test_touch_draws(browser, maze_export, fork):
    with opened_page(browser, f"{maze_export.page_file.as_uri()}#{fragment(fork)}",
                     viewport={"width": 390, "height": 840}, has_touch=True,
                     is_mobile=True) as page:
        open_text(page)
        walls = [Square(*place) for place in np.argwhere(
            (fork.grid.cells == WALL) & fork.grid.region(15)).tolist()]
        fingers = page.context.new_cdp_session(page)
        # Touching a column of the maze must not scroll the page.
        column = [wall for wall in walls if wall.column == walls[-1].column]
        for kind, touched in [("touchStart", column[:1]), *(("touchMove", [wall]) for wall in
                                                            column[1:]), ("touchEnd", [])]:
            fingers.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [
                dict(zip("xy", at_square(page, fork, wall))) for wall in touched]})
        assert text_of(page) == maze_text(fork.with_cells(dict.fromkeys(column, FREE)).grid)


def test_the_address_holds_maze_patches_and_view(browser, maze_export):
    state = edited("hard", 3)  # with free squares outside its maze
    assert state.grid.is_free[~state.grid.region(25)].any() and state.grid.facing == 1
    whole = fragment(state, SHIPPED, [f"zero@{LAYER}:3"], show="channel", channel=9, components=1,
                     layer="embedder.block3.res1.conv2", world=1, region=5, seed=7,
                     patch_off="zero@fc_value", actions="likely", notes="a & b = <i>c</i>")
    with opened_page(browser, f"{maze_export.page_file.as_uri()}#{whole}") as page:
        assert fragment_of(page) == parse_qs(whole)
        np.testing.assert_array_equal(frame(page), draw([state])[0])
        assert answers(page).keys() == {"original", "patched"}
        assert page.get_by_role("textbox", name="Notes").input_value() == "a & b = <i>c</i>"


def test_mistakes_get_the_sentences_of_python(page, policies, fork):
    open_text(page)
    for rows in (["M.x", "...", "..C"], ["M..", "....", "..C"], ["M..", "..C"], ["..", ".M"],
                 ["m..", "...", "..."], ["...", ".C.", "..."], ["M..", ".M.", "..C"],
                 ["M" + 16 * "."] + 16 * [17 * "."]):
        with pytest.raises(UserError) as error:
            from_text("\n".join(rows), "easy")
        page.get_by_role("textbox", name="Maze as text").fill("\n".join(rows))
        page.get_by_role("button", name="Load this text").click()
        assert page.get_by_text(f"This is not a maze: {error.value}.", exact=True).is_visible()
    page.get_by_role("application").focus()
    page.keyboard.press("ArrowLeft")
    for key, edit in (("c", lambda: fork.with_cheese(fork.grid.mouse)),
                      ("Enter", lambda: fork.with_cells({fork.grid.mouse: WALL}))):
        with pytest.raises(UserError) as error:
            edit()
        page.keyboard.press(key)
        text = str(error.value)
        assert page.get_by_text(f"{text[0].upper()}{text[1:]}.", exact=True).is_visible()
    policy = policies[NAME]
    for text in ("zero", "zero@embedder.block2.res1.resad", "zero@gru", f"set@{LAYER}:8",
                 f"set@{LAYER}:8=1", f"set@{LAYER}:1=a", f"zero@{LAYER}:1=3", f"zero@{LAYER}:x",
                 f"zero@{LAYER}:1,cell=5", f"zero@{LAYER}:1,cell=5.16", "zero@embedder.fc,cell=1.1",
                 f"set@{LAYER}:1=1,others=2", f"zero@{LAYER}:1,square=15.0",
                 f"zero@{LAYER}:1,mapping=centred", f"clamp@{LAYER}=2:1", "zero@all,square=1.1",
                 f"zero@{LAYER}:1,cell=1.1,cell=2.2"):
        with pytest.raises(UserError) as error, patched(policy, opened(policy, fork, [text])):
            vector_field(policy, FLOAT32, fork)
        wanted = re.sub(r"\(.*|, (such as|as in|or an .npy) .*", "", str(error.value)).strip()
        go(page, fragment(fork, patches=[text]))
        problem = page.locator("li .problem").inner_text()
        assert problem.lower().startswith(wanted.lower()), (problem, wanted)
        assert not page.locator('[aria-label^="Patched: "]').count()


def test_a_vector_that_the_maze_has_not_is_said(page, fork):
    full = next(state for seed in range(100)
                if (state := stock_state("easy", seed)).grid.margin == 0)
    for state, kind, text in ((fork.with_cheese(None), "cheese", "the maze has no cheese, not one"),
                              (full, "top_right", "the maze fills the world")):
        go(page, fragment(state, patches=[f"add@{LAYER}={kind}"]))
        assert page.get_by_text(text).count()


def test_a_channel_is_coloured_by_its_cells(page, policies, fork):
    """Positive values are blue and negative ones red, at the position of the layer's cell."""
    policy, channel = policies[NAME], 6
    layer = "embedder.block3.res1.resadd"
    go(page, fragment(fork, show="channel", layer=layer, channel=channel,
                        patches=["multiply@embedder.block3.maxpool=-1"]))
    # 36 places in each cell, most of which are not on the lines of the walls.
    down, across = np.moveaxis(np.indices((48, 48)).reshape(2, 8, 6, 8, 6), 3, 2).reshape(2, -1)
    places = np.stack([across, down], 1) / 48 + 1 / 96
    maps = {}
    for title, texts in (("Original", []), ("Patched", ["multiply@embedder.block3.maxpool=-1"])):
        with patched(policy, opened(policy, fork, texts)), cached(policy, [layer]) as found:
            run_policy(policy, FLOAT32, draw([fork]), policy.initial_states(1))
        maps[title] = found[layer][0, channel].numpy()
    for title, numbers in maps.items():
        shown = np.median(colours(canvas_of(page, title), places).reshape(64, 36, 3), axis=1)
        shades = np.sign(numbers) * np.abs(numbers)**0.7  # see gradientColour of the page
        assert np.corrcoef(shown[:, 2] - shown[:, 0], shades.ravel())[0, 1] > 0.97, title


def test_arrows_point_where_the_agent_goes(page, policies):
    """The head of an arrow is wider than its tail."""
    seen = set()
    for state in find_levels("easy", range(1, 100), 6, Filters(kind="fork")):
        field = vector_field(policies[SHIPPED], FLOAT32, state)
        go(page, fragment(state, SHIPPED))
        grid = state.grid
        for square, probs in zip(field.squares.tolist(), field.probs):
            direction = probs[:4].argmax()
            if probs[direction] < 0.97 or Square(*square) in (grid.mouse, grid.decision_square()):
                continue
            right, up = ((-1, 0), (0, -1), (0, 1), (1, 0))[direction]
            row, column = grid.inner(square)
            points = [(column + 0.5 + sign * 0.22 * right + 0.09 * up,
                       grid.maze_dim - row - 0.5 - sign * 0.22 * up + 0.09 * right)
                      for sign in (1, -1)]
            head, tail = colours(canvas_of(page, "Original"), np.array(points) / grid.maze_dim)
            assert head.max() < 128 < tail.min(), (state.level_seed, square, direction)
            seen.add(int(direction))
    assert seen == {0, 1, 2, 3}


def walk_of(page, condition: str) -> list[tuple[Square, int | None, list[float]]]:
    """Return square, direction of the move and probabilities (5,) at each step of a walk."""
    steps = page.evaluate("""async (condition) => {
        const button = (name) => document.querySelector(`[aria-label="${name}"]`)
        const group = button(`walk of the ${condition} agent`)
        const found = []
        button('first step').click()
        for (let last = ''; ; last = group.querySelector('.where').textContent) {
            await new Promise((then) => setTimeout(then, 0))
            const where = group.querySelector('.where').textContent
            if (where === last) return found
            const rows = [...group.querySelectorAll('li')]
            found.push([where.match(/\\d+/g).slice(1).map(Number),
                rows.findIndex((row) => row.classList.contains('taken')),
                rows.map((row) => parseFloat(row.querySelector('.number').textContent))])
            button('forward one step').click()
        }
    }""", condition)
    return [(Square(*square), move if move >= 0 else None, probs) for square, move, probs in steps]


def forecast_of(page, condition: str) -> list[float]:
    """Return P(cheese) and P(corner) in percent, and the expected number of steps."""
    text = page.get_by_role("group", name=f"walk of the {condition} agent").locator(
        ".exact").inner_text()
    return [float(number) for number in re.findall(r"[\d.]+", text)]


ARROW_ACTIONS = (1, 3, 5, 7, 4)  # left, down, up, right, stay


@pytest.mark.parametrize(("actions", "seed"), [("sampled", 3), ("likely", 0)])
def test_walks_follow_the_policy_as_in_procgen(page, policies, fork, actions, seed):
    policy, texts = policies[SHIPPED], [f"add@{LAYER}=cheese,coefficient=-1"]
    go(page, fragment(fork, SHIPPED, texts, seed=seed, actions=actions))
    page.wait_for_selector(".exact")
    vector = level_vectors(policy, [LAYER], VECTOR_KINDS["cheese"], [fork])[LAYER][0]
    for condition, patches in (("original", []), ("patched", [Add(LAYER, vector, -1)])):
        with patched(policy, patches):
            fields = [vector_field(policy, FLOAT32, fork, facing=facing) for facing in (0, 1)]
        chain = Chain.of(fields)
        expected = [*100 * chain.reaching([fork.grid.cheese, fork.grid.corner]),
                    chain.expected_steps()]
        np.testing.assert_allclose(forecast_of(page, condition), expected, atol=0.06)
        view = StateView(EnvConfig("maze", "easy"))
        view.set(fork.to_bytes())
        walk = walk_of(page, condition)
        for square, move, probs in walk[:-1]:
            grid = MazeState.parse(view.state()).grid
            assert square == grid.mouse
            field = fields[grid.facing]
            row = field.row(square)
            np.testing.assert_allclose(probs, 100 * field.probs[row], atol=0.06)
            if actions == "likely":
                right, up = ACTION_DIRECTIONS[field.log_probs[row].argmax()]
                assert move == {-1: 0, 1: 3}.get(right, {-1: 1, 1: 2}.get(up, 4))
            ended, solved = view.step(ARROW_ACTIONS[move])
        # Without the cheese, the walk is cut at its arrival in the corner.
        assert solved == (walk[-1][0] in fork.grid.cheeses)
        assert ended == (solved or len(walk) == 501)
        assert ended or walk[-1][0] == fork.grid.corner
        view.close()


def test_both_walks_use_the_same_random_numbers(page, fork):
    go(page, fragment(fork, SHIPPED, ["multiply@all=1"], seed=5))
    page.wait_for_selector(".exact")
    walk = walk_of(page, "original")
    assert walk == walk_of(page, "patched")  # the patch changes nothing
    page.get_by_role("button", name="New seed").click()
    assert walk_of(page, "original") != walk
    page.get_by_role("button", name="Reset").click()
    page.get_by_role("button", name="play", exact=True).click()
    page.wait_for_function("Number(document.querySelector('.step b').textContent) > 1")
    page.get_by_role("button", name="pause", exact=True).click()


def test_the_page_opens_where_the_cheese_vector_changes_most(browser, policies, maze_export):
    start = read_script(MazePageFolder(maze_export.page_file.parent).data_file("manifest"))["start"]
    with opened_page(browser, maze_export.page_file.as_uri()) as page:
        page.wait_for_selector(".exact")
        assert page.get_by_role("combobox", name="Level seed").input_value() == start["level"]
        shown = [forecast_of(page, condition)[0] / 100 for condition in ("original", "patched")]
    changes, policy = {}, policies[NAME]
    for seed in range(MAZE_SEEDS):
        state = stock_state("easy", seed)
        if state.grid.kind() != "fork":
            continue
        vector = level_vectors(policy, [LAYER], VECTOR_KINDS["cheese"], [state])[LAYER][0]
        found = []
        for patches in ([], [Add(LAYER, vector, -1)]):
            with patched(policy, patches):
                fields = [vector_field(policy, FLOAT32, state, facing=facing) for facing in (0, 1)]
            found.append(float(Chain.of(fields).reaching([state.grid.cheese])[0]))
        changes[str(seed)] = found
    assert start["level"] == max(changes, key=lambda name: abs(np.diff(changes[name])[0]))
    np.testing.assert_allclose(shown, changes[start["level"]], atol=6e-4)


def test_levels_sizes_and_modes_are_shown(page):
    open_text(page)
    for mode in ("hard", "easy"):
        page.get_by_role("combobox", name="Mode").select_option(mode)
        page.get_by_role("combobox", name="Level seed").select_option("2")
        assert text_of(page) == maze_text(stock_state(mode, 2).grid)
        page.get_by_role("button", name="next level").click()
        assert text_of(page) == maze_text(stock_state(mode, 3).grid)
    rows = [".####", ".....", ".#.#.", "M#.#."]
    chooser = page.get_by_role("combobox", name="Cheese in training")
    page.get_by_role("combobox", name="Agent").select_option(SHIPPED)
    assert chooser.input_value() == "5"  # region with which maze_confined was trained
    for region, column in (("2", 4), ("2", 2), ("5", 2)):
        chooser.select_option(region)
        text = "\n".join([f"{'....'[:column]}C{'....'[column:]}", *rows])
        page.get_by_role("textbox", name="Maze as text").fill(text)
        page.get_by_role("button", name="Load this text").click()
        warning = page.get_by_text("distribution: the cheese is outside the region").count()
        state = from_text(text, "easy")
        np.testing.assert_array_equal(frame(page), draw([state])[0])
        wanted = state.grid.departures_from_training(int(region))
        assert bool(warning) == bool(wanted) == ((region, column) == ("2", 2))
    chooser.select_option("anywhere")
    page.get_by_role("combobox", name="Size").select_option("13")
    page.get_by_role("button", name="Random maze").click()
    grid = from_text(text_of(page), "easy").grid
    assert grid.maze_dim == 13 and not grid.departures_from_training()
    assert page.get_by_text("Procgen may generate this maze in training.").count()


def test_seeds_come_in_each_mode_and_level_files_once(tmp_path, capsys):
    save_agent(tmp_path / "small.pth", small_maze_policy())
    save_levels(tmp_path / "level_1.json", [edited("hard", 1)])
    assert script.main(["--agent_file", str(tmp_path / "small.pth"), "--levels", "0-1",
                        str(tmp_path / "level_1.json"), "--output_dir", str(tmp_path / "page"),
                        "--dry_run"]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == [
        "easy 0", "easy 1", "hard 1", "hard 0", "hard 1_2"]
    assert not (tmp_path / "page").exists()


def test_what_the_page_cannot_show_is_refused(tmp_path, capsys):
    for name, policy in (("small", small_maze_policy()), ("nature", Policy(NatureEmbedder(), None)),
                         ("gru", build_policy("impala", 16, True, True))):
        save_agent(tmp_path / f"{name}.pth", policy)
    save_levels(tmp_path / "level_3.json", [stock_state("easy", 3, use_backgrounds=True)])
    small = str(tmp_path / "small.pth")
    output = tmp_path / "page"
    for flags, words in (
            ([str(tmp_path / "gru.pth")], "GRU"),
            ([str(tmp_path / "nature.pth")], "not an IMPALA network"),
            ([small, "--levels", str(tmp_path / "level_3.json")], "background"),
            ([small, "--distribution_mode", "memory"], "moves with the mouse"),
            ([small, small], "two agents are called 'small'"),
            ([small, "--name", "a", "b"], "2 names"),
            ([small, "--levels", "9-3"], "ends before it begins")):
        argv = ["--agent_file", *flags, "--output_dir", output]
        assert words in refusal(script.main, argv, capsys)
    assert not output.exists()
