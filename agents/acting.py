"""Acting: run an agent on observations and draw its actions, with optional action noise.

Letters in shape comments: M frames, E embedding.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from agents.hooks import chunk_of_batch, disabled
from agents.networks import Policy, PolicyOutput, to_images
from common.config import read_yaml, typed
from common.devices import Compute
from common.errors import UserError
from common.game_constants import FRAME_SIZE, NUM_ACTIONS

# Frames embedded at a time, to limit memory. On two AMD cores, 128 took 10 % longer than 1024.
CPU_CHUNK = 1024
GPU_CHUNK = 1 << 20
# Sizes of batches of frames, see ``batch_sizes``.
FRAMES_PER_BATCH = 16
_MULTIPLE, _LARGEST = 4, 64
_SIZES: dict[tuple, tuple[int, int]] = {}  # results of ``batch_sizes``, by architecture
ACTION_NOISE_FILE = Path(__file__).parent.parent / "hyperparams" / "action_noise.yml"
_OTHER_GAMES = "other_games"


def reset_hidden(policy: Policy, hidden: Tensor, first: Tensor) -> Tensor:
    """Reset the hidden states of environments that start an episode to the initial state.

    Args:
        hidden: states that left the previous step (N, D).
        first: whether each environment starts an episode, bool (N,).

    Returns:
        States that enter the step (N, D).
    """
    return torch.where(first.unsqueeze(-1), policy.initial_state().detach(), hidden)


def embed_frames(policy: Policy, frames: Tensor, compute: Compute) -> Tensor:
    """Embed frames as float32 (M, E), in chunks to limit memory.

    Args:
        frames: uint8 (M, H, W, C), or images in [0, 1] (M, C, H, W), on the policy's device.
        compute: precision and memory layout.
    """
    size = CPU_CHUNK if compute.device.type == "cpu" else GPU_CHUNK
    embeddings = []
    with compute.autocast():
        for begin in range(0, len(frames), size):
            chunk = frames[begin:begin + size]
            with chunk_of_batch(policy, begin, begin + len(chunk), len(frames)):
                images = chunk if chunk.is_floating_point() else to_images(
                    chunk, compute.channels_last, compute.dtype)
                embeddings.append(policy.embed(images).float())
    return torch.cat(embeddings)


@torch.no_grad()
def run_policy(policy: Policy, compute: Compute, frames: np.ndarray | Tensor,
               hidden_in: Tensor) -> PolicyOutput:
    """Run an agent for one step.

    Frames are transferred to the device as uint8 and converted to floats there.

    Args:
        frames: uint8 (N, H, W, C), or images in [0, 1] (N, C, H, W).
        hidden_in: states that enter the step (N, D).
    """
    frames = torch.as_tensor(frames).to(compute.device, non_blocking=True)
    return policy.step(embed_frames(policy, frames, compute), hidden_in)


def batch_sizes(policy: Policy, compute: Compute) -> tuple[int, int]:
    """Return the number of frames to pad batches to a multiple of, and the largest number of frames
    of a batch.

    What an agent does must not depend on how many episodes are played at the same time, or shards
    would not join to the same bytes. If this machine computes each frame of random batches of 4, 8
    and 64 frames to the same bits as in a batch of 16, batches can be multiples of 4; otherwise all
    batches have 16 frames. This is tried once per architecture and number of threads.

    Args:
        policy: the agent; its patches and caches are not used.
        compute: precision and memory layout.
    """
    key = (compute, torch.get_num_threads(), type(policy),
           *((name, value.shape) for name, value in policy.named_parameters()))
    if key not in _SIZES:
        is_cpu = compute.device.type == "cpu"
        _SIZES[key] = (
            (_MULTIPLE, _LARGEST) if is_cpu and _is_equal_in_batches(policy, compute)
            else (FRAMES_PER_BATCH, FRAMES_PER_BATCH))
    return _SIZES[key]


def _is_equal_in_batches(policy: Policy, compute: Compute) -> bool:
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (_LARGEST, FRAME_SIZE, FRAME_SIZE, 3), dtype=np.uint8)
    hidden = policy.initial_states(_LARGEST)
    hidden += 0.1 * torch.from_numpy(rng.standard_normal(hidden.shape)).to(hidden)
    with disabled(policy):
        found = [[torch.cat(parts) for parts in zip(*(
            dataclasses.astuple(run_policy(policy, compute, frames[begin:begin + size],
                                           hidden[begin:begin + size]))
            for begin in range(0, _LARGEST, size)))]
            for size in (FRAMES_PER_BATCH, _MULTIPLE, 2 * _MULTIPLE, _LARGEST)]
    return all(map(torch.equal, found[0] * (len(found) - 1),
                   [value for values in found[1:] for value in values]))


def draw_actions(log_probs: Tensor, draws: Tensor) -> Tensor:
    """Sample actions from given random numbers, by inverse transform sampling.

    Args:
        log_probs: log-probabilities of the actions (N, A).
        draws: uniform random numbers in [0, 1), (N,).

    Returns:
        Actions, int64 (N,).
    """
    cumulative = log_probs.exp().cumsum(dim=-1)
    chosen = (cumulative <= draws.unsqueeze(-1) * cumulative[:, -1:]).sum(dim=-1)
    return chosen.clamp(max=log_probs.shape[-1] - 1)


@dataclasses.dataclass(frozen=True)
class ActionNoise:
    """Transformation of the logits before an action is drawn, to make recordings more varied.

    Attributes:
        enabled: whether record.py applies the noise by default.
        scale: factor by which the logits are multiplied first.
        lowest, highest: bounds to which the logits are then clamped; None for no bound.
        fixed_logits: logits of some actions, by action number; they are set after clamping.

    Raises:
        UserError: if a key of ``fixed_logits`` is not an action.
    """

    enabled: bool
    scale: float
    lowest: float | None
    highest: float | None
    fixed_logits: dict

    def __post_init__(self):
        if not set(self.fixed_logits) <= set(range(NUM_ACTIONS)):
            raise UserError(f"{ACTION_NOISE_FILE.name}: the keys of fixed_logits must be actions "
                            f"from 0 to {NUM_ACTIONS - 1}")

    def __call__(self, logits: Tensor) -> Tensor:
        """Apply the noise to logits (N, A)."""
        logits = logits * self.scale
        if (self.lowest, self.highest) != (None, None):
            logits = logits.clamp(self.lowest, self.highest)
        actions = list(self.fixed_logits)
        logits[:, actions] = torch.tensor([float(self.fixed_logits[a]) for a in actions]).to(logits)
        return logits


def load_action_noise(env_name: str) -> ActionNoise:
    """Read a game's action noise from ``hyperparams/action_noise.yml``.

    Games without a section use the section ``other_games``.

    Raises:
        UserError: if both sections are missing, or the section is invalid.
    """
    path, sections = ACTION_NOISE_FILE, read_yaml(ACTION_NOISE_FILE)
    name = env_name if env_name in sections else _OTHER_GAMES
    return typed(ActionNoise, sections.get(name), f"{path.name}, {name}")
