"""Infidelity and sensitivity of attributions to a layer, computed with Captum.

Both measures are from Yeh et al. (2019), "On the (in)fidelity and sensitivity of explanations".
Infidelity: mean squared difference between the predicted and the actual change of the output when
activations move to or from the baseline by random shares of their distance (normally distributed,
with standard deviation NOISE). It is divided by the mean square of the actual change, so that
attributions of zero have infidelity 1. Sensitivity: largest relative change of the attributions
(Euclidean norm) when activations move by shares of at most NOISE.

Letters in shape comments: N frames, B frames of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import pandas as pd
import torch
from captum.metrics import infidelity, sensitivity_max
from matplotlib.figure import Figure
from torch import Tensor

from attribution.checking.check import (
    Arrays,
    Batch,
    Check,
    CheckContext,
    CheckedLayer,
    Name,
    Subject,
    panels,
)
from attribution.integrated_gradients import Integration, PrefixActivations
from common.results import Array

NUM_FRAMES = 32  # small, because each frame is attributed at many changed activations
NOISE = 0.1
CHANGES = 10  # random changes per frame
_FRAMES_PER_BATCH = 8


class Fidelity(Check):
    """Infidelity and sensitivity.

    Stored: ``values`` of both, float64 (N, 2); NaN where they are not defined.
    """

    name = "fidelity"
    title = "Infidelity and sensitivity"
    method = (
        "By captum, after Yeh et al. (2019), with small random changes of the activations. "
        "Infidelity: mean squared error of what attributions say of them, as a share of the "
        "mean square of what they do; 1 is as good as no attributions. Sensitivity: the "
        "largest relative change of the attributions.")
    columns: ClassVar = {"frames": "frames", "infidelity": "infidelity (median)",
        "sensitivity": "sensitivity (median)"}
    arrays: ClassVar = {"values": Array(np.float64, "N 2", finite=False)}

    def compute(self, context: CheckContext, subject: Subject) -> Arrays:
        settings = context.attributions.settings()
        layer = CheckedLayer(context.agent, subject,
                             Integration(settings["steps"], settings["rule"], None))

        def compute(batch: Batch) -> np.ndarray:
            rows = torch.arange(len(batch.actions))
            return np.concatenate([_fidelity(layer, batch, part, context.seed)
                                   for part in rows.split(_FRAMES_PER_BATCH)])

        with torch.random.fork_rng():
            return {"values": layer.compute(context.frames.subset(NUM_FRAMES), "fidelity frame",
                                            compute)}

    def rows(self, context: CheckContext, subject: Subject, arrays: Arrays) -> pd.DataFrame:
        values = arrays["values"]
        return pd.DataFrame([(len(values), *np.nanmedian(values, axis=0))],
                            columns=["frames", "infidelity", "sensitivity"])

    def plot(self, table: pd.DataFrame, arrays: Mapping[Name, Arrays]) -> Figure:
        figure, axes_of = panels(1, 2)
        names = [", ".join(name) for name in arrays]
        for number, (axes, title) in enumerate(zip(axes_of[0], ("infidelity", "sensitivity"))):
            columns = [stored["values"][:, number] for stored in arrays.values()]
            axes.boxplot([column[np.isfinite(column)] for column in columns],
                         orientation="horizontal")
            axes.set_yticks(np.arange(1, len(names) + 1), names, fontsize=8)
            axes.set(xlabel=title)
        return figure

    def verdict(self, table: pd.DataFrame) -> str:
        return (f"Infidelity: median {table['infidelity'].median():.2f}; sensitivity: median "
                f"{table['sensitivity'].median():.2f}.")


def _fidelity(layer: CheckedLayer, batch: Batch, rows: Tensor, seed: int) -> np.ndarray:
    """Compute infidelity and sensitivity in some rows (B,) of a batch.

    Args:
        layer: layer and output.
        batch: the frames.
        rows: positions in the batch (B,).
        seed: seed of the random changes.

    Returns:
        float64 array (B, 2).
    """
    activations = batch.prefix.activations[rows].cpu().contiguous()
    base = layer.baseline.expand_as(activations)

    def output(changed: Tensor, frame: Tensor) -> Tensor:
        return torch.from_numpy(layer.outputs(batch, changed, frame.numpy()))

    def attribute(changed: tuple[Tensor, ...],
                  additional_forward_args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        [frame] = additional_forward_args
        also_read = tuple(state[frame] for state in batch.prefix.also_read)
        with torch.enable_grad():  # captum disables gradients
            values = layer.attributor.attribute(PrefixActivations(changed[0].detach(), also_read),
                                                batch.actions[frame.numpy()], np.zeros(1)).values
        return (torch.from_numpy(values[0]).reshape(changed[0].shape),)

    def move(inputs: Tensor, baselines: Tensor) -> tuple[Tensor, Tensor]:
        shares = NOISE * torch.randn(inputs.shape)
        return shares, inputs - shares * (inputs - baselines)

    def move_slightly(inputs: Tensor, radius: float) -> tuple[Tensor, ...]:
        starts = base.repeat_interleave(len(inputs) // len(base), dim=0)
        return (inputs + radius * (2 * torch.rand(inputs.shape) - 1) * (inputs - starts),)

    [attributed] = attribute((activations,), (rows,))
    errors = []
    for attributions in (attributed, torch.zeros_like(attributed)):
        torch.manual_seed(seed)
        errors.append(infidelity(output, move, activations, attributions, base.contiguous(),
                                 rows, n_perturb_samples=CHANGES))
    torch.manual_seed(seed)
    sensitivity = sensitivity_max(attribute, activations, move_slightly, NOISE, CHANGES,
                                  additional_forward_args=(rows,))
    ratio = torch.where(errors[1] > 0, errors[0] / errors[1], torch.nan)
    return torch.stack([ratio.double(), sensitivity.double()], dim=1).cpu().numpy()
