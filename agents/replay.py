"""Replay recorded episodes in the real game, to get their level states.

Every replayed frame is compared with the recorded one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator

import numpy as np

from agents.rollout_files import RolloutFolder
from common.config import typed
from common.errors import UserError
from common.files import versions
from envs.cheese_region import CheeseRegion
from envs.coin import CoinPlace
from envs.level_state import LevelState
from envs.procgen_env import EnvConfig, LevelEdit, LevelSlots

# Edits of levels by their key in recording.json.
_EDITS: dict[str, Callable[..., LevelEdit]] = {"cheese_region": CheeseRegion, "coin": CoinPlace}


def recorded_game(folder: RolloutFolder) -> EnvConfig:
    """Return the game of a recording.

    Raises:
        UserError: if the recording does not name its game, or its levels were edited.
    """
    for name in _EDITS:
        if folder.description().get(name):
            raise UserError(f"the levels of {folder.path} were edited before they were played "
                            f"({folder.description_file.name}: {name}), so they cannot be "
                            "replayed from their seeds")
    return _game_of(folder)


def recorded_levels(folder: RolloutFolder) -> tuple[EnvConfig, LevelSlots]:
    """Return the game of a recording, and one slot for its levels, edited as in the recording.

    Raises:
        UserError: if the recording does not name its game.
    """
    game, described = _game_of(folder), folder.description()
    edits = [edit(described[name]) for name, edit in _EDITS.items() if described.get(name)]
    return game, LevelSlots(game, 1, edit=edits[0] if edits else None)


def _game_of(folder: RolloutFolder) -> EnvConfig:
    env = folder.description().get("env")
    if not env:
        raise UserError(f"{folder.description_file} does not say which game was recorded; record "
                        "the agent with record.py")
    return typed(EnvConfig, env, f"{folder.description_file}, 'env'")


def replay(slots: LevelSlots, slot: int, folder: RolloutFolder, episode: int, last: int
           ) -> Iterator[int]:
    """Replay a recorded episode in one of several environments.

    Args:
        slots: environments of the recorded game.
        last: last row to replay; it must precede the terminal row.

    Yields:
        Number of each row up to and including ``last``, while ``slots.frames[slot]`` is the frame
        of this row.

    Raises:
        UserError: if ``last`` is not before the terminal row, a frame or the end of the episode
            differs from the recording (the message names episode, step and likely reason), or a
            file is missing or damaged.
    """
    steps = folder.steps(episode)
    if last >= len(steps) - 1:
        raise UserError(f"episode {episode} of {folder.path} has {len(steps) - 1} frames before "
                        f"its terminal frame, so row {last} cannot be replayed")
    recorded = np.moveaxis(folder.array_files(episode).frames.rows(0, last + 1), 1, -1)
    slots.start(slot, int(steps["level_seed"].iloc[0]))
    for row, action in enumerate(steps["action"].iloc[:last + 1]):
        if not np.array_equal(slots.frames[slot], recorded[row]):
            raise _mismatch(folder, episode, row)
        yield row
        if row < last and slots.step(slot, int(action))[1]:
            raise _mismatch(folder, episode, row + 1)


def level_states(folder: RolloutFolder, episode: int, rows: Collection[int]
             ) -> Iterator[tuple[int, LevelState]]:
    """Yield the level states of some rows of a recorded episode, in ascending order.

    Yields:
        Row, and the level state that its frame shows.

    Raises:
        UserError: see ``replay`` and ``recorded_game``.

    Example::

        >>> [(row, state)] = level_states(recording, episode=0, rows=[10])
        >>> frame = StateView(EnvConfig("coinrun", "hard")).draw(state)
        >>> assert np.array_equal(frame, recording.episode(0).frames[10])
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
    reason = (f"it was recorded with other versions: {', '.join(changed)}" if changed else
              "its frames, actions or level seeds were changed, or the game options in its "
              "recording.json are not those it was recorded with")
    return UserError(f"{folder.path} cannot be replayed: episode {episode} differs from the "
                     f"real game at step {row}; likely {reason}")
