"""Rows 1 to 5 of the table of findings on maze agents, from folders of behaviour.

Row 3, agents of other regions, is rows 1 and 2 of each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from common.results import ResultStore
from maze.level.grid import FORK, KINDS
from maze.studies.behaviour_files import BEHAVIOUR_FILES
from maze.studies.episodes import CHEESE, NEITHER, REGION
from maze.studies.prediction import SET, SINGLE
from stats.bootstrap import ClusterBootstrap
from stats.claims import Finding
from stats.significance import share

GOT, EXACT = "got_cheese", "exact_cheese"  # targets, and columns of the table of episodes
SUCCESS, EXACT_LABEL, PLAYED_LABEL = "gets the cheese", "exact probability", "got the cheese"
FORKS_OUTSIDE = "forks, cheese outside the region"
TARGET_LABELS = {GOT: PLAYED_LABEL, EXACT: EXACT_LABEL}


def mean(values: pd.Series, seed: int) -> tuple[float, float, float]:
    """A mean over levels with its bootstrap 95 % interval, NaN for fewer than two."""
    numbers = values.to_numpy(np.float64)[None]
    low, high = ClusterBootstrap(np.arange(len(values)), seed).interval(numbers)
    return float(numbers.mean()), float(low[0]), float(high[0])


def groups_of(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Levels of the table of episodes by what they are: all, and as far as not all are, those by
    where the cheese is, by kind, and the forks with the cheese outside the region."""
    inside = table["cheese_in_region"]
    groups = {"cheese in the region": table[inside],
              "cheese outside the region": table[~inside],
              **{f"kind: {kind}": table[table["kind"] == kind] for kind in KINDS},
              FORKS_OUTSIDE: table[(table["kind"] == FORK) & ~inside]}
    return {"all levels": table, **{name: rows for name, rows in groups.items()
                                    if 0 < len(rows) < len(table)}}


def findings(path: Path) -> list[Finding]:
    """The rows that a folder fills.

    A run with the cheese confined fills row 1; one with the cheese anywhere row 2, and, with
    ``--regress``, rows 4 and 5. Scores of row 4 come best first.

    Raises:
        UserError: if a file of the folder is missing or damaged.
    """
    store = ResultStore(path, BEHAVIOUR_FILES)
    settings, table = store.settings(), store.read("episodes")
    regressions = store.read("regressions") if store.has("regressions") else None
    return of_tables(table, regressions, settings)


def of_tables(table: pd.DataFrame, regressions: pd.DataFrame | None,
              settings: dict) -> list[Finding]:
    """See :func:`findings`."""
    seed, region = int(settings.get("seed", 0)), int(settings.get("cheese_region", 0))
    found: list[Finding] = []

    def add(row: int, levels: str, rows: pd.DataFrame, measure: str,
            number: Callable[[pd.DataFrame], tuple[float, float, float]]) -> None:
        found.append(Finding(levels, measure, *number(rows), len(rows), row=row))

    if region:
        add(1, f"cheese in the last {region} rows and columns", table, SUCCESS, _success)
        return found
    chosen = {} if _filtered(settings) else {"cheese anywhere": table}
    forks = table[(table["kind"] == FORK) & ~table["cheese_in_region"]]
    if len(forks):
        chosen[FORKS_OUTSIDE] = forks
    for levels, rows in chosen.items():
        add(2, levels, rows, SUCCESS, _success)
        exact = rows[rows[EXACT].notna()]
        if len(exact):
            add(2, levels, exact, EXACT_LABEL, lambda some: mean(some[EXACT], seed))
        for name in (CHEESE, REGION, NEITHER) if rows is forks else ():
            add(2, levels, rows, f"first is {name}",
                lambda some, name=name: share((some["first"] == name).sum(), len(some)))
        deciding = rows[rows["p_cheese"].notna()]
        if len(deciding):
            add(2, levels, deciding, "P(cheese) at the decision square",
                lambda some: mean(some["p_cheese"], seed))
    if regressions is not None:
        found += _of_regressions(regressions, int((table["kind"] == FORK).sum()))
    return found


def _success(rows: pd.DataFrame) -> tuple[float, float, float]:
    return share(rows[GOT].sum(), len(rows))


def _filtered(settings: dict) -> bool:
    """Whether the levels are no sample of those that the game makes."""
    return bool(settings.get("levels")) or any(settings.get("filters", {}).values())


def _of_regressions(table: pd.DataFrame, num_levels: int) -> list[Finding]:
    """Rows 4 and 5."""
    scores, rows = [], []
    gain = table[table["quantity"].str.endswith("_gain")].set_index(
        ["target", "model", "features", "quantity"])
    for line in table.itertuples():
        of, p_holm = f"target: {TARGET_LABELS[line.target]}", np.nan
        if line.quantity in ("accuracy", "log_loss"):
            p_holm = gain.loc[(line.target, line.model, line.features,
                               f"{line.quantity}_gain"), "p_holm"]
        number = (line.value, line.low_95, line.high_95, num_levels, line.base, p_holm)
        if line.model == SINGLE and line.quantity in ("accuracy", "log_loss"):
            scores.append(Finding(of, f"{line.quantity} {line.features}", *number, row=4))
        elif line.model == SET and line.quantity in ("accuracy", "log_loss", "coefficient",
                                                     "intercept"):
            name = "" if line.feature == "-" else f" {line.feature}"
            rows.append(Finding(of, f"{line.features}: {line.quantity}{name}", *number, row=5))
    scores.sort(key=lambda one: (one.levels, one.measure.split()[0],
                                 one.value if one.measure.startswith("log_loss") else -one.value))
    return scores + rows
