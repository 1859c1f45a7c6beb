"""Scores of features by the kinds of object that they respond to, using exact masks.

The score of a feature and a kind of object is the area under the ROC curve when the feature's
activation in a cell is used to detect cells that the mask touches, over all cells of all frames.
Many kinds lie in the same part of every frame, and many features are active there regardless of
its content. Cells are therefore weighted: at each position of the grid, a touched cell has as its
weight the share of frames in which the position is not touched, and an untouched cell the share in
which it is touched (overlap weights; Li, Morgan and Zaslavsky 2018). Both classes then have the
same distribution over the grid, and a position that is always, or never, touched has no weight.

The chance level is the same score with the masks of other frames, by a cyclic shift of the frames.

A feature *hallucinates* an object in a cell if its activation there exceeds the 99 % quantile over
all cells of all frames, but the object touches neither the cell nor one of its eight neighbours.
Neighbours are excluded because features are also active next to the objects they respond to.

Letters in shape comments: O frames, H W cells, P = H W positions, F features, K kinds of object, E
episodes, B bins of activations, R resamplings.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from scipy.ndimage import binary_dilation

from attribution.layers import Bottleneck
from common.game_constants import FRAME_SIZE
from stats.bootstrap import ClusterBootstrap

NUM_SHIFTS = 40
# A score needs this many frames and episodes in which the kind touches a cell with a weight.
MIN_FRAMES, MIN_EPISODES = 10, 5
_BINS = 128
STRONG = 0.99  # quantile of activations above which a feature is strongly active
NUM_CANDIDATES = 8  # listed frames per feature, at most one per episode
PER = 1000  # rates are per this many frames


def cells_of(masks: np.ndarray, bottleneck: Bottleneck) -> np.ndarray:
    """Find the cells that masks touch; each pixel belongs to the cell with the nearest centre.

    Args:
        masks: masks of pixels, bool (…, 64, 64).
        bottleneck: the layer.

    Returns:
        Mask of cells, bool (…, H, W).

    Raises:
        UserError: if the layer has no cells.
    """
    place = (np.arange(FRAME_SIZE) - bottleneck.centres()[0]) / bottleneck.layer.stride
    cells = np.clip(np.floor(place + 0.5), 0, bottleneck.shape[1] - 1)
    first = np.searchsorted(cells, np.arange(bottleneck.shape[1]))
    rows = np.logical_or.reduceat(masks, first, axis=-2)
    return np.logical_or.reduceat(rows, first, axis=-1)


@dataclasses.dataclass(frozen=True)
class ObjectScores:
    """Scores of the features of a layer; NaN where a kind is in too few frames, or its cells never
    have a weight.

    Attributes:
        auc: area under the ROC curve (F, K).
        low, high: 95 % interval of ``auc``, by bootstrap over episodes (F, K).
        chance: mean of ``auc`` over shifts of the masks (F, K).
        chance_low, chance_high: 2.5 % and 97.5 % quantiles of ``auc`` over the shifts (F, K).
        frames: number of frames in which a kind touches a cell with a weight (K,).
        score: object score (mean over features of the best ``auc``) with its 95 % interval (3,).
        score_chance: object score with shifted masks, averaged over the shifts.
    """

    auc: np.ndarray
    low: np.ndarray
    high: np.ndarray
    chance: np.ndarray
    chance_low: np.ndarray
    chance_high: np.ndarray
    frames: np.ndarray
    score: np.ndarray
    score_chance: float

    @property
    def best(self) -> np.ndarray:
        """Index of the kind with the best score for each feature; -1 without any score (F,)."""
        known = np.where(np.isnan(self.auc), -1, self.auc)
        return np.where(known.max(axis=1) >= 0, known.argmax(axis=1), -1)

    @property
    def named(self) -> np.ndarray:
        """Whether the interval of each feature's best score lies above chance, bool (F,)."""
        rows, best = np.arange(len(self.auc)), self.best
        return (best >= 0) & (self.low[rows, best] > self.chance_high[rows, best])


def object_scores(activations: np.ndarray, touched: np.ndarray, episodes: np.ndarray,
                  seed: int) -> ObjectScores:
    """Score the features of a layer.

    Args:
        activations: activations of the features, float (O, H, W, F).
        touched: cells that the masks touch, bool (O, H, W, K).
        episodes: episode of each frame (O,).
        seed: seed of the bootstrap over episodes.
    """
    scorer = ObjectScorer(touched, episodes)
    histograms = scorer.histograms(activations)
    bootstrap = ClusterBootstrap(episodes, seed)
    auc, low, high = np.full((3, *histograms.shape[:2]), np.nan)
    for place in np.ndindex(auc.shape):
        if scorer.enough[place[1]]:
            auc[place] = _auc(histograms[place].sum(axis=1))
            low[place], high[place] = bootstrap.interval_of(
                functools.partial(_auc_of_draws, histograms=histograms[place]))
    shifted = scorer.shifted(activations)  # (shifts, F, K)
    chance_low, chance_high = np.quantile(shifted, (0.025, 0.975), axis=0)  # NaN if any value is
    scores = ObjectScores(auc, low, high, shifted.mean(axis=0), chance_low, chance_high,
                          scorer.frames, np.full(3, np.nan), float("nan"))
    best = scores.best
    if (best < 0).any():
        return scores
    chosen = [histograms[place] for place in enumerate(best)]
    return dataclasses.replace(
        scores, score_chance=float(np.nanmax(shifted, axis=2).mean()),
        score=np.array([auc[np.arange(len(best)), best].mean(), *bootstrap.interval_of(
            lambda draws: mean_score(draws, chosen))]))


def score_difference(activations: np.ndarray, others: np.ndarray, touched: np.ndarray,
                     episodes: np.ndarray, seed: int) -> np.ndarray:
    """Compare the object score of features with that of other features in the same frames.

    Args:
        activations: activations of the features, float (O, H, W, F).
        others: activations of the other features, float (O, H, W, any number).
        touched: cells that the masks touch, bool (O, H, W, K).
        episodes: episode of each frame (O,).
        seed: seed of the bootstrap over episodes; both scores use the same resamplings.

    Returns:
        Difference of the object scores with its 95 % interval (3,); NaN if a feature has no score.
    """
    scorer = ObjectScorer(touched, episodes)
    both = [scorer.best_histograms(each) for each in (activations, others)]
    if not all(both):
        return np.full(3, np.nan)

    def difference(draws: np.ndarray) -> np.ndarray:
        return mean_score(draws, both[0]) - mean_score(draws, both[1])

    return np.append(difference(np.ones((1, len(np.unique(episodes))))),
                     ClusterBootstrap(episodes, seed).interval_of(difference))


def mean_score(draws: np.ndarray, histograms: list[np.ndarray]) -> np.ndarray:
    """Compute the mean area under the ROC curve over features in each resampling.

    Args:
        draws: number of times that each episode was drawn (R, E).
        histograms: histograms (2, E, B) of each feature and its kind, from :class:`ObjectScorer`.

    Returns:
        Means, float (R,).
    """
    return np.mean([_auc_of_draws(draws, each) for each in histograms], axis=0)


class ObjectScorer:
    """Weighted histograms of activations in touched and in untouched cells.

    Args:
        touched: cells that the masks touch, bool (O, H, W, K).
        episodes: episode of each frame (O,).

    Attributes:
        frames: number of frames in which a kind touches a cell with a weight (K,).
        enough: whether there are enough such frames and episodes for a score, bool (K,).
    """

    def __init__(self, touched: np.ndarray, episodes: np.ndarray):
        number = len(touched)
        self._touched = touched.reshape(number, -1, touched.shape[-1])  # (O, P, K)
        self._episode = np.unique(episodes, return_inverse=True)[1]
        share = self._touched.mean(axis=0)  # (P, K)
        self._weights = 1 - share, share  # weights of touched and of other cells
        counted = (self._touched & (share < 1)).any(axis=1)  # (O, K)
        self.frames = counted.sum(axis=0)
        in_episodes = np.array([len(np.unique(self._episode[each])) for each in counted.T])
        self.enough = (self.frames >= MIN_FRAMES) & (in_episodes >= MIN_EPISODES)

    def histograms(self, activations: np.ndarray) -> np.ndarray:
        """Compute histograms of activations (O, H, W, F) by episode, in touched and in other cells:
        float32 (F, K, 2, E, B)."""
        codes = self._codes(activations)
        num_episodes, kinds = self._episode.max() + 1, self._touched.shape[-1]
        histograms = np.zeros((len(codes), kinds, 2, num_episodes, _BINS), np.float32)
        for kind, which in np.ndindex(kinds, 2):
            frames, places = np.nonzero(self._touched[..., kind] == (which == 0))
            weights = self._weights[which][places, kind]
            begins = self._episode[frames] * _BINS
            for feature, code in enumerate(codes):
                histograms[feature, kind, which] = np.bincount(
                    begins + code[frames, places], weights, num_episodes * _BINS
                    ).reshape(num_episodes, _BINS)
        return histograms

    def best_histograms(self, activations: np.ndarray) -> list[np.ndarray]:
        """Compute the histograms (2, E, B) of each feature and the kind with its best score; return
        an empty list if a feature has no score."""
        best = []
        for by_kind in self.histograms(activations):
            scores = np.where(self.enough, [_auc(each.sum(axis=1)) for each in by_kind], np.nan)
            if np.isnan(scores).all():
                return []
            best.append(by_kind[np.nanargmax(scores)])
        return best

    def shifted(self, activations: np.ndarray) -> np.ndarray:
        """Compute areas under the ROC curve with the masks of other frames (shifts, F, K)."""
        codes = self._codes(activations)
        number = len(self._touched)
        shifts = np.unique(np.linspace(0, number, NUM_SHIFTS + 2)[1:-1].astype(int))
        areas = np.full((len(shifts), len(codes), self._touched.shape[-1]), np.nan)
        for kind in np.flatnonzero(self.enough):
            inside, outside = (weight[:, kind] for weight in self._weights)
            frames, places = np.nonzero(self._touched[..., kind])
            for feature, code in enumerate(codes):
                everywhere = np.bincount(code.ravel(), np.tile(outside, number), _BINS)
                for row, shift in enumerate(shifts):
                    bins = code[(frames + shift) % number, places]
                    others = everywhere - np.bincount(bins, outside[places], _BINS)
                    areas[row, feature, kind] = _auc(np.stack(
                        [np.bincount(bins, inside[places], _BINS), np.maximum(others, 0)]))
        return areas

    def _codes(self, activations: np.ndarray) -> np.ndarray:
        """Assign each activation to a bin, int (F, O, P); equal activations share a bin."""
        values = activations.reshape(*self._touched.shape[:2], -1)
        return np.stack([_binned(values[..., feature]) for feature in range(values.shape[-1])])


def _binned(values: np.ndarray) -> np.ndarray:
    """Assign each value to a bin; positive values are spread evenly over the bins."""
    positive = values[values > 0]
    if not len(positive):
        return np.zeros(values.shape, np.int64)
    edges = np.unique(positive)
    if len(edges) >= _BINS:
        edges = np.unique(np.quantile(positive, np.linspace(0, 1, _BINS)[:-1], method="lower"))
    return np.searchsorted(edges, values, side="right")


def _auc(histograms: np.ndarray) -> np.ndarray:
    """Compute areas under the ROC curve (…) from histograms of touched and of other cells
    (2, …, B)."""
    inside, outside = histograms
    below = outside.cumsum(axis=-1) - outside / 2
    total = inside.sum(axis=-1) * outside.sum(axis=-1)
    return np.divide((inside * below).sum(axis=-1), total, out=np.full(total.shape, np.nan),
                     where=total > 0)


def _auc_of_draws(draws: np.ndarray, histograms: np.ndarray) -> np.ndarray:
    """Compute areas under the ROC curve in resamplings (R,) of histograms by episode (2, E, B)."""
    return _auc(np.stack([draws @ each for each in histograms]))


@dataclasses.dataclass(frozen=True)
class Hallucinations:
    """Frames in which a feature is strongly active away from its object.

    Attributes:
        threshold: activation exceeded in 1 % of all cells.
        rate: number of hallucinations per 1 000 frames.
        low, high: 95 % interval of the rate, by bootstrap over episodes.
        frames: indices of the n frames with the strongest activations, at most one per episode,
            strongest first (n,).
        cells: row and column of the most active cell in each of these frames (n, 2).
        strengths: activations in these cells (n,).
    """

    threshold: float
    rate: float
    low: float
    high: float
    frames: np.ndarray
    cells: np.ndarray
    strengths: np.ndarray


def hallucinations(activations: np.ndarray, touched: np.ndarray, episodes: np.ndarray,
                   seed: int) -> Hallucinations:
    """Find frames in which a feature is strongly active away from its object.

    Args:
        activations: activations of the feature, float (O, H, W).
        touched: cells that the masks of its object touch, bool (O, H, W).
        episodes: episode of each frame (O,).
        seed: seed of the bootstrap over episodes.
    """
    threshold = np.quantile(activations, STRONG, method="higher")
    near = binary_dilation(touched, np.ones((1, 3, 3), bool))
    elsewhere = np.where(near, -np.inf, activations).reshape(len(activations), -1)  # (O, H W)
    place, strength = elsewhere.argmax(axis=1), elsewhere.max(axis=1)
    counted = strength > threshold
    low, high = ClusterBootstrap(episodes, seed).interval(
        counted[None].astype(float))[:, 0]
    order = np.argsort(-strength, kind="stable")
    order = order[counted[order]]
    _, first = np.unique(episodes[order], return_index=True)
    frames = order[np.sort(first)][:NUM_CANDIDATES]
    cells = np.stack(np.unravel_index(place[frames], activations.shape[1:]), axis=1)
    return Hallucinations(float(threshold), PER * counted.mean(), PER * low, PER * high, frames,
                          cells, strength[frames])
