"""Attribute an agent's outputs to the features of its layers, along trajectories of a recording.

A killed run continues after the last trajectory; more layers and outputs can be added later. Shards
attribute along their trajectories; with --join the whole is summed up.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from agents.outputs import POLICY, PUBLISHED_POLICY, VALUE, Output, outputs_named
from attribution.advantages import AUTO, find_advantage_settings
from attribution.context import (
    AttributionContext,
    add_agent_flags,
    add_integral_flags,
    add_output_flags,
)
from attribution.integrated_gradients import (
    GAUSS_LEGENDRE,
    RIEMANN_RIGHT,
    RULES,
    Integration,
    LayerIntegratedGradients,
    frame_gradients,
)
from attribution.layers import Bottleneck
from attribution.over_time import IntegratedGradientsOverTime, Window
from attribution.recordings import batches, check_finite_frames
from attribution.reduction import cells_first
from attribution.results import (
    ACTIVATIONS,
    INPUT,
    Attributed,
    AttributedOverTime,
    AttributionFolder,
    Gradients,
    LayerFeatures,
    Reduced,
    finished_layers,
    quantiles,
)
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
from common.progress import Progress
from common.shards import WHOLE, add_shard_flags

NUM_REFERENCE = 1024  # observations over which an output's deviation is taken
PUBLISHED = Integration(10, RIEMANN_RIGHT, None)
AT_THE_END = Integration(1, RIEMANN_RIGHT, None)  # of the path alone: gradient times activation
Places = Mapping[int, np.ndarray]  # of a trajectory by number, episode and row of its steps (T, 2)
Piece = TypeVar("Piece", Attributed, AttributedOverTime, Reduced, Gradients)


def parser() -> Parser:
    flags = Parser(__doc__)
    add_agent_flags(flags)
    flags.add_argument("--features_dir", type=Path,
                       default=Path("analysis") / "attribution" / "features",
                       help="folder of python -m attribution.features; its layers if --layers is "
                             "not given")
    flags.add_argument("--outputs", nargs="+", metavar="OUTPUT", default=[VALUE],
                       help="scalars to attribute: value, log_prob_right, log_prob_any_right, "
                            f"taken and others; {POLICY}: all log-probabilities of actions and "
                            f"directions; {PUBLISHED_POLICY}: all logits and their sums")
    flags.add_argument("--num_trajectories", type=count, default=8,
                       help="trajectories, each of consecutive episodes")
    flags.add_argument("--num_steps", type=count, default=512, help="steps of a trajectory")
    flags.add_argument("--episodes", type=from_zero, nargs="+", metavar="EPISODE", default=[],
                       help="numbers of the recorded episodes that trajectories are made of, in "
                            "this order; all of them if not given")
    flags.add_argument("--choose", choices=CHOICES, default=IN_ORDER,
                       help=f"{FAILURES}: episodes with the smallest sum of rewards first")
    add_integral_flags(flags)
    flags.add_argument("--integration", choices=RULES, default=GAUSS_LEGENDRE,
                       help="nodes of the integral: those of Gauss and Legendre, or right ends of "
                            "equal parts")
    flags.add_argument("--memory_steps", type=whole(0, 64), default=0, metavar="STEPS",
                       help="of agents with memory, also attribute to the layer at so many last "
                            "steps and to older memory; 8 is enough for most, and costs as many "
                            "times the work")
    flags.add_argument("--gradient_activation", action="store_true",
                       help="also gradient times activation of each output, reduced to the same "
                            "features, to compare attributions with")
    flags.add_argument("--published_mode", action="store_true",
                       help="as published: 10 right ends, no refinement, logits where --outputs "
                            f"has {POLICY}; for comparison")
    add_output_flags(flags, "attribution")
    add_shard_flags(flags, "the trajectories")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    set_up_logging(args.log_level)
    context = AttributionContext(args, None if args.layers else finished_layers(args.features_dir))
    outputs, integration = asked(args)
    if args.memory_steps and not context.policy.recurrent:
        raise UserError("--memory_steps is for agents with memory, which this one has not; leave "
                        "it out")
    steps = gather_trajectories(context.recording.folder, args.num_trajectories, args.num_steps,
                                args.episodes, args.choose)
    places = {number: places_of(steps.part(number)) for number in range(len(steps.bounds) - 1)}
    features = {bottleneck.name: context.features(args.features_dir, bottleneck)
                for bottleneck in context.bottlenecks}
    layers = [*([INPUT] if context.wants_frame else []), *features]
    described = (f"{len(places)} trajectories of {', '.join(map(str, map(len, places.values())))} "
                 f"steps; "
                 f"layers: {', '.join(layers)}; outputs: "
                 + ", ".join(output.name for output in outputs))
    if args.dry_run:
        print(described)
        return
    if len(places) < args.num_trajectories:
        print(f"the recording has episodes for {len(places)} of {args.num_trajectories} "
              "trajectories")
    folder = AttributionFolder(args.output_dir)
    folder.open({
        **context.provenance, "num_trajectories": args.num_trajectories,
        "num_steps": args.num_steps, "choose": args.choose, "episodes": args.episodes,
        "seed": args.seed, **vars(integration), "published_mode": args.published_mode,
        "unit": vars(find_advantage_settings(args.agent_file, AUTO, context.recording.all_steps())),
        "versions": versions()}, args.overwrite, args.shard,
        {"layers": layers, "outputs": [output.name for output in outputs],
         "memory_steps": args.memory_steps, "gradient_activation": args.gradient_activation,
         "features_sha256": [each.checksum for each in features.values()]}, args.join)
    is_whole = args.shard == WHOLE
    if is_whole and not folder.trajectories_file.exists():
        folder.add_trajectories(without_noise(context, steps))
    places = {number: places[number] for number in args.shard.of([*places])}
    deviations = deviations_of(context, outputs, args.seed)
    if context.wants_frame:
        differentiate_frames(context, outputs, places, folder)
        if is_whole:
            sum_up_frames(outputs, places, deviations, folder)
    for bottleneck in context.bottlenecks:
        folder.open_layer(features[bottleneck.name], {
            "features_dir": str(args.features_dir), "layer": bottleneck.layer.name,
            "place": features[bottleneck.name].settings["place"], "partial": bottleneck.bypassed},
                          is_whole)
        waiting = [output for output in outputs
                   if not folder.summary_file(bottleneck.name, output.name).exists()]
        attribute_layer(context, bottleneck, features[bottleneck.name], waiting, integration,
                        places,
                        np.array([deviations[output.name] for output in waiting]), folder)
        attribute_memory(context, bottleneck, features[bottleneck.name], outputs, integration,
                         places,
                         deviations, folder, args.memory_steps)
        if args.gradient_activation:
            multiply_gradients(context, bottleneck, features[bottleneck.name], outputs, places,
                               folder)
        if not is_whole:
            continue
        for output in waiting:
            folder.add_summary(bottleneck.name, output.name, summary_of(
                folder, bottleneck.name, output.name, len(places), deviations[output.name],
                integration.tolerance))
        print(said(bottleneck.name, [folder.summary(bottleneck.name, output.name)
                                     for output in outputs]))
    folder.finish()
    print(f"wrote {args.output_dir}: {described}" if is_whole else
          f"attributed along {len(places)} trajectories in {args.output_dir}")


def asked(args: argparse.Namespace) -> tuple[tuple[Output, ...], Integration]:
    """The outputs and the integration of the flags."""
    if not args.published_mode:
        return outputs_named(args.outputs), Integration(args.integrate_steps, args.integration,
                                                        args.tolerance)
    return outputs_named([PUBLISHED_POLICY if name == POLICY else name for name in args.outputs]
                         ), PUBLISHED


def without_noise(context: AttributionContext, steps: Trajectories) -> Trajectories:
    """Trajectories with the log-probabilities of the policy without noise."""
    if not context.recording.description.get("action_noise"):
        return steps
    log_probs = [context.run(some)[0].log_probs.cpu().numpy() for some in batches(places_of(steps))]
    return dataclasses.replace(steps, log_probs=np.concatenate(log_probs))


def places_of(steps: Trajectories) -> np.ndarray:
    """Episode and row of each step, int32 (N, 2)."""
    return np.stack([steps.episode, steps.row], axis=1)


def deviations_of(context: AttributionContext, outputs: Sequence[Output], seed: int) -> dict[str,
                                                                                             float]:
    """Deviation of each output over observations of the recording, by its name."""
    found = []
    for some in batches(context.recording.observations(NUM_REFERENCE, seed)):
        output, actions = context.run(some)
        found.append(torch.stack([each(output, actions) for each in outputs]).double().cpu())
    return dict(zip((output.name for output in outputs),
                    torch.cat(found, dim=1).numpy().std(axis=1).tolist()))


def attribute_layer(context: AttributionContext, bottleneck: Bottleneck, features: LayerFeatures,
                    outputs: Sequence[Output], integration: Integration,
                    places: Places, deviations: np.ndarray,
                    folder: AttributionFolder) -> None:
    """Write the attributions to one layer, trajectory by trajectory, and the activations.

    Args:
        outputs: K of them.
        deviations: of the outputs (K,).
    """
    if not outputs:
        return
    attributor = LayerIntegratedGradients(context.policy, context.compute, bottleneck, outputs,
                                          integration,
                            features.mean_activations
                            if features.settings["baseline"] == "mean" else None)
    names = [output.name for output in outputs]
    with Progress(sum(map(len, places.values())), f"{bottleneck.name} step") as progress:
        for number, trajectory in places.items():
            if not all(folder.file(bottleneck.name, name, number).exists()
                       for name in (*names, ACTIVATIONS)):
                activations, attributed = along(context, attributor, features, trajectory,
                                                deviations)
                folder.add_activations(bottleneck.name, number, activations)
                for name, each in zip(names, attributed):
                    folder.add(bottleneck.name, name, number, each)
            progress.update(progress.done + len(trajectory))


def along(context: AttributionContext, attributor: LayerIntegratedGradients,
          features: LayerFeatures,
          trajectory: np.ndarray, deviations: np.ndarray) -> tuple[np.ndarray, list[Attributed]]:
    """Activations of features (T, H, W, F) and attributions of each output along a trajectory of
    places (T, 2).

    Raises:
        UserError: if a number is not finite; its frame is named.
    """
    bottleneck, reducer = attributor.bottleneck, features.reducer
    all_activations: list[np.ndarray] = []
    pieces: list[list[Attributed]] = [[] for _ in attributor.outputs]
    for batch in batches(trajectory):
        rows = context.recording.read(batch)
        prefix = attributor.run_prefix(rows.frames, rows.entering)
        held = prefix.activations.cpu().numpy().reshape(len(batch), *bottleneck.shape)
        check_finite_frames(held, batch, f"activations of the layer {bottleneck.name}")
        held = cells_first(held)
        shape = (len(batch), *bottleneck.shape[1:], -1)
        all_activations.append(reducer.activations(held).reshape(shape).astype(np.float16))
        found = attributor.attribute(prefix, rows.actions, deviations)
        for number, values in enumerate(found.values):
            check_finite_frames(values, batch, f"attributions to the layer {bottleneck.name}")
            coefficients, residual = reducer.attributions(cells_first(values), held)
            cells = np.concatenate([coefficients, residual[:, None]], axis=1).reshape(shape)
            pieces[number].append(Attributed(
                cells.astype(np.float16), cells.sum(axis=(1, 2)).astype(np.float32),
                found.outputs[number], found.baselines[number], found.errors[number],
                found.steps[number]))
    return np.concatenate(all_activations), [*map(joined, pieces)]


def attribute_memory(context: AttributionContext, bottleneck: Bottleneck, features: LayerFeatures,
                     outputs: Sequence[Output], integration: Integration,
                     places: Places, deviations: dict[str, float],
                     folder: AttributionFolder, lags: int) -> None:
    """Write the attributions over time to one layer, trajectory by trajectory.

    Args:
        lags: L; 0 for none.
    """
    if not lags:
        return
    attributor = IntegratedGradientsOverTime(context.policy, context.compute, bottleneck, outputs,
                                             integration)
    scales = np.array([deviations[output.name] for output in outputs])
    with Progress(sum(map(len, places.values())), f"{bottleneck.name} step over time") as progress:
        for number, trajectory in places.items():
            if not all(folder.memory_file(bottleneck.name, output.name, lags, number).exists()
                       for output in outputs):
                pieces = [memory_of(context, attributor, features, some, scales, lags)
                          for some in batches(trajectory)]
                for output, some in zip(outputs, zip(*pieces)):
                    folder.add_over_time(bottleneck.name, output.name, number, joined(some))
            progress.update(progress.done + len(trajectory))


def memory_of(context: AttributionContext, attributor: IntegratedGradientsOverTime,
              features: LayerFeatures,
              batch: np.ndarray, deviations: np.ndarray, lags: int) -> list[AttributedOverTime]:
    """Attributions over time of each output at some steps (B, 2)."""
    bottleneck = attributor.bottleneck
    rows = batch[:, 1:] - np.arange(lags)  # (B, L)
    wanted, where = np.unique(np.stack([
        np.broadcast_to(batch[:, :1], rows.shape), np.maximum(rows, 0)], axis=-1).reshape(-1, 2),
        axis=0, return_inverse=True)
    read = context.recording.read(wanted)
    shape = rows.shape
    where = where.reshape(shape)
    held = attributor.run_prefix(read.frames, read.entering).activations
    is_there = torch.from_numpy(rows >= 0).to(held.device)
    last = torch.from_numpy(where).to(held.device)
    activations = held[last] * is_there.reshape(*shape, *[1] * (held.ndim - 1))
    found = attributor.attribute_over_time(
        Window(activations, is_there,
               torch.from_numpy(read.entering[where[:, -1]]).to(held.device)),
        read.actions[where[:, 0]], deviations)
    cells = cells_first(activations.flatten(0, 1).cpu().numpy().reshape(-1, *bottleneck.shape))
    pieces = []
    for number, values in enumerate(found.values):
        check_finite_frames(values, batch, f"attributions over time to the layer {bottleneck.name}")
        coefficients, residual = features.reducer.attributions(
            cells_first(values.reshape(-1, *bottleneck.shape)), cells)
        totals = np.concatenate([coefficients, residual[:, None]], axis=1).reshape(
            *shape, -1, features.number + 1).sum(axis=2)
        pieces.append(AttributedOverTime(
            totals, found.older[number], found.outputs[number], found.baselines[number],
            found.errors[number], found.steps[number]))
    return pieces


def multiply_gradients(context: AttributionContext, bottleneck: Bottleneck, features: LayerFeatures,
                       outputs: Sequence[Output], places: Places,
                       folder: AttributionFolder) -> None:
    """Write gradient times activation at one layer, trajectory by trajectory."""
    attributor = LayerIntegratedGradients(context.policy, context.compute, bottleneck, outputs,
                                          AT_THE_END)
    for number, trajectory in places.items():
        if all(folder.gradient_activation_file(bottleneck.name, output.name, number).exists()
               for output in outputs):
            continue
        _, products = along(context, attributor, features, trajectory, np.zeros(len(outputs)))
        for output, each in zip(outputs, products):
            folder.add_gradient_activation(bottleneck.name, output.name, number,
                                           Reduced(each.cells, each.totals))


def differentiate_frames(context: AttributionContext, outputs: Sequence[Output], places: Places,
                         folder: AttributionFolder) -> None:
    """Write gradients of the outputs by the frames, trajectory by trajectory."""
    waiting = without_summary(outputs, folder)
    if not waiting:
        return
    with Progress(sum(map(len, places.values())), f"{INPUT} step") as progress:
        for number, trajectory in places.items():
            if not all(folder.file(INPUT, output.name, number).exists() for output in waiting):
                pieces = [gradients_of(context, waiting, batch) for batch in batches(trajectory)]
                for output, some in zip(waiting, zip(*pieces)):
                    folder.add_gradients(output.name, number, joined(some))
            progress.update(progress.done + len(trajectory))


def sum_up_frames(outputs: Sequence[Output], places: Places, deviations: dict[str, float],
                  folder: AttributionFolder) -> None:
    """Let gradients by the frames count as done."""
    waiting = without_summary(outputs, folder)
    for output in waiting:
        folder.add_summary(INPUT, output.name, {"deviation": deviations[output.name],
                                                "frames": sum(map(len, places.values()))})
    if waiting:
        print(f"{INPUT}: gradients by the frame, which add up to nothing")


def without_summary(outputs: Sequence[Output], folder: AttributionFolder) -> list[Output]:
    """The outputs of which gradients by the frames are not done."""
    return [output for output in outputs
            if not folder.summary_file(INPUT, output.name).exists()]


def gradients_of(context: AttributionContext, outputs: Sequence[Output],
                 batch: np.ndarray) -> list[Gradients]:
    """Gradients of each output by the frames of some steps (B, 2).

    Raises:
        UserError: if a number is not finite; its frame is named.
    """
    found, said_by_agent = frame_gradients(context.policy, context.compute, outputs,
                                           context.recording.read(batch))
    pieces = []
    for values, output in zip(found, said_by_agent):
        check_finite_frames(values, batch, "gradients by the frame")
        largest = np.abs(values).max(axis=(1, 2, 3))
        shares = values / np.where(largest > 0, largest, 1)[:, None, None, None]
        pieces.append(Gradients(shares.astype(np.float16), largest, output))
    return pieces


def joined(pieces: Sequence[Piece]) -> Piece:
    """Attributions of some steps, one behind the other."""
    return type(pieces[0])(**{name: np.concatenate([getattr(each, name) for each in pieces])
                              for name in vars(pieces[0])})


def summary_of(folder: AttributionFolder, layer: str, output: str, number: int, deviation: float,
               allowed: float | None) -> dict:
    """How the attributions of an output came out in all trajectories."""
    gaps = np.concatenate([folder.attributed(layer, output, each).gap for each in range(number)])
    return {"deviation": deviation, "frames": len(gaps), **quantiles(gaps),
            "above": int((gaps > (Integration().tolerance if allowed is None else allowed)).sum())}


def said(layer: str, summaries: Sequence[dict]) -> str:
    """The errors of a layer's attributions, in a line."""
    frames = sum(each["frames"] for each in summaries)
    return (f"{layer}: gap median {max(each['gap_median'] for each in summaries):.2%}, 99 % "
            f"{max(each['gap_99'] for each in summaries):.2%} of the worst output; above the "
            f"tolerance in {sum(each['above'] for each in summaries)} of {frames} frames and "
            "outputs")


if __name__ == "__main__":
    raise SystemExit(main())
