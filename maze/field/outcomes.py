"""Outcomes of a level's fields: at the decision square, over all squares, and exact probabilities.

The unit of statistics is the level, so every outcome is one number per level. Outcomes that are
defined for forks only are NaN for other kinds of level.

Exact probabilities: a policy without memory acts on the frame alone, which is determined by the
mouse's square and facing. An episode is therefore a Markov chain over (square, facing), and its
probabilities can be computed without sampling.

Symbols in shapes: m free squares, including the cheese; k targets; n levels; W side of the world.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from scipy.sparse import csr_array

from common.errors import UserError
from envs.maze.grid import Grid, Square
from maze.field.fields import (
    LEFT,
    NO_MEMORY,
    RIGHT,
    STAY,
    STEPS,
    Field,
    difference,
    direction_between,
)

EPISODE_STEPS = 500  # steps after which an episode ends without reward
# At the decision square of a fork; log-odds of cheese against corner, entropy in nats.
AT_DECISION = ("p_cheese", "p_corner", "p_other", "log_odds", "entropy", "value")
# Over all squares of the field: share of squares whose most likely move leads to the neighbour of
# highest value, geometric mean of the move probabilities along the paths to the cheese and the
# corner, mean probabilities of walking into a wall and of standing still.
OF_FIELD = ("value_agreement", "path_cheese", "path_corner", "into_walls", "stay")
# From the Markov chain, which needs both facings and an agent without memory.
EXACT = ("exact_cheese", "exact_cheese_first", "exact_region_first", "expected_steps")
# Differences between the patched and the unpatched field: mean over squares, the published norm,
# and whether the most likely move at the decision square changed.
OF_CHANGE = ("mean_total_variation", "published_size", "direction_changed")


@dataclasses.dataclass(frozen=True, eq=False)
class Chain:
    """Markov chain of a policy without memory on a level; built by :meth:`of`.

    A state is a square and a facing. States at the cheese, which ends the episode, are absorbing.

    Attributes:
        grid: the level; episodes start with its mouse's square and facing.
        transition: sparse transition matrix, from states (rows) to next states (columns), float64
            (2 m, 2 m); all squares with facing 0, then all with facing 1.
        numbers: map with the number of each free square, counted row by row (W, W); -1 elsewhere.
    """

    grid: Grid
    transition: csr_array
    numbers: np.ndarray

    @classmethod
    def of(cls, fields: Sequence[Field]) -> Chain:
        """Build the chain of a level.

        Args:
            fields: the level's fields with facing 0 and 1.

        Raises:
            UserError: if the agent has a memory.
        """
        if any(field.memory != NO_MEMORY for field in fields):
            raise UserError("exact probabilities need an agent without memory: with a GRU, actions "
                            "depend on more than the square; play episodes instead")
        grid = fields[0].grid
        numbers = np.where(grid.is_free,
                           np.cumsum(grid.is_free).reshape(grid.is_free.shape) - 1, -1)
        half = int(numbers.max()) + 1
        cheese = np.array([numbers[square] for square in grid.cheeses], np.int64)
        ends = np.concatenate([cheese, half + cheese])
        sources, targets, shares = [ends], [ends], [np.ones(len(ends))]
        for facing, field in enumerate(fields):
            here = numbers[tuple(field.squares.T)]
            for direction in range(STAY + 1):
                there, turned = here, {LEFT: 0, RIGHT: 1}.get(direction, facing)
                if direction != STAY:
                    neighbours = np.minimum(field.squares + STEPS[direction], grid.world_dim - 1)
                    there = np.where(field.is_open[:, direction], numbers[tuple(neighbours.T)],
                                     here)
                sources.append(facing * half + here)
                targets.append(turned * half + there)
                shares.append(field.probs[:, direction])
        entries = np.concatenate(shares), (np.concatenate(sources), np.concatenate(targets))
        return cls(grid, csr_array(entries, shape=(2 * half, 2 * half)), numbers)

    def _states(self, squares: Iterable[Square]) -> np.ndarray:
        """Return the indices in ``transition`` of k free squares with facing 0 and with facing 1,
        int64 (2, k)."""
        numbers = np.array([self.numbers[square] for square in squares], np.int64)
        return np.stack([numbers, numbers + self.transition.shape[0] // 2])

    @property
    def _start(self) -> int:
        return self._states([self.grid.mouse])[self.grid.facing, 0]

    def reaching(self, targets: Sequence[Square], steps: int = EPISODE_STEPS) -> np.ndarray:
        """Compute the probability of reaching each target within ``steps`` steps, float64 (k,).

        The probability is 1 for the square where the episode starts.
        """
        there = np.zeros((self.transition.shape[0], len(targets)))
        there[self._states(targets), np.arange(len(targets))] = 1
        reached = there
        for _ in range(steps):
            reached = np.maximum(self.transition @ reached, there)
        return reached[self._start]

    def before(self, squares: Sequence[Square], others: Sequence[Square],
               steps: int = EPISODE_STEPS) -> float:
        """Compute the probability of reaching one of ``squares`` before any of ``others``.

        Only the first ``steps`` steps count. The square where the episode starts counts as reached.
        """
        there, stays = np.zeros((2, self.transition.shape[0]))
        there[self._states(squares)] = 1
        stays[self._states([*squares, *others])] = 1
        reached = there
        for _ in range(steps):
            reached = np.where(stays, there, self.transition @ reached)
        return float(reached[self._start])

    def expected_steps(self, steps: int = EPISODE_STEPS) -> float:
        """Compute the expected length of an episode, which ends when the cheese is reached or after
        ``steps`` steps."""
        left = np.ones(self.transition.shape[0])
        left[self._states(self.grid.cheeses)] = 0
        total = 0.0
        for _ in range(steps):  # left: probability that the episode has not ended by then
            total += left[self._start]
            left = self.transition @ left
        return float(total)


@dataclasses.dataclass(frozen=True)
class Reaching:
    """Exact probabilities for an episode on a level with one cheese.

    Attributes:
        cheese: probability of reaching the cheese within the episode's steps.
        cheese_first: probability of reaching the cheese before the top right region, from which the
            cheese's square is excluded.
        region_first: probability of reaching this region before the cheese.
        steps: expected length of the episode, in steps.
    """

    cheese: float
    cheese_first: float
    region_first: float
    steps: float


def reaching(fields: Sequence[Field], region: int, steps: int = EPISODE_STEPS) -> Reaching:
    """Compute the exact probabilities of a level.

    Args:
        fields: fields of a policy without memory, with facing 0 and 1.
        region: number of rows and columns of the top right region.
        steps: maximum length of an episode.

    Raises:
        UserError: if the agent has a memory, or there is not exactly one cheese.
    """
    chain, grid = Chain.of(fields), fields[0].grid
    inside = grid.region(region)
    others = [square for square in grid.squares() if inside[square] and square != grid.cheese]
    return Reaching(float(chain.reaching([grid.cheese], steps)[0]),
                    chain.before([grid.cheese], others, steps),
                    chain.before(others, [grid.cheese], steps), chain.expected_steps(steps))


def path_probability(field: Field, target: Square) -> float:
    """Compute the published *normalised path probability* of a square.

    This is the geometric mean of the probabilities of the steps along the shortest path from the
    mouse to the square, excluding steps from the cheese's square. For the mouse's own square, it is
    P(stay).

    Raises:
        UserError: if the square cannot be reached, or the field lacks a square of the path.
    """
    path = field.grid.path(field.grid.mouse, target)
    if len(path) == 1:
        return float(field.probs[field.row(path[0]), STAY])
    logs = [field.log_groups[field.row(square), direction_between(square, after)]
            for square, after in itertools.pairwise(path) if square not in field.grid.cheeses]
    return float(np.exp(np.mean(logs)))


def at_decision_square(field: Field) -> dict[str, float]:
    """Compute the outcomes AT_DECISION of a fork, by name.

    The outcomes are the probabilities of the first step to the cheese, of the first step to the
    corner, and of all other moves and staying; the log-odds of cheese against corner; the entropy
    of left, down, up, right and stay in nats; and the value.

    Raises:
        UserError: if the level is not a fork.
    """
    to_cheese, to_corner = decision_steps(field.grid)
    row = [field.row(field.grid.decision_square())]
    values = at_decisions(field.log_groups[row], field.values[row], np.array([to_cheese]),
                          np.array([to_corner]))
    return dict(zip(AT_DECISION, values[0].tolist()))


def decision_steps(grid: Grid) -> tuple[int, ...]:
    """Return the directions of the first steps to cheese and corner from the decision square.

    Raises:
        UserError: if the level is not a fork.
    """
    square = grid.decision_square()
    return tuple(direction_between(square, step) for step in grid.first_steps())


def at_decisions(log_groups: np.ndarray, values: np.ndarray, to_cheese: np.ndarray,
                 to_corner: np.ndarray) -> np.ndarray:
    """Compute the outcomes AT_DECISION of several levels, float64 (n, 6).

    Args:
        log_groups: log-probabilities of left, down, up, right, stay at the decision squares,
            (n, 5).
        values: values at the decision squares (n,).
        to_cheese, to_corner: directions of the first steps, from :func:`decision_steps`, (n,).
    """
    probs, rows = np.exp(log_groups), np.arange(len(log_groups))
    probs = probs / probs.sum(axis=1, keepdims=True)
    cheese, corner = probs[rows, to_cheese], probs[rows, to_corner]
    return np.stack([cheese, corner, 1 - cheese - corner,
                     log_groups[rows, to_cheese] - log_groups[rows, to_corner],
                     -(probs * log_groups).sum(axis=1), values.astype(np.float64)], axis=1)


def value_agreement(field: Field) -> float:
    """Compute the share of squares whose most likely move leads to the neighbour of highest value.

    The cheese, which ends the episode with its reward, counts as the highest value. Staying, walls
    and squares without neighbours in the field are ignored.
    """
    grid = field.grid
    heights = np.pad(field.map(field.values), 1, constant_values=np.nan)
    for square in grid.cheeses:
        heights[square[0] + 1, square[1] + 1] = np.inf
    around = np.stack([heights[tuple((field.squares + 1 + step).T)] for step in STEPS],
                      axis=1)  # (squares, 4)
    has_neighbour = ~np.isnan(around).all(axis=1)
    best = np.nanargmax(around[has_neighbour], axis=1)
    return float((field.probs[has_neighbour, :STAY].argmax(axis=1) == best).mean())


def outcomes(field: Field, unpatched: Field | None = None, other_facing: Field | None = None,
             region: int = 5, steps: int = EPISODE_STEPS) -> dict[str, float]:
    """Compute all outcomes of a level: AT_DECISION, OF_FIELD, EXACT and OF_CHANGE.

    Args:
        field: field with facing 0, or the only field.
        unpatched: field of the same level without patches, for OF_CHANGE.
        other_facing: field with facing 1, for EXACT.
        region: number of rows and columns of the top right region, for EXACT.
        steps: maximum length of an episode, for EXACT.

    Returns:
        Outcomes by name; NaN where undefined or not computed.
    """
    grid = field.grid
    values = dict.fromkeys((*AT_DECISION, *OF_FIELD, *EXACT, *OF_CHANGE), np.nan)
    with contextlib.suppress(UserError):
        values |= at_decision_square(field)
    with contextlib.suppress(UserError):
        values["path_cheese"] = path_probability(field, grid.cheese)
    with contextlib.suppress(UserError):
        values["path_corner"] = path_probability(field, grid.corner)
    values["value_agreement"] = value_agreement(field)
    values["into_walls"] = float((field.effective_probs - field.probs)[:, STAY].mean())
    values["stay"] = float(field.probs[:, STAY].mean())
    if other_facing is not None and len(grid.cheeses) == 1:
        exact = reaching((field, other_facing), region, steps)
        values |= dict(zip(EXACT, dataclasses.astuple(exact)))
    if unpatched is not None:
        change = difference(unpatched, field)
        values["mean_total_variation"] = change.mean_total_variation
        values["published_size"] = change.published_size
        with contextlib.suppress(UserError):
            square = grid.decision_square()
            before, after = (side.probs[side.row(square)].argmax() for side in (unpatched, field))
            values["direction_changed"] = float(before != after)
    return values
