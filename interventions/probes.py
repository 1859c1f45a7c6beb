"""Probes: decode labels from activations with a linear function, or with one hidden layer.

A probe reads all entries of a layer, one channel, or the channels of one cell (then each cell is an
example; "convolutional probing"). It is trained on one part of the levels, its penalty or number of
epochs is chosen on a second, and it is tested on a third. Its scores are compared with those of a
constant prediction (``base``), and of probes whose labels were shuffled between levels
(``shuffled``; the control tasks of Hewitt and Liang 2019). ``compare_probes`` compares the scores
of two probes of the same label.

Letters in shape comments: N examples, *shape the shape of one example, F the number of its entries,
K classes, E levels of the test part, R resamplings.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pandas as pd
from sklearn.base import is_regressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.neural_network import MLPClassifier, MLPRegressor

from common.errors import UserError
from stats.association import Estimate
from stats.bootstrap import ClusterBootstrap, by_episode
from stats.effects import check_starts

SHARES = (0.6, 0.2, 0.2)  # shares of the levels: for training, choosing the penalty, testing
PENALTIES = tuple(10.0 ** power for power in range(5))  # weights of the L2 penalty
NUM_SHUFFLES = 5
MAX_EPOCHS, PATIENCE = 60, 4  # of a network; training ends after PATIENCE epochs without progress
_BATCH_SIZE, _LEARNING_RATE = 500, 3e-3
_SMALLEST = 1e-15  # lower limit of probabilities in a log-loss


@dataclasses.dataclass(frozen=True)
class Parts:
    """Split of the examples into three parts, which show different levels.

    Attributes:
        train: examples to train on, bool (N,).
        penalty: examples on which the penalty or the number of epochs is chosen, bool (N,).
        test: examples to test on, bool (N,).
    """

    train: np.ndarray
    penalty: np.ndarray
    test: np.ndarray

    def __getitem__(self, rows: np.ndarray) -> Parts:
        """Select examples by an index array or a boolean mask."""
        return Parts(self.train[rows], self.penalty[rows], self.test[rows])


Statistic = Callable[[np.ndarray], np.ndarray]
"""Function that maps the number of times that each of R draws contains each level of the test part
(R, E) to a score per draw (R,), NaN if the score of a draw is undefined."""


@dataclasses.dataclass(frozen=True)
class Probe:
    """A probe and its scores on held-out levels.

    Attributes:
        scores: one row per ``metric``: ``score``, ``low_95``, ``high_95`` (bootstrap over levels),
            ``base`` and ``shuffled`` (mean over shuffles). Metrics are accuracy, AUC (one class
            versus the rest, mean over classes) and log-loss in nats; or, for a regression, R²
            relative to the training mean.
        weights: weights of the unscaled activations, in the shape of the activations of one
            example, or (K, *shape) for more than two classes; None for a network.
        intercept: intercept, () or (K,); None for a network.
        penalty: chosen weight of the L2 penalty; NaN for a network.
        held_out: mean log-probability on ``Parts.penalty``, or in a regression the negative mean
            squared error. Probes of the same label can be chosen by this score.
        statistics: metrics on ``Parts.test`` as functions of the draws of a bootstrap over its
            levels, see ``Statistic``.
    """

    scores: pd.DataFrame
    weights: np.ndarray | None
    intercept: np.ndarray | None
    penalty: float
    held_out: float
    statistics: Mapping[str, Statistic] = dataclasses.field(repr=False)


def split_levels(levels: np.ndarray, seed: int) -> Parts:
    """Split examples by level into three parts, with the shares of levels in ``SHARES``.

    Args:
        levels: seed of each example's level (N,).
        seed: seed of the random split.

    Raises:
        UserError: if there are fewer than 10 levels.
    """
    names = np.unique(levels)
    check_starts(len(names))
    shuffled = np.random.default_rng(seed).permutation(names)
    ends = np.round(np.cumsum(SHARES) * len(names)).astype(int)
    return Parts(*(np.isin(levels, part) for part in np.split(shuffled, ends[:2])))


def probe(activations: np.ndarray, target: np.ndarray, levels: np.ndarray, seed: int = 0, *,
          regression: bool = False, num_shuffles: int = NUM_SHUFFLES, hidden_units: int = 0,
          parts: Parts | None = None) -> Probe:
    """Train and test a probe of a layer.

    Args:
        activations: activations of the layer (N, *shape).
        target: class of each example, or a number with ``regression`` (N,).
        levels: seed of each example's level (N,).
        seed: seed of the split, the shuffles, the bootstrap and a network's initial weights.
        regression: predict a number (by ridge regression) instead of a class (by logistic
            regression).
        num_shuffles: number of probes with shuffled labels; those whose training labels have a
            single class are left out.
        hidden_units: number of ReLU units of a network with one hidden layer; 0 for a linear probe.
        parts: split of the examples; by default from ``split_levels``.

    Raises:
        UserError: if there are fewer than 10 levels, or the training part has a single class.

    Example::

        >>> activations, levels = np.random.randn(60, 8), np.arange(60) // 3  # 3 frames per level
        >>> result = probe(activations, activations[:, 0] > 0, levels, num_shuffles=2)
        >>> assert list(result.scores["metric"]) == ["accuracy", "auc", "log_loss"]
    """
    entries = activations.reshape(len(activations), -1)  # (N, F)
    parts = split_levels(levels, seed) if parts is None else parts
    if not regression and len(np.unique(target[parts.train])) < 2:
        raise UserError("all examples of the training part have the same label; use more levels, "
                        "or another seed")

    def fit(labels: np.ndarray) -> _Fitted:
        return _fit(entries, labels, parts, regression, hidden_units, seed)

    fitted = fit(target)
    statistics = _statistics(fitted, entries, target, levels, parts)
    scores = _scores(statistics, levels[parts.test])
    bootstrap = ClusterBootstrap(levels[parts.test], seed)
    rng, shuffled = np.random.default_rng([seed, 1]), []
    for _ in range(num_shuffles):
        other = target[exchanged_levels(levels, parts, rng)]
        if not regression and len(np.unique(other[parts.train])) < 2:
            continue  # shuffling levels of unequal length has removed a rare class
        shuffled.append(_scores(_statistics(fit(other), entries, other, levels, parts),
                                levels[parts.test]))
    table = pd.DataFrame({"metric": list(scores), "score": list(scores.values())})
    table["low_95"], table["high_95"] = np.transpose([bootstrap.interval_of(statistic)
                                                      for statistic in statistics.values()])
    table["base"] = list(_base(target, parts, regression).values())
    table["shuffled"] = pd.DataFrame(shuffled, columns=list(scores)).mean().to_numpy()
    if hidden_units:
        return Probe(table, None, None, math.nan, fitted.held_out, statistics)
    weights = fitted.unit * np.atleast_2d(fitted.model.coef_) / fitted.scale  # (1 or K, F)
    intercept = (fitted.origin + fitted.unit * np.atleast_1d(fitted.model.intercept_)
                 - weights @ fitted.means)
    weights = np.float32(weights).reshape(-1, *activations.shape[1:])
    if len(weights) == 1:
        weights, intercept = weights[0], intercept[0]
    return Probe(table, weights, intercept, fitted.penalty, fitted.held_out, statistics)


def compare_probes(probe: Probe, other: Probe, metric: str,
                   bootstrap: ClusterBootstrap) -> tuple[Estimate, float]:
    """Compare the scores of two probes of the same examples, from different activations.

    Args:
        probe, other: the probes.
        metric: metric of both probes.
        bootstrap: bootstrap over the levels of the test part; each draw gives one difference.

    Returns:
        Score of ``probe`` minus score of ``other``, with its interval; and its two-sided p-value.
    """
    first, second = probe.statistics[metric], other.statistics[metric]

    def difference(draws: np.ndarray) -> np.ndarray:
        return first(draws) - second(draws)

    value = float(difference(np.ones((1, bootstrap.num_episodes)))[0])
    return (Estimate(value, *bootstrap.interval_of(difference).tolist()),
            bootstrap.p_of(difference))


@dataclasses.dataclass(frozen=True)
class _Fitted:
    """A fitted model, whose inputs are centred and divided by one scale.

    Attributes:
        means: means of the entries in the training part (F,).
        scale: scale of all entries.
        origin, unit: mean and standard deviation of the targets of a regression in the training
            part; 0 and 1 for a classification.
        model: model fitted to the scaled entries, with scaled targets in a regression.
        penalty: weight of the L2 penalty; NaN for a network.
        held_out: see ``Probe``.
    """

    means: np.ndarray
    scale: float
    origin: float
    unit: float
    model: LogisticRegression | Ridge | MLPClassifier | MLPRegressor
    penalty: float = math.nan
    held_out: float = -math.inf

    def log_probs(self, entries: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return log-probabilities of all classes (N, K), and of the targets' classes (N,)."""
        probs = self.model.predict_proba(self.scaled(entries))
        log_probs = np.log(np.maximum(probs, _SMALLEST))
        return log_probs, _of_target(log_probs, self.model.classes_, target)

    def errors(self, entries: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Return squared errors of the probe, and of a constant prediction.

        Args:
            entries: activations (N, F).
            target: targets (N,).

        Returns:
            Errors (2, N); the constant prediction is the mean of the training targets.
        """
        predicted = self.origin + self.unit * self.model.predict(self.scaled(entries))
        return np.stack([target - predicted, target - self.origin]) ** 2

    def scaled(self, entries: np.ndarray) -> np.ndarray:
        """Return the model's inputs for the given entries, float64 (N, F)."""
        return (entries - self.means) / self.scale


def _fit(entries: np.ndarray, target: np.ndarray, parts: Parts, regression: bool,
         hidden_units: int, seed: int) -> _Fitted:
    """Fit models to the training part, and return the best on the penalty part.

    The models differ in their penalties, or for a network in the number of epochs.

    Args:
        entries: activations (N, F).
        target: targets (N,).
        parts: division of the N rows.
        regression, hidden_units, seed: see ``probe``.
    """
    train, train_target = entries[parts.train], target[parts.train]
    held_out, held_target = entries[parts.penalty], target[parts.penalty]
    means = train.mean(axis=0, dtype=np.float64)
    # Entries share one scale; with its own, an entry that hardly varies in training could be huge
    # in the test part.
    scale = float(np.sqrt(train.var(axis=0, dtype=np.float64).mean())) or 1.0
    origin, unit = 0.0, 1.0
    if regression:
        origin, unit = float(train_target.mean()), float(train_target.std()) or 1.0
        train_target = (train_target - origin) / unit
    best, failures = _Fitted(means, scale, origin, unit, Ridge()), 0
    models = (_linear_models if not hidden_units else _networks)(
        best.scaled(train), train_target, regression, hidden_units, seed)
    for penalty, model in models:
        fitted = dataclasses.replace(best, model=model, penalty=penalty)
        score = float(-fitted.errors(held_out, held_target)[0].mean() if regression
                      else fitted.log_probs(held_out, held_target)[1].mean())
        if score > best.held_out:
            best, failures = dataclasses.replace(fitted, held_out=score), 0
        elif (failures := failures + 1) == PATIENCE and hidden_units:
            break
    return best


def _linear_models(inputs: np.ndarray, target: np.ndarray, regression: bool, *_: int
                   ) -> Iterator[tuple[float, LogisticRegression | Ridge]]:
    """Yield each penalty and a linear model that was fitted with it."""
    for penalty in PENALTIES:
        model = Ridge(penalty) if regression else LogisticRegression(C=1 / penalty, max_iter=1000)
        yield penalty, model.fit(inputs, target)


def _networks(inputs: np.ndarray, target: np.ndarray, regression: bool, hidden_units: int,
              seed: int) -> Iterator[tuple[float, MLPClassifier | MLPRegressor]]:
    """Yield NaN (no penalty) and a network with one hidden layer, after each epoch of training."""
    model = (MLPRegressor if regression else MLPClassifier)(
        hidden_layer_sizes=(hidden_units,), batch_size=min(_BATCH_SIZE, 1 + len(inputs) // 10),
        learning_rate_init=_LEARNING_RATE, random_state=seed)
    classes = {} if regression else {"classes": np.unique(target)}
    for _ in range(MAX_EPOCHS):
        model.partial_fit(inputs, target, **classes)
        yield math.nan, copy.deepcopy(model)


def _statistics(fitted: _Fitted, entries: np.ndarray, target: np.ndarray, levels: np.ndarray,
                parts: Parts) -> dict[str, Statistic]:
    """Return the metrics on the test part as functions of draws of its levels.

    Args:
        fitted: the fitted model.
        entries: activations (N, F).
        target: targets (N,).
        levels: level of each row (N,).
        parts: division of the N rows.
    """
    entries, target, levels = entries[parts.test], target[parts.test], levels[parts.test]
    _, level = np.unique(levels, return_inverse=True)
    if is_regressor(fitted.model):
        sums = by_episode(level, fitted.errors(entries, target))
        return {"r2": lambda draws: _one_minus_ratio(*(draws @ sums).T)}
    log_probs, of_target = fitted.log_probs(entries, target)
    classes = fitted.model.classes_
    right = classes[log_probs.argmax(axis=1)] == target
    means = by_episode(level, np.stack([right, -of_target, np.ones(len(right))]))
    wins = [_wins(log_probs[:, number], target == name, level)
            for number, name in enumerate(classes)]
    wins = wins[:1] if len(wins) == 2 else wins  # two classes have the same AUC
    wins = [counts for counts in wins if counts[1].any() and counts[2].any()]
    return {"accuracy": lambda draws: (draws @ means[:, 0]) / (draws @ means[:, 2]),
            "auc": lambda draws: _auc(wins, draws),
            "log_loss": lambda draws: (draws @ means[:, 1]) / (draws @ means[:, 2])}


def _scores(statistics: Mapping[str, Statistic], levels: np.ndarray) -> dict[str, float]:
    """Return the value of each metric on the test part, whose rows have the levels (N,)."""
    once = np.ones((1, len(np.unique(levels))))  # every level drawn once
    return {name: float(statistic(once)[0]) for name, statistic in statistics.items()}


def _base(target: np.ndarray, parts: Parts, regression: bool) -> dict[str, float]:
    """Compute the test scores of a constant prediction.

    The prediction is the frequency of each training label, or in a regression the labels' mean.
    """
    if regression:
        return {"r2": 0.0}
    classes, counts = np.unique(target[parts.train], return_counts=True)
    tested = target[parts.test]
    log_probs = np.tile(np.log(counts / counts.sum()), (len(tested), 1))
    return {"accuracy": float((tested == classes[counts.argmax()]).mean()), "auc": 0.5,
            "log_loss": float(-_of_target(log_probs, classes, tested).mean())}


def _of_target(log_probs: np.ndarray, classes: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Select the log-probabilities of the targets (N,) from those of all classes (N, K).

    Targets that are not among ``classes`` (K,) get log 1e-15.
    """
    place = np.searchsorted(classes, target).clip(max=len(classes) - 1)
    return np.where(classes[place] == target, log_probs[np.arange(len(target)), place],
                    np.log(_SMALLEST))


def _one_minus_ratio(errors: np.ndarray, of_mean: np.ndarray) -> np.ndarray:
    """Return 1 - errors / of_mean; NaN where the denominator is 0."""
    return 1 - np.divide(errors, of_mean, out=np.full(errors.shape, np.nan), where=of_mean > 0)


def _wins(scores: np.ndarray, positive: np.ndarray,
          level: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count the pairs in which a positive example has a higher score than a negative example.

    Pairs are counted by the levels of their examples; ties count half.

    Args:
        scores: scores of the examples (N,).
        positive: whether each example is positive, bool (N,).
        level: index of each example's level, 0 to E - 1 (N,).

    Returns:
        Counts (E, E), by level of the positive and of the negative example; and the numbers of
        positive and of negative examples per level, (E,) each.
    """
    num = level.max() + 1
    positives, of_positive = scores[positive], level[positive]
    wins = np.zeros((num, num))
    for other in range(num):
        negatives = np.sort(scores[~positive & (level == other)])
        beaten = (np.searchsorted(negatives, positives) +
                  np.searchsorted(negatives, positives, side="right")) / 2
        wins[:, other] = np.bincount(of_positive, beaten, num)
    return wins, np.bincount(of_positive, minlength=num), np.bincount(level[~positive],
                                                                      minlength=num)


def _auc(classes: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
         draws: np.ndarray) -> np.ndarray:
    """Compute the AUC, mean over classes, of each draw of levels.

    Args:
        classes: result of ``_wins`` for each class.
        draws: number of times that each of R draws contains each level (R, E).

    Returns:
        AUC (R,); NaN where a draw lacks positive or negative examples of a class.
    """
    areas = [] if classes else [np.full(len(draws), np.nan)]
    for wins, positive, negative in classes:
        pairs = (draws @ positive) * (draws @ negative)
        areas.append(np.divide(((draws @ wins) * draws).sum(axis=1), pairs,
                               out=np.full(len(draws), np.nan), where=pairs > 0))
    return np.mean(areas, axis=0)


def exchanged_levels(levels: np.ndarray, parts: Parts, rng: np.random.Generator) -> np.ndarray:
    """Assign to the rows of each level rows of another level of the same part, to shuffle labels.

    Args:
        levels: level of each example (N,).
        parts: split of the examples.
        rng: random generator.

    Returns:
        Row from which each example gets its label, int64 (N,). The rows of the other level are
        repeated or truncated to the level's number of rows.
    """
    source = np.arange(len(levels))
    for part in (parts.train, parts.penalty, parts.test):
        order = rng.permutation(np.unique(levels[part]))
        for level, other in zip(order, np.roll(order, 1)):
            own = np.flatnonzero(levels == level)
            source[own] = np.resize(np.flatnonzero(levels == other), len(own))
    return source


def auc_of_draws(scores: np.ndarray, positive: np.ndarray,
                 levels: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return the AUC of scores as a function of the draws of a bootstrap over levels.

    Pairs of examples of all levels count; ties count half.

    Args:
        scores: scores of the examples (N,).
        positive: whether each example is positive, bool (N,).
        levels: level of each example (N,).

    Returns:
        Function that maps the number of times that each of R draws contains each level (R, E) to
        the AUC of each draw (R,), NaN for draws with a single class.
    """
    wins = _wins(scores, positive, np.unique(levels, return_inverse=True)[1])
    return lambda draws: _auc([wins], draws)
