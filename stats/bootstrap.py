"""Cluster bootstrap over episodes.

Shape symbols: N windows, E episodes, T steps or other quantities, R resamplings.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

RESAMPLINGS = 2000


class ClusterBootstrap:
    """95 % intervals of means over windows, by a cluster bootstrap over their episodes.

    Windows of the same episode overlap and are correlated, so resampling windows would give far too
    narrow intervals. With few episodes, intervals are still too narrow.

    Args:
        episodes: episode of each window (N,).
        seed: seed of the resamplings.

    Attributes:
        num_episodes: number of episodes, E.
    """

    def __init__(self, episodes: np.ndarray, seed: int):
        names, self._episode = np.unique(episodes, return_inverse=True)
        self.num_episodes = len(names)
        even = np.full(len(names), 1 / len(names))
        self._draws = np.random.default_rng(seed).multinomial(
            len(names), even, RESAMPLINGS)  # (R, E), number of draws of each episode

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
            statistic: maps the number of draws of each episode (R, E), episodes sorted, to the
                statistic of each resampling (R,), which is NaN if undefined.
        """
        values = statistic(self._draws)
        if np.isnan(values).all():
            return np.full(2, np.nan)
        return np.nanquantile(values, (0.025, 0.975))

    def interval_of_medians(self, values: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Compute the 95 % percentile interval of the difference of two medians.

        Both medians of a resampling use the same draw of episodes, so that their common variation
        cancels.

        Args:
            values: values of each window (T, N).
            others: values (T, N) whose median is subtracted.

        Returns:
            Lower and upper ends (2, T).
        """
        return np.quantile(self._medians(values) - self._medians(others), (0.025, 0.975), axis=1)

    def _medians(self, values: np.ndarray) -> np.ndarray:
        """Return the medians (T, R) of values (T, N) over the windows of each resampling."""
        medians = np.empty((len(values), len(self._draws)))
        for row, numbers in enumerate(values):
            order = np.argsort(numbers)
            count = self._draws[:, self._episode[order]].cumsum(axis=1)  # (R, N)
            half, ordered = count[:, -1:] / 2, numbers[order]
            medians[row] = (ordered[(count >= half).argmax(axis=1)]
                            + ordered[(count > half).argmax(axis=1)]) / 2
        return medians

    def _by_episode(self, values: np.ndarray) -> np.ndarray:
        """Sum values (T, N) over the windows of each episode to (E, T)."""
        sums = np.zeros((self.num_episodes, len(values)))
        np.add.at(sums, self._episode, values.T)
        return sums
