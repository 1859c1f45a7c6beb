"""Report and figure of optimised starts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from common.palette import BLUE, DARK_GREY, DPI, GREEN, ORANGE, VERMILION
from common.tables import markdown_table
from generative.start_optimisation.evaluation import (
    LEAST,
    NUM_DRAWS,
    NUM_SUBSETS,
    PERCENTILE,
    QUANTILE,
    RECORDED,
    SCORE,
    SHOWN,
)
from generative.start_optimisation.recorded_starts import TYPICAL_SHARE
from generative.start_optimisation.search import SearchContext
from stats.effects import MIN_STARTS
from stats.significance import LEVEL, share

_COLOURS = (BLUE, VERMILION, ORANGE)
_TITLES = {SCORE.name: "the best recorded start, in deviations",
           PERCENTILE.name: "0.5, percentile in the real game"}


def report(context: SearchContext, starts: pd.DataFrame, effects: pd.DataFrame | None,
           real_game: bool) -> str:
    """Format the report as Markdown.

    Args:
        starts, effects: tables from ``evaluate``.
        real_game: whether the starts were compared in the real game.
    """
    best = starts[starts["best"]]
    by_penalty = {penalty: best[best["penalty"] == penalty] for penalty in best["penalty"].unique()}
    titles = [f"penalty {penalty:g}" for penalty in by_penalty]
    number, step = len(context.starts.windows), context.plan.step

    def shares(column: str) -> list[str]:
        return [_share(rows[column]) for rows in by_penalty.values()]

    def medians(column: str) -> list[str]:
        return [f"{rows[column].median():.2f}" for rows in by_penalty.values()]

    lines = [
        "# Starts made to order", "",
        f"{len(context.objectives)} orders, {context.num_starts} starts each, searched for "
        f"{context.plan.iterations} iterations through {step + 1} simulated steps; a target is "
        f"read at step {step}, counted from 0. Searches begin from the best of "
        f"{number - context.best_of} recorded starts, and are compared with the best of "
        f"{context.best_of} others. Scores are deviations of the target over all {number} recorded "
        "starts, simulated, with the sign of the aim. Of each order the best start counts: score "
        "less penalty, which grows where no recorded starts lie and with the probability that the "
        "simulated episode has ended.", "",
        "How noise is fixed: latents take their most likely class and the agent its likeliest "
        "action, so that a start has one rollout; both pass straight-through gradients, which are "
        "biased, so the best vector on the way is kept. The last row of the first table has the "
        f"same starts with drawn latents, mean of {NUM_DRAWS} draws that all starts share.", "",
        "## Against recorded starts", "",
        f"Beyond is by more than {LEAST} deviations, since units that saturate differ by rounding. "
        f"A start is typical if its density among recorded start vectors is above that of "
        f"{100 * TYPICAL_SHARE:.0f} % of them. Intervals of shares are Wilson's, 95 %.", "",
        *markdown_table(("", *titles), [
            (f"beyond the {100 * QUANTILE:.1f} % quantile of recorded starts, simulated",
             *shares("beyond_simulated")),
            (f"beyond the {100 * QUANTILE:.1f} % quantile of recorded values",
             *shares("beyond_real")),
            (f"beyond the best of {context.best_of} recorded starts", *shares("beyond_best")),
            ("typical start", *shares("typical")),
            ("the simulated episode has ended by the step (probability of 0.5 or more)",
             *(_share(rows["end"] >= 0.5) for rows in by_penalty.values())),
            ("score, median", *medians("score")),
            ("score at the beginning, median", *medians("begin_score")),
            ("score of the best recorded start, median", *medians("recorded_score")),
            ("score of the nearest recorded start, median", *medians("nearest_score")),
            ("score with drawn latents, median", *medians("score_drawn"))])]
    if number * (1 - QUANTILE) < 1:
        lines += [f"With {number} recorded starts the {100 * QUANTILE:.1f} % quantile lies between "
                  "the largest two.", ""]
    if real_game:
        recorded = next(iter(by_penalty.values()))["recorded_percentile"]
        lines += ["## In the real game", "",
                  "The recording of the nearest recorded start is replayed up to it, then the "
                  f"agent plays on. Shown: its target at step {step} is beyond {100 * SHOWN:.0f} % "
                  f"of the recorded values; chance is {100 * (1 - SHOWN):.0f} %.", "",
                  *markdown_table(("", *titles, "best recorded start"), [
                      ("shown", *(_share(rows["real_percentile"] >= SHOWN)
                                  for rows in by_penalty.values()), _share(recorded >= SHOWN)),
                      ("percentile, median", *medians("real_percentile"),
                       f"{best['recorded_percentile'].median():.2f}"),
                      ("ended before the step", *shares("ended"), "")])]
    return "\n".join([*lines, *_effects(effects), *_objectives(best), ""])


def _share(values: pd.Series) -> str:
    """Format the share of true values with Wilson's 95 % interval (1927)."""
    value, low, high = share(int(values.astype(bool).sum()), len(values))
    return (f"{100 * value:.0f} % ({100 * low:.0f} to {100 * high:.0f}; "
            f"{round(value * len(values))} of {len(values)})")


def _effects(table: pd.DataFrame | None) -> list[str]:
    if table is None:
        return ["## What may be claimed", "", f"Nothing: fewer than {MIN_STARTS} targets have no "
                "interval.", ""]
    return ["## What may be claimed", "",
            "Mean and median over orders with 95 % bootstrap intervals over targets. **Claimed** "
            f"is what leaves 0 out of its interval and has p (Holm) and p (controls) <= {LEVEL}. "
            f"Controls of the score: the best of other {NUM_SUBSETS} draws of recorded starts. "
            "Controls of the percentile: the starts of other orders.", "", *markdown_table(
                ("arm", "compared with", "mean", "median", "p (Holm)", "controls", "p (controls)",
                 "verdict"),
                [(RECORDED + " start" if row.arm == RECORDED else row.arm, _TITLES[row.outcome],
                  f"{row.effect:+.3g} ({row.low_95:.3g} to {row.high_95:.3g})",
                  f"{row.median_effect:+.3g} ({row.median_low_95:.3g} to "
                  f"{row.median_high_95:.3g})", f"{row.p_holm:.2g}",
                  f"{row.control_low:.3g} to {row.control_high:.3g}", f"{row.p_control:.2g}",
                  f"**{row.verdict}**" if row.claimed else row.verdict)
                 for row in table[~table["control"]].itertuples()])]


def _objectives(best: pd.DataFrame) -> list[str]:
    """Format the table of objectives, with a row for each objective and penalty."""
    rows = []
    for row in best.sort_values(["order", "penalty"], ascending=[True, False]).itertuples():
        real = getattr(row, "real_percentile", np.nan)
        rows.append((f"[{row.aim} {row.target}](pictures/order_{row.order:03d}.png)",
                     f"{row.penalty:g}", f"[{row.sample}](penalty_{row.penalty:g}/videos/"
                     f"sample_{row.sample:05d}.mp4)", f"{row.value:.3g}", f"{row.score:.2f}",
                     f"{row.recorded_score:.2f}", "yes" if row.typical else f"{row.excess:.2f}",
                     f"{row.nearest_episode}, {row.nearest_frame} ({row.nearest_cosine:.2f})",
                     "" if np.isnan(real) else f"{real:.2f}"))
    return ["## Orders", "", *markdown_table(
        ("order", "penalty", "film", "target", "score", "best recorded", "typical, or excess",
         "nearest: episode, frame (cosine)", "percentile in the real game"), rows)]


def plot(path: Path, starts: pd.DataFrame) -> None:
    """Plot the scores of all objectives next to the scores of recorded starts, and percentiles in
    the real game."""
    best = starts[starts["best"]]
    penalties = best["penalty"].unique()
    first = best[best["penalty"] == penalties[0]].sort_values("recorded_score")
    order = first["order"].tolist()
    real = "real_percentile" in best
    figure = Figure(figsize=(15 if real else 8, 1.8 + 0.2 * len(order)), layout="constrained")
    panels = figure.subplots(1, 2 if real else 1, squeeze=False, sharey=True)[0]
    rows, bars = np.arange(len(order)), dict(color=DARK_GREY, markersize=10, markeredgewidth=2)
    panels[0].plot(first["recorded_score"], rows, "|", label="best recorded start", **bars)
    if real:
        panels[1].plot(first["recorded_percentile"], rows, "|", **bars)
        panels[1].axvline(0.5, color=DARK_GREY, linewidth=0.8)
        panels[1].axvspan(SHOWN, 1, color=GREEN, alpha=0.15, linewidth=0)
        panels[1].set_xlim(-0.02, 1.02)
        panels[1].set_xlabel("percentile of the target in the real game (green: shown)")
    for penalty, colour in zip(penalties, _COLOURS):
        points = best[best["penalty"] == penalty].set_index("order").loc[order]
        panels[0].plot(points["score"], rows, "o", color=colour, markersize=4,
                       label=f"made to order, penalty {penalty:g}")
        panels[0].plot(points["begin_score"], rows, ".", color=colour, markersize=3, alpha=0.4)
        if real:
            panels[1].plot(points["real_percentile"], rows, "o", color=colour, markersize=4)
    panels[0].set_yticks(rows, (first["aim"] + " " + first["target"]).tolist(), fontsize=7)
    panels[0].set_xlabel("score, in deviations of recorded starts (small points: at the beginning)")
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.set_ylim(-0.7, len(order) - 0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4,
                  fontsize=9)
    figure.savefig(path, dpi=DPI)
