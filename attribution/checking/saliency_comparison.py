"""Comparison of saliency through the simulator with attributions: which kind of map predicts the
real game correctly more often?

Every map is scored by three measures in the same frames: deletion and insertion of blocks of the
frame; rank correlation with the maps of agents with randomised weights; and objects hidden in the
real game, where the output should change with the sign opposite to that of the map in the object's
pixels. For hidden objects, the share of correctly predicted signs per frame, over all kinds of
object, is also tested with ``stats.effects``: each map against 0.5, and saliency through the
simulator against attributions in the same frames. Controls are the maps of other frames, by a
cyclic shift.

Letters in shape comments: N frames, K kinds of object, M maps, H W a grid, P points of a curve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from attribution.checking.deletion import COMPARISON, KINDS, areas_under, compare_areas
from attribution.checking.object_scores import cells_of
from attribution.checking.saliency_maps import BLOCK, Map
from common.palette import COLOURS, DARK_GREY
from common.tables import markdown_escaped, markdown_table
from stats.bootstrap import ClusterBootstrap
from stats.effects import Condition, Outcome, compare_conditions
from stats.forest_plot import forest_plot
from stats.report import bold, format_p, format_range
from stats.significance import LEVEL

NUM_SHIFTS = 20
AGREEMENT = Outcome("agreement", "share of hidden objects whose sign is right", probability=True)
CHANCE = "chance"


def agreements(maps: Map, masks: np.ndarray, changes: np.ndarray, shift: int = 0) -> np.ndarray:
    """Compute the share of objects in each frame whose effect has the sign that a map predicts.

    Args:
        maps: maps of the frames.
        masks: masks of the objects, bool (N, K, 64, 64).
        changes: changes of the output at the map's lag when each object is hidden (N, K).
        shift: number of frames by which the maps are cyclically shifted.

    Returns:
        Share of correct signs per frame (N,); NaN where no object changes the output.
    """
    cells = cells_of(masks, maps.bottleneck)  # (N, K, H, W)
    predicted = -(np.roll(maps.values, shift, axis=0)[:, None] * cells).sum(axis=(2, 3))
    counted = changes != 0
    right = ((np.sign(predicted) == np.sign(changes)) & counted).sum(axis=1)
    number = counted.sum(axis=1)
    return np.divide(right, number, out=np.full(len(right), np.nan), where=number > 0)


def compare_agreements(maps: Sequence[Map], masks: np.ndarray, changes: Mapping[int, np.ndarray],
                       episodes: np.ndarray, seed: int) -> pd.DataFrame:
    """Test the agreement of each map against 0.5, and of each saliency map against each
    attribution map.

    Args:
        maps: the maps.
        masks: masks of the objects, bool (N, K, 64, 64).
        changes: changes of the output when each object is hidden (N, K), by lag. Attributions
            explain the output in the frame itself; they are compared at every lag.
        episodes: episode of each frame (N,).
        seed: seed of the bootstrap.

    Returns:
        The table of ``stats.effects.compare_conditions``, with all comparisons in one family and
        the columns ``map``, ``compared_with``, ``lag``, and the shares ``right`` and ``other``.
        ``altered`` is the difference, and ``unaltered`` is 0. A control is the same difference
        computed with the maps of other frames, for both maps.
    """
    shifts = (0, *np.unique(np.linspace(0, len(episodes), NUM_SHIFTS + 2)[1:-1].astype(int)))
    counted = np.all([(change != 0).any(axis=1) for change in changes.values()], axis=0)
    conditions: list[Condition] = []
    after, facts = [], []
    for lag, change in changes.items():
        shares = {each: np.stack([agreements(each, masks, change, shift)[counted]
                                  for shift in shifts])
                  for each in maps if each.lag == lag or each.is_attribution}
        others = {CHANCE: np.full((len(shifts), counted.sum()), 0.5),
                  **{each.name: share for each, share in shares.items() if each.is_attribution}}
        for other, against in others.items():
            for each, share in shares.items():
                if other != CHANCE and each.is_attribution:
                    continue
                pair = f"{each.name} against {other} at {lag}"
                for number, difference in enumerate(share - against):
                    conditions.append(Condition(f"{pair}, control {number}" if number else pair,
                                                pair, pair, number > 0))
                    after.append(difference[:, None])
                    facts.append((each.name, other, lag, share[number].mean(),
                                  against[number].mean()))
    table = compare_conditions(conditions, [AGREEMENT], np.zeros((counted.sum(), 1)),
                               np.stack(after), seed, episodes[counted])
    named = pd.DataFrame(facts, columns=["map", "compared_with", "lag", "right", "other"])
    return pd.concat([named, table.drop(columns=["label", "pattern"])], axis=1)


def deletion_table(names: Sequence[str], curves: np.ndarray, episodes: np.ndarray,
                   seed: int) -> pd.DataFrame:
    """Compare deletion and insertion in the order of each map with random orders.

    Args:
        names: names of the maps (M,).
        curves: curves of the maps and then of random orders, float64 (N, orders, 2, P).
        episodes: episode of each frame (N,).
        seed: seed of the bootstrap over episodes.

    Returns:
        Table with columns ``map``, ``kind``, ``area`` and ``random_area`` (mean areas under the
        curves, in standard deviations of the output over the frames), and the columns of
        ``COMPARISON``.
    """
    deviation = max(float(curves[:, 0, 0, 0].std()), 1e-9)
    areas = areas_under(curves) / deviation  # (N, orders, 2)
    random = areas[:, len(names):].mean(axis=1)
    bootstrap = ClusterBootstrap(episodes, seed)
    return pd.DataFrame([
        (name, kind, *compare_areas(areas[:, place, number], random[:, number], kind, bootstrap))
        for place, name in enumerate(names) for number, kind in enumerate(KINDS)],
        columns=["map", "kind", "area", "random_area", *COMPARISON])


def report(description: str, tables: Mapping[str, pd.DataFrame]) -> str:
    """Return the report as Markdown.

    Args:
        description: a sentence that describes the frames and the output.
        tables: the tables ``agreement``, ``objects``, ``deletion`` and ``randomisation``.
    """
    agreement = tables["agreement"]
    return "\n".join([
        "# Saliency through the simulator and attributions: which is right about the real game?",
        "", markdown_escaped(description), "",
        "A simulation begins at the vector of a recorded frame and the two before it, and "
        "takes the most likely latents and the agent's likeliest actions, so nothing is "
        "drawn. Its saliency at step 0 is compared with attributions in the recorded frame.",
        "", "## Objects hidden in the real game", "",
        "One kind of object is drawn no more in one frame; the game stays as it is, and the "
        "agent plays on. A map is right if the change of the output has the sign opposite to "
        "that of the map in the object's pixels. Below: share of hidden objects a frame; "
        "interval by bootstrap over episodes. **Claimed** leaves 0 out and has p (Holm) and p "
        f"(controls) <= {LEVEL}; controls are the maps of other frames.", "",
        *markdown_table(
            ("map", "compared with", "steps later", "right", "other", "difference (95 %)",
             "controls", "p (Holm)", "p (controls)", "verdict"),
            [(row.map, row.compared_with, str(row.lag), f"{row.right:.3f}", f"{row.other:.3f}",
              f"{row.effect:+.3f} ({format_range(row.low_95, row.high_95, '+.3f')})",
              format_range(row.control_low, row.control_high, "+.3f"), format_p(row.p_holm),
              format_p(row.p_control), bold(row.verdict, row.claimed))
             for row in agreement[~agreement["control"]].itertuples()]),
        "By kind of object:", "",
        *_markdown(tables["objects"], "map", "lag", "kind", "frames", "change", "agreement",
                   "low_95", "high_95", "chance", "above_chance", "rank_correlation",
                   "rank_low_95", "rank_high_95"),
        "## Deletion and insertion", "",
        f"Blocks of {BLOCK} x {BLOCK} pixels of the real frame go to the mean frame "
        "(deletion) or come from it, those first that a map says raise the output most. Areas "
        "under the curve in deviations of the output; better than random orders where the "
        "interval of the difference lies above 0.", "", *_markdown(tables["deletion"]),
        "## Weights drawn again", "",
        "Rank correlation of |map| with that of an agent of which more and more is random, "
        "from the heads downwards (Adebayo et al. 2018). Inside the simulator it is the agent "
        "that is random, not the simulator.", "", *_markdown(tables["randomisation"])])


def _markdown(table: pd.DataFrame, *columns: str) -> list[str]:
    """Format the given columns of a table, or all columns, as Markdown."""
    table = table[list(columns)] if columns else table
    return markdown_table([name.replace("_", " ") for name in table], [
        ["" if pd.isna(value) else f"{value:.3g}" if isinstance(value, float) else str(value)
         for value in row] for row in table.itertuples(index=False)])


def plot(tables: Mapping[str, pd.DataFrame], curves: np.ndarray, names: Sequence[str]) -> Figure:
    """Plot the agreement, deletion and insertion curves, and correlations with maps of randomised
    agents.

    Args:
        tables: as for ``report``.
        curves: curves of the maps in ``names`` and then of random orders, float64
            (N, orders, 2, P).
        names: names of the maps (M,).
    """
    figure = Figure(figsize=(17, 5.2), layout="constrained")
    right, *falling, random = figure.subplots(1, 4)
    agreement = tables["agreement"]
    rows = agreement[(agreement["compared_with"] == CHANCE) & ~agreement["control"]].copy()
    rows[["low_95", "high_95", "control_low", "control_high"]] += 0.5  # were differences from 0.5
    forest_plot(right, rows, [f"{row.map.partition(',')[0]}, {row.lag} later" if row.lag
                              else row.map for row in rows.itertuples()], value="right")
    right.axvline(0.5, color=DARK_GREY, linewidth=0.8)
    right.set_title("share of hidden objects whose sign is right\n(bars: 95 %; grey: maps of other "
                    "frames)", fontsize=10)
    shares = np.linspace(0, 1, curves.shape[-1])
    for number, (axes, kind) in enumerate(zip(falling, KINDS)):
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
    for axes in (*falling, random):
        axes.grid(alpha=0.3)
    return figure
