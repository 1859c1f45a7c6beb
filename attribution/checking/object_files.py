"""Masks of objects, and the features' scores and names, on disk: ``analysis/attribution/objects/``.

::

    objects/settings.json          what made them; kinds: names of the K kinds of object
    objects/masks.npz              observations int32 (O, 2), episode and row of each frame; masks
                                   uint8 (O, K, 512), the bits of 64 x 64 pixels, row by row, as
                                   numpy.packbits gives them
    objects/<layer>/scores.csv     a row a feature (counted from 0) and kind: see COLUMNS
    objects/<layer>/hallucinations.csv  frames in which a feature that has a name is strongly
                                   active away from its object, see HALLUCINATION_COLUMNS
    objects/<layer>/names.json     the features' names and scores, see below; written last
    objects/<layer>/compared.json  if asked for: ``features_sha256``, ``other_features_sha256``,
                                   and ``difference``, ``low_95`` and ``high_95`` of the layer's
                                   object score minus that of the other features in the same frames

``names.json`` holds ``layer`` (path), ``features_sha256`` (checksum of the features, as in the
settings of attributions), ``features``: of each, in their order, ``name`` (kind of object, or null
if its score is not above chance), ``kind`` (the one with the best score; null if no kind can be
told from its place), ``score`` (area under the ROC), ``low_95``, ``high_95`` and ``chance_high`` of
that score (null likewise), and, of a feature with a name, ``hallucinations`` (frames in 1 000 in
which it is strongly active away from its object, see ``attribution.checking.hallucinations``),
``hallucinations_low_95`` and ``hallucinations_high_95`` (null without one); and of the layer
``score`` (object score: mean over the features), ``score_low_95``, ``score_high_95``,
``score_chance`` (the same with the masks of other frames), null if a feature has none.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd

from attribution.checking.hallucinations import Hallucinations
from attribution.checking.object_scores import ObjectScores
from common.description import open_described_folder, read_description
from common.errors import UserError
from common.files import atomic_path, read_arrays, read_json, save_json
from common.game_constants import FRAME_SIZE
from common.locks import FolderLock
from common.tables import read_table, write_table

SCRIPT = "python -m attribution.objects"
COLUMNS = ("feature", "kind", "auc", "low_95", "high_95", "chance", "chance_low", "chance_high",
           "frames")
# A feature (from 0), its kind, a frame, its cell with the strongest activation, and that.
HALLUCINATION_COLUMNS = ("feature", "kind", "episode", "row", "cell_row", "cell_column",
                         "activation", "threshold")
RATES = ("hallucinations", "hallucinations_low_95", "hallucinations_high_95")  # of a feature
_KINDS = "kinds"
_MASKS_KINDS = {"observations": np.int32, "masks": np.uint8}


class ObjectsFolder:
    """Names, writer and reader.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.settings_file = self.path / "settings.json"
        self.masks_file = self.path / "masks.npz"
        self._lock: FolderLock | None = None

    def scores_file(self, layer: str) -> Path:
        return self.path / layer / "scores.csv"

    def hallucinations_file(self, layer: str) -> Path:
        return self.path / layer / "hallucinations.csv"

    def names_file(self, layer: str) -> Path:
        return self.path / layer / "names.json"

    def compared_file(self, layer: str) -> Path:
        return self.path / layer / "compared.json"

    def open(self, description: dict, overwrite: bool) -> None:
        """Make the folder, or go on with what it holds.

        Raises:
            UserError: see ``open_described_folder``.
        """
        self._lock = open_described_folder(
            self.settings_file, description,
            ("settings.json", "masks.npz", "*/scores.csv", "*/hallucinations.csv", "*/names.json",
             "*/compared.json"),
            "objects", "--output_dir", overwrite, ("versions", "agent_file"))

    def add_masks(self, observations: np.ndarray, masks: np.ndarray) -> None:
        """Write masks bool (O, K, 64, 64) of observations (O, 2)."""
        self._lock.check()
        bits = packed(masks)
        with atomic_path(self.masks_file, bits.nbytes) as temporary:
            np.savez(temporary, observations=observations.astype(np.int32), masks=bits)

    def kinds(self) -> list[str]:
        """Names of the kinds of object (K,)."""
        return read_description(self.settings_file).get(_KINDS, [])

    def masks(self) -> tuple[np.ndarray, np.ndarray]:
        """Observations (O, 2) and masks bool (O, K, 64, 64).

        Raises:
            UserError: if the file is missing or damaged.
        """
        found = read_arrays(self.masks_file, "file of masks")
        if {name: array.dtype for name, array in found.items()} != _MASKS_KINDS or (
                found["masks"].shape != (len(found["observations"]), len(self.kinds()),
                                         FRAME_SIZE**2 // 8)):
            raise UserError(f"{self.masks_file} is damaged: it does not hold masks; {SCRIPT} "
                            "--overwrite makes it again")
        return found["observations"], unpacked(found["masks"])

    def add_scores(self, layer: str, path: str, features_sha256: str, scores: ObjectScores,
                   found: dict[int, Hallucinations], observations: np.ndarray) -> None:
        """Write the scores of a layer's features, their names last.

        Args:
            layer, path: its short name and its path.
            found: hallucinations of the features that have a name.
            observations: that they are of (O, 2).
        """
        self._lock.check()
        kinds = self.kinds()
        table = pd.DataFrame([
            (feature, name, *(getattr(scores, each)[feature, kind] for each in (
                "auc", "low", "high", "chance", "chance_low", "chance_high")), scores.frames[kind])
            for feature in range(len(scores.auc)) for kind, name in enumerate(kinds)],
            columns=COLUMNS)
        write_table(self.scores_file(layer), table)
        self._write_hallucinations(layer, {
            feature: (kinds[scores.best[feature]], each) for feature, each in found.items()},
            observations)
        features = []
        for feature, (best, named) in enumerate(zip(scores.best, scores.named)):
            number = {key: _number(array[feature, best]) if best >= 0 else None for key, array in (
                ("score", scores.auc), ("low_95", scores.low), ("high_95", scores.high),
                ("chance_high", scores.chance_high))}
            kind = kinds[best] if best >= 0 else None
            away = found.get(feature)
            rate = (None,) * 3 if away is None else map(_number, (away.rate, away.low, away.high))
            features.append({"name": kind if named else None, "kind": kind, **number,
                             **dict(zip(RATES, rate, strict=True))})
        score, low, high = map(_number, scores.score)
        save_json(self.names_file(layer), {
            "layer": path, "features_sha256": features_sha256, "features": features,
            "score": score, "score_low_95": low, "score_high_95": high,
            "score_chance": _number(scores.score_chance)})

    def _write_hallucinations(self, layer: str, found: dict[int, tuple[str, Hallucinations]],
                              observations: np.ndarray) -> None:
        rows = [(feature, kind, *observations[frame], *cell, strength, each.threshold)
                for feature, (kind, each) in found.items()
                for frame, cell, strength in zip(each.frames, each.cells, each.strengths)]
        write_table(self.hallucinations_file(layer),
                    pd.DataFrame(rows, columns=HALLUCINATION_COLUMNS))

    def add_difference(self, layer: str, features_sha256: str, other_sha256: str,
                       difference: np.ndarray) -> None:
        """Write how much better the features are than others.

        Args:
            features_sha256, other_sha256: checksums of both.
            difference: with its interval (3,).
        """
        self._lock.check()
        value, low, high = map(_number, difference)
        save_json(self.compared_file(layer), {
            "features_sha256": features_sha256, "other_features_sha256": other_sha256,
            "difference": value, "low_95": low, "high_95": high})

    def difference(self, layer: str) -> dict:
        """``compared.json`` of a layer; empty if its features were not compared."""
        return read_description(self.compared_file(layer))

    def has(self, layer: str, features_sha256: str) -> bool:
        """Whether the scores of a layer with these features are there."""
        return read_description(self.names_file(layer)).get("features_sha256") == features_sha256

    def layers(self) -> list[str]:
        """Short names of the layers whose features have scores."""
        return sorted(path.parent.name for path in self.path.glob("*/names.json"))

    def scores(self, layer: str) -> pd.DataFrame:
        """Scores of a layer's features: the columns of COLUMNS.

        Raises:
            UserError: if the file is missing or damaged.
        """
        numbers = COLUMNS[2:-1]
        return read_table(self.scores_file(layer), {
            "feature": int, "kind": str, **dict.fromkeys(numbers, float), COLUMNS[-1]: int},
            numbers, SCRIPT)

    def names(self, layer: str) -> dict:
        """``names.json`` of a layer.

        Raises:
            UserError: if the file is missing or damaged.
        """
        found = read_json(self.names_file(layer))
        if not isinstance(found, dict) or not isinstance(found.get("features"), list):
            raise UserError(f"{self.names_file(layer)} is damaged; {SCRIPT} --overwrite makes it "
                            "again")
        return found


def packed(masks: np.ndarray) -> np.ndarray:
    """Masks bool (O, K, 64, 64) as bits, uint8 (O, K, 512)."""
    return np.packbits(masks.reshape(*masks.shape[:2], -1), axis=-1)


def unpacked(bits: np.ndarray) -> np.ndarray:
    """The masks of ``packed``."""
    masks = np.unpackbits(bits, axis=-1).astype(bool)
    return masks.reshape(*masks.shape[:2], FRAME_SIZE, FRAME_SIZE)


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
