"""Progress reports of long work: a bar on a terminal, otherwise occasional log messages."""

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
    """Reporter of the amount of work done, the rate in this session and the remaining time.

    Nothing is reported if logging is disabled entirely.

    Args:
        total: amount of work; None if unknown.
        unit: name of a unit of work, in the singular.
        initial: amount of work done in earlier sessions.
        first_message: whether the first update is logged immediately if there is no terminal.
    """

    def __init__(self, total: int | None, unit: str, initial: int = 0, first_message: bool = False):
        self._total, self._unit, self._initial = total, unit, initial
        self._start = time.monotonic()
        self._last_message = -math.inf if first_message else self._start
        has_bar = sys.stderr.isatty() and logger.isEnabledFor(logging.CRITICAL)
        self._bar = tqdm(total=total, initial=initial, unit=unit, unit_scale=(total or 0) > 10_000,
                         disable=not has_bar)
        self.done = initial

    @property
    def rate(self) -> float:
        """Units per second in this session."""
        return (self.done - self._initial) / max(time.monotonic() - self._start, 1e-9)

    def update(self, done: int, figures: str = "") -> None:
        """Report the amount of work done so far.

        Args:
            done: total amount of work done, including earlier sessions.
            figures: further values to show, as text.
        """
        self.done = done
        if figures:
            self._bar.set_postfix_str(figures, refresh=False)
        self._bar.update(done - self._bar.n)
        now = time.monotonic()
        if self._bar.disable and now - self._last_message > SECONDS_BETWEEN_MESSAGES:
            self._last_message = now
            units = (self._unit.removesuffix("y") + "ies" if self._unit.endswith("ry") else
                     self._unit + ("es" if self._unit.endswith("tch") else "s"))
            figures = f", {figures}" if figures else ""
            if self._total is None:
                logger.info("%d %s, %.4g %s/s%s", done, units, self.rate, units, figures)
            else:
                logger.info("%d of %d %s, %.4g %s/s%s, %.0f min left", done, self._total, units,
                            self.rate, units, figures,
                            max(0, self._total - done) / max(self.rate, 1e-9) / 60)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()


def with_progress(items: Iterable[Item], total: int | None, unit: str) -> Iterator[Item]:
    """Yield ``items`` with progress reports. See ``Progress`` for ``total`` and ``unit``."""
    with Progress(total, unit) as progress:
        for done, item in enumerate(items, 1):
            yield item
            progress.update(done)
