"""Which kind of object each feature goes with, by exact masks.

For a feature and a kind of object: the area under the ROC of the feature's activation in a cell
against "the mask touches the cell", over all cells of all frames. Many kinds lie in the same part
of every picture, and many features are active there whatever it shows; so cells are weighted: at
each place of the grid, a cell that is touched counts as the share of frames in which the place is
not, and one that is not touched as the share in which it is (overlap weights; Li, Morgan and
Zaslavsky 2018). Both classes are then spread over the grid in the same way, and a place that is
always, or never, touched says nothing.

Chance is the same with the masks of other frames: the masks are shifted along the frames in a
circle.

Letters in shape comments: O frames, H W cells, P = H W places, F features, K kinds of object, E
episodes, B bins of activations, R resamplings.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from attribution.layers import Bottleneck
from common.game_constants import FRAME_SIZE
from stats.bootstrap import ClusterBootstrap

NUM_SHIFTS = 40
# In which a kind touches a cell that it does not touch in others, for a score.
MIN_FRAMES, MIN_EPISODES = 10, 5
_BINS = 128


def cells_of(masks: np.ndarray, bottleneck: Bottleneck) -> np.ndarray:
    """The cells that masks touch: each pixel belongs to the cell on whose centre it is nearest.

    Args:
        masks: bool (…, 64, 64).

    Returns:
        bool (…, H, W).

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
    """Scores of the features of a layer; NaN where a kind is in too few frames or
    cannot be told from its place.

    Attributes:
        auc: area under the ROC (F, K).
        low, high: its 95 % interval, by bootstrap over episodes (F, K).
        chance: mean with shifted masks (F, K).
        chance_low, chance_high: the interval that 95 % of the shifts lie in (F, K).
        frames: in which a kind touches a cell that counts (K,).
        score: mean over features of each one's best score, and its 95 % interval (3,).
        score_chance: mean over features and shifts of the best score with shifted masks.
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
        """The kind with the best score of each feature; -1 where no kind has any (F,)."""
        known = np.where(np.isnan(self.auc), -1, self.auc)
        return np.where(known.max(axis=1) >= 0, known.argmax(axis=1), -1)

    @property
    def named(self) -> np.ndarray:
        """Whether the best kind's interval lies above chance, bool (F,)."""
        rows, best = np.arange(len(self.auc)), self.best
        return (best >= 0) & (self.low[rows, best] > self.chance_high[rows, best])


def object_scores(activations: np.ndarray, touched: np.ndarray, episodes: np.ndarray,
                  seed: int) -> ObjectScores:
    """Score the features of a layer.

    Args:
        activations: of the features, float (O, H, W, F).
        touched: by the masks, bool (O, H, W, K).
        episodes: of each frame (O,).
        seed: of the bootstrap.
    """
    scorer = ObjectScorer(touched, episodes)
    histograms = scorer.histograms(activations)
    bootstrap = ClusterBootstrap(episodes, seed)
    auc, *ends = np.full((3, *histograms.shape[:2]), np.nan)
    for place in np.ndindex(auc.shape):
        if scorer.enough[place[1]]:
            auc[place] = _auc(histograms[place].sum(axis=1))
            ends[0][place], ends[1][place] = bootstrap.interval_of(
                lambda draws, place=place: _auc_of_draws(draws, histograms[place]))
    shifted = scorer.shifted(activations)  # (shifts, F, K)
    low, high = np.quantile(shifted, (0.025, 0.975), axis=0)  # NaN where any is
    found = ObjectScores(auc, *ends, shifted.mean(axis=0), low, high, scorer.frames,
                         np.full(3, np.nan), float("nan"))
    best = found.best
    if (best < 0).any():
        return found
    chosen = [histograms[place] for place in enumerate(best)]
    return dataclasses.replace(
        found, score_chance=float(np.nanmax(shifted, axis=2).mean()),
        score=np.array([auc[np.arange(len(best)), best].mean(), *bootstrap.interval_of(
            lambda draws: mean_score(draws, chosen))]))


def score_difference(activations: np.ndarray, others: np.ndarray, touched: np.ndarray,
                     episodes: np.ndarray, seed: int) -> np.ndarray:
    """Mean over features of the best score, minus that of other features in the same frames, with
    its 95 % interval (3,); NaN where a feature has no score.

    Args:
        activations: of the features, float (O, H, W, F).
        others: of the other features, as many or not, likewise.
        touched: by the masks, bool (O, H, W, K).
        episodes: of each frame (O,).
        seed: of the bootstrap over episodes, whose draws both share.
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
    """Mean over features of the area under the ROC in resamplings.

    Args:
        draws: how often each episode was drawn (R, E).
        histograms: of each feature and its kind, from :class:`ObjectScorer`.

    Returns:
        (R,).
    """
    return np.mean([_auc_of_draws(draws, each) for each in histograms], axis=0)


class ObjectScorer:
    """Weighted histograms of activations in cells that masks touch, and in those that they do not.

    Args:
        touched: bool (O, H, W, K).
        episodes: of each frame (O,).

    Attributes:
        frames: in which a kind touches a cell that counts (K,).
        enough: whether there are enough of them, in enough episodes, bool (K,).
    """

    def __init__(self, touched: np.ndarray, episodes: np.ndarray):
        number = len(touched)
        self._touched = touched.reshape(number, -1, touched.shape[-1])  # (O, P, K)
        self._episode = np.unique(episodes, return_inverse=True)[1]
        share = self._touched.mean(axis=0)  # (P, K)
        self._weights = 1 - share, share  # of touched and of other cells
        counted = (self._touched & (share < 1)).any(axis=1)  # (O, K)
        self.frames = counted.sum(axis=0)
        in_episodes = np.array([len(np.unique(self._episode[each])) for each in counted.T])
        self.enough = (self.frames >= MIN_FRAMES) & (in_episodes >= MIN_EPISODES)

    def histograms(self, activations: np.ndarray) -> np.ndarray:
        """By episode, float32 (F, K, 2, E, B): of cells that are touched, and of others."""
        codes = self._codes(activations)
        num_episodes, kinds = self._episode.max() + 1, self._touched.shape[-1]
        found = np.zeros((len(codes), kinds, 2, num_episodes, _BINS), np.float32)
        for kind, which in np.ndindex(kinds, 2):
            frames, places = np.nonzero(self._touched[..., kind] == (which == 0))
            weights = self._weights[which][places, kind]
            begins = self._episode[frames] * _BINS
            for feature, code in enumerate(codes):
                found[feature, kind, which] = np.bincount(
                    begins + code[frames, places], weights, num_episodes * _BINS
                    ).reshape(num_episodes, _BINS)
        return found

    def best_histograms(self, activations: np.ndarray) -> list[np.ndarray]:
        """The histograms of each feature with the kind that it has the best score with, as of
        ``histograms``; none if a feature has none."""
        found = []
        for by_kind in self.histograms(activations):
            scores = np.where(self.enough, [_auc(each.sum(axis=1)) for each in by_kind], np.nan)
            if np.isnan(scores).all():
                return []
            found.append(by_kind[np.nanargmax(scores)])
        return found

    def shifted(self, activations: np.ndarray) -> np.ndarray:
        """Areas under the ROC with the masks of other frames (shifts, F, K)."""
        codes = self._codes(activations)
        number = len(self._touched)
        shifts = np.unique(np.linspace(0, number, NUM_SHIFTS + 2)[1:-1].astype(int))
        found = np.full((len(shifts), len(codes), self._touched.shape[-1]), np.nan)
        for kind in np.flatnonzero(self.enough):
            inside, outside = (weight[:, kind] for weight in self._weights)
            frames, places = np.nonzero(self._touched[..., kind])
            for feature, code in enumerate(codes):
                everywhere = np.bincount(code.ravel(), np.tile(outside, number), _BINS)
                for row, shift in enumerate(shifts):
                    bins = code[(frames + shift) % number, places]
                    others = everywhere - np.bincount(bins, outside[places], _BINS)
                    found[row, feature, kind] = _auc(np.stack(
                        [np.bincount(bins, inside[places], _BINS), np.maximum(others, 0)]))
        return found

    def _codes(self, activations: np.ndarray) -> np.ndarray:
        """The bin of each activation, int (F, O, P); equal ones share a bin, and zeros one."""
        values = activations.reshape(*self._touched.shape[:2], -1)
        return np.stack([_binned(values[..., feature]) for feature in range(values.shape[-1])])


def _binned(values: np.ndarray) -> np.ndarray:
    """Bins of about equal numbers of values that are not zero."""
    positive = values[values > 0]
    if not len(positive):
        return np.zeros(values.shape, np.int64)
    edges = np.unique(positive)
    if len(edges) >= _BINS:
        edges = np.unique(np.quantile(positive, np.linspace(0, 1, _BINS)[:-1], method="lower"))
    return np.searchsorted(edges, values, side="right")


def _auc(histograms: np.ndarray) -> np.ndarray:
    """Area under the ROC of weights (2, …, B) of cells that are touched, and of others: (…)."""
    inside, outside = histograms
    below = outside.cumsum(axis=-1) - outside / 2
    total = inside.sum(axis=-1) * outside.sum(axis=-1)
    return np.divide((inside * below).sum(axis=-1), total, out=np.full(total.shape, np.nan),
                     where=total > 0)


def _auc_of_draws(draws: np.ndarray, histograms: np.ndarray) -> np.ndarray:
    """Areas under the ROC in resamplings (R,) from histograms by episode (2, E, B)."""
    return _auc(np.stack([draws @ each for each in histograms]))
