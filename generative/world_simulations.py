"""Simulations from recorded and from random starts, in sampled or recorded worlds."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch
from torch import Tensor

from agents.frames import to_frames
from common.devices import Compute
from generative.batches import AlignedBatch, align
from generative.dataset import RolloutDataset
from generative.dream_life import POSITIVE, coin_reward
from generative.loss_over_time import window_start
from generative.networks import Draw
from generative.simulator import Simulator, Start, Step
from generative.squares import SquareImages
from generative.world_data import RecordedWorlds
from generative.world_tables import mean
from stats.association import Estimate

START_INTERVAL = 7  # rows between two windows, see ``Simulations.spaced``
_SEEDS = 2**24  # seeds per value of --seed


@dataclasses.dataclass(frozen=True)
class Simulations:
    """Settings of the measures of generated starts and worlds, and their simulations.

    Attributes:
        simulator: the simulator. One without worlds is measured as far as possible.
        windows: numbers of the windows that may be measured (N,).
        draw: sampler of z.
        seed: seed of starts, worlds and bootstraps.
        batch_size: simulations per batch.
        worlds: recorded worlds, in which windows are simulated; None to sample worlds.
    """

    simulator: Simulator
    dataset: RolloutDataset
    windows: np.ndarray
    draw: Draw
    compute: Compute
    seed: int
    batch_size: int
    worlds: RecordedWorlds | None = None

    @property
    def squares(self) -> SquareImages:
        """Images of the squares; the simulator must have worlds."""
        assert self.simulator.squares is not None
        return self.simulator.squares

    @property
    def scale(self) -> float:
        return self.squares.pixels_per_square

    @functools.cached_property
    def _coin_reward(self) -> float:
        episodes = np.unique(self.dataset.episodes_of(self.windows)).tolist()
        return coin_reward(self.dataset, episodes)

    def spaced(self, first: int) -> np.ndarray:
        """Return one window, int64 (N,), per recorded frame whose row is at least ``first`` and a
        multiple of START_INTERVAL.

        These are the rows whose worlds ``record.py`` stores, and on which priors are trained.
        """
        places = {self.dataset.place(number): number for number in self.windows.tolist()}
        return np.array([number for place, number in places.items()
                         if place.frame >= first and place.frame % START_INTERVAL == 0], np.int64)

    def with_steps(self, num_steps: int) -> RolloutDataset:
        """Return the recording as windows of another number of simulated steps."""
        dataset = RolloutDataset(self.dataset.folder.path, self.dataset.num_init_steps, num_steps)
        if self.worlds is not None:
            dataset.attach_worlds(self.worlds)
        return dataset

    @property
    def first_seed(self) -> int:
        """Smallest of the seeds of starts and worlds that belong to ``seed``."""
        return self.seed * _SEEDS

    def batch(self, dataset: RolloutDataset, windows: np.ndarray) -> AlignedBatch:
        """Read windows (B,) on the device."""
        steps = dataset.window_length - dataset.num_init_steps + 1
        config = dataclasses.replace(self.simulator.config, num_sim_steps=steps)
        return align(dataset.batch(windows).to(self.compute.device), config)

    def recorded_start(self, batch: AlignedBatch, seeds: Tensor) -> Start:
        """Start from recorded frames, with the recorded state and action of the agent."""
        with self.compute.autocast():
            start = window_start(self.simulator, batch, self.draw, seeds.to(self.compute.device))
        return dataclasses.replace(start, agent_hidden=batch.first_hidden,
                                   action=self.simulator.one_hot_actions(batch.actions[0]))

    def random_start(self, numbers: np.ndarray) -> Start:
        """Sample the random starts with these numbers."""
        seeds = torch.from_numpy(numbers + self.first_seed)
        world = None
        with self.compute.autocast():
            if self.simulator.squares is None:
                vectors = torch.cat([self.simulator.random_vectors(
                    1, torch.Generator().manual_seed(seed)) for seed in seeds.tolist()])
            else:
                vectors, world = self.simulator.sample_starts(
                    self.simulator.prior.noise(seeds), seeds.to(self.compute.device))
            return self.simulator.start_from(vectors, self.draw, world=world)

    def simulate(self, start: Start, num_steps: int, actions: Tensor | None = None) -> list[Step]:
        """Simulate with the agent's most likely actions, or with given ones, int64 (T, B)."""
        with self.compute.autocast():
            return self.simulator.imagine(start, self.draw, num_steps, true_actions=actions)

    def hazards(self, steps: list[Step]) -> tuple[np.ndarray, np.ndarray]:
        """Return the probabilities, at each step, that the episode ends, and that it ends by a
        death (T, B) each. Without ``death_logits``, an end with a small reward is a death."""
        end = torch.stack([step.terminal_logits for step in steps]).float().sigmoid()
        logits = [step.death_logits for step in steps if step.death_logits is not None]
        if logits:
            death = torch.stack(logits).float().sigmoid().minimum(end)
        else:
            rewards = torch.stack([step.rewards for step in steps])
            death = end * (rewards <= POSITIVE * self._coin_reward)
        return end.cpu().numpy(), death.cpu().numpy()

    def mean(self, values: np.ndarray, clusters: np.ndarray) -> Estimate:
        return mean(values, clusters, self.seed)


def first_step(step: Step) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return frames, uint8 (B, H, W, C), probabilities of an end, and values (B,) of a step."""
    return (to_frames(step.images), step.terminal_logits.float().sigmoid().cpu().numpy(),
            step.values.float().cpu().numpy())
