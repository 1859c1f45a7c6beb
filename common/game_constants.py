"""Sizes and actions that all of Procgen's games share; reading them needs no Procgen."""

FRAME_SIZE = 64  # pixels, of the agent's view
PERSON_VIEW_SIZE = 512  # pixels
NUM_ACTIONS = 15

# Games whose camera follows the player: pixels of the agent's view per square of the level. Frames
# shifted by the recorded positions times this number match, see docs/fidelity.md.
CAMERA_FOLLOWS = {"coinrun": 64 / 13}
# Games whose camera stands still in every mode but memory, as the centre of the view in their
# states shows.
CAMERA_STANDS_STILL = frozenset({
    "bigfish", "bossfight", "chaser", "dodgeball", "heist", "leaper", "maze", "miner", "plunder",
    "starpilot"})


def pixels_per_square(game: str, mode: str) -> float | None:
    """By how many pixels the camera moves when the player moves by a square.

    Args:
        mode: the game's distribution mode.

    Returns:
        0 where the camera stands still, None where it is not known.
    """
    if game in CAMERA_STANDS_STILL and mode != "memory":
        return 0.0
    return CAMERA_FOLLOWS.get(game)


# Direction of each action as (right, up); the last six actions are keys that most games ignore.
ACTION_DIRECTIONS = ((-1, -1), (-1, 0), (-1, 1), (0, -1), (0, 0), (0, 1), (1, -1), (1, 0), (1, 1),
                     *((0, 0),) * 6)
# Names of the others.
ACTION_NAMES = ("downleft", "left", "upleft", "down", "null", "up", "downright", "right", "upright")
ACTION_LABELS = (*ACTION_NAMES,
                 *(f"special {i}" for i in range(len(ACTION_NAMES), NUM_ACTIONS)))
