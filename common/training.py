"""A training run: its folder and log, wall time over all sessions, saving when due, stop signals.

Agents (``agents.training``) and simulators (``generative.training``) are trained by subclasses of
``Run``, which know what a step is and what belongs to the state of the run.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.config import SETTINGS_NAME, save_settings
from common.devices import Compute
from common.distributed import Distributed
from common.errors import UserError
from common.locks import FolderLock, claim_folder
from common.metrics_log import MetricsLog
from common.progress import Progress
from common.signals import deferred_signals

SECONDS_BETWEEN_SAVES = 600


@contextlib.contextmanager
def restoring(file: Path) -> Iterator[None]:
    """Raise UserError if the state in a file does not fit the run that restores it in the block."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"the run cannot be resumed from {file}, which does not fit it: "
                        f"{type(error).__name__}: {error}") from error


@torch.no_grad()
def assign(values: Iterable[Tensor], tensors: Iterable[Tensor]) -> None:
    """Copy values, which may be on another device, into as many tensors of the same shapes."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


class Run(abc.ABC):
    """Training run in a folder.

    The constructor of a subclass calls ``__init__``, sets ``num_steps``, restores a saved state,
    with ``_on_device`` and ``_resume``, and calls ``_open`` at its end.

    Args:
        folder: the run's folder. ``_open`` appends a number to the name if another run uses it.
        world: the group of training processes, which all call every method; rank 0 writes files.
        is_resumed: whether the folder has a state to resume from; it is then locked at once.

    Attributes:
        steps: number of steps so far, in the unit of the log's first column.
        num_steps: number of steps at which the run ends.

    Raises:
        FolderInUse: if another process uses the folder of the run to resume.
    """

    unit = "step"  # unit of ``steps``, for messages
    work = "step"  # what is finished after a stop signal, for messages

    def __init__(self, folder: Path, compute: Compute, world: Distributed, is_resumed: bool):
        self.folder, self.compute, self.world = folder, compute, world
        self.steps, self.num_steps = 0, 0
        self._lock = FolderLock(folder) if is_resumed and world.is_main else None
        self.log: MetricsLog | None = None
        self._elapsed = 0.0
        self._seconds_between_saves: float = SECONDS_BETWEEN_SAVES
        self._saved_steps = -1  # steps of the newest saved state

    def _on_device(self, state: Any) -> Any:
        """Return a saved state, nested, with its floating-point tensors on the run's device.

        Random generators and environments have states of bytes, which stay on the CPU, and
        optimisers choose the device of their tensors when they load them.
        """
        if isinstance(state, dict):
            return {name: value if name == "optimizer_state_dict" else self._on_device(value)
                    for name, value in state.items()}
        if isinstance(state, list):
            return [self._on_device(value) for value in state]
        is_moved = isinstance(state, Tensor) and state.is_floating_point()
        return state.to(self.compute.device) if is_moved else state

    def _resume(self, steps: int, wall_time: float, world_size: int, file: Path) -> None:
        """Continue after ``steps`` steps in ``wall_time`` seconds, which ``world_size`` processes
        saved in ``file``."""
        self.steps = self._saved_steps = steps
        self._elapsed = wall_time
        self.world.warn_if_world_size_changed(world_size, file)

    def _open(self, settings: Any, log_name: str, columns: tuple[str, ...]) -> None:
        """Claim the folder of a new run, write the settings, and open the log."""
        if self.world.is_main:
            self._lock = self._lock or claim_folder(self.folder, SETTINGS_NAME)
            self.folder = self._lock.folder
            save_settings(self.folder, settings)
            self.log = MetricsLog(self.folder / log_name, columns,
                                  None if self._saved_steps < 0 else self.steps)
        self.folder = self.world.broadcast(self.folder)
        self._session_start = self._saved_at = time.monotonic()
        self._session_steps = self.steps

    @property
    def wall_time(self) -> float:
        """Wall time over all sessions, in seconds."""
        return self._elapsed + time.monotonic() - self._session_start

    @property
    def finished(self) -> bool:
        return self.steps >= self.num_steps

    def train(self) -> int:
        """Train until the end, or until one of :data:`common.signals.STOP_SIGNALS` is received.

        Returns:
            0 if the run is finished, 128 + signal number if any of the processes was stopped. The
            state is saved in both cases.

        Raises:
            NonFiniteLoss: if a loss or the gradient is not finite; the last saved state is kept.
            LostProcess: if another process has ended; the saved files are kept.
        """
        stopped = 0
        try:
            with (deferred_signals(self.work, not self.world.is_distributed) as received,
                  Progress(self.num_steps, self.unit, self.steps, first_message=True) as progress):
                while not self.finished:
                    stopped = self.world.max(max(received, default=0))
                    if stopped:
                        break
                    message = self._advance()
                    if message:
                        progress.update(self.steps, message)
                    if self._is_checkpoint:
                        self.save()
                    elif self.world.broadcast(
                            time.monotonic() - self._saved_at > self._seconds_between_saves):
                        self._save_state()
                if not self._is_saved:
                    self.save()
        finally:
            if self.log is not None:
                self.log.close()
        return 0 if self.finished else 128 + stopped

    def save(self) -> None:
        """Write everything that the run writes at a checkpoint."""
        self._save_state()

    def _save_state(self) -> None:
        self._write_state()
        self._saved_steps, self._saved_at = self.steps, time.monotonic()

    def _append(self, row: dict[str, float], diagnostics: dict[str, float] | None = None) -> None:
        """Append a row to the log, see ``MetricsLog``."""
        if self.log is not None and self._lock is not None:
            self._lock.check()
            self.log.append(row, diagnostics)

    @property
    def _is_saved(self) -> bool:
        """Whether ``save`` has written its files for the current step."""
        return self._saved_steps == self.steps

    @property
    @abc.abstractmethod
    def _is_checkpoint(self) -> bool:
        """Whether ``save`` is due at the current step, however long ago the last save was."""

    @abc.abstractmethod
    def _advance(self) -> str:
        """Train a bit, increase ``steps``, and return a progress message; "" for none.

        Raises:
            NonFiniteLoss: if a loss or the gradient is not finite.
        """

    @abc.abstractmethod
    def _write_state(self) -> None:
        """Write the state from which the run can be resumed."""
