"""Edits that might blind an agent to a hazard, and which of them does so the most."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An edit that might blind an agent to a hazard.

    Attributes:
        layer: short name.
        features: that are taken out together, from 0, in order.
        strength: of the edit.
    """

    layer: str
    features: tuple[int, ...]
    strength: float

    @property
    def label(self) -> str:
        return f"{self.layer}_{'_'.join(map(str, self.features))}_strength_{self.strength:g}"


@dataclasses.dataclass(frozen=True)
class Trial:
    """Failures on the levels that an edit was tried on.

    Attributes:
        candidate: the edit.
        levels: how many.
        by_hazard_before, by_hazard: how many are failed by the hazard, without and with the edit.
        by_others_before, by_others: likewise by all else.
    """

    candidate: Candidate
    levels: int
    by_hazard_before: int
    by_hazard: int
    by_others_before: int
    by_others: int

    @property
    def margin(self) -> int:
        """Rise in failures by the hazard, less the rise in failures by all else."""
        return (self.by_hazard - self.by_hazard_before
                - (self.by_others - self.by_others_before))


def single_features(numbers: Mapping[str, int], strengths: Sequence[float]) -> list[Candidate]:
    """Each feature of each layer by itself, at each strength.

    Args:
        numbers: of features, by the layer's short name.
    """
    return [Candidate(layer, (feature,), strength) for layer, number in numbers.items()
            for feature in range(number) for strength in strengths]


def with_another(candidate: Candidate, number: int) -> list[Candidate]:
    """An edit with each of the layer's other features, of so many, taken out, too."""
    return [dataclasses.replace(candidate, features=tuple(sorted((*candidate.features, feature))))
            for feature in range(number) if feature not in candidate.features]


def trial(candidate: Candidate, hazard: str, before: np.ndarray, after: np.ndarray,
          solved: str) -> Trial:
    """A trial on the same levels without and with an edit.

    Args:
        before, after: cause of failure of each level, or solved (N,).
        solved: stands for a level that is solved.
    """
    counts = [int(found.sum()) for ended in (before, after) for found in (
        ended == hazard, (ended != hazard) & (ended != solved))]
    return Trial(candidate, len(before), counts[0], counts[2], counts[1], counts[3])


def best_of(trials: Sequence[Trial]) -> Trial:
    """The one with the largest margin, the first of equals."""
    return max(trials, key=lambda each: each.margin)
