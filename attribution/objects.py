"""Score the features of an agent's layers as detectors of objects, name each feature after the kind
of object that it detects best, and list frames in which it is strongly active away from the object.
The exact masks of objects in recorded frames come from replaying the recording in the real game.

A killed run resumes after the masks or the last finished layer; more layers can be added later.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from agents.replay import recorded_game
from attribution.checking.object_scores import (
    OBJECT_FILES,
    cells_of,
    finite_or_none,
    has_names,
    kinds_in,
    packed,
    read_names,
    rendered_without,
    score_difference,
    score_features,
    unpacked,
)
from attribution.context import (
    AttributionContext,
    add_agent_flags,
    add_output_flags,
    feature_activations,
)
from attribution.results import finished_layers
from common.cli import Parser, count, set_up_logging
from common.errors import UserError, script_main
from common.files import versions
from common.results import ResultStore


def parser() -> Parser:
    flags = Parser(__doc__)
    add_agent_flags(flags)
    flags.add_argument("--features_dir", type=Path,
                       default=Path("analysis") / "attribution" / "features",
                       help="output folder of python -m attribution.features; without --layers, "
                            "all of its layers with a spatial map are used")
    flags.add_argument("--other_features_dir", type=Path,
                       help="folder of other features of the same layers, such as features found "
                            "with --nmf_of activations, whose scores in the same frames are "
                            "compared")
    flags.add_argument("--num_observations", type=count, default=2048,
                       help="number of frames, drawn evenly from the recorded episodes")
    add_output_flags(flags, "objects")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    set_up_logging(args.log_level)
    context = AttributionContext(args, None if args.layers else finished_layers(args.features_dir))
    layers = [layer for layer in context.bottlenecks if layer.layer.is_map]
    if not layers:
        raise UserError("objects are compared with the cells of a layer, and "
                        f"{', '.join(layer.name for layer in context.bottlenecks)} has none; give "
                        "--layers with a spatial map")
    kinds = kinds_in(recorded_game(context.recording.folder))
    features = {layer.name: context.features(args.features_dir, layer) for layer in layers}
    others = {layer.name: context.features(args.other_features_dir, layer) for layer in layers
              } if args.other_features_dir else {}
    names = [kind.name for kind in kinds]
    observations = context.recording.observations(args.num_observations, args.seed)
    if args.dry_run:
        print(f"{len(observations)} observations of {len(context.recording.lengths)} episodes; "
              f"layers: {', '.join(features)}; kinds of object: {', '.join(names)}")
        return
    store = ResultStore(args.output_dir, OBJECT_FILES)
    store.open({**context.provenance, "num_observations": args.num_observations,
                "seed": args.seed, "kinds": names, "versions": versions()}, args.overwrite)
    arrays = store.compute("masks", function=lambda: {
        "observations": observations, "masks": packed(np.stack([
            pictures.masks for _, pictures in rendered_without(
                context.recording.folder, observations, kinds)]))})
    observations, masks = arrays["observations"], unpacked(arrays["masks"])
    for layer in layers:
        own, other = features[layer.name], others.get(layer.name)
        has_scores = has_names(store, layer.name, own.checksum)
        if not has_scores or other:
            activations = feature_activations(context, layer, own, observations)
            touched = np.moveaxis(cells_of(masks, layer), 1, -1)
        if not has_scores:
            score_features(store, layer, own.checksum, names, activations, touched, observations,
                           args.seed)
        if other:
            difference, low, high = map(finite_or_none, score_difference(
                activations, feature_activations(context, layer, other, observations), touched,
                observations[:, 0], args.seed))
            store.write("compared", layer.name, value={
                "features_sha256": own.checksum, "other_features_sha256": other.checksum,
                "difference": difference, "low_95": low, "high_95": high})
        scores = read_names(store, layer.name)
        score, low, high, chance = (np.nan if scores[key] is None else scores[key] for key in (
            "score", "score_low_95", "score_high_95", "score_chance"))
        print(f"{layer.name}: object score {score:.3f} ({low:.3f} to {high:.3f}), by chance "
              f"{chance:.3f}; features: {', '.join(str(f['name']) for f in scores['features'])}")
    print(f"wrote {args.output_dir}: {len(observations)} observations")


if __name__ == "__main__":
    raise SystemExit(main())
