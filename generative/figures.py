"""Figures of training, of the loss over simulated steps, and of the fidelity card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from common.palette import (
    BLUE,
    DARK_GREY,
    DPI,
    GREEN,
    ORANGE,
    PURPLE,
    SKY_BLUE,
    VERMILION,
)
from common.training_curves import STEPS, TRAINING, VALIDATION, save
from envs.objects import kind_label
from generative.fidelity import (
    KEPT,
    OBJECT_ERROR,
    OBJECT_SHOWN,
    OTHER_POLICY_KL,
    OTHER_VALUE_CORRELATION,
    PSNR,
    PSNR_MARGIN,
    PSNR_MOVING,
    PSNR_REMEMBERED,
    PSNR_REVEALED,
    SSIM,
)
from generative.loss_over_time import (
    CONSTANT_POLICY,
    KINDS,
    LAST_FRAME,
    MEAN_FRAME,
    NOOP_ACTIONS,
    OTHER_SIMULATOR,
    PERSISTENCE,
    POLICY_KL,
    SHIFTED_ACTIONS,
    SHUFFLED_ACTIONS,
    SIMULATOR,
    STATE_COSINE,
    VALUE_CORRELATION,
)
from stats.report import format_interval

TITLES = {"image": "image: half the sum of squared errors", "reward": "reward: half the squared "
          "error", "terminal": "terminal: cross-entropy (nats)", "agent_state": "agent's state: "
          "half the sum of squared errors", "kl": "KL of posterior and prior (nats)"}
STEP = "simulated step"
TITLES_OF_AGENT = {
    POLICY_KL: "agent's policy: divergence from that on true frames (nats)",
    VALUE_CORRELATION: "agent's value: correlation with that on true frames",
    STATE_COSINE: "agent's state: cosine with that on true frames"}
LINES = {SIMULATOR: (BLUE, "-"), SHUFFLED_ACTIONS: (VERMILION, "--"),
         LAST_FRAME: (GREEN, "-."), MEAN_FRAME: (DARK_GREY, ":"),
         SHIFTED_ACTIONS: (ORANGE, (0, (5, 2))), NOOP_ACTIONS: (PURPLE, (0, (3, 1, 1, 1))),
         OTHER_SIMULATOR: (SKY_BLUE, (0, (8, 2))),
         CONSTANT_POLICY: ("black", (0, (1, 1))), PERSISTENCE: ("black", (0, (4, 1, 1, 1)))}
LABELS = {SIMULATOR: "simulator", SHUFFLED_ACTIONS: "simulator, actions of another window",
          LAST_FRAME: "last initial frame", MEAN_FRAME: "mean frame",
          SHIFTED_ACTIONS: "simulator, actions one step late",
          NOOP_ACTIONS: "simulator, no actions", OTHER_SIMULATOR: "other simulator",
          CONSTANT_POLICY: "the agent's mean policy", PERSISTENCE: "the agent's output of step 0"}
TITLES_OF_CARD = {
    PSNR: "PSNR, all pixels (dB)", PSNR_REMEMBERED: "PSNR, remembered pixels (dB)",
    PSNR_REVEALED: "PSNR, newly revealed pixels (dB)", PSNR_MOVING: "PSNR, moving objects (dB)",
    SSIM: "SSIM, all pixels", PSNR_MARGIN: "PSNR with the recorded actions above others (dB)",
    POLICY_KL: "agent inside: divergence of its policy (nats)",
    VALUE_CORRELATION: "agent inside: correlation of its values",
    OTHER_POLICY_KL: "agent not in training: divergence (nats)",
    OTHER_VALUE_CORRELATION: "agent not in training: correlation of its values"}
TITLES_OF_TRAINING = {
    "loss": "total loss",
    "loss_image": "image loss of a window",
    "loss_reward": "reward loss of a window",
    "loss_terminal": "terminal loss of a window",
    "loss_agent_state": "loss of the agent's state, of a window",
    "kl_nats": "KL of posterior and prior (nats per step)",
    "posterior_entropy": "entropy of the posterior (nats per step)",
    "prior_entropy": "entropy of the prior (nats per step)",
    "vector_distance": "mean distance of two bottleneck vectors",
    "loss_first_action": "loss of the first action (nats)",
    "gradient_norm": "gradient norm before clipping",
    "frames_per_second": "frames per second",
}
LOGARITHMIC = {"loss", "loss_image", "loss_reward", "loss_terminal", "loss_agent_state",
               "gradient_norm"}
SMOOTHED_ROWS = 20
_KEPT_WIDTH = 0.4  # half the width of a group of bars


def plot_simulator(log: pd.DataFrame, path: Path, title: str) -> None:
    """Plot the metrics in ``progress.csv`` on training and held-out episodes."""
    figure, grid = plt.subplots(3, 4, figsize=(18, 12), layout="constrained")
    for axes, (name, heading) in zip(grid.flat, TITLES_OF_TRAINING.items()):
        held_out = f"held_out_{name}"
        for column, colour, label in ((name, TRAINING, "training episodes"),
                                      (held_out, VALIDATION, "held-out episodes")):
            if column in log:
                axes.plot(log["batches"], log[column], color=colour, alpha=0.25, linewidth=0.7)
                smooth = log[column].rolling(SMOOTHED_ROWS, min_periods=1).mean()
                axes.plot(log["batches"], smooth, color=colour, label=label,
                          marker="o" if len(log) == 1 else None)
        if held_out in log:
            axes.legend()
        if name in LOGARITHMIC:
            axes.set_yscale("log")
        axes.set_title(heading, fontsize=10)
        axes.set_xlabel("batches")
        axes.xaxis.set_major_formatter(STEPS)
        axes.grid(alpha=0.3)
    save(figure, path, title)


def _draw_panels(table: pd.DataFrame, titles: dict[str, str]) -> tuple[Figure, list[Axes]]:
    """Draw measures over simulated steps, three panels per row, and return the figure and all
    panels, of which at least one is empty.

    Args:
        table: table from ``loss_tables.table_of``.
    """
    num_rows = len(titles) // 3 + 1
    figure = Figure(figsize=(15, 4.2 * num_rows), layout="constrained")
    panels = list(figure.subplots(num_rows, 3).flat)
    for axes, (kind, title) in zip(panels, titles.items()):
        _draw(axes, table, kind, title)
        if kind in (*KINDS, POLICY_KL, OTHER_POLICY_KL):
            axes.set_ylim(bottom=0)
        axes.set_xlabel(f"{STEP} (0 shows the last initial frame)")
    for axes in panels[len(titles):]:
        axes.axis("off")
    return figure, panels


def _legend(panels: Sequence[Axes]) -> tuple[list[Artist], list[str]]:
    """Return one handle and label for each predictor that any panel shows."""
    handles = {label: handle for axes in panels
               for handle, label in zip(*axes.get_legend_handles_labels())}
    return list(handles.values()), list(handles)


def plot_losses(table: pd.DataFrame, path: Path, title: str) -> None:
    """Plot means with intervals over simulated steps, one panel per loss or measure of the agent.

    Args:
        table: table from ``loss_tables.table_of``.
    """
    figure, panels = _draw_panels(table, TITLES | TITLES_OF_AGENT)
    panels[-1].legend(*_legend(panels), loc="center", fontsize=11)
    figure.suptitle(f"{_at_last_step(table, 'image', 'The error of the image', '.0f')}\n{title}")
    figure.savefig(path, dpi=DPI)


def plot_objects(table: pd.DataFrame, kinds: Sequence[str], path: Path, title: str) -> None:
    """Plot how well each predictor draws each kind of object, over simulated steps.

    The top row shows the share of objects that are shown, the bottom row the squared error on their
    pixels. Kinds that were never in view are left out.

    Args:
        table: table from ``loss_tables.table_of``.
    """
    seen = [kind for kind in kinds if (table["kind"] == OBJECT_SHOWN + kind).any()]
    figure = Figure(figsize=(3.2 * max(len(seen), 3), 6.5), layout="constrained")
    panels = figure.subplots(2, len(seen), squeeze=False, sharex=True) if seen else np.empty((2, 0))
    for (above, below), kind in zip(panels.T, seen):
        _draw(above, table, OBJECT_SHOWN + kind, f"{kind_label(kind)}: share shown")
        above.set_ylim(-0.03, 1.03)
        _draw(below, table, OBJECT_ERROR + kind, f"{kind_label(kind)}: squared error")
        below.set_ylim(bottom=0)
        below.set_xlabel(STEP)
    if seen:
        figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center",
                      ncols=4, fontsize=10)
    last = table[(table["step"] == table["step"].max()) & (table["predictor"] == SIMULATOR)]
    shown = last.set_index("kind")["mean"]
    figure.suptitle("The simulator still shows, at the last step: " + ", ".join(
        f"{kind_label(kind)} {100 * shown[OBJECT_SHOWN + kind]:.0f} %" for kind in seen
        if OBJECT_SHOWN + kind in shown) + f"\n{title}" if seen else
        f"{title}; no object is in view")
    figure.savefig(path, dpi=DPI)


def plot_card(table: pd.DataFrame, path: Path, title: str) -> None:
    """Plot the fidelity card, see ``generative.fidelity.FidelityCard``.

    The figure has one panel per measure over simulated steps. The last panel is a bar chart of kept
    objects, that is, objects in view at the start that are still shown at the last step.

    Args:
        table: table from ``loss_tables.table_of``.
    """
    titles = {kind: heading for kind, heading in TITLES_OF_CARD.items()
              if (table["kind"] == kind).any()}
    perfect = (table["predictor"] == LAST_FRAME) & (table["step"] == 0)  # equals the label
    figure, panels = _draw_panels(table[~(perfect & table["kind"].isin(titles))], titles)
    _draw_kept(panels[len(titles)], table)
    figure.legend(*_legend(panels[:len(titles)]), loc="outside lower center", ncols=4,
                  fontsize=11)
    answers = [_at_last_step(table, kind, titles[kind], ".3g") for kind in list(titles)[:1]]
    figure.suptitle("\n".join([*answers, title]))
    figure.savefig(path, dpi=DPI)


def _at_last_step(table: pd.DataFrame, kind: str, what: str, form: str) -> str:
    """Return a measure of the simulator and of the last initial frame at the last step in words."""
    rows = table[(table["kind"] == kind) & table["mean"].notna()]
    rows = rows[rows["step"] == rows["step"].max()].set_index("predictor")
    return f"{what} at step {rows['step'].iloc[0]}: " + ", ".join(
        f"{LABELS[name]} " + format_interval(row["mean"], row["low_95"], row["high_95"], form)
        for name in (SIMULATOR, LAST_FRAME) if name in rows.index for row in (rows.loc[name],))


def _draw_kept(axes: Axes, table: pd.DataFrame) -> None:
    """Draw a bar chart of kept objects, by kind of object, for the simulators and the mean frame.

    An object is kept if it is in view at the start and still shown at the last step.
    """
    rows = table[table["kind"].str.startswith(KEPT)]
    rows = rows[rows["step"] == rows["step"].max()]
    if not len(rows):
        return
    axes.axis("on")
    shown = [name for name in (SIMULATOR, OTHER_SIMULATOR, MEAN_FRAME)
             if (rows["predictor"] == name).any()]
    kinds = rows["kind"].str.removeprefix(KEPT).map(kind_label)
    by_kind = rows.assign(kind=kinds).pivot(index="kind", columns="predictor").reindex(
        kinds.unique())
    means, low, high = (by_kind[name][shown] for name in ("mean", "low_95", "high_95"))
    errors = np.nan_to_num([means - low, high - means]).clip(min=0)  # (2, kinds, predictors)
    means = means.rename(columns=LABELS)
    means.plot.bar(ax=axes, yerr=np.moveaxis(errors, -1, 0), width=2 * _KEPT_WIDTH,
                   color=[LINES[name][0] for name in shown], error_kw={"elinewidth": 1},
                   xlabel="", rot=40)
    axes.set_ylim(0, 1.3)  # leaves room for the legend
    axes.legend(fontsize=9, ncols=2, loc="upper center")
    axes.set_title(f"objects kept: share still shown at step {rows['step'].max()}", fontsize=11)
    axes.grid(alpha=0.3, axis="y")


def _draw(axes: Axes, table: pd.DataFrame, kind: str, title: str) -> None:
    for predictor, (colour, style) in LINES.items():
        rows = table[(table["kind"] == kind) & (table["predictor"] == predictor)]
        if len(rows):
            axes.plot(rows["step"], rows["mean"], linestyle=style, color=colour, linewidth=1.8,
                      label=LABELS[predictor])
            axes.fill_between(rows["step"], rows["low_95"], rows["high_95"], color=colour,
                              alpha=0.2, linewidth=0)
    axes.set_title(title, fontsize=11)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
