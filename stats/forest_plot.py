"""Figure of the effects of altered directions of the hidden state on the agent's behaviour."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from common.palette import BLUE, DPI, VERMILION
from stats.effects import Outcome
from stats.significance import LEVEL

COLUMNS = 6
FEWEST_RUNS = 20  # unaltered ones, of a step in the panel of action divergence
CLAIMED, DIRECTION, CONTROL, CONTROL_RANGE = VERMILION, BLUE, "#888888", "#DDDDDD"


def plot_effects(path: Path, table: pd.DataFrame, over_time: pd.DataFrame | None,
                 outcomes: Sequence[Outcome], title: str, controls: str) -> None:
    """A panel for each outcome, one for the size of the alterations, one for divergence over time.

    Args:
        table: from ``compare``.
        over_time: from ``divergence_over_time``; None for what has no steps.
        title: what was run and how often.
        controls: many of them, as ``Wording`` has it.
    """
    directions = table[~table["control"]]
    labels = list(dict.fromkeys(directions["label"]))
    panels_more = 1 if over_time is None else 2
    rows = -(-(len(outcomes) + panels_more) // COLUMNS)
    figure = Figure(figsize=(3.5 * COLUMNS + 1, rows * (1.6 + 0.2 * len(labels)) + 1.6),
                    layout="constrained")
    panels = figure.subplots(rows, COLUMNS, squeeze=False)
    for axes, outcome in zip(panels.flat, outcomes):
        part = directions[directions["outcome"] == outcome.name]
        _plot_outcome(axes, part)
        axes.locator_params(axis="x", nbins=5)  # more overlap where numbers are long
        unaltered = part["unaltered"].iloc[0]
        axes.set_title(outcome.label, fontsize=10)
        axes.set_xlabel(f"change (unaltered: {unaltered:.3g})", fontsize=9)
    moved, *unused = panels.flat[len(outcomes):]
    course = None if over_time is None else unused.pop(0)
    _plot_moved(moved, table)
    for row in panels:
        for axes in row:
            if axes is not course and axes not in unused:
                _name_rows(axes, labels, first=axes is row[0])
    if over_time is not None:
        _plot_course(course, over_time)
    for axes in unused:
        axes.axis("off")
    figure.legend(handles=_key(controls, "" if over_time is None else " (grey lines over time)"),
                  loc="outside lower center", ncols=4, fontsize=10)
    figure.suptitle(title, fontsize=13)
    figure.savefig(path, dpi=DPI)


def _plot_outcome(axes: Axes, part: pd.DataFrame) -> None:
    places = np.arange(len(part))
    axes.axvline(0, color="black", linewidth=0.8)
    axes.barh(places, part["control_high"] - part["control_low"], left=part["control_low"],
              height=1, color=CONTROL_RANGE)
    for place, row in zip(places, part.itertuples()):
        colour = CLAIMED if row.claimed else DIRECTION
        beats_zero = row.p_holm <= LEVEL
        axes.plot([row.low_95, row.high_95], [place, place], color=colour, linewidth=1.4)
        axes.plot(row.effect, place, marker="D" if row.claimed else "o", markersize=5,
                  color=colour, markerfacecolor=colour if beats_zero else "white")


def _plot_moved(axes: Axes, table: pd.DataFrame) -> None:
    """Distance by which each alteration moves a state, and that of its controls."""
    arms = table.drop_duplicates("arm")
    controls = arms[arms["control"]].groupby("pattern")["moved"]
    low, high = controls.min(), controls.max()
    for place, row in enumerate(arms[~arms["control"]].itertuples()):
        left, right = low[row.pattern], high[row.pattern]
        axes.barh(place, right - left, left=left, height=1, color=CONTROL_RANGE)
        axes.plot(row.moved, place, "o", color=DIRECTION, markersize=5)
    axes.set_xlim(left=0)
    axes.set_title("size of the alteration", fontsize=10)
    axes.set_xlabel("moved in a step (standard deviations)", fontsize=9)


def _plot_course(axes: Axes, over_time: pd.DataFrame) -> None:
    going = over_time["unaltered_going"]
    shown = over_time[going >= min(FEWEST_RUNS, going.max())]
    for control, colour, width in ((True, CONTROL, 0.7), (False, DIRECTION, 0.9)):
        for _, arm in shown[shown["control"] == control].groupby("arm"):
            axes.plot(arm["step"], arm["share"], color=colour, linewidth=width, alpha=0.7)
    axes.set_ylim(0, 1.02)
    axes.set_xlim(left=0)
    axes.set_title("divergence of actions over time", fontsize=10)
    axes.set_xlabel(f"step, while {FEWEST_RUNS} unaltered runs go on", fontsize=9)
    axes.set_ylabel("share of pairs with another action", fontsize=9)
    axes.grid(alpha=0.3)


def _name_rows(axes: Axes, labels: Sequence[str], first: bool) -> None:
    axes.set_yticks(np.arange(len(labels)), labels if first else [""] * len(labels), fontsize=9)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
    axes.tick_params(axis="x", labelsize=8)


def _key(controls: str, over_time: str) -> list[Line2D | Patch]:
    def mark(label: str, **style) -> Line2D:
        return Line2D([], [], linewidth=1.4, markersize=6, label=label, **style)
    return [
        mark("claimed: beats 0 after Holm's correction, and in absolute size also the controls",
             color=CLAIMED, marker="D"),
        mark("beats 0 after the correction, but not the controls", color=DIRECTION, marker="o"),
        mark("does not beat 0 after the correction (bars: 95 % intervals)", color=DIRECTION,
             marker="o", markerfacecolor="white"),
        Patch(color=CONTROL_RANGE, label=f"range of the {controls}{over_time}")]
