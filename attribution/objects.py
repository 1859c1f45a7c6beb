"""Score the features of an agent's layers as detectors of objects, see ``ObjectsOptions``.

A killed run resumes after the masks or the last finished layer; more layers can be added later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from agents.replay import recorded_game
from attribution.checking.object_scores import (
    OBJECT_FILES,
    cells_of,
    has_names,
    kinds_in,
    packed,
    read_names,
    rendered_without,
    score_difference,
    score_features,
    unpacked,
)
from attribution.config import ANALYSES
from attribution.context import (
    AttributionContext,
    AttributionOptions,
    feature_activations,
)
from attribution.layers import Bottleneck
from attribution.results import LayerFeatures, finished_layers
from common.cli import count
from common.errors import UserError
from common.files import versions
from common.options import command, option
from common.results import ResultStore
from common.tables import finite_or_none
from stats.report import format_interval


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectsOptions(AttributionOptions):
    """Score the features of an agent's layers as detectors of objects, name each feature after the
    kind of object that it detects best, and list frames in which it is strongly active away from
    the object. The exact masks of objects in recorded frames come from replaying the recording in
    the real game."""

    features_dir: Path = option(ANALYSES / "features", "output folder of python -m "
                                "attribution.features; without --layers, all of its layers with a "
                                "spatial map are used")
    other_features_dir: Path | None = option(
        None, "folder of other features of the same layers, such as features found with --nmf_of "
              "activations, whose scores in the same frames are compared")
    num_observations: int = option(
        2048, "number of frames, drawn evenly from the recorded episodes", type=count)
    output_dir: Path = option(ANALYSES / "objects", "folder to write to")


def score_objects(options: ObjectsOptions) -> ResultStore:
    """Write the scores of the features, and return their folder."""
    context = options.open_context(None if options.layers
                                   else finished_layers(options.features_dir))
    layers = [layer for layer in context.bottlenecks if layer.layer.is_map]
    if not layers:
        raise UserError("objects are compared with the cells of a layer, and "
                        f"{', '.join(layer.name for layer in context.bottlenecks)} has none; give "
                        "--layers with a spatial map")
    kinds = kinds_in(recorded_game(context.recording.folder))
    features = {layer.name: context.features(options.features_dir, layer) for layer in layers}
    others = {layer.name: context.features(options.other_features_dir, layer) for layer in layers
              } if options.other_features_dir else {}
    names = [kind.name for kind in kinds]
    observations = context.recording.observations(options.num_observations, options.seed)
    store = ResultStore(options.output_dir, OBJECT_FILES)
    if options.dry_run:
        print(f"{len(observations)} observations of {len(context.recording.lengths)} episodes; "
              f"layers: {', '.join(features)}; kinds of object: {', '.join(names)}")
        return store
    store.open({**context.provenance, "num_observations": options.num_observations,
                "seed": options.seed, "kinds": names, "versions": versions()}, options.overwrite)
    arrays = store.compute("masks", function=lambda: {
        "observations": observations, "masks": packed(np.stack([
            pictures.masks for _, pictures in rendered_without(
                context.recording.folder, observations, kinds)]))})
    for layer in layers:
        score_layer(store, context, layer, names, features[layer.name], others.get(layer.name),
                    arrays, options.seed)
    print(f"wrote {options.output_dir}: {len(observations)} observations")
    return store


def score_layer(store: ResultStore, context: AttributionContext, layer: Bottleneck,
                names: Sequence[str], own: LayerFeatures, other: LayerFeatures | None,
                arrays: Mapping[str, np.ndarray], seed: int) -> None:
    """Write and print the scores of a layer's features.

    Args:
        store: open folder.
        names: names of the kinds of object.
        own: the features.
        other: features to compare them with; None for no comparison.
        arrays: the entry ``masks`` of the folder.
    """
    observations, masks = arrays["observations"], unpacked(arrays["masks"])
    has_scores = has_names(store, layer.name, own.checksum)
    if not has_scores or other:
        activations = feature_activations(context, layer, own, observations)
        touched = np.moveaxis(cells_of(masks, layer), 1, -1)
    if not has_scores:
        score_features(store, layer, own.checksum, names, activations, touched, observations, seed)
    if other:
        difference, low, high = map(finite_or_none, score_difference(
            activations, feature_activations(context, layer, other, observations), touched,
            observations[:, 0], seed))
        store.write("compared", layer.name, value={
            "features_sha256": own.checksum, "other_features_sha256": other.checksum,
            "difference": difference, "low_95": low, "high_95": high})
    scores = read_names(store, layer.name)
    interval = format_interval(scores["score"], scores["score_low_95"], scores["score_high_95"],
                               ".3f")
    chance = format_interval(scores["score_chance"], None, None, ".3f")
    print(f"{layer.name}: object score {interval}, by chance {chance}; features: "
          f"{', '.join(str(feature['name']) for feature in scores['features'])}")


main = command(ObjectsOptions, score_objects)

if __name__ == "__main__":
    raise SystemExit(main())
