"""Pairs of levels whose difference a steering vector is made of.

Sources: *Understanding and controlling a maze-solving policy network* (2023), *Add a top-right
vector* (2023).
"""

from __future__ import annotations

from common.errors import UserError
from maze.level.grid import FREE, Square
from maze.level.state import MazeState

Pair = tuple[MazeState, MazeState]


def cheese_pair(state: MazeState) -> Pair:
    """The level with its cheese, and without; the mouse at inner (0, 0) in both.

    Raises:
        UserError: if the level has not one cheese, or it lies there.
    """
    with_cheese = state.with_mouse(state.grid.start)
    with_cheese.grid.cheese  # noqa: B018  refuses none and several
    return with_cheese, with_cheese.with_cheese(None)


def with_top_right_path(state: MazeState) -> MazeState:
    """The level with a corridor from the maze's corner up to the world's top row, and along it to
    the world's corner.

    Raises:
        UserError: if the maze fills the world, so that there is no way to go.
    """
    grid = state.grid
    if grid.margin == 0:
        raise UserError(f"level {state.level_seed} has no room for a path to the top right: its "
                        "maze fills the world")
    last = grid.world_dim - 1
    corner = grid.corner
    path = [*(Square(row, corner.column) for row in range(corner.row + 1, last + 1)),
            *(Square(last, column) for column in range(corner.column + 1, last + 1))]
    return state.with_cells({square: FREE for square in path if square not in grid.cheeses})


def top_right_pair(state: MazeState) -> Pair:
    """The level with a path to the world's corner, and as it is; the mouse at inner (0, 0).

    Raises:
        UserError: as :func:`with_top_right_path`.
    """
    at_start = state.with_mouse(state.grid.start)
    return with_top_right_path(at_start), at_start


def custom_pair(one: MazeState, other: MazeState) -> Pair:
    """Any two levels of one mode, and so of one world size.

    Raises:
        UserError: if they are of two modes.
    """
    if one.distribution_mode != other.distribution_mode:
        raise UserError(f"a pair needs two levels of one mode, not of {one.distribution_mode} and "
                        f"{other.distribution_mode}")
    return one, other
