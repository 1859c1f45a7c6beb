"""Find the features of an agent's layers: directions that the value's attributions are made of, and
observations that show them.

A killed run continues after the last part of the attributions; more layers can be added later.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
from collections.abc import Iterator, Sequence
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
    OBSERVATIONS_A_FEATURE,
    Features,
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
from attribution.recordings import batches, check_finite_frames
from attribution.reduction import cells_first
from attribution.results import (
    ATTRIBUTION_SCRIPT,
    INPUT,
    THUMBNAIL,
    FeaturesFolder,
    quantiles,
)
from common.cli import Parser, count, set_up_logging, whole
from common.errors import UserError, script_main
from common.files import versions
from common.progress import Progress
from interventions.projector import Projector

ZERO, MEAN = BASELINES = ("zero", "mean")
PASSES_A_PART = 4
NUM_EPISODES = 4000  # of analysis/hidden_analysis_precompute.py by default

logger = logging.getLogger(__name__)


def parser() -> Parser:
    flags = Parser(__doc__)
    add_agent_flags(flags)
    flags.add_argument("--num_observations", type=count, default=4096,
                       help="frames, drawn evenly from the recording's episodes")
    flags.add_argument("--nmf_features", type=whole(1, 1000), default=8,
                       help="features of a layer")
    flags.add_argument("--nmf_of", choices=KINDS, default=ATTRIBUTIONS,
                       help="what the features are found in")
    flags.add_argument("--precomp_dir", type=Path,
                       help="folder of analysis/hidden_analysis_precompute.py for this agent: its "
                            "independent components become the features of the layer hidden_state")
    flags.add_argument("--num_episodes", type=count, default=NUM_EPISODES,
                       help="recorded episodes that these components were computed from, which is "
                            "in the names of their files")
    add_integral_flags(flags)
    flags.add_argument("--baseline", choices=BASELINES, default=ZERO,
                       help="activations where the paths of the integrals begin: zero, or the mean "
                            "over the observations")
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
    places = {layer.name: place for place, layer in enumerate(all_layers(context.policy))}
    integration = Integration(args.integrate_steps, tolerance=args.tolerance)
    if args.dry_run:
        print(f"{len(observations)} observations of {len(context.recording.lengths)} episodes; "
              "layers: " + ", ".join(f"{bottleneck.name} {bottleneck.shape}"
                                     for bottleneck in context.bottlenecks))
        return
    components = components_of(context, args)
    for bottleneck in context.bottlenecks:
        given = components if bottleneck.layer.name == STATE else None
        folder = FeaturesFolder(args.output_dir, bottleneck.name)
        description = {
            **context.provenance, "layer": bottleneck.layer.name, "name": bottleneck.name,
            "place": places[bottleneck.layer.name], "num_observations": args.num_observations,
            "nmf_features": args.nmf_features, "nmf_of": args.nmf_of, "seed": args.seed,
            "integrate_steps": args.integrate_steps, "tolerance": args.tolerance,
            "baseline": args.baseline, "components": given.checksums if given else None,
            "versions": versions()}
        if folder.has(description) and not args.overwrite:
            print(f"{bottleneck.name}: already there")
            continue
        folder.open(description, args.overwrite)
        held, mean, values = attributed(context, bottleneck, integration, args.baseline == MEAN,
                                        observations, folder)
        features = (find_features(held, args.nmf_features, args.seed, args.nmf_of)
                    if given is None else
                    features_along(held, given.directions, given.names, args.nmf_features))
        folder.finish(features.reducer.directions, mean, observations,
                      examples_of(features, held, bottleneck), {**facts_of(bottleneck, held),
                                                                **features.facts,
                                                         **values})
        print(summary(bottleneck.name, features.facts, values))
    print(f"wrote {args.output_dir}")


@dataclasses.dataclass(frozen=True)
class Components:
    """Independent components of an agent's hidden states.

    Attributes:
        directions: changes of state, float32 (k, D).
        checksums: of the files that they are of.
    """

    directions: np.ndarray
    checksums: dict[str, str]

    @property
    def names(self) -> list[str]:
        """"IC 0" and so on, as the other analyses number them."""
        return [f"IC {number}" for number in range(len(self.directions))]


def components_of(context: AttributionContext, args: argparse.Namespace) -> Components | None:
    """The components that the flags name; None if they name none.

    Raises:
        UserError: if they are missing or damaged, or of an agent with another hidden state.
    """
    if args.precomp_dir is None:
        return None
    projector, checksums = Projector.load_for(context.policy.hidden_state_size, args.precomp_dir,
                                              args.num_episodes, args.agent_file)
    return Components(projector.directions("ica").numpy(), checksums)


def check_number(found: int, asked: int, features: int) -> None:
    """Say that there are fewer observations than asked for.

    Raises:
        UserError: if they are too few.
    """
    if found >= asked:
        return
    needed = OBSERVATIONS_A_FEATURE * features
    if found < needed:
        raise UserError(f"the recording has {found} frames, and {features} features need {needed}; "
                        "record more episodes, or give fewer --nmf_features")
    logger.warning("the recording has %d frames, fewer than the %d of --num_observations; going "
                   "on with these", found, asked)


def attributed(context: AttributionContext, bottleneck: Bottleneck, integration: Integration,
               from_mean: bool,
               observations: np.ndarray, folder: FeaturesFolder
               ) -> tuple[LayerSamples, np.ndarray, dict]:
    """A layer's activations and the value's attributions to it, in all observations.

    Returns:
        That; the mean activations (C, H, W); and facts about the value, for the settings.
    """
    make = functools.partial(LayerIntegratedGradients, context.policy, context.compute, bottleneck,
                             outputs_named([VALUE]), integration)
    passes = list(batches(observations))
    runs = list(runs_of(context, bottleneck, make(), passes))
    activations, values = map(np.concatenate, zip(*runs))
    mean = activations.mean(axis=0, dtype=np.float64).astype(np.float32)
    attributor = make(mean if from_mean else None)
    found: dict[str, list[np.ndarray]] = {}
    with Progress(len(observations), f"{bottleneck.name} observation") as progress:
        for begin in range(0, len(passes), PASSES_A_PART):
            number = begin // PASSES_A_PART
            part = folder.part(number)
            if part is None:
                part = joined([attributed_batch(context, attributor, batch, values.std())
                               for batch in passes[begin:begin + PASSES_A_PART]])
                folder.store_part(number, part)
            for name, array in part.items():
                found.setdefault(name, []).append(array)
            progress.update(sum(map(len, found["outputs"])))
    everything = {name: np.concatenate(arrays) for name, arrays in found.items()}
    held = LayerSamples(bottleneck.name, everything["attributions"], activations, observations[:,
                                                                                               0])
    return held, mean, facts_of_value(everything)


def runs_of(context: AttributionContext, bottleneck: Bottleneck,
            attributor: LayerIntegratedGradients, passes: Sequence[np.ndarray]
            ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Activations (B, C, H, W) of observations and the values (B,), a batch at a time.

    Raises:
        UserError: if an activation is not finite; its frame is named.
    """
    for batch in passes:
        rows = context.recording.read(batch)
        prefix = attributor.run_prefix(rows.frames, rows.entering)
        found = prefix.activations.cpu().numpy()
        check_finite_frames(found, batch, f"activations of the layer {bottleneck.name}")
        yield (found.reshape(len(batch), *bottleneck.shape),
               attributor.outputs_at(prefix, rows.actions)[0])


def attributed_batch(context: AttributionContext, attributor: LayerIntegratedGradients,
                     batch: np.ndarray,
                     deviation: float) -> dict[str, np.ndarray]:
    """Attributions of the value in some observations (B, 2), and the value at both ends of the
    paths.

    Args:
        deviation: of the value over all observations.

    Raises:
        UserError: if one is not finite; its frame is named.
    """
    rows = context.recording.read(batch)
    found = attributor.attribute(attributor.run_prefix(rows.frames, rows.entering), rows.actions,
                                 np.array([deviation]))
    check_finite_frames(found.values[0], batch,
                        f"attributions to the layer {attributor.bottleneck.name}")
    return {"attributions": found.values[0], "outputs": found.outputs[0],
            "baselines": found.baselines[0]}


def joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Arrays of the same names, one behind the other."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def facts_of_value(found: dict[str, np.ndarray]) -> dict:
    """Means and deviations of the value and of what it is with the layer at the baseline, and how
    large the integrals' errors are."""
    values, baselines = found["outputs"], found["baselines"]
    sums = found["attributions"].reshape(len(values), -1).sum(axis=1, dtype=np.float64)
    gaps = completeness_errors(sums[None], values[None], baselines[None], np.array([values.std()]))
    return {"value_mean": float(values.mean()), "value_deviation": float(values.std()),
            "baseline_mean": float(baselines.mean()), "baseline_deviation": float(baselines.std()),
            **quantiles(gaps)}


def facts_of(bottleneck: Bottleneck, held: LayerSamples) -> dict:
    """Facts of a layer that readers of its features need."""
    return {"grid": bottleneck.shape[1:], "channels": bottleneck.shape[0],
            "stride": bottleneck.layer.stride,
            "first_pixel": bottleneck.layer.first_pixel, "signed": held.signed,
            "partial": bottleneck.bypassed,
            "observations": len(held.episodes)}


def examples_of(features: Features, held: LayerSamples, bottleneck: Bottleneck) -> dict:
    """All examples of a map's features, by their kinds; none of units."""
    if not bottleneck.layer.is_map:
        return {}
    found = np.concatenate([
        features.reducer.activations(cells_first(some)).astype(np.float32)
        for some in batches(held.activations)])
    found = np.moveaxis(found.reshape(len(held.episodes), *bottleneck.shape[1:], -1), -1, 1)
    return {**{subdivision: spatial_examples(found, bottleneck, subdivision)
               for subdivision in SUBDIVISIONS}, THUMBNAIL: thumbnail_examples(found, bottleneck)}


def summary(name: str, facts: dict, values: dict) -> str:
    """How the features of a layer came out, in a line."""
    ended = "" if facts.get("converged", True) else (
        f"; not converged: further iterations make the error {facts['change']:.2%} smaller")
    stable = "" if facts["stability"] is None else (
        f", stability {min(facts['stability']):.2f} to {max(facts['stability']):.2f}")
    return (f"{name}: {facts['explained']:.1%} of squared attribution explained, residual "
            f"{facts['residual_share']:.1%} of |attribution|{stable}; gap median "
            f"{values['gap_median']:.1%}, 99 % {values['gap_99']:.1%}{ended}")


if __name__ == "__main__":
    raise SystemExit(main())
