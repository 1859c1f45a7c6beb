"""Objects in recorded frames, and the features that respond to them: ``analysis/attribution/
objects/``.

::

    settings.json               settings; kinds: names of the K kinds of object
    masks.npz                   observations int32 (O, 2), episode and row of each frame; masks
                                uint8 (O, K, 512), the bits of 64 x 64 pixels, see ``packed``
    <layer>/scores.csv          one row per feature (counted from 0) and kind of object
    <layer>/hallucinations.csv  frames in which a named feature is strongly active away from its
                                object
    <layer>/names.json          names and scores of the features, see below; written last
    <layer>/compared.json       optional: ``features_sha256``, ``other_features_sha256``, and the
                                ``difference`` between the layer's object score and that of the
                                other features in the same frames, with ``low_95`` and ``high_95``

``names.json`` holds ``layer`` (path), ``features_sha256`` (checksum of the features, as in the
settings of attributions) and a list of ``features``. Each feature has ``name`` (its kind of object,
or null if its score is not above chance), ``kind`` (the kind with the best score), ``score`` (area
under the ROC curve) with ``low_95``, ``high_95`` and ``chance_high`` (all five null if no kind has
a score), and ``hallucinations`` (frames per 1 000 in which the feature is strongly active away from
its object) with ``hallucinations_low_95`` and ``hallucinations_high_95`` (null without a name). For
the layer, it holds ``score`` (object score: mean over the features) with ``score_low_95`` and
``score_high_95``, and ``score_chance`` (the object score with the masks of other frames); they are
null if a feature has no score.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from agents.object_masks import ObjectPainter, ObjectPictures
from agents.replay import recorded_game, replayed
from agents.rollout_files import RolloutFolder
from attribution.checking.object_scores import Hallucinations, ObjectScores
from common.errors import UserError
from common.game_constants import FRAME_SIZE
from common.progress import Progress
from common.results import Array, Entry, Json, Npz, ResultStore, Schema, Table
from envs.level_state import LevelState
from envs.objects import GAME_OBJECTS_FILE, GameObject, objects_of
from envs.procgen_env import EnvConfig

_SCORES = {"feature": int, "kind": str, **dict.fromkeys(
    ("auc", "low_95", "high_95", "chance", "chance_low", "chance_high"), float), "frames": int}
_HALLUCINATIONS = {"feature": int, "kind": str, "episode": int, "row": int, "cell_row": int,
                   "cell_column": int, "activation": float, "threshold": float}
RATES = ("hallucinations", "hallucinations_low_95", "hallucinations_high_95")  # keys of a feature
OBJECT_FILES = Schema(
    "objects", "python -m attribution.objects", items={
        "masks": Entry("masks.npz", Npz({
            "observations": Array(np.int32, "O 2"),
            "masks": Array(np.uint8, f"O K {FRAME_SIZE**2 // 8}")})),
        "scores": Entry("{}/scores.csv", Table(_SCORES)),
        "hallucinations": Entry("{}/hallucinations.csv", Table(_HALLUCINATIONS)),
        "names": Entry("{}/names.json", Json()),
        "compared": Entry("{}/compared.json", Json())})


def kinds_in(config: EnvConfig) -> tuple[GameObject, ...]:
    """Return the kinds of object of a game.

    Raises:
        UserError: if the game has no table of objects.
    """
    kinds = objects_of(config.env_name)
    if not kinds:
        raise UserError(f"{GAME_OBJECTS_FILE.name} has no objects of {config.env_name}; add them "
                        "there")
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
        UserError: if the recording cannot be replayed; see ``agents.replay.replayed``.
    """
    with (contextlib.closing(ObjectPainter(recorded_game(folder), kinds)) as painter,
          Progress(len(places), "frame with masks") as progress):
        borders = np.flatnonzero(np.diff(places[:, 0])) + 1
        for rows in np.split(places, borders):
            for _, state in replayed(folder, int(rows[0, 0]), rows[:, 1].tolist()):
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
    """Read the names and scores of a layer's features.

    Raises:
        UserError: if the file is missing or damaged.
    """
    names = store.read("names", layer)
    if not isinstance(names.get("features"), list):
        raise UserError(f"{store.file_of('names', layer)} is damaged: it has no list of features; "
                        "delete it to have it made again")
    return names


def has_names(store: ResultStore, layer: str, features_sha256: str) -> bool:
    """Return whether names and scores are stored for the layer's features with this checksum."""
    return store.has("names", layer) and (
        store.read("names", layer).get("features_sha256") == features_sha256)


def write_names(store: ResultStore, layer: str, facts: Mapping[str, str], kinds: Sequence[str],
                scores: ObjectScores, hallucinations: Mapping[int, Hallucinations],
                observations: np.ndarray) -> None:
    """Write the scores of a layer's features, and their names last.

    Args:
        store: the open folder.
        layer: short name of the layer.
        facts: path of the layer and checksum of its features, as in ``names.json``.
        kinds: names of the kinds of object (K,).
        scores: scores of the features.
        hallucinations: hallucinations of each named feature, by its number.
        observations: episode and row of each frame (O, 2).
    """
    store.write("scores", layer, value=pd.DataFrame([
        (feature, kind, *(array[feature, place] for array in (
            scores.auc, scores.low, scores.high, scores.chance, scores.chance_low,
            scores.chance_high)), scores.frames[place])
        for feature in range(len(scores.auc)) for place, kind in enumerate(kinds)],
        columns=list(_SCORES)))
    store.write("hallucinations", layer, value=pd.DataFrame([
        (feature, kinds[scores.best[feature]], *observations[frame], *cell, strength,
         listed.threshold)
        for feature, listed in hallucinations.items()
        for frame, cell, strength in zip(listed.frames, listed.cells, listed.strengths)],
        columns=list(_HALLUCINATIONS)))
    features = []
    for feature, (best, named) in enumerate(zip(scores.best, scores.named)):
        numbers = {name: finite_or_none(array[feature, best]) if best >= 0 else None
                   for name, array in (("score", scores.auc), ("low_95", scores.low),
                                       ("high_95", scores.high),
                                       ("chance_high", scores.chance_high))}
        kind = kinds[best] if best >= 0 else None
        listed = hallucinations.get(feature)
        rate = (None,) * 3 if listed is None else map(
            finite_or_none, (listed.rate, listed.low, listed.high))
        features.append({"name": kind if named else None, "kind": kind, **numbers,
                         **dict(zip(RATES, rate))})
    score, low, high = map(finite_or_none, scores.score)
    store.write("names", layer, value={
        **facts, "features": features, "score": score, "score_low_95": low,
        "score_high_95": high, "score_chance": finite_or_none(scores.score_chance)})


def finite_or_none(value: float) -> float | None:
    """Convert a number for JSON: return None if it is not finite."""
    return float(value) if math.isfinite(value) else None
