"""The order in which windows are trained on, and reading them ahead of time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from common.errors import UserError
from generative.dataset import RolloutDataset, Windows

_READ_AHEAD = 2


class BatchOrder:
    """Batches of windows, shuffled again in every epoch.

    Which windows batch i holds depends on the arguments and i alone, so a run can go on anywhere.
    What an epoch has left over for less than a batch is skipped; the next one shuffles again.

    Args:
        windows: window numbers.

    Raises:
        UserError: if there are fewer windows than a batch holds.
    """

    def __init__(self, windows: np.ndarray, batch_size: int, seed: int):
        if len(windows) < batch_size:
            raise UserError(f"batch_size is {batch_size}, but there are only {len(windows)} "
                            "windows to train on")
        self._windows, self.batch_size, self._seed = windows, batch_size, seed
        self.batches_per_epoch = len(windows) // batch_size
        self._shuffled = (-1, windows)  # an epoch and its order

    def __getitem__(self, number: int) -> np.ndarray:
        """Window numbers of a batch (B,), counted over all epochs."""
        epoch, batch = divmod(number, self.batches_per_epoch)
        if self._shuffled[0] != epoch:
            order = np.random.default_rng([self._seed, epoch]).permutation(self._windows)
            self._shuffled = (epoch, order)
        begin = batch * self.batch_size
        return self._shuffled[1][begin:begin + self.batch_size]


class BatchReader:
    """Reads batches in the background while the ones before them are worked on.

    Args:
        first: number of the first batch.
        device: where the batches go.
        part: which windows of each batch are read; None for all.

    Attributes:
        seconds_waiting: how long the consumer has waited for data.
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
        return windows.pinned() if self._device.type == "cuda" else windows
