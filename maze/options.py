"""Options that choose, filter and edit levels; options of studies of an agent on mazes."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agents.agent_file import load_agent
from agents.config import level_seed
from agents.networks import Policy
from agents.provenance import agent_sha256
from common.cli import count, seed, whole
from common.errors import UserError
from common.files import versions
from common.options import ComputeOptions, Options, option, redefine
from common.results import ResultStore, Schema
from envs.maze.grid import FREE, KINDS, WALL, Square
from envs.maze.levels import Filters, after_edit, chosen_levels, digest, find_levels
from envs.maze.state import GAME, WORLD_DIMS, MazeState, check_seeds, game_of
from envs.procgen_env import EnvConfig, LevelEdit


def square(text: str) -> Square:
    """argparse type: a square given as row and column, such as ``3,5``."""
    match = re.fullmatch(r"\s*(-?[0-9]{1,6})\s*,\s*(-?[0-9]{1,6})\s*", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a row and a column, as in 3,5, not '{text}'")
    return Square(int(match[1]), int(match[2]))


def _cheese(text: str) -> Square | None:
    return None if text == "none" else square(text)


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch("([0-9]{1,4})(?::([0-9]{1,4}))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a size or a range, as in 9:15, not '{text}'")
    return int(match[1]), int(match[2] or match[1])


region = whole(1, max(WORLD_DIMS.values()))  # argparse type: rows and columns of a region
_SQUARE: dict[str, Any] = {"type": square, "metavar": "ROW,COLUMN"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MazeOptions(Options):
    """Options that choose levels and filter them."""

    distribution_mode: str = option(
        "easy", "distribution mode of the levels; level files have their own",
        choices=tuple(WORLD_DIMS))
    use_backgrounds: bool = option(False, "draw the game's background images")
    levels: tuple[str, ...] | None = option(
        None, "level files, folders of level files, and level seeds such as 0-99,795; if not "
              "given, --num_mazes levels are drawn at random", metavar="LEVELS")
    num_mazes: int = option(10, "number of levels to draw", type=count)
    start_level: int = option(0, "seed of the first level that may be drawn", type=level_seed)
    num_levels: int = option(
        0, "number of consecutive level seeds that may be drawn; 0: all seeds", type=level_seed)
    seed: int = option(0, "seed of the random draw of levels", type=seed)
    size: Sequence[int] | None = option(
        None, "accept only mazes with this number of rows, such as 9:15", type=_size,
        metavar="MIN:MAX")
    kind: str | None = option(None, "accept only levels of this kind", choices=KINDS)
    cheese_outside: int | None = option(
        None, "accept only levels with the cheese outside the maze's top right R x R squares",
        type=region, metavar="R")
    cheese_inside: int | None = option(
        None, "accept only levels with the cheese in the maze's top right R x R squares",
        type=region, metavar="R")
    cheese_at: Square | None = option(
        None, "accept only levels with the cheese on this square; row 0 of the world is at the "
              "bottom", **_SQUARE)
    free_at: Square | None = option(
        None, "accept only levels in which this square is free", **_SQUARE)
    max_tried: int = option(
        10_000, "maximum number of levels to examine in search of accepted ones", type=count)

    @property
    def filters(self) -> Filters:
        """Properties that a level must have."""
        return Filters(**{field.name: getattr(self, field.name)
                          for field in dataclasses.fields(Filters)})

    def choose_levels(self, edit: LevelEdit | None = None) -> list[MazeState]:
        """Return the levels.

        Args:
            edit: optional edit of every level's state bytes, applied before the filters.

        Raises:
            UserError: if --levels is given, and a source is invalid or no level passes the
                filters; if it is not given, and fewer than --num_mazes levels pass.
        """
        if self.levels:
            states = [after_edit(state, edit) for state in chosen_levels(
                self.levels, self.distribution_mode, self.use_backgrounds)]
            accepted = [state for state in states if self.filters.accept(state.grid)]
            if not accepted:
                raise UserError(f"none of the {len(states)} levels passes the filters; relax them, "
                                "or give other --levels")
            return accepted
        config = EnvConfig(GAME, self.distribution_mode, self.start_level, self.num_levels)
        seeds = config.draw_levels(min(len(config.levels), self.max_tried), self.seed)
        return find_levels(self.distribution_mode, seeds, self.num_mazes, self.filters,
                           self.use_backgrounds, edit)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EditOptions(Options):
    """Options that edit levels."""

    cheese: tuple[Square | None, ...] | None = option(
        None, "move the cheese to one or several squares; none: remove it; row 0 of the world is "
              "at the bottom", type=_cheese, metavar="ROW,COLUMN")
    mouse: Square | None = option(None, "move the mouse to this square", **_SQUARE)
    facing: int | None = option(None, "facing of the mouse; 0: left, 1: right", choices=(0, 1))
    wall: tuple[Square, ...] = option((), "squares to turn into walls", **_SQUARE)
    open: tuple[Square, ...] = option((), "squares to turn into free squares", **_SQUARE)
    top_right_path: bool = option(
        False, "open a path from the maze's top right corner to the world's")

    def edit(self, state: MazeState) -> MazeState:
        """Edit a level: walls, free squares, path to the world's corner, removal of the cheese
        (with ``cheese``), mouse, new cheese, facing.

        Raises:
            UserError: if an edit is impossible; the message names the level.
        """
        try:
            state = state.with_cells({**dict.fromkeys(self.wall, WALL),
                                      **dict.fromkeys(self.open, FREE)})
            if self.top_right_path:
                state = state.with_top_right_path()
            if self.cheese is not None:
                state = state.with_cheese(None)
            if self.mouse is not None:
                state = state.with_mouse(self.mouse)
            for place in self.cheese or ():
                if place is not None:
                    state = state.with_cheese(place, several=True)
            return state if self.facing is None else state.with_facing(self.facing)
        except UserError as error:
            raise UserError(f"level {state.level_seed}: {error}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentOptions(MazeOptions, ComputeOptions):
    """Options of a study of an agent on mazes.

    The precision is float32 by default, because differences of activations need it.
    """

    agent_file: Path = option(help="agent to analyse")
    output_dir: Path = option(help="folder to write to")
    overwrite: bool = option(False, "delete the previous contents")
    dry_run: bool = option(False, "print the levels and exit")
    precision: str = redefine(ComputeOptions, "precision", default="float32")

    def load_agent(self) -> Policy:
        """Load the agent on the device of the options.

        Raises:
            UserError: if the agent cannot be loaded, or there is no such device.
        """
        return load_agent(self.agent_file, self.compute.device)

    def open_store(self, schema: Schema, settings: dict, *more: Any,
                   states: Sequence[MazeState] = ()) -> ResultStore:
        """Open the output folder.

        Args:
            settings: settings in addition to those of agent, levels and computation.
            more: further positional arguments of ``ResultStore.open``, from ``shard`` on.
            states: all levels of the run; empty if a later run can add levels to the folder.

        Raises:
            UserError: if the folder holds other data or results of other settings, or two of the
                levels have the same seed, different modes or different backgrounds.
        """
        check_seeds(states)
        store = ResultStore(self.output_dir, schema)
        levels = {"levels": [state.level_seed for state in states], "levels_sha256": digest(states),
                  "distribution_mode": game_of(states).distribution_mode,
                  "use_backgrounds": game_of(states).use_backgrounds} if states else {}
        store.open({"agent_file": self.agent_file.name,
                    "agent_sha256": agent_sha256(self.agent_file), **levels, **settings,
                    "precision": self.compute.precision, "versions": versions()},
                   self.overwrite, *more)
        return store


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegionOptions(Options):
    """Options of a study of the maze's top right region."""

    region: int = option(5, "number of rows and columns of the top right region, for exact "
                            "probabilities", type=region)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactOptions(RegionOptions, AgentOptions):
    """Options of a study that can compute exact probabilities of an agent without memory."""

    exact: bool = option(False, "also compute exact probabilities of reaching cheese and region; "
                                "needs an agent without memory")

    def load_agent(self) -> Policy:
        """Load the agent.

        Raises:
            UserError: if it cannot be loaded, or has a memory and ``exact`` is set.
        """
        policy = super().load_agent()
        if policy.recurrent and self.exact:
            raise UserError("exact probabilities need an agent without memory, and "
                            f"{self.agent_file} has a GRU; leave --exact out")
        return policy
