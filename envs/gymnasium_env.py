"""Procgen as Gymnasium environments, which importing this module registers.

``gymnasium.make("procgen/coinrun-v0", distribution_mode="hard")`` makes a ``ProcgenEnv`` of one of
the 16 games, and ``gymnasium.make_vec`` a ``ProcgenGymVectorEnv``, whose environments run in
parallel threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from common.game_constants import FRAME_SIZE, GAMES, NUM_ACTIONS
from envs.procgen_env import MAX_LEVEL, EnvConfig, LevelSlots, ProcgenVectorEnv

FRAMES = spaces.Box(0, 255, (FRAME_SIZE, FRAME_SIZE, 3), np.uint8)
ACTIONS = spaces.Discrete(NUM_ACTIONS)


class ProcgenEnv(gymnasium.Env):
    """One Procgen game. Each episode is a level, whose seed ``reset`` draws from the range.

    The frame after the end of an episode is black, because Procgen does not render it. A time limit
    of the game also ends an episode; Procgen does not tell the two apart, so ``truncated`` is
    always False.

    Args:
        env_name: one of the 16 games.
        distribution_mode, options: see ``EnvConfig``.
        use_backgrounds: whether the game draws background images.
        render_mode: "rgb_array" for a ``render`` that returns the 512-pixel view.

    Example::

        >>> env = ProcgenEnv("coinrun", "hard", num_levels=100)
        >>> frame, info = env.reset(seed=0, options={"level": 7})
        >>> state = env.get_state()
        >>> frame, reward, terminated, truncated, info = env.step(7)  # right
        >>> env.set_state(state)  # returns the frame of this state
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012  declared by Gymnasium

    def __init__(self, env_name: str = "coinrun", distribution_mode: str = "easy", *,
                 use_backgrounds: bool = True, render_mode: str | None = None, **options: Any):
        self.config = EnvConfig(env_name, distribution_mode, use_backgrounds=use_backgrounds,
                                **options)
        self.render_mode = render_mode
        self.observation_space, self.action_space = FRAMES, spaces.Discrete(NUM_ACTIONS)
        self._slots = LevelSlots(self.config, 1, person_view=render_mode == "rgb_array")
        self._level = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None
              ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin a level.

        Args:
            seed: seed of the levels that this and later calls draw.
            options: ``{"level": SEED}`` for a level seed, or ``{"state": BYTES}`` for a state.
        """
        super().reset(seed=seed)
        options = options or {}
        if "state" in options:
            return self.set_state(options["state"]), {}
        levels = self.config.levels
        self._level = int(options.get("level", levels[int(self.np_random.integers(len(levels)))]))
        self._slots.start(0, self._level)
        return self._slots.frames[0].copy(), {"level_seed": self._level}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward, ended = self._slots.step(0, int(action))
        info: dict[str, Any] = {"level_seed": self._level}
        if ended:
            info["level_complete"] = bool(self._slots.level_complete[0])
        return self._slots.frames[0].copy(), reward, ended, False, info

    def get_state(self) -> bytes | None:
        """Return the state of the level; None after the end of an episode."""
        return self._slots.state(0)

    def set_state(self, state: bytes) -> np.ndarray:
        """Continue from a state, and return its frame."""
        self._slots.restore(0, state)
        return self._slots.frames[0].copy()

    def render(self) -> np.ndarray | None:
        return self._slots.person_view(0).copy() if self.render_mode == "rgb_array" else None

    def close(self) -> None:
        self._slots.close()


class ProcgenGymVectorEnv(gymnasium.vector.VectorEnv):
    """N copies of a Procgen game that step together; arguments as for ``ProcgenEnv``.

    An episode's end and the first frame of the next level come with the same step, as in Procgen.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012  declared by Gymnasium

    def __init__(self, num_envs: int, env_name: str = "coinrun", distribution_mode: str = "easy",
                 *, use_backgrounds: bool = True, **options: Any):
        self.config = EnvConfig(env_name, distribution_mode, use_backgrounds=use_backgrounds,
                                **options)
        self.num_envs = num_envs
        self.single_observation_space = FRAMES
        self.single_action_space = spaces.Discrete(NUM_ACTIONS)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._env: ProcgenVectorEnv | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None
              ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.close_extras()
        self._env = ProcgenVectorEnv(self.config, self.num_envs,
                                     int(self.np_random.integers(MAX_LEVEL)))
        return self._env.observe().frames, {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray,
                                                 dict[str, Any]]:
        env = self._opened()
        env.act(np.asarray(actions, np.int32))
        seen = env.observe()
        return (seen.frames, seen.rewards.astype(np.float64), seen.first.copy(),
                np.zeros(self.num_envs, bool), {})

    def get_state(self) -> list[bytes]:
        """Return the state of each environment."""
        return self._opened().get_state()

    def set_state(self, states: Sequence[bytes]) -> np.ndarray:
        """Continue from states, and return their frames."""
        self._opened().set_state(list(states))
        return self._opened().observe().frames

    def close_extras(self, **kwargs: Any) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def _opened(self) -> ProcgenVectorEnv:
        if self._env is None:
            raise gymnasium.error.ResetNeeded("call reset first")
        return self._env


for game in GAMES:
    gymnasium.register(
        f"procgen/{game}-v0", entry_point="envs.gymnasium_env:ProcgenEnv",
        vector_entry_point="envs.gymnasium_env:ProcgenGymVectorEnv", kwargs={"env_name": game})
