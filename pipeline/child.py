"""A stage in a process of its own: one script's ``main``, with everything it says in a log."""

from __future__ import annotations

import dataclasses
import importlib
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path

from tqdm import tqdm

from common.config import yaml_given
from common.signals import signal_at_death_of_parent
from pipeline.records import Experiment


@dataclasses.dataclass(frozen=True)
class Torchrun:
    """The processes of one training, which torchrun starts on this machine.

    Attributes:
        number: of them, one a GPU.
        seconds_to_stop: that they have, after a signal, until they are killed.
    """

    number: int
    seconds_to_stop: int

    @property
    def argv(self) -> tuple[str, ...]:
        """Words between Python and a script's module."""
        return ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.number}",
                f"--shutdown_timeout={self.seconds_to_stop}")


def run_stage(folder: Path, module: str, argv: list[str], log_file: Path,
              hyperparams: dict[Path, dict], torchrun: Torchrun | None = None) -> None:
    """Call the ``main`` of a script and end with its status.

    Ctrl-C on the terminal does not reach the process, which has a group of its own: the pipeline
    passes signals on, once each. If the pipeline is killed, so is the stage.

    Args:
        folder: the experiment's.
        module: of the script.
        log_file: added to.
        hyperparams: contents of the YAML files of parameters as the pipeline has read them, which
            its records tell; the script gets these, whatever the files hold by now.
        torchrun: how the script runs in several processes, which read the files themselves.
    """
    os.setpgid(0, 0)
    parent = multiprocessing.parent_process()
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a killed stage leaves behind
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with open(log_file, "ab", buffering=0) as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    sys.stdout.reconfigure(line_buffering=True)
    with Experiment(folder).stage_lock() as lock, yaml_given(hyperparams):
        if parent.is_alive() and torchrun is not None:
            os.set_inheritable(lock.fileno(), True)
            signal_at_death_of_parent(signal.SIGKILL)  # the thread does not outlive execv
            os.execv(sys.executable, [sys.executable, *torchrun.argv, "-m", module, *argv])
        if parent.is_alive():
            sys.exit(importlib.import_module(module).main(argv))


def _end_with(parent) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
