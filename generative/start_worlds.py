"""Worlds around starts: seeds, and surroundings that the prior samples.

The numbers of worlds are rounded to the precision of sample files, so that a simulation from the
files equals the one that was recorded. ``generative.rendered_worlds`` takes surroundings from the
game.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from agents.rollout_files import RolloutFolder
from common.devices import Compute
from common.errors import UserError
from generative.dataset import WindowPlace
from generative.networks import LatentSampler
from generative.prior import Prior
from generative.simulator import Simulator, Start
from generative.squares import World


def world_seeds(keys: Sequence[Sequence[int]]) -> Tensor:
    """Return a seed, int64 (B,), for each sequence of whole numbers."""
    return torch.tensor([int(np.random.SeedSequence(list(key)).generate_state(1)[0])
                         for key in keys], dtype=torch.int64)


def rounded(world: World) -> World:
    """Round the numbers of a world to half precision, as in sample files."""
    return dataclasses.replace(world, **{name: getattr(world, name).half().float() for name in (
        "squares", "places", "velocities")})


def read_places(folder: RolloutFolder, places: Sequence[WindowPlace], num_init_steps: int
                ) -> tuple[Tensor, Tensor, Tensor]:
    """Read what a simulation starts from at recorded frames.

    Args:
        places: the frames (B).
        num_init_steps: I, number of initial frames, the last of which is the recorded frame.

    Returns:
        Initial frames, uint8 (I, B, C, H, W); hidden states that enter the agent at the last ones,
        float32 (B, D); and the actions that led to the last ones, int64 (B,).
    """
    frames, hidden, actions = [], [], []
    for place in places:
        files, end = folder.array_files(place.episode), place.frame + 1
        frames.append(files.frames.rows(end - num_init_steps, end))
        hidden.append(files.hidden_states.rows(place.frame, end)[0])
        actions.append(int(folder.steps(place.episode)["action"].iloc[place.frame - 1]))
    return (torch.from_numpy(np.stack(frames, axis=1)), torch.from_numpy(np.stack(hidden)),
            torch.tensor(actions))


@torch.no_grad()
def recorded_starts(simulator: Simulator, vectors: Tensor, images: Tensor, hidden: Tensor,
                    actions: Tensor, seeds: Tensor) -> Start:
    """Return starts of simulations at recorded frames, in sampled worlds.

    Args:
        vectors: bottleneck vectors of the initial frames (B, V).
        images: last initial frames (B, C, H, W) in [0, 1], off which the squares in view are read.
        hidden: hidden states that enter the agent at these frames (B, D).
        actions: actions that led to these frames, int64 (B,).
        seeds: seeds of the surroundings, int64 (B,).
    """
    start = simulator.start_from(vectors, LatentSampler("mode"), images=images, seeds=seeds)
    return dataclasses.replace(start, agent_hidden=hidden,
                               action=simulator.one_hot_actions(actions))


def on(world: World | None, compute: Compute) -> World | None:
    """Return worlds on the device of ``compute``."""
    return None if world is None else world.each(lambda tensor: tensor.to(compute.device))


def prior_sha256(prior: Prior) -> str:
    """Return the SHA-256 digest of the prior's tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(prior.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def check_prior(simulator: Simulator, way_out: str = "") -> None:
    """Raise UserError if the prior of a simulator with worlds is not trained.

    Args:
        way_out: further advice, for the end of the message.
    """
    if not simulator.prior.is_trained:
        raise UserError("the prior of this simulator has not been trained, so it cannot generate "
                        f"surroundings; train it with python -m generative.train_prior{way_out}")


@torch.no_grad()
def sampled_world(simulator: Simulator, vectors: Tensor, images: Tensor, seeds: Tensor) -> World:
    """Sample the surroundings of recorded frames, whose own squares are read off the frames.

    Args:
        simulator: simulator with worlds and a trained prior.
        vectors: bottleneck vectors (B, V).
        images: last initial frames (B, C, H, W) in [0, 1].
        seeds: seeds of the surroundings, int64 (B,).
    """
    world = simulator.start_from(vectors, LatentSampler("mode"), images=images,
                                 seeds=seeds.to(vectors.device)).world
    assert world is not None
    return rounded(world)
