"""Behaviour on disk: writer and reader of ``analysis/maze/behaviour/``.

Layout::

    settings.json        what made it
    levels.jsonl         a line a level as it was done, in any order: what the tables are made from
    episodes.csv         a row a level
    paths.npz            where the mouse was
    regressions.csv      see prediction.py
    report.md, *.png

``paths.npz`` has ``seeds`` (N,) int64, ``lengths`` (N,) int64, and ``squares`` (all lengths, 2)
int16, inner row and column, level behind level: of each frame of an episode, and the cheese's
where the mouse got it.

A run that was killed goes on with the lines that are there. More levels can be added.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from common.description import open_described_folder, read_description
from common.errors import UserError
from common.files import append_or_nothing, atomic_path, read_bytes
from common.locks import FolderLock
from common.tables import read_table, write_table
from maze.field.decisions import AT_DECISION, EXACT
from maze.level.features import NAMES
from maze.studies import prediction

SCRIPT = "python -m maze.behaviour"
OUTCOMES = (*AT_DECISION, *EXACT)  # of fields; NaN where a level or a run has none
COLUMNS = {"seed": int, "maze_dim": int, "kind": str, "cheese_row": int, "cheese_column": int,
           "cheese_in_region": bool, "got_cheese": bool, "steps": int, "first": str,
           **dict.fromkeys((*OUTCOMES, *NAMES), float)}
EPISODES_FIGURE, REGRESSIONS_FIGURE = "episodes.png", "regressions.png"
_ENTRY = {"number": int, "seed": int, "level": str, "got_cheese": bool, "path": list,
          "outcomes": dict}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A level that was played and looked at.

    Attributes:
        number: its place among the levels.
        seed: of the level.
        level: checksum of cells, mouse and facing.
        got_cheese: the game's own flag.
        path: inner row and column of the mouse in each frame, and of the cheese if it was got.
        outcomes: by OUTCOMES.
    """

    number: int
    seed: int
    level: str
    got_cheese: bool
    path: list[list[int]]
    outcomes: Mapping[str, float]


class BehaviourFolder:
    """Names, writer and reader of the behaviour of an agent.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.settings_file = self.path / "settings.json"
        self.journal_file = self.path / "levels.jsonl"
        self.episodes_file = self.path / "episodes.csv"
        self.paths_file = self.path / "paths.npz"
        self.regressions_file = self.path / "regressions.csv"
        self.report_file = self.path / "report.md"
        self._lock: FolderLock | None = None

    def figure_file(self, name: str) -> Path:
        return self.path / name

    def open(self, description: dict, overwrite: bool) -> None:
        """Make the folder, or go on with what it holds; tables, report and figures are removed.

        Args:
            description: what makes the entries, however many there are.
            overwrite: throw away what the folder holds.

        Raises:
            UserError: see ``open_described_folder``.
        """
        results = (self.episodes_file, self.paths_file, self.regressions_file, self.report_file,
                   self.figure_file(EPISODES_FIGURE), self.figure_file(REGRESSIONS_FIGURE))
        self._lock = open_described_folder(
            self.settings_file, description,
            (self.settings_file.name, self.journal_file.name, *(path.name for path in results)),
            "behaviour", "--output_dir", overwrite,
            informative=("versions", "agent_file", "levels"))  # each entry knows its level
        for path in results:
            path.unlink(missing_ok=True)

    def entries(self) -> dict[int, Entry]:
        """Finished entries by number; a line that a kill cut short is cut off.

        Raises:
            UserError: if the file is damaged.
        """
        if not self.journal_file.exists():
            with atomic_path(self.journal_file) as temporary:
                temporary.touch()
        content = read_bytes(self.journal_file)
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(self.journal_file, whole)
        found = {}
        for number, line in enumerate(content[:whole].splitlines(), 1):
            entry = _entry(line)
            if entry is None:
                raise UserError(f"{self.journal_file} is damaged in line {number}; give "
                                "--overwrite to begin again")
            found[entry.number] = entry
        return found

    def add(self, entry: Entry) -> None:
        """Add what is done; it is on disk when this returns.

        Raises:
            UserError: if the folder was deleted.
        """
        self._lock.check()
        values = {name: float(value) if np.isfinite(value) else None
                  for name, value in entry.outcomes.items()}
        line = json.dumps({**dataclasses.asdict(entry), "outcomes": values},
                          separators=(",", ":"), allow_nan=False)
        append_or_nothing(self.journal_file, line + "\n")

    def save_paths(self, entries: Sequence[Entry]) -> None:
        with atomic_path(self.paths_file) as temporary:
            np.savez(
                temporary, seeds=np.array([entry.seed for entry in entries], np.int64),
                lengths=np.array([len(entry.path) for entry in entries], np.int64),
                squares=np.concatenate([np.array(entry.path, np.int16) for entry in entries]))

    def save_episodes(self, table: pd.DataFrame) -> None:
        """Write ``episodes.csv``; ``table`` has COLUMNS."""
        write_table(self.episodes_file, table[list(COLUMNS)])

    def save_regressions(self, table: pd.DataFrame) -> None:
        """Write ``regressions.csv``; ``table`` is from ``prediction.regressions``."""
        write_table(self.regressions_file, table)

    def settings(self) -> dict:
        """Description of the run that made the folder.

        Raises:
            UserError: if that is missing or damaged.
        """
        settings = read_description(self.settings_file)
        if not settings:
            raise UserError(f"there is no {self.settings_file}, which {SCRIPT} writes")
        return settings

    def episodes(self) -> pd.DataFrame:
        """The table of the levels.

        Raises:
            UserError: if the file is missing or damaged.
        """
        return read_table(self.episodes_file, COLUMNS, (*OUTCOMES, *NAMES), SCRIPT)

    def regressions(self) -> pd.DataFrame | None:
        """The table of the regressions; None if there were none.

        Raises:
            UserError: if the file is damaged.
        """
        if not self.regressions_file.exists():
            return None
        gaps = [name for name, kind in prediction.COLUMNS.items() if kind is float]
        return read_table(self.regressions_file, prediction.COLUMNS, gaps, SCRIPT)


def _entry(line: bytes) -> Entry | None:
    """The entry in a line; None if it holds none."""
    try:
        content = json.loads(line)
        if {name: type(value) for name, value in content.items()} != _ENTRY:
            return None
        outcomes = {name: np.nan if content["outcomes"][name] is None
                    else float(content["outcomes"][name]) for name in OUTCOMES}
        path = np.array(content["path"], np.int16)
        if path.ndim != 2 or path.shape[1] != 2:
            return None
    except (ValueError, AttributeError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return Entry(**{**content, "outcomes": outcomes})
