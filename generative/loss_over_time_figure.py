"""Figure of the losses against the simulated step."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from common.palette import BLUE, DARK_GREY, DPI, GREEN, VERMILION
from generative.loss_over_time import (
    KINDS,
    LAST_FRAME,
    MEAN_FRAME,
    PREDICTORS,
    SHUFFLED_ACTIONS,
    SIMULATOR,
)

TITLES = {"image": "image: half the sum of squared errors", "reward": "reward: half the squared "
          "error", "terminal": "terminal: cross-entropy (nats)", "agent_state": "agent's state: "
          "half the sum of squared errors", "kl": "posterior from prior: divergence (nats)"}
LINES = {SIMULATOR: (BLUE, "-"), SHUFFLED_ACTIONS: (VERMILION, "--"),
         LAST_FRAME: (GREEN, "-."), MEAN_FRAME: (DARK_GREY, ":")}
LABELS = {SIMULATOR: "simulator", SHUFFLED_ACTIONS: "simulator, actions of another window",
          LAST_FRAME: "last initial frame", MEAN_FRAME: "mean frame of the training episodes"}


def plot_losses(table: pd.DataFrame, path: Path, title: str) -> None:
    """A panel for each kind of loss: means and their intervals against the step."""
    figure = Figure(figsize=(15, 8.5), layout="constrained")
    *panels, corner = figure.subplots(2, 3).flat
    for axes, kind in zip(panels, KINDS):
        for predictor in PREDICTORS:
            rows = table[(table["kind"] == kind) & (table["predictor"] == predictor)]
            colour, style = LINES[predictor]
            if len(rows):
                axes.plot(rows["step"], rows["mean"], style, color=colour, linewidth=1.8,
                          label=LABELS[predictor])
                axes.fill_between(rows["step"], rows["low_95"], rows["high_95"], color=colour,
                                  alpha=0.2, linewidth=0)
        axes.set_title(TITLES[kind], fontsize=11)
        axes.set_xlabel("simulated step (0 shows the last initial frame)")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    corner.axis("off")
    corner.legend(*panels[0].get_legend_handles_labels(), loc="center", fontsize=11)
    figure.suptitle(title)
    figure.savefig(path, dpi=DPI)
