"""Tables, report and figure of ``python -m maze.retargeting``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from common.palette import BLUE, DPI, VERMILION
from maze.studies.retargets import CELLS, CHANNELS, PATCHED, UNPATCHED
from stats.bootstrap import ClusterBootstrap
from stats.effects import MIN_STARTS, Condition, Outcome, compare_conditions

ALL = "all"  # targets, as a part
OUTCOME = Outcome("path", "path probability", probability=True)
_DISTANCES = ((0, 0), (1, 2), (3, 5), (6, 10), (11, 25), (26, 10**6))  # off the corner's path
_SIZES = ((3, 7), (9, 11), (13, 15), (17, 21), (23, 31))
_CONTROLS = {CHANNELS: "other channels at the same cell", CELLS: "the same channels at other cells"}
_KEYS = ["seed", "row", "column"]


def by_part(targets: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Means over targets with 95 % intervals over levels: of all, by squares off the corner's path,
    and by rows of the maze.

    Args:
        targets: see ``retargets.COLUMNS``.
        seed: of the bootstrap.
    """
    parts = [(ALL, ALL, np.ones(len(targets), bool))]
    for name, column, bins in (("off the corner's path", "off_corner_path", _DISTANCES),
                               ("rows of the maze", "maze_dim", _SIZES)):
        for low, high in bins:
            label = (f"{low}" if low == high else f"{low} to {high}" if high < 10**6
                     else f"{low} or more")
            parts.append((name, label, targets[column].between(low, high).to_numpy()))
    rows = []
    for name, label, chosen in parts:
        part = targets[chosen]
        for outcome in ("path", "exact"):
            before, after = part[f"{outcome}_{UNPATCHED}"], part[f"{outcome}_{PATCHED}"]
            if before.isna().any() or not len(part):
                continue
            change = (after - before).to_numpy()
            ends = ClusterBootstrap(part["seed"].to_numpy(), seed).interval(
                change[None])[:, 0]
            rows.append((name, label, outcome, part["seed"].nunique(), len(part), before.mean(),
                         after.mean(), change.mean(), *ends, after.mean() / before.mean(),
                         (change > 0).mean()))
    return pd.DataFrame(rows, columns=[
        "by", "part", "outcome", "levels", "targets", UNPATCHED, PATCHED, "effect", "low_95",
        "high_95", "ratio", "share_larger"])


def effects(targets: pd.DataFrame, controls: pd.DataFrame, seed: int) -> pd.DataFrame:
    """The effect on path probabilities, against both kinds of controls at the same targets.

    Args:
        controls: see ``retargets.CONTROL_COLUMNS``.

    Returns:
        The table of ``stats.effects.compare_conditions``, empty with fewer than 10 levels.
        Targets of a level are drawn and flipped together.
    """
    found = controls.pivot(index=_KEYS, columns=["kind", "number"], values="path")
    own = targets.set_index(_KEYS).loc[found.index]
    levels = own.index.get_level_values("seed").to_numpy()
    if len(np.unique(levels)) < MIN_STARTS:
        return pd.DataFrame()
    arms, after = [], []
    for kind, label in _CONTROLS.items():
        arms.append(Condition(f"set, {kind}", f"against {label}", kind, False))
        after.append(own["path_patched"].to_numpy())
        for number in found[kind].columns:
            arms.append(Condition(f"{kind} {number}", label, kind, True))
            after.append(found[kind][number].to_numpy())
    before, after = own["path_unpatched"].to_numpy()[:, None], np.stack(after)[..., None]
    return compare_conditions(arms, [OUTCOME], before, after, seed, levels)


def report(arm: str, layer: str, targets: pd.DataFrame, parts: pd.DataFrame,
           tested: pd.DataFrame) -> str:
    """The report as Markdown."""
    lines = [
        f"# Retargeting: {arm}", "",
        f"Of {targets['seed'].nunique()} levels without cheese, {len(targets)} targets. Patched at "
        f"{layer}. Path: normalised path probability. Exact: probability of reaching the target "
        "within an episode. Intervals: 95 %, over levels.", "",
        "| by | part | outcome | targets | unpatched | patched | change (95 %) | ratio | "
        "larger at |", "|" + " --- |" * 9]
    lines += [f"| {row.by} | {row.part} | {row.outcome} | {row.targets} | {row.unpatched:.3f} | "
              f"{row.patched:.3f} | {row.effect:+.3f} ({row.low_95:.3f} to {row.high_95:.3f}) | "
              f"{row.ratio:.2f} | {row.share_larger:.0%} |" for row in parts.itertuples()]
    if tested.empty:
        return "\n".join([*lines, "", "No controls were tried, or on fewer than 10 levels, so "
                          "nothing is claimed.", ""])
    lines += ["", "## Against controls", "", "Path probability at some targets of each level.", "",
              "| compared | change (95 %) | p (Holm) | controls' changes | p (controls) | "
              "verdict |", "|" + " --- |" * 6]
    lines += [f"| {row.label} | {row.effect:+.3f} ({row.low_95:.3f} to {row.high_95:.3f}) | "
              f"{row.p_holm:.2g} | {row.control_low:.3f} to {row.control_high:.3f} | "
              f"{row.p_control:.2g} | {row.verdict} |"
              for row in tested[~tested["control"]].itertuples()]
    return "\n".join([*lines, ""])


def plot(path: Path, arm: str, parts: pd.DataFrame) -> None:
    """Both probabilities, unpatched and patched, by distance and by size."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    outcomes = [name for name in ("path", "exact") if (parts["outcome"] == name).any()]
    panels = figure.subplots(len(outcomes), 2, squeeze=False, sharey=True)
    for row, outcome in zip(panels, outcomes):
        for axes, by in zip(row, ("off the corner's path", "rows of the maze")):
            part = parts[(parts["by"] == by) & (parts["outcome"] == outcome)]
            places = np.arange(len(part))
            axes.plot(places, part[UNPATCHED], "o-", color=BLUE, label=UNPATCHED)
            axes.errorbar(places, part[PATCHED],
                          np.array([part["effect"] - part["low_95"],
                                    part["high_95"] - part["effect"]]),
                          fmt="o-", color=VERMILION, label="patched (bars: 95 % of the change)")
            axes.set_xticks(places, part["part"])
            axes.set(xlabel=f"squares {by}" if by.startswith("off") else by, ylim=(0, 1.02),
                     ylabel=f"{outcome} probability")
            axes.grid(alpha=0.3)
    panels[0, 0].legend(fontsize=9)
    figure.suptitle(f"Retargeting: {arm}")
    figure.savefig(path, dpi=DPI, format="png")
