"""Log of a run's metrics, written row by row to a CSV file and to TensorBoard."""

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
    """Writer of rows to a CSV file, and of TensorBoard events to the same folder.

    Args:
        path: the CSV file.
        columns: names of the columns; the first column counts the steps of the run.
        resume_at: keep the rows up to this step and delete later rows, which a killed run wrote
            after its last save; None starts a new log.

    Raises:
        UserError: if the log to resume is missing or damaged.
    """

    def __init__(self, path: Path, columns: tuple[str, ...], resume_at: int | None = None):
        self._step = columns[0]
        rows = []
        if resume_at is not None:
            rows = [row for row in _read_rows(path, columns) if int(row[self._step]) <= resume_at]
        with atomic_path(path) as temporary, open(
                temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
        self._file = open(path, "a", newline="", encoding="utf-8")
        self._path, self._csv = path, csv.DictWriter(self._file, columns)
        purge_step = None if resume_at is None else resume_at + 1
        self._events = SummaryWriter(str(path.parent), purge_step=purge_step)

    def append(self, row: dict[str, float], diagnostics: dict[str, float] | None = None) -> None:
        """Append a row and flush it to the file.

        Args:
            row: value of each column; NaN gives an empty cell.
            diagnostics: further values, written to TensorBoard only.
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
    """Return the rows as stored, without a row that a killed process left incomplete."""
    read_metrics(path, columns, may_be_empty=True)
    reader = csv.DictReader(io.StringIO(read_bytes(path).decode(), newline=""))
    if tuple(reader.fieldnames or ()) != columns:
        raise UserError(f"{path} has other columns than this run writes")
    return [row for row in reader if None not in row.values()]


def read_metrics(path: Path, columns: tuple[str, ...], may_be_empty: bool = False) -> pd.DataFrame:
    """Read a log written by :class:`MetricsLog`.

    Args:
        columns: names of the columns to read; the first column counts the steps.
        may_be_empty: whether a log without rows is accepted.

    Raises:
        UserError: if the file is missing, has no rows or lacks a column, or a cell is not a number.
    """
    kinds = {name: int if name == columns[0] else float for name in columns}
    log = read_table(path, kinds, gaps=columns[1:])
    if log.empty and not may_be_empty:
        raise UserError(f"{path} has no rows yet: the run has just started")
    return log
