"""Which frame, action and state of a window belongs to which simulated step.

Simulated step i has the label frame num_init_steps - 1 + i, and starts from the action taken at
the frame before. A stored hidden state enters the agent at its frame; the one with which the
agent leaves a frame is the next row.

Letters in shape comments: W frames of a window, I initial frames, T simulated steps, B batch,
C H W a frame, D agent hidden state.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from generative.config import SimulatorConfig
from generative.dataset import Windows


@dataclasses.dataclass(frozen=True)
class AlignedBatch:
    """A batch of windows as the simulator sees it.

    Attributes:
        initial_images: (I, B, C, H, W) in [0, 1].
        images: labels of the steps (T, B, C, H, W) in [0, 1].
        actions: action that enters each step, int64 (T, B).
        rewards: labels (T, B).
        terminals: labels, 0 or 1 (T, B).
        first_hidden: state that enters the agent at the first step (B, D).
        hidden_states: labels, states that leave the agent at each step (T, B, D).
        positions: of the player in squares, x to the right and y up, at the frame before the first
            step and at each step's label (T + 1, B, 2), NaN where unknown; None for recordings
            without positions.
    """

    initial_images: Tensor
    images: Tensor
    actions: Tensor
    rewards: Tensor
    terminals: Tensor
    first_hidden: Tensor
    hidden_states: Tensor
    positions: Tensor | None = None


def align(windows: Windows, config: SimulatorConfig) -> AlignedBatch:
    """Cut a batch of windows (time first), on the device where it lies.

    Raises:
        UserError: if the windows do not have the configuration's length.
    """
    length, first = config.window_length, config.num_init_steps - 1
    if len(windows.frames) != length:
        raise UserError(f"the windows have {len(windows.frames)} frames, but num_init_steps "
                        f"{config.num_init_steps} and num_sim_steps {config.num_sim_steps} make "
                        f"{length}")
    images = windows.frames.to(torch.float32) / 255  # (W, B, C, H, W)
    return AlignedBatch(initial_images=images[:config.num_init_steps], images=images[first:],
                        actions=windows.actions[first - 1:-1], rewards=windows.rewards[first:],
                        terminals=windows.terminals[first:],
                        first_hidden=windows.hidden_states[first],
                        hidden_states=windows.hidden_states[first + 1:],
                        positions=None if windows.positions is None
                        else windows.positions[first - 1:])


def true_camera(batch: AlignedBatch, pixels_per_square: float) -> Tensor:
    """Velocity and displacement of a camera that follows the player, from recorded positions.

    Where the position is unknown, the camera stands still.

    Returns:
        (T, B, 4): its motion in each step, and since the first step's label; x and y in pixels, to
        the right and down.
    """
    right, up = (pixels_per_square * torch.diff(batch.positions, dim=0)).nan_to_num().unbind(dim=-1)
    moved = torch.stack([right, -up], dim=-1)  # (T, B, 2)
    displacement = moved.cumsum(dim=0) - moved[0]
    return torch.cat([moved, displacement], dim=-1)


def as_frames(images: Tensor) -> np.ndarray:
    """Images (…, C, H, W) in [0, 1] to uint8 frames (…, H, W, C)."""
    return (images.float().clamp(0, 1) * 255).round().byte().movedim(-3, -1).cpu().numpy()
