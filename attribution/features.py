"""Find the features of an agent's layers, see ``FeaturesOptions``.

A killed run resumes after the last finished part of the attributions; more layers can be added
later.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from pathlib import Path

import numpy as np

from agents.layers import STATE, all_layers
from agents.outputs import VALUE, outputs_named
from attribution.config import ANALYSES
from attribution.context import (
    AttributionContext,
    AttributionOptions,
    IntegralOptions,
)
from attribution.feature_directions import (
    ATTRIBUTIONS,
    KINDS,
    SUBDIVISIONS,
    LayerSamples,
    features_along,
    find_features,
    spatial_examples,
    thumbnail_examples,
)
from attribution.integrated_gradients import Integration, LayerIntegratedGradients
from attribution.layers import Bottleneck
from attribution.recordings import batches, check_finite_frames, concatenate
from attribution.reduction import flatten_cells
from attribution.results import (
    ATTRIBUTION_SCRIPT,
    FEATURES,
    INPUT,
    error_quantiles,
    finish_features,
    is_finished,
)
from common.cli import count, whole
from common.errors import UserError
from common.files import versions
from common.options import command, option
from common.progress import with_progress
from common.results import ResultStore
from interventions.projector import Projector

# Letters in shape comments: O observations, C H W channels and grid of a layer, F features,
# D hidden units.
ZERO, MEAN = BASELINES = ("zero", "mean")
FRAMES_PER_PART = 256  # frames whose attributions are stored together, to resume a killed run
NUM_EPISODES = 4000  # same default as in analysis/hidden_analysis_precompute.py

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeaturesOptions(IntegralOptions, AttributionOptions):
    """Find the features of an agent's layers: directions into which the value's attributions are
    decomposed, and dataset examples of each feature."""

    num_observations: int = option(
        4096, "number of frames, drawn evenly from the recorded episodes", type=count)
    nmf_features: int = option(8, "number of features per layer", type=whole(1, 1000))
    nmf_of: str = option(ATTRIBUTIONS, "quantity that is decomposed into features", choices=KINDS)
    precomp_dir: Path | None = option(
        None, "output folder of analysis/hidden_analysis_precompute.py for this agent; its "
              "independent components become the features of the layer hidden_state")
    num_episodes: int = option(
        NUM_EPISODES, "number of episodes from which the components were computed; it is part of "
                      "their file names", type=count)
    baseline: str = option(
        ZERO, "baseline of the integrals: zero, or the mean activations over the observations",
        choices=BASELINES)
    output_dir: Path = option(ANALYSES / "features", "folder to write to")

    def read_components(self, hidden_state_size: int
                        ) -> tuple[np.ndarray, dict[str, str]] | None:
        """Read the directions of k independent components of the hidden state, float32 (k, D), and
        the checksums of their files by name; return None without ``precomp_dir``."""
        if self.precomp_dir is None:
            return None
        projector, checksums = Projector.load_for(hidden_state_size, self.precomp_dir,
                                                  self.num_episodes, self.agent_file)
        return projector.directions("ica").numpy(), checksums


def find_all_features(options: FeaturesOptions) -> Path:
    """Write the features of every layer, and return their folder."""
    context = options.open_context()
    if context.wants_frame:
        raise UserError(f"the layer '{INPUT}' is the frame itself, which has gradients but no "
                        f"features; {ATTRIBUTION_SCRIPT} --layers {INPUT} computes the gradients")
    observations = context.recording.observations(options.num_observations, options.seed)
    if len(observations) < options.num_observations:
        logger.warning("the recording has %d frames, fewer than the %d of --num_observations; "
                       "all of them are used", len(observations), options.num_observations)
    if options.dry_run:
        print(f"{len(observations)} observations of {len(context.recording.lengths)} episodes; "
              "layers: " + ", ".join(f"{layer.name} {layer.shape}"
                                     for layer in context.bottlenecks))
        return options.output_dir
    components = options.read_components(context.policy.hidden_state_size)
    for bottleneck in context.bottlenecks:
        find_layer_features(context, bottleneck, observations, options,
                            components if bottleneck.layer.name == STATE else None)
    print(f"wrote {options.output_dir}")
    return options.output_dir


def find_layer_features(context: AttributionContext, bottleneck: Bottleneck,
                        observations: np.ndarray, options: FeaturesOptions,
                        components: tuple[np.ndarray, dict[str, str]] | None) -> None:
    """Find and write the features of a layer, unless they are already stored.

    Args:
        context: the agent and its recording.
        bottleneck: the layer.
        observations: frame ids (O, 2).
        components: result of ``FeaturesOptions.read_components``, to use as features; None to find
            features by factorisation.
    """
    name, paths = bottleneck.name, [layer.name for layer in all_layers(context.policy)]
    store = ResultStore(options.output_dir / name, FEATURES)
    settings = {
        **context.provenance, "layer": bottleneck.layer.name, "name": name,
        "place": paths.index(bottleneck.layer.name), "versions": versions(),
        "components": components[1] if components else None,
        **{key: getattr(options, key) for key in (
            "num_observations", "nmf_features", "nmf_of", "seed", "integrate_steps", "tolerance",
            "baseline")}}
    if is_finished(store, settings) and not options.overwrite:
        print(f"{name}: already finished")
        return
    store.open(settings, options.overwrite)
    samples, mean, value = sample_layer(context, bottleneck, observations, options, store)
    reducer, facts = (
        find_features(samples, options.nmf_features, options.seed, options.nmf_of)
        if components is None else features_along(samples, components[0], options.nmf_features))
    if bottleneck.layer.is_map:
        reduced = np.concatenate([reducer.activations(flatten_cells(maps)).astype(np.float32)
                                  for maps in batches(samples.activations)])
        activations = np.moveaxis(reduced.reshape(
            len(observations), *bottleneck.shape[1:], -1), -1, 1)  # (O, F, H, W)
        for subdivision in SUBDIVISIONS:
            store.write("spatial_examples", f"{subdivision:g}",
                        value=vars(spatial_examples(activations, bottleneck, subdivision)))
        store.write("thumbnail_examples", value=vars(thumbnail_examples(activations, bottleneck)))
    finish_features(store, {
        "grid": bottleneck.shape[1:], "channels": bottleneck.shape[0],
        "stride": bottleneck.layer.stride, "first_pixel": bottleneck.layer.first_pixel,
        "signed": samples.signed, "partial": bottleneck.bypassed,
        "observations": len(observations), **facts, **value},
        directions=reducer.directions, mean_activations=mean, observations=observations)
    convergence = "" if facts.get("converged", True) else (
        f"; not converged: further iterations make the error {facts['change']:.2%} smaller")
    print(f"{name}: {facts['explained']:.1%} of squared attribution explained, residual "
          f"{facts['residual_share']:.1%} of |attribution|; completeness error "
          f"{value['gap_median']:.1%} (median), {value['gap_99']:.1%} (99th percentile)"
          f"{convergence}")


def sample_layer(context: AttributionContext, bottleneck: Bottleneck, observations: np.ndarray,
                 options: FeaturesOptions, store: ResultStore
                 ) -> tuple[LayerSamples, np.ndarray, dict]:
    """Compute a layer's activations, and attributions of the value to it, in all observations.

    Args:
        context: the agent and its recording.
        bottleneck: the layer.
        observations: frame ids (O, 2).
        store: open folder, which stores partial results.

    Returns:
        Activations and attributions; the mean activations (C, H, W); and the statistics
        ``value_mean``, ``value_deviation``, ``baseline_mean``, ``baseline_deviation`` and
        ``gap_*``, see ``attribution.results``.

    Raises:
        UserError: if a value is not finite; the message names its frame.
    """
    make = functools.partial(
        LayerIntegratedGradients, context.policy, context.compute, bottleneck,
        outputs_named([VALUE]), Integration(options.integrate_steps, tolerance=options.tolerance))
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
    attributor = make(mean if options.baseline == MEAN else None)

    def attribute(part: np.ndarray) -> dict[str, np.ndarray]:
        results = []
        for frame_ids in batches(part):
            frames = context.recording.read(frame_ids)
            result = attributor.attribute(attributor.run_prefix(frames.frames, frames.entering),
                                          frames.actions, np.array([values.std()]))
            check_finite_frames(result.values[0], frame_ids,
                                f"attributions to the layer {bottleneck.name}")
            results.append({"attributions": result.values[0], "outputs": result.outputs[0],
                            "baselines": result.baselines[0], "errors": result.errors[0]})
        return concatenate(results)

    borders = range(FRAMES_PER_PART, len(observations), FRAMES_PER_PART)
    everything = concatenate([
        store.compute("part", number, function=functools.partial(attribute, part))
        for number, part in enumerate(with_progress(
            np.split(observations, borders), len(borders) + 1, f"{bottleneck.name} part"))])
    outputs, baselines = everything["outputs"], everything["baselines"]
    return (LayerSamples(bottleneck.name, everything["attributions"], activations,
                         observations[:, 0]), mean,
            {"value_mean": float(outputs.mean()), "value_deviation": float(outputs.std()),
             "baseline_mean": float(baselines.mean()), "baseline_deviation": float(baselines.std()),
             **error_quantiles(everything["errors"])})


main = command(FeaturesOptions, find_all_features)

if __name__ == "__main__":
    raise SystemExit(main())
