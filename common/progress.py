"""Progress of long work: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

SECONDS_BETWEEN_MESSAGES = 30

logger = logging.getLogger(__name__)
Item = TypeVar("Item")


def with_progress(items: Iterable[Item], total: int, unit: str) -> Iterator[Item]:
    """Yield ``items``, saying how many of ``total`` are done, how fast, and what remains."""
    start = last_message = time.monotonic()
    bar = tqdm(items, total=total, unit=unit, disable=not sys.stderr.isatty())
    for done, item in enumerate(bar, 1):
        yield item
        now = time.monotonic()
        if bar.disable and now - last_message > SECONDS_BETWEEN_MESSAGES:
            last_message = now
            rate = done / (now - start)
            logger.info("%d of %d, %.1f %ss/s, %.0f min left", done, total, rate, unit,
                        (total - done) / rate / 60)
