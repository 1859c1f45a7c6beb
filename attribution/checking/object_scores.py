"""Scores of features as detectors of objects, computed with exact masks of the objects, and the
files of ``analysis/attribution/objects/``.

::

    settings.json               settings; kinds: names of the K kinds of object
    masks.npz                   observations int32 (O, 2), episode and row of each frame; masks
                                uint8 (O, K, 512), the bits of 64 x 64 pixels, see ``packed``
    <layer>/scores.csv          one row per feature (counted from 0) and kind of object
    <layer>/hallucinations.csv  frames in which a named feature is strongly active away from its
                                object
    <layer>/names.json          names and scores of the features, see below; written last
    <layer>/compared.json       optional comparison with other features of the same layer: the
                                checksums ``features_sha256`` and ``other_features_sha256``, and
                                ``difference``, object score minus object score of the other
                                features in the same frames, with ``low_95`` and ``high_95``

``names.json`` holds the following entries; ``features`` has an entry for each feature::

    layer, features_sha256      path of the layer; checksum of the features, as in the settings of
                                attributions
    score                       object score: mean score over the features, with score_low_95 and
                                score_high_95; null if a feature has no score
    score_chance                object score with the masks of other frames; null if ``score`` is
    features                    list of one dictionary per feature, with these keys:
        name                    kind of object that the feature is named after; null unless low_95
                                of the best score exceeds chance_high
        kind, score             kind of object with the best score, and this score, with low_95,
                                high_95 and chance_high; all null if no kind has a score
        hallucinations          frames per 1 000 in which the feature is strongly active away from
                                its object, with hallucinations_low_95 and hallucinations_high_95;
                                null without a name

The score of a feature for a kind of object is the area under the ROC curve with which the feature's
activation in a cell predicts whether the object's mask touches the cell, over all cells of all
frames. Many kinds of object lie in the same part of every frame, and many features are active there
whatever the frame shows. To prevent high scores for such features, cells are weighted. The weight
of a touched cell is the share of frames in which its position on the grid is not touched. The
weight of an untouched cell is the share of frames in which its position is touched (overlap
weights; Li, Morgan and Zaslavsky 2018). Both classes then have the same distribution over the grid,
and a position that is always, or never, touched has weight 0.

The chance level is the same score with the masks of other frames, obtained by shifting the masks
cyclically along the frames.

A feature *hallucinates* an object in a cell if its activation there exceeds the 99 % quantile over
all cells of all frames, but the object touches neither the cell nor one of its eight neighbours.
Neighbours are excluded because features are also active next to the objects they respond to.

Letters in shape comments: O frames, H W cells, P = H W positions, F features, K kinds of object, E
episodes, B bins of activations, R resamplings.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from scipy.ndimage import binary_dilation

from agents.object_masks import ObjectPainter, ObjectPictures
from agents.replay import level_states, recorded_game
from agents.rollout_files import RolloutFolder
from attribution.layers import Bottleneck
from common.config import check_entries
from common.errors import UserError
from common.game_constants import FRAME_SIZE
from common.progress import Progress
from common.results import Array, Entry, Json, Npz, ResultStore, Schema, Table
from common.tables import finite_or_none
from envs.level_state import LevelState
from envs.objects import GAME_OBJECTS_FILE, GameObject, objects_of
from envs.procgen_env import EnvConfig
from stats.association import auc_of_histograms
from stats.bootstrap import ClusterBootstrap

NUM_SHIFTS = 40  # maximum number of cyclic shifts of the masks for the chance level
# A score needs this many frames and episodes in which the kind touches a cell with weight above 0.
MIN_FRAMES, MIN_EPISODES = 10, 5
_BINS = 128  # bins of activations
STRONG = 0.99  # quantile of activations above which a feature is strongly active
NUM_CANDIDATES = 8  # listed frames per feature, at most one per episode
PER = 1000  # rates are per this many frames


def cells_of(masks: np.ndarray, bottleneck: Bottleneck) -> np.ndarray:
    """Find the cells that masks touch. Each pixel belongs to the cell with the nearest centre.

    Args:
        masks: masks of pixels, bool (…, 64, 64).
        bottleneck: the layer.

    Returns:
        Masks of cells, bool (…, H, W).
    """
    stride, first_pixel = bottleneck.layer.stride or FRAME_SIZE, bottleneck.layer.first_pixel or 0
    place = (np.arange(FRAME_SIZE) - first_pixel) / stride
    cells = np.clip(np.floor(place + 0.5), 0, bottleneck.shape[1] - 1)
    first = np.searchsorted(cells, np.arange(bottleneck.shape[1]))
    rows = np.logical_or.reduceat(masks, first, axis=-2)
    return np.logical_or.reduceat(rows, first, axis=-1)


def object_scores(activations: np.ndarray, touched: np.ndarray, kinds: Sequence[str],
                  episodes: np.ndarray, seed: int) -> tuple[pd.DataFrame, np.ndarray]:
    """Score the features of a layer as detectors of objects; see the module docstring.

    Args:
        activations: activations of the features, float (O, H, W, F).
        touched: cells that the masks touch, bool (O, H, W, K).
        kinds: names of the kinds of object (K,).
        episodes: episode of each frame (O,).
        seed: seed of the bootstrap over episodes.

    Returns:
        A pair. The first element is a table with one row per feature and kind; scores are NaN where
        there are too few frames or episodes:

        - ``feature``, ``kind``: number of the feature, and kind of object
        - ``auc``, ``low_95``, ``high_95``: area under the ROC curve, with its interval by bootstrap
          over episodes
        - ``chance``, ``chance_low``, ``chance_high``: mean, 2.5 % and 97.5 % quantile of ``auc``
          over shifts of the masks
        - ``frames``: number of frames in which the kind touches a cell with weight above 0

        The second element (4,) holds the object score (mean over features of the best ``auc``), its
        95 % interval, and its mean over shifts of the masks; all are NaN if a feature has no score.
    """
    scorer = ObjectScorer(touched, episodes)
    auc, histograms = scorer.areas(activations)
    bootstrap = ClusterBootstrap(episodes, seed)
    low, high = np.full((2, *auc.shape), np.nan)
    for place in zip(*np.nonzero(np.isfinite(auc))):
        low[place], high[place] = bootstrap.interval_of(
            functools.partial(_auc_of_draws, histograms=histograms[place]))
    shifted = scorer.shifted(activations)  # (shifts, F, K)
    chance_low, chance_high = np.quantile(shifted, (0.025, 0.975), axis=0)  # NaN if any score is
    table = pd.DataFrame({
        "feature": np.repeat(np.arange(len(auc)), len(kinds)), "kind": np.tile(kinds, len(auc)),
        "auc": auc.ravel(), "low_95": low.ravel(), "high_95": high.ravel(),
        "chance": shifted.mean(axis=0).ravel(), "chance_low": chance_low.ravel(),
        "chance_high": chance_high.ravel(), "frames": np.tile(scorer.frames, len(auc))})
    chosen = best_histograms(auc, histograms)
    if chosen is None:
        return table, np.full(4, np.nan)
    interval = bootstrap.interval_of(lambda draws: mean_score(draws, chosen))
    return table, np.array([auc[np.arange(len(auc)), np.nanargmax(auc, axis=1)].mean(), *interval,
                            np.nanmax(shifted, axis=2).mean()])


def score_difference(activations: np.ndarray, others: np.ndarray, touched: np.ndarray,
                     episodes: np.ndarray, seed: int) -> np.ndarray:
    """Compare the object score of features with that of other features in the same frames.

    Args:
        activations: activations of the features, float (O, H, W, F).
        others: activations of the other features, float (O, H, W, number of these features).
        touched: cells that the masks touch, bool (O, H, W, K).
        episodes: episode of each frame (O,).
        seed: seed of the bootstrap over episodes; both scores use the same resamplings.

    Returns:
        Difference of the object scores with its 95 % interval (3,); NaN if a feature has no score.
    """
    scorer = ObjectScorer(touched, episodes)
    own, other = (best_histograms(*scorer.areas(features)) for features in (activations, others))
    if own is None or other is None:
        return np.full(3, np.nan)

    def difference(draws: np.ndarray) -> np.ndarray:
        return mean_score(draws, own) - mean_score(draws, other)

    return np.append(difference(np.ones((1, len(np.unique(episodes))))),
                     ClusterBootstrap(episodes, seed).interval_of(difference))


def best_histograms(auc: np.ndarray, histograms: np.ndarray) -> np.ndarray | None:
    """Select the histograms of each feature for the kind of object with its best score.

    Args:
        auc: score of each feature and kind (F, K), NaN where it is undefined.
        histograms: histograms of activations, from ``ObjectScorer.areas`` (F, K, 2, E, B).

    Returns:
        Histograms (F, 2, E, B); None if a feature has no score.
    """
    if np.isnan(auc).all(axis=1).any():
        return None
    return histograms[np.arange(len(auc)), np.nanargmax(auc, axis=1)]


def mean_score(draws: np.ndarray, histograms: np.ndarray) -> np.ndarray:
    """Compute the mean area under the ROC curve over features in each resampling.

    Args:
        draws: number of times that each episode was drawn (R, E).
        histograms: histograms of each feature for its best kind (F, 2, E, B).

    Returns:
        Means, float (R,).
    """
    return np.mean([_auc_of_draws(draws, of_feature) for of_feature in histograms], axis=0)


class ObjectScorer:
    """Computes weighted areas under the ROC curve of activations as predictors of touched cells.

    Args:
        touched: cells that the masks touch, bool (O, H, W, K).
        episodes: episode of each frame (O,).

    Attributes:
        frames: number of frames in which a kind touches a cell with weight above 0 (K,).
        enough: whether at least MIN_FRAMES such frames exist, in at least MIN_EPISODES episodes,
            bool (K,).
    """

    def __init__(self, touched: np.ndarray, episodes: np.ndarray):
        number = len(touched)
        self._touched = touched.reshape(number, -1, touched.shape[-1])  # (O, P, K)
        self._episode = np.unique(episodes, return_inverse=True)[1]
        share = self._touched.mean(axis=0)  # (P, K)
        self._weights = 1 - share, share  # weights of touched and of other cells
        counted = (self._touched & (share < 1)).any(axis=1)  # (O, K)
        self.frames = counted.sum(axis=0)
        in_episodes = np.array([len(np.unique(self._episode[of_kind])) for of_kind in counted.T])
        self.enough = (self.frames >= MIN_FRAMES) & (in_episodes >= MIN_EPISODES)

    def areas(self, activations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute the area under the ROC curve of each feature and kind.

        Args:
            activations: activations of the features, float (O, H, W, F).

        Returns:
            Areas (F, K), NaN where ``enough`` is False; and weighted histograms of the activations
            by episode, in touched and in untouched cells, float32 (F, K, 2, E, B).
        """
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
        auc = auc_of_histograms(*np.moveaxis(histograms.sum(axis=3), 2, 0))
        return np.where(self.enough, auc, np.nan), histograms

    def shifted(self, activations: np.ndarray) -> np.ndarray:
        """Compute the chance level of the areas under the ROC curve, with masks of other frames.

        Args:
            activations: activations of the features, float (O, H, W, F).

        Returns:
            Areas (shifts, F, K) for at most NUM_SHIFTS cyclic shifts of the masks along the frames;
            NaN where ``enough`` is False.
        """
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
                    areas[row, feature, kind] = auc_of_histograms(
                        np.bincount(bins, inside[places], _BINS), np.maximum(others, 0))
        return areas

    def _codes(self, activations: np.ndarray) -> np.ndarray:
        """Return the bin of each activation, int (F, O, P). Equal activations share a bin."""
        values = activations.reshape(*self._touched.shape[:2], -1)
        return np.stack([_binned(values[..., feature]) for feature in range(values.shape[-1])])


def _binned(values: np.ndarray) -> np.ndarray:
    """Return the bin of each value, int64 with the shape of ``values``. Positive values are spread
    evenly over the bins."""
    positive = values[values > 0]
    if not len(positive):
        return np.zeros(values.shape, np.int64)
    edges = np.unique(positive)
    if len(edges) >= _BINS:
        edges = np.unique(np.quantile(positive, np.linspace(0, 1, _BINS)[:-1], method="lower"))
    return np.searchsorted(edges, values, side="right")


def _auc_of_draws(draws: np.ndarray, histograms: np.ndarray) -> np.ndarray:
    """Compute the area under the ROC curve in each resampling of the episodes.

    Args:
        draws: number of times that each episode was drawn (R, E).
        histograms: histograms of touched and of untouched cells by episode (2, E, B).

    Returns:
        Areas (R,).
    """
    return auc_of_histograms(*(draws @ by_episode for by_episode in histograms))


def hallucinations(activations: np.ndarray, touched: np.ndarray, observations: np.ndarray,
                   seed: int) -> tuple[np.ndarray, pd.DataFrame]:
    """Find frames in which a feature is strongly active away from the object it is named after.

    Args:
        activations: activations of the feature, float (O, H, W).
        touched: cells that the masks of this object touch, bool (O, H, W).
        observations: episode and row of each frame (O, 2).
        seed: seed of the bootstrap over episodes.

    Returns:
        Number of such frames per 1 000, with its 95 % interval by bootstrap over episodes (3,); and
        a table of the frames with the strongest such activations, strongest first, at most one per
        episode and NUM_CANDIDATES in all. The columns are ``episode`` and ``row`` of the frame;
        ``cell_row``, ``cell_column`` and ``activation`` of the most active cell away from the
        object; and ``threshold``, the 99 % quantile of the activation over all cells and frames.
    """
    threshold = np.quantile(activations, STRONG, method="higher")
    near = binary_dilation(touched, np.ones((1, 3, 3), bool))
    elsewhere = np.where(near, -np.inf, activations).reshape(len(activations), -1)  # (O, H W)
    place, strength = elsewhere.argmax(axis=1), elsewhere.max(axis=1)
    counted = strength > threshold
    interval = ClusterBootstrap(observations[:, 0], seed).interval(
        counted[None].astype(float))[:, 0]
    cell_rows, cell_columns = np.unravel_index(place, activations.shape[1:])
    table = pd.DataFrame({
        "episode": observations[:, 0], "row": observations[:, 1], "cell_row": cell_rows,
        "cell_column": cell_columns, "activation": strength, "threshold": threshold})[counted]
    table = table.sort_values("activation", ascending=False, kind="stable")
    return (PER * np.array([counted.mean(), *interval]),
            table.drop_duplicates("episode")[:NUM_CANDIDATES])


_SCORES = {"feature": int, "kind": str, **dict.fromkeys(
    ("auc", "low_95", "high_95", "chance", "chance_low", "chance_high"), float), "frames": int}
_HALLUCINATIONS = {"feature": int, "kind": str, "episode": int, "row": int, "cell_row": int,
                   "cell_column": int, "activation": float, "threshold": float}
_BEST = {"score": "auc", "low_95": "low_95", "high_95": "high_95", "chance_high": "chance_high"}
OBJECT_SCORES = ("score", "score_low_95", "score_high_95", "score_chance")  # keys of a layer
_NAME_TYPES = {"features_sha256": str, "features": tuple[dict, ...],
               **dict.fromkeys(OBJECT_SCORES, float | None)}
RATES = ("hallucinations", "hallucinations_low_95", "hallucinations_high_95")  # keys of a feature
OBJECT_FILES = Schema(
    "objects", "python -m attribution.objects", items={
        "masks": Entry("masks.npz", Npz({
            "observations": Array(np.int32, "O 2"),
            "masks": Array(np.uint8, f"O K {FRAME_SIZE**2 // 8}")})),
        "scores": Entry("{}/scores.csv", Table(_SCORES)),
        "hallucinations": Entry("{}/hallucinations.csv", Table(_HALLUCINATIONS)),
        "names": Entry("{}/names.json", Json(kinds=_NAME_TYPES, needed=tuple(_NAME_TYPES))),
        "compared": Entry("{}/compared.json", Json())},
    setting_types={"num_observations": int})


def kinds_in(config: EnvConfig) -> tuple[GameObject, ...]:
    """Return the kinds of object of a game.

    Raises:
        UserError: if the game has no table of objects.
    """
    kinds = objects_of(config.env_name)
    if not kinds:
        raise UserError(f"{GAME_OBJECTS_FILE.name} lists no objects of {config.env_name}; add them "
                        "to this file")
    return kinds


def rendered_without(folder: RolloutFolder, places: np.ndarray, kinds: Sequence[GameObject]
                     ) -> Iterator[tuple[LevelState, ObjectPictures]]:
    """Render rows of a recording with and without each kind of object, in the given order.

    Args:
        folder: the recording.
        places: episode and row of each frame (O, 2); rows of an episode are adjacent and ascending.
        kinds: kinds of object.

    Yields:
        The level state of each row, and its renderings.

    Raises:
        UserError: if the recording cannot be replayed; see ``agents.replay.level_states``.
    """
    with (contextlib.closing(ObjectPainter(recorded_game(folder), kinds)) as painter,
          Progress(len(places), "masked frame") as progress):
        borders = np.flatnonzero(np.diff(places[:, 0])) + 1
        for rows in np.split(places, borders):
            for _, state in level_states(folder, int(rows[0, 0]), rows[:, 1].tolist()):
                yield state, painter.draw(state)
                progress.update(progress.done + 1)


def packed(masks: np.ndarray) -> np.ndarray:
    """Pack masks, bool (O, K, 64, 64), into bits, uint8 (O, K, 512)."""
    return np.packbits(masks.reshape(*masks.shape[:2], -1), axis=-1)


def unpacked(bits: np.ndarray) -> np.ndarray:
    """Unpack the bits of ``packed``, uint8 (O, K, 512), to masks, bool (O, K, 64, 64)."""
    masks = np.unpackbits(bits, axis=-1).astype(bool)
    return masks.reshape(*masks.shape[:2], FRAME_SIZE, FRAME_SIZE)


def read_names(store: ResultStore, layer: str) -> dict:
    """Read the content of ``names.json`` of a layer; see the module docstring.

    Raises:
        UserError: if the file is missing or damaged.
    """
    names = store.read("names", layer)
    for number, feature in enumerate(names["features"]):
        check_entries(feature, {"name": str | None, "kind": str | None, **dict.fromkeys(
            (*_BEST, *RATES), float | None)}, f"{store.file_of('names', layer)}, feature {number}",
            needed=("name",))
    return names


def has_names(store: ResultStore, layer: str, features_sha256: str) -> bool:
    """Return whether names and scores are stored for a layer's features with a given checksum."""
    return store.has("names", layer) and (
        store.read("names", layer)["features_sha256"] == features_sha256)


def score_features(store: ResultStore, layer: Bottleneck, checksum: str, kinds: Sequence[str],
                   activations: np.ndarray, touched: np.ndarray, observations: np.ndarray,
                   seed: int) -> None:
    """Score a layer's features, and write ``scores.csv``, ``hallucinations.csv`` and, last,
    ``names.json``.

    Args:
        store: the open folder.
        layer: the layer.
        checksum: checksum of its features.
        kinds: names of the kinds of object (K,).
        activations: activations of the features, float (O, H, W, F).
        touched: cells that the masks touch, bool (O, H, W, K).
        observations: episode and row of each frame (O, 2).
        seed: seed of the bootstraps over episodes.
    """
    scores, total = object_scores(activations, touched, kinds, observations[:, 0], seed)
    features, listed = [], [pd.DataFrame(columns=list(_HALLUCINATIONS))]
    for feature, rows in scores.groupby("feature"):
        facts = dict.fromkeys(("name", "kind", *_BEST, *RATES))
        if rows["auc"].notna().any():
            best = rows.loc[rows["auc"].idxmax()]
            facts |= {"kind": best["kind"], **{name: finite_or_none(best[column])
                                               for name, column in _BEST.items()}}
            if best["low_95"] > best["chance_high"]:
                rates, frames = hallucinations(
                    activations[..., feature], touched[..., kinds.index(best["kind"])],
                    observations, seed)
                facts |= {"name": best["kind"], **dict(zip(RATES, map(finite_or_none, rates)))}
                listed.append(frames.assign(feature=feature, kind=best["kind"]))
        features.append(facts)
    store.write("scores", layer.name, value=scores)
    store.write("hallucinations", layer.name, value=pd.concat(
        [table for table in listed if len(table)] or listed)[list(_HALLUCINATIONS)])
    store.write("names", layer.name, value={
        "layer": layer.layer.name, "features_sha256": checksum, "features": features,
        **dict(zip(OBJECT_SCORES, map(finite_or_none, total)))})
