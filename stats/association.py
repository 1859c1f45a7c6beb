"""Association of two quantities measured in each frame, with 95 % bootstrap intervals.

In every function, ``episodes`` is the number of each frame's episode (N,), and ``bootstrap``
resamples these episodes.

Letters in shape comments: E episodes, K quantities.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy.stats import rankdata

from stats.bootstrap import ClusterBootstrap, by_episode


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A statistic with its 95 % interval.

    Attributes:
        value: value over all frames; NaN if undefined.
        low, high: ends of the interval; NaN for a single episode.
    """

    value: float
    low: float
    high: float


def slope(x: np.ndarray, y: np.ndarray, episodes: np.ndarray,
          bootstrap: ClusterBootstrap) -> Estimate:
    """Estimate the slope of the least-squares regression of y (N,) on x (N,)."""
    return estimate(_slope, np.stack([np.ones(len(x)), x, y, x**2, x * y]), episodes, bootstrap)


def rank_correlation(x: np.ndarray, y: np.ndarray, episodes: np.ndarray,
                     bootstrap: ClusterBootstrap) -> Estimate:
    """Estimate Spearman's rank correlation of x and y, both (N,).

    Ranks are computed once, among all frames, and not again in each resampling.
    """
    return correlation(rankdata(x), rankdata(y), episodes, bootstrap)


def rank_correlations(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Compute Spearman's rank correlation along the last axis of two arrays (..., N).

    Returns:
        Correlations (...); NaN where one of the arrays is constant.
    """
    x, y = (ranks - ranks.mean(axis=-1, keepdims=True) for ranks in (
        rankdata(values, axis=-1) for values in (x, y)))
    return _divide((x * y).sum(axis=-1), np.sqrt((x**2).sum(axis=-1) * (y**2).sum(axis=-1)))


def correlation(x: np.ndarray, y: np.ndarray, episodes: np.ndarray,
                bootstrap: ClusterBootstrap) -> Estimate:
    """Estimate Pearson's correlation of x and y, both (N,)."""
    return estimate(_correlation, _moments(x, y), episodes, bootstrap)


def explained(x: np.ndarray, y: np.ndarray, episodes: np.ndarray,
              bootstrap: ClusterBootstrap) -> Estimate:
    """Estimate the share of the variance of y (N,) that is linearly explained by x (N,)."""
    return estimate(lambda sums: _correlation(sums)**2, _moments(x, y), episodes, bootstrap)


def ratio(x: np.ndarray, y: np.ndarray, episodes: np.ndarray,
          bootstrap: ClusterBootstrap) -> Estimate:
    """Estimate the ratio of the mean of x (N,) to the mean of y (N,); NaN unless the mean of y is
    above 0."""
    return estimate(lambda sums: _divide(sums[..., 0], sums[..., 1]), np.stack([x, y]), episodes,
                    bootstrap)


def auc_of_histograms(positive: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """Compute areas under the ROC curve; equal scores count one half.

    Args:
        positive, negative: numbers of positive and of negative cases by score, in ascending order
            of the B scores (..., B).

    Returns:
        Areas (...); NaN unless there are positive and negative cases.
    """
    below = negative.cumsum(axis=-1) - negative / 2
    return _divide((positive * below).sum(axis=-1),
                   positive.sum(axis=-1) * negative.sum(axis=-1))


def _moments(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return 1, x, y, x², y² and xy (6, N) of x and y (N,), centred to avoid cancellation."""
    x, y = x - x.mean(dtype=np.float64), y - y.mean(dtype=np.float64)
    return np.stack([np.ones(len(x)), x, y, x**2, y**2, x * y])


def estimate(statistic, numbers: np.ndarray, episodes: np.ndarray,
             bootstrap: ClusterBootstrap) -> Estimate:
    """Estimate a statistic that depends only on sums of quantities over frames.

    Args:
        statistic: maps sums (..., K), with any leading dimensions, to the statistic (...).
        numbers: quantities to sum (K, N).
        episodes: number of the episode of each frame (N,).
    """
    sums = by_episode(episodes, numbers)
    ends = (np.nan, np.nan)
    if bootstrap.num_episodes > 1:
        ends = bootstrap.interval_of(lambda draws: statistic(draws @ sums)).tolist()
    return Estimate(float(statistic(sums.sum(axis=0))), *ends)


def _slope(sums: np.ndarray) -> np.ndarray:
    number, x, y, xx, xy = np.moveaxis(sums, -1, 0)
    return _divide(number * xy - x * y, number * xx - x**2)


def _correlation(sums: np.ndarray) -> np.ndarray:
    number, x, y, xx, yy, xy = np.moveaxis(sums, -1, 0)
    return _divide(number * xy - x * y, np.sqrt(np.maximum(number * xx - x**2, 0)
                                                * np.maximum(number * yy - y**2, 0)))


def _divide(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Return the quotient; NaN where the denominator is not positive."""
    return np.divide(numerator, denominator, out=np.full(np.shape(denominator), np.nan),
                     where=denominator > 0)
