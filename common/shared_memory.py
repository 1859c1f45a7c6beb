"""Sums of tensors over the processes on one machine, in shared memory.

Messages between processes are copied into the kernel and out again; tensors in shared memory are
summed without such copies.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_MARK_BYTES = 16


class SharedMemory:
    """Anonymous memory that other processes can map by its ``path`` and ``mark``.

    It is independent of file systems, and is freed when the last process that maps it ends, even
    if that process is killed.

    Args:
        size: size in bytes.

    Raises:
        OSError: if the system does not support anonymous shared memory.
    """

    def __init__(self, size: int):
        if not hasattr(os, "memfd_create"):
            raise OSError("this system does not support memfd_create")
        self.mark = os.urandom(_MARK_BYTES)
        self._descriptor = os.memfd_create("gradients", os.MFD_CLOEXEC)
        os.truncate(self._descriptor, size)
        os.pwrite(self._descriptor, self.mark, 0)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Close the descriptor, after which no further process can map the memory."""
        os.close(self._descriptor)


def map_memory(path: str, mark: bytes) -> mmap.mmap:
    """Map the ``SharedMemory`` of this or another process.

    Args:
        path, mark: attributes of the ``SharedMemory``.

    Raises:
        OSError: if the memory is not accessible, for example from another machine.
    """
    descriptor = os.open(path, os.O_RDWR)
    try:
        if os.pread(descriptor, _MARK_BYTES, 0) != mark:
            raise OSError(f"{path} is not the shared memory")
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


class SharedSum:
    """Sums of tensors over processes, bitwise identical in all processes.

    Every process writes its tensors to its own row, sums a share of the columns over all rows, and
    reads the sums of all shares.

    Args:
        rows: shared memory with one row per process and a last row for the sums,
            (processes + 1, ``length(like)``).
        rank: rank of this process.
        like: tensors with the shapes and memory layouts of the tensors to sum, in the same order in
            all processes.
        wait: barrier, which returns when all processes have called it.
    """

    def __init__(self, rows: Tensor, rank: int, like: Sequence[Tensor],
                 wait: Callable[[], None]):
        *own, sums = rows
        size, length = len(own), rows.shape[1]
        self._own, self._sums = _views(own[rank], like), _views(sums, like)
        share = slice(rank * length // size, (rank + 1) * length // size)
        self._share, self._share_of_sums = rows[:-1, share], sums[share]
        self._wait = wait

    @staticmethod
    def length(like: Sequence[Tensor]) -> int:
        """Return the total number of elements of the tensors ``like``: the length of a row."""
        return sum(map(torch.numel, like))

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors with their sums over all processes, in place."""
        for view, tensor in zip(self._own, tensors, strict=True):
            view.copy_(tensor)
        self._wait()
        torch.sum(self._share, dim=0, out=self._share_of_sums)
        self._wait()
        for tensor, total in zip(tensors, self._sums):
            tensor.copy_(total)


def _views(row: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of consecutive parts of a row with the shapes and layouts of ``like``."""
    parts = row.split([tensor.numel() for tensor in like])
    return [part.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())
            for part, tensor in zip(parts, like)]
