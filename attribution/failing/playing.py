"""Episodes played to see why they fail.

The state of a level is read every few steps alone, which is much cheaper than at every step: the
state before a failure is found by going on from the last one that was read.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from agents.episodes import Episode
from attribution.failing.causes import Coroner
from envs.level_state import LevelState
from envs.objects import hazards_of, in_view
from envs.procgen_env import EnvConfig

STEPS_A_STATE = 16  # of an episode, from one state that is read to the next


@dataclasses.dataclass(frozen=True)
class Fate:
    """How an episode ended.

    Attributes:
        number: of the episode.
        level_seed: of its level.
        length: environment steps.
        total_reward: sum of its rewards.
        cause: of its failure, one of ``causes_of``; None if the level was solved.
        in_view: steps at which hazards of each kind were in view, in the order of ``hazards_of``:
            STEPS_A_STATE times the number of states in which they were, of one in STEPS_A_STATE.
    """

    number: int
    level_seed: int
    length: int
    total_reward: float
    cause: str | None
    in_view: tuple[int, ...]


class _Onlooker:
    """Keeps the last state that was read of each episode, and counts what is in view."""

    def __init__(self, game: str):
        self._game, self._hazards = game, hazards_of(game)
        self.kept: dict[int, tuple[int, bytes]] = {}  # step and state, by the episode's number
        self.in_view: dict[int, list[int]] = {}

    def __call__(self, number: int, step: int, read: Callable[[], bytes]) -> None:
        # Every step of the many episodes has the same chance to be one that is looked at.
        looked_at = (step + number) % STEPS_A_STATE == 0
        if step == 0:
            self.in_view[number] = [0] * len(self._hazards)
        if step and not looked_at:
            return
        state = read()
        self.kept[number] = step, state
        if looked_at and self._hazards:
            parsed = LevelState.parse(state, self._game)
            for place, kind in enumerate(self._hazards):
                self.in_view[number][place] += STEPS_A_STATE * in_view(parsed, kind)


def with_fates(config: EnvConfig, play: Callable[..., Iterator[Episode]]
               ) -> Iterator[tuple[Episode, Fate]]:
    """Play episodes and yield them with their fates, as they end.

    Args:
        config: their game.
        play: ``play_episodes`` with all of its arguments but ``watch``.
    """
    onlooker = _Onlooker(config.env_name)
    with contextlib.closing(Coroner(config)) as coroner:
        for episode in play(watch=onlooker):
            cause = None
            step, state = onlooker.kept.pop(episode.number)
            if not episode.level_complete:
                actions = [int(action) for action in episode.actions[step:-1]]
                cause = coroner.cause(coroner.before_the_end(state, actions), actions[-1])
            yield episode, Fate(episode.number, episode.level_seed, episode.length,
                                episode.total_reward, cause,
                                tuple(onlooker.in_view.pop(episode.number)))
