"""Tables that a study writes part by part, so that a killed run goes on after the last part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd

from common.tables import read_table, write_table


def stored(path: Path, columns: Mapping[str, type],
           compute: Callable[[], pd.DataFrame]) -> pd.DataFrame:
    """The table of a file, which is computed and written if it is not there.

    It is read from the file in either case, so that a run that goes on has the same numbers, to the
    last bit, as one that was never stopped.

    Args:
        columns: names and types, as in ``read_table``; numbers with a point may be missing.

    Raises:
        UserError: if the file is damaged.
    """
    if not path.exists():
        write_table(path, compute()[list(columns)], exact=True)
    return read_table(path, columns, [name for name, kind in columns.items() if kind is float])
