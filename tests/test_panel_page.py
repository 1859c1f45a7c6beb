"""The interpretability panel in a real browser, over a real export of a small run."""

import itertools
import re
import shutil
from urllib.parse import parse_qs, unquote, urlsplit

import av
import numpy as np
import pytest
from page_exports import HOSTILE_NAME as NAME
from page_exports import needs_browser
from panel_run import (
    BEHAVIOURS,
    LACKING,
    NUM_SAMPLES,
    NUM_STEPS,
    NUM_SWAPPED,
    READ_AT,
    START,
    SWAPPED,
    TITLES,
    TYPES,
    UNALTERED,
    coordinate_gradients,
    write_run,
)

import export_panel
from analysis.panel_files import PanelFolder
from common.game_constants import ACTION_LABELS, ACTION_NAMES
from tools.browser import SHOWN, opened_page

pytestmark = needs_browser

TOTAL = NUM_SAMPLES + NUM_SWAPPED
COUNTER = itertools.count()
VIEWS = ("observation", "saliency", "states", "components", "timeline")  # canvases, in their order


@pytest.fixture(scope="module")
def exported(panel_export):
    return panel_export.run, PanelFolder(panel_export.page_file.parent)


@pytest.fixture(scope="module")
def run(panel_export):
    return panel_export.run


@pytest.fixture(scope="module")
def address(panel_export):
    return panel_export.page_file.as_uri()


@pytest.fixture(scope="module")
def opened(browser, address):
    with opened_page(browser, address, viewport={"width": 1400, "height": 900}) as opened:
        yield opened


@pytest.fixture
def page(opened):
    """The module's page, at a new view of the first sample."""
    go(opened, f"sample={UNALTERED}/0&unused={next(COUNTER)}")
    return opened


def go(page, fragment):
    page.evaluate("""(fragment) => new Promise((resolve) => {
        addEventListener('hashchange', () => setTimeout(resolve), { once: true })
        location.hash = fragment
    })""", fragment)
    page.wait_for_selector(SHOWN)
    page.evaluate("document.activeElement.blur()")


def chooser(page, name):
    return page.get_by_role("combobox", name=name, exact=True)


def facts(page, row=0):
    """Texts beside the sample, by their titles."""
    return page.evaluate("""(row) => Object.fromEntries(
        [...document.querySelectorAll('.facts')[row].children].map((each) => [
            each.querySelector('dt').textContent,
            each.querySelector('dd').innerText.replace('−', '-').replace(/\\s+/g, ' ').trim()]))
        """, row)


def colour(page, view, across=0.5, down=0.5, row=0):
    """Of a pixel in the canvas of a view: red, green, blue."""
    page.wait_for_selector(SHOWN)
    return page.evaluate("""([index, across, down]) => {
        const canvas = document.querySelectorAll('.samples canvas')[index]
        const [x, y] = [Math.floor(canvas.width * across), Math.floor(canvas.height * down)]
        return [...canvas.getContext('2d').getImageData(x, y, 1, 1).data].slice(0, 3)
    }""", [VIEWS.index(view) + len(VIEWS) * row, across, down])


def label(page, view, row=0):
    """Text of a view for screen readers."""
    return page.locator(".samples canvas").nth(VIEWS.index(view) + len(VIEWS) * row).get_attribute(
        "aria-label")


def shown_sample(page, row=0):
    """Set and number."""
    group = page.locator(".picker").nth(row)
    return (group.locator("select").evaluate("each => each.selectedOptions[0].text"),
            int(group.locator("input").input_value()))


def shown_step(page):
    return int(page.locator(".step b").inner_text())


def table(page, row=0):
    """Coordinates and gradients as numbers; NaN for a dash."""
    cells = page.locator(".table").nth(row).locator("td").all_text_contents()
    values = [float(cell.replace("−", "-")) if cell != "–" else np.nan for cell in cells]
    return np.array(values).reshape(-1, 2).T


def left(page):
    """Samples left by the filters, as the page counts them."""
    page.wait_for_selector(SHOWN)
    text = page.locator(".count").inner_text()
    if text.startswith("No sample passes"):
        return 0
    return int(re.fullmatch(rf"(\d+) of {TOTAL} samples pass", text)[1])


def add_filter(page, ic, what, low=None, high=None, step="any"):
    page.get_by_role("button", name="Add a filter").click()
    row = page.locator("li[aria-label^=filter]").last
    row.get_by_role("combobox", name="IC", exact=True).select_option(str(ic))
    row.get_by_role("combobox", name="Quantity").select_option(label=what)
    row.get_by_role("combobox", name="at step").select_option(str(step))
    for name, value in (("from", low), ("to", high)):
        if value is not None:
            row.get_by_role("spinbutton", name=name).fill(str(value))


def test_steps_show_their_numbers_and_pictures(page, run):
    page.locator(".picker input").fill("3")
    page.locator(".picker input").press("Enter")
    for step in range(NUM_STEPS):
        said, samples = facts(page), run.samples
        assert float(said["Value"]) == pytest.approx(samples.values[3, step], abs=0.01)
        assert float(said["Reward"]) == pytest.approx(samples.rewards[3, step], abs=0.006)
        assert said["Terminal"] == f"{100 * samples.terminals[3, step]:.0f} %"
        answer = samples.log_probs[3, step].argmax()
        name = ACTION_LABELS[answer]
        share = f"{100 * np.exp(samples.log_probs[3, step].max()):.0f} %"
        assert said["Action"] == f"{name} {share}"
        assert said["Previous action"] == ACTION_LABELS[samples.actions[3, step]]
        assert said["Behaviour"] == str(BEHAVIOURS[3])
        assert colour(page, "observation")[:2] == pytest.approx([45, 50 * step], abs=8)
        assert colour(page, "saliency") == pytest.approx([45, 50 * step, 80], abs=8)
        coordinates, gradients = table(page)
        np.testing.assert_allclose(coordinates, run.coordinates[3, step], rtol=0.006, atol=1e-6)
        np.testing.assert_allclose(
            gradients, coordinate_gradients(run.gradients["value"][3, step]), rtol=0.06)
        page.get_by_role("button", name="forward one step").click()
    assert shown_step(page) == NUM_STEPS - 1  # and goes no further


def test_arrows_point_where_the_actions_go(page, run):
    """The first coordinate of an arrow turned by its angle: right of the middle for 'right'."""
    for sample in range(3):
        for step in range(NUM_STEPS):
            page.evaluate(f"location.hash = 'sample={UNALTERED}/{sample}&step={step}'")
            page.wait_for_function(f"document.querySelector('.step b').textContent == '{step}'")
            action = run.samples.actions[sample, step]
            path = page.locator(".facts dd").nth(1).locator("path")
            if ACTION_NAMES[action] == "null":
                assert path.count() == 0
                continue
            angle = float(re.search(r"rotate\((.*)\)", path.get_attribute("transform"))[1])
            wanted = {"right": 0, "upright": -45, "up": -90, "upleft": -135, "left": 180,
                      "downleft": 135, "down": 90, "downright": 45}[ACTION_NAMES[action]]
            assert (angle - wanted) % 360 == 0


def test_buttons_slider_and_timeline_go_through_the_steps(page):
    def press(name):
        page.get_by_role("button", name=name, exact=True).click()
        return shown_step(page)

    assert press("back one step") == 0
    assert press("forward one step") == 1
    assert press("last step") == NUM_STEPS - 1
    assert press("back one step") == NUM_STEPS - 2
    assert press("first step") == 0
    slider = page.get_by_role("slider", name="Step")
    slider.fill("3")
    assert shown_step(page) == 3 and slider.get_attribute("aria-valuetext") == "step 3 of 0 to 4"
    timeline = page.locator(".samples canvas").nth(VIEWS.index("timeline"))
    width = timeline.bounding_box()["width"]
    timeline.click(position={"x": 1.5 / NUM_STEPS * width, "y": 30})
    assert shown_step(page) == 1


def test_playing_goes_on_and_around_until_paused(page):
    page.get_by_role("combobox", name="speed").select_option("8")
    page.get_by_role("button", name="last step").click()
    page.get_by_role("button", name="play").click()
    page.wait_for_function("document.querySelector('.step b').textContent == '0'")
    page.wait_for_function("document.querySelector('.step b').textContent == '3'")
    page.get_by_role("button", name="pause").click()
    step = shown_step(page)
    page.wait_for_timeout(400)
    assert shown_step(page) == step


def test_keys(page):
    def press(key):
        page.keyboard.press(key)
        return shown_step(page)

    assert [press(key) for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight",
                                   "Home", "ArrowLeft")] == [1, 2, 1, 4, 4, 0, 0]
    page.keyboard.press("Shift+ArrowRight")
    assert shown_sample(page) == (UNALTERED, 1)
    page.keyboard.press("Shift+ArrowLeft")
    assert shown_sample(page) == (UNALTERED, 0)
    page.keyboard.press("Space")
    page.wait_for_function("document.querySelector('.step b').textContent != '0'")
    page.keyboard.press("Space")
    assert page.get_by_role("button", name="play").count() == 1
    page.get_by_role("button", name="first step").click()
    page.get_by_role("textbox", name="Notes").click()
    page.keyboard.type("a b")
    assert press("ArrowLeft") == 0 and press("Home") == 0 and press("ArrowRight") == 0
    assert page.get_by_role("textbox", name="Notes").input_value() == "a b"


def test_a_step_is_spoken_but_not_while_playing(page):
    spoken = page.locator("p.hidden[aria-live]")
    page.get_by_role("button", name="forward one step").click()
    assert spoken.inner_text().startswith(f"{UNALTERED}/0, step 1: agent's action ")
    page.get_by_role("button", name="play").click()
    assert spoken.inner_text() == ""
    page.get_by_role("button", name="pause").click()


def test_saliency_types(page, run):
    chosen = chooser(page, "Saliency")
    assert [text.split(" (")[0] for text in chosen.locator("option").all_text_contents()] == \
        list(TITLES)
    page.locator(".picker input").fill("7")
    page.locator(".picker input").press("Enter")
    for index, name in enumerate(TYPES):
        chosen.select_option(index=index)
        assert colour(page, "saliency")[2] == pytest.approx(80 + 50 * index, abs=8)
        gradients = coordinate_gradients(run.gradients[name][7, 0])
        np.testing.assert_allclose(table(page)[1], gradients, rtol=0.06)
        assert page.get_by_text(f"saliency read out at step {READ_AT}").is_visible()
        assert f"Saliency of {TITLES[index]} at step 0, read at step 2" in label(page, "saliency")


def test_a_missing_saliency_type_is_said_and_coloured_grey(page, run):
    chooser(page, "Saliency").select_option(index=TYPES.index(LACKING[1]))
    for sample in (LACKING[0] - 1, LACKING[0], LACKING[0] + 1):
        page.locator(".picker input").fill(str(sample))
        page.locator(".picker input").press("Enter")
        lacks = sample == LACKING[0]
        said = "No saliency of most likely action was computed for this sample."
        page.wait_for_selector(SHOWN)
        assert (label(page, "saliency") == said) == lacks
        assert np.isnan(table(page)[1]).all() == lacks
        # The observation is shown all the same.
        assert colour(page, "observation")[0] == pytest.approx(15 * sample, abs=8)


def test_bars_have_the_colour_and_length_of_their_numbers(page, run, step=1):
    """Blue where the gradient is above 0, red below it; above the axis for positive coordinates."""
    page.locator(".picker input").fill("2")
    page.locator(".picker input").press("Enter")
    page.get_by_role("slider", name="Step").fill(str(step))
    page.wait_for_selector(SHOWN)
    coordinates = run.coordinates[2, step]
    gradients = coordinate_gradients(run.gradients["value"][2])
    full, gradients = np.abs(gradients).max(), gradients[step]
    clear = np.flatnonzero(np.abs(gradients) > 0.2 * full)
    assert len(clear)
    for ic in clear.tolist():
        columns = page.evaluate("""([index, ic]) => {
            const canvas = document.querySelectorAll('.samples canvas')[index]
            const ratio = devicePixelRatio
            const [left, right] = [40 * ratio, canvas.width - 8 * ratio]
            const x = Math.floor(left + (ic + 0.5) / 3 * (right - left)) + 12
            const bottom = canvas.height - 66 * ratio
            const data = canvas.getContext('2d').getImageData(x, 8, 1, bottom - 8).data
            return Array.from({ length: bottom - 8 }, (_, y) => [...data.slice(4 * y, 4 * y + 3)])
        }""", [VIEWS.index("components"), ic])
        pixels = np.array(columns, dtype=float)
        coloured = np.abs(pixels[:, 0] - pixels[:, 2]) > 25
        assert coloured.any()
        blue = (pixels[coloured, 2] > pixels[coloured, 0]).mean() > 0.5
        assert blue == (gradients[ic] > 0)
        middle = np.flatnonzero(coloured).mean()
        assert (middle < len(pixels) / 2) == (coordinates[ic] > 0)


def test_axes_and_the_current_point(page, run):
    chooser(page, "Horizontal axis").select_option("2")
    chooser(page, "Vertical axis").select_option("0")
    for sample, step in ((0, 0), (3, 4), (6, 2)):
        page.locator(".picker input").fill(str(sample))
        page.locator(".picker input").press("Enter")
        page.get_by_role("slider", name="Step").fill(str(step))
        page.wait_for_selector(SHOWN)
        here = run.coordinates[sample, step]
        said = re.fullmatch("Scatter plot: IC 2 is (.*), IC 0 is (.*)",
                            label(page, "states").replace("−", "-"))
        assert [float(value) for value in said.groups()] == pytest.approx(here[[2, 0]], rel=0.01)
        everything = np.concatenate([run.coordinates.reshape(-1, 3), run.recorded])
        low, high = everything.min(axis=0)[[2, 0]], everything.max(axis=0)[[2, 0]]
        pad = 0.04 * (high - low)
        share = (here[[2, 0]] - low + pad) / (high - low + 2 * pad)
        box = page.locator(".samples canvas").nth(VIEWS.index("states")).bounding_box()
        across = (40 + share[0] * (box["width"] - 48)) / box["width"]
        down = (box["height"] - 34 - share[1] * (box["height"] - 42)) / box["height"]
        assert colour(page, "states", across, down) == [0xb0, 0x4a, 0x00]


def view_of(run):
    """Smallest and largest coordinates of the plane's axes (2,)."""
    everything = np.concatenate([run.coordinates.reshape(-1, 3), run.recorded])[:, :2]
    return everything.min(axis=0), everything.max(axis=0)


def states_on_canvas(coordinates, low, high, box):
    """Where states (n, 2) are drawn, in pixels (n, 2)."""
    pad = 0.04 * (high - low)
    shares = (coordinates - low + pad) / (high - low + 2 * pad)
    return np.stack([40 + shares[:, 0] * (box["width"] - 48),
                     box["height"] - 34 - shares[:, 1] * (box["height"] - 42)], axis=1)


def test_a_click_on_a_state_goes_there_and_the_cloud_can_be_chosen(page, run):
    chooser(page, "States shown").select_option("simulated")
    low, high = view_of(run)
    canvas = page.locator(".samples canvas").nth(VIEWS.index("states"))
    box = canvas.bounding_box()
    flat = run.coordinates.reshape(-1, 3)[:, :2]
    places = states_on_canvas(flat, low, high, box)
    # A state that lies apart from all others.
    apart = np.linalg.norm(places[:, None] - places, axis=2) + 1e9 * np.eye(len(places))
    target = int(apart.min(axis=1).argmax())
    canvas.click(position={"x": float(places[target, 0]) + 2, "y": float(places[target, 1])})
    page.wait_for_selector(SHOWN)
    sample, step = divmod(target, NUM_STEPS)
    expected = (UNALTERED, sample) if sample < NUM_SAMPLES else (SWAPPED, sample - NUM_SAMPLES)
    assert (shown_sample(page), shown_step(page)) == (expected, step)

    def inked():
        return page.evaluate("""(index) => {
            const canvas = document.querySelectorAll('.samples canvas')[index]
            const ctx = canvas.getContext('2d')
            const { data } = ctx.getImageData(0, 0, canvas.width, canvas.height)
            return data.filter((value, i) => i % 4 === 0 && value < 200).length
        }""", VIEWS.index("states"))

    simulated = inked()
    chooser(page, "States shown").select_option("both")
    both = inked()
    chooser(page, "States shown").select_option("recorded")
    assert both > simulated and both > inked()


def test_a_recording_gives_frames_and_positions(browser, page, tmp_path, capsys):
    assert chooser(page, "Recorded states coloured by").count() == 0
    run = write_run(tmp_path / "run", with_recording=True)
    positions = run.positions
    assert export_panel.main(run.arguments("--output_dir", str(tmp_path / "panel"))) == 0
    with opened_page(browser, PanelFolder(tmp_path / "panel").page_file.as_uri()
                     + f"#sample={UNALTERED}/0", viewport={"width": 1400, "height": 900},
                     color_scheme="light") as opened:
        assert opened.title().startswith("a.pth · coinrun hard · ")
        recorded = opened.get_by_role("img", name="Recorded frame")
        for sample, step in ((0, 0), (2, 3), (8, 0), (8, 4)):
            go(opened, f"sample={UNALTERED}/{sample}&step={step}")
            at = START + sample + step  # of an episode of 43 frames
            shown = recorded.evaluate("""(canvas) => [...canvas.getContext('2d').getImageData(
                canvas.width / 2, canvas.height / 4, 1, 1).data].slice(0, 3)""")
            expected = [0, 5 * at, 200] if at < 43 else [0, 0, 0]  # nothing, as it has ended
            assert shown == pytest.approx(expected, abs=8), (sample, step)
        go(opened, f"sample={SWAPPED}/0&step=0")
        assert recorded.count() == 0  # its folder names no recording
        go(opened, f"sample={UNALTERED}/0&step=0")
        chooser(opened, "States shown").select_option("recorded")
        flat, (low, high) = run.recorded[:, :2], view_of(run)
        box = opened.locator(".samples canvas").nth(3).bounding_box()  # behind the recorded frame
        places = states_on_canvas(flat, low, high, box)
        apart = (np.linalg.norm(places[:, None] - places, axis=2)
                 + 1e9 * np.eye(len(places))).min(axis=1) > 6
        path = states_on_canvas(run.coordinates[0, :, :2], low, high, box)
        apart &= np.linalg.norm(places[:, None] - path, axis=2).min(axis=1) > 60
        shares = np.where(apart, positions[:, 1] / 10, np.nan)
        states = int(np.nanargmin(shares)), int(np.nanargmax(shares))

        def reddish():
            """Red minus blue of the two states, which have a low and a high y."""
            opened.wait_for_selector(SHOWN)
            opened.wait_for_timeout(200)
            found = [colour(opened, "components", *places[each] / (box["width"], box["height"]))
                     for each in states]
            return [red - blue for red, _, blue in found]

        assert np.abs(reddish()).max() < 40
        chooser(opened, "Recorded states coloured by").select_option("player_y")
        low_y, high_y = reddish()
        assert low_y > 60 and high_y < -60
        opened.wait_for_function("location.hash.includes('colouring=player_y')")
    (tmp_path / "other").mkdir()
    assert export_panel.main(run.arguments("--output_dir", str(tmp_path / "again"), "--data_dir",
                                           str(tmp_path / "other"))) == 2
    assert "is not the recording" in capsys.readouterr().err


def passing(run, filters, behaviour=None):
    """Which samples pass, worked out with numpy."""
    mask = np.ones(TOTAL, bool)
    if behaviour is not None:
        of_samples = np.full(TOTAL, -1)
        of_samples[:len(BEHAVIOURS)] = BEHAVIOURS
        mask &= of_samples == behaviour
    for ic, what, low, high, step in filters:
        array = run.coordinates if what == "coordinate" else coordinate_gradients(
            run.gradients[TYPES[TITLES.index(what.removeprefix("gradient of "))]])
        values = array[:, :, ic] if step == "any" else array[:, [step], ic]
        with np.errstate(invalid="ignore"):
            inside = ((values >= (-np.inf if low is None else low))
                      & (values <= (np.inf if high is None else high)))
        mask &= inside.any(axis=1)
    return np.flatnonzero(mask).tolist()


FILTERS = {
    "a coordinate at any step": [(0, "coordinate", 0.2, None, "any")],
    "a coordinate at a step": [(1, "coordinate", -0.5, 1.5, 3)],
    "at most": [(2, "coordinate", None, -0.8, 0)],
    "a gradient at any step": [(1, "gradient of value", 0.3, 0.9, "any")],
    "a gradient that a sample lacks": [(0, "gradient of most likely action", -100, 100, "any")],
    "no bounds of what a sample lacks": [(0, "gradient of most likely action", None, None, 1)],
    "a gradient behind the step that is read": [(0, "gradient of IC 1", 0.001, None, 4)],
    "two together": [(0, "coordinate", -0.3, 0.6, 1), (2, "gradient of value", 0, None, 2)],
}


def test_filters_leave_what_numpy_leaves(page, run):
    for filters in FILTERS.values():
        go(page, f"sample={UNALTERED}/0&unused={next(COUNTER)}")
        check_filters(page, run, filters)


def check_filters(page, run, filters):
    expected = passing(run, filters)
    assert len(expected) < TOTAL
    for each in filters:
        add_filter(page, *each)
    assert left(page) == len(expected)
    # Going on from sample to sample visits just those that are left.
    page.keyboard.press("Escape")
    visited = []
    page.locator("h1").click()
    following = page.get_by_role("button", name="next sample")
    if expected and expected[0] == 0:
        visited.append((UNALTERED, 0))
    while following.is_enabled():
        following.click()
        visited.append(shown_sample(page))
    assert visited == [(UNALTERED, i) if i < NUM_SAMPLES else (SWAPPED, i - NUM_SAMPLES)
                       for i in expected]
    if expected:
        page.get_by_role("button", name="Reset").click()
        assert left(page) == TOTAL


def test_behaviours_filter_and_count(page, run):
    chosen = chooser(page, "Behaviour")
    assert chosen.locator("option").all_text_contents() == [
        "any", f"none ({1 + TOTAL - len(BEHAVIOURS)})", "0 (2)", "2 (3)"]
    chosen.select_option("2")
    assert left(page) == 3
    add_filter(page, 0, "coordinate", 0, None, 2)
    assert left(page) == len(passing(run, [(0, "coordinate", 0, None, 2)], behaviour=2))
    page.get_by_role("button", name="remove filter 1").click()
    assert left(page) == 3
    page.get_by_role("button", name="Reset").click()
    assert left(page) == TOTAL and chosen.input_value() == ""


def test_an_empty_result_is_said_and_can_be_undone(page):
    before = colour(page, "observation")
    add_filter(page, 0, "coordinate", 1000, None)
    assert left(page) == 0
    assert page.get_by_text("No sample passes; widen or reset the filters.").is_visible()
    assert page.get_by_text(f"0 of {TOTAL} samples pass the filters").is_visible()
    assert page.get_by_text("does not pass the filters").is_visible()
    assert page.get_by_text("no samples").count() == 3
    assert page.get_by_role("button", name="next sample").is_disabled()
    assert colour(page, "observation") == before
    page.get_by_role("button", name="forward one step").click()
    assert shown_step(page) == 1
    page.get_by_role("button", name="Reset").click()
    assert left(page) == TOTAL
    assert page.get_by_role("button", name="next sample").is_enabled()


@pytest.mark.parametrize(("ic", "step"), [(0, READ_AT), (2, 4), (1, "any")])
def test_extremes_are_those_of_numpy(page, run, ic, step):
    section = page.locator("section", has=page.get_by_role("heading", name="Extremes"))
    section.get_by_role("combobox", name="IC").select_option(str(ic))
    section.get_by_role("combobox", name="at step").select_option(str(step))
    values = run.coordinates[:, :, ic] if step == "any" else run.coordinates[:, [step], ic]
    highest, lowest = values.max(axis=1), values.min(axis=1)
    middles = np.sort(values, axis=1)[:, (values.shape[1] - 1) // 2]
    for title, order in (("Highest", np.argsort(-highest, kind="stable")),
                         ("Median", np.argsort(np.abs(middles - np.median(middles)),
                                                 kind="stable")),
                         ("Lowest", np.argsort(lowest, kind="stable"))):
        items = section.get_by_role("list", name=f"{title} in IC {ic}").get_by_role("button").all()
        names = [each.locator("span").first.inner_text() for each in items]
        assert names == [f"{UNALTERED}/{i}" if i < NUM_SAMPLES else f"{SWAPPED}/{i - NUM_SAMPLES}"
                         for i in order[:-(-TOTAL // 3)]]
    items[0].click()
    sample = int(lowest.argmin())
    assert shown_sample(page) == ((UNALTERED, sample) if sample < NUM_SAMPLES
                                  else (SWAPPED, sample - NUM_SAMPLES))
    expected = run.coordinates[sample, :, ic].argmin() if step == "any" else step
    assert shown_step(page) == expected


def test_extremes_and_histograms_are_of_the_samples_left(page, run):
    add_filter(page, 0, "coordinate", 0.2, None)
    expected = passing(run, [(0, "coordinate", 0.2, None, "any")])
    items = page.get_by_role("list", name="Lowest in IC 0").get_by_role("button")
    assert items.count() == -(-len(expected) // 3)


def test_histograms(page, run):
    everything = np.concatenate([run.coordinates.reshape(-1, 3), run.recorded])
    for ic in range(3):
        button = page.get_by_role("button", name=re.compile(f"^IC {ic}, from"))
        numbers = re.findall(r"-?[\d.]+", button.get_attribute("aria-label").replace("−", "-"))[1:]
        low, high = everything[:, ic].min(), everything[:, ic].max()
        assert [float(each) for each in numbers] == pytest.approx(
            [low, high, run.coordinates[0, 0, ic]], rel=0.01)
        counts, _ = np.histogram(run.coordinates[:, :, ic], 48, (low, high))
        heights = np.array(button.locator("canvas").evaluate("""(canvas) => {
            const ctx = canvas.getContext('2d')
            const { data } = ctx.getImageData(0, 0, canvas.width, canvas.height)
            return Array.from({ length: 48 }, (_, bin) => {
                const x = Math.floor((bin + 0.35) * canvas.width / 48)
                let tall = 0
                for (let y = 0; y < canvas.height; y++) {
                    const at = 4 * (y * canvas.width + x)
                    if (data[at + 3] > 100 && data[at] < 100) tall++
                }
                return tall
            })
        }"""))
        mark = int((run.coordinates[0, 0, ic] - low) / (high - low) * 48)
        clear = [bin for bin in range(48) if abs(bin - mark) > 1]
        np.testing.assert_allclose(heights[clear], counts[clear] / counts.max() * 42, atol=1.6)
        button.click()
        assert button.get_attribute("aria-pressed") == "true"
        assert page.get_by_role("list", name=f"Highest in IC {ic}").is_visible()


def test_every_view_and_part_is_explained(page):
    for title in ("Imagined frame", "Saliency: value", "Hidden states", "Independent components"):
        figure = page.locator("figure", has=page.get_by_text(title, exact=True))
        text = figure.locator("figcaption p")
        assert not text.is_visible()
        figure.locator("summary").first.click()
        assert text.is_visible() and len(text.inner_text()) > 100
    for title in ("Filters", "Extremes", "Histograms", "Notes and sharing"):
        section = page.locator("section", has=page.get_by_role("heading", name=title))
        assert len(section.locator(".why").first.inner_text()) > 40


def test_two_side_by_side_are_altered_and_unaltered_and_in_step(page, run):
    page.locator(".picker input").fill("2")
    page.locator(".picker input").press("Enter")
    compare = page.get_by_role("button", name="Compare two samples")
    compare.click()
    assert shown_sample(page, 0) == (UNALTERED, 2) and shown_sample(page, 1) == (SWAPPED, 2)
    page.get_by_role("button", name="last step").click()
    for row, place in ((0, 2), (1, NUM_SAMPLES + 2)):
        assert float(facts(page, row)["Value"]) == pytest.approx(run.samples.values[place, 4],
                                                                 abs=0.01)
        assert colour(page, "observation", row=row)[:2] == pytest.approx([15 * place, 200], abs=8)
    boxes = [page.locator(".samples > section").nth(row).bounding_box() for row in (0, 1)]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]
    page.get_by_role("button", name="next second sample").click()
    assert shown_sample(page, 1) == (SWAPPED, 3) and shown_sample(page, 0) == (UNALTERED, 2)
    page.locator(".picker").nth(1).get_by_role("combobox").select_option(UNALTERED)
    assert shown_sample(page, 1) == (UNALTERED, 3)
    compare.click()
    assert page.locator(".picker").count() == 1


def test_a_number_that_is_not_there_is_said(page):
    page.locator(".picker input").fill("77")
    page.locator(".picker input").press("Enter")
    assert page.get_by_role("alert").inner_text() == "There is no sample 77 here."
    page.wait_for_url("**sample=informed_init%2F0**")


def all_that_is_chosen(page):
    return page.evaluate("""() => [...document.querySelectorAll('select, input, textarea')].map(
        (each) => each.value).concat(document.querySelector('.step b').textContent,
        document.querySelectorAll('.picker').length, document.querySelector('.count').textContent,
        document.querySelector('[aria-pressed=true]')?.textContent.trim())""")


NOTES = "<b>50 % of\nIC 1</b> & \"more\" # + 日本"


def test_the_address_holds_the_whole_view(browser, page):
    page.locator(".picker input").fill("3")
    page.locator(".picker input").press("Enter")
    page.get_by_role("button", name="Compare two samples").click()
    page.get_by_role("button", name="last step").click()
    chooser(page, "Saliency").select_option(index=2)
    chooser(page, "Horizontal axis").select_option("2")
    chooser(page, "Vertical axis").select_option("1")
    chooser(page, "States shown").select_option("recorded")
    page.get_by_role("combobox", name="speed").select_option("2")
    page.get_by_role("button", name=re.compile("^IC 1, from")).click()
    page.locator(".controls").get_by_role("combobox", name="at step").select_option("any")
    chooser(page, "Behaviour").select_option("2")
    add_filter(page, 2, "gradient of value, without environment gradients", -1.5, 0.25, 1)
    add_filter(page, 1, "coordinate", None, 3e-2)
    page.get_by_role("textbox", name="Notes").fill(NOTES)
    page.wait_for_function("location.hash.includes('notes=')")
    page.wait_for_timeout(300)
    chosen = all_that_is_chosen(page)
    assert unquote(parse_qs(urlsplit(page.url).fragment)["notes"][0]) == unquote(NOTES)
    with opened_page(browser, page.url) as other:
        assert all_that_is_chosen(other) == chosen
        assert other.evaluate("location.hash") == page.evaluate("location.hash")
        other.evaluate(f"location.hash = 'sample={UNALTERED}/1&step=1'")
        other.wait_for_function("document.querySelector('.step b').textContent == '1'")
        assert shown_sample(other) == (UNALTERED, 1) and left(other) == TOTAL


def test_an_address_of_another_panel_shows_what_fits(browser, address, run):
    strange = ("#sample=gone/3&beside=x&step=99&saliency=__proto__&x=55&y=-1&ic=a&at=1e9&cloud=?"
               "&speed=1000&behaviour=x&filter=0,a,,any,coordinate&filter=77,,,any,coordinate"
               "&filter=0,1,2,any,gradient%20gone&filter=,&notes=%")
    values = run.samples.values[:NUM_SAMPLES]
    with_all = [sample for sample in range(NUM_SAMPLES) if sample != LACKING[0]]
    start = max(with_all, key=lambda sample: np.ptp(values[sample]))  # where the panel opens
    with opened_page(browser, address + strange) as page:
        assert shown_sample(page) == (UNALTERED, start) and shown_step(page) == 0
        assert page.locator("li[aria-label^=filter]").count() == 1  # the first, without its bound
        assert left(page) == TOTAL


def test_hostile_names_are_text(page):
    assert page.get_by_role("heading", level=1).text_content().endswith(f" · {NAME}")
    assert page.title().split()[-len(NAME.split()):] == NAME.split()
    options = page.locator(".picker select option").all_text_contents()
    assert options == [UNALTERED, SWAPPED]
    page.locator(".picker select").select_option(SWAPPED)
    page.get_by_role("textbox", name="Notes").fill("<img src=x onerror='window.owned=1'>")
    assert shown_sample(page) == (SWAPPED, 0)
    page.wait_for_timeout(300)
    page.reload()
    page.wait_for_selector(SHOWN)
    assert shown_sample(page) == (SWAPPED, 0)  # the name survives the address
    assert page.evaluate("window.owned") is None
    assert page.locator("img, h1 *, i, b:not(.step b)").count() == 0


def test_a_video_holds_every_step(page, tmp_path, run):
    page.get_by_role("combobox", name="speed").select_option("8")
    page.get_by_role("button", name="Compare two samples").click()
    page.wait_for_selector(SHOWN)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save a video").click()
    assert "in your downloads" in page.locator("output").all_inner_texts()[-1]
    suggested = download.value.suggested_filename
    assert re.fullmatch(r"informed_init_0_beside_informed_init_swapped[\w-]*_0\.mp4", suggested)
    download.value.save_as(tmp_path / suggested)
    with av.open(str(tmp_path / suggested)) as container:
        frames = list(container.decode(video=0))
        assert container.duration / av.time_base == pytest.approx(NUM_STEPS / 8, abs=0.01)
    times = [frame.time for frame in frames]
    np.testing.assert_allclose(times, np.arange(NUM_STEPS) / 8, atol=1e-3)
    pictures = [frame.to_ndarray(format="rgb24") for frame in frames]
    height, width, _ = pictures[0].shape
    assert width > 1300 and height > 2 * 320
    # The observation becomes greener with every step, in both rows at once.
    greens = np.array([[picture[200, 160, 1], picture[200 + 364, 160, 1]] for picture in pictures],
                      int)
    assert (np.diff(greens, axis=0) > 25).all()


def test_a_damaged_sample_leaves_the_others_usable(browser, exported, tmp_path):
    _, folder = exported
    broken = PanelFolder(tmp_path / "pictures")
    shutil.copytree(folder.path, broken.path)
    broken.frames_file(0).unlink()
    page = browser.new_page()
    page.goto(f"{broken.page_file.as_uri()}#sample={UNALTERED}/0")
    page.wait_for_selector(SHOWN)
    page.get_by_role("button", name="next sample").click()
    assert colour(page, "observation")[0] == pytest.approx(15, abs=8)  # others go on
    page.close()
