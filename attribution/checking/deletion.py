"""Removal of cells and of features of a layer: does the output change as attributed?

*Deletion and insertion*: cells of a layer are replaced by the baseline (deletion) or restored
(insertion) one after another. The output is plotted against the number of these cells (as in
Petsiuk, Das and Saenko 2018, "RISE", section 3.3, but with cells of a layer instead of pixels). The
cells with the largest attribution, which raise the output most, come first. A good order therefore
has a small area under the deletion curve and a large area under the insertion curve. The order by
attribution is compared with the orders by gradient times activation and by the size of the
activations (Euclidean norm over channels), and with random orders.

*Ablation* of single features, as in ``agents.edits``: a feature's direction is projected out of
every cell. If the output is additive in the features and their directions are orthogonal, the
output changes by minus the sum of the feature's attributions.

Letters in shape comments: N frames, B frames of a batch, P = H W cells of a layer, C channels, F
features, M points of a curve, R changed activations of frames.
"""

from __future__ import annotations

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
    summarise,
)
from common.palette import BLUE, COLOURS, DARK_GREY, VERMILION
from common.results import Array
from stats.association import rank_correlation, slope
from stats.bootstrap import ClusterBootstrap

POINTS = 9  # points per curve, including both ends
RANDOM_ORDERS = 2  # random orders per frame, whose curves are averaged
ATTRIBUTION, GRADIENT, ACTIVATION, RANDOM = ORDERS = (
    "attribution", "gradient times activation", "size of the activations", "random")
KINDS = ("deletion", "insertion")
COMPARISON = ("better", "low_95", "high_95", "above")  # columns; see compare_areas
_CHANGED_PER_BATCH = 128


class Deletion(Check):
    """Deletion and insertion curves.

    The stored array ``values`` holds values of the output, float32 (N, orders, 2, M). The second
    axis is in the order of ``ORDERS``, the third in the order of ``KINDS``. At the first
    point of a curve no cell has been replaced or restored; at the last point, all have been.
    """

    title = "Do the cells with the largest attributions matter most?"
    method = (
        "Cells of the layer are set to the baseline (deletion) or restored from it (insertion), "
        "in descending order of attribution. Areas under the curves are in standard deviations "
        "of the output. Better: advantage over the other order, which is a smaller area in "
        "deletion and a larger area in insertion. Criterion: the 95 % interval of the advantage "
        "over random orders lies above 0.")
    columns: ClassVar = {"kind": "curve", "other": "other order", "area": "area",
        "other_area": "other order's area", "better": "better", "low_95": "low", "high_95": "high"}
    arrays: ClassVar = {"values": Array(np.float32, f"N {len(ORDERS)} 2 {POINTS}")}

    def compute(self, context: CheckContext, subject: Subject) -> Arrays:
        layer, cells = CheckedLayer(context.agent, subject), context.cells(subject)
        rng = np.random.default_rng(context.seed)
        return {"values": np.concatenate([
            _curves(layer, batch, cells[batch.rows], rng)
            for batch in layer.read(context, "deletion batch")])}

    def rows(self, context: CheckContext, subject: Subject, arrays: Arrays) -> pd.DataFrame:
        """Compare the order by attribution with every other order.

        Returns:
            A row per kind of curve and other order, with the columns ``kind``, ``other``, ``area``
            and ``other_area`` (mean areas under the curves, in standard deviations of the output),
            and the columns of ``COMPARISON``.
        """
        deviation = context.attributions.read("summary", *subject.name)["deviation"] or 1.0
        areas = areas_under(arrays["values"]) / deviation  # (N, orders, 2)
        bootstrap = ClusterBootstrap(context.episodes, context.seed)
        return pd.DataFrame([
            (kind, order, *compare_areas(areas[:, 0, number], areas[:, place, number], kind,
                                         bootstrap))
            for number, kind in enumerate(KINDS) for place, order in enumerate(ORDERS) if place],
            columns=["kind", "other", "area", "other_area", *COMPARISON])

    def plot(self, table: pd.DataFrame, arrays: Mapping[Name, Arrays]) -> Figure:
        figure, axes_of = panels(len(arrays), len(KINDS))
        for row, (name, stored) in zip(axes_of, arrays.items()):
            curves = stored["values"].mean(axis=0).swapaxes(0, 1)  # (2, orders, M)
            for axes, kind, heights_of in zip(row, KINDS, curves):
                for colour, order, heights in zip((VERMILION, BLUE, COLOURS[2], DARK_GREY), ORDERS,
                                                  heights_of):
                    axes.plot(np.linspace(0, 1, POINTS), heights, color=colour, label=order)
                axes.set(title=f"{', '.join(name)}: {kind}", xlabel="share of the cells",
                         ylabel="mean output")
        axes_of[0, 0].legend(fontsize=8)
        return figure

    def verdict(self, table: pd.DataFrame) -> str:
        random = table[table["other"] == RANDOM]
        return " ".join(
            summarise(rows["above"], rows, f"{kind.capitalize()} is better than random order")
            for kind in KINDS if len(rows := random[random["kind"] == kind]))


def ranks_of(scores: np.ndarray) -> np.ndarray:
    """Rank the cells of each frame by descending score. The cell of rank 0 is the first to be
    replaced or restored.

    Args:
        scores: score of each cell (N, …); all axes but the first are flattened to P cells.

    Returns:
        Rank of each cell, int64 (N, P).
    """
    return np.argsort(np.argsort(-scores.reshape(len(scores), -1), axis=1, kind="stable"), axis=1)


def areas_under(curves: np.ndarray) -> np.ndarray:
    """Compute the areas under curves on the unit interval, by the trapezoidal rule.

    Args:
        curves: curves at M evenly spaced points (…, M).

    Returns:
        Areas, with the shape of ``curves`` without its last axis.
    """
    return (curves[..., 1:] + curves[..., :-1]).mean(axis=-1) / 2


def compare_areas(areas: np.ndarray, others: np.ndarray, kind: str,
                  bootstrap: ClusterBootstrap) -> tuple:
    """Compare the areas under the curves of two orders in the same frames.

    Args:
        areas, others: areas of the first and the second order (N,).
        kind: one of ``KINDS``.
        bootstrap: bootstrap over episodes.

    Returns:
        Mean area of each order, then the values of ``COMPARISON``: ``better``, the advantage of the
        first order (smaller area in deletion, larger area in insertion); ``low_95`` and
        ``high_95``, its 95 % interval; and ``above``, whether this interval lies above 0.
    """
    better = (areas - others) * (1 if kind == "insertion" else -1)
    low, high = bootstrap.interval(better[None])[:, 0]
    return areas.mean(), others.mean(), better.mean(), low, high, bool(low > 0)


def _curves(layer: CheckedLayer, batch: Batch, attributions: np.ndarray,
            rng: np.random.Generator) -> np.ndarray:
    """Compute the deletion and insertion curves of a batch of frames.

    Args:
        layer: layer and output.
        batch: the frames.
        attributions: attribution to each cell (B, H, W).
        rng: random generator of the random orders.

    Returns:
        Curves, float64 (B, orders, 2, M); see ``Deletion``.
    """
    activations = batch.prefix.activations
    number, _, height, width = activations.shape
    gradient = layer.attribute(batch.prefix, batch.actions, np.zeros(1)).values[0]
    scores = [attributions, gradient.sum(axis=1), activations.norm(dim=1).cpu().numpy()]
    ranks = list(map(ranks_of, scores))
    random = [rng.permuted(np.tile(np.arange(height * width), (number, 1)), axis=1)
              for _ in range(RANDOM_ORDERS)]
    changed = np.round(np.linspace(0, height * width, POINTS)).astype(int)[1:-1]
    kept = np.stack([
        *(rank[:, None] >= changed[:, None] for rank in (*ranks, *random)),  # deletion
        *(rank[:, None] < changed[:, None] for rank in ranks)],  # insertion
        axis=1)  # (B, orders, M - 2, P)
    inner = _outputs(layer, batch, kept.reshape(-1, 1, height, width)).reshape(kept.shape[:3])
    rows = np.arange(number)
    full, empty = (np.tile(layer.changed_outputs(batch, end, rows)[:, None, None],
                           (1, kept.shape[1], 1))
                   for end in (activations, layer.start.to(activations).expand_as(activations)))
    own = len(ranks)
    deleted = np.concatenate([full, inner, empty], axis=2)[:, :own + RANDOM_ORDERS]
    inserted = np.concatenate([empty, inner, full], axis=2)[:, own + RANDOM_ORDERS:]
    # A deletion curve read backwards is the insertion curve of the reversed order, which is also
    # random.
    by_chance = deleted[:, own:].mean(axis=1, keepdims=True)
    return np.stack([np.concatenate([deleted[:, :own], by_chance], axis=1),
                     np.concatenate([inserted, by_chance[..., ::-1]], axis=1)], axis=2)


def _outputs(layer: CheckedLayer, batch: Batch, kept: np.ndarray) -> np.ndarray:
    """Compute outputs with some cells at their activations and all other cells at the baseline.

    Args:
        layer: layer and output.
        batch: B frames.
        kept: masks of the cells that keep their activations, bool (R, 1, H, W); R / B successive
            masks belong to each frame.

    Returns:
        Outputs, float64 (R,).
    """
    activations = batch.prefix.activations
    base = layer.start.to(activations)
    frames = torch.arange(len(activations)).repeat_interleave(len(kept) // len(activations))
    outputs = []
    for frame, cells in zip(frames.split(_CHANGED_PER_BATCH),
                            torch.from_numpy(kept).split(_CHANGED_PER_BATCH)):
        changed = torch.where(cells.to(activations.device), activations[frame], base)
        outputs.append(layer.changed_outputs(batch, changed, frame.numpy()))
    return np.concatenate(outputs)


class Ablation(Check):
    """Changes of the output when single features are ablated, and the features' attributions.

    Stored arrays: ``changes``, changes of the output, float64 (N, F); ``totals``, sums of the
    attributions over cells, float32 (N, F).
    """

    title = "Does the output change as attributed when a feature is ablated?"
    method = (
        "Each feature's direction is projected out of every cell of a frame. Expected change: "
        "minus the sum of the feature's attributions. Slope: regression slope of the actual on "
        "the expected change; it is 1 if the output is additive in the features and their "
        "directions are orthogonal.")
    columns: ClassVar = {"feature": "feature", "change": "change", "expected": "expected",
        "slope": "slope", "low_95": "low", "high_95": "high", "r2": "R²",
        "rank_correlation": "rank correlation"}
    arrays: ClassVar = {"changes": Array(np.float64, "N F"), "totals": Array(np.float32, "N F")}

    def compute(self, context: CheckContext, subject: Subject) -> Arrays:
        layer, changes = CheckedLayer(context.agent, subject), []
        edits = [Edit(subject.bottleneck.layer.name, direction[None])
                 for direction in torch.from_numpy(subject.features.reducer.directions)]
        for batch in layer.read(context, "edited batch"):
            activations, rows = batch.prefix.activations, np.arange(len(batch.rows))
            before = layer.changed_outputs(batch, activations, rows)
            changes.append(np.stack([
                layer.changed_outputs(batch, edit.changed(activations, 1), rows) - before
                for edit in edits], axis=1))  # (B, F)
        return {"changes": np.concatenate(changes),
                "totals": context.attributed(subject, "totals")[:, :-1]}

    def rows(self, context: CheckContext, subject: Subject, arrays: Arrays) -> pd.DataFrame:
        return features_table(arrays["changes"], arrays["totals"], context.episodes, context.seed)

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
        within = (known["low_95"] <= 1) & (known["high_95"] >= 1)
        return (f"Slopes: median {known['slope'].median():.2f}, R² median "
                f"{known['r2'].median():.2f}; {within.sum()} of {len(known)} intervals contain 1.")


def features_table(changes: np.ndarray, totals: np.ndarray, episodes: np.ndarray,
                   seed: int) -> pd.DataFrame:
    """Compare changes of the output when each feature is ablated with the feature's attributions.

    Args:
        changes: changes of the output (N, F).
        totals: sums of the attributions over cells (N, F).
        episodes: episode of each frame (N,).
        seed: seed of the bootstrap over episodes.

    Returns:
        A row per feature; slope, R² and rank correlation are NaN if attributions or changes are
        constant:

        - ``feature``: number of the feature
        - ``change``: mean change
        - ``expected``: mean expected change, which is minus the sum of the attributions
        - ``slope``, ``low_95``, ``high_95``: regression slope of the actual on the expected change,
          and its interval
        - ``r2``, ``rank_correlation``: R² and rank correlation of actual and expected change
    """
    bootstrap, rows = ClusterBootstrap(episodes, seed), []
    for feature, (change, total) in enumerate(zip(changes.T, totals.T)):
        numbers = [np.nan] * 5
        if np.ptp(total) > 0 and np.ptp(change) > 0:
            numbers = [*vars(slope(-total, change, episodes, bootstrap)).values(),
                       np.corrcoef(total, change)[0, 1]**2,
                       rank_correlation(-total, change, episodes, bootstrap).value]
        rows.append((feature, change.mean(), -total.mean(), *numbers))
    return pd.DataFrame(rows, columns=list(Ablation.columns))
