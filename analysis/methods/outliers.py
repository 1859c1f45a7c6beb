"""States that lie far from all others."""

from __future__ import annotations

import dataclasses

import numpy as np

from analysis.methods.neighbours import nearest_neighbours
from common.errors import UserError

SMALLEST_K = 5
DEVIATIONS = 2


@dataclasses.dataclass(frozen=True)
class Outliers:
    """Which states are outliers.

    Attributes:
        mask: True for an outlier, bool (N,).
        ks: numbers of neighbours that voted.
    """

    mask: np.ndarray
    ks: tuple[int, ...]


def find_outliers(states: np.ndarray, max_k: int, seed: int) -> Outliers:
    """Vote on each state, once for every k = 5, 7, … below ``max_k``.

    A k votes against a state if the median of the distances to its k nearest neighbours lies
    beyond mean + 2 standard deviations of these medians. More than half of the votes decide. The
    published ``max_k`` of 6 leaves one k, 5.

    Args:
        states: standardised (N, D).

    Raises:
        UserError: if no k lies below ``max_k``, or there are too few states.
    """
    ks = tuple(range(SMALLEST_K, max_k, 2))
    if not ks:
        raise UserError(f"outlier_max_k must be above {SMALLEST_K}, not {max_k}")
    if len(states) <= ks[-1]:
        raise UserError(f"there are only {len(states)} states, too few for the {ks[-1]} nearest "
                        "neighbours of each; take more episodes or lower outlier_max_k")
    distances = nearest_neighbours(states, ks[-1], seed).distances  # (N, largest k), ascending
    votes = np.zeros(len(states), dtype=np.int64)
    for k in ks:
        medians = distances[:, k // 2].astype(np.float64)  # k is odd
        votes += medians > medians.mean() + DEVIATIONS * medians.std()
    return Outliers(2 * votes > len(ks), ks)
