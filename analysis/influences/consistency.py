"""Sign agreement of gradients and cross-correlations, tested against shuffled samples.

An influence of a source (an IC at an earlier step) on a target (an IC or an output of the agent at
a later step) is claimed within a behaviour if all of the following hold.

1. The sign of the gradient agrees with the signs of the deviations *within individual samples*.
   With g the gradient in a sample, and a and b the deviations of source and target from their
   medians over the behaviour's samples, the agreement is the share of samples in which g has the
   sign of a·b. A sample in which a factor is 0 counts half. The null distribution is obtained by
   shuffling the sources' states among the behaviour's samples, while each sample keeps its
   gradients and its targets' states.
2. The p-value of this agreement is at most LEVEL, after correction by the maximum statistic of
   Westfall and Young over all pairs, lags and groups (the behaviours, and all samples together).
3. The median gradient over the samples has the sign of the cross-correlation.
4. For one standard deviation of the source, the median gradient moves the target by at least
   MIN_EFFECT of the target's standard deviation.

Medians are used because gradients explode in a few samples, which would dominate the sign and the
size of a mean. The mean, which is published, is reported next to the median.

Why this shuffle? A gradient predicts how source and target covary across samples. Shuffling the
sources' states breaks only this relation: the gradients, the means of the behaviour, and the
correlations among sources and among targets stay the same. Other shuffles test other hypotheses.
Shuffling the *gradients* among the samples does not change a gradient that is equal in all samples,
although such a gradient is the clearest evidence of an influence. Shuffling the *behaviour labels*
does not change an influence that holds in all behaviours: it tests whether the behaviour is
special, not whether there is an influence. Permuting the *ICs* is a valid test of a whole matrix
(see below), but cannot give a p-value for one pair.

A mere correlation is not claimed. If source and target are correlated through a common cause,
gradients that are zero or of unrelated sign agree with the deviations in half of the samples, with
or without the shuffle (condition 1). A gradient that always has the same sign because of rounding
or a negligible weight is too small (condition 4). A gradient without a correlation is not claimed
either: the products of the deviations then have random signs, and half of the samples agree.

For a whole matrix, the statistic is the share of pairs of different ICs in which the median
gradient has the sign of the cross-correlation. The null distribution is obtained by permuting the
ICs of one matrix and flipping some of their signs, in rows and columns alike. Order and sign of ICs
are arbitrary, so if gradients were unrelated to correlations, all these arrangements would be
equally likely. Whole ICs are permuted rather than single entries, because the entries of a row
share a source. Samples are not shuffled, because then a few pairs would suffice to make a whole
matrix significant.

Samples are treated as independent. Samples from the same recorded episode are not entirely
independent, so use samples from many episodes.

Letters in shape comments: K lags; I sources (ICs); J targets (ICs, then outputs); R shuffles; G
groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from analysis.influences.gradients import Influences, outlier_share
from common.progress import with_progress

ALL_SAMPLES = "all"  # group of all samples; the other groups are numbered behaviours
MEAN, MEDIAN = AVERAGES = "mean", "median"  # averages over samples; the mean is published
LEVEL = 0.05  # significance level of corrected p-values
MIN_EFFECT = 0.1  # standard deviations of the target per standard deviation of the source
MIN_SAMPLES = 8  # smallest number of samples for a behaviour's influences to be tested
_SHUFFLES_AT_A_TIME = 250
_ROUNDING = 1e-5  # tolerance when comparing values of `standing`; distinct values differ by more

Group = int | str
"""The number of a behaviour, or ALL_SAMPLES."""


def file_stem(group: Group) -> str:
    """Return the part of file names of figures and pages that stands for a group: ``all``, or
    ``behaviour_03`` for behaviour 3."""
    return group if group == ALL_SAMPLES else f"behaviour_{group:02d}"


def mean_products(earlier: np.ndarray, later: np.ndarray, lag: int) -> np.ndarray:
    """Compute mean products of coordinates at steps t and t + lag, over samples and steps t.

    The products are not covariances: the mean over these samples and steps is not subtracted. The
    coordinates of ICs are relative to the mean of the recorded states.

    Args:
        earlier: coordinates to take at step t (M, T, I).
        later: coordinates of the same samples to take at step t + lag (M, T, J).
        lag: lag in steps, from 0 to T - 1.

    Returns:
        Mean products, float64 (I, J): rows are coordinates at t, columns coordinates at t + lag.
    """
    first = earlier[:, :earlier.shape[1] - lag].reshape(-1, earlier.shape[2]).astype(np.float64)
    second = later[:, lag:].reshape(-1, later.shape[2]).astype(np.float64)
    return first.T @ second / len(first)


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Gradients and correlations in one group of samples.

    Arrays are (K, I, J) unless stated otherwise. No value is NaN: p-values are 1 where no test is
    possible.

    Attributes:
        num_samples: number of samples, M.
        tested: pairs that are tested if the group has at least MIN_SAMPLES samples, bool: all pairs
            except those of two ICs at lag 0, because ICs do not influence ICs of the same step.
        gradients: mean gradients over the samples, in the unit of ``Influences.gradients``.
        medians: median gradients over the samples, in the same unit.
        outliers: share of the samples whose gradient is an outlier, see ``outlier_share``.
        outlier_samples: share of the samples in which the norm of the gradients of all tested pairs
            at the lag is an outlier (K,).
        steadiness: share of the samples whose gradient has the sign of the median gradient; 0 where
            the median is 0.
        correlations: mean products over all pairs of steps at this lag, see ``mean_products``.
        agreement: share of the samples in which the gradient has the sign of the product of the
            deviations from the medians; a sample in which the gradient or a deviation is 0 counts
            half.
        p: uncorrected p-value of the agreement of the pair.
        p_corrected: p-value corrected for all pairs, lags and groups (maximum statistic).
        effects: absolute median gradient, in standard deviations of the target within the group per
            standard deviation of the source within the group; 0 where the target is constant.
        explained: median gradient times variance of the source, as a share of the covariance of the
            source at the earlier step and the target at the saliency step. It is near 1 if the
            direct influence explains the covariance, near 0 if the covariance has other causes, and
            0 where there is no covariance.
        matrix_agreement: share of the pairs of different ICs in which the signs of median gradient
            and cross-correlation agree (K,); a pair in which one of them is 0 counts half.
        matrix_p, matrix_p_corrected: p-value of ``matrix_agreement`` at one lag, and corrected for
            all groups and lags (K,).
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
        """Whether the median gradient has the sign of the cross-correlation, bool (K, I, J)."""
        return np.sign(self.medians) * np.sign(self.correlations) > 0

    @property
    def claimed(self) -> np.ndarray:
        """Whether the influence is claimed, bool (K, I, J); see the module docstring."""
        return (self.tested & self.signs_agree & (self.p_corrected <= LEVEL)
                & (self.effects >= MIN_EFFECT))


def agreements(influences: Influences, groups: Mapping[Group, np.ndarray], num_shuffles: int,
               seed: int) -> dict[Group, Agreement]:
    """Compare gradients with correlations in all samples and in each behaviour.

    Args:
        influences: gradients and coordinates of all samples.
        groups: row indices of each behaviour's samples, by behaviour number.
        num_shuffles: number of shuffles of the samples, R, and of permutations of the ICs.

    Returns:
        Results by group, ALL_SAMPLES first.
    """
    rows = {ALL_SAMPLES: np.arange(len(influences.gradients)), **groups}
    tested = np.ones(influences.gradients.shape[1:], dtype=bool)  # (K, I, J)
    tested[0, :, :influences.num_ics] = False
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


class SampleSigns:
    """Signs of the gradients and deviations in a group.

    Args:
        influences: gradients and coordinates of all samples.
        rows: row indices of the group's samples (M,).

    Attributes:
        balance: mean over the samples of +1 if the sign of the gradient agrees with the product of
            the signs of the deviations, -1 if it disagrees, and 0 if one of them is 0 (K, I, J).
        standing: ``balance`` times sqrt(M), which makes groups of different sizes comparable: its
            standard deviation under the null hypothesis is about 1 (K, I, J).
        enough: whether the group has enough samples for a test.
    """

    def __init__(self, influences: Influences, rows: np.ndarray):
        step = influences.step
        # The source of lag k is its coordinate at step - k.
        sources = influences.sources[rows][:, step::-1]  # (M, K, I)
        targets = influences.targets[rows, step]  # (M, J)
        self._sources = np.sign(sources - np.median(sources, axis=0)).astype(np.float32)
        targets = np.sign(targets - np.median(targets, axis=0)).astype(np.float32)
        # Product of the signs of gradient and target deviation; times the sign of the source
        # deviation, it is +1 if the signs agree.
        self._factors = np.sign(influences.gradients[rows]) * targets[:, None, None]  # (M, K, I, J)
        self._num = len(rows)
        self.enough = self._num >= MIN_SAMPLES
        self.balance = np.einsum("mki,mkij->kij", self._sources, self._factors) / self._num
        self.standing = self.balance * np.sqrt(self._num)

    def shuffled(self, num_shuffles: int, tested: np.ndarray,
                 rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Compute the null distribution by shuffling the sources among the samples.

        All sources and lags of a sample are moved together, which preserves their dependence in
        the maxima.

        Args:
            num_shuffles: number of shuffles, R.
            tested: mask of the tested pairs, bool (K, I, J).

        Returns:
            Number of shuffles whose ``standing`` is at least as large as that of the unshuffled
            samples (K, I, J), and the largest ``standing`` over the tested pairs in each shuffle
            (R,). Zeros and -infinity if the group has too few samples for a test.
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
    """Test the sign agreement of whole matrices against permutations and sign flips of the ICs.

    Args:
        gradients, correlations: median gradients and mean products of each group (G, K, I, I).
        num_shuffles: number of permutations.

    Returns:
        Share of the pairs of different ICs in which the signs of gradient and correlation agree,
        its p-value, and the p-value corrected for all groups and lags; (G, K) each. A pair in which
        one of them is 0 counts half, so the results are 0.5, 1 and 1 at a lag where all gradients
        are 0.
    """
    num_ics = gradients.shape[-1]
    pairs = ~np.eye(num_ics, dtype=bool)
    signs = np.sign(gradients) * pairs
    correlation_signs = np.sign(correlations)

    def share(matrices: np.ndarray) -> np.ndarray:
        return 0.5 + np.einsum("gkij,gkij->gk", signs, matrices) / max(pairs.sum(), 1) / 2

    true = share(correlation_signs)
    rng = np.random.default_rng([seed, 1])
    as_large, larger = np.zeros(true.shape), np.zeros(true.shape)
    for _ in range(num_shuffles):
        order, flips = rng.permutation(num_ics), rng.choice([-1.0, 1.0], num_ics)
        permuted = correlation_signs[..., order, :][..., order] * flips[:, None] * flips
        shares = share(permuted)
        as_large += shares >= true - 1e-9
        larger += shares.max() >= true - 1e-9
    return true, (1 + as_large) / (1 + num_shuffles), (1 + larger) / (1 + num_shuffles)


def _effects(influences: Influences, rows: np.ndarray,
             medians: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute ``effects`` and ``explained`` of ``Agreement``, (K, I, J) each."""
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
