"""Paired tests of optimised starts against starts that no search changed, over independent groups.

Objectives whose targets belong to one group (``Target.group``) are not independent: the
log-probabilities of one policy add up to 1, and both aims of a target share its starts. A group
therefore counts once: its difference is the mean over its objectives of +1 (the optimised start is
better), -1 (it is worse) or 0. Two-sided p-values are those of the exact sign test over the groups
whose difference is not 0; with one objective per group, this is McNemar's test (1947). Intervals of
the mean difference over groups are percentile bootstraps over groups.

Letters in shape comments: O objectives, K starts of each, G groups.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from common.tables import markdown_table
from generative.sample_files import SampleFolder
from generative.start_optimisation.search import SearchContext
from stats.bootstrap import ClusterBootstrap, by_episode
from stats.report import format_interval, format_p
from stats.significance import holm, mcnemar_p

LEAST = 0.01  # smallest difference of scores that counts; saturated units differ by rounding
SHOWN = 0.95  # percentile from which the target counts as shown in the real game
_EQUAL = 1e-3  # largest difference between a start and its copy in half precision
# Outcome, columns of the optimised start and of the other one, and title of the other one.
_SIMULATED, _REAL = "higher simulated score", "shown in the real game"
_PAIRS = (
    (_SIMULATED, "score", "best_begin_score", "beginning of the search"),
    (_SIMULATED, "score", "recorded_score", "best recorded start"),
    (_SIMULATED, "score", "prior_score", "best random prior sample"),
    (_REAL, "real_percentile", "begin_percentile", "beginning of the search"),
    (_REAL, "real_percentile", "recorded_percentile", "best recorded start"))


def find_moved(context: SearchContext, folder: SampleFolder) -> np.ndarray:
    """Return whether each search returned another start than its beginning, bool (O K,).

    Vectors and worlds are compared. Searches over vectors keep the worlds.
    """
    moved = []
    for number, (vectors, world) in enumerate(context.begin_starts):
        samples = list(context.numbers(number))
        found, optimised = folder.worlds(samples), folder.stacked_field("bottleneck_vec", samples)
        changes = np.abs(optimised - vectors.cpu().numpy()).max(axis=1)  # (K,)
        if world is not None and found is not None:
            for name in ("squares", "corner", "places", "velocities"):
                change = (getattr(found, name) - getattr(world, name).cpu()).abs().flatten(1)
                changes = np.maximum(changes, change.amax(dim=1).numpy())
        moved.append(changes > _EQUAL)
    return np.concatenate(moved)


def compare_pairs(starts: pd.DataFrame, groups: np.ndarray, seed: int) -> pd.DataFrame:
    """Test whether optimised starts are better than the starts that they are compared with.

    Args:
        starts: table of ``evaluation.evaluate``; comparisons without columns are left out.
        groups: number of the group of each objective (O,).

    Returns:
        A row per penalty and comparison: ``penalty``, ``outcome``, ``compared_with``,
        ``objectives``, ``groups``, ``better`` and ``worse`` (numbers of groups), ``difference``
        (mean over groups, from -1 to 1) with ``low_95`` and ``high_95``, ``p``, and ``p_holm``,
        corrected over all rows.
    """
    rows = []
    best = starts[starts["best"]]
    for penalty in best["penalty"].unique():
        table = best[best["penalty"] == penalty].sort_values("order")
        for outcome, own, other, title in _PAIRS:
            if own not in table or other not in table:
                continue
            if outcome == _REAL:
                differences = (table[own] >= SHOWN).astype(int) - (table[other] >= SHOWN)
            else:
                gain = table[own] - table[other]
                differences = np.sign(gain.where(gain.abs() > LEAST, 0))
            sums = by_episode(groups, np.stack([differences, np.ones(len(table))]))  # (G, 2)
            of_groups = sums[:, 0] / sums[:, 1]
            low, high = ClusterBootstrap(np.arange(len(sums)), seed).interval(of_groups[None])
            rows.append({
                "penalty": penalty, "outcome": outcome, "compared_with": title,
                "objectives": len(table), "groups": len(sums),
                "better": int((of_groups > 0).sum()), "worse": int((of_groups < 0).sum()),
                "difference": of_groups.mean(), "low_95": low[0], "high_95": high[0],
                "p": mcnemar_p(of_groups[:, None])[0]})
    pairs = pd.DataFrame(rows)
    return pairs.assign(p_holm=holm(pairs["p"].to_numpy()))


def paired_report(pairs: pd.DataFrame) -> list[str]:
    """Format the table of ``compare_pairs`` as lines of Markdown."""
    return ["## Paired tests over independent targets", "",
            "All log-probabilities of the policy form one group of targets, because they depend on "
            "each other; every other target is a group of its own. Each group contributes one "
            "number: the share of its objectives for which the optimised start is better minus the "
            "share for which it is worse. The sign test counts groups, and intervals are 95 % "
            "bootstrap intervals over groups.", "", *markdown_table(
                ("penalty", "outcome", "compared with", "groups", "better", "worse",
                 "mean difference", "p (sign test)", "p (Holm)"),
                [(f"{row.penalty:g}", row.outcome, row.compared_with, str(row.groups),
                  str(row.better), str(row.worse),
                  format_interval(row.difference, row.low_95, row.high_95, "+.2f"),
                  format_p(row.p), format_p(row.p_holm)) for row in pairs.itertuples()])]
