"""Figures of the loss over simulated steps, of objects shown, and of the fidelity card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
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
from generative.fidelity import (
    KEPT,
    OBJECT_ERROR,
    OBJECT_SHOWN,
    OTHER_POLICY_KL,
    PSNR,
    PSNR_MARGIN,
    PSNR_MOVING,
    PSNR_REMEMBERED,
    PSNR_REVEALED,
    SSIM,
)
from generative.loss_over_time import (
    KINDS,
    LAST_FRAME,
    MEAN_FRAME,
    NOOP_ACTIONS,
    OTHER_SIMULATOR,
    POLICY_KL,
    SHIFTED_ACTIONS,
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
         LAST_FRAME: (GREEN, "-."), MEAN_FRAME: (DARK_GREY, ":"),
         SHIFTED_ACTIONS: (ORANGE, (0, (5, 2))), NOOP_ACTIONS: (PURPLE, (0, (3, 1, 1, 1))),
         OTHER_SIMULATOR: (SKY_BLUE, (0, (8, 2)))}
LABELS = {SIMULATOR: "simulator", SHUFFLED_ACTIONS: "simulator, actions of another window",
          LAST_FRAME: "last initial frame", MEAN_FRAME: "mean frame",
         SHIFTED_ACTIONS: "simulator, actions one step late",
         NOOP_ACTIONS: "simulator, no actions", OTHER_SIMULATOR: "other simulator"}
TITLES_OF_CARD = {
    PSNR: "PSNR, all pixels (dB)", PSNR_REMEMBERED: "PSNR, remembered pixels (dB)",
    PSNR_REVEALED: "PSNR, newly revealed pixels (dB)", PSNR_MOVING: "PSNR, moving objects (dB)",
    SSIM: "SSIM, all pixels", PSNR_MARGIN: "PSNR with the recorded actions above others (dB)",
    POLICY_KL: "agent inside: divergence of its policy (nats)",
    OTHER_POLICY_KL: "agent not in training: divergence (nats)"}
_KEPT_WIDTH = 0.4  # half the width of a group of bars


def plot_losses(table: pd.DataFrame, path: Path, title: str) -> None:
    """Plot means with intervals over simulated steps, one panel per loss or measure of the
    agent."""
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
    """Plot, for each kind of object that was in view, the share shown (top) and the squared error
    on its pixels (bottom)."""
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
                      ncols=4, fontsize=10)
    figure.suptitle(title if seen else f"{title}; no object is in view")
    figure.savefig(path, dpi=DPI)


def plot_card(table: pd.DataFrame, path: Path, title: str) -> None:
    """Plot the fidelity card: one panel per measure over simulated steps, and the shares of objects
    kept at the last step."""
    figure = Figure(figsize=(16, 13), layout="constrained")
    kinds = [kind for kind in TITLES_OF_CARD if (table["kind"] == kind).any()]
    panels = list(figure.subplots(3, 3).flat)
    perfect = (table["predictor"] == LAST_FRAME) & (table["step"] == 0)  # equals the label
    drawn = table[~(perfect & table["kind"].isin(TITLES_OF_CARD))]
    for axes, kind in zip(panels, kinds):
        _draw(axes, drawn, kind, TITLES_OF_CARD[kind])
        if kind in (POLICY_KL, OTHER_POLICY_KL):
            axes.set_ylim(bottom=0)
        axes.set_xlabel(f"{STEP} (0 shows the last initial frame)")
    _draw_kept(panels[len(kinds)], table)
    for axes in panels[len(kinds) + 1:]:
        axes.axis("off")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=11)
    figure.suptitle(title)
    figure.savefig(path, dpi=DPI)


def _draw_kept(axes: Axes, table: pd.DataFrame) -> None:
    """Draw bars: share of each kind of object in view at the start that is still shown at the last
    step, by the simulators and by the mean frame."""
    rows = table[table["kind"].str.startswith(KEPT)]
    rows = rows[rows["step"] == rows["step"].max()]
    if not len(rows):
        axes.axis("off")
        return
    kinds = rows["kind"].unique().tolist()
    shown = [name for name in (SIMULATOR, OTHER_SIMULATOR, MEAN_FRAME)
             if (rows["predictor"] == name).any()]
    for number, predictor in enumerate(shown):
        bars = rows[rows["predictor"] == predictor].set_index("kind").reindex(kinds)
        offset = (number - (len(shown) - 1) / 2) * 2 * _KEPT_WIDTH / len(shown)
        axes.bar(np.arange(len(kinds)) + offset, bars["mean"], 2 * _KEPT_WIDTH / len(shown),
                 yerr=np.nan_to_num([bars["mean"] - bars["low_95"], bars["high_95"] - bars["mean"]]
                                    ).clip(min=0),
                 color=LINES[predictor][0], error_kw={"elinewidth": 1})
    axes.set_xticks(range(len(kinds)), [kind.removeprefix(KEPT) for kind in kinds], rotation=40,
                    ha="right")
    axes.set_ylim(0, 1.03)
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
