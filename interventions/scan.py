"""Effect scans: the effect of patching every layer, channel or cell in turn on an outcome.

The entries of a part are replaced by 0 (``zero``), by their mean over reference frames (``mean``),
or by those of a paired frame (``interchange``: activation patching; cell by cell, the causal trace
of Meng et al. 2022, "Locating and editing factual associations in GPT").

Letters in shape comments: N frames, P patched passes, S parts, L levels, C H W a map, U units,
D hidden units, A actions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from agents.hooks import disabled
from agents.layers import find_layer
from agents.networks import Policy, PolicyOutput
from agents.reference_set import ReferenceSet
from common.devices import Compute
from common.errors import UserError
from common.progress import Progress
from interventions.partial_forward import PartialForward, Prefix
from interventions.patches import Zero
from stats.bootstrap import ClusterBootstrap
from stats.effects import FLIPS_PER_COMPARISON, MIN_FLIPS, check_starts
from stats.significance import holm, sign_flip_p

PASSES_PER_BATCH = 128
KINDS = ("zero", "mean", "interchange")
UNITS = ("layer", "channel", "cell")

Outcome = Callable[[PolicyOutput, np.ndarray], Tensor]
"""Maps the output of P passes and the frame of each (P,) to one number per pass (P,)."""


def value(output: PolicyOutput, frames: np.ndarray) -> Tensor:
    """Return the value estimate as an outcome (P,)."""
    return output.values


def entropy(output: PolicyOutput, frames: np.ndarray) -> Tensor:
    """Return the entropy of the policy in nats as an outcome (P,)."""
    return -(output.log_probs.exp() * output.log_probs).sum(dim=-1)


def log_prob_of(action: int) -> Outcome:
    """Return an outcome function: the log-probability of an action (P,)."""
    return lambda output, frames: output.log_probs[:, action]


@dataclasses.dataclass(frozen=True)
class ScanFrames:
    """Frames in which a scan patches parts.

    Attributes:
        frames: uint8 (N, H, W, 3).
        levels: seed of the level of each frame, int64 (N,).
        paired: source frame of each frame for ``interchange``, uint8 (N, H, W, 3); None for the
            other kinds.
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
        """Name for reports and figures, in the syntax of patches."""
        name = self.layer.removeprefix("embedder.")
        return (name + ("" if self.channel is None else f":{self.channel}")
                + ("" if self.cell is None else f",cell={self.cell[0]}.{self.cell[1]}"))


def parts_of(policy: Policy, layers: Sequence[str], unit: str) -> list[Part]:
    """Return the parts of some layers: each whole layer, each channel or unit, or each cell.

    Args:
        layers: names of the layers.
        unit: size of the parts, one of UNITS.

    Raises:
        UserError: if the policy has no such layer, or cells are requested of a layer without a map.
    """
    parts = []
    for layer in (find_layer(policy, name) for name in layers):
        if unit == "layer":
            parts.append(Part(layer.name))
        elif unit == "channel":
            parts += [Part(layer.name, channel) for channel in range(layer.shape[0])]
        elif not layer.is_map:
            raise UserError(f"{layer.name} has no cells, it is {layer.shape[0]} units; scan its "
                            "channels, or a layer with a map")
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

        Columns: ``layer``, ``channel``, ``row`` and ``column`` (missing if the part has all of
        them); mean ``unpatched`` outcome, ``effect``, ``absolute`` effect, and ``norm`` of the
        change.
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
        names, of_level = np.unique(self.levels, return_inverse=True)
        check_starts(len(names))
        table = self.table()
        table["low_95"], table["high_95"] = ClusterBootstrap(self.levels, seed).interval(
            self.effects)
        sums = np.zeros((len(names), len(self.parts)))
        np.add.at(sums, of_level, self.effects.T)
        means = sums / np.bincount(of_level)[:, None]  # (L, S)
        table["p"] = sign_flip_p(means, max(MIN_FLIPS, FLIPS_PER_COMPARISON * len(self.parts)),
                                 seed)
        table["p_holm"] = holm(table["p"])
        table["num_levels"] = len(names)
        return table


def effect_maps(table: pd.DataFrame) -> dict[str, np.ndarray]:
    """Return maps of the mean effect of each cell by layer, float64 (H, W); NaN if not scanned.

    Args:
        table: result of ``Scan.table``.
    """
    maps = {}
    for layer, cells in table[table["row"].notna()].groupby("layer", sort=False):
        rows, columns = (cells[name].to_numpy(int) for name in ("row", "column"))
        maps[layer] = np.full((rows.max() + 1, columns.max() + 1), np.nan)
        maps[layer][rows, columns] = cells["effect"]
    return maps


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
         outcome: Outcome, kind: str = "zero", reference: ReferenceSet | None = None,
         over: Literal["cells", "channels"] = "cells") -> Scan:
    """Patch each part in each frame, and measure the outcome.

    Modules before a layer are run once per frame.

    Args:
        parts: parts to patch, one at a time.
        frames: frames in which the parts are patched.
        outcome: outcome to measure in each pass.
        kind: replacement of the part's entries, one of KINDS.
        reference: frames of other levels, for ``mean``.
        over: whether ``mean`` uses one mean per entry ("cells") or per channel ("channels").

    Raises:
        UserError: if the policy has no such layer, channel or cell, pairs or a reference set are
            missing, or there are no frames or parts.
    """
    by_layer = _by_layer(policy, parts)
    _check(parts, frames, kind, reference)
    num = len(frames.frames)
    unpatched, effects, norms = np.empty(num), *np.empty((2, len(parts), num))
    with torch.no_grad(), Progress(len(parts) * num, "patched pass") as progress:
        for layer, members in by_layer.items():
            forward = PartialForward(policy, compute, layer)
            source = torch.zeros(())
            if kind == "mean" and reference is not None:
                source = _mean(reference, policy, forward, over)
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
                    some = np.array(members[first:first + parts_per_batch])
                    after, sizes = _run_patched(prefix, replacement,
                                                [parts[place] for place in some], outcome, chosen)
                    effects[np.ix_(some, chosen)] = after - before
                    norms[np.ix_(some, chosen)] = sizes
                    progress.update(progress.done + after.size)
    return Scan(list(parts), np.asarray(frames.levels), unpatched, effects, norms)


def _run_patched(prefix: Prefix, replacement: Tensor, parts: Sequence[Part], outcome: Outcome,
                 chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Measure the outcome, and the norm of the layer's change, of each part and frame (S, N)."""
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


def _mean(reference: ReferenceSet, policy: Policy, forward: PartialForward, over: str) -> Tensor:
    """Return the reference mean per entry or per channel, broadcastable to the layer's shape."""
    if over == "cells":
        return reference.mean(policy, forward.layer)
    means = reference.channel_means(policy, forward.layer)  # (C, 1)
    return means.reshape(-1, *(1,) * (len(forward.layer.shape) - 1))


def _by_layer(policy: Policy, parts: Sequence[Part]) -> dict[str, list[int]]:
    """Return the indices of the parts of each layer.

    Raises:
        UserError: if the policy has no such layer, channel or cell.
    """
    by_layer: dict[str, list[int]] = {}
    for place, part in enumerate(parts):
        layer = find_layer(policy, part.layer)
        Zero(part.layer, channels=None if part.channel is None else (part.channel,),
             cells=None if part.cell is None else (part.cell,)).select(policy, layer)
        by_layer.setdefault(layer.name, []).append(place)
    return by_layer


def _check(parts: Sequence[Part], frames: ScanFrames, kind: str,
           reference: ReferenceSet | None) -> None:
    if not parts or not len(frames.frames):
        raise UserError("a scan needs at least one part and one frame")
    if len(frames.levels) != len(frames.frames):
        raise UserError(f"{len(frames.frames)} frames need a level each, not {len(frames.levels)}")
    if kind == "interchange" and (frames.paired is None
                                  or frames.paired.shape != frames.frames.shape):
        raise UserError("interchange takes entries from a paired frame for each of the "
                        f"{len(frames.frames)} frames")
    if kind == "mean" and reference is None:
        raise UserError("mean takes a reference set of at least 2 frames, of other levels than "
                        "those scanned")
