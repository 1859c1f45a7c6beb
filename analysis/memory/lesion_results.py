"""Results of lesions of an agent's memory: files, curves over steps, report and figure.

Layout of ``analysis/memory/lesions/``::

    settings.json          settings
    open_loop.npz          policy divergences after lesions on recorded frames, and attributions
    states.npz             hidden states of the intact agent in the real game
    episodes/<arm>.csv     one row per level that was played under the condition named <arm>
    effects.csv            one row per condition and outcome in the real game
    open_loop_effects.csv  one row per condition and tested step (TESTED_STEPS), on recorded frames
    curves.csv             divergence at every step from the lesion on, and attribution, see
                           curves_of
    reach.csv              over how many steps frames affect the policy, see reach_of
    report.md              report
    effects.png, kl.png    forest plot of the effects, and the curves

Letters in shape comments: A conditions, N windows, K steps from the start of a lesion on, R
resamplings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import rankdata

from analysis.memory.lesions import COPY
from common.palette import COLOURS, DARK_GREY
from common.results import Array, Entry, File, Npz, Schema, Table, Text
from common.tables import markdown_table
from stats.bootstrap import ClusterBootstrap, by_episode
from stats.effects import Condition
from stats.report import bold, format_interval, format_p, format_range

LESIONS = Schema(
    "lesions of the memory", "python -m analysis.memory_lesions", items={
        "open_loop": Entry("open_loop.npz", Npz({
            "kl": Array(np.float32, "A N K"), "moved": Array(np.float64, "A"),
            "attribution": Array(np.float32, "N L"), "levels": Array(np.int64, "N")})),
        "states": Entry("states.npz", Npz({
            "states": Array(np.float32, "S D"), "lengths": Array(np.int64, "N")})),
        "episodes": Entry("episodes/{}.csv", Table(
            {"level": int, "level_seed": int, "cause": str, "length": int, "return": float,
             "moved": float, "changed_steps": int}, exact=True))},
    results={
        "effects": Entry("effects.csv", Table({
            "arm": str, "label": str, "outcome": str, "control": bool, "claimed": bool,
            **dict.fromkeys(("unaltered", "altered", "effect", "low_95", "high_95", "p_holm",
                             "p_control"), float)})),
        "open_loop_effects": Entry("open_loop_effects.csv", Table({
            "arm": str, "label": str, "outcome": str, "control": bool, "claimed": bool,
            **dict.fromkeys(("altered", "low_95", "high_95", "p_control"), float)})),
        "curves": Entry("curves.csv", Table({
            "arm": str, "label": str, "control": bool, "step": int, "value": float,
            "low_95": float, "high_95": float})),
        "reach": Entry("reach.csv", Table({
            "curve": str, **dict.fromkeys(("reach", "reach_low_95", "reach_high_95", "spearman",
                                           "spearman_low_95", "spearman_high_95"), float)})),
        "report": Entry("report.md", Text()), "figure": Entry("effects.png", File()),
        "kl_figure": Entry("kl.png", File())},
    informative=("versions", "agent_file", "data_dir"))
ATTRIBUTION = "attribution"  # name of the curve of attributions
SOLVED = "solved"  # cause of an episode that solved its level
TESTED_STEPS = (1, 4, 16, 32)  # steps after a lesion at which the open loop is tested
REACH = 0.1  # share of a curve's maximum that defines its reach, see reach_of
Statistic = Callable[[np.ndarray, np.ndarray], np.ndarray]


def curves_of(conditions: Sequence[Condition], kl: np.ndarray, attribution: np.ndarray,
              levels: np.ndarray, seed: int) -> pd.DataFrame:
    """Average divergences and attributions over windows.

    Args:
        conditions: lesions and controls.
        kl: divergence at each step from the lesioned one on (A, N, K).
        attribution: absolute attribution to the frame k steps before the action, for k = 0 to K
            (N, K + 1).
        levels: level seed of each window (N,).
        seed: seed of the bootstrap over levels.

    Returns:
        A row per condition and step, with the columns ``arm`` (name of the condition), ``label``,
        ``control``, ``step`` (1 for the lesioned step), ``value`` (mean), ``low_95`` and
        ``high_95``. In further rows, ``arm`` is ATTRIBUTION, and ``step`` is the number of steps
        between frame and action, from 0.
    """
    bootstrap = ClusterBootstrap(levels, seed)
    named = [(condition.name, condition.label, condition.control, 1, values)
             for condition, values in zip(conditions, kl)]
    named.append((ATTRIBUTION, "absolute attribution", False, 0, attribution))
    tables = []
    for name, label, control, first, values in named:
        low, high = bootstrap.interval(values.T)
        tables.append(pd.DataFrame({
            "arm": name, "label": label, "control": control,
            "step": np.arange(first, first + values.shape[1]), "value": values.mean(axis=0),
            "low_95": low, "high_95": high}))
    return pd.concat(tables, ignore_index=True)


def reach_of(names: Sequence[str], kl: np.ndarray, attribution: np.ndarray, levels: np.ndarray,
             seed: int) -> pd.DataFrame:
    """Compute over how many steps frames affect the policy, from lesions and from attributions.

    Steps k are counted from a reset or swap, whose own step is k = 1. At step k, the agent has seen
    only the last k frames since its state was replaced. The divergence at step k is compared with
    the attribution to the frame k steps before the action. The attribution to the frame of the
    action itself, k = 0, is left out.

    Args:
        names: names of the conditions.
        kl, attribution, levels, seed: see ``curves_of``.

    Returns:
        A row per ``curve``: the name of a reset or swap that acts once, or ATTRIBUTION.

        - ``reach``: last step at which the mean curve exceeds REACH times its maximum
        - ``spearman``: rank correlation of the mean curve with the mean attribution over the K
          steps; NaN if one of them is constant
        - ``reach_low_95``, …: ends of the 95 % intervals of ``reach`` and ``spearman``
    """
    bootstrap, num_steps = ClusterBootstrap(levels, seed), kl.shape[2]
    lags = attribution[:, 1:]
    curves = {name: kl[names.index(name)] for name in ("reset_once", "swap_once")
              if name in names}
    curves[ATTRIBUTION] = lags
    counts = by_episode(levels, np.ones((1, len(levels))))
    statistics = {"reach": lambda curve, other: last_above(curve), "spearman": rank_correlation}
    rows = []
    for name, values in curves.items():
        sums = by_episode(levels, np.concatenate([values, lags], axis=1).T)  # (levels, 2 K)
        row: dict[str, str | float] = {"curve": name}
        for quantity, statistic in statistics.items():
            def of_levels(draws: np.ndarray, sums: np.ndarray = sums,
                          statistic: Statistic = statistic) -> np.ndarray:
                means = draws @ sums / (draws @ counts)
                return statistic(means[..., :num_steps], means[..., num_steps:])

            row[quantity] = float(of_levels(np.ones((1, len(counts))))[0])
            row[f"{quantity}_low_95"], row[f"{quantity}_high_95"] = bootstrap.interval_of(of_levels)
        rows.append(row)
    return pd.DataFrame(rows)


def last_above(curves: np.ndarray) -> np.ndarray:
    """Return the last step (from 1) at which each curve (R, K) exceeds REACH times its maximum,
    float64 (R,); 0 for a curve without positive values."""
    above = curves > REACH * curves.max(axis=-1, keepdims=True).clip(min=0)
    steps = curves.shape[-1] - above[..., ::-1].argmax(axis=-1)
    return np.where(above.any(axis=-1), steps, 0).astype(float)


def rank_correlation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return Spearman's rank correlation of each row of ``a`` with the same row of ``b`` (R,); NaN
    if one of them is constant."""
    a, b = (rankdata(values, axis=-1) for values in (a, b))
    a, b = (values - values.mean(axis=-1, keepdims=True) for values in (a, b))
    norm = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return np.divide((a * b).sum(axis=-1), norm, out=np.full(norm.shape, np.nan), where=norm > 0)


def open_loop_report(effects: pd.DataFrame, reach: pd.DataFrame, size: tuple[int, int],
                     num_levels: int) -> str:
    """Format the report's section on recorded frames.

    Args:
        effects: effects at the tested steps, from ``stats.effects.compare_conditions``.
        reach: table of ``reach_of``.
        size: number of windows, and number of steps from the lesioned one on.
        num_levels: number of levels of the windows.
    """
    lesions, controls = effects[~effects["control"]], effects[effects["control"]]
    outcomes = list(dict.fromkeys(lesions["outcome"]))
    rows = []
    for label, part in lesions.groupby("label", sort=False):
        rows.append((label, *(
            bold(format_interval(row.altered, row.low_95, row.high_95), row.claimed)
            + f"; controls {format_range(row.control_low, row.control_high)}, p "
            + format_p(row.p_control) for row in part.itertuples())))
    claimed = controls["claimed"].sum()
    lines = [
        "## Recorded frames", "",
        f"{size[0]} lesions on {num_levels} recorded levels. The agent sees the recorded frames; "
        "only its hidden state differs. KL(intact || lesioned) of the policy in nats, with 95 % "
        "intervals over levels; k = 1 is the lesioned step. Bold: claimed by the rule above "
        "(`stats.effects`). Controls are random changes of the state of the same size; the rule "
        f"claims {claimed} of their {len(controls)} effects.", "",
        *markdown_table(("lesion", *(f"k = {name.removeprefix('kl_')}" for name in outcomes)),
                        rows),
        "After a reset, the policy at step k has seen the last k frames only. Reach: last step at "
        f"which the mean exceeds {REACH:.0%} of its maximum, up to {size[1]}. Attribution: "
        "absolute value of gradient times deviation of the embedding from its mean, for the frame "
        "k steps before the action; the frame of the action itself, k = 0, is left out. Spearman: "
        "rank correlation over k with the attribution.", "",
        *markdown_table(("curve", "reach (steps)", "Spearman with attribution"), [
            (row.curve.replace("_", " "),
             format_interval(row.reach, row.reach_low_95, row.reach_high_95),
             "" if row.curve == ATTRIBUTION else "none" if np.isnan(row.spearman) else
             format_interval(row.spearman, row.spearman_low_95, row.spearman_high_95))
            for row in reach.itertuples()])]
    return "\n".join(lines)


def plot_curves(curves: pd.DataFrame, description: str) -> Figure:
    """Plot the divergence at each step from the lesion on, and the attribution to earlier frames.

    Args:
        curves: table of ``curves_of``.
        description: description of the runs, for the title.
    """
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    lesions = curves[~curves["control"] & ~curves["arm"].isin((ATTRIBUTION, COPY))]
    for axes, title in zip(panels, ("one step is changed", "all steps are changed")):
        once = axes is panels[0]
        names = [arm for arm in dict.fromkeys(lesions["arm"]) if arm.endswith("_once") == once]
        for name, colour in zip(names, COLOURS):
            part = lesions[lesions["arm"] == name]
            axes.fill_between(part["step"], part["low_95"], part["high_95"], color=colour,
                              alpha=0.2, linewidth=0)
            axes.plot(part["step"], part["value"], color=colour, label=part["label"].iloc[0])
            mine = curves[curves["arm"].str.fullmatch(f"control_\\d+_{name}")]
            axes.plot(*mine.groupby("step")["value"].mean().reset_index().to_numpy().T,
                      color=colour, linestyle=":", linewidth=1)
        axes.set_yscale("symlog", linthresh=1e-3)
        axes.set(title=title, xlabel="step k (1: lesioned step)", ylim=(0, None))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("KL(intact || lesioned), nats")
    _overlay(panels[0], curves[(curves["arm"] == ATTRIBUTION) & (curves["step"] > 0)])
    for axes in panels:
        if axes.lines:
            axes.legend(fontsize=8, title="dotted: random changes of the same size",
                        title_fontsize=8)
    figure.suptitle(f"Policy after lesions of the memory, on recorded frames: {description}",
                    fontsize=11)
    return figure


def _overlay(axes: Axes, part: pd.DataFrame) -> None:
    """Plot the attribution on a second y axis."""
    other = axes.twinx()
    other.plot(part["step"], part["value"], color=DARK_GREY, linestyle="--")
    other.set_ylim(bottom=0)
    other.set_ylabel("dashed: |attribution| to the frame k steps earlier", color=DARK_GREY,
                     fontsize=8)
