"""The real game as an environment, with the methods that ``agents.episodes.Game`` lists."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from envs.procgen_env import EnvConfig, LevelEdit, LevelSlots


class RealGame:
    """Procgen with the methods of ``agents.episodes.Game``; arguments as for ``LevelSlots``."""

    is_simulated = False

    def __init__(self, config: EnvConfig, num_slots: int, person_view: bool = False,
                 edit: LevelEdit | None = None, edit_every_step: bool = False):
        self._slots = LevelSlots(config, num_slots, person_view, edit, edit_every_step)
        self.get_state, self.set_state = self._slots.state, self._slots.restore
        self.person_view, self.close = self._slots.person_view, self._slots.close

    def reset(self, slots: Sequence[int], levels: Sequence[int]) -> None:
        """Begin episodes on levels with the given seeds."""
        for slot, level in zip(slots, levels, strict=True):
            self._slots.start(slot, level)

    def observe(self, slots: Sequence[int]) -> np.ndarray:
        """Return the current frames, uint8 (N, H, W, C)."""
        return self._slots.frames[slots]

    def step(self, slots: Sequence[int], actions: Sequence[int]) -> list[tuple[float, bool]]:
        """Take a step in each slot, and return its reward, and whether it ended the episode."""
        return [self._slots.step(*pair) for pair in zip(slots, actions, strict=True)]

    def players(self, slots: Sequence[int]) -> np.ndarray:
        """Return y, x (in squares) and facing of the players, (N, 3); NaN after an episode."""
        players = map(self._slots.player, slots)
        return np.array([[np.nan] * 3 if player is None else
                         [player["y"], player["x"], player["is_reflected"]] for player in players])

    def result(self, slot: int) -> bool:
        """Return whether the slot's episode has ended with the level solved."""
        return bool(self._slots.level_complete[slot])
