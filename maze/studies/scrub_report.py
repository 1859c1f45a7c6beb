"""Report and figure of ``python -m maze.scrubbing``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from common.palette import BLUE, DPI, VERMILION
from maze.studies.scrubs import OUTCOMES
from stats.effects import MIN_CONTROLS_TO_CLAIM

_FEATURES = {"same": "the same square", "other": "another square"}
_SETS = {"hypothesis": "these channels", "random": "random channels"}


def report(layer: str, channels: str, num_levels: int, sets: pd.DataFrame,
           conditions: pd.DataFrame, contrasts: pd.DataFrame) -> str:
    """The report as Markdown.

    Args:
        sets: the sets of channels, with ``moved`` and ``matched``.
        conditions, contrasts: of ``interventions.resampling.Scrubbing``.
    """
    own = contrasts[~contrasts["control"]]
    num = int(own["num_controls"].min())
    lines = [
        f"# Causal scrubbing of channels {channels} of {layer}", "",
        "Hypothesis: the channels matter only through the cheese's square. In "
        f"{num_levels} levels they are taken from other levels, with the cheese at the same square "
        f"or at another; so are {num} random sets of as many channels. Intervals: 95 %, over "
        "levels. The published norm shrinks with the size of a maze and is no total variation; it "
        "is given to compare with published numbers.", "",
        f"Sizes of the change, in standard deviations: {sets['moved'].iloc[0]:.3g}; of the random "
        f"sets {sets['moved'].iloc[1:].min():.3g} to {sets['moved'].iloc[1:].max():.3g}, "
        f"{int(sets['matched'].iloc[1:].sum())} of {num} within a quarter.", "",
        "| outcome | channels | cheese at | mean (95 %) |", "|" + " --- |" * 4]
    lines += [f"| {OUTCOMES[row.outcome]} | {_SETS[row.channels]} | {_FEATURES[row.feature]} | "
              f"{row.mean:.4f} ({row.low_95:.4f} to {row.high_95:.4f}) |"
              for row in conditions.sort_values("outcome", key=lambda names: names.map(
                  list(OUTCOMES).index), kind="stable").itertuples()]
    lines += ["", "## Double contrast", "", "Other minus same square, these channels minus random "
              "ones. **Supported**: claimed (interval without 0, p (Holm) and p (controls) at most "
              "0.05) and above 0.", "",
              "| outcome | other - same: random | other - same: these | double contrast (95 %) | "
              "p (Holm) | p (controls) | supported |", "|" + " --- |" * 7]
    lines += [f"| {OUTCOMES[row.outcome]} | {row.unaltered:.4f} | {row.altered:.4f} | "
              f"{row.effect:+.4f} ({row.low_95:.4f} to {row.high_95:.4f}) | {row.p_holm:.2g} | "
              f"{row.p_control:.2g} | {'**yes**' if row.supported else 'no'} |"
              for row in own.itertuples()]
    claimed = int(contrasts[contrasts["control"]]["claimed"].sum())
    lines += ["", f"The same rule claims {claimed} of {contrasts['control'].sum()} contrasts of "
              "the random sets, each compared with the others."]
    if num < MIN_CONTROLS_TO_CLAIM:
        lines.append(f"Nothing can be claimed with fewer than {MIN_CONTROLS_TO_CLAIM} random sets.")
    return "\n".join([*lines, ""])


def plot(path: Path, title: str, conditions: pd.DataFrame, contrasts: pd.DataFrame) -> None:
    """The four conditions of each outcome, and the double contrast."""
    figure = Figure(figsize=(3.2 * len(OUTCOMES), 4), layout="constrained")
    panels = figure.subplots(1, len(OUTCOMES), squeeze=False)[0]
    own = contrasts[~contrasts["control"]].set_index("outcome")
    for axes, (outcome, label) in zip(panels, OUTCOMES.items()):
        part = conditions[conditions["outcome"] == outcome]
        for shift, (channels, colour) in enumerate((("hypothesis", VERMILION), ("random", BLUE))):
            rows = part[part["channels"] == channels]
            axes.errorbar(np.arange(2) + 0.08 * shift, rows["mean"],
                          np.array([rows["mean"] - rows["low_95"],
                                    rows["high_95"] - rows["mean"]]),
                          fmt="o-", color=colour, label=_SETS[channels])
        axes.set_xticks(np.arange(2) + 0.04, [_FEATURES[each] for each in rows["feature"]])
        axes.set_title(f"{label}\ndouble contrast {own.loc[outcome, 'effect']:+.3f}", fontsize=9)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=9)
    figure.suptitle(title)
    figure.savefig(path, dpi=DPI, format="png")
