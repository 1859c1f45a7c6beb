"""A table of figures that grows by a row at a time: a CSV file and its TensorBoard twin."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pandas as pd
from torch.utils.tensorboard import SummaryWriter

from common.errors import UserError
from common.files import atomic_path, named_errors, read_bytes
from common.tables import read_table


class MetricsLog:
    """Appends rows to a CSV file and TensorBoard events to its folder.

    Args:
        path: the CSV file.
        columns: names; the first one counts the steps of the run.
        resume_at: keep the rows up to this step and drop later ones (they belong to work that a
            killed run did not save); None starts a new log.

    Raises:
        UserError: if the log to go on with is missing or damaged.
    """

    def __init__(self, path: Path, columns: tuple[str, ...], resume_at: int | None = None):
        self._step = columns[0]
        rows = []
        if resume_at is not None:
            rows = [row for row in _read_rows(path, columns) if int(row[self._step]) <= resume_at]
        with atomic_path(path) as temporary, open(temporary, "w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
        self._file = open(path, "a", newline="")
        self._path, self._csv = path, csv.DictWriter(self._file, columns)
        purge_step = None if resume_at is None else resume_at + 1
        self._events = SummaryWriter(str(path.parent), purge_step=purge_step)

    def append(self, row: dict[str, float], diagnostics: dict[str, float] | None = None) -> None:
        """Add a row; it is on disk when this returns. NaN leaves a cell empty.

        Args:
            diagnostics: further figures for TensorBoard alone.
        """
        with named_errors(self._path):
            self._csv.writerow({name: "" if value != value else value
                                for name, value in row.items()})
            self._file.flush()
        for name, value in {**row, **(diagnostics or {})}.items():
            if name != self._step and value == value:
                self._events.add_scalar(name, value, row[self._step])

    def close(self) -> None:
        self._file.close()
        self._events.close()


def _read_rows(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    """The rows as stored, but for those cut short by a kill."""
    read_metrics(path, columns, may_be_empty=True)
    reader = csv.DictReader(io.StringIO(read_bytes(path).decode(), newline=""))
    if tuple(reader.fieldnames or ()) != columns:
        raise UserError(f"{path} has other columns than this run writes")
    return [row for row in reader if None not in row.values()]


def read_metrics(path: Path, columns: tuple[str, ...], may_be_empty: bool = False) -> pd.DataFrame:
    """Read what a :class:`MetricsLog` wrote.

    Args:
        may_be_empty: whether a log without rows will do.

    Raises:
        UserError: if there is no such file, or it lacks rows or any of the columns, or holds
            something else than numbers.
    """
    if not path.is_file():
        raise UserError(f"there is no {path.name} in {path.parent}")
    kinds = {name: int if name == columns[0] else float for name in columns}
    log = read_table(path, kinds, gaps=columns[1:])
    if log.empty and not may_be_empty:
        raise UserError(f"{path} has no rows yet: the run has only begun")
    return log
