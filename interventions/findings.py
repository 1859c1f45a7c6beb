"""Published claims and the numbers of ours beside them: the rows of a table of findings."""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy.stats import binomtest


@dataclasses.dataclass(frozen=True)
class Claim:
    """A row of the table.

    Attributes:
        published: the claim, with numbers and how many levels they are of.
        measured: how it is measured here.
    """

    published: str
    measured: str


@dataclasses.dataclass(frozen=True)
class Finding:
    """A number of ours.

    Attributes:
        row: of the table, from 1.
        levels: over which levels or frames, in words.
        measure: in words.
        value, low_95, high_95: with its interval, NaN without. Of an effect: its size.
        num_levels: how many levels or frames.
        base: the same of the base rate, or without the alteration; NaN where there is none.
        p_holm: corrected p within the study, NaN where there is none.
        altered: of an effect, the number with the alteration.
        p: uncorrected.
        p_control: share of controls with as large an effect.
        primary: whether it is the row's one number that is tested over the whole table.
        shown: whether the table's cell gives it.
        holds: whether it is as the claim says, by its interval; None where that is not asked.
    """

    row: int
    levels: str
    measure: str
    value: float
    low_95: float
    high_95: float
    num_levels: int
    base: float = np.nan
    p_holm: float = np.nan
    altered: float = np.nan
    p: float = np.nan
    p_control: float = np.nan
    primary: bool = False
    shown: bool = False
    holds: bool | None = None

    def text(self) -> str:
        """The number in a few words."""
        numbers = (f"{_short(self.base)} to {_short(self.altered)}" if np.isfinite(self.altered)
                   else _short(self.value))
        ends = ("" if np.isnan(self.low_95)
                else f"{_short(self.low_95)} to {_short(self.high_95)}")
        if np.isfinite(self.altered):
            ends = f"change {self.value:+.3g}" + (f", {ends}" if ends else "")
        elif np.isfinite(self.base):
            ends += f"; base {_short(self.base)}"
        verdict = "" if self.holds is None else ": **holds**" if self.holds else ": does not hold"
        return f"{self.measure}: {numbers}" + (f" ({ends})" if ends else "") + verdict


def _short(number: float) -> str:
    is_count = number >= 2 and float(number).is_integer()
    return f"{number:.0f}" if is_count else f"{number:.3f}"


def share(successes: int, number: int) -> tuple[float, float, float]:
    """A share of at least one with Wilson's 95 % interval (1927)."""
    ends = binomtest(int(successes), int(number)).proportion_ci(0.95, method="wilson")
    return successes / number, float(ends.low), float(ends.high)
