"""Figure of the losses against the simulated step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from common.palette import BLUE, DARK_GREY, DPI, GREEN, VERMILION
from generative.loss_over_time import (
    KINDS,
    LAST_FRAME,
    MEAN_FRAME,
    OBJECT_ERROR,
    OBJECT_SHOWN,
    POLICY_KL,
    PREDICTORS,
    SHUFFLED_ACTIONS,
    SIMULATOR,
    STATE_COSINE,
    VALUE_CORRELATION,
)

TITLES = {"image": "image: half the sum of squared errors", "reward": "reward: half the squared "
          "error", "terminal": "terminal: cross-entropy (nats)", "agent_state": "agent's state: "
          "half the sum of squared errors", "kl": "posterior from prior: divergence (nats)"}
STEP = "simulated step"
TITLES_OF_AGENT = {
    POLICY_KL: "agent's policy: divergence from that on true frames (nats)",
    VALUE_CORRELATION: "agent's value: correlation with that on true frames",
    STATE_COSINE: "agent's state: cosine with that on true frames"}
LINES = {SIMULATOR: (BLUE, "-"), SHUFFLED_ACTIONS: (VERMILION, "--"),
         LAST_FRAME: (GREEN, "-."), MEAN_FRAME: (DARK_GREY, ":")}
LABELS = {SIMULATOR: "simulator", SHUFFLED_ACTIONS: "simulator, actions of another window",
          LAST_FRAME: "last initial frame", MEAN_FRAME: "mean frame of the training episodes"}


def plot_losses(table: pd.DataFrame, path: Path, title: str) -> None:
    """A panel for each kind of loss and measure of the agent: means and their intervals against
    the step."""
    figure = Figure(figsize=(15, 12.5), layout="constrained")
    panels = figure.subplots(3, 3).flat
    titles = {**{kind: TITLES[kind] for kind in KINDS}, **TITLES_OF_AGENT}
    for axes, (kind, name) in zip(panels, titles.items()):
        _draw(axes, table, kind, name)
        if kind in KINDS or kind == POLICY_KL:
            axes.set_ylim(bottom=0)
        axes.set_xlabel(f"{STEP} (0 shows the last initial frame)")
    *drawn, corner = figure.axes
    corner.axis("off")
    corner.legend(*drawn[0].get_legend_handles_labels(), loc="center", fontsize=11)
    figure.suptitle(title)
    figure.savefig(path, dpi=DPI)


def plot_objects(table: pd.DataFrame, kinds: Sequence[str], path: Path, title: str) -> None:
    """For each kind of object that was in view the share that is shown, above the error on its
    pixels."""
    seen = [kind for kind in kinds if (table["kind"] == OBJECT_SHOWN + kind).any()]
    figure = Figure(figsize=(3.2 * max(len(seen), 3), 6.5), layout="constrained")
    panels = figure.subplots(2, len(seen), squeeze=False, sharex=True) if seen else np.empty((2, 0))
    for (above, below), kind in zip(panels.T, seen):
        _draw(above, table, OBJECT_SHOWN + kind, f"{kind}: share shown")
        above.set_ylim(-0.03, 1.03)
        _draw(below, table, OBJECT_ERROR + kind, f"{kind}: squared error")
        below.set_ylim(bottom=0)
        below.set_xlabel(STEP)
    if seen:
        figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center",
                      ncols=len(PREDICTORS), fontsize=10)
    figure.suptitle(title if seen else f"{title}; no object is in view")
    figure.savefig(path, dpi=DPI)


def _draw(axes: Axes, table: pd.DataFrame, kind: str, title: str) -> None:
    for predictor in PREDICTORS:
        rows = table[(table["kind"] == kind) & (table["predictor"] == predictor)]
        colour, style = LINES[predictor]
        if len(rows):
            axes.plot(rows["step"], rows["mean"], style, color=colour, linewidth=1.8,
                      label=LABELS[predictor])
            axes.fill_between(rows["step"], rows["low_95"], rows["high_95"], color=colour,
                              alpha=0.2, linewidth=0)
    axes.set_title(title, fontsize=11)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
