"""Levels as Procgen makes and draws them.

Letters in shape comments: N states; H W C height, width and channels of a frame.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

import numpy as np

from common.errors import UserError
from envs.procgen_env import EnvConfig, ProcgenVectorEnv, StateView
from maze.level.state import GAME, MazeState


def stock_state(distribution_mode: str, level_seed: int, use_backgrounds: bool = False
                ) -> MazeState:
    """The state of a level at its start, as Procgen generates it.

    Raises:
        UserError: if mazes have no such mode, or there is no such seed.
    """
    config = EnvConfig(GAME, distribution_mode, level_seed, 1, use_backgrounds)
    with contextlib.closing(ProcgenVectorEnv(config, 1, level_seed, num_threads=0)) as env:
        return MazeState.parse(env.get_state()[0])


def draw(states: Sequence[MazeState], person_view: bool = False) -> np.ndarray:
    """Frames of states, as the agent sees them, without a step: uint8 (N, 64, 64, 3).

    Args:
        person_view: whether to draw the view for people instead, uint8 (N, 512, 512, 3).
    """
    config = EnvConfig(GAME, "easy")  # a state brings its own options with it
    with contextlib.closing(StateView(config, person_view)) as view:
        return np.stack([view.draw(state.to_bytes()) for state in states])


def game_of(states: Collection[MazeState]) -> EnvConfig:
    """The game that the levels are of.

    Raises:
        UserError: if they are of several modes, or some have backgrounds.
    """
    games = {EnvConfig(GAME, state.distribution_mode, use_backgrounds=state.use_backgrounds)
             for state in states}
    if len(games) > 1:
        raise UserError("the levels are of several distribution modes, or only some have "
                        "backgrounds; ask for those of one kind at a time")
    return games.pop()


def as_played(states: Collection[MazeState], data: bytes) -> bytes:
    """The edit that makes one of the levels out of its stock state.

    Raises:
        UserError: if there are several of that seed.
    """
    seed = MazeState.parse(data).level_seed
    found = [state for state in states if state.level_seed == seed]
    if len(found) > 1:
        raise UserError(f"there are {len(found)} levels of the seed {seed}, which a patch cannot "
                        "tell apart; ask for one at a time")
    return found[0].to_bytes()
