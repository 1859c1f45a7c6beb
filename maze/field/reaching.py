"""Probabilities of reaching squares of a level: exact ones, and the published one along the path.

A policy without memory acts on the picture alone, which the mouse's square and facing decide, so
that an episode is a Markov chain over (square, facing) and its probabilities need no sampling.

Letters in shape comments: m free squares, with cheese; k targets.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from scipy.sparse import csr_array

from common.errors import UserError
from maze.field.fields import (
    LEFT,
    NO_MEMORY,
    RIGHT,
    STAY,
    STEPS,
    Field,
    direction_between,
)
from maze.level.grid import Grid, Square

EPISODE_STEPS = 500  # after which a level ends without reward


@dataclasses.dataclass(frozen=True, eq=False)
class Chain:
    """The Markov chain of a policy without memory on a level; :meth:`of` makes it.

    A state is a square and a facing; those of the cheese, which ends the episode, stay as they are.

    Attributes:
        grid: the level; an episode starts where its mouse is, facing as there.
        transition: probability of each state (columns) after a step from each (rows), float64
            (2 m, 2 m): facing 0 of all squares, then facing 1.
    """

    grid: Grid
    transition: csr_array

    @classmethod
    def of(cls, fields: tuple[Field, Field]) -> Chain:
        """The chain of a level.

        Args:
            fields: of facing 0 and 1.

        Raises:
            UserError: if the agent has a memory.
        """
        if any(field.memory != NO_MEMORY for field in fields):
            raise UserError("exact probabilities need an agent without memory: with a GRU the "
                            "square does not decide what it does; play episodes instead")
        grid = fields[0].grid
        number = _numbers(grid)  # (W, W)
        half = int(number.max()) + 1
        cheese = np.array([number[square] for square in grid.cheeses], np.int64)
        ends = np.concatenate([cheese, half + cheese])
        sources, targets, shares = [ends], [ends], [np.ones(len(ends))]
        for facing, field in enumerate(fields):
            here = number[tuple(field.squares.T)]
            for direction in range(STAY + 1):
                there, turned = here, {LEFT: 0, RIGHT: 1}.get(direction, facing)
                if direction != STAY:
                    beside = np.minimum(field.squares + STEPS[direction], grid.world_dim - 1)
                    there = np.where(field.is_open[:, direction], number[tuple(beside.T)], here)
                sources.append(facing * half + here)
                targets.append(turned * half + there)
                shares.append(field.probs[:, direction])
        joined = map(np.concatenate, (shares, sources, targets))
        shares, sources, targets = joined
        return cls(grid, csr_array((shares, (sources, targets)), shape=(2 * half, 2 * half)))

    @property
    def _start(self) -> int:
        number = _numbers(self.grid)
        return int(number[self.grid.mouse]) + self.grid.facing * (int(number.max()) + 1)

    def reaching(self, targets: Sequence[Square], steps: int = EPISODE_STEPS) -> np.ndarray:
        """Probability that the mouse is on each target within some steps of the episode's start;
        1 for the square where it starts. (k,)

        Raises:
            UserError: if a target is a wall.
        """
        for square in targets:
            self.grid.check_free(square, "a target")
        number = _numbers(self.grid)
        half = self.transition.shape[0] // 2
        rows = np.array([number[tuple(square)] for square in targets], np.int64)
        there = np.zeros((2 * half, len(rows)))
        there[rows, np.arange(len(rows))] = there[half + rows, np.arange(len(rows))] = 1
        reached = there
        for _ in range(steps):
            reached = np.maximum(self.transition @ reached, there)
        return reached[self._start]

    def before(self, squares: Iterable[Square], others: Iterable[Square],
               steps: int = EPISODE_STEPS) -> float:
        """Probability that the mouse comes to one of some squares, and to none of the others
        before, within some steps. Where it starts counts.

        Raises:
            UserError: if a square is among both.
        """
        wanted, unwanted = set(squares), set(others)
        if wanted & unwanted:
            raise UserError(f"{Square(*min(wanted & unwanted))} cannot come before itself")
        number = _numbers(self.grid)
        stays = np.zeros(self.transition.shape[0], bool)
        there = np.zeros(len(stays))
        for chosen in (wanted, unwanted):
            for square in chosen:
                rows = [number[tuple(square)], number[tuple(square)] + len(stays) // 2]
                stays[rows] = True
                there[rows] = chosen is wanted
        reached = there
        for _ in range(steps):
            reached = np.where(stays, there, self.transition @ reached)
        return float(reached[self._start])

    def expected_steps(self, steps: int = EPISODE_STEPS) -> float:
        """Expected length of an episode: until the mouse is on cheese, or ``steps``."""
        number = _numbers(self.grid)
        half = self.transition.shape[0] // 2
        going = np.ones(2 * half)
        for square in self.grid.cheeses:
            going[[number[square], half + number[square]]] = 0
        total, left = 0.0, going
        for _ in range(steps):  # left: probability that the episode still goes on after so many
            total += left[self._start]
            left = self.transition @ left * going
        return float(total)


@dataclasses.dataclass(frozen=True)
class Reaching:
    """Exact probabilities of how an episode of a level with one cheese goes.

    Attributes:
        cheese: that the mouse reaches it within the episode's steps.
        cheese_first: that it does so before it is on another square of the region.
        region_first: that it is on another square of the region before.
        steps: expected length of the episode.
    """

    cheese: float
    cheese_first: float
    region_first: float
    steps: float


def reaching(fields: tuple[Field, Field], region: int, steps: int = EPISODE_STEPS) -> Reaching:
    """Exact probabilities of a level.

    Args:
        fields: of facing 0 and 1, of a policy without memory.
        region: rows and columns of the top right region.
        steps: that the episode has.

    Raises:
        UserError: if the agent has a memory, there is not one cheese, or no such region.
    """
    chain, grid = Chain.of(fields), fields[0].grid
    inside = grid.region(region) & grid.is_free
    others = [Square(*place) for place in np.argwhere(inside).tolist() if place != [*grid.cheese]]
    return Reaching(float(chain.reaching([grid.cheese], steps)[0]),
                    chain.before([grid.cheese], others, steps),
                    chain.before(others, [grid.cheese], steps), chain.expected_steps(steps))


def path_probability(field: Field, target: Square) -> float:
    """The published *normalised path probability*: the geometric mean of the probabilities of the
    steps along the path from the mouse to a square. A step from the cheese's own square is left
    out; for the mouse's own square it is P(stay).

    Raises:
        UserError: if no way leads there.
    """
    path = field.grid.path(field.grid.mouse, target)
    if len(path) == 1:
        return float(field.probs[field.row(path[0]), STAY])
    logs = [field.log_groups[field.row(square), direction_between(square, after)]
            for square, after in itertools.pairwise(path) if square not in field.grid.cheeses]
    return float(np.exp(np.mean(logs)))


def _numbers(grid: Grid) -> np.ndarray:
    """Each free square's number by row, then column: (W, W), -1 elsewhere."""
    return np.where(grid.is_free, np.cumsum(grid.is_free).reshape(grid.is_free.shape) - 1, -1)
