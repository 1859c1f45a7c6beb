"""Progress of long work: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

SECONDS_BETWEEN_MESSAGES = 30

logger = logging.getLogger(__name__)
Item = TypeVar("Item")


class Progress:
    """Says how much of ``total`` is done, how fast in this sitting, and how long the rest takes.

    It says nothing where logging is disabled altogether.

    Args:
        total: amount of work.
        unit: its name, in the singular.
        initial: what earlier sittings did.
        first_message: whether the first report is shown at once where there is no terminal.
    """

    def __init__(self, total: int, unit: str, initial: int = 0, first_message: bool = False):
        self._total, self._unit, self._initial = total, unit, initial
        self._start = time.monotonic()
        self._last_message = -math.inf if first_message else self._start
        has_bar = sys.stderr.isatty() and logger.isEnabledFor(logging.CRITICAL)
        self._bar = tqdm(total=total, initial=initial, unit=unit, unit_scale=total > 10_000,
                         disable=not has_bar)
        self.done = initial

    @property
    def rate(self) -> float:
        """Units a second in this sitting."""
        return (self.done - self._initial) / max(time.monotonic() - self._start, 1e-9)

    def update(self, done: int, figures: str = "") -> None:
        """Report that ``done`` of the total is done, with some figures."""
        self.done = done
        if figures:
            self._bar.set_postfix_str(figures, refresh=False)
        self._bar.update(done - self._bar.n)
        now = time.monotonic()
        if self._bar.disable and now - self._last_message > SECONDS_BETWEEN_MESSAGES:
            self._last_message = now
            units = self._unit + ("es" if self._unit.endswith("tch") else "s")  # batches, epochs
            logger.info("%d of %d %s, %.4g %s/s%s, %.0f min left", done, self._total,
                        units, self.rate, units, f", {figures}" if figures else "",
                        max(0, self._total - done) / max(self.rate, 1e-9) / 60)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()


def with_progress(items: Iterable[Item], total: int, unit: str) -> Iterator[Item]:
    """Yield ``items``, reporting each."""
    with Progress(total, unit) as progress:
        for done, item in enumerate(items, 1):
            yield item
            progress.update(done)
