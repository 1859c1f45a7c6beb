"""Logistic regressions of an outcome of the agent on features of the level.

Source: *Behavioural statistics for a maze-solving agent* (2023), rows 4 and 5 of the table of
claims. A target is a number between 0 and 1 per level: 1 if the agent got the cheese and 0 if not,
or the exact probability of getting it. A level with probability q is fitted as a 1 with weight q
and a 0 with weight 1 - q, so that no outcome has to be sampled.

Letters in shape comments: F features, S scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from sklearn import clone, config_context
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import StandardScaler

from common.errors import UserError
from stats.bootstrap import ClusterBootstrap
from stats.effects import FLIPS_PER_COMPARISON, MIN_FLIPS
from stats.significance import holm, sign_flip_p

FOLDS = 10
MIN_LEVELS = 10  # levels of each outcome, so that every fold contains one
RESAMPLINGS = 400  # bootstrap resamples of levels, each with its own fit
NUM_SUBSETS = 200  # random subsets of all features
SINGLE, SET, ALL = "single", "set", "all"
# Published sets: the three features of claim 5, two of them without the redundant third, four
# features of an earlier article, and the six best single features of claim 4.
SETS = {
    "three": ("euc_C_T", "steps_C_D", "euc_C_D"),
    "two": ("euc_C_T", "steps_C_D"),
    "four": ("euc_C_T", "steps_C_D", "euc_C_D", "euc_D_5x5"),
    "six": ("euc_C_5x5", "euc_C_T", "euc_C_D", "steps_C_D", "steps_C_5x5", "steps_C_T")}
SCORES = ("accuracy", "log_loss")
COLUMNS = {"target": str, "model": str, "features": str, "quantity": str, "feature": str,
           "value": float, "low_95": float, "high_95": float, "base": float, "p": float,
           "p_holm": float}
_SMALLEST = 1e-15  # smallest probability in a log-loss
_NONE = "-"  # feature name in rows that do not belong to a feature

_SINGLE_MODEL = LogisticRegression()  # with scikit-learn's default L2 penalty
# The solver penalises the intercept, too; ``intercept_scaling`` makes this negligible.
_L1_MODEL = LogisticRegression(penalty="l1", solver="liblinear", intercept_scaling=10,
                               max_iter=1000, random_state=0)


@config_context(assume_finite=True, skip_parameter_validation=True)  # halves the time
def regressions(features: pd.DataFrame, targets: Mapping[str, np.ndarray], strata: np.ndarray,
                seed: int, sets: Mapping[str, Sequence[str]] = SETS) -> pd.DataFrame:
    """Fit and score all regressions for every target.

    Scores are computed on held-out levels by FOLDS-fold cross-validation, with the same folds for
    all regressions; standardisation, fits and base rate come from the training folds. Intervals of
    scores resample levels and do not include the variation of the fits.

    Args:
        features: two or more features, a row per level and a column per feature, (N, F).
        targets: targets by name, between 0 and 1, (N,).
        strata: whether the agent got the cheese, bool (N,); folds are stratified by it.
        seed: seed of folds, bootstrap, sign flips and subsets.

    Returns:
        A row per number, with COLUMNS. ``model`` is SINGLE for a regression on one feature, SET
        for a regression on a set, and ALL for numbers on all features. Values of ``quantity``:

        - ``accuracy``, ``log_loss`` (nats): score with a bootstrap interval over levels; ``base``
          is the score of the base rate.
        - ``accuracy_gain``, ``log_loss_gain``: improvement over the base rate on the same levels,
          with interval, sign-flip ``p``, and ``p_holm``, corrected for all gains of the table.
        - ``coefficient``, ``intercept``: fit to all levels with standardised features; for sets
          with an interval from fits to RESAMPLINGS bootstrap resamples of levels.
        - ``vif``: variance inflation factor of a feature given the other features of its set (for
          ALL, all other features); NaN if the feature is a linear function of these.
        - ``share_positive``, ``share_negative``: share of random subsets in which the coefficient
          of the feature has this sign, among those of NUM_SUBSETS that contain the feature.

    Raises:
        UserError: if there are fewer than MIN_LEVELS levels of one outcome; for a target of
            probabilities, in expectation.
    """
    for name, target in {"the target": strata, **targets}.items():
        either = float(np.sum(target)), float(np.sum(1 - np.asarray(target, np.float64)))
        if min(either) < MIN_LEVELS:
            raise UserError(f"a regression needs at least {MIN_LEVELS} levels with each outcome, "
                            f"but {name} has {either[0]:.3g} and {either[1]:.3g}; use more levels")
    folds = list(StratifiedKFold(FOLDS, shuffle=True, random_state=seed).split(features, strata))
    bootstrap = ClusterBootstrap(np.arange(len(features)), seed)
    rows, gains = [], []  # gains: gain of each level (N,) for every row with a gain
    for target_name, target in targets.items():
        base = _scores(_held_out(np.zeros((len(target), 0)), target, folds, None), target)
        models = {(SINGLE, name): ([name], _SINGLE_MODEL) for name in features.columns}
        models |= {(SET, name): (list(chosen), _L1_MODEL) for name, chosen in sets.items()}
        for (kind, name), (chosen, model) in models.items():
            values = features[chosen].to_numpy(np.float64)
            scores = _scores(_held_out(values, target, folds, model), target)
            of_model, gain = _score_rows(scores, base, bootstrap)
            gains += gain
            of_model += _coefficient_rows(values, chosen, target, model,
                                          seed if kind == SET else None)
            if kind == SET:
                of_model += _inflation_rows(values, chosen)
            rows += [{"target": target_name, "model": kind, "features": name, **row}
                     for row in of_model]
        values = features.to_numpy(np.float64)
        rows += [{"target": target_name, "model": ALL, "features": ALL, **row} for row in (
            _inflation_rows(values, features.columns)
            + _sign_rows(values, features.columns, target, seed))]
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    is_gain = table["quantity"].str.endswith("_gain")
    num_flips = max(MIN_FLIPS, FLIPS_PER_COMPARISON * len(gains))
    table.loc[is_gain, "p"] = sign_flip_p(np.stack(gains, axis=1), num_flips, seed)
    table.loc[is_gain, "p_holm"] = holm(table.loc[is_gain, "p"].to_numpy())
    return table


def _twice(values: np.ndarray, target: np.ndarray, counts: np.ndarray
           ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Turn each level into two weighted examples, one per outcome; weights of 0 are left out.

    Args:
        values: features (N, F).
        target: probability of outcome 1 (N,).
        counts: how often each level was drawn (N,).

    Returns:
        Features, outcomes (1 or 0) and weights of the examples.
    """
    weights = np.concatenate([counts * target, counts * (1 - target)])
    labels = np.repeat([1, 0], len(target))
    some = weights > 0
    return np.tile(values, (2, 1))[some], labels[some], weights[some]


def _fitted(values: np.ndarray, target: np.ndarray, model: LogisticRegression,
            counts: np.ndarray | None = None) -> tuple[StandardScaler, LogisticRegression]:
    """Standardise the features and fit the regression; return both.

    Args:
        values: features (N, F).
        target: targets between 0 and 1 (N,).
        model: regression with its settings, which is not changed.
        counts: how often each level was drawn (N,); by default once.
    """
    counts = np.ones(len(target)) if counts is None else counts
    scaler = StandardScaler().fit(values, sample_weight=counts)
    return scaler, clone(model).fit(*_twice(scaler.transform(values), target, counts))


def _held_out(values: np.ndarray, target: np.ndarray, folds: list,
              model: LogisticRegression | None) -> np.ndarray:
    """Predict the probability of outcome 1 for each level from a fit to the other folds.

    Args:
        values: features (N, F).
        target: targets between 0 and 1 (N,).
        folds: indices of training and test levels of each fold.
        model: regression; None predicts the mean target of the training levels.

    Returns:
        Probabilities, float64 (N,).
    """
    predicted = np.empty(len(target))
    for train, test in folds:
        if model is None:
            predicted[test] = target[train].mean()
        else:
            scaler, fitted = _fitted(values[train], target[train], model)
            predicted[test] = fitted.predict_proba(scaler.transform(values[test]))[:, 1]
    return predicted


def _scores(probability: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Compute accuracy and log-loss of each level (S, N); for a target between 0 and 1, expected
    values over outcomes with this probability.

    Args:
        probability: predicted probability of outcome 1 (N,).
        target: targets between 0 and 1 (N,).
    """
    inside = probability.clip(_SMALLEST, 1 - _SMALLEST)
    return np.stack([np.where(probability >= 0.5, target, 1 - target),
                     -target * np.log(inside) - (1 - target) * np.log1p(-inside)])


def _score_rows(scores: np.ndarray, base: np.ndarray, bootstrap: ClusterBootstrap
                ) -> tuple[list[dict], list[np.ndarray]]:
    """Return rows with the mean scores and gains over the base rate, and the gains of each level.

    Args:
        scores, base: scores of the regression and of the base rate (S, N).
    """
    gains = np.stack([scores[0] - base[0], base[1] - scores[1]])  # (S, N)
    values = np.concatenate([scores, gains])
    low, high = bootstrap.interval(values)
    names = (*SCORES, *(f"{name}_gain" for name in SCORES))
    bases = (*base.mean(axis=1), None, None)
    return [{"quantity": name, "feature": _NONE, "value": value.mean(), "low_95": one,
             "high_95": other, "base": of_base}
            for name, value, one, other, of_base in zip(names, values, low, high, bases)
            ], list(gains)


def _coefficient_rows(values: np.ndarray, names: Sequence[str], target: np.ndarray,
                      model: LogisticRegression, seed: int | None) -> list[dict]:
    """Return rows with the intercept and the standardised coefficients of a fit to all levels.

    Args:
        values: features (N, F).
        target: targets between 0 and 1 (N,).
        model: regression.
        seed: seed of the bootstrap intervals; None for no intervals.
    """
    def coefficients(counts: np.ndarray | None = None) -> np.ndarray:
        if counts is not None and not 0 < counts @ target < len(target):
            return np.full(1 + len(names), np.nan)  # only one outcome was drawn
        fitted = _fitted(values, target, model, counts)[1]
        return np.concatenate([fitted.intercept_, fitted.coef_[0]])  # (1 + F,)

    fit, ends = coefficients(), np.full((2, 1 + len(names)), np.nan)
    if seed is not None:
        even = np.full(len(target), 1 / len(target))
        draws = np.random.default_rng(seed).multinomial(len(target), even, RESAMPLINGS)  # (R, N)
        ends = np.nanquantile([coefficients(counts) for counts in draws], (0.025, 0.975),
                              axis=0)
    return [{"quantity": "coefficient" if number else "intercept", "feature": name,
             "value": fit[number], "low_95": ends[0, number], "high_95": ends[1, number]}
            for number, name in enumerate((_NONE, *names))]


def _inflation_rows(values: np.ndarray, names: Sequence[str]) -> list[dict]:
    """Return rows with the variance inflation factor of each feature (columns of ``values``, named
    ``names``) given the other ones; NaN for linearly dependent features."""
    rows = []
    for number, name in enumerate(names):
        others, own = np.delete(values, number, axis=1), values[:, number]
        explained = LinearRegression().fit(others, own).score(others, own)
        rows.append({"quantity": "vif", "feature": name,
                     "value": 1 / (1 - explained) if explained < 1 - 1e-12 else np.nan})
    return rows


def _sign_rows(values: np.ndarray, names: Sequence[str], target: np.ndarray,
               seed: int) -> list[dict]:
    """Return rows with the shares of coefficient signs over random subsets of the features."""
    rng = np.random.default_rng([seed, 1])
    signs = np.full((NUM_SUBSETS, len(names)), np.nan)
    for row in signs:
        size = rng.integers(2, len(names) + 1)
        chosen = np.sort(rng.choice(len(names), size, replace=False))
        row[chosen] = np.sign(_fitted(values[:, chosen], target, _L1_MODEL)[1].coef_[0])
    counted = np.isfinite(signs).sum(axis=0)  # (F,)
    return [{"quantity": f"share_{word}", "feature": name,
             "value": (signs[:, number] == sign).sum() / counted[number]}
            for number, name in enumerate(names) for word, sign in (("positive", 1),
                                                                    ("negative", -1))]
