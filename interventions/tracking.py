"""Tracking scores: which channels of a map encode the position of an object?

The object (cheese, mouse, a wall, …) is placed at many squares of many levels. For one channel, A_q
is its map with the object at square q, A_0 its map without the object, and c(q) the cell of the map
that shows q:

- hit rate: share of (level, q) for which the maximum of A_q - A_0 is within one row and one column
  of c(q). A map that does not change is not a hit.
- contrast: mean of A_q at c(q) minus its mean at all other cells, in standard deviations of the
  channel over all levels, squares and cells.
- specificity: share of the variance of A_q over (level, q) that is explained by the offset from
  c(q). Values of each cell, minus their mean over (level, q), are grouped by the cell's row and
  column relative to c(q); the score is the between-group sum of squares over the total.

The threshold of a score is its maximum over channels and random permutations of the squares within
each level.

Letters in shape comments: L levels, Q squares of a level, C H W the maps of a layer, R orders of
the squares: the true order, then the permutations.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd

from common.errors import UserError

SCORES = ("hit_rate", "contrast", "specificity")
NUM_PERMUTATIONS = 19  # their maximum is exceeded by chance with probability 1 / 20
NEAR = 1  # largest distance of a hit, in cells


@dataclasses.dataclass(frozen=True)
class Tracking:
    """Tracking scores of the channels of a layer.

    Attributes:
        scores: columns ``SCORES``, one row per channel; 0 for constant channels.
        means: mean activation ``at`` the object's cell and ``elsewhere``, one row per channel.
        thresholds: threshold of each score, by name.
        num_levels: number of levels.
        num_squares: total number of squares over all levels.
    """

    scores: pd.DataFrame
    means: pd.DataFrame
    thresholds: dict[str, float]
    num_levels: int
    num_squares: int

    def table(self) -> pd.DataFrame:
        """Return one row per channel, with scores, means and thresholds.

        Columns: ``channel``, the scores, ``at``, ``elsewhere``, ``<score>_threshold`` per score,
        and ``tracks``: whether all three scores exceed their thresholds.
        """
        table = pd.concat([self.scores, self.means], axis=1).rename_axis("channel").reset_index()
        for name, threshold in self.thresholds.items():
            table[f"{name}_threshold"] = threshold
        table["tracks"] = np.all([table[name] > self.thresholds[name] for name in SCORES], axis=0)
        return table


class Tracker:
    """Accumulator of levels, which scores the channels of a layer.

    Args:
        seed: seed of the permutations.
        num_permutations: number of permutations of the squares of each level.
    """

    def __init__(self, seed: int, num_permutations: int = NUM_PERMUTATIONS):
        self._rng, self._num_permutations = np.random.default_rng(seed), num_permutations
        self._sums: _Sums | None = None
        self._num_levels = 0

    def add(self, activations: np.ndarray, without: np.ndarray, cells: np.ndarray) -> None:
        """Add a level.

        Args:
            activations: maps with the object at each square (Q, C, H, W).
            without: maps without the object (C, H, W).
            cells: row from the top and column of the cell that shows each square, int (Q, 2).

        Raises:
            UserError: if the level has fewer than 2 squares, the shapes are inconsistent, a cell
                is outside the map, or an activation is not finite.
        """
        activations, without, cells = map(np.asarray, (activations, without, cells))
        _check(activations, without, cells,
               self._sums.shape if self._sums else activations.shape[1:])
        if self._sums is None:
            _, channels, height, width = activations.shape
            self._sums = _Sums((channels, height, width), self._num_permutations)
        orders = [np.arange(len(cells)), *(self._rng.permutation(len(cells))
                                           for _ in range(self._num_permutations))]
        self._sums.add(activations.astype(np.float64), without, cells[np.stack(orders)])
        self._num_levels += 1

    def result(self) -> Tracking:
        """Compute the scores of all levels that were added.

        Raises:
            UserError: if no level was added.
        """
        if self._sums is None:
            raise UserError("tracking scores need at least one level")
        scores = self._sums.scores()  # (3, R, C)
        return Tracking(pd.DataFrame(dict(zip(SCORES, scores[:, 0]))), self._sums.means(),
                        dict(zip(SCORES, scores[:, 1:].max(axis=(1, 2)).tolist())),
                        self._num_levels, self._sums.count)


class _Sums:
    """Sums over squares that the scores are computed from, for the true order and permutations."""

    def __init__(self, shape: tuple[int, int, int], num_permutations: int):
        channels, height, width = self.shape = shape
        orders = 1 + num_permutations
        self.count = 0  # number of squares
        self._total = np.zeros(shape)
        self._squares = np.zeros(channels)
        self._hits, self._at_cell = np.zeros((2, orders, channels))
        self._cells = np.zeros((orders, height, width), int)  # how often the object is in each cell
        # Sums of A_q by offset; offset (0, 0) is entry (H - 1, W - 1).
        self._by_offset = np.zeros((orders, channels, 2 * height - 1, 2 * width - 1))

    def add(self, activations: np.ndarray, without: np.ndarray, cells: np.ndarray) -> None:
        """Add a level.

        Args:
            activations: maps with the object at each square (Q, C, H, W).
            without: maps without the object (C, H, W).
            cells: cell of each square in each order (R, Q, 2).
        """
        _, height, width = self.shape
        self.count += len(activations)
        self._total += activations.sum(axis=0)
        self._squares += np.einsum("qchw,qchw->c", activations, activations)
        change = (activations - without).reshape(*activations.shape[:2], -1)  # (Q, C, H W)
        largest = np.stack(np.unravel_index(change.argmax(axis=2), (height, width)), -1)
        changes = np.ptp(change, axis=2) > 0  # (Q, C)
        squares = np.arange(len(activations))
        for order, of_square in enumerate(cells):
            rows, columns = of_square.T
            near = (np.abs(largest - of_square[:, None]) <= NEAR).all(axis=2)  # (Q, C)
            self._hits[order] += (near & changes).sum(axis=0)
            self._at_cell[order] += activations[squares, :, rows, columns].sum(axis=0)
            np.add.at(self._cells[order], (rows, columns), 1)
            for each, (row, column) in zip(activations, of_square):
                _shifted(self._by_offset[order], row, column, self.shape)[...] += each

    def scores(self) -> np.ndarray:
        """Compute the scores (3, R, C), in the order of ``SCORES``."""
        cells = self.shape[1] * self.shape[2]
        mean = self._total / self.count  # (C, H, W)
        whole = self._total.sum(axis=(1, 2))
        elsewhere = (whole - self._at_cell) / (self.count * (cells - 1))
        entries = self.count * cells
        variance = self._squares / entries - (whole / entries) ** 2
        contrast = _ratio(self._at_cell / self.count - elsewhere,
                          np.sqrt(np.maximum(variance, 0)))
        centred = self._squares - self.count * np.square(mean).sum(axis=(1, 2))
        between = np.stack([self._between(order, mean) for order in range(len(self._cells))])
        # A channel that depends on the cell alone has only rounding errors in both terms.
        varies = centred > 1e-9 * self._squares
        return np.stack([self._hits / self.count, contrast,
                         _ratio(between, np.where(varies, centred, 0))])

    def means(self) -> pd.DataFrame:
        """Compute the mean activation at the object's cell and elsewhere, one row per channel."""
        num_elsewhere = self.count * (self.shape[1] * self.shape[2] - 1)
        elsewhere = (self._total.sum(axis=(1, 2)) - self._at_cell[0]) / num_elsewhere
        return pd.DataFrame({"at": self._at_cell[0] / self.count, "elsewhere": elsewhere})

    def _between(self, order: int, mean: np.ndarray) -> np.ndarray:
        """Compute the sum of squares between offsets of activations centred per cell (C,)."""
        sums = self._by_offset[order].copy()  # (C, 2 H - 1, 2 W - 1)
        counts = np.zeros(sums.shape[1:])
        for row, column in np.argwhere(self._cells[order]):
            times = self._cells[order][row, column]
            _shifted(sums, row, column, self.shape)[...] -= times * mean
            _shifted(counts, row, column, self.shape)[...] += times
        return np.square(sums).reshape(len(sums), -1) @ _ratio(1.0, counts).ravel()


def _shifted(by_offset: np.ndarray, row: int, column: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return the view (…, H, W) of an array by offset that holds a map's offsets from one cell."""
    _, height, width = shape
    return by_offset[..., height - 1 - row:2 * height - 1 - row,
                     width - 1 - column:2 * width - 1 - column]


def _ratio(a: np.ndarray | float, b: np.ndarray) -> np.ndarray:
    """Return a / b, and 0 where b is not positive."""
    a, b = np.broadcast_arrays(a, b)
    return np.divide(a, b, out=np.zeros(a.shape), where=b > 0)


def _check(activations: np.ndarray, without: np.ndarray, cells: np.ndarray,
           shape: tuple[int, ...]) -> None:
    if activations.ndim != 4 or activations.shape[1:] != shape or without.shape != shape:
        raise UserError("tracking scores need maps of one layer (squares, channels, rows, "
                        f"columns), not {activations.shape} and {without.shape} without the thing")
    if cells.shape != (len(activations), 2) or len(cells) < 2:
        raise UserError("tracking scores need a cell for each of at least 2 squares of a level, "
                        f"not cells of shape {cells.shape} for {len(activations)} squares")
    if not ((cells >= 0) & (cells < shape[1:])).all():
        outside = cells[~((cells >= 0) & (cells < shape[1:])).all(axis=1)][0]
        raise UserError(f"the map has no cell {outside[0]}.{outside[1]}: its rows go from 0 to "
                        f"{shape[1] - 1}, its columns to {shape[2] - 1}")
    if not (np.isfinite(activations).all() and np.isfinite(without).all()):
        raise UserError("the activations hold NaN or infinity")
