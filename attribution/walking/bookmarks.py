"""Steps of trajectories that are worth looking at first.

Letters in shape comments: N steps.
"""

from __future__ import annotations

import numpy as np

from attribution.walking.trajectories import Trajectories


def best_of_episodes(scores: np.ndarray, steps: Trajectories, most: int) -> np.ndarray:
    """Of every episode the step with the highest score, if that is above 0; of these the ``most``
    highest, highest first, as numbers of steps.

    Args:
        scores: (N,).
    """
    new = (np.diff(steps.episode, prepend=-1) != 0) | (np.diff(steps.trajectory, prepend=-1) != 0)
    starts = np.flatnonzero(new)
    best = np.array([begin + int(np.argmax(scores[begin:end]))
                     for begin, end in zip(starts, [*starts[1:], len(scores)])], dtype=int)
    best = best[scores[best] > 0]
    return best[np.argsort(-scores[best], kind="stable")][:most]


def spikes(steps: Trajectories) -> np.ndarray:
    """By how much the value of a step stands out from its neighbours', |V_t - (V_{t-1} + V_{t+1})
    / 2|; 0 where an episode or trajectory begins, ends or is cut. float64 (N,)."""
    values = steps.value.astype(np.float64)
    found = np.zeros(len(values))
    inner = ((steps.episode[2:] == steps.episode[:-2])
             & (steps.trajectory[2:] == steps.trajectory[:-2]))
    found[1:-1] = np.where(inner, np.abs(values[1:-1] - (values[:-2] + values[2:]) / 2), 0)
    return found


def failures(steps: Trajectories, most: int) -> np.ndarray:
    """Last steps of episodes that ended and brought no reward, in order."""
    ends = np.flatnonzero(steps.ended)
    brought = np.array([steps.earned[(steps.episode == steps.episode[end])
                                     & (steps.trajectory == steps.trajectory[end])].sum()
                        for end in ends])
    return ends[~(brought > 0)][:most]
