"""Name the features of an agent's layers by the kind of object that each goes with, score them, and
list the frames in which they are active without it: by exact masks of the objects in recorded
frames, from the real game played once more.

A killed run continues after the masks and after each layer; more layers can be added later.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from agents.replay import recorded_game
from attribution.checking.hallucinations import hallucinations
from attribution.checking.object_files import ObjectsFolder
from attribution.checking.object_scores import cells_of, object_scores, score_difference
from attribution.checking.recorded_objects import kinds_in, painted
from attribution.checking.sources import feature_activations
from attribution.context import AttributionContext, add_agent_flags, add_output_flags
from attribution.results import finished_layers
from common.cli import Parser, count, set_up_logging
from common.errors import UserError, script_main
from common.files import versions


def parser() -> Parser:
    flags = Parser(__doc__)
    add_agent_flags(flags)
    flags.add_argument("--features_dir", type=Path,
                       default=Path("analysis") / "attribution" / "features",
                       help="folder of python -m attribution.features; its layers with cells if "
                            "--layers is not given")
    flags.add_argument("--other_features_dir", type=Path,
                       help="other features of the same layers, such as those of --nmf_of "
                            "activations, whose scores in the same frames are subtracted")
    flags.add_argument("--num_observations", type=count, default=2048,
                       help="frames, drawn evenly from the recording's episodes")
    add_output_flags(flags, "objects")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    set_up_logging(args.log_level)
    context = AttributionContext(args, None if args.layers else finished_layers(args.features_dir))
    bottlenecks = [bottleneck for bottleneck in context.bottlenecks if bottleneck.layer.is_map]
    if not bottlenecks:
        raise UserError("objects go with the cells of a layer, and "
                        f"{', '.join(layer.name for layer in context.bottlenecks)} has none; give "
                        "--layers with cells")
    kinds = kinds_in(recorded_game(context.recording.folder))
    features = {bottleneck.name: context.features(args.features_dir, bottleneck)
                for bottleneck in bottlenecks}
    others = {bottleneck.name: context.features(args.other_features_dir, bottleneck)
              for bottleneck in bottlenecks
              } if args.other_features_dir else {}
    names = [kind.name for kind in kinds]
    observations = context.recording.observations(args.num_observations, args.seed)
    if args.dry_run:
        print(f"{len(observations)} observations of {len(context.recording.lengths)} episodes; "
              f"layers: {', '.join(features)}; kinds of object: {', '.join(names)}")
        return
    folder = ObjectsFolder(args.output_dir)
    folder.open({**context.provenance, "num_observations": args.num_observations,
                 "seed": args.seed, "kinds": names, "versions": versions()}, args.overwrite)
    if not folder.masks_file.exists():
        folder.add_masks(observations, np.stack([
            pictures.masks for pictures in painted(context.recording.folder, observations, kinds)]))
    observations, masks = folder.masks()
    for bottleneck in bottlenecks:
        own, other = features[bottleneck.name], others.get(bottleneck.name)
        has_scores = folder.has(bottleneck.name, own.checksum)
        if not has_scores or other:
            activations = feature_activations(context, bottleneck, own, observations)
            touched = np.moveaxis(cells_of(masks, bottleneck), 1, -1)
        if not has_scores:
            scores = object_scores(activations, touched, observations[:, 0], args.seed)
            folder.add_scores(bottleneck.name, bottleneck.layer.name, own.checksum, scores, {
                int(feature): hallucinations(activations[..., feature],
                                             touched[..., scores.best[feature]],
                                             observations[:, 0], args.seed)
                for feature in np.flatnonzero(scores.named)}, observations)
        if other:
            folder.add_difference(bottleneck.name, own.checksum, other.checksum, score_difference(
                activations, feature_activations(context, bottleneck, other, observations), touched,
                observations[:, 0], args.seed))
        print(said(bottleneck.name, folder.names(bottleneck.name),
                   folder.difference(bottleneck.name)))
    print(f"wrote {args.output_dir}: {len(observations)} observations of "
          f"{len(np.unique(observations[:, 0]))} episodes")


def said(layer: str, found: dict, compared: dict) -> str:
    """The scores of a layer in a line."""
    each = [f"{each['name'] or 'no object'} {each['score']:.2f}" if each["score"] is not None
            else "none" for each in found["features"]]
    mean = "unknown" if found["score"] is None else (
        f"{found['score']:.3f} ({found['score_low_95']:.3f} to {found['score_high_95']:.3f}), by "
        f"chance {found['score_chance']:.3f}")
    more = "" if compared.get("difference") is None else (
        f"; {compared['difference']:+.3f} ({compared['low_95']:+.3f} to "
        f"{compared['high_95']:+.3f}) against the other features")
    return f"{layer}: object score {mean}; features: {', '.join(each)}{more}"


if __name__ == "__main__":
    raise SystemExit(main())
