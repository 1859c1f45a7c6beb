"""Agents that differ in one number: the side R of the cheese region of their training, or their
training steps.

Every agent has a folder with a ``behaviour`` study on the same levels, and possibly a ``steering``
study. A result folder contains::

    settings.json      numbers and folders of the agents
    series.csv         a row per agent and measure, and the rank correlation, see series_table
    report.md          the same as a table
    series.png         the measures against the number

Claim 3 of the table of claims is computed from such a folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.stats import rankdata

from common.errors import UserError
from common.palette import COLOURS, DPI
from common.results import Entry, File, ResultStore, Schema, Table, Text
from common.tables import markdown_table
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
from stats.report import format_interval
from stats.significance import share

REGION, STEPS = "region", "steps"
AXES = {REGION: "R (side of the cheese region in training)", STEPS: "training steps"}
VECTOR_EFFECT = "change of P(cheese), cheese vector subtracted"
TREND = "rank correlation"
_ENDS = ["value", "low_95", "high_95"]
_SEED = 0  # of the bootstrap over levels
_COLUMNS = {"number": float, "agent": str, "measure": str, "value": float, "low_95": float,
            "high_95": float, "num_levels": int}
SERIES_FILES = Schema(
    "series of agents", "python -m maze.series",
    results={"series": Entry("series.csv", Table(_COLUMNS)), "report": Entry("report.md", Text()),
             "figure": Entry("series.png", File())})


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
    """Measure each agent, and compute the rank correlation with the number.

    Args:
        numbers: the number of each agent.
        folders: folder of studies of each agent.
        levels: tables of episodes from :func:`read_levels`.

    Returns:
        The table ``series.csv``. A measure that an agent's studies do not have is left out. The
        last row is TREND, see :func:`trend`; its ``number`` is NaN.
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
    rows.append((np.nan, "all", TREND, *trend(numbers, levels), len(levels[0])))
    return pd.DataFrame(rows, columns=list(_COLUMNS))


def trend(numbers: Sequence[float], levels: Sequence[pd.DataFrame]) -> tuple[float, float, float]:
    """Compute the rank correlation, over agents, of the number and the share of episodes that reach
    the cheese.

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


def report(table: pd.DataFrame, axis: str) -> str:
    """Return the report as Markdown.

    Args:
        table: table from :func:`series_table`.
        axis: name of the number, from AXES.
    """
    agents, [correlation] = table[table["measure"] != TREND], _of(table, TREND).itertuples()
    cells = agents.assign(text=[format_interval(row.value, row.low_95, row.high_95, ".3f")
                                for row in agents.itertuples()])
    wide = cells.pivot(index=["number", "agent"], columns="measure", values="text").fillna("")
    wide = wide[agents["measure"].unique()]
    return "\n".join([
        f"# Agents by {axis}", "",
        f"All agents played the same {correlation.num_levels} levels, in which the cheese lies "
        "outside the region of maze.behaviour. Shares have Wilson's 95 % interval; means have a "
        "bootstrap interval over levels.", "",
        *markdown_table((axis, "agent", *wide), [
            (f"{number:.15g}", agent, *row) for (number, agent), row in zip(wide.index,
                                                                            wide.to_numpy())]),
        f"Rank correlation of the first column and \"{SUCCESS}\" over {len(wide)} agents: "
        f"{format_interval(correlation.value, correlation.low_95, correlation.high_95, '.2f')}; "
        "the interval is a bootstrap over levels, and does not cover the variation between "
        "training seeds.", ""])


def _of(table: pd.DataFrame, *measures: str) -> pd.DataFrame:
    return table[table["measure"].isin(measures)]


def draw_series(path: Path, table: pd.DataFrame, axis: str) -> None:
    """Draw each measure, with its intervals, against the number of the agent.

    Args:
        path: figure to write.
        table: table from :func:`series_table`.
        axis: name of the number, from AXES; steps have a logarithmic scale.
    """
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    agents = table[table["measure"] != TREND]
    for color, (measure, rows) in zip(COLOURS, agents.groupby("measure", sort=False)):
        rows = rows.sort_values("number")
        value, low, high = rows[_ENDS].to_numpy().T
        axes.errorbar(rows["number"].to_numpy(), value, np.stack([value - low, high - value]),
                      color=color, marker="o", capsize=3, label=measure)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log" if axis == AXES[STEPS] else "linear")
    axes.set_xlabel(axis)
    figure.legend(loc="outside upper center", fontsize=9)
    figure.savefig(path, dpi=DPI)


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
    rows = _of(table, TREND, SUCCESS, EXACT_LABEL).sort_values(
        "number", na_position="first", kind="stable")
    num_agents = table["number"].notna().groupby(table["agent"]).any().sum()
    return [Finding("agents" if row.measure == TREND else "forks",
                    f"{TREND} of R and the share of {num_agents} agents" if row.measure == TREND
                    else f"{row.measure}, R = {row.number:.0f}", row.value, row.low_95, row.high_95,
                    row.num_levels, row=3, shown=True) for row in rows.itertuples()]
