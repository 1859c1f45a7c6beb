"""Cluster bootstrap over episodes.

Letters in shape comments: E episodes, K quantities, T rows (time steps or other quantities).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

RESAMPLINGS = 2000


def by_episode(episodes: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Sum quantities over the windows of each episode.

    Args:
        episodes: number of the episode of each window (N,).
        values: quantities (K, N).

    Returns:
        Sums (E, K), in ascending order of the episodes' numbers.
    """
    place = np.unique(episodes, return_inverse=True)[1]
    return np.stack([np.bincount(place, quantity) for quantity in values], axis=1)


class ClusterBootstrap:
    """95 % intervals of means over windows, by a cluster bootstrap over their episodes.

    Windows of the same episode overlap and are correlated, so resampling windows would give far too
    narrow intervals. With few episodes, intervals are still too narrow.

    Args:
        episodes: number of the episode of each window (N,).
        resamplings: number of resamplings, R.

    Attributes:
        num_episodes: number of episodes, E.
        draws: how often each resampling drew each episode, in ascending order of the episodes'
            numbers, int64 (R, E).
    """

    def __init__(self, episodes: np.ndarray, seed: int, resamplings: int = RESAMPLINGS):
        names, self._episode = np.unique(episodes, return_inverse=True)
        self.num_episodes = len(names)
        even = np.full(len(names), 1 / len(names))
        self.draws = np.random.default_rng(seed).multinomial(
            len(names), even, resamplings)

    def interval(self, values: np.ndarray, counted: np.ndarray | None = None) -> np.ndarray:
        """Compute the 95 % percentile interval of the mean of each row.

        Args:
            values: values of each window (T, N).
            counted: mask of the values included in the means, bool (T, N); by default all.

        Returns:
            Lower and upper ends (2, T); NaN for rows with values from fewer than two episodes.
        """
        if counted is None:
            counted = np.ones(values.shape, bool)
        sums = by_episode(self._episode, np.where(counted, values, 0))  # (E, T)
        counts = by_episode(self._episode, counted)
        drawn = self.draws @ counts  # (R, T)
        means = np.divide(self.draws @ sums, drawn, out=np.full(drawn.shape, np.nan),
                          where=drawn > 0)
        ends = np.full((2, counted.shape[0]), np.nan)
        reached = (counts > 0).sum(axis=0) >= 2
        ends[:, reached] = np.nanquantile(means[:, reached], (0.025, 0.975), axis=0)
        return ends

    def interval_of(self, statistic: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Compute the 95 % percentile interval (2,) of any statistic; NaN if it is never defined.

        Args:
            statistic: maps (R, E) counts to (R,) statistics. A count is how often a resampling
                drew an episode; episodes are in ascending order of their numbers. An undefined
                statistic must be NaN, and its resampling is left out.
        """
        values = statistic(self.draws)
        if np.isnan(values).all():
            return np.full(2, np.nan)
        return np.nanquantile(values, (0.025, 0.975))

    def p_of(self, statistic: Callable[[np.ndarray], np.ndarray]) -> float:
        """Compute a two-sided p-value for the hypothesis that a statistic is 0.

        It is 2 (1 + c) / (1 + R), but at most 1, where c is the number of resamplings with a
        statistic of at most 0 or of at least 0, whichever is smaller (Efron and Tibshirani 1993,
        chapter 15).

        Args:
            statistic: see ``interval_of``; undefined statistics count neither in c nor in R.
        """
        values = statistic(self.draws)
        values = values[~np.isnan(values)]
        fewer = min((values <= 0).sum(), (values >= 0).sum())
        return float(min(1, 2 * (1 + fewer) / (1 + len(values))))

    def interval_of_medians(self, values: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Compute the 95 % percentile interval of the difference of medians, row by row.

        In each resampling, both medians use the same drawn episodes, so that variation between
        episodes that affects both medians cancels.

        Args:
            values: values of each window (T, N).
            others: values (T, N); the median of a row is subtracted from that of the same row of
                ``values``.

        Returns:
            Lower and upper ends (2, T).
        """
        medians = np.zeros((2, len(values), len(self.draws)))
        for row, numbers in zip(medians.reshape(-1, len(self.draws)), [*values, *others]):
            order = np.argsort(numbers)
            count = self.draws[:, self._episode[order]].cumsum(axis=1)  # (R, N)
            half, ordered = count[:, -1:] / 2, numbers[order]
            row[:] = (ordered[(count >= half).argmax(axis=1)]
                      + ordered[(count > half).argmax(axis=1)]) / 2
        return np.quantile(medians[0] - medians[1], (0.025, 0.975), axis=1)
