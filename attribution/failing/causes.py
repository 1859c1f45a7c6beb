"""Cause of a failed episode: the hazard without which its last step would not have ended it.

Procgen says whether a level is solved, not what ended an episode. So the last step is repeated in
a copy of the level, with all hazards of one kind near the player taken away: if the episode then
goes on, that kind is the cause.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import UserError
from envs.level_state import LevelState
from envs.objects import GAME_OBJECTS_FILE, GameObject, hazards_of, removed
from envs.procgen_env import EnvConfig, LevelCopy

TIMEOUT = "timeout"
MULTIPLE = "multiple"  # no kind alone, but all of them together
OTHER = "other"  # not even all of them
ENDED = "ended"  # of a game whose hazards are not known
NEAR = 3.0  # cells from the player in which hazards are taken away


def causes_of(game: str) -> tuple[str, ...]:
    """All causes that an episode of a game can have, its hazards first."""
    hazards = hazards_of(game)
    if not hazards:
        return ENDED, TIMEOUT
    return *(kind.name for kind in hazards), MULTIPLE, TIMEOUT, OTHER


def what_is_known(game: str) -> str:
    """A sentence that says so if the hazards of a game are not known; else nothing."""
    if hazards_of(game):
        return ""
    return (f"{GAME_OBJECTS_FILE.name} has no table of hazards of {game}, so its causes of failure "
            f"are {TIMEOUT} and {ENDED}.")


class Coroner:
    """Finds causes, in a copy of the level.

    Args:
        config: the game.
    """

    def __init__(self, config: EnvConfig):
        self._game = config.env_name
        self._hazards = hazards_of(config.env_name)
        self._copy = LevelCopy(config)

    def before_the_end(self, state: bytes, actions: Sequence[int]) -> bytes:
        """The state before the last of the actions that an episode took from a state on.

        Raises:
            UserError: if the level does not go on as it did: it ends earlier.
        """
        if len(actions) == 1:
            return state
        self._copy.set(state)
        for action in actions[:-1]:
            if self._copy.step(action)[0]:
                raise self._differs()
        return self._copy.state()

    def cause(self, before: bytes, action: int) -> str | None:
        """The cause of a failure.

        Args:
            before: state before the step that ended the episode.
            action: taken in it.

        Returns:
            One of ``causes_of``; None if the step solves the level.

        Raises:
            UserError: if the step, repeated, does not end the episode.
        """
        state = LevelState.parse(before, self._game)
        ended, solved = self._end(before, action)
        if not ended:
            raise self._differs()
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
        return without != before and self._end(without, action) in ((False, False), (True, True))

    def _end(self, state: bytes, action: int) -> tuple[bool, bool]:
        """Whether a step from a state ends the episode, and whether it solves the level."""
        self._copy.set(state)
        return self._copy.step(action)

    def _differs(self) -> UserError:
        return UserError(f"a level of {self._game} does not go on from its state as it did before; "
                         "was it played with another version of Procgen?")
