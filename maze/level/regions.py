"""Cheese confined to a region of the maze, as in Langosco et al. (2022), *Goal misgeneralization*.

The region of size R is the last R rows and columns of the maze, at its top right. In the authors'
fork of Procgen the game itself places the cheese there. Here stock Procgen generates the level, and
the cheese is moved before the agent sees the first frame.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import numpy as np

from agents.agent_file import AgentOrigin, read_origin
from common.cli import whole
from common.errors import UserError
from envs.level_state import LevelState
from envs.procgen_env import EnvConfig
from maze.level.grid import CHEESE, FREE, WALL
from maze.level.state import GAME, WORLD_DIMS

_WORLD_DIMS = {**WORLD_DIMS, "exploration": WORLD_DIMS["hard"]}  # by distribution mode


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
        state = LevelState.parse(data, GAME)
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


def add_cheese_region_flag(parser: argparse.ArgumentParser, name: str = "cheese_region",
                           levels: str = "levels", of_agent: bool = False) -> None:
    """Add a flag that confines the cheese, for :func:`cheese_region`.

    Args:
        parser: parser to add the flag to.
        name: name of the flag, without dashes.
        levels: noun for the levels in the help text.
        of_agent: whether the default is the region of the agent's training (parsed as None),
            instead of 0.
    """
    parser.add_argument(f"--{name}", type=whole(0, max(_WORLD_DIMS.values())),
                        default=None if of_agent else 0, metavar="R",
                        help=f"maze only: move the cheese of {levels} into the last R rows and "
                             "columns of the maze; 1: its corner; 0: do not move it"
                             + ("; if not given, the region of the agent's training, or 0 if the "
                                "agent file does not record it" if of_agent else ""))


def cheese_region(config: EnvConfig, size: int | None,
                  agent_file: Path | None = None) -> CheeseRegion | None:
    """Return the edit that confines the cheese, or None for region 0.

    Args:
        config: environment in which the agent plays.
        size: region size R from the flag; None if the flag was not given.
        agent_file: optional agent file. If ``size`` is None, the region of the agent's training is
            used, provided that training and ``config`` are on mazes.

    Raises:
        UserError: if ``size`` is not 0 and the game is not maze, or ``size`` is negative or larger
            than the world of the mode.
    """
    if size is None:
        origin = (read_origin(agent_file) if agent_file is not None and config.env_name == GAME
                  else AgentOrigin())
        size = (min(origin.cheese_region or 0, _WORLD_DIMS[config.distribution_mode])
                if origin.env_name == GAME else 0)
    if size == 0:
        return None
    if config.env_name != GAME:
        raise UserError(f"there is no cheese in {config.env_name}; --cheese_region is for maze "
                        "only")
    largest = _WORLD_DIMS[config.distribution_mode]
    if not 0 <= size <= largest:
        raise UserError(f"the region of the cheese must lie between 0 and {largest}, the world "
                        f"of {config.distribution_mode} mazes, not {size}")
    return CheeseRegion(size)


def region_described(edit: CheeseRegion | None) -> dict[str, int]:
    """Return the metadata entry ``cheese_region`` of an edit; empty without an edit."""
    return {"cheese_region": edit.size} if edit else {}


def words_of(config: EnvConfig, edit: CheeseRegion | None) -> str:
    """Describe game, mode, region and backgrounds, for example "hard coinrun, no backgrounds"."""
    region = f", cheese in the last {edit.size} rows and columns" if edit else ""
    backgrounds = "with" if config.use_backgrounds else "no"
    return f"{config.distribution_mode} {config.env_name}{region}, {backgrounds} backgrounds"
