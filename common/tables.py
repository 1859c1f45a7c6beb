"""Reading and writing of tables as CSV files, and formatting as Markdown."""

from __future__ import annotations

import csv
import html
import io
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from common.errors import UserError
from common.files import MAX_REASON, atomic_path, read_bytes

_LARGEST = float(np.finfo(np.float32).max)
_TRUTH = {"True": 1, "False": 0, "1.0": 1, "0.0": 0, "1": 1, "0": 0}


def finite_or_none(value: float | np.floating) -> float | None:
    """Convert a number for JSON: return None if it is not finite."""
    return float(value) if math.isfinite(value) else None


def markdown_escaped(text: str) -> str:
    """Escape text from a user, such as a name, for Markdown."""
    text = " ".join(html.escape(text, quote=False).split())
    return re.sub(r"[\\`*\[\]|]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", text)


def with_minus(text: str) -> str:
    """Replace hyphens before numbers by minus signs, for pages."""
    return re.sub(r"(?<![\w.,)/−-])-(?=\.?\d)", "−", text)


def format_count(number: int, plural: str) -> str:
    """Return a number with its noun, such as "2 layers of one agent" or "1 layer of one agent".

    Args:
        plural: the noun in the plural, which ends in s; words after "of" or "with" belong to it.
    """
    if number == 1:
        plural = re.sub(r"s(?= (?:of|with) |$)", "", plural, count=1)
    return f"{number} {plural}"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, followed by an empty line.

    Args:
        header: titles of the columns.
        rows: cells of each row, as Markdown.
    """
    cells = [header, ["---"] * len(header), *rows]
    return [*("| " + " | ".join(row) + " |" for row in cells), ""]


def write_table(path: Path, table: pd.DataFrame, exact: bool = False) -> None:
    """Write a CSV file atomically.

    Args:
        exact: write all digits of numbers, for tables that are read again; otherwise six
            significant digits.
    """
    with atomic_path(path) as temporary:
        table.to_csv(temporary, index=False, float_format=None if exact else "%.6g",
                     errors="backslashreplace")


def read_table(path: Path, columns: Mapping[str, type], gaps: Collection[str] = (),
               written_by: str = "", content: bytes | None = None) -> pd.DataFrame:
    """Read columns of a CSV file.

    Args:
        columns: type of each column to read: ``int`` (integers), ``float`` (numbers in the range of
            float32), ``bool`` (0, 1, True or False) or ``str``. Other columns are ignored.
        gaps: columns of the types ``int`` and ``float`` whose cells may be empty.
        written_by: script that writes the file, for the message about a missing file.
        content: contents of the file, if they have already been read.

    Returns:
        Table with these columns in this order. Numeric types are chosen by pandas; boolean
        columns have type bool.

    Raises:
        UserError: if the file is missing or damaged, or a column is missing, repeated or of another
            type; the message names the column.
    """
    if content is None:
        content = read_bytes(path, written_by=written_by)
    try:
        header = next(csv.reader(io.StringIO(content.partition(b"\n")[0].decode())), [])
        for name in columns:
            if header.count(name) != 1:
                raise UserError(f"{path} is damaged: it has {header.count(name) or 'no'} "
                                f"column{'s' * (name in header)} '{name}'")
        if max(_cells_of_lines(content)) > len(header):
            raise UserError(f"{path} is damaged: a row has more cells than the table has columns")
        kinds = {name: str for name, kind in columns.items() if kind is str}
        table = pd.read_csv(io.BytesIO(content), usecols=list(columns), dtype=kinds,
                            index_col=False, low_memory=False)[list(columns)]
    except (ValueError, OverflowError, csv.Error) as error:  # also decoding errors
        reason = " ".join(str(error).split())[:MAX_REASON]
        raise UserError(f"{path} is damaged: {reason}") from None
    if not len(table):
        return table.astype(dict(columns))
    for name, kind in columns.items():
        table[name] = _checked(table[name], kind, name in gaps,
                               f"{path} is damaged: the column {name} ")
    return table


def _cells_of_lines(content: bytes) -> Iterator[int]:
    """Yield the number of cells in each line."""
    if b'"' in content:
        yield from map(len, csv.reader(io.StringIO(content.decode(), newline="")))
    else:  # ten times faster
        yield from (line.count(b",") + 1 for line in io.BytesIO(content))


def _checked(column: pd.Series, kind: type, gaps: bool, what: str) -> pd.Series:
    """Check the type of a column and return it; boolean columns get the type bool.

    Args:
        kind: ``int``, ``float``, ``bool`` or ``str``.
        gaps: whether cells may be empty.
        what: beginning of messages.
    """
    if kind is str:
        if column.isna().any():
            raise UserError(f"{what}has an empty cell")
        return column
    if kind is bool:
        if not pd.api.types.is_numeric_dtype(column):  # pandas counts booleans as numbers
            column = column.astype(str).str.strip().map(_TRUTH)
        if not column.isin((0, 1)).all():
            raise UserError(f"{what}holds a value other than true and false")
        return column.astype(bool)
    if not pd.api.types.is_numeric_dtype(column) or pd.api.types.is_bool_dtype(column):
        raise UserError(f"{what}holds a value that is not a number")
    values = column.to_numpy(np.float64)
    values = values[~np.isnan(values)] if gaps else values
    if not (np.abs(values) <= _LARGEST).all():
        raise UserError(f"{what}has a missing or infinite value, or a number that is too large")
    if kind is int and ((values % 1 != 0) | (np.abs(values) > 2**53)).any():
        raise UserError(f"{what}holds a value that is not an integer")
    return column
