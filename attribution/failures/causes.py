"""Cause of a failed episode: the hazard without which its last step would not have ended it.

Procgen tells whether a level is solved, not what ended an episode. So the last step is repeated in
a copy of the level, from which all hazards of one kind near the player are removed: if the episode
then continues, that kind is the cause.

The state of a level is read only every few steps, which is much cheaper than at every step: the
state before a failure is found by replaying the actions since the last state that was read.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from agents.episodes import Episode
from agents.replay import recorded_game, replayed
from agents.rollout_files import RolloutFolder
from common.errors import UserError
from envs.level_state import LevelState
from envs.objects import GAME_OBJECTS_FILE, GameObject, hazards_of, in_view, removed
from envs.procgen_env import EnvConfig, StateView

TIMEOUT = "timeout"
MULTIPLE = "multiple"  # no kind alone, but all of them together
OTHER = "other"  # not even all of them
ENDED = "ended"  # in a game whose hazards are not known
NEAR = 3.0  # cells from the player in which hazards are removed
STEPS_PER_STATE = 16  # of an episode, from one state that is read to the next


def causes_of(game: str) -> tuple[str, ...]:
    """Return all causes that a failure in a game can have, its hazards first."""
    hazards = hazards_of(game)
    if not hazards:
        return ENDED, TIMEOUT
    return *(kind.name for kind in hazards), MULTIPLE, TIMEOUT, OTHER


def unknown_hazards(game: str) -> str:
    """Return a sentence that tells if the hazards of a game are not known; else nothing."""
    if hazards_of(game):
        return ""
    return (f"{GAME_OBJECTS_FILE.name} has no table of hazards of {game}, so its causes of failure "
            f"are {TIMEOUT} and {ENDED}.")


class FailureAttributor:
    """Finds causes of failures, in a copy of the level.

    Args:
        config: the game.
    """

    def __init__(self, config: EnvConfig):
        self._game = config.env_name
        self._hazards = hazards_of(config.env_name)
        self._copy = StateView(config)

    def before_last(self, state: bytes, actions: Sequence[int]) -> bytes:
        """Return the state before the last of the actions that an episode took from a state.

        Raises:
            UserError: if the level ends before.
        """
        if len(actions) == 1:
            return state
        self._copy.set(state)
        for action in actions[:-1]:
            if self._copy.step(action)[0]:
                raise self._difference()
        return self._copy.state()

    def cause(self, before: bytes, action: int) -> str | None:
        """Return the cause of a failure.

        Args:
            before: state before the step that ended the episode.
            action: action of this step.

        Returns:
            One of ``causes_of``; None if the step solves the level.

        Raises:
            UserError: if the step, repeated, does not end the episode.
        """
        state = LevelState.parse(before, self._game)
        ended, solved = self._step(before, action)
        if not ended:
            raise self._difference()
        if solved:
            return None
        if state.step["cur_time"] + 1 >= state.step["timeout"]:
            return TIMEOUT
        if not self._hazards:
            return ENDED
        for kind in self._hazards:
            if self._saves([kind], state, before, action):
                return kind.name
        return MULTIPLE if self._saves(self._hazards, state, before, action) else OTHER

    def close(self) -> None:
        """Free the copy."""
        self._copy.close()

    def _saves(self, kinds: Sequence[GameObject], state: LevelState, before: bytes,
               action: int) -> bool:
        """Whether the step does not fail without hazards of some kinds."""
        for kind in kinds:
            state = removed(state, kind, NEAR)
        without = state.to_bytes()
        return without != before and self._step(without, action) in ((False, False), (True, True))

    def _step(self, state: bytes, action: int) -> tuple[bool, bool]:
        """Whether a step from a state ends the episode, and whether it solves the level."""
        self._copy.set(state)
        return self._copy.step(action)

    def _difference(self) -> UserError:
        return UserError(f"a level of {self._game} does not go on from its state as it did before; "
                         "was it played with another version of Procgen?")


@dataclasses.dataclass(frozen=True)
class EpisodeOutcome:
    """How an episode ended.

    Attributes:
        number: number of the episode.
        level_seed: seed of its level.
        length: number of environment steps.
        total_reward: sum of its rewards.
        cause: cause of its failure, one of ``causes_of``; None if the level was solved.
        in_view: estimated number of steps with a hazard of each kind in view, in the order of
            ``hazards_of``: STEPS_PER_STATE times the number of sampled states with one.
    """

    number: int
    level_seed: int
    length: int
    total_reward: float
    cause: str | None
    in_view: tuple[int, ...]


class StateSampler:
    """Keeps the last state of each episode that was read, and counts the hazards in view.

    Attributes:
        last: step and state, by the episode's number.
        in_view: see ``EpisodeOutcome``, by the episode's number.
    """

    def __init__(self, game: str):
        self._game, self._hazards = game, hazards_of(game)
        self.last: dict[int, tuple[int, bytes]] = {}
        self.in_view: dict[int, list[int]] = {}

    def __call__(self, number: int, step: int, read: Callable[[], bytes]) -> None:
        # Over many episodes, every step is equally likely to be sampled.
        sampled = (step + number) % STEPS_PER_STATE == 0
        if step == 0:
            self.in_view[number] = [0] * len(self._hazards)
        if step and not sampled:
            return
        state = read()
        self.last[number] = step, state
        if sampled and self._hazards:
            parsed = LevelState.parse(state, self._game)
            for place, kind in enumerate(self._hazards):
                self.in_view[number][place] += STEPS_PER_STATE * in_view(parsed, kind)


def attribute_failures(config: EnvConfig, play: Callable[..., Iterator[Episode]]
                       ) -> Iterator[tuple[Episode, EpisodeOutcome]]:
    """Play episodes and yield them with their outcomes, as they end.

    Args:
        config: the game.
        play: ``play_episodes`` with all of its arguments but ``watch``.
    """
    sampler = StateSampler(config.env_name)
    with contextlib.closing(FailureAttributor(config)) as attributor:
        for episode in play(watch=sampler):
            cause = None
            step, state = sampler.last.pop(episode.number)
            if not episode.level_complete:
                actions = [int(action) for action in episode.actions[step:-1]]
                cause = attributor.cause(attributor.before_last(state, actions), actions[-1])
            yield episode, EpisodeOutcome(episode.number, episode.level_seed, episode.length,
                                          episode.total_reward, cause,
                                          tuple(sampler.in_view.pop(episode.number)))


def recorded_causes(folder: RolloutFolder, episodes: Iterable[int]) -> dict[int, str]:
    """Find the causes of the failed episodes of a recording, by replaying it in the real game.

    Every frame is compared with the recording, which takes 0.3 ms per step.

    Args:
        episodes: finished episodes, see ``RolloutFolder.finished``.

    Returns:
        Causes by the episode's number, without episodes that solved their level.

    Raises:
        UserError: if a frame or an end differs from the recording; see
            ``agents.replay.replayed``.
    """
    causes = {}
    with contextlib.closing(FailureAttributor(recorded_game(folder))) as attributor:
        for episode in episodes:
            actions = folder.steps(episode)["action"]
            last = len(actions) - 2  # before the terminal row
            [(_, state)] = replayed(folder, episode, [last])
            cause = attributor.cause(state.to_bytes(), int(actions.iloc[last]))
            if cause is not None:
                causes[episode] = cause
    return causes
