"""Training curves of a simulator."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from common.training_curves import STEPS, TRAINING, VALIDATION, save

SIMULATOR_TITLES = {
    "loss": "total loss",
    "loss_image": "image loss of a window",
    "loss_reward": "reward loss of a window",
    "loss_terminal": "terminal loss of a window",
    "loss_agent_state": "loss of the agent's state, of a window",
    "kl_nats": "KL of posterior and prior (nats a step)",
    "posterior_entropy": "entropy of the posterior (nats a step)",
    "prior_entropy": "entropy of the prior (nats a step)",
    "vector_distance": "mean distance of two bottleneck vectors",
    "loss_first_action": "loss of the first action (nats)",
    "gradient_norm": "gradient norm before it is clipped",
    "frames_per_second": "frames a second",
}
LOGARITHMIC = {"loss", "loss_image", "loss_reward", "loss_terminal", "loss_agent_state",
               "gradient_norm"}
SMOOTHED_ROWS = 20


def plot_simulator(log: pd.DataFrame, path: Path, title: str) -> None:
    """Plot the metrics in ``progress.csv`` on training and held-out episodes."""
    figure, grid = plt.subplots(3, 4, figsize=(18, 12), layout="constrained")
    for axes, (name, heading) in zip(grid.flat, SIMULATOR_TITLES.items()):
        held_out = f"held_out_{name}"
        for column, colour, label in ((name, TRAINING, "training episodes"),
                                      (held_out, VALIDATION, "held-out episodes")):
            if column in log:
                axes.plot(log["batches"], log[column], color=colour, alpha=0.25, linewidth=0.7)
                smooth = log[column].rolling(SMOOTHED_ROWS, min_periods=1).mean()
                axes.plot(log["batches"], smooth, color=colour, label=label)
        if held_out in log:
            axes.legend()
        if name in LOGARITHMIC:
            axes.set_yscale("log")
        axes.set_title(heading, fontsize=10)
        axes.set_xlabel("batches")
        axes.xaxis.set_major_formatter(STEPS)
        axes.grid(alpha=0.3)
    save(figure, path, title)
