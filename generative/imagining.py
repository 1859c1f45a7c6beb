"""Imagine rollouts, and compute saliency in them, from frames or from generated starts.

These functions are for interactive use. Scripts simulate and store many samples with
``generative.sampling`` and ``generative.saliency``, from which these functions differ only in that
they start from what they are given, and return their results.

Letters in shape comments: B starts, I initial frames, T simulated steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from agents.frames import as_images
from agents.outputs import ANSWERS
from common.devices import Compute
from common.errors import UserError, nearest
from common.game_constants import NUM_ACTIONS
from common.parameters import BASE_SET, ParameterSet
from generative.config import SaliencyConfig, SimulatorConfig
from generative.networks import LatentSampler
from generative.runs import open_simulator
from generative.saliency.gradients import (
    SaliencyFunction,
    SaliencyPass,
    saliency_maps,
    smoothgrad_starts,
)
from generative.sample_files import SampleArrays
from generative.sampling import sample_arrays
from generative.simulator import Simulator, Start, stack
from generative.start_worlds import rounded, sampled_world, world_seeds

_MODE = LatentSampler("mode")


def load_simulator(model_file: str | Path, agent_file: str | Path,
                   device: torch.device | str = "cpu") -> Simulator:
    """Load a simulator with the agent that it was trained with, in float32.

    Files without ``hyperparameters.yml`` next to them must have the published sizes.

    Raises:
        UserError: if a file is missing or damaged, or the agent is another one.

    Example::

        >>> folder = "pretrained/coinrun_hard"
        >>> simulator = load_simulator(f"{folder}_simulator/model.pt", f"{folder}/model.pth")
        >>> policy = simulator.agent.policy
    """
    return open_simulator(Path(model_file), Path(agent_file), SimulatorConfig(),
                          Compute(torch.device(device), bfloat16=False))


@torch.no_grad()
def random_starts(simulator: Simulator, num: int = 1, *, seed: int = 0) -> Start:
    """Generate starts: levels and agent states that the simulator's prior draws or, in a simulator
    without worlds, random start vectors.

    Start i depends on the seed and i only.

    Args:
        num: number of starts B.
        seed: seed of the random numbers.

    Raises:
        UserError: if the simulator has worlds, but its prior is not trained.

    Example::

        >>> starts = random_starts(simulator, 2, seed=1)
        >>> dreams = imagine(simulator, starts, num_steps=4)
        >>> assert dreams.frames.shape == (2, 4, 64, 64, 3)
    """
    device, seeds = _device(simulator), world_seeds([(seed, number) for number in range(num)])
    if simulator.squares is None:
        vectors = torch.cat([simulator.random_vectors(1, torch.Generator().manual_seed(int(number)))
                             for number in seeds])
        return simulator.start_from(vectors, _MODE)
    seeds = seeds.to(device)
    vectors, world = simulator.sample_starts(simulator.prior.noise(seeds), seeds)
    return simulator.start_from(vectors, _MODE, world=rounded(world))


@torch.no_grad()
def imagine(simulator: Simulator, start: Start | np.ndarray | torch.Tensor, *,
            num_steps: int = 16, actions: Sequence[int] | np.ndarray | None = None,
            seed: int = 0) -> SampleArrays:
    """Simulate rollouts in which latents take their most likely class.

    The first simulated step shows the last initial frame, and its input action is the action taken
    in the frame before. To imagine the rows t, t + 1, … of a recorded episode, pass the frames of
    the rows t - 2 to t (if the simulator starts from three frames), and the actions of the rows
    t - 1, t, ….

    Args:
        simulator: the simulator; patches of its agent apply.
        start: starts from ``random_starts``, or the initial frames of one start (I, …) or several
            (B, I, …), see ``agents.frames.as_images``.
        num_steps: T.
        actions: input actions of all steps (T,) or (B, T); None for the agent's most likely ones.
        seed: seed of the surroundings of frames, in simulators with worlds.

    Returns:
        Frames, values, log-probabilities of actions, probabilities of the episode's end
        (``terminals``) and more, with the leading dimensions (B, T), or (T,) for a single start
        given as frames.

    Raises:
        UserError: if the frames or actions have a wrong type, shape or range, or the simulator
            has worlds, but its prior is not trained.

    Example::

        >>> episode = recording.episode(0)
        >>> dream = imagine(simulator, episode.frames[:3], num_steps=5)
        >>> assert dream.frames.shape == (5, 64, 64, 3) and dream.terminals.max() <= 1
    """
    is_single = not isinstance(start, Start) and np.ndim(start) == 4
    start = _opened(simulator, start, seed)
    true_actions = None
    if actions is not None:
        true_actions = _checked_actions(actions, num_steps, len(start.env_h)).to(_device(simulator))
    steps = simulator.imagine(start, _MODE, num_steps, true_actions=true_actions)
    samples = sample_arrays(stack(start, steps))
    return samples[0] if is_single else samples


def compute_saliency(simulator: Simulator, start: Start | np.ndarray | torch.Tensor, *,
                     of: str = "value", step: int = 4, num_copies: int = 4,
                     seed: int = 0) -> np.ndarray:
    """Compute saliency maps of a scalar at one imagined step, in this step and all earlier ones.

    A map is the gradient with respect to the frame, through the simulator, averaged over perturbed
    start vectors (SmoothGrad; Smilkov et al. 2017), summed over colours and smoothed. The agent
    takes its most likely actions.

    Args:
        simulator: the simulator.
        start: see ``imagine``.
        of: "value", "action" (log-probability of the most likely action), "leftwards",
            "jumping_up" or "jumping_right" (log-probabilities of actions).
        step: step at which the scalar is computed, from 0.
        num_copies: number of start vectors, including the unperturbed one.
        seed: seed of the perturbations, and of ``imagine``.

    Returns:
        Maps, float32 (B, step + 1, 64, 64), or (step + 1, 64, 64) for a single start given as
        frames. The frames are those of ``imagine`` with the same start and seed.

    Raises:
        UserError: see ``imagine``; or if there is no such scalar.

    Example::

        >>> frames = recording.episode(0).frames[:3]
        >>> maps = compute_saliency(simulator, frames, of="value", step=2, num_copies=2)
        >>> assert maps.shape == (3, 64, 64) and abs(maps).max() > 0
    """
    is_single = not isinstance(start, Start) and np.ndim(start) == 4
    if of not in ANSWERS:
        raise UserError(f"there is no saliency of '{of}'{nearest(of, ANSWERS)}")
    function, settings = SaliencyFunction(of), ParameterSet(BASE_SET).get(SaliencyConfig)
    start = _opened(simulator, start, seed)
    copies = torch.stack([smoothgrad_starts(vector, num_copies,
                                           settings.perturbation_scale, seed, number)
                          for number, vector in enumerate(start.bottleneck_vec)])
    forward_pass = SaliencyPass(
        simulator, Compute(_device(simulator), bfloat16=False), (copies, start.world), (function,),
        (step,), step + 1)
    maps = np.stack([saliency_maps(gradients, settings.gaussian_kernel_size, settings.sigma)
                     for gradients in forward_pass.gradients(function).images.numpy()])
    return maps[0] if is_single else maps


def _device(simulator: Simulator) -> torch.device:
    return next(simulator.parameters()).device


@torch.no_grad()
def _opened(simulator: Simulator, start: Start | np.ndarray | torch.Tensor, seed: int) -> Start:
    """Return starts, those of initial frames in worlds that are sampled with a seed."""
    if isinstance(start, Start):
        return start
    images = as_images(start, 1 if np.ndim(start) == 4 else 2).to(_device(simulator))
    if images.ndim == 4:
        images = images[None]
    expected = simulator.config.num_init_steps
    if images.shape[1] != expected:
        raise UserError(f"this simulator starts from {expected} frames, not {images.shape[1]}")
    images = images.transpose(0, 1)  # (I, B, C, H, W)
    vectors, world = simulator.encode(images), None
    if simulator.squares is not None:
        seeds = world_seeds([(seed, number) for number in range(len(vectors))])
        world = sampled_world(simulator, vectors, images[-1], seeds)
    return simulator.start_from(vectors, _MODE, world=world)


def _checked_actions(actions: Sequence[int] | np.ndarray, num_steps: int,
                     num_starts: int) -> torch.Tensor:
    """Return actions, int64 (T, B).

    Raises:
        UserError: if their shape or a value is wrong.
    """
    numbers = np.asarray(actions)
    if numbers.dtype.kind not in "iu" or numbers.shape not in ((num_steps,),
                                                               (num_starts, num_steps)):
        raise UserError(f"actions must be whole numbers of the shape ({num_steps},) or "
                        f"({num_starts}, {num_steps}), not {numbers.dtype} {numbers.shape}")
    if numbers.min() < 0 or numbers.max() >= NUM_ACTIONS:
        raise UserError(f"actions must be numbers from 0 to {NUM_ACTIONS - 1}, not "
                        f"{numbers.min()} to {numbers.max()}")
    return torch.from_numpy(np.broadcast_to(numbers, (num_starts, num_steps)).T.astype(np.int64))
