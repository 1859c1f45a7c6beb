"""Labels of a level state: objects in view, velocity of the player, and contact with the ground.

Distances are in cells, x to the right and y upwards.
"""

from __future__ import annotations

import math

import numpy as np

from envs.level_state import LevelState
from envs.objects import GameObject, objects_of, places_in_view

VELOCITY = ("velocity_x", "velocity_y")
ON_GROUND = "on_ground"
_GROUND_CELLS = {"coinrun": (15, 16), "ninja": (20,)}  # cells that support the player, by game
_COINRUN_ON_BOX = 4  # index of a word in CoinRun's tail: 1 if a box below stopped the player
_CONTACT = 0.01  # distance in cells at which these games look for ground


def label_names(game: str) -> tuple[str, ...]:
    """Return the names of a game's labels, in the order of ``state_labels``."""
    return (*(f"{kind.name}_{label}" for kind in labelled_kinds(game)
              for label in ("in_view", "dx", "dy")),
            *VELOCITY, *((ON_GROUND,) if game in _GROUND_CELLS else ()))


def labelled_kinds(game: str) -> tuple[GameObject, ...]:
    """Return the kinds of object that have labels, which are all kinds except the player.

    The result is empty if the kinds of object in the game are not known, see ``objects_of``.
    """
    return tuple(kind for kind in objects_of(game) if not kind.is_player)


def state_labels(state: LevelState) -> dict[str, float]:
    """Compute the labels of a level state.

    Returns:
        Label by name:

        - ``<kind>_in_view``, for each kind of object in ``labelled_kinds``: 1 if an object of this
          kind overlaps the view, otherwise 0. Its trail (entities that it leaves behind) does not
          count.
        - ``<kind>_dx``, ``<kind>_dy``: offset from the player's centre to the centre of the nearest
          such object in view; NaN without one.
        - ``velocity_x``, ``velocity_y``: velocity of the player in cells per step, which is the
          displacement in the last step unless an obstacle stopped the player.
        - ``on_ground``, for games whose ground is known: 1 if the player stands on ground, as
          required for a jump, otherwise 0.
    """
    player = state.player
    labels: dict[str, float] = {}
    for kind in labelled_kinds(state.game):
        offsets = places_in_view(state, kind) - [player["x"], player["y"]]
        distances = np.hypot(*offsets.T)
        dx, dy = offsets[distances.argmin()] if len(offsets) else (math.nan, math.nan)
        labels |= {f"{kind.name}_in_view": float(len(offsets) > 0),
                   f"{kind.name}_dx": float(dx), f"{kind.name}_dy": float(dy)}
    labels |= {"velocity_x": float(player["vx"]), "velocity_y": float(player["vy"])}
    if state.game in _GROUND_CELLS:
        labels[ON_GROUND] = float(_is_on_ground(state))
    return labels


def _is_on_ground(state: LevelState) -> bool:
    """Return whether the player stands on ground, by the rule in the game's source code."""
    player, cells = state.player, _GROUND_CELLS[state.game]
    y = player["y"] - (player["ry"] + _CONTACT)
    half_width = player["rx"] - _CONTACT
    supported = any(_cell(state, x, y) in cells
                    for x in (player["x"] - half_width, player["x"] + half_width))
    if state.game == "coinrun":
        tail = np.frombuffer(state.tail, "<i4")
        return (supported or bool(tail[_COINRUN_ON_BOX])) and player["vy"] == 0
    return supported


def _cell(state: LevelState, x: float, y: float) -> int:
    """Return the value of the cell at a position, or the game's value for cells out of bounds."""
    height, width = state.grid.shape
    if not (0 <= x < width and 0 <= y < height):
        return int(state.world["out_of_bounds_object"])
    return int(state.grid[int(y), int(x)])
