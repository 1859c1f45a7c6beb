"""Contents of worlds: static objects that squares stand for, in view or beyond it.

Moving objects are no squares of a world.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

import numpy as np
import torch
from PIL import Image

from agents.frames import to_frames
from agents.replay import recorded_game
from common.errors import UserError
from common.game_constants import FRAME_SIZE
from common.video import strip
from envs.equal_views import NEAR_SQUARES
from envs.level_state import LevelState
from envs.objects import GameObject, object_groups, objects_of
from envs.procgen_env import EnvConfig, LevelSlots
from envs.squares import squares_around
from generative.dataset import RolloutDataset
from generative.simulator import Simulator
from generative.squares import SquareImages, World
from generative.world_data import RecordedWorlds, fit_worlds

_NOT_A_CLASS = -1
_OUTLINE = 2  # pixels


def recorded_worlds(simulator: Simulator, dataset: RolloutDataset,
                    windows: np.ndarray) -> RecordedWorlds:
    """Return the recorded worlds of the episodes of windows (N,), in the simulator's classes.

    Raises:
        UserError: if the simulator or the recording has no worlds.
    """
    squares, num_squares = simulator.squares, simulator.config.world_squares
    if squares is None or num_squares is None:
        raise UserError("this simulator has no worlds, so it cannot simulate in rendered ones; "
                        "leave out --rendered_worlds")
    episodes = np.unique(dataset.episodes_of(windows)).tolist()
    return fit_worlds(dataset.folder, episodes, num_squares, squares)[1]


def check_squares(simulator: Simulator, other: Simulator) -> None:
    """Raise UserError unless the classes of squares of another simulator, if any, are equal."""
    if other.squares is not None and simulator.squares is not None and not (
            other.config.world_squares == simulator.config.world_squares
            and torch.equal(other.squares.templates, simulator.squares.templates)):
        raise UserError("the simulator to compare with has other classes of squares, so it cannot "
                        "be given the same recorded worlds; leave out --rendered_worlds")


def name_classes(dataset: RolloutDataset, worlds: RecordedWorlds,
                 images: SquareImages) -> dict[str, np.ndarray]:
    """Find the classes that stand for each kind of object.

    A class belongs to a kind of static object if most of its recorded squares hold one.

    Returns:
        Numbers of the classes by name of the kind, without kinds that have no class.
    """
    game = recorded_game(dataset.folder)
    kinds = [kind for kind in objects_of(game.env_name) if kind.is_static]
    num_classes = len(images.templates)
    votes, counts = np.zeros((len(kinds), num_classes)), np.zeros(num_classes)
    with contextlib.closing(LevelSlots(game, 1)) as slots:
        for episode in np.unique(worlds.episodes).tolist():
            slots.start(0, int(dataset.folder.steps(episode)["level_seed"].iloc[0]))
            state = LevelState.parse(slots.state(0) or b"", game.env_name)
            maps = [_squares_with(state, kind) for kind in kinds]
            outside = [int(state.world["out_of_bounds_object"]) in kind.cells for kind in kinds]
            for row in np.flatnonzero(worlds.episodes == episode):
                classes = worlds.squares[row]
                counts += np.bincount(classes.ravel(), minlength=num_classes)
                x, y = worlds.positions[row].tolist()
                for vote, holds, beyond in zip(votes, maps, outside):
                    held = squares_around(holds, beyond, x, y, len(classes))
                    vote += np.bincount(classes[held > 0], minlength=num_classes)
    found = {kind.name: np.flatnonzero(vote > counts / 2) for kind, vote in zip(kinds, votes)}
    first = num_classes - len(images.looks)
    for number, names in enumerate(object_groups(game.env_name)[:len(images.looks)], first):
        found |= dict.fromkeys(names, np.array([number]))
    return {name: classes for name, classes in found.items() if len(classes)}


def _squares_with(state: LevelState, kind: GameObject) -> np.ndarray:
    """Return 1 for the squares of a level that hold a kind, int64 (h, w), row 0 at the top."""
    holds = np.isin(state.grid[::-1], kind.cells).astype(np.int64)
    for entity in state.entities[np.isin(state.entities["type"], kind.entity_types)]:
        row, column = len(holds) - 1 - int(np.floor(entity["y"])), int(np.floor(entity["x"]))
        if 0 <= row < holds.shape[0] and 0 <= column < holds.shape[1]:
            holds[row, column] = 1
    return holds


def certain_classes(world: World) -> np.ndarray:
    """Return the most probable class of each square, int64 (B, n, n)."""
    squares = world.squares if world.squares.ndim == 3 else world.squares.argmax(dim=-1)
    return squares.cpu().numpy()


def squares_in_view(world: World, pixels_per_square: float) -> np.ndarray:
    """Return the classes of the squares whose centre is in view at the start.

    Returns:
        Classes (B, n · n), -1 for squares that are not in view.
    """
    classes = certain_classes(world)
    centres = world.corner.cpu().numpy()[:, :, None] + pixels_per_square * (
        np.arange(classes.shape[1]) + 0.5)  # (B, 2, n), right and down
    inside = (centres > 0) & (centres < FRAME_SIZE)
    seen = inside[:, 1, :, None] & inside[:, 0, None]
    return np.where(seen, classes, _NOT_A_CLASS).reshape(len(classes), -1)


def squares_beyond(world: World, pixels_per_square: float) -> np.ndarray:
    """Return the classes of the squares to the right of the view at the start of a level.

    These are the squares of ``envs.equal_views.contents_beyond``, as far as the world reaches up
    and down. At the start of a level, the right edge of the view is the edge of a square.

    Returns:
        Classes (B, n · NEAR_SQUARES), -1 for columns outside the world.
    """
    classes = certain_classes(world)
    edge = (FRAME_SIZE - world.corner[:, 0].cpu().numpy()) / pixels_per_square  # (B,)
    first = np.round(edge).astype(int)
    columns = first[:, None] + np.arange(NEAR_SQUARES)  # (B, 13)
    inside = columns < classes.shape[2]
    columns = np.where(inside, columns, 0)[:, None]
    found = np.take_along_axis(classes, np.broadcast_to(columns, (*classes.shape[:2],
                                                                  NEAR_SQUARES)), axis=2)
    return np.where(inside[:, None], found, _NOT_A_CLASS).reshape(len(classes), -1)


def have_any(squares: np.ndarray, classes: Collection[int]) -> np.ndarray:
    """Return whether any of the squares (..., squares) has one of the classes, bool (...)."""
    return np.isin(squares, list(classes)).any(axis=-1)


def start_frames(config: EnvConfig, levels: Sequence[int]) -> np.ndarray:
    """Return the first frames of levels, uint8 (B, H, W, C)."""
    frames = []
    with contextlib.closing(LevelSlots(config, 1)) as slots:
        for level in levels:
            slots.start(0, level)
            frames.append(slots.frames[0].copy())
    return np.stack(frames)


def draw_continuations(views: np.ndarray, worlds: np.ndarray, size: int,
                       ) -> Image.Image:
    """Draw views in the first column, and worlds that continue them, with the view outlined.

    Args:
        views: frames, uint8 (N, H, W, C).
        worlds: images of M worlds of each view, uint8 (N, M, 3 · H, 3 · W, C).
        size: pixels per side of a world in the image.

    Returns:
        Image of N rows and 1 + M columns.
    """
    inside = slice(FRAME_SIZE, 2 * FRAME_SIZE)
    edge = slice(FRAME_SIZE - _OUTLINE, 2 * FRAME_SIZE + _OUTLINE)
    rows = []
    for view, images in zip(views, worlds):
        alone = np.full_like(images[0], 128)
        alone[inside, inside] = view
        outlined = images.copy()
        outlined[:, edge, edge] = 255, 255, 0
        outlined[:, inside, inside] = images[:, inside, inside]
        rows.append([alone, *outlined])
    return strip(rows, size)


def draw_worlds(squares: SquareImages, world: World, size: int) -> np.ndarray:
    """Draw worlds around the view at their start, with their objects, uint8 (B, S, S, 3)."""
    return to_frames(squares.view(squares.paint(world), torch.zeros_like(world.corner), size))
