"""Stopping long work cleanly when the user or a batch system asks for it."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import time
from collections.abc import Iterator

# Ctrl-C, and what batch systems send before they kill a job (LSF at its run limit: SIGUSR2).
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

# A batch system tells every process of a job to stop, and so do those that passed it on.
SECONDS_OF_ONE_REQUEST = 1.0

_PR_SET_PDEATHSIG = 1  # of Linux

logger = logging.getLogger(__name__)


def signal_at_death_of_parent(number: int) -> None:
    """Have the system send this process a signal when the one that started it ends, also if that
    is killed. Where the system cannot, nothing happens."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


@contextlib.contextmanager
def deferred_signals(until: str, second_acts: bool = True) -> Iterator[list[int]]:
    """Collect the signals that ask to stop in a list; a second one acts at once.

    Signals within a second of the first are the same request, which came on several ways.

    Args:
        until: what is finished first, for the message: "stopping after this update".
        second_acts: False where others send the same signal on, as torchrun does: a second one
            then has no effect.
    """
    received: list[int] = []
    previous = {}
    first = 0.0  # when it was received

    def note(number, _frame):
        nonlocal first
        if not received:
            first = time.monotonic()
            received.append(number)
            logger.warning("stopping after this %s (signal %d)", until, number)
        elif second_acts and time.monotonic() - first > SECONDS_OF_ONE_REQUEST:
            for each in previous:
                signal.signal(each, previous[each])
            os.kill(os.getpid(), number)

    for number in STOP_SIGNALS:
        previous[number] = signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
