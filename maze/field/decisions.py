"""Outcomes of a field, by name: at the decision square, over all squares, and exact ones.

The unit of statistics is the level, so every outcome is one number a level; those of a fork are
missing (NaN) for other kinds of level.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from common.errors import UserError
from maze.field.differences import difference
from maze.field.fields import STAY, STEPS, Field, direction_between
from maze.field.reaching import EPISODE_STEPS, path_probability, reaching
from maze.level.grid import Grid

# Of a fork, at its decision square.
AT_DECISION = ("p_cheese", "p_corner", "p_other", "log_odds", "entropy", "value")
# Over all squares; the last three say whether the agent still knows how to move.
OF_FIELD = ("value_agreement", "path_cheese", "path_corner", "into_walls", "stay")
# Of the Markov chain; they need both facings and an agent without memory.
EXACT = ("exact_cheese", "exact_cheese_first", "exact_region_first", "expected_steps")
# Of a field and the one without patch.
OF_CHANGE = ("mean_total_variation", "published_size", "direction_changed")


def at_decision_square(field: Field) -> dict[str, float]:
    """AT_DECISION: the probabilities of the first steps to cheese and corner and of all else, the
    log-odds of the first two, the entropy of left, down, up, right and stay (nats), the value.

    Raises:
        UserError: if the level is no fork.
    """
    to_cheese, to_corner = decision_steps(field.grid)
    row = [field.row(field.grid.decision_square())]
    found = at_decisions(field.log_groups[row], field.values[row], np.array([to_cheese]),
                         np.array([to_corner]))
    return dict(zip(AT_DECISION, found[0].tolist()))


def decision_steps(grid: Grid) -> tuple[int, int]:
    """The directions of the first steps to cheese and corner from the decision square.

    Raises:
        UserError: if the level is no fork.
    """
    square = grid.decision_square()
    to_cheese, to_corner = (direction_between(square, step) for step in grid.first_steps())
    return to_cheese, to_corner


def at_decisions(log_groups: np.ndarray, values: np.ndarray, to_cheese: np.ndarray,
                 to_corner: np.ndarray) -> np.ndarray:
    """AT_DECISION of several levels, float64 (n, outcomes).

    Args:
        log_groups: log-probabilities of left, down, up, right, stay at their decision squares,
            (n, 5).
        values: there (n,).
        to_cheese, to_corner: directions of the first steps, from :func:`decision_steps`, (n,).
    """
    probs, rows = np.exp(log_groups), np.arange(len(log_groups))
    probs = probs / probs.sum(axis=1, keepdims=True)
    cheese, corner = probs[rows, to_cheese], probs[rows, to_corner]
    return np.stack([cheese, corner, 1 - cheese - corner,
                     log_groups[rows, to_cheese] - log_groups[rows, to_corner],
                     -(probs * log_groups).sum(axis=1), values.astype(np.float64)], axis=1)


def value_agreement(field: Field) -> float:
    """Share of squares where the most likely of the four moves leads to the neighbour with the
    highest value. The cheese, which ends the episode with its reward, is above all others; a wall
    is no neighbour."""
    grid = field.grid
    heights = np.pad(field.map(field.values), 1, constant_values=np.nan)
    for square in grid.cheeses:
        heights[square[0] + 1, square[1] + 1] = np.inf
    beside = np.stack([heights[tuple((field.squares + 1 + step).T)] for step in STEPS],
                      axis=1)  # (n, 4)
    has_neighbour = ~np.isnan(beside).all(axis=1)
    best = np.nanargmax(beside[has_neighbour], axis=1)
    return float((field.probs[has_neighbour, :STAY].argmax(axis=1) == best).mean())


def outcomes(field: Field, unpatched: Field | None = None, other_facing: Field | None = None,
             region: int = 5, steps: int = EPISODE_STEPS) -> dict[str, float]:
    """Every outcome of a level by its name; NaN where it is not defined there.

    Args:
        field: the one with facing 0, or the only one.
        unpatched: the field of the same level without patch, for OF_CHANGE.
        other_facing: the field with facing 1, for EXACT.
        region: rows and columns of the top right region, for EXACT.
        steps: that an episode has, for EXACT.
    """
    grid = field.grid
    found = dict.fromkeys((*AT_DECISION, *OF_FIELD, *EXACT, *OF_CHANGE), np.nan)
    with contextlib.suppress(UserError):
        found |= at_decision_square(field)
    with contextlib.suppress(UserError):
        found["path_cheese"] = path_probability(field, grid.cheese)
    with contextlib.suppress(UserError):
        found["path_corner"] = path_probability(field, grid.corner)
    found["value_agreement"] = value_agreement(field)
    found["into_walls"] = float((field.effective_probs - field.probs)[:, STAY].mean())
    found["stay"] = float(field.probs[:, STAY].mean())
    if other_facing is not None and len(grid.cheeses) == 1:
        exact = reaching((field, other_facing), region, steps)
        found |= dict(zip(EXACT, dataclasses.astuple(exact)))
    if unpatched is not None:
        change = difference(unpatched, field)
        found["mean_total_variation"] = change.mean_total_variation
        found["published_size"] = change.published_size
        with contextlib.suppress(UserError):
            square = grid.decision_square()
            before, after = (each.probs[each.row(square)].argmax() for each in (unpatched, field))
            found["direction_changed"] = float(before != after)
    return found


def by_outcome(levels: Sequence[Mapping[str, float]], names: Sequence[str],
               fewest: int = 10) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Outcomes of several levels as arrays, for ``stats.effects``.

    Args:
        levels: from :func:`outcomes`, one a level.
        names: of those wanted; levels that lack one of them are left out.
        fewest: levels that must remain.

    Returns:
        The outcomes by name, float64 (N,), and the numbers of the N levels they are of.

    Raises:
        UserError: if too few levels have them all.
    """
    table = {name: np.array([level[name] for level in levels], np.float64) for name in names}
    whole = np.flatnonzero(np.isfinite(np.stack(list(table.values()))).all(axis=0))
    if len(whole) < fewest:
        raise UserError(f"only {len(whole)} of {len(levels)} levels have {', '.join(names)}, which "
                        f"is fewer than {fewest}; take more levels, and forks where a decision "
                        "square is asked for")
    return {name: values[whole] for name, values in table.items()}, whole
