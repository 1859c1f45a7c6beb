"""export_panel.py: contents of the panel's files, and error messages of one sentence."""

import json
import re
import shutil

import numpy as np
import pandas as pd
import pytest
from conftest import refusal
from page_exports import HOSTILE_NAME
from page_view import array_of, bytes_of, picture_of, read_script
from panel_run import (
    BEHAVIOURS,
    DREAMS,
    EXAMPLES,
    FEATURES,
    LACKING,
    NUM_EPISODES,
    NUM_RECORDED,
    NUM_SAMPLES,
    NUM_STEPS,
    NUM_SWAPPED,
    READ_AT,
    RED_OF_MAPS,
    SWAPPED,
    TITLES,
    TYPES,
    UNALTERED,
    coordinate_gradients,
    saliency_folder,
    write_decisions,
    write_features,
    write_run,
)

import export_panel
from analysis.behaviours import BEHAVIOUR_FILES
from analysis.panel_files import NO_BEHAVIOUR, NOT_RECORDED, PanelFolder
from common.files import save_json
from common.step_results import StepResults
from envs.objects import action_labels
from interventions.hidden_states_folder import hidden_state_results

TOTAL = NUM_SAMPLES + NUM_SWAPPED


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


@pytest.fixture(scope="module")
def exported(panel_export):
    """A run and its panel, which no test may change."""
    return panel_export.run, PanelFolder(panel_export.page_file.parent)


def content(folder: PanelFolder, name: str) -> dict:
    """Return the content of a data file of the page."""
    return read_script(folder.data_file(name))


def test_coordinates_and_gradients_are_those_worked_out_by_hand(exported):
    run, folder = exported
    found = array_of(content(folder, "steps")["coordinates"]).reshape(TOTAL, NUM_STEPS, 3)
    np.testing.assert_allclose(found, run.coordinates, rtol=1e-5, atol=1e-6)
    for index, name in enumerate(TYPES):  # NaN where a sample lacks a type
        found = array_of(content(folder, f"gradients_{index:02d}")["gradients"])
        np.testing.assert_allclose(found.reshape(TOTAL, NUM_STEPS, 3),
                                   coordinate_gradients(run.gradients[name]), rtol=1e-5, atol=1e-6)


def test_numbers_of_the_steps(exported):
    run, folder = exported
    samples = run.samples
    has_saliency = np.ones((TOTAL, len(TYPES)), bool)
    has_saliency[LACKING[0], 1] = has_saliency[NUM_SAMPLES:, 1:] = False
    expected = {
        **{name: getattr(samples, name) for name in ("rewards", "terminals", "values")},
        "entered": samples.actions, "answers": samples.log_probs.argmax(2),
        "probabilities": np.exp(samples.log_probs).max(2), "has_saliency": has_saliency,
        "behaviours": np.array([*BEHAVIOURS, *[NO_BEHAVIOUR] * (TOTAL - len(BEHAVIOURS))])}
    steps = content(folder, "steps")
    for name, array in expected.items():
        np.testing.assert_allclose(array_of(steps[name]), array.ravel(), rtol=1e-6, err_msg=name)


def test_images_are_the_steps_from_left_to_right(exported):
    run, folder = exported
    for sample in (0, LACKING[0], TOTAL - 1):
        frames = content(folder, f"frames_{sample:05d}")
        assert frames["recorded"] is None  # the samples name no recording
        strip = np.concatenate(list(run.samples.frames[sample]), axis=1)
        assert np.abs(picture_of(frames["frames"]).astype(int) - strip).mean() < 3
        saliency = content(folder, f"pictures_{sample:05d}")["saliency"]
        lacks = [1] if sample == LACKING[0] else [1, 2, 3] if sample >= NUM_SAMPLES else []
        assert [i for i, each in enumerate(saliency) if each is None] == lacks
        for index, each in enumerate(saliency):
            if each is not None:
                maps = [picture_of(strip) for strip in each]
                assert [strip[..., 2].mean() for strip in maps] == pytest.approx(
                    [80 + 50 * index] * len(maps), abs=4)
                reds = [] if sample >= NUM_SAMPLES else RED_OF_MAPS
                assert [strip[..., 0].mean() for strip in maps] == pytest.approx(
                    [15 * sample, *reds], abs=4)


def test_manifest_names_what_there_is(exported):
    manifest = content(exported[1], "manifest")
    assert manifest["experiment"] == HOSTILE_NAME
    assert manifest["sets"] == [
        {"name": UNALTERED, "numbers": [*range(NUM_SAMPLES)], "num_steps": NUM_STEPS,
         "unaltered": None, "starts": [*range(NUM_SAMPLES)], "variants": [""] * NUM_SAMPLES},
        {"name": SWAPPED, "numbers": [*range(NUM_SWAPPED)], "num_steps": NUM_STEPS,
         "unaltered": UNALTERED, "starts": [*range(NUM_SWAPPED)],
         "variants": [""] * NUM_SWAPPED}]
    assert manifest["saliency"] == [
        {"name": name, "title": title, "steps": [READ_AT], "counterfactual": False,
         "samples": number}
        for name, title, number in zip(TYPES, TITLES, (TOTAL, NUM_SAMPLES - 1, 9, 9))]
    assert manifest["maps"] == ["pixels", "canvas and scene", "memory"]
    assert manifest["recorded"] == {"shown": NUM_RECORDED, "of": NUM_RECORDED}
    assert [action["name"] for action in manifest["actions"]] == list(action_labels(""))
    assert manifest["actions"][2] == {"name": "upleft", "direction": [-1, 1]}
    assert manifest["frame"] == [64, 64] and manifest["num_ics"] == 3


def test_recorded_states_are_evenly_spaced_and_have_their_positions(tmp_path, capsys):
    run = write_run(tmp_path / "run", with_recording=True)
    output = PanelFolder(tmp_path / "panel")
    flags = run.arguments("--output_dir", str(output.path), "--max_states", "4")
    assert export_panel.main(flags) == 0
    assert content(output, "manifest")["recorded"] == {
        "shown": 4, "of": NUM_RECORDED, "positions": ["player_x", "player_y"]}
    found = {name: array_of(each) for name, each in content(output, "recorded").items()}
    shown = [0, 100, 199, 299]
    np.testing.assert_array_equal(found.pop("coordinates").reshape(-1, 3), run.recorded[shown])
    np.testing.assert_allclose(np.stack([*found.values()], axis=1), run.positions[shown], rtol=1e-6)
    hidden = hidden_state_results(run.folder / "hx_analysis_precomp", NUM_EPISODES)
    np.save(hidden.file("sources"), hidden.read("sources")[:-1])
    assert "300 rows of player_x, but there are 299 recorded states" in refusal(
        export_panel.main, flags, capsys)


def test_published_samples_and_saliency_have_no_descriptions(run, tmp_path):
    for pattern in ("saliency_*.json", "actions.npy", "origin.json", "recording.json",
                    "settings*.json"):
        for path in run.folder.rglob(pattern):
            path.unlink()
    saliency_folder(run).file_of("env_h", 7, "value").unlink()  # so this sample is incomplete
    output = PanelFolder(tmp_path / "panel")
    assert export_panel.main(run.arguments("--output_dir", str(output.path))) == 0
    steps, manifest = content(output, "steps"), content(output, "manifest")
    assert set(array_of(steps["entered"])) == {NOT_RECORDED}
    assert array_of(steps["behaviours"])[:6].tolist() == BEHAVIOURS.tolist()
    assert [each["steps"] for each in manifest["saliency"]] == [[]] * 4
    assert [each["samples"] for each in manifest["saliency"]] == [TOTAL - 1, 8, 9, 9]
    assert content(output, "pictures_00007")["saliency"][0] is None
    assert [each["unaltered"] for each in manifest["sets"]] == [None, None]


def test_samples_without_saliency_or_behaviours_can_be_shown(run, tmp_path):
    for pattern in ("saliency_*.json", "grad_*.npy", "clusters_per_sample_6.npy"):
        for path in run.folder.rglob(pattern):
            path.unlink()
    output = PanelFolder(tmp_path / "panel")
    arguments = run.arguments("--output_dir", str(output.path), "--num_samples", "2")
    for flag in ("--num_behaviour_samples", "--num_episodes"):
        at = arguments.index(flag)
        del arguments[at:at + 2]
    assert export_panel.main(arguments) == 0
    manifest = content(output, "manifest")
    assert manifest["saliency"] == [] and manifest["behaviours"] is False
    assert [each["numbers"] for each in manifest["sets"]] == [[0, 1], [0, 1]]
    assert "behaviours" not in content(output, "steps")


@pytest.fixture
def features(run):
    """Flags of export_panel.py that show the run's sparse features."""
    return run.arguments(*write_features(run))


def test_features_are_those_of_their_tables_strongest_first(run, features, tmp_path):
    output = PanelFolder(tmp_path / "panel")
    flags = [*features, "--output_dir", str(output.path)]
    assert export_panel.main(flags) == 0
    assert content(output, "features")["features"] == FEATURES
    assert content(output, "manifest")["features"] == [each["number"] for each in FEATURES]
    examples = picture_of(content(output, "feature_007")["examples"])
    assert examples.shape == (128, 3 * 128, 3)  # without the empty tile of the sheet
    assert np.abs(examples[64, 64::128].astype(int) - EXAMPLES).max() < 8
    assert content(output, "feature_003")["examples"] is None
    # Without the samples of the dreams, and without results in the real game.
    dreams = run.folder / "dreams" / "dreams.csv"
    pd.read_csv(dreams).drop(columns=["active", "others_active"]).to_csv(dreams, index=False)
    flags.remove(DREAMS)
    assert export_panel.main(flags) == 0
    found = content(output, "features")["features"]
    assert found[0]["dream"] == {**FEATURES[0]["dream"], "active": None, "others_active": None,
                                 "sample": None}


def test_a_panel_without_features_has_none_of_their_files(exported):
    assert content(exported[1], "manifest")["features"] == []
    assert not [*exported[1].path.glob("data/feature*")]


MISTAKES_IN_FEATURES = {
    "features of another agent": ("features/settings.json", "agent_sha256",
                                  "features in .* were found with an agent other than"),
    "dreams of other features": ("dreams/made_to_order.json", "sae_sha256",
                                 "starts in .* were optimised for other features than those in")}


@pytest.mark.parametrize("mistake", MISTAKES_IN_FEATURES)
def test_features_that_do_not_belong_together_are_refused(run, features, tmp_path, capsys, mistake):
    name, key, words = MISTAKES_IN_FEATURES[mistake]
    settings = json.loads((run.folder / name).read_text())
    save_json(run.folder / name, {**settings, key: "1" * 64})
    argv = [*features, "--output_dir", str(tmp_path / "panel")]
    assert re.search(words, refusal(export_panel.main, argv, capsys))
    del argv[argv.index("--features_dir"):argv.index("--dreams_dir")]
    assert "give --features_dir as well" in refusal(export_panel.main, argv, capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def describe(run, name, **changes):
    path = saliency_folder(run).file_of("description", 3, name)
    save_json(path, {**json.loads(path.read_text()), **changes})


def change(run, pattern, edit):
    """Apply an edit to all arrays whose files match a pattern."""
    for path in run.folder.glob(pattern):
        np.save(path, edit(np.load(path)))


def behaviours_of(run):
    return StepResults(run.folder / "combined_agent_env_hx_analysis_precomp", BEHAVIOUR_FILES, 6)


MISTAKES = {
    "too short a gradient": (lambda run: np.save(saliency_folder(run).file_of(
        "hidden_states", 4, "value"), np.zeros((4, 4), np.float32)), r"has the shape \(4, 4\)"),
    "other directions": (lambda run: describe(run, "hx_direction_1_ica", matrices_sha256={
        "hx_mu_7.npy": "0"}), "with other directions than those of this panel"),
    "other steps": (lambda run: describe(run, "value", common_timesteps=[1]),
                    "evaluated at different steps"),
    "behaviours of others": (lambda run: save_json(behaviours_of(run).settings_file, {
        "samples": "rand_init", "sample_numbers": list(range(6))}),
        "behaviours in .* belong to samples in rand_init"),
    "too many behaviours": (lambda run: np.save(behaviours_of(run).file("per_sample"), np.zeros(
        7, dtype=int)), "holds 7 behaviours, but there are 6 samples"),
    "another agent": (lambda run: change(run, "informed*/*/agent_hs.npy", lambda a: a[:, :3]),
                      "4 hidden units, but the agent has 3"),
    "another agent in one folder": (
        lambda run: change(run, "*swapped*/*/agent_hs.npy", lambda a: a[:, :3]),
        "and 3 hidden units, but the first folder has .* and 4"),
    "smaller frames": (lambda run: change(run, "*swapped*/*/ims.npy", lambda a: a[:, ::2]),
                       r"frames of the shape \(32, 64, 3\) and .* but the first folder has \(64, "),
    "no samples": (lambda run: shutil.rmtree(run.folder / SWAPPED), "holds no samples"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_sentence_and_leave_nothing(run, tmp_path, capsys, mistake):
    make, words = MISTAKES[mistake]
    make(run)
    argv = run.arguments("--output_dir", str(tmp_path / "panel"))
    assert re.search(words, refusal(export_panel.main, argv, capsys))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_failures_have_their_decisions_and_films(run, exported, tmp_path, capsys):
    output = PanelFolder(tmp_path / "panel")
    argv = run.arguments(*write_decisions(run), "--output_dir", str(output.path))
    assert export_panel.main(argv) == 0
    fatal, lost = content(output, "manifest")["failures"]
    assert fatal == {"number": 5, "cause": "enemy left", "kind": "wrong", "before_end": 3,
                     "taken": "null", "best": "right", "taken_rate": 0.125, "best_rate": 0.75}
    assert lost["number"] == 7 and lost["before_end"] is lost["best_rate"] is None
    assert bytes_of(content(output, "failure_00007")["film"]) == (
        run.folder / "decisions" / "films" / "failures_7.mp4").read_bytes()
    assert content(exported[1], "manifest")["failures"] == []
    settings = run.folder / "decisions" / "settings.json"
    save_json(settings, {**json.loads(settings.read_text()), "agent_sha256": "1" * 64})
    assert re.search("decisions in .* are those with an agent other than",
                     refusal(export_panel.main, argv, capsys))
