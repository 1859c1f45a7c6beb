"""Features that are strongly active where the object that they are called by is not.

Strongly active is a cell above the 99 % quantile of the feature's activations in all cells of all
frames. It counts when the object touches neither the cell nor one of the eight around it, because
features are also active beside what they respond to.

Letters in shape comments: O frames, H W cells, F features, K kinds of object.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy.ndimage import binary_dilation

from stats.bootstrap import ClusterBootstrap

STRONG = 0.99  # quantile
NUM_CANDIDATES = 8  # frames of a feature that are listed, one an episode
PER = 1000  # frames, of a rate


@dataclasses.dataclass(frozen=True)
class Hallucinations:
    """Of one feature.

    Attributes:
        threshold: activation that 1 % of all cells exceed.
        rate: frames with such a cell away from the object, in 1 000.
        low, high: its 95 % interval, by bootstrap over episodes.
        frames: numbers of the frames with the strongest ones, one an episode, strongest first.
        cells: their cells (row, column).
        strengths: the activations there.
    """

    threshold: float
    rate: float
    low: float
    high: float
    frames: np.ndarray
    cells: np.ndarray
    strengths: np.ndarray


def hallucinations(activations: np.ndarray, touched: np.ndarray, episodes: np.ndarray,
                   seed: int) -> Hallucinations:
    """Frames in which a feature is strongly active away from its object.

    Args:
        activations: of the feature, float (O, H, W).
        touched: by the masks of its object, bool (O, H, W).
        episodes: of each frame (O,).
        seed: of the bootstrap.
    """
    threshold = np.quantile(activations, STRONG, method="higher")
    near = binary_dilation(touched, np.ones((1, 3, 3), bool))
    elsewhere = np.where(near, -np.inf, activations).reshape(len(activations), -1)  # (O, H W)
    place, strength = elsewhere.argmax(axis=1), elsewhere.max(axis=1)
    counted = strength > threshold
    low, high = ClusterBootstrap(episodes, seed).interval(
        counted[None].astype(float))[:, 0]
    order = np.argsort(-strength, kind="stable")
    order = order[counted[order]]
    _, first = np.unique(episodes[order], return_index=True)
    frames = order[np.sort(first)][:NUM_CANDIDATES]
    cells = np.stack(np.unravel_index(place[frames], activations.shape[1:]), axis=1)
    return Hallucinations(float(threshold), PER * counted.mean(), PER * low, PER * high, frames,
                          cells, strength[frames])
