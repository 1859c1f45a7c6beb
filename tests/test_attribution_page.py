"""The attribution page in a real browser: pictures and numbers are those of the files."""

import json
import re
import shutil
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import av
import numpy as np
import pandas as pd
import pytest
from attribution_run import (
    LAGS,
    NUM_FEATURES,
    NUM_STEPS,
    exported,
    hues,
    write_edited,
)
from attribution_view import (
    GAMMA,
    LAMBDA,
    MAP,
    RES,
    RIGHT,
    UNITS,
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
    tile_of,
)
from page_data import read_script
from page_exports import needs_browser
from PIL import Image

from attribution import page as attribution_page
from attribution.checking.object_scores import OBJECT_FILES
from attribution.failures.causes import recorded_causes
from attribution.page_files import AttributionPageFolder
from attribution.results import INPUT, read_features
from attribution.trajectories import (
    advantages_of,
)
from common.game_constants import ACTION_DIRECTIONS, ACTION_LABELS
from common.results import ResultStore
from tools.browser import SHOWN, opened_page

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


def test_a_frame_shows_its_numbers(page, run, reference):
    steps = run.steps
    advantages = advantages_of(steps, 0.5, GAMMA, LAMBDA)
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
        assert found["Next action"] == f"{ACTION_LABELS[action]} {100 * share:.0f} %"
        isnew = at in (0, first_end + 1)
        assert ("new episode" in found["Frame"]) == isnew
        reward = steps.earned[at - 1] if at else 0
        match = re.search(r"last reward (\S+)", found["Frame"])
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


@pytest.mark.parametrize("case", [
    ({}, "sign=two", ("positive", "negative")),
    ({}, "sign=combined", ("combined",)),
    ({"on": [0, 2]}, "alone=1,3", ("positive", "negative")),
    ({"on": [RES]}, "alone=0&sign=combined", ("combined",)),
    ({"on": range(NUM_FEATURES + 1)}, "residual=shown", ("positive", "negative")),
    ({"gain": 2.0, "smoothing": 0}, "gain=2&smoothing=0", ("positive", "negative")),
    ({"overlay": False, "smoothing": 2.5}, "ground=black&smoothing=2.5", ("positive", "negative")),
    ({"on": [1]}, "alone=2&sign=signed", ("signed",))])
def test_attributions_are_drawn_as_python_computes_them(page, reference, case):
    changes, fragment, kinds = case
    show(page, f"trajectory=2&frame=9&row=value&row=log_prob_any_right&{fragment}")
    for index, output in enumerate(("value", "log_prob_any_right")):
        for place, kind in enumerate(kinds):
            expected = reference.picture(output, 1, 8, kind, **changes)
            drawn = pixels(picture(page, index, place))
            np.testing.assert_allclose(drawn, expected, atol=2)
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
        expected = reference.painted(products[1].cells[8], 1 / np.median(peaks), 1, 8, kind,
                                     smoothing=0.5)
        np.testing.assert_allclose(pixels(picture(page, 0, place)), expected, atol=2)
    np.testing.assert_allclose(list(table_of(page).values()), products[1].totals[8], rtol=6e-3,
                               atol=1e-4)
    assert row(page).locator(".sum").count() == 0  # it is no sum, and says no gap
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
    expected = reference.painted(grey[1][8], 1 / scale, 1, 8, "signed", on=[0], smoothing=0,
                                 stride=1)
    assert row(page).locator("canvas").count() == 1  # no chart: there is nothing to add up
    drawn = pixels(row(page).locator("canvas").first)
    np.testing.assert_allclose(drawn, expected, atol=2)
    assert np.abs(drawn - reference.painted(-grey[1][8], 1 / scale, 1, 8, "signed", on=[0],
                                            smoothing=0, stride=1)).max() > 50
    assert "gap" not in row(page).inner_text() and "adds up to nothing" in row(page).inner_text()
    assert "no gap" in page.locator("section[aria-labelledby=checks-title]").inner_text()
    assert page.locator("section[aria-labelledby=legend-title] li").count() == 0
    summary = next(each for each in reference.manifest["summaries"] if each["layer"] == 0)
    assert summary["gaps"] is None and summary["means"] == []


def test_two_trajectories_are_shown_in_step(page, run, reference):
    show(page, "trajectory=1&frame=9&row=value")
    page.get_by_role("combobox", name="trajectory beside it").select_option("1")
    page.get_by_role("spinbutton", name="frames ahead").fill("4")
    page.get_by_role("spinbutton", name="frames ahead").press("Enter")
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
    box = strips.nth(1).bounding_box()
    page.mouse.click(box["x"] + box["width"] * 30.5 / NUM_STEPS, box["y"] + 20)  # of the second
    assert said(page) == (1, 27)
    page.keyboard.press("End")
    assert "trajectory 2, frame 110" in row(page, 1).inner_text()
    page.get_by_role("combobox", name="trajectory beside it").select_option("")
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
    checksum = read_features(run.folder / "features", MAP).checksum
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
    with opened_page(browser, f"{page_folder.page_file.as_uri()}#layer={MAP}", **WIDE) as page:
        items = page.locator("section[aria-labelledby=legend-title] li")
        assert [items.nth(k).locator("input").get_attribute("placeholder") for k in range(5)] == [
            "coin", "saw blade", "name…", "name…", "name…"]
        assert "coin 0.900" in items.nth(0).inner_text()
        assert "saw blade 0.810" in items.nth(1).inner_text()
        names = page.get_by_role("combobox", name="Add a curve").locator("option").all_inner_texts()
        assert {"1 coin in value", "2 my name in value", "feature 3 in value"} <= set(names)
        assert "object score, 0.650 to 0.750; by chance 0.520" in page.locator(
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
    with opened_page(browser, f"{page_folder.page_file.as_uri()}#layer={MAP}", **WIDE) as page:
        assert page.get_by_text("Episodes without a reward").count() == 0
        page.get_by_text(f"Failures: {cause}").click()
        page.get_by_role("list", name=f"Failures: {cause}").get_by_role("button").first.click()
        assert said(page) == (trajectory + 1, step + 1)
        assert f"fails: {cause}" in facts(page)["Frame"]
        assert f"the episode fails: {cause}" in page.locator(
            "[aria-live=polite]").last.text_content()
        show(page, f"trajectory={trajectory + 1}&frame=1&window={NUM_STEPS}")
        strip = page.locator(".strip canvas")
        colour = strip.evaluate("""(canvas, share) => [...canvas.getContext('2d').getImageData(
            Math.round(share * canvas.width), canvas.height - 12, 1, 1).data].slice(0, 3)""",
            (step + 1) / NUM_STEPS)
        np.testing.assert_allclose(colour, [0xe0, 0x20, 0x0a], atol=2)
        show(page, f"trajectory={trajectory + 1}&frame={step}")
        assert "fails" not in facts(page)["Frame"]


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
        page.get_by_role("combobox", name="trajectory beside it").select_option("2")
        assert page.get_by_role("checkbox", name="at the same level").is_checked()
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
        page.get_by_role("button", name="Save a picture of all rows").click()
    assert download.value.suggested_filename == "block3_1_9.png"
    download.value.save_as(tmp_path / "rows.png")
    image = np.asarray(Image.open(tmp_path / "rows.png").convert("RGB"))
    for line, (trajectory, step) in enumerate(((0, 8), (1, 12))):
        np.testing.assert_allclose(tile_of(image, line), reference.frame(trajectory, step),
                                   atol=2)
        left = 16 + 320 + 16 + 432 + 16 - 16  # behind the observation and the chart
        expected = reference.picture("value", trajectory, step, "positive", smoothing=0)
        np.testing.assert_allclose(tile_of(image[:, left:], line), expected, atol=2)


def test_a_video_goes_through_the_frames(page, reference, tmp_path):
    show(page, f"trajectory=2&frame={NUM_STEPS - 5}&row=value&row=activations&speed=8")
    frames = page.get_by_role("spinbutton", name="Frames of the video")
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
        drawn = tile_of(each.to_ndarray(format="rgb24"))
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
    gap = parse_number(re.search(r"gap (\S+) %", line)[1])
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
