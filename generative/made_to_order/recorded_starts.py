"""Recorded starts: what targets are worth in them, simulated and as recorded.

Letters in shape comments: N recorded starts, G targets, V bottleneck vector.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from agents.scopes import cached
from common.devices import Compute
from common.errors import UserError
from common.progress import with_progress
from generative.agent_inside import AgentInside
from generative.alignment import AlignedBatch, align
from generative.dataset import RolloutDataset
from generative.made_to_order.search import rollout
from generative.made_to_order.targets import Answers, Target
from generative.simulator import Simulator

_DRAWN = 1  # stream of random numbers, beside the seed


@dataclasses.dataclass(frozen=True)
class RecordedStarts:
    """Recorded starts, in a random order.

    Attributes:
        windows: of the recorded data, int64 (N,).
        episodes, frames: that the first simulated step shows, int64 (N,).
        vectors: float32 (N, V).
        simulated: of each target, in a rollout from the vector, float32 (N, G).
        real: of each target, when the agent sees the recorded frames, float32 (N, G).
    """

    windows: np.ndarray
    episodes: np.ndarray
    frames: np.ndarray
    vectors: np.ndarray
    simulated: np.ndarray
    real: np.ndarray


def drawn_windows(dataset: RolloutDataset, number: int, step: int, seed: int) -> np.ndarray:
    """Windows drawn evenly from those with initial frames of one episode that has not ended at the
    step: int64, at most ``number``.

    Raises:
        UserError: if there is none.
    """
    index = dataset.folder.index()
    lengths = index.groupby("episode").size()
    places = [dataset.place(window) for window in range(len(dataset))]
    going = [window for window, place in enumerate(places)
             if place.frame >= dataset.num_init_steps - 1
             and place.frame + step < lengths[place.episode] - 1]  # the last row is black
    if not going:
        raise UserError(f"no episode in {dataset.folder.path} is long enough for "
                        f"{dataset.num_init_steps} initial frames and the step {step}; see --step")
    return np.random.default_rng([seed, _DRAWN]).permutation(going)[:number]


def recorded_starts(simulator: Simulator, compute: Compute, dataset: RolloutDataset,
                    windows: np.ndarray, targets: Sequence[Target], step: int,
                    batch_size: int) -> RecordedStarts:
    """Simulate recorded starts, and read the targets there and on the recorded frames."""
    sizes = dataclasses.replace(
        simulator.config, num_init_steps=dataset.num_init_steps,
        num_sim_steps=dataset.window_length - dataset.num_init_steps + 1)
    layers = layers_of(targets)
    batches = [windows[begin:begin + batch_size] for begin in range(0, len(windows), batch_size)]
    vectors, simulated, real = [], [], []
    for numbers in with_progress(iter(batches), len(batches), "batch"):
        batch = align(dataset.batch(numbers).to(compute.device), sizes)
        with torch.no_grad():
            with compute.autocast():
                found = simulator.encode(batch.initial_images)
            _, answers = rollout(simulator, compute, found, step + 1, layers)
            seen = _on_recorded_frames(simulator.agent, compute, batch, step, layers)
        vectors.append(found.cpu().numpy())
        for rows, of in ((simulated, answers), (real, seen)):
            rows.append(read(targets, of, len(of.values) - 1))
    places = [dataset.place(int(window)) for window in windows]
    return RecordedStarts(
        windows.astype(np.int64), np.array([place.episode for place in places]),
        np.array([place.frame for place in places]), *map(np.concatenate,
                                                          (vectors, simulated, real)))


def layers_of(targets: Sequence[Target]) -> tuple[str, ...]:
    """The layers whose units targets read."""
    return tuple(dict.fromkeys(layer for target in targets for layer in target.layers))


def read(targets: Sequence[Target], answers: Answers, step: int) -> np.ndarray:
    """Targets at a step, float32 (B, G)."""
    return torch.stack([target(answers, step) for target in targets],
                       dim=1).detach().float().cpu().numpy()


def _on_recorded_frames(agent: AgentInside, compute: Compute, batch: AlignedBatch, step: int,
                        layers: tuple[str, ...]) -> Answers:
    """Answers at the step and the one before, with the recorded states entering."""
    outputs = []
    with compute.autocast(), cached(agent.policy, layers, graph=True) as activations:
        for t in range(max(step - 1, 0), step + 1):
            hidden: Tensor = batch.hidden_states[t - 1] if t else batch.first_hidden
            outputs.append(agent.step(batch.images[t], hidden))
    return Answers.of(outputs, activations, agent.policy)
