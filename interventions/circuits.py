"""Circuits: small sets of parts of a layer that determine an outcome.

Parts are the channels, units or cells of the layer, see ``interventions.scan.Part``. Each original
frame is paired with a frame of another level. The policy runs on the paired frame, and the parts in
the circuit receive their activations from the original frame. *Faithfulness* is
1 - mean |circuit - original| / mean |paired - original|, where the terms are outcomes, and means
are over frames: 0 without parts, 1 if every outcome equals that of the original frame. If later
modules bypass the layer (``PartialForward.bypassed``), all parts together do not reach 1.

Letters in shape comments: N frames, S parts of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from agents.networks import Policy
from common.devices import Compute
from common.palette import BLUE, DARK_GREY, DPI
from common.tables import format_count
from interventions.partial_forward import PartialForward, Prefix
from interventions.scan import Outcome, Part, ScanFrames
from stats.association import ratio
from stats.bootstrap import ClusterBootstrap

GREEDY = "greedy"
MOST_PARTS = 64  # largest circuit
NUM_RANDOM = 19  # random orders of parts, with which the greedy order is compared


class LayerCircuits:
    """Finds and evaluates circuits of one layer on pairs of frames.

    Args:
        policy: the agent.
        compute: device and precision.
        parts: all parts of the layer, such as its channels.
        frames: original frames with their paired frames.
        outcome: outcome that circuits should preserve.

    Attributes:
        target: outcome of each original frame (N,).
    """

    def __init__(self, policy: Policy, compute: Compute, parts: Sequence[Part],
                 frames: ScanFrames, outcome: Outcome):
        assert frames.paired is not None
        forward = PartialForward(policy, compute, parts[0].layer)
        self._parts, self._outcome, self._numbers = parts, outcome, np.arange(len(frames.frames))
        with torch.no_grad():
            original = forward.run_to(frames.frames, frames.entering)
            self._paired: Prefix = forward.run_to(frames.paired, frames.entering)
            self._original = original.activations
            self.target = outcome(original.run_from(), self._numbers)  # (N,)

    def _outcome_of(self, activations: Tensor) -> Tensor:
        return self._outcome(self._paired.run_from(activations), self._numbers)

    def greedy_order(self, number: int) -> list[int]:
        """Choose parts greedily, by a first-order estimate.

        Each choice is the part with the largest estimated reduction of the squared difference of
        the outcome from ``target``, summed over frames, given the parts chosen before.

        Args:
            number: number of parts to choose; at most all parts are chosen.

        Returns:
            Indices of the parts, in the order of choice.
        """
        activations, chosen = self._paired.activations.clone(), []
        left = dict(enumerate(self._parts))
        for _ in range(min(number, len(left))):
            activations.requires_grad_()
            error = (self._outcome_of(activations) - self.target).square().sum()
            (gradient,) = torch.autograd.grad(error, activations)
            activations = activations.detach()
            changes = (gradient * (self._original - activations)).float()
            best = min(left, key=lambda index: float(changes[left[index].entries].sum()))
            entries = left.pop(best).entries
            activations[entries] = self._original[entries]
            chosen.append(best)
        return chosen

    @torch.no_grad()
    def errors(self, order: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
        """Return the absolute differences of the outcome from ``target``, without and with each
        circuit.

        Args:
            order: indices of parts; a circuit of n parts consists of the first n.
            sizes: sizes of the circuits, ascending.

        Returns:
            Errors, float64 (1 + number of sizes, N); the first row is without a circuit.
        """
        activations, outcomes = self._paired.activations.clone(), []
        outcomes.append(self._outcome_of(activations))
        for begin, end in zip([0, *sizes], sizes):
            for index in order[begin:end]:
                entries = self._parts[index].entries
                activations[entries] = self._original[entries]
            outcomes.append(self._outcome_of(activations))
        return (torch.stack(outcomes) - self.target).abs().double().cpu().numpy()


def circuit_table(policy: Policy, compute: Compute, parts: Sequence[Part], ranking: ScanFrames,
                  testing: ScanFrames, outcome: Outcome, seed: int) -> pd.DataFrame:
    """Choose circuits of a layer, and measure their faithfulness on frames of other levels.

    Args:
        policy, compute, parts, outcome: as for ``LayerCircuits``.
        ranking: frames on which the greedy order is chosen.
        testing: frames of other levels, on which faithfulness is measured.
        seed: seed of the random orders and of the bootstrap.

    Returns:
        A row per order (``greedy``, ``random_0``, ...) and size (powers of 2, and the largest
        size: all parts or ``MOST_PARTS``, whichever is less). Columns: ``layer``, ``order``,
        ``size``, ``parts`` (number of the layer's parts), ``faithfulness``, and ``low_95`` and
        ``high_95`` (bootstrap over levels).
    """
    most = min(len(parts), MOST_PARTS)
    sizes = sorted({*(2**power for power in range(most.bit_length())), most})
    rng = np.random.default_rng(seed)
    orders = {GREEDY: LayerCircuits(policy, compute, parts, ranking, outcome).greedy_order(most),
              **{f"random_{number}": rng.permutation(len(parts))[:most].tolist()
                 for number in range(NUM_RANDOM)}}
    tested, bootstrap = (LayerCircuits(policy, compute, parts, testing, outcome),
                         ClusterBootstrap(testing.levels, seed))
    rows = []
    for name, order in orders.items():
        without, *errors = tested.errors(order, sizes)
        for size, error in zip(sizes, errors):
            lost = ratio(error, without, testing.levels, bootstrap)
            rows.append({"layer": parts[0].layer, "order": name, "size": size,
                         "parts": len(parts), "faithfulness": 1 - lost.value,
                         "low_95": 1 - lost.high, "high_95": 1 - lost.low})
    return pd.DataFrame(rows)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Compare each layer's greedy circuit of about half of its parts with random circuits.

    Args:
        table: results of ``circuit_table``, of any number of layers.

    Returns:
        One row per layer, with the columns:

        - ``layer``, and ``parts``, the number of its parts.
        - ``size``: largest measured size of a circuit that is at most half of ``parts``; 1 for a
          layer with one part.
        - ``faithfulness``, ``low_95``, ``high_95``: faithfulness of the greedy circuit.
        - ``random_median``, ``random_max``: faithfulness of the random circuits of this size.
    """
    halves = table[2 * table["size"] <= table["parts"].clip(lower=2)]
    halves = halves[halves["size"] == halves.groupby("layer")["size"].transform("max")]
    greedy = halves[halves["order"] == GREEDY].drop(columns="order")
    random = halves[halves["order"] != GREEDY].groupby("layer")["faithfulness"]
    return greedy.merge(random.agg(random_median="median", random_max="max").reset_index(),
                        on="layer")


def plot_circuits(path: Path, table: pd.DataFrame, title: str) -> None:
    """Plot faithfulness against the size of the circuit, one panel per layer.

    Args:
        path: figure to write.
        table: results of ``circuit_table``, of any number of layers.
        title: what was measured, the second line of the title.
    """
    layers = list(dict.fromkeys(table["layer"]))
    columns = min(4, len(layers))
    rows = -(-len(layers) // columns)
    figure = Figure(figsize=(1 + 2.6 * columns, 1 + 2 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for axes in panels[len(layers):]:
        axes.axis("off")
    for axes, layer in zip(panels, layers):
        of_layer = table[table["layer"] == layer]
        random = of_layer[of_layer["order"] != GREEDY].groupby("size")["faithfulness"]
        greedy = of_layer[of_layer["order"] == GREEDY].sort_values("size")
        axes.fill_between(random.min().index, random.min(), random.max(), color=DARK_GREY,
                          alpha=0.3, linewidth=0, label=f"{NUM_RANDOM} random orders")
        axes.errorbar(greedy["size"], greedy["faithfulness"],
                      np.abs(greedy[["low_95", "high_95"]].to_numpy().T
                             - greedy["faithfulness"].to_numpy()), color=BLUE, marker="o",
                      markersize=3, linewidth=1, label="greedy order (95 %)")
        axes.set_xscale("log", base=2)
        axes.set_ylim(-0.25, 1.05)
        axes.set_title(layer.removeprefix("embedder."), fontsize=9)
    panels[0].legend(fontsize=7, loc="lower right")
    figure.supxlabel("parts in the circuit", fontsize=9)
    figure.supylabel("faithfulness", fontsize=9)
    halves = summary(table)
    better = (halves["faithfulness"] > halves["random_max"]).sum()
    figure.suptitle(f"Half of the parts in greedy order are more faithful than all random ones in "
                    f"{better} of {format_count(len(halves), 'layers')}\n{title}", fontsize=11)
    figure.savefig(path, dpi=DPI)
