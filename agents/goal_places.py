"""Options that place the goal of a game elsewhere: the cheese of mazes in a region, see
``envs.cheese_region``, and the coin of CoinRun, see ``envs.coin``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from agents.agent_file import AgentOrigin, read_origin
from agents.config import GameOptions
from common.cli import whole
from common.errors import UserError
from common.game_constants import WORLD_DIMS
from common.options import option
from envs import coin
from envs.cheese_region import CheeseRegion
from envs.coin import CoinPlace
from envs.procgen_env import EnvConfig

GAME = "maze"
GoalEdit = CheeseRegion | CoinPlace
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


def coin_option(of_agent: bool = False) -> Any:
    """Define an option that places the coin, for :func:`coin_place`.

    Args:
        of_agent: whether the default is the place of the agent's training (None), instead of
            ``end``.
    """
    return option(None if of_agent else coin.END,
                  "coinrun only: place of the coin; anywhere: on a random square along the level; "
                  "none: no coin; start: behind the player; N: N squares from the start; end: "
                  "at the end of the level, as in the game"
                  + ("; if not given, the place of the agent's training, or end if the agent file "
                     "does not record it" if of_agent else ""),
                  type=coin.place_of, metavar="PLACE")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoalGameOptions(GameOptions):
    """Options for the game that an agent plays, and for the place of its goal."""

    cheese_region: int | None = region_option(of_agent=True)
    coin: str | None = coin_option(of_agent=True)

    def game(self, agent_file: Path) -> tuple[EnvConfig, GoalEdit | None]:
        """Return the game and its levels, and the edit that places the goal, if any.

        Raises:
            UserError: see ``env_config`` and :func:`goal_edit`.
        """
        config = self.env_config(agent_file)
        return config, goal_edit(config, self.cheese_region, self.coin, agent_file)


def goal_edit(config: EnvConfig, region: int | None, place: str | None,
              agent_file: Path | None = None) -> GoalEdit | None:
    """Return the edit that places the goal of a game, see :func:`cheese_region` and
    :func:`coin_place`; None if it stays where the game puts it."""
    cheese = cheese_region(config, region, agent_file)
    return coin_place(config, place, agent_file) or cheese


def coin_place(config: EnvConfig, place: str | None,
               agent_file: Path | None = None) -> CoinPlace | None:
    """Return the edit that places the coin, or None if it lies at the end of the level.

    Args:
        config: environment in which the agent plays.
        place: place from the flag, see ``envs.coin.place_of``; None if the flag was not given.
        agent_file: optional agent file. If ``place`` is None, the place of the agent's training is
            used, provided that training and ``config`` are on CoinRun.

    Raises:
        UserError: if a place other than ``end`` is given and the game is not CoinRun.
    """
    if place is None:
        origin = (read_origin(agent_file) if agent_file is not None
                  and config.env_name == coin.GAME else AgentOrigin())
        place = (origin.coin if origin.env_name == coin.GAME else None) or coin.END
    if place == coin.END:
        return None
    if config.env_name != coin.GAME:
        raise UserError(f"there is no coin in {config.env_name}; --coin is for coinrun only")
    return CoinPlace(place)


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


def goal_described(edit: GoalEdit | None) -> dict[str, int | str]:
    """Return the metadata entry ``cheese_region`` or ``coin`` of an edit; empty without an edit."""
    if isinstance(edit, CoinPlace):
        return {"coin": edit.place}
    return {"cheese_region": edit.size} if edit else {}


def words_of(config: EnvConfig, edit: GoalEdit | None) -> str:
    """Describe game, mode, goal and backgrounds, for example "hard coinrun, no backgrounds"."""
    goal = ""
    if isinstance(edit, CheeseRegion):
        goal = f", cheese in the last {edit.size} rows and columns"
    elif edit:
        goal = f", {coin.coin_words(edit.place)}"
    backgrounds = "with" if config.use_backgrounds else "no"
    return f"{config.distribution_mode} {config.env_name}{goal}, {backgrounds} backgrounds"
