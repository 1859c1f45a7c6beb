"""Squares of recorded worlds, and the classes that they belong to."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from agents.replay import recorded_levels
from agents.rollout_files import RolloutFolder
from common.errors import UserError
from common.files import MAX_REASON, atomic_path, read_arrays
from common.game_constants import CAMERA_FOLLOWS, SQUARES_IN_VIEW, square_size
from common.progress import with_progress
from common.schemas import Array, Npz, save_arrays
from envs.level_state import LevelState
from envs.objects import object_groups
from envs.squares import is_empty, is_solid, square_keys, squares_around
from generative.dataset import RecordedWorlds, RolloutDataset
from generative.sprites import SpriteFit
from generative.squares import SquareImages, square_images
from generative.template_fit import TemplateFit

WORLDS_NAME = "worlds.npz"  # squares of the recorded worlds, in the folder of a run
_IMAGES = "images."  # prefix of the tensors of ``SquareImages`` in this file
NUM_SQUARES = 39  # per side of a world, as many as three views
_MAX_LOOKS, _MAX_IMAGES = 256, 2**28  # of all classes of objects; bytes of all images in the file
_WORLDS = Npz({
    "pixels_per_square": Array(np.floating), "object_looks": Array(np.integer, "G"),
    "episodes": Array(np.integer, "N"), "rows": Array(np.integer, "N"),
    **{name: Array(dtype, "N n n") for name, dtype in (
        ("squares", np.uint8), ("places", np.float16), ("velocities", np.float16),
        ("looks", np.uint8))},
    **{name: Array(np.floating, "N 2", finite=False) for name in ("positions", "moved")}})
_NEAREST = (0, -1, 1, -2, 2)  # columns of squares for an object, relative to its own


def fit_worlds(folder: RolloutFolder, episodes: Sequence[int], num_squares: int = NUM_SQUARES,
               given: SquareImages | None = None) -> tuple[SquareImages, RecordedWorlds]:
    """Fit the classes of squares to a recording, and return the squares of its worlds.

    Args:
        folder: recording of ``record.py --worlds``.
        num_squares: n.
        given: images of given classes; None to fit them.

    Raises:
        UserError: if the recording has no worlds, worlds of its game cannot be rendered or have
            another number of squares, or it does not name its game.
    """
    game, levels = recorded_levels(folder)
    size = square_size(game.env_name, game.distribution_mode)
    if size is None:
        raise UserError(f"{folder.path}: worlds of {game.env_name} cannot be rendered")
    is_static = game.env_name not in CAMERA_FOLLOWS
    if is_static and num_squares != (
            needed := SQUARES_IN_VIEW[game.env_name][game.distribution_mode]):
        raise UserError(f"world_squares must be {needed} in {game.env_name}, mode "
                        f"{game.distribution_mode}, whose level fills the view, not {num_squares}")
    groups = object_groups(game.env_name)
    fit, sprites = TemplateFit(size, num_squares), SpriteFit(size, groups)
    found: list[tuple] = []
    themes: dict[int, int] = {}  # levels of the fit by episode
    with contextlib.closing(levels) as slots:
        for episode in with_progress(episodes, len(episodes), "episode"):
            steps, rows = folder.steps(episode), folder.world_rows(episode)
            if not rows:
                continue
            slots.start(0, int(steps["level_seed"].iloc[0]))
            state = slots.state(0)
            assert state is not None
            keys, outside = square_keys(LevelState.parse(state))
            theme = themes[episode] = 0 if is_static else episode  # mazes have no themes
            places = steps[["player_x", "player_y"]].to_numpy(np.float32)
            frames, table = folder.array_files(episode).frames, folder.moving(episode)
            for row in rows:
                x, y = places[row]
                if is_static:  # the middle of the view, and of the level
                    x = y = num_squares / 2
                squares = squares_around(keys, outside, float(x), float(y), num_squares)
                world, objects = folder.world(episode, row), table[table["row"] == row]
                fit.add(theme, world, squares, float(x), float(y))
                if given is None and groups:
                    sprites.add(frames.rows(row, row + 1)[0], world, objects, float(x), float(y))
                found.append((episode, row, squares, objects, places[row],
                              places[row] - places[max(row - 1, 0)]))
    if not found:
        raise UserError(f"{folder.path} has no worlds; record it with --worlds")
    images, classes = fit.finish(given)
    if given is None:
        images = _with_objects(images, classes, sprites, game.env_name)
    squares, at, moving, looks = map(np.stack, zip(*(
        with_objects(_classified(keys, classes, themes[episode]), objects, groups, images, x, y)
        for episode, _, keys, objects, (x, y), _ in found)))
    numbers, rows, _, _, positions, velocities = map(list, zip(*found))
    return images, RecordedWorlds(np.array(numbers), np.array(rows), squares, at, moving, looks,
                                  np.array(positions), np.array(velocities))


def with_objects(squares: np.ndarray, objects: pd.DataFrame, groups: Sequence[Sequence[str]],
                 images: SquareImages, x: float, y: float) -> tuple[np.ndarray, ...]:
    """Put moving and animated objects into the squares of a world.

    Args:
        squares: classes of static squares, uint8 (n, n).
        objects: the objects, with the columns of ``MovingObject``.
        groups: kinds in each class of objects, see ``envs.objects.object_groups``.
        images: images of the classes; objects are left out if they have none for them.
        x, y: the player's position in squares.

    Returns:
        Classes, places and velocities, float16, and looks, uint8, see ``squares.World`` (n, n).
        If the square of an object is not empty, the object is put into the nearest empty square of
        the same row and height above the ground, with a place beyond its edge.
    """
    num, squares = len(squares), squares.copy()
    places, velocities = np.zeros((2, num, num), np.float16)
    looks = np.zeros((num, num), np.uint8)
    sprites, empty = images.sprites, images.empty_class
    if sprites is None:
        return squares, places, velocities, looks
    speeds = sprites.speed.tolist()
    for thing in objects.itertuples():
        row = int(np.floor(-thing.y)) - int(np.floor(-y)) + num // 2
        column = int(np.floor(thing.x)) - int(np.floor(x)) + num // 2
        if 0 <= row < num and 0 <= column < num:
            group = next(i for i, kinds in enumerate(groups) if thing.kind in kinds)
            place = thing.x % 1
            on_ground = sprites.solid[squares[min(row + 1, num - 1)].astype(int)].numpy() > 0
            near = next((step for step in _NEAREST if 0 <= column + step < num and squares[
                row, column + step] == empty and on_ground[column + step] == on_ground[column]), 0)
            column, place = column + near, place - near
            squares[row, column] = sprites.first_class + group
            places[row, column] = place
            velocities[row, column] = thing.vx / speeds[group] if speeds[group] else 0
            looks[row, column] = thing.image_theme
    return squares, places, velocities, looks


def _with_objects(images: SquareImages, classes: dict[tuple[int, int], int], sprites: SpriteFit,
                  game: str) -> SquareImages:
    """Append the classes of objects to the images of static classes."""
    keys = np.array([key for key, _ in classes])
    numbers = np.array(list(classes.values()))
    empty = int(np.bincount(numbers[is_empty(keys)], minlength=1).argmax())
    looks = sprites.looks
    if not looks:
        return images
    result = SquareImages(len(images.templates) + len(looks), images.pixels_per_square, looks)
    result.templates.copy_(torch.cat([images.templates,
                                      images.templates[[empty]].repeat(len(looks), 1, 1, 1)]))
    assert result.sprites is not None
    sprites.finish(result.sprites)
    result.sprites.solid[torch.from_numpy(np.unique(numbers[is_solid(keys, game)]))] = 1
    return result


def _classified(keys: np.ndarray, classes: dict[tuple[int, int], int], level: int) -> np.ndarray:
    """Return the classes, uint8 (n, n), of the squares with these keys in a level of the fit."""
    names, numbers = np.unique(keys, return_inverse=True)
    return np.array([classes[name, level] for name in names.tolist()], np.uint8)[
        numbers.reshape(keys.shape)]


def read_worlds(path: Path, num_squares: int, max_worlds: int
                ) -> tuple[SquareImages, RecordedWorlds]:
    """Read the file that ``attach_worlds`` has written.

    Args:
        num_squares: n.
        max_worlds: largest number of worlds that the file may hold.

    Raises:
        UserError: if the file is damaged, or its worlds have another number of squares.
    """
    size = _MAX_IMAGES + max_worlds * (8 * num_squares**2 + 64)
    arrays = read_arrays(path, "file of worlds", max_size=size)
    state = {name: arrays.pop(name) for name in list(arrays) if name.startswith(_IMAGES)}
    try:
        _WORLDS.check(arrays)
        if arrays["squares"].shape[1] != num_squares:
            raise UserError(f"its worlds have {arrays['squares'].shape[1]} squares per side, not "
                            f"{num_squares}")
        looks, templates = arrays.pop("object_looks"), state.get(f"{_IMAGES}templates", np.empty(0))
        scale = float(arrays.pop("pixels_per_square"))
        if not (templates.ndim and scale > 0 and (looks > 0).all() and looks.sum() <= _MAX_LOOKS
                and len(looks) <= len(templates) and (arrays["squares"] < len(templates)).all()):
            raise UserError("its classes do not fit each other")
        images = square_images(len(templates), num_squares, scale, looks.tolist())
        images.load_state_dict({name.removeprefix(_IMAGES): torch.from_numpy(array)
                                for name, array in state.items()})
    except (UserError, RuntimeError, TypeError) as error:  # of images of other shapes or types
        reason = " ".join(str(error).split())[:MAX_REASON]
        raise UserError(f"{path} is damaged: {reason}; delete it, so that it is written again"
                        ) from None
    return images, RecordedWorlds(**arrays)


def attach_worlds(path: Path, dataset: RolloutDataset, num_squares: int,
                  given: SquareImages | None, death_copies: int = 1, coin_copies: int = 1
                  ) -> tuple[SquareImages, np.ndarray]:
    """Add the worlds of a recording to a data set.

    Args:
        path: file that keeps the squares of the worlds, in the folder of a run, which is bound to
            one recording; written if it is missing.
        dataset: windows of a recording of ``record.py --worlds``.
        num_squares, given: see ``fit_worlds``.
        death_copies, coin_copies: see ``RolloutDataset.attach_worlds``.

    Returns:
        Images of the classes, and the numbers of the windows with worlds, see
        ``RolloutDataset.attach_worlds``.

    Raises:
        UserError: see ``fit_worlds``.
    """
    if path.is_file():
        images, worlds = read_worlds(path, num_squares, len(dataset) + dataset.window_length)
    else:
        images, worlds = fit_worlds(dataset.folder, dataset.episodes.tolist(), num_squares, given)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            save_arrays(temporary, {
                "pixels_per_square": np.array(images.pixels_per_square),
                "object_looks": np.array(images.looks, np.int64),
                **{_IMAGES + name: tensor.cpu().numpy() for name, tensor in
                   images.state_dict().items()}, **vars(worlds)}, compressed=True)
    return images, dataset.attach_worlds(worlds, death_copies, coin_copies)
