"""Contents of a level's squares, as keys that tell static objects apart.

Two squares with equal keys in the same level look the same, because Procgen draws every cell of a
kind, and every static entity of an image and theme, in the same way. Keys are the basis of the
classes of squares in ``generative.squares``.
"""

from __future__ import annotations

import numpy as np

from envs.level_state import LevelState
from envs.objects import moving_rows, objects_of

_INVISIBLE = {"coinrun": (19,)}  # cells that are not drawn: barriers of enemies
_EMPTY = 100
_IMAGES, _THEMES = 1000, 100  # more than the numbers of image types and themes
_LARGEST_RADIUS = 0.5  # static entities with a larger radius do not fit into one square


def square_keys(state: LevelState) -> tuple[np.ndarray, int]:
    """Compute the key of each square of a level from its cell and from the static entity in it.

    Returns:
        Keys, int64 (h, w), row 0 at the top of the level; and the key of all squares outside it.
    """
    cells = np.where(np.isin(state.grid, _INVISIBLE.get(state.game, ())), _EMPTY, state.grid)
    keys = (cells[::-1].astype(np.int64) + _IMAGES) * _IMAGES * _THEMES
    height, width = keys.shape
    entities = state.entities[~moving_rows(state)]
    for entity in entities[entities["rx"] <= _LARGEST_RADIUS]:
        row, column = height - 1 - int(np.floor(entity["y"])), int(np.floor(entity["x"]))
        if 0 <= row < height and 0 <= column < width:
            cell = keys[row, column] // (_IMAGES * _THEMES)  # later entities occlude earlier ones
            keys[row, column] = (cell * _IMAGES + 1 + int(entity["image_type"])) * _THEMES + int(
                entity["image_theme"])
    outside = (int(state.world["out_of_bounds_object"]) + _IMAGES) * _IMAGES * _THEMES
    return keys, outside


def is_solid(keys: np.ndarray, game: str) -> np.ndarray:
    """Return whether squares with these keys are walls, bool, in the shape of the keys."""
    walls = [cell for kind in objects_of(game) if kind.name == "wall" for cell in kind.cells]
    return np.isin(cells_of(keys), walls)


def is_empty(keys: np.ndarray) -> np.ndarray:
    """Return whether squares with these keys are empty, bool, in the shape of the keys."""
    return (cells_of(keys) == _EMPTY) & (keys % (_IMAGES * _THEMES) == 0)


def cells_of(keys: np.ndarray) -> np.ndarray:
    """Return the cells of squares with these keys, int64, in the shape of the keys."""
    return keys // (_IMAGES * _THEMES) - _IMAGES


def images_of(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the image type of the static entity in squares with these keys, -1 for none, and its
    theme, int64, in the shape of the keys."""
    entity = keys % (_IMAGES * _THEMES)
    return entity // _THEMES - 1, entity % _THEMES


def squares_around(keys: np.ndarray, outside: int, x: float, y: float, size: int) -> np.ndarray:
    """Cut out the squares around a position.

    Args:
        keys, outside: see ``square_keys``.
        x, y: position in squares, from the lower left corner of the level.
        size: odd number of squares per side.

    Returns:
        Keys, int64 (size, size); the position is in the middle square.
    """
    height, width = keys.shape
    row, column = height + int(np.floor(-y)), int(np.floor(x))
    rows = np.arange(size) - size // 2 + row
    columns = np.arange(size) - size // 2 + column
    inside = ((rows >= 0) & (rows < height))[:, None] & ((columns >= 0) & (columns < width))
    cut = keys[rows.clip(0, height - 1)][:, columns.clip(0, width - 1)]
    return np.where(inside, cut, outside)
