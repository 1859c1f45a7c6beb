"""An agent of the attribution page: its attributions, features and recording.

Letters in shape comments: N steps of all trajectories, T steps of one trajectory, H W grid of a
layer, F features.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np

from agents.agent_file import agent_title, load_agent
from agents.provenance import agent_digests, agent_sha256
from attribution.checking.object_scores import OBJECT_FILES, OBJECT_SCORES, has_names, read_names
from attribution.feature_directions import SUBDIVISIONS, Examples
from attribution.feature_directions import THUMBNAIL as THUMBNAIL_SIDE
from attribution.page_files import (
    ATTRIBUTION,
    KINDS,
    PRODUCTS,
    PageExamples,
    PageLayer,
    kind_of,
)
from attribution.recordings import Recording
from attribution.results import (
    ACTIVATIONS,
    ATTRIBUTION_SCRIPT,
    FEATURES,
    INPUT,
    AttributionStore,
    LayerFeatures,
    read_features,
)
from common.errors import UserError, nearest
from common.game_constants import FRAME_SIZE
from common.results import ResultStore
from envs.objects import action_labels

_SCORES = ("auc", "low_95", "high_95", "chance_high")  # columns per feature and kind of object
MIN_STABILITY = 0.3  # features with a lower stability are not named after an object
MAX_CELLS = 256  # maximum number of cells of layers whose activations are shown by default
_FACTS = {"observations": "observations for the NMF",
          "explained": "explained squared attribution (held out)",
          "residual_share": "residual share of |attribution|", "value_mean": "mean value",
          "value_deviation": "standard deviation of the value",
          "baseline_mean": "mean baseline G(0)"}


class AttributedAgent:
    """An agent's attributions with their features and recording; implements ``PageAgent``.

    Args:
        agent_file, data_dir, attributions: paths of the agent, its recording and its attributions.
        features_dir: folder of the features of all layers.
        objects_dir: folder of names and scores of features; entries for other features are ignored.
        activations: short names of the layers whose activations are shown; None for layers of at
            most ``MAX_CELLS`` cells.

    Attributes:
        name: name of the agent file, or of its folder for files called model.pth.
        checksum: checksum of the agent.
        remembers: whether the agent is recurrent.
        recording: recording of the agent.
        action_labels: names of the actions in the game.
        steps: steps of the trajectories.
        features: features by layer, in order of computation.
        layers: short names of all layers, after INPUT (the frame itself) if it has gradients.
        outputs: names from :meth:`outputs_at` for all layers, sorted by kind.
        tolerance: accepted completeness error.

    Raises:
        UserError: if a file is missing or damaged, no attributions are finished, the files do not
            belong together, or a layer in ``activations`` does not exist.
    """

    def __init__(self, agent_file: Path, data_dir: Path, attributions: Path, features_dir: Path,
                 objects_dir: Path, activations: tuple[str, ...] | None):
        policy = load_agent(agent_file)
        self.name = agent_title(agent_file)
        self.checksum = agent_sha256(agent_file)
        self.remembers = policy.recurrent
        self.recording = Recording(data_dir, policy, agent_file)
        self.action_labels = action_labels(self.recording.folder.game)
        self._store = AttributionStore(attributions)
        self._store.check_source(agent_digests(agent_file), self.recording.sha256)
        self.tolerance = self._store.tolerance()
        self._features_dir = features_dir
        self._objects = ResultStore(objects_dir, OBJECT_FILES)
        self.features = {name: read_features(features_dir, name) for name in self._store.layers()}
        for features in self.features.values():
            self._store.check_features(features)
        for name in activations or ():
            if name not in self.features:
                raise UserError(f"--activations names the layer '{name}', which has no attributed "
                                f"features{nearest(name, self.features)}")
        self._with_activations = {
            name for name, features in self.features.items()
            if math.prod(features.facts["grid"]) <= MAX_CELLS
        } if activations is None else {*activations}
        gradients = self._store.outputs(INPUT)
        self.layers = [*([INPUT] if gradients else []), *self.features]
        if not self.layers:
            raise UserError(f"{attributions} is not finished; run {ATTRIBUTION_SCRIPT}")
        self.steps = self._store.trajectories()
        self.outputs = [*dict.fromkeys(itertools.chain(*map(self.outputs_at, self.layers)))]
        # The sort is stable, so outputs of one kind keep their order.
        self.outputs.sort(key=lambda name: KINDS.index(kind_of(name)))

    def _has_all(self, entry: str, *key: object) -> bool:
        """Return whether an item with this entry and key is stored for every trajectory."""
        return all(self._store.has(entry, *key, number)
                   for number in range(self.steps.num_trajectories))

    def outputs_at(self, layer: str) -> list[str]:
        """Return the names of the outputs attributed to a layer, the value first.

        For layers other than the input, the names of quantities that the page shows like outputs
        follow: the stored products of gradient and activation (one per output), and the stored
        activations.
        """
        outputs = sorted(self._store.outputs(layer), key=lambda name: (name != "value", name))
        if layer == INPUT:
            return outputs
        products = [PRODUCTS + output for output in outputs
                    if self._has_all("gradient_activation", layer, output)]
        has_activations = layer in self._with_activations and self._has_all("activations", layer)
        return [*outputs, *products, *([ACTIVATIONS] if has_activations else [])]

    def frames(self, trajectory: int) -> np.ndarray:
        """Read the frames of a trajectory, uint8 (T, 64, 64, 3)."""
        return self.recording.read(self.steps.part(trajectory).frame_ids).frames

    def attribution(self, layer: str, output: str, trajectory: int) -> dict[str, np.ndarray]:
        """Read attributions along a trajectory, or a quantity that the page shows in the same way:
        gradient times activation, activations, or gradients with respect to the frame.

        Activations have a residual of zero. Gradients with respect to the frame are summed over
        colours; the sum is the rate at which the output changes when a pixel gets brighter.

        Returns:
            Arrays as in ``PageAgent.attribution``.
        """
        if layer == INPUT:
            arrays = self._store.read("gradients", output, trajectory)
            grey = arrays["gradients"].sum(axis=-1, keepdims=True, dtype=np.float32)
            return {"cells": grey * arrays["largest"][:, None, None, None],
                    "output": arrays["output"]}
        if output == ACTIVATIONS:
            cells = self._store.read("activations", layer, trajectory)["cells"]
            cells = np.concatenate([cells, np.zeros_like(cells[..., :1])], axis=-1)
            return {"cells": cells, "totals": cells.sum(axis=(1, 2), dtype=np.float32)}
        if output.startswith(PRODUCTS):
            return self._store.read("gradient_activation", layer, output.removeprefix(PRODUCTS),
                                    trajectory)
        return self._store.read("attributions", layer, output, trajectory)

    def lags(self, layer: str, output: str) -> int:
        """Return the largest number of steps L for which all trajectories have attributions over
        time; 0 without attributions over time."""
        if layer == INPUT or kind_of(output) != ATTRIBUTION:
            return 0
        return max((lags for lags in self._store.lags(layer, output)
                    if self._has_all("over_time", layer, output, lags)), default=0)

    def memory(self, layer: str, output: str, trajectory: int) -> dict[str, np.ndarray]:
        """Read attributions over time along a trajectory, as in ``PageAgent.memory``."""
        return self._store.read("over_time", layer, output, self.lags(layer, output), trajectory)

    def page_layer(self, name: str) -> PageLayer:
        """Return the page's content for a layer, given its short name, or for the frame (INPUT)."""
        available = self.outputs_at(name)
        outputs = tuple(number for number, output in enumerate(self.outputs)
                        if output in available)
        if name == INPUT:
            return PageLayer(name, "the frame itself", (FRAME_SIZE, FRAME_SIZE), 0, 1, 0,
                             np.zeros(0), {}, outputs, gradients=True)
        features = self.features[name]
        facts = features.facts
        return PageLayer(
            name, features.settings.get("layer", name), tuple(facts["grid"]),
            facts["first_pixel"], facts["stride"], features.number, self._stability(features),
            {title: facts[key] for key, title in _FACTS.items() if facts.get(key) is not None},
            outputs, bool(facts.get("partial")), objects=self._read_objects(name),
            **self._read_examples(features))

    def opening_layer(self) -> str:
        """Return the layer that the page opens on: the layer with the largest object score, or
        with the largest grid if no layer has a score; INPUT if only gradients are stored."""
        def rank(name: str) -> tuple[float, int]:
            score = (self._read_objects(name) or {"score": [None]})["score"][0]
            return (-1 if score is None or np.isnan(score) else score,
                    math.prod(self.features[name].facts["grid"]))

        return max(self.features, key=rank, default=INPUT)

    @staticmethod
    def _stability(features: LayerFeatures) -> np.ndarray:
        return np.array(features.facts.get("stability") or [np.nan] * features.number, dtype=float)

    def _read_objects(self, layer: str) -> dict | None:
        """Read the objects that features respond to, as in ``PageLayer.objects``; None if
        unknown."""
        features = self.features[layer]
        if not has_names(self._objects, layer, features.checksum):
            return None
        names = read_names(self._objects, layer)
        if len(names["features"]) != features.number:
            raise UserError(f"{self._objects.path} names another number of features of {layer}")
        table = self._objects.read("scores", layer)[["feature", "kind", *_SCORES]]
        table = table[table["auc"].notna()]
        return {
            "score": [names[key] for key in OBJECT_SCORES],
            "names": [
                "" if stability < MIN_STABILITY else feature["name"] or ""  # NaN: unknown
                for feature, stability in zip(names["features"], self._stability(features))],
            "kinds": [table[table["feature"] == number].sort_values("auc", ascending=False).drop(
                columns="feature").to_dict("records") for number in range(features.number)]}

    def _read_examples(self, features: LayerFeatures) -> dict:
        """Read examples of a layer's features, as fields of ``PageLayer``.

        Examples are frames of the recording in which the features were found. They are left out if
        the page shows another recording.
        """
        store = ResultStore(self._features_dir / features.name, FEATURES)
        items: list[tuple] = [("spatial_examples", f"{shares:g}") for shares in SUBDIVISIONS]
        items = [item for item in (*items, ("thumbnail_examples",)) if store.has(*item)]
        if not items or features.settings.get("recording_sha256") != self.recording.sha256:
            return {}
        examples = {item: Examples(**store.read(*item)) for item in items}
        numbers = np.concatenate([of_item.observations.ravel() for of_item in examples.values()])
        used = np.unique(numbers[numbers >= 0])
        if numbers.max(initial=-1) >= len(features.observations):
            raise UserError(f"{store.path} is damaged: its examples show missing observations")
        new_numbers = np.full(len(features.observations), -1)
        new_numbers[used] = np.arange(len(used))
        converted = {
            item: _convert_examples(of_item, new_numbers, float(item[1]) if item[1:] else None)
            for item, of_item in examples.items()}
        return {"thumbnails": converted.pop(("thumbnail_examples",), None),
                "spatial": tuple(converted.values()),
                "pictures": self.recording.read(features.observations[used]).frames,
                "seen": self._describe_frames(features.observations[used])}

    def _describe_frames(self, frame_ids: np.ndarray) -> np.ndarray:
        """Return the episode, row and level of recorded frames, given their ids (B, 2), and their
        trajectory and step, -1 for frames that no trajectory contains, int32 (B, 5)."""
        places = {frame: self.steps.place(step)
                  for step, frame in enumerate(map(tuple, self.steps.frame_ids.tolist()))}
        return np.array([
            (episode, row, self.recording.steps(episode)["level_seed"].iloc[0],
             *places.get((episode, row), (-1, -1)))
            for episode, row in frame_ids.tolist()], np.int32).reshape(-1, 5)


def _convert_examples(examples: Examples, new_numbers: np.ndarray,
                      shares: float | None) -> PageExamples:
    """Convert examples to the page's format, and renumber their observations.

    Args:
        examples: examples of a layer's features.
        new_numbers: new number of each observation, -1 for unused ones (observations,).
        shares: positions per cell along each axis; None for thumbnails.
    """
    observations = examples.observations
    shape = observations.shape
    if len(shape) == 2:  # patches of a thumbnail, in reading order
        side = min(THUMBNAIL_SIDE, shape[1])
        shape = (shape[0], -(-shape[1] // side), side)
    missing = int(np.prod(shape[1:])) - int(np.prod(observations.shape[1:]))

    def padded(array: np.ndarray, fill: float) -> np.ndarray:
        flat = array.reshape(len(array), -1, *array.shape[observations.ndim:])
        flat = np.pad(flat, [(0, 0), (0, missing)] + [(0, 0)] * (flat.ndim - 2),
                      constant_values=fill)
        return flat.reshape(*shape, *array.shape[observations.ndim:])

    boxes = examples.boxes.astype(np.float32)
    centres = (boxes[..., :2] + boxes[..., 2:]) / 2 - 0.5  # position 0 is the middle of a pixel
    renumbered = np.where(observations >= 0, new_numbers[np.maximum(observations, 0)], -1)
    return PageExamples(padded(renumbered, -1), padded(centres, 0), padded(examples.strengths, 0),
                        shares)
