"""Report and figures of the probe atlas."""

from __future__ import annotations

import textwrap

import pandas as pd
from matplotlib.figure import Figure

from analysis.memory.probe_atlas import (
    ACTION_POSITION,
    BASELINES,
    CURRENT,
    EMBEDDING,
    FRAME,
    HIDDEN,
    LAST_MAP,
    UNTRAINED,
    better_probes,
)
from common.palette import BLUE, DARK_GREY, GREEN, ORANGE, PURPLE, SKY_BLUE, VERMILION
from common.tables import format_count, markdown_table
from stats.forest_plot import forest_plot, legend_mark
from stats.report import bold, format_interval, format_number, format_p

REPRESENTATIONS = {
    HIDDEN: ("hidden state", VERMILION), EMBEDDING: ("embedding of the frame", BLUE),
    LAST_MAP: ("last convolutional map", SKY_BLUE), FRAME: ("pixels", GREEN),
    UNTRAINED: ("hidden state, untrained agent", PURPLE),
    ACTION_POSITION: ("last action and position", ORANGE),
    CURRENT: ("embedding, last action, position", "#000000")}
AHEAD = {"action": "action", "jump": "whether it jumps", "right": "whether it moves right"}
METRICS = {"auc": "AUC", "accuracy": "accuracy", "r2": "R²"}


def report(atlas: pd.DataFrame, beyond: pd.DataFrame, skipped: pd.DataFrame,
           description: str) -> str:
    """Format the report of a probe atlas as Markdown.

    Args:
        atlas, beyond, skipped: tables ``atlas.csv``, ``beyond.csv`` and ``skipped.csv``.
        description: agent, and numbers of steps and levels.
    """
    best = better_probes(atlas)
    scores = best.pivot(index="label", columns="representation", values="score")
    shuffled = best[best["representation"] == HIDDEN].set_index("label")
    lines = [
        "# Probe atlas of the hidden state", "", f"{description}.", "",
        "Score on test levels with a 95 % bootstrap interval over levels: AUC for a property, "
        "accuracy for an action, R² for a number. Each representation has a linear probe and a "
        "network with one hidden layer. The table shows the probe that is better on the "
        "validation part, which is also used to choose the penalty (linear probe) and the number "
        "of epochs (network).", "",
        "## Labels decodable beyond the current frame", "",
        f"{beyond['claimed'].sum()} of {len(beyond)} labels are decoded better from the hidden "
        "state than from the best baseline without memory. Baselines: "
        f"{'; '.join(REPRESENTATIONS[name][0] for name in BASELINES)}. Difference: paired "
        "bootstrap over levels; p (Holm): corrected for all labels. **Bold**: the interval lies "
        "above 0 and p (Holm) is at most 0.05.", ""]
    for group, rows in beyond.groupby("group", sort=False):
        lines += [f"### {str(group).capitalize()}", "", *markdown_table(
            ("label", "score", "hidden state", "best baseline", "its score", "difference",
             "p (Holm)"),
            [(f"`{row.label}`", METRICS[row.metric],
              format_interval(row.hidden_state, row.low_95_hidden, row.high_95_hidden),
              REPRESENTATIONS[row.baseline][0], format_number(row.baseline_score),
              bold(format_interval(row.difference, row.low_95, row.high_95, "+.2g"), row.claimed),
              format_p(row.p_holm)) for row in rows.itertuples()])]
    lines += [
        "## Scores of all representations", "",
        "Base: score of a constant prediction. Shuffled: hidden state, with labels shuffled "
        "between levels.", "",
        *markdown_table(
            ("label", *(name for name, _ in REPRESENTATIONS.values()), "base", "shuffled"),
            [(f"`{label}`", *(format_number(scores.loc[label, name], ".2f")
                              for name in REPRESENTATIONS),
              *(format_number(shuffled.loc[label, name], ".2f") for name in ("base", "shuffled")))
             for label in beyond["label"]])]
    if len(skipped):
        lines += ["## Labels that were not probed", "", *markdown_table(
            ("label", "reason"), [(f"`{row.label}`", row.reason) for row in skipped.itertuples()])]
    return "\n".join(lines)


def plot_actions_ahead(atlas: pd.DataFrame, description: str) -> Figure:
    """Plot how well the agent's own actions are decoded, against the number of steps ahead."""
    figure = Figure(figsize=(15, 5), layout="constrained")
    ahead = atlas["label"].str.extract(r"^(action|jump|right)_ahead_(\d+)$")
    rows = better_probes(atlas.assign(what=ahead[0], steps=ahead[1].astype(float)))
    for axes, (what, title) in zip(figure.subplots(1, 3), AHEAD.items()):
        shown = rows[rows["what"] == what].sort_values("steps")
        for name, (label, colour) in REPRESENTATIONS.items():
            part = shown[shown["representation"] == name]
            axes.plot(part["steps"], part["score"], "o-", color=colour, markersize=4, label=label,
                      linewidth=2.2 if name == HIDDEN else 1.2)
        part = shown[shown["representation"] == HIDDEN]
        axes.fill_between(part["steps"], part["low_95"], part["high_95"],
                          color=REPRESENTATIONS[HIDDEN][1], alpha=0.15)
        axes.plot(part["steps"], part["shuffled"], "x:", color=DARK_GREY,
                  label="hidden state, shuffled labels")
        axes.plot(part["steps"], part["base"], "--", color=DARK_GREY, label="constant prediction")
        if len(part):
            axes.set_xscale("log")
            axes.set_xticks(part["steps"], part["steps"].astype(int))
            axes.minorticks_off()
            axes.set_ylabel(f"{METRICS[part['metric'].iloc[0]]} on test levels")
        axes.set_xlabel("steps ahead")
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5,
                  fontsize=8)
    hidden = rows[(rows["what"] == "action") & (rows["representation"] == HIDDEN)]
    answer = "; ".join(f"{row.score:.2f} at {row.steps:.0f}" for row in hidden[
        hidden["steps"].isin((hidden["steps"].min(), hidden["steps"].max()))].itertuples())
    figure.suptitle("The agent's own action, decoded in advance from its hidden state: "
                    f"score {answer} steps ahead\n{description}", fontsize=11)
    return figure


def plot_beyond(beyond: pd.DataFrame, description: str) -> Figure:
    """Plot, for each label, how much better it is decoded from the hidden state than from the best
    baseline."""
    figure = Figure(figsize=(8, 1.6 + 0.19 * len(beyond)), layout="constrained")
    axes = figure.subplots()
    claimed, other = ({"color": VERMILION, "marker": "D"}, {"color": BLUE, "marker": "o"})
    styles = [claimed if row.claimed else other for row in beyond.itertuples()]
    axes.axvline(0, color="black", linewidth=0.8)
    forest_plot(axes, beyond, [f"{row.label.replace('_', ' ')} ({METRICS[row.metric]})"
                               for row in beyond.itertuples()], styles, "difference")
    names = "; ".join(REPRESENTATIONS[name][0] for name in BASELINES)
    axes.set_xlabel("score of the hidden state minus score of the best baseline\n"
                    + textwrap.fill(f"({names})", 80), fontsize=8)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_title(f"{beyond['claimed'].sum()} of {format_count(len(beyond), 'labels')} are "
                   f"decoded beyond the current frame\n{description}", fontsize=10)
    figure.legend(handles=[legend_mark("above 0 after Holm's correction", **claimed),
                           legend_mark("not above 0 after the correction", **other)],
                  loc="outside lower center", ncols=2, fontsize=8)
    return figure
