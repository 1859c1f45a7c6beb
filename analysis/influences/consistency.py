"""Agreement in sign of gradients and cross-correlations, tested against shuffled samples.

An influence of a source (an IC at an earlier step) on a target (an IC, or what the agent answers,
at a later one) is claimed within a behaviour if all of the following hold.

1. *In sample after sample* the gradient has the sign that the pair's own deviations have. With g
   the gradient in a sample, and a and b the deviations of source and target from their medians
   over the behaviour's samples, the agreement is the share of samples in which g has the sign of
   a·b. It is compared with what it is after the sources' states have been shuffled among the
   behaviour's samples, while each sample keeps its gradients and its targets' states.
2. The p-value holds for the largest of all agreements that were looked at (Westfall and Young's
   maximum over all pairs, lags and behaviours, the whole sample among them).
3. The median gradient over the samples has the sign of the cross-correlation.
4. The median gradient moves the target by at least MIN_EFFECT of its standard deviation for one
   standard deviation of the source.

Medians, because gradients explode in a few samples, which would decide the sign and the size of a
mean. The mean, which is published, is reported next to the median.

Why this shuffle. A gradient predicts how source and target vary together from sample to sample.
Shuffling the sources' states breaks only this relation: the gradients, the means of the behaviour,
and the correlations among sources and among targets stay as they are. Other shuffles break the
wrong thing. Shuffling the *gradients* among the samples leaves a gradient that is the same in all
samples unchanged, although that is the plainest cause there is. Shuffling the *labels of
behaviours* leaves an influence that holds in all of them unchanged: it tests whether the behaviour
is special, not whether there is an influence. Shuffling the *pairs* is a fair test of a whole
matrix, for which it is used below, but it cannot give one pair a p-value.

A mere correlation is not claimed: with a common cause the states are correlated, but gradients
that are zero or of unrelated sign agree with them in half of the samples, whatever the shuffle
(1), and a gradient that has always the same sign because of rounding or of a negligible weight is
too small (4). A gradient without a correlation is not claimed either: the products of the states'
deviations then have either sign, and half of the samples agree.

For a whole matrix the statistic is the share of its pairs (an IC and another one) in which the
median gradient has the sign of the cross-correlation. It is compared with its values after the ICs
of one of the matrices have been put in another order and some of their signs turned, rows and
columns alike. Order and sign of ICs are arbitrary, so if gradients were unrelated to correlations,
all of these would be equally likely. ICs are shuffled, not samples, because the entries of a row
share a source, and because shuffling samples would make a few pairs enough for a whole matrix.

Samples count as independent. Those from one recorded episode are not quite, so take samples of
many episodes.

Letters in shape comments: M samples, K lags, I sources (ICs), J targets (ICs, then answers),
R shuffles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from analysis.influences.gradients import Influences, outlier_share
from common.errors import UserError
from common.progress import with_progress

ALL_SAMPLES = "all"  # a group in addition to the behaviours, which have numbers
MEAN, MEDIAN = AVERAGES = "mean", "median"  # over samples; the mean is published
INFIX = {MEAN: "", MEDIAN: "_median"}  # of averages in names of files
LEVEL = 0.05  # of corrected p-values
MIN_EFFECT = 0.1  # standard deviations of the target for one of the source
MIN_SAMPLES = 8  # of a behaviour, for its influences to be tested
_SHUFFLES_AT_A_TIME = 250
_ROUNDING = 1e-5  # of standings; different ones lie further apart

Group = int | str
"""The number of a behaviour, or ALL_SAMPLES."""


def file_stem(group: Group) -> str:
    """Return the name of a group in the names of files."""
    return group if group == ALL_SAMPLES else f"behaviour_{group:02d}"


def mean_products(earlier: np.ndarray, later: np.ndarray, lag: int) -> np.ndarray:
    """Mean products of coordinates at t and others at t + lag, over samples and steps t.

    The coordinates are taken as they are: about their mean in recorded episodes, which is 0 for
    independent components, and not about their mean in these samples.

    Args:
        earlier: (M, T, I).
        later: of the same samples (M, T, J).
        lag: from 0 to T - 1.

    Returns:
        float64 (I, J): rows are coordinates at t, columns those at t + lag.

    Raises:
        UserError: if there is no sample, or none is longer than the lag.
    """
    num_samples, num_steps = earlier.shape[:2]
    if not num_samples:
        raise UserError("there is no sample to take mean products of")
    if not 0 <= lag < num_steps:
        raise UserError(f"samples of {num_steps} steps have no two steps that are {lag} apart")
    first = earlier[:, :num_steps - lag].reshape(-1, earlier.shape[2]).astype(np.float64)
    second = later[:, lag:].reshape(-1, later.shape[2]).astype(np.float64)
    return first.T @ second / len(first)


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Gradients and correlations in one group of samples; arrays are (K, I, J) unless stated
    otherwise. Nothing is NaN: where nothing can be tested the p-values are 1.

    Attributes:
        num_samples: M.
        tested: pairs that are examined, bool; ICs do not influence their own step.
        gradients: means over the samples, in standard deviations of the recorded states.
        medians: medians over the samples, likewise.
        outliers: share of the samples whose gradient is an outlier, see ``outlier_share``.
        outlier_samples: the same for the norm of all gradients of a sample (K,).
        steadiness: share of the samples whose gradient has the sign of the median, 0 where that
            is 0.
        correlations: mean products over all pairs of steps that are so far apart.
        agreement: share of the samples in which the gradient has the sign of the product of the
            deviations from the medians; where one of them is 0 it counts half.
        p: for this pair alone.
        p_corrected: for the largest agreement of all that were looked at.
        effects: standard deviations of the target, within the group, for one of the source, by
            the median gradient.
        explained: median gradient times variance of the source as a share of the covariance at the
            saliency step: near 1 where the direct influence is all there is between the two, near
            0 where something else moves both; 0 where there is no covariance.
        matrix_agreement: share of the pairs of different ICs in which the signs of median gradient
            and cross-correlation agree (K,).
        matrix_p, matrix_p_corrected: the same for it (K,).
    """

    num_samples: int
    tested: np.ndarray
    gradients: np.ndarray
    medians: np.ndarray
    outliers: np.ndarray
    outlier_samples: np.ndarray
    steadiness: np.ndarray
    correlations: np.ndarray
    agreement: np.ndarray
    p: np.ndarray
    p_corrected: np.ndarray
    effects: np.ndarray
    explained: np.ndarray
    matrix_agreement: np.ndarray
    matrix_p: np.ndarray
    matrix_p_corrected: np.ndarray

    @property
    def signs_agree(self) -> np.ndarray:
        """Whether the median gradient has the sign of the cross-correlation."""
        return np.sign(self.medians) * np.sign(self.correlations) > 0

    @property
    def claimed(self) -> np.ndarray:
        """The influences that are claimed, bool (K, I, J): see the module."""
        return (self.tested & self.signs_agree & (self.p_corrected <= LEVEL)
                & (self.effects >= MIN_EFFECT))


def agreements(influences: Influences, groups: Mapping[Group, np.ndarray], num_shuffles: int,
               seed: int) -> dict[Group, Agreement]:
    """Compare gradients with correlations in all samples and in each behaviour.

    Args:
        groups: rows of the samples of each behaviour.

    Raises:
        UserError: if a group is empty.
    """
    rows = {ALL_SAMPLES: np.arange(len(influences.gradients)), **groups}
    for group, chosen in rows.items():
        if not len(chosen):
            raise UserError(f"behaviour {group} has no sample")
    tested = tested_pairs(influences)
    scores = [SampleSigns(influences, chosen) for chosen in rows.values()]
    counts, largest = [], np.full(num_shuffles, -np.inf)
    for score, group in with_progress(zip(scores, rows), len(rows), "behaviour"):
        stream = 0 if group == ALL_SAMPLES else int(group) + 2
        rng = np.random.default_rng([seed, stream])
        as_large, maxima = score.shuffled(num_shuffles, tested, rng)
        counts.append(as_large)
        largest = np.maximum(largest, maxima)

    correlations = [np.stack([mean_products(influences.sources[chosen], influences.targets[chosen],
                                            lag) for lag in influences.lags])
                    for chosen in rows.values()]
    medians = [np.median(influences.gradients[chosen], axis=0).astype(np.float64)
               for chosen in rows.values()]
    between_ics = np.s_[..., :influences.num_ics]
    matrix_results = matrix_agreements(
        np.stack([(median * tested)[between_ics] for median in medians]),
        np.stack([matrix[between_ics] for matrix in correlations]), num_shuffles, seed)

    results = {}
    for i, (group, chosen) in enumerate(rows.items()):
        score = scores[i]
        testable = tested & score.enough
        standing = (largest[:, None] >= score.standing.ravel() - _ROUNDING).sum(axis=0)
        corrected = ((1 + standing) / (1 + num_shuffles)).reshape(tested.shape)
        effects, explained = _effects(influences, chosen, medians[i])
        gradients = influences.gradients[chosen]
        results[group] = Agreement(
            len(chosen), tested, gradients.mean(axis=0, dtype=np.float64), medians[i],
            outlier_share(np.abs(gradients)),
            outlier_share(np.linalg.norm(gradients * tested, axis=(2, 3))),
            (np.sign(gradients) * np.sign(medians[i]) > 0).mean(axis=0), correlations[i],
            (1 + score.balance) / 2,
            np.where(testable, (1 + counts[i]) / (1 + num_shuffles), 1.0),
            np.where(testable, corrected, 1.0), effects, explained,
            *(result[i] for result in matrix_results))
    return results


def tested_pairs(influences: Influences) -> np.ndarray:
    """Return a mask of all pairs at all lags except ICs with ICs of the same step (K, I, J)."""
    shape = influences.gradients.shape[1:]
    tested = np.ones(shape, dtype=bool)
    tested[0, :, :influences.num_ics] = False
    return tested


class SampleSigns:
    """Signs of a group's gradients and deviations.

    Attributes:
        balance: mean over the samples of +1 where they agree and -1 where they do not (K, I, J).
        standing: the same, times the square root of M, so that groups of different sizes can be
            compared: about 1 is its standard deviation by chance.
        enough: whether the group has enough samples to be tested.
    """

    def __init__(self, influences: Influences, rows: np.ndarray):
        step = influences.step
        # Lag k is read at step - k.
        sources = influences.sources[rows][:, step::-1]  # (M, K, I)
        targets = influences.targets[rows, step]  # (M, J)
        self._sources = np.sign(sources - np.median(sources, axis=0)).astype(np.float32)
        targets = np.sign(targets - np.median(targets, axis=0)).astype(np.float32)
        # Factor that turns the sign of a source's deviation into the agreement.
        self._factors = np.sign(influences.gradients[rows]) * targets[:, None, None]  # (M, K, I, J)
        self._num = len(rows)
        self.enough = self._num >= MIN_SAMPLES
        self.balance = np.einsum("mki,mkij->kij", self._sources, self._factors) / self._num
        self.standing = self.balance * np.sqrt(self._num)

    def shuffled(self, num_shuffles: int, tested: np.ndarray,
                 rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Shuffle the samples' sources.

        All sources and lags of a sample move together, so that the maxima keep their dependence.

        Returns:
            How many shuffles give a standing as large as the true one (K, I, J), and the
            largest standing of the tested pairs in each of them (R,).
        """
        as_large = np.zeros(self.standing.shape)
        maxima = np.full(num_shuffles, -np.inf)
        if not self.enough:
            return as_large, maxima
        for begin in range(0, num_shuffles, _SHUFFLES_AT_A_TIME):
            part = slice(begin, min(begin + _SHUFFLES_AT_A_TIME, num_shuffles))
            orders = np.argsort(rng.random((part.stop - begin, self._num)), axis=1)  # (R, M)
            for lag, source in np.ndindex(tested.shape[:2]):
                moved = self._sources[:, lag, source][orders]  # (R, M)
                standings = moved @ self._factors[:, lag, source] / np.sqrt(self._num)  # (R, J)
                true = self.standing[lag, source]
                as_large[lag, source] += (standings >= true - _ROUNDING).sum(axis=0)
                chosen = tested[lag, source]
                if chosen.any():
                    maxima[part] = np.maximum(maxima[part], standings[:, chosen].max(axis=1))
        return as_large, maxima


def matrix_agreements(gradients: np.ndarray, correlations: np.ndarray, num_shuffles: int,
                      seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Agreement of the signs of whole matrices, compared with other orders and signs of the ICs.

    Args:
        gradients, correlations: of groups (G, K, I, I).

    Returns:
        The share of the pairs of different ICs whose signs agree, its p-value, and the one for
        the largest of all groups and lags; (G, K) each. A pair whose gradient is 0 counts half,
        so a lag without gradients has 0.5, 1 and 1.
    """
    num_ics = gradients.shape[-1]
    pairs = ~np.eye(num_ics, dtype=bool)
    signs = np.sign(gradients) * pairs
    others = np.sign(correlations)

    def share(matrices: np.ndarray) -> np.ndarray:
        return 0.5 + np.einsum("gkij,gkij->gk", signs, matrices) / max(pairs.sum(), 1) / 2

    true = share(others)
    rng = np.random.default_rng([seed, 1])
    as_large, larger = np.zeros(true.shape), np.zeros(true.shape)
    for _ in range(num_shuffles):
        order, turn = rng.permutation(num_ics), rng.choice([-1.0, 1.0], num_ics)
        found = share(others[..., order, :][..., order] * turn[:, None] * turn)
        as_large += found >= true - 1e-9
        larger += found.max() >= true - 1e-9
    return true, (1 + as_large) / (1 + num_shuffles), (1 + larger) / (1 + num_shuffles)


def _effects(influences: Influences, rows: np.ndarray,
             medians: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``effects`` and ``explained`` of ``Agreement``."""
    step = influences.step
    sources = influences.sources[rows][:, step::-1].astype(np.float64)  # (M, K, I)
    targets = influences.targets[rows, step].astype(np.float64)  # (M, J)
    sources, targets = sources - sources.mean(axis=0), targets - targets.mean(axis=0)
    deviations, spread = sources.std(axis=0)[:, :, None], targets.std(axis=0)
    effects = np.divide(np.abs(medians) * deviations, spread, out=np.zeros(medians.shape),
                        where=spread > 0)
    covariances = np.einsum("mki,mj->kij", sources, targets) / len(rows)
    explained = np.divide(medians * deviations ** 2, covariances, out=np.zeros(medians.shape),
                          where=covariances != 0)
    return effects, explained
