"""Forest plots of effects with 95 % intervals and the ranges of their controls.

``forest_plot`` draws one panel, ``plot_effects`` the complete figure of a study.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from common.palette import BLUE, DPI, VERMILION
from common.tables import format_count, with_minus
from stats.effects import Outcome, claims_summary
from stats.report import Wording
from stats.significance import LEVEL

COLUMNS = 3
FEW_CONDITIONS, FIRST_OUTCOMES = 3, 6  # of fewer conditions, only so many outcomes are drawn
MIN_RUNS = 20  # unaltered runs required for a step to be shown in the divergence panel
CLAIMED, EFFECT, CONTROL, CONTROL_RANGE = VERMILION, BLUE, "#888888", "#DDDDDD"


def forest_plot(axes: Axes, rows: pd.DataFrame, labels: Sequence[str],
                styles: Sequence[Mapping[str, Any]] | None = None, value: str = "effect") -> None:
    """Draw one row per effect, from top to bottom: effect, interval, and range of its controls.

    Args:
        rows: table of effects with the column named by ``value``, ``low_95`` and ``high_95``, and,
            if there are controls, ``control_low`` and ``control_high`` (NaN for a row without
            controls). If ``styles`` is None, also ``claimed`` and ``p_holm``.
        labels: label of each row; empty strings for no labels.
        styles: colour, marker and other ``Line2D`` properties of each effect; the interval has the
            same colour. By default from ``effect_style``.
        value: name of the column of effects.
    """
    places = np.arange(len(rows))
    if "control_low" in rows:
        axes.barh(places, rows["control_high"] - rows["control_low"], left=rows["control_low"],
                  height=1, color=CONTROL_RANGE)
    styles = [effect_style(row.claimed, row.p_holm) for row in rows.itertuples()
              ] if styles is None else styles
    for place, (style, row) in enumerate(zip(styles, rows.to_dict("records"))):
        axes.plot([row["low_95"], row["high_95"]], [place] * 2, color=style["color"],
                  linewidth=1.4)
        axes.plot(row[value], place, **{"marker": "o", "markersize": 5, **style})
    name_rows(axes, labels)


def effect_style(claimed: bool, p_holm: float) -> dict[str, Any]:
    """Return the marker style of an effect: diamond if claimed, otherwise circle; filled if
    p (Holm) <= LEVEL."""
    color = CLAIMED if claimed else EFFECT
    return {"color": color, "marker": "D" if claimed else "o",
            "markerfacecolor": color if p_holm <= LEVEL else "white"}


def name_rows(axes: Axes, labels: Sequence[str]) -> None:
    """Label the rows of a panel, from top to bottom."""
    axes.set_yticks(np.arange(len(labels)), [with_minus(label) for label in labels], fontsize=9)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
    axes.tick_params(axis="x", labelsize=8)


def plot_effects(path: Path, table: pd.DataFrame, outcomes: Sequence[Outcome], wording: Wording,
                 description: str, over_time: pd.DataFrame | None = None) -> None:
    """Plot the effects, with one panel per outcome that any condition changes; of few conditions,
    only the first outcomes.

    Further panels show the sizes of the changes and the divergence of actions over time, if given.

    Args:
        table: table from ``stats.effects.compare_conditions``.
        description: description of the runs, the second line of the title; the first one is the
            answer.
        over_time: table with the columns ``condition`` (name of the condition), ``control``,
            ``step``, ``unaltered_going`` (number of unaltered runs that reach the step) and
            ``share`` (share of pairs of runs with different actions); None if there is no panel
            over time.
    """
    directions = table[~table["control"]]
    labels = list(dict.fromkeys(directions["label"]))
    changed = set(table.loc[table["effect"] != 0, "outcome"])
    unchanged = [outcome.label for outcome in outcomes if outcome.name not in changed]
    outcomes = [outcome for outcome in outcomes if outcome.name in changed]
    left_out = outcomes[FIRST_OUTCOMES:] if len(labels) < FEW_CONDITIONS else []
    outcomes = outcomes[:len(outcomes) - len(left_out)]
    extra_panels = ("moved" in table) + (over_time is not None)
    num_panels = max(len(outcomes) + extra_panels, 1)
    columns = min(num_panels, COLUMNS)
    rows = -(-num_panels // columns)
    figure = Figure(figsize=(3.5 * max(columns, 2) + 1, rows * (1.5 + 0.25 * len(labels)) + 2.4),
                    layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    row_labels = [labels if place % columns == 0 else [""] * len(labels)
                  for place in range(panels.size)]
    for axes, outcome, names in zip(panels.flat, outcomes, row_labels):
        part = directions[directions["outcome"] == outcome.name]
        axes.axvline(0, color="black", linewidth=0.8)
        forest_plot(axes, part, names)
        axes.locator_params(axis="x", nbins=5)  # more labels would overlap if numbers are long
        unaltered = part["unaltered"].iloc[0]
        axes.set_title(outcome.label, fontsize=10)
        axes.set_xlabel(f"change (unaltered: {unaltered:.3g})", fontsize=9)
    unused = list(panels.flat[len(outcomes):])
    if "moved" in table:
        _plot_moved(unused.pop(0), table, row_labels[len(outcomes)], wording.axis)
    if over_time is not None:
        _plot_divergence(unused.pop(0), over_time)
    for axes in unused:
        axes.axis("off")
    figure.legend(handles=_key(wording.controls,
                               "" if over_time is None else " (grey lines over time)"),
                  loc="outside lower center", ncols=1, fontsize=10)
    title = [f"{wording.title}: {claims_summary(table)}", description]
    if unchanged:
        title.append(f"No run changes: {', '.join(unchanged)}.")
    if left_out:
        title.append(f"Only in the table: {format_count(len(left_out), 'further outcomes')}.")
    width = int(10 * figure.get_figwidth())
    figure.suptitle("\n".join(textwrap.fill(line, width) for line in title), fontsize=11)
    figure.savefig(path, dpi=DPI)


def _plot_moved(axes: Axes, table: pd.DataFrame, labels: Sequence[str], label: str) -> None:
    """Draw the size of each intervention's change (``moved``), and the range of its controls."""
    conditions = table.drop_duplicates("condition")
    controls = conditions[conditions["control"]].groupby("pattern")["moved"]
    low, high = controls.min(), controls.max()
    for place, row in enumerate(conditions[~conditions["control"]].itertuples()):
        left, right = low[row.pattern], high[row.pattern]
        axes.barh(place, right - left, left=left, height=1, color=CONTROL_RANGE)
        axes.plot(row.moved, place, "o", color=EFFECT, markersize=5)
    axes.set_xlim(0, 1.05 * conditions["moved"].max() or 1)
    axes.set_title("size of the alteration", fontsize=10)
    axes.set_xlabel(label, fontsize=9)
    name_rows(axes, labels)


def _plot_divergence(axes: Axes, over_time: pd.DataFrame) -> None:
    """Draw the share of pairs of runs with different actions against the step."""
    going = over_time["unaltered_going"]
    least = min(MIN_RUNS, going.max())
    shown = over_time[going >= least]
    for control, colour, width in ((True, CONTROL, 0.7), (False, EFFECT, 0.9)):
        for _, part in shown[shown["control"] == control].groupby("condition"):
            axes.plot(part["step"], part["share"], color=colour, linewidth=width, alpha=0.7)
    axes.set(xlim=(0, None), ylim=(0, 1.02))
    axes.set_title("divergence of actions over time", fontsize=10)
    axes.set_xlabel(f"step (if at least {least} unaltered runs reach it)", fontsize=9)
    axes.set_ylabel("share with another action", fontsize=9)
    axes.grid(alpha=0.3)


def _key(controls: str, over_time: str) -> list[Line2D | Patch]:
    """Return the entries of the legend.

    Args:
        over_time: note on the divergence panel's grey lines; "" without this panel.
    """
    return [
        legend_mark("claimed: differs from 0 after Holm's correction, and is larger than the "
                    "controls' effects", color=CLAIMED, marker="D"),
        legend_mark("differs from 0 after the correction; not claimed, because controls have "
                    "such effects or are too few", color=EFFECT, marker="o"),
        legend_mark("does not differ from 0 after the correction (bars: 95 % intervals)",
                    color=EFFECT, marker="o", markerfacecolor="white"),
        Patch(color=CONTROL_RANGE, label=f"range of the {controls}{over_time}")]


def legend_mark(label: str, **style: Any) -> Line2D:
    """Return an entry of a legend: an interval with its marker."""
    return Line2D([], [], linewidth=1.4, markersize=6, label=label, **style)
