"""Series of maze agents that differ in the cheese region of their training, or in training steps.

Each agent has a folder with a ``behaviour`` study on the same levels, and possibly a ``steering``
study. ``stats.series`` describes the files. Claim 3 of the table of claims is computed from such a
series.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from common.errors import UserError
from common.results import ResultStore
from maze.studies.behaviour import (
    BEHAVIOUR_FILES,
    EXACT_CHEESE,
    EXACT_LABEL,
    GOT,
    SUCCESS,
    mean_interval,
)
from maze.studies.steering import STEERING_FILES
from stats.claims import Finding
from stats.series import (
    correlation_findings,
    is_correlation,
    series_of,
    series_schema,
    with_correlations,
)
from stats.significance import share

REGION, STEPS = "region", "steps"
AXES = {REGION: "R (side of the cheese region in training)", STEPS: "training steps"}
VECTOR_EFFECT = "change of P(cheese), cheese vector subtracted"
MEASURES = [SUCCESS, EXACT_LABEL, VECTOR_EFFECT]
SERIES_FILES = series_schema("python -m maze.series")
_SEED = 0  # of the bootstrap over levels


def read_levels(folders: Sequence[Path]) -> list[pd.DataFrame]:
    """Read the levels on which agents are compared: those with the cheese outside the region of
    ``maze.behaviour --region``.

    Returns:
        The rows of each agent's table of episodes, in the same order of levels.

    Raises:
        UserError: if a study is missing or damaged, or the agents played different levels.
    """
    tables = []
    for folder in folders:
        table = ResultStore(folder / "behaviour", BEHAVIOUR_FILES).read("episodes")
        tables.append(table[~table["cheese_in_region"]].sort_values("seed", ignore_index=True))
        if not tables[-1]["seed"].equals(tables[0]["seed"]):
            raise UserError(f"{folders[0]} and {folder} hold episodes of different levels, or "
                            "their studies were run with different regions (--region)")
    return tables


def series_table(numbers: Sequence[float], folders: Sequence[Path],
                 levels: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Compute the measures of each agent from its studies, and their rank correlations with cheese
    region or training steps.

    Args:
        numbers: cheese region or training steps of each agent.
        folders: folder of studies of each agent.
        levels: tables of episodes from :func:`read_levels`.

    Returns:
        The table ``series.csv``. A measure that an agent's studies do not have is left out.
    """
    rows: list[tuple] = []
    for number, folder, table in zip(numbers, folders, levels, strict=True):
        exact = table[EXACT_CHEESE].dropna()
        rows.append((number, folder.name, SUCCESS, *share(table[GOT].sum(), len(table)),
                     len(table)))
        if len(exact):
            rows.append((number, folder.name, EXACT_LABEL, *mean_interval(exact, _SEED),
                         len(exact)))
        store = ResultStore(folder / "steering", STEERING_FILES)
        if store.has("effects"):
            effects = store.read("effects")
            own = effects[(effects["label"] == "own -1") & (effects["outcome"] == "p_cheese")]
            rows += [(number, folder.name, VECTOR_EFFECT, row.effect, row.low_95, row.high_95,
                      len(store.settings("levels")["levels"])) for row in own.itertuples()]
    return with_correlations(series_of(rows))


def read_findings(path: Path) -> list[Finding]:
    """Return the findings of a folder for row 3 of the table of claims, [] for a series by steps.

    The claim is not judged, because agents with different regions may also differ in overall
    performance.

    Raises:
        UserError: if a file of the folder is missing or damaged.
    """
    store = ResultStore(path, SERIES_FILES)
    if store.settings("by")["by"] != REGION:
        return []
    table = store.read("series")
    agents = table[~is_correlation(table) & (table["measure"] != VECTOR_EFFECT)]
    return [*correlation_findings(table, "R", row=3), *(
        Finding("forks", f"{row.measure}, R = {row.number:.0f}", row.value, row.low_95,
                row.high_95, row.num_levels, row=3, shown=True)
        for row in agents.sort_values("number", kind="stable").itertuples())]
