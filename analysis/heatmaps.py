"""Heat maps of matrices whose rows and columns are independent components (ICs) or other named
quantities.

Blue marks positive and red negative values, as in the saliency images. Colour-blind readers can
distinguish these colours.

Letters in shape comments: I rows and J columns of a matrix (square ones: I ICs), K lags.
"""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from scipy.cluster.hierarchy import dendrogram, leaves_list, linkage

from common.palette import DARK_GREY
from common.tables import with_minus

SIGNED, SHARE = "RdBu", "PuOr"  # matplotlib colour maps of signed values and of shares
_CELL = 0.19  # inches, side of a matrix entry
_SMALLEST = 2.3  # inches, smallest side of a panel
_NARROWEST = 7.0  # inches, smallest width of a figure, so that its title fits


Seriation = tuple[np.ndarray, np.ndarray]
"""An order of coordinates, as indices (I,), and a dendrogram whose leaves have this order, as a
scipy linkage matrix (I - 1, 4)."""


def seriate(products: np.ndarray) -> Seriation:
    """Order coordinates so that coordinates correlated at any lag are next to each other.

    The method is average linkage with optimal leaf ordering. The distance of two coordinates is 1
    minus their largest absolute correlation (mean product divided by both root mean squares) over
    all lags in both directions. The absolute value is taken because the sign of an independent
    component is arbitrary.

    Args:
        products: mean products of the coordinates at lags 0 to K - 1, from
            ``analysis.influences.consistency.mean_products`` (K, I, I).
    """
    num = products.shape[1]
    if num < 2:
        return np.arange(num), np.zeros((0, 4))
    sizes = np.sqrt(np.maximum(np.diagonal(products[0]), np.finfo(float).tiny))
    together = np.abs(products / sizes[:, None] / sizes).max(axis=0)
    distances = np.clip(1 - np.maximum(together, together.T), 0, None)
    tree = linkage(distances[np.triu_indices(num, 1)], "average", optimal_ordering=True)
    return leaves_list(tree), tree


@dataclasses.dataclass(frozen=True)
class ColourScale:
    """Map from values to colours.

    Attributes:
        colours: name of the matplotlib colour map.
        label: label of the colour bar, with its unit.
        beyond: whether some values lie outside the range and are clipped to its end.
    """

    norm: Normalize
    colours: str
    label: str
    beyond: bool = False


def signed_scale(matrices: Sequence[np.ndarray], label: str, square: bool = True) -> ColourScale:
    """Return a red-to-blue scale, symmetric about 0, that ends at the largest absolute value.

    Args:
        matrices: matrices that share the scale, each (I, J).
        label: label of the colour bar, with its unit.
        square: whether rows and columns are the same components; the diagonals are then ignored,
            because the relation of a component to itself is often many times larger and would wash
            out the other entries.
    """
    stacked = np.abs(np.stack(matrices)).astype(np.float64)
    largest = float(stacked.max(initial=0))
    if square:
        diagonal = np.arange(min(stacked.shape[1:]))
        stacked[:, diagonal, diagonal] = 0
    far = float(stacked.max(initial=0)) or largest or 1.0
    return ColourScale(Normalize(-far, far), SIGNED, label, largest > far)


@dataclasses.dataclass(frozen=True)
class Heatmap:
    """One matrix of a figure.

    Attributes:
        matrix: values (I, J).
        marked: whether each entry is marked with a dot, bool (I, J); None for no dots.
    """

    matrix: np.ndarray
    title: str
    marked: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Names:
    """Names of the rows and columns of a matrix.

    Attributes:
        rows, columns: names of the individual rows and columns.
        row_label, column_label: labels of the axes.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    row_label: str
    column_label: str


def plot_matrices(panels: Sequence[Heatmap], names: Names, scales: Sequence[ColourScale],
                  columns: int, title: str, seriation: Seriation | None = None,
                  tree: bool = False) -> Figure:
    """Draw several matrices with the same rows and columns. Row names are written only next to
    the leftmost panels, and column names only below the lowest panels.

    Args:
        panels: matrices, row by row.
        scales: one scale for all panels, one per column of panels, or one per panel.
        columns: number of panels in a row.
        seriation: order of rows and columns; None keeps the given order.
        tree: whether to draw the dendrogram of the seriation on the left.
    """
    rows = -(-len(panels) // columns)
    order, place = np.arange(len(names.rows)), np.arange(len(names.columns))
    if seriation is not None:
        order = place = seriation[0]
    height = max(_SMALLEST, _CELL * len(names.rows)) + 0.9
    width = max(_SMALLEST, _CELL * len(names.columns)) + 0.6
    trees = int(tree and seriation is not None and len(seriation[1]) > 0)
    total = width * columns + 1.2 + trees * 0.9 + (len(scales) > 1) * columns * 0.9
    figure = Figure(figsize=(max(total, _NARROWEST), height * rows + 0.7), layout="constrained")
    grid = figure.subplots(rows, columns + trees, squeeze=False,
                           width_ratios=[0.3] * trees + [1.0] * columns)
    if trees and seriation is not None:
        for axes in grid[:, 0]:
            _draw_tree(axes, seriation[1])
    places = grid[:, trees:]
    for number, (axes, panel, scale) in enumerate(zip(places.flat, panels,
                                                      itertools.cycle(scales))):
        _draw_panel(axes, panel, scale, order, place)
        if number % columns == 0:  # text is slow to draw, and all panels have the same rows
            axes.set_yticks(range(len(order)), [names.rows[i] for i in order], fontsize=6)
            axes.set_ylabel(names.row_label, fontsize=8)
        if number + columns >= len(panels):
            axes.set_xticks(range(len(place)), [names.columns[i] for i in place], fontsize=6,
                            rotation=90)
            axes.set_xlabel(names.column_label, fontsize=8)
    for axes in places.flat[len(panels):]:
        axes.axis("off")
    for number, scale in enumerate(scales):
        location = "bottom" if 1 < len(scales) == columns else "right"
        bar = figure.colorbar(ScalarMappable(scale.norm, scale.colours),
                              ax=list(places.flat[number::len(scales)]), location=location,
                              shrink=0.8 if location == "bottom" else 0.6,
                              extend="both" if scale.beyond else "neither")
        bar.set_label(scale.label, fontsize=8)
        bar.ax.tick_params(labelsize=7)
    figure.suptitle("\n".join(textwrap.fill(line, int(11 * figure.get_figwidth()))
                              for line in title.splitlines()), fontsize=11)
    return figure


def largest(panels: Sequence[Heatmap], names: Names) -> str:
    """Name the largest entry of several matrices; without the diagonal, if rows and columns are
    named alike."""
    matrices = np.nan_to_num(np.stack([panel.matrix for panel in panels]))
    if names.rows == names.columns and len(names.rows) > 1:
        matrices = matrices * ~np.eye(len(names.rows), dtype=bool)
    panel, row, column = np.unravel_index(np.abs(matrices).argmax(), matrices.shape)
    title = f" ({panels[panel].title})" if panels[panel].title else ""
    return with_minus(f"{names.rows[row]} and {names.columns[column]}, "
                      f"{matrices[panel, row, column]:+.2g}{title}")


def _draw_panel(axes: Axes, panel: Heatmap, scale: ColourScale, order: np.ndarray,
                place: np.ndarray) -> None:
    shown = panel.matrix[order][:, place]
    axes.imshow(shown, cmap=scale.colours, norm=scale.norm, interpolation="nearest", aspect="auto")
    axes.set(xticks=[], yticks=[])
    axes.tick_params(length=2, pad=1)
    axes.set_title(panel.title, fontsize=9)
    if panel.marked is not None:
        y, x = np.nonzero(panel.marked[order][:, place])
        axes.scatter(x, y, s=9, color="white", edgecolors="black", linewidths=0.8, zorder=3)


def _draw_tree(axes: Axes, linkage_matrix: np.ndarray) -> None:
    dendrogram(linkage_matrix, orientation="left", ax=axes, no_labels=True,
               color_threshold=0, above_threshold_color=DARK_GREY)
    # The first leaf is at the top, like the first row of the matrices; leaves are 10 units apart.
    axes.set_ylim(10 * (len(linkage_matrix) + 1), 0)
    axes.set_xlabel("1 − largest\ncorrelation", fontsize=7)
    axes.tick_params(labelsize=6)
    axes.spines[["top", "left", "right"]].set_visible(False)
