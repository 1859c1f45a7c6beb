"""Frames in which attributions are checked, stored attributions in them, and layers whose
activations are changed.

Letters in shape comments: N frames, H W a layer's grid, F features, C channels, B a batch, R
changed frames.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from agents.outputs import Output
from attribution.context import AttributionContext
from attribution.integrated_gradients import (
    RIEMANN_RIGHT,
    Integration,
    LayerIntegratedGradients,
    PrefixActivations,
)
from attribution.layers import Bottleneck
from attribution.recordings import batches, check_finite_frames
from attribution.reduction import flatten_cells
from attribution.results import (
    AttributionStore,
    LayerFeatures,
)
from interventions.partial_forward import PartialForward

GRADIENT = Integration(1, RIEMANN_RIGHT, None)  # one node, at the frame: gradient times activation
_FRAMES_PER_BATCH = 128  # of changed activations


@dataclasses.dataclass(frozen=True)
class CheckedFrames:
    """Frames of trajectories, in their order.

    Attributes:
        trajectory: number of the trajectory of each frame (N,).
        step: step in the trajectory (N,).
        places: episode and row in the recording, int32 (N, 2); rows of an episode are adjacent and
            ascending.
    """

    trajectory: np.ndarray
    step: np.ndarray
    places: np.ndarray

    @property
    def episodes(self) -> np.ndarray:
        """Episode of each frame (N,)."""
        return self.places[:, 0]

    def subset(self, number: int) -> CheckedFrames:
        """Return at most ``number`` evenly spaced frames."""
        rows = np.unique(np.linspace(0, len(self.step) - 1, min(number, len(self.step))).round()
                         ).astype(int)
        return CheckedFrames(self.trajectory[rows], self.step[rows], self.places[rows])


def draw_frames(attributions: AttributionStore, number: int, seed: int) -> CheckedFrames:
    """Draw at most ``number`` frames from all trajectories."""
    steps = attributions.trajectories()
    rows = np.sort(np.random.default_rng(seed).permutation(len(steps))[:number])
    trajectory = steps.trajectory[rows]
    return CheckedFrames(trajectory, rows - steps.bounds[trajectory],
                         steps.frame_ids[rows])


def read_attributions(attributions: AttributionStore, layer: str, output: str,
                      frames: CheckedFrames, array: str) -> np.ndarray:
    """Read stored attributions of an output to the features of a layer in frames.

    Args:
        array: "cells", or "totals" for the sums over cells.

    Returns:
        float32 (N, H, W, F + 1) or (N, F + 1); the last entry is the residual.

    Raises:
        UserError: if a file is missing or damaged.
    """
    return np.concatenate([
        attributions.read("attributions", layer, output, int(number))[array][
            frames.step[frames.trajectory == number]].astype(np.float32)
        for number in np.unique(frames.trajectory)])


def feature_activations(context: AttributionContext, bottleneck: Bottleneck,
                        features: LayerFeatures, places: np.ndarray) -> np.ndarray:
    """Compute activations of features in rows of the recording.

    Args:
        places: episode and row of each frame (N, 2).

    Returns:
        float32 (N, H, W, F).

    Raises:
        UserError: if one is not finite; its frame is named.
    """
    half, activations = PartialForward(context.policy, context.compute, bottleneck.layer.name), []
    with torch.no_grad():
        for batch in batches(places):
            rows = context.recording.read(batch)
            maps = half.run_to(rows.frames, torch.from_numpy(rows.entering)).activations.cpu(
                ).numpy().reshape(len(batch), *bottleneck.shape)
            check_finite_frames(maps, batch, f"activations of the layer {bottleneck.name}")
            activations.append(features.reducer.activations(flatten_cells(maps)).astype(
                np.float32).reshape(len(batch), *bottleneck.shape[1:], -1))
    return np.concatenate(activations)


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch of frames with the activations of a layer.

    Attributes:
        rows: positions among all checked frames.
        prefix: activations (B, C, …) and what else the rest of the network reads.
        actions: actions that were taken (B,).
    """

    rows: slice
    prefix: PrefixActivations
    actions: np.ndarray


class CheckedLayer:
    """A layer and an output of an agent, to measure the output with changed activations.

    Args:
        bottleneck: a layer with cells.
        features: features of the layer.
        output: the attributed output.
        integration: integration of attributions that are computed here.
    """

    def __init__(self, context: AttributionContext, bottleneck: Bottleneck,
                 features: LayerFeatures, output: Output, integration: Integration = GRADIENT):
        self.bottleneck, self.features = bottleneck, features
        self._context = context
        self.attributor = LayerIntegratedGradients(
            context.policy, context.compute, bottleneck, [output], integration, features.baseline)
        self.baseline = (torch.zeros(bottleneck.shape) if features.baseline is None
                         else torch.from_numpy(features.baseline))

    def batches(self, frames: CheckedFrames) -> Iterator[Batch]:
        """Yield the frames batch by batch."""
        done = 0
        for places in batches(frames.places):
            recorded = self._context.recording.read(places)
            yield Batch(slice(done, done + len(places)),
                        self.attributor.run_prefix(recorded.frames, recorded.entering),
                        recorded.actions)
            done += len(places)

    def outputs(self, batch: Batch, changed: Tensor, frame: np.ndarray) -> np.ndarray:
        """Compute the output with changed activations.

        Args:
            changed: activations (R, C, H, W).
            frame: position in the batch of the frame that each belongs to (R,).

        Returns:
            float64 (R,).
        """
        outputs = []
        for begin in range(0, len(changed), _FRAMES_PER_BATCH):
            part = slice(begin, begin + _FRAMES_PER_BATCH)
            which = torch.from_numpy(frame[part])
            outputs.append(self.attributor.outputs_at(
                PrefixActivations(changed[part], tuple(
                    state[which] for state in batch.prefix.also_read)),
                batch.actions[frame[part]])[0])
        return np.concatenate(outputs)
