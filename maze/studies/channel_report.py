"""Report and figure of ``python -m maze.channels``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from common.palette import BLUE, DPI, VERMILION
from common.tables import markdown_table
from interventions.tracking import SCORES
from maze.studies.multiplied import OUTCOMES
from maze.studies.tracks import CENTRED, CHEESE, PUBLISHED, THINGS
from stats.report import PATCHES
from stats.report import report as effect_report

_METRICS = {"accuracy": "accuracy", "auc": "AUC", "log_loss": "log-loss (nats)", "r2": "R²"}


def report(scores: pd.DataFrame, layer: str, effects: pd.DataFrame, probes: pd.DataFrame,
           num_forks: int) -> str:
    """The report as Markdown.

    Args:
        scores: with ``chosen``.
        layer: whose channels were multiplied.
        effects: of that; empty if none was chosen.
    """
    sizes = scores.drop_duplicates("set").set_index("set")["num_levels"]
    lines = [
        "# Channels that follow the cheese", "",
        f"Chosen on {sizes['choosing']} levels: channels whose hit rate, contrast and specificity "
        "are above the largest of any channel with permuted squares, and in which the cheese "
        f"stands out more than a wall at the same squares. Numbers are of {sizes['reporting']} "
        "other levels. Contrasts are in standard deviations of a channel; mouse and wall are what "
        "the same channel shows of these.", ""]
    found = scores[(scores["set"] == "reporting") & scores["chosen"]]
    by_thing = {thing: found[(found["thing"] == thing) & (found["mapping"] == PUBLISHED)].set_index(
        ["layer", "channel"]) for thing in THINGS}
    rows = [(name, str(channel), *(f"{row[each]:.3f}" for each in SCORES), f"{row['at']:.3g}",
             f"{row['elsewhere']:.3g}",
             *(f"{by_thing[thing].loc[(name, channel), 'contrast']:.2f}" for thing in THINGS[1:]),
             "yes" if row["tracks"] else "no")
            for (name, channel), row in by_thing[CHEESE].iterrows()]
    lines += markdown_table(
        ("layer", "channel", "hit rate", "contrast", "specificity", "at the cheese", "elsewhere",
         "contrast: mouse", "contrast: wall", "above chance here, too"), rows)
    cheese = found[found["thing"] == CHEESE].groupby("mapping")["contrast"].mean()
    if len(cheese):
        lines += [f"Mean contrast of these with the cells of the published mapping: "
                  f"{cheese[PUBLISHED]:.3f}; with those whose field of view is centred on the "
                  f"square: {cheese[CENTRED]:.3f}.", ""]
    lines += ["## Probes", "", "Linear, trained, chosen and tested on different levels; 95 % "
              "intervals over levels. Base: without reading the layer. Shuffled: labels shuffled "
              "between levels.", ""]
    lines += markdown_table(("layer", "target", "metric", "score (95 %)", "base", "shuffled"), [
        (row.layer, row.target, _METRICS[row.metric],
         f"{row.score:.3f} ({row.low_95:.3f} to {row.high_95:.3f})", f"{row.base:.3f}",
         f"{row.shuffled:.3f}") for row in probes.itertuples()])
    if effects.empty:
        lines += ["## Multiplied channels", "", f"No channel of {layer} was chosen, so none was "
                  "multiplied."]
        return "\n".join(lines)
    found = effect_report(effects, OUTCOMES, PATCHES, f"Positive and negative parts of the chosen "
                          f"channels of {layer}, multiplied, at the decision squares of "
                          f"{num_forks} forks among the levels that are reported.")
    return "\n".join(lines) + "\n" + found.replace("\n#", "\n##").replace("# ", "## ", 1)


def plot(path: Path, scores: pd.DataFrame, probes: pd.DataFrame) -> None:
    """Hit rate against contrast of each channel by layer, and the probes of each target."""
    shown = scores[(scores["set"] == "reporting") & (scores["mapping"] == PUBLISHED)
                   & (scores["thing"] == CHEESE)]
    layers, targets = list(shown["layer"].unique()), list(probes["target"].unique())
    columns = max(len(layers), -(-len(targets) // 2))
    figure = Figure(figsize=(3.2 * columns, 9.5), layout="constrained")
    panels = figure.subplots(3, columns, squeeze=False)
    for axes in panels.flat:
        axes.axis("off")
    for axes, layer in zip(panels[0], layers):
        part = shown[shown["layer"] == layer]
        axes.axis("on")
        axes.axhline(part["hit_rate_threshold"].iloc[0], color="#888888", linewidth=0.8)
        axes.axvline(part["contrast_threshold"].iloc[0], color="#888888", linewidth=0.8)
        axes.scatter(part["contrast"], part["hit_rate"], s=14,
                     color=np.where(part["chosen"], VERMILION, BLUE))
        for row in part[part["chosen"]].itertuples():
            axes.annotate(str(row.channel), (row.contrast, row.hit_rate), fontsize=8)
        axes.set(title=layer.removeprefix("embedder."), xlabel="contrast of the cheese (sd)",
                 ylabel="hit rate", ylim=(-0.03, 1.06))
    for axes, target in zip(panels[1:].flat, targets):
        part = probes[(probes["target"] == target) & probes["metric"].isin(("accuracy", "r2"))]
        places = np.arange(len(part))
        axes.axis("on")
        axes.errorbar(places, part["score"], np.array([part["score"] - part["low_95"],
                                                       part["high_95"] - part["score"]]),
                      color=BLUE, marker="o", markersize=4, linewidth=1.2, label="probe")
        axes.plot(places, part["base"], color="black", linewidth=0.8, label="base")
        axes.plot(places, part["shuffled"], color="#888888", linestyle=":", label="shuffled")
        axes.set_xticks(places, [name.removeprefix("embedder.") for name in part["layer"]],
                        rotation=60, ha="right", fontsize=7)
        axes.set(title=target, ylabel=_METRICS[part["metric"].iloc[0]])
    panels[1, 0].legend(fontsize=8)
    figure.suptitle("Channels that follow the cheese (red: chosen on other levels), and probes")
    figure.savefig(path, dpi=DPI, format="png")
