"""Search for the edit that blinds an agent to a hazard.

Each feature of each layer is ablated alone, then the best feature together with each other feature
of its layer, and so on while the result improves. The best edit has the largest rise in failures by
the hazard minus the rise in other failures.

Letters in shape comments: N levels, F features, M channels by sign.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from agents.edits import Edit
from attribution.failures.conditions import Run, invisible_hazards, run_of
from attribution.failures.results import SOLVED
from envs.objects import GameObject
from stats.effects import Condition

MIN_LEVELS = 10  # with fewer levels on which the hazard must be seen, all levels are played
Play = Callable[[Condition[Run], Sequence[tuple[int, int]]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An edit that might blind an agent to a hazard.

    Attributes:
        layer: short name of the layer.
        features: numbers of the features that are ablated together, from 0, ascending.
        strength: strength of the edit.
    """

    layer: str
    features: tuple[int, ...]
    strength: float

    @property
    def label(self) -> str:
        return f"{self.layer}_{'_'.join(map(str, self.features))}_strength_{self.strength:g}"


@dataclasses.dataclass(frozen=True)
class Trial:
    """Failures on the levels on which an edit was tried.

    Attributes:
        candidate: the edit.
        levels: number of levels.
        by_hazard_before, by_hazard: numbers of levels failed by the hazard, without and with the
            edit.
        by_others_before, by_others: numbers of levels failed by other causes, without and with the
            edit.
    """

    candidate: Candidate
    levels: int
    by_hazard_before: int
    by_hazard: int
    by_others_before: int
    by_others: int

    @classmethod
    def of(cls, candidate: Candidate, hazard: str, before: np.ndarray, after: np.ndarray) -> Trial:
        """Count failures without and with an edit on the same levels.

        Args:
            candidate: the edit.
            hazard: name of the hazard.
            before, after: cause of failure of each level without and with the edit, or SOLVED (N,).
        """
        counts = [int(failed.sum()) for failed in (
            before == hazard, after == hazard, (before != hazard) & (before != SOLVED),
            (after != hazard) & (after != SOLVED))]
        return cls(candidate, len(before), *counts)

    @property
    def margin(self) -> int:
        """Rise in failures by the hazard, minus the rise in other failures."""
        return (self.by_hazard - self.by_hazard_before
                - (self.by_others - self.by_others_before))


def single_features(numbers: Mapping[str, int], strengths: Sequence[float]) -> list[Candidate]:
    """Return the candidates that ablate a single feature, for each layer, feature and strength.

    Args:
        numbers: number of features by the layer's short name.
        strengths: strengths of the edits.
    """
    return [Candidate(layer, (feature,), strength) for layer, number in numbers.items()
            for feature in range(number) for strength in strengths]


def add_feature(candidate: Candidate, number: int) -> list[Candidate]:
    """Extend a candidate by each further feature of its layer, which has ``number`` features."""
    return [dataclasses.replace(candidate, features=tuple(sorted((*candidate.features, feature))))
            for feature in range(number) if feature not in candidate.features]


def best_of(trials: Sequence[Trial]) -> Trial:
    """Return the first trial with the largest margin."""
    return max(trials, key=lambda trial: trial.margin)


class EditSearch:
    """Search over edits of an agent.

    Args:
        original: condition of the unedited agent.
        directions: path and directions (F, M) of each layer, by its short name.
        play: plays N levels under a condition and returns each one's cause of failure, or SOLVED
            (N,).
    """

    def __init__(self, original: Condition[Run], directions: Mapping[str, tuple[str, np.ndarray]],
                 play: Play):
        self._original, self._directions, self._play = original, directions, play

    def edit(self, candidate: Candidate) -> Edit:
        """Return the edit of a candidate."""
        layer, directions = self._directions[candidate.layer]
        return Edit(layer, torch.from_numpy(directions[list(candidate.features)]),
                    candidate.strength)

    def search(self, hazard: GameObject, game: str, levels: Sequence[tuple[int, int]],
               strengths: Sequence[float], max_features: int) -> tuple[Trial, list[Trial]]:
        """Search for the edit that blinds the agent to a hazard.

        Args:
            hazard: the hazard.
            game: name of the game.
            levels: number and seed of each level. Edits are tried on the levels that the agent
                fails by the hazard when the hazard is invisible, or on all levels if these are
                fewer than MIN_LEVELS.
            strengths: strengths of the edits.
            max_features: maximum number of features that are ablated together.

        Returns:
            The trial of the best edit, and all trials.
        """
        before = self._play(self._original, levels)
        needed = np.ones(len(levels), dtype=bool)
        if not hazard.cells:  # hazards drawn from cells cannot be made invisible
            [hidden] = invisible_hazards([hazard.name], game, self._original, None)
            fails = self._play(hidden, levels) == hazard.name
            needed = fails if fails.sum() >= MIN_LEVELS else needed
        before = before[needed]
        levels = [level for level, is_needed in zip(levels, needed) if is_needed]

        def try_edits(candidates: Sequence[Candidate]) -> list[Trial]:
            return [Trial.of(candidate, hazard.name, before,
                             self._play(self._condition(candidate), levels))
                    for candidate in candidates]

        numbers = {name: len(directions) for name, (_, directions) in self._directions.items()}
        trials = try_edits(single_features(numbers, list(dict.fromkeys(strengths))))
        best = best_of(trials)
        for _ in range(max_features - 1):
            more = try_edits(add_feature(best.candidate, numbers[best.candidate.layer]))
            trials += more
            if not more or best_of(more).margin <= best.margin:
                break
            best = best_of(more)
        return best, trials

    def _condition(self, candidate: Candidate) -> Condition[Run]:
        return Condition(
            f"edited_{candidate.label}", candidate.label, candidate.label,
            value=Run(run_of(self._original).policy, [self.edit(candidate)]))
