"""Stopping long work cleanly when the user or a batch system asks for it."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager

# Ctrl-C, and what batch systems send before they kill a job (LSF at its run limit: SIGUSR2).
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

logger = logging.getLogger(__name__)


@contextmanager
def deferred_signals(until: str, second_acts: bool = True) -> Iterator[list[int]]:
    """Collect the signals that ask to stop in a list; a second one acts at once.

    Args:
        until: what is finished first, for the message: "stopping after this update".
        second_acts: False where others send the same signal on, as torchrun does: a second one
            then has no effect.
    """
    received: list[int] = []
    previous = {}

    def note(number, _frame):
        received.append(number)
        logger.warning("stopping after this %s (signal %d)", until, number)
        for each in previous:
            signal.signal(each, previous[each] if second_acts else signal.SIG_IGN)

    for number in STOP_SIGNALS:
        previous[number] = signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
