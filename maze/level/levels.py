"""Levels chosen by seed or by their properties, and levels as JSON files and as plain text.

A level file is JSON that can be written by hand and read in a diff::

    {"format": "procgen maze", "version": 1, "distribution_mode": "easy", "level_seed": 0,
     "use_backgrounds": false, "facing": 0, "rows": ["#####...", ...]}

``rows`` are those of the whole world from top to bottom: ``#`` wall, ``.`` free, ``C`` cheese,
``M`` mouse. A level is the one that Procgen generates for the seed, at its start, with these cells,
this mouse and facing; its maze therefore has the size of the seed's. Several levels are a JSON list
of such entries, or a folder of files.

A text has the same letters but no walls around the maze. A text of d lines is a maze of d x d
squares in the middle of the world of its mode; the first level seed whose maze has this size
supplies the rest of the state.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from common.config import typed
from common.errors import UserError, nearest
from common.files import read_bytes, read_json, save_json
from envs.procgen_env import LevelEdit
from maze.level.grid import KINDS, WALL, Grid, Square
from maze.level.state import WORLD_DIMS, MazeState, stock_state

FORMAT, VERSION = "procgen maze", 1
MAX_SEEDS = 10_000_000
MAX_TRIED = 1000  # level seeds; a mode has 15 sizes at most, each as often as the others


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
        """Return whether a level has the properties.

        Raises:
            UserError: if a region or square does not fit into its world.
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
    """Apply an optional edit of the state bytes to a level."""
    return state if edit is None else MazeState.parse(edit(state.to_bytes()))


def find_levels(distribution_mode: str, seeds: Iterable[int], number: int,
                filters: Filters | None = None, use_backgrounds: bool = False,
                edit: LevelEdit | None = None) -> list[MazeState]:
    """Return the first levels of a sequence of seeds that have some properties.

    Args:
        number: of levels to return.
        edit: optional edit of every level, applied before the filters.

    Raises:
        UserError: if there are fewer levels; the message says how many were tried.
    """
    filters = filters or Filters()
    accepted: list[MazeState] = []
    tried = 0
    for seed in seeds:
        if len(accepted) == number:
            break
        state = after_edit(stock_state(distribution_mode, seed, use_backgrounds), edit)
        tried += 1
        if filters.accept(state.grid):
            accepted.append(state)
    if len(accepted) < number:
        raise UserError(f"of the {tried} levels looked at {len(accepted)} have what is asked for, "
                        f"not {number}; look at more, or ask for less")
    return accepted


def parse_seeds(text: str) -> list[int]:
    """Parse level seeds such as ``0-99,795``; ranges include both ends.

    Raises:
        UserError: if the text has another form.
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


@dataclasses.dataclass(frozen=True)
class LevelEntry:
    """A level in a level file, where ``use_backgrounds`` and ``facing`` are optional."""

    format: str
    version: int
    distribution_mode: str
    level_seed: int
    rows: tuple[str, ...]
    use_backgrounds: bool = False
    facing: int = 0

    @classmethod
    def of(cls, state: MazeState) -> LevelEntry:
        """Return the entry of a level. It lacks time, timeout and generators of the state."""
        return cls(FORMAT, VERSION, state.distribution_mode, state.level_seed,
                   tuple(state.grid.to_rows()), state.use_backgrounds, state.grid.facing)

    def to_json(self) -> dict:
        """Return the entry in the order of the format."""
        names = ("format", "version", "distribution_mode", "level_seed", "use_backgrounds",
                 "facing", "rows")
        return {name: getattr(self, name) for name in names}

    def state(self) -> MazeState:
        """Return the level at its start.

        Raises:
            UserError: if the entry is of another format or version, or the rows are no maze of
                the seed's size.
        """
        if (self.format, self.version) != (FORMAT, VERSION):
            raise UserError(f"it has the format '{self.format}' in version {self.version}, not "
                            f"'{FORMAT}' in version {VERSION}")
        state = stock_state(self.distribution_mode, self.level_seed, self.use_backgrounds)
        stock = state.grid
        if len(self.rows) != stock.world_dim:
            raise UserError(f"it has {len(self.rows)} rows, but the world of "
                            f"{self.distribution_mode} mazes has {stock.world_dim}")
        return state.with_grid(Grid.from_rows(self.rows, stock.maze_dim, self.facing))


def save_levels(path: Path, states: list[MazeState]) -> None:
    """Write a level file: one level as an entry, several as a list of them."""
    entries = [LevelEntry.of(state).to_json() for state in states]
    save_json(path, entries[0] if len(entries) == 1 else entries)


def load_levels(path: Path) -> list[MazeState]:
    """Read the levels of a level file, or of a folder of them in the order of their seeds.

    Raises:
        UserError: if there is none, or one is damaged; file and entry are named.
    """
    if path.is_dir():
        files = [file for file in path.glob("level_*.json") if re.fullmatch(
            r"level_[0-9]+\.json", file.name)]
        if not files:
            raise UserError(f"the folder {path} has no level file level_<seed>.json")
        return [state for file in sorted(files, key=lambda file: int(file.stem[len("level_"):]))
                for state in load_levels(file)]
    content = read_json(path)
    entries = content if isinstance(content, list) else [content]
    if not entries:
        raise UserError(f"the level file {path} holds no level")
    states = []
    for number, entry in enumerate(entries):
        where = f"{path}, level {number + 1}" if len(entries) > 1 else str(path)
        checked = typed(LevelEntry, entry, where)
        try:
            states.append(checked.state())
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
    return states


def chosen_levels(sources: Sequence[str], distribution_mode: str, use_backgrounds: bool = False
                  ) -> list[MazeState]:
    """Return the levels of level files, of folders of them, and of seeds such as ``0-99,795``.

    Args:
        distribution_mode, use_backgrounds: of the seeds; a level file has its own.

    Raises:
        UserError: if a source is none of these, or holds no level.
    """
    states: list[MazeState] = []
    for source in sources:
        if os.path.exists(source) or source.endswith(".json"):
            states += load_levels(Path(source))
        else:
            states += [stock_state(distribution_mode, seed, use_backgrounds)
                       for seed in parse_seeds(source)]
    return states


def to_text(grid: Grid) -> str:
    """Format a maze as text.

    Raises:
        UserError: if squares outside the maze are free, because a text has no place for them.
    """
    if grid.is_free[~grid.region(grid.world_dim)].any():
        raise UserError("the level has free squares outside its maze; a level file keeps them, a "
                        "text does not")
    inside = slice(grid.margin, grid.margin + grid.maze_dim)
    return "".join(f"{row[inside]}\n" for row in grid.to_rows()[inside])


def from_text(text: str, distribution_mode: str, use_backgrounds: bool = False) -> MazeState:
    """Parse a level from text.

    Raises:
        UserError: if the text is no maze, or the mode has no maze of this size.
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
                                Square(grid.mouse.row + margin, grid.mouse.column + margin)))


def load_text(path: Path, distribution_mode: str, use_backgrounds: bool = False) -> MazeState:
    """Read a level from a text file.

    Raises:
        UserError: as :func:`from_text`, or if the file is missing; the message names it.
    """
    try:
        return from_text(read_bytes(path).decode(), distribution_mode, use_backgrounds)
    except UnicodeDecodeError:
        raise UserError(f"{path} is no text") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
