"""Tests of paired differences, Holm's correction and Wilson's interval.

Letters in shape comments: C comparisons.
"""

from __future__ import annotations

import numpy as np
from scipy.stats import binom, binomtest

LEVEL = 0.05  # significance level of claims
_FLIPS_AT_A_TIME = 2_000


def sign_flip_p(differences: np.ndarray, num_flips: int, seed: int) -> np.ndarray:
    """Compute two-sided p-values of a sign-flip test of paired differences.

    Args:
        differences: altered minus unaltered outcomes (N, C); the statistic is their sum over pairs.
        num_flips: number of random sign assignments, each used for all comparisons.
        seed: seed of the sign assignments.

    Returns:
        p-values (C,), at least 1 / (num_flips + 1).
    """
    observed = np.abs(differences.sum(axis=0))
    observed -= 1e-9 * np.abs(differences).sum(axis=0)  # tolerance for rounding of equal sums
    rng = np.random.default_rng(seed)
    reached = np.zeros(differences.shape[1], dtype=np.int64)
    for begin in range(0, num_flips, _FLIPS_AT_A_TIME):
        shape = min(_FLIPS_AT_A_TIME, num_flips - begin), len(differences)
        signs = 2.0 * rng.integers(0, 2, shape) - 1
        reached += (np.abs(signs @ differences) >= observed).sum(axis=0)
    return (1 + reached) / (1 + num_flips)


def mcnemar_p(differences: np.ndarray) -> np.ndarray:
    """Compute two-sided p-values of McNemar's exact test (1947) for paired binary outcomes.

    Args:
        differences: altered minus unaltered outcomes, -1, 0 or 1 (N, C).

    Returns:
        p-values (C,); 1 if no pair differs.
    """
    up, down = (differences > 0).sum(axis=0), (differences < 0).sum(axis=0)
    return np.minimum(1, 2 * binom.cdf(np.minimum(up, down), up + down, 0.5))


def holm(p: np.ndarray) -> np.ndarray:
    """Correct p-values (C,) by Holm's method (1979), and return them (C,) in the same order."""
    p = np.asarray(p)
    order = np.argsort(p, kind="stable")
    stepped = np.maximum.accumulate((len(p) - np.arange(len(p))) * p[order])
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(stepped, 1)
    return corrected


def share(successes: int, number: int) -> tuple[float, float, float]:
    """Return the share of successes and the ends of its 95 % interval by Wilson (1927).

    Args:
        successes: number of successes.
        number: number of trials, at least 1.
    """
    ends = binomtest(int(successes), int(number)).proportion_ci(0.95, method="wilson")
    return successes / number, float(ends.low), float(ends.high)
