"""export_panel.py: the contents of a panel's files, and every mistake as one sentence."""

import json
import re
import shutil

import numpy as np
import pytest
from page_data import array_of, picture_of, read_script
from panel_run import (
    BEHAVIOUR_SAMPLES,
    BEHAVIOURS,
    LACKING,
    NUM_EPISODES,
    NUM_RECORDED,
    NUM_SAMPLES,
    NUM_STEPS,
    NUM_SWAPPED,
    READ_AT,
    SWAPPED,
    TITLES,
    TYPES,
    UNALTERED,
    coordinate_gradients,
    saliency_folder,
    write_run,
)

import export_panel
from analysis.behaviours import BEHAVIOUR_FILES
from analysis.panel_files import NO_BEHAVIOUR, NOT_RECORDED, PanelFolder
from analysis.parameters import BehavioursConfig
from common.files import save_json
from common.game_constants import ACTION_LABELS
from common.parameters import ParameterSet
from common.schemas import SETTINGS_NAME
from common.step_results import StepResults
from interventions.hidden_states_folder import hidden_state_results

TOTAL = NUM_SAMPLES + NUM_SWAPPED
NAME = "</script><img src=x onerror=alert(1)> \u2028 \"it's\""


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A run and its panel, which no test may change."""
    folder = tmp_path_factory.mktemp("panel")
    run = write_run(folder / "run")
    assert export_panel.main(run.arguments("--output_dir", str(folder / "panel"), "--exp_name",
                                           NAME)) == 0
    return run, PanelFolder(folder / "panel")


def content(folder: PanelFolder, name: str) -> dict:
    """Content that a file of data gives to the page."""
    return read_script(folder.data_file(name))


def test_coordinates_are_those_worked_out_by_hand(exported):
    run, folder = exported
    steps = content(folder, "steps")
    found = array_of(steps["coordinates"]).reshape(TOTAL, NUM_STEPS, 3)
    np.testing.assert_allclose(found, run.coordinates, rtol=1e-5, atol=1e-6)
    hx = run.samples.hidden_states[3, 2]
    assert found[3, 2, 0] == pytest.approx((hx[0] - 1) / 4, rel=1e-5)


def test_gradients_are_those_worked_out_by_hand_and_nan_where_missing(exported):
    run, folder = exported
    for index, name in enumerate(TYPES):
        found = array_of(content(folder, f"gradients_{index:02d}")["gradients"])
        np.testing.assert_allclose(found.reshape(TOTAL, NUM_STEPS, 3),
                                   coordinate_gradients(run.gradients[name]), rtol=1e-5, atol=1e-6)
    missing = np.isnan(array_of(content(folder, "gradients_01")["gradients"])).reshape(TOTAL, -1)
    assert missing.all(axis=1).tolist() == [n == 5 for n in range(9)] + [True] * NUM_SWAPPED
    assert not missing[:5].any()


def test_numbers_of_the_steps(exported):
    run, folder = exported
    steps, samples = content(folder, "steps"), run.samples
    for name in ("rewards", "terminals", "values"):
        np.testing.assert_array_equal(array_of(steps[name]), getattr(samples, name).ravel())
    np.testing.assert_array_equal(array_of(steps["entered"]), samples.actions.ravel())
    np.testing.assert_array_equal(array_of(steps["answers"]), samples.log_probs.argmax(2).ravel())
    np.testing.assert_allclose(array_of(steps["probabilities"]),
                               np.exp(samples.log_probs).max(2).ravel(), rtol=1e-6)
    has = array_of(steps["has_saliency"]).reshape(TOTAL, len(TYPES)).astype(bool)
    expected = np.ones((TOTAL, len(TYPES)), bool)
    expected[LACKING[0], 1] = False
    expected[NUM_SAMPLES:, 1:] = False
    np.testing.assert_array_equal(has, expected)
    of_samples = [*BEHAVIOURS, *[NO_BEHAVIOUR] * (TOTAL - len(BEHAVIOURS))]
    assert array_of(steps["behaviours"]).tolist() == of_samples


def test_pictures_are_the_steps_from_left_to_right(exported):
    run, folder = exported
    for sample in range(TOTAL):
        pictures = content(folder, f"pictures_{sample:05d}")
        strip = np.concatenate(list(run.samples.frames[sample]), axis=1)
        frames = content(folder, f"frames_{sample:05d}")
        found = picture_of(frames["frames"])
        assert frames["recorded"] is None  # the samples name no recording
        assert found.shape == strip.shape
        assert np.abs(found.astype(int) - strip).mean() < 3
        lacks = [1] if sample == LACKING[0] else [1, 2, 3] if sample >= NUM_SAMPLES else []
        assert [i for i, each in enumerate(pictures["saliency"]) if each is None] == lacks
        for index, each in enumerate(pictures["saliency"]):
            if each is not None:
                blue = picture_of(each)[..., 2].mean()
                assert blue == pytest.approx(80 + 50 * index, abs=4)


def test_manifest_names_what_there_is(exported):
    _, folder = exported
    manifest = content(folder, "manifest")
    assert manifest["experiment"] == NAME
    assert [(each["name"], each["numbers"], each["num_steps"], each["unaltered"])
            for each in manifest["sets"]] == [
        (UNALTERED, list(range(NUM_SAMPLES)), NUM_STEPS, None),
        (SWAPPED, list(range(NUM_SWAPPED)), NUM_STEPS, UNALTERED)]
    assert [(each["name"], each["title"], each["steps"], each["samples"])
            for each in manifest["saliency"]] == [
        (name, title, [READ_AT], number)
        for name, title, number in zip(TYPES, TITLES, (TOTAL, NUM_SAMPLES - 1, 9, 9))]
    assert manifest["recorded"] == {"shown": NUM_RECORDED, "of": NUM_RECORDED}
    assert manifest["actions"][2] == {"name": "upleft", "direction": [-1, 1]}
    assert [each["name"] for each in manifest["actions"]] == list(ACTION_LABELS)
    assert manifest["actions"][9] == {"name": "special 9", "direction": [0, 0]}
    assert manifest["frame"] == [64, 64] and manifest["num_ics"] == 3


def test_files_of_data_are_plain_ascii_and_all_of_them_are_there(exported):
    _, folder = exported
    names = {path.name for path in folder.data_file("").parent.iterdir()}
    assert names == {"manifest.js", "steps.js", "recorded.js",
                     *(f"gradients_{i:02d}.js" for i in range(len(TYPES))),
                     *(f"{kind}_{i:05d}.js" for i in range(TOTAL) for kind in ("frames",
                                                                               "pictures"))}
    for path in PanelFolder.built().iterdir():
        assert (folder.path / path.name).read_bytes() == path.read_bytes()
    settings = json.loads((folder.path / SETTINGS_NAME).read_text())
    assert settings["saliency_types"] == list(TYPES) and "python" in settings["versions"]


def test_recorded_states_are_evenly_spaced_and_have_their_positions(tmp_path, capsys):
    run = write_run(tmp_path / "run", with_recording=True)
    positions = run.positions
    output = PanelFolder(tmp_path / "panel")
    flags = run.arguments("--output_dir", str(output.path), "--max_states", "4")
    assert export_panel.main(flags) == 0
    assert content(output, "manifest")["recorded"] == {
        "shown": 4, "of": NUM_RECORDED, "positions": ["player_x", "player_y"]}
    found = content(output, "recorded")
    np.testing.assert_array_equal(array_of(found["coordinates"]).reshape(-1, 3),
                                  run.recorded[[0, 100, 199, 299]])
    assert list(found) == ["coordinates", "player_x", "player_y"]
    for name, column in zip(("player_x", "player_y"), positions.T):
        np.testing.assert_allclose(array_of(found[name]), column[[0, 100, 199, 299]], rtol=1e-6)
    hidden = hidden_state_results(run.folder / "hx_analysis_precomp", NUM_EPISODES)
    np.save(hidden.file("sources"), hidden.read("sources")[:-1])
    assert export_panel.main(flags) == 2
    assert "300 rows of player_x, but there are 299 recorded states" in capsys.readouterr().err


def test_published_samples_and_saliency_have_no_descriptions(run, tmp_path):
    for path in [*run.folder.rglob("saliency_*.json"), *run.folder.rglob("actions.npy"),
                 *run.folder.rglob("origin.json"), *run.folder.rglob("recording.json"),
                 *run.folder.rglob("settings*.json")]:
        path.unlink()
    saliency_folder(run).file_of("env_h", 7, "value").unlink()  # so this one is not whole
    output = PanelFolder(tmp_path / "panel")
    assert export_panel.main(run.arguments("--output_dir", str(output.path))) == 0
    steps, manifest = content(output, "steps"), content(output, "manifest")
    assert set(array_of(steps["entered"])) == {NOT_RECORDED}
    assert array_of(steps["behaviours"])[:6].tolist() == BEHAVIOURS.tolist()
    assert [each["steps"] for each in manifest["saliency"]] == [[]] * 4
    assert [each["samples"] for each in manifest["saliency"]] == [TOTAL - 1, 8, 9, 9]
    assert [each["unaltered"] for each in manifest["sets"]] == [None, None]


def test_saliency_that_is_not_finished_is_left_out(run, tmp_path):
    saliency_folder(run).file_of("description", 2, "value").unlink()
    output = PanelFolder(tmp_path / "panel")
    assert export_panel.main(run.arguments("--output_dir", str(output.path))) == 0
    assert content(output, "pictures_00002")["saliency"][0] is None
    assert content(output, "pictures_00003")["saliency"][0] is not None


def test_samples_without_saliency_or_behaviours_can_be_shown(run, tmp_path):
    for path in [*run.folder.rglob("saliency_*.json"), *run.folder.rglob("grad_*.npy")]:
        path.unlink()
    output = PanelFolder(tmp_path / "panel")
    arguments = run.arguments("--output_dir", str(output.path), "--num_samples", "2")
    at = arguments.index("--num_behaviour_samples")
    assert export_panel.main(arguments) == 0
    assert "behaviours" in content(output, "steps")
    assert ParameterSet("tiny").get(BehavioursConfig).num_samples == BEHAVIOUR_SAMPLES
    without_flag = arguments[:at] + arguments[at + 2:]
    assert export_panel.main(without_flag) == 0
    assert "behaviours" in content(output, "steps")
    next(run.folder.rglob("clusters_per_sample_6.npy")).unlink()
    assert export_panel.main(without_flag) == 0
    manifest = content(output, "manifest")
    assert manifest["saliency"] == [] and manifest["behaviours"] is False
    assert [each["numbers"] for each in manifest["sets"]] == [[0, 1], [0, 1]]
    assert "behaviours" not in content(output, "steps")


def other_directions(run):
    path = saliency_folder(run).file_of("description", 3, "hx_direction_1_ica")
    description = json.loads(path.read_text())
    save_json(path, {**description, "matrices_sha256": {"hx_mu_7.npy": "0"}})


def other_steps(run):
    path = saliency_folder(run).file_of("description", 3, "value")
    save_json(path, {**json.loads(path.read_text()), "common_timesteps": [1]})


def behaviours_of_others(run):
    folder = StepResults(run.folder / "combined_agent_env_hx_analysis_precomp", BEHAVIOUR_FILES, 6)
    save_json(folder.settings_file, {"samples": "rand_init", "sample_numbers": list(range(6))})


def too_many_behaviours(run):
    folder = StepResults(run.folder / "combined_agent_env_hx_analysis_precomp", BEHAVIOUR_FILES, 6)
    np.save(folder.file("per_sample"), np.zeros(7, dtype=int))


def fewer_units(run):
    for name in (UNALTERED, SWAPPED):
        for path in (run.folder / name).rglob("agent_hs.npy"):
            np.save(path, np.load(path)[:, :3])


MISTAKES = {
    "too short a gradient": (lambda run: np.save(saliency_folder(run).file_of(
        "hidden_states", 4, "value"), np.zeros((4, 4), np.float32)), r"has the shape \(4, 4\)"),
    "other directions": (other_directions, "of other directions than those of this panel"),
    "other steps": (other_steps, "read at different steps"),
    "behaviours of others": (behaviours_of_others, "behaviours in .* are of samples in rand_init"),
    "too many behaviours": (too_many_behaviours, "holds 7 behaviours, but there are 6 samples"),
    "another agent": (fewer_units, "4 hidden units, but the agent has 3"),
    "another agent in one folder": (
        lambda run: [np.save(path, np.load(path)[:, :3]) for path in
                     (run.folder / SWAPPED).rglob("agent_hs.npy")],
        "and 3 hidden units, but the first folder .* and 4"),
    "smaller frames": (lambda run: [np.save(path, np.load(path)[:, ::2]) for path in
                                    (run.folder / SWAPPED).rglob("ims.npy")],
                       r"frames of the shape \(32, 64, 3\) and .* but the first folder \(64, "),
    "no samples": (lambda run: shutil.rmtree(run.folder / SWAPPED), "holds no samples"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_sentence_and_leave_nothing(run, tmp_path, capsys, mistake):
    make, words = MISTAKES[mistake]
    make(run)
    assert export_panel.main(run.arguments("--output_dir", str(tmp_path / "panel"))) == 2
    error = capsys.readouterr().err
    assert re.search(words, error) and error.count("\n") == 1, error
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_two_folders_of_one_name_are_refused(run, tmp_path, capsys):
    assert export_panel.main(run.arguments("--output_dir", str(tmp_path / "p"), "--samples",
                                           UNALTERED, f"../run/{UNALTERED}")) == 2
    assert "two folders of samples have the name" in capsys.readouterr().err
    assert not (tmp_path / "p").exists()
