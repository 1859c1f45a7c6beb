"""Grid of a maze: cells, paths, kinds of level, the decision square and the features of a fork.

This module does not need Procgen. Symbols in shapes: W cells along a side of the world, d cells
along a side of the maze, which lies in the centre of the world. Row 0 is at the bottom of the
frame, column 0 at the left. Inner coordinates start at the maze's first row and column, which are
row and column m = (W - d) / 2 of the world.

Source of the features: *Behavioural statistics for a maze-solving agent* (2023). 15 features are
distances between the cheese C, the decision square D and the corner T, and from C and D to the top
right 5 x 5 region: Euclidean (``euc``), taxicab (``taxi``) and in steps along the shortest path
(``steps``). The distance to the region is the distance to its nearest free square. Names consist of
measure and end points: ``euc_C_D``, ``steps_D_5x5``. The 16th feature, ``cheese_norm``, is the
Euclidean norm of the cheese's world coordinates.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from common.errors import UserError
from common.game_constants import CHEESE, FREE, WALL

FORK, CHEESE_ON_THE_WAY, CORNER_ON_THE_WAY = "fork", "cheese on the way", "corner on the way"
KINDS = (FORK, CHEESE_ON_THE_WAY, CORNER_ON_THE_WAY)
FEATURE_REGION = 5  # number of rows and columns of the region in the features
MEASURES = ("euc", "taxi", "steps")
FEATURES = (*(f"{measure}_{ends}" for measure, ends in itertools.product(
    MEASURES, ("C_D", "C_T", "D_T", "C_5x5", "D_5x5"))), "cheese_norm")
_LETTERS = {"#": WALL, ".": FREE, "C": CHEESE, "M": FREE}
_ORDER = ((0, -1), (-1, 0), (1, 0), (0, 1))  # (row, column) steps left, down, up, right


class Square(NamedTuple):
    """A square in world coordinates; row 0 is at the bottom of the frame."""

    row: int
    column: int

    def __str__(self) -> str:
        return f"row {self.row}, column {self.column}"


@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
    """Cells of a level, with the square and facing of the mouse.

    Attributes:
        cells: WALL, FREE or CHEESE, int32 (W, W), read-only; the mouse's square is FREE.
        maze_dim: number of rows and columns of the maze, d.
        mouse: square of the mouse, free and without cheese.
        facing: facing of the mouse: 0 for left, as at the start of a level; 1 for right.

    Raises:
        UserError: if a cell has another value, the cells are not a square, W or d is even, d is
            not between 3 and W, the facing is invalid, or the mouse is not on a free square
            without cheese.
    """

    cells: np.ndarray
    maze_dim: int
    mouse: Square
    facing: int = 0

    def __post_init__(self):
        cells = np.array(self.cells, np.int32)  # a copy, because it becomes read-only
        if cells.ndim != 2 or cells.shape[0] != cells.shape[1]:
            raise UserError(f"a maze must be square, not of the shape {cells.shape}")
        cells.flags.writeable = False
        object.__setattr__(self, "cells", cells)
        object.__setattr__(self, "mouse", Square(*map(int, self.mouse)))
        known = (cells == WALL) | (cells == FREE) | (cells == CHEESE)
        if not known.all():
            wrong = Square(*np.argwhere(~known)[0].tolist())
            raise UserError(f"the cell at {wrong} is {cells[wrong]}; a maze has {WALL} for a wall, "
                            f"{FREE} for a free square and {CHEESE} for cheese")
        if not (3 <= self.maze_dim <= len(cells) and self.maze_dim % 2 and len(cells) % 2):
            raise UserError(f"maze_dim is {self.maze_dim} in a world of {len(cells)} x "
                            f"{len(cells)} cells; both sizes must be odd, and maze_dim must be "
                            f"from 3 to {len(cells)}")
        if self.facing not in (0, 1):
            raise UserError(f"the facing of the mouse must be 0 or 1, not {self.facing}")
        self.check_inside(self.mouse, "the mouse")
        if cells[self.mouse] != FREE:
            on = "a wall" if cells[self.mouse] == WALL else "the cheese"
            raise UserError(f"the mouse cannot be on {on} at {self.mouse}"
                            f"{self._nearest_free(self.mouse)}")

    @property
    def world_dim(self) -> int:
        """Number of cells along a side of the world, W."""
        return len(self.cells)

    @property
    def margin(self) -> int:
        """Width of the border around the maze, m = (W - d) / 2, in cells."""
        return (self.world_dim - self.maze_dim) // 2

    def inner(self, square: Square) -> tuple[int, int]:
        """Return the inner row and column of a square."""
        return square[0] - self.margin, square[1] - self.margin

    def world(self, row: int, column: int) -> Square:
        """Return the square at inner coordinates."""
        return Square(int(row) + self.margin, int(column) + self.margin)

    @property
    def start(self) -> Square:
        """Start square of the mouse in generated levels: inner (0, 0)."""
        return self.world(0, 0)

    @property
    def corner(self) -> Square:
        """Top right square of the maze, T: inner (d - 1, d - 1)."""
        return self.world(self.maze_dim - 1, self.maze_dim - 1)

    @functools.cached_property
    def is_free(self) -> np.ndarray:
        """Mask of the free squares, including those with cheese, bool (W, W)."""
        return self.cells != WALL

    @functools.cached_property
    def cheeses(self) -> tuple[Square, ...]:
        """Squares with cheese, ordered by row, then column."""
        return tuple(Square(*place) for place in np.argwhere(self.cells == CHEESE).tolist())

    @property
    def cheese(self) -> Square:
        """Square of the only cheese.

        Raises:
            UserError: if the level has no cheese, or several.
        """
        if len(self.cheeses) != 1:
            raise UserError(f"the maze has {len(self.cheeses) or 'no'} cheese"
                            f"{'s' * (len(self.cheeses) > 1)}, not one")
        return self.cheeses[0]

    def squares(self, without_cheese: bool = False) -> list[Square]:
        """Return the free squares, ordered by row, then column."""
        chosen = self.cells == FREE if without_cheese else self.is_free
        return [Square(*place) for place in np.argwhere(chosen).tolist()]

    def region(self, size: int) -> np.ndarray:
        """Return a mask of the top right region of the maze, bool (W, W).

        The region is the last ``size`` rows and columns of the maze, or all of a smaller maze.
        """
        inside = np.zeros(self.cells.shape, bool)
        begin, end = self.margin + max(self.maze_dim - size, 0), self.margin + self.maze_dim
        inside[begin:end, begin:end] = True
        return inside

    def check_inside(self, square: Square, what: str) -> None:
        """Raise UserError if a square is outside the world; the message names ``what``, the thing
        to be placed there."""
        if not all(0 <= place < self.world_dim for place in square):
            raise UserError(f"{what} cannot be at {Square(*square)}: rows and columns of the world "
                            f"are 0 to {self.world_dim - 1}{self._nearest_free(square)}")

    def check_free(self, square: Square, what: str) -> None:
        """Raise UserError if a square is a wall or outside the world; the message names ``what``,
        the thing to be placed there, and the nearest free square."""
        self.check_inside(square, what)
        if not self.is_free[square]:
            raise UserError(f"{what} cannot be at {Square(*square)}, which is a wall"
                            f"{self._nearest_free(square)}")

    def _nearest_free(self, square: Square) -> str:
        """Return a hint that names the nearest free square without cheese or mouse."""
        candidates = [free for free in self.squares(without_cheese=True) if free != self.mouse]
        if not candidates:
            return ""
        near = min(candidates, key=lambda free: (free[0] - square[0])**2 + (free[1] - square[1])**2)
        return f"; the nearest free square is {near}"

    def distances(self, origin: Square) -> np.ndarray:
        """Compute the lengths of the shortest paths from a square to all squares, in steps.

        Paths may cross squares with cheese.

        Returns:
            Lengths, int32 (W, W); -1 for walls and unreachable squares.

        Raises:
            UserError: if the origin is not a free square.
        """
        self.check_free(origin, "a path")
        far = np.pad(np.where(self.is_free, -1, -2), 1, constant_values=-2)
        stride = len(far)
        begin = (origin[0] + 1) * stride + origin[1] + 1
        steps = far.ravel().tolist()
        steps[begin] = 0
        reached = [begin]
        for at in reached:  # breadth-first search; the list grows during the loop
            for neighbour in (at - 1, at - stride, at + stride, at + 1):
                if steps[neighbour] == -1:
                    steps[neighbour] = steps[at] + 1
                    reached.append(neighbour)
        return np.maximum(np.array(steps, np.int32).reshape(far.shape)[1:-1, 1:-1], -1)

    def path(self, origin: Square, target: Square) -> list[Square]:
        """Return the shortest path from ``origin`` to ``target``, including both ends.

        It may cross squares with cheese. If the free squares are not a tree (:attr:`is_tree`),
        there may be several shortest paths; ties are broken in the order left, down, up, right.

        Raises:
            UserError: if the target cannot be reached, or an end is not a free square.
        """
        self.check_free(origin, "a path")
        steps = self.distances(target)
        if steps[origin] < 0:
            raise UserError(f"no path leads from {Square(*origin)} to {Square(*target)}")
        path = [Square(*origin)]
        while steps[path[-1]]:
            path.append(next(square for square in self.neighbours(path[-1])
                             if steps[square] == steps[path[-1]] - 1))
        return path

    def neighbours(self, square: Square) -> list[Square]:
        """Return the free neighbours of a square, in the order left, down, up, right."""
        adjacent = [Square(square[0] + up, square[1] + right) for up, right in _ORDER]
        return [place for place in adjacent if min(place) >= 0 and max(place) < self.world_dim
                and self.is_free[place]]

    @property
    def is_tree(self) -> bool:
        """Whether there is exactly one path between any two free squares."""
        free = self.is_free
        edges = (free[1:] & free[:-1]).sum() + (free[:, 1:] & free[:, :-1]).sum()
        return edges == free.sum() - 1 and bool(
            (self.distances(self.mouse) >= 0).sum() == free.sum())

    @functools.cached_property
    def _paths(self) -> tuple[list[Square], list[Square]]:
        """Paths from the start to the cheese and to the corner."""
        return self.path(self.start, self.cheese), self.path(self.start, self.corner)

    def kind(self) -> str:
        """Return the kind of the level.

        It is CHEESE_ON_THE_WAY if the cheese is on the path from the start to the corner,
        CORNER_ON_THE_WAY if the corner is on the path from the start to the cheese, otherwise FORK.

        Raises:
            UserError: if there is not exactly one cheese, or the cheese or the corner cannot be
                reached from the start.
        """
        to_cheese, to_corner = self._paths
        if to_cheese[-1] in to_corner:
            return CHEESE_ON_THE_WAY
        return CORNER_ON_THE_WAY if to_corner[-1] in to_cheese else FORK

    def decision_square(self) -> Square:
        """Return the last common square of the paths from the start to cheese and corner.

        Raises:
            UserError: if the level is not a fork, or :meth:`kind` raises.
        """
        return self._paths[0][self._num_common() - 1]

    def first_steps(self) -> tuple[Square, Square]:
        """Return the squares after the decision square on the paths to the cheese and the corner.

        Raises:
            UserError: if :meth:`decision_square` raises.
        """
        to_cheese, to_corner = self._paths
        num_common = self._num_common()
        return to_cheese[num_common], to_corner[num_common]

    def _num_common(self) -> int:
        """Return the length of the common part of both paths of a fork, in squares."""
        if self.kind() != FORK:
            raise UserError(f"the maze has no decision square: its kind is '{self.kind()}'")
        return next(number for number, (one, other) in enumerate(zip(*self._paths)) if one != other)

    def steps_off_corner_path(self, target: Square) -> int:
        """Count the squares on the path from the start to a target that are not on the path from
        the start to the corner.

        Raises:
            UserError: if the target or the corner cannot be reached from the start.
        """
        return len(set(self.path(self.start, target)) - set(self.path(self.start, self.corner)))

    def departures_from_training(self, region: int | None = None) -> list[str]:
        """List, as sentences, the properties in which the level differs from generated levels.

        Args:
            region: number of rows and columns of the top right region to which the cheese was
                confined in the agent's training; None if it was not confined.
        """
        inside = self.region(self.world_dim)
        row, column = np.indices(self.cells.shape) - self.margin
        even, odd = ((row % 2 == parity) & (column % 2 == parity) & inside for parity in (0, 1))
        allowed = inside if region is None else self.region(region)
        holds = {
            f"there are {len(self.cheeses)} cheeses, not one": len(self.cheeses) == 1,
            "a square with even inner row and column is a wall": self.is_free[even].all(),
            "a square with odd inner row and column is not a wall": not self.is_free[odd].any(),
            "there are free squares outside the maze": not self.is_free[~inside].any(),
            "the free squares do not form a tree; of several shortest paths, the first in the "
            "order left, down, up, right is taken": self.is_tree,
            "the mouse is not at inner (0, 0)": self.mouse == self.start,
            "cheese lies at inner (0, 0)": self.start not in self.cheeses,
            "cheese lies outside the agent's region": all(
                allowed[square] for square in self.cheeses)}
        return [sentence for sentence, true in holds.items() if not true]

    def to_rows(self) -> list[str]:
        """Return the world as one string per row, from top to bottom.

        The letters are ``#`` wall, ``.`` free, ``C`` cheese and ``M`` mouse.
        """
        letters = {cell: letter for letter, cell in _LETTERS.items() if letter != "M"}
        rows = [[letters[cell] for cell in row] for row in self.cells.tolist()]
        rows[self.mouse.row][self.mouse.column] = "M"
        return ["".join(row) for row in reversed(rows)]

    @classmethod
    def from_rows(cls, rows: Sequence[str], maze_dim: int | None = None, facing: int = 0) -> Grid:
        """Parse the strings of :meth:`to_rows`.

        Args:
            rows: one string per row, from top to bottom.
            maze_dim: number of rows of the maze, d; by default W.
            facing: facing of the mouse: 0 for left, 1 for right.

        Raises:
            UserError: if the rows do not form a square with an odd side of at least 3, contain
                another letter or not exactly one mouse, or ``maze_dim`` or ``facing`` is invalid.
        """
        size = len(rows)
        if size < 3 or size % 2 == 0:
            raise UserError(f"a maze has an odd number of rows, 3 or more, not {size}")
        mice, cells = [], np.zeros((size, size), np.int32)
        for number, text in enumerate(rows):
            row = size - 1 - number
            if len(text) != size:
                raise UserError(f"row {row} of the maze (line {number + 1}) has {len(text)} "
                                f"squares, but the maze has {size} rows")
            for column, letter in enumerate(text):
                place = f"row {row}, column {column} (line {number + 1})"
                if letter == "m":
                    raise UserError(f"the mouse cannot be on the cheese at {place}")
                if letter not in _LETTERS:
                    raise UserError(f"{letter!r} at {place} does not stand for a square; use # "
                                    "for a wall, . for a free square, C for cheese and M for the "
                                    "mouse")
                if letter == "M":
                    mice.append(Square(row, column))
                cells[row, column] = _LETTERS[letter]
        if len(mice) != 1:
            raise UserError(f"the maze has mice M at {mice[0]} and at {mice[1]}" if mice else
                            "the maze has no mouse M")
        return cls(cells, maze_dim or size, mice[0], facing)


def kind_of(grid: Grid) -> str:
    """Return the kind of a level, or "none" if :meth:`Grid.kind` raises."""
    try:
        return grid.kind()
    except UserError:
        return "none"


def describe(grid: Grid) -> str:
    """Describe size, cheese, kind and decision square of a level in one line."""
    kind = kind_of(grid)
    decision = f", decision square at {grid.decision_square()}" if kind == FORK else ""
    return (f"{grid.maze_dim} x {grid.maze_dim} squares, cheese at "
            f"{' and '.join(map(str, grid.cheeses)) or 'nowhere'}, kind: {kind}{decision}")


def fork_features(grid: Grid) -> dict[str, float]:
    """Compute the 16 published features of a fork by name, in squares; see the module docstring.

    In a maze of at most 5 rows, the region is the whole maze.

    Raises:
        UserError: if the level is not a fork.
    """
    decision, region = grid.decision_square(), grid.region(FEATURE_REGION) & grid.is_free
    by_ends = []  # (5, 3): a column per measure
    for origin, target in ((grid.cheese, decision), (grid.cheese, grid.corner),
                           (decision, grid.corner), (grid.cheese, region), (decision, region)):
        squares = np.argwhere(target) if isinstance(target, np.ndarray) else np.array([target])
        apart = np.abs(squares - origin)
        steps = grid.distances(origin)[tuple(squares.T)]
        by_ends.append((np.hypot(*apart.T).min(), apart.sum(axis=1).min(), steps[steps >= 0].min()))
    return dict(zip(FEATURES, (*np.array(by_ends, np.float64).T.ravel().tolist(),
                               float(np.hypot(*grid.cheese)))))
