"""Features and attributions on disk: ``analysis/attribution/features/`` and
``analysis/attribution/attribution/``.

Letters in shapes: C H W channels and grid of a layer, M slots (channels by sign), F features, O
observations, T steps of a trajectory.

Features are stored in one folder per layer, named after the short name of the layer::

    features/<layer>/settings.json             settings; once finished also "found", see below
    features/<layer>/directions.npy            (F, M), non-negative, each with sum 1
    features/<layer>/mean_activations.npy      (C, H, W), mean over the observations
    features/<layer>/observations.npy          (O, 2), episode and row in the recording
    features/<layer>/examples_spatial_<m>.npz  feature_directions.Examples, for m = 0.25, 0.5, 1 and
                                               2 positions per cell along each axis
    features/<layer>/examples_thumbnail.npz    feature_directions.Examples, for thumbnails; layers
                                               of units have no examples

The entry "found" holds facts about the layer, the fit and the features::

    grid, channels                 H and W; C
    stride, first_pixel            distance between cells and centre of the first cell, in pixels;
                                   null for units
    signed                         whether features distinguish positive and negative activations
    partial                        whether a part of the network bypasses the layer
    observations                   O
    rows, fitted_rows              numbers of non-zero rows, and of rows used in the fit
    iterations, converged          number of iterations of the factorisation; whether it converged
    change                         only if not converged: relative reduction of the error by further
                                   iterations
    explained                      share of the sum of squares of held-out rows explained
    names                          per feature, only for independent components: name such as
                                   "IC 0 +"; fitted_rows, iterations and converged are then missing
    residual_share                 summed |residual| as a share of summed |attribution|
    attribution                    per feature: sum of |attribution| of the value, averaged over
                                   observations
    largest_entry                  per feature: largest entry of its direction
    stability                      per feature: cosine between the directions fitted to the two
                                   halves of the episodes; null with too few rows, and for
                                   independent components
    value_mean, value_deviation, baseline_mean, baseline_deviation    mean and standard deviation of
                                   the value, and of the value at the baseline
    gap_median, gap_99, gap_largest    median, 99 % quantile and maximum of the completeness errors

Attributions are stored for the T steps of each trajectory, the F features of a layer and the
residual::

    attribution/settings.json                  settings that all layers and outputs share
    attribution/trajectories.npz               see trajectories.Trajectories
    attribution/<layer>/settings.json          checksum and folder of the features; path of the
                                               layer, and its place in the order of computation;
                                               ``partial``, as above
    attribution/<layer>/activations/trajectory_00000.npz     activations of features per cell
    attribution/<layer>/<output>/trajectory_00000.npz        attributions per cell (``cells``) and
                                               their sums over cells (``totals``), the ``output``,
                                               its value at the ``baseline``, completeness errors
                                               (``gap``) and number of nodes (``steps``)
    attribution/<layer>/<output>/memory_<L>/trajectory_00000.npz    totals at each of the last L
                                               steps, and attribution to the hidden state before
                                               them (``older``); optional
    attribution/<layer>/<output>/gradient_activation/trajectory_00000.npz    gradient times
                                               activation, reduced to the same features; optional
    attribution/input/<output>/trajectory_00000.npz    gradients with respect to the frame, as
                                               shares of the ``largest`` |gradient| of the frame
    attribution/<layer>/<output>/summary.json  written last: standard ``deviation`` of the output,
                                               which scales completeness errors; ``frames``;
                                               quantiles of the errors; number of frames ``above``
                                               the tolerance; for gradients with respect to the
                                               frame only ``deviation`` and ``frames``
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Collection
from pathlib import Path

import numpy as np

from attribution.layers import Bottleneck
from attribution.reduction import Reducer
from attribution.trajectories import FIELDS, Trajectories
from common.config import check_entries
from common.errors import UserError
from common.files import TEMPORARY_SUFFIX, read_description, save_json, sha256
from common.folders import remove_folder
from common.results import Array, Entry, Json, Npy, Npz, ResultStore, Schema
from common.shards import first_difference

FEATURES_SCRIPT = "python -m attribution.features"
ATTRIBUTION_SCRIPT = "python -m attribution.attribute"
ACTIVATIONS = "activations"  # folder next to the folders of the outputs
INPUT = "input"  # the frame itself, in place of a layer
_FACTS = "found"  # entry of the settings of finished features
# Types of the facts that are read back; see the module docstring.
_FACT_TYPES: dict[str, object] = {
    "grid": tuple[int, ...], "stride": float | None, "first_pixel": float | None, "signed": bool,
    "partial": bool, "observations": int, "explained": float, "residual_share": float,
    "names": tuple[str, ...], "attribution": tuple[float | None, ...],
    "largest_entry": tuple[float | None, ...], "stability": tuple[float | None, ...] | None,
    **dict.fromkeys(("value_mean", "value_deviation", "baseline_mean", "baseline_deviation"),
                    float | None)}
_PARTS = f".parts{TEMPORARY_SUFFIX}"


def _examples(positions: str) -> Npz:
    return Npz({"observations": Array(np.int32, f"F {positions}"),
                "strengths": Array(np.float32, f"F {positions}"),
                "boxes": Array(np.int32, f"F {positions} 4")})


FEATURES = Schema(
    "features", FEATURES_SCRIPT, items={
        "part": Entry(f"{_PARTS}/{{:0>5}}.npz", Npz({
            "attributions": Array(np.float32, "B C H W", finite=False),
            "outputs": Array(np.float64, "B"), "baselines": Array(np.float64, "B"),
            "errors": Array(np.float64, "B")}))},
    results={
        "directions": Entry("directions.npy", Npy(Array(np.float32, "F M"))),
        "mean_activations": Entry("mean_activations.npy", Npy(Array(np.float32, "C H W"))),
        "observations": Entry("observations.npy", Npy(Array(np.int32, "O 2"))),
        "spatial_examples": Entry("examples_spatial_{}.npz", _examples("R C"), optional=True),
        "thumbnail_examples": Entry("examples_thumbnail.npz", _examples("N"), optional=True)},
    informative=("versions", "agent_file", _FACTS),
    setting_types={"game": str | None, "layer": str, "place": int, "baseline": str})

_CELLS = {"cells": Array(np.float16, "T H W G"), "totals": Array(np.float32, "T G")}  # G = F + 1
_INTEGRAL = {"output": Array(np.float32, "T"), "baseline": Array(np.float32, "T"),
             "gap": Array(np.float32, "T"), "steps": Array(np.int16, "T")}
ATTRIBUTIONS = Schema(
    "attributions", ATTRIBUTION_SCRIPT, items={
        "trajectories": Entry("trajectories.npz", Npz(FIELDS)),
        "layer": Entry("{}/settings.json", Json(
            kinds={"place": int, "features_sha256": str})),
        "activations": Entry(f"{{}}/{ACTIVATIONS}/trajectory_{{:0>5}}.npz", Npz({
            "cells": Array(np.float16, "T H W F")})),
        "attributions": Entry("{}/{}/trajectory_{:0>5}.npz", Npz({**_CELLS, **_INTEGRAL})),
        "over_time": Entry("{}/{}/memory_{}/trajectory_{:0>5}.npz", Npz({
            "totals": Array(np.float32, "T L G"), "older": Array(np.float32, "T"), **_INTEGRAL})),
        "gradient_activation": Entry("{}/{}/gradient_activation/trajectory_{:0>5}.npz",
                                     Npz(_CELLS)),
        "gradients": Entry(f"{INPUT}/{{}}/trajectory_{{:0>5}}.npz", Npz({
            "gradients": Array(np.float16, "T 64 64 3"), "largest": Array(np.float32, "T"),
            "output": Array(np.float32, "T")})),
        "summary": Entry("{}/{}/summary.json", Json())},
    setting_types={"tolerance": float | None, "steps": int, "rule": str, "unit": dict | None},
    # Attributions do not depend on "unit", the settings for computing advantages.
    informative=("versions", "agent_file", "unit"))


@dataclasses.dataclass(frozen=True)
class LayerFeatures:
    """Features of a layer, as read from disk.

    Attributes:
        name: short name of the layer.
        settings: settings with which the features were found.
        reducer: reduction of channels to the features, with the features' directions (F, M).
        mean_activations: mean activations of the layer, float32 (C, H, W).
        observations: episode and row of each observation, int32 (O, 2).
        checksum: checksum of the feature data on which attributions depend.
    """

    name: str
    settings: dict
    reducer: Reducer
    mean_activations: np.ndarray
    observations: np.ndarray
    checksum: str

    @property
    def facts(self) -> dict:
        """Entry "found" of the settings: facts about the layer, the fit and the features."""
        return self.settings[_FACTS]

    @property
    def number(self) -> int:
        """Number of features F."""
        return len(self.reducer.directions)

    @property
    def baseline(self) -> np.ndarray | None:
        """Baseline activations of the attributions (C, H, W); None for zero."""
        return self.mean_activations if self.settings["baseline"] == "mean" else None


def is_finished(store: ResultStore, settings: dict) -> bool:
    """Return whether a store holds finished features that were found with these settings."""
    stored = read_description(store.settings_file)
    return _FACTS in stored and first_difference(stored, settings, FEATURES.informative) is None


def finish_features(store: ResultStore, facts: dict, **results: np.ndarray) -> None:
    """Write the results of a layer, and remove its partial results.

    Args:
        store: open folder of the layer's features.
        facts: the entry "found" of the settings, see the module docstring; written last.
        results: arrays by the name of the entry.
    """
    for name, array in results.items():
        store.write(name, value=array)
    save_json(store.settings_file, {**store.settings(), _FACTS: facts})
    if (store.path / _PARTS).exists():
        remove_folder(store.path / _PARTS)


def read_features(path: Path, layer: str) -> LayerFeatures:
    """Read the finished features of a layer from disk.

    Args:
        path: folder of the features of all layers.
        layer: short name of the layer.

    Raises:
        UserError: if a file is missing or damaged, or the features are not finished.
    """
    store = ResultStore(Path(path) / layer, FEATURES)
    settings = _feature_settings(store.settings_file)
    if _FACTS not in settings:
        raise UserError(f"{store.path} holds no finished features of the layer '{layer}'; find "
                        f"them with {FEATURES_SCRIPT}")
    names = "directions", "mean_activations", "observations"
    directions, mean_activations, observations = map(store.read, names)
    facts = settings[_FACTS]
    signed = facts.get("signed", False)
    if (directions.shape[1] != mean_activations.shape[0] * (1 + signed)
            or list(mean_activations.shape[1:]) != list(facts["grid"])
            or any(len(facts.get(name) or directions) != len(directions)
                   for name in ("names", "stability"))):
        raise UserError(f"{store.path} is damaged: the shapes of its files do not fit each other; "
                        f"replace them with {FEATURES_SCRIPT} --overwrite")
    digest = hashlib.sha256()
    for name in names[:2]:
        digest.update(sha256(store.file_of(name)).encode())
    digest.update(str(settings.get("baseline")).encode())
    return LayerFeatures(layer, settings, Reducer(directions, signed), mean_activations,
                         observations, digest.hexdigest())


def _feature_settings(path: Path) -> dict:
    """Read the settings of features; {} if there are none.

    Raises:
        UserError: if the file is damaged; the message names the entry.
    """
    settings = FEATURES.read_settings(path)
    if _FACTS in settings:
        check_entries(settings[_FACTS], _FACT_TYPES, f"{path}, '{_FACTS}'",
                      needed=("grid", "stride", "first_pixel"))
    return settings


def load_features(path: Path, bottleneck: Bottleneck, agents: Collection[str],
                  game: str | None = None) -> LayerFeatures:
    """Read the features of a layer, and check that they belong to a given agent and game.

    Args:
        path: folder of the features of all layers.
        bottleneck: the layer.
        agents: checksums of the agents whose features are accepted.
        game: name of the required game; None accepts any game.

    Raises:
        UserError: if the features are missing, damaged, or belong to another agent, game or layer.
    """
    features = read_features(path, bottleneck.name)
    folder = path / bottleneck.name
    again = f"; give --features_dir of this agent, or find them with {FEATURES_SCRIPT}"
    agent = str(features.settings.get("agent_sha256"))
    if agent not in agents:
        raise UserError(f"the features in {folder} belong to the agent {agent[:12]}, not to "
                        f"{' or '.join(sorted(checksum[:12] for checksum in agents))}{again}")
    if game not in (None, features.settings.get("game")):
        raise UserError(f"the features in {folder} belong to the game "
                        f"{features.settings.get('game')}, not to {game}{again}")
    if (features.settings.get("layer") != bottleneck.layer.name
            or features.mean_activations.shape != bottleneck.shape):
        raise UserError(f"the features in {folder} belong to the layer "
                        f"{features.settings.get('layer')} with "
                        f"{features.mean_activations.shape} activations, not to "
                        f"{bottleneck.layer.name} with {bottleneck.shape}{again}")
    return features


def finished_layers(path: Path) -> list[str]:
    """Return the short names of the layers with finished features, in order of computation.

    Args:
        path: folder of the features of all layers.

    Raises:
        UserError: if no layer has finished features.
    """
    settings = {file.parent.name: _feature_settings(file)
                for file in Path(path).glob(f"*/{FEATURES.settings_name}")}
    finished = [name for name in settings if _FACTS in settings[name]]
    if not finished:
        raise UserError(f"{path} holds no finished features; find them with {FEATURES_SCRIPT}")
    return sorted(finished, key=lambda name: (settings[name].get("place", 0), name))


class AttributionStore(ResultStore):
    """A folder of attributions; see ``ATTRIBUTIONS`` for its entries.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path):
        super().__init__(path, ATTRIBUTIONS)

    def layers(self) -> list[str]:
        """Return the short names of the layers with finished attributions, in order of computation;
        the frame itself, which has no features, is left out."""
        names = [name for name in self.keys("layer") if self.outputs(name)]
        return sorted(names, key=lambda name: (self.read("layer", name).get("place", 0), name))

    def tolerance(self) -> float:
        """Return the accepted completeness error."""
        return self.settings().get("tolerance") or 0.01

    def outputs(self, layer: str) -> list[str]:
        """Return the names of the outputs whose attributions to a layer are finished, sorted."""
        return sorted(path.parent.name for path in (self.path / layer).glob("*/summary.json"))

    def lags(self, layer: str, output: str) -> list[int]:
        """Return, in ascending order, the values of ``--memory_steps`` for which attributions of an
        output to a layer over time are stored."""
        return sorted(int(match[1]) for path in (self.path / layer / output).glob("memory_*")
                      if (match := re.fullmatch(r"memory_(\d{1,9})", path.name)))

    def trajectories(self) -> Trajectories:
        """Read the steps of the trajectories.

        Raises:
            UserError: if the file is missing or damaged.
        """
        return Trajectories(**self.read("trajectories"))

    def read_all(self, entry: str, *key: object, name: str) -> np.ndarray:
        """Read one array of all trajectories, concatenated over steps.

        Args:
            entry: name of the entry of ``ATTRIBUTIONS``.
            key: key of the entry without the number of the trajectory, such as layer and output.
            name: name of the array in the entry.
        """
        numbers = range(self.trajectories().num_trajectories)
        return np.concatenate([self.read(entry, *key, number)[name] for number in numbers])

    def check_source(self, agents: Collection[str], recording: str) -> None:
        """Check that the attributions belong to an agent and a recording.

        Args:
            agents: accepted checksums of the agent.
            recording: checksum of the recording.

        Raises:
            UserError: if they belong to another agent or recording; the message gives both
                checksums.
        """
        settings = self.settings()
        for key, what, accepted in (("agent_sha256", "agent", agents),
                                    ("recording_sha256", "recording", {recording})):
            if settings.get(key) not in accepted:
                raise UserError(f"the attributions in {self.path} belong to another {what}: its "
                                f"checksum is {str(settings.get(key))[:12]}, not "
                                f"{' or '.join(sorted(checksum[:12] for checksum in accepted))}; "
                                f"compute them again with {ATTRIBUTION_SCRIPT}")

    def check_features(self, features: LayerFeatures) -> None:
        """Check that any existing attributions to a layer were reduced to the given features.

        Raises:
            UserError: if they were reduced to other features; the message gives both checksums.
        """
        if self.has("layer", features.name):
            checksum = self.read("layer", features.name).get("features_sha256")
            if checksum != features.checksum:
                raise UserError(f"the attributions in {self.path} to the layer '{features.name}' "
                                f"belong to features with the checksum {str(checksum)[:12]}, but "
                                f"the given ones have {features.checksum[:12]}; give the matching "
                                "--features_dir, or compute attributions in another folder")


def error_quantiles(errors: np.ndarray) -> dict[str, float]:
    """Compute median, 99 % quantile and maximum of completeness errors, by their names in files."""
    return {"gap_median": float(np.median(errors)), "gap_99": float(np.quantile(errors, 0.99)),
            "gap_largest": float(np.max(errors))}
