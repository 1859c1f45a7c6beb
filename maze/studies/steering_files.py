"""Steering of an agent on forks: writer and reader of ``analysis/maze/steering/``.

Layout::

    settings.json                     what made it
    decisions/<group>/<number>.npz    outcomes of some forks at their decision squares: before
    fields/<group>/<number>.npz       (n, K), after (D, A, n, K), sizes (D, A, n, 3); see Measured
    choosing/<group>/<number>.npz     the same of forks on which layer and coefficient are chosen
    decisions.csv                     a row for each arm and fork
    effects.csv, field_effects.csv    a row for each arm and outcome
    report.md, effects.png, field_effects.png, coefficients.png
    vectors/<name>.npz                steering vectors
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from common.description import open_described_folder
from common.errors import UserError
from common.files import atomic_path, read_arrays
from common.locks import FolderLock
from common.tables import read_table, write_table
from maze.studies.steering import SIZES, Measured

DECISIONS, FIELDS, CHOOSING = "decisions", "fields", "choosing"
_DIMENSIONS = {"before": 2, "after": 4, "sizes": 4}
_EFFECTS = {"arm": str, "label": str, "control": bool, "outcome": str,
            **dict.fromkeys(("unaltered", "altered", "effect", "low_95", "high_95", "p", "p_holm",
                             "p_control"), float), "claimed": bool, **dict.fromkeys(
                ("median_unaltered", "median_altered"), float), "verdict": str}


class SteeringFolder:
    """Names, writer and reader of the outcomes, tables and figures.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.decisions_file = self.path / "decisions.csv"
        self.effects_file = self.path / "effects.csv"
        self.field_effects_file = self.path / "field_effects.csv"
        self.report_file = self.path / "report.md"
        self.figure_file = self.path / "effects.png"
        self.field_figure_file = self.path / "field_effects.png"
        self.curves_file = self.path / "coefficients.png"
        self._lock: FolderLock | None = None

    def open(self, description: dict, overwrite: bool) -> None:
        """Make the folder, or go on with what it holds; old results are removed.

        Raises:
            UserError: see ``open_described_folder``.
        """
        results = (self.decisions_file, self.effects_file, self.field_effects_file,
                   self.report_file, self.figure_file, self.field_figure_file, self.curves_file)
        self._lock = open_described_folder(
            self.path / "settings.json", description,
            ("settings.json", "vectors/*.npz", *(path.name for path in results),
             *(f"{what}/*/*.npz" for what in (DECISIONS, FIELDS, CHOOSING))),
            "effects of steering vectors", "--output_dir", overwrite,
            informative=("versions", "agent_file"))
        for path in results:
            path.unlink(missing_ok=True)

    def vector_file(self, name: str) -> Path:
        return self.path / "vectors" / f"{name}.npz"

    def measured(self, what: str, group: str, number: int,
                 measure: Callable[[], Measured]) -> Measured:
        """Outcomes of some forks: those that are there, or those that ``measure`` gives.

        Args:
            what: DECISIONS, FIELDS or CHOOSING.
            number: of the first of the forks.

        Raises:
            UserError: if the file is damaged, or the folder was deleted.
        """
        path = self.path / what / group / f"{number:05d}.npz"
        if not path.exists():
            self._lock.check()
            found = measure()
            with atomic_path(path) as temporary:
                np.savez(temporary, **{name: getattr(found, name) for name in _DIMENSIONS})
        arrays = read_arrays(path, "file of outcomes")
        if ({name: values.ndim for name, values in arrays.items()} != _DIMENSIONS
                or arrays["after"].shape[2:] != arrays["before"].shape
                or arrays["sizes"].shape != (*arrays["after"].shape[:3], len(SIZES))):
            raise UserError(f"the file of outcomes {path} is damaged: its arrays do not fit each "
                            "other; delete it to have it made again")
        return Measured(**arrays)

    def save_table(self, path: Path, table: pd.DataFrame) -> None:
        """Write one of the CSV files.

        Raises:
            UserError: if the folder was deleted.
        """
        self._lock.check()
        write_table(path, table)

    def effects(self, fields: bool = False) -> pd.DataFrame:
        """The effects, a row for each arm, control and outcome.

        Args:
            fields: those over whole fields instead of those at decision squares.

        Raises:
            UserError: if the file is missing or damaged.
        """
        return read_table(self.field_effects_file if fields else self.effects_file, _EFFECTS,
                          ("median_unaltered", "median_altered"),
                          "python -m maze.steering")
