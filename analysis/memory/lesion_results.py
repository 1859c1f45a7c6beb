"""Results of lesions of an agent's memory: files, curves over steps, report and figure.

Layout of ``analysis/memory/lesions/``::

    settings.json          settings
    open_loop.npz          policy divergences and value changes after lesions on recorded frames,
                           and attributions
    states.npz             hidden states of the intact agent in the real game
    episodes/<condition>.csv
                           one row per level that was played under the condition named
                           <condition>
    effects.csv            one row per condition and outcome in the real game
    open_loop_effects.csv  one row per condition and tested step (TESTED_STEPS), on recorded frames
    curves.csv             effect at every step from the lesion on, and attribution, see curves_of
    reach.csv              how long effects on policy and value last, see reach_of
    report.md              report
    effects.png, kl.png    forest plot of the effects, and the curves

Letters in shape comments: A conditions, N windows, K steps from the start of a lesion on, R
resamplings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.memory.lesions import COPY
from common.palette import COLOURS, DARK_GREY
from common.results import Array, Entry, File, Npz, Schema, Table, Text
from common.tables import markdown_table
from stats.association import rank_correlations
from stats.bootstrap import ClusterBootstrap, by_episode
from stats.effects import Condition
from stats.report import bold, format_interval, format_p, format_range

LESIONS = Schema(
    "lesions of the memory", "python -m analysis.memory_lesions", items={
        "open_loop": Entry("open_loop.npz", Npz({
            "kl": Array(np.float32, "A N K"), "value": Array(np.float32, "A N K"),
            "moved": Array(np.float64, "A"), "attribution": Array(np.float32, "N L"),
            "levels": Array(np.int64, "N")})),
        "states": Entry("states.npz", Npz({
            "states": Array(np.float32, "S D"), "lengths": Array(np.int64, "N")})),
        "episodes": Entry("episodes/{}.csv", Table(
            {"level": int, "level_seed": int, "cause": str, "length": int, "return": float,
             "moved": float, "changed_steps": int}, exact=True))},
    results={
        "effects": Entry("effects.csv", Table({
            "condition": str, "label": str, "outcome": str, "control": bool, "claimed": bool,
            **dict.fromkeys(("unaltered", "altered", "effect", "low_95", "high_95", "p_holm",
                             "p_control"), float)})),
        "open_loop_effects": Entry("open_loop_effects.csv", Table({
            "condition": str, "label": str, "outcome": str, "control": bool, "claimed": bool,
            **dict.fromkeys(("altered", "low_95", "high_95", "p_control"), float)})),
        "curves": Entry("curves.csv", Table({
            "condition": str, "label": str, "control": bool, "output": str, "step": int,
            "value": float, "low_95": float, "high_95": float})),
        "reach": Entry("reach.csv", Table({
            "curve": str, "output": str, "lag": int, **dict.fromkeys((
                f"{name}{end}" for name in ("reach", "left", "spearman")
                for end in ("", "_low_95", "_high_95")), float),
            **dict.fromkeys((f"control_{name}_{end}" for name in ("reach", "left")
                             for end in ("low", "median", "high")), float)})),
        "report": Entry("report.md", Text()), "figure": Entry("effects.png", File()),
        "kl_figure": Entry("kl.png", File())},
    informative=("versions", "agent_file", "data_dir"))
ATTRIBUTION = "attribution"  # name of the curve of attributions
ONCE = ("reset_once", "swap_once", "delay_once")  # lesions whose effects fade
TESTED_STEPS = (1, 4, 16, 32)  # steps after a lesion at which the open loop is tested
REACH = 0.1  # share of a curve's maximum that defines its reach, see reach_of
LEFT_AT = 16  # step at which the remaining share of an effect is reported, or the last one
POLICY, VALUE = "policy", "value"  # outputs of the agent on which effects are measured
_UNITS = {POLICY: "KL(intact || lesioned), nats", VALUE: "|change of the value|, return"}
Statistic = Callable[[np.ndarray, np.ndarray], np.ndarray]


def curves_of(conditions: Sequence[Condition], effects: Mapping[str, np.ndarray],
              attribution: np.ndarray, levels: np.ndarray, seed: int) -> pd.DataFrame:
    """Average effects and attributions over windows.

    Args:
        conditions: lesions and controls.
        effects: effect on each output at each step from the lesioned one on (A, N, K): divergence
            of the policy in nats, and absolute change of the value, by POLICY and VALUE.
        attribution: absolute attribution to the frame k steps before the action, for k = 0 to K
            (N, K + 1).
        levels: level seed of each window (N,).
        seed: seed of the bootstrap over levels.

    Returns:
        A row per output, condition and step, with the columns ``condition`` (name of the
        condition), ``label``, ``control``, ``output``, ``step`` (1 for the lesioned step),
        ``value`` (mean), ``low_95`` and ``high_95``. In further rows, ``condition`` is ATTRIBUTION,
        ``output`` is POLICY, and ``step`` is the number of steps between frame and action, from 0.
    """
    bootstrap = ClusterBootstrap(levels, seed)
    named = [(condition.name, condition.label, condition.control, output, 1, values)
             for output, of_output in effects.items()
             for condition, values in zip(conditions, of_output)]
    named.append((ATTRIBUTION, "absolute attribution", False, POLICY, 0, attribution))
    tables = []
    for name, label, control, output, first, values in named:
        low, high = bootstrap.interval(values.T)
        tables.append(pd.DataFrame({
            "condition": name, "label": label, "control": control, "output": output,
            "step": np.arange(first, first + values.shape[1]), "value": values.mean(axis=0),
            "low_95": low, "high_95": high}))
    return pd.concat(tables, ignore_index=True)


def reach_of(names: Sequence[str], effects: Mapping[str, np.ndarray], attribution: np.ndarray,
             levels: np.ndarray, seed: int) -> pd.DataFrame:
    """Compute how long the effects of lesions on policy and value last, next to those of random
    changes of the same size, and to attributions.

    Steps k are counted from the lesion, whose own step is k = 1. At step k after a reset or swap,
    the agent has seen only the last k frames since its state was replaced. The divergence of the
    policy at step k is compared with the attribution to the frame k steps before the action. The
    attribution to the frame of the action itself, k = 0, is left out.

    Args:
        names: names of the conditions; those of controls are ``control_<number>_<lesion>``.
        effects, attribution, levels, seed: see ``curves_of``.

    Returns:
        A row per ``curve`` and ``output``: each lesion that acts once on POLICY and VALUE, and
        ATTRIBUTION.

        - ``reach``: last step at which the mean curve exceeds REACH times its maximum
        - ``left``: mean at step ``lag`` as a share of the curve's maximum; ``lag`` is LEFT_AT or
          the last step
        - ``spearman``: rank correlation of the mean curve with the mean attribution over the K
          steps; NaN if one of them is constant
        - ``reach_low_95``, …: ends of the 95 % intervals of these three
        - ``control_reach_low``, ``…_median``, ``…_high``, ``control_left_low``, …: the same numbers
          of the lesion's controls; NaN for ATTRIBUTION
    """
    bootstrap, lags = ClusterBootstrap(levels, seed), attribution[:, 1:]
    num_steps = lags.shape[1]
    place = min(LEFT_AT, num_steps) - 1
    counts = by_episode(levels, np.ones((1, len(levels))))
    statistics: dict[str, Statistic] = {
        "reach": lambda curve, other: last_above(curve),
        "left": lambda curve, other: share_left(curve, place), "spearman": rank_correlations}
    curves = [(name, output, values[names.index(name)],
               [values[place] for place, other in enumerate(names)
                if other.startswith("control_") and other.endswith(f"_{name}")])
              for name in names if name in ONCE for output, values in effects.items()]
    rows = []
    for name, output, values, controls in [*curves, (ATTRIBUTION, POLICY, lags, [])]:
        sums = by_episode(levels, np.concatenate([values, lags], axis=1).T)  # (levels, 2 K)
        row: dict[str, str | float] = {"curve": name, "output": output, "lag": place + 1}
        for quantity, statistic in statistics.items():
            def of_levels(draws: np.ndarray, sums: np.ndarray = sums,
                          statistic: Statistic = statistic) -> np.ndarray:
                means = draws @ sums / (draws @ counts)
                return statistic(means[..., :num_steps], means[..., num_steps:])

            row[quantity] = float(of_levels(np.ones((1, len(counts))))[0])
            row[f"{quantity}_low_95"], row[f"{quantity}_high_95"] = bootstrap.interval_of(of_levels)
            if quantity != "spearman":
                each = ([float(statistic(control.mean(axis=0)[None], lags[:1])[0])
                         for control in controls] or [np.nan])
                row |= {f"control_{quantity}_{end}": float(np.quantile(each, q))
                        for end, q in (("low", 0), ("median", 0.5), ("high", 1))}
        rows.append(row)
    return pd.DataFrame(rows)


def share_left(curves: np.ndarray, place: int) -> np.ndarray:
    """Return entry ``place`` of each curve (R, K) as a share of its maximum (R,); 0 for a curve
    without positive values."""
    largest = curves.max(axis=-1)
    return np.divide(curves[..., place], largest, out=np.zeros_like(largest), where=largest > 0)


def last_above(curves: np.ndarray) -> np.ndarray:
    """Return the last step (from 1) at which each curve (R, K) exceeds REACH times its maximum,
    float64 (R,); 0 for a curve without positive values."""
    above = curves > REACH * curves.max(axis=-1, keepdims=True).clip(min=0)
    steps = curves.shape[-1] - above[..., ::-1].argmax(axis=-1)
    return np.where(above.any(axis=-1), steps, 0).astype(float)


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
        f"which the mean exceeds {REACH:.0%} of its maximum, up to {size[1]}. Left: mean at step "
        f"k = {reach['lag'].iloc[0]} as a share of the maximum. Attribution: "
        "absolute value of gradient times deviation of the embedding from its mean, for the frame "
        "k steps before the action; the frame of the action itself, k = 0, is left out. Spearman: "
        "rank correlation over k with the attribution. Random: median and range over the random "
        "changes of the same size. A duration says something about the content of the state only "
        "if it lies outside this range.", "",
        *markdown_table(
            ("curve", "output", "reach (steps)", "random", "left", "random",
             "Spearman with attribution"),
            [(row.curve.replace("_", " "), row.output,
              format_interval(row.reach, row.reach_low_95, row.reach_high_95),
              _of_controls(row.control_reach_median, row.control_reach_low,
                           row.control_reach_high),
              format_interval(row.left, row.left_low_95, row.left_high_95, ".2f"),
              _of_controls(row.control_left_median, row.control_left_low, row.control_left_high,
                           ".2f"),
              "" if row.curve == ATTRIBUTION else "none" if np.isnan(row.spearman) else
              format_interval(row.spearman, row.spearman_low_95, row.spearman_high_95))
             for row in reach.itertuples()])]
    return "\n".join(lines)


def _of_controls(median: float, low: float, high: float, form: str = ".3g") -> str:
    """Format the median and range of controls; return "" without controls."""
    return "" if np.isnan(median) else format_interval(median, low, high, form)


def plot_curves(curves: pd.DataFrame, description: str) -> Figure:
    """Plot the effects at each step from the lesion on, on the policy above and on the value below,
    and, in a further panel, the attribution to earlier frames.

    Args:
        curves: table of ``curves_of``.
        description: description of the runs, for the title.
    """
    lesions = curves[~curves["control"] & ~curves["condition"].isin((ATTRIBUTION, COPY))]
    groups = {title: conditions for title, once in (("one step is changed", True),
                                                    ("all steps are changed", False))
              if (conditions := [condition for condition in dict.fromkeys(lesions["condition"])
                                 if (condition in ONCE) == once])}
    attribution = curves[(curves["condition"] == ATTRIBUTION) & (curves["step"] > 0)]
    rows = 2 + bool(len(attribution))
    figure = Figure(figsize=(max(5.5 * len(groups), 7), 3.8 * rows + 0.6), layout="constrained")
    panels = figure.subplots(rows, len(groups), sharey="row", squeeze=False)
    for row, output in zip(panels, (POLICY, VALUE)):
        shown = curves[curves["output"] == output]
        for axes, (title, conditions) in zip(row, groups.items()):
            for condition, colour in zip(conditions, COLOURS):
                part = shown[shown["condition"] == condition]
                axes.fill_between(part["step"], part["low_95"], part["high_95"], color=colour,
                                  alpha=0.2, linewidth=0)
                axes.plot(part["step"], part["value"], color=colour, label=part["label"].iloc[0])
                random = shown[shown["condition"].str.fullmatch(f"control_\\d+_{condition}")]
                axes.plot(*random.groupby("step")["value"].mean().reset_index().to_numpy().T,
                          color=colour, linestyle=":", linewidth=1)
            axes.set_yscale("symlog", linthresh=1e-3 if output == POLICY else 1e-2)
            axes.set(title=title, xlabel="step k (1: lesioned step)", ylim=(0, None))
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8, title="dotted: random changes of the same size",
                        title_fontsize=8)
        row[0].set_ylabel(_UNITS[output])
    for axes in panels[2:].flat:
        axes.axis("off")
    if len(attribution):
        axes = panels[2, 0]
        axes.axis("on")
        axes.plot(attribution["step"], attribution["value"], color=DARK_GREY)
        axes.set(title="for comparison: attribution", xlabel="steps back", ylim=(0, None),
                 ylabel="|attribution| to the earlier frame")
        axes.grid(alpha=0.3)
    policy = lesions[lesions["output"] == POLICY]
    most = policy.loc[policy["value"].idxmax()]
    last = policy[policy["condition"] == most["condition"]].sort_values("step").iloc[-1]
    figure.suptitle(f'"{most["label"]}" changes the policy most: KL {most["value"]:.2g} nats at '
                    f'step {most["step"]}, {last["value"]:.2g} at step {last["step"]}\n'
                    f"recorded frames; {description}", fontsize=11)
    return figure
