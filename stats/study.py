"""Studies: measurement of outcomes under several conditions, and the resulting claims.

A study measures outcomes at the same levels or starts without any intervention, under several
interventions, and under matched controls of each. The calling code declares the conditions and a
function that measures the outcomes of a condition; only this function interprets
``Condition.value``. This module runs the conditions and writes the results; ``stats.effects``
estimates the effects. With ``Condition``, ``BASELINE`` and a ``Testbed`` from ``agents.testbed``::

    conditions = [Condition("zero", "channel 55 to zero", "zero", patches=[patch]),
                  *(Condition(f"control_{k}", f"control {k}", "zero", True, patches=[other])
                    for k, other in enumerate(controls))]
    outcomes = [Outcome("return", "return (sum of rewards)")]
    store.open({"seed": seed, "arms": {arm.name: arm.settings for arm in conditions}})
    measure_conditions(store, "arm", [BASELINE, *conditions], outcomes_of)
    before, *after = (store.read("arm", arm.name) for arm in [BASELINE, *conditions])  # (N, K)
    table = compare_conditions(conditions, outcomes, before, np.stack(after), seed)
    write_effects(store, table, outcomes, PATCHES, "model.pth on 400 levels")

Studies with their own report layout use functions of ``stats.report`` and ``stats.forest_plot``
directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pandas as pd

from common.results import ResultStore
from common.shards import WHOLE, Shard
from stats.effects import Condition, Outcome
from stats.forest_plot import plot_effects
from stats.report import Wording, report

AnyCondition = TypeVar("AnyCondition", bound=Condition)


def measure_conditions(store: ResultStore, entry: str, conditions: Sequence[AnyCondition],
                       measure: Callable[[AnyCondition], Any], shard: Shard = WHOLE) -> None:
    """Measure the conditions of a shard that an open result folder lacks, and mark the shard as
    finished.

    Args:
        store: open result folder.
        entry: entry of the schema with one item per condition; the item's key is the condition's
            name.
        conditions: all conditions, the baseline first.
        measure: returns the item of a condition. A long measurement may store partial results in
            ``store`` and resume from them.
        shard: subset of the conditions that this process measures.
    """
    for number, condition in shard.of(list(enumerate(conditions))):
        if not store.has(entry, condition.name):
            store.write(entry, condition.name, value=measure(condition))
            print(f"{condition.name}: {number} of {len(conditions) - 1} alterations", flush=True)
    store.finish()


def write_effects(store: ResultStore, table: pd.DataFrame, outcomes: Sequence[Outcome],
                  wording: Wording, description: str,
                  over_time: pd.DataFrame | None = None) -> None:
    """Write the table, report and forest plot of a study.

    They are the entries ``effects``, ``report`` and ``figure`` of the store's schema.

    Args:
        store: open result folder.
        table: table from ``compare_conditions``.
        outcomes, over_time: see ``stats.forest_plot.plot_effects``.
        wording: terms for interventions and controls.
        description: description of the runs, such as "model.pth on 400 levels", without a full
            stop.
    """
    store.write("effects", value=table)
    store.write("report", value=report(table, outcomes, wording, f"{description}."))
    with store.file("figure") as temporary:
        plot_effects(temporary, table, outcomes, f"{wording.title}\n{description}",
                     wording.controls, over_time)
