"""Frames of mazes composed from stamps, identical to Procgen's frames in every pixel.

Procgen draws a maze without backgrounds on black: the cells column by column from the left, each
column from the bottom, and the mouse last. The image of a cell depends on its position and content
alone, so it is rendered once, as a *stamp*, and drawn over earlier cells. Pixels of cells are
opaque or transparent; the mouse has semi-transparent edges, so its opacity is measured on black and
on walls.

Symbols in shapes: W side of the world in cells, P = 64 * 64 pixels, K largest number of cells that
may be visible at a pixel, M largest number of pixels of a mouse, n frames.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.errors import UserError
from common.files import atomic_path, versions
from common.game_constants import FRAME_SIZE
from common.schemas import Array, Npz
from envs.level_state import LevelState
from envs.maze.grid import CHEESE, FREE, WALL, Grid, Square
from envs.procgen_env import EnvConfig, StateView

CACHE_FOLDER = "procgen-agent-interpretability"
FORMAT = 2  # version of the cache; increase it when the stamps or their storage change
_CONTENTS = (WALL, CHEESE)  # visible contents, 1 and 2 in the tables; a free cell is 0
_COLOUR = np.dtype("<u4")
_FILE = Npz({"cells": Array(np.int16, f"K {FRAME_SIZE**2}"),
             "colours": Array(np.uint32, f"3 K {FRAME_SIZE**2}"),
             "mouse_pixels": Array(np.int16, "Q 2 M"), "mouse_colours": Array(np.uint8, "Q 2 M 3"),
             "mouse_opacity": Array(np.uint8, "Q 2 M")})

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Stamps:
    """Images of single cells and of the mouse ("stamps") in the mazes of a distribution mode.

    The class method :meth:`of` loads or renders them.

    Attributes:
        cells: cells that may be visible at each pixel, in drawing order, as row * W + column, or
            W * W for none. int16 (K, P).
        colours: colours of these cells at the pixel, by content: nothing, a wall, a cheese. uint32
            (3, K, P), red in the lowest byte, then green and blue; 0 where transparent.
        mouse_pixels: pixels covered by a mouse in each cell, by facing, int16 (W * W, 2, M), padded
            with copies of the last one.
        mouse_colours: colours of the mouse times its opacity, uint8 (W * W, 2, M, 3).
        mouse_opacity: opacity of the mouse, from 0 to 255, uint8 (W * W, 2, M).
    """

    cells: np.ndarray
    colours: np.ndarray
    mouse_pixels: np.ndarray
    mouse_colours: np.ndarray
    mouse_opacity: np.ndarray

    @classmethod
    @functools.lru_cache
    def of(cls, distribution_mode: str) -> Stamps:
        """Return the stamps of a mode, from the cache folder or rendered with Procgen and cached.

        Args:
            distribution_mode: ``easy`` or ``hard``.
        """
        path = cache_file(distribution_mode)
        if path.is_file():
            try:
                return cls(**_FILE.read(path, "python -m maze.fields"))
            except UserError as error:
                logger.warning("the file of stamps %s is damaged: %s; its stamps are rendered "
                               "again", path, error)
        stamps = _render(EnvConfig("maze", distribution_mode))
        try:
            with atomic_path(path) as temporary:
                _FILE.write(temporary, dataclasses.asdict(stamps))
        except OSError as error:
            logger.warning("the stamps cannot be cached: %s", error)
        return stamps

    def frames(self, grid: Grid, squares: Sequence[Square] | np.ndarray,
               facing: int | np.ndarray = 0) -> np.ndarray:
        """Return frames of a maze with the mouse on each of several squares.

        Args:
            grid: a maze of this mode; its own mouse is ignored.
            squares: squares of the mouse, world (row, column), (n, 2).
            facing: facing of the mouse, 0 for left and 1 for right; one number or one per square
                (n,).

        Returns:
            Frames, uint8 (n, 64, 64, 3).
        """
        empty = self._without_mouse(grid.cells)
        rows, columns = np.asarray(squares, np.int64).reshape(-1, 2).T
        where = rows * grid.world_dim + columns, np.broadcast_to(facing, rows.shape)
        frames = np.repeat(empty[None], len(rows), axis=0)  # (n, P, 3)
        pixels = np.arange(len(rows))[:, None], self.mouse_pixels[where]  # (n, M)
        frames[pixels] = _over(self.mouse_colours[where], self.mouse_opacity[where][..., None],
                               frames[pixels])
        return frames.reshape(-1, FRAME_SIZE, FRAME_SIZE, 3)

    def _without_mouse(self, cells: np.ndarray) -> np.ndarray:
        """Return the frame of a maze without the mouse, uint8 (P, 3)."""
        contents = np.zeros(cells.size + 1, np.int64)  # the last entry stands for no cell
        for number, content in enumerate(_CONTENTS, 1):
            contents[:-1][cells.ravel() == content] = number
        frame = np.zeros(FRAME_SIZE**2, _COLOUR)
        pixels = np.arange(FRAME_SIZE**2)
        for cell, colours in zip(self.cells, self.colours.swapaxes(0, 1)):
            colour = colours[contents[cell], pixels]  # (P,)
            frame = np.where(colour, colour, frame)
        return frame.view(np.uint8).reshape(-1, 4)[:, :3]


def cache_file(distribution_mode: str) -> Path:
    """Return the cache file of a mode's stamps, named after Procgen's version and FORMAT."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / CACHE_FOLDER
    version = versions().get("procgen") or versions().get("procgen-mirror")
    return folder / f"maze_{distribution_mode}_procgen_{version}_format_{FORMAT}.npz"


def _over(colours: np.ndarray, opacity: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Blend semi-transparent colours over opaque ones.

    Results are rounded as by ``BYTE_MUL`` in Qt's raster engine.

    Args:
        colours: upper colours, already multiplied by their opacity, uint8.
        opacity: opacity of the upper colours, 0 to 255; all arrays broadcast.
        below: lower colours, uint8.
    """
    product = below.astype(np.uint32) * (255 - opacity.astype(np.uint32))
    return (colours + ((product + (product >> 8) + 128) >> 8)).astype(np.uint8)


def _render(config: EnvConfig) -> Stamps:
    """Render the stamps of a mode with Procgen."""
    with contextlib.closing(StateView(config)) as view:
        state = LevelState.parse(view.state(), "maze")
        side = len(state.grid)
        places = [(row, column) for column in range(side) for row in range(side)]
        nothing, walls = np.full((side, side), FREE), np.full((side, side), WALL)

        def draw(cells: np.ndarray, mouse: tuple[int, int], facing: int = 0) -> np.ndarray:
            """Render cells and the mouse at (row, column), which may be a wall; uint8 (P, 3)."""
            entities = state.entities.copy()
            entities["y"], entities["x"] = mouse[0] + 0.5, mouse[1] + 0.5
            entities["is_reflected"] = facing
            return view.draw(dataclasses.replace(state, grid=cells, entities=entities).to_bytes()
                             ).reshape(-1, 3)

        on_black, on_walls = (np.array([[draw(cells, place, facing) for facing in (0, 1)]
                                        for place in places])  # (W * W, 2, P, 3)
                              for cells in (nothing, walls))
        shown = np.empty((len(_CONTENTS), len(places), FRAME_SIZE**2, 3), np.uint8)
        for (kind, content), (number, (row, column)) in itertools.product(
                enumerate(_CONTENTS), enumerate(places)):
            cells = nothing.copy()
            cells[row, column] = content
            far = 0 if row + column >= side else -1  # a corner whose mouse is far from the cell
            shown[kind, number] = draw(cells, places[far]) - on_black[far, 0]
    numbers = np.array([row * side + column for row, column in places])
    cells, colours = _by_pixel(numbers, shown)
    bare = Stamps(cells, colours, *(np.zeros((side**2, 2, 1, *more), np.int16)
                                    for more in ((), (3,), ())))
    order = np.argsort(numbers)
    return dataclasses.replace(bare, **_mouse_stamps(on_black[order], on_walls[order],
                                                     bare._without_mouse(walls)))


def _by_pixel(numbers: np.ndarray, shown: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Collect the cells that are visible at each pixel, and their colours, for ``Stamps.cells`` and
    ``Stamps.colours``.

    Args:
        numbers: numbers of the cells, row * W + column, in drawing order.
        shown: images of each cell alone, by content, (2, W * W, P, 3).
    """
    touches = shown.any(axis=(0, 3))  # (W * W, P)
    most = touches.sum(axis=0).max()
    cells = np.full((most, touches.shape[1]), len(numbers), np.int16)
    colours = np.zeros((1 + len(_CONTENTS), most, touches.shape[1], 4), np.uint8)
    for pixel in range(touches.shape[1]):
        touching = np.flatnonzero(touches[:, pixel])
        cells[:len(touching), pixel] = numbers[touching]
        colours[1:, :len(touching), pixel, :3] = shown[:, touching, pixel]
    return cells, colours.view(_COLOUR)[..., 0]


def _mouse_stamps(on_black: np.ndarray, on_walls: np.ndarray,
                  walls: np.ndarray) -> dict[str, np.ndarray]:
    """Compute pixels, colours and opacity of the mouse in each cell, as arrays of :class:`Stamps`
    by name.

    Args:
        on_black, on_walls: frames with the mouse in each cell, by facing, (W * W, 2, P, 3).
        walls: frame of the walls without the mouse (P, 3).
    """
    changed = on_black.any(axis=-1) | (on_walls != walls).any(axis=-1)  # (W * W, 2, P)
    most = changed.sum(axis=-1).max()
    shape = (*changed.shape[:2], most)
    mouse_pixels = np.zeros(shape, np.int16)
    mouse_colours = np.zeros((*shape, 3), np.uint8)
    mouse_opacity = np.zeros(shape, np.uint8)
    opacities = np.arange(256)[:, None, None]
    for place in np.ndindex(*changed.shape[:2]):
        pixels = np.flatnonzero(changed[place])
        if not len(pixels):
            continue
        pixels = np.pad(pixels, (0, most - len(pixels)), mode="edge")
        colours, seen = on_black[place][pixels], on_walls[place][pixels]
        explains = (_over(colours, opacities, walls[pixels]) == seen).all(axis=-1)  # (256, M)
        mouse_pixels[place], mouse_colours[place] = pixels, colours
        mouse_opacity[place] = explains.argmax(axis=0)
    return {"mouse_pixels": mouse_pixels, "mouse_colours": mouse_colours,
            "mouse_opacity": mouse_opacity}
