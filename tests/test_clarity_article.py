"""Rows of the article's table, on numbers whose answers are known."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from clarity.attributing.clarity_files import LayerFeatures
from clarity.attributing.reduction import Reducer
from clarity.checking.article import (
    attribution_on_objects,
    better_than_of_activations,
    near_one_hot,
    odd_frames,
    score_by_layer,
    value_without_the_layer,
)
from clarity.checking.object_files import ObjectsFolder
from clarity.checking.two_numbers import rank_correlation, ratio, slope
from common.bootstrap import ClusterBootstrap

EPISODES = np.repeat(np.arange(12), 10)


def test_two_numbers_go_together_as_scipy_says():
    rng = np.random.default_rng(0)
    x = rng.normal(size=120)
    y = 2 * x + rng.normal(size=120)
    bootstrap = ClusterBootstrap(EPISODES, 0)
    for found, expected in (
            (rank_correlation(x, y, EPISODES, bootstrap), spearmanr(x, y).statistic),
            (slope(x, y, EPISODES, bootstrap), np.polyfit(x, y, 1)[0]),
            (ratio(x**2, y**2, EPISODES, bootstrap), (x**2).mean() / (y**2).mean())):
        assert found.value == pytest.approx(expected)
        assert found.low < found.value < found.high and found.high - found.low < 1
    assert math.isnan(slope(np.ones(120), y, EPISODES, bootstrap).value)


def test_object_scores_of_both_kinds_of_features_are_compared_in_the_same_frames():
    rng = np.random.default_rng(0)
    touched = rng.random((120, 4, 4, 2)) < 0.2
    noise = rng.random((2, 120, 4, 4, 2))
    found = better_than_of_activations("block3", touched + noise[0], 0.3 * touched + noise[1],
                                       touched, EPISODES, seed=0)
    assert found.row == "R3" and found.holds and 0.1 < found.low < found.value < found.high
    other = better_than_of_activations("block3", touched + noise[0], touched + noise[0], touched,
                                       EPISODES, seed=0)
    assert other.value == 0 and other.holds is False
    nothing = better_than_of_activations("block3", noise[0], noise[1], np.zeros_like(touched),
                                         EPISODES, seed=0)
    assert math.isnan(nothing.value) and nothing.holds is None


def test_odd_frames_have_large_residuals_where_they_have():
    rng = np.random.default_rng(0)
    advantages, share = rng.normal(size=120), rng.random(120)
    cells = np.zeros((120, 2, 2, 3))
    cells[..., :2] = 0.5 * (1 - share[:, None, None, None])
    cells[..., 2] = share[:, None, None]
    found = odd_frames("block3", cells, advantages, EPISODES, seed=0)
    assert found.low < 0 < found.high and abs(found.value) < 0.3
    by_size = np.argsort(np.argsort(np.abs(advantages))) / 120
    cells[..., 2] = -by_size[:, None, None]
    cells[..., :2] = 0.5 * (1 - by_size[:, None, None, None])
    found = odd_frames("block3", cells, advantages, EPISODES, seed=0)
    assert found.row == "R12" and found.value == pytest.approx(1, abs=1e-3) and found.low > 0.9


def test_rows_are_read_off_features_and_tables(tmp_path):
    features = LayerFeatures(
        "block3", {"found": {"baseline_mean": 8.9, "baseline_deviation": 0.1, "value_mean": 9.0,
                             "value_deviation": 0.4}},
        Reducer(np.array([[1, 0], [0.3, 0.7], [0.5, 0.5]], np.float32), False),
        np.zeros((2, 8, 8), np.float32), np.zeros((9, 2), np.int32), "0")
    assert [round(each.value, 3) for each in near_one_hot(features)] == [0.7, 0.5]
    assert [each.value for each in value_without_the_layer(features)] == [8.9, 0.1, 9.0, 0.4]

    table = pd.DataFrame([
        ("block3", "value", "coin", 2.5, 1.8, 3.4, 0.6), ("block3", "value", "saw", 1.4, 0.9, 2, 0),
        ("block3", "value", "lava", *[np.nan] * 4), ("block3", "value", "box", 3, 2, 4, 1),
        ("block2", "value", "coin", 9, 9, 9, 9)],
        columns=["layer", "output", "kind", "density", "density_low_95", "density_high_95",
                 "attribution_sign"])
    found = attribution_on_objects(table, "block3", "value")
    assert [(each.value, each.holds) for each in found] == [
        (2.5, True), (0.6, None), (1.4, False), (0, None), (3, None), (1, None)]

    for layer, score in (("block2", 0.8), ("block3", None)):
        (tmp_path / layer).mkdir()
        (tmp_path / layer / "names.json").write_text(json.dumps(
            {"features": [], "score": score, "score_low_95": score, "score_high_95": score}))
    first, second = score_by_layer(ObjectsFolder(tmp_path))
    assert first.value == 0.8 and first.what.endswith("block2") and math.isnan(second.value)
