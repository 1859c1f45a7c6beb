"""Helpers of the benchmarks: candidates in separate processes, costs, and the command line."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
AGENT = ROOT / "pretrained" / "coinrun_hard" / "model.pth"
SIMULATOR = ROOT / "pretrained" / "coinrun_hard_simulator" / "model.pt"
NO_ARGUMENTS = contextlib.nullcontext[tuple](())


class Candidate:
    """A variant of some work, run in a separate process so that the variants' memory settings do
    not affect each other.

    Args:
        make: function that is called with ``args`` in the process and returns the work; each call
            of the candidate calls the work.
        args: arguments of ``make``.
    """

    def __init__(self, make: Callable[..., Callable], *args: object):
        self._process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare,
                                            (make, args))

    def __call__(self, *args: object) -> Any:
        return self.begin(*args).result()

    def begin(self, *args: object) -> Future:
        """Start a call without waiting, and return a future of its result."""
        return self._process.submit(_work, *args)

    def close(self) -> None:
        self._process.shutdown()


_made: Callable = print  # the work, in the process of a candidate


def _prepare(make: Callable[..., Callable], args: tuple) -> None:
    global _made
    _made = make(*args)


def _work(*args: object) -> Any:
    return _made(*args)


def measure_in_turns(candidates: Mapping[str, Callable], repeats: int, *args: object,
                     warmup: int = 1) -> dict[str, list]:
    """Call candidates alternately, because the speed of a machine drifts.

    Args:
        candidates: functions by name.
        repeats: number of measured calls of each candidate.
        args: arguments of every call.
        warmup: number of initial rounds without measurement, which allocate memory and prepare
            kernels.

    Returns:
        The results of each candidate, by name.
    """
    results: dict[str, list] = {name: [] for name in candidates}
    for repeat in range(warmup + repeats):
        for name, candidate in candidates.items():
            result = candidate(*args)
            if repeat >= warmup:
                results[name].append(result)
    return results


def medians(results: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of the results of each candidate."""
    return {name: median(values) for name, values in results.items()}


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cost of some work.

    Attributes:
        seconds: wall time in seconds, which other work on the machine increases.
        cpu: processor time in seconds.
        memory: peak memory of the process so far, in gigabytes.
    """

    seconds: float
    cpu: float
    memory: float

    def __str__(self) -> str:
        return (f"{self.seconds:.1f} s, {self.cpu:.1f} s of processor time, {self.memory:.2f} GB "
                "at its peak")


def cost_of(work: Callable[..., object], *args: object) -> Cost:
    """Call a function and return the cost of the call."""
    start, cpu = time.perf_counter(), time.process_time()
    work(*args)
    return Cost(time.perf_counter() - start, time.process_time() - cpu, peak_memory())


def cost_apart(work: Callable[..., object], *args: object) -> Cost:
    """Call a function in a separate process and return the cost of the call."""
    candidate = Candidate(functools.partial, cost_of, work)
    try:
        return candidate(*args)
    finally:
        candidate.close()


def run_script(main: Callable[[list[str]], int | None], *argv: object) -> None:
    """Run a script's ``main`` with arguments.

    Raises:
        RuntimeError: if its exit status is not 0.
    """
    status = main([str(word) for word in argv])
    if status:
        raise RuntimeError(f"{main.__module__} ended with {status}")


def seconds_of(work: Callable[[], object], repeats: int = 3) -> float:
    """Return the wall time of the fastest of several calls, in seconds."""
    return min(cost_of(work).seconds for _ in range(repeats))


def peak_memory() -> float:
    """Return the peak memory of this process in gigabytes, from the kernel's VmHWM.

    ``getrusage`` would return the memory of the parent process if that was larger.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    kibibytes = next(line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(kibibytes) * 1024 / 1e9


def size_of(folder: Path) -> float:
    """Return the total size of the files in a folder, in megabytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def say(text: str) -> None:
    """Print a line and flush it."""
    print(text, flush=True)


def parser_of(description: str | None, parts: Sequence[str]) -> argparse.ArgumentParser:
    """Return the argument parser of a benchmark whose parts can be selected."""
    parser = argparse.ArgumentParser(description=description,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=parts, help="measure only this part")
    return parser


def run_parts(description: str | None, parts: Mapping[str, Callable[..., None]],
              setup: AbstractContextManager[tuple] = NO_ARGUMENTS) -> None:
    """Run the part of a benchmark that the command line selects, or all parts.

    Args:
        description: description of the benchmark for ``--help``.
        parts: functions that measure the parts, by name.
        setup: context manager that yields the arguments of every part.
    """
    part = parser_of(description, tuple(parts)).parse_args().part
    say(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    with setup as arguments:
        for name, measure in parts.items():
            if part in (None, name):
                measure(*arguments)
