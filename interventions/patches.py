"""Kinds of patch: how a patch changes the entries of a layer's output.

a is the output of the layer, and a' its replacement, which later layers read. Entries outside the
patch's channels, cells and frames stay unchanged.

Letters in shape comments: R frames that are changed, C channels and H W cells of a layer (units
are channels with one cell), K channels and M cells that are changed, P = H W, D hidden units,
*shape the layer's shape for one frame.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from agents.layers import Layer
from agents.networks import Policy
from agents.patch import BatchInfo, Patch, PatchContext, PatchFn, Selection, Values
from agents.reference_set import ReferenceSet, activations_of
from common.errors import UserError

if TYPE_CHECKING:
    from envs.procgen_env import EnvConfig, LevelEdit

MEAN = "mean"  # value of ``Project.to``


@dataclasses.dataclass(frozen=True, eq=False)
class Zero(Patch):
    """Replace activations by zero: a' = 0."""

    kind: ClassVar[str] = "zero"

    def bind(self, selection: Selection) -> PatchFn:
        return lambda entries, context: torch.zeros_like(entries)


@dataclasses.dataclass(frozen=True, eq=False)
class SetTo(Patch):
    """Set activations to fixed values: a' = v.

    Attributes:
        value: values v; the path of an .npy file before the patch is opened.
        others: value of all other cells of the same channels; None leaves them unchanged.
        override: whether the patch may overwrite entries that an earlier ``set`` patch has set.
    """

    kind: ClassVar[str] = "set"

    value: Values | Path
    others: float | None = None
    override: bool = False

    def bind(self, selection: Selection) -> PatchFn:
        value = selection.values(_require_opened(self.value), "the value to set")
        others = self.others
        if others is None:
            return lambda entries, context: value(context).expand_as(entries)
        layer = selection.layer
        if self.cells is None:
            raise UserError(f"others={others:g} sets all other cells, but the patch of "
                            f"{layer.name} names no cell; add cell=row.column")
        chosen = torch.zeros(layer.shape[1:], dtype=torch.bool, device=selection.policy.device)
        chosen[tuple(np.transpose(self.cells))] = True
        inside = chosen.flatten()  # (P,)
        return lambda entries, context: torch.where(
            inside, value(context), others).expand_as(entries)

    @property
    def entry_cells(self) -> tuple[tuple[int, int], ...] | None:
        return self.cells if self.others is None else None

    def overwrites(self, earlier: Patch, layer: Layer) -> bool:
        # Patches with conditions do not count: their conditions may exclude each other.
        return (not self.override and isinstance(earlier, SetTo)
                and not self.conditions and not earlier.conditions
                and _meet(self.channels, earlier.channels)
                and _meet(self.entry_cells, earlier.entry_cells)
                and _meet(self.levels, earlier.levels) and _meet_in_time(self.steps, earlier.steps))


@dataclasses.dataclass(frozen=True, eq=False)
class Mean(Patch):
    """Mean ablation: a' = mean of a over a reference set.

    Attributes:
        reference: reference set of frames.
        over: "cells": one mean per entry; "channels": one mean per channel.
    """

    kind: ClassVar[str] = "mean"

    reference: ReferenceSet | None = None
    over: Literal["cells", "channels"] = "cells"

    def bind(self, selection: Selection) -> PatchFn:
        reference, layer = _require_reference(self.reference, self.kind), selection.layer
        if self.over == "channels":
            mean = reference.channel_means(selection.policy, layer).expand(-1, layer.num_cells)
        else:
            mean = reference.mean(selection.policy, layer)
        mean = selection.broadcast(mean.reshape(layer.shape), "the reference mean")
        return lambda entries, context: mean.expand_as(entries)


@dataclasses.dataclass(frozen=True, eq=False)
class Resample(Patch):
    """Resample ablation: a' = activations in another frame, drawn once per level (in the simulator,
    once per start).

    Attributes:
        sources: function that maps (seed of the level or number of the start, number of frames,
            seed of the draw) to source frames, uint8 (number of frames, H, W, 3); by default, they
            are drawn from ``reference``.
        reference: frames to draw from if there are no ``sources``.
        draw: "joint": all channels from one frame; "channel": a separate frame per channel.
        seed: seed of the random draw.
    """

    kind: ClassVar[str] = "resample"

    sources: Callable[[int, int, int], np.ndarray] | None = None
    reference: ReferenceSet | None = None
    draw: Literal["joint", "channel"] = "joint"
    seed: int = 0

    @property
    def needs_reference(self) -> bool:
        return self.sources is None and self.reference is None

    @property
    def needs_info(self) -> bool:
        return True

    def bind(self, selection: Selection) -> PatchFn:
        sources = self.sources or _require_reference(self.reference, self.kind).drawn
        policy, layer = selection.policy, selection.layer
        num_channels = (layer.shape[0] if selection.channels is None
                        else len(selection.channels))

        @functools.cache
        def of_level(level: int) -> Tensor:
            """Return the replacement of the selected entries in all frames of a level (K, M)."""
            frames = sources(level, num_channels if self.draw == "channel" else 1, self.seed)
            outputs = activations_of(policy, frames, [layer.name])[layer.name]
            entries = selection.take(outputs.reshape(len(outputs), layer.shape[0], -1))
            if self.draw == "joint":
                return entries[0]
            channels = torch.arange(num_channels, device=entries.device)
            return entries[channels, channels]

        return lambda entries, context: torch.stack(
            [of_level(int(level)) for level in context.required_info.target])


@dataclasses.dataclass(frozen=True, eq=False)
class Noise(Patch):
    """Add Gaussian noise: a' = a + sigma e, with e standard normal.

    Attributes:
        sigma: standard deviation of the noise, in units of the activations, or with
            ``reference_sd`` in standard deviations of each channel over the reference set.
        reference_sd: whether sigma is relative to the channels' standard deviations.
        reference: reference set, needed with ``reference_sd``.
        draw: "once": one e for all frames; "picture": one e for each step of each episode.
        seed: seed of the noise.
    """

    kind: ClassVar[str] = "noise"

    sigma: float
    reference_sd: bool = False
    reference: ReferenceSet | None = None
    draw: Literal["once", "picture"] = "once"
    seed: int = 0

    @property
    def needs_reference(self) -> bool:
        return self.reference_sd and self.reference is None

    @property
    def needs_info(self) -> bool:
        return super().needs_info or self.draw == "picture"

    def bind(self, selection: Selection) -> PatchFn:
        layer, sigma = selection.layer, torch.tensor(self.sigma)
        if self.reference_sd:
            reference = _require_reference(self.reference, self.kind)
            stds = reference.channel_stds(selection.policy, layer)  # (C, 1)
            sigma = sigma * stds.expand(-1, layer.num_cells).reshape(layer.shape)
        scale = selection.broadcast(sigma, "sigma")

        def draw(*numbers: int) -> np.ndarray:
            rng = np.random.default_rng([self.seed, *numbers])
            return rng.standard_normal(layer.shape, dtype=np.float32)

        if self.draw == "once":
            noise = scale * selection.broadcast(draw(), "noise")
            return lambda entries, context: entries + noise
        return lambda entries, context: entries + scale * selection.broadcast(
            np.stack([draw(int(episode), int(step)) for episode, step in
                      zip(context.required_info.episode, context.required_info.step)]),
            "noise")


@dataclasses.dataclass(frozen=True, eq=False)
class Add(Patch):
    """Add a steering vector: a' = a + c v.

    Attributes:
        vector: vector v; the path of an .npz file before the patch is opened.
        coefficient: coefficient c.
    """

    kind: ClassVar[str] = "add"

    vector: Values | Path
    coefficient: float = 1.0

    def bind(self, selection: Selection) -> PatchFn:
        vector = selection.values(_require_opened(self.vector), "the vector")
        return lambda entries, context: entries + self.coefficient * vector(context)


@dataclasses.dataclass(frozen=True, eq=False)
class Multiply(Patch):
    """Scale activations: a' = s+ max(a, 0) + s- min(a, 0).

    Attributes:
        positive: factor s+ of positive activations.
        negative: factor s- of negative activations; None for s+.
    """

    kind: ClassVar[str] = "multiply"

    positive: float
    negative: float | None = None

    def bind(self, selection: Selection) -> PatchFn:
        negative = self.negative
        if negative is None:
            return lambda entries, context: self.positive * entries
        return lambda entries, context: (self.positive * entries.clamp(min=0)
                                         + negative * entries.clamp(max=0))


@dataclasses.dataclass(frozen=True, eq=False)
class Project(Patch):
    """Replace the component along a vector: a' = a - (a · u) u + t u, with u = v / |v|.

    Attributes:
        vector: vector v, of the layer's shape, or with one number per channel (C,) to project each
            cell separately; the path of an .npz file before the patch is opened. Only its entries
            within the patch are used.
        to: new component t; "mean": mean component over the reference set.
        reference: reference set, needed for "mean".
    """

    kind: ClassVar[str] = "project"

    vector: np.ndarray | Tensor | Mapping[str, np.ndarray] | Path
    to: float | Literal["mean"] = 0.0
    reference: ReferenceSet | None = None

    @property
    def needs_reference(self) -> bool:
        return self.to == MEAN and self.reference is None

    def bind(self, selection: Selection) -> PatchFn:
        layer, opened = selection.layer, _require_opened(self.vector)
        vector = opened[layer.name] if isinstance(opened, Mapping) else opened
        in_cells = layer.is_map and np.shape(vector) == layer.shape[:1]
        if in_cells:
            vector = torch.as_tensor(vector).reshape(-1, 1, 1)
        v = selection.broadcast(vector, "the vector")  # (1, K, M)
        dims = (1,) if in_cells else (1, 2)
        norm = torch.linalg.vector_norm(v, dim=dims, keepdim=True)
        if not (norm > 0).all():
            raise UserError(f"the vector to project on is 0 in the entries of {layer.name} that "
                            "the patch acts on")
        unit = v / norm

        def along(entries: Tensor) -> Tensor:
            return (entries * unit).sum(dim=dims, keepdim=True)

        to: float | Tensor
        if isinstance(self.to, str):  # by linearity, the mean component is that of the mean
            mean = _require_reference(self.reference, self.kind).mean(selection.policy, layer)
            to = along(selection.broadcast(mean, "the reference mean")).mean()
        else:
            to = self.to
        return lambda entries, context: entries + (to - along(entries)) * unit


@dataclasses.dataclass(frozen=True, eq=False)
class Clamp(Patch):
    """Clamp activations: a' = min(max(a, low), high).

    Attributes:
        low, high: bounds; None for no bound.
    """

    kind: ClassVar[str] = "clamp"

    low: float | None = None
    high: float | None = None

    def bind(self, selection: Selection) -> PatchFn:
        if self.low is not None and self.high is not None and self.low > self.high:
            raise UserError(f"clamp has a lower bound, {self.low:g}, above its upper bound, "
                            f"{self.high:g}")
        return lambda entries, context: entries.clamp(self.low, self.high)


@dataclasses.dataclass(frozen=True, eq=False)
class Shift(Patch):
    """Shift channels by whole cells; vacated cells get the channel's mean over the reference set.

    Attributes:
        down: number of cells to shift down; negative shifts up.
        right: number of cells to shift to the right; negative shifts to the left.
        reference: reference set of the mean.
    """

    kind: ClassVar[str] = "shift"

    down: int
    right: int
    reference: ReferenceSet | None = None

    def bind(self, selection: Selection) -> PatchFn:
        layer = selection.layer
        if not layer.is_map or self.cells is not None:
            raise UserError("shift moves whole channels of a convolutional layer, so it takes no "
                            f"cells; {layer.name} has the shape {layer.shape}")
        means = _require_reference(self.reference, self.kind).channel_means(selection.policy, layer)
        fill = selection.take(means[None])[..., None]  # (1, K, 1, 1)
        # Row i takes the entries of row i - down.
        (to_rows, from_rows), (to_columns, from_columns) = (
            (slice(max(by, 0), size + min(by, 0)), slice(max(-by, 0), size + min(-by, 0)))
            if abs(by) < size else (slice(0, 0), slice(0, 0))
            for by, size in zip((self.down, self.right), layer.shape[1:]))

        def change(entries: Tensor, context: PatchContext) -> Tensor:
            maps = entries.unflatten(2, layer.shape[1:])  # (R, K, H, W)
            moved = fill.expand_as(maps).clone()
            moved[:, :, to_rows, to_columns] = maps[:, :, from_rows, from_columns]
            return moved.flatten(2)

        return change


@dataclasses.dataclass(frozen=True, eq=False)
class Interchange(Patch):
    """Activation patching: a' = activations in the forward pass of a paired frame.

    Attributes:
        pairs: function that maps batch metadata either to the paired frames, uint8 (R, H, W, 3),
            which are then run without patches from the initial state, or to the layer's outputs for
            these frames, float32 (R, *shape).
    """

    kind: ClassVar[str] = "interchange"

    pairs: Callable[[BatchInfo], np.ndarray | Tensor] | None = None

    @property
    def needs_info(self) -> bool:
        return True

    def bind(self, selection: Selection) -> PatchFn:
        pairs = self.pairs
        if pairs is None:
            raise UserError("interchange needs paired frames; name the levels to take the entries "
                            "from, as in source=7/8")

        def change(entries: Tensor, context: PatchContext) -> Tensor:
            paired = torch.as_tensor(pairs(context.required_info))
            if paired.dtype == torch.uint8:
                name = selection.layer.name
                paired = activations_of(selection.policy, paired, [name])[name]
            return selection.broadcast(paired, "the output for the paired frames")

        return change


def _require_opened(values: Any) -> Any:
    """Return the values of a patch; raise UserError if they are still a path."""
    if isinstance(values, Path):
        raise UserError(f"the file {values} of a patch must be read first "
                        "(interventions.patch_text.open_patches)")
    return values


def _require_reference(reference: ReferenceSet | None, kind: str) -> ReferenceSet:
    """Return the reference set of a patch; raise UserError if it is None."""
    if reference is None:
        raise UserError(f"{kind} needs a reference set of at least 2 frames")
    return reference


def _meet(a: tuple | None, b: tuple | None) -> bool:
    """Return whether two selections overlap; None selects everything."""
    return a is None or b is None or not set(a).isdisjoint(b)


def _meet_in_time(a: tuple[int, int | None] | None, b: tuple[int, int | None] | None) -> bool:
    """Return whether two ranges of steps (begin, end) overlap; None selects all steps."""
    if a is None or b is None:
        return True
    return ((a[1] is None or b[0] < a[1]) and (b[1] is None or a[0] < b[1]))


@dataclasses.dataclass(frozen=True)
class Opening:
    """Agent, game and reference frames for which patches are opened.

    Attributes:
        policy: agent to which the patches will be applied.
        env: configuration of the game; None in the simulator.
        reference: function that returns the reference set; called only if a patch needs one.
        edit: edit applied to every level before it is played; None for no edit.
    """

    policy: Policy
    env: EnvConfig | None
    reference: Callable[[], ReferenceSet]
    edit: LevelEdit | None = None


OpenOption = Callable[[Patch, str, Opening], Patch]
"""Function that applies an option to a patch. It maps the patch, the text of the option and the
opening to a new patch, and raises UserError if the option is not valid for them."""
