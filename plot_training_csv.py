"""Plot the training curve of a run, of an agent or of a simulator."""

from __future__ import annotations

import re
from pathlib import Path

import common as _common  # noqa: F401  # isort: skip  (chooses the backend of matplotlib)
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.ticker import EngFormatter

from agents.training_log import newest_run, read_log
from common.cli import Parser
from common.errors import script_main
from common.files import atomic_path
from common.palette import BLUE, DARK_GREY, DPI, VERMILION
from generative.runs import newest_simulator_run, read_progress

TRAINING, VALIDATION, OTHER = BLUE, VERMILION, DARK_GREY

STEPS = EngFormatter(sep="")  # 500k, 2M

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


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("--datapath", type=Path, required=True,
                       help="a run's folder, or its experiment's folder for the newest run; of "
                            "an agent (train.py) or of a simulator (train_gen_model.py)")
    return flags


def draw(axes: plt.Axes, log: pd.DataFrame, name: str) -> None:
    """One quantity against time steps: training and validation where there are both."""
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
    axes.set_xlabel("environment steps")
    axes.xaxis.set_major_formatter(STEPS)
    axes.grid(alpha=0.3)


def plot_everything(log: pd.DataFrame, path: Path, title: str) -> None:
    figure, grid = plt.subplots(2, 4, figsize=(18, 9), layout="constrained")
    for axes, name in zip(grid.flat, TITLES):
        draw(axes, log, name)
    save(figure, path, title)


def plot_for_figure(log: pd.DataFrame, path: Path, title: str) -> None:
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    axes.plot(log["timesteps"], log["mean_episode_rewards"], color=TRAINING,
              label="training levels")
    axes.plot(log["timesteps"], log["val_mean_episode_rewards"], color=VALIDATION,
              label="unseen levels")
    axes.set(xlabel="environment steps", ylabel="mean return of the last 40 episodes")
    axes.xaxis.set_major_formatter(STEPS)
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path, title)


def plot_simulator(log: pd.DataFrame, path: Path, title: str) -> None:
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


def save(figure: plt.Figure, path: Path, title: str) -> None:
    figure.suptitle(title)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=DPI)
    plt.close(figure)
    print(f"wrote {path}")


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    simulator_folder = newest_simulator_run(args.datapath)
    if simulator_folder is not None:
        log = read_progress(simulator_folder)
        title = f"{simulator_folder.parent.name}, {log['batches'].iloc[-1]:,} batches"
        plot_simulator(log, simulator_folder / "plot.png", title)
        return
    folder = newest_run(args.datapath)
    log = read_log(folder)
    experiment = re.sub(r"_\d\d-\d\d-\d{4}.*", "", folder.name).replace("_", " ")
    title = f"{folder.parent.name}, {experiment}, {log['timesteps'].iloc[-1]:,} steps"
    plot_everything(log, folder / "plot.png", title)
    plot_for_figure(log, folder / "plot_for_fig.png", title)


if __name__ == "__main__":
    raise SystemExit(main())
