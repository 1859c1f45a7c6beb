"""Levels of the real game, built from the squares and the objects of a world.

A key of ``envs.squares`` names what a square holds: a cell, and possibly a static entity. The
*parts* of a game are what its own levels consist of: an entity of each kind, from which new ones
are copied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from common.game_constants import CAMERA_FOLLOWS
from envs.coin import EMPTY
from envs.level_state import LevelState
from envs.objects import RIGHT, entities_of, moving_rows, objects_of, with_player_moved
from envs.procgen_env import EnvConfig, first_states
from envs.squares import cells_of, images_of, square_keys, squares_around

_BARRIER = {"coinrun": 19}  # invisible cell in which walking objects turn
_SPACING = 18.5  # squares between the places from which a level is drawn; phases vary


@dataclasses.dataclass(frozen=True)
class WorldObject:
    """A moving or animated object of a world.

    Attributes:
        kinds: names of the kinds that it may be, which differ in the direction of motion.
        row: row of the world, from the top.
        x: its centre, in squares from the left edge of the world.
        vx: velocity to the right in squares per step.
        theme: Procgen's number of the theme of its image.
    """

    kinds: tuple[str, ...]
    row: int
    x: float
    vx: float
    theme: int


@dataclasses.dataclass(frozen=True)
class Parts:
    """Parts of a game.

    Attributes:
        states: states of levels at their start.
        statics: entity of each image type of static entities.
        movers: entity of each kind of moving or animated object.
    """

    states: Sequence[LevelState]
    statics: dict[int, np.void]
    movers: dict[str, np.void]

    @classmethod
    def of(cls, config: EnvConfig, levels: Sequence[int]) -> Parts:
        """Collect the parts that occur in levels."""
        states = [LevelState.parse(data, config.env_name)
                  for data, _ in first_states(config, levels)]
        statics: dict[int, np.void] = {}
        movers: dict[str, np.void] = {}
        for state in states:
            for entity in state.entities[~moving_rows(state)]:
                statics.setdefault(int(entity["image_type"]), entity)
            for kind in objects_of(state.game):
                if not (kind.is_static or kind.is_player):
                    for entity in state.entities[entities_of(state, kind)]:
                        movers.setdefault(kind.name, entity)
        return cls(states, statics, movers)


def viewpoints(state: LevelState) -> Iterator[LevelState]:
    """Yield copies of a state in which the player, and thus the camera, is at places all over the
    level; only the state itself if the camera stands still."""
    if state.game not in CAMERA_FOLLOWS:
        yield state
        return
    width = state.grid.shape[1]
    x, y = float(state.player["x"]), float(state.player["y"])
    used = np.flatnonzero((state.grid != state.grid[:, -1:]).any(axis=0))
    last = used.max() if used.size else width
    for number, column in enumerate(np.arange(6, last + 7, _SPACING)):
        yield with_player_moved(state, column - x, 6.3 + 0.29 * number - y)


def rebuild(state: LevelState, parts: Parts, keys: np.ndarray, objects: Sequence[WorldObject]
            ) -> tuple[LevelState, int]:
    """Build a world into a level.

    The player, its velocity, the theme, the clock and all random generators are those of ``state``.
    Where the camera follows the player, the player is moved by whole squares to the middle of the
    level, so that the world fits; beyond the world, the level is filled with what lies outside.
    Walking objects get invisible barriers where the ground ends, as in the game's own levels.

    Args:
        state: level in which the player is in the middle square of the world; with a static camera,
            a level of the size of the world.
        keys: keys of the squares of the world, int64 (n, n), row 0 at the top.
        objects: moving and animated objects.

    Returns:
        The state, and the number of objects that are left out, because the game's levels in
        ``parts`` show none of their kind.
    """
    height, width = state.grid.shape
    num, follows = len(keys), state.game in CAMERA_FOLLOWS
    x, y = float(state.player["x"]), float(state.player["y"])
    if follows:
        right, up = width // 2 - int(np.floor(x)), height // 2 - int(np.floor(y))
        bottom, left = height // 2 - num // 2, width // 2 - num // 2
    else:
        right = up = 0
        bottom = left = 0
    outside = int(state.world["out_of_bounds_object"])
    grid = np.full_like(state.grid, outside) if follows else state.grid.copy()
    grid[bottom:bottom + num, left:left + num] = cells_of(keys)[::-1]
    solid = np.isin(grid, [cell for kind in objects_of(state.game) if kind.name == "wall"
                           for cell in kind.cells])
    player = np.array([state.player])
    player["x"] += right
    player["y"] += up
    entities = [player]
    images, themes = images_of(keys)
    for row, column in np.argwhere(np.isin(images, list(parts.statics))):
        entities.append(_placed(parts.statics[int(images[row, column])], left + column + 0.5,
                                bottom + num - 1 - row, int(themes[row, column])))
    left_out = 0
    for thing in objects:
        named = [kind for kind in objects_of(state.game) if kind.name in thing.kinds]
        fitting = [kind.name for kind in named if kind.name in parts.movers
                   and (kind.moving is None or (kind.moving == RIGHT) == (thing.vx > 0))]
        fitting += [kind.name for kind in named if kind.name in parts.movers]
        if not fitting:
            left_out += 1
            continue
        level = bottom + num - 1 - thing.row
        entity = _placed(parts.movers[fitting[0]], left + thing.x, level, thing.theme)
        entity["vx"] = thing.vx
        if thing.vx:
            entity["is_reflected"] = thing.vx > 0
            if state.game in _BARRIER:
                _add_barriers(grid, solid, level, int(left + thing.x), _BARRIER[state.game])
        entities.append(entity)
    drawing, tail = state.drawing.copy(), np.frombuffer(state.tail, "<i4").copy()
    drawing["center_x"] += right
    drawing["center_y"] += up
    if state.game == "coinrun":
        tail[:1].view("<f4")[0] += up  # the player's height in the last step
    return dataclasses.replace(
        state, grid=grid, entities=np.concatenate(entities), drawing=drawing,
        tail=tail.tobytes()), left_out


def _placed(entity: np.void, x: float, level: int, theme: int) -> np.ndarray:
    """Return a copy of an entity (1,) with its centre at ``x``, as high above the lower edge of its
    row as the original."""
    copy = np.array([entity])
    copy["x"], copy["y"] = x, level + float(entity["y"]) % 1
    copy["image_theme"] = theme
    return copy


def _add_barriers(grid: np.ndarray, solid: np.ndarray, level: int, column: int, barrier: int
                  ) -> None:
    """Put barriers into a grid (h, w) where the ground under a walking object ends, before the next
    wall.

    Args:
        solid: whether each square of the grid is a wall, bool (h, w).
        level, column: square of the object.
    """
    ground = ~solid[level] & solid[level - 1]
    for step in (-1, 1):
        at = column
        while 0 <= at < len(ground) and ground[at]:
            at += step
        if 0 <= at < len(ground) and at != column and grid[level, at] == EMPTY:
            grid[level, at] = barrier


def keys_of(state: LevelState, num: int) -> np.ndarray:
    """Return the keys of the squares around the player, or of the whole level if the camera stands
    still, int64 (num, num)."""
    keys, outside = square_keys(state)
    if state.game not in CAMERA_FOLLOWS:
        return squares_around(keys, outside, num / 2, num / 2, num)
    return squares_around(keys, outside, float(state.player["x"]), float(state.player["y"]), num)
