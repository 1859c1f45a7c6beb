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

# A batch system signals every process of a job, and some processes forward the signal.
SECONDS_OF_ONE_REQUEST = 1.0

_PR_SET_PDEATHSIG = 1  # of Linux

logger = logging.getLogger(__name__)


def signal_at_death_of_parent(number: int) -> None:
    """Have the system send this process a signal when its parent ends, even if it is killed.

    Does nothing on systems that cannot.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


@contextlib.contextmanager
def deferred_signals(until: str, second_acts: bool = True) -> Iterator[list[int]]:
    """Collect the signals that ask to stop in a list; a second one acts at once.

    Signals within a second of the first count as the same request, delivered several times.

    Args:
        until: work that is finished first, for the message: "stopping after this update".
        second_acts: False where others forward the signal, as torchrun does: a second one then
            has no effect.
    """
    received: list[int] = []
    previous: dict = {}
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
