"""Channels of a layer reduced to features: slots, and non-negative least squares.

A feature is a direction over the *slots* of a layer, non-negative and of sum 1. A layer that is
never negative has a slot a channel; one that is signed has two: the channel where its activation is
positive, and the channel where it is negative, as a size.

Letters in shape comments: N cells (of any number of frames), C channels, M slots, F features.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numba import njit, prange

from common.devices import give_numba_torchs_threads

_ROWS_A_TIME = 2**16
_DEPENDENT = 1e-10  # of a direction's length: what is left of one that others make up


def num_slots(channels: int, signed: bool) -> int:
    """M of a layer."""
    return 2 * channels if signed else channels


def to_slots(values: np.ndarray, activations: np.ndarray, signed: bool) -> np.ndarray:
    """Numbers of channels (N, C) to slots (N, M), by the sign of the activations there (N, C).

    In a signed layer the slots of positive activations come first, then those of negative ones.
    """
    if not signed:
        return values
    negative = activations < 0
    return np.concatenate([np.where(negative, 0, values), np.where(negative, values, 0)], axis=1)


def activations_in_slots(activations: np.ndarray, signed: bool) -> np.ndarray:
    """Activations (N, C) as sizes in slots (N, M), none of them negative."""
    return np.abs(to_slots(activations, activations, signed))


def cells_first(values: np.ndarray) -> np.ndarray:
    """Maps (B, C, H, W) to rows of cells (B H W, C), frame by frame."""
    return np.ascontiguousarray(np.moveaxis(values, 1, -1)).reshape(-1, values.shape[1])


@dataclasses.dataclass(frozen=True)
class Reducer:
    """Reduces what a layer holds to features.

    Attributes:
        directions: float32 (F, M), non-negative, each of sum 1.
        signed: whether the layer's slots are of signs.
    """

    directions: np.ndarray
    signed: bool

    def attributions(self, values: np.ndarray, activations: np.ndarray
                     ) -> tuple[np.ndarray, np.ndarray]:
        """Attributions (N, C) in cells with these activations (N, C).

        Positive and negative parts are reduced by themselves. Since a direction's sum is 1, a
        coefficient is in the unit of the output.

        Returns:
            Coefficients float64 (N, F), and what they leave of the sum over channels, float64 (N,):
            both together have that sum, exactly.
        """
        found = np.empty((len(values), len(self.directions)))
        for some in _pieces(len(values)):
            rows = to_slots(values[some], activations[some], self.signed)
            found[some] = nnls(np.maximum(rows, 0), self.directions)
            found[some] -= nnls(np.maximum(-rows, 0), self.directions)
        return found, values.sum(axis=1, dtype=np.float64) - found.sum(axis=1)

    def activations(self, activations: np.ndarray) -> np.ndarray:
        """Activations (N, C) to coefficients (N, F), float64."""
        found = np.empty((len(activations), len(self.directions)))
        for some in _pieces(len(activations)):
            found[some] = nnls(activations_in_slots(activations[some], self.signed),
                               self.directions)
        return found


def _pieces(number: int) -> list[slice]:
    return [slice(begin, begin + _ROWS_A_TIME) for begin in range(0, number, _ROWS_A_TIME)]


def nnls(rows: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """Exact non-negative least squares of each row by itself: t >= 0 with the least |t V - x|.

    Lawson and Hanson (1974), "Solving least squares problems", chapter 23, on the normal equations:
    scipy's takes 0.2 ms a row of eight directions, and one layer of 512 frames has a million.

    Args:
        rows: x (N, M).
        directions: V (F, M).

    Returns:
        t, float64 (N, F).
    """
    directions = directions.astype(np.float64)
    targets = rows.astype(np.float64) @ directions.T
    found = np.zeros_like(targets)
    give_numba_torchs_threads()
    _solve(directions @ directions.T, targets, found)
    return found


@njit(nogil=True, cache=True, parallel=True)
def _solve(gram, targets, found):
    for row in prange(len(targets)):
        _solve_row(gram, targets[row], found[row])


@njit(nogil=True, cache=True)
def _solve_row(gram, target, t):
    """Least t G t / 2 - t b with t >= 0, G ``gram`` (F, F), b ``target`` (F,); t begins as 0."""
    size = len(target)
    slope = target.copy()  # b - G t
    smallest = 1e-12 * np.abs(target).max()
    free = np.zeros(size, np.bool_)  # those that may be above 0
    barred = np.zeros(size, np.bool_)  # made up of others, or no gain
    chosen = np.empty(size, np.int64)
    solved = np.empty(size)
    factor = np.empty((size, size))
    for _ in range(10 * size):
        best, place = smallest, -1
        for i in range(size):
            if not free[i] and not barred[i] and slope[i] > best:
                best, place = slope[i], i
        if place < 0:
            return
        free[place] = True
        while True:
            count = 0
            for i in range(size):
                if free[i]:
                    chosen[count] = i
                    count += 1
            if not _cholesky(gram, target, chosen, count, factor, solved):
                free[place], barred[place] = False, True
                break
            # How far to go from t to the solution without going below 0.
            step, first = 1.0, -1
            for k in range(count):
                if solved[k] <= 0:
                    old = t[chosen[k]]
                    share = old / (old - solved[k]) if old > solved[k] else 0.0
                    if share < step or first < 0:
                        step, first = share, k
            for k in range(count):
                t[chosen[k]] += step * (solved[k] - t[chosen[k]])
            if first < 0:
                barred[:] = False
                break
            for k in range(count):
                if k == first or (solved[k] <= 0 and t[chosen[k]] <= 0):
                    t[chosen[k]] = 0.0
                    free[chosen[k]] = False
            if not free[place] and t[place] == 0.0:
                barred[place] = True  # rounding alone made it look like a gain
        for i in range(size):
            slope[i] = target[i]
            for j in range(size):
                slope[i] -= gram[i, j] * t[j]


@njit(nogil=True, cache=True)
def _cholesky(gram, target, chosen, count, factor, solved):
    """Solve for the chosen rows and columns; False if one of them is made up of the others."""
    for i in range(count):
        for j in range(i + 1):
            total = gram[chosen[i], chosen[j]]
            for k in range(j):
                total -= factor[i, k] * factor[j, k]
            if i > j:
                factor[i, j] = total / factor[j, j]
            elif total <= _DEPENDENT * gram[chosen[i], chosen[i]]:
                return False
            else:
                factor[i, i] = np.sqrt(total)
    for i in range(count):
        total = target[chosen[i]]
        for k in range(i):
            total -= factor[i, k] * solved[k]
        solved[i] = total / factor[i, i]
    for i in range(count - 1, -1, -1):
        total = solved[i]
        for k in range(i + 1, count):
            total -= factor[k, i] * solved[k]
        solved[i] = total / factor[i, i]
    return True
