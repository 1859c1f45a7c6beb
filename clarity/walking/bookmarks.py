"""Steps of trajectories that are worth looking at first.

Letters in shape comments: N steps.
"""

from __future__ import annotations

import itertools

import numpy as np

from clarity.attributing.clarity_files import Trajectories


def stretches(steps: Trajectories) -> list[slice]:
    """The steps of each episode, as far as a trajectory has them."""
    found = []
    for number in range(len(steps)):
        begin = steps.steps(number).start
        episode = steps.episode[steps.steps(number)]
        borders = [0, *(np.flatnonzero(np.diff(episode)) + 1).tolist(), len(episode)]
        found += [slice(begin + a, begin + b) for a, b in itertools.pairwise(borders)]
    return found


def best_of_episodes(scores: np.ndarray, steps: Trajectories, most: int) -> np.ndarray:
    """Of every episode the step with the highest score, if that is above 0; of these the ``most``
    highest, highest first, as numbers of steps.

    Args:
        scores: (N,).
    """
    best = np.array([rows.start + int(np.argmax(scores[rows])) for rows in stretches(steps)])
    best = best[scores[best] > 0]
    return best[np.argsort(-scores[best], kind="stable")][:most]


def spikes(steps: Trajectories) -> np.ndarray:
    """By how much the value of a step stands out from its neighbours', |V_t - (V_{t-1} + V_{t+1})
    / 2|; 0 at the ends of an episode or of a trajectory. float64 (N,)."""
    values = steps.value.astype(np.float64)
    found = np.zeros(len(values))
    for rows in stretches(steps):
        of_episode = values[rows]
        found[rows][1:-1] = np.abs(of_episode[1:-1] - (of_episode[:-2] + of_episode[2:]) / 2)
    return found


def failures(steps: Trajectories, most: int) -> np.ndarray:
    """Last steps of episodes that ended and brought no reward, in order."""
    found = [rows.stop - 1 for rows in stretches(steps)
             if steps.done[rows.stop - 1] and not steps.reward[rows].sum() > 0]
    return np.array(found[:most], dtype=int)
