"""Signal handling that stops long work cleanly at the request of the user or a batch system."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import time
from collections.abc import Iterator

# Ctrl-C, and signals that batch systems send before they kill a job (LSF's run limit: SIGUSR2).
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

# A batch system signals every process of a job, and some processes forward the signal.
SECONDS_OF_ONE_REQUEST = 1.0

_PR_SET_PDEATHSIG = 1  # constant of Linux

logger = logging.getLogger(__name__)


def signal_at_death_of_parent(number: int) -> None:
    """Make the system send this process a signal when its parent process ends or is killed.

    No effect on systems other than Linux.

    Args:
        number: number of the signal.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


@contextlib.contextmanager
def deferred_signals(until: str, second_acts: bool = True) -> Iterator[list[int]]:
    """Record the first stop signal in a list instead of acting on it; a second signal acts at once.

    Signals within a second of the first count as the same request, delivered several times.

    Args:
        until: unit of work that is finished first, for the message: "update" in "stopping after
            this update".
        second_acts: whether a second signal acts; False if another process forwards signals, as
            torchrun does.

    Yields:
        List that is empty until a signal is received, and then holds the number of the first one.
    """
    received: list[int] = []
    previous: dict = {}
    first = 0.0  # time of the first signal

    def note(number, _frame):
        nonlocal first
        if not received:
            first = time.monotonic()
            received.append(number)
            logger.warning("stopping after this %s (signal %d)", until, number)
        elif second_acts and time.monotonic() - first > SECONDS_OF_ONE_REQUEST:
            for handled, handler in previous.items():
                signal.signal(handled, handler)
            os.kill(os.getpid(), number)

    for number in STOP_SIGNALS:
        previous[number] = signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
