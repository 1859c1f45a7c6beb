"""Exact masks of the objects in recorded frames, from the real game.

A recorded episode is played once more from its level seed and actions, and every frame compared
with the recorded one. The mask of a kind of object in a frame is the pixels that change when that
kind alone is drawn no more; what others hide of it is no part of it.

Letters in shape comments: K kinds of object, H W C a frame.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from common.env import EnvConfig, LevelSlots, StateView
from common.errors import UserError
from common.files import versions
from common.game_objects import GameObject, in_view, undrawn
from common.level_state import LevelState
from common.rollout_files import RolloutFolder

_EDITED = "cheese_region"  # key of a recording on edited levels


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


def recorded_game(folder: RolloutFolder) -> EnvConfig:
    """The game of a recording.

    Raises:
        UserError: if it does not say, or its levels were edited.
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


def replayed(folder: RolloutFolder, episode: int, rows: Collection[int]
             ) -> Iterator[tuple[int, LevelState]]:
    """Play a recorded episode once more.

    Args:
        rows: those whose state is wanted, none of them the terminal one.

    Yields:
        Each of the rows, ascending, and the state that its frame shows.

    Raises:
        UserError: if a frame, or the end, differs from the recording up to the last of the rows;
            episode, step and likely reason are named. Or if a file is missing or damaged.
    """
    config, steps = recorded_game(folder), folder.steps(episode)
    frames = folder.array_files(episode).frames
    wanted, last = set(rows), max(rows, default=-1)
    if last >= len(steps) - 1:
        raise UserError(f"episode {episode} of {folder.path} has {len(steps) - 1} frames that show "
                        f"its level, so there is none in row {last}")
    with contextlib.closing(LevelSlots(config, 1)) as slots:
        slots.start(0, int(steps["level_seed"].iloc[0]))
        recorded = np.moveaxis(frames.rows(0, last + 1), 1, -1)
        for row, action in enumerate(steps["action"].iloc[:last + 1]):
            if not np.array_equal(slots.frames[0], recorded[row]):
                raise _differs(folder, episode, row)
            if row in wanted:
                yield row, LevelState.parse(slots.state(0))
            if row < last and slots.step(0, int(action))[1]:
                raise _differs(folder, episode, row + 1)


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


def _differs(folder: RolloutFolder, episode: int, row: int) -> UserError:
    """That the game shows something else than the recording."""
    made = folder.description().get("versions") or {}
    changed = [f"{name} {made[name]} then and {found} now" for name, found in versions().items()
               if name in made and made[name] != found]
    reason = (f"it was made with other versions: {', '.join(changed)}" if changed else
              "its frames, actions or level seeds were changed, or its recording.json has other "
              "options of the game than it was made with")
    return UserError(f"{folder.path} cannot be played again: episode {episode} differs from the "
                     f"real game at step {row}; likely {reason}")
