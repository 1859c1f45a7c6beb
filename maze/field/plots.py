"""Figures and films of fields: arrows over a level and heat maps of its squares.

Coordinates are world coordinates: x is the column, y the row from the bottom, and a square is one
unit wide. Symbols in shapes: W side of the world; n squares; H' W' C dimensions of an image.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from PIL import Image

from agents.agent_file import load_agent
from common.errors import UserError
from common.files import atomic_path
from common.palette import DPI, ORANGE, PURPLE, SKY_BLUE, VERMILION, YELLOW
from common.progress import with_progress
from common.results import ResultStore
from common.tables import with_minus
from common.video import write_video
from envs.maze.grid import CHEESE, FREE, Grid, Square
from envs.maze.state import MazeState, draw
from maze.field.fields import NO_MEMORY, WALKED, Difference, Field, difference
from maze.field.outcomes import Chain, path_probability
from maze.field.results import UNPATCHED, FieldOptions, Fields

PANEL_INCHES = 4.2
FILM_FRAMES_PER_SECOND = 4
_CELL_COLOURS = ListedColormap(("#7A6A58", "#161616", ORANGE))  # wall, free, cheese
_WIDTH = 0.005  # width of an arrow, relative to a panel of 25 x 25 squares
_LENGTH = 0.9  # length of an arrow of probability 1, in squares
_SHORTEST = 0.05  # smallest probability for which an arrow is drawn


@dataclasses.dataclass(frozen=True)
class Style:
    """Options for drawing fields.

    Attributes:
        components: whether to draw one arrow per direction, with the probability of the direction
            as its length, instead of net arrows.
        margin: whether to also draw the walls around the maze.
        marked: squares to mark, such as squares where a patch acts.
    """

    components: bool = False
    margin: bool = False
    marked: Sequence[Square] = ()


PLAIN = Style()


@dataclasses.dataclass(frozen=True, eq=False)
class Panel:
    """Panel of a figure with arrows over a level.

    Attributes:
        shown: field or difference whose arrows are drawn.
        view: person view of the level, uint8 (512, 512, 3); by default the cells are drawn.
    """

    title: str
    grid: Grid
    shown: Field | Difference
    view: np.ndarray | None = None


def compared(original: Panel, patched: Panel) -> list[Panel]:
    """Return panels of the unpatched field, of the patched field, and of their difference.

    Args:
        original, patched: panels that show the fields of one level.
    """
    change = difference(cast(Field, original.shown), cast(Field, patched.shown))
    title = f"difference\nmean total variation {change.mean_total_variation:.3f}"
    return [original, patched, Panel(title, original.grid, change, original.view)]


def field_figure(panels: Sequence[Panel], style: Style = PLAIN, title: str = "") -> Figure:
    """Draw panels side by side."""
    figure, axes_of = _side_by_side(len(panels), title)
    for axes, panel in zip(axes_of, panels):
        _draw_level(axes, panel.grid, panel.view)
        _draw_arrows(axes, panel, style)
        _finish(axes, panel.grid, style, panel.title)
    return figure


def _side_by_side(number: int, title: str) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(PANEL_INCHES * number, PANEL_INCHES + 0.8), layout="constrained")
    figure.suptitle(title, fontsize=11)
    return figure, figure.subplots(1, number, squeeze=False)[0]


def plot_fields(path: Path, panels: Sequence[Panel], style: Style = PLAIN,
                title: str = "") -> None:
    """Write a figure of panels side by side, atomically."""
    with atomic_path(path) as temporary:
        field_figure(panels, style, title).savefig(temporary, dpi=DPI)


def plot_maps(path: Path, grid: Grid, maps: Mapping[str, np.ndarray], style: Style = PLAIN,
              title: str = "") -> None:
    """Write heat maps side by side, atomically.

    Args:
        maps: maps by title. Maps of squares, (W, W), have row 0 at the bottom and NaN for other
            cells, as from ``Field.map``. Maps of another shape show a channel (rows, columns), with
            row 0 at the top, and cover the whole frame.
    """
    figure, axes_of = _side_by_side(len(maps), title)
    side = grid.world_dim
    for axes, (name, values) in zip(axes_of, maps.items()):
        _draw_level(axes, grid, None)
        is_of_squares = values.shape == grid.cells.shape
        image = axes.imshow(values[::-1] if is_of_squares else values, extent=(0, side, 0, side),
                            cmap="viridis", interpolation="nearest", zorder=1)
        _finish(axes, grid, style, name)
        figure.colorbar(image, ax=axes, shrink=0.8).ax.tick_params(labelsize=7)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=DPI)


def write_film(path: Path, figures: Iterable[Figure], stills: Path | None = None,
               num_stills: int = 0) -> None:
    """Write figures of one size as a film, atomically, each shown for a quarter of a second.

    Args:
        stills: optional image file with ``num_stills`` evenly spaced figures side by side,
            including the first and the last; all figures if there are fewer.
    """
    images = []
    for figure in figures:
        canvas = FigureCanvasAgg(figure)
        figure.set_dpi(DPI)
        canvas.draw()
        image = np.asarray(canvas.buffer_rgba())[..., :3]  # (H', W', C), cropped to even sides
        images.append(image[:len(image) // 2 * 2, :image.shape[1] // 2 * 2].copy())
    write_video(path, iter(images), FILM_FRAMES_PER_SECOND)
    if stills:
        chosen = np.unique(np.linspace(0, len(images) - 1, num_stills).round().astype(int))
        with atomic_path(stills) as temporary:
            Image.fromarray(np.hstack([images[place] for place in chosen])).save(temporary)


def _draw_level(axes: Axes, grid: Grid, view: np.ndarray | None) -> None:
    side = grid.world_dim
    if view is None:
        contents = np.select([grid.cells == FREE, grid.cells == CHEESE], [1, 2], 0)
        axes.imshow(contents[::-1], extent=(0, side, 0, side), cmap=_CELL_COLOURS, vmin=0, vmax=2,
                    interpolation="nearest", zorder=0)
        axes.plot(grid.mouse.column + 0.5, grid.mouse.row + 0.5, "o", color="white", zorder=2)
    else:
        axes.imshow(view, extent=(0, side, 0, side), zorder=0)


def _shown_side(grid: Grid, style: Style) -> int:
    """Return the number of squares along a side of a panel: of the world with the margin, of the
    maze without it."""
    return grid.world_dim if style.margin else grid.maze_dim


def _draw_arrows(axes: Axes, panel: Panel, style: Style) -> None:
    shown = panel.shown
    arrows = shown.components if style.components else shown.arrows[:, None]  # (n, 1 or 4, 2)
    places = np.broadcast_to(shown.squares[:, None, ::-1] + 0.5, arrows.shape)
    long_enough = np.linalg.norm(arrows, axis=-1) >= _SHORTEST
    (x, y), (right, up) = places[long_enough].T, arrows[long_enough].T
    # Light colours are visible on Procgen's black floor.
    colour = SKY_BLUE if isinstance(shown, Difference) else YELLOW
    axes.quiver(x, y, right, up, color=colour, angles="xy", scale_units="xy", scale=1 / _LENGTH,
                units="width", width=_WIDTH * 25 / _shown_side(panel.grid, style), zorder=3)


def _finish(axes: Axes, grid: Grid, style: Style, title: str) -> None:
    """Draw a ring at the decision square of a fork and crosses at the marked squares; set the
    limits and the title of the axes."""
    size = 260 / _shown_side(grid, style)
    with contextlib.suppress(UserError):  # only forks have a decision square
        square = grid.decision_square()
        axes.plot(square.column + 0.5, square.row + 0.5, "o", markerfacecolor="none",
                  markeredgecolor=VERMILION, markeredgewidth=2, markersize=size, zorder=4)
    for square in style.marked:
        axes.plot(square.column + 0.5, square.row + 0.5, "x", color=PURPLE, markeredgewidth=2,
                  markersize=size, zorder=4)
    begin = (grid.world_dim - _shown_side(grid, style)) / 2
    limits = begin, grid.world_dim - begin
    axes.set(xlim=limits, ylim=limits, xticks=[], yticks=[])
    axes.set_title(with_minus(title.replace("_", " ")), fontsize=9)


def draw_condition(store: ResultStore, condition: str, fields: Mapping[str, Fields],
                   unpatched: Mapping[str, Fields], views: Mapping[str, np.ndarray],
                   style: Style) -> None:
    """Draw and write the missing figures of a condition, which is a list of patches.

    Args:
        fields, unpatched: fields of the condition and of the condition without patches, by level.
        views: person views of the levels to draw, uint8 (512, 512, 3), by level.
    """
    for name, view in with_progress(views.items(), len(views), "level"):
        sides = fields[name]
        grid = sides[0].grid
        panel = Panel(condition, grid, sides[0], view)
        if not store.has("field_figure", condition, name):
            panels = [panel] if condition == UNPATCHED else compared(
                Panel(UNPATCHED, grid, unpatched[name][0], view), panel)
            plot_fields(store.file_of("field_figure", condition, name), panels, style,
                        f"level {name}: arrows show where the agent moves")
        if not store.has("maps_figure", condition, name):
            maps = maps_of(sides)
            values = maps["value"]
            best = Square(*map(int, np.unravel_index(np.nanargmax(values), values.shape)))
            shown = with_minus(condition.replace("_", " "))
            plot_maps(store.file_of("maps_figure", condition, name), grid, maps, style,
                      f"level {name}, {shown}: the value is highest at {best}")


def maps_of(sides: Fields) -> dict[str, np.ndarray]:
    """Return maps (W, W) by title: the value and the path probability of each square and, with both
    facings, the exact probability of reaching the square.

    The path probability is left out if the memory of the field is WALKED, the exact probability if
    the agent has a memory.
    """
    field = sides[0]
    reached = field.grid.distances(field.grid.mouse) >= 0
    maps = {"value": field.map(field.values)}
    if field.memory != WALKED:
        maps["path probability"] = field.map(np.array([
            path_probability(field, Square(*square)) if reached[tuple(square)] else np.nan
            for square in field.squares.tolist()]))
    if len(sides) > 1 and field.memory == NO_MEMORY:
        squares = field.grid.squares()
        exact = np.full(reached.shape, np.nan)
        exact[tuple(np.array(squares).T)] = Chain.of(sides).reaching(squares)
        maps["exact probability of reaching it"] = exact
    return maps


def over_conditions(fields: Mapping[str, Mapping[str, Fields]], level: str, view: np.ndarray,
                    style: Style) -> Iterator[Figure]:
    """For each list of patches (condition), yield a figure of a level's unpatched field, its
    patched field, and their difference.

    Args:
        view: person view of the level, uint8 (512, 512, 3).
    """
    grid = fields[UNPATCHED][level][0].grid
    original = Panel(UNPATCHED, grid, fields[UNPATCHED][level][0], view)
    for condition, by_level in fields.items():
        if condition != UNPATCHED:
            yield field_figure(compared(original, Panel(condition, grid, by_level[level][0], view)),
                               style, f"level {level}")


def over_checkpoints(files: Sequence[Path], state: MazeState, options: FieldOptions,
                     view: np.ndarray, style: Style) -> Iterator[Figure]:
    """For each agent file, yield a figure of a level's field.

    Args:
        view: person view of the level, uint8 (512, 512, 3).
    """
    for path in files:
        policy = load_agent(path, options.compute.device)
        field = dataclasses.replace(options, policy=policy).field(state)
        yield field_figure([Panel(path.stem, state.grid, field, view)], style)


def over_cheese(state: MazeState, options: FieldOptions, style: Style) -> Iterator[Figure]:
    """For each free square except the mouse's, yield a figure of the level's field with the cheese
    on that square."""
    for square in state.grid.squares():
        if square != state.grid.mouse:
            moved = state.with_cheese(square)
            yield field_figure([Panel(f"cheese at {square}", moved.grid, options.field(moved),
                                      draw([moved], person_view=True)[0])], style)
