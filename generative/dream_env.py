"""A simulator as Gymnasium environments, which importing this module registers.

``gymnasium.make("procgen/Dream-v0", model_file=..., agent_file=...)`` makes a ``DreamEnv``.
Whatever trains or plays in Procgen can do so in the simulator.

An episode starts from a recorded frame if a recording is given, and otherwise from a level that the
simulator's prior draws. Its end is drawn with the probability that the simulator predicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from agents.frames import as_images, to_frames
from agents.rollout_files import RolloutFolder
from common.devices import Compute
from common.errors import UserError
from common.game_constants import FRAME_SIZE, NUM_ACTIONS
from generative.imagining import load_simulator, random_starts
from generative.simulated_game import FrameState, SimulatedGame
from generative.simulator import Simulator, Start
from generative.start_worlds import recorded_starts, world_seeds

FRAMES = spaces.Box(0, 255, (FRAME_SIZE, FRAME_SIZE, 3), np.uint8)
_SEEDS = 2**31 - 1


class _Dreams:
    """Simulated episodes in slots, and the starts that they can begin from."""

    def __init__(self, simulator: Simulator | None, model_file: str | Path | None,
                 agent_file: str | Path | None, data_dir: str | Path | None, max_steps: int):
        if simulator is None:
            if model_file is None or agent_file is None:
                raise UserError("give a simulator, or model_file and agent_file")
            simulator = load_simulator(model_file, agent_file)
        self.simulator, self.max_steps = simulator.eval(), max_steps
        self.recording = None if data_dir is None else RolloutFolder(data_dir)
        self.episodes = [] if self.recording is None else self.recording.finished()
        device = next(simulator.parameters()).device
        self._game = SimulatedGame(simulator, Compute(device, bfloat16=False),
                                   lambda numbers: self._start)
        self._start: Start
        self._steps: dict[int, int] = {}  # by slot

    def reset(self, slot: int, rng: np.random.Generator, options: dict[str, Any]) -> dict[str, Any]:
        """Begin an episode in a slot, and return its start."""
        world = int(options.get("world", rng.integers(_SEEDS)))
        info: dict[str, Any] = {"world": world}
        if self.recording is None:
            self._start = random_starts(self.simulator, 1, seed=world)
        else:
            number = int(options.get("episode", self.episodes[rng.integers(len(self.episodes))]))
            episode = self.recording.episode(number)
            first, last = self.simulator.config.num_init_steps - 1, len(episode.frames) - 1
            if last <= first:
                raise UserError(f"episode {number} has only {last + 1} frames")
            row = int(options.get("row", rng.integers(first, last)))
            if not first <= row < last:
                raise UserError(f"row must lie between {first} and {last - 1}, not {row}")
            self._start = self._recorded(episode, row, world)
            info |= {"episode": number, "row": row}
        self._game.reset([slot], [0])
        self._steps[slot] = 0
        return info

    @torch.no_grad()
    def _recorded(self, episode, row: int, world_seed: int) -> Start:
        simulator, count = self.simulator, self.simulator.config.num_init_steps
        device = next(simulator.parameters()).device
        images = as_images(episode.frames[row + 1 - count:row + 1]).to(device)[:, None]
        actions = torch.tensor(episode.steps["action"].to_numpy()[row - 1:row], device=device)
        return recorded_starts(
            simulator, simulator.encode(images), images[-1],
            torch.from_numpy(episode.hidden_states[row:row + 1]).to(device), actions,
            world_seeds([(world_seed,)]).to(device))

    def step(self, slots: Sequence[int], actions: Sequence[int], rngs: Sequence[np.random.Generator]
             ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Take a step in each slot; return rewards, and whether episodes end or are too long."""
        rewards, ended = np.zeros(len(slots)), np.zeros(len(slots), bool)
        for count in {self._steps[slot] for slot in slots}:  # a batch must be at one step
            places = [place for place, slot in enumerate(slots) if self._steps[slot] == count]
            results = self._game.step([slots[place] for place in places],
                                      [int(actions[place]) for place in places])
            for place, (reward, _) in zip(places, results):
                frames, row = self._game.get_state(slots[place])
                rewards[place] = reward
                ended[place] = rngs[place].random() < float(frames.now[row])
        for slot in slots:
            self._steps[slot] += 1
        late = np.array([self._steps[slot] >= self.max_steps for slot in slots])
        return rewards, ended, late & ~ended

    def frames(self, slots: Sequence[int]) -> np.ndarray:
        """Return the current frames, uint8 (N, H, W, C)."""
        return to_frames(self._game.observe(slots))

    def get_state(self, slot: int) -> tuple[FrameState, int]:
        return self._game.get_state(slot), self._steps[slot]

    def set_state(self, slot: int, state: tuple[FrameState, int]) -> None:
        self._game.set_state(slot, state[0])
        self._steps[slot] = state[1]


class DreamEnv(gymnasium.Env):
    """A simulator as an environment.

    Args:
        model_file, agent_file: simulator and its agent; or give ``simulator``.
        data_dir: recording of the agent, from whose frames episodes start; None to draw levels.
        max_steps: number of steps after which an episode is truncated.
        render_mode: "rgb_array" for a ``render`` that returns the frame.

    Example::

        >>> env = DreamEnv(simulator=simulator, data_dir="recording", max_steps=8)
        >>> frame, info = env.reset(seed=0)  # info names episode, row and world
        >>> state = env.get_state()
        >>> frame, reward, terminated, truncated, _ = env.step(7)
        >>> env.set_state(state)  # go back
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012  declared by Gymnasium

    def __init__(self, model_file: str | Path | None = None, agent_file: str | Path | None = None,
                 data_dir: str | Path | None = None, *, simulator: Simulator | None = None,
                 max_steps: int = 64, render_mode: str | None = None):
        self._dreams = _Dreams(simulator, model_file, agent_file, data_dir, max_steps)
        self.render_mode = render_mode
        self.observation_space, self.action_space = FRAMES, spaces.Discrete(NUM_ACTIONS)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None
              ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode.

        Args:
            seed: seed of the starts, worlds and ends of this and later episodes.
            options: ``world`` (seed of the surroundings, or of the level), ``episode`` and ``row``
                (of the recorded start) instead of random ones.
        """
        super().reset(seed=seed)
        info = self._dreams.reset(0, self.np_random, options or {})
        return self._dreams.frames([0])[0], info

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        rewards, ended, late = self._dreams.step([0], [action], [self.np_random])
        return self._dreams.frames([0])[0], float(rewards[0]), bool(ended[0]), bool(late[0]), {}

    def get_state(self) -> Any:
        """Return the state of the simulation, from which any number of others can continue."""
        return self._dreams.get_state(0)

    def set_state(self, state: Any) -> np.ndarray:
        """Continue from a state, and return its frame."""
        self._dreams.set_state(0, state)
        return self._dreams.frames([0])[0]

    def render(self) -> np.ndarray | None:
        return self._dreams.frames([0])[0] if self.render_mode == "rgb_array" else None


class DreamVectorEnv(gymnasium.vector.VectorEnv):
    """N simulated episodes that step together; arguments as for ``DreamEnv``.

    Episodes are those of N ``DreamEnv`` with the seeds s, s + 1, …; the next one begins with the
    step that ends one, whose last frame is in ``info["final_obs"]``.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012  declared by Gymnasium

    def __init__(self, num_envs: int, model_file: str | Path | None = None,
                 agent_file: str | Path | None = None, data_dir: str | Path | None = None, *,
                 simulator: Simulator | None = None, max_steps: int = 64):
        self._dreams = _Dreams(simulator, model_file, agent_file, data_dir, max_steps)
        self.num_envs = num_envs
        self.single_observation_space = FRAMES
        self.single_action_space = spaces.Discrete(NUM_ACTIONS)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._rngs: list[np.random.Generator] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None
              ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        first = int(self.np_random.integers(_SEEDS)) if seed is None else seed
        self._rngs = [gymnasium.utils.seeding.np_random(first + slot)[0]
                      for slot in range(self.num_envs)]
        for slot, rng in enumerate(self._rngs):
            self._dreams.reset(slot, rng, options or {})
        return self._dreams.frames(range(self.num_envs)), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray,
                                                 dict[str, Any]]:
        slots = list(range(self.num_envs))
        rewards, ended, late = self._dreams.step(slots, list(actions), self._rngs)
        info: dict[str, Any] = {}
        done = ended | late
        if done.any():
            info = {"final_obs": self._dreams.frames(slots), "_final_obs": done}
            for slot in np.flatnonzero(done).tolist():
                self._dreams.reset(slot, self._rngs[slot], {})
        return self._dreams.frames(slots), rewards, ended, late, info


gymnasium.register("procgen/Dream-v0", entry_point="generative.dream_env:DreamEnv",
                   vector_entry_point="generative.dream_env:DreamVectorEnv")
