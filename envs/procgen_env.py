"""Procgen environments: vector environments, episodes on chosen levels, and single level states."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import random
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from common.errors import UserError, nearest
from common.game_constants import FRAME_SIZE, PERSON_VIEW_SIZE
from envs.level_state import LevelState

with contextlib.redirect_stderr(io.StringIO()):  # gym, which procgen imports, prints a notice
    from procgen import ProcgenGym3Env
    from procgen.env import ENV_NAMES, EXPLORATION_LEVEL_SEEDS, MAX_STATE_SIZE

MAX_LEVEL = 2**31 - 1
_RESET = -1  # action that makes Procgen begin the next level

LevelEdit = Callable[[bytes], bytes]
"""Function that maps the serialised state of a new level to the state that is played instead. It
must be pure and idempotent, because the first frame of a level may be observed twice."""

GAMES_OF_MODE = {
    "easy": tuple(ENV_NAMES),
    "hard": tuple(ENV_NAMES),
    "extreme": ("chaser", "dodgeball", "leaper", "starpilot"),
    "memory": ("caveflyer", "dodgeball", "heist", "jumper", "maze", "miner"),
    "exploration": tuple(EXPLORATION_LEVEL_SEEDS),
}


DISPLAY_OPTIONS = ("restrict_themes", "use_monochrome_assets", "use_sequential_levels",
                   "center_agent")


@dataclasses.dataclass(frozen=True)
class EnvConfig:
    """A game and its levels.

    Attributes:
        env_name: one of the 16 Procgen games.
        distribution_mode: ``easy``, ``hard``, ``extreme``, ``memory`` or ``exploration``; not
            every game has every mode.
        start_level: seed of the first level; must be 0 if ``num_levels`` is 0.
        num_levels: number of consecutive level seeds; 0 for all of them.
        use_backgrounds: whether the game draws background images. The published agents were
            trained without them.
        restrict_themes: whether all levels have the same theme.
        use_monochrome_assets: whether objects are drawn as rectangles of one colour.
        use_sequential_levels: whether the next level follows in the same episode when a level is
            solved, so that episodes end only by failure.
        center_agent: whether frames show the player's surroundings instead of the whole level, in
            games where this differs.

    The last four are attributes of the object, as ``vars`` returns them, only if they differ from
    their defaults, so that settings of results without them stay equal.

    Raises:
        UserError: if there is no such game or mode, or the range of levels is invalid.

    Example::

        >>> env = EnvConfig("coinrun", "hard", num_levels=1000)
        >>> unseen = env.unseen_levels()
        >>> assert min(unseen.draw_levels(5, seed=0)) >= 1000
    """

    env_name: str
    distribution_mode: str
    start_level: int = 0
    num_levels: int = 0
    use_backgrounds: bool = False
    restrict_themes: bool = False
    use_monochrome_assets: bool = False
    use_sequential_levels: bool = False
    center_agent: bool = True

    def __post_init__(self):
        for name in DISPLAY_OPTIONS:
            if vars(self).get(name) == getattr(type(self), name):
                vars(self).pop(name, None)
        if self.env_name not in ENV_NAMES:
            raise UserError(f"there is no Procgen game '{self.env_name}'"
                            f"{nearest(self.env_name, ENV_NAMES)}")
        mode = self.distribution_mode
        if mode not in GAMES_OF_MODE:
            raise UserError(f"unknown distribution mode '{mode}'{nearest(mode, GAMES_OF_MODE)}")
        if self.env_name not in GAMES_OF_MODE[mode]:
            raise UserError(f"{self.env_name} has no distribution mode '{mode}'; "
                            f"the games that have it: {', '.join(GAMES_OF_MODE[mode])}")
        if self.start_level < 0 or self.num_levels < 0:
            raise UserError("start_level and num_levels must not be negative")
        if self.start_level and not self.num_levels:
            raise UserError("start_level needs num_levels above 0, because 0 selects all levels")
        if self.start_level + self.num_levels > MAX_LEVEL:
            raise UserError(f"start_level + num_levels must not exceed {MAX_LEVEL}")

    @property
    def levels(self) -> range:
        """Level seeds in use; a single one in mode ``exploration``."""
        if self.distribution_mode == "exploration":
            level = EXPLORATION_LEVEL_SEEDS[self.env_name]
            return range(level, level + 1)
        if self.num_levels == 0:
            return range(MAX_LEVEL)
        return range(self.start_level, self.start_level + self.num_levels)

    def draw_levels(self, num: int, seed: int) -> list[int]:
        """Draw ``num`` level seeds, which are distinct while unused seeds remain.

        A larger ``num`` with the same seed only extends the list.
        """
        rng = random.Random(seed)
        drawn: list[int] = []
        seen: set[int] = set()
        while len(drawn) < num:
            level = rng.choice(self.levels)
            if level not in seen or len(seen) == len(self.levels):
                drawn.append(level)
                seen.add(level)
        return drawn

    def unseen_levels(self) -> EnvConfig:
        """Return the same game with all level seeds above the current range.

        If ``num_levels`` is 0, the range covers all 2**31 - 1 levels, of which a run sees a
        negligible part. The configuration is then returned unchanged.

        Raises:
            UserError: if no level is left.
        """
        if self.num_levels == 0:
            return self
        start = self.start_level + self.num_levels
        if start == MAX_LEVEL:
            raise UserError("no unseen levels are left above start_level + num_levels")
        return dataclasses.replace(self, start_level=start, num_levels=MAX_LEVEL - start)


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
        self.check_states(states)
        self._env.set_state(states)

    def check_states(self, states: list[bytes]) -> None:
        """Raise the errors that ``set_state`` would raise, without setting any state."""
        if len(states) != self._env.num:
            raise UserError(f"there are {len(states)} states for {self._env.num} environments")
        for state in states:
            LevelState.parse(state, self.config.env_name)

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
        self._envs: dict[int, _Procgen] = {}  # environments by slot
        self._idle: list[_Procgen] = []  # of ended episodes, for restore: a new one takes 5 ms

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
        return None if state is None else LevelState.parse(state).player

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


class _Procgen(ProcgenGym3Env):
    """Procgen's environments, with access to the states of single environments."""

    def __init__(self, num: int, env_name: str, **options):
        super().__init__(num, env_name, **options)
        self._game = env_name
        self._state: object | None = None  # buffer that states are read into

    def state_of(self, index: int) -> bytes:
        """Return the state of one environment; all environments must have been observed."""
        if self._state is None:
            self._state = self._ffi.new("char[]", MAX_STATE_SIZE)
        size = self.call_c_func("get_state", index, self._state, MAX_STATE_SIZE)
        return bytes(self._ffi.buffer(self._state, size))

    def edit(self, index: int, edit: LevelEdit) -> None:
        """Edit one environment; the next ``observe`` shows it.

        Raises:
            UserError: if the result would crash Procgen.
        """
        edited = edit(self.state_of(index))
        LevelState.parse(edited, self._game)
        self.call_c_func("set_state", index, edited, len(edited))


def _make(config: EnvConfig, levels: range, num: int, seed: int, num_threads: int,
          person_view: bool) -> _Procgen:
    range_options = {"start_level": levels.start,
                     "num_levels": 0 if levels == range(MAX_LEVEL) else len(levels)}
    with _no_collection():
        return _Procgen(
            num=num, env_name=config.env_name, distribution_mode=config.distribution_mode,
            use_backgrounds=config.use_backgrounds, num_threads=num_threads,
            **{name: getattr(config, name) for name in DISPLAY_OPTIONS},
            rand_seed=seed % MAX_LEVEL, render_mode="rgb_array" if person_view else None,
            **({} if config.distribution_mode == "exploration" else range_options))


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection: freeing an environment while cffi loads a library deadlocks."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
