"""Figures of an agent's training run, from its log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from common.training_curves import OTHER, STEPS, TRAINING, VALIDATION, save
from stats.report import format_number

SMOOTHED = 9  # updates in the moving average of compared runs
TITLES = {
    "episode_rewards": "return of the last 40 episodes",
    "episode_len": "length of the last 40 episodes (steps)",
    "mean_episode_value": "mean value estimate",
    "mean_policy_loss": "policy loss",
    "mean_value_loss": "value loss",
    "mean_entropy_loss": "entropy of the policy (nats)",
    "num_episodes": "episodes finished",
    "wall_time": "wall time (minutes)",
}



def draw(axes: plt.Axes, log: pd.DataFrame, name: str) -> None:
    """Plot a quantity against time steps.

    Returns, lengths and numbers of episodes are shown for training levels and unseen levels.

    Args:
        log: the run's ``log.csv``.
        name: quantity, a key of ``TITLES``.
    """
    steps = log["timesteps"]
    if name in ("episode_rewards", "episode_len"):
        for prefix, colour, label in (("", TRAINING, "training levels"),
                                      ("val_", VALIDATION, "unseen levels")):
            axes.plot(steps, log[f"{prefix}mean_{name}"], color=colour, label=f"mean, {label}")
            for kind in ("min", "max"):
                axes.plot(steps, log[f"{prefix}{kind}_{name}"], color=colour, linewidth=0.7,
                          linestyle=":", label=f"lowest and highest, {label}"
                          if kind == "min" else None)
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    elif name == "num_episodes":
        axes.plot(steps, log[name], color=TRAINING, label="training levels")
        axes.plot(steps, log["num_episodes_val"], color=VALIDATION, label="unseen levels")
        axes.legend()
    else:
        axes.plot(steps, log[name] / (60 if name == "wall_time" else 1), color=OTHER)
    axes.set_title(TITLES[name], fontsize=10)
    _finish(axes)


def _finish(axes: plt.Axes) -> None:
    axes.set_xlabel("environment steps")
    axes.xaxis.set_major_formatter(STEPS)
    axes.grid(alpha=0.3)


def plot_everything(log: pd.DataFrame, path: Path, title: str) -> None:
    """Write a figure with one panel per quantity in ``TITLES``."""
    figure, grid = plt.subplots(2, 4, figsize=(18, 9), layout="constrained")
    for axes, name in zip(grid.flat, TITLES):
        draw(axes, log, name)
    save(figure, path, f"{_last_returns(log)}\n{title}")


def plot_for_figure(log: pd.DataFrame, path: Path, title: str) -> None:
    """Write a figure of the return on training and unseen levels."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    axes.plot(log["timesteps"], log["mean_episode_rewards"], color=TRAINING,
              label="training levels")
    axes.plot(log["timesteps"], log["val_mean_episode_rewards"], color=VALIDATION,
              label="unseen levels")
    axes.set_ylabel("mean return of the last 40 episodes")
    _finish(axes)
    axes.legend()
    save(figure, path, f"{_last_returns(log)}\n{title}")


def _last_returns(log: pd.DataFrame) -> str:
    mean, unseen = (format_number(log[name].iloc[-1], ".2f")
                    for name in ("mean_episode_rewards", "val_mean_episode_rewards"))
    return f"Return at last: {mean} on training levels, {unseen} on unseen levels"


def plot_comparison(logs: Mapping[str, pd.DataFrame], path: Path) -> None:
    """Write a figure that compares the smoothed returns of two runs on training levels.

    Args:
        logs: training logs of two runs by run name.
    """
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for (name, log), colour in zip(logs.items(), (TRAINING, VALIDATION), strict=True):
        axes.plot(log["timesteps"], log["mean_episode_rewards"].rolling(
            SMOOTHED, center=True, min_periods=1).mean(), color=colour, label=name)
    axes.set_ylabel(f"return on training levels, mean of {SMOOTHED} updates")
    _finish(axes)
    axes.legend()
    save(figure, path, "Return at last: " + ", ".join(
        f"{name} {format_number(log['mean_episode_rewards'].iloc[-1], '.2f')}"
        for name, log in logs.items()))
