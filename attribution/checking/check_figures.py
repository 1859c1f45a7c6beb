"""Figures of the checks of attributions: a panel a layer and output, or all in one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attribution.checking.check_report import (
    CORRELATION_BAR,
    HIGH_BAR,
    MEDIAN_BAR,
    layers_of,
)
from attribution.checking.deletion import KINDS as CURVES
from attribution.checking.deletion import ORDERS
from common.palette import BLUE, COLOURS, DARK_GREY, DPI, VERMILION

_WIDE = 4.2


def plot_completeness(path: Path, table: pd.DataFrame) -> None:
    """Median and 99 % quantile of the gaps of each layer and output."""
    names = [f"{layer}, {output}" for layer, output in layers_of(table)]
    figure = Figure(figsize=(7, 1.2 + 0.25 * len(names)), layout="constrained")
    axes = figure.subplots()
    for column, bar, colour in (("median", MEDIAN_BAR, BLUE), ("high", HIGH_BAR, VERMILION)):
        axes.plot(np.maximum(table[column], 1e-7), np.arange(len(names)), "o", color=colour,
                  label={"median": "median", "high": "99 % quantile"}[column])
        axes.axvline(bar, color=colour, linewidth=0.8, linestyle="--")
    axes.set(xscale="log", xlabel="gap (bars: dashed)")
    axes.set_yticks(np.arange(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=DPI)


def plot_deletion(path: Path, curves: Mapping[tuple[str, str], np.ndarray]) -> None:
    """Mean output while cells go and come.

    Args:
        curves: by layer and output, mean over frames (orders, 2, M).
    """
    figure, panels = _panels(len(curves), len(CURVES))
    for row, (name, values) in zip(panels, curves.items()):
        for axes, curve, each in zip(row, CURVES, values.swapaxes(0, 1)):
            for colour, order, heights in zip((VERMILION, BLUE, COLOURS[2], DARK_GREY), ORDERS,
                                              each):
                axes.plot(np.linspace(0, 1, len(heights)), heights, color=colour, label=order)
            axes.set(title=f"{', '.join(name)}: {curve}", xlabel="share of the cells",
                     ylabel="mean output")
    panels[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=DPI)


def plot_randomisation(path: Path, table: pd.DataFrame) -> None:
    """Rank correlation of the maps by how much of the network is random."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(layers_of(table)):
        part = _part(table, name)
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(part["drawn_again"], part["correlation"], "o-", color=colour,
                  label=", ".join(name))
        axes.fill_between(part["drawn_again"], part["low_95"], part["high_95"], color=colour,
                          alpha=0.2, linewidth=0)
    axes.axhline(CORRELATION_BAR, color=DARK_GREY, linewidth=0.8, linestyle="--")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xlabel="drawn again, with all to the left", ylabel="rank correlation of |attribution|")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=DPI)


def plot_interventions(path: Path, points: Mapping[tuple[str, str],
                                                   tuple[np.ndarray, np.ndarray]]) -> None:
    """Change of the output against what is expected, a point a frame and feature.

    Args:
        points: by layer and output, expected and found changes (N, F) each.
    """
    figure, panels = _panels(1, len(points))
    for axes, (name, (expected, changes)) in zip(panels[0], points.items()):
        for feature, (x, y) in enumerate(zip(expected.T, changes.T)):
            axes.plot(x, y, ".", markersize=3, color=COLOURS[feature % len(COLOURS)],
                      label=str(feature))
        _diagonal(axes, expected)
        axes.set(title=", ".join(name), xlabel="expected", ylabel="change")
    panels[0, 0].legend(title="feature", fontsize=7, ncols=2)
    figure.savefig(path, dpi=DPI)


def plot_objects(path: Path, table: pd.DataFrame) -> None:
    """Agreement of signs by kind of object, with chance."""
    names = layers_of(table)
    figure, panels = _panels(1, len(names))
    for axes, name in zip(panels[0], names):
        part = _part(table, name).dropna(subset=["agreement"])
        places = np.arange(len(part))
        axes.axvline(0.5, color=DARK_GREY, linewidth=0.8, linestyle="--")
        axes.hlines(places, part["low_95"], part["high_95"], color=BLUE)
        axes.plot(part["agreement"], places, "o", color=BLUE, label="mask of the frame")
        axes.plot(part["chance"], places, "x", color=DARK_GREY, label="mask of another frame")
        axes.set_yticks(places, part["kind"])
        axes.set(title=", ".join(name), xlabel="share of frames with the expected sign",
                 xlim=(0, 1))
        axes.invert_yaxis()
    panels[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=DPI)


def plot_fidelity(path: Path, values: Mapping[tuple[str, str], np.ndarray]) -> None:
    """Infidelity and sensitivity of frames, a box a layer and output.

    Args:
        values: by layer and output (N, 2).
    """
    figure, panels = _panels(1, 2)
    names = [", ".join(name) for name in values]
    for number, (axes, title) in enumerate(zip(panels[0], ("infidelity", "sensitivity"))):
        axes.boxplot([each[np.isfinite(each[:, number]), number] for each in values.values()],
                     orientation="horizontal")
        axes.set_yticks(np.arange(1, len(names) + 1), names, fontsize=8)
        axes.set(xlabel=title)
    figure.savefig(path, dpi=DPI)


def _panels(rows: int, columns: int) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(_WIDE * columns, 3.4 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _part(table: pd.DataFrame, name: tuple[str, str]) -> pd.DataFrame:
    return table[(table["layer"] == name[0]) & (table["output"] == name[1])]


def _diagonal(axes: Axes, values: np.ndarray) -> None:
    ends = [float(values.min()), float(values.max())]
    axes.plot(ends, ends, color="black", linewidth=0.8)
