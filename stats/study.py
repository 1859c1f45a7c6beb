"""Studies: measurement of outcomes under several conditions, and the resulting claims.

A study measures outcomes at the same levels or starts without any intervention, under several
interventions, and under matched controls of each. The calling code declares the conditions and a
function that measures the outcomes of a condition; only this function interprets
``Condition.value``. This module runs the conditions and writes the results; ``stats.effects``
estimates the effects, for which a study needs at least 10 levels, and 19 controls of each
``Condition.pattern``. With ``Condition``, ``BASELINE`` and a ``Testbed`` from ``agents.testbed``::

    conditions = [Condition("zero", "channel 55 to zero", "zero", patches=[patch]),
                  *(Condition(f"control_{k}", f"control {k}", "zero", True, patches=[other])
                    for k, other in enumerate(controls))]
    outcomes = [Outcome("return", "return (sum of rewards)")]
    store = ResultStore(folder, study_schema("channels set to zero", "example.py"))
    store.open({"seed": seed,
                "conditions": {condition.name: condition.settings for condition in conditions}})
    table = run_study(store, [BASELINE, *conditions], outcomes, outcomes_of, seed, PATCHES,
                      "model.pth on 400 levels")

``docs/example_study.py`` is a complete study. If the items of a study are levels instead of
conditions, ``ResultStore.compute`` measures each. Studies with their own report layout use
functions of ``stats.report`` and ``stats.forest_plot`` directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from common.results import Array, Entry, File, Npy, ResultStore, Schema, Table, Text
from common.shards import WHOLE, Shard
from stats.effects import Condition, Outcome, compare_conditions
from stats.forest_plot import plot_effects
from stats.report import Wording, report

AnyCondition = TypeVar("AnyCondition", bound=Condition)


def study_schema(what: str, script: str, **results: Entry) -> Schema:
    """Return the schema of a study: the outcomes of each condition (N, K), the table of effects,
    the report, the figure, and further results.

    The setting ``conditions`` holds the settings of each condition by name; conditions can be added
    to a finished study.

    Args:
        what: name of the contents, for messages.
        script: command that writes the folder, for messages.
    """
    outcomes = Npy(Array(np.float64, "N K"))
    return Schema(what, script, items={"condition": Entry("conditions/{}.npy", outcomes)},
                  results={"effects": Entry("effects.csv",
                                            Table({"condition": str, "effect": float})),
                           "report": Entry("report.md", Text()),
                           "figure": Entry("effects.png", File()), **results},
                  growing="conditions", growing_items=("condition",))


def run_study(store: ResultStore, conditions: Sequence[AnyCondition], outcomes: Sequence[Outcome],
              measure: Callable[[AnyCondition], np.ndarray], seed: int, wording: Wording,
              description: str, levels: np.ndarray | None = None) -> pd.DataFrame:
    """Measure the conditions that an open folder lacks, write the results, and return the effects.

    Args:
        store: folder with a schema from ``study_schema``.
        conditions: the unaltered condition, then all others.
        outcomes: outcomes along the last axis of what ``measure`` returns.
        measure: returns the outcomes of a condition, float64 (N, K), in the same order of starts.
        description, wording: see ``write_effects``.
        levels: level of each start (N,), see ``stats.effects.paired_effects``.

    Returns:
        Table from ``stats.effects.compare_conditions``.

    Raises:
        UserError: see ``compare_conditions``.
    """
    measure_conditions(store, "condition", conditions, measure)
    before, *after = (store.read("condition", condition.name) for condition in conditions)
    table = compare_conditions(conditions[1:], outcomes, before, np.stack(after), seed, levels)
    write_effects(store, table, outcomes, wording, description)
    return table


def measure_conditions(store: ResultStore, entry: str, conditions: Sequence[AnyCondition],
                       measure: Callable[[AnyCondition], Any], shard: Shard = WHOLE) -> None:
    """Measure the conditions of a shard that an open result folder lacks, and mark the shard as
    finished.

    Args:
        entry: entry of the schema with one item per condition; the item's key is the condition's
            name.
        measure: returns the item of a condition. A long measurement may store partial results in
            ``store`` and resume from them.
    """
    for number, condition in shard.of(list(enumerate(conditions))):
        if not store.has(entry, condition.name):
            store.write(entry, condition.name, value=measure(condition))
            print(f"{condition.name}: {number} of {len(conditions) - 1} alterations", flush=True)
    store.finish()


def write_effects(store: ResultStore, table: pd.DataFrame, outcomes: Sequence[Outcome],
                  wording: Wording, description: str, over_time: pd.DataFrame | None = None,
                  appendix: str = "") -> None:
    """Write the table, report and forest plot of a study.

    They are the entries ``effects``, ``report`` and ``figure`` of the store's schema.

    Args:
        table: table from ``compare_conditions``.
        outcomes, over_time: see ``stats.forest_plot.plot_effects``.
        description: description of the runs, such as "model.pth on 400 levels", without a full
            stop.
        appendix: Markdown at the end of the report.
    """
    store.write("effects", value=table)
    store.write("report", value=report(table, outcomes, wording, f"{description}.") + appendix)
    with store.file("figure") as temporary:
        plot_effects(temporary, table, outcomes, wording, description, over_time)
