"""Replay recorded episodes in the real game, for their level states and masks of objects.

Every replayed frame is compared with the recorded one. The mask of a kind of object in a frame is
the set of pixels that change when objects of this kind are not rendered; occluded parts are
excluded.

Letters in shape comments: K kinds of object, T frames, H W C a frame.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from agents.rollout_files import RolloutFolder
from common.errors import UserError
from common.files import versions
from envs.level_state import LevelState
from envs.objects import GameObject, in_view, undrawn
from envs.procgen_env import EnvConfig, LevelSlots, StateView

_EDITED = "cheese_region"  # key in recording.json if levels were edited


def recorded_game(folder: RolloutFolder) -> EnvConfig:
    """Return the game of a recording.

    Raises:
        UserError: if the recording does not name it, or its levels were edited.
    """
    description = folder.description()
    if description.get(_EDITED):
        raise UserError(f"{folder.description_file} says that levels were edited before they were "
                        "played, so that they cannot be played again from their seeds")
    try:
        return EnvConfig(**description["env"])
    except (KeyError, TypeError):
        raise UserError(f"{folder.description_file} does not say which game was recorded; record "
                        "the agent with record.py") from None


def replay(slots: LevelSlots, slot: int, folder: RolloutFolder, episode: int, last: int
           ) -> Iterator[int]:
    """Replay a recorded episode in a slot.

    Args:
        last: last row to replay, before the terminal row.

    Yields:
        Each row up to ``last``, while the slot shows its frame.

    Raises:
        UserError: if a frame or the end of the episode differs from the recording; the message
            names episode, step and likely reason. Or if a file is missing or damaged.
    """
    steps = folder.steps(episode)
    if last >= len(steps) - 1:
        raise UserError(f"episode {episode} of {folder.path} has {len(steps) - 1} frames that show "
                        f"its level, so there is none in row {last}")
    recorded = np.moveaxis(folder.array_files(episode).frames.rows(0, last + 1), 1, -1)
    slots.start(slot, int(steps["level_seed"].iloc[0]))
    for row, action in enumerate(steps["action"].iloc[:last + 1]):
        if not np.array_equal(slots.frames[slot], recorded[row]):
            raise _mismatch(folder, episode, row)
        yield row
        if row < last and slots.step(slot, int(action))[1]:
            raise _mismatch(folder, episode, row + 1)


def replayed(folder: RolloutFolder, episode: int, rows: Collection[int]
             ) -> Iterator[tuple[int, LevelState]]:
    """Yield the level states of some rows of a recorded episode, in ascending order.

    Args:
        rows: rows other than the terminal row.

    Yields:
        Row, and the level state that its frame shows.

    Raises:
        UserError: see ``replay`` and ``recorded_game``.
    """
    rows, config = set(rows), recorded_game(folder)
    if not rows:
        return
    with contextlib.closing(LevelSlots(config, 1)) as slots:
        for row in replay(slots, 0, folder, episode, max(rows)):
            state = slots.state(0)
            if row in rows and state is not None:
                yield row, LevelState.parse(state)


def _mismatch(folder: RolloutFolder, episode: int, row: int) -> UserError:
    """Return the error for a replay that differs from the recording."""
    recorded = folder.description().get("versions") or {}
    changed = [f"{name} {recorded[name]} then and {version} now"
               for name, version in versions().items()
               if name in recorded and recorded[name] != version]
    reason = (f"it was made with other versions: {', '.join(changed)}" if changed else
              "its frames, actions or level seeds were changed, or its recording.json has other "
              "options of the game than it was made with")
    return UserError(f"{folder.path} cannot be played again: episode {episode} differs from the "
                     f"real game at step {row}; likely {reason}")


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
        config: the game.
        kinds: K kinds of object.
    """

    def __init__(self, config: EnvConfig, kinds: Sequence[GameObject]):
        self.kinds = tuple(kinds)
        self._view = StateView(config)

    def draw(self, state: LevelState) -> ObjectPictures:
        """Render a state with and without each kind; kinds out of view reuse the frame."""
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
        painter: painter for the game of the recording and K kinds of object.
        first: row of the first frame.
        frames: recorded frames, excluding the terminal frame, uint8 (T, C, H, W).

    Returns:
        Frames without each kind, uint8 (T, K, C, H, W).

    Raises:
        UserError: see ``replayed``.
    """
    without = np.repeat(frames[:, None], len(painter.kinds), axis=1)
    for row, state in replayed(folder, episode, range(first, first + len(frames))):
        without[row - first] = np.moveaxis(painter.draw(state).without, -1, 1)
    return without
