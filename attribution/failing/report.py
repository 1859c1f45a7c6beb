"""Report and figure of failures by cause."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from attribution.failing.counting import ANY, PER
from attribution.failing.files import ORIGINAL
from common.palette import BLUE, DPI, VERMILION
from common.tables import markdown_escaped, markdown_table
from stats.effects import MIN_CONTROLS_TO_CLAIM
from stats.significance import LEVEL

_CONTROLS = "#DDDDDD"


def report(rates: pd.DataFrame, effects: pd.DataFrame, blind: pd.DataFrame, films: Sequence[str],
           failures: str, what: str, controls: str) -> str:
    """The report as Markdown.

    Args:
        rates, effects, blind: as in ``causes.csv``, ``effects.csv`` and ``blindness.csv``.
        films: their paths beside the report.
        failures: likewise of the picture of the original's failures; empty without any.
        what: a sentence on what was played.
        controls: a sentence on the controls; empty without any.
    """
    causes = list(dict.fromkeys(rates["cause"]))
    shown, drawn = rates[~rates["control"]], rates[rates["control"]]
    lines = [
        "# Causes of failure", "", markdown_escaped(what), "",
        "Each failed episode has one cause: the hazard without which its last step, repeated in a "
        "copy of the real game, does not end it; *multiple* if only all hazards together are, "
        "*timeout* at the time limit, *other* if none is.", "",
        "## Failures by cause, % of levels (95 %, Wilson)", "",
        "Bold: claimed as different from the original.", ""]
    claimed = set(effects.loc[effects["claimed"], ["arm", "outcome"]].itertuples(
        index=False, name=None))
    rows = []
    for label, arm, part in _by_arm(shown):
        rows.append((label, *(_bold(_rate(row), (arm, row.cause) in claimed)
                              for row in part.itertuples())))
    for pattern, part in drawn.groupby("pattern", sort=False):
        found = part.groupby("cause")["rate"].agg(["min", "max"])
        rows.append((f"{part['arm'].nunique()} random edits like {pattern}, lowest to highest",
                     *(f"{100 * found.loc[cause, 'min']:.2f} to {100 * found.loc[cause, 'max']:.2f}"
                       for cause in causes)))
    lines += markdown_table(("arm", *causes), rows)
    lines += _differences(effects, controls)
    hazards = shown.dropna(subset="steps_in_view")
    if len(hazards):
        lines += [f"## Failures per {PER:,} steps with that hazard in view (95 %, bootstrap)", "",
                  "An agent that dies early meets fewer hazards.", ""]
        lines += markdown_table(("arm", *dict.fromkeys(hazards["cause"])), [
            (label, *(_per_steps(row) for row in part.itertuples()))
            for label, _, part in _by_arm(hazards)])
    if len(blind):
        lines += ["## Blindness", "",
                  "(edited - original) / (invisible - original), of the rate of failures by the "
                  "hazard that is invisible: 1 is an agent to which the edit does what taking the "
                  "hazard out of all frames does.", ""]
        lines += markdown_table(("agent", "hazard", "blindness (95 %, bootstrap)"), [
            (markdown_escaped(row.label), row.hazard,
             "not defined" if math.isnan(row.blindness) else
             f"{row.blindness:.2f} ({row.low_95:.2f} to {row.high_95:.2f})")
            for row in blind.itertuples()])
    if failures:
        lines += ["## The original's failures", "",
                  "The first by each cause, in their last frames. V: value; the mark is the action "
                  "that was taken, the last of which ended the episode.", "",
                  f"![The original's failures]({failures})", ""]
    if films:
        lines += ["## Levels that only one arm fails", "",
                  "Both arms, side by side; one that is over stays, darker.", "",
                  *(f"- [{film}]({film})" for film in films), ""]
    return "\n".join(lines)


def _differences(effects: pd.DataFrame, controls: str) -> list[str]:
    """The section on paired differences."""
    shown = effects[~effects["control"]]
    if not len(shown):
        return []
    lines = [
        "## Differences from the original on the same levels", "",
        "Points of % (95 % bootstrap over levels); p: McNemar's exact test; p (Holm): corrected "
        "over edits and causes; p (controls): (1 + controls with a difference as large) / (1 + "
        f"controls). **Claimed**: the interval leaves 0 out and both p (Holm) and p (controls) "
        f"are <= {LEVEL}. An invisible hazard is a planted effect, which the same rule must find; "
        "it is no edit, and corrected by itself.", ""]
    if controls:
        lines += [controls, ""]
    fewest = shown["num_controls"].min()
    if math.isnan(fewest):
        lines += ["Nothing is claimed of arms without controls: agents whose weights differ have "
                  "none.", ""]
    elif fewest < MIN_CONTROLS_TO_CLAIM:
        lines += [f"Nothing can be claimed with fewer than {MIN_CONTROLS_TO_CLAIM} controls.", ""]
    lines += markdown_table(
        ("arm", "cause", "original", "altered", "difference", "p", "p (Holm)",
         "controls' differences", "p (controls)"), [
            (markdown_escaped(row.label), row.outcome, _percent(row.unaltered),
             _percent(row.altered),
             _bold(f"{100 * row.effect:+.2f} ({100 * row.low_95:.2f} to {100 * row.high_95:.2f})",
                   row.claimed), f"{row.p:.2g}", _or_none(row.p_holm, "{:.2g}"),
             "none" if math.isnan(row.control_low) else
             f"{100 * row.control_low:+.2f} to {100 * row.control_high:+.2f}",
             _or_none(row.p_control, "{:.2g}")) for row in shown.itertuples()])
    control = effects[effects["control"]]
    if len(control):
        lines += [f"The same rule claims {int(control['claimed'].sum())} of {len(control)} "
                  "differences of the controls, each compared with the others.", ""]
    return lines


def plot(path: Path, rates: pd.DataFrame, title: str) -> None:
    """A panel for each cause: rates of the arms with their intervals, above the controls' range.

    Args:
        rates: as in ``causes.csv``.
    """
    shown = rates[~rates["control"]]
    causes = list(dict.fromkeys(rates["cause"]))
    labels = list(dict.fromkeys(shown["label"]))
    columns = min(len(causes), 4)
    height = -(-len(causes) // columns)
    figure = Figure(figsize=(3.3 * columns + 1.5, height * (1.2 + 0.25 * len(labels)) + 0.6),
                    layout="constrained")
    panels = figure.subplots(height, columns, squeeze=False)
    for axes, cause in zip(panels.flat, causes):
        part = shown[shown["cause"] == cause]
        drawn = rates[rates["control"] & (rates["cause"] == cause)].groupby("pattern")["rate"]
        spread = drawn.agg(["min", "max"])
        for place, row in enumerate(part.itertuples()):
            if row.pattern in spread.index:
                low, high = 100 * spread.loc[row.pattern]
                axes.barh(place, high - low, left=low, height=0.9, color=_CONTROLS)
            colour = BLUE if row.arm == ORIGINAL else VERMILION
            axes.plot([100 * row.low_95, 100 * row.high_95], [place, place], color=colour)
            axes.plot(100 * row.rate, place, "o", color=colour, markersize=5)
        axes.axvline(100 * part["rate"].iloc[0], color=BLUE, linewidth=0.6, linestyle=":")
        first = axes in panels[:, 0]
        axes.set_yticks(np.arange(len(labels)), labels if first else [""] * len(labels))
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.set_title("any cause" if cause == ANY else cause, fontsize=10)
        axes.set_xlabel("failed levels (%)", fontsize=9)
        axes.grid(axis="x", alpha=0.3)
    for axes in panels.flat[len(causes):]:
        axes.axis("off")
    grey = "; grey: range of the random edits" if rates["control"].any() else ""
    figure.suptitle(f"{title}\nbars: 95 % (Wilson){grey}", fontsize=11)
    figure.savefig(path, dpi=DPI)


def _by_arm(rates: pd.DataFrame) -> list[tuple[str, str, pd.DataFrame]]:
    return [(markdown_escaped(part["label"].iloc[0]), arm, part)
            for arm, part in rates.groupby("arm", sort=False)]


def _rate(row) -> str:
    return f"{_percent(row.rate)} ({100 * row.low_95:.2f} to {100 * row.high_95:.2f})"


def _percent(rate: float) -> str:
    return f"{100 * rate:.2f}"


def _per_steps(row) -> str:
    if not row.steps_in_view:
        return "never in view"
    return (f"{row.per_1000:.2f} ({row.per_1000_low_95:.2f} to {row.per_1000_high_95:.2f}), "
            f"{int(row.steps_in_view)} steps")


def _or_none(value: float, form: str) -> str:
    return "none" if math.isnan(value) else form.format(value)


def _bold(text: str, bold: bool) -> str:
    return f"**{text}**" if bold else text
