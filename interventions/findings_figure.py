"""Figure of the tested rows of a table of findings: each agent's effect with its interval."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from common.palette import BLUE, DPI, VERMILION

COLUMNS = 4
TITLE_WIDTH = 34  # characters of a line


def plot_findings(path: Path, table: pd.DataFrame, letter: str) -> None:
    """A panel a row of the table in which an agent has a primary number.

    Args:
        table: of ``findings_table``, with at least one primary number.
        letter: before the numbers of the rows.
    """
    primary = table[table["primary"].astype(bool)]
    agents = list(dict.fromkeys(table["agent"]))
    rows = sorted(primary["row"].unique())
    columns = min(COLUMNS, len(rows))
    lines = -(-len(rows) // columns)
    figure = Figure(figsize=(2.9 * columns + 1.2, lines * (1.2 + 0.26 * len(agents)) + 0.6),
                    layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for axes, row in zip(panels.flat, rows):
        _plot_row(axes, primary[primary["row"] == row], agents, f"{letter}{row}")
    panels[0, 0].set_ylim(len(agents) - 0.5, -0.5)
    for axes in panels.flat[len(rows):]:
        axes.axis("off")
    figure.legend(handles=[_mark("claimed", True), _mark("not claimed (bars: 95 %)", False)],
                  loc="outside lower center", ncols=2, fontsize=9)
    figure.savefig(path, dpi=DPI)


def _plot_row(axes: Axes, part: pd.DataFrame, agents: list[str], number: str) -> None:
    axes.axvline(0, color="black", linewidth=0.8)
    for each in part.itertuples():
        place = agents.index(each.agent)
        axes.plot([each.low_95, each.high_95], [place, place], linewidth=1.4,
                  color=_style(each.claimed)["color"])
        axes.plot(each.value, place, markersize=5, **_style(each.claimed))
    axes.set_yticks(np.arange(len(agents)), agents, fontsize=9)
    measure = in_common(list(dict.fromkeys(part["measure"])))
    axes.set_title(textwrap.fill(f"{number}: {measure}", TITLE_WIDTH), fontsize=9)
    axes.locator_params(axis="x", nbins=4)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", alpha=0.3)


def in_common(texts: list[str]) -> str:
    """Texts in one: words that are not the same in all, such as numbers of channels, are dots."""
    return " ".join(words[0] if len(set(words)) == 1 else "…"
                    for words in zip(*(text.split() for text in texts)))


def _style(claimed: bool) -> dict:
    return {"color": VERMILION, "marker": "D"} if claimed else {
        "color": BLUE, "marker": "o", "markerfacecolor": "white"}


def _mark(label: str, claimed: bool) -> Line2D:
    return Line2D([], [], linewidth=1.4, markersize=6, label=label, **_style(claimed))
