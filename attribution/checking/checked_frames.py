"""Frames that attributions are checked in, and what was attributed in them.

Letters in shape comments: N frames, H W a layer's grid, F features, C channels, R changed frames.
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
from attribution.recordings import batches
from attribution.results import AttributionFolder, LayerFeatures

GRADIENT = Integration(1, RIEMANN_RIGHT, None)  # one node, at the frame: gradient times activation
_ROWS_A_PASS = 128  # of changed activations


@dataclasses.dataclass(frozen=True)
class CheckedFrames:
    """Frames of trajectories, in their order.

    Attributes:
        trajectory: of each (N,).
        step: in its trajectory (N,).
        places: episode and row in the recording, int32 (N, 2); those of an episode lie together,
            ascending.
    """

    trajectory: np.ndarray
    step: np.ndarray
    places: np.ndarray

    @property
    def episodes(self) -> np.ndarray:
        """Of each frame (N,)."""
        return self.places[:, 0]

    def some(self, number: int) -> CheckedFrames:
        """So many of them at most, evenly."""
        rows = np.unique(np.linspace(0, len(self.step) - 1, min(number, len(self.step))).round()
                         ).astype(int)
        return CheckedFrames(self.trajectory[rows], self.step[rows], self.places[rows])


def draw_frames(attributions: AttributionFolder, number: int, seed: int) -> CheckedFrames:
    """Draw frames from all trajectories, at most ``number``."""
    steps = attributions.trajectories()
    rows = np.sort(np.random.default_rng(seed).permutation(len(steps))[:number])
    trajectory = steps.trajectory[rows]
    return CheckedFrames(trajectory, rows - steps.bounds[trajectory],
                         np.stack([steps.episode[rows], steps.row[rows]], axis=1))


def attributed_cells(attributions: AttributionFolder, layer: str, output: str,
                     frames: CheckedFrames) -> np.ndarray:
    """Attributions of an output to the features of a layer in frames, float32 (N, H, W, F + 1); the
    last one is the residual.

    Raises:
        UserError: if a file is missing or damaged.
    """
    return np.concatenate([
        attributions.attributed(layer, output, int(number)).cells[
            frames.step[frames.trajectory == number]].astype(np.float32)
        for number in np.unique(frames.trajectory)])


def attributed_totals(attributions: AttributionFolder, layer: str, output: str,
                      frames: CheckedFrames) -> np.ndarray:
    """Sums of the same over cells, float32 (N, F + 1).

    Raises:
        UserError: if a file is missing or damaged.
    """
    return np.concatenate([
        attributions.attributed(layer, output, int(number)).totals[
            frames.step[frames.trajectory == number]]
        for number in np.unique(frames.trajectory)])


@dataclasses.dataclass(frozen=True)
class Batch:
    """Some frames with the activations of a layer.

    Attributes:
        rows: their numbers among all checked frames.
        prefix: activations (B, C, …) and what else the rest of the network reads.
        actions: that were taken (B,).
        pictures: uint8 (B, 64, 64, 3).
        entering: hidden states that enter (B, D).
    """

    rows: slice
    prefix: PrefixActivations
    actions: np.ndarray
    pictures: np.ndarray
    entering: np.ndarray


class CheckedLayer:
    """One layer and one output of an agent, to change activations and see what becomes of the
    output.

    Args:
        bottleneck: a layer with cells.
        features: of the layer.
        output: that is attributed.
        integration: for attributions that are computed here.
    """

    def __init__(self, context: AttributionContext, bottleneck: Bottleneck, features: LayerFeatures,
                 output: Output,
                 integration: Integration = GRADIENT):
        self.bottleneck, self.features = bottleneck, features
        self._opened = context
        mean = features.mean_activations if features.settings["baseline"] == "mean" else None
        self.attributor = LayerIntegratedGradients(context.policy, context.compute, bottleneck,
                                                   [output], integration,
                                     mean)
        self.baseline = torch.zeros(bottleneck.shape) if mean is None else torch.from_numpy(mean)

    def batches(self, frames: CheckedFrames) -> Iterator[Batch]:
        """The frames, some at a time."""
        done = 0
        for places in batches(frames.places):
            read = self._opened.recording.read(places)
            yield Batch(slice(done, done + len(places)),
                        self.attributor.run_prefix(read.frames, read.entering), read.actions,
                        read.frames, read.entering)
            done += len(places)

    def outputs(self, batch: Batch, changed: Tensor, frame: np.ndarray) -> np.ndarray:
        """The output with other activations.

        Args:
            changed: activations (R, C, H, W).
            frame: number in the batch of each (R,).

        Returns:
            float64 (R,).
        """
        found = []
        for begin in range(0, len(changed), _ROWS_A_PASS):
            some = slice(begin, begin + _ROWS_A_PASS)
            which = torch.from_numpy(frame[some])
            found.append(self.attributor.outputs_at(
                PrefixActivations(changed[some], tuple(each[which]
                                                       for each in batch.prefix.also_read)),
                batch.actions[frame[some]])[0])
        return np.concatenate(found)
