"""Series of agents that differ in one number, such as the number of training levels.

A result folder contains::

    settings.json      folders of the agents' studies, and further settings
    series.csv         a row per agent and measure, and a row per measure with the rank correlation
                       over agents; num_levels: number of levels, frames, features or agents
    report.md          the values of series.csv as Markdown tables
    series.png         each measure plotted against the number in which the agents differ
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.stats import norm

from common.errors import UserError
from common.palette import COLOURS, DPI
from common.results import Entry, File, ResultStore, Schema, Table, Text
from common.tables import markdown_table, with_minus, write_table
from stats.association import rank_correlations
from stats.claims import Finding
from stats.report import format_interval

COLUMNS = {"number": float, "agent": str, "measure": str, "value": float, "low_95": float,
           "high_95": float, "num_levels": int}
ALL = "all agents"  # agent of a rank correlation, whose number is NaN
_MIN_AGENTS = 4  # for the interval of a rank correlation
_ENDS = ["value", "low_95", "high_95"]


def series_schema(script: str) -> Schema:
    """Return the schema of the result folder of a series, which the command ``script`` writes."""
    return Schema("series of agents", script, results={
        "series": Entry("series.csv", Table(COLUMNS)), "report": Entry("report.md", Text()),
        "figure": Entry("series.png", File())}, replaced=True, setting_types={"by": str})


def series_of(rows: Iterable[tuple]) -> pd.DataFrame:
    """Return the table ``series.csv`` with the given rows, whose values are in the order of
    COLUMNS."""
    return pd.DataFrame(list(rows), columns=list(COLUMNS))


def is_correlation(table: pd.DataFrame) -> pd.Series:
    """Return a mask of the rows of a series that are rank correlations, bool (rows,)."""
    return table["agent"] == ALL


def with_correlations(agents: pd.DataFrame) -> pd.DataFrame:
    """Append Spearman's rank correlation of the number and each measure, over agents.

    Intervals are those of Bonett and Wright (2000), "Sample size requirements for estimating
    Pearson, Kendall and Spearman correlations"; they cover the variation between agents, and are
    NaN for fewer than four agents. At a correlation of ±1, where this interval has no width, the
    inner end is that of the next smaller correlation (two neighbours swapped). There is no
    correlation if all numbers or all values are equal.

    Args:
        agents: rows of the agents, from :func:`series_of`.
    """
    rows: list[tuple] = []
    for measure, of_measure in agents.groupby("measure", sort=False):
        numbers, values = of_measure["number"], of_measure["value"]
        if numbers.nunique() > 1 and values.nunique() > 1:
            found = float(rank_correlations(numbers.to_numpy(), values.to_numpy()))
            rows.append((np.nan, ALL, measure, found, *_interval(found, len(values)), len(values)))
    return series_of([*agents.itertuples(index=False, name=None), *rows])


def _interval(correlation: float, num_agents: int) -> tuple[float, float]:
    if num_agents < _MIN_AGENTS:
        return np.nan, np.nan
    inner = correlation
    if np.isclose(abs(correlation), 1):
        inner = np.sign(correlation) * (1 - 12 / (num_agents * (num_agents**2 - 1)))
    half = norm.ppf(0.975) * np.sqrt((1 + inner**2 / 2) / (num_agents - 3))
    low, high = np.tanh(np.arctanh(inner) + half * np.array([-1, 1]))
    return min(float(low), correlation), max(float(high), correlation)


def correlation_findings(table: pd.DataFrame, number: str, **more: Any) -> list[Finding]:
    """Return the rank correlations of a series as findings of a table of claims.

    Args:
        table: table ``series.csv``.
        number: name of the number in which the agents differ.
        more: further attributes of the findings.
    """
    return [Finding("agents", f"rank correlation of {number} and {row.measure}, "
                    f"{row.num_levels} agents", row.value, row.low_95, row.high_95, row.num_levels,
                    shown=True, **more)
            for row in table[is_correlation(table)].itertuples()]


def write_series(store: ResultStore, settings: dict, table: pd.DataFrame, axis: str,
                 panels: Mapping[str, list[str]], notes: str, logarithmic: bool) -> None:
    """Write the folder of a series, and replace an earlier one.

    Args:
        table: table ``series.csv``.
        axis: name of the number in which the agents differ.
        panels: measures of each table of the report and of each panel of the figure, by title.
        logarithmic: whether the figure has a logarithmic x-axis.

    Raises:
        UserError: if two agents have the same name and number.
    """
    keys = ["number", "agent", "measure"]
    for number, agent, _ in table.loc[table.duplicated(keys), keys].itertuples(index=False):
        raise UserError(f"two folders of agents with the number {number:.15g} are named "
                        f"'{agent}'; rename one")
    with store.replace(settings) as folder:
        written = ResultStore(folder, store.schema)
        write_table(written.file_of("series"), table)
        _draw(written.file_of("figure"), table, axis, panels, logarithmic)
        written.file_of("report").write_text(_report(table, axis, panels, notes), encoding="utf-8")


def _report(table: pd.DataFrame, axis: str, panels: Mapping[str, list[str]], notes: str) -> str:
    """Return the report as Markdown; see :func:`write_series`."""
    lines = [f"# Agents by {axis}", "", notes, ""]
    text = table.assign(text=[format_interval(row.value, row.low_95, row.high_95, ".3f")
                              if np.isfinite(row.low_95) else f"{row.value:.3g}"
                              for row in table.itertuples()])
    agents, correlations = text[~is_correlation(table)], text[is_correlation(table)]
    cells = agents.pivot(index=["number", "agent"], columns="measure", values="text").fillna("")
    for title, measures in panels.items():
        wide = cells[[measure for measure in measures if measure in cells]]
        lines += [*([f"## {title.capitalize()}", ""] if title else []),
                  *markdown_table((axis, "agent", *wide), [
                      (f"{number:.15g}", agent, *row)
                      for (number, agent), row in zip(wide.index, wide.to_numpy())])]
    number = agents["agent"].nunique()
    return "\n".join([*lines, *markdown_table(
        ("measure", f"rank correlation with {axis}, {number} agents"),
        [(row.measure, row.text) for row in correlations.itertuples()])])


def _draw(path: Path, table: pd.DataFrame, axis: str, panels: Mapping[str, list[str]],
          logarithmic: bool) -> None:
    """Plot each measure, with intervals, against the number in which the agents differ.

    A line connects the means over agents with the same number. See :func:`write_series`.
    """
    agents = table[~is_correlation(table)]
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(1.2 + 4.4 * columns, 4.4 * lines), layout="constrained")
    all_axes = [*figure.subplots(lines, columns, squeeze=False).flat]
    for axes, (title, measures) in zip(all_axes, panels.items()):
        for color, measure in zip(itertools.cycle(COLOURS), measures):
            rows = agents[agents["measure"] == measure].sort_values("number")
            value, low, high = rows[_ENDS].to_numpy().T
            axes.errorbar(rows["number"].to_numpy(), value, np.stack([value - low, high - value]),
                          color=color, marker="o", linestyle="", capsize=3, label=measure)
            means = rows.groupby("number")["value"].mean()
            axes.plot(means.index.to_numpy(), means.to_numpy(), color=color)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_xscale("log" if logarithmic else "linear")
        axes.set(xlabel=axis, title=title)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    for axes in all_axes[len(panels):]:
        axes.axis("off")
    correlations = table[is_correlation(table)].dropna(subset=["value"])
    if len(correlations):
        top = correlations.loc[correlations["value"].abs().idxmax()]
        figure.suptitle(textwrap.fill(
            f"{top['measure']} has the strongest rank correlation with {axis}: " + with_minus(
                format_interval(top["value"], top["low_95"], top["high_95"], "+.2f")),
            int(11 * figure.get_figwidth())), fontsize=11)
    figure.savefig(path, dpi=DPI)
