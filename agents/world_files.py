"""Files of the rendered worlds in an episode's folder, see ``agents.rollout_files``."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image, UnidentifiedImageError

from common.errors import UserError
from common.files import read_bytes
from common.game_constants import FRAME_SIZE, WORLD_SIZE
from common.tables import read_table
from envs.level_state import MovingObject

MOVING_COLUMNS = ("row", *(field.name for field in dataclasses.fields(MovingObject)))
_MOVING_KINDS = {name: {"kind": str, "row": int, "image_type": int, "image_theme": int}.get(
    name, float) for name in MOVING_COLUMNS}
_MOVING = "moving.csv"


@dataclasses.dataclass(frozen=True)
class RenderedWorld:
    """World of a row of an episode, see ``envs.wide_view``.

    Attributes:
        image: static objects in and around the view, uint8 (WORLD_SIZE, WORLD_SIZE, 3), or in the
            view of a static camera, (FRAME_SIZE, FRAME_SIZE, 3).
        moving: all moving objects of the level except the player.
    """

    image: np.ndarray
    moving: list[MovingObject]


def rows_of(folder: Path) -> list[int]:
    """Return the rows whose worlds are in an episode's folder, in ascending order."""
    return sorted(int(match[1]) for path in folder.glob("world_*.png")
                  if (match := re.fullmatch(r"world_(\d{5,9})\.png", path.name)))


def files_of(folder: Path) -> list[Path]:
    """Return the paths of all files of worlds in an episode's folder."""
    files = [_world_file(folder, row) for row in rows_of(folder)]
    return [*files, folder / _MOVING] if files else []


def read_world(folder: Path, row: int) -> np.ndarray:
    """Read the image of the world of a row, see ``RenderedWorld``.

    Raises:
        UserError: if the file is missing or damaged, or the image has another size.
    """
    path = _world_file(folder, row)
    content = io.BytesIO(read_bytes(path))
    try:
        with Image.open(content) as image:
            shape = *image.size[::-1], len(image.getbands())
            fits = shape in ((WORLD_SIZE, WORLD_SIZE, 3), (FRAME_SIZE, FRAME_SIZE, 3))
            world = np.asarray(image) if fits else None  # decode only images of the right size
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError, SyntaxError,
            ValueError) as error:
        raise UserError(f"{path} cannot be read as an image: {error}") from None
    if world is None:
        raise UserError(f"{path} has the shape {shape}, not {(WORLD_SIZE, WORLD_SIZE, 3)}, "
                        f"or {(FRAME_SIZE, FRAME_SIZE, 3)} for a static camera")
    return world


def read_moving(folder: Path) -> pd.DataFrame:
    """Read the moving objects of all worlds in an episode's folder, with columns MOVING_COLUMNS.

    Raises:
        UserError: if the file is missing or damaged.
    """
    return read_table(folder / _MOVING, _MOVING_KINDS)


def write_worlds(folder: Path, worlds: Mapping[int, RenderedWorld]) -> None:
    """Write worlds, by row, and their moving objects to an episode's folder."""
    for row, world in worlds.items():
        Image.fromarray(world.image).save(_world_file(folder, row))
    pd.DataFrame([(row, *dataclasses.astuple(entity)) for row, world in worlds.items()
                  for entity in world.moving], columns=MOVING_COLUMNS).to_csv(
                      folder / _MOVING, index=False)


def copy_worlds(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write copies of the files of worlds, by name, to an episode's folder.

    Raises:
        UserError: if a name is not that of a file of a world.
    """
    for name, content in files.items():
        if not re.fullmatch(rf"world_\d{{5,9}}\.png|{re.escape(_MOVING)}", name):
            raise UserError(f"'{name}' is not a file of a world")
        (folder / name).write_bytes(content)


def _world_file(folder: Path, row: int) -> Path:
    return folder / f"world_{row:05d}.png"
