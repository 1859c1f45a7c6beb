"""All checks of an agent's attributions, and the files of analysis/attribution/checks::

    settings.json                       settings
    raw/<check>/<layer>/<output>.npz    per-frame results (``Check.arrays``), and ``of``, the
                                        checksum of the features
    raw/objects/<output>.npz            per-frame results of the removal of objects, which are the
                                        same for all layers; ``of`` is the agent's checksum
    <check>.csv, <check>.png            table and figure of each check
    report.md                           a section per check, whose anchor is the name of the check

Results per frame are stored for each layer and output, so that an interrupted run resumes after the
last stored file. Tables, figures and the report cover all stored results, including those of
earlier runs.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from attribution.checking.check import (
    Arrays,
    Check,
    CheckContext,
    Name,
    Subject,
    format_rows,
    panels,
    summarise,
)
from attribution.checking.deletion import Ablation, Deletion
from attribution.checking.object_removal import ObjectRemoval
from attribution.checking.randomisation import Fidelity, Randomisation
from common.palette import BLUE, DPI, VERMILION
from common.results import Array, Entry, File, Json, Npz, ResultStore, Schema, Table, Text
from common.tables import markdown_escaped, markdown_table
from envs.objects import kind_label

OBJECTS = "objects"  # name of a check
# Limits on the median and the 99 % quantile of the completeness errors ("gaps").
MEDIAN_BAR, HIGH_BAR = 0.005, 0.01


class Completeness(Check):
    """Completeness errors of all layers and outputs, read from the stored attributions."""

    title = "Do the attributions add up?"
    method = (
        "Completeness error: |sum of the attributions - (output - output at the baseline)|, "
        "divided by |output - output at the baseline| or by a tenth of the output's standard "
        "deviation, whichever is larger. Criterion: the median is at most "
        f"{MEDIAN_BAR:.1%}, and the 99 % quantile at most {HIGH_BAR:.0%}.")
    columns: ClassVar = {"frames": "frames", "median": "median", "high": "99 % quantile",
        "largest": "largest", "above": "frames above the tolerance", "met": "met"}

    def table(self, context: CheckContext, stored: Mapping[Subject, Arrays]) -> pd.DataFrame:
        rows = []
        for layer in context.attributions.layers():
            for output in context.attributions.outputs(layer):
                summary = context.attributions.read("summary", layer, output, form=SUMMARY)
                rows.append((
                    layer, output, summary["frames"], summary["gap_median"], summary["gap_99"],
                    summary["gap_largest"], summary["above"],
                    summary["gap_median"] <= MEDIAN_BAR and summary["gap_99"] <= HIGH_BAR))
        return pd.DataFrame(rows, columns=["layer", "output", *self.columns])

    def plot(self, table: pd.DataFrame, arrays: Mapping[Name, Arrays]) -> Figure:
        names = table["layer"] + ", " + table["output"]
        figure, [[axes]] = panels(1, 1)
        for column, label, bar, colour in (("median", "median", MEDIAN_BAR, BLUE),
                                           ("high", "99 % quantile", HIGH_BAR, VERMILION)):
            axes.plot(table[column], np.arange(len(names)), "o", color=colour,
                      label=label)
            axes.axvline(bar, color=colour, linewidth=0.8, linestyle="--")
        axes.set(xlim=(0, None), xlabel="completeness error (dashed: limits)")
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.set_yticks(np.arange(len(names)), names, fontsize=8)
        axes.invert_yaxis()
        axes.legend(fontsize=8)
        return figure

    def verdict(self, table: pd.DataFrame) -> str:
        return summarise(table["met"], table, "Completeness errors are within the limits")


CHECKS: dict[str, Check] = {
    "completeness": Completeness(), "deletion": Deletion(), "randomisation": Randomisation(),
    "interventions": Ablation(), OBJECTS: ObjectRemoval(), "fidelity": Fidelity()}
_OF = "of"  # array with the checksum of the features or agent that the results belong to
_COLUMNS = {  # columns that other studies read
    OBJECTS: {"layer": str, "output": str, "kind": str, "frames": int, **dict.fromkeys(
        ("density", "density_low_95", "density_high_95", "attribution_sign"), float)},
    "deletion": {"layer": str, "output": str, "kind": str, "other": str, **dict.fromkeys(
        ("better", "low_95", "high_95"), float)}}
_SUMMARY_TYPES = {"frames": int, "gap_median": float, "gap_99": float, "gap_largest": float,
                  "above": int}
SUMMARY = Json(kinds=_SUMMARY_TYPES, needed=tuple(_SUMMARY_TYPES))  # of attributions to a layer
CHECK_FILES = Schema(
    "checks of attributions", "python -m attribution.checks", items={
        name: Entry(f"raw/{name}/{{}}.npz" if name == OBJECTS else
                    f"raw/{name}/{{}}/{{}}.npz", Npz({_OF: Array(np.str_), **check.arrays}))
        for name, check in CHECKS.items() if check.arrays},
    results={
        **{f"{name}_table": Entry(f"{name}.csv", Table(_COLUMNS.get(name, {})), optional=True)
           for name in CHECKS},
        **{f"{name}_figure": Entry(f"{name}.png", File(), optional=True) for name in CHECKS},
        "report": Entry("report.md", Text())},
    setting_types={"num_frames": int})


def stored_arrays(store: ResultStore, context: CheckContext, name: str, subject: Subject
                  ) -> Arrays | None:
    """Read the stored per-frame results of one check for a layer and an output.

    Args:
        store: open folder of the checks.
        context: agent, attributions and frames.
        name: name of the check.
        subject: layer and output.

    Returns:
        The arrays that the check declares in ``Check.arrays``; None if they are not stored, or if
        the stored arrays belong to other features or another agent.
    """
    key, owner = CHECKS[name].place(context, subject)
    if not CHECKS[name].arrays or not store.has(name, *key):
        return None
    arrays = store.read(name, *key)
    return arrays if arrays.pop(_OF) == owner else None


def run_checks(store: ResultStore, context: CheckContext, names: Collection[str],
               chosen: Sequence[Subject], subjects: Sequence[Subject]) -> dict[str, pd.DataFrame]:
    """Compute and store missing per-frame results, and write tables and figures of all checks.

    Args:
        store: open folder of the checks.
        context: agent, attributions and frames.
        names: names of the checks to run.
        chosen: layers and outputs for which these checks compute missing results.
        subjects: all layers and outputs; tables include those with stored results.

    Returns:
        Table of each check with stored results, by the name of the check.

    Raises:
        UserError: if the removal of objects is checked and the recording cannot be replayed.
    """
    tables = {}
    for name, check in CHECKS.items():
        missing = [subject for subject in chosen if name in names and check.arrays
                   and stored_arrays(store, context, name, subject) is None]
        for subject, arrays in check.compute_all(context, missing):
            key, owner = check.place(context, subject)
            store.write(name, *key, value={_OF: np.array(owner), **arrays})
        stored = {subject: numbers for subject in subjects if (
            numbers := stored_arrays(store, context, name, subject)) is not None}
        if stored or not check.arrays:
            tables[name] = check.table(context, stored)
            store.write(f"{name}_table", value=tables[name])
            figure = check.plot(tables[name], {
                subject.name: arrays for subject, arrays in stored.items()})
            figure.suptitle(textwrap.fill(check.verdict(tables[name]),
                                          int(11 * figure.get_figwidth())), fontsize=10)
            with store.file(f"{name}_figure") as path:
                figure.savefig(path, dpi=DPI)
    return tables


def report(tables: Mapping[str, pd.DataFrame], what: str) -> str:
    """Format the report of all checks as Markdown.

    Args:
        tables: table of each check with stored results, by the name of the check, in the order of
            the report.
        what: a sentence that describes the checked frames and agent.
    """
    checks = [(name, CHECKS[name], table.assign(kind=table["kind"].map(kind_label))
               if "kind" in table else table) for name, table in tables.items()]
    lines = ["# Checks of the attributions", "", markdown_escaped(what), "",
             "Intervals: 95 %, bootstrap over episodes.", "",
             *(f"- [{check.title}](#{name}) {check.verdict(table)}"
               for name, check, table in checks)]
    for name, check, table in checks:
        lines += ["", f'<a id="{name}"></a>', "", f"## {check.title}", "", check.method, "",
                  f"**{check.verdict(table)}**", "", f"![{check.title}]({name}.png)", "",
                  *markdown_table(("layer", "output", *check.columns.values()),
                                  format_rows(table[["layer", "output", *check.columns]]))]
    return "\n".join(lines)
