"""Cheese confined to a region of the maze, as in Langosco et al. (2022), *Goal misgeneralization*.

The region of size R is the last R rows and columns of the maze, at its top right. In the authors'
fork of Procgen the game itself places the cheese there. Here stock Procgen generates the level, and
the cheese is moved before the agent sees the first frame.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from common.errors import UserError
from common.game_constants import CHEESE, FREE, WALL
from envs.level_state import LevelState


@dataclasses.dataclass(frozen=True)
class CheeseRegion:
    """``LevelEdit`` that moves the cheese of a new level into the top right region of the maze.

    The cheese is drawn uniformly from the free squares of the region except the start, inner
    (0, 0). The draw depends on the level seed and the size alone, so the cheese of a level is
    always at the same square. The rest of the state is unchanged. The edit parses ``LevelState``
    rather than ``MazeState``, because that halves the time per episode of training.

    Attributes:
        size: region size R, at least 1, clipped to the size of the maze. Size 1 is the corner; with
            the size of the world or more, the cheese may lie anywhere, as in stock levels.
    """

    size: int

    def __call__(self, data: bytes) -> bytes:
        """Return the state bytes with the cheese moved.

        Args:
            data: state bytes of a level at its start.

        Raises:
            UserError: if the bytes are not the state of a maze, or the region has no free square.
        """
        state = LevelState.parse(data, "maze")
        maze_dim, world_dim = np.frombuffer(state.tail, "<i4", 2).tolist()
        start = (world_dim - maze_dim) // 2
        begin, end = start + maze_dim - min(self.size, maze_dim), start + maze_dim
        squares = begin + np.argwhere(state.grid[begin:end, begin:end] != WALL)
        squares = squares[(squares != start).any(axis=1)]  # (n, 2), by row, then column
        level = int(state.step["current_level_seed"])
        if not len(squares):
            raise UserError(f"level {level} has no free square for the cheese in its region of "
                            f"{self.size} x {self.size}")
        chosen = np.random.default_rng([level, self.size]).integers(len(squares))
        cells = state.grid.copy()
        cells[cells == CHEESE] = FREE
        cells[tuple(squares[chosen])] = CHEESE
        return dataclasses.replace(state, grid=cells).to_bytes()
