"""Running an agent on observations.

Letters in shape comments: N environments, M frames, E embedding, H W C a frame, D hidden state,
A actions.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from agents.hooks import chunk_of_batch
from agents.networks import Policy, PolicyOutput, to_images
from common.devices import Compute

# Frames embedded at a time: a limit of memory. On two AMD cores 128 took a tenth longer than 1 024.
CPU_CHUNK = 1024
GPU_CHUNK = 1 << 20


def reset_hidden(policy: Policy, hidden: Tensor, first: Tensor) -> Tensor:
    """The state that enters the agent: ``hidden`` (N, D), or a new one where ``first`` (N,)."""
    return torch.where(first.unsqueeze(-1), policy.initial_state().detach(), hidden)


def embed_frames(policy: Policy, frames: Tensor, compute: Compute) -> Tensor:
    """Embed uint8 frames (M, H, W, C), a chunk at a time; returns (M, E) float32."""
    size = CPU_CHUNK if compute.device.type == "cpu" else GPU_CHUNK
    embeddings = []
    with compute.autocast():
        for begin in range(0, len(frames), size):
            chunk = frames[begin:begin + size]
            with chunk_of_batch(policy, begin, begin + len(chunk), len(frames)):
                embeddings.append(policy.embed(
                    to_images(chunk, compute.channels_last, compute.dtype)).float())
    return torch.cat(embeddings)


@torch.no_grad()
def run_policy(policy: Policy, compute: Compute, frames: np.ndarray | Tensor,
               hidden_in: Tensor) -> PolicyOutput:
    """Run one step on uint8 frames (N, H, W, C) and the states that enter (N, D).

    Frames travel to the device as bytes and become floats there.
    """
    frames = torch.as_tensor(frames).to(compute.device, non_blocking=True)
    return policy.step(embed_frames(policy, frames, compute), hidden_in)


def draw_actions(log_probs: Tensor, draws: Tensor) -> Tensor:
    """Choose actions by inverting the cumulative distribution.

    Args:
        log_probs: (N, A).
        draws: uniform numbers in [0, 1), (N,).

    Returns:
        int64 (N,).
    """
    cumulative = log_probs.exp().cumsum(dim=-1)
    chosen = (cumulative <= draws.unsqueeze(-1) * cumulative[:, -1:]).sum(dim=-1)
    return chosen.clamp(max=log_probs.shape[-1] - 1)
