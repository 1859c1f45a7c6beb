"""Batches of windows: order, prefetching, and alignment with simulated steps.

The label of simulated step t is frame num_init_steps - 1 + t of the window, and the step's input is
the action taken at the frame before. Row i of the recorded hidden states is the agent's state
before it sees frame i; the state after this frame is row i + 1.

Letters in shape comments: W frames of a window.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from common.progress import with_progress
from generative.config import SimulatorConfig
from generative.dataset import RolloutDataset, Windows
from generative.squares import Scenery, World, world_corner

_READ_AHEAD = 2


class BatchOrder:
    """Batches of windows, reshuffled in every epoch.

    The windows of batch i depend only on the arguments and i, so a run can resume anywhere. An
    incomplete last batch of an epoch is dropped.

    Args:
        windows: window numbers (N,).
        batch_size: B, number of windows per batch.

    Raises:
        UserError: if there are fewer windows than ``batch_size``.
    """

    def __init__(self, windows: np.ndarray, batch_size: int, seed: int):
        if len(windows) < batch_size:
            raise UserError(f"batch_size is {batch_size}, but there are only {len(windows)} "
                            "windows to train on")
        self._windows, self.batch_size, self._seed = windows, batch_size, seed
        self.batches_per_epoch = len(windows) // batch_size
        self._shuffled = (-1, windows)  # an epoch and its order

    def __getitem__(self, number: int) -> np.ndarray:
        """Return the window numbers (B,) of a batch; batches are counted over all epochs."""
        epoch, batch = divmod(number, self.batches_per_epoch)
        if self._shuffled[0] != epoch:
            order = np.random.default_rng([self._seed, epoch]).permutation(self._windows)
            self._shuffled = (epoch, order)
        begin = batch * self.batch_size
        return self._shuffled[1][begin:begin + self.batch_size]


class BatchReader:
    """Reader that loads batches ahead of time, in a background thread.

    Args:
        order: window numbers of the batches.
        first: number of the first batch.
        part: slice of each batch that is read; None for all windows.

    Attributes:
        seconds_waiting: time that the consumer has waited for data, in seconds.
    """

    def __init__(self, dataset: RolloutDataset, order: BatchOrder, first: int,
                 device: torch.device, part: slice | None = None):
        self._dataset, self._order, self._device = dataset, order, device
        self._part = part or slice(None)
        self._next = first
        self._pool = ThreadPoolExecutor(1)
        self._pending: deque = deque()
        self.seconds_waiting = 0.0

    def __iter__(self) -> Iterator[Windows]:
        while True:
            while len(self._pending) <= _READ_AHEAD:
                self._pending.append(self._pool.submit(self._read, self._next))
                self._next += 1
            start = time.perf_counter()
            windows = self._pending.popleft().result()
            self.seconds_waiting += time.perf_counter() - start
            yield windows.to(self._device)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _read(self, number: int) -> Windows:
        windows = self._dataset.batch(self._order[number][self._part])
        return windows.each(Tensor.pin_memory) if self._device.type == "cuda" else windows


class SpeedMeter:
    """Meter of training speed: frames per second, and the share of time spent waiting for data."""

    def __init__(self, reader: BatchReader, frames_per_batch: int):
        self._reader, self._frames_per_batch = reader, frames_per_batch
        self._restart()

    def _restart(self) -> None:
        self.batches = 0
        self._start, self._waited = time.perf_counter(), self._reader.seconds_waiting

    def since_last_call(self) -> dict[str, float]:
        """Return the measurements since the last call, by column name."""
        seconds = time.perf_counter() - self._start
        speed = {"frames_per_second": self.batches * self._frames_per_batch / seconds,
                 "waiting_for_data": (self._reader.seconds_waiting - self._waited) / seconds}
        self._restart()
        return speed


@dataclasses.dataclass(frozen=True)
class AlignedBatch:
    """A batch of windows, aligned with simulated steps.

    Attributes:
        initial_images: initial frames (I, B, C, H, W) in [0, 1].
        images: image labels of the steps (T, B, C, H, W) in [0, 1].
        actions: input actions of the steps, int64 (T, B).
        rewards: reward labels (T, B).
        terminals: terminal labels, 0 or 1 (T, B).
        first_hidden: the agent's hidden state before the first step (B, D).
        hidden_states: labels of the agent's hidden states after each step (T, B, D).
        positions: the player's position in squares, x to the right and y up, at the second-to-last
            initial frame and at each step's label (T + 1, B, 2), NaN where unknown; None for
            recordings without positions.
        world: static surroundings of the windows, with certain classes; None without worlds.
        outcome_weights: weights of the windows' losses of outcomes (B,); None for 1.
    """

    initial_images: Tensor
    images: Tensor
    actions: Tensor
    rewards: Tensor
    terminals: Tensor
    first_hidden: Tensor
    hidden_states: Tensor
    positions: Tensor | None = None
    world: World | None = None
    outcome_weights: Tensor | None = None


def align(windows: Windows, config: SimulatorConfig) -> AlignedBatch:
    """Align windows (W, B, …) with simulated steps, on the device of the windows.

    Raises:
        UserError: if the windows do not have ``config.window_length`` frames.
    """
    length, first = config.window_length, config.num_init_steps - 1
    if len(windows.frames) != length:
        raise UserError(f"the windows have {len(windows.frames)} frames, but num_init_steps "
                        f"{config.num_init_steps} and num_sim_steps {config.num_sim_steps} need "
                        f"{length}")
    images = windows.frames.to(torch.float32) / 255  # (W, B, C, H, W)
    batch = AlignedBatch(initial_images=images[:config.num_init_steps], images=images[first:],
                        actions=windows.actions[first - 1:-1], rewards=windows.rewards[first:],
                        terminals=windows.terminals[first:],
                        first_hidden=windows.hidden_states[first],
                        hidden_states=windows.hidden_states[first + 1:],
                        positions=None if windows.positions is None
                        else windows.positions[first - 1:])
    if windows.squares is None or windows.outcome_weights is None:
        return batch
    return dataclasses.replace(batch, outcome_weights=windows.outcome_weights[0],
                               world=recorded_world(windows, batch, config))


def recorded_world(windows: Windows, batch: AlignedBatch, config: SimulatorConfig) -> World:
    """Return the world around the last initial frames.

    Args:
        batch: the same windows, whose positions give the position of the squares unless the camera
            is static.
    """
    assert windows.squares is not None
    squares, places, velocities, looks, clock = (
        part[0] for part in (windows.squares, windows.places, windows.velocities, windows.looks,
                             windows.clock) if part is not None)
    corner = batch.images.new_zeros(len(squares), 2)
    if config.pixels_per_square:
        corner = world_corner(true_phase(batch), squares.shape[-1], config.pixels_per_square)
    return World.of(squares.long(), corner, places=places.float(), velocities=velocities.float(),
                    looks=looks.long(), clock=clock)


def true_camera(batch: AlignedBatch, pixels_per_square: float) -> Tensor:
    """Compute velocity and displacement of a camera that follows the player, from positions.

    Where a position is unknown, the camera is assumed to stand still.

    Returns:
        Motion in each step (2 numbers) and motion since the first step's label (2 numbers), in
        pixels to the right and down (T, B, 4).
    """
    assert batch.positions is not None
    right, up = (pixels_per_square * torch.diff(batch.positions, dim=0)).nan_to_num().unbind(dim=-1)
    moved = torch.stack([right, -up], dim=-1)  # (T, B, 2)
    displacement = moved.cumsum(dim=0) - moved[0]
    return torch.cat([moved, displacement], dim=-1)


def true_phase(batch: AlignedBatch) -> Tensor:
    """Compute the phase, in the last initial frame, of a camera that follows the player.

    Returns:
        Cosine and sine of the camera's position within a square to the right, and of its position
        down (B, 4), see ``generative.camera``; NaN where the position is unknown.

    Raises:
        ValueError: if the batch has no positions.
    """
    if batch.positions is None:
        raise ValueError("the phase of the camera needs recorded positions")
    right, up = batch.positions[1].unbind(dim=-1)
    angle = 2 * math.pi * torch.stack([right, -up], dim=-1)  # (B, 2)
    return torch.stack([angle.cos(), angle.sin()], dim=-1).flatten(1)


def divide(items: Sequence | np.ndarray, batch_size: int) -> list[Any]:
    """Divide items into batches of consecutive items; the last batch may be smaller.

    Rounding depends on the composition of a batch, so the division is fixed: a resumed run puts
    every item into the same batch as an uninterrupted run.
    """
    return [items[begin:begin + batch_size] for begin in range(0, len(items), batch_size)]


def in_batches(items: Sequence | np.ndarray, batch_size: int) -> Iterator[Any]:
    """Yield items in batches, with progress reports."""
    batches = divide(items, batch_size)
    return with_progress(batches, len(batches), "batch")


@dataclasses.dataclass(frozen=True)
class EnvState:
    """State of the simulated environment between two steps.

    Attributes:
        env_h: deterministic states (B, H).
        z: one-hot latent variables (B, S, K).
        world: static surroundings; None in simulators without worlds.
        scenery: the drawn surroundings; None before the first step.
        step: number of steps taken.
    """

    env_h: Tensor
    z: Tensor
    world: World | None
    scenery: Scenery | None = None
    step: int = 0
