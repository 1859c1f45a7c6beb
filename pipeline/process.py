"""Execution of a stage: run a script's ``main`` in a separate process, with its output in a log."""

from __future__ import annotations

import contextlib
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


def run_script(experiment: Path, module: str, argv: Sequence[str], log_file: Path,
               hyperparams: dict[Path, dict], preload: Sequence[str] | None,
               torchrun: Sequence[str] | None = None) -> tuple[int, list[int]]:
    """Run a script's ``main`` in a separate process, and print its log as it grows.

    Args:
        experiment: output folder of the experiment.
        module: module name of the script.
        argv: command-line arguments of the script.
        log_file: file that the output is appended to.
        hyperparams: contents of the parameter files, passed to the script.
        preload: modules to import once in a fork server, from which the process is forked. None in
            a cluster job, where signals would end the fork server first.
        torchrun: arguments from ``torchrun_arguments``; None for a single process.

    Returns:
        The exit status (128 + signal number if a signal ended the process), and the signals that
        were received and forwarded.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with open(log_file, "a", encoding="utf-8") as text:
        text.write(f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S} {module} {shlex.join(argv)}\n")
    arguments = (experiment, module, argv, log_file, hyperparams, torchrun)
    context = multiprocessing.get_context("spawn" if preload is None else "forkserver")
    context.set_forkserver_preload(list(preload or ()))
    process: BaseProcess = context.Process(target=_run_main, args=arguments)  # type: ignore
    forwarded = signal.SIGTERM if preload is None else None
    with open(log_file, "rb") as log, _forward_signals_to(process, forwarded) as received:
        log.seek(0, os.SEEK_END)
        process.start()
        if received and process.pid:  # received before the process existed
            os.kill(process.pid, forwarded or received[0])
        is_running = True
        while is_running:
            is_running = process.is_alive()
            sys.stdout.write(log.read().decode(errors="replace"))
            sys.stdout.flush()
            os.utime(log_file)  # records when the stage last ran, even if this process is killed
            process.join(SECONDS_BETWEEN_LOOKS)
    status = process.exitcode or 0
    if status < 0:
        print(f"{module} was ended by signal {-status}", file=sys.stderr)
        status = 128 - status
    if received and (status == 0 or torchrun is not None):
        # torchrun exits with its own status when it is stopped.
        status = 128 + (received[0] if status == 0 else signal.SIGTERM)
    return status, received


@contextlib.contextmanager
def _forward_signals_to(process: BaseProcess,
                        as_signal: int | None = None) -> Iterator[list[int]]:
    """Forward stop signals to a process; yields the list of received signals.

    Args:
        process: process to forward to.
        as_signal: signal to send instead; None forwards each signal unchanged.
    """
    received: list[int] = []

    def forward(number: int, _frame: object) -> None:
        received.append(number)
        if process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, as_signal or number)

    previous = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _run_main(experiment: Path, module: str, argv: Sequence[str], log_file: Path,
              hyperparams: dict[Path, dict], torchrun: Sequence[str] | None) -> None:
    """Call the ``main`` of a script and exit with its status; target of the process.

    Ctrl-C in the terminal does not reach the process, which has its own process group: the pipeline
    forwards each signal once. If the pipeline is killed, so is the stage. The script gets the
    recorded parameters, even if the files have changed since; processes of torchrun read the files
    themselves.
    """
    os.setpgid(0, 0)
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
