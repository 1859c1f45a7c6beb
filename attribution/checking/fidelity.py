"""Infidelity and sensitivity of attributions to a layer, by captum.

Yeh et al. (2019), "On the (in)fidelity and sensitivity of explanations". Infidelity: activations
move by random shares of their distance from the baseline (normally distributed, NOISE); the mean
squared difference between what the attributions say that this does to the output, and what it does;
here as a share of the mean square of the latter, so that 1 is as good as attributions of zero.
Sensitivity: the largest relative change of the attributions (Euclidean norm) while activations move
by shares of at most NOISE.

Letters in shape comments: N frames, B of a batch, C H W a layer, R changed frames.
"""

from __future__ import annotations

import numpy as np
import torch
from captum.metrics import infidelity, sensitivity_max
from torch import Tensor

from attribution.checking.checked_frames import Batch, CheckedFrames, CheckedLayer
from attribution.integrated_gradients import PrefixActivations
from common.progress import Progress

NOISE = 0.1
CHANGES = 10  # of a frame
_FRAMES_A_PASS = 8


def fidelity_of(layer: CheckedLayer, frames: CheckedFrames, seed: int) -> np.ndarray:
    """Infidelity and sensitivity of attributions in frames, float64 (N, 2); NaN where changes do
    nothing, or nothing is attributed.

    Args:
        layer: with the integration that is checked.
        seed: of the changes.
    """
    found = []
    with torch.random.fork_rng(), Progress(len(frames.step), "fidelity frame") as progress:
        for batch in layer.batches(frames):
            for begin in range(0, len(batch.actions), _FRAMES_A_PASS):
                rows = torch.arange(begin, min(begin + _FRAMES_A_PASS, len(batch.actions)))
                found.append(_fidelity(layer, batch, rows, seed))
                progress.update(progress.done + len(rows))
    return np.concatenate(found)


def _fidelity(layer: CheckedLayer, batch: Batch, rows: Tensor, seed: int) -> np.ndarray:
    """(B, 2)."""
    activations = batch.prefix.activations[rows].cpu().contiguous()
    base = layer.baseline.expand_as(activations)

    def output(changed: Tensor, frame: Tensor) -> Tensor:
        return torch.from_numpy(layer.outputs(batch, changed, frame.numpy()))

    def attribute(changed: tuple[Tensor, ...],
                  additional_forward_args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        [frame] = additional_forward_args
        read = tuple(each[frame] for each in batch.prefix.also_read)
        with torch.enable_grad():  # captum forbids it
            found = layer.attributor.attribute(PrefixActivations(changed[0].detach(), read),
                                               batch.actions[frame.numpy()], np.zeros(1))
        return (torch.from_numpy(found.values[0]).reshape(changed[0].shape),)

    def moved(inputs: Tensor, baselines: Tensor) -> tuple[Tensor, Tensor]:
        shares = NOISE * torch.randn(inputs.shape)
        return shares, inputs - shares * (inputs - baselines)

    def moved_a_little(inputs: Tensor, radius: float) -> tuple[Tensor, ...]:
        starts = base.repeat_interleave(len(inputs) // len(base), dim=0)
        return (inputs + radius * (2 * torch.rand(inputs.shape) - 1) * (inputs - starts),)

    [own] = attribute((activations,), (rows,))
    errors = []
    for attributions in (own, torch.zeros_like(own)):
        torch.manual_seed(seed)
        errors.append(infidelity(output, moved, activations, attributions, base.contiguous(),
                                 rows, n_perturb_samples=CHANGES))
    torch.manual_seed(seed)
    sensitivity = sensitivity_max(attribute, activations, moved_a_little, NOISE, CHANGES,
                                  additional_forward_args=(rows,))
    ratio = torch.where(errors[1] > 0, errors[0] / errors[1], torch.nan)
    return torch.stack([ratio.double(), sensitivity.double()], dim=1).cpu().numpy()
