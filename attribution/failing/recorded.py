"""Causes of the failed episodes of a recording, which is played once more in the real game."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from agents.replay import recorded_game, replayed
from agents.rollout_files import RolloutFolder
from attribution.failing.causes import Coroner


def recorded_causes(folder: RolloutFolder, episodes: Iterable[int]) -> dict[int, str]:
    """Why episodes of a recording failed, by their number; those that solved their level are left
    out.

    Every frame is compared with the recording. It takes 0.3 ms a step.

    Args:
        episodes: whole ones; see ``RolloutFolder.finished``.

    Raises:
        UserError: if a frame or an end differs from the recording; see
            ``agents.replay.replayed``.
    """
    found = {}
    with contextlib.closing(Coroner(recorded_game(folder))) as coroner:
        for episode in episodes:
            actions = folder.steps(episode)["action"]
            last = len(actions) - 2  # behind it is the terminal row
            [(_, state)] = replayed(folder, episode, [last])
            cause = coroner.cause(state.to_bytes(), int(actions.iloc[last]))
            if cause is not None:
                found[episode] = cause
    return found
