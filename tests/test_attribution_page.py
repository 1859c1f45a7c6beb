"""The attribution page in a real browser: its images and numbers are those of the files."""

import itertools
import json
import re
import shutil
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import attribution_view as view
import av
import numpy as np
import pandas as pd
import pytest
from attribution_run import LAGS, NUM_FEATURES, NUM_STEPS, exported, hues, write_edited
from attribution_view import (
    MAP,
    RES,
    RIGHT,
    UNITS,
    VALUE,
    WIDE,
    Reference,
    facts,
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

from attribution import page as attribution_page
from attribution.checking.object_scores import OBJECT_FILES
from attribution.failures.causes import recorded_causes
from attribution.page_contents import MIN_STABILITY
from attribution.page_files import FORMAT, AttributionPageFolder
from attribution.results import INPUT, read_features
from attribution.trajectories import advantages_of
from common.game_constants import ACTION_DIRECTIONS, ACTION_LABELS
from common.page_files import data_script
from common.results import ResultStore
from tools.browser import SHOWN, opened_page, served

pytestmark = needs_browser
COUNTER = itertools.count()


@pytest.fixture(scope="module")
def run(attribution_export):
    return attribution_export.run


@pytest.fixture(scope="module")
def folder(attribution_export):
    return AttributionPageFolder(attribution_export.page_file.parent)


@pytest.fixture(scope="module")
def reference(run, folder):
    return Reference(run, folder)


@pytest.fixture(scope="module")
def opened(browser, folder):
    with opened_page(browser, folder.page_file.as_uri(), **WIDE) as page:
        yield page


@pytest.fixture
def page(opened):
    """The module's page, at a new view of the map's layer."""
    opened.keyboard.press("Escape")
    show(opened, f"trajectory=1&frame=1&row=value&unused={next(COUNTER)}")
    opened.mouse.move(700, 5)
    return opened


@pytest.fixture
def advantages(run):
    return advantages_of(run.steps, 0.5, view.GAMMA, view.LAMBDA)


def refused(run, output, capsys, *more, **changed):
    """The sentence with which attribution.page refuses; nothing may be left of its output."""
    argv = run.arguments(output, *more)
    for flag, value in changed.items():
        argv[argv.index(f"--{flag}") + 1] = str(value)
    before = sorted(output.rglob("*")) if output.exists() else None
    assert attribution_page.main(argv) == 2
    assert (sorted(output.rglob("*")) if output.exists() else None) == before
    assert not list(output.parent.glob(".*partial*"))
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_a_frame_shows_its_numbers(page, run, reference, advantages):
    steps = run.steps
    (first_end, *_) = np.flatnonzero(steps.ended)
    rewarded = int(np.flatnonzero(steps.earned[:first_end])[0])
    assert steps.earned[rewarded] != steps.earned[rewarded + 1]
    for at in (0, rewarded, rewarded + 1, first_end, first_end + 1):
        assert at < NUM_STEPS
        show(page, f"trajectory=1&frame={at + 1}")
        found = facts(page)
        assert parse_number(found["Value"]) == pytest.approx(steps.value[at], rel=6e-3, abs=1e-3)
        assert parse_number(found["Advantage"]) == pytest.approx(advantages[at], rel=6e-3, abs=1e-3)
        assert (found["Episode"], found["Level"]) == (str(steps.episode[at]),
                                                      str(steps.level[at]))
        action, share = steps.action[at], np.exp(steps.log_probs[at, steps.action[at]])
        assert found["Action"] == f"{ACTION_LABELS[action]} {100 * share:.0f} %"
        isnew = at in (0, first_end + 1)
        assert ("new episode" in found["Frame"]) == isnew
        reward = steps.earned[at - 1] if at else 0
        match = re.search(r"reward (\S+)", found["Frame"])
        assert (parse_number(match[1]) if match else 0) == pytest.approx(reward, abs=0.01)
        drawn = pixels(page.locator(".picture canvas").first)
        np.testing.assert_allclose(drawn, reference.frame(0, at), atol=2)


def test_the_pad_has_the_policy_by_direction(page, run):
    steps = run.steps
    show(page, "trajectory=2&frame=5")
    at = steps.bounds[1] + 4
    shares = np.exp(steps.log_probs[at])
    cells = page.locator(".pad .cell")
    expected = [shares[ACTION_DIRECTIONS.index((right, up))] for up in (1, 0, -1)
                for right in (-1, 0, 1)]
    assert [int(text.removesuffix(" %")) for text in cells.all_inner_texts()] == [
        round(100 * each) for each in expected]
    assert page.locator(".other").inner_text() == f"other {100 * shares[9:].sum():.0f} %"
    taken = page.locator(".policy .taken")
    assert taken.count() == 1


def test_attributions_are_drawn_as_python_computes_them(page, reference):
    for changes, fragment, kinds in (
            ({}, "sign=two", ("positive", "negative")), ({}, "sign=combined", ("combined",)),
            ({"on": [0, 2]}, "alone=1,3", ("positive", "negative")),
            ({"on": [RES]}, "alone=0&sign=combined", ("combined",)),
            ({"on": range(NUM_FEATURES + 1)}, "residual=shown", ("positive", "negative")),
            ({"gain": 2.0, "smoothing": 0}, "gain=2&smoothing=0", ("positive", "negative")),
            ({"overlay": False, "smoothing": 2.5}, "ground=black&smoothing=2.5", ("positive",)),
            ({"on": [1]}, "alone=2&sign=signed", ("signed",))):
        show(page, f"trajectory=2&frame=9&row=value&row=log_prob_any_right&{fragment}")
        for index, output in enumerate(("value", "log_prob_any_right")):
            for place, kind in enumerate(kinds):
                expected = reference.picture(output, 1, 8, kind, **changes)
                np.testing.assert_allclose(pixels(picture(page, index, place)), expected, atol=2)
        if "on" not in changes:  # and it is not the picture of any other frame
            other = reference.picture("value", 1, 9, kinds[0], **changes)
            assert np.abs(pixels(picture(page)) - other).max() > 4


def test_gradient_times_activation_is_a_row_beside_attribution(page, run, reference):
    show(page, "trajectory=2&frame=9&row=gradient_activation%3Alog_prob_any_right&smoothing=0.5")
    assert row(page).get_attribute("aria-label") == f"row 1: gradient × activation: {RIGHT}"
    products = [run.read("gradient_activation", MAP, "log_prob_any_right", number)
                for number in (0, 1)]
    peaks = np.concatenate([np.abs(each.cells[..., :-1].astype(float)).max(axis=(1, 2, 3))
                            for each in products])
    for place, kind in enumerate(("positive", "negative")):
        expected = reference.painted(products[1].cells[8], view.GAIN / np.median(peaks), 1, 8, kind,
                                     smoothing=0.5)
        np.testing.assert_allclose(pixels(picture(page, 0, place)), expected, atol=2)
    np.testing.assert_allclose(list(table_of(page).values()), products[1].totals[8], rtol=6e-3,
                               atol=1e-4)
    assert row(page).locator(".sum").count() == 0
    groups = row(page).locator("optgroup").evaluate_all("all => all.map(each => each.label)")
    assert groups == ["attribution", "gradient × activation", "activation"]


def test_the_frame_itself_is_a_layer_of_signed_gradients(page, run, reference):
    show(page, f"layer={INPUT}&trajectory=2&frame=9&row=value&smoothing=0")
    grey, sizes = {}, []
    for number in (0, 1):
        found = run.read("gradients", "value", number)
        cells = found.gradients.astype(np.float32).sum(axis=-1) * found.largest[:, None, None]
        grey[number] = cells[..., None]
        sizes.append(np.abs(cells).max(axis=(1, 2)))
    scale = np.median(np.concatenate(sizes))
    expected = reference.painted(grey[1][8], view.GAIN / scale, 1, 8, "signed", on=[0], smoothing=0,
                                 stride=1)
    assert row(page).locator("canvas").count() == 1  # no chart: there is nothing to add up
    drawn = pixels(row(page).locator("canvas").first)
    np.testing.assert_allclose(drawn, expected, atol=2)
    assert np.abs(drawn - reference.painted(-grey[1][8], view.GAIN / scale, 1, 8, "signed", on=[0],
                                            smoothing=0, stride=1)).max() > 50
    assert "no completeness check" in row(page).inner_text()
    checks = page.locator("section[aria-labelledby=checks-title]")
    assert "no completeness check" in checks.inner_text()
    assert page.locator("section[aria-labelledby=legend-title] li").count() == 0
    summary = next(each for each in reference.manifest["summaries"] if each["layer"] == 0)
    assert summary["gaps"] is None and summary["means"] == []


def test_two_trajectories_are_shown_in_step(page, run, reference):
    show(page, "trajectory=1&frame=9&row=value")
    page.get_by_role("combobox", name="second trajectory").select_option("1")
    page.get_by_role("spinbutton", name="frame offset").fill("4")
    page.get_by_role("spinbutton", name="frame offset").press("Enter")
    page.get_by_role("button", name="forward one frame").click()
    page.wait_for_selector(SHOWN)
    for index, (trajectory, step) in enumerate(((0, 9), (1, 13))):
        for place, kind in enumerate(("positive", "negative")):
            np.testing.assert_allclose(
                pixels(picture(page, index, place)),
                reference.picture("value", trajectory, step, kind), atol=2)
        np.testing.assert_allclose(pixels(page.locator(".picture canvas").nth(index)),
                                   reference.frame(trajectory, step), atol=2)
    found = run.read("attributions", MAP, "value", 1)
    np.testing.assert_allclose(
        list(table_of(page, 1).values()),
        [found.baseline[13], *found.totals[13], found.output[13]], rtol=6e-3, atol=1e-4)
    page.wait_for_timeout(300)
    fragment = parse_qs(urlsplit(page.url).fragment)
    assert (fragment["beside"], fragment["ahead"]) == (["2"], ["4"])
    strips = page.locator(".strip")
    strips.nth(1).scroll_into_view_if_needed()
    box = strips.nth(1).bounding_box()
    page.mouse.click(box["x"] + box["width"] * 30.5 / NUM_STEPS, box["y"] + 20)  # of the second
    assert said(page) == (1, 27)
    page.keyboard.press("End")
    assert "trajectory 2, frame 110" in row(page, 1).inner_text()
    page.get_by_role("combobox", name="second trajectory").select_option("")
    assert page.locator(".row").count() == 1 and strips.count() == 1


def test_features_are_named_and_scored_by_objects(run, browser, tmp_path):
    objects = ResultStore(tmp_path / "objects", OBJECT_FILES)
    objects.open({})
    auc = np.array([0.9, 0.6, 0.4, 0.81, 0.55, np.nan, 0.5, 0.52, np.nan, np.nan])
    scores = pd.DataFrame({
        "feature": np.repeat(range(5), 2), "kind": ["coin", "saw_blade"] * 5, "auc": auc,
        "low_95": auc - 0.05, "high_95": auc + 0.05, "chance": 0.5, "chance_low": 0.45,
        "chance_high": 0.55, "frames": [30, 20] * 5})
    named = [{"name": name} for name in ("coin", "saw_blade", None, None, None)]
    features = read_features(run.folder / "features", MAP)
    checksum, stability = features.checksum, features.facts["stability"]
    for layer, features in ((MAP, checksum), (UNITS, "0" * 64)):  # the latter are others
        objects.write("scores", layer, value=scores)
        objects.write("names", layer, value={
            "features_sha256": features, "features": named, "score": 0.7, "score_low_95": 0.65,
            "score_high_95": 0.75, "score_chance": 0.52})
    (tmp_path / "checks").mkdir()
    (tmp_path / "checks" / "report.md").write_text("all is well")
    (tmp_path / "checks" / "deletion.csv").write_text("layer,output")
    labels = tmp_path / "labels.json"
    labels.write_text(json.dumps({MAP: {"2": "my name"}}))
    page_folder = exported(run, tmp_path / "out" / "page", "--objects_dir", str(objects.path),
                           "--labels", str(labels), "--checks_dir", str(tmp_path / "checks"))
    layers = read_script(page_folder.data_file("manifest"))["layers"]
    assert [layer["objects"] is not None for layer in layers] == [False, True, False]
    start = read_script(page_folder.data_file("manifest"))["start"]
    assert layers[start["layer"]]["name"] == MAP  # the only layer with an object score
    with opened_page(browser, f"{page_folder.page_file.as_uri()}#layer={MAP}", **WIDE) as page:
        items = page.locator("section[aria-labelledby=legend-title] li")
        assert [items.nth(k).locator("input").get_attribute("placeholder") for k in range(5)] == [
            "name…" if unstable else word for word, unstable in zip(
                ("coin", "saw blade", *3 * ("name…",)), np.array(stability) < MIN_STABILITY)]
        assert "coin 0.900" in items.nth(0).inner_text()
        assert "saw blade 0.810" in items.nth(1).inner_text()
        names = page.get_by_role("combobox", name="Add a curve").locator("option").all_inner_texts()
        assert {"2 my name in value", "feature 3 in value"} <= set(names)
        assert "object score (95 % 0.650 to 0.750; chance 0.520)" in page.locator(
            "section[aria-labelledby=checks-title]").inner_text()
        page.get_by_role("button", name="examples of feature 2").click()
        lines = page.get_by_role("table", name="objects").locator("tbody tr")
        assert [line.split("\t") for line in lines.all_inner_texts()] == [
            ["saw blade", "0.810", "0.760 to 0.860"], ["coin", "0.400", "0.350 to 0.450"]]
        assert [line.get_attribute("class") is None or "chance" not in line.get_attribute("class")
                for line in lines.all()] == [True, False]
        page.keyboard.press("Escape")
        links = page.locator("section[aria-labelledby=checks-title] a")
        assert links.evaluate_all("all => all.map(each => each.getAttribute('href'))") == [
            "../../checks/report.md#deletion"]
        found = links.first.evaluate("each => each.href")
        assert Path(unquote(urlsplit(found).path)).read_text() == "all is well"


def test_failures_are_marked_by_what_ended_them(run, browser, tmp_path):
    page_folder = exported(run, tmp_path / "page", "--failure_causes")
    manifest = read_script(page_folder.data_file("manifest"))
    steps = run.steps
    ends = np.flatnonzero(steps.ended)
    causes = recorded_causes(run.recording, steps.episode[ends].tolist())
    assert causes  # an untrained agent fails
    expected = {}
    for end in ends:
        if steps.episode[end] in causes:
            expected.setdefault(causes[steps.episode[end]], []).append(
                [int(steps.trajectory[end]), int(end - steps.bounds[steps.trajectory[end]])])
    assert {each["cause"]: each["steps"] for each in manifest["failures"]} == expected
    cause, ((trajectory, step), *_) = next(iter(expected.items()))
    first = min(place for steps in expected.values() for place in steps)
    with opened_page(browser, page_folder.page_file.as_uri(), **WIDE) as page:
        assert said(page) == (first[0] + 1, first[1] + 1)  # it opens on the first failure
        assert page.get_by_text("Episodes without a reward").count() == 0
        page.get_by_text(f"Failures: {cause}").click()
        page.get_by_role("list", name=f"Failures: {cause}").get_by_role("button").first.click()
        assert said(page) == (trajectory + 1, step + 1)
        assert f"failure: {cause}" in facts(page)["Frame"]
        assert f"the episode fails: {cause}" in page.locator(
            "[aria-live=polite]").last.text_content()
        show(page, f"trajectory={trajectory + 1}&frame=1&window={NUM_STEPS}")
        strip = page.locator(".strip canvas")
        colour = strip.evaluate("""(canvas, share) => [...canvas.getContext('2d').getImageData(
            Math.round(share * canvas.width), canvas.height - 12, 1, 1).data].slice(0, 3)""",
            (step + 1) / NUM_STEPS)
        np.testing.assert_allclose(colour, [0xe0, 0x20, 0x0a], atol=2)
        show(page, f"trajectory={trajectory + 1}&frame={step}")
        assert "failure" not in facts(page)["Frame"]


def test_an_edited_agent_is_shown_beside_the_original_at_the_same_level(run, browser, reference,
                                                                        tmp_path, capsys):
    edited = write_edited(run, tmp_path)
    flags = ("--beside_agent_file", str(edited.agent), "--beside_data_dir",
             str(edited.recording.path), "--beside_attribution_dir", str(edited.attributions.path))
    page_folder = exported(run, tmp_path / "page", *flags)
    manifest = read_script(page_folder.data_file("manifest"))
    assert manifest["agents"] == [run.agent.name, "edited.pth"]
    assert manifest["agent_of"] == [0, 0, 1, 1] and len(manifest["trajectories"]) == 4
    assert sum(each["title"].startswith("edited.pth: ") for each in manifest["bookmarks"]) >= 3
    with opened_page(browser, f"{page_folder.page_file.as_uri()}#layer={MAP}&frame=7", **WIDE
                     ) as page:
        page.get_by_role("combobox", name="second trajectory").select_option("2")
        assert page.get_by_role("checkbox", name="match levels").is_checked()
        theirs = edited.steps
        begin = int(np.flatnonzero(run.steps.episode[:NUM_STEPS] == run.steps.episode[NUM_STEPS - 1]
                                   )[0])
        for step in (6, begin + 2):  # in the first level, and in the last of this trajectory
            show(page, f"frame={step + 1}&beside=3&level=same&row=value")
            level = run.steps.level[step]
            same = np.flatnonzero(theirs.level[:NUM_STEPS] == level)
            ago = step - np.flatnonzero(run.steps.level[:NUM_STEPS] == level)[0]
            at = same[min(ago, len(same) - 1)] if len(same) else step
            assert f"trajectory 3 of edited.pth, frame {at + 1}" in row(page, 1).inner_text()
            found = edited.read("attributions", MAP, "value", 0)
            np.testing.assert_allclose(
                list(table_of(page, 1).values()),
                [found.baseline[at], *found.totals[at], found.output[at]], rtol=6e-3, atol=1e-4)
            levels = [page.locator(".facts").nth(k).locator("dd").nth(2).inner_text()
                      for k in (0, 1)]
            assert not len(same) or levels == [str(level)] * 2
    shutil.rmtree(edited.attributions.path / UNITS)
    assert "edited.pth has no attributions of value at embedder.relufc" in refused(
        run, tmp_path / "other", capsys, *flags)


def test_a_picture_of_all_rows_holds_what_is_shown(page, reference, tmp_path):
    show(page, "trajectory=1&frame=9&row=value&beside=2&ahead=4&smoothing=0")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save an image of all rows").click()
    assert download.value.suggested_filename == "block3_1_9.png"
    download.value.save_as(tmp_path / "rows.png")
    image = np.asarray(Image.open(tmp_path / "rows.png").convert("RGB"))
    for line, (trajectory, step) in enumerate(((0, 8), (1, 12))):
        np.testing.assert_allclose(view.tile_of(image, line), reference.frame(trajectory, step),
                                   atol=2)
        left = 16 + 320 + 16 + 432 + 16 - 16  # behind the observation and the chart
        expected = reference.picture("value", trajectory, step, "positive", smoothing=0)
        np.testing.assert_allclose(view.tile_of(image[:, left:], line), expected, atol=2)


def test_a_video_goes_through_the_frames(page, reference, tmp_path):
    show(page, f"trajectory=2&frame={NUM_STEPS - 5}&row=value&row=activations&speed=8")
    frames = page.get_by_role("spinbutton", name="Frames in the video")
    assert frames.input_value() == "6"
    frames.fill("4")
    frames.press("Enter")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save a video").click()
    assert download.value.suggested_filename == f"block3_2_{NUM_STEPS - 5}.mp4"
    download.value.save_as(tmp_path / "rows.mp4")
    with av.open(str(tmp_path / "rows.mp4")) as container:
        found = list(container.decode(video=0))
    np.testing.assert_allclose([each.time for each in found], np.arange(4) / 8, atol=1e-3)
    for number, each in enumerate(found):
        drawn = view.tile_of(each.to_ndarray(format="rgb24"))
        errors = [np.abs(drawn - reference.frame(1, NUM_STEPS - 6 + k)).mean() for k in range(6)]
        assert np.argmin(errors) == number and errors[number] < 8


def test_a_rows_numbers_are_those_of_the_files(page, run):
    show(page, "trajectory=2&frame=12&row=log_prob_any_right&row=activations")
    found = run.read("attributions", MAP, "log_prob_any_right", 1)
    shown = list(table_of(page).values())
    expected = [found.baseline[11], *found.totals[11], found.output[11]]
    np.testing.assert_allclose(shown, expected, rtol=6e-3, atol=1e-4)
    line = row(page).locator(".sum").inner_text()
    assert line.startswith(RIGHT) and "from memory alone" in line  # the agent has a GRU
    gap = parse_number(re.search(r"completeness error (\S+) %", line)[1])
    assert gap == pytest.approx(100 * found.gap[11], rel=0.06, abs=1e-3)
    cells = run.read("activations", MAP, 1).cells[11].astype(float)
    np.testing.assert_allclose(list(table_of(page, 1).values()), cells.sum(axis=(0, 1)),
                               rtol=6e-3, atol=1e-3)
    assert row(page, 1).locator(".sum").count() == 0


def test_bars_have_the_height_and_colour_of_their_numbers(page, run):
    show(page, "trajectory=1&frame=20&chart=bars")
    totals = run.read("attributions", MAP, "value", 0).totals.astype(float)
    highest, lowest = totals.max(axis=1), totals.min(axis=1)
    top = max(0, np.quantile(highest, 0.9), highest.max() / 5)
    bottom = -max(0, np.quantile(-lowest, 0.9), -lowest.min() / 5)
    canvas = row(page).locator("canvas").first
    found = canvas.evaluate("""(canvas) => {
        const ctx = canvas.getContext('2d')
        return [canvas.width, canvas.height, canvas.clientHeight,
                [...ctx.getImageData(0, 0, canvas.width, canvas.height).data]]
    }""")
    width, height, shown_height, data = found
    image = np.array(data).reshape(height, width, 4)[..., :3]
    scale = height / shown_height
    pad = (top - bottom) * 0.03
    low, high = (shown_height - 18) * scale, 8 * scale

    def place(value):
        return low + (value - bottom + pad) / (top - bottom + 2 * pad) * (high - low)

    each = (width - 42 * scale) / (NUM_FEATURES + 1)
    for f, colour in enumerate(hues(NUM_FEATURES)):
        x = int(42 * scale + (f + 0.5) * each)
        own = np.flatnonzero(np.abs(image[:, x] - 255 * colour / colour.max()).max(axis=1) <= 2)
        total = np.clip(totals[19, f], bottom, top)
        size = abs(place(total) - place(0))
        if size < 4:
            continue
        assert len(own) == pytest.approx(size, abs=2.5)
        assert own.mean() == pytest.approx((place(total) + place(0)) / 2, abs=2)


def test_the_last_steps_show_their_numbers_and_frames(page, run, reference):
    show(page, "trajectory=2&frame=9&row=value&row=log_prob_any_right")
    found = run.read("over_time", MAP, "value", LAGS, 1)
    assert page.locator(".memory").count() == 1  # of the output that has them
    memory = row(page).locator(".memory")
    shown = [parse_number(text.removesuffix(" %"))
             for text in memory.locator("td").all_text_contents()]
    by_lag = found.totals[8].sum(axis=1)
    expected = [found.baseline[8], found.older[8], *by_lag[::-1], 100 * found.gap[8]]
    np.testing.assert_allclose(shown[:-1], expected[:-1], rtol=6e-3, atol=1e-4)
    assert shown[-1] == pytest.approx(expected[-1], rel=0.06, abs=1e-3)
    memory.scroll_into_view_if_needed()
    box = memory.locator("canvas").first.bounding_box()
    for column, ago in ((LAGS, 0), (LAGS - 1, 1), (1, LAGS - 1)):  # the first is older memory
        left = 42 + (box["width"] - 42) * (column + 0.5) / (LAGS + 1)
        page.mouse.move(box["x"] + left, box["y"] + 60)
        drawn = pixels(memory.locator("canvas").last)
        np.testing.assert_allclose(drawn, reference.frame(1, 8 - ago), atol=2)


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
    assert page.get_by_role("button", name="remove row 1").count() == 0


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
    page.get_by_role("combobox", name="Images").select_option("signed")
    changed()
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
    speed = page.get_by_role("spinbutton", name="frames per second")
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


def test_curves_show_their_numbers_and_ranges(page, run, advantages):
    show(page, "trajectory=2&frame=12")
    chooser = page.get_by_role("combobox", name="Add a curve")
    chooser.select_option(label=VALUE)
    chooser.select_option(label=f"2 coins in {RIGHT}")
    page.wait_for_selector(SHOWN)
    label = page.locator(".strip canvas").get_attribute("aria-label")
    right = run.read("attributions", MAP, "log_prob_any_right", 1).totals[:, 1]
    value = run.read("attributions", MAP, "value", 1).output
    parts = label.partition(": ")[2].split("; ")
    assert len(parts) == 3
    for part, title, of in zip(parts, ("advantage", VALUE, f"2 coins in {RIGHT}"),
                               (advantages[run.steps.bounds[1]:], value, right)):
        assert part.startswith(title)
        here, low, high = map(parse_number, re.fullmatch(
            r"(\S+) of (\S+) to (\S+)", part.removeprefix(title).strip()).groups())
        np.testing.assert_allclose([here, low, high], [of[11], of.min(), of.max()], rtol=6e-3,
                                   atol=1e-4)
    page.get_by_role("button", name=re.compile(f"^{VALUE}")).click()
    assert VALUE not in page.locator(".strip canvas").get_attribute("aria-label")


def test_keys(page):
    spoken = page.locator("[aria-live=polite]").last.text_content()
    assert spoken.startswith("trajectory 1, frame 1: new episode, action")
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
    page.get_by_role("checkbox", name="keyboard shortcuts").uncheck()
    page.locator("#main").focus()
    assert pressed("ArrowRight") == here


def test_the_address_holds_the_whole_view(browser, folder):
    fragment = ("layer=block3&trajectory=2&frame=33&row=log_prob_any_right&row=value&gain=2&"
                "smoothing=0.75&sign=combined&chart=bars&palette=apart&window=64&speed=30&"
                "ground=black&residual=shown&alone=2%2C0&curve=value&curve=value%2C2&mark=1.7&"
                "beside=1&ahead=-3&keys=off&notes=a+%3Cb%3E")
    with opened_page(browser, f"{folder.page_file.as_uri()}#{fragment}", **WIDE) as other:
        assert said(other) == (2, 33)
        other.wait_for_timeout(400)
        assert parse_qs(urlsplit(other.url).fragment) == parse_qs(fragment)
        other.get_by_role("button", name="forward one frame").click()
        other.wait_for_timeout(400)
        assert parse_qs(urlsplit(other.url).fragment)["frame"] == ["34"]
        assert other.get_by_role("textbox", name="Notes").input_value() == "a <b>"


def test_the_published_address_is_understood(browser, folder):
    with served(folder.path) as server, opened_page(browser, server, **WIDE) as page:
        for query, layer, place in (
                ("?layer=2&trajectory=2&frame=17", MAP, (2, 17)), ("?trajectory=2", MAP, (2, 1)),
                (f"?layer={UNITS}&trajectory=1&frame=3", UNITS, (1, 3))):
            page.goto(server + query)
            page.wait_for_selector(SHOWN)
            assert said(page) == place
            assert page.locator("input[name=layer]:checked").evaluate(
                "each => each.closest('label').querySelector('span').textContent") == layer


def test_an_address_of_another_page_shows_what_fits(browser, folder):
    fragment = ("layer=toString&trajectory=99&frame=5&row=toString&gain=-1&sign=constructor&"
                "alone=7,toString,-1,1&curve=x,1&curve=value,9&mark=9.9&mark=__proto__&window=x")
    with opened_page(browser, f"{folder.page_file.as_uri()}#{fragment}", **WIDE) as page:
        assert said(page)[1] == 5
        assert page.locator(".row").count() == 1
        page.wait_for_timeout(400)
        left = parse_qs(urlsplit(page.url).fragment)
        assert set(left) == {"layer", "trajectory", "frame", "row", "alone"}


def test_bookmarks_go_where_they_say(page, run, reference, advantages):
    lists = {each["title"]: each["steps"] for each in reference.manifest["bookmarks"]}
    assert reference.manifest["unit"]["off"]  # of an untrained agent, so the title says so
    worst = lists["Unexpected failures (unit uncertain)"]
    for trajectory, step, score in worst:
        rows = slice(*run.steps.bounds[trajectory:trajectory + 2])
        of_episode = run.steps.episode[rows] == run.steps.episode[rows.start + step]
        assert score == pytest.approx(advantages[rows][of_episode].min())
    assert [each[2] for each in worst] == sorted(each[2] for each in worst)
    item = page.get_by_role("list", name="Unexpected failures").get_by_role("button").first
    assert item.inner_text().split("\n")[0] == (
        f"trajectory {worst[0][0] + 1}, frame {worst[0][1] + 1}")
    item.click()
    assert said(page) == (worst[0][0] + 1, worst[0][1] + 1)
    gaps = lists["Largest completeness errors"]
    assert gaps[0][2] == pytest.approx(max(
        run.read("attributions", MAP, "value", number).gap.max() for number in (0, 1)))
    show(page, "trajectory=2&frame=8")
    page.get_by_role("button", name="Bookmark this frame").click()
    show_first = page.get_by_role("list", name="Your bookmarks").get_by_role("button")
    assert show_first.count() == 1
    page.wait_for_timeout(400)
    assert parse_qs(urlsplit(page.url).fragment)["mark"] == ["2.8"]
    page.get_by_role("button", name="Bookmark this frame").click()
    assert page.get_by_role("list", name="Your bookmarks").count() == 0


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
    assert page.get_by_role("textbox", name="name of feature 1").input_value() == NAME[:60]
    assert page.evaluate("window.owned") is None
    page.get_by_role("textbox", name="name of feature 3").fill("<i>saws</i>")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save names").click()
    download.value.save_as(tmp_path / "labels.json")
    assert json.loads((tmp_path / "labels.json").read_text()) == {
        MAP: {"1": NAME[:60], "2": "coins", "3": "<i>saws</i>"}}
    again = exported(run, tmp_path / "page", "--labels", str(tmp_path / "labels.json"))
    assert read_script(again.data_file("manifest"))["labels"][1] == [
        NAME[:60], "coins", "<i>saws</i>", "", ""]


def test_a_layer_of_units_has_bars_alone_and_outputs_it_lacks_say_so(page, run):
    show(page, f"layer={UNITS}&trajectory=1&row=value&row=log_prob_any_right")
    assert row(page).locator("canvas").count() == 1
    found = run.read("attributions", UNITS, "value", 0)
    np.testing.assert_allclose(
        list(table_of(page).values()),
        [found.baseline[0], *found.totals[0], found.output[0]], rtol=6e-3, atol=1e-4)
    assert "was not attributed" in row(page, 1).inner_text()
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
    doubt = "seem to have different units"
    assert page.locator("section[aria-labelledby=checks-title]").get_by_text(doubt).count() == 1
    assert page.get_by_text(doubt).count() == 3  # and at both lists of advantages


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


@pytest.mark.parametrize("size", [(1440, 900), (390, 844)])
def test_attributions_are_above_the_fold(browser, folder, size):
    with opened_page(browser, folder.page_file.as_uri(), viewport={
            "width": size[0], "height": size[1]}) as page:
        for kind in (0, 1):
            box = picture(page, 0, kind).bounding_box()
            assert box["y"] + box["height"] <= size[1] and box["width"] > 150
