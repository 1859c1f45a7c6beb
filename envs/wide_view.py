"""Render the surroundings of a view: the *rendered world* of a level state.

In games whose camera follows the player, moving the player by the width of a view moves the view by
exactly one view, with every pixel at the same position within its square. Nine renderings therefore
form an image of three by three views without seams, whose centre shows the same static objects as
the agent's frame. Where the level fills the view of a static camera, the world is one view.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from common.errors import UserError
from common.game_constants import (
    CAMERA_FOLLOWS,
    FRAME_SIZE,
    SQUARES_IN_VIEW,
    VIEWS_PER_WORLD,
    square_size,
)
from envs.level_state import LevelState
from envs.objects import invisible, objects_of, with_player_moved
from envs.procgen_env import EnvConfig, StateView

# Words of tails that are drawn over the view: in ninja, how far a jump is charged.
_OVERLAYS = {"ninja": (6,)}
LARGEST_MISMATCH = 0.005  # share of pixels in which shifted views may differ


class WorldView:
    """Renderer of worlds: static objects within one view of the agent's view, on all sides.

    The player and other moving or animated objects are not drawn; ``moving_objects`` lists them.

    Raises:
        UserError: if the game's camera is not known to follow the player, and its level does not
            fill the view.
    """

    def __init__(self, config: EnvConfig):
        if square_size(config.env_name, config.distribution_mode) is None:
            games = ", ".join((*sorted(CAMERA_FOLLOWS), *(f"{game} ({' or '.join(modes)})"
                                                  for game, modes in SQUARES_IN_VIEW.items())))
            raise UserError(f"the camera of {config.env_name} in mode {config.distribution_mode} "
                            "is not known to follow the player, and its level does not fill the "
                            f"view, so worlds cannot be rendered; games with worlds are {games}")
        self._is_static = config.env_name not in CAMERA_FOLLOWS
        self._view = StateView(config)
        self._moving = [kind for kind in objects_of(config.env_name) if not kind.is_static]

    def draw(self, state: LevelState) -> np.ndarray:
        """Render the world of a level state, uint8 (WORLD_SIZE, WORLD_SIZE, 3).

        The pixel in row r and column c of the agent's frame is at (64 + r, 64 + c). With a static
        camera, the world is the view, (FRAME_SIZE, FRAME_SIZE, 3).
        """
        state = self._static(state)
        if self._is_static:
            return self._shifted(state, 0, 0)
        reach = range(-(VIEWS_PER_WORLD // 2), VIEWS_PER_WORLD // 2 + 1)
        return np.concatenate([
            np.concatenate([self._shifted(state, right, down) for right in reach], axis=1)
            for down in reach])

    def check(self, state: LevelState) -> None:
        """Raise UserError if the world of a state has seams."""
        mismatch = 0.0 if self._is_static else self.mismatch(state)
        if mismatch > LARGEST_MISMATCH:
            raise UserError(f"the worlds of {state.game} have seams: {100 * mismatch:.1f} % of the "
                            "pixels change if the view is shifted by half a view")

    def mismatch(self, state: LevelState) -> float:
        """Return the share of pixels in which views shifted by half a view differ from the world.

        It is at most LARGEST_MISMATCH in games whose worlds have no seams.
        """
        world, half = self.draw(state), FRAME_SIZE // 2
        state, differ = self._static(state), []
        for right, down in ((1, 0), (-1, 0), (0, 1), (0, -1)):
            top, left = FRAME_SIZE + half * down, FRAME_SIZE + half * right
            same = world[top:top + FRAME_SIZE, left:left + FRAME_SIZE]
            differ.append((self._shifted(state, right / 2, down / 2) != same).any(axis=-1).mean())
        return float(np.mean(differ))

    def close(self) -> None:
        """Free the environment."""
        self._view.close()

    def _static(self, state: LevelState) -> LevelState:
        """Return the state without moving and animated objects, and without what the game draws
        over the view."""
        for kind in self._moving:
            state = invisible(state, kind)
        tail = np.frombuffer(state.tail, "<i4").copy()
        tail[list(_OVERLAYS.get(state.game, ()))] = 0
        return dataclasses.replace(state, tail=tail.tobytes())

    def _shifted(self, state: LevelState, right: float, down: float) -> np.ndarray:
        """Render the view that is shifted by multiples of its size, without the player."""
        size = float(state.world["view_dim"])
        return self._view.draw(with_player_moved(state, size * right, -size * down).to_bytes())
