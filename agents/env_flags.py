"""Flags that choose the game and the levels that an agent plays."""

from __future__ import annotations

import argparse
from pathlib import Path

from agents.agent_file import read_origin
from common.cli import whole
from envs.procgen_env import MAX_LEVEL, EnvConfig

# What is played where neither a flag nor the agent file says otherwise, as published.
_UNTRAINED = {"env_name": "coinrun", "distribution_mode": "easy", "use_backgrounds": False}

level_seed = whole(0, MAX_LEVEL)


def add_env_flags(parser: argparse.ArgumentParser, of_agent: bool = True) -> None:
    """Flags that choose game and levels.

    Args:
        of_agent: whether game, mode and backgrounds are those of an agent's training unless the
            user chooses others.
    """
    def described(text: str, name: str) -> dict:
        default = _UNTRAINED[name]
        if not of_agent:
            return {"default": default, "help": text}
        return {"default": None, "help": f"{text}; if not given, that of the agent's training, or "
                                         f"{default} if the agent file does not say"}

    parser.add_argument("--env_name", **described("one of Procgen's 16 games", "env_name"))
    parser.add_argument("--distribution_mode", **described(
        "easy, hard, extreme, memory or exploration", "distribution_mode"))
    parser.add_argument("--start_level", type=level_seed, default=0, help="seed of the first level")
    parser.add_argument("--num_levels", type=level_seed, default=0,
                        help="number of consecutive level seeds; 0: all of them")
    backgrounds = parser.add_mutually_exclusive_group()
    backgrounds.add_argument("--use_backgrounds", action="store_true",
                             default=None if of_agent else False,
                             help="draw the game's background images")
    backgrounds.add_argument("--no_backgrounds", action="store_false", dest="use_backgrounds",
                             default=None if of_agent else False,
                             help="draw none, as for the published agents")


def env_config(args: argparse.Namespace, agent_file: Path | None = None) -> EnvConfig:
    """Return the game and levels that flags choose.

    Args:
        agent_file: agent whose training decides what the flags leave open. In a game that it was
            not trained on, only the flags and the published defaults count.

    Raises:
        UserError: if there is no such game or mode, or the agent file is missing or damaged.
    """
    flags = {name: getattr(args, name) for name in _UNTRAINED if getattr(args, name) is not None}
    found = {}
    if agent_file is not None:
        found = {name: value for name, value in vars(read_origin(agent_file)).items()
                 if name in _UNTRAINED and value is not None}
        game = found.get("env_name")
        if game and flags.get("env_name", game) != game:
            found = {}
    return EnvConfig(**{**_UNTRAINED, **found, **flags}, start_level=args.start_level,
                     num_levels=args.num_levels)
