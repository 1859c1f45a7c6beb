"""Features of a level that may predict whether an agent gets the cheese.

Source: *Behavioural statistics for a maze-solving agent* (2023). Distances between the cheese C,
the decision square D, the corner T and the top right region of 5 x 5: Euclidean (``euc``), taxicab
(``taxi``) and in steps along the shortest path (``steps``); to a region, the smallest to one of its
free squares. A feature is named by kind and ends: ``euc_C_D``, ``steps_D_5x5``.
"""

from __future__ import annotations

import itertools

import numpy as np

from common.errors import UserError
from maze.level.grid import Grid, Square

REGION = 5
MEASURES = ("euc", "taxi", "steps")
ENDS = tuple(f"{one}_{other}" for one, other in (
    ("C", "D"), ("C", "T"), ("D", "T"), ("C", "5x5"), ("D", "5x5")))
NAMES = (*(f"{measure}_{ends}" for measure, ends in itertools.product(MEASURES, ENDS)),
         "cheese_norm")


def distances_between(grid: Grid, origin: Square, targets: np.ndarray) -> tuple[float, ...]:
    """Smallest distances from a square to one of several, one for each of MEASURES.

    Args:
        targets: bool (W, W), of which free squares count.

    Raises:
        UserError: if no way leads to one of them.
    """
    places = np.argwhere(targets & grid.is_free)
    apart = np.abs(places - origin)
    steps = grid.distances(origin)[tuple(places.T)]
    reached = steps[steps >= 0]
    if not len(reached):
        raise UserError(f"no way leads from {origin} to any of {len(places)} squares")
    return (float(np.hypot(*apart.T).min()), float(apart.sum(axis=1).min()),
            float(reached.min()))


def features(grid: Grid) -> dict[str, float]:
    """The 16 published features of a fork, by NAMES, in squares.

    ``cheese_norm`` is the Euclidean norm of the cheese's world coordinates. A region is the whole
    maze where that has no more than 5 rows.

    Raises:
        UserError: if the level is no fork.
    """
    decision = grid.decision_square()

    def only(square: Square) -> np.ndarray:
        mask = np.zeros(grid.cells.shape, bool)
        mask[square] = True
        return mask

    corner, region = only(grid.corner), grid.region(REGION)
    columns = [distances_between(grid, origin, targets) for origin, targets in (
        (grid.cheese, only(decision)), (grid.cheese, corner), (decision, corner),
        (grid.cheese, region), (decision, region))]
    values = [column[number] for number in range(len(MEASURES)) for column in columns]
    return dict(zip(NAMES, (*values, float(np.hypot(*grid.cheese)))))
