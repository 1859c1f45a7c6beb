"""Levels chosen by seed, by what they are, or from level files."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from common.errors import UserError, nearest
from envs.procgen_env import LevelEdit
from maze.level.environment import stock_state
from maze.level.files import load_levels
from maze.level.grid import KINDS, Grid, Square
from maze.level.state import MazeState

MAX_SEEDS = 10_000_000


@dataclasses.dataclass(frozen=True)
class Filters:
    """Properties that a level must have; None: any.

    Attributes:
        size: smallest and largest d.
        kind: one of KINDS; a level without a kind has none.
        cheese_inside, cheese_outside: rows of the top right region that must hold the cheese, or
            must not.
        cheese_at, free_at: squares, in world coordinates, with the cheese, and free.
    """

    size: tuple[int, int] | None = None
    kind: str | None = None
    cheese_inside: int | None = None
    cheese_outside: int | None = None
    cheese_at: Square | None = None
    free_at: Square | None = None

    def __post_init__(self):
        if self.kind not in (None, *KINDS):
            raise UserError(f"there is no kind of level '{self.kind}'{nearest(self.kind, KINDS)}")
        if self.size is not None and self.size[0] > self.size[1]:
            raise UserError(f"no maze has between {self.size[0]} and {self.size[1]} rows")

    def accept(self, grid: Grid) -> bool:
        """Whether a level has the properties.

        Raises:
            UserError: if there can be no such region or square in its world.
        """
        inside, outside = (None if size is None else grid.region(size)
                           for size in (self.cheese_inside, self.cheese_outside))
        for square in (self.cheese_at, self.free_at):
            if square is not None:
                grid.check_inside(square, "a square that is asked for")
        if self.size is not None and not self.size[0] <= grid.maze_dim <= self.size[1]:
            return False
        if self.free_at is not None and not grid.is_free[self.free_at]:
            return False
        try:
            if inside is not None and not inside[grid.cheese]:
                return False
            if outside is not None and outside[grid.cheese]:
                return False
            if self.cheese_at is not None and self.cheese_at != grid.cheese:
                return False
            return self.kind is None or self.kind == grid.kind()
        except UserError:  # without one cheese that can be reached
            return False


def after_edit(state: MazeState, edit: LevelEdit | None) -> MazeState:
    """A level as an edit of its bytes leaves it; as it is without one."""
    return state if edit is None else MazeState.parse(edit(state.to_bytes()))


def find_levels(distribution_mode: str, seeds: Iterable[int], wanted: int,
                filters: Filters | None = None, use_backgrounds: bool = False,
                edit: LevelEdit | None = None) -> list[MazeState]:
    """The first levels of a range of seeds that have certain properties.

    Args:
        edit: optional edit of every level before it is looked at.

    Raises:
        UserError: if there are fewer; how many were looked at is named.
    """
    filters = filters or Filters()
    found, tried = [], 0
    for seed in seeds:
        if len(found) == wanted:
            break
        state = after_edit(stock_state(distribution_mode, seed, use_backgrounds), edit)
        tried += 1
        if filters.accept(state.grid):
            found.append(state)
    if len(found) < wanted:
        raise UserError(f"of the {tried} levels looked at {len(found)} have what is asked for, not "
                        f"{wanted}; look at more, or ask for less")
    return found


def parse_seeds(text: str) -> list[int]:
    """Level seeds of a text such as ``0-99,795``; both ends of a range are included.

    Raises:
        UserError: if it is none.
    """
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,10})\s*(?:-\s*([0-9]{1,10})\s*)?", part)
        if match is None:
            raise UserError(f"'{part.strip()}' in '{text}' is no level seed; write for example "
                            "0-99,795")
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first or last - first + len(seeds) >= MAX_SEEDS:
            raise UserError(f"the range {part.strip()} of level seeds "
                            + ("ends before it begins" if last < first else
                               f"has more than {MAX_SEEDS} levels"))
        seeds.extend(range(first, last + 1))
    return list(dict.fromkeys(seeds))


def chosen_levels(sources: Sequence[str], distribution_mode: str, use_backgrounds: bool = False
                  ) -> list[MazeState]:
    """Levels of level files, of folders of them, and of seeds such as ``0-99,795``, in this order.

    Args:
        distribution_mode, use_backgrounds: of the seeds; a level file has its own.

    Raises:
        UserError: if a source is none of these, or holds none.
    """
    states = []
    for source in sources:
        if os.path.exists(source) or source.endswith(".json"):
            states += load_levels(Path(source))
        else:
            states += [stock_state(distribution_mode, seed, use_backgrounds)
                       for seed in parse_seeds(source)]
    return states
