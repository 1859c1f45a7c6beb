"""Cause of a failed episode: the hazard without which its last step would not have ended it.

Procgen reports whether a level is solved, but not why an episode ended. The last step is therefore
repeated in a copy of the level without any hazards of one kind near the player: if the episode then
continues, that kind is the cause.

The state of a level is read only every few steps, which is much cheaper than at every step. The
state before a failure is restored by replaying the actions since the last state that was read.
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
MULTIPLE = "multiple"  # removing all kinds of hazard prevents the failure, but no single kind does
OTHER = "other"  # removing all kinds of hazard does not prevent the failure
ENDED = "ended"  # the hazards of the game are not known
NEAR = 3.0  # distance from the player in cells within which hazards are removed
STEPS_PER_STATE = 16  # steps of an episode between two states that are read


def causes_of(game: str) -> tuple[str, ...]:
    """Return all possible causes of failure in a game, its hazards first."""
    hazards = hazards_of(game)
    if not hazards:
        return ENDED, TIMEOUT
    return *(kind.name for kind in hazards), MULTIPLE, TIMEOUT, OTHER


def unknown_hazards(game: str) -> str:
    """Return a note for games whose hazards are not known; otherwise an empty string."""
    if hazards_of(game):
        return ""
    return (f"{GAME_OBJECTS_FILE.name} has no table of hazards of {game}, so its causes of failure "
            f"are {TIMEOUT} and {ENDED}.")


class FailureAttributor:
    """Finds the causes of failures by replaying steps in a copy of the level.

    Args:
        config: configuration of the game.
    """

    def __init__(self, config: EnvConfig):
        self._game = config.env_name
        self._hazards = hazards_of(config.env_name)
        self._copy = StateView(config)

    def before_last(self, state: bytes, actions: Sequence[int]) -> bytes:
        """Replay all but the last of the actions from a state, and return the resulting state.

        Raises:
            UserError: if the episode ends before the last action.
        """
        if len(actions) == 1:
            return state
        self._copy.set(state)
        for action in actions[:-1]:
            if self._copy.step(action)[0]:
                raise self._difference()
        return self._copy.state()

    def cause(self, before: bytes, action: int) -> str | None:
        """Determine the cause of a failure.

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
        """Free the copy of the level."""
        self._copy.close()

    def _saves(self, kinds: Sequence[GameObject], state: LevelState, before: bytes,
               action: int) -> bool:
        """Return whether removing hazards of the given kinds prevents the failure."""
        for kind in kinds:
            state = removed(state, kind, NEAR)
        without = state.to_bytes()
        return without != before and self._step(without, action) in ((False, False), (True, True))

    def _step(self, state: bytes, action: int) -> tuple[bool, bool]:
        """Take a step from a state; return whether it ends the episode and solves the level."""
        self._copy.set(state)
        return self._copy.step(action)

    def _difference(self) -> UserError:
        return UserError(f"a level of {self._game} does not go on from its state as it did before; "
                         "was it played with another version of Procgen?")


@dataclasses.dataclass(frozen=True)
class EpisodeOutcome:
    """Outcome of an episode.

    Attributes:
        number: number of the episode.
        level_seed: seed of its level.
        length: number of environment steps.
        total_reward: sum of its rewards.
        cause: cause of its failure, one of ``causes_of``; None if the level was solved.
        in_view: estimated number of steps with a hazard of each kind in view, in the order of
            ``hazards_of``: STEPS_PER_STATE times the number of sampled states with such a hazard.
    """

    number: int
    level_seed: int
    length: int
    total_reward: float
    cause: str | None
    in_view: tuple[int, ...]


class StateSampler:
    """``watch`` callback that keeps the last state read of each episode and counts steps with
    hazards in view.

    Attributes:
        last: step and state last read, by the episode's number.
        in_view: counts as in ``EpisodeOutcome``, by the episode's number.
    """

    def __init__(self, game: str):
        self._game, self._hazards = game, hazards_of(game)
        self.last: dict[int, tuple[int, bytes]] = {}
        self.in_view: dict[int, list[int]] = {}

    def __call__(self, number: int, step: int, read: Callable[[], bytes]) -> None:
        # The offset by the episode's number samples all steps equally often over many episodes.
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
    """Play episodes and yield each one with its outcome when it ends.

    Args:
        config: configuration of the game.
        play: ``play_episodes`` with all arguments bound except ``watch``.
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
    """Find the causes of the failed episodes of a recording by replaying it in the real game.

    Every frame is compared with the recording, which takes 0.3 ms per step.

    Args:
        folder: the recording.
        episodes: numbers of finished episodes; see ``RolloutFolder.finished``.

    Returns:
        Cause by episode number; episodes that solved their level are left out.

    Raises:
        UserError: if a frame or the end of an episode differs from the recording; see
            ``agents.replay.replayed``.
    """
    causes = {}
    with contextlib.closing(FailureAttributor(recorded_game(folder))) as attributor:
        for episode in episodes:
            actions = folder.steps(episode)["action"]
            last = len(actions) - 2  # the row before the terminal row
            [(_, state)] = replayed(folder, episode, [last])
            cause = attributor.cause(state.to_bytes(), int(actions.iloc[last]))
            if cause is not None:
                causes[episode] = cause
    return causes
