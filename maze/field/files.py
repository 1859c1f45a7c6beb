"""Fields on disk: writer and reader of ``analysis/maze/fields/``.

Layout::

    settings.json                       what made the fields
    differences.csv                     a row for each arm and level: outcomes, see decisions.py
    moved.csv                           a row for each patch of an arm: how far it moved its output
    <arm>/patches.json                  the patches of the arm, as they are written down
    <arm>/field_<level>.npz             the field of a level; level is its seed
    <arm>/field_<level>_facing_1.npz    the same with the mouse facing the other way, if asked for
    <arm>/field_<level>.png             the field, or what the patches change
    <arm>/maps_<level>.png              value and probabilities of reaching each square
    films/<name>_<level>.mp4
    films/<name>_<level>.png            some moments of it side by side, if asked for

An ``.npz`` file has ``squares`` (n, 2) int16, inner row and column; ``log_probs`` (n, 15),
``probs`` (n, 5: left, down, up, right, stay) and ``values`` (n,), float32; ``rows``, the world from
top to bottom, a text a row as in a level file, with the mouse where the episode starts;
``maze_dim``, ``level_facing`` (at the episode's start), ``facing`` and ``memory`` (of the field);
``moved_layers`` (p,) and ``moved`` (p, 4: pictures, in_std, norm, relative), how far each patch
moved an output.

Files appear whole under their names, so what is there is done. Levels can be divided among shards,
see ``common.shards``: each writes fields, and settings, tables and pictures follow when they are
joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from agents.scopes import Size
from common.description import first_difference
from common.errors import UserError
from common.files import atomic_path, read_arrays, read_json, save_json
from common.game_constants import NUM_ACTIONS
from common.shards import WHOLE, Shard, SharedFolder
from common.tables import read_table, write_table
from maze.field.decisions import AT_DECISION, EXACT, OF_CHANGE, OF_FIELD
from maze.field.fields import MEMORIES, NO_MEMORY, Field
from maze.level.grid import Grid

UNPATCHED = "unpatched"  # the arm without patches
FILMS = "films"
OUTCOMES = (*AT_DECISION, *OF_FIELD, *EXACT, *OF_CHANGE)
_COLUMNS = {"arm": str, "level": str, "seed": int, "maze_dim": int, "kind": str, "squares": int,
            **dict.fromkeys((*OUTCOMES, "facing_variation"), float)}
_ARRAYS = {"squares": 2, "log_probs": 2, "probs": 2, "values": 1, "rows": 1, "maze_dim": 0,
           "level_facing": 0, "facing": 0, "memory": 0, "moved_layers": 1,
           "moved": 2}  # dimensions
_MOVED = ("pictures", "in_std", "norm", "relative")  # of a Size


def save_field(path: Path, field: Field, moved: Sequence[Size] = ()) -> None:
    """Write a field, atomically.

    Args:
        moved: how far each patch moved an output, from ``Scope.moved``.
    """
    grid = field.grid
    with atomic_path(path) as temporary:
        np.savez(temporary, squares=(field.squares - grid.margin).astype(np.int16),
                 log_probs=field.log_probs.astype(np.float32),
                 probs=field.probs.astype(np.float32), values=field.values.astype(np.float32),
                 rows=np.array(grid.to_rows()), maze_dim=grid.maze_dim, level_facing=grid.facing,
                 facing=field.facing, memory=field.memory,
                 moved_layers=np.array([size.layer for size in moved], np.str_),
                 moved=np.array([[getattr(size, name) for name in _MOVED] for size in moved],
                                np.float64).reshape(-1, len(_MOVED)))


def load_field(path: Path) -> tuple[Field, list[Size]]:
    """Read a field, and how far each patch moved an output.

    Raises:
        UserError: if the file is missing or damaged.
    """
    arrays = read_arrays(path, "field")
    try:
        if {name: values.ndim for name, values in arrays.items()} != _ARRAYS:
            raise UserError(f"its arrays are {', '.join(sorted(arrays))}")
        grid = Grid.from_rows([str(row) for row in arrays["rows"]], int(arrays["maze_dim"]),
                              int(arrays["level_facing"]))
        field = Field(grid, arrays["squares"].astype(np.int64) + grid.margin,
                      arrays["log_probs"], arrays["values"], int(arrays["facing"]),
                      str(arrays["memory"]))
        num = len(field.squares)
        free = set(grid.squares(without_cheese=True))
        if (field.squares.shape[1] != 2 or field.log_probs.shape != (num, NUM_ACTIONS)
                or field.values.shape != (num,) or field.facing not in (0, 1)
                or field.memory not in (NO_MEMORY, *MEMORIES)
                or not np.isfinite(field.values).all() or np.isnan(field.log_probs).any()
                or len(free & {tuple(square) for square in field.squares.tolist()}) != num):
            raise UserError("its arrays do not fit each other")
        moved = [Size(str(layer), int(pictures), *sizes) for layer, (pictures, *sizes) in zip(
            arrays["moved_layers"], arrays["moved"].tolist(), strict=True)]
    except (UserError, ValueError, TypeError) as error:
        raise UserError(f"the field {path} is damaged: {error}") from None
    return field, moved


class FieldsFolder:
    """Names, writer and reader of the fields of several arms on the same levels.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.table_file = self.path / "differences.csv"
        self.moved_file = self.path / "moved.csv"
        self._shared: SharedFolder | None = None

    def open(self, description: dict, overwrite: bool, shard: Shard = WHOLE,
             divided: dict | None = None, join: bool = False) -> None:
        """Make the folder, or go on with what it holds; the old table is removed.

        Args:
            description: what makes the fields, whichever arms and levels there are.
            overwrite: throw away what the folder holds.
            shard, join: see ``SharedFolder``.
            divided: names of all levels and arms.

        Raises:
            UserError: see ``SharedFolder``.
        """
        self._shared = SharedFolder(
            self.path / "settings.json", description,
            ("settings.json", self.table_file.name, self.moved_file.name, "*/patches.json",
             "*/field_*.npz", "*/field_*.png", "*/maps_*.png", f"{FILMS}/*.mp4"),
            "fields", "--output_dir", overwrite, ("versions", "agent_file"), shard, divided,
            lambda: self.table_file.exists() and all(
                self.field_file(arm, level).exists()
                for arm in divided["arms"] for level in divided["levels"]), join)
        if self._shared.is_open:
            for path in (self.table_file, self.moved_file):
                path.unlink(missing_ok=True)

    def finish(self) -> None:
        """Note that all fields of this process are there."""
        self._shared.finish()

    def add_arm(self, arm: str, patches: dict) -> None:
        """Say what an arm is, before its fields are added.

        Args:
            patches: ``OpenedPatches.metadata``.

        Raises:
            UserError: if there is an arm of this name with other patches.
        """
        path = self.path / arm / "patches.json"
        if path.exists():
            if first_difference(read_json(path), patches, ()):
                raise UserError(f"{path.parent} holds fields with other patches; give the arm "
                                "another name, choose another --output_dir, or give --overwrite")
        else:
            save_json(path, patches, through=self._shared.through)

    def field_file(self, arm: str, level: str, facing: int = 0, several: bool = False) -> Path:
        """The file of a field.

        Args:
            several: whether the folder has both facings.
        """
        side = f"_facing_{facing}" if several and facing else ""
        return self.path / arm / f"field_{level}{side}.npz"

    def picture_file(self, arm: str, level: str) -> Path:
        return self.path / arm / f"field_{level}.png"

    def maps_file(self, arm: str, level: str) -> Path:
        return self.path / arm / f"maps_{level}.png"

    def film_file(self, name: str, level: str) -> Path:
        return self.path / FILMS / f"{name}_{level}.mp4"

    def stills_file(self, name: str, level: str) -> Path:
        return self.path / FILMS / f"{name}_{level}.png"

    def save_tables(self, table: pd.DataFrame, moved: pd.DataFrame) -> None:
        """Write ``moved.csv`` and then ``differences.csv``.

        Raises:
            UserError: if the folder was deleted.
        """
        self._shared.check()
        for path, content in ((self.moved_file, moved), (self.table_file, table[list(_COLUMNS)])):
            write_table(path, content)

    def table(self) -> pd.DataFrame:
        """The outcomes of every arm and level; those that a level does not have are missing.

        Raises:
            UserError: if the file is missing or damaged.
        """
        gaps = [name for name, kind in _COLUMNS.items() if kind is float]
        return read_table(self.table_file, _COLUMNS, gaps, "python -m maze.fields")
