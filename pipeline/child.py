"""A stage in a process of its own: one script's ``main``, with everything it says in a log."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path

from tqdm import tqdm

from common.config import yaml_given
from pipeline.records import Experiment


def run_stage(folder: Path, module: str, argv: list[str], log_file: Path,
              hyperparams: dict[Path, dict]) -> None:
    """Call the ``main`` of a script and end with its status.

    Ctrl-C on the terminal does not reach the process, which has a group of its own: the pipeline
    passes signals on, once each. If the pipeline is killed, so is the stage.

    Args:
        folder: the experiment's.
        module: of the script.
        log_file: added to.
        hyperparams: contents of the YAML files of parameters as the pipeline has read them, which
            its records tell; the script gets these, whatever the files hold by now.
    """
    os.setpgid(0, 0)
    parent = multiprocessing.parent_process()
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a killed stage leaves behind
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with open(log_file, "ab", buffering=0) as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    sys.stdout.reconfigure(line_buffering=True)
    with Experiment(folder).stage_lock(), yaml_given(hyperparams):
        if parent.is_alive():
            sys.exit(importlib.import_module(module).main(argv))


def _end_with(parent) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
