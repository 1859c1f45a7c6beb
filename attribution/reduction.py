"""Reduction of a layer's channels to features, by non-negative least squares.

A feature is a non-negative direction over the channels of a layer, with sum 1. In a layer whose
activations may be negative, each channel is split into two *slots*: the positive part of its
activation, and the absolute value of its negative part.

Letters in shape comments: N cells (of any number of frames), B frames, C H W channels and grid of a
layer, M slots, F features.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numba import njit, prange
from sklearn.utils import gen_batches

from common.devices import give_numba_torchs_threads

_ROWS_PER_BATCH = 2**16
# A direction is dependent if other directions span all but this share of its squared length.
_DEPENDENT = 1e-10


def split_signs(values: np.ndarray, activations: np.ndarray, signed: bool) -> np.ndarray:
    """Arrange values of channels in slots, by the sign of the activations.

    Args:
        values: values of the channels (N, C).
        activations: activations of the channels (N, C).
        signed: whether the layer has slots of both signs. The C slots of positive activations then
            come first, and each value is put into the slot of its activation's sign; the other slot
            is 0. Activations of 0 count as positive.

    Returns:
        Values of the slots (N, M), where M is C, or 2 C in a signed layer.
    """
    if not signed:
        return values
    negative = activations < 0
    return np.concatenate([np.where(negative, 0, values), np.where(negative, values, 0)], axis=1)


def split_activations(activations: np.ndarray, signed: bool) -> np.ndarray:
    """Arrange absolute values of activations (N, C) in slots (N, M), see ``split_signs``."""
    return np.abs(split_signs(activations, activations, signed))


def flatten_cells(values: np.ndarray) -> np.ndarray:
    """Flatten maps (B, C, H, W) to rows of cells (B H W, C), frame by frame."""
    return np.ascontiguousarray(np.moveaxis(values, 1, -1)).reshape(-1, values.shape[1])


@dataclasses.dataclass(frozen=True)
class Reducer:
    """Reduces channels to features.

    Attributes:
        directions: directions of the features, float32 (F, M), non-negative, each with sum 1.
        signed: whether the layer has slots of both signs.
    """

    directions: np.ndarray
    signed: bool

    def attributions(self, values: np.ndarray, activations: np.ndarray) -> np.ndarray:
        """Convert attributions to channels into attributions to features.

        Positive and negative parts are reduced separately. Since a direction has sum 1, its
        coefficient has the unit of the output.

        Args:
            values: attributions (N, C).
            activations: activations of the same cells (N, C).

        Returns:
            Coefficients and, last, the residual, float64 (N, F + 1). Per cell, they add up to the
            sum of the attributions over channels.
        """
        coefficients = np.empty((len(values), len(self.directions) + 1))
        for rows in gen_batches(len(values), _ROWS_PER_BATCH):
            slots = split_signs(values[rows], activations[rows], self.signed)
            coefficients[rows, :-1] = nnls(np.maximum(slots, 0), self.directions)
            coefficients[rows, :-1] -= nnls(np.maximum(-slots, 0), self.directions)
        coefficients[:, -1] = (values.sum(axis=1, dtype=np.float64)
                               - coefficients[:, :-1].sum(axis=1))
        return coefficients

    def activations(self, activations: np.ndarray) -> np.ndarray:
        """Convert activations of channels (N, C) into activations of features, float64 (N, F)."""
        coefficients = np.empty((len(activations), len(self.directions)))
        for rows in gen_batches(len(activations), _ROWS_PER_BATCH):
            coefficients[rows] = nnls(split_activations(activations[rows], self.signed),
                                      self.directions)
        return coefficients


def nnls(rows: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """Solve non-negative least squares exactly for each row: t >= 0 that minimises |t V - x|.

    Lawson and Hanson (1974), "Solving least squares problems", chapter 23, on the normal equations.
    SciPy's solver takes 0.2 ms per row with eight directions, and 512 frames can have a million
    rows.

    Args:
        rows: x (N, M).
        directions: V (F, M).

    Returns:
        t, float64 (N, F).
    """
    directions = directions.astype(np.float64)
    targets = rows.astype(np.float64) @ directions.T
    solutions = np.zeros_like(targets)
    give_numba_torchs_threads()
    _solve(directions @ directions.T, targets, solutions)
    return solutions


@njit(nogil=True, cache=True, parallel=True)
def _solve(gram, targets, solutions):
    for row in prange(len(targets)):
        _solve_row(gram, targets[row], solutions[row])


@njit(nogil=True, cache=True)
def _solve_row(gram, target, t):
    """Overwrite ``t`` (F,), initially 0, with the t >= 0 that minimises t G t / 2 - t b, where G is
    ``gram`` (F, F) and b is ``target`` (F,)."""
    # Plain loops: numba compiles numpy's functions for ten seconds.
    size = len(target)
    slope = target.copy()  # b - G t
    smallest = 0.0
    for i in range(size):
        smallest = max(smallest, 1e-12 * abs(target[i]))
    free = np.zeros(size, np.bool_)  # entries of t that may be positive
    barred = np.zeros(size, np.bool_)  # entries whose direction is dependent or gives no gain
    chosen = np.empty(size, np.int64)
    solved = np.empty(size)
    factor = np.empty((size, size))
    for _ in range(10 * size):
        index, gain = -1, smallest
        for i in range(size):
            if slope[i] > gain and not free[i] and not barred[i]:
                index, gain = i, slope[i]
        if index < 0:
            return
        free[index] = True
        while True:
            count = 0
            for i in range(size):
                if free[i]:
                    chosen[count] = i
                    count += 1
            if not _cholesky(gram, target, chosen, count, factor, solved):
                free[index], barred[index] = False, True
                break
            # Largest step from t towards the solution that keeps t non-negative.
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
                for i in range(size):
                    barred[i] = False
                break
            for k in range(count):
                if k == first or (solved[k] <= 0 and t[chosen[k]] <= 0):
                    t[chosen[k]] = 0.0
                    free[chosen[k]] = False
            if not free[index] and t[index] == 0.0:
                barred[index] = True  # the apparent gain was a rounding error
        for i in range(size):
            slope[i] = target[i]
            for j in range(size):
                slope[i] -= gram[i, j] * t[j]


@njit(nogil=True, cache=True)
def _cholesky(gram, target, chosen, count, factor, solved):
    """Solve the normal equations of the chosen entries, and return whether they were solved. They
    are not if the directions of the entries are linearly dependent.

    Args:
        gram: G (F, F).
        target: b (F,).
        chosen: indices of the entries (count,).
        count: number of entries.
        factor: memory for the Cholesky factor (F, F).
        solved: receives the solution in its first ``count`` elements (F,).
    """
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
