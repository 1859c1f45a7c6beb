"""Execution of a stage: run a script's ``main`` in a separate process, with its output in a log."""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib
import io
import multiprocessing
import os
import shlex
import signal
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import BinaryIO, TypeVar

from tqdm import tqdm

from common.config import yaml_given
from common.signals import STOP_SIGNALS, signal_at_death_of_parent
from pipeline.records import Experiment

SECONDS_BETWEEN_LOOKS = 0.1


def torchrun_arguments(number: int, seconds_to_stop: int) -> tuple[str, ...]:
    """Return the arguments that start a distributed training run by torchrun.

    In the command line, they follow the Python executable and precede ``-m`` and the script's
    module.

    Args:
        number: number of processes on this machine, one per GPU.
        seconds_to_stop: seconds after a signal until torchrun kills the processes.
    """
    return ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={number}",
            f"--shutdown_timeout={seconds_to_stop}")


Script = Generator[None, None, int]  # a running script, which returns its exit status
Result = TypeVar("Result")


class Scripts:
    """Scripts of an experiment, run in processes to which stop signals are forwarded.

    Args:
        experiment: output folder of the experiment.
        hyperparams: contents of the parameter files, passed to the scripts.
        preload: modules to import once in a fork server, from which the processes are forked. None
            in a cluster job, where signals would end the fork server first.

    Attributes:
        received: numbers of the stop signals that were received.
    """

    def __init__(self, experiment: Path, hyperparams: dict[Path, dict],
                 preload: Sequence[str] | None):
        self.received: list[int] = []
        self._experiment, self._hyperparams, self._preload = experiment, hyperparams, preload
        self._processes: list[BaseProcess] = []

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Context manager: record and forward stop signals."""
        def forward(number: int, _frame: object) -> None:
            self.received.append(number)
            for process in self._processes:
                self._send(process)

        previous = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _send(self, process: BaseProcess) -> None:
        if process.pid is not None:
            number = self.received[-1] if self._preload is not None else signal.SIGTERM
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def run(self, module: str, argv: Sequence[str], log_file: Path,
            torchrun: Sequence[str] | None = None, name: str = "") -> Script:
        """Run a script's ``main`` in a separate process, and print its log as it grows.

        Args:
            module: module name of the script.
            argv: command-line arguments of the script.
            log_file: file that the output is appended to.
            torchrun: arguments from ``torchrun_arguments``; None for a single process.
            name: name that each printed line begins with, if other scripts run at the same time.

        Yields:
            None, about ten times per second while the process runs.

        Returns:
            The exit status (128 + signal number if a signal ended the process).
        """
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with open(log_file, "a", encoding="utf-8") as text:
            text.write(f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S} {module} {shlex.join(argv)}\n")
        arguments = (self._experiment, module, argv, log_file, self._hyperparams, torchrun)
        context = multiprocessing.get_context("spawn" if self._preload is None else "forkserver")
        context.set_forkserver_preload([*(self._preload or ()), "pipeline.preloaded"])
        process: BaseProcess = context.Process(target=_run_main, args=arguments)  # type: ignore
        with open(log_file, "rb") as file:
            file.seek(0, os.SEEK_END)
            log = _Log(file, name)
            num_received = len(self.received)
            self._processes.append(process)
            process.start()
            if len(self.received) > num_received:  # received before the process existed
                self._send(process)
            while process.is_alive():
                log.print_more(is_end=False)
                os.utime(log_file)  # tells when it last ran, even if this process is killed
                process.join(SECONDS_BETWEEN_LOOKS)
                yield
            self._processes.remove(process)
            log.print_more(is_end=True)
            os.utime(log_file)
        status = process.exitcode or 0
        if status < 0:
            print(f"{module} was ended by signal {-status}", file=sys.stderr)
            status = 128 - status
        if self.received and (status == 0 or torchrun is not None):
            # torchrun exits with its own status when it is stopped.
            status = 128 + (self.received[0] if status == 0 else signal.SIGTERM)
        return status

class _Log:
    """Log that a process writes, printed as it grows.

    Args:
        file: the opened log, at the position to print from.
        name: name that each line begins with; "" prints the log unchanged.
    """

    def __init__(self, file: BinaryIO, name: str):
        self._file, self._prefix, self._rest = file, f"{name}: " if name else "", ""

    def print_more(self, is_end: bool) -> None:
        """Print what has been written since the last call.

        Args:
            is_end: whether the process has ended, so that an incomplete line is printed, too.
        """
        text = self._rest + self._file.read().decode(errors="replace")
        self._rest = ""
        if self._prefix:
            text, end, self._rest = text.rpartition("\n")
            if is_end and self._rest:
                text, end, self._rest = text + end + self._rest, "\n", ""
            text = "".join(f"{self._prefix}{line}\n" for line in text.split("\n") if end)
        sys.stdout.write(text)
        sys.stdout.flush()


def step(script: Script) -> int | None:
    """Return the exit status of a running script, or None if it still runs after a moment."""
    try:
        return next(script)
    except StopIteration as end:
        return end.value


def finish(script: Generator[None, None, Result]) -> Result:
    """Run a script to its end, and return its result."""
    while True:
        try:
            next(script)
        except StopIteration as end:
            return end.value


def _run_main(experiment: Path, module: str, argv: Sequence[str], log_file: Path,
              hyperparams: dict[Path, dict], torchrun: Sequence[str] | None) -> None:
    """Call the ``main`` of a script and exit with its status; target of the process.

    Ctrl-C in the terminal does not reach the process, which has its own process group: the pipeline
    forwards each signal once. If the pipeline is killed, so is the stage. The script gets the
    recorded parameters, even if the files have changed since; processes of torchrun read the files
    themselves.
    """
    os.setpgid(0, 0)
    gc.freeze()  # collections would copy the memory that is shared with the fork server
    parent = multiprocessing.parent_process()
    assert parent is not None
    tqdm.set_lock(threading.RLock())  # tqdm's default semaphore would leak if the stage is killed
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with open(log_file, "ab", buffering=0) as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    with Experiment(experiment).stage_lock() as lock, yaml_given(hyperparams):
        if parent.is_alive() and torchrun is not None:
            os.set_inheritable(lock.fileno(), True)
            signal_at_death_of_parent(signal.SIGKILL)  # the thread above does not survive execv
            os.execv(sys.executable, [sys.executable, *torchrun, "-m", module, *argv])
        if parent.is_alive():
            sys.exit(importlib.import_module(module).main(argv))


def _end_with(parent: BaseProcess) -> None:
    """Wait for the end of the parent process, then kill this process."""
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
