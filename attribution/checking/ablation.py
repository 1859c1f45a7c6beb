"""Ablation of features in single frames: does the output change by the attributed amount?

A feature is ablated as in ``agents.edits``: its direction is projected out of every cell. If the
attributions are right and features do not interact, the output changes by minus the sum of the
feature's attributions.

Letters in shape comments: N frames, B a batch, F features.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from agents.edits import Edit
from attribution.checking.check import (
    Arrays,
    Batch,
    Check,
    CheckContext,
    CheckedLayer,
    Name,
    Subject,
    panels,
)
from common.palette import COLOURS
from common.results import Array
from stats.association import rank_correlation, slope
from stats.bootstrap import ClusterBootstrap


class Ablation(Check):
    """Changes of the output when single features are ablated, and the features' attributions.

    Stored: ``changes`` of the output, float64 (N, F); ``totals``, sums of the attributions over
    cells, float32 (N, F).
    """

    name = "interventions"
    title = "Does the output change as attributed when a feature is taken out?"
    method = (
        "Each feature's direction is projected out of every cell of a frame. Expected "
        "is minus the sum of the feature's attribution; slope: of the change on what is "
        "expected, 1 if attributions are right and features act apart from each other.")
    columns: ClassVar = {"feature": "feature", "change": "change", "expected": "expected",
        "slope": "slope", "low_95": "low", "high_95": "high", "r2": "R²",
        "rank_correlation": "rank correlation"}
    arrays: ClassVar = {"changes": Array(np.float64, "N F"), "totals": Array(np.float32, "N F")}

    def compute(self, context: CheckContext, subject: Subject) -> Arrays:
        layer = CheckedLayer(context.agent, subject)
        return {"changes": layer.compute(context.frames, "edited frame", functools.partial(
                    ablate_features, layer)),
                "totals": context.attributed(subject, "totals")[:, :-1]}

    def rows(self, context: CheckContext, subject: Subject, arrays: Arrays) -> pd.DataFrame:
        return features_table(arrays["changes"], arrays["totals"], context.frames.episodes,
                              context.seed)

    def plot(self, table: pd.DataFrame, arrays: Mapping[Name, Arrays]) -> Figure:
        """Plot actual against expected changes of the output, one point per frame and feature."""
        figure, axes_of = panels(1, len(arrays))
        for axes, (name, stored) in zip(axes_of[0], arrays.items()):
            expected = -stored["totals"]
            for feature, (x, y) in enumerate(zip(expected.T, stored["changes"].T)):
                axes.plot(x, y, ".", markersize=3, color=COLOURS[feature % len(COLOURS)],
                          label=str(feature))
            ends = [float(expected.min()), float(expected.max())]
            axes.plot(ends, ends, color="black", linewidth=0.8)
            axes.set(title=", ".join(name), xlabel="expected", ylabel="change")
        axes_of[0, 0].legend(title="feature", fontsize=7, ncols=2)
        return figure

    def verdict(self, table: pd.DataFrame) -> str:
        known = table.dropna(subset=["slope"])
        if not len(known):
            return "No feature has any attribution."
        within = (known["low_95"] <= 1) & (known["high_95"] >= 1)
        return (f"Slopes: median {known['slope'].median():.2f}, R² median "
                f"{known['r2'].median():.2f}; {within.sum()} of {len(known)} intervals hold 1.")


def ablate_features(layer: CheckedLayer, batch: Batch) -> np.ndarray:
    """Compute the change of the output when each feature is ablated alone, float64 (B, F)."""
    activations, rows = batch.prefix.activations, np.arange(len(batch.actions))
    before = layer.outputs(batch, activations, rows)
    return np.stack([
        layer.outputs(batch, Edit(layer.subject.bottleneck.layer.name, direction[None]).changed(
            activations, 1), rows) - before
        for direction in torch.from_numpy(layer.subject.features.reducer.directions)], axis=1)


def features_table(changes: np.ndarray, totals: np.ndarray, episodes: np.ndarray,
                   seed: int) -> pd.DataFrame:
    """Compare changes of the output with attributions.

    Args:
        changes: changes of the output (N, F).
        totals: sums of the attributions over cells (N, F).
        episodes: episode of each frame (N,).
        seed: seed of the bootstrap over episodes.

    Returns:
        A row per feature: ``feature``, ``change`` (mean), ``expected`` (mean expected change: minus
        the attributions), ``slope`` of the actual on the expected change with ``low_95`` and
        ``high_95``, ``r2``, and ``rank_correlation``. NaN where attributions or changes are
        constant.
    """
    bootstrap = ClusterBootstrap(episodes, seed)
    rows = []
    for feature, (change, total) in enumerate(zip(changes.T, totals.T)):
        numbers = [change.mean(), -total.mean()]
        if np.ptp(total) > 0 and np.ptp(change) > 0:
            numbers += [*vars(slope(-total, change, episodes, bootstrap)).values(),
                        np.corrcoef(total, change)[0, 1]**2,
                        rank_correlation(-total, change, episodes, bootstrap).value]
        else:
            numbers += [np.nan] * 5
        rows.append((feature, *numbers))
    return pd.DataFrame(rows, columns=["feature", "change", "expected", "slope", "low_95",
                                       "high_95", "r2", "rank_correlation"])
