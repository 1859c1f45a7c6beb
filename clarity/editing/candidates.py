"""Edits that might blind an agent to a hazard, and which of them does so the most."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from common.errors import UserError

COLUMNS = ("hazard", "layer", "features", "strength", "score", "levels", "by_hazard_before",
           "by_hazard", "by_others_before", "by_others", "chosen")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An edit that might blind an agent to a hazard.

    Attributes:
        hazard: name.
        layer: short name.
        features: that are taken out together, from 0, the best one first.
        strength: of the edit.
        score: smallest of the features' scores for the hazard.
    """

    hazard: str
    layer: str
    features: tuple[int, ...]
    strength: float
    score: float

    @property
    def label(self) -> str:
        """Of the edit, whatever hazard it is tried for."""
        return f"{self.layer}_{'_'.join(map(str, self.features))}_strength_{self.strength:g}"


def candidates_for(hazard: str, scores: Mapping[str, pd.DataFrame], num_features: int,
                   strengths: Sequence[float]) -> list[Candidate]:
    """In each layer the feature with the best score for a hazard, the best two together, and so
    on, at each strength.

    Args:
        scores: of each layer: columns feature, kind and auc, see ``ObjectsFolder.scores``.
        num_features: most that are taken out together.

    Raises:
        UserError: if no feature has a score for the hazard.
    """
    found = []
    for layer, table in scores.items():
        known = table[(table["kind"] == hazard) & table["auc"].notna()].sort_values(
            "auc", ascending=False, kind="stable")
        for number in range(1, min(num_features, len(known)) + 1):
            best = known.iloc[:number]
            found += [Candidate(hazard, layer, tuple(map(int, best["feature"])), strength,
                                float(best["auc"].iloc[-1])) for strength in strengths]
    if not found:
        raise UserError(f"no feature has a score for '{hazard}': it is in view in too few of the "
                        "frames that python -m clarity.objects has drawn; give it a longer "
                        "recording, or more --num_observations")
    return found


def compared(candidates: Sequence[Candidate], causes: Mapping[str, np.ndarray],
             original: np.ndarray, solved: str) -> pd.DataFrame:
    """Failures of the same levels with and without each edit, and for each hazard the edit that is
    chosen: the one for which the rise in failures by the hazard, less the rise in failures by all
    else, is the largest; the first of equals.

    Args:
        causes: by the label of the edit, what each level ended by (N,).
        original: the same without an edit (N,).
        solved: what a level that is no failure ended by.

    Returns:
        A row a candidate, the columns of COLUMNS.
    """
    rows = []
    for each in candidates:
        before, after = original, causes[each.label]
        rows.append((
            each.hazard, each.layer, " ".join(map(str, each.features)), each.strength, each.score,
            len(original), *(int((ended == each.hazard).sum()) for ended in (before, after)),
            *(int(((ended != each.hazard) & (ended != solved)).sum())
              for ended in (before, after))))
    table = pd.DataFrame(rows, columns=COLUMNS[:-1])
    rise = (table["by_hazard"] - table["by_hazard_before"]
            - (table["by_others"] - table["by_others_before"]))
    table["chosen"] = table.index.isin(rise.groupby(table["hazard"], sort=False).idxmax())
    return table
