"""Scores of predicted effects: signs, ranks, and differences between predictors.

Three measures compare predicted with measured effects of the same pairs:

- *sign*: share of pairs whose effect has the predicted sign; a prediction of zero counts one half
- *AUC*: area under the ROC curve with which the prediction tells positive from negative effects
- *rank*: Spearman's rank correlation; ranks are computed once, not in each resampling

Pairs whose effect is at most MIN_EFFECT in absolute value have no sign and are left out of all
measures. Intervals are 95 % percentile intervals of the bootstrap over levels; differences are
paired, with the same resamplings for both predictors. Their p-values are two-sided and use the
normal approximation with the standard deviation of the resampled differences, because a count of
resamplings could not be small enough for Holm's correction.

Two baselines use measured effects. *Constant sign per kind* predicts the mean sign of the kind's
effects in the other half of the levels, at the same lag. *Lag 0 carried forward* predicts the
effect that was measured in the real game at lag 0.

Letters in shape comments: N pairs, M predictors, J outputs, L lags, E levels, R resamplings.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from scipy.stats import norm, rankdata

from attribution.checking.object_effects import EFFECTS, TOTAL
from interventions.probes import auc_of_draws
from stats.bootstrap import ClusterBootstrap, by_episode
from stats.significance import holm

CONSTANT, CARRIED = BASELINES = ("constant sign per kind", "lag 0 carried forward")
MEASURES = ("sign", "auc", "rank")
ALL = "all"  # all kinds of object, or all pairs
LARGE = "large effects"  # pairs whose total effect is at least LARGE_EFFECT in absolute value
SAME_PLACE = "same place"  # pairs in which the player stays within NEAR of its recorded place
NEAR = 0.01  # squares
MIN_EFFECT, LARGE_EFFECT = 1e-4, 0.05
MIN_OBJECTS = 30  # kinds with fewer pairs are only counted
_MIN_PAIRS = 20  # fewest pairs for which scores are computed


@dataclasses.dataclass(frozen=True, eq=False)
class Effects:
    """Measured and predicted effects of N pairs.

    Attributes:
        levels: level of each pair, int (N,).
        kinds: kind of each pair's object (N,).
        effects: total and direct effects, float64 (2, J, L, N); NaN where an episode has ended.
        apart: largest distance between the player's places with and without the object up to each
            lag, in squares (L, N).
        predictions: predictions by name of the predictor, float64 (J, L, N) each.
        outputs: names of the outputs (J,).
        lags: lags (L,).
    """

    levels: np.ndarray
    kinds: np.ndarray
    effects: np.ndarray
    apart: np.ndarray
    predictions: Mapping[str, np.ndarray]
    outputs: Sequence[str]
    lags: Sequence[int]

    def counted_kinds(self) -> list[str]:
        """Return the kinds with at least MIN_OBJECTS pairs."""
        names, counts = np.unique(self.kinds, return_counts=True)
        return names[counts >= MIN_OBJECTS].tolist()


def constant_sign(effects: np.ndarray, kinds: np.ndarray, levels: np.ndarray, seed: int
                  ) -> np.ndarray:
    """Return the mean sign of the effects of each pair's kind in the other half of the levels.

    Args:
        effects: effects, NaN where unknown (N,).
        kinds, levels: kind and level of each pair (N,).
        seed: seed of the halves.
    """
    names = np.random.default_rng(seed).permutation(np.unique(levels))
    half, signs = np.isin(levels, names[::2]), np.sign(effects)
    result = np.zeros(len(effects))
    for kind, side in itertools.product(np.unique(kinds), (True, False)):
        known = signs[(kinds == kind) & (half != side) & np.isfinite(effects)]
        result[(kinds == kind) & (half == side)] = known.mean() if len(known) else 0
    return result


def resampled(measure: str, predicted: np.ndarray, effects: np.ndarray, levels: np.ndarray,
              draws: np.ndarray) -> np.ndarray:
    """Compute a measure in resamplings of the levels.

    Args:
        measure: one of MEASURES.
        predicted, effects: predicted and measured effects (N,).
        levels: index of each pair's level (N,).
        draws: how often each resampling draws each level (R, E).

    Returns:
        The measure in each resampling, NaN where it is undefined (R,).
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        if measure == "sign":
            right = (1 + np.sign(predicted) * np.sign(effects)) / 2
            sums, counts = by_episode(levels, np.stack([right, np.ones(len(right))])).T
            return (draws @ sums) / (draws @ counts)
        if measure == "rank":
            x, y = (ranks - ranks.mean() for ranks in map(rankdata, (predicted, effects)))
            moments = np.stack([np.ones(len(x)), x, y, x * x, y * y, x * y])
            n, x, y, xx, yy, xy = (draws @ by_episode(levels, moments)).T
            return (n * xy - x * y) / np.sqrt((n * xx - x * x) * (n * yy - y * y))
    return auc_of_draws(predicted, effects > 0, levels)(draws)


def subsets(data: Effects) -> list[tuple[str, str, np.ndarray]]:
    """Return the analysed subsets: type of effect, name of the subset, and the mask of its pairs at
    each lag, bool (L, N)."""
    near = data.apart <= NEAR
    known = np.isfinite(data.effects).all(axis=1)  # (2, L, N)
    return [*((effect, ALL, mask) for effect, mask in zip(EFFECTS, known)),
            (TOTAL, SAME_PLACE, known[0] & near)]


def pair_counts(data: Effects) -> pd.DataFrame:
    """Count the pairs that are left at each lag.

    Returns:
        Table with columns ``effect``, ``subset``, ``kind``, ``lag``, ``pairs``, ``levels``;
        ``no_effect_<output>``, the number of pairs whose effect is at most MIN_EFFECT; and
        ``as_direct_<output>``, the number of pairs whose total and direct effects differ by at most
        MIN_EFFECT.
    """
    rows = []
    with np.errstate(invalid="ignore"):
        as_direct = np.abs(data.effects[0] - data.effects[1]) <= MIN_EFFECT  # (J, L, N)
    for effect, subset, mask in subsets(data):
        for kind in (ALL, *np.unique(data.kinds).tolist()):
            for place, lag in enumerate(data.lags):
                chosen = mask[place] & ((data.kinds == kind) | (kind == ALL))
                small = np.abs(data.effects[EFFECTS.index(effect)][:, place, chosen]) <= MIN_EFFECT
                rows.append((effect, subset, kind, lag, chosen.sum(),
                             len(np.unique(data.levels[chosen])), *small.sum(axis=1),
                             *as_direct[:, place, chosen].sum(axis=1)))
    return pd.DataFrame(rows, columns=["effect", "subset", "kind", "lag", "pairs", "levels", *(
        f"{name}_{output}" for name in ("no_effect", "as_direct") for output in data.outputs)])


def score_predictions(data: Effects, comparisons: Sequence[tuple[str, str]], seed: int
                      ) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Score all predictors, and compare pairs of them.

    Args:
        data: measured and predicted effects.
        comparisons: predictors, and the predictor or baseline that each is compared with.
        seed: seed of the bootstrap, and of the halves of ``constant_sign``.

    Returns:
        A pair of tables. Both have the columns ``effect``, ``subset``, ``output``, ``kind``,
        ``lag`` and ``predictor``.

        - scores: ``pairs``, ``levels`` and, for each of MEASURES, the value and the ends of its
          interval, ``<measure>_low_95`` and ``<measure>_high_95``. AUC and rank correlation of the
          baseline CONSTANT are NaN for a single kind.
        - differences: ``reference``, ``measure``, ``difference``, ``low_95``, ``high_95``,
          ``p``; and ``p_holm``, corrected by Holm's method over all rows with the same effect,
          subset, output, kind and measure
    """
    scores: list[dict] = []
    differences: list[dict] = []
    analysed = subsets(data)
    analysed.append((TOTAL, LARGE, analysed[0][2]))
    for (effect, subset, mask), output, kind in itertools.product(
            analysed, range(len(data.outputs)), (ALL, *data.counted_kinds())):
        measured = data.effects[EFFECTS.index(effect), output]  # (L, N)
        for place, lag in enumerate(data.lags):
            chosen = mask[place] & ((data.kinds == kind) | (kind == ALL))
            chosen &= np.abs(np.where(mask[place], measured[place], 0)) > (
                LARGE_EFFECT if subset == LARGE else MIN_EFFECT)
            levels = data.levels[chosen]
            if chosen.sum() < _MIN_PAIRS or len(np.unique(levels)) < 2:
                continue
            constant = constant_sign(np.where(mask[place], measured[place], np.nan), data.kinds,
                                     data.levels, seed)
            predicted = {**{name: values[output, place]
                            for name, values in data.predictions.items()},
                         CONSTANT: constant, CARRIED: data.effects[0, output, 0]}
            known = {name: values[chosen] for name, values in predicted.items()
                     if not (name == CARRIED and lag == 0)}
            facts = {"effect": effect, "subset": subset, "output": data.outputs[output],
                     "kind": kind, "lag": lag}
            scored = _Scores(known, measured[place, chosen], levels, kind != ALL, seed)
            scores += [{**facts, "predictor": name, "pairs": int(chosen.sum()),
                        "levels": scored.num_levels, **scored.row(name)} for name in known]
            differences += [
                {**facts, "predictor": name, "reference": other, "measure": measure,
                 **scored.difference(name, other, measure)}
                for name, other in comparisons for measure in MEASURES
                if {name, other} <= set(known)]
    family = ["effect", "subset", "output", "kind", "measure"]
    table = pd.DataFrame(differences, columns=[
        *family[:4], "lag", "predictor", "reference", "measure", "difference", "low_95", "high_95",
        "p"]).dropna(subset=["difference"])
    table["p_holm"] = table.groupby(family)["p"].transform(holm)
    measures = [f"{measure}{end}" for measure in MEASURES for end in ("", "_low_95", "_high_95")]
    return pd.DataFrame(scores, columns=[*family[:4], "lag", "predictor", "pairs", "levels",
                                         *measures]), table


class _Scores:
    """Scores of predictors in the same pairs.

    Args:
        predicted: predictions by name (N,).
        effects: measured effects (N,).
        levels: levels of the pairs (N,).
        single_kind: whether all objects are of one kind.
        seed: seed of the bootstrap.
    """

    def __init__(self, predicted: Mapping[str, np.ndarray], effects: np.ndarray,
                 levels: np.ndarray, single_kind: bool, seed: int):
        self._bootstrap = ClusterBootstrap(levels, seed)
        self.num_levels = self._bootstrap.num_episodes
        place = np.unique(levels, return_inverse=True)[1]
        every = np.ones((1, self.num_levels))

        def both(measure: str, values: np.ndarray) -> np.ndarray:
            """Return the measure, and its resampled values (1 + R,)."""
            return np.concatenate([resampled(measure, values, effects, place, draws)
                                   for draws in (every, self._bootstrap.draws)])

        self._values = {
            (name, measure): np.full(2, np.nan)
            if name == CONSTANT and single_kind and measure != "sign" else both(measure, values)
            for name, values in predicted.items() for measure in MEASURES}

    @staticmethod
    def _interval(values: np.ndarray) -> tuple[float, float]:
        if np.isnan(values).all():
            return np.nan, np.nan
        low, high = np.nanquantile(values, (0.025, 0.975))
        return float(low), float(high)

    def row(self, name: str) -> dict[str, float]:
        """Return all measures of a predictor with their intervals."""
        result: dict[str, float] = {}
        for measure in MEASURES:
            values = self._values[name, measure]
            low, high = self._interval(values[1:])
            result |= {measure: values[0], f"{measure}_low_95": low, f"{measure}_high_95": high}
        return result

    def difference(self, name: str, other: str, measure: str) -> dict[str, float]:
        """Return the paired difference of two predictors, with its interval and p-value; NaN if the
        measure is undefined for one of them."""
        values, others = self._values[name, measure], self._values[other, measure]
        if not np.isfinite(values[0] - others[0]):
            return {"difference": np.nan, "low_95": np.nan, "high_95": np.nan, "p": np.nan}
        difference = values - others
        low, high = self._interval(difference[1:])
        deviation = float(np.nanstd(difference[1:]))
        return {"difference": difference[0], "low_95": low, "high_95": high,
                "p": 2 * norm.sf(abs(difference[0]) / deviation) if deviation else 1.0}
