"""Deletion and insertion: what becomes of an output while a layer's cells go to the baseline, or
come from it, in the order of their attributions.

Petsiuk, Das and Saenko (2018), "RISE", section 3.3, with the cells of a layer in the place of
pixels. The cells with the largest attribution, those that raise the output most, go or come first,
so good orders have a small area under the curve of deletion, and a large one under that of
insertion. Beside it the orders of gradient times activation and of the size of the activations
(Euclidean norm over channels), and random ones.

Letters in shape comments: N frames, B of a batch, P cells, C channels, M points of a curve.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import torch

from attribution.checking.checked_frames import Batch, CheckedFrames, CheckedLayer
from common.progress import Progress
from stats.bootstrap import ClusterBootstrap

POINTS = 9  # of a curve, both ends among them
RANDOM_ORDERS = 2
ATTRIBUTION, GRADIENT, ACTIVATION, RANDOM = ORDERS = (
    "attribution", "gradient times activation", "size of the activations", "random")
KINDS = ("deletion", "insertion")


@dataclasses.dataclass(frozen=True)
class Curves:
    """Outputs while cells go and come.

    Attributes:
        values: float32 (N, orders, 2, M): by order of ``ORDERS``, deletion and insertion. The first
            point has no cell gone or come, the last one all.
    """

    values: np.ndarray

    @property
    def areas(self) -> np.ndarray:
        """Mean heights (N, orders, 2): areas under the curves over a length of 1."""
        return (self.values[..., 1:] + self.values[..., :-1]).mean(axis=-1) / 2


def deletion_curves(layer: CheckedLayer, frames: CheckedFrames, attributions: np.ndarray,
                    seed: int) -> Curves:
    """The curves of frames.

    Args:
        attributions: of each cell (N, H, W).
        seed: of the random orders.
    """
    rng = np.random.default_rng(seed)
    values = np.empty((len(frames.step), len(ORDERS), len(KINDS), POINTS), np.float32)
    with Progress(len(values), "deletion frame") as progress:
        for batch in layer.batches(frames):
            values[batch.rows] = _curves(layer, batch, attributions[batch.rows], rng)
            progress.update(batch.rows.stop)
    return Curves(values)


def _curves(layer: CheckedLayer, batch: Batch, attributions: np.ndarray,
            rng: np.random.Generator) -> np.ndarray:
    """(B, orders, 2, M)."""
    activations = batch.prefix.activations
    number, _, height, width = activations.shape
    gradient = layer.attributor.attribute(batch.prefix, batch.actions, np.zeros(1)).values[0]
    scores = [attributions, gradient.sum(axis=1), activations.norm(dim=1).cpu().numpy()]
    # Place of each cell in an order (B, P): those with a small one go, or come, first.
    ranks = [np.argsort(np.argsort(-each.reshape(number, -1), axis=1, kind="stable"), axis=1)
             for each in scores]
    random = [rng.permuted(np.tile(np.arange(height * width), (number, 1)), axis=1)
              for _ in range(RANDOM_ORDERS)]
    changed = np.round(np.linspace(0, height * width, POINTS)).astype(int)[1:-1]
    kept = np.stack([np.stack([keep(rank, some) for some in changed], axis=1) for keep, rank in (
        *((np.greater_equal, each) for each in (*ranks, *random)),  # the last ones: deletion
        *((np.less, each) for each in ranks))], axis=1)  # the first ones: insertion
    inner = _outputs(layer, batch, kept.reshape(-1, 1, height, width)).reshape(kept.shape[:3])
    rows = np.arange(number)
    ends = [np.tile(layer.outputs(batch, each, rows)[:, None, None], (1, kept.shape[1], 1))
            for each in (activations, layer.baseline.to(activations).expand_as(activations))]
    own = len(ranks)
    gone = np.concatenate([ends[0], inner, ends[1]], axis=2)[:, :own + RANDOM_ORDERS]
    come = np.concatenate([ends[1], inner, ends[0]], axis=2)[:, own + RANDOM_ORDERS:]
    # A random order read from its end is another one, which has the same curve from its other end.
    by_chance = gone[:, own:].mean(axis=1, keepdims=True)
    return np.stack([np.concatenate([gone[:, :own], by_chance], axis=1),
                     np.concatenate([come, by_chance[..., ::-1]], axis=1)], axis=2)


def _outputs(layer: CheckedLayer, batch: Batch, kept: np.ndarray) -> np.ndarray:
    """Outputs where only the cells ``kept`` (R, 1, H, W) are not at the baseline; R / B in a row
    belong to a frame: (R,)."""
    activations = batch.prefix.activations
    base = layer.baseline.to(activations)
    frame = np.repeat(np.arange(len(activations)), len(kept) // len(activations))
    found = []
    for some in _pieces(len(kept)):
        cells = torch.from_numpy(kept[some]).to(activations.device)
        changed = torch.where(cells, activations[torch.from_numpy(frame[some])], base)
        found.append(layer.outputs(batch, changed, frame[some]))
    return np.concatenate(found)


def _pieces(number: int, size: int = 512) -> list[slice]:
    return [slice(begin, begin + size) for begin in range(0, number, size)]


def deletion_table(curves: Curves, episodes: np.ndarray, deviation: float,
                   seed: int) -> pd.DataFrame:
    """How much better the order of attributions is than the others.

    Args:
        episodes: of each frame (N,).
        deviation: of the output over observations, the unit of the table.
        seed: of the bootstrap over episodes.

    Returns:
        A row a kind of curve and other order, with the columns ``kind``, ``other``, ``area`` and
        ``other_area`` (under the curves, in deviations of the output), ``better`` (by how much the
        order of attributions is better: its area is smaller in deletion, and larger in insertion),
        ``low_95``, ``high_95``, and ``above`` (whether this interval lies above 0).
    """
    areas = curves.areas / deviation
    bootstrap, rows = ClusterBootstrap(episodes, seed), []
    for number, kind in enumerate(KINDS):
        own = areas[:, 0, number]
        for place, other in enumerate(ORDERS[1:], start=1):
            better = (own - areas[:, place, number]) * (1 if kind == "insertion" else -1)
            low, high = bootstrap.interval(better[None])[:, 0]
            rows.append((kind, other, own.mean(), areas[:, place, number].mean(), better.mean(),
                         low, high, bool(low > 0)))
    return pd.DataFrame(rows, columns=["kind", "other", "area", "other_area", "better", "low_95",
                                       "high_95", "above"])
