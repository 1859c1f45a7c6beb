"""Sums over the processes of one machine, in memory that all of them see.

Between processes of one machine messages are copied into the system and out of it again. Numbers
that lie where everybody reads them are added up at the speed of memory.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_MARK_BYTES = 16


class Memory:
    """Memory that another process can see as well, by its ``path`` and ``mark``.

    It belongs to no file system and needs no name, and is given back with the last process that
    holds it, however that ends.

    Args:
        size: bytes.

    Raises:
        OSError: if the system has no memory of this kind.
    """

    def __init__(self, size: int):
        if not hasattr(os, "memfd_create"):
            raise OSError("this system shares no memory by file descriptors")
        self.mark = os.urandom(_MARK_BYTES)
        self._descriptor = os.memfd_create("gradients", os.MFD_CLOEXEC)
        os.truncate(self._descriptor, size)
        os.pwrite(self._descriptor, self.mark, 0)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Let nobody else come to see it."""
        os.close(self._descriptor)


def seen(path: str, mark: bytes) -> mmap.mmap:
    """The bytes of a ``Memory`` of this or another process.

    Raises:
        OSError: if it cannot be seen from here, as from another machine.
    """
    descriptor = os.open(path, os.O_RDWR)
    try:
        if os.pread(descriptor, _MARK_BYTES, 0) != mark:
            raise OSError(f"{path} is something else here")
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


class SharedSum:
    """Tensors' sums over processes, the same numbers in each of them.

    Every process writes its tensors to a row of its own, adds up a share of the columns of all
    rows, and reads the sums that all have made.

    Args:
        rows: memory of a row for each process and one for the sums,
            (processes + 1, ``length(like)``).
        rank: number of this process.
        like: tensors of the shapes and layouts that will be added up, the same in all processes.
        wait: returns when all processes have called it.
    """

    def __init__(self, rows: Tensor, rank: int, like: Sequence[Tensor],
                 wait: Callable[[], None]):
        *own, sums = rows
        size, length = len(own), rows.shape[1]
        self._own, self._sums = _laid_out(own[rank], like), _laid_out(sums, like)
        share = slice(rank * length // size, (rank + 1) * length // size)
        self._share, self._share_of_sums = rows[:-1, share], sums[share]
        self._wait = wait

    @staticmethod
    def length(like: Sequence[Tensor]) -> int:
        """Numbers of a row."""
        return sum(map(torch.numel, like))

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace the tensors' numbers by their sums over all processes."""
        for place, tensor in zip(self._own, tensors, strict=True):
            place.copy_(tensor)
        self._wait()
        torch.sum(self._share, dim=0, out=self._share_of_sums)
        self._wait()
        for tensor, place in zip(tensors, self._sums):
            tensor.copy_(place)


def _laid_out(row: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Parts of a row, with the tensors' shapes and layouts."""
    parts = row.split([tensor.numel() for tensor in like])
    return [part.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())
            for part, tensor in zip(parts, like)]
