"""Correlation between coordinates of hidden states, some steps apart.

Letters in shape comments: M samples, T steps, K lags, I and J coordinates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy.cluster.hierarchy import leaves_list, linkage

from common.errors import UserError

MAX_LAG = 10


def lags_of(num_steps: int) -> tuple[list[int], list[int]]:
    """The lags 0 … MAX_LAG that samples of this length have, and those that they are too short
    for."""
    there = list(range(min(MAX_LAG + 1, num_steps)))
    return there, list(range(len(there), MAX_LAG + 1))


def mean_products(earlier: np.ndarray, later: np.ndarray, lag: int) -> np.ndarray:
    """Mean products of coordinates at t and others at t + lag, over samples and steps t.

    The coordinates are taken as they are: about their mean in recorded episodes, which is 0 for
    independent components, and not about their mean in these samples.

    Args:
        earlier: (M, T, I).
        later: of the same samples (M, T, J).
        lag: from 0 to T - 1.

    Returns:
        float64 (I, J): rows are coordinates at t, columns those at t + lag.

    Raises:
        UserError: if there is no sample, or none is longer than the lag.
    """
    num_samples, num_steps = earlier.shape[:2]
    if not num_samples:
        raise UserError("there is no sample to take mean products of")
    if not 0 <= lag < num_steps:
        raise UserError(f"samples of {num_steps} steps have no two steps that are {lag} apart")
    first = earlier[:, :num_steps - lag].reshape(-1, earlier.shape[2]).astype(np.float64)
    second = later[:, lag:].reshape(-1, later.shape[2]).astype(np.float64)
    return first.T @ second / len(first)


@dataclasses.dataclass(frozen=True)
class Seriation:
    """An order that puts correlated coordinates next to each other.

    Attributes:
        order: the coordinates (I,).
        linkage: the dendrogram whose leaves they are, as scipy describes it (I - 1, 4).
    """

    order: np.ndarray
    linkage: np.ndarray


def seriate(products: np.ndarray) -> Seriation:
    """Order coordinates so that those correlated at any lag are next to each other.

    Average linkage of 1 less the largest absolute product of two coordinates at any lag, one way
    or the other, divided by their root mean squares; the sign of an independent component means
    nothing. The leaves of the dendrogram are turned so that neighbours are as near as they can be.

    Args:
        products: ``mean_products`` at the lags 0, 1, … (K, I, I).
    """
    num = products.shape[1]
    if num < 2:
        return Seriation(np.arange(num), np.zeros((0, 4)))
    sizes = np.sqrt(np.maximum(np.diagonal(products[0]), np.finfo(float).tiny))
    together = np.abs(products / sizes[:, None] / sizes).max(axis=0)
    distances = np.clip(1 - np.maximum(together, together.T), 0, None)
    tree = linkage(distances[np.triu_indices(num, 1)], "average", optimal_ordering=True)
    return Seriation(leaves_list(tree), tree)


@dataclasses.dataclass(frozen=True)
class Extremes:
    """Samples at the two ends of a quantity, their rows in ascending order of it."""

    bottom: np.ndarray
    top: np.ndarray


def extreme_rows(values: np.ndarray, share: float) -> Extremes:
    """The rows with the lowest and the highest values.

    Args:
        values: (M,).
        share: of all rows, at each end; at least one row is taken.

    Raises:
        UserError: if there are fewer than two rows, so that the ends are the same.
    """
    if len(values) < 2:
        raise UserError("one sample alone has no extreme ones; take more samples")
    number = max(1, round(share * len(values)))
    order = np.argsort(values, kind="stable")
    return Extremes(order[:number], order[-number:])


def cosine_similarity(directions: np.ndarray) -> np.ndarray:
    """Cosines of the angles between directions (I, D), as (I, I)."""
    lengths = np.linalg.norm(directions, axis=1, keepdims=True)
    unit = directions / lengths
    return unit @ unit.T


def members(labels: np.ndarray) -> dict[int, np.ndarray]:
    """The rows of each behaviour that has any, by its number; -1 is none.

    Args:
        labels: (M,).
    """
    return {int(label): np.flatnonzero(labels == label) for label in np.unique(labels)
            if label >= 0}


def standardised(values: np.ndarray, what: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Quantities less their means, divided by their standard deviations over samples and steps.

    Args:
        values: (M, T, J).
        what: their names, for the message.

    Returns:
        The same shape, and the standard deviations (J,).

    Raises:
        UserError: if one does not vary.
    """
    flat = values.reshape(-1, values.shape[-1]).astype(np.float64)
    deviations = flat.std(axis=0)
    for name, deviation in zip(what, deviations):
        if not deviation > 0:
            raise UserError(f"{name} does not vary over these samples, so nothing can be said "
                            "about what moves it")
    return (values - flat.mean(axis=0)) / deviations, deviations
