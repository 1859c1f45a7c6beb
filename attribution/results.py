"""Features and attributions on disk: writers and readers of ``analysis/attribution/features/`` and
``analysis/attribution/attribution/``.

Features, a folder a layer, by its short name::

    features/<layer>/settings.json             what made them; "found", see below, when it is done
    features/<layer>/directions.npy            float32 (F, M), non-negative, each of sum 1
    features/<layer>/mean_activations.npy      float32 (C, H, W), over the observations
    features/<layer>/observations.npy          int32 (O, 2): episode and row in the recording
    features/<layer>/examples_spatial_<m>.npz  for m = 0.25, 0.5, 1 and 2 places a cell; and
    features/<layer>/examples_thumbnail.npz    observations, strengths, boxes, as of
                                               examples.Examples; units, which have no cells, have
                                               none of these

"found": ``grid`` (H, W), ``channels``, ``stride`` and ``first_pixel`` of cells in pixels (null for
units), ``signed`` (whether there are slots of both signs), ``partial`` (whether a part of the
network goes around the layer), ``observations`` (O); ``rows`` that are not zero and how many of
them were fitted to, ``iterations``, ``converged`` and, if not, ``change``: by how much further
iterations still made the error smaller; ``explained``: share of squared attribution, of rows held
out; ``residual_share``: summed |residual| as a share of all summed |attribution|; of each feature
``attribution`` (summed |attribution| of the value, mean over observations), ``largest_entry`` of
its direction, and ``stability``: cosine of the features of both halves of the episodes, or null if
there were too few; of the value over the observations ``value_mean``, ``value_deviation``,
``baseline_mean`` and ``baseline_deviation``, ``gap_median`` and ``gap_99``.

Attributions, below them a folder a layer and in it one an output::

    attribution/settings.json                  what made them, whichever layers and outputs
    attribution/trajectories.npz               see attribution.trajectories
    attribution/<layer>/settings.json          checksum of the features and where they were
    attribution/<layer>/activations/trajectory_00000.npz     cells, of the features' activations:
                                               float16 (T, H, W, F), in units of the slots
    attribution/<layer>/<output>/trajectory_00000.npz        see Attributed
    attribution/<layer>/<output>/memory_<L>/trajectory_00000.npz    over the last L steps, where
                                               asked for; see AttributedOverTime
    attribution/<layer>/<output>/gradient_activation/trajectory_00000.npz    gradient times
                                               activation, reduced to the same features, where
                                               asked for; see Reduced
    attribution/input/<output>/trajectory_00000.npz    gradients by the frame; see Gradients
    attribution/<layer>/<output>/summary.json  written last: ``deviation`` of the output, by which
                                               gaps are judged, ``frames``, ``gap_median``,
                                               ``gap_99``, ``gap_largest``, ``above`` (frames whose
                                               gap is above the tolerance); gradients by the frame
                                               have the first two alone

Nothing half-written is under its name; what is there is done.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from attribution.feature_examples import SUBDIVISIONS, Examples
from attribution.reduction import Reducer
from attribution.trajectories import Trajectories, read_trajectories, save_trajectories
from common.description import first_difference, open_described_folder, read_description
from common.errors import UserError
from common.files import (
    TEMPORARY_SUFFIX,
    atomic_path,
    check_finite,
    read_array,
    read_arrays,
    read_json,
    remove_folder,
    save_json,
    sha256,
)
from common.game_constants import FRAME_SIZE
from common.locks import FolderLock
from common.shards import WHOLE, Shard, SharedFolder

FEATURES_SCRIPT = "python -m attribution.features"
ATTRIBUTION_SCRIPT = "python -m attribution.attribute"
_FOUND = "found"
_INFORMATIVE = ("versions", "agent_file", _FOUND)
# "unit", see attribution.advantages.Unit: attributions do not depend on it.
_INFORMATIVE_OF_ATTRIBUTIONS = ("versions", "agent_file", "unit")
ACTIVATIONS = "activations"  # a folder beside those of the outputs
GRADIENT_ACTIVATION = "gradient_activation"  # a folder below that of an output
INPUT = "input"  # the frame itself, in the place of a layer
_PARTS = f".parts{TEMPORARY_SUFFIX}"
THUMBNAIL = "thumbnail"


@dataclasses.dataclass(frozen=True)
class LayerFeatures:
    """Features of a layer, as read.

    Attributes:
        name: short name of the layer.
        settings: ``settings.json``.
        reducer: the directions (F, M).
        mean_activations: float32 (C, H, W).
        observations: episode and row of each, int32 (O, 2).
        checksum: of what attributions depend on.
    """

    name: str
    settings: dict
    reducer: Reducer
    mean_activations: np.ndarray
    observations: np.ndarray
    checksum: str

    @property
    def found(self) -> dict:
        """How the features came out; see the module."""
        return self.settings[_FOUND]

    @property
    def number(self) -> int:
        """F."""
        return len(self.reducer.directions)


class FeaturesFolder:
    """Names, writer and reader of the features of one layer.

    Args:
        path: the folder of all layers.
        layer: short name.
    """

    def __init__(self, path: Path, layer: str):
        self.layer, self.path = layer, Path(path) / layer
        self.settings_file = self.path / "settings.json"
        self.directions_file = self.path / "directions.npy"
        self.mean_file = self.path / "mean_activations.npy"
        self.observations_file = self.path / "observations.npy"
        self._lock: FolderLock | None = None

    def examples_file(self, kind: float | str) -> Path:
        """The file of spatial examples with so many places a cell, or of the thumbnails."""
        name = kind if kind == THUMBNAIL else f"spatial_{kind:g}"
        return self.path / f"examples_{name}.npz"

    def has(self, description: dict) -> bool:
        """Whether the features are there, made in this way."""
        found = read_description(self.settings_file)
        return _FOUND in found and first_difference(found, description, _INFORMATIVE) is None

    def open(self, description: dict, overwrite: bool) -> None:
        """Make the folder, or go on with what it holds.

        Raises:
            UserError: see ``open_described_folder``.
        """
        self._lock = open_described_folder(
            self.settings_file, description,
            ("settings.json", "*.npy", "examples_*.npz", f"{_PARTS}/*"), "features",
            "--output_dir", overwrite, _INFORMATIVE)

    def part(self, number: int) -> dict[str, np.ndarray] | None:
        """A part of the attributions that was stored before, or None."""
        path = self.path / _PARTS / f"{number:05d}.npz"
        return read_arrays(path, "part of the attributions") if path.exists() else None

    def store_part(self, number: int, arrays: dict[str, np.ndarray]) -> None:
        """Store a part of the attributions, so that a killed run continues after it."""
        self._lock.check()
        with atomic_path(self.path / _PARTS / f"{number:05d}.npz") as temporary:
            np.savez(temporary, **arrays)

    def finish(self, directions: np.ndarray, mean_activations: np.ndarray,
               observations: np.ndarray, examples: dict[float | str, Examples],
               found: dict) -> None:
        """Write everything, the settings last, and remove the parts."""
        self._lock.check()
        for path, array in ((self.directions_file, directions),
                            (self.mean_file, mean_activations),
                            (self.observations_file, observations)):
            with atomic_path(path) as temporary:
                np.save(temporary, array, allow_pickle=False)
        for kind, each in examples.items():
            with atomic_path(self.examples_file(kind)) as temporary:
                np.savez(temporary, **vars(each))
        save_json(self.settings_file, {**read_description(self.settings_file), _FOUND: found})
        if (self.path / _PARTS).exists():
            remove_folder(self.path / _PARTS)

    def read(self) -> LayerFeatures:
        """The features.

        Raises:
            UserError: if a file is missing or damaged, or they are not finished.
        """
        settings = read_description(self.settings_file)
        if _FOUND not in settings:
            raise UserError(f"{self.path} holds no finished features of the layer "
                            f"'{self.layer}'; {FEATURES_SCRIPT} finds them")
        directions = self._read(self.directions_file, np.float32, 2)
        mean = self._read(self.mean_file, np.float32, 3)
        observations = self._read(self.observations_file, np.int32, 2)
        found = settings[_FOUND]
        try:
            signed = bool(found["signed"])
            if (directions.shape[1] != mean.shape[0] * (1 + signed)
                    or list(mean.shape[1:]) != list(found["grid"])
                    or observations.shape[1:] != (2,)):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{self.path} is damaged: its files do not fit each other; "
                            f"{FEATURES_SCRIPT} --overwrite makes them again") from None
        digest = hashlib.sha256()
        for path in (self.directions_file, self.mean_file):
            digest.update(sha256(path).encode())
        digest.update(str(settings.get("baseline")).encode())
        return LayerFeatures(self.layer, settings, Reducer(directions, signed), mean,
                             observations, digest.hexdigest())

    def examples(self, kind: float | str) -> Examples:
        """Spatial examples with so many places a cell, or those of the thumbnails.

        Raises:
            UserError: if the file is missing or damaged.
        """
        path = self.examples_file(kind)
        arrays = read_arrays(path, "file of examples")
        try:
            examples = Examples(**arrays)
            shape = examples.observations.shape
            if examples.strengths.shape != shape or examples.boxes.shape != (*shape, 4):
                raise TypeError
        except TypeError:
            raise UserError(f"{path} is damaged: it holds other arrays") from None
        return examples

    def example_kinds(self) -> list[float | str]:
        """The kinds of examples there are."""
        return [kind for kind in (*SUBDIVISIONS, THUMBNAIL) if self.examples_file(kind).exists()]

    def _read(self, path: Path, dtype: type, dimensions: int) -> np.ndarray:
        array = read_array(path, dtype, dimensions, FEATURES_SCRIPT)
        check_finite(array, path, f"{FEATURES_SCRIPT} --overwrite makes it again")
        return array


@dataclasses.dataclass(frozen=True)
class Attributed:
    """Attribution of one output to the features of one layer, along a trajectory of T steps.

    Attributes:
        cells: float16 (T, H, W, F + 1), in the unit of the output; the last one is the residual.
        totals: sums over cells, float32 (T, F + 1); together they are output minus baseline, but
            for the gap.
        output: G(a), float32 (T,).
        baseline: G of the baseline, float32 (T,).
        gap: error of the sum, as of ``completeness_errors``, float32 (T,).
        steps: nodes of the integral, int16 (T,).
    """

    cells: np.ndarray
    totals: np.ndarray
    output: np.ndarray
    baseline: np.ndarray
    gap: np.ndarray
    steps: np.ndarray


@dataclasses.dataclass(frozen=True)
class AttributedOverTime:
    """Attribution of one output to the features of one layer at the last L steps, along a
    trajectory of T steps.

    Attributes:
        totals: sums over cells, by how many steps ago, float32 (T, L, F + 1), in the unit of the
            output; the last one is the residual. 0 before an episode's first step.
        older: of the state that entered the earliest of these steps, float32 (T,).
        output, gap, steps: as of ``Attributed``.
        baseline: G of the path's start, float32 (T,).
    """

    totals: np.ndarray
    older: np.ndarray
    output: np.ndarray
    baseline: np.ndarray
    gap: np.ndarray
    steps: np.ndarray


@dataclasses.dataclass(frozen=True)
class Reduced:
    """Numbers of cells that are reduced to the features of one layer, along a trajectory of T
    steps, and need not add up to anything.

    Attributes:
        cells: float16 (T, H, W, F + 1); the last one is the residual.
        totals: sums over cells, float32 (T, F + 1).
    """

    cells: np.ndarray
    totals: np.ndarray


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Gradients of one output by the frames of a trajectory of T steps.

    Attributes:
        gradients: as shares of the frame's largest, float16 (T, 64, 64, 3), red, green and blue.
        largest: of the frame's |gradients|, in units of the output a brightness from 0 to 1,
            float32 (T,).
        output: float32 (T,).
    """

    gradients: np.ndarray
    largest: np.ndarray
    output: np.ndarray


_REDUCED_KINDS = {"cells": "f2", "totals": "f4"}
_GRADIENTS_KINDS = {"gradients": "f2", "largest": "f4", "output": "f4"}
_ATTRIBUTED_KINDS = {"cells": "f2", "totals": "f4", "output": "f4", "baseline": "f4", "gap": "f4",
                     "steps": "i2"}
_OVER_TIME_KINDS = {"totals": "f4", "older": "f4", "output": "f4", "baseline": "f4", "gap": "f4",
                    "steps": "i2"}


class AttributionFolder:
    """Names, writer and readers of attributions.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.settings_file = self.path / "settings.json"
        self.trajectories_file = self.path / "trajectories.npz"
        self._shared: SharedFolder | None = None

    def layer_settings_file(self, layer: str) -> Path:
        return self.path / layer / "settings.json"

    def file(self, layer: str, output: str, number: int) -> Path:
        """The file of a trajectory."""
        return self.path / layer / output / f"trajectory_{number:05d}.npz"

    def memory_file(self, layer: str, output: str, lags: int, number: int) -> Path:
        """The file of a trajectory's attributions over time."""
        return self.path / layer / output / f"memory_{lags}" / f"trajectory_{number:05d}.npz"

    def gradient_activation_file(self, layer: str, output: str, number: int) -> Path:
        """The file of a trajectory's gradient times activation."""
        return self.path / layer / output / GRADIENT_ACTIVATION / f"trajectory_{number:05d}.npz"

    def summary_file(self, layer: str, output: str) -> Path:
        return self.path / layer / output / "summary.json"

    def open(self, description: dict, overwrite: bool, shard: Shard = WHOLE,
             divided: dict | None = None, join: bool = False) -> None:
        """Make the folder, or go on with what it holds.

        Args:
            description: what makes attributions, whichever layers and outputs there are.
            shard, join: see ``SharedFolder``.
            divided: names of all layers and outputs, and what else is attributed:
                ``memory_steps`` (0 for none) and ``gradient_activation``.

        Raises:
            UserError: see ``SharedFolder``.
        """
        self._shared = SharedFolder(
            self.settings_file, description,
            ("settings.json", "trajectories.npz", "*/settings.json", "*/*/trajectory_*.npz",
             "*/*/memory_*/trajectory_*.npz", f"*/*/{GRADIENT_ACTIVATION}/trajectory_*.npz",
             "*/*/summary.json"),
            "attributions", "--output_dir", overwrite, _INFORMATIVE_OF_ATTRIBUTIONS, shard, divided,
            lambda: self._holds(**divided), join)

    def _holds(self, layers: Sequence[str], outputs: Sequence[str], memory_steps: int,
               gradient_activation: bool, **_) -> bool:
        """Whether all of this is attributed, along all trajectories."""
        if not all(self.summary_file(layer, output).exists() for layer in layers
                   for output in outputs):
            return False
        numbers = range(len(self.trajectories().bounds) - 1)
        return all(
            (not memory_steps or self.memory_file(layer, output, memory_steps, number).exists())
            and (not gradient_activation
                 or self.gradient_activation_file(layer, output, number).exists())
            for layer in layers if layer != INPUT for output in outputs for number in numbers)

    def finish(self) -> None:
        """Note that all attributions of this process are there."""
        self._shared.finish()

    def open_layer(self, features: LayerFeatures, description: dict, write: bool = True) -> None:
        """Say whose features a layer's attributions are reduced to, before any are added.

        Args:
            write: False for a shard, which leaves it to the joining.

        Raises:
            UserError: if the folder has attributions to other features of the layer.
        """
        path = self.layer_settings_file(features.name)
        found = read_description(path)
        if found and found.get("features_sha256") != features.checksum:
            raise UserError(f"{path.parent} holds attributions to features with the checksum "
                            f"{str(found.get('features_sha256'))[:12]}, and those given have "
                            f"{features.checksum[:12]}; choose another --output_dir, or give "
                            "--overwrite to throw it away")
        if write:
            save_json(path, {"features_sha256": features.checksum, **description})

    def add_trajectories(self, trajectories: Trajectories) -> None:
        """Write the steps."""
        self._shared.check()
        save_trajectories(self.trajectories_file, trajectories)

    def add(self, layer: str, output: str, number: int, attributed: Attributed) -> None:
        """Write the attributions of a trajectory."""
        self._shared.check()
        _save(self.file(layer, output, number), vars(attributed), _ATTRIBUTED_KINDS)

    def add_over_time(self, layer: str, output: str, number: int,
                      attributed: AttributedOverTime) -> None:
        """Write the attributions over time of a trajectory."""
        self._shared.check()
        _save(self.memory_file(layer, output, attributed.totals.shape[1], number),
              vars(attributed), _OVER_TIME_KINDS)

    def add_activations(self, layer: str, number: int, cells: np.ndarray) -> None:
        """Write the activations of a trajectory's features (T, H, W, F)."""
        self._shared.check()
        _save(self.file(layer, ACTIVATIONS, number), {"cells": cells}, {"cells": "f2"})

    def add_gradient_activation(self, layer: str, output: str, number: int,
                                reduced: Reduced) -> None:
        """Write gradient times activation of a trajectory."""
        self._shared.check()
        _save(self.gradient_activation_file(layer, output, number), vars(reduced), _REDUCED_KINDS)

    def add_gradients(self, output: str, number: int, gradients: Gradients) -> None:
        """Write gradients by the frames of a trajectory."""
        self._shared.check()
        _save(self.file(INPUT, output, number), vars(gradients), _GRADIENTS_KINDS)

    def add_summary(self, layer: str, output: str, summary: dict) -> None:
        """Let an output count as done."""
        save_json(self.summary_file(layer, output), summary)

    def settings(self) -> dict:
        """Description of the run that made the attributions.

        Raises:
            UserError: if there are none.
        """
        found = read_description(self.settings_file)
        if not found:
            raise UserError(f"{self.path} holds no attributions; {ATTRIBUTION_SCRIPT} makes them")
        return found

    def layer_settings(self, layer: str) -> dict:
        """The features that the attributions to a layer are reduced to.

        Raises:
            UserError: if the file is missing or damaged.
        """
        return read_json(self.layer_settings_file(layer))

    def layers(self) -> list[str]:
        """Short names of the layers with attributions of an output, in order of computation; not
        of the frame itself, which has no features."""
        found = [path.parent.name for path in self.path.glob("*/settings.json")
                 if self.outputs(path.parent.name)]
        return sorted(found, key=lambda layer: (self.layer_settings(layer).get("place", 0), layer))

    def outputs(self, layer: str) -> list[str]:
        """Names of the outputs whose attributions to a layer are done."""
        return sorted(path.parent.name for path in (self.path / layer).glob("*/summary.json"))

    def summary(self, layer: str, output: str) -> dict:
        """How the attributions of an output came out; see the module.

        Raises:
            UserError: if the file is missing or damaged.
        """
        return read_json(self.summary_file(layer, output))

    def trajectories(self) -> Trajectories:
        """The steps.

        Raises:
            UserError: if the file is missing or damaged.
        """
        return read_trajectories(self.trajectories_file)

    def attributed(self, layer: str, output: str, number: int) -> Attributed:
        """Attributions along a trajectory.

        Raises:
            UserError: if the file is missing or damaged.
        """
        path = self.file(layer, output, number)
        found = Attributed(**_read(path, _ATTRIBUTED_KINDS))
        steps, *_, features = found.cells.shape
        if found.cells.ndim != 4 or found.totals.shape != (steps, features) or any(
                getattr(found, name).shape != (steps,)
                for name in ("output", "baseline", "gap", "steps")):
            raise UserError(f"{path} is damaged: its arrays do not fit each other")
        return found

    def lags(self, layer: str, output: str) -> list[int]:
        """The numbers of steps L for which there are attributions over time."""
        return sorted(int(path.name.removeprefix("memory_"))
                      for path in (self.path / layer / output).glob("memory_*"))

    def over_time(self, layer: str, output: str, lags: int, number: int) -> AttributedOverTime:
        """Attributions over time along a trajectory.

        Raises:
            UserError: if the file is missing or damaged.
        """
        path = self.memory_file(layer, output, lags, number)
        found = AttributedOverTime(**_read(path, _OVER_TIME_KINDS))
        if found.totals.ndim != 3 or found.totals.shape[1] != lags or any(
                array.shape != found.older.shape or len(array) != len(found.totals)
                for name, array in vars(found).items() if name != "totals"):
            raise UserError(f"{path} is damaged: its arrays do not fit each other")
        return found

    def gradient_activation(self, layer: str, output: str, number: int) -> Reduced:
        """Gradient times activation along a trajectory.

        Raises:
            UserError: if the file is missing or damaged.
        """
        path = self.gradient_activation_file(layer, output, number)
        found = Reduced(**_read(path, _REDUCED_KINDS))
        if found.cells.ndim != 4 or found.totals.shape != (len(found.cells),
                                                           found.cells.shape[-1]):
            raise UserError(f"{path} is damaged: its arrays do not fit each other")
        return found

    def gradients(self, output: str, number: int) -> Gradients:
        """Gradients by the frames of a trajectory.

        Raises:
            UserError: if the file is missing or damaged.
        """
        path = self.file(INPUT, output, number)
        found = Gradients(**_read(path, _GRADIENTS_KINDS))
        steps = found.output.shape
        if found.gradients.shape != (*steps, FRAME_SIZE, FRAME_SIZE, 3) or (
                found.largest.shape != steps):
            raise UserError(f"{path} is damaged: its arrays do not fit each other")
        return found

    def activations(self, layer: str, number: int) -> np.ndarray:
        """Activations of a trajectory's features, float16 (T, H, W, F).

        Raises:
            UserError: if the file is missing or damaged.
        """
        return _read(self.file(layer, ACTIVATIONS, number), {"cells": "f2"})["cells"]


def _save(path: Path, arrays: dict[str, np.ndarray], kinds: dict[str, str]) -> None:
    arrays = {name: np.asarray(arrays[name]).astype(kind) for name, kind in kinds.items()}
    with atomic_path(path, sum(array.nbytes for array in arrays.values())) as temporary:
        np.savez(temporary, **arrays)


def _read(path: Path, kinds: dict[str, str]) -> dict[str, np.ndarray]:
    arrays = read_arrays(path, "file of attributions")
    if {name: array.dtype for name, array in arrays.items()} != {
            name: np.dtype(kind) for name, kind in kinds.items()}:
        raise UserError(f"{path} is damaged: it holds {', '.join(sorted(arrays)) or 'nothing'}")
    for array in arrays.values():
        check_finite(array, path, f"{ATTRIBUTION_SCRIPT} --overwrite makes it again")
    return arrays


def finished_layers(path: Path) -> list[str]:
    """Short names of the layers with finished features in a folder of ``attribution.features``, in
    order of computation.

    Raises:
        UserError: if there are none.
    """
    found = {settings.parent.name: read_description(settings)
             for settings in Path(path).glob("*/settings.json")}
    names = [name for name, settings in found.items() if _FOUND in settings]
    if not names:
        raise UserError(f"{path} holds no finished features; {FEATURES_SCRIPT} finds them")
    return sorted(names, key=lambda name: (found[name].get("place", 0), name))


def quantiles(gaps: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Median, 99 % quantile and largest of gaps, by their names in the files."""
    return {"gap_median": float(np.median(gaps)), "gap_99": float(np.quantile(gaps, 0.99)),
            "gap_largest": float(np.max(gaps))}
