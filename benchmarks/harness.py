"""Shared parts of the benchmarks: candidates in processes of their own, costs, the command line."""

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
    """A variant of some work in a process of its own, so that the memory of one variant does not
    affect another.

    Args:
        make: called there with ``args``; its result is called for every call of the candidate.
    """

    def __init__(self, make: Callable[..., Callable], *args: object):
        self._process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare,
                                            (make, args))

    def __call__(self, *args: object) -> Any:
        return self.begin(*args).result()

    def begin(self, *args: object) -> Future:
        """Start a call and return at once; the future has its result."""
        return self._process.submit(_work, *args)

    def close(self) -> None:
        self._process.shutdown()


_made: Callable = print  # in the process of a candidate: its work


def _prepare(make: Callable[..., Callable], args: tuple) -> None:
    global _made
    _made = make(*args)


def _work(*args: object) -> Any:
    return _made(*args)


def measure_in_turns(candidates: Mapping[str, Callable], repeats: int, *args: object,
                     warmup: int = 1) -> dict[str, list]:
    """Call candidates in turns, because machines differ and drift.

    Args:
        args: arguments of every call.
        warmup: rounds that are not counted, in which memory is taken and kernels are prepared.

    Returns:
        The results of each candidate.
    """
    results: dict[str, list] = {name: [] for name in candidates}
    for repeat in range(warmup + repeats):
        for name, candidate in candidates.items():
            result = candidate(*args)
            if repeat >= warmup:
                results[name].append(result)
    return results


def medians(results: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Median of the results of each candidate."""
    return {name: median(values) for name, values in results.items()}


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cost of some work.

    Attributes:
        seconds: wall time, which other work on the machine lengthens.
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
    """Return the cost of a call."""
    start, cpu = time.perf_counter(), time.process_time()
    work(*args)
    return Cost(time.perf_counter() - start, time.process_time() - cpu, peak_memory())


def cost_apart(work: Callable[..., object], *args: object) -> Cost:
    """Return the cost of a call in a process of its own."""
    candidate = Candidate(functools.partial, cost_of, work)
    try:
        return candidate(*args)
    finally:
        candidate.close()


def run_script(main: Callable[[list[str]], int | None], *argv: object) -> None:
    """Run a script's ``main``, which must succeed."""
    status = main([str(word) for word in argv])
    if status:
        raise RuntimeError(f"{main.__module__} ended with {status}")


def seconds_of(work: Callable[[], object], repeats: int = 3) -> float:
    """Wall time of the fastest of several calls, in seconds."""
    return min(cost_of(work).seconds for _ in range(repeats))


def peak_memory() -> float:
    """Peak memory in gigabytes. This is the kernel's figure of this program: ``getrusage`` of a
    process that another one started gives the size of the starter, where that was larger."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kibibytes = next(line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(kibibytes) * 1024 / 1e9


def size_of(folder: Path) -> float:
    """Size of the files in a folder, in megabytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def say(text: str) -> None:
    """Print a line at once, also into a file."""
    print(text, flush=True)


def parser_of(description: str | None, parts: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of a benchmark whose parts can be measured one by one."""
    parser = argparse.ArgumentParser(description=description,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=parts, help="measure this part only")
    return parser


def run_parts(description: str | None, parts: Mapping[str, Callable[..., None]],
              setup: AbstractContextManager[tuple] = NO_ARGUMENTS) -> None:
    """Run a benchmark: the part that the command line names, or all of them.

    Args:
        setup: yields the arguments of every part.
    """
    part = parser_of(description, tuple(parts)).parse_args().part
    say(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    with setup as arguments:
        for name, measure in parts.items():
            if part in (None, name):
                measure(*arguments)
