"""Figures of states in a projection: on a plane, rotating in space, and by cluster.

Letters in shape comments: M other states, which are drawn in black for comparison.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure, FigureBase
from matplotlib.lines import Line2D
from scipy.spatial import cKDTree
from scipy.stats import spearmanr

from common.palette import COLOURS, DARK_GREY, SKY_BLUE, VERMILION
from common.tables import with_minus
from common.video import write_gif

NO_CATEGORY_COLOUR, REST_COLOUR, OTHERS_COLOUR = "#BBBBBB", "#909090", "black"
OTHERS_SIZE = 6  # smallest marker area of other states, in square points
COLOUR_MAP = "viridis"
LEGEND_ROWS = 20
DENSITY_BINS = 160
SPACE_POINTS = 8_000  # states per rotating figure; more would only make the file larger
SPACE_FRAMES = 36
SPACE_SECONDS = 6
ROTATION_DPI = 80


@dataclasses.dataclass(frozen=True)
class Plane:
    """Projection in which states are drawn.

    Attributes:
        places: coordinates of the states (N, 2), or (N, 3) in space.
        title: description and number of the states.
        others: coordinates of other states (M, 2 or 3), or None.
        others_name: name of the other states, such as "simulated".
        others_in_view: whether the axis limits include all other states.
        unit: plural noun for the drawn points, for legends.
    """

    places: np.ndarray
    names: tuple[str, ...]
    title: str
    others: np.ndarray | None = None
    others_name: str = ""
    others_in_view: bool = False
    unit: str = "states"

    @property
    def limits(self) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper axis limits, (2,) or (3,) each: range of the states, including other
        states if ``others_in_view``, plus 10 % on each side."""
        inside = self.places
        if self.others is not None and self.others_in_view:
            inside = np.concatenate([inside, self.others])
        low, high = inside.min(axis=0), inside.max(axis=0)
        margin = 0.1 * np.maximum(high - low, 1e-6)
        return low - margin, high + margin

    def frame(self, axes: Axes) -> None:
        """Set the labels and limits of two- or three-dimensional axes."""
        for dimension, name, low, high in zip("xyz", self.names, *self.limits):
            axes.set(**{f"{dimension}label": name, f"{dimension}lim": (low, high)})

    def dimensions(self, number: int) -> Plane:
        """Return the projection on the first ``number`` dimensions."""
        others = None if self.others is None else self.others[:, :number]
        return dataclasses.replace(self, places=self.places[:, :number],
                                   names=self.names[:number], others=others)


@dataclasses.dataclass(frozen=True)
class Pictures:
    """Frames to show side by side.

    Attributes:
        frames: frames, each uint8 (H, W, C).
        captions: text above each frame.
    """

    frames: Sequence[np.ndarray]
    captions: Sequence[str]
    title: str


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A numeric value per state, shown on a colour map.

    Attributes:
        values: value of each state (N,).
        label: name of the quantity, with its unit.
    """

    values: np.ndarray
    label: str


@dataclasses.dataclass(frozen=True)
class Category:
    """A category per state, shown as a colour; on planes, as a panel if there are too many.

    Attributes:
        values: category of each state, from 0, or -1 for none (N,).
        label: name of the categorical variable.
        numbered: whether to write the number of each category at the median of its states.
    """

    values: np.ndarray
    label: str
    names: tuple[str, ...]
    numbered: bool = False

    @functools.cached_property
    def counts(self) -> dict[int, int]:
        """Number of states of each category that occurs, in the order of the categories."""
        return {int(value): int(count) for value, count in
                zip(*np.unique(self.values[self.values >= 0], return_counts=True))}

    @functools.cached_property
    def colours(self) -> dict[int, str]:
        """Colours of the categories that occur, or of the most frequent ones of too many."""
        largest = sorted(self.counts, key=lambda value: -self.counts[value])[:len(COLOURS)]
        return dict(zip(sorted(largest), COLOURS))


def plot_plane(plane: Plane, colouring: Quantity | Category, seed: int) -> Figure:
    """Draw all states on a plane, coloured by a quantity or category, with other states in black.
    If there are more categories than colours, each has its own panel.

    Args:
        colouring: value or category of each state.
    """
    if isinstance(colouring, Category) and len(colouring.counts) > len(COLOURS):
        return _plot_categories(plane, colouring)
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots()
    # States are drawn in random order, but states with rare values on top.
    size = _size(len(plane.places))
    order = np.random.default_rng(seed).permutation(len(plane.places))
    order = order[np.argsort(-_frequency(colouring)[order], kind="stable")]
    _scatter(axes, plane.places, colouring, order, size)
    if isinstance(colouring, Category) and colouring.numbered:
        for value, colour in colouring.colours.items():
            middle = np.median(plane.places[colouring.values == value], axis=0)
            axes.annotate(str(value), middle, ha="center", va="center", fontsize=8, weight="bold",
                          bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "alpha": 0.8,
                                "edgecolor": colour})
    if plane.others is not None:
        axes.scatter(plane.others[:, 0], plane.others[:, 1], c=OTHERS_COLOUR,
                     s=max(size, OTHERS_SIZE), linewidths=0, rasterized=True)
    plane.frame(axes)
    figure.suptitle(_order(plane, colouring), fontsize=11, x=0.02, ha="left")
    handles = _legend_handles(colouring, plane)
    if isinstance(colouring, Category):
        figure.legend(handles=handles, loc="outside right upper", fontsize=8,
                      title=f"{colouring.label} ({plane.unit})",
                      ncols=1 + (len(handles) - 1) // LEGEND_ROWS)
    else:
        figure.colorbar(ScalarMappable(_norm(colouring.values), COLOUR_MAP), ax=axes,
                        label=colouring.label)
        if handles:
            axes.legend(handles=handles, loc="best", fontsize=9)
    return figure


def _plot_categories(plane: Plane, categories: Category) -> Figure:
    """Draw one panel per category that occurs, its states over all states in grey, and one with the
    other states, if there are any."""
    panels = [(f"{categories.names[value]} ({count})", plane.places[categories.values == value],
               VERMILION) for value, count in categories.counts.items()]
    if plane.others is not None:
        panels.append((f"{plane.others_name} ({len(plane.others)})", plane.others, OTHERS_COLOUR))
    columns = min(int(np.ceil(np.sqrt(1.6 * len(panels)))), len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(2.1 * columns + 0.4, 2.1 * rows + 0.9), layout="constrained")
    density = _density(plane.places)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axes, (title, places, colour) in zip(grid.flat, panels):
        _draw_density(axes, density)
        axes.scatter(*places.T, s=_size(len(places)) / 2, linewidths=0, color=colour,
                     rasterized=True)
        plane.frame(axes)
        axes.set(xlabel="", ylabel="", xticks=(), yticks=())
        axes.set_title(title, fontsize=9)
    for axes in grid.flat[len(panels):]:
        axes.axis("off")
    figure.supxlabel(plane.names[0], fontsize=9)
    figure.supylabel(plane.names[1], fontsize=9)
    figure.suptitle(f"{_order(plane, categories)}; grey: all {plane.unit}", fontsize=11, x=0.02,
                    ha="left")
    return figure


def _order(plane: Plane, colouring: Quantity | Category) -> str:
    """Return a title: whether neighbours have the same category or a similar value; and all states.
    """
    known = colouring.values >= 0 if isinstance(colouring, Category) else np.isfinite(
        colouring.values)
    values, places = colouring.values[known], plane.places[known]
    if len(values) < 3 or np.ptp(values) == 0:
        found = "does not differ"
    else:
        near = cKDTree(places).query(places, 2)[1]  # the state itself, and the nearest other one
        other = np.where(near[:, 0] == np.arange(len(near)), near[:, 1], near[:, 0])
        if isinstance(colouring, Category):
            chance = ((np.array([*colouring.counts.values()]) / len(values)) ** 2).sum()
            found = (f"nearest {plane.unit} agree in {100 * (values == values[other]).mean():.0f} %"
                     f" of cases (chance: {100 * chance:.0f} %)")
        else:
            found = (f"rank correlation of nearest {plane.unit} "
                     f"{spearmanr(values, values[other]).statistic:.2f}")
    return with_minus(f"{colouring.label}: {found}\n") + plane.title


def plot_variance(variances: np.ndarray, total: float, title: str) -> Figure:
    """Draw the share of the variance that each principal component explains, and the cumulative
    share.

    Args:
        variances: variance of each component (P,).
        total: total variance of the states, including omitted components.
    """
    shares = variances / total
    numbers = np.arange(1, len(shares) + 1)
    cumulative = np.cumsum(shares)
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    axes.bar(numbers, shares, color=SKY_BLUE, label="this component")
    axes.plot(numbers, cumulative, color=VERMILION, marker=".", label="all up to this one")
    axes.axhline(0.95, color=DARK_GREY, linestyle=":", label="95 %")
    axes.set(xlabel="principal component", ylabel="share of the variance", ylim=(0, 1.02),
             title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="center right")
    return figure


def plot_paths(plane: Plane, sequences: np.ndarray, what: str, chosen: Sequence[int],
               notes: Sequence[str]) -> Figure:
    """Draw trajectories of selected sequences in the projection, one panel per sequence, one arrow
    per step.

    Args:
        sequences: index of each state's sequence (N,).
        what: kind of sequence, such as "episode".
        notes: text above the panel of each chosen sequence.
    """
    columns = int(np.ceil(np.sqrt(len(chosen))))
    rows = int(np.ceil(len(chosen) / columns))
    figure = Figure(figsize=(4 * columns + 1, 3.6 * rows + 0.8), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    density = _density(plane.places)
    for axes, sequence, note in zip(panels.flat, chosen, notes):
        _draw_density(axes, density)
        path = plane.places[sequences == sequence]
        part = np.linspace(0, 1, max(len(path) - 1, 1))[:len(path) - 1]
        if len(path) > 1:
            axes.quiver(*path[:-1].T, *np.diff(path, axis=0).T, part, cmap=COLOUR_MAP, angles="xy",
                        scale_units="xy", scale=1, width=0.006, clim=(0, 1))
        axes.plot(*path[0], marker="o", color="white", markeredgecolor="black", markersize=8,
                  linestyle="")
        axes.plot(*path[-1], marker="X", color=VERMILION, markeredgecolor="black", markersize=9,
                  linestyle="")
        axes.set_title(with_minus(f"{what} {sequence}: {note}"), fontsize=10)
    for axes in panels.flat[len(chosen):]:
        axes.axis("off")
    figure.supxlabel(plane.names[0])
    figure.supylabel(plane.names[1])
    figure.colorbar(ScalarMappable(Normalize(0, 1), COLOUR_MAP), ax=panels, shrink=0.6,
                    label=f"part of the {what}")
    figure.suptitle(f"Trajectories of {len(chosen)} {what}s: arrows from state to state, ring: "
                    f"first, cross: last, grey: {plane.title}", fontsize=11)
    return figure


class ClusterPlots:
    """Figures of single clusters: the cluster's states on several planes, over all states in grey.

    Args:
        planes: planes to draw, projections of the same states.
        labels: cluster of each state, -1 for none (N,).
    """

    def __init__(self, planes: Sequence[Plane], labels: np.ndarray):
        self.planes, self.labels = planes, labels
        self._densities = [_density(plane.places) for plane in planes]

    def plot(self, cluster: int, note: str, pictures: Pictures | None = None) -> Figure:
        """Draw a cluster in a new figure.

        Args:
            note: text after the number in the title.
            pictures: example frames to show below the planes, or None.
        """
        width = 6.5 * len(self.planes)
        below = 0.5 + width / len(pictures.frames) if pictures else 0.0
        figure = Figure(figsize=(width, 5.8 + below), layout="constrained")
        parts = figure.subfigures(2 if pictures else 1, 1, squeeze=False,
                                  height_ratios=(5.8, below) if pictures else None)[:, 0]
        self.draw(parts[0], cluster)
        if pictures:
            draw_pictures(parts[1], pictures)
        figure.suptitle(with_minus(f"Cluster {cluster}: {note}"), fontsize=11)
        return figure

    def draw(self, figure: FigureBase, cluster: int, what: str = "cluster") -> None:
        """Draw a cluster on all planes into a figure or subfigure.

        Args:
            what: word for a cluster in the legend, such as "behaviour".
        """
        members = self.labels == cluster
        for axes, plane, density in zip(figure.subplots(1, len(self.planes), squeeze=False).flat,
                                        self.planes, self._densities):
            _draw_density(axes, density)
            x, y = plane.places[members].T
            axes.scatter(x, y, s=_size(members.sum()) * 1.5, linewidths=0, color=VERMILION,
                         rasterized=True)
            plane.frame(axes)
        figure.legend(handles=[_handle(VERMILION, f"{what} {cluster}"), _handle(
            NO_CATEGORY_COLOUR, f"all {self.planes[0].unit}, darker where they are dense", "s")],
            fontsize=9, loc="outside lower center", ncols=2)


def draw_pictures(figure: FigureBase, pictures: Pictures) -> None:
    """Draw frames side by side into a figure or subfigure."""
    for axes, frame, caption in zip(figure.subplots(1, len(pictures.frames), squeeze=False).flat,
                                    pictures.frames, pictures.captions):
        axes.imshow(frame, interpolation="nearest")
        axes.set_title(caption, fontsize=8)
        axes.axis("off")
    figure.suptitle(pictures.title, fontsize=10)


class Rotation:
    """A three-dimensional figure that is saved as a GIF of one rotation.

    Args:
        axes: three-dimensional axes of the figure, which rotate.
    """

    def __init__(self, figure: Figure, axes: Any):
        self.figure, self.axes = figure, axes

    def savefig(self, path: Path, dpi: int) -> None:
        """Write the GIF at ROTATION_DPI; ``dpi`` is ignored to keep the file small."""
        canvas = FigureCanvasAgg(self.figure)
        self.figure.set_dpi(ROTATION_DPI)
        frames = []
        for angle in np.linspace(0, 360, SPACE_FRAMES, endpoint=False):
            self.axes.view_init(elev=20, azim=angle)
            canvas.draw()
            frames.append(np.array(canvas.buffer_rgba())[..., :3])
        write_gif(path, frames, SPACE_FRAMES / SPACE_SECONDS)


Drawing = Figure | Rotation


def plot_space(space: Plane, colouring: Quantity | Category, seed: int) -> Rotation:
    """Draw the states in three dimensions.

    If there are more than SPACE_POINTS states, a random subset of this size is drawn, and the title
    reports its size.

    Args:
        space: projection on three dimensions.
        colouring: value or category of each state.
    """
    rng = np.random.default_rng(seed)
    num_states = len(space.places)
    shown = rng.permutation(num_states)[:SPACE_POINTS]
    figure = Figure(figsize=(10, 6.4))
    axes: Any = figure.add_axes((0.06, 0.03, 0.6, 0.86), projection="3d")
    size = _size(len(shown))
    _scatter(axes, space.places, colouring, shown, size, depthshade=False)
    if space.others is not None:
        inside = space.others[_inside(space.others, *space.limits)]
        axes.scatter(*inside.T, c=OTHERS_COLOUR, s=max(size, OTHERS_SIZE), linewidths=0,
                     depthshade=False)
    dataclasses.replace(space, names=tuple(
        name.replace(" of the variance", "") for name in space.names)).frame(axes)
    some = f", {len(shown)} of them shown" if len(shown) < num_states else ""
    figure.suptitle(_order(space, colouring) + some, fontsize=10)
    handles = _legend_handles(colouring, space)
    place, title = "center right", f"{colouring.label} ({space.unit})"
    if isinstance(colouring, Quantity):
        place, title = "lower right", ""
        figure.colorbar(ScalarMappable(_norm(colouring.values), COLOUR_MAP),
                        cax=figure.add_axes((0.76, 0.25, 0.025, 0.5)), label=colouring.label)
    figure.legend(handles=handles, fontsize=7, title=title, title_fontsize=8, loc=place,
                  ncols=1 + (len(handles) - 1) // LEGEND_ROWS)
    return Rotation(figure, axes)


def _scatter(axes: Any, places: np.ndarray, colouring: Quantity | Category, order: np.ndarray,
             size: float, **more) -> None:
    """Draw states.

    Args:
        axes: axes to draw into, with as many dimensions as ``places`` has columns.
        places: coordinates of all states (N, 2 or 3).
        colouring: value or category of each state.
        order: indices of the n states to draw, in drawing order (n,).
        size: marker area, in square points.
        more: further arguments of ``axes.scatter``.
    """
    axes.scatter(*places[order].T, c=_rgba(colouring)[order], s=size, linewidths=0,
                 rasterized=True, **more)


def _inside(places: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return ((places >= low) & (places <= high)).all(axis=1)


def _legend_handles(colouring: Quantity | Category, plane: Plane) -> list[Line2D]:
    handles = []
    if isinstance(colouring, Category):
        handles += [_handle(colour, f"{colouring.names[value]} ({colouring.counts[value]})")
                    for value, colour in colouring.colours.items()]
        rest = [count for value, count in colouring.counts.items()
                if value not in colouring.colours]
        if rest:
            handles.append(_handle(REST_COLOUR, f"{len(rest)} rarer ones ({sum(rest)})"))
        in_none = int((colouring.values < 0).sum())
        if in_none:
            handles.append(_handle(NO_CATEGORY_COLOUR, f"none ({in_none})"))
    if plane.others is not None:
        outside = int((~_inside(plane.others, *plane.limits)).sum())
        beyond = f", {outside} not in view" if outside else ""
        handles.append(_handle(OTHERS_COLOUR, f"{plane.others_name} ({len(plane.others)}{beyond})"))
    return handles


def _handle(colour: str, label: str, marker: str = "o") -> Line2D:
    return Line2D([], [], linestyle="", marker=marker, color=colour, markersize=6, label=label)


def _rgba(colouring: Quantity | Category) -> np.ndarray:
    """Return the colour of each state as RGBA (N, 4)."""
    if isinstance(colouring, Quantity):
        return colormaps[COLOUR_MAP](_norm(colouring.values)(colouring.values))
    table = matplotlib.colors.to_rgba_array(
        [*(colouring.colours.get(value, REST_COLOUR) for value in range(len(colouring.names))),
         NO_CATEGORY_COLOUR])
    return table[colouring.values]  # -1 is the last one


def _norm(values: np.ndarray) -> Normalize:
    low, high = float(values.min()), float(values.max())
    return Normalize(low, high if high > low else low + 1)


def _frequency(colouring: Quantity | Category) -> np.ndarray:
    """Return how often each state's value occurs (N,); zeros if there are many distinct values."""
    distinct, inverse, counts = np.unique(colouring.values, return_inverse=True, return_counts=True)
    few = 20 if isinstance(colouring, Quantity) else 2
    return counts[inverse] if len(distinct) <= few else np.zeros(len(inverse))


def _size(num_states: int) -> float:
    """Return the marker area in square points, smaller for more states."""
    return float(np.clip(20_000 / max(num_states, 1), 1.5, 14))


def _density(places: np.ndarray) -> tuple[np.ndarray, tuple[float, float, float, float]]:
    """Return a 2D histogram of places (N, 2) with DENSITY_BINS bins per axis, rows along y, and its
    extent (x from, x to, y from, y to)."""
    counts, x, y = np.histogram2d(places[:, 0], places[:, 1], bins=DENSITY_BINS)
    return counts.T, (x[0], x[-1], y[0], y[-1])


def _draw_density(axes: Axes, density: tuple[np.ndarray, tuple]) -> None:
    counts, borders = density
    axes.imshow(np.ma.masked_equal(counts, 0), extent=borders, origin="lower", aspect="auto",
                cmap="Greys", norm=LogNorm(0.1, max(counts.max() * 5, 1)), interpolation="nearest")

