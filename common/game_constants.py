"""Frame sizes and actions common to all Procgen games; Procgen need not be installed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from common.errors import UserError, nearest

FRAME_SIZE = 64  # pixels along a side of the agent's frames
VIEWS_PER_WORLD = 3  # views per side of a world, see envs.wide_view
WORLD_SIZE = VIEWS_PER_WORLD * FRAME_SIZE  # pixels along a side of a world
PERSON_VIEW_SIZE = 512  # pixels along a side of the larger view
NUM_ACTIONS = 15
GAMES = ("bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball",
         "fruitbot", "heist", "jumper", "leaper", "maze", "miner", "ninja", "plunder", "starpilot")
WALL, FREE, CHEESE = 51, 100, 2  # cell types of mazes in Procgen's state
WORLD_DIMS = {"easy": 15, "hard": 25, "memory": 31}  # squares per side of a maze's world, by mode

# Games whose camera follows the player, and whose worlds can be rendered, see ``envs.wide_view``.
CAMERA_FOLLOWS = frozenset({"coinrun", "ninja"})
# Squares per side of the view, by mode, in games whose level is a grid that fills the view of a
# static camera, and does not change before the end of an episode.
SQUARES_IN_VIEW = {"maze": {"easy": 15, "hard": 25}}
# Games whose camera is static in every mode except "memory", according to the view centre in their
# states.
CAMERA_STANDS_STILL = frozenset({
    "bigfish", "bossfight", "chaser", "dodgeball", "heist", "leaper", "maze", "miner", "plunder",
    "starpilot"})
# Squares per side of the view where the camera follows the player in both directions, by mode,
# according to the states. In climber and fruitbot, it follows only upwards.
_SQUARES_AROUND_PLAYER = {
    "caveflyer": {"easy": 10, "hard": 16, "memory": 16}, "coinrun": {"easy": 13, "hard": 13},
    "dodgeball": {"memory": 16}, "heist": {"memory": 8}, "jumper": {"easy": 12, "hard": 16,
    "memory": 16}, "maze": {"memory": 8}, "miner": {"memory": 8}, "ninja": {"easy": 10, "hard": 16}}
# Games whose only reward is that for solving a level, so that success says it all.
GOAL_GAMES = frozenset({"coinrun", "heist", "jumper", "leaper", "maze", "ninja"})


def pixels_per_square(game: str, mode: str) -> float | None:
    """Return the camera's movement per square of the player, in pixels of the agent's frame.

    Args:
        game: name of the game.
        mode: the game's distribution mode.

    Returns:
        0 if the camera is static, None if it follows the player in one direction only.
    """
    if game in CAMERA_STANDS_STILL and mode != "memory":
        return 0.0
    squares = _SQUARES_AROUND_PLAYER.get(game, {}).get("hard" if mode == "exploration" else mode)
    return FRAME_SIZE / squares if squares else None


def square_size(game: str, mode: str) -> float | None:
    """Return the size of a level's square in pixels of the agent's frame; None if worlds of the
    game cannot be rendered."""
    squares = SQUARES_IN_VIEW.get(game, {}).get(mode)
    if squares:
        return FRAME_SIZE / squares
    return pixels_per_square(game, mode) if game in CAMERA_FOLLOWS else None


# Direction of each action as (right, up); the last six actions are keys ignored by most games.
ACTION_DIRECTIONS = ((-1, -1), (-1, 0), (-1, 1), (0, -1), (0, 0), (0, 1), (1, -1), (1, 0), (1, 1),
                     *((0, 0),) * 6)
# Names of actions 0 to 8, the moves.
ACTION_NAMES = ("downleft", "left", "upleft", "down", "null", "up", "downright", "right", "upright")
# Names in files; ``envs.objects.action_labels`` has those that are shown.
ACTION_LABELS = (*ACTION_NAMES,
                 *(f"special {i}" for i in range(len(ACTION_NAMES), NUM_ACTIONS)))
OTHER_NAMES = {"jump": "up", "jumpleft": "upleft", "jumpright": "upright"}  # of actions


def action_name(label: str) -> str:
    """Return the name of an action as one word: "fire (W)" is ``fire_w``."""
    return re.sub(r"\W+", "_", label.lower()).strip("_")


def action_number(name: str, labels: Sequence[str] = ACTION_LABELS, what: str = "action") -> int:
    """Parse a name of an action in ``labels``, ``ACTION_LABELS`` or ``OTHER_NAMES``, or its number.

    Args:
        name: case is ignored, and ``fire_backwards`` stands for "fire backwards".
        labels: names of Procgen's actions in the game, see ``envs.objects.action_labels``.
        what: name of the value, for the message.

    Raises:
        UserError: if there is no such action; the message suggests the nearest name.
    """
    names = [action_name(label) for label in labels]
    known = {**{action_name(label): number for number, label in enumerate(ACTION_LABELS)},
             **{other: ACTION_LABELS.index(ours) for other, ours in OTHER_NAMES.items()},
             **{ours: number for number, ours in enumerate(names)},
             **{str(number): number for number in range(NUM_ACTIONS)}}
    number = known.get(action_name(name))
    if number is None:
        raise UserError(f"unknown {what} '{name}'{nearest(name, names)}")
    return number
