"""The attribution page in a real browser: its images and numbers match the files."""

import dataclasses
import itertools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs

import attribution_view as view
import numpy as np
import pandas as pd
import pytest
from attribution_run import LAGS, NUM_FEATURES, NUM_STEPS, exported, refused, write_edited
from attribution_view import (
    MAP,
    RES,
    RIGHT,
    UNITS,
    VALUE,
    WIDE,
    Reference,
    picture,
    row,
    show,
    shown_frame,
    table_of,
)
from page_exports import HOSTILE_NAME as NAME
from page_exports import needs_browser
from page_view import colours, facts, fragment_of, image_of, parse_number, pixels, read_script
from PIL import Image

from agents.failures import recorded_causes
from attribution.checking.object_scores import OBJECT_FILES
from attribution.page_agent import MIN_STABILITY
from attribution.page_bookmarks import find_opening
from attribution.page_files import FORMAT, AttributionPageFolder
from attribution.results import INPUT, read_features
from attribution.trajectories import advantages_of
from common.game_constants import ACTION_DIRECTIONS
from common.page_files import data_script
from common.results import ResultStore
from envs.objects import action_labels
from tools.browser import SHOWN, opened_page, served

pytestmark = [needs_browser, pytest.mark.slow]
LABELS = action_labels("fruitbot")
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
    """The page, shared by the tests of this module, at a new view of the layer MAP."""
    opened.keyboard.press("Escape")
    show(opened, f"trajectory=1&frame=1&row=value&unused={next(COUNTER)}")
    opened.mouse.move(700, 5)
    return opened


@pytest.fixture
def advantages(run):
    return advantages_of(run.steps, 0.5, view.GAMMA, view.LAMBDA)


def pressed(page):
    """Return the numbers of the features that are kept isolated."""
    return page.locator(".legend [aria-pressed=true] .number").all_inner_texts()


def sign_of(action):
    """Return the text in the sign of an action, which is an arrow if it has a direction."""
    if action < 9:
        return ""
    number = re.search(r"\d+", LABELS[action])
    initials = "".join(word[0].upper() for word in LABELS[action].split()[:2])
    return f"{number[0] if number else initials} "


def section(page, name):
    return page.locator(f"section[aria-labelledby={name}-title]")


def sum_of(found, step):
    """Return the numbers of a row: baseline, features, residual and output."""
    return [found.baseline[step], *found.totals[step], found.output[step]]


def assert_numbers(page, index, expected, atol=1e-4):
    np.testing.assert_allclose(list(table_of(page, index).values()), expected, rtol=6e-3, atol=atol)


def test_a_frame_shows_its_numbers(page, run, reference, advantages):
    steps = run.steps
    (first_end, *_) = np.flatnonzero(steps.ended)
    rewarded = int(np.flatnonzero(steps.earned[:first_end])[0])
    assert steps.earned[rewarded] != steps.earned[rewarded + 1] and first_end + 1 < NUM_STEPS
    for at in (0, rewarded, rewarded + 1, first_end, first_end + 1):
        show(page, f"trajectory=1&frame={at + 1}")
        found = facts(page)
        numbers = [parse_number(found[name]) for name in ("Value", "Advantage")]
        np.testing.assert_allclose(numbers, [steps.value[at], advantages[at]], rtol=6e-3, atol=1e-3)
        action, share = steps.action[at], np.exp(steps.log_probs[at, steps.action[at]])
        assert [found[name] for name in ("Episode", "Level", "Action")] == [
            str(steps.episode[at]), str(steps.level[at]),
            f"{sign_of(action)}{LABELS[action]} {100 * share:.0f} %"]
        assert ("new episode" in found["Frame"]) == (at in (0, first_end + 1))
        match = re.search(r"reward (\S+)", found["Frame"])
        assert (parse_number(match[1]) if match else 0) == pytest.approx(
            steps.earned[at - 1] if at else 0, abs=0.01)
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
    keys = np.arange(9, 15)
    named = (shares[keys] >= 0.05) | (keys == steps.action[at])
    assert page.locator(".other").inner_text() == f"other {100 * shares[keys[~named]].sum():.0f} %"
    texts = page.locator(".others li").all_inner_texts()[:-1]
    assert [" ".join(text.split()) for text in texts] == [
        f"{sign_of(key)}{LABELS[key]} {100 * shares[key]:.0f} %"
        for key in sorted(keys[named], key=lambda key: -shares[key])]
    taken = page.locator(".policy .taken")
    assert taken.count() == 1


def test_attributions_are_drawn_as_python_computes_them(page, reference):
    for changes, fragment, kinds in (
            ({}, "sign=two", ("positive", "negative")), ({}, "sign=combined", ("combined",)),
            ({"on": [0, 2]}, "alone=1,3", ("positive", "negative")),
            ({"on": [RES]}, "alone=0&sign=combined", ("combined",)),
            ({"on": range(NUM_FEATURES + 1)}, "residual=shown", ("positive", "negative")),
            ({"gain": 2.0, "above": 0}, "gain=2&above=0", ("positive", "negative")),
            ({"palette": "hues", "above": 90}, "palette=hues&above=90", ("positive",)),
            ({"overlay": False, "smoothing": 2.5}, "ground=black&smoothing=2.5", ("positive",)),
            ({"on": [1]}, "alone=2&sign=signed", ("signed",))):
        show(page, f"trajectory=2&frame=9&row=value&row=log_prob_any_right&{fragment}")
        for index, output in enumerate(("value", "log_prob_any_right")):
            for place, kind in enumerate(kinds):
                expected = reference.picture(output, 1, 8, kind, **changes)
                np.testing.assert_allclose(pixels(picture(page, index, place)), expected, atol=2)
        if "on" not in changes:  # and the image differs from that of the next frame
            other = reference.picture("value", 1, 9, kinds[0], **changes)
            assert np.abs(pixels(picture(page)) - other).max() > 4


def test_gradient_times_activation_is_a_row_beside_attribution(page, run, reference):
    show(page, "trajectory=2&frame=9&row=gradient_activation%3Alog_prob_any_right&smoothing=0.5")
    assert row(page).get_attribute("aria-label") == f"row 1: gradient × activation: {RIGHT}"
    products = [run.read("gradient_activation", MAP, "log_prob_any_right", number)
                for number in (0, 1)]
    for place, kind in enumerate(("positive", "negative")):
        expected = reference.painted([each.cells for each in products], 1, 8, kind, smoothing=0.5)
        np.testing.assert_allclose(pixels(picture(page, 0, place)), expected, atol=2)
    assert_numbers(page, 0, products[1].totals[8])
    assert row(page).locator(".sum").count() == 0
    groups = row(page).locator("optgroup").evaluate_all("all => all.map(each => each.label)")
    assert groups == ["attribution", "gradient × activation", "activation"]


def test_the_frame_itself_is_a_layer_of_signed_gradients(page, run, reference):
    show(page, f"layer={INPUT}&trajectory=2&frame=9&row=value&smoothing=0")
    grey = []
    for number in (0, 1):
        found = run.read("gradients", "value", number)
        cells = found.gradients.astype(np.float32).sum(axis=-1) * found.largest[:, None, None]
        grey.append(cells[..., None])
    expected = reference.painted(grey, 1, 8, "signed", on=[0], stride=1)
    assert row(page).locator("canvas").count() == 2  # no chart, because no sum is shown
    drawn = pixels(picture(page))
    np.testing.assert_allclose(drawn, expected, atol=2)
    opposite = reference.painted([-each for each in grey], 1, 8, "signed", on=[0], stride=1)
    assert np.abs(drawn - opposite).max() > 50
    assert "no completeness check" in row(page).inner_text()
    checks = section(page, "checks")
    assert "no completeness check" in checks.inner_text()
    assert section(page, "legend").locator("li").count() == 0
    summary = next(each for each in reference.manifest["summaries"] if each["layer"] == 0)
    assert summary["gaps"] is None and summary["means"] == []


def test_the_value_of_a_cell_is_read_under_the_pointer(page, run):
    show(page, "trajectory=2&frame=9&alone=2")
    box = picture(page).bounding_box()
    page.mouse.move(box["x"] + box["width"] * 26 / 64, box["y"] + box["height"] * 34 / 64)
    value = run.read("attributions", MAP, "value", 1).cells[8, 4, 3, 1]
    text = row(page).locator("output").inner_text()
    match = re.fullmatch(r"row 5, column 4: 2 coins (\S+)", text)
    assert parse_number(match[1]) == pytest.approx(float(value), rel=0.02, abs=1e-3)


def test_two_trajectories_are_shown_in_step(page, run, reference):
    show(page, "trajectory=1&frame=9&row=value")
    page.get_by_role("combobox", name="second trajectory").select_option("1")
    page.get_by_role("spinbutton", name="frame offset").fill("4")
    page.get_by_role("spinbutton", name="frame offset").press("Enter")
    page.get_by_role("button", name="forward one frame").click()
    page.wait_for_selector(SHOWN)
    for index, (trajectory, step) in enumerate(((0, 9), (1, 13))):
        np.testing.assert_allclose(pixels(page.locator(".picture canvas").nth(index)),
                                   reference.frame(trajectory, step), atol=2)
        for place, kind in enumerate(("positive", "negative")):
            expected = reference.picture("value", trajectory, step, kind)
            np.testing.assert_allclose(pixels(picture(page, index, place)), expected, atol=2)
    assert_numbers(page, 1, sum_of(run.read("attributions", MAP, "value", 1), 13))
    strip = page.locator(".strip").nth(1)
    strip.scroll_into_view_if_needed()
    width = strip.bounding_box()["width"]
    strip.click(position={"x": width * 30.5 / NUM_STEPS, "y": 20})  # second trajectory
    assert shown_frame(page) == (1, 27)
    page.keyboard.press("End")
    assert "trajectory 2, frame 110" in row(page, 1).inner_text()


def test_features_are_named_and_scored_by_objects(run, browser, tmp_path):
    objects = ResultStore(tmp_path / "objects", OBJECT_FILES)
    objects.open({})
    auc = np.array([0.9, 0.6, 0.4, 0.81, 0.55, np.nan, 0.5, 0.52, np.nan, np.nan])
    scores = pd.DataFrame({
        "feature": np.repeat(range(5), 2), "kind": ["coin", "saw_blade"] * 5, "auc": auc,
        "low_95": auc - 0.05, "high_95": auc + 0.05, "chance": 0.5, "chance_low": 0.45,
        "chance_high": 0.55, "frames": [30, 20] * 5})
    features = read_features(run.folder / "features", MAP)
    for layer, checksum in ((MAP, features.checksum), (UNITS, "0" * 64)):  # UNITS: other features
        objects.write("scores", layer, value=scores)
        objects.write("names", layer, value={
            "features_sha256": checksum, "score": 0.7, "score_low_95": 0.65, "score_high_95": 0.75,
            "score_chance": 0.52, "features": [
                {"name": name} for name in ("coin", "saw_blade", None, None, None)]})
    checks = tmp_path / "checks"
    checks.mkdir()
    (checks / "report.md").write_text(
        '<a id="deletion"></a>\n\n## Deletion\n\n![curves](deletion.png)\n')
    (checks / "deletion.csv").write_text("layer,output")
    (tmp_path / "labels.json").write_text(json.dumps({MAP: {"2": "my name"}}))
    page_folder = exported(run, tmp_path / "out" / "page", "--objects_dir", str(objects.path),
                           "--labels", str(tmp_path / "labels.json"), "--checks_dir", str(checks))
    report = (page_folder.path / "report.html").read_text()
    assert '<a id="deletion">' in report and 'src="../../checks/deletion.png"' in report
    manifest = read_script(page_folder.data_file("manifest"))
    layers = manifest["layers"]
    assert [layer["objects"] is not None for layer in layers] == [False, True, False]
    assert layers[manifest["start"]["layer"]]["name"] == MAP  # the only layer with object scores
    with opened_page(browser, f"{page_folder.page_file.as_uri()}#layer={MAP}", **WIDE) as page:
        items = section(page, "legend").locator("li")
        stable = np.array(features.facts["stability"]) >= MIN_STABILITY
        assert [items.nth(k).locator("input").get_attribute("placeholder") for k in range(5)] == [
            word if found else "name…"
            for word, found in zip(("coin", "saw blade", *3 * ("name…",)), stable)]
        assert "coin 0.900" in items.nth(0).inner_text()
        names = page.get_by_role("combobox", name="Add a curve").locator("option").all_inner_texts()
        assert {"2 my name in value", "feature 3 in value"} <= set(names)
        score = "object score (95 % 0.650 to 0.750; chance 0.520)"
        assert score in section(page, "checks").inner_text()
        link = section(page, "checks").locator("a")
        assert link.get_attribute("href") == "report.html#deletion"
        page.get_by_role("button", name="examples of feature 2").click()
        lines = page.get_by_role("table", name="objects").locator("tbody tr")
        assert [line.split("\t") for line in lines.all_inner_texts()] == [
            ["saw blade", "0.810", "0.760 to 0.860"], ["coin", "0.400", "0.350 to 0.450"]]
        assert ["chance" in (line.get_attribute("class") or "") for line in lines.all()] == [
            False, True]


def test_failures_are_marked_by_what_ended_them(run, browser, tmp_path):
    page_folder = exported(run, tmp_path / "page", "--failure_causes")
    steps = run.steps
    ends = np.flatnonzero(steps.ended)
    causes = recorded_causes(run.recording, steps.episode[ends].tolist())
    assert causes  # an untrained agent fails
    expected = {}
    for end in ends:
        if steps.episode[end] in causes:
            expected.setdefault(causes[steps.episode[end]], []).append(
                [int(steps.trajectory[end]), int(end - steps.bounds[steps.trajectory[end]])])
    failures = read_script(page_folder.data_file("manifest"))["failures"]
    assert {each["cause"]: each["steps"] for each in failures} == expected
    cause, ((trajectory, step), *_) = next(iter(expected.items()))
    first = min(place for steps in expected.values() for place in steps)
    with opened_page(browser, page_folder.page_file.as_uri(), **WIDE) as page:
        assert shown_frame(page) == (first[0] + 1, first[1] + 1)  # opens at the first failure
        totals = run.read("attributions", MAP, "value", first[0]).totals[first[1], :-1]
        assert pressed(page) == [str(np.abs(totals).argmax() + 1)]  # the feature shown alone
        assert f"value by {abs(totals).max():.3g}"[:10] in page.locator(".legend .why").inner_text()
        assert page.get_by_text("Episodes without a reward").count() == 0
        page.get_by_text(f"Failures: {cause}").click()
        page.get_by_role("list", name=f"Failures: {cause}").get_by_role("button").first.click()
        assert shown_frame(page) == (trajectory + 1, step + 1)
        assert f"failure: {cause}" in facts(page)["Frame"]
        assert f"the episode fails: {cause}" in page.locator(
            "[aria-live=polite]").last.text_content()
        show(page, f"trajectory={trajectory + 1}&frame={step}&window={NUM_STEPS}")
        assert "failure" not in facts(page)["Frame"]
        mark = colours(page.locator(".strip canvas"), [((step + 1) / NUM_STEPS, 0.88)])
        np.testing.assert_allclose(mark, [[0xe0, 0x20, 0x0a]], atol=2)


def test_without_failures_it_opens_at_the_largest_attribution_to_a_feature(run):
    agent = SimpleNamespace(
        steps=dataclasses.replace(run.steps, ended=np.zeros_like(run.steps.ended)),
        opening_layer=lambda: MAP, outputs_at=lambda layer: ["value"],
        attribution=lambda *names: vars(run.read("attributions", *names)))
    sizes = np.stack([np.abs(run.read("attributions", MAP, "value", number).totals[:, :-1])
                      for number in (0, 1)])
    assert find_opening(agent, []) == np.unravel_index(sizes.argmax(), sizes.shape)


def test_an_edited_agent_is_shown_beside_the_original_at_the_same_level(run, browser, tmp_path,
                                                                        capsys):
    edited = write_edited(run, tmp_path)
    flags = ("--beside_agent_file", str(edited.agent), "--beside_data_dir",
             str(edited.recording.path), "--beside_attribution_dir", str(edited.attributions.path))
    page_folder = exported(run, tmp_path / "page", *flags)
    manifest = read_script(page_folder.data_file("manifest"))
    assert manifest["agents"] == [run.agent.name, "edited.pth"]
    assert manifest["agent_of"] == [0, 0, 1, 1] and len(manifest["trajectories"]) == 4
    assert sum(each["title"].startswith("edited.pth: ") for each in manifest["bookmarks"]) >= 3
    steps, theirs = run.steps, edited.steps
    last_level = steps.episode[:NUM_STEPS].tolist().index(steps.episode[NUM_STEPS - 1])
    with opened_page(browser, f"{page_folder.page_file.as_uri()}#layer={MAP}&frame=7", **WIDE
                     ) as page:
        page.get_by_role("combobox", name="second trajectory").select_option("2")
        assert page.get_by_role("checkbox", name="match levels").is_checked()
        for step in (6, last_level + 2):  # in the first and in the last level of this trajectory
            show(page, f"trajectory=1&frame={step + 1}&beside=3&level=same&row=value")
            level = steps.level[step]
            same = np.flatnonzero(theirs.level[:NUM_STEPS] == level)
            ago = step - np.flatnonzero(steps.level[:NUM_STEPS] == level)[0]
            at = same[min(ago, len(same) - 1)] if len(same) else step
            assert f"trajectory 3 of edited.pth, frame {at + 1}" in row(page, 1).inner_text()
            assert_numbers(page, 1, sum_of(edited.read("attributions", MAP, "value", 0), at))
            levels = [facts(page, k)["Level"] for k in (0, 1)]
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
        left = 16 + 320 + 16 + 432 + 16 - 16  # right of the observation and the chart
        expected = reference.picture("value", trajectory, step, "positive", smoothing=0)
        np.testing.assert_allclose(view.tile_of(image[:, left:], line), expected, atol=2)


def test_a_rows_numbers_are_those_of_the_files(page, run):
    show(page, "trajectory=2&frame=12&row=log_prob_any_right&row=activations")
    found = run.read("attributions", MAP, "log_prob_any_right", 1)
    assert_numbers(page, 0, sum_of(found, 11))
    line = row(page).locator(".sum").inner_text()
    assert line.startswith(RIGHT) and "from memory alone" in line  # the agent has a GRU
    gap = parse_number(re.search(r"completeness error (\S+) %", line)[1])
    assert gap == pytest.approx(100 * found.gap[11], rel=0.06, abs=1e-3)
    cells = run.read("activations", MAP, 1).cells[11].astype(float)
    assert_numbers(page, 1, cells.sum(axis=(0, 1)), atol=1e-3)
    assert row(page, 1).locator(".sum").count() == 0


def hex_colour(feature):
    return np.array([int(view.PALETTE[feature][i:i + 2], 16) for i in (0, 2, 4)], float)


# Machado et al. (2009), severity 1; rows of matrices for linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
               [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
               [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
               [0.004733, 0.691367, 0.303900]]}
TO_XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
                   [0.0193339, 0.1191920, 0.9503041]])


def test_colours_of_features_differ_for_colour_blind_readers():
    source = (Path(__file__).parents[1] / "web" / "attribution" / "lib" / "paint.js").read_text()
    words = re.findall(r"'([0-9a-f]{6})'", source.partition("const APART = [")[2].partition("]")[0])
    assert tuple(words) == view.PALETTE
    rgb = np.array([[int(word[i:i + 2], 16) / 255 for i in (0, 2, 4)]
                    for word in [*words, "ffffff"]])  # the residual is white
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    for kind, matrix in BLINDNESS.items():
        xyz = np.clip(linear @ np.transpose(matrix), 0, 1) @ TO_XYZ.T / [0.95047, 1, 1.08883]
        root = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz * (29 / 6) ** 2 / 3 + 4 / 29)
        lab = root @ [[0, 500, 0], [116, -500, 200], [0, 0, -200]]
        distances = np.linalg.norm(lab[:, None] - lab, axis=-1)
        assert distances[np.triu_indices(len(lab), 1)].min() > 25, kind


def test_bars_have_the_height_and_colour_of_their_numbers(page, run):
    show(page, "trajectory=1&frame=20&chart=bars")
    totals = run.read("attributions", MAP, "value", 0).totals.astype(float)
    highest, lowest = totals.max(axis=1), totals.min(axis=1)
    top = max(0, np.quantile(highest, 0.9), highest.max() / 5)
    bottom = -max(0, np.quantile(-lowest, 0.9), -lowest.min() / 5)
    image = image_of(row(page).locator(".below canvas").first)
    pad = (top - bottom) * 0.03
    low, high = len(image) - 18, 8

    def place(value):
        return low + (value - bottom + pad) / (top - bottom + 2 * pad) * (high - low)

    width, clear = (image.shape[1] - 42) / (NUM_FEATURES + 1), 0
    for f in range(NUM_FEATURES):
        column = image[:, int(42 + (f + 0.5) * width)]
        own = np.flatnonzero(np.abs(column - hex_colour(f)).max(axis=1) <= 2)
        ends = place(np.clip(totals[19, f], bottom, top)), place(0)
        if abs(ends[0] - ends[1]) >= 4 and bottom <= totals[19, f] <= top:
            assert len(own) == pytest.approx(abs(ends[0] - ends[1]), abs=3.5)
            assert own.mean() == pytest.approx(np.mean(ends), abs=2)
            clear += 1
    assert clear
    # A bar that leaves the chart has a gap near its end.
    outside = np.argwhere((totals[:, :-1] > top) | (totals[:, :-1] < bottom))
    step, f = outside[0]
    show(page, f"trajectory=1&frame={step + 1}&chart=bars")
    image = image_of(row(page).locator(".below canvas").first)
    column = image[:, int(42 + (f + 0.5) * width)]
    end = place(np.clip(totals[step, f], bottom, top))
    inward = 1 if totals[step, f] > 0 else -1
    for by, is_gap in ((6, False), (16.5, True)):
        pixel = column[round(end + by * inward)]
        assert (np.abs(pixel - hex_colour(f)).max() > 2) == is_gap, by


def test_the_last_steps_show_their_numbers_and_frames(page, run, reference):
    show(page, "trajectory=2&frame=9&row=value&row=log_prob_any_right")
    found = run.read("over_time", MAP, "value", LAGS, 1)
    assert page.locator(".memory").count() == 1  # only for the first output
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


def test_controls_change_the_view(page):
    for name, value in (("gain", "5"), ("smoothing", "2")):
        page.get_by_role("slider", name=name).fill(value)
    for name in ("over the observation", "residual"):
        page.get_by_role("checkbox", name=name).click()
    for name, value in (("Palette", "hues"), ("Images", "signed"), ("Chart", "bars"),
                        ("Cells drawn", "95")):
        page.get_by_role("combobox", name=name).select_option(value)
    page.get_by_role("button", name="feature 1 alone").click()
    page.get_by_role("button", name="residual alone").click()
    page.get_by_role("button", name="Add a row").click()
    page.get_by_role("combobox", name="output of row 2").select_option(
        label="activation of the features")
    page.get_by_role("button", name="remove row 1").click()
    assert row(page).get_attribute("aria-label") == "row 1: activation of the features"
    fragment = fragment_of(page)
    for name, value in {"gain": "3.2", "smoothing": "2", "ground": "black", "residual": "shown",
                        "palette": "hues", "above": "95", "sign": "signed", "chart": "bars",
                        "alone": "1,0", "row": "activations"}.items():
        assert fragment[name] == [value], name


def test_playing_goes_both_ways_and_stops_at_the_ends(page):
    for start, button, end in ((NUM_STEPS - 3, "play", NUM_STEPS), (4, "play backwards", 1)):
        show(page, f"trajectory=1&frame={start}&speed=100")
        page.get_by_role("button", name=button, exact=True).click()
        page.wait_for_function("(end) => document.querySelector('.step b').textContent === end",
                               arg=str(end))
        page.wait_for_selector("[aria-label=play]")
    show(page, f"trajectory=1&frame={NUM_STEPS}&speed=0")
    page.get_by_role("button", name="play", exact=True).click()
    assert shown_frame(page) == (1, 1)  # from the end, it starts again
    page.get_by_role("button", name="pause").click()


def test_the_timeline_is_clicked_dragged_and_zoomed(page):
    show(page, f"trajectory=1&frame=50&window={NUM_STEPS * 2}")
    page.locator(".strip").evaluate("each => each.scrollIntoView({ block: 'center' })")
    box = page.locator(".strip").bounding_box()
    middle = box["y"] + 20

    def across(share):
        return box["x"] + box["width"] * share

    page.mouse.click(across(30.5 / NUM_STEPS), middle)  # all steps are visible
    assert shown_frame(page) == (1, 31)
    show(page, "trajectory=1&frame=50&window=20")
    page.mouse.click(across(0.5 + 4 / 20), middle)  # the mark is in the middle
    assert shown_frame(page) == (1, 54)
    page.mouse.move(across(0.5), middle)
    page.mouse.down()
    page.mouse.move(across(0.5 + 10 / 20), middle, steps=4)
    page.mouse.up()
    assert shown_frame(page) == (1, 44)
    for by, frames in ((100, 25), (-100, 20)):
        page.mouse.wheel(0, by)
        page.wait_for_timeout(100)
        shown = page.get_by_role("spinbutton", name="Frames shown")
        assert int(shown.input_value()) == frames


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
    for key, frame in (("ArrowRight", (1, 6)), ("ArrowLeft", (1, 5)), ("End", (1, NUM_STEPS)),
                       ("Home", (1, 1)), ("Shift+ArrowRight", (2, 1)), ("Shift+ArrowLeft", (1, 1))):
        page.keyboard.press(key)
        assert shown_frame(page) == frame, key
    layers = page.locator("input[name=layer]")
    for key, layer in (("]", 2), ("[", 1)):
        page.keyboard.press(key)
        assert layers.nth(layer).is_checked()
    for key in ("2", "0", "8"):  # there is no feature 8
        page.keyboard.press(key)
    assert pressed(page) == ["2", "0"]
    # Keys belong to the page after a click on a control, and to the control after Tab.
    layers.nth(1).click()
    page.get_by_role("slider", name="gain").click()
    gain = page.get_by_role("slider", name="gain").input_value()
    for key, frame in (("End", NUM_STEPS), ("ArrowLeft", NUM_STEPS - 1)):
        page.keyboard.press(key)
        assert shown_frame(page) == (1, frame)
    layers.nth(1).click()
    page.keyboard.press("ArrowLeft")
    assert shown_frame(page) == (1, NUM_STEPS - 2) and layers.nth(1).is_checked()
    assert page.get_by_role("slider", name="gain").input_value() == gain
    page.keyboard.press("Tab")
    page.get_by_role("slider", name="gain").focus()
    page.keyboard.press("ArrowLeft")
    assert shown_frame(page) == (1, NUM_STEPS - 2)
    assert page.get_by_role("slider", name="gain").input_value() == str(int(gain) - 1)
    page.evaluate("document.activeElement.blur()")
    show(page, "trajectory=1&frame=60&speed=1")
    page.keyboard.press("Space")
    page.keyboard.press("ArrowLeft")  # sets the direction while playing
    assert page.locator("[aria-label=play]").count() == 1
    assert page.locator("[aria-label='pause'][title='Play backwards']").count() == 1
    page.keyboard.press("Space")
    page.get_by_role("checkbox", name="keyboard shortcuts").uncheck()
    page.locator("#main").focus()
    here = shown_frame(page)
    page.keyboard.press("ArrowRight")
    assert shown_frame(page) == here


def test_the_address_holds_the_whole_view_and_what_does_not_fit_is_left_out(browser, folder):
    fragment = ("layer=block3&trajectory=2&frame=33&row=log_prob_any_right&row=value&gain=2&"
                "smoothing=0.75&above=95&sign=combined&chart=bars&palette=hues&window=64&speed=30&"
                "ground=black&residual=shown&alone=2%2C0&curve=value&curve=value%2C2&mark=1.7&"
                "beside=1&ahead=-3&keys=off&name=block3%2C3%2Cbig%2C+red&notes=a+%3Cb%3E")
    strange = ("layer=toString&trajectory=99&frame=5&row=toString&gain=-1&sign=constructor&"
               "alone=7,toString,-1,1&above=x&name=x,1,y&name=block3,9,y&curve=x,1&curve=value,9&mark=9.9&mark=__proto__&window=x")
    with opened_page(browser, f"{folder.page_file.as_uri()}#{fragment}", **WIDE) as page:
        assert shown_frame(page) == (2, 33)
        assert fragment_of(page) == parse_qs(fragment)
        assert page.get_by_role("textbox", name="Notes").input_value() == "a <b>"
        assert page.get_by_role("textbox", name="name of feature 3").input_value() == "big, red"
    with opened_page(browser, f"{folder.page_file.as_uri()}#{strange}", **WIDE) as page:
        assert shown_frame(page)[1] == 5 and page.locator(".row").count() == 1
        assert set(fragment_of(page)) == {"layer", "trajectory", "frame", "row", "alone"}


def test_the_published_address_is_understood(browser, folder):
    with served(folder.path) as server, opened_page(browser, server, **WIDE) as page:
        for query, layer, place in (
                ("?layer=2&trajectory=2&frame=17", MAP, (2, 17)), ("?trajectory=2", MAP, (2, 1)),
                (f"?layer={UNITS}&trajectory=1&frame=3", UNITS, (1, 3))):
            page.goto(server + query)
            page.wait_for_selector(SHOWN)
            assert shown_frame(page) == place
            assert page.locator("input[name=layer]:checked").evaluate(
                "each => each.closest('label').querySelector('span').textContent") == layer


def test_bookmarks_go_where_they_say(page, run, reference, advantages):
    lists = {each["title"]: each["steps"] for each in reference.manifest["bookmarks"]}
    worst = lists["Worse than predicted (unit uncertain)"]  # because the agent is untrained
    for trajectory, step, score in worst:
        rows = slice(*run.steps.bounds[trajectory:trajectory + 2])
        of_episode = run.steps.episode[rows] == run.steps.episode[rows.start + step]
        assert score == pytest.approx(advantages[rows][of_episode].min())
    assert [each[2] for each in worst] == sorted(each[2] for each in worst)
    page.get_by_role("list", name="Worse than predicted").get_by_role("button").first.click()
    assert shown_frame(page) == (worst[0][0] + 1, worst[0][1] + 1)
    assert lists["Largest completeness errors"][0][2] == pytest.approx(max(
        run.read("attributions", MAP, "value", number).gap.max() for number in (0, 1)))
    show(page, "trajectory=2&frame=8")
    page.get_by_role("button", name="Bookmark this frame").click()
    own = page.get_by_role("list", name="Your bookmarks")
    assert own.get_by_role("button").count() == 1 and fragment_of(page)["mark"] == ["2.8"]
    page.get_by_role("button", name="Bookmark this frame").click()
    assert own.count() == 0


def test_examples_are_the_files(page, run):
    page.get_by_role("button", name="examples of feature 2").click()
    dialog = page.get_by_role("dialog")
    canvas = dialog.locator("canvas").first
    dialog.get_by_role("slider", name="number of patches").fill("2")
    page.wait_for_selector(SHOWN)
    canvas.hover()  # hovering draws without transparency
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
        error = np.abs(ours - patch).mean()  # the images are lossy and smoothed
        assert error < 12 and error < min(np.abs(ours - patch_at(i, j, shift)).mean()
                                          for shift in (-2, 2)) / 2
        page.mouse.move(box["x"] + box["width"] * (j + 0.5) / 8,
                        box["y"] + box["height"] * (i + 0.5) / 8)
        page.mouse.down()
        whole = pixels(canvas)
        page.mouse.up()
        assert np.abs(whole - frame).mean() < 6
        assert np.abs(pixels(canvas) - frame).mean() > 6


def test_the_popup_zooms_and_leads_to_frames(page, reference):
    page.get_by_role("button", name="examples of feature 1").click()
    dialog = page.get_by_role("dialog")
    dialog.locator("canvas").first.hover()
    page.mouse.wheel(0, 100)
    page.wait_for_timeout(50)
    zoom = dialog.get_by_role("slider", name="zoom")
    assert float(zoom.input_value()) == pytest.approx(4.8)
    summaries = [each for each in reference.manifest["summaries"] if each["layer"] == 1]
    means = map(parse_number, dialog.locator("table td").all_inner_texts())
    assert [*means] == pytest.approx([each["means"][0] for each in summaries[:2]], rel=6e-3)
    dialog.get_by_text(VALUE, exact=True).last.click()
    trajectory, step, total = summaries[0]["strongest"][0][0]
    value = reference.run.read("attributions", MAP, "value", trajectory).totals[step, 0]
    assert abs(total) == pytest.approx(abs(value))
    dialog.locator("details[open] button").first.click()
    assert shown_frame(page) == (trajectory + 1, step + 1) and dialog.count() == 0


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
    assert row(page).locator("canvas").count() == 2  # observation and chart
    assert_numbers(page, 0, sum_of(run.read("attributions", UNITS, "value", 0), 0))
    assert "was not attributed" in row(page, 1).inner_text()
    assert section(page, "legend").locator("canvas").count() == 0


def test_the_errors_and_the_unit_are_said(page, run):
    gaps = np.concatenate([run.read("attributions", MAP, "value", each).gap for each in (0, 1)])
    cells = section(page, "checks").locator("tbody tr").first.locator("td")
    *texts, above = cells.all_inner_texts()
    for text, share in zip(texts, (np.median(gaps), np.quantile(gaps, 0.99)), strict=True):
        assert text == "< 0.01 %" if share < 1e-4 else parse_number(
            text.removesuffix(" %")) == pytest.approx(100 * share, rel=6e-3)
    assert above == f"{(gaps > 0.05).sum()} of {len(gaps)}"
    # The agent is untrained: the warning appears here and at both lists of advantages.
    assert page.get_by_text("seem to have different units").count() == 3


def test_missing_and_other_data_is_said(browser, folder, tmp_path):
    copy = AttributionPageFolder(shutil.copytree(folder.path, tmp_path / "page"))
    copy.data_file("attribution_01_00_00000").unlink()
    page = browser.new_page()
    page.goto(f"{copy.page_file.as_uri()}#layer={MAP}&trajectory=1")
    page.wait_for_selector(SHOWN)
    message = page.get_by_role("alert").inner_text()
    assert "attribution_01_00_00000.js is missing or damaged" in message
    manifest = copy.data_file("manifest")
    manifest.write_bytes(data_script(manifest, {**read_script(manifest), "format": FORMAT + 1}))
    page.reload()
    assert "another version" in page.get_by_role("alert").inner_text()
    page.close()


@pytest.mark.parametrize("size", [(1440, 900), (390, 844)])
def test_attributions_are_above_the_fold(browser, folder, size):
    with opened_page(browser, folder.page_file.as_uri(), viewport={
            "width": size[0], "height": size[1]}) as page:
        for kind in (0, 1):
            box = picture(page, 0, kind).bounding_box()
            assert box["y"] + box["height"] <= size[1] and box["width"] > 150
