"""Time of a piece of work, and memory that a process has used."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path


class Apart:
    """A piece of work in a process of its own, as its users run it: the memory that one variant
    has taken, and how it asks for it, is not in the way of another.

    Args:
        make: called there with the other arguments; what it returns is called for every call of
            this object, and its result comes back.
    """

    def __init__(self, make: Callable[..., Callable], *args):
        self._process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare,
                                            (make, args))

    def __call__(self, *args):
        return self.begin(*args).result()

    def begin(self, *args) -> Future:
        """Start a call and go on; the future has its result."""
        return self._process.submit(_work, *args)

    def close(self) -> None:
        self._process.shutdown()


def _prepare(make: Callable[..., Callable], args: tuple) -> None:
    global _made
    _made = make(*args)


def _work(*args):
    return _made(*args)


def peak_memory() -> float:
    """Gigabytes. The kernel's own figure of this program: ``getrusage`` of a process that another
    one started gives the size of the starter, where that was larger."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kibibytes = next(line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(kibibytes) * 1024 / 1e9


def best_of(function: Callable[[], object], repeats: int = 3) -> float:
    """Seconds of the fastest of several calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)
