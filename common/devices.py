"""Device, precision and memory layout of computations, and the number of threads."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Mapping
from typing import TypeVar

import numba
import torch

from common.errors import UserError

ROWS_FOR_THREADS = 3000
PRECISIONS = ("auto", "float32", "bfloat16")
Module = TypeVar("Module", bound=torch.nn.Module)


@dataclasses.dataclass(frozen=True)
class Compute:
    """Device, precision and memory layout of computations with networks.

    Attributes:
        device: device of parameters and rollouts.
        bfloat16: whether convolutions run under bfloat16 autocast. Parameters, the GRU, the
            heads and all losses stay float32.
        channels_last: whether inputs of convolutions have channels-last memory layout. The results
            are equal up to rounding; Procgen's frames arrive in this layout.

    Example::

        >>> compute = Compute(torch.device("cpu"), bfloat16=False)
        >>> assert compute.precision == "float32"
    """

    device: torch.device
    bfloat16: bool
    channels_last: bool = True

    @property
    def precision(self) -> str:
        return "bfloat16" if self.bfloat16 else "float32"

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the convolutions."""
        return torch.bfloat16 if self.bfloat16 else torch.float32

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bfloat16)

    def place(self, module: Module) -> Module:
        """Move a network to the device, in place, with the memory layout that ``channels_last``
        selects, and return it."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        # torch's type stubs lack memory_format
        return module.to(self.device, memory_format=layout)  # type: ignore[call-overload]


def bfloat16_features(features: Mapping[str, bool]) -> list[str]:
    """Return the names of the processor's features for computing in bfloat16.

    Args:
        features: whether the processor has each feature, from ``torch.cpu.get_capabilities``.
    """
    return [name for name in ("amx_bf16", "avx512_bf16") if features.get(name)]


def keep_freed_memory() -> None:
    """Make the C library keep freed memory instead of returning it to the operating system.

    Every training step frees and allocates the same gigabyte; obtaining it each time from the
    operating system, page by page, costs about a tenth of the step. No effect if the C library is
    not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def num_jobs(num_rows: int | None = None) -> int:
    """Return the number of threads that a library should use.

    It is torch's number of threads, limited to the number of available cores.

    Args:
        num_rows: number of rows of the data, if known. With fewer than ROWS_FOR_THREADS rows, the
            result is 1, because one thread is faster.
    """
    if num_rows is not None and num_rows < ROWS_FOR_THREADS:
        return 1
    affinity = getattr(os, "sched_getaffinity", None)  # exists on Linux
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min(cores, torch.get_num_threads()))


def give_numba_torchs_threads() -> None:
    """Set numba's number of threads, for calls from this thread, to torch's number, or to numba's
    maximum if that is smaller.

    By default numba uses all processors. Both libraries share OpenMP's threads, so the first call
    of numba would also change torch's number of threads, and thereby the rounding of its results.
    """
    threads = torch.get_num_threads()
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def resolve_compute(device: str = "auto", gpu_device: int = 0, precision: str = "auto",
                    local_rank: int = 0) -> Compute:
    """Turn the flags ``--device``, ``--gpu_device`` and ``--precision`` into a :class:`Compute`.

    Args:
        device: ``auto`` (a CUDA GPU if available), ``gpu`` or ``cpu``.
        gpu_device: index of the GPU.
        precision: ``auto`` (bfloat16 if the hardware supports it), ``float32`` or ``bfloat16``.
        local_rank: rank of this process on this machine, which is added to ``gpu_device``.

    Raises:
        UserError: if the requested GPU does not exist.
    """
    count = torch.cuda.device_count()
    if device == "gpu" and count == 0:
        raise UserError("--device gpu needs a CUDA GPU, but torch finds none; use --device cpu or "
                        "--device auto")
    use_gpu = device == "gpu" or (device == "auto" and count > 0)
    index = gpu_device + local_rank
    if use_gpu and index >= count:
        raise UserError(f"process {local_rank} of this machine would compute on GPU {index}, but "
                        f"there are {count}, numbered from 0; choose another --gpu_device, or "
                        "start fewer processes")
    chosen = torch.device("cuda", index) if use_gpu else torch.device("cpu")
    if precision != "auto":
        return Compute(chosen, precision == "bfloat16")
    return Compute(chosen, torch.cuda.is_bf16_supported(including_emulation=False) if use_gpu
                   else bool(bfloat16_features(torch.cpu.get_capabilities())))
