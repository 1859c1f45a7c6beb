"""Realism of generated frames, and calibration of predicted events.

Every measure is a function of arrays, so it also applies to other simulators. Baselines are decoded
recorded frames for frames, and the constant rate for events.

Letters in shape comments: B bins.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from sklearn.isotonic import IsotonicRegression
from torch import Tensor, nn
from torch.nn import functional

from common.errors import UserError
from stats.association import Estimate, auc_of_histograms, estimate, ratio
from stats.bootstrap import ClusterBootstrap

CHANNELS = 16, 32, 64, 64  # of the classifier's convolutions, each with stride 2
DROPOUT, LEARNING_RATE, WEIGHT_DECAY, BATCH = 0.2, 2e-3, 1e-2, 64
EPOCHS, PATIENCE = 40, 6  # at most; epochs without a lower validation loss before training ends
FEWEST_FRAMES = 40  # per kind, so that 10 are left for the test

STATIC_CHANGE = 1.0  # of 255: frames with a smaller mean absolute change are static
BLACK = 8  # of 255: pixels whose channels are all below are black
BINS = 10  # of Murphy's decomposition
PERFECT_DRAWS = 500  # samples of the perfect forecaster
_LEAST_SIGNAL = 0.2  # limits the correction of noise where nearly all variance is noise


@torch.enable_grad()
def classifier_auc(real: np.ndarray, generated: np.ndarray, seed: int,
                   epochs: int = EPOCHS) -> Estimate:
    """Compute the AUC of a classifier that separates generated from real frames.

    This is the classifier two-sample test of Lopez-Paz and Oquab (2017, arXiv:1610.06545), with the
    area under the ROC curve instead of the accuracy. The first half of either kind trains a small
    CNN, the next quarter chooses the epoch (lowest loss), and the last quarter is the test. The
    parts are contiguous, so frames of one episode should be adjacent; shuffled ones would be in all
    three parts. Frames are not augmented.

    The result depends only on the arguments, on CPUs with equal libraries and numbers of threads.

    Args:
        real, generated: frames to separate, uint8 (N, H, W, C) each; N may differ, and is at least
            FEWEST_FRAMES.
        seed: seed of initial weights, order of the frames, dropout, and bootstrap.
        epochs: largest number of passes over the training frames.

    Returns:
        AUC on the test frames with its 95 % interval over frames: 0.5 if the classifier cannot tell
        them apart, 1 if it always can. Values below 0.5 are not reflected. The interval does not
        include the variation between trainings; repeat with other seeds for it.
    """
    (train, train_labels), (valid, valid_labels), (test, test_labels) = (
        _part([real, generated], *ends) for ends in ((0, 0.5), (0.5, 0.75), (0.75, 1)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = _classifier(train.shape[1])
        optimizer = torch.optim.AdamW(network.parameters(), LEARNING_RATE,
                                      weight_decay=WEIGHT_DECAY)
        best_loss, best, since_best = float("inf"), network.state_dict(), 0
        for _ in range(epochs):
            network.train()
            for rows in torch.randperm(len(train)).split(BATCH):
                loss = functional.binary_cross_entropy_with_logits(
                    network(_scaled(train[rows])).squeeze(1), train_labels[rows])
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
            valid_loss = functional.binary_cross_entropy_with_logits(
                _logits(network, valid), valid_labels).item()
            since_best += 1
            if valid_loss < best_loss:
                best_loss, best, since_best = valid_loss, copy.deepcopy(network.state_dict()), 0
            if since_best == PATIENCE:
                break
        network.load_state_dict(best)
        scores = _logits(network, test).double().numpy()
    return auc(scores, test_labels.numpy() == 1, np.arange(len(scores)), seed)


def auc(scores: np.ndarray, outcomes: np.ndarray, clusters: np.ndarray, seed: int) -> Estimate:
    """Estimate the area under the ROC curve; equal scores count one half.

    Args:
        scores: scores or probabilities (N,).
        outcomes: labels, bool (N,).
        clusters: number of the cluster (episode, level) of each case (N,).

    Returns:
        The area with its 95 % interval over clusters; NaN unless both labels occur.
    """
    return _of_ranking(auc_of_histograms, scores, outcomes, clusters, seed)


def recall_at_precision(scores: np.ndarray, outcomes: np.ndarray, clusters: np.ndarray,
                        precision: float, seed: int) -> Estimate:
    """Estimate the largest recall of any threshold whose precision is at least ``precision``.

    Precision depends on the share of events among the cases, so draw the cases at their natural
    rate.

    Args:
        scores, outcomes, clusters, seed: see ``auc``.

    Returns:
        The recall with its 95 % interval over clusters; 0 if no threshold is precise enough, NaN
        unless both labels occur.
    """
    def recall(positive: np.ndarray, negative: np.ndarray) -> float:
        if not positive.sum() or not negative.sum():
            return np.nan
        found, wrong = (counts[::-1].cumsum() for counts in (positive, negative))
        precise = found * (1 - precision) >= wrong * precision - 1e-9
        return float(found[precise].max(initial=0) / positive.sum())

    return _of_ranking(recall, scores, outcomes, clusters, seed)


def _of_ranking(statistic: Callable[[np.ndarray, np.ndarray], np.ndarray | float],
                scores: np.ndarray, outcomes: np.ndarray, clusters: np.ndarray, seed: int
                ) -> Estimate:
    """Estimate a statistic of a ranking.

    Args:
        statistic: maps the weights of cases with and without the event, by score in ascending
            order, to the statistic.
        scores, outcomes, clusters, seed: see ``auc``.
    """
    values, place = np.unique(scores, return_inverse=True)
    cluster = np.unique(clusters, return_inverse=True)[1]
    outcomes = np.asarray(outcomes, bool)

    def of(weights: np.ndarray) -> float:
        return float(statistic(*(np.bincount(place, weights * of_kind, len(values))
                                 for of_kind in (outcomes, ~outcomes))))

    bootstrap = ClusterBootstrap(clusters, seed)
    ends = (np.nan, np.nan)
    if bootstrap.num_episodes > 1:
        ends = bootstrap.interval_of(
            lambda draws: np.array([of(draw[cluster]) for draw in draws])).tolist()
    return Estimate(of(np.ones(len(scores))), *ends)


def known_colours(frames: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Compute the share of each frame's pixels whose colour occurs anywhere in reference frames.

    Colours are compared with 5 bits per channel (32 768 colours).

    Args:
        frames, reference: uint8 (..., H, W, 3) each.

    Returns:
        Shares (...).
    """
    known = np.zeros(1 << 15, bool)
    known[_colours(reference)] = True
    return known[_colours(frames)].mean(axis=(-2, -1))


def neighbour_difference(frames: np.ndarray) -> np.ndarray:
    """Compute the mean absolute difference of neighbouring pixels of each frame, of 255.

    It is the mean of horizontal and vertical neighbours, over all channels. Noise has a larger
    value than real frames, blur a smaller one.

    Args:
        frames: uint8 (..., H, W, C).

    Returns:
        Differences (...).
    """
    values = frames.astype(np.int16)
    return np.mean([np.abs(np.diff(values, axis=axis)).mean(axis=(-3, -2, -1))
                    for axis in (-3, -2)], axis=0)


def black_share(frames: np.ndarray) -> np.ndarray:
    """Compute the share of each frame's pixels whose channels are all below ``BLACK``.

    Args:
        frames: uint8 (..., H, W, C).

    Returns:
        Shares (...).
    """
    return (frames < BLACK).all(axis=-1).mean(axis=(-2, -1))


def static_rollouts(frames: np.ndarray, last: int = 16) -> np.ndarray:
    """Find the rollouts that are static at their end.

    A rollout is static if the mean absolute change between consecutive frames, over all pixels and
    changes among its last frames, is below ``STATIC_CHANGE`` (1 of 255).

    Args:
        frames: rollouts that did not end, uint8 (N, T, H, W, C).
        last: number of frames to compare, from 2 to T.

    Returns:
        Mask of the static rollouts, bool (N,).
    """
    changes = [np.abs(np.diff(rollout[-last:].astype(np.int16), axis=0)).mean()
               for rollout in frames]
    return np.array(changes) < STATIC_CHANGE


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Agreement of predicted probabilities with outcomes, see ``calibration``.

    Attributes:
        expected_over_real: sum of the probabilities over the number of events.
        brier: mean squared error of the probabilities (Brier 1950).
        skill: 1 - ``brier`` over that of the constant event rate; 0 for this rate, 1 at best.
        fair_skill: the same with the fair score of Ferro (2014), which estimates the skill in the
            limit of infinitely many worlds. Equal to ``skill`` for probabilities.
        reliability, resolution, uncertainty: terms of Murphy (1973). ``reliability - resolution +
            uncertainty`` is the Brier score of the probabilities averaged in each bin.
        perfect_reliability: mean and 95 % range of the reliability of a perfect forecaster.
        excess_reliability: ``reliability`` minus ``perfect_reliability``; the interval contains 0
            if a perfect forecaster would reach this reliability.
        auc: area under the ROC curve.
    """

    expected_over_real: Estimate
    brier: Estimate
    skill: Estimate
    fair_skill: Estimate
    reliability: float
    resolution: float
    uncertainty: float
    perfect_reliability: Estimate
    excess_reliability: Estimate
    auc: Estimate


def calibration(probabilities: np.ndarray, outcomes: np.ndarray, clusters: np.ndarray,
                num_worlds: int | None, seed: int) -> Calibration:
    """Measure the calibration of predicted events.

    Even a perfect forecaster has a reliability above 0: outcomes are random, and a frequency among
    few worlds deviates from the event's true probability. A parametric bootstrap estimates its
    reliability:

    1. Isotonic regression of the outcomes on the given probabilities estimates the true probability
       of each case: it is calibrated, and discriminates as well as the given probabilities do.
       Noise of the frequencies narrows the spread of the result by a factor that is known from
       their variance (attenuation); the spread is restored.
    2. ``PERFECT_DRAWS`` times, outcomes are drawn with these true probabilities, the forecasts are
       frequencies among ``num_worlds`` other draws, and the decomposition is repeated.

    Dependence within clusters is ignored there, so the excess is rather too large than too small.

    Args:
        probabilities: frequencies of the event among ``num_worlds`` samples of each case (N,).
        outcomes: whether the event occurred in reality, bool (N,).
        clusters: number of the cluster (episode, level) of each case (N,).
        num_worlds: number of samples per case, at least 2; None if the probabilities are not
            frequencies.

    Returns:
        The measures; intervals are 95 % intervals over clusters unless said otherwise. NaN where
        undefined, for example if the event never occurs.
    """
    p, y = np.asarray(probabilities, np.float64), np.asarray(outcomes, np.float64)
    bootstrap = ClusterBootstrap(clusters, seed)
    ones, squared = np.ones(len(p)), (p - y)**2
    skill, fair_skill = (
        estimate(_skill, np.stack([ones, y, errors]), clusters, bootstrap)
        for errors in (squared, fair_squared_error(p, y, num_worlds)))
    reliability, resolution, uncertainty = decompose(p, y)
    perfect = _perfect_reliabilities(p, y, num_worlds, seed)
    low, high = np.quantile(perfect, (0.025, 0.975)).tolist()
    mean = float(perfect.mean())
    return Calibration(
        ratio(p, y, clusters, bootstrap), ratio(squared, ones, clusters, bootstrap), skill,
        fair_skill, reliability, resolution, uncertainty, Estimate(mean, low, high),
        Estimate(reliability - mean, reliability - high, reliability - low),
        auc(p, y == 1, clusters, seed))


def decompose(probabilities: np.ndarray, outcomes: np.ndarray) -> tuple[float, float, float]:
    """Compute Murphy's decomposition of the Brier score (Murphy 1973).

    Cases are grouped by probability into ``BINS`` bins of about equal size. Equal probabilities
    share a bin, so bins differ in size, or are fewer, if many probabilities are equal.

    Args:
        probabilities, outcomes: (N,) each.

    Returns:
        Reliability, resolution and uncertainty.
    """
    _, place, counts = np.unique(probabilities, return_inverse=True, return_counts=True)
    middle = (counts.cumsum() - counts / 2) / len(probabilities)
    bins = (BINS * middle).astype(int)[place]
    size, forecast, events = (np.bincount(bins, weights, BINS)
                              for weights in (None, probabilities, outcomes))
    size, forecast, events = size[size > 0], forecast[size > 0], events[size > 0]
    rate = events.sum() / size.sum()
    share = size / size.sum()
    return (float(share @ ((forecast - events) / size)**2),
            float(share @ (events / size - rate)**2), float(rate * (1 - rate)))


def fair_squared_error(frequencies: np.ndarray, outcomes: np.ndarray,
                       num_worlds: int | np.ndarray | None) -> np.ndarray:
    """Compute squared errors that do not depend on the number of worlds in expectation.

    A frequency among M worlds adds p (1 - p) / M to the expected squared error of the probability
    p. This part is estimated and subtracted (Ferro 2014, "Fair scores for ensemble forecasts").

    Args:
        frequencies, outcomes: (N,) each.
        num_worlds: M, at least 2, one number or (N,); None if the frequencies are probabilities.

    Returns:
        Squared errors (N,); single ones can be negative.
    """
    squared = (frequencies - outcomes)**2
    if num_worlds is None:
        return squared
    return squared - frequencies * (1 - frequencies) / (num_worlds - 1)


def relative_skill(probabilities: np.ndarray, outcomes: np.ndarray, clusters: np.ndarray,
                   num_worlds: int | None, oracle: tuple[np.ndarray, np.ndarray],
                   seed: int) -> dict[str, Estimate]:
    """Compare the Brier skill of a forecast with that of the game's own distribution.

    Both skills use fair squared errors, because 16 worlds would cost a perfect forecaster of rare
    contents more than half of its skill. The baseline of both is the constant rate.

    Args:
        probabilities, outcomes, clusters, num_worlds: see ``calibration``.
        oracle: frequencies (N,) and their numbers of levels (N,), see
            ``envs.equal_views.oracle_probabilities``. Cases with fewer than 2 are left out.

    Returns:
        ``skill`` and ``oracle_skill``; ``relative_skill`` is their ratio, NaN unless the oracle's
        skill is above 0; 95 % intervals over clusters.

    Raises:
        UserError: if the oracle knows no case.
    """
    p, y = np.asarray(probabilities, np.float64), np.asarray(outcomes, np.float64)
    frequencies, numbers = oracle
    known = numbers >= 2
    if not known.any():
        raise UserError("no case has two other levels with an equal view; draw more levels")
    p, y, clusters = p[known], y[known], clusters[known]
    errors = (fair_squared_error(p, y, num_worlds),
              fair_squared_error(frequencies[known], y, numbers[known]))
    sums = np.stack([np.ones(len(p)), y, *errors])  # (4, N)
    bootstrap = ClusterBootstrap(clusters, seed)

    def quotient(sums: np.ndarray) -> np.ndarray:
        own, best = _skill(sums[..., [0, 1, 2]]), _skill(sums[..., [0, 1, 3]])
        return np.divide(own, best, out=np.full(np.shape(best), np.nan), where=best > 0)

    return {"skill": estimate(_skill, sums[[0, 1, 2]], clusters, bootstrap),
            "oracle_skill": estimate(_skill, sums[[0, 1, 3]], clusters, bootstrap),
            "relative_skill": estimate(quotient, sums, clusters, bootstrap)}


def _skill(sums: np.ndarray) -> np.ndarray:
    """Return the Brier skill (...) from numbers of cases and events and squared errors (..., 3)."""
    number, events, errors = np.moveaxis(sums, -1, 0)
    constant = events * (1 - events / number)  # squared errors of the constant rate
    return np.divide(constant - errors, constant, out=np.full(np.shape(constant), np.nan),
                     where=constant > 0)


def _perfect_reliabilities(probabilities: np.ndarray, outcomes: np.ndarray, num_worlds: int | None,
                           seed: int) -> np.ndarray:
    """Draw reliabilities (PERFECT_DRAWS,) of a perfect forecaster, see ``calibration``."""
    true = IsotonicRegression(y_min=0, y_max=1).fit_transform(probabilities, outcomes)
    variance = probabilities.var()
    if num_worlds is not None and variance > 0:
        noise = (probabilities * (1 - probabilities)).mean() / (num_worlds - 1)
        signal = max(1 - noise / variance, _LEAST_SIGNAL)  # share of the variance that is not noise
        true = np.clip(outcomes.mean() + (true - outcomes.mean()) / np.sqrt(signal), 0, 1)
    rng = np.random.default_rng(seed)
    reliabilities = []
    for _ in range(PERFECT_DRAWS):
        forecast = true if num_worlds is None else rng.binomial(num_worlds, true) / num_worlds
        reliabilities.append(decompose(forecast, rng.random(len(true)) < true)[0])
    return np.array(reliabilities)


def _colours(frames: np.ndarray) -> np.ndarray:
    """Return the colour number, 5 bits per channel, of each pixel of frames (..., H, W, 3)."""
    red, green, blue = np.moveaxis(frames >> 3, -1, 0).astype(np.int64)
    return red << 10 | green << 5 | blue


def _part(kinds: list[np.ndarray], begin: float, end: float) -> tuple[Tensor, Tensor]:
    """Return frames uint8 (N, C, H, W) and labels (N,), 1 for generated frames, of one part."""
    parts = [frames[int(begin * len(frames)):int(end * len(frames))] for frames in kinds]
    frames = torch.from_numpy(np.concatenate(parts)).permute(0, 3, 1, 2).contiguous()
    return frames, torch.arange(2).repeat_interleave(torch.tensor(list(map(len, parts)))).float()


def _classifier(channels: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in CHANNELS:
        layers += [nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.BatchNorm2d(width),
                   nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(DROPOUT),
                         nn.Linear(channels, 1))


def _scaled(frames: Tensor) -> Tensor:
    return frames.float() / 127.5 - 1


@torch.no_grad()
def _logits(network: nn.Module, frames: Tensor) -> Tensor:
    """Compute the logits (N,) of frames in evaluation mode."""
    network.eval()
    return torch.cat([network(_scaled(part)).squeeze(1) for part in frames.split(256)])
