"""Attributions of an agent's outputs to the features of its layers, along trajectories.

Results that are already stored are not computed again, so that a killed run can resume, and layers,
outputs and methods can be added later.

Letters in shape comments: B frames, T steps of a trajectory, L lags, C H W a layer, F features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from agents.outputs import Output
from attribution.context import AttributionContext
from attribution.integrated_gradients import (
    RIEMANN_RIGHT,
    Integration,
    LayerIntegratedGradients,
    frame_gradients,
)
from attribution.layers import Bottleneck
from attribution.over_time import IntegratedGradientsOverTime, Window
from attribution.recordings import batches, check_finite_frames, concatenate
from attribution.reduction import Reducer, flatten_cells
from attribution.results import INPUT, AttributionStore, LayerFeatures, error_quantiles
from common.progress import Progress

# One node, at the end of the path: gradient times activation.
GRADIENT_ACTIVATION = Integration(1, RIEMANN_RIGHT, None)
Arrays = dict[str, np.ndarray]


class TrajectoryAttributor:
    """Attributes outputs along trajectories and writes the results missing from a store.

    Args:
        context: the agent and its recording.
        store: the open folder.
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
        """Attribute unfinished outputs to a layer; also write the activations of its features."""
        outputs = self.unfinished(bottleneck.name)
        if not outputs:
            return
        attributor = LayerIntegratedGradients(
            self._context.policy, self._context.compute, bottleneck, outputs, integration,
            features.baseline)
        deviations = np.array([self._deviations[output.name] for output in outputs])
        self._write(
            [("activations", bottleneck.name),
             *(("attributions", bottleneck.name, output.name) for output in outputs)],
            functools.partial(self._attribute_batch, attributor, features.reducer, deviations),
            f"{bottleneck.name} step")

    def attribute_over_time(self, bottleneck: Bottleneck, features: LayerFeatures,
                            integration: Integration, lags: int) -> None:
        """Attribute all outputs to a layer at each of the last ``lags`` steps."""
        attributor = IntegratedGradientsOverTime(
            self._context.policy, self._context.compute, bottleneck, self._outputs, integration)
        self._write(
            [("over_time", bottleneck.name, output.name, lags) for output in self._outputs],
            functools.partial(self._attribute_batch_over_time, attributor, features, lags),
            f"{bottleneck.name} step over time")

    def multiply_gradients(self, bottleneck: Bottleneck, features: LayerFeatures) -> None:
        """Compute gradient times activation of all outputs at a layer."""
        attributor = LayerIntegratedGradients(
            self._context.policy, self._context.compute, bottleneck, self._outputs,
            GRADIENT_ACTIVATION)
        deviations = np.zeros(len(self._outputs))

        def multiply(batch: np.ndarray) -> list[Arrays]:
            _, *products = self._attribute_batch(attributor, features.reducer, deviations, batch)
            return [{name: product[name] for name in ("cells", "totals")} for product in products]

        self._write([("gradient_activation", bottleneck.name, output.name)
                     for output in self._outputs],
                    multiply, f"{bottleneck.name} step, gradient times activation")

    def differentiate_frames(self) -> None:
        """Compute gradients of unfinished outputs with respect to the frames."""
        outputs = self.unfinished(INPUT)
        if outputs:
            self._write([("gradients", output.name) for output in outputs],
                        functools.partial(self._differentiate_batch, outputs), f"{INPUT} step")

    def unfinished(self, layer: str) -> list[Output]:
        """Return the outputs that have no summary for a layer yet."""
        return [output for output in self._outputs
                if not self._store.has("summary", layer, output.name)]

    def summarise(self, layer: str, tolerance: float | None) -> str:
        """Write the missing summaries of a layer, which mark its outputs as finished.

        Args:
            layer: short name of the layer.
            tolerance: accepted completeness error; None for the default.

        Returns:
            One line of text on the completeness errors of all outputs.
        """
        frames = sum(map(len, self._trajectories.values()))
        allowed = Integration().tolerance if tolerance is None else tolerance
        for output in self.unfinished(layer):
            summary: dict = {"deviation": self._deviations[output.name], "frames": frames}
            if layer != INPUT:
                errors = self._store.read_all("attributions", layer, output.name, name="gap")
                summary |= {**error_quantiles(errors), "above": int((errors > allowed).sum())}
            self._store.write("summary", layer, output.name, value=summary)
        if layer == INPUT:
            return f"{INPUT}: plain gradients with respect to the frame (no completeness check)"
        summaries = [self._store.read("summary", layer, output.name) for output in self._outputs]
        return (f"{layer}: gap median {max(each['gap_median'] for each in summaries):.2%}, 99 % "
                f"{max(each['gap_99'] for each in summaries):.2%} of the worst output; above the "
                f"tolerance in {sum(each['above'] for each in summaries)} of "
                f"{sum(each['frames'] for each in summaries)} frames and outputs")

    def _write(self, items: Sequence[tuple], compute: Callable[[np.ndarray], Sequence[Arrays]],
               title: str) -> None:
        """Compute and write items of each trajectory, unless all of them are already stored.

        Args:
            items: entry and key of each item, without the number of the trajectory.
            compute: function that returns each item's arrays for a batch of frame ids (B, 2).
            title: title of the progress bar.
        """
        with Progress(sum(map(len, self._trajectories.values())), title) as progress:
            for number, trajectory in self._trajectories.items():
                if not all(self._store.has(*item, number) for item in items):
                    pieces = zip(*map(compute, batches(trajectory)))
                    for item, arrays in zip(items, pieces):
                        self._store.write(*item, number, value=concatenate(arrays))
                progress.update(progress.done + len(trajectory))

    def _attribute_batch(self, attributor: LayerIntegratedGradients, reducer: Reducer,
                         deviations: np.ndarray, frame_ids: np.ndarray) -> list[Arrays]:
        """Compute the activations of features in frames with the given ids (B, 2), and the
        attributions of each output."""
        layer = attributor.bottleneck
        frames = self._context.recording.read(frame_ids)
        prefix = attributor.run_prefix(frames.frames, frames.entering)
        maps = prefix.activations.cpu().numpy().reshape(len(frame_ids), *layer.shape)
        check_finite_frames(maps, frame_ids, f"activations of the layer {layer.name}")
        activations = flatten_cells(maps)
        shape = (len(frame_ids), *layer.shape[1:], -1)
        items = [{"cells": reducer.activations(activations).reshape(shape).astype(np.float16)}]
        result = attributor.attribute(prefix, frames.actions, deviations)
        for number, values in enumerate(result.values):
            check_finite_frames(values, frame_ids, f"attributions to the layer {layer.name}")
            cells = reducer.with_residual(flatten_cells(values), activations).reshape(shape)
            items.append({
                "cells": cells.astype(np.float16),
                "totals": cells.sum(axis=(1, 2)).astype(np.float32),
                "output": result.outputs[number], "baseline": result.baselines[number],
                "gap": result.errors[number], "steps": result.steps[number]})
        return items

    def _attribute_batch_over_time(self, attributor: IntegratedGradientsOverTime,
                                   features: LayerFeatures, lags: int,
                                   frame_ids: np.ndarray) -> list[Arrays]:
        """Compute the attributions over time of each output in frames with the given ids (B, 2)."""
        layer = attributor.bottleneck
        rows = frame_ids[:, 1:] - np.arange(lags)  # (B, L)
        steps = np.stack([np.broadcast_to(frame_ids[:, :1], rows.shape), np.maximum(rows, 0)],
                         axis=-1).reshape(-1, 2)
        unique, index = np.unique(steps, axis=0, return_inverse=True)
        index = index.reshape(rows.shape)
        frames = self._context.recording.read(unique)
        prefix = attributor.run_prefix(frames.frames, frames.entering).activations
        device = prefix.device
        exists = torch.from_numpy(rows >= 0).to(device)
        activations = (prefix[torch.from_numpy(index).to(device)]
                       * exists.reshape(*rows.shape, *[1] * (prefix.ndim - 1)))
        entering = torch.from_numpy(frames.entering[index[:, -1]]).to(device)
        result = attributor.attribute_over_time(
            Window(activations, exists, entering), frames.actions[index[:, 0]],
            np.array([self._deviations[output.name] for output in self._outputs]))
        cells = flatten_cells(activations.flatten(0, 1).cpu().numpy().reshape(-1, *layer.shape))
        items = []
        assert result.older is not None
        for number, values in enumerate(result.values):
            check_finite_frames(values, frame_ids,
                                f"attributions over time to the layer {layer.name}")
            reduced = features.reducer.with_residual(
                flatten_cells(values.reshape(-1, *layer.shape)), cells)
            items.append({
                "totals": reduced.reshape(*rows.shape, -1, features.number + 1).sum(axis=2),
                "older": result.older[number], "output": result.outputs[number],
                "baseline": result.baselines[number], "gap": result.errors[number],
                "steps": result.steps[number]})
        return items

    def _differentiate_batch(self, outputs: Sequence[Output],
                             frame_ids: np.ndarray) -> list[Arrays]:
        """Compute the gradients of each output with respect to frames with the given ids (B, 2)."""
        items = []
        for gradients, output in zip(*frame_gradients(
                self._context.policy, self._context.compute, outputs,
                self._context.recording.read(frame_ids))):
            check_finite_frames(gradients, frame_ids, "gradients by the frame")
            largest = np.abs(gradients).max(axis=(1, 2, 3))
            shares = gradients / np.where(largest > 0, largest, 1)[:, None, None, None]
            items.append({"gradients": shares.astype(np.float16), "largest": largest,
                          "output": output})
        return items
