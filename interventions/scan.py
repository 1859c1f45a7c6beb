"""Effect scan: every layer, channel or cell patched in turn, and its effect on an outcome.

The entries of a part are replaced by 0 (``zero``), by their mean over reference pictures
(``mean``), or by those of the paired picture's pass (``interchange``: activation patching; cell by
cell, the causal trace of Meng et al. 2022, "Locating and editing factual associations in GPT").
Parts are chosen on some levels and reported on others.

Letters in shape comments: N pictures, P patched passes, S parts, L levels, C H W a map, U units,
D hidden state, A actions.
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

PASSES_AT_A_TIME = 128

Outcome = Callable[[PolicyOutput, np.ndarray], Tensor]
"""(output of P passes, number of each one's picture (P,)) to one number a pass (P,)."""


def value(output: PolicyOutput, pictures: np.ndarray) -> Tensor:
    """The value estimate, as an outcome."""
    return output.values


def entropy(output: PolicyOutput, pictures: np.ndarray) -> Tensor:
    """The entropy of the policy in nats, as an outcome."""
    return -(output.log_probs.exp() * output.log_probs).sum(dim=-1)


def log_prob_of(action: int) -> Outcome:
    """The log-probability of an action, as an outcome."""
    return lambda output, pictures: output.log_probs[:, action]


@dataclasses.dataclass(frozen=True)
class Pictures:
    """The pictures that a scan looks at, and what it measures there.

    Attributes:
        frames: uint8 (N, H, W, 3).
        levels: seed of each one's level, int64 (N,).
        outcome: read off each pass.
        paired: for ``interchange`` the picture that each takes its entries from, uint8
            (N, H, W, 3).
        entering: hidden states that enter, for both pictures of a pair (N, D); None for those of
            an episode's start.
    """

    frames: np.ndarray
    levels: np.ndarray
    outcome: Outcome
    paired: np.ndarray | None = None
    entering: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a layer's output: all of it, a channel (or unit), a cell, or a channel's cell.

    Attributes:
        layer: its name.
        channel: number of the channel or unit; None for all.
        cell: row from the top and column; None for all.
    """

    layer: str
    channel: int | None = None
    cell: tuple[int, int] | None = None

    @property
    def entries(self) -> tuple:
        """Index of the part in activations (…, C, H, W), or (…, U)."""
        channel = slice(None) if self.channel is None else self.channel
        return (slice(None), channel, *(self.cell or ()))


def parts_of(policy: Policy, layers: Sequence[str],
             each: Literal["layer", "channel", "cell"]) -> list[Part]:
    """The parts of some layers: each whole layer, each channel or unit, or each cell.

    Raises:
        UserError: if the policy has no such layer, or the layer has no cells.
    """
    found = []
    for layer in (find_layer(policy, name) for name in layers):
        if each == "layer":
            found.append(Part(layer.name))
        elif each == "channel":
            found += [Part(layer.name, channel) for channel in range(layer.shape[0])]
        elif not layer.is_map:
            raise UserError(f"{layer.name} has no cells, it is {layer.shape[0]} units; scan its "
                            "channels, or a layer with a map")
        else:
            found += [Part(layer.name, None, cell) for cell in np.ndindex(*layer.shape[1:])]
    return found


@dataclasses.dataclass(frozen=True)
class Scan:
    """Effects of patched parts on an outcome.

    Attributes:
        parts: S of them.
        levels: of the pictures (N,).
        unpatched: the outcome of each picture, float64 (N,).
        effects: patched minus unpatched, float64 (S, N).
        norms: Euclidean norm of the change of the layer's output, float64 (S, N).
    """

    parts: Sequence[Part]
    levels: np.ndarray
    unpatched: np.ndarray
    effects: np.ndarray
    norms: np.ndarray

    def table(self) -> pd.DataFrame:
        """A row a part: ``layer``, ``channel``, ``row`` and ``column`` (missing where the part
        has all of them), the mean ``unpatched`` and ``effect``, the mean ``absolute`` effect, the
        mean ``norm`` of the change, and ``rank`` by the absolute value of the effect, from 1."""
        table = pd.DataFrame(
            [(part.layer, part.channel, *(part.cell or (None, None))) for part in self.parts],
            columns=["layer", "channel", "row", "column"])
        table[["channel", "row", "column"]] = table[["channel", "row", "column"]].astype("Int64")
        table["unpatched"] = self.unpatched.mean()
        table["effect"] = self.effects.mean(axis=1)
        table["absolute"] = np.abs(self.effects).mean(axis=1)
        table["norm"] = self.norms.mean(axis=1)
        table["rank"] = table["effect"].abs().rank(ascending=False, method="first").astype(int)
        return table

    def maps(self) -> dict[str, np.ndarray]:
        """The mean effect of each cell, float64 (H, W) a layer; NaN where none was scanned."""
        table = self.table()
        found = {}
        for layer, cells in table[table["row"].notna()].groupby("layer", sort=False):
            rows, columns = (cells[name].to_numpy(int) for name in ("row", "column"))
            found[layer] = np.full((rows.max() + 1, columns.max() + 1), np.nan)
            found[layer][rows, columns] = cells["effect"]
        return found

    def strongest(self, number: int) -> list[Part]:
        """The parts of the largest absolute mean effect, largest first."""
        order = np.argsort(-np.abs(self.effects.mean(axis=1)), kind="stable")
        return [self.parts[place] for place in order[:number]]

    def report(self, seed: int) -> pd.DataFrame:
        """The table with intervals: for parts that were chosen on other levels.

        Args:
            seed: of bootstrap and sign flips.

        Returns:
            The table with ``low_95`` and ``high_95`` (bootstrap over levels), ``p`` (two-sided
            sign flips of the levels' means), ``p_holm`` over the parts, and ``num_levels``.

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


def scan(policy: Policy, compute: Compute, parts: Sequence[Part], pictures: Pictures,
         kind: Literal["zero", "mean", "interchange"] = "zero",
         reference: ReferenceSet | None = None,
         over: Literal["cells", "channels"] = "cells") -> Scan:
    """Patch each part in each picture, and measure the outcome.

    What lies before a layer is computed once a picture.

    Args:
        kind: what the part's entries are replaced by, see the module.
        reference: for ``mean``, pictures of other levels.
        over: whether ``mean`` is one for each entry or one for each channel.

    Raises:
        UserError: for a layer, channel or cell that the policy does not have, for pairs or
            a reference set that are missing, and for no pictures or parts.
    """
    by_layer = _by_layer(policy, parts)
    _check(parts, pictures, kind, reference)
    num = len(pictures.frames)
    unpatched, effects, norms = np.empty(num), *np.empty((2, len(parts), num))
    with torch.no_grad(), Progress(len(parts) * num, "patched pass") as progress:
        for layer, members in by_layer.items():
            cut = PartialForward(policy, compute, layer)
            put = torch.zeros(()) if kind != "mean" else _mean(reference, policy, cut, over)
            for begin in range(0, num, PASSES_AT_A_TIME):
                chosen = np.arange(begin, min(num, begin + PASSES_AT_A_TIME))
                entering = None if pictures.entering is None else pictures.entering[chosen]
                half = cut.run_to(pictures.frames[chosen], entering)
                if kind == "interchange":
                    with disabled(policy):
                        put = cut.run_to(pictures.paired[chosen], entering).activations
                source = put.to(half.activations).expand_as(half.activations)
                before = _numbers(pictures.outcome(half.run_from(), chosen))
                unpatched[chosen] = before
                at_a_time = max(1, PASSES_AT_A_TIME // len(chosen))
                for first in range(0, len(members), at_a_time):
                    some = members[first:first + at_a_time]
                    after, sizes = _patched(half, source, [parts[place] for place in some],
                                            pictures.outcome, chosen)
                    effects[np.ix_(some, chosen)] = after - before
                    norms[np.ix_(some, chosen)] = sizes
                    progress.update(progress.done + after.size)
    return Scan(list(parts), np.asarray(pictures.levels), unpatched, effects, norms)


def choose_and_report(policy: Policy, compute: Compute, parts: Sequence[Part], choosing: Pictures,
                      reporting: Pictures, number: int, seed: int,
                      **how) -> tuple[Scan, pd.DataFrame]:
    """Choose the parts of the strongest effect on some levels, and report them on others.

    Args:
        number: of parts to choose.
        seed: of bootstrap and sign flips.
        how: ``kind``, ``reference`` and ``over`` of :func:`scan`.

    Returns:
        The scan of all parts on the levels for choosing, and the report of the chosen ones, see
        ``Scan.report``.

    Raises:
        UserError: if a level is in both sets; also see :func:`scan` and ``Scan.report``.
    """
    both = np.intersect1d(choosing.levels, reporting.levels)
    if len(both):
        raise UserError(f"{len(both)} levels are in both sets, such as {both[0]}; choose parts on "
                        "other levels than those they are reported on")
    check_starts(len(np.unique(reporting.levels)))
    first = scan(policy, compute, parts, choosing, **how)
    second = scan(policy, compute, first.strongest(number), reporting, **how)
    return first, second.report(seed)


def _patched(half: Prefix, source: Tensor, parts: Sequence[Part], outcome: Outcome,
             chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Outcome, and size of the change of the layer's output, of each part and picture (S, N)."""
    shape = len(parts), len(chosen)
    patched = half.activations.repeat(len(parts), *(1,) * (half.activations.ndim - 1))
    sizes = []
    for part, activations in zip(parts, patched.split(len(chosen))):
        change = source[part.entries] - activations[part.entries]  # (N, …)
        sizes.append(change.float().reshape(len(chosen), -1).norm(dim=1))
        activations[part.entries] = source[part.entries]
    pictures = torch.arange(len(chosen), device=patched.device).repeat(len(parts))
    after = outcome(half.run_from(patched, pictures), np.tile(chosen, len(parts)))
    return _numbers(after).reshape(shape), torch.stack(sizes).double().cpu().numpy()


def _mean(reference: ReferenceSet, policy: Policy, cut: PartialForward, over: str) -> Tensor:
    """Reference mean of each entry, or of each channel, that broadcasts to the layer's shape."""
    if over == "cells":
        return reference.mean(policy, cut.layer)
    means = reference.channel_means(policy, cut.layer)  # (C, 1)
    return means.reshape(-1, *(1,) * (len(cut.layer.shape) - 1))


def _numbers(outcomes: Tensor) -> np.ndarray:
    return outcomes.double().cpu().numpy()


def _by_layer(policy: Policy, parts: Sequence[Part]) -> dict[str, list[int]]:
    """Numbers of the parts of each layer.

    Raises:
        UserError: if a part is not one of the policy.
    """
    found: dict[str, list[int]] = {}
    for place, part in enumerate(parts):
        layer = find_layer(policy, part.layer)
        Zero(part.layer, channels=None if part.channel is None else (part.channel,),
             cells=None if part.cell is None else (part.cell,)).select(policy, layer)
        found.setdefault(layer.name, []).append(place)
    return found


def _check(parts: Sequence[Part], pictures: Pictures, kind: str,
           reference: ReferenceSet | None) -> None:
    if not parts or not len(pictures.frames):
        raise UserError("a scan needs at least one part and one picture")
    if len(pictures.levels) != len(pictures.frames):
        raise UserError(f"{len(pictures.frames)} pictures need a level each, not "
                        f"{len(pictures.levels)}")
    if kind == "interchange" and np.shape(pictures.paired) != pictures.frames.shape:
        raise UserError("interchange takes entries from a paired picture for each of the "
                        f"{len(pictures.frames)} pictures")
    if kind == "mean" and reference is None:
        raise UserError("mean takes a reference set of at least 2 pictures, of other levels than "
                        "those scanned")
