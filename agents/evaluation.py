"""Evaluation of an agent: success rate and mean return over levels, with intervals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import numpy as np

from agents.episodes import Episode
from stats.significance import share

Z_95 = 1.959963984540054  # 97.5 % quantile of the standard normal distribution


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Results over a number of episodes, one a level; intervals are 95 %.

    Attributes:
        success_rate: share of levels the game counts as solved, with Wilson's interval (1927).
        mean_return: mean sum of raw rewards, with the normal interval of the mean (None for a
            single episode).
        mean_length: mean number of environment steps.
    """

    num_episodes: int
    success_rate: float
    success_interval: tuple[float, float]
    mean_return: float
    return_interval: tuple[float, float] | None
    mean_length: float

    def __str__(self) -> str:
        interval = ""
        if self.return_interval:
            interval = " ({:.2f} to {:.2f})".format(*self.return_interval)
        return (f"success rate {100 * self.success_rate:.1f} % "
                f"(95 % interval {100 * self.success_interval[0]:.1f} to "
                f"{100 * self.success_interval[1]:.1f}), mean return {self.mean_return:.2f}"
                f"{interval}, mean length {self.mean_length:.1f} steps over "
                f"{self.num_episodes} levels")


def evaluate(episodes: Iterable[Episode]) -> Evaluation:
    """Summarise episodes; at least one."""
    episodes = list(episodes)
    n = len(episodes)
    successes = int(sum(episode.level_complete for episode in episodes))
    rate, *success_interval = share(successes, n)
    returns = np.array([episode.total_reward for episode in episodes])
    interval = None
    if n > 1:
        error = Z_95 * returns.std(ddof=1) / math.sqrt(n)
        interval = float(returns.mean() - error), float(returns.mean() + error)
    return Evaluation(
        n, rate, tuple(success_interval), float(returns.mean()), interval,
        float(np.mean([episode.length for episode in episodes])))
