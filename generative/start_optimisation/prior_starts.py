"""Random samples of the prior: beginnings and controls of a search, and a measure of plausibility.

The *prior loss* of a start is the error of the prior when it denoises the squares of its world and
its vector, at fixed times and with fixed noise: up to the weights of the times, a bound of the
negative log-likelihood (Ho et al. 2020, "Denoising diffusion probabilistic models"). A search in
noise keeps the norm of the noise, so the norm cannot tell implausible starts, but this loss can.
It exists for all starts, so searches in noise and over vectors can be compared.

Letters in shape comments: P samples of the prior, G targets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from common.devices import Compute
from generative.batches import in_batches
from generative.networks import LatentSampler
from generative.prior import camera_globals
from generative.prior_networks import with_player
from generative.simulator import Simulator
from generative.spatial import split_state
from generative.squares import World
from generative.start_optimisation.objectives import Target, layers_of, read, rollout
from generative.start_worlds import rounded, world_seeds

TIMES = (0.25, 0.5, 0.75)  # from 0 for noise to 1 for data
_SAMPLES = 5  # random stream; part of the generator's seed


@dataclasses.dataclass(frozen=True)
class PriorStarts:
    """Random samples of the prior.

    Attributes:
        seeds: seeds of the noise, int64 (P,).
        simulated: values of the targets in a rollout from the sample, float32 (P, G).
        loss: prior loss of each sample, float32 (P,).
    """

    seeds: np.ndarray
    simulated: np.ndarray
    loss: np.ndarray


@torch.no_grad()
def prior_starts(simulator: Simulator, compute: Compute, number: int, targets: Sequence[Target],
                 step: int, batch_size: int, seed: int) -> PriorStarts:
    """Draw samples of the prior, and read the targets in their rollouts.

    Args:
        simulator: simulator with a trained prior, on the device of ``compute``.
        number: P.
        step: step at which the targets are read.
    """
    seeds = world_seeds([(seed, _SAMPLES, sample) for sample in range(number)])
    columns = []
    for rows in in_batches(range(number), batch_size):
        batch = seeds[list(rows)].to(compute.device)
        vectors, world = simulator.sample_starts(simulator.prior.noise(batch), batch)
        world = rounded(world)
        _, rollouts = rollout(simulator, compute, vectors, step + 1, layers_of(targets), world)
        columns.append((read(targets, rollouts, step), prior_loss(simulator, vectors, world)))
    return PriorStarts(seeds.numpy(), *map(np.concatenate, zip(*columns)))


@torch.no_grad()
def prior_loss(simulator: Simulator, vectors: Tensor, world: World) -> np.ndarray:
    """Compute the prior loss of starts, float32 (B,).

    It is the cross-entropy per square, plus the flow-matching loss of the vector (see
    ``prior_losses``), averaged over ``TIMES``.

    Args:
        vectors: bottleneck vectors (B, V), on the simulator's device.
        world: worlds of the starts, on the simulator's device.
    """
    prior = simulator.prior
    classes = world.squares.argmax(dim=-1)  # (B, n, n)
    env_h = simulator.start_from(vectors, LatentSampler("mode"), world=world).env_h
    camera = camera_globals(split_state(env_h, simulator.config).camera)
    squares, codes = prior.worlds.embed(classes), prior.starts.standardise(vectors)
    view = simulator.scenery(world).first
    if prior.player is not None:
        view = with_player(view, None, prior.worlds.num_squares)
    noise = prior.noise(torch.zeros(1, dtype=torch.int64))  # the same for all starts
    unknown = torch.zeros_like(squares[:, :1])
    losses = []
    for time in TIMES:
        at = camera.new_full((len(camera),), time)  # (B,)
        logits, _ = prior.worlds(torch.lerp(noise.squares, squares, time), unknown,
                                 torch.lerp(noise.globals, camera, time), unknown[:, :, 0, 0], at)
        predicted = prior.starts(torch.lerp(noise.vector, codes, time), view, camera, at)
        losses.append(
            functional.cross_entropy(logits.permute(0, 3, 1, 2), classes, reduction="none")
            .mean(dim=(1, 2)) + ((predicted - codes) / (1 - time)).square().mean(dim=(1, 2, 3)))
    return torch.stack(losses).mean(dim=0).cpu().numpy()
