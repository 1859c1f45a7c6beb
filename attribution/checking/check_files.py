"""Checks of attributions on disk: ``analysis/attribution/checks/``.

::

    checks/settings.json                       what made them
    checks/raw/<check>/<layer>/<output>.npz    numbers by frame, of deletion, randomisation,
                                               interventions and fidelity
    checks/raw/objects/<output>.npz            masks and changes by frame, see object_removal
    checks/<check>.csv                         the table of each check, a row a layer, output and
                                               what else the check tells apart
    checks/<check>.png                         its figure
    checks/report.md                           all of it in words, a section a check: its anchor is
                                               the name of the check

What is raw is stored layer by layer, so that a killed run continues behind it; tables, figures and
report are written from all that is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from common.description import open_described_folder
from common.files import atomic_path, read_arrays
from common.locks import FolderLock
from common.tables import read_table, write_table

SCRIPT = "python -m attribution.checks"
COMPLETENESS, DELETION, RANDOMISATION, INTERVENTIONS, OBJECTS, FIDELITY = CHECKS = (
    "completeness", "deletion", "randomisation", "interventions", "objects", "fidelity")
_DENSITIES = {"layer": str, "output": str, "kind": str, "frames": int, **dict.fromkeys(
    ("density", "density_low_95", "density_high_95", "attribution_sign"), float)}
_OF = "of"  # array of a raw file: checksum of the features that its numbers belong to


class ChecksFolder:
    """Names, writer and reader.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.settings_file = self.path / "settings.json"
        self.report_file = self.path / "report.md"
        self._lock: FolderLock | None = None

    def table_file(self, check: str) -> Path:
        return self.path / f"{check}.csv"

    def raw_file(self, check: str, output: str, layer: str | None = None) -> Path:
        """The file of numbers by frame, of a layer if the check has some of each."""
        folder = self.path / "raw" / check
        return (folder / layer if layer else folder) / f"{output}.npz"

    def open(self, description: dict, overwrite: bool) -> None:
        """Make the folder, or go on with what it holds.

        Raises:
            UserError: see ``open_described_folder``.
        """
        self._lock = open_described_folder(
            self.settings_file, description,
            ("settings.json", "report.md", "*.csv", "*.png", "raw/*/*.npz", "raw/*/*/*.npz"),
            "checks of attributions", "--output_dir", overwrite, ("versions", "agent_file"))

    def add_raw(self, path: Path, belongs_to: str, **arrays: np.ndarray) -> None:
        """Write numbers by frame.

        Args:
            path: from ``raw_file``.
            belongs_to: checksum of the features.
        """
        self._lock.check()
        with atomic_path(path) as temporary:
            np.savez(temporary, **{_OF: np.array(belongs_to)}, **arrays)

    def raw(self, path: Path, belongs_to: str) -> dict[str, np.ndarray] | None:
        """Numbers by frame; None if there are none, or they are of other features.

        Raises:
            UserError: if the file is damaged.
        """
        if not path.exists():
            return None
        found = read_arrays(path, "file of checks")
        return found if str(found.pop(_OF, "")) == belongs_to else None

    @contextlib.contextmanager
    def figure(self, check: str) -> Iterator[Path]:
        """Yield the path that the figure of a check is to be saved to; it appears when complete."""
        self._lock.check()
        with atomic_path(self.path / f"{check}.png") as temporary:
            yield temporary

    def add_report(self, text: str) -> None:
        """Write the report."""
        self._lock.check()
        with atomic_path(self.report_file) as temporary:
            temporary.write_text(text)

    def densities(self) -> pd.DataFrame:
        """Of the check of objects, how dense attributions are on each kind: some columns of its
        table.

        Raises:
            UserError: if the file is missing or damaged.
        """
        return read_table(self.table_file(OBJECTS), _DENSITIES, [
            name for name, kind in _DENSITIES.items() if kind is float], SCRIPT)

    def add_table(self, check: str, table: pd.DataFrame) -> None:
        """Write the table of a check."""
        write_table(self.table_file(check), table)
