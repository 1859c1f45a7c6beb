"""Masks of objects in frames of level states and of recorded episodes.

The mask of a kind of object in a frame is the set of pixels that change when objects of this kind
are not rendered; occluded parts are excluded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from agents.replay import level_states
from agents.rollout_files import RolloutFolder
from envs.level_state import LevelState
from envs.objects import GameObject, in_view, undrawn
from envs.procgen_env import EnvConfig, StateView


@dataclasses.dataclass(frozen=True)
class ObjectPictures:
    """Frames of a level state, rendered with and without each of K kinds of object.

    Attributes:
        frame: uint8 (H, W, C).
        without: the frame without each kind, uint8 (K, H, W, C).
    """

    frame: np.ndarray
    without: np.ndarray

    @property
    def masks(self) -> np.ndarray:
        """Masks of the pixels of each kind, bool (K, H, W)."""
        return (self.without != self.frame).any(axis=-1)


class ObjectPainter:
    """Renderer of level states that leaves out one kind of object at a time.

    Args:
        kinds: K kinds of object.
    """

    def __init__(self, config: EnvConfig, kinds: Sequence[GameObject]):
        self.kinds = tuple(kinds)
        self._view = StateView(config)

    def draw(self, state: LevelState) -> ObjectPictures:
        """Render a state with all objects, and once without each of the K kinds."""
        frame = self._view.draw(state.to_bytes())
        return ObjectPictures(frame, np.stack([
            self._view.draw(undrawn(state, kind).to_bytes()) if in_view(state, kind) else frame
            for kind in self.kinds]))

    def close(self) -> None:
        """Free the environment."""
        self._view.close()


def recorded_without(folder: RolloutFolder, painter: ObjectPainter, episode: int, first: int,
                     frames: np.ndarray) -> np.ndarray:
    """Render consecutive frames of a recorded episode without each kind of object.

    Args:
        painter: renderer for the game of the recording and K kinds of object.
        first: row of the first frame.
        frames: recorded frames, excluding the terminal frame, uint8 (T, C, H, W).

    Returns:
        Frames without each kind, uint8 (T, K, C, H, W).

    Raises:
        UserError: see ``level_states``.
    """
    without = np.repeat(frames[:, None], len(painter.kinds), axis=1)
    for row, state in level_states(folder, episode, range(first, first + len(frames))):
        without[row - first] = np.moveaxis(painter.draw(state).without, -1, 1)
    return without
