"""Quantised attributions and their statistics for the attribution page.

Letters in shape comments: see ``attribution/page_files.py``.
"""

from __future__ import annotations

import numpy as np

from attribution.trajectories import Trajectories, best_of_episodes

LEVELS = 127  # quantisation levels of a cell on each side of 0
NUM_BINS = 24  # bins per histogram
NUM_STRONGEST = 8  # strongest steps per feature, at most one per episode
PERCENTILES = (90, 95, 98, 99)  # of |cells|, below which the page can leave out cells
SAMPLED_FRAMES = 256  # frames per trajectory from which the percentiles are computed


def quantise(cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantise the cells of each frame to integers from -LEVELS to LEVELS.

    Args:
        cells: attributions per cell and feature (T, H, W, F + 1).

    Returns:
        Quantised cells, int8 (T, H, W, F + 1); and the largest |cell| of each frame, which is
        mapped to LEVELS, float32 (T,).
    """
    cells = cells.astype(np.float32)
    peak = np.abs(cells).max(axis=(1, 2, 3))
    scale = np.where(peak > 0, LEVELS / np.where(peak > 0, peak, 1), 0)
    return np.rint(cells * scale[:, None, None, None]).astype(np.int8), peak


def sample_sizes(cells: np.ndarray, is_gradient: bool) -> np.ndarray:
    """Return |cells| of at most SAMPLED_FRAMES evenly spaced frames of a trajectory, without the
    residual, as a flat array.

    Args:
        cells: attributions per cell and feature (T, H, W, F + 1).
        is_gradient: whether they are gradients (T, H, W, 1), which have no residual.
    """
    some = cells[::-(-len(cells) // SAMPLED_FRAMES)].astype(np.float32)
    return np.abs(some if is_gradient else some[..., :-1]).ravel()


def summarise(steps: Trajectories, tolerance: float, sizes: np.ndarray, peaks: np.ndarray,
              gaps: np.ndarray | None, totals: np.ndarray | None) -> dict:
    """Compute statistics of a layer and an output over all trajectories.

    Args:
        steps: the trajectories.
        tolerance: accepted completeness error.
        sizes: |cells| of all trajectories, from ``sample_sizes``.
        peaks: largest |cell| of each step and feature (N, F).
        gaps: completeness error of each step (N,); None if the maps are not attributions.
        totals: sums of the attributions over cells (N, F + 1); None if ``gaps`` is None.

    Returns:
        - ``scales``: for each feature, the median over frames of its largest |cell|; the page gives
          full colour to this size, or to the largest |cell| of a frame if that is larger
        - ``quantiles``: of |cells|, by percentile; the page leaves out smaller cells
        - ``gaps``: dict of the completeness errors: ``median``, ``most`` (99 % quantile) and
          ``largest`` error, number of errors ``above`` the tolerance, and number of ``steps``; None
          without errors
        - ``means``: mean totals of each feature and, last, the residual (F + 1,)
        - ``strongest``: for each feature, [trajectory, step, total] of the largest |totals|
        - ``spread``: for each feature, a histogram over frames of the largest |cell|, with ``low``
          and ``high`` end and ``counts``
    """
    features = () if totals is None else totals[:, :-1].T
    histograms = [np.histogram(peak, bins=NUM_BINS) for _, peak in zip(features, peaks.T)]
    return {
        "scales": np.median(peaks, axis=0).astype(float).tolist(),
        "quantiles": {str(each): float(np.percentile(sizes, each)) for each in PERCENTILES},
        "gaps": None if gaps is None else {
            "median": float(np.median(gaps)), "most": float(np.quantile(gaps, 0.99)),
            "largest": float(gaps.max()), "above": int((gaps > tolerance).sum()),
            "steps": len(gaps)},
        "means": [] if totals is None else totals.mean(axis=0).astype(float).tolist(),
        "strongest": [[[*steps.place(step), float(feature[step])]
                       for step in best_of_episodes(np.abs(feature), steps, NUM_STRONGEST)]
                      for feature in features],
        "spread": [{"low": float(edges[0]), "high": float(edges[-1]), "counts": counts.tolist()}
                   for counts, edges in histograms]}
