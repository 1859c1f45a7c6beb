"""Series of maze agents that differ in the cheese region of their training, or in training steps.

Each agent has a folder with a ``behaviour`` study on the same levels, and possibly a ``steering``
study. ``stats.series`` describes the files. Claim 3 of the table of claims is computed from such a
series.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import rankdata

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
from stats.bootstrap import ClusterBootstrap
from stats.claims import Finding
from stats.series import ALL, series_of, series_schema
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

    Args:
        folders: folder of studies of each agent.

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
    """Measure each agent, and correlate its success with its cheese region or training steps.

    Args:
        numbers: cheese region or training steps of each agent.
        folders: folder of studies of each agent.
        levels: tables of episodes from :func:`read_levels`.

    Returns:
        The table ``series.csv``. A measure that an agent's studies do not have is left out. The
        last row is the rank correlation of ``numbers`` and SUCCESS, see :func:`trend`.
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
                      len(store.settings()["levels"])) for row in own.itertuples()]
    rows.append((np.nan, ALL, SUCCESS, *trend(numbers, levels), len(levels[0])))
    return series_of(rows)


def trend(numbers: Sequence[float], levels: Sequence[pd.DataFrame]) -> tuple[float, float, float]:
    """Compute the rank correlation, over agents, of ``numbers`` and the share of episodes that
    reach the cheese.

    The interval is a bootstrap over levels, so it does not cover the variation between training
    seeds.

    Args:
        numbers, levels: see :func:`series_table`.

    Returns:
        The correlation and the ends of its 95 % interval.
    """
    got = np.stack([table[GOT].to_numpy(np.float64) for table in levels])  # (agents, levels)
    ranks = rankdata(numbers)

    def correlation(counts: np.ndarray) -> np.ndarray:  # counts of levels (R, levels)
        reached = rankdata(counts @ got.T, axis=1)  # (R, agents)
        a, b = ranks - ranks.mean(), reached - reached.mean(axis=1, keepdims=True)
        with np.errstate(invalid="ignore"):
            return b @ a / np.sqrt((a**2).sum() * (b**2).sum(axis=1))

    bootstrap = ClusterBootstrap(np.arange(got.shape[1]), _SEED)
    low, high = bootstrap.interval_of(correlation)
    return float(correlation(np.ones((1, got.shape[1])))[0]), float(low), float(high)


def read_findings(path: Path) -> list[Finding]:
    """Return the findings of a folder for row 3 of the table of claims.

    The claim is not judged, because the interval does not cover the variation between seeds.

    Raises:
        UserError: if a file of the folder is missing or damaged.
    """
    store = ResultStore(path, SERIES_FILES)
    if store.settings()["by"] != REGION:
        return []
    table = store.read("series")
    rows = table[table["measure"] != VECTOR_EFFECT].sort_values(
        "number", na_position="first", kind="stable")
    num_agents = len(table[table["measure"] == SUCCESS]) - 1
    return [Finding("agents" if row.agent == ALL else "forks",
                    f"rank correlation of R and the share of {num_agents} agents"
                    if row.agent == ALL else f"{row.measure}, R = {row.number:.0f}", row.value,
                    row.low_95, row.high_95, row.num_levels, row=3, shown=True)
            for row in rows.itertuples()]
