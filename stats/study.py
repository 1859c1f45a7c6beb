"""Studies: conditions, what is measured under each of them, and what may be claimed.

A study measures outcomes at the same levels or starts without any intervention, under several
interventions, and under matched controls of each. A package declares its conditions, whose values
only it understands, and passes what it measures as a callable; everything else is here::

    conditions = [Condition("zero", "channel 55 to zero", "zero", value=[patch]),
                  *(Condition(f"control_{k}", f"control {k}", "zero", control=True, value=[other])
                    for k, other in enumerate(controls))]
    outcomes = [Outcome("return", "return (sum of rewards)")]
    store.open({"seed": seed, "arms": {each.name: each.settings for each in conditions}})
    measure_conditions(store, "arm", [BASELINE, *conditions], lambda each: play(each.value))
    before, *after = (store.read("arm", each.name) for each in [BASELINE, *conditions])  # (N, K)
    table = compare_conditions(conditions, outcomes, before, np.stack(after), seed)
    write_effects(store, table, outcomes, PATCHES, "agent.pt on 400 levels")

``stats.effects`` has the statistics, ``stats.report`` and ``stats.forest_plot`` the parts of a
report and of a figure for studies with a layout of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from common.results import ResultStore
from common.shards import WHOLE, Shard
from stats.effects import Condition, Outcome, Value
from stats.forest_plot import plot_effects
from stats.report import Wording, report

BASELINE: Condition = Condition("unaltered", "unaltered", "")


def measure_conditions(store: ResultStore, entry: str, conditions: Sequence[Condition[Value]],
                       measure: Callable[[Condition[Value]], Any], shard: Shard = WHOLE) -> None:
    """Measure the conditions that an open result folder lacks, and note that this shard is done.

    A line with the time is printed for each condition.

    Args:
        entry: entry of the schema that holds one item per condition, by its name.
        conditions: all conditions, the baseline first.
        measure: returns the item of a condition. A measurement that takes long may keep parts of
            its own in the store and resume with them.
        shard: part of the conditions that this process measures.
    """
    begin = time.perf_counter()
    for number, condition in shard.of(list(enumerate(conditions))):
        if not store.has(entry, condition.name):
            started = time.perf_counter()
            store.write(entry, condition.name, value=measure(condition))
            print(f"{condition.name} ({number} of {len(conditions) - 1} alterations): "
                  f"{time.perf_counter() - started:.1f} s", flush=True)
    print(f"all runs: {time.perf_counter() - begin:.0f} s", flush=True)
    store.finish()


def write_effects(store: ResultStore, table: pd.DataFrame, outcomes: Sequence[Outcome],
                  wording: Wording, description: str,
                  over_time: pd.DataFrame | None = None) -> None:
    """Write the table, report and forest plot of a study: the entries ``effects``, ``report`` and
    ``figure`` of its schema.

    Args:
        table: from ``compare_conditions``.
        description: what was run and how often, for report and figure; without a full stop.
        over_time: divergence over time, see ``stats.forest_plot.plot_effects``.
    """
    store.write("effects", value=table)
    store.write("report", value=report(table, outcomes, wording, f"{description}."))
    with store.file("figure") as temporary:
        plot_effects(temporary, table, outcomes, f"{wording.title}\n{description}",
                     wording.controls, over_time)
