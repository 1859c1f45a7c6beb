"""Figures of the read-out weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from analysis.hidden_states.readout import Readout
from analysis.plotting.matrices import Heatmap, Names, plot_matrices, signed_scale
from common.game_constants import ACTION_LABELS
from common.palette import BLUE, DPI, VERMILION

UNIT = "per standard deviation of the component"


def plot_actions(path: Path, weights: Readout, title: str) -> None:
    """Heat map of all actions and components."""
    plot_matrices(path, [Heatmap(weights.preferences, "logit less the mean of all logits")],
                  Names(ACTION_LABELS, _numbers(weights), "action", "IC"),
                  signed_scale([weights.preferences], f"nats {UNIT}", square=False), 1,
                  f"Read-out weights of the policy\n{title}")


def plot_action_bars(path: Path, weights: Readout, title: str) -> None:
    """A panel for each component, a bar for each action."""
    preferences = weights.preferences
    num_ics = len(weights.value)
    columns = min(num_ics, 4)
    rows = -(-num_ics // columns)
    figure = Figure(figsize=(3.6 * columns, 1.9 * rows + 1.2), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for component, axes in enumerate(panels.flat):
        if component >= num_ics:
            axes.axis("off")
            continue
        _draw_bars(axes, preferences[:, component])
        axes.set_title(f"IC {component}", fontsize=9)
        axes.set_xticks(range(len(ACTION_LABELS)), ACTION_LABELS, rotation=90, fontsize=6)
        axes.tick_params(axis="x", labelbottom=component + columns >= num_ics)
    figure.supxlabel("action", fontsize=9)
    figure.supylabel(f"nats {UNIT}", fontsize=9)
    figure.suptitle("Read-out weights of the policy: logits less the mean of all logits; blue "
                    f"raises, orange lowers\n{title}", fontsize=10)
    figure.savefig(path, dpi=DPI)


def plot_value(path: Path, weights: Readout, title: str) -> None:
    """A bar for each component."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    _draw_bars(axes, weights.value)
    axes.set_xticks(range(len(weights.value)), _numbers(weights))
    axes.set(xlabel="IC", ylabel=f"value (discounted, scaled rewards)\n{UNIT}")
    axes.set_title(f"Read-out weights of the value; blue raises, orange lowers\n{title}",
                   fontsize=10)
    figure.savefig(path, dpi=DPI)


def _draw_bars(axes, values: np.ndarray) -> None:
    axes.bar(range(len(values)), values,
             color=[BLUE if value >= 0 else VERMILION for value in values])
    axes.axhline(0, color="black", linewidth=0.8)
    axes.grid(axis="y", alpha=0.3)


def _numbers(weights: Readout) -> list[str]:
    return [str(i) for i in range(len(weights.value))]
