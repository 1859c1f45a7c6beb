"""Attribute an agent's outputs to the features of its layers, along trajectories of a recording.

A killed run resumes after the last finished trajectory; more layers and outputs can be added later.
Each shard attributes along its own trajectories; --join then writes the summaries.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from agents.outputs import POLICY, PUBLISHED_POLICY, VALUE, Output, outputs_named
from attribution.advantages import AUTO, find_advantage_settings
from attribution.along_trajectories import TrajectoryAttributor
from attribution.context import (
    AttributionContext,
    add_agent_flags,
    add_integral_flags,
    add_output_flags,
)
from attribution.integrated_gradients import GAUSS_LEGENDRE, RIEMANN_RIGHT, RULES, Integration
from attribution.recordings import batches
from attribution.results import INPUT, AttributionStore, finished_layers
from attribution.trajectories import (
    CHOICES,
    FAILURES,
    IN_ORDER,
    Trajectories,
    gather_trajectories,
)
from common.cli import Parser, count, from_zero, set_up_logging, whole
from common.errors import UserError, script_main
from common.files import versions
from common.shards import WHOLE, add_shard_flags

NUM_REFERENCE = 1024  # observations over which the standard deviation of an output is computed
PUBLISHED = Integration(10, RIEMANN_RIGHT, None)


def parser() -> Parser:
    flags = Parser(__doc__)
    add_agent_flags(flags)
    flags.add_argument("--features_dir", type=Path,
                       default=Path("analysis") / "attribution" / "features",
                       help="output folder of python -m attribution.features; without --layers, "
                             "all of its layers are used")
    flags.add_argument("--outputs", nargs="+", metavar="OUTPUT", default=[VALUE],
                       help="scalars to attribute, such as value, log_prob_right, "
                            f"log_prob_any_right or taken; {POLICY}: all log-probabilities of "
                            f"actions and directions; {PUBLISHED_POLICY}: all logits and their "
                            "sums")
    flags.add_argument("--num_trajectories", type=count, default=8,
                       help="number of trajectories, each a sequence of consecutive episodes")
    flags.add_argument("--num_steps", type=count, default=512,
                       help="number of steps per trajectory")
    flags.add_argument("--episodes", type=from_zero, nargs="+", metavar="EPISODE", default=[],
                       help="numbers of the recorded episodes to concatenate, in this order; if "
                            "not given, all episodes")
    flags.add_argument("--choose", choices=CHOICES, default=IN_ORDER,
                       help=f"order of the episodes; {FAILURES}: episodes without a reward first")
    add_integral_flags(flags)
    flags.add_argument("--integration", choices=RULES, default=GAUSS_LEGENDRE,
                       help="quadrature rule: Gauss-Legendre, or the right Riemann sum")
    flags.add_argument("--memory_steps", type=whole(0, 64), default=0, metavar="STEPS",
                       help="for agents with memory: also attribute to the layer at each of the "
                            "last STEPS steps and to older memory; 8 suffices for most agents and "
                            "takes 8 times as long")
    flags.add_argument("--gradient_activation", action="store_true",
                       help="for comparison, also compute gradient times activation of each "
                            "output, reduced to the same features")
    flags.add_argument("--published_mode", action="store_true",
                       help="use the published settings, for comparison: right Riemann sum with 10 "
                            f"nodes, no refinement, and logits instead of {POLICY} in --outputs")
    add_output_flags(flags, "attribution")
    add_shard_flags(flags, "the trajectories")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    set_up_logging(args.log_level)
    context = AttributionContext(args, None if args.layers else finished_layers(args.features_dir))
    outputs, integration = select_outputs(args)
    if args.memory_steps and not context.policy.recurrent:
        raise UserError("--memory_steps is for agents with memory, which this one has not; leave "
                        "it out")
    steps = gather_trajectories(context.recording.folder, args.num_trajectories, args.num_steps,
                                args.episodes, args.choose)
    trajectories = {number: steps.part(number).frame_ids
                    for number in range(steps.num_trajectories)}
    features = {layer.name: context.features(args.features_dir, layer)
                for layer in context.bottlenecks}
    layers = [*([INPUT] if context.wants_frame else []), *features]
    description = (f"{len(trajectories)} trajectories of "
                   f"{', '.join(str(len(ids)) for ids in trajectories.values())} steps; "
                   f"layers: {', '.join(layers)}; outputs: "
                   + ", ".join(output.name for output in outputs))
    if args.dry_run:
        print(description)
        return
    if len(trajectories) < args.num_trajectories:
        print(f"the recording has episodes for {len(trajectories)} of {args.num_trajectories} "
              "trajectories")
    store = AttributionStore(args.output_dir)
    store.open(
        {**context.provenance, "num_trajectories": args.num_trajectories,
         "num_steps": args.num_steps, "choose": args.choose, "episodes": args.episodes,
         "seed": args.seed, **vars(integration), "published_mode": args.published_mode,
         "unit": vars(find_advantage_settings(args.agent_file, AUTO,
                                              context.recording.all_steps())),
         "versions": versions()}, args.overwrite, args.shard,
        {"layers": layers, "outputs": [output.name for output in outputs],
         "memory_steps": args.memory_steps, "gradient_activation": args.gradient_activation,
         "features_sha256": [each.checksum for each in features.values()]}, args.join,
        [*items_of(args, layers, outputs, len(trajectories))])
    is_whole = args.shard == WHOLE
    if is_whole and not store.has("trajectories"):
        store.write("trajectories", value=vars(without_noise(context, steps)))
    trajectories = {number: trajectories[number] for number in args.shard.of([*trajectories])}
    attributor = TrajectoryAttributor(
        context, store, outputs, output_deviations(context, outputs, args.seed), trajectories)
    if context.wants_frame:
        attributor.differentiate_frames()
        if is_whole:
            print(attributor.summarise(INPUT, integration.tolerance))
    for bottleneck in context.bottlenecks:
        layer = features[bottleneck.name]
        store.check_features(layer)
        if is_whole:
            store.write("layer", layer.name, value={
                "features_sha256": layer.checksum, "features_dir": str(args.features_dir),
                "layer": bottleneck.layer.name, "place": layer.settings["place"],
                "partial": bottleneck.bypassed})
        attributor.attribute(bottleneck, layer, integration)
        if args.memory_steps:
            attributor.attribute_over_time(bottleneck, layer, integration, args.memory_steps)
        if args.gradient_activation:
            attributor.multiply_gradients(bottleneck, layer)
        if is_whole:
            print(attributor.summarise(layer.name, integration.tolerance))
    store.finish()
    print(f"wrote {args.output_dir}: {description}" if is_whole else
          f"attributed along {len(trajectories)} trajectories in {args.output_dir}")


def select_outputs(args: argparse.Namespace) -> tuple[tuple[Output, ...], Integration]:
    """Return the outputs and the integration that the flags select."""
    if not args.published_mode:
        return outputs_named(args.outputs), Integration(args.integrate_steps, args.integration,
                                                        args.tolerance)
    return outputs_named([PUBLISHED_POLICY if name == POLICY else name for name in args.outputs]
                         ), PUBLISHED


def items_of(args: argparse.Namespace, layers: Sequence[str], outputs: Sequence[Output],
             num_trajectories: int) -> Iterator[tuple]:
    """Yield the keys of the items that the requested attributions need to be complete."""
    for layer in layers:
        for output in outputs:
            yield "summary", layer, output.name
            for number in range(num_trajectories if layer != INPUT else 0):
                if args.memory_steps:
                    yield "over_time", layer, output.name, args.memory_steps, number
                if args.gradient_activation:
                    yield "gradient_activation", layer, output.name, number


def without_noise(context: AttributionContext, steps: Trajectories) -> Trajectories:
    """Replace the log-probabilities by those of the policy without action noise."""
    if not context.recording.description.get("action_noise"):
        return steps
    log_probs = [context.run(ids)[0].log_probs.cpu().numpy() for ids in batches(steps.frame_ids)]
    return dataclasses.replace(steps, log_probs=np.concatenate(log_probs))


def output_deviations(context: AttributionContext, outputs: Sequence[Output],
                      seed: int) -> dict[str, float]:
    """Return the standard deviation of each output over recorded observations, by output name."""
    scalars = []
    for frame_ids in batches(context.recording.observations(NUM_REFERENCE, seed)):
        run, actions = context.run(frame_ids)
        scalars.append(torch.stack([output(run, actions) for output in outputs]).double().cpu())
    return dict(zip((output.name for output in outputs),
                    torch.cat(scalars, dim=1).numpy().std(axis=1).tolist()))


if __name__ == "__main__":
    raise SystemExit(main())
