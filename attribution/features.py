"""Find the features of an agent's layers: directions into which the value's attributions are
decomposed, and dataset examples of each feature.

A killed run resumes after the last finished part of the attributions; more layers can be added
later.
"""

from __future__ import annotations

import argparse
import functools
import logging
from pathlib import Path

import numpy as np

from agents.layers import STATE, all_layers
from agents.outputs import VALUE, outputs_named
from attribution.context import (
    AttributionContext,
    add_agent_flags,
    add_integral_flags,
    add_output_flags,
)
from attribution.feature_directions import (
    ATTRIBUTIONS,
    KINDS,
    OBSERVATIONS_PER_FEATURE,
    LayerSamples,
    features_along,
    find_features,
)
from attribution.feature_examples import SUBDIVISIONS, spatial_examples, thumbnail_examples
from attribution.integrated_gradients import (
    Integration,
    LayerIntegratedGradients,
    completeness_errors,
)
from attribution.layers import Bottleneck
from attribution.recordings import batches, check_finite_frames, concatenate
from attribution.reduction import Reducer, flatten_cells
from attribution.results import (
    ATTRIBUTION_SCRIPT,
    FEATURES,
    INPUT,
    are_finished,
    error_quantiles,
    finish_features,
)
from common.cli import Parser, count, set_up_logging, whole
from common.errors import UserError, script_main
from common.files import versions
from common.progress import Progress
from common.results import ResultStore
from interventions.projector import Projector

ZERO, MEAN = BASELINES = ("zero", "mean")
BATCHES_PER_PART = 4
NUM_EPISODES = 4000  # the default of analysis/hidden_analysis_precompute.py

logger = logging.getLogger(__name__)


def parser() -> Parser:
    flags = Parser(__doc__)
    add_agent_flags(flags)
    flags.add_argument("--num_observations", type=count, default=4096,
                       help="number of frames, drawn evenly from the recorded episodes")
    flags.add_argument("--nmf_features", type=whole(1, 1000), default=8,
                       help="number of features per layer")
    flags.add_argument("--nmf_of", choices=KINDS, default=ATTRIBUTIONS,
                       help="quantity that is decomposed into features")
    flags.add_argument("--precomp_dir", type=Path,
                       help="output folder of analysis/hidden_analysis_precompute.py for this "
                            "agent; its independent components become the features of the layer "
                            "hidden_state")
    flags.add_argument("--num_episodes", type=count, default=NUM_EPISODES,
                       help="number of episodes from which these components were computed; it is "
                            "part of their file names")
    add_integral_flags(flags)
    flags.add_argument("--baseline", choices=BASELINES, default=ZERO,
                       help="baseline of the integrals: zero, or the mean activations over the "
                            "observations")
    add_output_flags(flags, "features")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    set_up_logging(args.log_level)
    context = AttributionContext(args)
    if context.wants_frame:
        raise UserError(f"the layer '{INPUT}' is the frame itself, which has gradients and no "
                        f"features; {ATTRIBUTION_SCRIPT} --layers {INPUT} gives them")
    observations = context.recording.observations(args.num_observations, args.seed)
    check_number(len(observations), args.num_observations, args.nmf_features)
    if args.dry_run:
        print(f"{len(observations)} observations of {len(context.recording.lengths)} episodes; "
              "layers: " + ", ".join(f"{layer.name} {layer.shape}"
                                     for layer in context.bottlenecks))
        return
    components = read_components(context, args)
    for bottleneck in context.bottlenecks:
        find_layer_features(context, bottleneck, observations, args,
                            components if bottleneck.layer.name == STATE else None)
    print(f"wrote {args.output_dir}")


def find_layer_features(context: AttributionContext, bottleneck: Bottleneck,
                        observations: np.ndarray, args: argparse.Namespace,
                        components: tuple[np.ndarray, dict[str, str]] | None) -> None:
    """Find and write the features of a layer, unless they are already stored.

    Args:
        context: the agent and its recording.
        bottleneck: the layer.
        observations: frame ids (O, 2).
        args: the parsed flags.
        components: independent components to use as features; see :func:`read_components`.
    """
    name, paths = bottleneck.name, [layer.name for layer in all_layers(context.policy)]
    store = ResultStore(args.output_dir / name, FEATURES)
    settings = {
        **context.provenance, "layer": bottleneck.layer.name, "name": name,
        "place": paths.index(bottleneck.layer.name), "num_observations": args.num_observations,
        "nmf_features": args.nmf_features, "nmf_of": args.nmf_of, "seed": args.seed,
        "integrate_steps": args.integrate_steps, "tolerance": args.tolerance,
        "baseline": args.baseline, "components": components[1] if components else None,
        "versions": versions()}
    if are_finished(store, settings) and not args.overwrite:
        print(f"{name}: already there")
        return
    store.open(settings, args.overwrite)
    integration = Integration(args.integrate_steps, tolerance=args.tolerance)
    samples, mean, value = sample_layer(context, bottleneck, integration, args.baseline == MEAN,
                                        observations, store)
    reducer, facts = (
        find_features(samples, args.nmf_features, args.seed, args.nmf_of) if components is None
        else features_along(samples, components[0], args.nmf_features))
    if bottleneck.layer.is_map:
        write_examples(store, reducer, samples, bottleneck)
    finish_features(store, {
        "grid": bottleneck.shape[1:], "channels": bottleneck.shape[0],
        "stride": bottleneck.layer.stride, "first_pixel": bottleneck.layer.first_pixel,
        "signed": samples.signed, "partial": bottleneck.bypassed,
        "observations": len(observations), **facts, **value},
        directions=reducer.directions, mean_activations=mean, observations=observations)
    print(summary(name, facts, value))


def read_components(context: AttributionContext, args: argparse.Namespace
                    ) -> tuple[np.ndarray, dict[str, str]] | None:
    """Read the independent components of hidden states selected by the flags, if any.

    Returns:
        Directions of the components, float32 (k, D), and checksums of their files; None without
        --precomp_dir.

    Raises:
        UserError: if the components are missing, damaged, or belong to an agent with a different
            hidden state.
    """
    if args.precomp_dir is None:
        return None
    projector, checksums = Projector.load_for(context.policy.hidden_state_size, args.precomp_dir,
                                              args.num_episodes, args.agent_file)
    return projector.directions("ica").numpy(), checksums


def check_number(number: int, requested: int, features: int) -> None:
    """Warn if there are fewer observations than requested.

    Raises:
        UserError: if there are too few observations for the features.
    """
    if number >= requested:
        return
    needed = OBSERVATIONS_PER_FEATURE * features
    if number < needed:
        raise UserError(f"the recording has {number} frames, and {features} features need "
                        f"{needed}; record more episodes, or give fewer --nmf_features")
    logger.warning("the recording has %d frames, fewer than the %d of --num_observations; going "
                   "on with these", number, requested)


def sample_layer(context: AttributionContext, bottleneck: Bottleneck, integration: Integration,
                 from_mean: bool, observations: np.ndarray, store: ResultStore
                 ) -> tuple[LayerSamples, np.ndarray, dict]:
    """Compute a layer's activations, and attributions of the value to it, in all observations.

    Args:
        context: the agent and its recording.
        bottleneck: the layer.
        integration: settings of the numerical integration.
        from_mean: integrate from the mean activations instead of zero.
        observations: frame ids (O, 2).
        store: open folder, which stores partial results.

    Returns:
        Activations and attributions; the mean activations (C, H, W); and statistics of the value,
        see :func:`facts_of_value`.

    Raises:
        UserError: if a value is not finite; the message names its frame.
    """
    make = functools.partial(LayerIntegratedGradients, context.policy, context.compute, bottleneck,
                             outputs_named([VALUE]), integration)
    attributor, runs = make(), []
    for frame_ids in batches(observations):
        frames = context.recording.read(frame_ids)
        prefix = attributor.run_prefix(frames.frames, frames.entering)
        maps = prefix.activations.cpu().numpy().reshape(len(frame_ids), *bottleneck.shape)
        check_finite_frames(maps, frame_ids, f"activations of the layer {bottleneck.name}")
        runs.append({"activations": maps,
                     "values": attributor.outputs_at(prefix, frames.actions)[0]})
    activations, values = concatenate(runs).values()
    mean = activations.mean(axis=0, dtype=np.float64).astype(np.float32)
    attributor = make(mean if from_mean else None)
    deviations = np.array([values.std()])

    def attribute(frame_ids: np.ndarray) -> dict[str, np.ndarray]:
        frames = context.recording.read(frame_ids)
        result = attributor.attribute(attributor.run_prefix(frames.frames, frames.entering),
                                      frames.actions, deviations)
        check_finite_frames(result.values[0], frame_ids,
                            f"attributions to the layer {bottleneck.name}")
        return {"attributions": result.values[0], "outputs": result.outputs[0],
                "baselines": result.baselines[0]}

    def attribute_part(begin: int) -> dict[str, np.ndarray]:
        return concatenate([*map(attribute, all_ids[begin:begin + BATCHES_PER_PART])])

    parts, all_ids = [], list(batches(observations))
    with Progress(len(observations), f"{bottleneck.name} observation") as progress:
        for number, begin in enumerate(range(0, len(all_ids), BATCHES_PER_PART)):
            parts.append(store.compute(
                "part", number, function=functools.partial(attribute_part, begin)))
            progress.update(progress.done + len(parts[-1]["outputs"]))
    everything = concatenate(parts)
    samples = LayerSamples(bottleneck.name, everything["attributions"], activations,
                           observations[:, 0])
    return samples, mean, facts_of_value(everything)


def facts_of_value(arrays: dict[str, np.ndarray]) -> dict:
    """Compute means and standard deviations of the value and its baseline, and quantiles of the
    completeness errors.

    Args:
        arrays: arrays "attributions" (O, C, H, W), "outputs" and "baselines" (O,).
    """
    values, baselines = arrays["outputs"], arrays["baselines"]
    sums = arrays["attributions"].reshape(len(values), -1).sum(axis=1, dtype=np.float64)
    errors = completeness_errors(sums[None], values[None], baselines[None],
                                 np.array([values.std()]))
    return {"value_mean": float(values.mean()), "value_deviation": float(values.std()),
            "baseline_mean": float(baselines.mean()), "baseline_deviation": float(baselines.std()),
            **error_quantiles(errors)}


def write_examples(store: ResultStore, reducer: Reducer, samples: LayerSamples,
                   bottleneck: Bottleneck) -> None:
    """Write dataset examples of the features of a layer with cells."""
    activations = np.concatenate([reducer.activations(flatten_cells(maps)).astype(np.float32)
                                  for maps in batches(samples.activations)])
    activations = np.moveaxis(activations.reshape(
        len(samples.episodes), *bottleneck.shape[1:], -1), -1, 1)
    for subdivision in SUBDIVISIONS:
        store.write("spatial_examples", f"{subdivision:g}",
                    value=vars(spatial_examples(activations, bottleneck, subdivision)))
    store.write("thumbnail_examples", value=vars(thumbnail_examples(activations, bottleneck)))


def summary(name: str, facts: dict, value: dict) -> str:
    """Format the properties of a layer's features in one line."""
    convergence = "" if facts.get("converged", True) else (
        f"; not converged: further iterations make the error {facts['change']:.2%} smaller")
    stability = "" if facts["stability"] is None else (
        f", stability {min(facts['stability']):.2f} to {max(facts['stability']):.2f}")
    return (f"{name}: {facts['explained']:.1%} of squared attribution explained, residual "
            f"{facts['residual_share']:.1%} of |attribution|{stability}; gap median "
            f"{value['gap_median']:.1%}, 99 % {value['gap_99']:.1%}{convergence}")


if __name__ == "__main__":
    raise SystemExit(main())
