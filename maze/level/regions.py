"""Option that confines the cheese to a region of the maze, see ``envs.cheese_region``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from agents.agent_file import AgentOrigin, read_origin
from agents.config import GameOptions
from common.cli import whole
from common.errors import UserError
from common.options import option
from envs.cheese_region import CheeseRegion
from envs.procgen_env import EnvConfig
from maze.level.state import GAME, WORLD_DIMS

_WORLD_DIMS = {**WORLD_DIMS, "exploration": WORLD_DIMS["hard"]}  # by distribution mode


def region_option(levels: str = "levels", of_agent: bool = False) -> Any:
    """Define an option that confines the cheese, for :func:`cheese_region`.

    Args:
        levels: noun for the levels in the help text.
        of_agent: whether the default is the region of the agent's training (None), instead of 0.
    """
    return option(None if of_agent else 0,
                  f"maze only: move the cheese of {levels} into the last R rows and columns of the "
                  "maze; 1: its corner; 0: do not move it"
                  + ("; if not given, the region of the agent's training, or 0 if the agent file "
                     "does not record it" if of_agent else ""),
                  type=whole(0, max(_WORLD_DIMS.values())), metavar="R")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegionGameOptions(GameOptions):
    """Options for the game that an agent plays, which may confine the cheese to a region."""

    cheese_region: int | None = region_option(of_agent=True)

    def game(self, agent_file: Path) -> tuple[EnvConfig, CheeseRegion | None]:
        """Return the game and its levels, and the edit that confines the cheese, if any.

        Raises:
            UserError: see ``env_config`` and :func:`cheese_region`.
        """
        config = self.env_config(agent_file)
        return config, cheese_region(config, self.cheese_region, agent_file)


def cheese_region(config: EnvConfig, size: int | None,
                  agent_file: Path | None = None) -> CheeseRegion | None:
    """Return the edit that confines the cheese, or None for region 0.

    Args:
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
