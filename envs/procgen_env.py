"""Procgen environments: vector environments, episodes on chosen levels, and single level states.

Procgen itself is imported when the first environment is made, so that everything that only reads
recordings works without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from common.errors import UserError
from common.game_constants import FRAME_SIZE, PERSON_VIEW_SIZE
from envs.env_config import DISPLAY_OPTIONS, GAMES_OF_MODE, MAX_LEVEL, EnvConfig
from envs.level_state import LevelState

if TYPE_CHECKING:
    from envs.procgen_binding import Procgen

__all__ = ["DISPLAY_OPTIONS", "GAMES_OF_MODE", "MAX_LEVEL", "EnvConfig", "EnvObservation",
           "LevelEdit", "LevelSlots", "ProcgenVectorEnv", "StateView", "draw_new_levels",
           "first_frames", "first_states"]

_RESET = -1  # action that makes Procgen begin the next level

LevelEdit = Callable[[bytes], bytes]
"""Function that maps the serialised state of a new level to the state that is played instead. It
must be pure and idempotent, because the first frame of a level may be observed twice."""

@dataclasses.dataclass(frozen=True)
class EnvObservation:
    """Observation of N environments at one step.

    Attributes:
        frames: uint8 (N, H, W, C), a copy.
        rewards: float32 (N,), rewards of the last action.
        first: bool (N,), whether this frame is the first of an episode; the last action, if any,
            then ended the previous episode.
    """

    frames: np.ndarray
    rewards: np.ndarray
    first: np.ndarray


class ProcgenVectorEnv:
    """N Procgen environments stepped together.

    ``act`` submits the actions and returns at once; the environments step in background threads,
    and ``observe`` waits for them. Episodes restart automatically.

    Args:
        num_envs: number of environments N.
        edit: optional edit of every new level, before its first frame is observed. It does not
            change the rewards and episode ends of that observation.

    Raises:
        UserError: if there are fewer than 1 environments or 0 threads.

    Example::

        >>> env = ProcgenVectorEnv(EnvConfig("maze", "easy"), num_envs=2, seed=0)
        >>> env.act(np.array([7, 1], dtype=np.int32))  # right, left
        >>> frames, states = env.observe().frames, env.get_state()
    """

    def __init__(self, config: EnvConfig, num_envs: int, seed: int, num_threads: int = 2,
                 edit: LevelEdit | None = None):
        if num_envs < 1:
            raise UserError(f"the number of environments must be at least 1, not {num_envs}")
        if num_threads < 0:
            raise UserError(f"the number of threads must not be negative, not {num_threads}")
        self.config = config
        self._edit = edit
        self._env = _make(config, config.levels, num_envs, seed, num_threads, person_view=False)

    def observe(self) -> EnvObservation:
        """Wait for the environments and return their observation.

        Raises:
            UserError: if an edit returns a state that would crash Procgen.
        """
        rewards, observation, first = self._env.observe()
        if self._edit is not None and first.any():
            for index in np.flatnonzero(first):
                self._env.edit(int(index), self._edit)
            observation = self._env.observe()[1]
        return EnvObservation(observation["rgb"], rewards, first)

    def act(self, actions: np.ndarray) -> None:
        """Start the next step with int32 actions (N,)."""
        self._env.act(actions)

    def get_state(self) -> list[bytes]:
        """Return the complete state of each environment, including its random generators."""
        return self._env.get_state()

    def set_state(self, states: list[bytes]) -> None:
        """Restore the states of the environments from :meth:`get_state`.

        Raises:
            UserError: if the number of states is not N, or a state belongs to another game or would
                crash Procgen.
        """
        if len(states) != self._env.num:
            raise UserError(f"there are {len(states)} states for {self._env.num} environments")
        for state in states:
            LevelState.parse(state, self.config.env_name)
        self._env.set_state(states)

    def close(self) -> None:
        """Stop the threads and free the environments."""
        self._env.close()


class LevelSlots:
    """Environments for single episodes: each of N slots plays one episode of a chosen level.

    Procgen's own vector environment draws its levels itself. Here the caller chooses the level of
    each slot, so an episode depends only on its level and its actions.

    Args:
        config: game and rendering options; its level range is not used.
        num_slots: number of slots N. A slot is empty until :meth:`start`.
        person_view: also render the 512-pixel view that :meth:`person_view` returns.
        edit: optional edit of every level, before its first frame is observed.
        edit_every_step: repeat the edit after every step, which takes about 2 ms.

    Attributes:
        frames: current frames, uint8 (N, H, W, C).
        level_complete: whether the last episode of each slot has solved its level, bool (N,).
    """

    def __init__(self, config: EnvConfig, num_slots: int, person_view: bool = False,
                 edit: LevelEdit | None = None, edit_every_step: bool = False):
        self.frames = np.zeros((num_slots, FRAME_SIZE, FRAME_SIZE, 3), dtype=np.uint8)
        self.level_complete = np.zeros(num_slots, dtype=bool)  # in each slot's last episode
        self._config, self._person_view = config, person_view
        self._edit, self._edit_every_step = edit, edit_every_step
        self._envs: dict[int, Procgen] = {}  # environments by slot
        self._idle: list[Procgen] = []  # of ended episodes, for restore: a new one takes 5 ms

    def start(self, slot: int, level: int) -> None:
        """Begin an episode on the level with this seed; its first frame is in ``frames[slot]``.

        Raises:
            UserError: if an edit returns a state that would crash Procgen.
        """
        self.stop(slot)
        env = self._envs[slot] = _make(self._config, range(level, level + 1), 1, level, 0,
                                       self._person_view)
        if self._edit is not None:
            env.observe()
            env.edit(0, self._edit)
        self.frames[slot] = env.observe()[1]["rgb"][0]
        self.level_complete[slot] = False

    def restore(self, slot: int, state: bytes) -> None:
        """Continue an episode from a state, without an edit. Raise UserError if the state belongs
        to another game or would crash Procgen."""
        LevelState.parse(state, self._config.env_name)
        if slot not in self._envs:
            self._envs[slot] = self._idle.pop() if self._idle else _make(
                self._config, range(1), 1, 0, 0, self._person_view)
        self._envs[slot].set_state([state])
        self.frames[slot] = self._envs[slot].observe()[1]["rgb"][0]
        self.level_complete[slot] = False

    def step(self, slot: int, action: int) -> tuple[float, bool]:
        """Take one step, and return the reward and whether the step ended the episode.

        At the end of the episode ``frames[slot]`` is black and the slot is stopped, because the
        frame that Procgen renders then belongs to the next episode.
        """
        env = self._envs[slot]
        env.act(np.array([action], dtype=np.int32))
        reward, observation, first = env.observe()
        if first[0]:
            self.level_complete[slot] = env.get_info()[0]["prev_level_complete"]
            if len(self._idle) < len(self.frames):
                self._idle.append(self._envs.pop(slot))
            self.stop(slot)
            self.frames[slot] = 0
        else:
            if self._edit is not None and self._edit_every_step:
                env.edit(0, self._edit)
                observation = env.observe()[1]
            self.frames[slot] = observation["rgb"][0]
        return float(reward[0]), bool(first[0])

    def state(self, slot: int) -> bytes | None:
        """Return the state of a slot's level; None if the slot is empty, as after an episode."""
        return self._envs[slot].state_of(0) if slot in self._envs else None

    def player(self, slot: int) -> np.void | None:
        """Return a slot's player, a record of ``envs.level_state.ENTITY``; None if it is empty."""
        state = self.state(slot)
        return None if state is None else LevelState.parse(state, checked=False).player

    def person_view(self, slot: int) -> np.ndarray:
        """Return the 512-pixel view, uint8 (512, 512, C); black after the end of the episode.
        Requires ``person_view=True``."""
        if slot not in self._envs:
            return np.zeros((PERSON_VIEW_SIZE, PERSON_VIEW_SIZE, 3), dtype=np.uint8)
        return self._envs[slot].get_info()[0]["rgb"]

    def stop(self, slot: int) -> None:
        """Free a slot's environment."""
        if slot in self._envs:
            self._envs.pop(slot).close()

    def close(self) -> None:
        for env in (*self._envs.values(), *self._idle):
            env.close()
        self._envs, self._idle = {}, []


class StateView:
    """Environment that is set to level states, to render them or to continue from them.

    Args:
        config: the game; all other options are part of a state.
        person_view: render the 512-pixel view instead of the agent's view.

    Example::

        >>> [(_, state)] = level_states(recording, episode=0, rows=[0])
        >>> view = StateView(EnvConfig("coinrun", "hard"))
        >>> frame = view.draw(state)  # uint8 (64, 64, 3)
    """

    def __init__(self, config: EnvConfig, person_view: bool = False):
        self._game, self._person_view = config.env_name, person_view
        self._env = _make(config, range(1), 1, 0, 0, person_view)

    def set(self, state: bytes | LevelState) -> None:
        """Set the level to a state, serialised or parsed.

        Raises:
            UserError: if the state belongs to another game or would crash Procgen.
        """
        data = state.to_bytes() if isinstance(state, LevelState) else state
        LevelState.parse(data, self._game)
        self._env.set_state([data])

    def draw(self, state: bytes | LevelState) -> np.ndarray:
        """Render a state, uint8 (H, W, C).

        Raises:
            UserError: see ``set``.
        """
        self.set(state)
        if self._person_view:
            return self._env.get_info()[0]["rgb"].copy()
        return self._env.observe()[1]["rgb"][0]

    def step(self, action: int) -> tuple[bool, bool]:
        """Take a step, and return whether it ended the episode, and whether it solved the level.

        After the end of an episode the environment shows another level.
        """
        self._env.observe()
        self._env.act(np.array([action], dtype=np.int32))
        ended = bool(self._env.observe()[2][0])
        return ended, ended and bool(self._env.get_info()[0]["prev_level_complete"])

    def state(self) -> bytes:
        """Return the state of the level."""
        return self._env.state_of(0)

    def close(self) -> None:
        """Free the environment."""
        self._env.close()


def first_frames(config: EnvConfig, levels: Iterable[int]) -> Iterator[np.ndarray]:
    """Yield the first frame of each level, uint8 (H, W, C), see ``first_states``."""
    return (frame for _, frame in first_states(config, levels))


def first_states(config: EnvConfig, levels: Iterable[int]) -> Iterator[tuple[bytes, np.ndarray]]:
    """Yield the first state and the first frame of each level, uint8 (H, W, C).

    One environment is reset to all of them, at about 2 ms each.

    Args:
        config: game and rendering options; its level range is not used.
        levels: level seeds.
    """
    env = _make(config, range(1), 1, 0, 0, person_view=False)
    try:
        for level in levels:
            env.observe()
            state = LevelState.parse(env.state_of(0), config.env_name)
            seeds = state.levels.copy()
            seeds["level_seed_low"], seeds["level_seed_high"] = level, level + 1
            env.set_state([dataclasses.replace(state, levels=seeds).to_bytes()])
            env.observe()
            env.act(np.array([_RESET], dtype=np.int32))
            frame = env.observe()[1]["rgb"][0].copy()
            yield env.state_of(0), frame
    finally:
        env.close()


def draw_new_levels(config: EnvConfig, num: int, seed: int) -> tuple[list[int], float]:
    """Draw unseen levels whose first frame is not that of any level in the range of ``config``.

    Levels of Procgen are determined by their seeds, but levels with different seeds can start with
    the same frame, or even be the same.

    Args:
        config: game and range of known levels, for example those of an agent's training.
        seed: seed of the draws, see ``EnvConfig.draw_levels``.

    Returns:
        The level seeds, and the share of the drawn levels that were left out.

    Raises:
        UserError: if the range covers all levels, no level lies above it, or more than 99 % of the
            drawn levels start with a known frame.
    """
    if config.num_levels == 0:
        raise UserError("new first frames need num_levels, the number of known levels")
    unseen = config.unseen_levels()
    known = {frame.tobytes() for frame in first_frames(config, config.levels)}
    new: list[int] = []
    num_drawn = 0
    while len(new) < num:
        if num_drawn > 100 * max(num, 10):
            raise UserError(f"only {len(new)} of {num_drawn} unseen levels start with a frame that "
                            "no known level starts with; compare fewer known levels")
        drawn = unseen.draw_levels(num_drawn + num - len(new), seed)[num_drawn:]
        num_drawn += len(drawn)
        new += [level for level, frame in zip(drawn, first_frames(config, drawn))
                if frame.tobytes() not in known]
    return new, 1 - num / num_drawn


def _make(config: EnvConfig, levels: range, num: int, seed: int, num_threads: int,
          person_view: bool) -> Procgen:
    range_options = {"start_level": levels.start,
                     "num_levels": 0 if levels == range(MAX_LEVEL) else len(levels)}
    try:
        from envs.procgen_binding import Procgen, no_collection
    except ImportError as error:
        raise UserError(f"this needs Procgen, which cannot be imported ({error}); it has builds "
                        "for Linux and Python 3.11 and 3.12: pip install procgen-mirror") from error
    with no_collection():
        return Procgen(
            num=num, env_name=config.env_name, distribution_mode=config.distribution_mode,
            use_backgrounds=config.use_backgrounds, num_threads=num_threads,
            **{name: getattr(config, name) for name in DISPLAY_OPTIONS},
            rand_seed=seed % MAX_LEVEL, render_mode="rgb_array" if person_view else None,
            **({} if config.distribution_mode == "exploration" else range_options))
