"""Features taken out of a layer in single frames: does the output change by what was attributed?

A feature is taken out as the edits of ``common.edits`` do it: its direction is projected away in
every cell. If the attributions are right and features act apart from each other, the output changes
by minus the sum of the feature's attribution.

Letters in shape comments: N frames, F features, H W cells.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from scipy.stats import spearmanr

from clarity.checking.checked_frames import CheckedFrames, CheckedLayer
from common.bootstrap import ClusterBootstrap
from common.edits import Edit
from common.progress import Progress


def changes_without_features(layer: CheckedLayer, frames: CheckedFrames) -> np.ndarray:
    """Change of the output when one feature is taken out of a frame, float64 (N, F)."""
    directions = torch.from_numpy(layer.features.reducer.directions)
    edits = [Edit(layer.cut.layer.name, direction[None]) for direction in directions]
    found = np.empty((len(frames.step), len(edits)))
    with Progress(len(found), "frame without features") as progress:
        for batch in layer.batches(frames):
            rows = np.arange(len(batch.actions))
            before = layer.outputs(batch, batch.begun.activations, rows)
            found[batch.rows] = np.stack([
                layer.outputs(batch, edit.changed(batch.begun.activations, 1), rows) - before
                for edit in edits], axis=1)
            progress.update(batch.rows.stop)
    return found


def features_table(changes: np.ndarray, totals: np.ndarray, episodes: np.ndarray,
                   seed: int) -> pd.DataFrame:
    """How changes go with attributions.

    Args:
        changes: of the output (N, F).
        totals: sums of the attributions over cells (N, F).
        episodes: of each frame (N,).
        seed: of the bootstrap over episodes.

    Returns:
        A row a feature: ``feature``, ``change`` (mean), ``expected`` (mean of minus the
        attributions), ``slope`` of the change on what is expected, ``low_95`` and ``high_95``,
        ``r2``, and ``rank_correlation``. NaN where nothing was attributed.
    """
    bootstrap = ClusterBootstrap(episodes, seed)
    rows = []
    for feature, (change, total) in enumerate(zip(changes.T, totals.T)):
        numbers = [change.mean(), -total.mean()]
        if np.ptp(total) > 0 and np.ptp(change) > 0:
            sums = by_episode(episodes, np.stack(
                [np.ones(len(total)), -total, change, total**2, -total * change]))
            slope = float(_slope(sums.sum(axis=1)))
            r = np.corrcoef(-total, change)[0, 1]
            numbers += [slope, *bootstrap.interval_of(_slopes(sums)), r**2,
                        spearmanr(-total, change).statistic]
        else:
            numbers += [np.nan] * 5
        rows.append((feature, *numbers))
    return pd.DataFrame(rows, columns=["feature", "change", "expected", "slope", "low_95",
                                       "high_95", "r2", "rank_correlation"])


def by_episode(episodes: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Sums of numbers (K, N) over the frames of each episode, in sorted order (K, E)."""
    place = np.unique(episodes, return_inverse=True)[1]
    return np.stack([np.bincount(place, each) for each in values])


def _slopes(sums: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    return lambda draws: _slope(draws @ sums.T)


def _slope(sums: np.ndarray) -> np.ndarray:
    """Slope of least squares from (…, 5) sums of 1, x, y, x² and x y."""
    number, x, y, xx, xy = np.moveaxis(np.asarray(sums), -1, 0)
    spread = number * xx - x**2
    return np.divide(number * xy - x * y, spread, out=np.full(np.shape(spread), np.nan),
                     where=spread > 0)
