"""Table of the article's claims: numbers of the studies, or why they are missing."""

import itertools
import re
import shutil

import numpy as np
import pandas as pd
import pytest
from conftest import bytes_of_files, figures_drawn, refusal
from scipy.stats import spearmanr

from analysis import memory_table
from attribution import series, table
from attribution.checking.agent_checks import CHECK_FILES
from attribution.checking.object_scores import OBJECT_FILES
from attribution.claims import CLAIMS
from attribution.results import FEATURES, AttributionStore, finish_features, read_features
from attribution.trajectories import Trajectories, advantages_of
from common.files import save_json
from common.results import ResultStore
from maze import table as maze_table
from stats.series import series_of, with_correlations

LENGTHS = (40, 25)  # steps of two trajectories
EPISODES = (15, 30, 40)  # ends of the first trajectory's episodes; the third is cut
LAYERS = ("block2", "block3")
GRID, NUM_FEATURES = (3, 4), 5


def steps_of(rng):
    """Return two trajectories: three episodes, of which the last is cut, and the beginning of
    another episode."""
    number = np.concatenate([np.searchsorted(EPISODES, np.arange(LENGTHS[0]), side="right"),
                             np.full(LENGTHS[1], 7)])
    total = sum(LENGTHS)
    ended = np.zeros(total, bool)
    ended[[EPISODES[0] - 1, EPISODES[1] - 1]] = True
    zeros = np.zeros(total, np.int32)
    return Trajectories(
        np.repeat(np.arange(2), LENGTHS).astype(np.int32), number.astype(np.int32), zeros,
        zeros.astype(np.int64), zeros.astype(np.int16), (10.0 * ended).astype(np.float32), ended,
        rng.normal(5, 1, total).astype(np.float32), rng.normal(5, 1, total).astype(np.float32),
        np.zeros((total, 15), np.float32))


@pytest.fixture
def studies(tmp_path):
    """A folder with nothing but random attributions; their cells by layer, and the steps."""
    rng, path = np.random.default_rng(0), tmp_path / "agent"
    steps, cells = steps_of(rng), {}
    folder = AttributionStore(path / "attribution")
    folder.open({"game": "coinrun", "unit": {"reward_scale": 0.5, "gamma": 0.9, "lmbda": 0.8}})
    folder.write("trajectories", value=vars(steps))
    for place, layer in enumerate(LAYERS):
        features = ResultStore(path / "features" / layer, FEATURES)
        features.open({"baseline": "zero"})
        finish_features(features, {
            "signed": False, "grid": GRID, "stride": 8, "first_pixel": 0,
            "largest_entry": [0.5, 0.6, 0.7, 0.8, 0.9],
            "value_mean": 5.0, "value_deviation": 1.0, "baseline_mean": 4.0 + place,
            "baseline_deviation": 0.5, "observations": 9, "residual_share": 0.125},
            directions=rng.random((NUM_FEATURES, 8)), mean_activations=np.zeros((8, *GRID)),
            observations=np.zeros((9, 2)))
        folder.write("layer", layer, value={
            "features_sha256": read_features(path / "features", layer).checksum, "place": place})
        cells[layer] = rng.normal(size=(sum(LENGTHS), *GRID, NUM_FEATURES + 1)).astype(np.float16)
        for number, part in enumerate(np.split(cells[layer], [LENGTHS[0]])):
            nothing = np.zeros(len(part), np.float32)
            folder.write("attributions", layer, "value", number, value={
                "cells": part, "totals": part.sum((1, 2), dtype=np.float32),
                **dict.fromkeys(("output", "baseline", "gap", "steps"), nothing)})
        folder.write("summary", layer, "value", value={})
    return path, {layer: each.astype(np.float64) for layer, each in cells.items()}, steps


def made(path, tmp_path, *more):
    """Return findings by row and measure, and the details of each row of the table."""
    assert table.main(["--studies", str(path), "--output_dir", str(tmp_path / "table"), *more]) == 0
    found = pd.read_csv(tmp_path / "table" / "findings.csv")
    _, *details = (tmp_path / "table" / "table.md").read_text().split("\n## ")
    return found.set_index(["row", "measure"]), details


def test_numbers_of_attributions_are_those_of_their_files(studies, tmp_path):
    path, cells, steps = studies
    found, lines = made(path, tmp_path)
    assert [line.split(".")[0] for line in lines] == [f"R{row}" for row in range(1, 13)]
    for layer in LAYERS:
        sizes = np.abs(cells[layer])
        pairs = np.sort(sizes[..., :-1].reshape(len(sizes), -1), axis=1)
        share = pairs[:, -10:].sum(1) / pairs.sum(1)
        row = found.loc[2, f"share of the 10 largest pairs, {layer}"]
        np.testing.assert_allclose([row["value"], row["low_95"], row["high_95"]],
                                   np.quantile(share, (0.5, 0.25, 0.75)), rtol=1e-4)
        advantages = advantages_of(steps, 0.5, 0.9, 0.8)
        residual = sizes[..., -1].sum((1, 2)) / sizes.sum((1, 2, 3))
        assert found.loc[12, f"Spearman correlation, {layer}"]["value"] == pytest.approx(
            spearmanr(residual, np.abs(advantages)).statistic, rel=1e-4)
    assert found.loc[4, "mean of G(0), block2 (± one standard deviation)"]["low_95"] == 3.5
    assert found.loc[3, "largest entry, block3"]["value"] == pytest.approx(0.7)
    assert found.loc[10, "residual share of |attribution|, block3"]["value"] == 0.125
    known = slice(0, EPISODES[1])
    left = np.tile(np.arange(15)[::-1], 2)
    assert found.loc[10, "share of V's variance explained by steps left"]["value"] == pytest.approx(
        np.corrcoef(steps.value[known], left)[0, 1] ** 2, rel=1e-5)
    value = steps.value.astype(float)
    jump = max(abs(value[t] - (value[t - 1] + value[t + 1]) / 2) for t in range(1, len(value) - 1)
               if len({*steps.episode[t - 1:t + 2]}) == 1)
    assert found.loc[6, "largest value spike"]["value"] == pytest.approx(jump / value.std(),
                                                                         rel=1e-4)


@pytest.mark.parametrize(("layers", "shown"), [
    (["--layers", "block3", "block2"], ["block3", "block2"]), ([], ["block3", "block3"])])
def test_layer_that_is_shown_is_the_middle_one_or_the_one_asked_for(studies, tmp_path, layers,
                                                                    shown):
    path, *_ = studies
    assert table.main(["--studies", str(path), str(path), "--labels", "one", "other",
                       "--output_dir", str(tmp_path / "table"), *layers]) == 0
    third = (tmp_path / "table" / "table.md").read_text().split("\n## ")[3]
    assert re.findall(r"^\| (\w+) \| largest entry, (\w+)", third, re.MULTILINE) == [
        *zip(("one", "other"), shown)]


def test_rows_of_objects_and_causes_are_read_from_their_tables(studies, tmp_path):
    path, *_ = studies
    objects = {"layer": "block3", "output": "value", "frames": 100, "density_high_95": 3.5}
    (path / "checks").mkdir()
    pd.DataFrame([
        {**objects, "kind": "coin", "density": 2.25, "density_low_95": 1.1, "attribution_sign": .4},
        {**objects, "kind": "saw", "density": 1.2, "density_low_95": 0.9, "attribution_sign": -.2},
        {**objects, "kind": "lava", "frames": 3},
    ]).to_csv(path / "checks" / "objects.csv", index=False)
    none = {"name": None, "hallucinations": None}
    coin = {"name": "coin", "hallucinations": 7.5, "hallucinations_low_95": 5.0,
            "hallucinations_high_95": 9.0}
    save_json(path / "objects" / "block2" / "names.json", {
        "features_sha256": "0" * 64,
        "features": [none, coin, {**coin, "name": "saw", "hallucinations": 8.5}], "score": 0.8,
        "score_low_95": 0.7, "score_high_95": 0.9, "score_chance": 0.5})
    save_json(path / "objects" / "block2" / "compared.json",
              {"difference": 0.03, "low_95": -0.01, "high_95": 0.07})
    causes = path / "causes"
    causes.mkdir()
    pd.DataFrame([
        {"condition": condition, "label": condition, "control": False, "cause": "saw", "levels": 50,
         "failures": int(50 * rate), "rate": rate, "low_95": 0.01, "high_95": 0.2}
        for condition, rate in (("original", 0.06), ("edited_no_saw", 0.3))]).to_csv(
            causes / "causes.csv", index=False)
    effect = {"outcome": "saw", "unaltered": 0.06, "altered": 0.3, "effect": 0.24, "low_95": 0.1,
              "high_95": 0.4, "p": 0.001, "control": False}
    pd.DataFrame([
        {**effect, "label": "no saw", "p_holm": 0.01, "p_control": 0.04, "claimed": True},
        {**effect, "label": "saw invisible", "claimed": False},
        {**effect, "label": "no saw", "control": True, "claimed": False, "p_control": 0.5}]).to_csv(
            causes / "effects.csv", index=False)
    pd.DataFrame([{"label": "no saw", "hazard": "saw", "blindness": 0.4, "low_95": 0.2,
                   "high_95": 0.6}]).to_csv(causes / "blindness.csv", index=False)
    found, lines = made(path, tmp_path, "--labels", "mine", "--layers", "block2")
    assert ("| object score minus that of features of activations, block2 | 0.030 "
            "| -0.010 to 0.070 |" in lines[2])
    assert lines[5].count("frames per 1 000 with") == 1
    assert "median over features | 8 | 7.500 to 8.500 |" in lines[5]
    one = found.loc[(6, "block2, feature 2 (coin): frames per 1 000 with strong activation away "
                        "from its object")]
    assert one[["value", "low_95", "high_95"]].tolist() == [7.5, 5, 9]
    found, lines = made(path, tmp_path, "--labels", "mine")
    assert "block2" not in lines[2] + lines[5]
    assert (found["agent"] == "mine").all()
    assert "| coin, block3: density | 2.250 | 1.100 to 3.500 | holds |" in lines[0]
    assert "| saw, block3: density | 1.200 | 0.900 to 3.500 | does not hold |" in lines[0]
    assert "lava" not in lines[0] and "enemy" not in lines[0]
    assert "| failures by saw | 0.060 | 0.010 to 0.200 |" in lines[4] and "0.300" not in lines[4]
    assert lines[6].count(": failures by saw |") == 1 and len(found.loc[7]) == 2
    assert ("| no saw: failures by saw | +0.240 | 0.100 to 0.400 | 0.060 | holds |" in lines[6])
    assert "| no saw: blindness for saw | 0.400 | 0.200 to 0.600 |" in lines[7]
    assert "| object score, block2 | 0.800 | 0.700 to 0.900 | 0.500 |" in lines[10]
    assert set(found.index.get_level_values("row")) == set(CLAIMS.claims) - {9}


def test_agents_by_number_of_levels_fill_row_9(studies, tmp_path, capsys):
    """Scores rise with the number of levels at one layer, but not at the other."""
    path, _, _ = studies
    folders, numbers, unseen = [], (10, 10, 100, 100, 1000, 1000), (0.5, 0.6, 0.7, 0.6, 0.8, 0.9)
    for place, (number, share) in enumerate(zip(numbers, unseen)):
        folders.append(tmp_path / f"agent_{place}")
        for name, rate, levels in (("training", 0.95, number), ("unseen", share, 10**6)):
            save_json(folders[-1] / f"{name}.json", {
                "success_rate": rate, "success_interval": [rate - 0.04, rate + 0.03],
                "num_episodes": 200, "env": {"num_levels": levels},
                "new_first_frames": name == "unseen" and place != 5})
        store = ResultStore(folders[-1] / "objects", OBJECT_FILES)
        store.open({"num_observations": 64})
        for layer, score in (("block2", 0.6 + 0.01 * place), ("block3", 0.9 - share / 10)):
            store.write("names", layer, value={
                "features_sha256": "0" * 64, "score": score, "score_low_95": score - 0.1,
                "score_high_95": score + 0.1, "score_chance": 0.5,
                "features": [{"name": name} for name in ("coin", "saw", "coin", None)]})
        checks = ResultStore(folders[-1] / "checks", CHECK_FILES)
        checks.open({"num_frames": 30})
        checks.write("deletion_table", value=pd.DataFrame([
            ("block2", output, kind, other, place + better, place - 0.5, place + 9.5)
            for better, (output, kind, other) in enumerate(itertools.product(
                ("action", "value"), ("insertion", "deletion"), ("gradient", "random")))],
            columns=["layer", "output", "kind", "other", "better", "low_95", "high_95"]))
    given = ["--studies", *map(str, folders)]
    assert series.main([*given, "--output_dir", str(path / "levels")]) == 2
    assert "agent_5/unseen.json: unseen levels may start with" in capsys.readouterr().err
    given.append("--seen_first_frames")
    with figures_drawn() as figures:
        assert series.main([*given, "--output_dir", str(path / "levels")]) == 0
    assert [axes.get_title() for axes in figures["series.png"].axes] == [
        "success", "object score", "kinds of object named", "area gained by deletion"]
    found = pd.read_csv(path / "levels" / "series.csv").set_index(["agent", "measure"])
    gap = found.loc["agent_3", "generalisation gap"]
    assert (gap["number"], gap["num_levels"]) == (100, 200)
    np.testing.assert_allclose(gap[["value", "low_95", "high_95"]].astype(float), [
        0.35, 0.35 - np.hypot(0.04, 0.03), 0.35 + np.hypot(0.03, 0.04)], rtol=1e-4)
    assert found.loc["agent_0", "kinds of object named, block3"]["value"] == 2
    rank = spearmanr(numbers, range(6)).statistic
    assert found.loc["agent_5", "area gained by deletion, block2"]["value"] == 5 + 7
    for layer, expected in (("block2", rank), ("block3", -spearmanr(numbers, unseen).statistic)):
        findings, _ = made(path, tmp_path, "--layers", layer)
        first = findings.loc[9].iloc[0]
        assert first.name == ("rank correlation of training levels and object score, "
                              f"{layer}, 6 agents")
        assert first["value"] == pytest.approx(expected, rel=1e-5)
    ends = np.tanh(np.arctanh(rank) + np.array([-1, 1]) * 1.959964 * np.sqrt(
        (1 + rank**2 / 2) / 3))
    np.testing.assert_allclose(found.loc["all agents", "object score, block2"][
        ["low_95", "high_95"]].astype(float), ends, rtol=1e-4)

    perfect, inverse, swapped = (with_correlations(series_of(
        (number, str(number), "score", sign * value, np.nan, np.nan, 1)
        for number, value in enumerate(values))).iloc[-1]
        for sign, values in ((1, [1, 2, 3, 4]), (-1, [1, 2, 3, 4]), (1, [2, 1, 3, 4])))
    assert (perfect["value"], perfect["high_95"], swapped["value"]) == (1, 1, pytest.approx(0.8))
    assert perfect["low_95"] == pytest.approx(swapped["low_95"]) == -inverse["high_95"]

    few = [*given[:2], *map(str, folders[3:5]), "--output_dir", str(tmp_path / "few")]
    assert series.main(few) == 0
    found = pd.read_csv(tmp_path / "few" / "series.csv").set_index(["agent", "measure"])
    correlation = found.loc["all agents", "object score, block2"]
    assert correlation["value"] == 1 and np.isnan(correlation["low_95"])
    assert ("all agents", "kinds of object named, block2") not in found.index
    shutil.copytree(folders[0], tmp_path / "other" / "agent_0")
    assert series.main([*few, "--studies", *few[1:4], str(tmp_path / "other" / "agent_0")]) == 2
    assert "number 10 are named 'agent_0'; rename one" in capsys.readouterr().err
    (folders[2] / "objects" / "block3" / "names.json").unlink()
    assert series.main([*given, "--output_dir", str(tmp_path / "few")]) == 2
    assert "agent_2: no number for 'object score, block3'" in capsys.readouterr().err
    (folders[1] / "unseen.json").unlink()
    assert series.main([*given, "--output_dir", str(tmp_path / "few")]) == 2
    assert "unseen.json is missing" in capsys.readouterr().err


@pytest.mark.parametrize("script", [table, maze_table, memory_table])
@pytest.mark.parametrize("names", [["findings.csv", "table.md", "findings.png"], ["findings.png"]])
def test_tables_and_figures_of_others_are_not_replaced(script, names, studies, tmp_path, capsys):
    """The files have the names of the output, but another script or person has written them."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in names:
        (folder / name).write_text("mine")
    assert "mine holds other data" in refusal(script.main, [
        "--studies", studies[0], "--output_dir", folder], capsys)
    assert bytes_of_files(folder) == dict.fromkeys(names, b"mine")


def test_a_table_is_replaced_but_not_what_was_added_to_it(studies, tmp_path, capsys):
    found, _ = made(studies[0], tmp_path)
    assert made(studies[0], tmp_path)[0].equals(found)
    (tmp_path / "table" / "notes.txt").write_text("mine")
    assert "notes.txt does not belong to the table of attribution.table" in refusal(
        table.main, ["--studies", studies[0], "--output_dir", tmp_path / "table"], capsys)
