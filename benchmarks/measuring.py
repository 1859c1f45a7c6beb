"""How long a piece of work takes, and how much memory a process has used."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


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
