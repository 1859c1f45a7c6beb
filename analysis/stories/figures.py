"""The figures of the causal stories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.influences.comparison import WITH
from common.palette import BLUE, DARK_GREY, DPI, VERMILION

_FRAME = 0.95  # inches


def plot_films(path: Path, films: np.ndarray, labels: Sequence[str], title: str) -> None:
    """The steps of some samples, one sample a row.

    Args:
        films: uint8 (samples, T, H, W, C).
        labels: of the rows.
    """
    figure, panels = _frames(*films.shape[:2])
    for row, (film, label) in enumerate(zip(films, labels)):
        _draw_row(panels[row], film, label)
    for step, axes in enumerate(panels[-1]):
        axes.set_xlabel(str(step), fontsize=8)
    figure.supxlabel("simulated step", fontsize=9)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=DPI)


def plot_component(path: Path, top: np.ndarray, bottom: np.ndarray, notes: Sequence[Sequence[str]],
                   title: str) -> None:
    """Frames in which a component is highest, above those in which it is lowest.

    Args:
        top, bottom: uint8 (frames, H, W, C), as many of each.
        notes: below the frames of both rows.
    """
    figure, panels = _frames(2, len(top))
    for axes, frames, label, words in zip(panels, (top, bottom), ("highest", "lowest"), notes):
        _draw_row(axes, frames, label)
        for panel, note in zip(axes, words):
            panel.set_xlabel(note, fontsize=6)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=DPI)


def plot_influences(path: Path, rows: pd.DataFrame, others: Sequence[pd.Series | None],
                    title: str) -> None:
    """Agreement of some influences, claimed ones filled, with both kinds of gradient.

    Args:
        rows: of the table of agreements.
        others: the same influences with the other kind of gradient, or None.
    """
    figure = Figure(figsize=(9, 1.6 + 0.34 * len(rows)), layout="constrained")
    axes = figure.subplots()
    kinds: dict[str, None] = {}
    for place, ((_, row), other) in enumerate(zip(rows.iterrows(), others)):
        for each in (row, other):
            if each is not None:
                kinds[each["env_grads"]] = None
                _draw_dot(axes, each, place)
    axes.axvline(0.5, color=DARK_GREY, linestyle=":")
    axes.set_yticks(range(len(rows)), [
        f"{row['source']} {'raises' if row['median_gradient'] > 0 else 'lowers'} {row['target']}, "
        f"lag {row['lag']}, effect {row['effect']:.2f}" for _, row in rows.iterrows()], fontsize=8)
    axes.set(xlim=(0, 1.02), ylim=(len(rows) - 0.4, -0.6),
             xlabel="share of the samples in which gradient and deviations agree; dotted: chance")
    axes.grid(axis="x", alpha=0.3)
    handles = [_dot(kind, True, f"{kind} gradients through the environment, claimed")
               for kind in kinds]
    handles += [_dot(kind, False, f"{kind} gradients through the environment, not claimed")
                for kind in kinds]
    figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=2)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=DPI)


def _frames(rows: int, columns: int) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(max(_FRAME * columns + 0.9, 6.5), (_FRAME + 0.12) * rows + 1),
                    layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _draw_row(panels: Sequence[Axes], frames: np.ndarray, label: str) -> None:
    for axes, frame in zip(panels, frames):
        axes.imshow(frame, interpolation="nearest")
        axes.set(xticks=[], yticks=[])
    panels[0].set_ylabel(label, fontsize=7)


def _colour(kind: str) -> str:
    return BLUE if kind == WITH else VERMILION


def _draw_dot(axes: Axes, row: pd.Series, place: int) -> None:
    with_grads = row["env_grads"] == WITH
    colour = _colour(row["env_grads"])
    axes.plot(row["agreement"], place + (-0.12 if with_grads else 0.12),
              marker="o" if with_grads else "^", color=colour, linestyle="", markersize=7,
              markerfacecolor=colour if row["claimed"] else "white")


def _dot(kind: str, filled: bool, label: str) -> Line2D:
    colour = _colour(kind)
    return Line2D([], [], linestyle="", marker="o" if kind == WITH else "^", color=colour,
                  markerfacecolor=colour if filled else "white", label=label)
