"""Checks of attributions, on a planted agent whose right answers are known."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import killed_at, planted_policy
from scipy.stats import spearmanr

import record
from agents.agent_file import load_agent, save_agent
from attribution import attribute, checks, features, objects
from attribution.checking.ablation import features_table
from attribution.checking.agent_checks import CHECK_FILES, CHECKS, report
from attribution.checking.object_files import OBJECT_FILES, read_names
from attribution.checking.object_removal import objects_table
from attribution.checking.randomisation import cascade, randomise, rank_correlations, stages_of
from attribution.layers import find_bottlenecks
from attribution.results import AttributionStore
from common.results import ResultStore
from stats.association import rank_correlation, ratio, slope
from stats.bootstrap import ClusterBootstrap

# A linear function of a pixel's colour, from 0 to 1, that is above 0 for CoinRun's boxes alone.
BOX, BIAS = (5.2, -6.7, -1.2), -0.06
NUM_FRAMES = 80
WORTH = -0.5  # of a box's brightness of this colour in a cell, to the value


@pytest.fixture(scope="module")
def agent(tmp_path_factory) -> Path:
    """An agent that runs and jumps to the right, and whose value is a constant minus what of boxes
    it sees; all that it reads of the last map is one channel, and every map behind it is linear."""
    policy = planted_policy(3, BOX)
    with torch.no_grad():
        policy.embedder.block1.conv.bias[0] = BIAS
        for block in (policy.embedder.block2, policy.embedder.block3):
            block.conv.bias.zero_()
        policy.embedder.fc.bias.zero_()
        policy.fc_value.weight.fill_(WORTH)
        policy.fc_value.bias.fill_(5)
        policy.fc_policy.bias[[7, 8]] += 30
    path = tmp_path_factory.mktemp("agent") / "model_0.pth"
    save_agent(path, policy)
    return path


@pytest.fixture(scope="module")
def run(agent, tmp_path_factory) -> Path:
    """A folder with a recording of it, features and attributions."""
    folder = tmp_path_factory.mktemp("run")
    assert record.main([
        "--model_file", str(agent), "--logdir", str(folder), "--num_episodes", "10",
        "--param_name", "tiny", "--env_name", "coinrun", "--distribution_mode", "hard", "--seed",
        "0", "--precision", "float32", "--device", "cpu", "--no_action_noise",
        "--no_videos"]) == 0
    common = ["--agent_file", str(agent), "--data_dir", str(folder / "data"), "--device", "cpu"]
    assert features.main([*common, "--layers", "block3", "--num_observations", "90",
                          "--nmf_features", "1", "--output_dir", str(folder / "features")]) == 0
    assert attribute.main([
        *common, "--features_dir", str(folder / "features"), "--num_trajectories", "10",
        "--num_steps", "24", "--output_dir", str(folder / "attribution")]) == 0
    return folder


def arguments_of(agent: Path, run: Path, folder: Path, *more: str) -> list[str]:
    return ["--agent_file", str(agent), "--data_dir", str(run / "data"), "--device", "cpu",
            "--features_dir", str(run / "features"), "--attribution_dir",
            str(run / "attribution"), "--num_frames", str(NUM_FRAMES), "--output_dir", str(folder),
            *more]


@pytest.fixture(scope="module")
def made(agent, run, tmp_path_factory) -> ResultStore:
    store = ResultStore(tmp_path_factory.mktemp("checks") / "out", CHECK_FILES)
    assert checks.main(arguments_of(agent, run, store.path)) == 0
    return store


def table_of(store: ResultStore, check: str) -> pd.DataFrame:
    return pd.read_csv(store.path / f"{check}.csv")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and path.suffix != ".png" and path.name != ".lock"}


def test_the_checks_find_what_was_planted(made):
    [complete] = table_of(made, "completeness").itertuples()
    assert complete.met and complete.high < 1e-3 and complete.frames == 240

    deletion = table_of(made, "deletion")
    assert deletion[deletion["other"] == "random"]["above"].all()
    assert (deletion["high_95"] >= -1e-6).all(), "the right order is nowhere worse"

    [feature] = table_of(made, "interventions").itertuples()
    assert feature.slope == pytest.approx(1, abs=0.01) and feature.r2 > 0.999
    assert feature.expected > 0 and feature.low_95 <= feature.slope <= feature.high_95

    table = table_of(made, "objects").set_index("kind")
    box = table.loc["box"]
    assert box["agreement"] > 0.9 and box["above_chance"] and box["chance"] < box["agreement"]
    assert box["change"] > 0 and box["expected"] > 0 and box["attribution_sign"] < -0.9
    assert box["share"] > 0.3 and box["density_low_95"] > 2
    assert not (table.drop("box")["above_chance"].dropna() == True).any()  # noqa: E712

    [fidelity] = table_of(made, "fidelity").itertuples()
    assert fidelity.infidelity < 1e-3, "attributions to what is linear say all"

    random = table_of(made, "randomisation")
    assert random["drawn_again"].tolist() == ["heads", "fc", "block3", "block2", "block1"]
    assert random["correlation"].iloc[-1] < 0.5
    text = made.read("report")
    for check in CHECKS:
        assert f'<a id="{check}"></a>' in text and made.has(f"{check}_figure")
    assert "yes, in all 1 cases" in text


def test_a_planted_feature_is_named_by_its_object(agent, run, tmp_path):
    assert objects.main(["--agent_file", str(agent), "--data_dir", str(run / "data"), "--device",
                         "cpu", "--features_dir", str(run / "features"), "--num_observations",
                         "150", "--output_dir", str(tmp_path / "objects")]) == 0
    [feature] = read_names(ResultStore(tmp_path / "objects", OBJECT_FILES), "block3")["features"]
    assert feature["name"] == "box" and feature["score"] > 0.85
    assert feature["low_95"] > feature["chance_high"]


def test_attributions_of_the_wrong_sign_are_found_out(agent, run, tmp_path):
    """The same run, with its attributions turned around."""
    wrong = tmp_path / "attribution"
    shutil.copytree(run / "attribution", wrong)
    for path in (wrong / "block3" / "value").glob("trajectory_*.npz"):
        with np.load(path) as found:
            arrays = dict(found)
        np.savez(path, **{**arrays, "cells": -arrays["cells"], "totals": -arrays["totals"]})
    store = ResultStore(tmp_path / "out", CHECK_FILES)
    assert checks.main([*arguments_of(agent, run, store.path, "--checks", "deletion",
                                      "interventions", "objects"),
                        "--attribution_dir", str(wrong)]) == 0
    deletion = table_of(store, "deletion")
    assert not deletion[deletion["other"] == "random"]["above"].any()
    [feature] = table_of(store, "interventions").itertuples()
    assert feature.slope == pytest.approx(-1, abs=0.01)
    box = table_of(store, "objects").set_index("kind").loc["box"]
    assert box["agreement"] < 0.1 and not box["above_chance"]
    assert "not so for block3, value" in store.read("report")


def test_a_killed_run_resumes_and_more_checks_can_be_added(agent, run, made, tmp_path):
    store = ResultStore(tmp_path / "out", CHECK_FILES)
    arguments = [*arguments_of(agent, run, store.path), "--checks", "deletion"]
    with killed_at(ResultStore, "write", 2):
        assert checks.main([*arguments, "interventions"]) == 130
    first = store.file_of("deletion", "block3", "value")
    written = first.stat().st_mtime_ns
    assert checks.main(arguments) == 0
    assert 'id="interventions"' not in store.read("report")
    assert checks.main([*arguments, "interventions"]) == 0
    assert first.stat().st_mtime_ns == written
    files, whole = contents(store.path), contents(made.path)
    assert files.keys() == {
        "settings.json", "report.md", "completeness.csv", "deletion.csv", "interventions.csv",
        "raw/deletion/block3/value.npz", "raw/interventions/block3/value.npz"}
    assert all(files[name] == whole[name] for name in files if name != "report.md")


def test_attributions_of_another_agent_or_recording_are_refused(agent, run, tmp_path, capsys):
    arguments = arguments_of(agent, run, tmp_path / "out")
    settings = json.loads((run / "attribution" / "settings.json").read_text())
    layer = json.loads((run / "attribution" / "block3" / "settings.json").read_text())
    for name, content, what in (
            ("settings.json", {**settings, "agent_sha256": "0" * 64}, "are of another agent"),
            ("settings.json", {**settings, "recording_sha256": "0" * 64},
             "are of another recording"),
            ("block3/settings.json", {**layer, "features_sha256": "0"},
             "are of features with the checksum 0")):
        other = tmp_path / "attribution"
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(run / "attribution", other)
        (other / name).write_text(json.dumps(content))
        assert checks.main([*arguments, "--attribution_dir", str(other)]) == 2
        assert what in capsys.readouterr().err
    assert checks.main([*arguments, "--outputs", "taken"]) == 2
    assert "holds no attributions of taken" in capsys.readouterr().err
    assert checks.main([*arguments, "--dry_run"]) == 0
    assert f"{NUM_FRAMES} frames of" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_randomisation_reinitialises_the_parts_from_the_top_and_no_others(agent):
    policy = load_agent(agent)
    stages = stages_of(policy)
    before = policy.state_dict()
    after = randomise(policy, stages[1][1], 0).state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"embedder.fc.weight", "embedder.fc.bias"}
    parts = [each.state_dict() for each in cascade(policy, 0)]
    assert len(parts) == len(stages)
    for number, part in enumerate(parts):
        for later, (_, paths) in enumerate(stages):
            for name in before:
                if name.rpartition(".")[0].startswith(tuple(paths)):
                    assert torch.equal(part[name], before[name]) == (later > number), name
    again = [*cascade(policy, 0)][-1].state_dict()
    assert all(torch.equal(again[name], parts[-1][name]) for name in before)


def test_rank_correlations_are_those_of_spearman():
    rng = np.random.default_rng(0)
    maps, others = rng.normal(size=(2, 5, 4, 4)).round(1)
    others[2], others[3] = 7, maps[3]
    found = rank_correlations(maps, others)
    assert found[2] == 0 and found[3] == pytest.approx(1)
    for number in (0, 1, 4):
        assert found[number] == pytest.approx(
            spearmanr(maps[number].ravel(), others[number].ravel()).statistic)


def test_associations_are_those_of_scipy():
    rng = np.random.default_rng(0)
    episodes = np.repeat(np.arange(12), 10)
    x = rng.normal(size=120)
    y = 2 * x + rng.normal(size=120)
    bootstrap = ClusterBootstrap(episodes, 0)
    for found, expected in (
            (rank_correlation(x, y, episodes, bootstrap), spearmanr(x, y).statistic),
            (slope(x, y, episodes, bootstrap), np.polyfit(x, y, 1)[0]),
            (ratio(x**2, y**2, episodes, bootstrap), (x**2).mean() / (y**2).mean())):
        assert found.value == pytest.approx(expected)
        assert found.low < found.value < found.high < found.low + 1
    assert np.isnan(slope(np.ones(120), y, episodes, bootstrap).value)


def test_slopes_are_those_of_least_squares():
    rng = np.random.default_rng(0)
    totals, episodes = rng.normal(size=(80, 3)), np.repeat(np.arange(10), 8)
    changes = -np.array([2.0, 0.0, 1.0]) * totals + 0.1 * rng.normal(size=(80, 3)) + 0.3
    totals[:, 2] = 0
    table = features_table(changes, totals, episodes, seed=0)
    for feature in range(2):
        row = table.iloc[feature]
        slope, _ = np.polyfit(-totals[:, feature], changes[:, feature], 1)
        assert row["slope"] == pytest.approx(slope)
        assert row["low_95"] < row["slope"] < row["high_95"]
    assert table["r2"].iloc[0] > 0.95 > 0.2 > table["r2"].iloc[1]
    assert table["slope"].isna().tolist() == [False, False, True]
    assert "1 of 2 intervals" not in CHECKS["interventions"].verdict(table)


def test_agreement_of_objects_is_judged_against_their_cells_in_other_frames(agent):
    """Kind 0 changes the output by its own cells, kind 1 by a constant, while all cells are alike;
    kind 2 is in too few frames."""
    [bottleneck] = find_bottlenecks(load_agent(agent), ["block3"])
    rng = np.random.default_rng(1)
    number = 100
    masks = np.zeros((number, 3, 64, 64), bool)
    for frame in range(number):
        for kind in range(2):
            row, column = rng.integers(0, 60, 2)
            masks[frame, kind, row:row + 3, column:column + 3] = True
    masks[:4, 2, 5:9, 5:9] = True
    attributions = rng.normal(size=(number, 8, 8))
    rows = np.clip(np.floor(np.arange(64) / 8 + 0.5), 0, 7).astype(int)
    changes = np.zeros((number, 3))
    for frame in range(number):
        places = {(rows[i], rows[j]) for i, j in np.argwhere(masks[frame, 0])}
        changes[frame, 0] = -sum(attributions[frame, i, j] for i, j in places)
    changes[:, 1] = 1
    table = objects_table(masks, changes, attributions, bottleneck, ["coin", "saw", "lava"],
                          np.arange(number) // 10, seed=0).set_index("kind")
    assert table.loc["coin", "agreement"] == 1 and table.loc["coin", "above_chance"]
    assert table.loc["coin", "rank_correlation"] == pytest.approx(1)
    assert abs(table.loc["coin", "chance"] - 0.5) < 0.2
    assert not table.loc["saw", "above_chance"]
    assert np.isnan(table.loc["lava", "agreement"]) and table.loc["lava", "frames"] == 4
    assert table.loc["coin", "share"] / table.loc["coin", "area"] == pytest.approx(
        table.loc["coin", "density"])
    table = table.reset_index()
    table.insert(0, "output", "value")
    table.insert(0, "layer", "block3")
    said = CHECKS["objects"].verdict(table)
    assert "in 1 of 2 cases; not so for block3, value, saw" in said
    assert said in report({"objects": table}, "Some frames.")


def test_the_attributions_checked_are_those_on_disk(agent, run, made):
    """Expected changes of interventions are the stored totals."""
    folder = AttributionStore(run / "attribution")
    raw = made.read("interventions", "block3", "value")
    everything = np.concatenate([folder.read("attributions", "block3", "value", number)["totals"]
                                 for number in range(10)])[:, 0]
    assert len(raw["totals"]) == NUM_FRAMES and np.isin(raw["totals"], everything).all()
