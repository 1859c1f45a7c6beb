"""Mazes as plain text, without the walls around them.

A line a row, from top to bottom: ``#`` wall, ``.`` free, ``C`` cheese, ``M`` mouse. A text of d
lines is a maze of d x d squares, in the middle of the world of its mode; the first level seed whose
maze has this size lends the rest of the state.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from common.errors import UserError
from common.files import read_bytes
from maze.level.grid import WALL, Grid
from maze.level.search import Filters, find_levels
from maze.level.state import WORLD_DIMS, MazeState

MAX_TRIED = 1000  # level seeds; a mode has 15 sizes at most, each as often as the others


def to_text(grid: Grid) -> str:
    """A maze as text.

    Raises:
        UserError: if squares outside the maze are free, which a text cannot say.
    """
    if grid.is_free[~grid.region(grid.world_dim)].any():
        raise UserError("the level has free squares outside its maze; a level file keeps them, a "
                        "text does not")
    inside = slice(grid.margin, grid.margin + grid.maze_dim)
    return "".join(f"{row[inside]}\n" for row in grid.to_rows()[inside])


def from_text(text: str, distribution_mode: str, use_backgrounds: bool = False) -> MazeState:
    """The level of a text.

    Raises:
        UserError: if the text is no maze, or the mode has none of this size.
    """
    grid = Grid.from_rows(text.split())
    world_dim = WORLD_DIMS.get(distribution_mode)
    if world_dim is None:
        raise UserError(f"mazes have no distribution mode '{distribution_mode}'; choose from "
                        f"{', '.join(WORLD_DIMS)}")
    if grid.maze_dim > world_dim:
        fitting = [mode for mode, size in WORLD_DIMS.items() if size >= grid.maze_dim]
        raise UserError(f"the maze has {grid.maze_dim} rows, but the world of {distribution_mode} "
                        f"mazes has {world_dim}"
                        + (f"; choose the mode {fitting[0]}" if fitting else ""))
    margin = (world_dim - grid.maze_dim) // 2
    (state,) = find_levels(distribution_mode, range(MAX_TRIED), 1,
                           Filters(size=(grid.maze_dim, grid.maze_dim)), use_backgrounds)
    return state.with_grid(Grid(np.pad(grid.cells, margin, constant_values=WALL), grid.maze_dim,
                                (grid.mouse[0] + margin, grid.mouse[1] + margin)))


def load_text(path: Path, distribution_mode: str, use_backgrounds: bool = False) -> MazeState:
    """The level of a text file.

    Raises:
        UserError: if it is missing, or as :func:`from_text`; the file is named.
    """
    try:
        return from_text(read_bytes(path).decode(), distribution_mode, use_backgrounds)
    except UnicodeDecodeError:
        raise UserError(f"{path} is no text") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
