"""Cluster bootstrap over episodes.

Letters in shape comments: N windows, E episodes, T steps or other quantities, R resamplings.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

RESAMPLINGS = 2000


class ClusterBootstrap:
    """95 % intervals of means over windows, by a cluster bootstrap over their episodes.

    Windows of one episode overlap and resemble each other, so drawing windows would make the
    intervals far too narrow. With few episodes these are too narrow still.

    Args:
        episodes: episode of each window (N,).
    """

    def __init__(self, episodes: np.ndarray, seed: int):
        names, self._episode = np.unique(episodes, return_inverse=True)
        self.num_episodes = len(names)
        even = np.full(len(names), 1 / len(names))
        self._draws = np.random.default_rng(seed).multinomial(
            len(names), even, RESAMPLINGS)  # (R, E), how often an episode was drawn

    def interval(self, values: np.ndarray, counted: np.ndarray | None = None) -> np.ndarray:
        """Compute the 95 % percentile interval of the mean of each row.

        Args:
            values: (T, N).
            counted: bool (T, N), the values that the means are taken over; all if not given.

        Returns:
            Lower and upper ends (2, T), NaN for a row with values of fewer than two episodes.
        """
        if counted is None:
            counted = np.ones(values.shape, bool)
        sums = self._by_episode(np.where(counted, values, 0))  # (E, T)
        counts = self._by_episode(counted)
        drawn = self._draws @ counts  # (R, T)
        means = np.divide(self._draws @ sums, drawn, out=np.full(drawn.shape, np.nan),
                          where=drawn > 0)
        ends = np.full((2, counted.shape[0]), np.nan)
        reached = (counts > 0).sum(axis=0) >= 2
        ends[:, reached] = np.nanquantile(means[:, reached], (0.025, 0.975), axis=0)
        return ends

    def interval_of(self, statistic: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Compute the 95 % percentile interval (2,) of any statistic.

        Args:
            statistic: maps how often each episode was drawn (R, E), episodes in sorted order, to
                the statistic of each resampling (R,), NaN if it is not defined.
        """
        values = statistic(self._draws)
        if np.isnan(values).all():
            return np.full(2, np.nan)
        return np.nanquantile(values, (0.025, 0.975))

    def interval_of_medians(self, values: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Compute the interval (2, T) of the median of values (T, N) minus that of others (T, N).

        Both medians of a resampling are over the same draw of episodes, so that the variation
        shared by both cancels out.
        """
        return np.quantile(self._medians(values) - self._medians(others), (0.025, 0.975), axis=1)

    def _medians(self, values: np.ndarray) -> np.ndarray:
        """Medians (T, R) of values (T, N) over the windows of each resampling."""
        medians = np.empty((len(values), len(self._draws)))
        for row, numbers in enumerate(values):
            order = np.argsort(numbers)
            count = self._draws[:, self._episode[order]].cumsum(axis=1)  # (R, N)
            half, ordered = count[:, -1:] / 2, numbers[order]
            medians[row] = (ordered[(count >= half).argmax(axis=1)]
                            + ordered[(count > half).argmax(axis=1)]) / 2
        return medians

    def _by_episode(self, values: np.ndarray) -> np.ndarray:
        """Sums over the windows of each episode, (T, N) to (E, T)."""
        sums = np.zeros((self.num_episodes, len(values)))
        np.add.at(sums, self._episode, values.T)
        return sums
