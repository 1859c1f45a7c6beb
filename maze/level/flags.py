"""Command-line flags that choose, filter and edit levels; flags common to analyses of an agent."""

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
from common.cli import Parser, add_compute_flags, count, seed, set_up_logging, whole
from common.devices import Compute, resolve_compute
from common.errors import UserError
from common.files import versions
from common.results import ResultStore, Schema
from envs.procgen_env import EnvConfig, LevelEdit
from maze.level.grid import FREE, KINDS, WALL, Square
from maze.level.levels import Filters, after_edit, chosen_levels, digest, find_levels
from maze.level.state import GAME, WORLD_DIMS, MazeState, check_seeds, game_of


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


_region = whole(1, max(WORLD_DIMS.values()))
_SQUARE: dict[str, Any] = {"type": square, "metavar": "ROW,COLUMN"}
_SQUARES: dict[str, Any] = {**_SQUARE, "nargs": "+", "default": ()}
LEVEL_FLAGS: dict[str, dict[str, Any]] = {
    "distribution_mode": {
        "default": "easy", "choices": tuple(WORLD_DIMS),
        "help": "distribution mode of the levels; level files have their own"},
    "use_backgrounds": {
        "action": "store_true", "help": "draw the game's background images"},
    "levels": {
        "nargs": "+", "metavar": "LEVELS",
        "help": "level files, folders of level files, and level seeds such as 0-99,795; if not "
                "given, --num_mazes levels are drawn at random"},
    "num_mazes": {"type": count, "help": "number of levels to draw"},
    "start_level": {
        "type": level_seed, "default": 0, "help": "seed of the first level that may be drawn"},
    "num_levels": {
        "type": level_seed, "default": 0,
        "help": "number of consecutive level seeds that may be drawn; 0: all seeds"},
    "seed": {"type": seed, "default": 0, "help": "seed of the random draw of levels"}}
FILTER_FLAGS: dict[str, dict[str, Any]] = {
    "size": {"type": _size, "metavar": "MIN:MAX",
             "help": "accept only mazes with this number of rows, such as 9:15"},
    "kind": {"choices": KINDS, "help": "accept only levels of this kind"},
    "cheese_outside": {
        "type": _region, "metavar": "R",
        "help": "accept only levels with the cheese outside the maze's top right R x R squares"},
    "cheese_inside": {
        "type": _region, "metavar": "R",
        "help": "accept only levels with the cheese in the maze's top right R x R squares"},
    "cheese_at": {
        **_SQUARE, "help": "accept only levels with the cheese on this square; row 0 of the world "
                           "is at the bottom"},
    "free_at": {**_SQUARE, "help": "accept only levels in which this square is free"},
    "max_tried": {
        "type": count, "default": 10_000,
        "help": "maximum number of levels to examine in search of accepted ones"}}
EDIT_FLAGS: dict[str, dict[str, Any]] = {
    "text": {
        "type": Path, "metavar": "FILE",
        "help": "text file with a maze, one line per row: # wall, . free, C cheese, M mouse"},
    "cheese": {
        "type": _cheese, "nargs": "+", "metavar": "ROW,COLUMN",
        "help": "move the cheese to one or several squares; none: remove it; row 0 of the world is "
                "at the bottom"},
    "mouse": {**_SQUARE, "help": "move the mouse to this square"},
    "facing": {"type": int, "choices": (0, 1), "help": "facing of the mouse; 0: left, 1: right"},
    "wall": {**_SQUARES, "help": "squares to turn into walls"},
    "open": {**_SQUARES, "help": "squares to turn into free squares"},
    "top_right_path": {
        "action": "store_true",
        "help": "open a path from the maze's top right corner to the world's"}}


def add_level_flags(parser: Parser, num_mazes: int) -> None:
    """Add the flags that choose levels and filter them, LEVEL_FLAGS and FILTER_FLAGS.

    Args:
        parser: parser to add the flags to.
        num_mazes: default of ``--num_mazes``.
    """
    add_flags(parser, LEVEL_FLAGS | FILTER_FLAGS)
    parser.set_defaults(num_mazes=num_mazes)


def add_flags(parser: Parser, flags: dict[str, dict[str, Any]]) -> None:
    """Add a group of flags to a parser.

    Args:
        parser: parser to add the flags to.
        flags: keyword arguments of ``add_argument`` by name of the flag without dashes, such as
            LEVEL_FLAGS.
    """
    for name, options in flags.items():
        parser.add_argument(f"--{name}", **options)


def add_agent_flags(parser: Parser, help: str, num_mazes: int) -> None:
    """Add the flags for the agent file and the levels to a script that analyses an agent.

    Args:
        parser: parser to add the flags to.
        help: help text of ``--agent_file``.
        num_mazes: default of ``--num_mazes``.
    """
    parser.add_argument("--agent_file", type=Path, required=True, help=help)
    add_level_flags(parser, num_mazes)


def add_output_flags(parser: Parser, script: str) -> None:
    """Add the flags for output and computation to a script that analyses an agent.

    The precision is float32 by default, because differences of activations need it.

    Args:
        parser: parser to add the flags to.
        script: name of the script; its default output folder is ``analysis/maze/<script>``.
    """
    parser.add_argument("--output_dir", type=Path, default=Path("analysis") / "maze" / script,
                        help="folder to write to")
    parser.add_argument("--overwrite", action="store_true", help="delete the previous contents")
    parser.add_argument("--dry_run", action="store_true", help="print the levels and exit")
    add_compute_flags(parser)
    parser.set_defaults(precision="float32")


def start(flags: Parser, argv: list[str] | None) -> tuple[argparse.Namespace, Compute, Policy]:
    """Parse the flags of a script that analyses an agent, and load the agent.

    Args:
        flags: parser with the flags of :func:`add_agent_flags` and :func:`add_output_flags`.
        argv: command-line arguments; None for those of the process.

    Returns:
        The parsed flags; device and precision; and the agent.

    Raises:
        UserError: if the agent cannot be loaded, or has a memory and --exact is given, or the
            requested GPU does not exist.
    """
    args = flags.parse_args(argv)
    set_up_logging(args.log_level)
    compute = resolve_compute(args.device, args.gpu_device, args.precision)
    policy = load_agent(args.agent_file, compute.device)
    if policy.recurrent and getattr(args, "exact", False):
        raise UserError("exact probabilities need an agent without memory, and "
                        f"{args.agent_file} has a GRU; leave --exact out")
    return args, compute, policy


def open_store(schema: Schema, args: argparse.Namespace, compute: Compute, settings: dict,
               *more: Any, states: Sequence[MazeState] = ()) -> ResultStore:
    """Open the output folder of a script that analyses an agent.

    Args:
        schema: schema of the folder.
        args: the parsed flags.
        compute: device and precision.
        settings: settings of the script, in addition to those of agent, levels and computation.
        more: further positional arguments of ``ResultStore.open``, from ``shard`` on.
        states: all levels of the run; empty if a later run can add levels to the folder.

    Raises:
        UserError: if the folder holds other data or results of other settings, or two of the
            levels have the same seed, different modes or different backgrounds.
    """
    check_seeds(states)
    store = ResultStore(args.output_dir, schema)
    levels = {"levels": [state.level_seed for state in states], "levels_sha256": digest(states),
              "distribution_mode": game_of(states).distribution_mode,
              "use_backgrounds": game_of(states).use_backgrounds} if states else {}
    store.open({"agent_file": args.agent_file.name, "agent_sha256": agent_sha256(args.agent_file),
                **levels, **settings, "precision": compute.precision, "versions": versions()},
               args.overwrite, *more)
    return store


def filters_of(args: argparse.Namespace) -> Filters:
    """Return the filters given by the flags in FILTER_FLAGS."""
    return Filters(**{field.name: getattr(args, field.name)
                      for field in dataclasses.fields(Filters)})


def levels_of(args: argparse.Namespace, edit: LevelEdit | None = None) -> list[MazeState]:
    """Return the levels chosen by the flags of :func:`add_level_flags`.

    Args:
        args: the parsed flags.
        edit: optional edit of every level's state bytes, applied before the filters.

    Raises:
        UserError: if --levels is given, and a source is invalid or no level passes the filters; if
            it is not given, and fewer than --num_mazes levels pass.
    """
    filters = filters_of(args)
    if args.levels:
        states = [after_edit(state, edit) for state in chosen_levels(
            args.levels, args.distribution_mode, args.use_backgrounds)]
        accepted = [state for state in states if filters.accept(state.grid)]
        if not accepted:
            raise UserError(f"none of the {len(states)} levels passes the filters; relax them, or "
                            "give other --levels")
        return accepted
    config = EnvConfig(GAME, args.distribution_mode, args.start_level, args.num_levels)
    seeds = config.draw_levels(min(len(config.levels), args.max_tried), args.seed)
    return find_levels(args.distribution_mode, seeds, args.num_mazes, filters,
                       args.use_backgrounds, edit)


def edited(state: MazeState, args: argparse.Namespace) -> MazeState:
    """Apply the flags in EDIT_FLAGS, except ``--text``, to a level.

    The order is: walls, free squares, path to the world's corner, removal of the cheese (with
    ``--cheese``), mouse, new cheese, facing.

    Raises:
        UserError: if an edit is impossible; the message names the level.
    """
    try:
        state = state.with_cells({**dict.fromkeys(args.wall, WALL),
                                  **dict.fromkeys(args.open, FREE)})
        if args.top_right_path:
            state = state.with_top_right_path()
        if args.cheese is not None:
            state = state.with_cheese(None)
        if args.mouse is not None:
            state = state.with_mouse(args.mouse)
        for place in args.cheese or ():
            if place is not None:
                state = state.with_cheese(place, several=True)
        return state if args.facing is None else state.with_facing(args.facing)
    except UserError as error:
        raise UserError(f"level {state.level_seed}: {error}") from None
