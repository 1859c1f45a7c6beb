"""Selection of levels by seed or property, and levels as JSON files and plain text.

A level file is JSON that can be written by hand and read in a diff::

    {"format": "procgen maze", "version": 1, "distribution_mode": "easy", "level_seed": 0,
     "use_backgrounds": false, "facing": 0, "rows": ["#####...", ...]}

``rows`` are the rows of the whole world from top to bottom: ``#`` wall, ``.`` free, ``C`` cheese,
``M`` mouse. An entry describes the level that Procgen generates for the seed, at its start, with
cells, mouse and facing replaced; the maze therefore has the size of the generated one. Several
levels are stored as a JSON list of entries, or as a folder of files ``level_<seed>.json``.

The text format uses the same letters, and leaves out the walls around the maze. A text of d lines
is a maze of d x d squares in the centre of the world of a given mode; the first level seed whose
maze has this size supplies the rest of the state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from common.config import typed
from common.errors import UserError
from common.files import read_bytes, read_json, save_json
from envs.maze.grid import WALL, Grid, Square
from envs.maze.state import WORLD_DIMS, MazeState, stock_state
from envs.procgen_env import EnvConfig, LevelEdit

FORMAT, VERSION = "procgen maze", 1
MAX_SEEDS = 10_000_000  # largest number of seeds in a list such as 0-99,795
MAX_TRIED = 1000  # seeds tried to find a maze size; each of at most 15 sizes is equally frequent


@dataclasses.dataclass(frozen=True)
class Filters:
    """Properties that a level must have; None accepts any value.

    Filters on the cheese reject levels that do not have exactly one cheese.

    Attributes:
        size: smallest and largest number of rows of the maze.
        kind: one of ``envs.maze.grid.KINDS``; levels of undefined kind are rejected.
        cheese_inside: number of rows and columns of the top right region in which the cheese must
            be.
        cheese_outside: number of rows and columns of the top right region outside which the cheese
            must be.
        cheese_at: square of the cheese, in world coordinates.
        free_at: square that must be free, in world coordinates.
    """

    size: tuple[int, int] | None = None
    kind: str | None = None
    cheese_inside: int | None = None
    cheese_outside: int | None = None
    cheese_at: Square | None = None
    free_at: Square | None = None

    def accept(self, grid: Grid) -> bool:
        """Return whether a level has the properties."""
        if self.size is not None and not self.size[0] <= grid.maze_dim <= self.size[1]:
            return False
        with contextlib.suppress(UserError):  # not exactly one cheese, or unreachable squares
            return ((self.free_at is None or self.free_at in grid.squares())
                    and (self.cheese_inside is None or grid.region(self.cheese_inside)[grid.cheese])
                    and (self.cheese_outside is None
                         or not grid.region(self.cheese_outside)[grid.cheese])
                    and (self.cheese_at is None or self.cheese_at == grid.cheese)
                    and (self.kind is None or self.kind == grid.kind()))
        return False


def after_edit(state: MazeState, edit: LevelEdit | None) -> MazeState:
    """Apply an optional edit of the state bytes to a level."""
    return state if edit is None else MazeState.parse(edit(state.to_bytes()))


def find_levels(distribution_mode: str, seeds: Sequence[int], number: int,
                filters: Filters | None = None, use_backgrounds: bool = False,
                edit: LevelEdit | None = None) -> list[MazeState]:
    """Return the first levels in a sequence of seeds that pass the filters.

    Args:
        seeds: level seeds to try, in order.
        filters: properties that a level must have; None accepts all levels.
        edit: optional edit of every level, applied before the filters.

    Raises:
        UserError: if fewer than ``number`` levels pass; the message reports how many were tried.
    """
    filters = filters or Filters()
    states = (after_edit(stock_state(distribution_mode, seed, use_backgrounds), edit)
              for seed in seeds)
    accepted = list(itertools.islice((state for state in states if filters.accept(state.grid)),
                                     number))
    if len(accepted) < number:
        raise UserError(f"only {len(accepted)} of the {len(seeds)} examined levels pass the "
                        f"filters, not {number}; examine more levels, or relax the filters")
    return accepted


def draw_levels(env: EnvConfig, without: Collection[int], size: int, seed: int
                ) -> list[MazeState]:
    """Draw random levels, at their start, excluding given level seeds.

    Args:
        without: level seeds to exclude, such as those of measured levels.
        size: number of levels.
    """
    seeds = [number for number in env.draw_levels(size + len(without), seed)
             if number not in without]
    return [stock_state(env.distribution_mode, number, env.use_backgrounds)
            for number in seeds[:size]]


def parse_seeds(text: str) -> list[int]:
    """Parse level seeds such as ``0-99,795``; ranges include both ends, duplicates are removed.

    Raises:
        UserError: if the text is malformed, a range is reversed, or there are more than MAX_SEEDS
            seeds.
    """
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,10})\s*(?:-\s*([0-9]{1,10})\s*)?", part)
        if match is None:
            raise UserError(f"'{part.strip()}' in '{text}' is not a level seed; write for example "
                            "0-99,795")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first + len(seeds) >= MAX_SEEDS:
            raise UserError(f"the range {part.strip()} of level seeds "
                            + ("ends before it begins" if last < first else
                               f"has more than {MAX_SEEDS} levels"))
        seeds.extend(range(first, last + 1))
    return list(dict.fromkeys(seeds))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LevelEntry:
    """Entry of a level file, with keys in the order of these fields.

    Attributes:
        format, version: FORMAT and VERSION.
        distribution_mode: ``easy``, ``hard`` or ``memory``.
        use_backgrounds: whether the game draws background images; optional.
        facing: facing of the mouse: 0 for left (the default), 1 for right.
        rows: rows of the world, from top to bottom; see the module docstring.
    """

    format: str
    version: int
    distribution_mode: str
    level_seed: int
    use_backgrounds: bool = False
    facing: int = 0
    rows: tuple[str, ...]

    @classmethod
    def of(cls, state: MazeState) -> LevelEntry:
        """Return the entry of a level; time, timeout and random generators are not stored."""
        return cls(format=FORMAT, version=VERSION, distribution_mode=state.distribution_mode,
                   level_seed=state.level_seed, use_backgrounds=state.use_backgrounds,
                   facing=state.grid.facing, rows=tuple(state.grid.to_rows()))

    def state(self) -> MazeState:
        """Return the level at its start.

        Raises:
            UserError: if the entry has another format or version, the mode or seed is invalid, or
                the rows are not a world of this mode, see ``Grid.from_rows``.
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


def digest(states: Sequence[MazeState]) -> str:
    """Return the SHA-256 digest of levels, computed from their entries in a level file."""
    entries = [dataclasses.asdict(LevelEntry.of(state)) for state in states]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def save_levels(path: Path, states: list[MazeState]) -> None:
    """Write a level file: an entry for one level, a list of entries for several."""
    entries = [dataclasses.asdict(LevelEntry.of(state)) for state in states]
    save_json(path, entries[0] if len(entries) == 1 else entries)


def load_levels(path: Path) -> list[MazeState]:
    """Read the levels of a level file, or of the files ``level_<seed>.json`` of a folder, in the
    order of these seeds.

    Raises:
        UserError: if there is no level, or a file is missing or damaged; the message names file and
            entry.
    """
    if path.is_dir():
        files = [file for file in path.glob("level_*.json") if file.stem[6:].isdecimal()]
        if not files:
            raise UserError(f"the folder {path} has no level file level_<seed>.json")
        return [state for file in sorted(files, key=lambda file: int(file.stem[6:]))
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
    """Return the levels of level files, folders of level files, and seeds such as ``0-99,795``.

    Args:
        sources: paths of files or folders, and level seeds.
        distribution_mode, use_backgrounds: options of levels given by seed; level files contain
            the options of their levels.

    Raises:
        UserError: if a source is none of these, or contains no level.
    """
    states: list[MazeState] = []
    for source in sources:
        if os.path.exists(source) or source.endswith(".json"):
            states += load_levels(Path(source))
        else:
            states += [stock_state(distribution_mode, seed, use_backgrounds)
                       for seed in parse_seeds(source)]
    return states


def from_text(text: str, distribution_mode: str, use_backgrounds: bool = False) -> MazeState:
    """Parse a level from the text format, see the module docstring.

    Args:
        text: lines of the maze, from top to bottom.

    Raises:
        UserError: if the text is not a maze, or the mode has no maze of this size.
    """
    grid, world_dim = Grid.from_rows(text.split()), WORLD_DIMS[distribution_mode]
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
        UserError: if the file is missing or :func:`from_text` raises; the message names the file.
    """
    try:
        return from_text(read_bytes(path).decode(errors="replace"), distribution_mode,
                         use_backgrounds)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
