"""Claims and stages of the preset `memory`: verdicts and summaries of planted results, missing
studies, and the panel of features."""

import shutil

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from page_view import read_script
from panel_run import FEATURES, NUM_EPISODES, write_features, write_run

import export_panel
from analysis import memory_table
from analysis.memory.lesion_results import LESIONS
from analysis.memory.probe_interventions import PROBE_INTERVENTIONS
from analysis.panel_files import PanelFolder
from common.files import read_json, save_json
from common.results import ResultStore
from interventions.direction_folders import PROBE_ATLAS, SPARSE_FEATURES
from interventions.scan_study import SCANNED
from pipeline.patterns import find
from pipeline.presets import load_preset
from pipeline.stage import PathResolver
from pipeline.stage_files import all_stages
from stats.claims import FINDINGS_NAME, TABLE_NAME

EFFECT = {"control": False, "unaltered": 0.9, "altered": 0.2, "effect": -0.7, "low_95": -0.8,
          "high_95": -0.6, "p": 1e-4, "p_holm": 1e-3, "p_control": 0.05, "claimed": True,
          "num_controls": 19, "control_low": -0.1, "control_high": 0.05}
LABEL = {"group": "g", "probe": "linear", "hidden_state": 0.7, "low_95_hidden": 0.6,
         "high_95_hidden": 0.8, "baseline": "embedding", "baseline_probe": "linear",
         "baseline_score": 0.5, "difference": 0.2, "low_95": 0.1, "high_95": 0.3, "p": 1e-4,
         "num_examples": 900, "num_levels": 30, "p_holm": 0.01, "claimed": True}


def write(folder, study, schema, **tables):
    """Write given tables as results of a study."""
    store = ResultStore(folder / study, schema)
    store.open({"planted": True})
    for entry, rows in tables.items():
        store.write(entry, value=pd.DataFrame(rows))


@pytest.fixture
def studies(tmp_path):
    folder = tmp_path / "analysis" / "memory"
    write(folder, "lesions", LESIONS, effects=[
        {"condition": condition, "label": condition, "outcome": outcome, **EFFECT}
        for condition in ("reset_always", "swap_once") for outcome in ("success", "length")])
    worse = {**LABEL, "difference": -0.2, "low_95": -0.3, "high_95": -0.1}
    write(folder, "probe_atlas", PROBE_ATLAS, comparison=[
        {"label": "velocity_y", "metric": "r2", **LABEL},
        {"label": "action_ahead_50", "metric": "accuracy", **worse},
        {"label": "saw_left_view_8", "metric": "auc", **LABEL, "p_holm": 0.2, "claimed": False}],
        atlas=[
        {"label": "velocity_y", "group": "g", "representation": "untrained", "probe": "network",
         "metric": "r2", "score": 0.8, "low_95": 0.7, "high_95": 0.9, "base": 0.0,
         "shuffled": 0.0, "held_out": 0.0, "num_examples": 900, "num_levels": 30}])
    write(folder, "probe_interventions", PROBE_INTERVENTIONS, open_loop=[
        {"condition": name, "label": name, "outcome": "jump", **EFFECT, "p_control": p_control,
         "ratio_to_random": 0.5, "ratio_to_swap": 0.1}
        for name, p_control in (("more_saw_ahead_probe", 0.6), ("more_saw_ahead_covariance", 0.05),
                                ("less_saw_ahead_probe", 0.05), ("more_velocity_y_probe", 0.05))],
          effects=[{"condition": "a", "label": "a", "outcome": "success", **EFFECT,
                    "claimed": False}])
    write(folder, "sparse_features", SPARSE_FEATURES, dictionaries=[
        {"dictionary": name, "variance_explained": explained, "variance_low": 0.5,
         "variance_high": 0.95, "kl": 0.1, "success": success, "success_unaltered": 0.9,
         "dead": 0.1}
        for name, explained, success in (("units", 0.6, 0.7), ("sae_256", 0.92, 0.87))])
    return folder


def test_verdicts_follow_direction_correction_and_controls(studies, tmp_path):
    memory_table.main(["--studies", str(studies), "--labels", "planted", "--output_dir",
                       str(tmp_path / "table")])
    summary = (tmp_path / "table" / TABLE_NAME).read_text().split("\n\n")[0].splitlines()[2:]
    verdicts = [line.rpartition("<br>")[2].strip(" |*") for line in summary]
    assert verdicts[:5] == ["holds", "does not hold", "does not hold", "holds", "does not hold"]
    assert all("not measured" in line for line in (summary[6], summary[7]))
    table = pd.read_csv(tmp_path / "table" / FINDINGS_NAME)
    pushed = table[table["row"] == 5]["measure"]
    assert not pushed.str.contains("velocity|less").any() and len(pushed) == 6
    assert table[table["measure"].str.contains("untrained")]["value"].tolist() == [0.8]
    assert "feature_dreams.py has not been run" in (tmp_path / "table" / TABLE_NAME).read_text()


def test_stages_summarise_their_results(studies, tmp_path):
    stages = {stage.name: stage for stage in all_stages(load_preset("memory"), "planted")}
    results = [stages[name].result(tmp_path) for name in (
        "memory_lesions", "probe_atlas", "probe_interventions", "sparse_features")]
    assert results[0].startswith("4 of 4 tested effects")
    assert results[0].endswith("largest change of the success: -0.70 (-0.80 to -0.60), "
                               "reset_always; controls -0.10 to +0.05")
    assert results[1].startswith("2 of 3 labels")
    assert results[2].startswith("0 of 1 tested effect (1 alteration, ")
    assert "92 %" in results[3] and "87 %" in results[3]
    patched = ResultStore(tmp_path / "analysis/memory/patching/cells", SCANNED)
    for layer, of_means in (("first", 0.5), ("second", 0.7), ("third", np.nan), ("last", 0.9)):
        patched.write("agreement", layer, value=pd.DataFrame([{
            "layer": layer, "parts": 4, "rank_correlation": 0.1, "low_95": 0.0, "high_95": 0.2,
            "of_means": of_means}]))
    assert stages["patching_cells"].result(tmp_path).endswith(
        "median 0.70 of 3 layers (0.50 to 0.90)")


def test_an_agent_without_a_simulator_has_no_dreams():
    agent = ROOT / "pretrained" / "coinrun_hard" / "model.pth"
    names = [stage.name for stage in all_stages(load_preset("memory", agent), "own")]
    assert "sparse_features" in names
    assert not {"feature_dreams", "hidden_states", "panel"} & set(names)


def test_the_panel_of_features_is_made_of_the_files_that_its_stage_needs(tmp_path):
    run = write_run(tmp_path / "run", with_recording=True)
    write_features(run)
    preset = load_preset("memory", memory_episodes=NUM_EPISODES)
    [panel] = [stage for stage in all_stages(preset, "own") if stage.name == "panel"]
    everything, output = tmp_path / "everything", tmp_path / "output"
    for name, folder in {
            "recording": "attribution_rollouts/data",
            "hx_analysis_precomp": "analysis/hx_analysis_precomp",
            "features": "analysis/memory/sparse_features",
            "dreams": "analysis/memory/feature_dreams"}.items():
        shutil.copytree(run.folder / name, everything / folder)
    for patterns in panel.needs.values():
        for path in find(everything, patterns):
            copy = output / path.relative_to(everything)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    (settings,) = (output / "analysis" / "hx_analysis_precomp").glob("settings_*.json")
    save_json(settings, {**read_json(settings),
                         "data_dir": str(output / "attribution_rollouts" / "data")})
    shutil.rmtree(run.folder)
    assert export_panel.main(PathResolver(output, preset.given_files).fill_in(panel.argv)) == 0
    assert panel.result(output) == f"{len(FEATURES)} features"
    folder = PanelFolder(output / "analysis" / "panel")
    shown = read_script(folder.data_file("features"))["features"]
    assert [each["dream"] and each["dream"]["sample"] for each in shown] == [0, None, 2]
    assert read_script(folder.data_file("feature_007"))["examples"]


def test_the_panel_of_the_main_experiment_shows_features_if_they_are_studied():
    demo = load_preset("demo")
    studied = load_preset("demo", memory=load_preset("memory").settings["memory"])
    for preset, shows in ((demo, False), (studied, True)):
        stages = {stage.name: stage for stage in all_stages(preset, "own")}
        panel = stages["panel"]
        earlier = [*stages][:[*stages].index("panel")]
        assert set(panel.needs) <= set(earlier)
        for study, flag in (("sparse_features", "--features_dir"), ("feature_dreams",
                                                                   "--dreams_dir")):
            assert (study in panel.needs) == (flag in panel.argv) == shows
        assert ("../analysis/memory/feature_dreams/penalty_1" in panel.argv) == shows


def test_folders_without_studies_and_equal_names_are_refused(studies, tmp_path):
    flags = ["--output_dir", str(tmp_path / "table"), "--studies", str(studies)]
    (tmp_path / "empty").mkdir()
    assert memory_table.main([*flags, str(tmp_path / "empty")]) == 2
    assert memory_table.main([*flags, str(studies)]) == 2
