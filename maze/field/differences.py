"""Differences of two fields of a level: with and without a patch, with the mouse facing either way.

Letters in shape comments: n squares that both fields have.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from common.errors import UserError
from maze.field.fields import STAY, Field


@dataclasses.dataclass(frozen=True, eq=False)
class Difference:
    """A field minus another one, on the squares that both have.

    Attributes:
        squares: world (row, column), int64 (n, 2).
        probs: of left, down, up, right, stay, float64 (n, 5).
        arrows: (right, up), float64 (n, 2).
        components: an arrow a direction, float64 (n, 4, 2).
        values: float64 (n,).
    """

    squares: np.ndarray
    probs: np.ndarray
    arrows: np.ndarray
    components: np.ndarray
    values: np.ndarray

    @property
    def total_variation(self) -> np.ndarray:
        """Total variation distance of the five probabilities at each square, between 0 and 1,
        (n,)."""
        return np.abs(self.probs).sum(axis=1) / 2

    @property
    def mean_total_variation(self) -> float:
        """Mean of ``total_variation``."""
        return float(self.total_variation.mean())

    @property
    def published_size(self) -> float:
        """Euclidean norm of the changes of the four movement probabilities at all squares, over
        2 n, as ``procgen-tools`` prints it. It shrinks as 1 / sqrt(n) and is no total variation;
        only to be compared with published figures."""
        return float(np.linalg.norm(self.probs[:, :STAY]) / (2 * len(self.squares)))


def difference(original: Field, patched: Field) -> Difference:
    """``patched`` minus ``original``; neither is changed.

    Raises:
        UserError: if their agents saw the squares in different states of memory, or the fields have
            no square in common.
    """
    if original.memory != patched.memory:
        raise UserError("fields whose agents saw the squares with different memories "
                        f"({original.memory} and {patched.memory}) cannot be subtracted")
    here = {tuple(square) for square in patched.squares.tolist()}
    common = [square for square in original.squares.tolist() if tuple(square) in here]
    if not common:
        raise UserError("the fields have no square in common")
    before, after = ([field.row(square) for square in common] for field in (original, patched))

    def minus(name: str) -> np.ndarray:
        return (getattr(patched, name)[after].astype(np.float64)
                - getattr(original, name)[before])

    return Difference(np.array(common), *map(minus, ("probs", "arrows", "components", "values")))
