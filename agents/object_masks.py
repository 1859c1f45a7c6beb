"""Exact masks of the objects in recorded frames, from the real game.

The mask of a kind of object in a frame is the pixels that change when that kind alone is drawn no
more; what others hide of it is no part of it. ``agents.replay`` plays recorded episodes again.

Letters in shape comments: K kinds of object, H W C a frame.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from agents.replay import replayed
from agents.rollout_files import RolloutFolder
from envs.level_state import LevelState
from envs.objects import GameObject, in_view, undrawn
from envs.procgen_env import EnvConfig, StateView


@dataclasses.dataclass(frozen=True)
class ObjectPictures:
    """A state, drawn with and without each of K kinds of object.

    Attributes:
        frame: uint8 (H, W, C).
        without: the same without each kind, uint8 (K, H, W, C).
    """

    frame: np.ndarray
    without: np.ndarray

    @property
    def masks(self) -> np.ndarray:
        """The pixels of each kind, bool (K, H, W)."""
        return (self.without != self.frame).any(axis=-1)


class ObjectPainter:
    """Draws states of a game without single kinds of object.

    Args:
        config: the game.
        kinds: K of them.
    """

    def __init__(self, config: EnvConfig, kinds: Sequence[GameObject]):
        self.kinds = tuple(kinds)
        self._view = StateView(config)

    def draw(self, state: LevelState) -> ObjectPictures:
        """The pictures of a state; only what is in view is drawn once more."""
        frame = self._view.draw(state.to_bytes())
        return ObjectPictures(frame, np.stack([
            self._view.draw(undrawn(state, kind).to_bytes()) if in_view(state, kind) else frame
            for kind in self.kinds]))

    def close(self) -> None:
        """Free the environment."""
        self._view.close()


def recorded_without(folder: RolloutFolder, painter: ObjectPainter, episode: int, first: int,
                     frames: np.ndarray) -> np.ndarray:
    """Consecutive frames of a recorded episode with each kind of object drawn no more.

    Args:
        painter: of K kinds, in the game of the recording.
        first: row of the first frame.
        frames: as recorded, none of the terminal row, uint8 (T, C, H, W).

    Returns:
        uint8 (T, K, C, H, W).

    Raises:
        UserError: see ``replayed``.
    """
    found = np.repeat(frames[:, None], len(painter.kinds), axis=1)
    for row, state in replayed(folder, episode, range(first, first + len(frames))):
        found[row - first] = np.moveaxis(painter.draw(state).without, -1, 1)
    return found
