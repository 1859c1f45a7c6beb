"""Figures of the agent's hidden states on a plane, and rotating in space.

Letters in shape comments: N recorded states, M simulated ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

# Okabe and Ito's colours, which colour-blind readers can tell apart, without black; where there
# are more categories the marker changes, and their numbers stand where their states are.
COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#F0E442")
MARKERS = ("o", "^", "s", "x", "P", "v", "*", "D")
NO_CATEGORY_COLOUR, SIMULATED_COLOUR = "#BBBBBB", "black"
COLOUR_MAP = "viridis"
DPI = 110
LEGEND_ROWS = 20
DENSITY_BINS = 160
SPACE_POINTS = 8_000  # of the rotating figures, which are as sharp with more, but ten times larger
SPACE_FRAMES = 36
SPACE_SECONDS = 6


@dataclasses.dataclass(frozen=True)
class Plane:
    """Where states are drawn.

    Attributes:
        places: of the recorded states (N, 2), or (N, 3) in space.
        simulated: places of the simulated ones (M, 2 or 3), or None.
        names: of the axes.
        title: what the states are and how many.
    """

    places: np.ndarray
    simulated: np.ndarray | None
    names: tuple[str, ...]
    title: str

    def part(self, rows: np.ndarray) -> Plane:
        """The plane with some of the recorded states."""
        return dataclasses.replace(self, places=self.places[rows])


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A number for each state, shown as a shade.

    Attributes:
        values: (N,).
        label: with its unit.
    """

    values: np.ndarray
    label: str

    def part(self, rows: np.ndarray) -> Quantity:
        return dataclasses.replace(self, values=self.values[rows])


@dataclasses.dataclass(frozen=True)
class Category:
    """A kind for each state, shown as a colour and a marker.

    Attributes:
        values: from 0, or -1 for no category (N,).
        label: what they are.
        names: of the categories.
        numbered: whether the number of a category is written where its states are.
    """

    values: np.ndarray
    label: str
    names: tuple[str, ...]
    numbered: bool = False

    def part(self, rows: np.ndarray) -> Category:
        return dataclasses.replace(self, values=self.values[rows])


def plot_plane(path: Path, plane: Plane, colouring: Quantity | Category, seed: int) -> None:
    """All states on a plane, coloured, with the simulated ones in black."""
    figure, axes = _figure(plane.names)
    _draw_states(axes, plane, colouring, seed)
    axes.set_title(f"{plane.title}\ncoloured by {colouring.label}", fontsize=11)
    _add_key(figure, axes, colouring, plane)
    _save(figure, path)


def plot_variance(path: Path, variances: np.ndarray, total: float, title: str) -> None:
    """Share of the variance that each principal component explains, and that the first ones do."""
    shares = variances / total
    numbers = np.arange(1, len(shares) + 1)
    held = np.cumsum(shares)
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    axes.bar(numbers, shares, color=COLOURS[1], label="this component")
    axes.plot(numbers, held, color=COLOURS[3], marker=".", label="all up to this one")
    axes.axhline(0.95, color="#555555", linestyle=":", label="95 %")
    axes.set(xlabel="principal component", ylabel="share of the variance", ylim=(0, 1.02),
             title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="center right")
    _save(figure, path)


def plot_paths(path: Path, plane: Plane, episodes: np.ndarray, chosen: Sequence[int],
               notes: Sequence[str]) -> None:
    """The ways of some episodes through the plane, one panel each, an arrow for each step.

    Args:
        plane: of all states.
        episodes: number of each state's episode (N,).
        chosen: episodes to draw.
        notes: what to write above each of them.
    """
    columns = int(np.ceil(np.sqrt(len(chosen))))
    rows = int(np.ceil(len(chosen) / columns))
    figure = Figure(figsize=(4 * columns + 1, 3.6 * rows + 0.8), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    density = _density(plane.places)
    for axes, episode, note in zip(panels.flat, chosen, notes):
        _draw_density(axes, density)
        way = plane.places[episodes == episode]
        part = np.linspace(0, 1, max(len(way) - 1, 1))[:len(way) - 1]
        if len(way) > 1:
            axes.quiver(*way[:-1].T, *np.diff(way, axis=0).T, part, cmap=COLOUR_MAP, angles="xy",
                        scale_units="xy", scale=1, width=0.006, clim=(0, 1))
        axes.plot(*way[0], marker="o", color="white", markeredgecolor="black", markersize=8,
                  linestyle="")
        axes.plot(*way[-1], marker="X", color=COLOURS[3], markeredgecolor="black", markersize=9,
                  linestyle="")
        axes.set_title(f"episode {episode}: {note}", fontsize=10)
    for axes in panels.flat[len(chosen):]:
        axes.axis("off")
    figure.supxlabel(plane.names[0])
    figure.supylabel(plane.names[1])
    figure.colorbar(ScalarMappable(Normalize(0, 1), COLOUR_MAP), ax=panels, shrink=0.6,
                    label="part of the episode")
    figure.suptitle(f"Ways of {len(chosen)} episodes: arrows from state to state, ring: first, "
                    f"cross: last, grey: {plane.title}", fontsize=11)
    _save(figure, path)


class ClusterPlots:
    """One figure a cluster: its members on several planes, all states behind them in grey.

    Args:
        planes: on which they are shown.
        labels: cluster of each state (N,).
    """

    def __init__(self, planes: Sequence[Plane], labels: np.ndarray):
        self.planes, self.labels = planes, labels
        self._densities = [_density(plane.places) for plane in planes]

    def plot(self, path: Path, cluster: int, note: str) -> None:
        """Draw a cluster; ``note`` is written above it."""
        members = self.labels == cluster
        figure = Figure(figsize=(6.5 * len(self.planes), 5.8), layout="constrained")
        for axes, plane, density in zip(figure.subplots(1, len(self.planes), squeeze=False).flat,
                                        self.planes, self._densities):
            _draw_density(axes, density)
            axes.scatter(*plane.places[members].T, s=_size(members.sum()) * 1.5, linewidths=0,
                         color=COLOURS[3], rasterized=True, label=f"cluster {cluster}")
            axes.set(xlabel=plane.names[0], ylabel=plane.names[1])
            axes.set_title(plane.title, fontsize=10)
            axes.plot([], [], linestyle="", marker="s", color=NO_CATEGORY_COLOUR,
                      label="all states, darker where they are dense")
            axes.legend(fontsize=9, loc="best", markerscale=1.5)
        figure.suptitle(f"Cluster {cluster}: {note}", fontsize=11)
        _save(figure, path)


def plot_space(path: Path, space: Plane, colouring: Quantity | Category, seed: int) -> None:
    """The states in three dimensions, turning once, as a GIF.

    At most SPACE_POINTS of them, drawn by the seed; the title says how many.
    """
    rng = np.random.default_rng(seed)
    num_states = len(space.places)
    shown = rng.permutation(num_states)[:SPACE_POINTS]
    drawn = colouring.part(shown)
    figure = Figure(figsize=(7.6, 6.2))
    axes = figure.add_axes((0.0, 0.02, 0.78, 0.84), projection="3d")
    size = _size(len(shown))
    axes.scatter(*space.places[shown].T, c=_rgba(drawn), s=size, linewidths=0, depthshade=False)
    if space.simulated is not None:
        axes.scatter(*space.simulated.T, c=SIMULATED_COLOUR, s=size, linewidths=0,
                     depthshade=False)
    axes.set_xlabel(space.names[0])
    axes.set_ylabel(space.names[1])
    axes.set_zlabel(space.names[2])
    some = f", {len(shown)} of them shown" if len(shown) < num_states else ""
    figure.suptitle(f"{space.title}{some}\ncoloured by {colouring.label}", fontsize=10)
    if isinstance(colouring, Quantity):
        bar = figure.add_axes((0.86, 0.2, 0.025, 0.5))
        figure.colorbar(ScalarMappable(_norm(colouring.values), COLOUR_MAP), cax=bar,
                        label=colouring.label)
    handles = _legend_handles(colouring, space, markers=False)
    figure.legend(handles=handles, fontsize=7, title=_legend_title(colouring), title_fontsize=8,
                  loc="lower right" if isinstance(colouring, Quantity) else "center right",
                  ncols=1 + (len(handles) - 1) // (2 * LEGEND_ROWS))
    canvas = FigureCanvasAgg(figure)
    figure.set_dpi(80)
    frames = []
    for angle in np.linspace(0, 360, SPACE_FRAMES, endpoint=False):
        axes.view_init(elev=20, azim=angle)
        canvas.draw()
        frames.append(Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3]))
    palette = frames[0].quantize(128)
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    frames[0].save(path, save_all=True, append_images=frames[1:], loop=0,
                   duration=round(1000 * SPACE_SECONDS / SPACE_FRAMES))


def _figure(names: Sequence[str]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(9.5, 7), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=names[0], ylabel=names[1])
    return figure, axes


def _draw_states(axes: Axes, plane: Plane, colouring: Quantity | Category, seed: int) -> None:
    """One collection for each marker, in an order in which none hides the others."""
    size = _size(len(plane.places))
    order = np.random.default_rng(seed).permutation(len(plane.places))
    colours = _rgba(colouring)
    if isinstance(colouring, Quantity):
        order = order[np.argsort(_rarity(colouring.values)[order], kind="stable")]
        axes.scatter(*plane.places[order].T, c=colours[order], s=size, linewidths=0,
                     rasterized=True)
    else:
        frequency = np.bincount(colouring.values + 1)
        if len(colouring.names) <= 2:  # the rarer one on top
            order = order[np.argsort(-frequency[colouring.values + 1][order], kind="stable")]
        marker = np.maximum(colouring.values, 0) // len(COLOURS)
        for number in range(marker.max() + 1):
            rows = order[marker[order] == number]
            shape = MARKERS[number % len(MARKERS)]
            axes.scatter(*plane.places[rows].T, c=colours[rows], s=size * (1 if number == 0 else 2),
                         marker=shape, linewidths=0.8 if shape == "x" else 0, rasterized=True)
        if colouring.numbered:
            _write_numbers(axes, plane.places, colouring.values)
    if plane.simulated is not None:
        axes.scatter(*plane.simulated.T, c=SIMULATED_COLOUR, s=size, linewidths=0,
                     rasterized=True)


def _write_numbers(axes: Axes, places: np.ndarray, values: np.ndarray) -> None:
    for value in np.unique(values[values >= 0]):
        middle = np.median(places[values == value], axis=0)
        axes.annotate(str(value), middle, ha="center", va="center", fontsize=8, weight="bold",
                      bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "alpha": 0.8,
                            "edgecolor": COLOURS[value % len(COLOURS)]})


def _add_key(figure: Figure, axes: Axes, colouring: Quantity | Category, plane: Plane) -> None:
    handles = _legend_handles(colouring, plane)
    if isinstance(colouring, Quantity):
        figure.colorbar(ScalarMappable(_norm(colouring.values), COLOUR_MAP), ax=axes,
                        label=colouring.label)
        if handles:
            axes.legend(handles=handles, loc="best", fontsize=9)
    else:
        figure.legend(handles=handles, loc="outside right upper", fontsize=8,
                      title=_legend_title(colouring), ncols=1 + (len(handles) - 1) // LEGEND_ROWS)


def _legend_title(colouring: Quantity | Category) -> str:
    return f"{colouring.label} (states)" if isinstance(colouring, Category) else ""


def _legend_handles(colouring: Quantity | Category, plane: Plane,
                    markers: bool = True) -> list[Line2D]:
    handles = []
    if isinstance(colouring, Category):
        for value, name in enumerate(colouring.names):
            count = int((colouring.values == value).sum())
            if count:
                handles.append(_handle(COLOURS[value % len(COLOURS)], f"{name} ({count})",
                                       _marker(value) if markers else "o"))
        in_none = int((colouring.values < 0).sum())
        if in_none:
            handles.append(_handle(NO_CATEGORY_COLOUR, f"none ({in_none})"))
    if plane.simulated is not None:
        handles.append(_handle(SIMULATED_COLOUR, f"simulated ({len(plane.simulated)})"))
    return handles


def _handle(colour: str, label: str, marker: str = "o") -> Line2D:
    return Line2D([], [], linestyle="", marker=marker, color=colour, markersize=6, label=label)


def _marker(value: int) -> str:
    return MARKERS[value // len(COLOURS) % len(MARKERS)]


def _rgba(colouring: Quantity | Category) -> np.ndarray:
    """A colour for each state (N, 4)."""
    if isinstance(colouring, Quantity):
        return colormaps[COLOUR_MAP](_norm(colouring.values)(colouring.values))
    table = matplotlib.colors.to_rgba_array([NO_CATEGORY_COLOUR, *COLOURS])
    values = colouring.values
    return table[np.where(values < 0, 0, values % len(COLOURS) + 1)]


def _norm(values: np.ndarray) -> Normalize:
    low, high = float(values.min()), float(values.max())
    return Normalize(low, high if high > low else low + 1)


def _rarity(values: np.ndarray) -> np.ndarray:
    """How rare a value is among few different ones; nothing where values vary freely."""
    found, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return -counts[inverse] if len(found) <= 20 else np.zeros(len(values))


def _size(num_states: int) -> float:
    """Area of a marker, in square points, that leaves structure visible."""
    return float(np.clip(20_000 / max(num_states, 1), 1.5, 14))


def _density(places: np.ndarray) -> tuple[np.ndarray, tuple[float, float, float, float]]:
    """States in each cell of the plane, and its borders."""
    counts, x, y = np.histogram2d(*places.T, bins=DENSITY_BINS)
    return counts.T, (x[0], x[-1], y[0], y[-1])


def _draw_density(axes: Axes, density: tuple[np.ndarray, tuple]) -> None:
    counts, borders = density
    axes.imshow(np.ma.masked_equal(counts, 0), extent=borders, origin="lower", aspect="auto",
                cmap="Greys", norm=LogNorm(0.1, max(counts.max() * 5, 1)), interpolation="nearest")


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=DPI)
