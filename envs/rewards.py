"""Normalisation of rewards, and statistics of finished episodes, during an agent's training.

N is the number of environments in shape comments.
"""

from __future__ import annotations

import numpy as np


def clipped_scale(deviation: float, largest: float) -> float:
    """Return the factor from raw to normalised rewards.

    It is the inverse of the deviation, or smaller, so that no reward so far exceeds
    ``RewardNormalizer.CLIP``.

    Args:
        deviation: standard deviation of the discounted return.
        largest: largest absolute reward so far, above 0.
    """
    return min(1 / float(deviation), RewardNormalizer.CLIP / float(largest))


class RewardNormalizer:
    """Normaliser that divides rewards by the running standard deviation of the discounted return.

    The quotients are clipped to [-CLIP, CLIP]. Mean and variance are updated over all environments
    at once with the parallel formula of Chan et al. (1979), as in ``VecNormalize`` of OpenAI
    Baselines.
    """

    DISCOUNT = 0.99
    CLIP = 10.0
    EPSILON = 1e-8

    def __init__(self, num_envs: int):
        self.returns = np.zeros(num_envs)
        self.mean = 0.0
        self.variance = 1.0
        self.count = 1e-4
        self.largest = 0.0  # largest |reward| so far

    @property
    def scale(self) -> float | None:
        """Current factor from raw to normalised rewards, see :func:`clipped_scale`; None before the
        first non-zero reward."""
        return (clipped_scale(np.sqrt(self.variance + self.EPSILON), self.largest)
                if self.largest else None)

    def __call__(self, rewards: np.ndarray, first: np.ndarray) -> np.ndarray:
        """Update the statistics, and return the normalised rewards, float32 (N,).

        Args:
            rewards: raw rewards (N,).
            first: whether the step ended an episode, bool (N,).
        """
        self.returns = self.returns * self.DISCOUNT + rewards
        self._update(self.returns)
        self.returns[first] = 0.0
        self.largest = max(self.largest, float(np.abs(rewards).max(initial=0)))
        scaled = rewards / np.sqrt(self.variance + self.EPSILON)
        return np.clip(scaled, -self.CLIP, self.CLIP).astype(np.float32)

    def _update(self, batch: np.ndarray) -> None:
        total = self.count + batch.size
        delta = batch.mean() - self.mean
        squares = (self.variance * self.count + batch.var() * batch.size
                   + delta**2 * self.count * batch.size / total)
        self.mean += delta * batch.size / total
        self.variance = squares / total
        self.count = total

    def state_dict(self) -> dict:
        return {"returns": self.returns.tolist(), "mean": float(self.mean),
                "variance": float(self.variance), "count": float(self.count),
                "largest": self.largest}

    def load_state_dict(self, state: dict) -> None:
        self.returns = np.array(state["returns"])
        self.mean, self.variance, self.count = state["mean"], state["variance"], state["count"]
        self.largest = state.get("largest", 0.0)


class EpisodeStatistics:
    """Returns and lengths of the last ``WINDOW`` finished episodes.

    Attributes:
        recent_returns: sums of rewards, at most ``WINDOW``, the latest last.
        recent_lengths: numbers of steps of the same episodes.
    """

    WINDOW = 40

    def __init__(self, num_envs: int):
        self.num_episodes = 0
        self.recent_returns = np.zeros(0)
        self.recent_lengths = np.zeros(0, dtype=np.int64)
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, dtype=np.int64)

    def update(self, rewards: np.ndarray, first: np.ndarray) -> None:
        """Add a step of every environment.

        Args:
            rewards: rewards (N,).
            first: whether the step ended an episode, bool (N,).
        """
        self._returns += rewards
        self._lengths += 1
        if first.any():
            self.num_episodes += int(first.sum())
            self.recent_returns = np.append(self.recent_returns, self._returns[first])
            self.recent_lengths = np.append(self.recent_lengths, self._lengths[first])
            self.recent_returns = self.recent_returns[-self.WINDOW:]
            self.recent_lengths = self.recent_lengths[-self.WINDOW:]
            self._returns[first] = 0.0
            self._lengths[first] = 0

    def state_dict(self) -> dict:
        return {"num_episodes": self.num_episodes,
                "recent_returns": self.recent_returns.tolist(),
                "recent_lengths": self.recent_lengths.tolist(),
                "returns": self._returns.tolist(), "lengths": self._lengths.tolist()}

    def load_state_dict(self, state: dict) -> None:
        self.num_episodes = state["num_episodes"]
        self.recent_returns = np.array(state["recent_returns"], dtype=float)
        self.recent_lengths = np.array(state["recent_lengths"], dtype=np.int64)
        self._returns = np.array(state["returns"], dtype=float)
        self._lengths = np.array(state["lengths"], dtype=np.int64)
