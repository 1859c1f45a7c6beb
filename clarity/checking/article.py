"""What the article found, measured here: rows R1, R3, R4, R11 and R12 of its table.

Hilton et al. (2020), "Understanding RL Vision". R1 and R11 are read off what ``python -m
clarity.checks`` and ``python -m clarity.objects`` wrote; the others are computed from features,
attributions and masks.

Letters in shape comments: N steps, O frames, H W cells, F features, K kinds of object.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pandas as pd

from clarity.attributing.clarity_files import LayerFeatures
from clarity.checking.object_files import ObjectsFolder
from clarity.checking.object_scores import ObjectScorer, mean_score
from clarity.checking.two_numbers import rank_correlation
from common.bootstrap import ClusterBootstrap

AT_STAKE = ("coin", "saw")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One number of the table.

    Attributes:
        row: "R1" to "R12".
        what: it is.
        value: NaN if it cannot be told.
        low, high: its 95 % interval; NaN where there is none.
        holds: whether it is as the article says; None where the row only reports, or it cannot be
            told.
    """

    row: str
    what: str
    value: float
    low: float = math.nan
    high: float = math.nan
    holds: bool | None = None


def attribution_on_objects(table: pd.DataFrame, layer: str, output: str) -> list[Finding]:
    """R1: how much denser |attribution| is in cells that touch an object, and the sign there.

    Args:
        table: ``objects.csv`` of the checks.
    """
    part = table[(table["layer"] == layer) & (table["output"] == output)].set_index("kind")
    found = []
    for kind, row in part.dropna(subset=["density"]).iterrows():
        denser = bool(row["density_low_95"] > 1) if kind in AT_STAKE else None
        found += [
            Finding("R1", f"{kind}: share of |attribution| by share of the cells of {layer}",
                    row["density"], row["density_low_95"], row["density_high_95"], denser),
            Finding("R1", f"{kind}: mean sign of the attribution in its cells of {layer}",
                    row["attribution_sign"])]
    return found


def near_one_hot(features: LayerFeatures) -> list[Finding]:
    """R3, first half: largest entry of each direction, as a share of its sum."""
    entries = features.reducer.directions.max(axis=1) / features.reducer.directions.sum(axis=1)
    return [Finding("R3", f"largest entry of a direction of {features.name}, {what}", float(value))
            for what, value in (("median", np.median(entries)), ("smallest", entries.min()))]


def better_than_of_activations(layer: str, of_attributions: np.ndarray,
                               of_activations: np.ndarray, touched: np.ndarray,
                               episodes: np.ndarray, seed: int) -> Finding:
    """R3, second half: object score of features of attributions minus that of features of
    activations, in the same frames.

    Args:
        of_attributions, of_activations: activations of the features of both kinds, (O, H, W, F)
            each.
        touched: by the masks of each kind of object, bool (O, H, W, K).
        episodes: of each frame (O,).
        seed: of the bootstrap over episodes.
    """
    scorer = ObjectScorer(touched, episodes)
    both = [scorer.best_histograms(each) for each in (of_attributions, of_activations)]
    what = f"object score of {layer}, features of attributions minus those of activations"
    if not all(both):
        return Finding("R3", what, math.nan)

    def difference(draws: np.ndarray) -> np.ndarray:
        return mean_score(draws, both[0]) - mean_score(draws, both[1])

    once = np.ones((1, len(np.unique(episodes))))
    low, high = ClusterBootstrap(episodes, seed).interval_of(difference)
    return Finding("R3", what, float(difference(once)[0]), low, high, bool(low > 0))


def value_without_the_layer(features: LayerFeatures) -> list[Finding]:
    """R4: G(0), beside mean and deviation of the value over the observations."""
    return [Finding("R4", f"{what}, {features.name}", features.found[key]) for key, what in (
        ("baseline_mean", "value with the layer at the baseline, mean"),
        ("baseline_deviation", "its deviation"), ("value_mean", "value, mean"),
        ("value_deviation", "value, deviation"))]


def score_by_layer(folder: ObjectsFolder) -> list[Finding]:
    """R11: the object score of each layer."""
    found = []
    for layer in folder.layers():
        names = folder.names(layer)
        numbers = [math.nan if names[key] is None else names[key]
                   for key in ("score", "score_low_95", "score_high_95")]
        found.append(Finding("R11", f"object score of {layer}", *numbers))
    return found


def odd_frames(layer: str, cells: np.ndarray, advantages: np.ndarray, episodes: np.ndarray,
               seed: int) -> Finding:
    """R12: rank correlation of the residual's share of |attribution| with |advantage|.

    Args:
        cells: attributions to features, the residual last (N, H, W, F + 1).
        advantages: (N,).
        episodes: of each step (N,).
        seed: of the bootstrap over episodes.
    """
    sizes = np.abs(cells.astype(np.float64)).sum(axis=(1, 2))  # (N, F + 1)
    total = sizes.sum(axis=1)
    share = np.divide(sizes[:, -1], total, out=np.zeros(len(total)), where=total > 0)
    found = rank_correlation(share, np.abs(advantages), episodes,
                             ClusterBootstrap(episodes, seed))
    return Finding("R12", f"rank correlation of the residual's share of {layer} with |advantage|",
                   found.value, found.low, found.high)
