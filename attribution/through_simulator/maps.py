"""Maps of one output in recorded frames, of both kinds: saliency through the simulator, and
attributions to layers.

A simulation begins at the vector of the recorded frame and the two before it; its step 0 shows that
frame. The output is read at step 0, or ``lag`` steps later, and its gradient taken with respect to
the image of step 0.

Letters in shape comments: N frames, H W a map's grid, C image channels.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from agents.layers import Layer
from agents.networks import Policy
from agents.outputs import Output
from attribution.integrated_gradients import Integration, LayerIntegratedGradients
from attribution.layers import Bottleneck
from attribution.recordings import RecordedFrames
from common.devices import Compute
from common.game_constants import FRAME_SIZE
from generative.dataset import RolloutDataset
from generative.frozen_agent import FrozenAgent
from generative.saliency.gradients import SaliencyFunction, SaliencyPass, saliency_maps
from generative.simulator import Simulator

PIXELS = Bottleneck("pixels", Layer("pixels", (3, FRAME_SIZE, FRAME_SIZE), 1, 0.0))
SALIENCY, TIMES_IMAGE = "saliency", "saliency times image"
BLOCK = 8  # pixels a side, of a frame that is deleted or compared
_WINDOWS_A_PASS = 8


@dataclasses.dataclass(frozen=True)
class Map:
    """Maps of one kind in all frames.

    Attributes:
        name: with the lag, for tables.
        lag: steps after the frame at which the output is read.
        bottleneck: that its cells are of.
        values: what is said to raise the output, and where; float64 (N, H, W).
    """

    name: str
    lag: int
    bottleneck: Bottleneck
    values: np.ndarray

    @property
    def blocks(self) -> np.ndarray:
        """Sums over blocks of the frame (N, 8, 8); cell i of a layer of stride s counts for the
        pixels from s i on, as in ``Layer.cell``."""
        size = FRAME_SIZE // BLOCK
        return self.values.reshape(len(self.values), size, -1, size,
                                   self.values.shape[2] // size).sum(axis=(2, 4))


def attribution_maps(policy: Policy, compute: Compute, bottlenecks: Sequence[Bottleneck],
                     output: Output,
                     rows: RecordedFrames) -> list[Map]:
    """Integrated gradients of the agent's output in the recorded frames, one map a layer."""
    found = []
    for bottleneck in bottlenecks:
        attributor = LayerIntegratedGradients(policy, compute, bottleneck, [output],
                                              Integration(tolerance=None))
        values = []
        for begin in range(0, len(rows.frames), 32):
            some = slice(begin, begin + 32)
            prefix = attributor.run_prefix(rows.frames[some], rows.entering[some])
            values.append(attributor.attribute(prefix, rows.actions[some], np.ones(1)).values[0])
        found.append(Map(f"attribution to {bottleneck.name}", 0, bottleneck,
                         np.concatenate(values).sum(
            axis=1, dtype=np.float64)))
    return found


def simulated_maps(simulator: Simulator, compute: Compute, dataset: RolloutDataset,
                   windows: np.ndarray, function: SaliencyFunction, lags: Sequence[int],
                   kernel_size: int, sigma: float) -> list[Map]:
    """Saliency as it is drawn (summed over colours and smoothed), and times the image.

    Args:
        windows: whose last initial frame is the frame (N,).
        kernel_size, sigma: of the smoothing, see ``saliency_maps``.
    """
    drawn: dict[int, list[np.ndarray]] = {lag: [] for lag in lags}
    times: dict[int, list[np.ndarray]] = {lag: [] for lag in lags}
    for begin in range(0, len(windows), _WINDOWS_A_PASS):
        batch = dataset.batch(windows[begin:begin + _WINDOWS_A_PASS])
        images = batch.frames[:dataset.num_init_steps].to(compute.device).float() / 255
        with torch.no_grad(), compute.autocast():
            vectors = simulator.encode(images)
        for lag in lags:
            saliency = SaliencyPass(simulator, compute, vectors[:, None], [function], (lag,),
                                    lag + 1)
            gradients = saliency.gradients(function).images[:, 0].numpy()  # (B, C, H, W)
            shown = saliency.unperturbed_images()[:, 0].numpy()
            drawn[lag].append(saliency_maps(gradients, kernel_size, sigma))
            times[lag].append((gradients * shown).sum(axis=1))
    return [Map(f"{name}, {lag} steps later" if lag else name, lag, PIXELS,
                np.concatenate(found[lag]).astype(np.float64))
            for lag in lags for name, found in ((SALIENCY, drawn), (TIMES_IMAGE, times))]


@contextlib.contextmanager
def with_agent(simulator: Simulator, policy: Policy) -> Iterator[None]:
    """Put another agent of the same sizes inside a simulator."""
    agent = simulator.agent
    simulator.agent = FrozenAgent(policy, simulator.config.agent_hidden_size,
                                  simulator.config.action_space_size)
    try:
        yield
    finally:
        simulator.agent = agent
