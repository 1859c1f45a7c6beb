"""Controls, keys and the address of the attribution page in a real browser."""

import json
import re
import shutil
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from attribution_run import (
    NUM_FEATURES,
    NUM_STEPS,
    exported,
)
from attribution_view import (
    GAMMA,
    LAMBDA,
    MAP,
    RES,
    RIGHT,
    UNITS,
    VALUE,
    WIDE,
    Reference,
    parse_number,
    picture,
    pixels,
    row,
    said,
    show,
    table_of,
)
from page_data import read_script
from page_exports import HOSTILE_NAME as NAME
from page_exports import needs_browser
from PIL import Image

from attribution.page_files import FORMAT, AttributionPageFolder
from attribution.trajectories import (
    advantages_of,
)
from common.page_files import data_script
from tools.browser import SHOWN, opened_page, served

pytestmark = needs_browser


@pytest.fixture(scope="module")
def run(attribution_export):
    return attribution_export.run


@pytest.fixture(scope="module")
def folder(attribution_export):
    return AttributionPageFolder(attribution_export.page_file.parent)


@pytest.fixture(scope="module")
def address(folder):
    return folder.page_file.as_uri()


@pytest.fixture
def page(browser, address):
    with opened_page(browser, f"{address}#layer={MAP}&row=value", **WIDE) as context:
        yield context


@pytest.fixture(scope="module")
def reference(run, folder):
    return Reference(run, folder)


def test_rows_are_chosen_added_and_removed(page):
    assert page.locator(".row").count() == 1
    page.get_by_role("button", name="Add a row").click()
    chooser = page.get_by_role("combobox", name="output of row 2")
    assert chooser.locator("option:checked").inner_text() == RIGHT
    chooser.select_option(label="activation of the features")
    assert row(page, 1).get_attribute("aria-label") == "row 2: activation of the features"
    page.get_by_role("button", name="remove row 1").click()
    assert page.locator(".row").count() == 1
    assert row(page).get_attribute("aria-label") == "row 1: activation of the features"
    assert page.get_by_role("button", name="remove row 1").is_disabled()


def test_controls_change_the_pictures(page):
    show(page, "trajectory=1&frame=9")
    before = pixels(picture(page))

    def changed():
        nonlocal before
        page.wait_for_selector(SHOWN)
        now = pixels(picture(page))
        assert np.abs(now - before).max() > 3
        before = now

    page.get_by_role("slider", name="gain").fill("5")
    changed()
    page.get_by_role("slider", name="smoothing").fill("2")
    changed()
    page.get_by_role("checkbox", name="over the observation").uncheck()
    changed()
    page.get_by_role("checkbox", name="residual").check()
    changed()
    page.get_by_role("combobox", name="Palette").select_option("apart")
    changed()
    page.get_by_role("combobox", name="Pictures").select_option("signed")
    changed()
    assert row(page).locator(".views canvas").count() == 2
    page.wait_for_timeout(300)
    fragment = parse_qs(urlsplit(page.url).fragment)
    assert {name: fragment[name] for name in ("gain", "smoothing", "ground", "residual", "palette",
                                              "sign")} == {
        "gain": ["3.2"], "smoothing": ["2"], "ground": ["black"], "residual": ["shown"],
        "palette": ["apart"], "sign": ["signed"]}


def test_the_legend_isolates_features_while_pointed_at_and_for_good(page, reference):
    show(page, "trajectory=1&frame=9&smoothing=0")

    def drawn(on):
        expected = reference.picture("value", 0, 8, "positive", on=on, smoothing=0)
        return np.abs(pixels(picture(page)) - expected).max() <= 2

    everything = range(NUM_FEATURES)
    assert drawn(everything) and not drawn([1])
    items = page.locator("section[aria-labelledby=legend-title] li")
    items.nth(1).hover()
    assert drawn([1])
    page.mouse.move(700, 5)
    assert drawn(everything)
    page.get_by_role("button", name="feature 1 alone").click()
    page.get_by_role("button", name="feature 3 alone").click()
    page.mouse.move(700, 5)
    assert drawn([0, 2])
    page.get_by_role("button", name="residual alone").click()
    page.mouse.move(700, 5)
    assert drawn([0, 2, RES])
    page.get_by_role("button", name="Show all").click()
    page.mouse.move(700, 5)
    assert drawn(everything)


def test_buttons_and_slider_go_through_the_frames(page):
    show(page, "trajectory=2&frame=1")
    for name, expected in (("forward one frame", 2), ("last frame", NUM_STEPS),
                           ("forward one frame", NUM_STEPS), ("back one frame", NUM_STEPS - 1),
                           ("first frame", 1), ("back one frame", 1)):
        page.get_by_role("button", name=name).click()
        assert said(page) == (2, expected)
    page.get_by_role("slider", name="frame").fill("6")
    assert said(page) == (2, 7)


def test_playing_goes_both_ways_and_stops_at_the_ends(page):
    speed = page.get_by_role("spinbutton", name="frames a second")
    assert speed.input_value() == "12"
    speed.fill("100")
    speed.press("Enter")
    show(page, f"frame={NUM_STEPS - 3}&speed=100")
    page.get_by_role("button", name="play", exact=True).click()
    page.wait_for_function("document.querySelector('[aria-label=play]') !== null "
                           f"&& document.querySelector('.step b').textContent === '{NUM_STEPS}'")
    show(page, "frame=4&speed=100")
    page.get_by_role("button", name="play backwards").click()
    page.wait_for_function("document.querySelector('.step b').textContent === '1'")
    show(page, "frame=4&speed=0")
    page.get_by_role("button", name="play", exact=True).click()
    page.wait_for_timeout(200)
    assert said(page)[1] == 4
    page.get_by_role("button", name="pause").click()


def test_the_timeline_is_clicked_dragged_and_zoomed(page):
    show(page, f"trajectory=1&frame=50&window={NUM_STEPS * 2}")
    box = page.locator(".strip").bounding_box()
    middle = box["y"] + 20
    page.mouse.click(box["x"] + box["width"] * 30.5 / NUM_STEPS, middle)  # all is visible
    assert said(page) == (1, 31)
    show(page, "trajectory=1&frame=50&window=20")
    page.mouse.click(box["x"] + box["width"] * (0.5 + 4 / 20), middle)  # the mark is in the middle
    assert said(page) == (1, 54)
    page.mouse.move(box["x"] + box["width"] / 2, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * (0.5 + 10 / 20), middle, steps=4)
    page.mouse.up()
    assert said(page) == (1, 44)
    shown = page.get_by_role("spinbutton", name="Frames shown")
    page.mouse.wheel(0, 100)
    page.wait_for_timeout(100)
    assert int(shown.input_value()) == 25
    page.mouse.wheel(0, -100)
    page.wait_for_timeout(100)
    assert int(shown.input_value()) == 20


def test_curves_show_their_numbers_and_ranges(page, run):
    show(page, "trajectory=2&frame=12")
    chooser = page.get_by_role("combobox", name="Add a curve")
    chooser.select_option(label=VALUE)
    chooser.select_option(label=f"2 coins in {RIGHT}")
    page.wait_for_selector(SHOWN)
    label = page.locator(".strip canvas").get_attribute("aria-label")
    right = run.read("attributions", MAP, "log_prob_any_right", 1).totals[:, 1]
    value = run.read("attributions", MAP, "value", 1).output
    advantage = advantages_of(run.steps, 0.5, GAMMA, LAMBDA)[run.steps.bounds[1]:]
    parts = label.partition(": ")[2].split("; ")
    assert len(parts) == 3
    for part, title, of in zip(parts, ("advantage", VALUE, f"2 coins in {RIGHT}"),
                               (advantage, value, right)):
        assert part.startswith(title)
        here, low, high = map(parse_number, re.fullmatch(
            r"(\S+) of (\S+) to (\S+)", part.removeprefix(title).strip()).groups())
        np.testing.assert_allclose([here, low, high], [of[11], of.min(), of.max()], rtol=6e-3,
                                   atol=1e-4)
    page.get_by_role("button", name=re.compile(f"^{VALUE}")).click()
    assert VALUE not in page.locator(".strip canvas").get_attribute("aria-label")


def test_keys(page):
    show(page, "trajectory=1&frame=5")

    def pressed(key):
        page.keyboard.press(key)
        return said(page)

    assert pressed("ArrowRight") == (1, 6)
    assert pressed("ArrowLeft") == (1, 5)
    assert pressed("End") == (1, NUM_STEPS)
    assert pressed("Home") == (1, 1)
    assert pressed("Shift+ArrowRight") == (2, 1)
    assert pressed("Shift+ArrowRight") == (2, 1)
    assert pressed("Shift+ArrowLeft") == (1, 1)
    layers = page.locator("input[name=layer]")
    page.keyboard.press("]")
    assert layers.nth(2).is_checked()
    page.keyboard.press("[")
    assert layers.nth(1).is_checked()
    page.keyboard.press("2")
    page.keyboard.press("0")
    page.keyboard.press("8")  # there is no feature 8
    assert page.locator("section[aria-labelledby=legend-title] [aria-pressed=true]"
                        ).all_inner_texts() == ["2", "0"]
    show(page, "trajectory=1&frame=60&speed=1")
    page.keyboard.press("Space")
    assert page.get_by_role("button", name="pause").count() == 1
    page.keyboard.press("ArrowLeft")  # while playing, the direction
    assert page.locator("[aria-label=play]").count() == 1 and said(page)[1] in (60, 61)
    assert page.locator("[aria-label='pause'][title='Play backwards']").count() == 1
    page.keyboard.press("Space")
    field = page.get_by_role("textbox", name="name of feature 3")
    field.focus()
    here = said(page)
    field.press("ArrowLeft")
    field.press_sequentially("1 2")
    assert said(page) == here and field.input_value() == "1 2"
    page.get_by_role("checkbox", name="keys").uncheck()
    page.locator("#main").focus()
    assert pressed("ArrowRight") == here


def test_the_address_holds_the_whole_view(browser, page, address):
    fragment = ("layer=block3&trajectory=2&frame=33&row=log_prob_any_right&row=value&gain=2&"
                "smoothing=0.5&sign=combined&chart=bars&palette=apart&window=64&speed=30&"
                "ground=black&residual=shown&alone=2%2C0&curve=value&curve=value%2C2&mark=1.7&"
                "beside=1&ahead=-3&keys=off&notes=a+%3Cb%3E")
    page.goto("about:blank")
    with opened_page(browser, f"{address}#{fragment}", **WIDE) as other:
        assert said(other) == (2, 33)
        other.wait_for_timeout(400)
        assert parse_qs(urlsplit(other.url).fragment) == parse_qs(fragment)
        other.get_by_role("button", name="forward one frame").click()
        other.wait_for_timeout(400)
        assert parse_qs(urlsplit(other.url).fragment)["frame"] == ["34"]
        assert other.get_by_role("textbox", name="Notes").input_value() == "a <b>"


@pytest.mark.parametrize(("query", "layer", "place"), [
    ("?layer=2&trajectory=2&frame=17", MAP, (2, 17)), ("?trajectory=2", UNITS, (2, 1)),
    (f"?layer={MAP}&frame=3", MAP, (1, 3)), ("?layer=9&trajectory=0&frame=x", UNITS, (1, 1))])
def test_the_published_address_is_understood(browser, folder, query, layer, place):
    with served(folder.path) as server, opened_page(browser, server + query, **WIDE) as page:
        assert said(page) == place
        assert page.locator("input[name=layer]:checked").evaluate(
            "each => each.closest('label').querySelector('span').textContent") == layer


def test_an_address_of_another_page_shows_what_fits(browser, address):
    fragment = ("layer=toString&trajectory=99&frame=5&row=toString&gain=-1&sign=constructor&"
                "alone=7,toString,-1,1&curve=x,1&curve=value,9&mark=9.9&mark=__proto__&window=x")
    with opened_page(browser, f"{address}#{fragment}", **WIDE) as page:
        assert said(page) == (1, 5)
        assert page.locator(".row").count() == 1
        page.wait_for_timeout(400)
        left = parse_qs(urlsplit(page.url).fragment)
        assert set(left) == {"layer", "trajectory", "frame", "row", "alone"}


def test_bookmarks_go_where_they_say(page, run, reference):
    scores = advantages_of(run.steps, 0.5, GAMMA, LAMBDA)
    lists = {each["title"]: each["steps"] for each in reference.manifest["bookmarks"]}
    assert reference.manifest["unit"]["off"]  # of an untrained agent, so the title says so
    worst = lists["Unexpected failures (unit uncertain)"]
    for trajectory, step, score in worst:
        rows = slice(*run.steps.bounds[trajectory:trajectory + 2])
        of_episode = run.steps.episode[rows] == run.steps.episode[rows.start + step]
        assert score == pytest.approx(scores[rows][of_episode].min())
    assert [each[2] for each in worst] == sorted(each[2] for each in worst)
    item = page.get_by_role("list", name="Unexpected failures").get_by_role("button").first
    assert item.inner_text().split("\n")[0] == (
        f"trajectory {worst[0][0] + 1}, frame {worst[0][1] + 1}")
    item.click()
    assert said(page) == (worst[0][0] + 1, worst[0][1] + 1)
    gaps = lists["Largest gaps"]
    assert gaps[0][2] == pytest.approx(max(
        run.read("attributions", UNITS, "value", number).gap.max() for number in (0, 1)))
    show(page, "trajectory=2&frame=8")
    page.get_by_role("button", name="Mark this frame").click()
    show_first = page.get_by_role("list", name="Yours").get_by_role("button")
    assert show_first.count() == 1
    page.wait_for_timeout(400)
    assert parse_qs(urlsplit(page.url).fragment)["mark"] == ["2.8"]
    page.get_by_role("button", name="Mark this frame").click()
    assert page.get_by_role("list", name="Yours").count() == 0


def test_examples_are_the_files(page, run, folder, reference):
    page.get_by_role("button", name="examples of feature 2").click()
    dialog = page.get_by_role("dialog")
    canvas = dialog.locator("canvas").first
    dialog.get_by_role("slider", name="number of patches").fill("2")
    page.wait_for_selector(SHOWN)
    canvas.hover()  # without transparency
    dialog.get_by_role("slider", name="zoom").evaluate(
        "each => { each.value = 1; each.dispatchEvent(new Event('input', { bubbles: true })) }")
    found = np.load(run.folder / "features" / MAP / "examples_spatial_1.npz")
    listed = np.load(run.folder / "features" / MAP / "observations.npy")
    box = canvas.bounding_box()
    drawn = pixels(canvas)

    def frame_at(i, j):
        episode, at = listed[found["observations"][1, i, j]]
        return run.recording.episode(int(episode)).frames[at].astype(float)

    def patch_at(i, j, shift=0):
        top, left, bottom, right = found["boxes"][1, i, j] + shift
        return frame_at(i, j)[top:bottom, left:right]

    inner = [(i, j) for i in range(1, 7) for j in range(1, 7)]
    for i, j in sorted(inner, key=lambda place: -patch_at(*place).std())[:3]:
        frame, patch = frame_at(i, j), patch_at(i, j)
        assert patch.shape == (8, 8, 3)
        ours = drawn[8 * i:8 * i + 8, 8 * j:8 * j + 8]
        error = np.abs(ours - patch).mean()  # both lossy and smoothed
        assert error < 12 and error < min(np.abs(ours - patch_at(i, j, shift)).mean()
                                          for shift in (-2, 2)) / 2
        page.mouse.move(box["x"] + box["width"] * (j + 0.5) / 8,
                        box["y"] + box["height"] * (i + 0.5) / 8)
        page.mouse.down()
        whole = pixels(canvas)
        page.mouse.up()
        assert np.abs(whole - frame).mean() < 6
        assert np.abs(pixels(canvas) - frame).mean() > 6


def test_the_popup_zooms_leads_to_frames_and_closes(page, reference):
    page.get_by_role("button", name="examples of feature 1").click()
    dialog = page.get_by_role("dialog")
    zoom = dialog.get_by_role("slider", name="zoom")
    dialog.locator("canvas").first.hover()
    page.mouse.wheel(0, 100)
    page.wait_for_timeout(50)
    assert float(zoom.input_value()) == pytest.approx(4.8)
    summaries = {each["output"]: each for each in reference.manifest["summaries"]
                 if each["layer"] == 1}
    means = dialog.locator("table td").all_inner_texts()
    assert [parse_number(text) for text in means] == pytest.approx(
        [summaries[0]["means"][0], summaries[1]["means"][0]], rel=6e-3)
    dialog.get_by_text(VALUE, exact=True).last.click()
    trajectory, step, total = summaries[0]["strongest"][0][0]
    dialog.locator("details[open] button").first.click()
    assert said(page) == (trajectory + 1, step + 1) and dialog.count() == 0
    value = abs(reference.run.read("attributions", MAP, "value", trajectory).totals[step, 0])
    assert abs(total) == pytest.approx(value)
    for close in (lambda: page.keyboard.press("Escape"), lambda: page.mouse.click(3, 3),
                  lambda: dialog.get_by_role("button", name="Close").click()):
        page.get_by_role("button", name="examples of feature 3").click()
        assert dialog.count() == 1
        close()
        assert dialog.count() == 0


def test_names_are_saved_and_come_back(page, run, tmp_path):
    page.get_by_role("textbox", name="name of feature 3").fill("<i>saws</i>")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save names").click()
    download.value.save_as(tmp_path / "labels.json")
    assert json.loads((tmp_path / "labels.json").read_text()) == {
        MAP: {"1": NAME[:60], "2": "coins", "3": "<i>saws</i>"}}
    again = exported(run, tmp_path / "page", "--labels", str(tmp_path / "labels.json"))
    assert read_script(again.data_file("manifest"))["labels"][1] == [
        NAME[:60], "coins", "<i>saws</i>", "", ""]


def test_a_rows_picture_is_saved(page, tmp_path):
    show(page, "trajectory=2&frame=4")
    with page.expect_download() as download:
        row(page).get_by_role("button", name="Save a picture").click()
    assert download.value.suggested_filename == "value_2_4.png"
    download.value.save_as(tmp_path / "row.png")
    assert Image.open(tmp_path / "row.png").size[0] > 600


def test_a_layer_of_units_has_bars_alone_and_outputs_it_lacks_say_so(page, run):
    show(page, f"layer={UNITS}&row=value&row=log_prob_any_right")
    assert row(page).locator("canvas").count() == 1
    found = run.read("attributions", UNITS, "value", 0)
    np.testing.assert_allclose(
        list(table_of(page).values()),
        [found.baseline[0], *found.totals[0], found.output[0]], rtol=6e-3, atol=1e-4)
    assert "nothing of this output" in row(page, 1).inner_text()
    assert page.locator("section[aria-labelledby=legend-title] canvas").count() == 0


def test_the_errors_and_the_unit_are_said(page, run, reference):
    gaps = np.concatenate([run.read("attributions", MAP, "value", each).gap for each in (0, 1)])
    cells = page.locator("section[aria-labelledby=checks-title] tbody tr").first.locator("td")
    *texts, above = cells.all_inner_texts()
    for text, share in zip(texts, (np.median(gaps), np.quantile(gaps, 0.99)), strict=True):
        if share < 1e-4:
            assert text == "< 0.01 %"
        else:
            assert parse_number(text.removesuffix(" %")) == pytest.approx(100 * share, rel=6e-3)
    assert above == f"{(gaps > 0.05).sum()} of {len(gaps)}"
    assert reference.manifest["unit"]["off"]  # of an untrained agent
    doubt = "do not seem to have the same unit"
    assert page.locator("section[aria-labelledby=checks-title]").get_by_text(doubt).count() == 1
    assert page.get_by_text(doubt).count() == 3  # and at both lists of advantages


def test_the_frame_is_spoken(page):
    spoken = page.locator("[aria-live=polite]").last.text_content()
    assert spoken.startswith("trajectory 1, frame 1: new episode, next action")


def test_the_name_of_a_feature_is_text(page):
    assert page.get_by_role("textbox", name="name of feature 1").input_value() == NAME[:60]
    assert page.evaluate("window.owned") is None


def test_missing_and_other_data_is_said(browser, folder, tmp_path):
    copy = tmp_path / "page"
    shutil.copytree(folder.path, copy)
    (copy / "data" / "attribution_01_00_00000.js").unlink()
    browser_page = browser.new_page()
    browser_page.goto(f"{(copy / 'index.html').as_uri()}#layer={MAP}")
    browser_page.wait_for_selector(SHOWN)
    message = browser_page.get_by_role("alert").inner_text()
    assert "attribution_01_00_00000.js is missing or damaged" in message
    manifest = copy / "data" / "manifest.js"
    other = {**read_script(manifest), "format": FORMAT + 1}
    manifest.write_bytes(data_script(manifest, other))
    browser_page.reload()
    assert "another version" in browser_page.get_by_role("alert").inner_text()
    browser_page.close()
