"""A stage in a process of its own: one script's ``main``, with all of its output in a log."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib
import io
import multiprocessing
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from tqdm import tqdm

from common.config import yaml_given
from common.signals import STOP_SIGNALS, signal_at_death_of_parent
from pipeline.records import Experiment

SECONDS_BETWEEN_LOOKS = 0.1


@dataclasses.dataclass(frozen=True)
class Torchrun:
    """Processes of one training, which torchrun starts on this machine.

    Attributes:
        number: number of processes, one per GPU.
        seconds_to_stop: time between a signal and the moment at which torchrun kills them.
    """

    number: int
    seconds_to_stop: int

    @property
    def argv(self) -> tuple[str, ...]:
        """Words between Python and a script's module."""
        return ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.number}",
                f"--shutdown_timeout={self.seconds_to_stop}")


def run_script(experiment: Path, module: str, argv: Sequence[str], log_file: Path,
               hyperparams: dict[Path, dict], preload: Sequence[str] | None,
               torchrun: Torchrun | None = None) -> tuple[int, list[int]]:
    """Run a script's ``main`` in a process of its own, and print its log as it grows.

    Args:
        experiment: the output folder.
        module: module of the script.
        hyperparams: contents of the parameter files, which the script gets.
        preload: modules that are imported once; the process is a fork of the one that has done
            it. None in a job of a cluster, whose signals would end that process first.
        torchrun: how the script runs in several processes.

    Returns:
        The exit status, 128 + the signal's number if a signal ended it; and the signals that were
        received and passed on.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with open(log_file, "a") as text:
        text.write(f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S} {module} {shlex.join(argv)}\n")
    arguments = (experiment, module, argv, log_file, hyperparams, torchrun)
    process: BaseProcess
    if preload is None:
        process = multiprocessing.get_context("spawn").Process(target=_run_main, args=arguments)
    else:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(preload))
        process = context.Process(target=_run_main, args=arguments)
    passed_on = signal.SIGTERM if preload is None else None
    with open(log_file, "rb") as log, _passing_signals_to(process, passed_on) as received:
        log.seek(0, os.SEEK_END)
        process.start()
        if received and process.pid:  # before there was a process to pass it on to
            os.kill(process.pid, passed_on or received[0])
        is_running = True
        while is_running:
            is_running = process.is_alive()
            sys.stdout.write(log.read().decode(errors="replace"))
            sys.stdout.flush()
            os.utime(log_file)  # records until when it was at work, even if this is killed
            process.join(SECONDS_BETWEEN_LOOKS)
    status = process.exitcode or 0
    if status < 0:
        print(f"{module} was ended by signal {-status}", file=sys.stderr)
        status = 128 - status
    if received and (status == 0 or torchrun is not None):
        # torchrun has an exit status of its own when it is stopped.
        status = 128 + (received[0] if status == 0 else signal.SIGTERM)
    return status, received


@contextlib.contextmanager
def _passing_signals_to(process: BaseProcess,
                        as_signal: int | None = None) -> Iterator[list[int]]:
    """Pass the signals that ask to stop on to a process; yields the list of those received.

    Args:
        as_signal: signal that they become; None keeps them as they are.
    """
    received: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        received.append(number)
        if process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, as_signal or number)

    previous = {number: signal.signal(number, pass_on) for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _run_main(experiment: Path, module: str, argv: Sequence[str], log_file: Path,
              hyperparams: dict[Path, dict], torchrun: Torchrun | None) -> None:
    """Call the ``main`` of a script and end with its status: the body of the process.

    Ctrl-C on the terminal does not reach the process, which has a group of its own: the pipeline
    passes signals on, once each. If the pipeline is killed, so is the stage. The script gets the
    parameters that the record has, whatever the files hold by now; the processes of torchrun
    read the files themselves.
    """
    os.setpgid(0, 0)
    parent = multiprocessing.parent_process()
    assert parent is not None
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a killed stage leaves behind
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with open(log_file, "ab", buffering=0) as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    with Experiment(experiment).stage_lock() as lock, yaml_given(hyperparams):
        if parent.is_alive() and torchrun is not None:
            os.set_inheritable(lock.fileno(), True)
            signal_at_death_of_parent(signal.SIGKILL)  # the thread does not outlive execv
            os.execv(sys.executable, [sys.executable, *torchrun.argv, "-m", module, *argv])
        if parent.is_alive():
            sys.exit(importlib.import_module(module).main(argv))


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
