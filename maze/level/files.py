"""Level files: mazes as JSON, which can be written by hand and read in a diff.

::

    {"format": "procgen maze", "version": 1, "distribution_mode": "easy", "level_seed": 0,
     "use_backgrounds": false, "facing": 0, "rows": ["#####...", ...]}

``rows`` are those of the whole world from top to bottom: ``#`` wall, ``.`` free, ``C`` cheese,
``M`` mouse. A level is the one that Procgen generates for the seed, at its start, with these cells,
this mouse and facing; so the maze in the world has the size of the seed's. Several levels are a
JSON list of such entries, or a folder of files.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from common.config import typed
from common.errors import UserError
from common.files import read_json, save_json
from maze.level.environment import stock_state
from maze.level.grid import Grid
from maze.level.state import MazeState

FORMAT, VERSION = "procgen maze", 1


@dataclasses.dataclass(frozen=True)
class LevelEntry:
    """A level as a level file has it. ``use_backgrounds`` and ``facing`` may be missing there."""

    format: str
    version: int
    distribution_mode: str
    level_seed: int
    rows: tuple[str, ...]
    use_backgrounds: bool = False
    facing: int = 0

    @classmethod
    def of(cls, state: MazeState) -> LevelEntry:
        """The entry of a level. Time, timeout and generators of the state are not kept."""
        return cls(FORMAT, VERSION, state.distribution_mode, state.level_seed,
                   tuple(state.grid.to_rows()), state.use_backgrounds, state.grid.facing)

    def to_json(self) -> dict:
        """The entry in the order of the format."""
        names = ("format", "version", "distribution_mode", "level_seed", "use_backgrounds",
                 "facing", "rows")
        return {name: getattr(self, name) for name in names}

    def state(self) -> MazeState:
        """The level, at its start.

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
