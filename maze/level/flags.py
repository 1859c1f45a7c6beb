"""Command-line flags that choose levels, and edit them."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from agents.env_flags import level_seed
from common.cli import Parser, add_compute_flags, count, seed, whole
from common.errors import UserError
from envs.procgen_env import EnvConfig, LevelEdit
from maze.level.grid import FREE, KINDS, WALL, Square
from maze.level.pairs import with_top_right_path
from maze.level.search import Filters, after_edit, chosen_levels, find_levels
from maze.level.state import GAME, WORLD_DIMS, MazeState
from maze.level.text import load_text
from stats.effects import check_starts

_region = whole(1, max(WORLD_DIMS.values()))


def square(text: str) -> Square:
    """A square such as ``3,5``, row and column, as an argparse type."""
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


def add_level_flags(parser: Parser, num_mazes: int) -> None:
    """Flags that choose levels.

    Args:
        num_mazes: how many are drawn by default.
    """
    parser.add_argument("--distribution_mode", default="easy", choices=tuple(WORLD_DIMS),
                        help="of the levels, but for those of level files")
    parser.add_argument("--use_backgrounds", action="store_true",
                        help="draw the game's background pictures")
    parser.add_argument("--levels", nargs="+", metavar="LEVELS",
                        help="level files, folders of them, and level seeds such as 0-99,795; if "
                             "not given, --num_mazes levels are drawn")
    parser.add_argument("--num_mazes", type=count, default=num_mazes, help="levels to draw")
    parser.add_argument("--start_level", type=level_seed, default=0,
                        help="seed of the first level that may be drawn")
    parser.add_argument("--num_levels", type=level_seed, default=0,
                        help="number of consecutive level seeds that may be drawn; 0: all of them")
    parser.add_argument("--seed", type=seed, default=0, help="decides which levels are drawn")


def add_filter_flags(parser: Parser) -> None:
    """Flags for properties that a level must have. Squares are in world coordinates."""
    parser.add_argument("--size", type=_size, metavar="MIN:MAX",
                        help="rows of the maze, as in 9:15")
    parser.add_argument("--kind", choices=KINDS, help="kind of level")
    parser.add_argument("--cheese_outside", type=_region, metavar="R",
                        help="no cheese in the last R rows and columns of the maze")
    parser.add_argument("--cheese_inside", type=_region, metavar="R",
                        help="the cheese is in the last R rows and columns of the maze")
    parser.add_argument("--cheese_at", type=square, metavar="ROW,COLUMN",
                        help="square of the cheese; rows of the world count from the bottom")
    parser.add_argument("--free_at", type=square, metavar="ROW,COLUMN", help="a free square")
    parser.add_argument("--max_tried", type=count, default=10_000,
                        help="levels that are looked at to find those")


def add_agent_flags(parser: Parser, help: str, num_mazes: int) -> None:
    """Flags of a script that looks at an agent: its file, and the levels.

    Args:
        help: of the agent's file.
        num_mazes: how many levels are drawn by default.
    """
    parser.add_argument("--agent_file", type=Path, required=True, help=help)
    add_level_flags(parser, num_mazes)
    add_filter_flags(parser)


def add_output_flags(parser: Parser, script: str) -> None:
    """Flags of a script that looks at an agent: where it writes, and how it computes. The
    difference of two activations needs float32, which is the default.

    Args:
        script: its name, which its folder has.
    """
    parser.add_argument("--output_dir", type=Path, default=Path("analysis") / "maze" / script,
                        help="folder to write to")
    parser.add_argument("--overwrite", action="store_true", help="throw away what is there")
    parser.add_argument("--dry_run", action="store_true", help="print the levels and stop")
    add_compute_flags(parser)
    parser.set_defaults(precision="float32")


def add_edit_flags(parser: Parser) -> None:
    """Flags that edit the levels. Squares are in world coordinates."""
    parser.add_argument("--text", type=Path, metavar="FILE",
                        help="maze as text: a line a row, # wall, . free, C cheese, M mouse")
    parser.add_argument("--cheese", type=_cheese, nargs="+", metavar="ROW,COLUMN",
                        help="move the cheese to a square, or to several; none: take it away; "
                             "rows of the world count from the bottom")
    parser.add_argument("--mouse", type=square, metavar="ROW,COLUMN", help="move the mouse")
    parser.add_argument("--facing", type=int, choices=(0, 1), help="1: mirror the mouse")
    parser.add_argument("--wall", type=square, nargs="+", default=(), metavar="ROW,COLUMN",
                        help="squares to make walls")
    parser.add_argument("--open", type=square, nargs="+", default=(), metavar="ROW,COLUMN",
                        help="squares to make free")
    parser.add_argument("--top_right_path", action="store_true",
                        help="open a path from the corner of the maze to that of the world")


def filters_of(args: argparse.Namespace) -> Filters:
    """The properties that :func:`add_filter_flags` asks for."""
    return Filters(args.size, args.kind, args.cheese_inside, args.cheese_outside,
                   args.cheese_at, args.free_at)


def check_num_mazes(args: argparse.Namespace) -> None:
    """See that --num_mazes asks for enough levels to compare, before any is looked for.

    Raises:
        UserError: if it does not.
    """
    if not args.levels:
        check_starts(args.num_mazes, "--num_mazes")


def levels_of(args: argparse.Namespace, edit: LevelEdit | None = None) -> list[MazeState]:
    """The levels of :func:`add_level_flags`, as far as :func:`add_filter_flags` lets them pass.

    Args:
        edit: optional edit of every level before it is looked at.

    Raises:
        UserError: if none do, or too few of those that may be drawn.
    """
    filters = filters_of(args)
    if args.levels:
        found = [after_edit(state, edit) for state in chosen_levels(
            args.levels, args.distribution_mode, args.use_backgrounds)]
        passed = [state for state in found if filters.accept(state.grid)]
        if not passed:
            raise UserError(f"none of the {len(found)} levels looked at has what is asked for")
        return passed
    config = EnvConfig(GAME, args.distribution_mode, args.start_level, args.num_levels)
    seeds = config.draw_levels(min(len(config.levels), args.max_tried), args.seed)
    return find_levels(args.distribution_mode, seeds, args.num_mazes, filters,
                       args.use_backgrounds, edit)


def edited(state: MazeState, args: argparse.Namespace) -> MazeState:
    """A level after the edits of :func:`add_edit_flags`: walls first, then the mouse, then cheese.

    Raises:
        UserError: if one is refused; the level is named.
    """
    try:
        state = state.with_cells({**dict.fromkeys(args.wall, WALL),
                                  **dict.fromkeys(args.open, FREE)})
        if args.top_right_path:
            state = with_top_right_path(state)
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


def text_level(args: argparse.Namespace) -> MazeState:
    """The level of ``--text``.

    Raises:
        UserError: if it is none, or levels are asked for otherwise, too.
    """
    if args.levels:
        raise UserError("--text and --levels exclude each other")
    return load_text(args.text, args.distribution_mode, args.use_backgrounds)
