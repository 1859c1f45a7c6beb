"""Attribute an agent's outputs along trajectories, see ``AttributeOptions``.

A killed run resumes after the last finished trajectory; more layers and outputs can be added later.
Each shard attributes along its own trajectories; --join then writes the summaries.
"""
# Letters in shape comments: B frames, H W height and width of a frame, T steps of a trajectory, L
# lags, F features.

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from agents.networks import Policy, to_images
from agents.outputs import POLICY, PUBLISHED_POLICY, VALUE, Output, outputs_named
from attribution.config import ANALYSES
from attribution.context import (
    AttributionContext,
    AttributionOptions,
    IntegralOptions,
)
from attribution.integrated_gradients import (
    GAUSS_LEGENDRE,
    GRADIENT_ACTIVATION,
    RIEMANN_RIGHT,
    RULES,
    IntegratedGradientsOverTime,
    Integration,
    LayerIntegratedGradients,
)
from attribution.layers import Bottleneck
from attribution.recordings import RecordedFrames, batches, check_finite_frames, concatenate
from attribution.reduction import Reducer, flatten_cells
from attribution.results import (
    INPUT,
    AttributionStore,
    LayerFeatures,
    error_quantiles,
    finished_layers,
)
from attribution.trajectories import (
    AUTO,
    CHOICES,
    FAILURES,
    IN_ORDER,
    Trajectories,
    find_advantage_settings,
    gather_trajectories,
)
from common.cli import count, from_zero, whole
from common.devices import Compute
from common.errors import UserError
from common.files import versions
from common.options import ShardOptions, command, option
from common.progress import with_progress
from common.shards import WHOLE

NUM_REFERENCE = 1024  # observations over which the standard deviation of an output is computed
PUBLISHED = Integration(10, RIEMANN_RIGHT, None)
Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttributeOptions(IntegralOptions, ShardOptions, AttributionOptions):
    """Attribute an agent's outputs to the features of its layers, along trajectories of a
    recording."""

    features_dir: Path = option(ANALYSES / "features", "output folder of python -m "
                                "attribution.features; without --layers, all of its layers are "
                                "used")
    outputs: tuple[str, ...] = option(
        (VALUE,), "scalars to attribute, such as value, log_prob_right, log_prob_any_right or "
                  f"taken; {POLICY}: all log-probabilities of actions and directions; "
                  f"{PUBLISHED_POLICY}: all logits and their sums by direction", metavar="OUTPUT")
    num_trajectories: int = option(
        8, "number of trajectories, each a sequence of consecutive episodes", type=count)
    num_steps: int = option(512, "number of steps per trajectory", type=count)
    episodes: tuple[int, ...] = option(
        (), "numbers of the recorded episodes to concatenate, in this order; if not given, all "
            "episodes", type=from_zero, metavar="EPISODE")
    choose: str = option(
        IN_ORDER, f"order of the episodes; {FAILURES}: episodes without a reward first",
        choices=CHOICES)
    integration: str = option(
        GAUSS_LEGENDRE, "quadrature rule: Gauss-Legendre, or the right Riemann sum", choices=RULES)
    memory_steps: int = option(
        0, "for agents with memory: also attribute to the layer at each of the last STEPS steps "
           "and to older memory; 8 suffices for most agents and takes 8 times as long",
        type=whole(0, 64), metavar="STEPS")
    gradient_activation: bool = option(
        False, "for comparison, also compute gradient times activation of each output, reduced to "
               "the same features")
    published_mode: bool = option(
        False, "use the published settings, for comparison: right Riemann sum with 10 nodes, no "
               f"refinement, and logits instead of {POLICY} in --outputs")
    output_dir: Path = option(ANALYSES / "attribution", "folder to write to")

    @property
    def rule(self) -> Integration:
        """Settings of the integration."""
        return PUBLISHED if self.published_mode else Integration(
            self.integrate_steps, self.integration, self.tolerance)

    @property
    def scalars(self) -> tuple[Output, ...]:
        """The outputs.

        Raises:
            UserError: if there is no such output.
        """
        return outputs_named([
            PUBLISHED_POLICY if self.published_mode and name == POLICY else name
            for name in self.outputs])


def frame_gradients(policy: Policy, compute: Compute, outputs: Sequence[Output],
                    batch: RecordedFrames) -> tuple[np.ndarray, np.ndarray]:
    """Compute plain gradients of outputs with respect to the frames, at fixed hidden states.

    A gradient is the rate at which an output changes when a pixel gets brighter (Simonyan et al.
    2013, "Deep inside convolutional networks", section 3). Gradients have no baseline and do not
    sum to a change of the output, so they have no completeness error.

    Args:
        policy: the agent.
        compute: device and precision; float32.
        outputs: K outputs.
        batch: B frames.

    Returns:
        Gradients per unit of brightness, which ranges from 0 to 1, float32 (K, B, H, W, 3); and the
        outputs, float32 (K, B).
    """
    frames, entering, actions = (torch.from_numpy(array).to(compute.device)
                                 for array in (batch.frames, batch.entering, batch.actions))
    images = to_images(frames, compute.channels_last).requires_grad_()
    with torch.enable_grad():
        run = policy.step(policy.embed(images), entering)
        scalars = torch.stack([output(run, actions) for output in outputs])
    gradients = [torch.autograd.grad(scalar.sum(), images, retain_graph=True)[0]
                 for scalar in scalars]
    return (torch.stack(gradients).permute(0, 1, 3, 4, 2).contiguous().cpu().numpy(),
            scalars.detach().cpu().numpy())


def attribute(options: AttributeOptions) -> AttributionStore:
    """Write the attributions, or those of the shard, and return their folder."""
    context = options.open_context(None if options.layers
                                   else finished_layers(options.features_dir))
    outputs = options.scalars
    if options.memory_steps and not context.policy.recurrent:
        raise UserError("--memory_steps is for agents with memory, and this agent has none; leave "
                        "it out")
    steps = gather_trajectories(context.recording.folder, options.num_trajectories,
                                options.num_steps, options.episodes, options.choose)
    trajectories = {number: steps.part(number).frame_ids
                    for number in range(steps.num_trajectories)}
    features = {layer.name: context.features(options.features_dir, layer)
                for layer in context.bottlenecks}
    layers = [*([INPUT] if context.wants_frame else []), *features]
    description = (f"{len(trajectories)} trajectories of "
                   f"{', '.join(str(len(ids)) for ids in trajectories.values())} steps; "
                   f"layers: {', '.join(layers)}; outputs: "
                   + ", ".join(output.name for output in outputs))
    store = AttributionStore(options.output_dir)
    if options.dry_run:
        print(description)
        return store
    open_store(store, options, context, layers, features, len(trajectories))
    if options.shard == WHOLE and not store.has("trajectories"):
        store.write("trajectories", value=vars(without_noise(steps, context)))
    attributor = TrajectoryAttributor(
        context, store, outputs, output_deviations(context, outputs, options.seed),
        {number: trajectories[number] for number in options.shard.of([*trajectories])})
    attribute_layers(options, context, attributor, store, features)
    if options.shard == WHOLE:
        print(*(attributor.summarise(layer, options.rule) for layer in layers), sep="\n")
    store.finish()
    print(f"wrote {options.output_dir}: {description}")
    return store


def open_store(store: AttributionStore, options: AttributeOptions, context: AttributionContext,
               layers: Sequence[str], features: Mapping[str, LayerFeatures],
               num_trajectories: int) -> None:
    """Open the folder of the attributions with their settings.

    Args:
        layers: short names of the layers, and INPUT if gradients with respect to the frame are
            requested.
        features: features by short name of the layer.
        num_trajectories: number of trajectories.
    """
    unit = find_advantage_settings(options.agent_file, AUTO, context.recording.all_steps())
    store.open(
        {**context.provenance, "num_trajectories": options.num_trajectories,
         "num_steps": options.num_steps, "choose": options.choose, "episodes": options.episodes,
         "seed": options.seed, **vars(options.rule), "published_mode": options.published_mode,
         "unit": vars(unit), "versions": versions()}, options.overwrite, options.shard,
        {"layers": layers, "outputs": [output.name for output in options.scalars],
         "memory_steps": options.memory_steps, "gradient_activation": options.gradient_activation,
         "features_sha256": [of_layer.checksum for of_layer in features.values()]}, options.join,
        [*items_of(options, layers, num_trajectories)])


def items_of(options: AttributeOptions, layers: Sequence[str], num_trajectories: int
             ) -> Iterator[tuple]:
    """Yield entry and key of every item that must be stored for the attributions to be complete;
    see ``open_store``."""
    for layer in layers:
        for output in options.scalars:
            yield "summary", layer, output.name
            for number in range(num_trajectories if layer != INPUT else 0):
                if options.memory_steps:
                    yield "over_time", layer, output.name, options.memory_steps, number
                if options.gradient_activation:
                    yield "gradient_activation", layer, output.name, number


def without_noise(steps: Trajectories, context: AttributionContext) -> Trajectories:
    """Replace recorded log-probabilities with action noise by those of the agent."""
    if not context.recording.description.get("action_noise"):
        return steps
    return dataclasses.replace(steps, log_probs=np.concatenate([
        context.run(ids)[0].log_probs.cpu().numpy() for ids in batches(steps.frame_ids)]))


def attribute_layers(options: AttributeOptions, context: AttributionContext,
                     attributor: TrajectoryAttributor, store: AttributionStore,
                     features: Mapping[str, LayerFeatures]) -> None:
    """Compute and write everything that the options request for each layer."""
    if context.wants_frame:
        attributor.differentiate_frames()
    for bottleneck in context.bottlenecks:
        layer = features[bottleneck.name]
        store.check_features(layer)
        if options.shard == WHOLE:
            store.write("layer", layer.name, value={
                "features_sha256": layer.checksum, "features_dir": str(options.features_dir),
                "layer": bottleneck.layer.name, "place": layer.settings["place"],
                "partial": bottleneck.bypassed})
        attributor.attribute(bottleneck, layer, options.rule)
        if options.memory_steps:
            attributor.attribute_over_time(bottleneck, layer, options.rule, options.memory_steps)
        if options.gradient_activation:
            attributor.multiply_gradients(bottleneck, layer)


def output_deviations(context: AttributionContext, outputs: Sequence[Output],
                      seed: int) -> dict[str, float]:
    """Compute the standard deviation of each output over at most NUM_REFERENCE recorded frames.

    Args:
        context: the agent and its recording.
        outputs: the outputs.
        seed: seed of the choice of frames.

    Returns:
        Standard deviations by output name.
    """
    scalars = []
    for frame_ids in batches(context.recording.observations(NUM_REFERENCE, seed)):
        run, actions = context.run(frame_ids)
        scalars.append(torch.stack([output(run, actions) for output in outputs]).double().cpu())
    return dict(zip((output.name for output in outputs),
                    torch.cat(scalars, dim=1).numpy().std(axis=1).tolist()))


class TrajectoryAttributor:
    """Attributes outputs along trajectories, and writes the results that a store lacks.

    Args:
        context: the agent and its recording.
        store: open folder of attributions.
        outputs: the outputs.
        deviations: standard deviation of each output, by output name.
        trajectories: frame ids of each trajectory's steps (T, 2), by trajectory number.
    """

    def __init__(self, context: AttributionContext, store: AttributionStore,
                 outputs: Sequence[Output], deviations: Mapping[str, float],
                 trajectories: Mapping[int, np.ndarray]):
        self._context, self._store, self._outputs = context, store, outputs
        self._deviations, self._trajectories = deviations, trajectories

    def attribute(self, bottleneck: Bottleneck, features: LayerFeatures,
                  integration: Integration) -> None:
        """Attribute outputs to a layer, reduce the attributions to the layer's features, and write
        them and the activations of the features. Outputs that already have a summary for this layer
        are skipped."""
        outputs = self.unfinished(bottleneck.name)
        if outputs:
            attributor = LayerIntegratedGradients(
                self._context.policy, self._context.compute, bottleneck, outputs, integration,
                features.baseline)
            self._write(
                [("activations", bottleneck.name),
                 *(("attributions", bottleneck.name, output.name) for output in outputs)],
                functools.partial(self._attribute_batch, attributor, features.reducer),
                f"{bottleneck.name} trajectory")

    def attribute_over_time(self, bottleneck: Bottleneck, features: LayerFeatures,
                            integration: Integration, lags: int) -> None:
        """Attribute all outputs in each frame of the trajectories to a layer's features at the last
        ``lags`` steps, with baseline zero, and to the hidden state before them; write the results.
        """
        attributor = IntegratedGradientsOverTime(
            self._context.policy, self._context.compute, bottleneck, self._outputs, integration)
        self._write(
            [("over_time", bottleneck.name, output.name, lags) for output in self._outputs],
            functools.partial(self._attribute_batch_over_time, attributor, features, lags),
            f"{bottleneck.name} over-time trajectory")

    def multiply_gradients(self, bottleneck: Bottleneck, features: LayerFeatures) -> None:
        """Compute gradient times activation of all outputs at a layer, reduce the products to the
        layer's features, and write the results."""
        attributor = LayerIntegratedGradients(
            self._context.policy, self._context.compute, bottleneck, self._outputs,
            GRADIENT_ACTIVATION)

        def multiply(frame_ids: np.ndarray) -> list[Arrays]:
            _, *products = self._attribute_batch(attributor, features.reducer, frame_ids)
            return [{name: product[name] for name in ("cells", "totals")} for product in products]

        self._write([("gradient_activation", bottleneck.name, output.name)
                     for output in self._outputs],
                    multiply, f"{bottleneck.name} gradient-times-activation trajectory")

    def differentiate_frames(self) -> None:
        """Compute and write the gradients of outputs with respect to the frames. Outputs whose
        gradients already have a summary are skipped."""
        outputs = self.unfinished(INPUT)

        def differentiate(frame_ids: np.ndarray) -> list[Arrays]:
            items = []
            for gradients, output in zip(*frame_gradients(
                    self._context.policy, self._context.compute, outputs,
                    self._context.recording.read(frame_ids))):
                check_finite_frames(gradients, frame_ids, "gradients with respect to the frame")
                largest = np.abs(gradients).max(axis=(1, 2, 3))
                shares = gradients / np.where(largest > 0, largest, 1)[:, None, None, None]
                items.append({"gradients": shares.astype(np.float16), "largest": largest,
                              "output": output})
            return items

        self._write([("gradients", output.name) for output in outputs], differentiate,
                    f"{INPUT} trajectory")

    def unfinished(self, layer: str) -> list[Output]:
        """Return the outputs for which no summary of the attributions to a layer is stored."""
        return [output for output in self._outputs
                if not self._store.has("summary", layer, output.name)]

    def summarise(self, layer: str, integration: Integration) -> str:
        """Write the missing summaries of a layer, which mark its outputs as finished.

        Args:
            layer: short name of the layer, or INPUT.
            integration: settings of the integration, of which only the tolerance is used; if it is
                None, the default tolerance.

        Returns:
            A line of text on the completeness errors of the outputs; for INPUT, it states that
            there is no such check.
        """
        frames = sum(map(len, self._trajectories.values()))
        allowed = integration.tolerance or Integration().tolerance
        for output in self.unfinished(layer):
            summary: dict = {"deviation": self._deviations[output.name], "frames": frames}
            if layer != INPUT:
                errors = self._store.read_all("attributions", layer, output.name, name="gap")
                summary |= {**error_quantiles(errors), "above": int((errors > allowed).sum())}
            self._store.write("summary", layer, output.name, value=summary)
        if layer == INPUT:
            return f"{INPUT}: plain gradients with respect to the frame (no completeness check)"
        summaries = [self._store.read("summary", layer, output.name) for output in self._outputs]
        table = pd.DataFrame(summaries)
        worst = table[["gap_median", "gap_99"]].max()
        return (f"{layer}: completeness error of the worst output {worst['gap_median']:.2%} "
                f"(median), {worst['gap_99']:.2%} (99th percentile); above the tolerance in "
                f"{table['above'].sum()} of {table['frames'].sum()} frames and outputs")

    def _write(self, items: Sequence[tuple], compute: Callable[[np.ndarray], Sequence[Arrays]],
               title: str) -> None:
        """Compute and write the given items of every trajectory that lacks any of them.

        Args:
            items: entry and key of each item, without the number of the trajectory.
            compute: function that returns each item's arrays for a batch of frame ids (B, 2).
            title: title of the progress bar.
        """
        for number, trajectory in with_progress(self._trajectories.items(),
                                                len(self._trajectories), title):
            if not all(self._store.has(*item, number) for item in items):
                pieces = zip(*map(compute, batches(trajectory)))
                for item, arrays in zip(items, pieces):
                    self._store.write(*item, number, value=concatenate(arrays))

    def _attribute_batch(self, attributor: LayerIntegratedGradients, reducer: Reducer,
                         frame_ids: np.ndarray) -> list[Arrays]:
        """Compute the activations of features in the frames with the given ids (B, 2), and the
        attributions of each output.

        Returns:
            Arrays of the entry ``activations``, then arrays of the entry ``attributions`` for each
            output; see ``attribution.results``.
        """
        layer = attributor.bottleneck
        frames = self._context.recording.read(frame_ids)
        prefix = attributor.run_prefix(frames.frames, frames.entering)
        maps = prefix.activations.cpu().numpy().reshape(len(frame_ids), *layer.shape)
        check_finite_frames(maps, frame_ids, f"activations of the layer {layer.name}")
        activations = flatten_cells(maps)
        shape = (len(frame_ids), *layer.shape[1:], -1)
        items = [{"cells": reducer.activations(activations).reshape(shape).astype(np.float16)}]
        result = attributor.attribute(prefix, frames.actions, self._deviations_of(attributor))
        for number, values in enumerate(result.values):
            check_finite_frames(values, frame_ids, f"attributions to the layer {layer.name}")
            cells = reducer.attributions(flatten_cells(values), activations).reshape(shape)
            items.append({"cells": cells.astype(np.float16),
                          "totals": cells.sum(axis=(1, 2)).astype(np.float32),
                          **result.integral(number)})
        return items

    def _attribute_batch_over_time(self, attributor: IntegratedGradientsOverTime,
                                   features: LayerFeatures, lags: int,
                                   frame_ids: np.ndarray) -> list[Arrays]:
        """Compute the attributions over time in the frames with the given ids (B, 2); return the
        arrays of the entry ``over_time`` for each output."""
        layer = attributor.bottleneck
        rows = frame_ids[:, 1:] - np.arange(lags)  # (B, L)
        steps = np.stack([np.broadcast_to(frame_ids[:, :1], rows.shape), np.maximum(rows, 0)],
                         axis=-1).reshape(-1, 2)
        unique, index = np.unique(steps, axis=0, return_inverse=True)
        index = index.reshape(rows.shape)
        frames = self._context.recording.read(unique)
        prefix = attributor.run_prefix(frames.frames, frames.entering).activations
        exists, places, entering = (
            torch.from_numpy(array).to(prefix.device)
            for array in (rows >= 0, index, frames.entering[index[:, -1]]))
        activations = prefix[places] * exists.reshape(*rows.shape, *[1] * (prefix.ndim - 1))
        result = attributor.attribute_over_time(activations, exists, entering,
                                                frames.actions[index[:, 0]],
                                                self._deviations_of(attributor))
        cells = flatten_cells(activations.flatten(0, 1).cpu().numpy().reshape(-1, *layer.shape))
        items = []
        for number, values in enumerate(result.values):
            check_finite_frames(values, frame_ids,
                                f"attributions over time to the layer {layer.name}")
            reduced = features.reducer.attributions(
                flatten_cells(values.reshape(-1, *layer.shape)), cells)
            totals = reduced.reshape(*rows.shape, -1, features.number + 1).sum(axis=2)
            items.append({"totals": totals, **result.integral(number)})
        return items

    def _deviations_of(self, attributor: LayerIntegratedGradients) -> np.ndarray:
        return np.array([self._deviations[output.name] for output in attributor.outputs])


main = command(AttributeOptions, attribute)

if __name__ == "__main__":
    raise SystemExit(main())
