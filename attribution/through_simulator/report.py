"""Report and figure of the checks of both kinds of map."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from attribution.through_simulator.comparison import CHANCE
from attribution.through_simulator.maps import BLOCK
from common.palette import COLOURS, DARK_GREY, DPI
from common.tables import markdown_escaped, markdown_table
from stats.significance import LEVEL


def report(what: str, tables: dict[str, pd.DataFrame]) -> str:
    """The report as Markdown.

    Args:
        what: a sentence on what was checked.
        tables: ``agreement``, ``objects``, ``deletion`` and ``randomisation``.
    """
    agreement = tables["agreement"]
    own = agreement[~agreement["control"]]
    lines = ["# Saliency through the simulator and attributions: which is right about the real "
             "game?", "", markdown_escaped(what), "",
             "A simulation begins at the vector of a recorded frame and the two before it, and "
             "takes the most likely latents and the agent's likeliest actions, so nothing is "
             "drawn. Its saliency at step 0 is compared with attributions in the recorded frame.",
             "", "## Objects hidden in the real game", "",
             "One kind of object is drawn no more in one frame; the game stays as it is, and the "
             "agent plays on. A map is right if the change of the output has the sign opposite to "
             "that of the map in the object's pixels. Below: share of hidden objects a frame; "
             "interval by bootstrap over episodes. **Claimed** leaves 0 out and has p (Holm) and p "
             f"(controls) <= {LEVEL}; controls are the maps of other frames.", "", *markdown_table(
                 ("map", "compared with", "steps later", "right", "other", "difference (95 %)",
                  "controls", "p (Holm)", "p (controls)", "verdict"),
                 [(row.map, row.compared_with, str(row.lag), f"{row.right:.3f}",
                   f"{row.other:.3f}",
                   f"{row.effect:+.3f} ({row.low_95:+.3f} to {row.high_95:+.3f})",
                   f"{row.control_low:+.3f} to {row.control_high:+.3f}", f"{row.p_holm:.2g}",
                   f"{row.p_control:.2g}", f"**{row.verdict}**" if row.claimed else row.verdict)
                  for row in own.itertuples()]), "By kind of object:", "", *_frame(
                      tables["objects"], ("map", "lag", "kind", "frames", "change", "agreement",
                                          "low_95", "high_95", "chance", "above_chance",
                                          "rank_correlation", "rank_low_95", "rank_high_95")),
             "## Deletion and insertion", "",
             f"Blocks of {BLOCK} x {BLOCK} pixels of the real frame go to the mean frame "
             "(deletion) or come from it, those first that a map says raise the output most. Areas "
             "under the curve in deviations of the output; better than random orders where the "
             "interval of the difference lies above 0.", "", *_frame(
                 tables["deletion"], tuple(tables["deletion"].columns)),
             "## Weights drawn again", "",
             "Rank correlation of |map| with that of an agent of which more and more is random, "
             "from the heads downwards (Adebayo et al. 2018). Inside the simulator it is the agent "
             "that is random, not the simulator.", "", *_frame(
                 tables["randomisation"], tuple(tables["randomisation"].columns))]
    return "\n".join(lines)


def _frame(table: pd.DataFrame, columns: Sequence[str]) -> list[str]:
    return markdown_table(tuple(column.replace("_", " ") for column in columns), [
        tuple("" if value != value else f"{value:.3g}" if isinstance(value, float) else str(value)
              for value in row) for row in table[list(columns)].itertuples(index=False)])


def plot(path: Path, tables: dict[str, pd.DataFrame], curves: np.ndarray,
         names: Sequence[str]) -> None:
    """Agreement, curves of deletion, and correlations with maps of random weights.

    Args:
        curves: float64 (N, orders, 2, P), of the maps of ``names`` and then of random orders.
    """
    figure = Figure(figsize=(17, 5.2), layout="constrained")
    right, *falling, random = figure.subplots(1, 4)
    agreement = tables["agreement"]
    rows = agreement[agreement["compared_with"] == CHANCE]
    own = rows[~rows["control"]].reset_index(drop=True)
    places = np.arange(len(own))
    controls = rows[rows["control"]].groupby(["map", "lag"], sort=False)["right"]
    low, high = (np.array([controls.get_group((row.map, row.lag)).agg(end)
                           for row in own.itertuples()]) for end in ("min", "max"))
    right.hlines(places, low, high, color="#DDDDDD", linewidth=8, label="maps of other frames")
    right.errorbar(own["right"], places, xerr=np.abs(np.stack(
        [own["effect"] - own["low_95"], own["high_95"] - own["effect"]])), fmt="o",
        color=COLOURS[4], label="95 % interval")
    right.axvline(0.5, color=DARK_GREY, linewidth=0.8)
    right.set_yticks(places, [f"{row.map.partition(',')[0]}, {row.lag} later" if row.lag
                              else row.map for row in own.itertuples()], fontsize=8)
    right.set_ylim(-0.6, len(own) + 0.9)
    right.set_title("share of hidden objects whose sign is right", fontsize=10)
    right.legend(fontsize=8, loc="upper right", ncols=2)
    shares = np.linspace(0, 1, curves.shape[-1])
    for number, (axes, kind) in enumerate(zip(falling, ("deletion", "insertion"))):
        for place, name in enumerate(names):
            axes.plot(shares, curves[:, place, number].mean(axis=0), color=COLOURS[place],
                      label=name)
        axes.plot(shares, curves[:, len(names):, number].mean(axis=(0, 1)), "--", color=DARK_GREY,
                  label="random order")
        axes.set_title(f"{kind}: output", fontsize=10)
        axes.set_xlabel("share of the frame")
    falling[0].legend(fontsize=8)
    for place, (name, part) in enumerate(tables["randomisation"].groupby("map", sort=False)):
        random.plot(part["correlation"].to_numpy(), "o-", color=COLOURS[place % len(COLOURS)],
                    label=name)
        random.set_xticks(range(len(part)), part["drawn_again"], rotation=40, fontsize=8)
    random.axhline(0.5, color=DARK_GREY, linewidth=0.8)
    random.set_title("rank correlation with maps of random weights", fontsize=10)
    random.legend(fontsize=8)
    for axes in (right, *falling, random):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=DPI)
