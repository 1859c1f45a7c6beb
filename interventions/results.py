"""Tables, report and figure of a comparison, from the runs in its folder."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from common.results import ResultStore
from interventions.alterations import UNALTERED
from interventions.files import read_runs
from interventions.outcomes import chosen_outcomes, compare, divergence_over_time, outcomes_of_arms
from stats.effects import Arm, with_verdicts
from stats.forest_plot import plot_effects
from stats.report import DIRECTIONS, Wording, report


def write_results(folder: ResultStore, arms: Sequence[Arm], simulated: bool, seed: int,
                  what: str, wording: Wording = DIRECTIONS) -> pd.DataFrame:
    """Compare the runs of a folder, and write tables, report and figure to it.

    Args:
        simulated: whether the runs are simulations.
        seed: of bootstrap and sign flips.
        what: was run, how often; written in report and figure.
        wording: how alterations and controls are called. For all but DIRECTIONS, whose published
            tables stay as they are, there are medians and verdicts, too.

    Returns:
        The table of effects, see ``interventions.outcomes.compare`` and ``with_verdicts``.
    """
    unaltered = read_runs(folder, UNALTERED)
    runs = {arm.name: read_runs(folder, arm.name) for arm in arms}
    table = compare(arms, runs, unaltered, simulated, seed)
    over_time = divergence_over_time(arms, runs, unaltered)
    outcomes = chosen_outcomes(simulated)
    if wording != DIRECTIONS:
        before, after = outcomes_of_arms(arms, runs, unaltered, simulated)
        table = with_verdicts(table, outcomes, before, after, seed)
        for size in ("norm", "relative"):
            if all(getattr(each, size) is not None for each in runs.values()):
                table[size] = [float(getattr(runs[arm], size)) for arm in table["arm"]]
    folder.write("effects", value=table)
    folder.write("divergence", value=over_time)
    folder.write("report", value=report(table, outcomes, wording, f"{what}."))
    with folder.file("figure") as temporary:
        plot_effects(temporary, table, over_time, outcomes, f"{wording.title}\n{what}",
                     wording.controls)
    return table
