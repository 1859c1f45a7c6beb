"""Tracking scores: which channels of a layer encode the position of an object?

The object, such as the cheese, the mouse or a wall, is placed at many squares of many levels. A_q
is the map of a channel with the object at square q, A_0 the map without the object, and c(q) the
cell of the map that shows q. Each channel has three scores:

- hit rate: share of (level, q) for which the maximum of A_q - A_0 is within one row and one column
  of c(q). A map that does not change is not a hit.
- contrast: mean of A_q at c(q) minus the mean of A_q at all other cells, in standard deviations of
  the channel over all levels, squares and cells.
- specificity: share of the variance of A_q over (level, q) that is explained by the offset from
  c(q). Values of each cell, minus their mean over (level, q), are grouped by the cell's row and
  column relative to c(q); the score is the between-group sum of squares divided by the total.

The threshold of a score is its maximum over channels and random permutations of the squares within
each level.

Letters in shape comments: L levels, Q squares of a level, C H W the maps of a layer, R orders of
the squares: the true order, then the permutations.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

SCORES = ("hit_rate", "contrast", "specificity")
NUM_PERMUTATIONS = 19  # the maximum of their scores is exceeded by chance with probability 1 / 20
NEAR = 1  # largest distance of a hit, in cells


class Tracker:
    """Accumulates the maps of a layer on many levels, and scores the layer's channels.

    Args:
        shape: shape (C, H, W) of the layer.
        seed: seed of the permutations.
        num_permutations: number of permutations of the squares of each level.
    """

    def __init__(self, shape: tuple[int, ...], seed: int,
                 num_permutations: int = NUM_PERMUTATIONS):
        channels, height, width = self._shape = shape
        orders = 1 + num_permutations
        self._rng = np.random.default_rng(seed)
        self._num_levels = self._num_squares = 0
        self._total = np.zeros(shape)
        self._squares = np.zeros(channels)
        self._hits, self._at_cell = np.zeros((2, orders, channels))
        self._cells = np.zeros((orders, height, width), int)  # how often the object is in each cell
        # Sums of A_q by offset; offset (0, 0) is entry (H - 1, W - 1).
        self._by_offset = np.zeros((orders, channels, 2 * height - 1, 2 * width - 1))

    def add(self, activations: np.ndarray, without: np.ndarray, cells: np.ndarray) -> None:
        """Accumulate the maps of one level.

        Args:
            activations: maps with the object at each square (Q, C, H, W).
            without: maps without the object (C, H, W).
            cells: row from the top and column of the cell that shows each square, int (Q, 2).
        """
        activations = activations.astype(np.float64)
        squares = np.arange(len(cells))
        self._num_levels += 1
        self._num_squares += len(cells)
        self._total += activations.sum(axis=0)
        self._squares += np.einsum("qchw,qchw->c", activations, activations)
        change = (activations - without).reshape(*activations.shape[:2], -1)  # (Q, C, H W)
        largest = np.stack(np.unravel_index(change.argmax(axis=2), self._shape[1:]), -1)
        changes = np.ptp(change, axis=2) > 0  # (Q, C)
        for order in range(len(self._cells)):
            of_square = cells[self._rng.permutation(squares) if order else squares]
            rows, columns = of_square.T
            near = (np.abs(largest - of_square[:, None]) <= NEAR).all(axis=2)  # (Q, C)
            self._hits[order] += (near & changes).sum(axis=0)
            self._at_cell[order] += activations[squares, :, rows, columns].sum(axis=0)
            np.add.at(self._cells[order], (rows, columns), 1)
            for maps, (row, column) in zip(activations, of_square):
                _shifted(self._by_offset[order], row, column, self._shape)[...] += maps

    def table(self) -> pd.DataFrame:
        """Return each channel's scores over all added levels, one row per channel.

        The columns are:

        - ``channel``: number of the channel.
        - One column per score (0 for constant channels), and its ``<score>_threshold``.
        - ``at``, ``elsewhere``: mean activation at the object's cell, and at all other cells.
        - ``tracks``: whether all three scores exceed their thresholds.
        - ``num_levels``, ``num_squares``: numbers of levels, and of squares of all levels.
        """
        scores = self._scores()  # (3, R, C)
        at, size = self._at_cell[0], self._shape[1] * self._shape[2]
        elsewhere = (self._total.sum(axis=(1, 2)) - at) / (self._num_squares * (size - 1))
        table = pd.DataFrame({**dict(zip(SCORES, scores[:, 0])), "at": at / self._num_squares,
                              "elsewhere": elsewhere}).rename_axis("channel").reset_index()
        thresholds = scores[:, 1:].max(axis=(1, 2))
        columns = {f"{name}_threshold": threshold for name, threshold in zip(SCORES, thresholds)}
        return table.assign(**columns, tracks=(scores[:, 0] > thresholds[:, None]).all(axis=0),
                            num_levels=self._num_levels, num_squares=self._num_squares)

    def _scores(self) -> np.ndarray:
        """Compute the scores (3, R, C), in the order of ``SCORES``."""
        count, cells = self._num_squares, self._shape[1] * self._shape[2]
        mean = self._total / count  # (C, H, W)
        total = self._total.sum(axis=(1, 2))
        elsewhere = (total - self._at_cell) / (count * (cells - 1))
        variance = self._squares / (count * cells) - (total / (count * cells)) ** 2
        contrast = _ratio(self._at_cell / count - elsewhere, np.sqrt(np.maximum(variance, 0)))
        centred = self._squares - count * np.square(mean).sum(axis=(1, 2))
        between = np.stack([self._between(order, mean) for order in range(len(self._cells))])
        # A channel that depends on the cell alone has only rounding errors in both terms.
        varies = centred > 1e-9 * self._squares
        return np.stack([self._hits / count, contrast,
                         _ratio(between, np.where(varies, centred, 0))])

    def _between(self, order: int, mean: np.ndarray) -> np.ndarray:
        """Compute the between-group sum of squares (C,) of activations centred per cell.

        The groups are the offsets from the object's cell.

        Args:
            order: number of the order of squares; 0 is the true order.
            mean: mean activation of each cell (C, H, W).
        """
        sums = self._by_offset[order].copy()  # (C, 2 H - 1, 2 W - 1)
        counts = np.zeros(sums.shape[1:])
        for row, column in np.argwhere(self._cells[order]):
            times = self._cells[order][row, column]
            _shifted(sums, row, column, self._shape)[...] -= times * mean
            _shifted(counts, row, column, self._shape)[...] += times
        return np.square(sums).reshape(len(sums), -1) @ _ratio(1.0, counts).ravel()


def _shifted(by_offset: np.ndarray, row: int, column: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return the entries of an array by offset as a map in which a given cell has offset (0, 0).

    Args:
        by_offset: array (…, 2 H - 1, 2 W - 1); offset (0, 0) is entry (H - 1, W - 1).
        row, column: the given cell.
        shape: shape (C, H, W) of the layer.

    Returns:
        View (…, H, W), whose entry (i, j) has the offset (i - row, j - column).
    """
    _, height, width = shape
    return by_offset[..., height - 1 - row:2 * height - 1 - row,
                     width - 1 - column:2 * width - 1 - column]


def _ratio(a: np.ndarray | float, b: np.ndarray) -> np.ndarray:
    """Return a / b, and 0 where b is not positive."""
    a, b = np.broadcast_arrays(a, b)
    return np.divide(a, b, out=np.zeros(a.shape), where=b > 0)
