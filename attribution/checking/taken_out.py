"""Features taken out of a layer in single frames: does the output change by what was attributed?

A feature is taken out as the edits of ``agents.edits`` do it: its direction is projected away in
every cell. If the attributions are right and features act apart from each other, the output changes
by minus the sum of the feature's attribution.

Letters in shape comments: N frames, F features, H W cells.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch

from agents.edits import Edit
from attribution.checking.checked_frames import CheckedFrames, CheckedLayer
from common.progress import Progress
from stats.association import rank_correlation, slope
from stats.bootstrap import ClusterBootstrap


def changes_without_features(layer: CheckedLayer, frames: CheckedFrames) -> np.ndarray:
    """Change of the output when one feature is taken out of a frame, float64 (N, F)."""
    directions = torch.from_numpy(layer.features.reducer.directions)
    edits = [Edit(layer.bottleneck.layer.name, direction[None]) for direction in directions]
    found = np.empty((len(frames.step), len(edits)))
    with Progress(len(found), "edited frame") as progress:
        for batch in layer.batches(frames):
            rows = np.arange(len(batch.actions))
            before = layer.outputs(batch, batch.prefix.activations, rows)
            found[batch.rows] = np.stack([
                layer.outputs(batch, edit.changed(batch.prefix.activations, 1), rows) - before
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
            found = slope(-total, change, episodes, bootstrap)
            numbers += [*vars(found).values(), np.corrcoef(total, change)[0, 1]**2,
                        rank_correlation(-total, change, episodes, bootstrap).value]
        else:
            numbers += [np.nan] * 5
        rows.append((feature, *numbers))
    return pd.DataFrame(rows, columns=["feature", "change", "expected", "slope", "low_95",
                                       "high_95", "r2", "rank_correlation"])
