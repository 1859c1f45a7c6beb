"""Causes of failed episodes.

Procgen reports whether a level is solved, but not why an episode ended. The cause of a failed
episode is the kind of hazard whose removal prevents the failure. The last step is therefore
repeated in copies of the level, each without the hazards of one kind near the player: if the
episode does not fail in a copy, that kind is the cause.

Reading the state of a level is slow, so it is read only every few steps. The state before a failure
is restored by replaying the actions since the last state that was read.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from agents.episodes import FAILED, Episode
from agents.replay import level_states, recorded_game
from agents.rollout_files import RolloutFolder
from common.errors import UserError
from envs.level_state import LevelState
from envs.objects import GAME_OBJECTS_FILE, GameObject, hazards_of, in_view, kind_label, removed
from envs.procgen_env import EnvConfig, StateView
from stats.effects import Outcome

TIMEOUT = "timeout"
MULTIPLE = "multiple"  # removing all kinds of hazard prevents the failure, removing one does not
OTHER = "other"  # removing all kinds of hazard does not prevent the failure
ENDED = "ended"  # unknown cause, because the hazards of the game are not known
FAILS_BY = "fails_by_"  # prefix of the outcomes of ``failure_outcomes``
NEAR = 3.0  # maximum distance of removed hazards from the player, in cells of the level
STEPS_PER_STATE = 16  # steps of an episode between two states that are read


def causes_of(game: str) -> tuple[str, ...]:
    """Return all possible causes of failure in a game; names of kinds of hazard come first."""
    names = [kind.name for kind in hazards_of(game)]
    return (*names, MULTIPLE, TIMEOUT, OTHER) if names else (ENDED, TIMEOUT)


def failure_outcomes(game: str) -> tuple[Outcome, ...]:
    """Return one outcome per cause in ``causes_of``: whether an episode fails due to this cause."""
    return tuple(Outcome(f"{FAILS_BY}{cause}", f"failures by {kind_label(cause)}", probability=True)
                 for cause in causes_of(game))


def unknown_hazards(game: str) -> str:
    """Return a note if the hazards of a game are not known; otherwise an empty string."""
    return "" if hazards_of(game) else (
        f"{GAME_OBJECTS_FILE.name} lists no hazards of {game}, so the only causes of failure are "
        f"{TIMEOUT} and {ENDED}.")


class FailureAttributor(StateView):
    """Find the causes of failures by replaying steps in a copy of the level."""

    def __init__(self, config: EnvConfig):
        super().__init__(config)
        self._hazards = hazards_of(config.env_name)

    def before_last(self, state: bytes, actions: Sequence[int]) -> bytes:
        """Take the given actions except the last, and return the resulting state.

        Args:
            state: state of the level before the first of the actions.
            actions: actions up to the end of the episode.

        Raises:
            UserError: if the episode ends before the last action.
        """
        self.set(state)
        for action in actions[:-1]:
            self._check(not self.step(action)[0])
        return self.state()

    def cause(self, before: bytes, action: int) -> str | None:
        """Determine the cause of a failure.

        Args:
            before: state before the step that ended the episode.

        Returns:
            One of ``causes_of``; None if the step solves the level.

        Raises:
            UserError: if the episode does not end when the step is repeated.
        """
        state = LevelState.parse(before, self._game)
        ended, solved = self._step_from(before, action)
        self._check(ended)
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

    def _saves(self, kinds: Sequence[GameObject], state: LevelState, before: bytes,
               action: int) -> bool:
        """Return whether removing all nearby hazards of the given kinds prevents the failure.

        Args:
            state, before: state before the step, parsed and as bytes.
        """
        for kind in kinds:
            state = removed(state, kind, NEAR)
        without = state.to_bytes()
        return without != before and (
            self._step_from(without, action) in ((False, False), (True, True)))

    def _step_from(self, state: bytes, action: int) -> tuple[bool, bool]:
        """Take a step; return whether it ends the episode, and whether it solves the level."""
        self.set(state)
        return self.step(action)

    def _check(self, is_same: bool) -> None:
        if not is_same:
            raise UserError(f"a level of {self._game} does not continue from its state as it did "
                            "before; was it played with another version of Procgen?")


class StateSampler:
    """``watch`` callback of ``play_episodes`` that reads the level state at some steps.

    It keeps the last state that it read in each episode, and estimates the number of steps with
    hazards in view.

    Attributes:
        last: pair (step, state) of the last state that was read, by the episode's number.
        in_view: estimated number of steps with a hazard of each kind in view, int (kinds,) in the
            order of ``hazards_of``, by the episode's number. Every STEPS_PER_STATE-th step is
            inspected, and counts STEPS_PER_STATE times.
    """

    def __init__(self, game: str):
        self._game, self._hazards = game, hazards_of(game)
        self.last: dict[int, tuple[int, bytes]] = {}
        self.in_view: dict[int, np.ndarray] = {}

    def __call__(self, number: int, step: int, read: Callable[[], bytes]) -> None:
        # With the offset by the episode's number, all steps are sampled equally often on average.
        sampled = (step + number) % STEPS_PER_STATE == 0
        if step == 0:
            self.in_view[number] = np.zeros(len(self._hazards), int)
        if step and not sampled:
            return
        self.last[number] = step, read()
        if sampled and self._hazards:
            level = LevelState.parse(self.last[number][1], self._game)
            self.in_view[number] += [STEPS_PER_STATE * in_view(level, kind)
                                     for kind in self._hazards]


def attribute_failures(config: EnvConfig, play: Callable[..., Iterator[Episode]]
                       ) -> Iterator[Episode]:
    """Play episodes, and yield each as soon as it ends, with the cause of its failure.

    Args:
        play: ``play_episodes`` with all arguments bound except ``watch``.

    Yields:
        The episode, with ``cause``, one of ``causes_of`` (None if the level was solved, or the
        episode has not ended), and ``in_view``, the estimated number of steps with each kind of
        hazard in view, in the order of ``hazards_of``; see ``StateSampler``.
    """
    sampler = StateSampler(config.env_name)
    with contextlib.closing(FailureAttributor(config)) as attributor:
        for episode in play(watch=sampler):
            cause = None
            step, state = sampler.last.pop(episode.number)
            if episode.end == FAILED:
                actions = episode.actions[step:-1].tolist()
                cause = attributor.cause(attributor.before_last(state, actions), actions[-1])
            yield dataclasses.replace(
                episode, cause=cause, in_view=tuple(sampler.in_view.pop(episode.number).tolist()))


def recorded_causes(folder: RolloutFolder, episodes: Iterable[int]) -> dict[int, str]:
    """Find the causes of the failed episodes of a recording by replaying it in the real game.

    Every frame is compared with the recording, which takes 0.3 ms per step.

    Args:
        episodes: numbers of finished episodes; see ``RolloutFolder.finished``.

    Returns:
        Cause by episode number; episodes that solved their level are left out.

    Raises:
        UserError: if a frame or the end of an episode differs from the recording; see
            ``agents.replay.level_states``.
    """
    causes = {}
    with contextlib.closing(FailureAttributor(recorded_game(folder))) as attributor:
        for episode in episodes:
            actions = folder.steps(episode)["action"]
            last = len(actions) - 2  # the row before the terminal row
            [(_, state)] = level_states(folder, episode, [last])
            cause = attributor.cause(state.to_bytes(), int(actions.iloc[last]))
            if cause is not None:
                causes[episode] = cause
    return causes
