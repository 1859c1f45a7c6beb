"""Squares of recorded worlds, and the classes that they belong to.

Letters in shape comments: N worlds, n squares per side.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from agents.replay import recorded_levels
from agents.rollout_files import RolloutFolder
from common.errors import UserError
from common.files import atomic_path
from common.game_constants import CAMERA_FOLLOWS, SQUARES_IN_VIEW, square_size
from common.progress import with_progress
from envs.level_state import LevelState
from envs.squares import square_keys, squares_around
from generative.dataset import RecordedWorlds, RolloutDataset
from generative.squares import SquareImages, TemplateFit, square_images

WORLDS_NAME = "worlds.npz"  # squares of the recorded worlds, in the folder of a run
NUM_SQUARES = 39  # per side of a world, as many as three views


def fit_worlds(folder: RolloutFolder, episodes: Sequence[int], num_squares: int = NUM_SQUARES,
               given: SquareImages | None = None) -> tuple[SquareImages, RecordedWorlds]:
    """Fit the classes of squares to a recording, and return the squares of its worlds.

    Args:
        folder: recording of ``record.py --worlds``.
        episodes: numbers of the episodes.
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
    fit = TemplateFit(size, num_squares)
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
            for row in rows:
                x, y = places[row]
                if is_static:  # the middle of the view, and of the level
                    x = y = num_squares / 2
                squares = squares_around(keys, outside, float(x), float(y), num_squares)
                fit.add(theme, folder.world(episode, row), squares, float(x), float(y))
                found.append((episode, row, squares, places[row],
                              places[row] - places[max(row - 1, 0)]))
    if not found:
        raise UserError(f"{folder.path} has no worlds; record it with --worlds")
    images, classes = fit.finish(given)
    squares = np.stack([_classified(keys, classes, themes[episode])
                        for episode, _, keys, _, _ in found])
    numbers, rows, _, positions, velocities = map(list, zip(*found))
    return images, RecordedWorlds(np.array(numbers), np.array(rows), squares, np.array(positions),
                                  np.array(velocities))


def _classified(keys: np.ndarray, classes: dict[tuple[int, int], int], level: int) -> np.ndarray:
    """Return the classes, uint8 (n, n), of the squares with these keys in a level of the fit."""
    names, numbers = np.unique(keys, return_inverse=True)
    return np.array([classes[name, level] for name in names.tolist()], np.uint8)[
        numbers.reshape(keys.shape)]


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
        with np.load(path, allow_pickle=False) as stored:
            arrays = dict(stored)
        templates = torch.from_numpy(arrays.pop("templates"))
        images = square_images(len(templates), num_squares, float(arrays.pop("pixels_per_square")))
        images.templates.copy_(templates)
        worlds = RecordedWorlds(**arrays)
    else:
        images, worlds = fit_worlds(dataset.folder, dataset.episodes.tolist(), num_squares, given)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary, open(temporary, "wb") as file:
            np.savez_compressed(file, templates=images.templates.numpy(),
                                pixels_per_square=images.pixels_per_square, **vars(worlds))
    return images, dataset.attach_worlds(worlds, death_copies, coin_copies)
