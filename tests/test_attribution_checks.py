"""Checks of attributions, on a planted agent whose right answers are known."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import bytes_of_files, refusal
from scipy.stats import spearmanr

from agents.agent_file import load_agent
from attribution import checks
from attribution.checking import randomisation
from attribution.checking.agent_checks import CHECK_FILES, CHECKS
from attribution.checking.object_removal import objects_table
from attribution.checking.randomisation import cascade, randomise, stages_of
from attribution.layers import find_bottlenecks
from attribution.results import AttributionStore
from common.results import ResultStore
from stats.association import rank_correlation, ratio, slope
from stats.bootstrap import ClusterBootstrap

NUM_FRAMES = 60


def arguments_of(agent: Path, run: Path, folder: Path, *more: str) -> list[str]:
    return ["--agent_file", str(agent), "--data_dir", str(run / "data"), "--device", "cpu",
            "--features_dir", str(run / "features"), "--attribution_dir", str(run / "attribution"),
            "--num_frames", str(NUM_FRAMES), "--output_dir", str(folder), *more]


@pytest.fixture(scope="module")
def made(box_agent, box_run, tmp_path_factory) -> ResultStore:
    store = ResultStore(tmp_path_factory.mktemp("checks") / "out", CHECK_FILES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(randomisation, "NUM_FRAMES", 24)
        patch.setattr(randomisation, "FIDELITY_FRAMES", 8)
        assert checks.main(arguments_of(box_agent, box_run, store.path)) == 0
    return store


def table_of(store: ResultStore, check: str) -> pd.DataFrame:
    return pd.read_csv(store.path / f"{check}.csv")


def test_the_checks_find_what_was_planted(made, box_run):
    [complete] = table_of(made, "completeness").itertuples()
    assert complete.met and complete.high < 1e-3 and complete.frames == 240

    deletion = table_of(made, "deletion")
    assert deletion[deletion["other"] == "random"]["above"].all()
    assert (deletion["high_95"] >= -1e-6).all(), "the right order is nowhere worse"

    raw = made.read("interventions", "block3", "value")
    everything = AttributionStore(box_run / "attribution").read_all(
        "attributions", "block3", "value", name="totals")
    assert len(raw["totals"]) == NUM_FRAMES and np.isin(raw["totals"], everything).all()
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


def test_attributions_of_the_wrong_sign_are_found_out(box_agent, box_run, tmp_path):
    """The same run, with its attributions turned around."""
    wrong = shutil.copytree(box_run / "attribution", tmp_path / "attribution")
    for path in (wrong / "block3" / "value").glob("trajectory_*.npz"):
        with np.load(path) as found:
            arrays = dict(found)
        np.savez(path, **{**arrays, "cells": -arrays["cells"], "totals": -arrays["totals"]})
    store = ResultStore(tmp_path / "out", CHECK_FILES)
    assert checks.main([*arguments_of(box_agent, box_run, store.path, "--checks",
                                      "interventions", "objects"),
                        "--attribution_dir", str(wrong)]) == 0
    [feature] = table_of(store, "interventions").itertuples()
    assert feature.slope == pytest.approx(-1, abs=0.01)
    box = table_of(store, "objects").set_index("kind").loc["box"]
    assert box["agreement"] < 0.1 and not box["above_chance"]
    assert "not so for block3, value" in store.read("report")


def test_checks_can_be_added_to_those_that_are_stored(box_agent, box_run, made, tmp_path):
    store = ResultStore(tmp_path / "out", CHECK_FILES)
    arguments = [*arguments_of(box_agent, box_run, store.path), "--checks", "deletion"]
    assert checks.main(arguments) == 0
    raw = store.file_of("deletion", "block3", "value")
    written = raw.stat().st_mtime_ns
    assert checks.main([*arguments, "--layers", "block3"]) == 0
    assert raw.stat().st_mtime_ns == written
    # Numbers of other features are computed again.
    np.savez(raw, **{**np.load(raw), "of": np.array("0" * 64)})
    assert checks.main([*arguments, "interventions"]) == 0
    files, whole = (bytes_of_files(each.path) for each in (store, made))
    for name in ("deletion.csv", "interventions.csv", "raw/deletion/block3/value.npz",
                 "raw/interventions/block3/value.npz"):
        assert files[name] == whole[name]
    assert "objects.csv" not in files


@pytest.mark.parametrize(("name", "key", "words"), [
    ("settings.json", "recording_sha256", "are of another recording"),
    ("block3/settings.json", "features_sha256", "name the right --features_dir")])
def test_attributions_of_others_are_refused(box_agent, box_run, tmp_path, capsys, name, key, words):
    other = shutil.copytree(box_run / "attribution", tmp_path / "attribution")
    settings = json.loads((other / name).read_text())
    (other / name).write_text(json.dumps({**settings, key: "0" * 64}))
    arguments = arguments_of(box_agent, box_run, tmp_path / "out")
    assert words in refusal(checks.main, [*arguments, "--attribution_dir", other], capsys)


def test_randomisation_reinitialises_the_parts_from_the_top_and_no_others(box_agent):
    policy = load_agent(box_agent)
    stages, before = stages_of(policy), policy.state_dict()
    after = randomise(policy, stages[1][1], 0).state_dict()
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        "embedder.fc.weight", "embedder.fc.bias"}
    parts = [each.state_dict() for each in cascade(policy, 0)]
    assert len(parts) == len(stages)
    for number, part in enumerate(parts):
        for later, (_, paths) in enumerate(stages):
            for name in before:
                if name.rpartition(".")[0].startswith(tuple(paths)):
                    assert torch.equal(part[name], before[name]) == (later > number), name


def test_associations_are_those_of_scipy():
    rng = np.random.default_rng(0)
    episodes, x = np.repeat(np.arange(12), 10), rng.normal(size=120)
    y, bootstrap = 2 * x + rng.normal(size=120), ClusterBootstrap(episodes, 0)
    for found, expected in (
            (rank_correlation(x, y, episodes, bootstrap), spearmanr(x, y).statistic),
            (slope(x, y, episodes, bootstrap), np.polyfit(x, y, 1)[0]),
            (ratio(x**2, y**2, episodes, bootstrap), (x**2).mean() / (y**2).mean())):
        assert found.value == pytest.approx(expected)
        assert found.low < found.value < found.high < found.low + 1


def test_agreement_of_objects_is_judged_against_their_cells_in_other_frames(box_agent):
    """Kind 0 changes the output by its own cells, kind 1 by a constant, while all cells are alike;
    kind 2 is in too few frames."""
    [bottleneck] = find_bottlenecks(load_agent(box_agent), ["block3"])
    rng, number = np.random.default_rng(1), 100
    masks = np.zeros((number, 3, 64, 64), bool)
    for frame in range(number):
        for kind, (row, column) in enumerate(rng.integers(0, 60, (2, 2))):
            masks[frame, kind, row:row + 3, column:column + 3] = True
    masks[:4, 2, 5:9, 5:9] = True
    attributions = rng.normal(size=(number, 8, 8))
    cell = np.clip(np.floor(np.arange(64) / 8 + 0.5), 0, 7).astype(int)  # of each pixel
    changes = np.zeros((number, 3))
    for frame in range(number):
        places = {(cell[i], cell[j]) for i, j in np.argwhere(masks[frame, 0])}
        changes[frame, 0] = -sum(attributions[frame, i, j] for i, j in places)
    changes[:, 1] = 1
    table = objects_table(masks, changes, attributions, bottleneck, ["coin", "saw", "lava"],
                          np.arange(number) // 10, seed=0).set_index("kind")
    coin, saw, lava = table.loc["coin"], table.loc["saw"], table.loc["lava"]
    assert coin["agreement"] == 1 and coin["above_chance"]
    assert coin["rank_correlation"] == pytest.approx(1)
    assert abs(coin["chance"] - 0.5) < 0.2
    assert not saw["above_chance"]
    assert np.isnan(lava["agreement"]) and lava["frames"] == 4
    assert coin["share"] / coin["area"] == pytest.approx(coin["density"])
    table = table.reset_index().assign(layer="block3", output="value")
    assert "in 1 of 2 cases; not so for block3, value, saw" in CHECKS["objects"].verdict(table)
