"""Effect scans: the effect on an outcome of patching every layer, channel or cell in turn.

The activations of a part are replaced by 0 (``zero``), by their mean over reference frames
(``mean``), or by the activations in a paired frame (``interchange``). The last kind is activation
patching; applied cell by cell, it resembles the causal tracing of Meng et al. 2022, "Locating and
editing factual associations in GPT", with a paired frame instead of a noisy input. ``estimate``
computes first-order estimates of the same effects.

Letters in shape comments: N frames, P patched passes, S parts, L levels, C H W a map, U units,
D hidden units, A actions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from agents.hooks import cached, disabled
from agents.layers import find_layer
from agents.networks import Policy, PolicyOutput, to_images
from agents.reference_set import ReferenceSet
from common.devices import Compute
from common.errors import UserError
from common.game_constants import ACTION_NAMES
from common.progress import Progress
from interventions.partial_forward import PartialForward, Prefix
from stats.bootstrap import ClusterBootstrap, by_episode
from stats.effects import FLIPS_PER_COMPARISON, MIN_FLIPS, check_starts
from stats.significance import holm, sign_flip_p

PASSES_PER_BATCH = 128
KINDS = ("zero", "mean", "interchange")
UNITS = ("layer", "channel", "cell")

Outcome = Callable[[PolicyOutput, np.ndarray], Tensor]
"""Maps the output of P passes and the number of the frame of each pass (P,) to one value per pass
(P,)."""


OUTCOMES: dict[str, Outcome] = {
    "value": lambda output, frames: output.values,
    "entropy": lambda output, frames: -(output.log_probs.exp() * output.log_probs).sum(dim=-1),
    **{name: lambda output, frames, action=action: output.log_probs[:, action]  # type: ignore
       for action, name in enumerate(ACTION_NAMES)}}
"""Outcomes by name: value estimate, entropy of the policy in nats, and the log-probability of each
action under the action's name."""


@dataclasses.dataclass(frozen=True)
class ScanFrames:
    """Frames in which a scan patches parts.

    Attributes:
        frames: uint8 (N, H, W, 3).
        levels: seed of the level of each frame, int64 (N,).
        paired: frame from which ``interchange`` takes the entries for each frame, uint8
            (N, H, W, 3); may be None for the other kinds.
        entering: recurrent states before the step, shared by the two frames of a pair (N, D); None
            for initial states.
    """

    frames: np.ndarray
    levels: np.ndarray
    paired: np.ndarray | None = None
    entering: Tensor | None = None

    def __getitem__(self, index: slice | np.ndarray) -> ScanFrames:
        return ScanFrames(self.frames[index], self.levels[index],
                          None if self.paired is None else self.paired[index],
                          None if self.entering is None else self.entering[index])


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a layer's output: all of it, a channel (or unit), a cell, or one channel in a cell.

    Attributes:
        layer: name of the layer.
        channel: number of the channel or unit; None for all.
        cell: row from the top and column of the cell; None for all.
    """

    layer: str
    channel: int | None = None
    cell: tuple[int, int] | None = None

    @property
    def entries(self) -> tuple:
        """Index of the part in activations (N, C, H, W) or (N, U)."""
        channel = slice(None) if self.channel is None else self.channel
        return (slice(None), channel, *(self.cell or ()))

    @property
    def label(self) -> str:
        """Name for reports and figures, in the syntax of patches without ``embedder.``."""
        return (self.layer.removeprefix("embedder.")
                + ("" if self.channel is None else f":{self.channel}")
                + ("" if self.cell is None else f",cell={self.cell[0]}.{self.cell[1]}"))


def parts_of(policy: Policy, layers: Sequence[str], unit: str) -> list[Part]:
    """Return the parts of some layers: each whole layer, each channel or unit, or each cell.

    Args:
        layers: names of the layers.
        unit: kind of the parts, one of UNITS.

    Raises:
        UserError: if the policy has no such layer, or cells are requested of a layer that is not
            convolutional.
    """
    parts = []
    for layer in (find_layer(policy, name) for name in layers):
        if unit == "layer":
            parts.append(Part(layer.name))
        elif unit == "channel":
            parts += [Part(layer.name, channel) for channel in range(layer.shape[0])]
        elif not layer.is_map:
            raise UserError(f"{layer.name} has no cells: its output is {layer.shape[0]} units; "
                            "scan its channels, or a convolutional layer")
        else:
            parts += [Part(layer.name, None, (row, column))
                      for row, column in np.ndindex(layer.shape[1], layer.shape[2])]
    return parts


@dataclasses.dataclass(frozen=True)
class Scan:
    """Effects of patched parts on an outcome.

    Attributes:
        parts: the S patched parts.
        levels: seed of the level of each frame (N,).
        unpatched: outcome of each frame without a patch, float64 (N,).
        effects: patched minus unpatched outcome, float64 (S, N).
        norms: Euclidean norm of the change of the layer's output, float64 (S, N).
    """

    parts: Sequence[Part]
    levels: np.ndarray
    unpatched: np.ndarray
    effects: np.ndarray
    norms: np.ndarray

    def table(self) -> pd.DataFrame:
        """Return one row per part, with means over frames.

        Columns: ``layer``; ``channel``, missing if the part has all channels; ``row`` and
        ``column``, missing if it has all cells; mean ``unpatched`` outcome, ``effect``,
        ``absolute`` effect, and ``norm`` of the change.
        """
        table = pd.DataFrame(
            [(part.layer, part.channel, *(part.cell or (None, None))) for part in self.parts],
            columns=["layer", "channel", "row", "column"])
        table[["channel", "row", "column"]] = table[["channel", "row", "column"]].astype("Int64")
        table["unpatched"] = self.unpatched.mean()
        table["effect"] = self.effects.mean(axis=1)
        table["absolute"] = np.abs(self.effects).mean(axis=1)
        table["norm"] = self.norms.mean(axis=1)
        return table

    def test(self, seed: int) -> pd.DataFrame:
        """Test the effects of parts that were chosen on other levels.

        Args:
            seed: seed of the bootstrap and the sign flips.

        Returns:
            The result of ``table`` with ``low_95`` and ``high_95`` (bootstrap over levels), ``p``
            (two-sided sign-flip test on the levels' means), ``p_holm`` (corrected over the parts),
            and ``num_levels``.

        Raises:
            UserError: if there are fewer than 10 levels.
        """
        table, num_levels = self.table(), len(np.unique(self.levels))
        check_starts(num_levels)
        table["low_95"], table["high_95"] = ClusterBootstrap(self.levels, seed).interval(
            self.effects)
        means = by_episode(self.levels, self.effects) / by_episode(
            self.levels, np.ones((1, len(self.levels))))  # (L, S)
        num_flips = max(MIN_FLIPS, FLIPS_PER_COMPARISON * len(self.parts))
        table["p"] = sign_flip_p(means, num_flips, seed)
        table["p_holm"] = holm(table["p"])
        table["num_levels"] = num_levels
        return table


def effect_maps(table: pd.DataFrame) -> dict[str, np.ndarray]:
    """Return the mean effects of the cells as one map per layer, float64 (H, W), by layer name.

    Args:
        table: result of ``Scan.table``.
    """
    cells = table[table["row"].notna()].groupby("layer", sort=False)
    return {layer: rows.pivot(index="row", columns="column", values="effect").to_numpy(float)
            for layer, rows in cells}


def strongest(table: pd.DataFrame, number: int) -> list[Part]:
    """Return the parts with the largest absolute mean effects, largest first.

    Args:
        table: result of ``Scan.table``.
        number: number of parts.
    """
    order = table["effect"].abs().sort_values(ascending=False, kind="stable").index[:number]
    return [Part(row.layer, None if pd.isna(row.channel) else int(row.channel),
                 None if pd.isna(row.row) else (int(row.row), int(row.column)))
            for row in table.loc[order].itertuples()]


def scan(policy: Policy, compute: Compute, parts: Sequence[Part], frames: ScanFrames,
         outcome: Outcome, kind: str = "zero", reference: ReferenceSet | None = None) -> Scan:
    """Patch each part in each frame, and measure the outcome.

    Modules before a layer are run once per frame.

    Args:
        policy: the agent.
        compute: device and precision.
        parts: parts to patch, one at a time.
        frames: frames in which the parts are patched, with pairs for ``interchange``.
        outcome: outcome to measure in each pass.
        kind: replacement of the part's entries, one of KINDS.
        reference: frames of other levels, for ``mean``.
    """
    by_layer: dict[str, list[int]] = {}
    for place, part in enumerate(parts):
        by_layer.setdefault(part.layer, []).append(place)
    num = len(frames.frames)
    unpatched, effects, norms = np.empty(num), *np.empty((2, len(parts), num))
    with torch.no_grad(), Progress(len(parts) * num, "patched run") as progress:
        for layer, members in by_layer.items():
            forward = PartialForward(policy, compute, layer)
            source = torch.zeros(())
            if kind == "mean" and reference is not None:
                source = reference.mean(policy, forward.layer)
            for begin in range(0, num, PASSES_PER_BATCH):
                chosen = np.arange(begin, min(num, begin + PASSES_PER_BATCH))
                batch = frames[chosen]
                prefix = forward.run_to(batch.frames, batch.entering)
                if kind == "interchange" and batch.paired is not None:
                    with disabled(policy):
                        source = forward.run_to(batch.paired, batch.entering).activations
                replacement = source.to(prefix.activations).expand_as(prefix.activations)
                before = outcome(prefix.run_from(), chosen).double().cpu().numpy()
                unpatched[chosen] = before
                parts_per_batch = max(1, PASSES_PER_BATCH // len(chosen))
                for first in range(0, len(members), parts_per_batch):
                    rows = np.array(members[first:first + parts_per_batch])
                    after, sizes = _run_patched(prefix, replacement,
                                                [parts[row] for row in rows], outcome, chosen)
                    effects[np.ix_(rows, chosen)] = after - before
                    norms[np.ix_(rows, chosen)] = sizes
                    progress.update(progress.done + after.size)
    return Scan(list(parts), np.asarray(frames.levels), unpatched, effects, norms)


def _run_patched(prefix: Prefix, replacement: Tensor, parts: Sequence[Part], outcome: Outcome,
                 chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Measure the outcome, and the norm of the layer's change, with each part patched.

    Args:
        prefix: forward pass of the frames up to the layer.
        replacement: replacement of the whole layer's output (N, …).
        parts: parts of the layer.
        outcome: outcome to measure.
        chosen: indices of the frames, which the outcome gets (N,).

    Returns:
        Outcomes and norms (S, N) each.
    """
    shape = len(parts), len(chosen)
    patched = prefix.activations.repeat(len(parts), *(1,) * (prefix.activations.ndim - 1))
    sizes = []
    for part, activations in zip(parts, patched.split(len(chosen))):
        change = replacement[part.entries] - activations[part.entries]  # (N, …)
        sizes.append(change.float().reshape(len(chosen), -1).norm(dim=1))
        activations[part.entries] = replacement[part.entries]
    rows = torch.arange(len(chosen), device=patched.device).repeat(len(parts))
    after = outcome(prefix.run_from(patched, rows), np.tile(chosen, len(parts)))
    return after.double().cpu().numpy().reshape(shape), torch.stack(sizes).double().cpu().numpy()


def estimate(policy: Policy, compute: Compute, parts: Sequence[Part], frames: ScanFrames,
             outcome: Outcome, kind: str = "zero",
             reference: ReferenceSet | None = None) -> np.ndarray:
    """Estimate the effects of ``scan`` to first order, from one forward and one backward pass.

    The estimate is the gradient of the outcome with respect to the part, times the change of the
    part. For ``interchange`` this is attribution patching (Nanda 2023; Syed, Rager and Conmy 2023,
    "Attribution patching outperforms automated circuit discovery").

    Args:
        policy, compute, parts, frames, outcome, kind, reference: as for ``scan``.

    Returns:
        Estimated effects, float64 (S, N).
    """
    layers = {name: find_layer(policy, name)
              for name in dict.fromkeys(part.layer for part in parts)}
    effects = np.empty((len(parts), len(frames.frames)))
    for begin in range(0, len(frames.frames), PASSES_PER_BATCH):
        chosen = np.arange(begin, min(len(frames.frames), begin + PASSES_PER_BATCH))
        batch, shapes = frames[chosen], {name: (len(chosen), *layer.shape)
                                         for name, layer in layers.items()}
        sources = dict.fromkeys(layers, torch.zeros((), device=compute.device))
        if kind == "mean" and reference is not None:
            sources = {name: reference.mean(policy, layer) for name, layer in layers.items()}
        if kind == "interchange" and batch.paired is not None:
            with (disabled(policy), torch.no_grad(),
                  cached(policy, list(layers), on=compute.device) as of_paired):
                _run(policy, compute, batch.paired, batch.entering)
            sources = {name: of_paired[name].reshape(shapes[name]) for name in layers}
        with cached(policy, list(layers), graph=True) as cache:
            output = _run(policy, compute, batch.frames, batch.entering)
        tensors = [cache[name] for name in layers]
        gradients = torch.autograd.grad(outcome(output, chosen).sum(), tensors,
                                        materialize_grads=True)
        changes = {
            name: (gradient * (sources[name] - tensor.detach().reshape(shapes[name]))).float()
            for name, tensor, gradient in zip(layers, tensors, (
                gradient.reshape(shapes[name]) for name, gradient in zip(layers, gradients)))}
        for row, part in enumerate(parts):
            effects[row, chosen] = changes[part.layer][part.entries].reshape(
                len(chosen), -1).sum(dim=1).double().cpu().numpy()
    return effects


def _run(policy: Policy, compute: Compute, frames: np.ndarray,
         entering: Tensor | None) -> PolicyOutput:
    """Run one step on frames (N, H, W, C) with gradients."""
    images = to_images(torch.as_tensor(frames).to(compute.device), compute.channels_last,
                       compute.dtype)
    if torch.is_grad_enabled():
        images.requires_grad_()  # the parameters may be frozen
    if entering is None:
        entering = policy.initial_states(len(frames))
    with compute.autocast():
        embedded = policy.embed(images)
    return policy.step(embedded.float(), entering.to(compute.device))
