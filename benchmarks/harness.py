"""Shared code of the benchmarks: running candidates in separate processes, measuring costs, and
parsing the command line."""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

import record

AGENT = Path(__file__).parent.parent / "pretrained" / "coinrun_hard" / "model.pth"

Part = TypeVar("Part")
say = functools.partial(print, flush=True)


@contextlib.contextmanager
def separate_process(make: Callable[..., Callable], *args: object
                     ) -> Iterator[Callable[..., Future]]:
    """Start a separate process for a function that is measured. In a shared process, the memory
    settings of one candidate would affect the others.

    Args:
        make: called with ``args`` in the new process; returns the measured function.
        args: arguments of ``make``.

    Yields:
        Function that passes its arguments to the measured function in the new process, and returns
        a future of the result.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, _prepare, (make, args)) as process:
        yield functools.partial(process.submit, _work)


_call: Callable = print  # the measured function; set in the new process


def _prepare(make: Callable[..., Callable], args: tuple) -> None:
    global _call
    _call = make(*args)


def _work(*args: object) -> Any:
    return _call(*args)


def measure_in_turns(candidates: Mapping[str, Callable[[], Any]], repeats: int,
                     warmup: int = 1) -> dict[str, Any]:
    """Call candidates alternately, because the speed of a machine drifts.

    Args:
        candidates: functions by name; each returns one or more numbers.
        repeats: number of measured calls of each candidate.
        warmup: number of initial rounds without measurement, which allocate memory and prepare
            kernels.

    Returns:
        Medians of the results of each candidate, by name.
    """
    rounds = [[candidate() for candidate in candidates.values()]
              for _ in range(warmup + repeats)]
    return dict(zip(candidates, np.median(rounds[warmup:], axis=0)))


def measure_apart(candidates: Mapping[str, tuple], repeats: int) -> dict[str, Any]:
    """Call candidates alternately, each in a separate process; see ``measure_in_turns``.

    Args:
        candidates: arguments of ``separate_process`` by name.
        repeats: number of measured calls of each candidate.

    Returns:
        Medians of the results of each candidate, by name.
    """
    with contextlib.ExitStack() as stack:
        calls = {name: stack.enter_context(separate_process(*candidate))
                 for name, candidate in candidates.items()}
        return measure_in_turns({name: functools.partial(_result_of, call)
                                 for name, call in calls.items()}, repeats)


def _result_of(call: Callable[[], Future]) -> Any:
    return call().result()


def seconds_of(work: Callable[..., object], *args: object, repeats: int = 1) -> float:
    """Call a function, and return the wall time of the fastest call in seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work(*args)
        times.append(time.perf_counter() - start)
    return min(times)


def run_script(main: Callable[[list[str]], int | None], *argv: object) -> None:
    """Run a script's ``main`` with arguments.

    Raises:
        RuntimeError: if its exit status is not 0.
    """
    status = main([str(word) for word in argv])
    if status:
        raise RuntimeError(f"{main.__module__} ended with {status}")


@contextlib.contextmanager
def recorded(num_episodes: int, *more: str) -> Iterator[Path]:
    """Yield a folder whose subfolder ``data`` is a recording of the shipped agent in hard mode.

    Args:
        num_episodes: number of episodes.
        more: further arguments of record.py.
    """
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(None):
            run_script(record.main, "--agent_file", AGENT, "--distribution_mode", "hard",
                       "--logdir", folder, "--num_episodes", num_episodes, "--no_videos",
                       "--log_level", "error", *more)
        yield Path(folder)


def parts_to_measure(description: str | None, parts: Mapping[str, Part]) -> dict[str, Part]:
    """Parse the command line of a benchmark, and return the selected part, or all parts.

    Args:
        description: description for ``--help``.
        parts: parts of the benchmark by name.
    """
    parser = argparse.ArgumentParser(description=description,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=parts, help="measure only this part")
    part = parser.parse_args().part
    say(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    return {part: parts[part]} if part else dict(parts)
