"""The interpretability panel in a real browser, over a real export of a small run."""

import dataclasses
import itertools
import re
import shutil
from urllib.parse import parse_qs, urlencode

import av
import numpy as np
import pytest
from page_exports import needs_browser
from page_view import colours, facts, fragment_of, go, image_of, read_script
from panel_run import (
    BEHAVIOURS,
    DREAMS,
    EXAMPLES,
    LACKING,
    NUM_SAMPLES,
    NUM_STEPS,
    NUM_SWAPPED,
    READ_AT,
    RED_OF_MAPS,
    START,
    SWAPPED,
    TITLES,
    TYPES,
    UNALTERED,
    coordinate_gradients,
    sample_folder,
    write_decisions,
    write_features,
    write_run,
)

import export_panel
from analysis.panel_files import PanelFolder
from common.files import save_json
from common.game_constants import ACTION_LABELS, ACTION_NAMES
from envs.objects import action_labels
from generative.sample_files import SampleOrigin
from tools.browser import SHOWN, opened_page

pytestmark = [needs_browser, pytest.mark.slow]

TOTAL = NUM_SAMPLES + NUM_SWAPPED
COUNTER = itertools.count()
WIDE = {"viewport": {"width": 1400, "height": 900}, "color_scheme": "light"}
NAMES = [*((UNALTERED, i) for i in range(NUM_SAMPLES)), *((SWAPPED, i) for i in range(NUM_SWAPPED))]
VIEWS = {"imagined": "Imagined frame", "recorded": "Recorded frame", "states": "Scatter plot",
         "components": "Bar chart", "timeline": "All "}  # beginnings of their labels


@pytest.fixture(scope="module")
def run(panel_export):
    return panel_export.run


@pytest.fixture(scope="module")
def address(panel_export):
    return panel_export.page_file.as_uri()


@pytest.fixture(scope="module")
def opened(browser, address):
    with opened_page(browser, address, **WIDE) as opened:
        yield opened


@pytest.fixture
def page(opened):
    """The page, shared by the tests of this module, at a new view of the first sample."""
    go(opened, f"sample={UNALTERED}/0&unused={next(COUNTER)}")
    return opened


def chooser(page, name):
    return page.get_by_role("combobox", name=name, exact=True)


def press(page, name):
    page.get_by_role("button", name=name, exact=True).click()


def pick(page, sample, step=0):
    page.locator(".picker input").fill(str(sample))
    page.locator(".picker input").press("Enter")
    page.get_by_role("slider", name="Step").fill(str(step))
    page.wait_for_selector(SHOWN)


def canvas_of(page, view, row=0):
    """Return the canvas of a view of a sample; the saliency view has no label of its own."""
    canvases = page.locator(".samples > section").nth(row).locator("canvas")
    if view == "saliency":
        return page.locator(".samples > section").nth(row).locator(
            "figure", has_text="Saliency").locator("canvas")
    return canvases.and_(page.locator(f"[aria-label^='{VIEWS[view]}']"))


def colour(page, view, row=0, across=0.5, down=0.5):
    """Return red, green and blue at a place in a view."""
    page.wait_for_selector(SHOWN)
    return colours(canvas_of(page, view, row), [(across, down)])[0]


def shown_sample(page, row=0):
    """Return the set and number of the shown sample."""
    group = page.locator(".picker").nth(row)
    return (group.locator("select").evaluate("each => each.selectedOptions[0].text"),
            int(group.locator("input").input_value()))


def shown_step(page):
    return int(page.locator(".step b").inner_text())


def table(page):
    """Return the coordinates and gradients in the table; NaN for a dash."""
    cells = page.locator(".table").first.locator("td").all_text_contents()
    values = [float(cell.replace("−", "-")) if cell != "–" else np.nan for cell in cells]
    return np.array(values).reshape(-1, 2).T


def count_left(page):
    """Return the number of samples that pass the filters according to the page."""
    page.wait_for_selector(SHOWN)
    text = page.locator(".count").inner_text()
    return 0 if text.startswith("No sample passes") else int(
        re.fullmatch(rf"(\d+) of {TOTAL} samples pass", text)[1])


def add_filter(page, ic, what, low=None, high=None, step="any"):
    press(page, "Add a filter")
    row = page.locator("li[aria-label^=filter]").last
    row.get_by_role("combobox", name="IC", exact=True).select_option(str(ic))
    row.get_by_role("combobox", name="Quantity").select_option(label=what)
    row.get_by_role("combobox", name="at step").select_option(str(step))
    for name, value in (("from", low), ("to", high)):
        if value is not None:
            row.get_by_role("spinbutton", name=name).fill(str(value))


def states_on_canvas(run, coordinates, box, axes=(0, 1)):
    """Return the positions of states (n, k) on the canvas, in pixels (n, 2)."""
    everything = np.concatenate([run.coordinates.reshape(-1, 3), run.recorded])
    low, high = everything.min(axis=0)[[*axes]], everything.max(axis=0)[[*axes]]
    pad = 0.04 * (high - low)
    shares = (np.atleast_2d(coordinates)[:, axes] - low + pad) / (high - low + 2 * pad)
    return np.stack([40 + shares[:, 0] * (box["width"] - 48),
                     box["height"] - 34 - shares[:, 1] * (box["height"] - 42)], axis=1)


def test_steps_show_their_numbers_and_images(page, run):
    pick(page, 3)
    for step in range(NUM_STEPS):
        found, samples = facts(page), run.samples
        assert float(found["Value"]) == pytest.approx(samples.values[3, step], abs=0.01)
        assert float(found["Reward"]) == pytest.approx(samples.rewards[3, step], abs=0.006)
        answer, share = samples.log_probs[3, step].argmax(), samples.log_probs[3, step].max()
        assert [found[name] for name in ("Terminal", "Action", "Previous action", "Behaviour")] == [
            f"{100 * samples.terminals[3, step]:.0f} %",
            # The sign of an action without a direction is its number.
            (f"{answer} " if answer >= 9 else "")
            + f"{action_labels('')[answer]} {100 * np.exp(share):.0f} %",
            action_labels("")[samples.actions[3, step]], str(BEHAVIOURS[3])]
        assert colour(page, "imagined")[:2] == pytest.approx([45, 50 * step], abs=8)
        assert colour(page, "saliency") == pytest.approx([45, 50 * step, 80], abs=8)
        coordinates, gradients = table(page)
        np.testing.assert_allclose(coordinates, run.coordinates[3, step], rtol=0.006, atol=1e-6)
        np.testing.assert_allclose(
            gradients, coordinate_gradients(run.gradients["value"][3, step]), rtol=0.06)
        press(page, "forward one step")
    assert shown_step(page) == NUM_STEPS - 1  # the last step remains


def test_arrows_point_where_the_actions_go(page, run):
    angles = {"right": 0, "upright": -45, "up": -90, "upleft": -135, "left": 180, "downleft": 135,
              "down": 90, "downright": 45}
    for sample, step in itertools.product(range(3), range(NUM_STEPS)):
        go(page, f"sample={UNALTERED}/{sample}&step={step}")
        name = ACTION_NAMES[run.samples.actions[sample, step]]
        path = page.locator(".facts dd").nth(1).locator("path")
        if name == "null":
            assert path.count() == 0
            continue
        angle = float(re.search(r"rotate\((.*)\)", path.get_attribute("transform"))[1])
        assert (angle - angles[name]) % 360 == 0


def test_steps_are_gone_through_and_spoken(page):
    for name, step in (("back one step", 0), ("forward one step", 1), ("last step", 4),
                       ("back one step", 3), ("first step", 0)):
        press(page, name)
        assert shown_step(page) == step, name
    slider = page.get_by_role("slider", name="Step")
    slider.fill("3")
    assert shown_step(page) == 3 and slider.get_attribute("aria-valuetext") == "step 3 of 0 to 4"
    timeline = canvas_of(page, "timeline")
    timeline.click(position={"x": 1.5 / NUM_STEPS * timeline.bounding_box()["width"], "y": 30})
    spoken = page.locator("p.hidden[aria-live]")
    assert spoken.inner_text().startswith(f"{UNALTERED}/0, step 1: agent's action ")
    for key, step in (("ArrowRight", 2), ("ArrowLeft", 1), ("End", 4), ("ArrowRight", 4),
                      ("Home", 0), ("ArrowLeft", 0)):
        page.keyboard.press(key)
        assert shown_step(page) == step, key
    for key, sample in (("Shift+ArrowRight", 1), ("Shift+ArrowLeft", 0)):
        page.keyboard.press(key)
        assert shown_sample(page) == (UNALTERED, sample)
    go(page, f"sample={UNALTERED}/0&step=4&speed=8")
    page.keyboard.press("Space")  # plays to the end and starts over
    page.wait_for_function("document.querySelector('.step b').textContent == '0'")
    assert spoken.inner_text() == ""
    page.keyboard.press("Space")
    assert page.get_by_role("button", name="play").count() == 1


def test_saliency_types(page, run):
    chosen = chooser(page, "Saliency")
    assert chosen.locator("option").all_text_contents() == list(TITLES)
    pick(page, 7)
    for index, name in enumerate(TYPES):
        chosen.select_option(index=index)
        assert colour(page, "saliency")[2] == pytest.approx(80 + 50 * index, abs=8)
        gradients = coordinate_gradients(run.gradients[name][7, 0])
        np.testing.assert_allclose(table(page)[1], gradients, rtol=0.06)
        assert page.get_by_text(f"saliency read out at step {READ_AT}").is_visible()
    strip = page.locator(".images canvas").last
    box = strip.bounding_box()
    across = 60 + (box["width"] - 60) * (np.array([READ_AT, READ_AT + 1]) + 0.5) / NUM_STEPS
    before, after = colours(strip, np.stack([
        across / box["width"], np.full(2, 96 / box["height"])], axis=1))
    assert np.abs(before - after).max() > 60 and np.ptp(after) < 60  # hatched, no empty picture
    chosen.select_option(index=TYPES.index(LACKING[1]))
    for sample in (LACKING[0] - 1, LACKING[0]):
        pick(page, sample)
        lacks = sample == LACKING[0]
        text = "No saliency of most likely action was computed for this sample."
        assert (canvas_of(page, "saliency").get_attribute("aria-label") == text) == lacks
        assert np.isnan(table(page)[1]).all() == lacks
        # The frame is still shown.
        assert colour(page, "imagined")[0] == pytest.approx(15 * sample, abs=8)


def test_saliency_of_the_simulators_state(page):
    pick(page, 7, 1)
    chooser(page, "Saliency").select_option(index=1)
    chosen = chooser(page, "With respect to")
    for name, red in zip(("pixels", "canvas and scene", "memory"), (15 * 7, *RED_OF_MAPS)):
        chosen.select_option(label=name)
        assert colour(page, "saliency") == pytest.approx([red, 50, 130], abs=8)
        label = canvas_of(page, "saliency").get_attribute("aria-label")
        title = "most likely action" + ("" if name == "pixels" else f" ({name})")
        assert label.startswith(f"Saliency of {title} at step 1")
        assert ("blue raises, red lowers" in label) == (name == "pixels")
    go(page, urlencode({"sample": f"{SWAPPED}/0", "saliency": "value", "map": "memory"}))
    page.wait_for_selector(SHOWN)
    assert canvas_of(page, "saliency").get_attribute("aria-label") == (
        "This sample has no map of the simulator's memory.")
    chosen.select_option(label="pixels")
    assert colour(page, "saliency") == pytest.approx([15 * NUM_SAMPLES, 0, 80], abs=8)


def test_bars_have_the_colour_and_length_of_their_numbers(page, run, step=1):
    """Bars are blue for positive gradients and red for negative ones; their length is the value."""
    pick(page, 2, step)
    gradients = coordinate_gradients(run.gradients["value"][2])
    clear = np.flatnonzero(np.abs(gradients[step]) > 0.2 * np.abs(gradients).max())
    assert len(clear)
    image = image_of(canvas_of(page, "components"))
    left, right = 40, image.shape[1] - 8
    for ic in clear.tolist():
        across = int(left + (ic + 0.5) / 3 * (right - left)) + 12
        column = image[8:len(image) - 66, across]
        coloured = np.flatnonzero(np.abs(column[:, 0] - column[:, 2]) > 25)
        is_blue = (column[coloured, 2] > column[coloured, 0]).mean() > 0.5
        assert is_blue == (gradients[step, ic] > 0)
        assert (coloured.mean() < len(column) / 2) == (run.coordinates[2, step, ic] > 0)


def test_the_axis_of_the_bars_stays_while_stepping(page, run):
    chart = canvas_of(page, "components")
    full = 1.12 * np.abs(run.coordinates[0]).max()
    for step in range(NUM_STEPS):
        pick(page, 0, step)
        ic = int(np.abs(run.coordinates[0, step]).argmax())
        value = run.coordinates[0, step, ic]
        image = image_of(chart)
        across = int(40 + (ic + 0.5) / 3 * (image.shape[1] - 48)) + 12
        bottom = len(image) - 30 - 34
        end = bottom - (value + full) / (2 * full) * (bottom - 8)
        inward = 4 if value > 0 else -4
        empty = [[0, 0, 0], [226, 229, 233]]  # nothing, or a line of the grid
        outside, inside = (np.abs(image[int(at), across] - empty).max(axis=1).min()
                           for at in (end - inward, end + inward))
        assert outside < 3 and inside > 8, step


def test_axes_and_the_current_point(page, run):
    chooser(page, "Horizontal axis").select_option("2")
    chooser(page, "Vertical axis").select_option("0")
    for sample, step in ((0, 0), (3, 4), (6, 2)):
        pick(page, sample, step)
        here = run.coordinates[sample, step]
        canvas = canvas_of(page, "states")
        numbers = re.fullmatch("Scatter plot: IC 2 is (.*), IC 0 is (.*)",
                               canvas.get_attribute("aria-label").replace("−", "-"))
        assert [*map(float, numbers.groups())] == pytest.approx(here[[2, 0]], rel=0.01)
        box = canvas.bounding_box()
        ((x, y),) = states_on_canvas(run, here, box, (2, 0))
        assert colour(page, "states", 0, x / box["width"], y / box["height"]).tolist() == [
            0xb0, 0x4a, 0x00]


def test_a_click_on_a_state_goes_there_and_the_cloud_can_be_chosen(page, run):
    inked = {}
    for cloud in ("recorded", "both", "simulated"):
        chooser(page, "States shown").select_option(cloud)
        inked[cloud] = (image_of(canvas_of(page, "states"))[..., 0] < 200).sum()
    assert inked["both"] > max(inked["recorded"], inked["simulated"])
    canvas = canvas_of(page, "states")
    places = states_on_canvas(run, run.coordinates.reshape(-1, 3), canvas.bounding_box())
    # The state that is farthest from all others.
    apart = np.linalg.norm(places[:, None] - places, axis=2) + 1e9 * np.eye(len(places))
    target = int(apart.min(axis=1).argmax())
    canvas.click(position={"x": float(places[target, 0]) + 2, "y": float(places[target, 1])})
    page.wait_for_selector(SHOWN)
    sample, step = divmod(target, NUM_STEPS)
    assert (shown_sample(page), shown_step(page)) == (NAMES[sample], step)


def test_a_recording_gives_frames_and_positions(browser, page, tmp_path, capsys):
    assert chooser(page, "Recorded states coloured by").count() == 0
    run = write_run(tmp_path / "run", with_recording=True)
    assert export_panel.main(run.arguments("--output_dir", str(tmp_path / "panel"))) == 0
    with opened_page(browser, PanelFolder(tmp_path / "panel").page_file.as_uri(), **WIDE) as page:
        assert page.title().startswith("a · coinrun hard · ")
        for sample, step in ((0, 0), (2, 3), (7, 0)):
            go(page, f"sample={UNALTERED}/{sample}&step={step}")
            expected = [0, 5 * (START + sample + step), 200]
            assert colour(page, "recorded") == pytest.approx(expected, abs=8)
        # The last of 43 rows of the episode, its terminal row, is not shown.
        go(page, f"sample={UNALTERED}/7&step=1")
        assert page.get_by_role("img", name="The recorded episode has ended.").count() == 1
        strip = page.locator(".images canvas").last
        width = strip.bounding_box()["width"]
        across = (60 + (width - 60) * (np.array([0, 1, 4]) + 0.5) / NUM_STEPS) / width
        down = np.full(3, 90 / strip.bounding_box()["height"])
        drawn = colours(strip, np.stack([across, down], axis=1))
        assert (drawn[:, 2] > 150).tolist()[0] and drawn[0, 0] < 60  # recorded frames are blue
        assert np.abs(drawn[1:] - drawn[0]).max(axis=1).min() > 60  # hatched from step 1 on
        go(page, urlencode({"sample": f"{SWAPPED}/0", "step": 0}))
        assert canvas_of(page, "recorded").count() == 0  # its set has no recording
        go(page, f"sample={UNALTERED}/0&step=0&cloud=recorded")
        box = canvas_of(page, "states").bounding_box()
        places = states_on_canvas(run, run.recorded, box)
        path = states_on_canvas(run, run.coordinates[0], box)
        between = np.linalg.norm(places[:, None] - places, axis=2) + 1e9 * np.eye(len(places))
        apart = (between.min(axis=1) > 6) & (
            np.linalg.norm(places[:, None] - path, axis=2).min(axis=1) > 60)
        heights = np.where(apart, run.positions[:, 1], np.nan)
        shares = places[[np.nanargmin(heights), np.nanargmax(heights)]] / (box["width"],
                                                                           box["height"])

        def reddish():
            """Red minus blue of the isolated states with the lowest and the highest y."""
            page.wait_for_timeout(200)
            found = colours(canvas_of(page, "states"), shares)
            return found[:, 0] - found[:, 2]

        assert np.abs(reddish()).max() < 40
        chooser(page, "Recorded states coloured by").select_option("player_y")
        low_y, high_y = reddish()
        assert low_y > 60 and high_y < -60
        page.wait_for_function("location.hash.includes('colouring=player_y')")
    (tmp_path / "other").mkdir()
    assert export_panel.main(run.arguments("--output_dir", str(tmp_path / "again"), "--data_dir",
                                           str(tmp_path / "other"))) == 2
    assert "is not the recording" in capsys.readouterr().err


def passing(run, filters, behaviour=None):
    """Return the samples that pass, computed with numpy."""
    of_samples = np.array([*BEHAVIOURS, *[-1] * (TOTAL - len(BEHAVIOURS))])
    mask = np.ones(TOTAL, bool) if behaviour is None else of_samples == behaviour
    for ic, what, low, high, step in filters:
        array = run.coordinates if what == "coordinate" else coordinate_gradients(
            run.gradients[TYPES[TITLES.index(what.removeprefix("gradient of "))]])
        values = array[:, :, ic] if step == "any" else array[:, [step], ic]
        mask &= ((values >= (-np.inf if low is None else low))
                 & (values <= (np.inf if high is None else high))).any(axis=1)
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
    for name, filters in FILTERS.items():
        go(page, f"sample={UNALTERED}/0&unused={next(COUNTER)}")
        expected = passing(run, filters)
        assert len(expected) < TOTAL
        for each in filters:
            add_filter(page, *each)
        assert count_left(page) == len(expected), name
        # The button for the next sample visits exactly the samples that pass.
        visited = [(UNALTERED, 0)] if 0 in expected else []
        following = page.get_by_role("button", name="next sample")
        while following.is_enabled():
            following.click()
            visited.append(shown_sample(page))
        assert visited == [NAMES[sample] for sample in expected], name


def test_behaviours_filter_and_an_empty_result_is_said(page, run):
    chosen = chooser(page, "Behaviour")
    assert chosen.locator("option").all_text_contents() == [
        "any", f"none ({1 + TOTAL - len(BEHAVIOURS)})", "0 (2)", "2 (3)"]
    chosen.select_option("2")
    add_filter(page, 0, "coordinate", 0, None, 2)
    assert count_left(page) == len(passing(run, [(0, "coordinate", 0, None, 2)], behaviour=2))
    press(page, "remove filter 1")
    assert count_left(page) == 3
    add_filter(page, 0, "coordinate", 1000, None)
    assert count_left(page) == 0
    assert page.get_by_text("does not pass the filters").is_visible()
    assert page.get_by_text("no samples").count() == 3
    assert page.get_by_role("button", name="next sample").is_disabled()
    press(page, "Reset")
    assert count_left(page) == TOTAL and chosen.input_value() == ""


@pytest.mark.parametrize(("ic", "step"), [(0, READ_AT), (2, 4), (1, "any")])
def test_extremes_are_those_of_numpy(page, run, ic, step):
    section = page.locator("section", has=page.get_by_role("heading", name="Extremes"))
    section.get_by_role("combobox", name="IC").select_option(str(ic))
    section.get_by_role("combobox", name="at step").select_option(str(step))
    values = run.coordinates[:, :, ic] if step == "any" else run.coordinates[:, [step], ic]
    highest, lowest = values.max(axis=1), values.min(axis=1)
    middles = np.sort(values, axis=1)[:, (values.shape[1] - 1) // 2]
    orders = {"Highest": np.argsort(-highest, kind="stable")[:-(-TOTAL // 3)],
              "Lowest": np.argsort(lowest, kind="stable")[:-(-TOTAL // 3)]}
    near = np.argsort(np.abs(middles - np.median(middles)), kind="stable")
    orders["Median"] = near[~np.isin(near, np.concatenate([*orders.values()]))][:-(-TOTAL // 3)]
    for title in ("Highest", "Median", "Lowest"):
        order = orders[title]
        items = section.get_by_role("list", name=f"{title} in IC {ic}").get_by_role("button").all()
        assert [each.locator("span").first.inner_text() for each in items] == [
            "{}/{}".format(*NAMES[sample]) for sample in order]
        thumbnail = colours(items[0].locator("canvas"), [(0.5, 0.5)])[0]
        assert thumbnail[0] == pytest.approx(15 * order[0], abs=8)
    items[0].click()
    sample = int(lowest.argmin())
    expected = run.coordinates[sample, :, ic].argmin() if step == "any" else step
    assert (shown_sample(page), shown_step(page)) == (NAMES[sample], expected)


def test_histograms(page, run):
    everything = np.concatenate([run.coordinates.reshape(-1, 3), run.recorded])
    for ic in range(3):
        button = page.get_by_role("button", name=re.compile(f"^IC {ic}, from"))
        numbers = re.findall(r"-?[\d.]+", button.get_attribute("aria-label").replace("−", "-"))[1:]
        low, high = everything[:, ic].min(), everything[:, ic].max()
        here = run.coordinates[0, 0, ic]
        assert [*map(float, numbers)] == pytest.approx([low, high, here], rel=0.01)
        counts, _ = np.histogram(run.coordinates[:, :, ic], 48, (low, high))
        image = image_of(button.locator("canvas"))
        green = image[:, ((np.arange(48) + 0.35) * image.shape[1] / 48).astype(int)]
        heights = ((green[..., 0] < 100) & (green[..., 1] > 100)).sum(axis=0)
        mark = int((here - low) / (high - low) * 48)
        clear = np.abs(np.arange(48) - mark) > 1
        np.testing.assert_allclose(heights[clear], (counts / counts.max() * 42)[clear], atol=1.6)
        button.click()
        assert page.get_by_role("list", name=f"Highest in IC {ic}").is_visible()


def test_two_side_by_side_are_altered_and_unaltered_and_in_step(page, run):
    pick(page, 2)
    press(page, "Compare two samples")
    assert [shown_sample(page, row) for row in (0, 1)] == [(UNALTERED, 2), (SWAPPED, 2)]
    press(page, "last step")
    for row, place in ((0, 2), (1, NUM_SAMPLES + 2)):
        assert float(facts(page, row)["Value"]) == pytest.approx(run.samples.values[place, 4],
                                                                 abs=0.01)
        assert colour(page, "imagined", row)[:2] == pytest.approx([15 * place, 200], abs=8)
    press(page, "next second sample")
    page.locator(".picker").nth(1).get_by_role("combobox").select_option(UNALTERED)
    assert [shown_sample(page, row) for row in (0, 1)] == [(UNALTERED, 2), (UNALTERED, 3)]
    page.locator(".picker input").first.fill("77")
    page.locator(".picker input").first.press("Enter")
    assert page.get_by_role("alert").inner_text() == "There is no sample 77 here."
    press(page, "Compare two samples")
    assert page.locator(".picker").count() == 1


def test_samples_of_a_start_are_side_by_side(browser, page, tmp_path):
    """Actions have the names of the game: with those of all games, sample 4 is red."""
    assert page.get_by_role("heading", name="Samples of this start").count() == 0
    run = write_run(tmp_path / "run")
    samples = sample_folder(run)
    for number, world, action in ((1, 0, None), (4, 1, ACTION_LABELS[9])):
        save_json(samples.sample_folder(number) / "origin.json", dataclasses.asdict(
            SampleOrigin(1, manual_action=action, world=world, world_seed=7)))
    save_json(samples.settings_file, {**samples.settings(), "data_recording": {
        "env": {"env_name": "starpilot"}}})
    assert export_panel.main(run.arguments("--output_dir", str(tmp_path / "panel"))) == 0
    address = PanelFolder(tmp_path / "panel").page_file.as_uri()
    with opened_page(browser, f"{address}#sample={UNALTERED}/1&step=3", **WIDE) as page:
        section = page.locator("section[aria-labelledby=worlds-title]")
        items = section.get_by_role("button")
        assert [each.splitlines()[0].split("/")[1] for each in items.all_inner_texts()] == [
            "1, world 1", "4, world 2, fire"]
        place = colours(items.last.locator("canvas"), [(0.5, 0.5)])[0]
        assert place == pytest.approx([15 * 4, 50 * 3, 0], abs=10)
        items.last.click()
        assert shown_sample(page) == (UNALTERED, 4) and shown_step(page) == 3


def test_counterfactual_maps_are_not_called_gradients(browser, tmp_path):
    """Reds if the panel tells of a read-out, or colours and filters by gradients, which are 0."""
    run = write_run(tmp_path / "run")
    for path in (run.folder / UNALTERED).rglob("*value_without_env_grads*"):
        path.rename(path.with_name(path.name.replace("without_env_grads", "counterfactual")))
    folder = PanelFolder(tmp_path / "panel")
    assert export_panel.main(run.arguments("--output_dir", str(folder.path))) == 0
    view = urlencode({"sample": f"{UNALTERED}/0", "saliency": "value_counterfactual",
                      "step": READ_AT + 1})
    with opened_page(browser, f"{folder.page_file.as_uri()}#{view}", **WIDE) as page:
        assert page.get_by_text(f"maps of steps 0 to {READ_AT}").is_visible()
        assert not page.get_by_text("read-out of the saliency").count()
        chart = page.get_by_label("Saliency of value, counterfactual at step")
        assert "read at" not in chart.get_attribute("aria-label")
        page.get_by_text("Numbers", exact=True).click()
        rows = page.get_by_role("table").locator("tbody tr")
        assert [row.split()[-1] for row in rows.all_inner_texts()] == ["–"] * 3
        page.get_by_role("button", name="Add a filter").click()
        chosen = page.get_by_label("Quantity")
        assert chosen.locator("option").all_inner_texts() == [
            "coordinate", *(f"gradient of {title}" for title in TITLES[:3])]
        chosen.select_option(f"gradient of {TITLES[2]}")
        assert fragment_of(page)["filter"][0].endswith(f"gradient {TYPES[2]}")


def test_the_panel_opens_on_a_sample_that_survives(run, panel_export):
    start = read_script(panel_export.page_file.parent / "data" / "manifest.js")["start"]
    survives = (1 - run.samples.terminals).prod(axis=1) > 0.5
    complete = np.array([place < NUM_SAMPLES and place != LACKING[0] for place in range(TOTAL)])
    chosen = complete & survives if (complete & survives).any() else complete
    ranges = np.where(chosen, np.ptp(run.samples.values, axis=1), -1)
    assert start == ranges.argmax()


def test_features_have_a_page_each(browser, page, tmp_path):
    assert page.get_by_role("heading", name="Sparse features").count() == 0
    run = write_run(tmp_path / "run")
    assert export_panel.main(run.arguments(*write_features(run), *write_decisions(run),
                                           "--output_dir", str(tmp_path / "panel"))) == 0
    with opened_page(browser, PanelFolder(tmp_path / "panel").page_file.as_uri(), **WIDE) as page:
        listed = page.get_by_role("list", name="Sparse features").get_by_role("button")
        assert [text.split() for text in listed.all_inner_texts()] == [
            ["1", "not", "wall", "in", "view", "7"], ["2", "unnamed", "120"],
            ["3", "unnamed", "3"]]
        weights = [each.locator(".name").evaluate("each => getComputedStyle(each).fontWeight")
                   for each in listed.all()]
        assert weights == ["700", "400", "400"]

        def opened(number):
            """Return the text on the page of a feature."""
            page.wait_for_selector(SHOWN)
            text = page.get_by_role("group", name=f"Feature {number}").inner_text()
            return text.replace("−", "-").replace("\n", " ")

        text = opened(7)
        for fact in ("6.0 % of held-out states", "wall in view AUC 0.250 (0.200 to 0.300)",
                     "0.0200 (0.0100 to 0.0300) nats random directions: 0.00400",
                     "-30 (-40 to -20) points, claimed random directions: -5 to +10",
                     "Score 3.50 best recorded start: 2.50", "In the dream active",
                     "near the dream not active", "active near 50.0 %"):
            assert fact in text, fact
        examples = page.get_by_role("img", name="3 frames in which feature 7 is most active")
        box = examples.bounding_box()
        across = (72 + 148 * np.arange(3)) / box["width"]  # frames of 144 pixels, 4 apart
        shown = colours(examples, np.stack([across, [0.5] * 3], axis=1))
        assert np.abs(shown - EXAMPLES).max() < 8

        listed.nth(1).focus()
        page.keyboard.press("Enter")
        text = opened(120)
        assert "+1 (-2 to +4) points, not claimed" in text
        assert "No start was optimised for this feature." in text
        assert fragment_of(page)["feature"] == ["120"]

        # Fatal decisions
        failed = page.get_by_role("list", name="Failed episodes").get_by_role("button")
        assert [text.split() for text in failed.all_inner_texts()] == [
            ["enemy", "left", "wrong,", "3"], ["lava", "unavoidable"]]
        for number, words, seconds in (
                (5, "the agent chose null: 13 % of the continuations are saved. After right, 75 %",
                 3), (7, "No action in the measured states", 6)):
            group = page.get_by_role("group", name=f"Episode {number}")
            assert words in " ".join(group.inner_text().split())
            page.wait_for_function(
                "seconds => document.querySelector('video').duration === seconds", arg=seconds)
            failed.nth(1).press("Enter")
        assert fragment_of(page)["failure"] == ["7"]

        go(page, "feature=3")
        assert listed.nth(2).get_attribute("aria-pressed") == "true"
        text = opened(3)
        assert "It is active in no held-out frame." in text and "Best label none" in text
        dream = page.get_by_role("img", name="Dream of feature 3, 5 steps")
        across = (72 + 148 * np.arange(NUM_STEPS)) / dream.bounding_box()["width"]
        shown = colours(dream, np.stack([across, [0.5] * NUM_STEPS], axis=1))
        assert np.abs(shown[:, 0] - 15 * 2).max() < 8  # sample 2
        assert np.abs(shown[:, 1] - 50 * np.arange(NUM_STEPS)).max() < 8
        press(page, f"Show {DREAMS.rpartition('/')[2]}/2 in the panel above")
        assert (shown_sample(page), shown_step(page)) == (("penalty_1", 2), 3)
        dream.click(position={"x": 160, "y": 50})
        assert shown_step(page) == 1
        go(page, "feature=99")  # not in this panel, so the strongest feature is shown
        assert listed.nth(0).get_attribute("aria-pressed") == "true"


def test_the_address_holds_the_whole_view_and_what_does_not_fit_is_left_out(browser, address, run):
    whole = urlencode([
        ("sample", f"{UNALTERED}/3"), ("beside", f"{SWAPPED}/2"), ("step", 4),
        ("saliency", TYPES[2]), ("map", "memory"), ("x", 2), ("y", 1), ("ic", 1), ("at", 3),
        ("cloud", "recorded"), ("speed", 2), ("behaviour", 2),
        ("filter", f"2,-1.5,0.25,1,gradient {TYPES[3]}"), ("filter", "1,,0.03,any,coordinate"),
        ("notes", "<b>50 %\n</b> & \"more\" # + 日本")])
    with opened_page(browser, f"{address}#{whole}") as page:
        assert [shown_sample(page, row) for row in (0, 1)] == [(UNALTERED, 3), (SWAPPED, 2)]
        assert fragment_of(page) == parse_qs(whole)
    strange = ("#sample=gone/3&beside=x&step=99&saliency=__proto__&x=55&y=-1&ic=a&at=1e9&cloud=?"
               "&speed=1000&behaviour=x&filter=0,a,,any,coordinate&filter=77,,,any,coordinate"
               "&filter=0,1,2,any,gradient%20gone&filter=,&notes=")
    values = run.samples.values[:NUM_SAMPLES]
    with_all = [sample for sample in range(NUM_SAMPLES) if sample != LACKING[0]]
    start = max(with_all, key=lambda sample: np.ptp(values[sample]))  # where the panel opens
    with opened_page(browser, address + strange) as page:
        assert shown_sample(page) == (UNALTERED, start) and count_left(page) == TOTAL
        left = fragment_of(page)
        assert set(left) == {"sample", "step", "saliency", "x", "y", "ic", "filter"}
        assert left["step"] == ["0"] and left["filter"] == ["0,,,any,coordinate"]


def test_a_video_holds_every_step(page, tmp_path):
    go(page, urlencode({"sample": f"{UNALTERED}/0", "beside": f"{SWAPPED}/0", "speed": 8}))
    with page.expect_download() as download:
        press(page, "Save a video")
    suggested = download.value.suggested_filename
    assert re.fullmatch(r"informed_init_0_beside_informed_init_swapped[\w-]*_0\.mp4", suggested)
    download.value.save_as(tmp_path / suggested)
    with av.open(str(tmp_path / suggested)) as container:
        frames = list(container.decode(video=0))
        assert container.duration / av.time_base == pytest.approx(NUM_STEPS / 8, abs=0.01)
    np.testing.assert_allclose([each.time for each in frames], np.arange(NUM_STEPS) / 8, atol=1e-3)
    images = np.array([frame.to_ndarray(format="rgb24") for frame in frames], dtype=int)
    assert images.shape[2] > 1300 and images.shape[1] > 2 * 320
    # The frame becomes greener with every step, in both rows at once.
    assert (np.diff(images[:, [200, 200 + 364], 160, 1], axis=0) > 25).all()


def test_a_damaged_sample_leaves_the_others_usable(browser, panel_export, tmp_path):
    broken = PanelFolder(shutil.copytree(panel_export.page_file.parent, tmp_path / "panel"))
    broken.frames_file(0).unlink()
    page = browser.new_page()
    page.goto(f"{broken.page_file.as_uri()}#sample={UNALTERED}/0")
    page.wait_for_selector(SHOWN)
    press(page, "next sample")
    assert colour(page, "imagined")[0] == pytest.approx(15, abs=8)
    page.close()
