"""Recorded episodes, played once more in the real game from their level seed and actions.

Every frame is compared with the recorded one.

Letters in shape comments: H W C a frame.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import numpy as np

from agents.rollout_files import RolloutFolder
from common.errors import UserError
from common.files import versions
from envs.level_state import LevelState
from envs.procgen_env import EnvConfig, LevelSlots

_EDITED = "cheese_region"  # key of a recording on edited levels


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


def replay(slots: LevelSlots, slot: int, folder: RolloutFolder, episode: int, last: int
           ) -> Iterator[int]:
    """Play a recorded episode once more in a slot.

    Args:
        last: row at which the slot is left, not the terminal one.

    Yields:
        Each row up to the last, when the slot shows its frame.

    Raises:
        UserError: if a frame, or the end, differs from the recording up to the last row; episode,
            step and likely reason are named. Or if a file is missing or damaged.
    """
    steps = folder.steps(episode)
    if last >= len(steps) - 1:
        raise UserError(f"episode {episode} of {folder.path} has {len(steps) - 1} frames that show "
                        f"its level, so there is none in row {last}")
    recorded = np.moveaxis(folder.array_files(episode).frames.rows(0, last + 1), 1, -1)
    slots.start(slot, int(steps["level_seed"].iloc[0]))
    for row, action in enumerate(steps["action"].iloc[:last + 1]):
        if not np.array_equal(slots.frames[slot], recorded[row]):
            raise _differs(folder, episode, row)
        yield row
        if row < last and slots.step(slot, int(action))[1]:
            raise _differs(folder, episode, row + 1)


def replayed(folder: RolloutFolder, episode: int, rows: Collection[int]
             ) -> Iterator[tuple[int, LevelState]]:
    """States of a recorded episode.

    Args:
        rows: those whose state is wanted, none of them the terminal one.

    Yields:
        Each of the rows, ascending, and the state that its frame shows.

    Raises:
        UserError: see ``replay`` and ``recorded_game``.
    """
    wanted, config = set(rows), recorded_game(folder)
    if not wanted:
        return
    with contextlib.closing(LevelSlots(config, 1)) as slots:
        for row in replay(slots, 0, folder, episode, max(wanted)):
            if row in wanted:
                yield row, LevelState.parse(slots.state(0))


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
