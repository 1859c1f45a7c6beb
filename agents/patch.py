"""Patches: functions of a layer's activations, restricted to some channels, cells and frames.

``agents.hooks.patched`` applies patches. Letters in shape comments: B frames of a batch, C channels
and H W cells of a map (units are channels with one cell), P = H W; R frames, K channels and M cells
that a patch changes; D hidden state; *shape a layer's shape for one frame, see ``Layer.shape``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from agents.layers import Layer
from agents.networks import Policy
from common.errors import UserError

PADDING = -1  # episode number of padding rows
NO_LEVEL = -1  # level seed of simulated episodes


@dataclasses.dataclass(frozen=True)
class BatchInfo:
    """Metadata of a batch: episode, step, level and player position of each frame.

    Attributes:
        episode: number of the episode or of the simulated start, int64 (B,); ``PADDING`` for
            padding rows.
        step: step of the episode, from 0, int64 (B,).
        level: seed of the level, int64 (B,); ``NO_LEVEL`` in simulated episodes.
        square: the player's square, as (row from the bottom, column), int64 (B, 2), or None; -1 at
            the terminal step.
        facing: 1 if the player's image is mirrored (``is_reflected``), otherwise 0, int64 (B,), or
            None; -1 at the terminal step.
    """

    episode: np.ndarray
    step: np.ndarray
    level: np.ndarray
    square: np.ndarray | None = None
    facing: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.episode)

    @property
    def target(self) -> np.ndarray:
        """Seed of each row's random draws (B,): level seed, or number of the simulated start."""
        return np.where(self.level == NO_LEVEL, self.episode, self.level)

    def at_step(self, step: int) -> BatchInfo:
        """Return the metadata with the step of every row replaced by ``step``."""
        return dataclasses.replace(self, step=np.full_like(self.episode, step))

    def padded(self, number: int) -> BatchInfo:
        """Return the metadata with ``number`` padding rows appended."""
        return self._map(lambda values: np.concatenate(
            [values, np.full((number, *values.shape[1:]), PADDING, values.dtype)]))

    def __getitem__(self, index: slice | np.ndarray) -> BatchInfo:
        """Select rows by a slice, an index array or a boolean mask."""
        return self._map(lambda values: values[index])

    def _map(self, function: Callable[[np.ndarray], np.ndarray]) -> BatchInfo:
        return dataclasses.replace(self, **{name: function(values) for name, values
                                            in vars(self).items() if values is not None})


Condition = Callable[[BatchInfo], np.ndarray]
"""Map metadata to a mask of the rows on which a patch acts, bool (B,)."""

Array = np.ndarray | Tensor
Values = float | Array | Mapping[str, float | Array] | Callable[[BatchInfo], Array]
"""Values for the entries of a layer: a number, an array that broadcasts to the layer's shape, a
mapping from layer names to these, or a function from metadata to an array that broadcasts to
(R, *shape)."""""


@dataclasses.dataclass(frozen=True)
class PatchContext:
    """Inputs of a patch function in addition to the activations.

    Attributes:
        info: metadata of the R frames, or None if the caller did not attach any.
        state: recurrent state that enters the step (R, D), for the layer ``hidden_state`` only.
    """

    info: BatchInfo | None
    state: Tensor | None

    @property
    def required_info(self) -> BatchInfo:
        """Return ``info``; it is never None for patches with ``needs_info``."""
        assert self.info is not None
        return self.info


PatchFn = Callable[[Tensor, PatchContext], Tensor]
"""Map selected activations (R, K, M), float32, to their replacements."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """Entries of a layer's output that a patch acts on.

    Attributes:
        channels: indices of channels, int64 (K,), or None for all.
        cells: indices of cells in reading order, int64 (M,), or None for all.
    """

    policy: Policy
    layer: Layer
    channels: Tensor | None
    cells: Tensor | None

    def take(self, values: Tensor) -> Tensor:
        """Select the entries (R, K, M) of outputs (R, C, P)."""
        if self.channels is not None:
            values = values[:, self.channels]
        return values if self.cells is None else values[:, :, self.cells]

    def broadcast(self, values: float | Array, name: str) -> Tensor:
        """Broadcast values to the layer's shape and take the selected entries.

        Args:
            values: number or array that broadcasts to (*shape) or (R, *shape).
            name: description of the values, for messages.

        Returns:
            Entries (R or 1, K, M).

        Raises:
            UserError: if the array does not fit, or holds NaN or infinity.
        """
        values = torch.as_tensor(values, dtype=torch.float32, device=self.policy.device)
        shape = self.layer.shape
        lead = values.shape[:1] if values.ndim > len(shape) else (1,)
        try:
            whole = values.expand(*lead, *shape)
        except RuntimeError:
            raise UserError(f"{name} has the shape {tuple(values.shape)}, but "
                            f"{self.layer.name} has {shape}") from None
        if not torch.isfinite(values).all():
            raise UserError(f"{name} holds NaN or infinity")
        return self.take(whole.reshape(*lead, shape[0], -1))

    def values(self, values: Values, name: str) -> Callable[[PatchContext], Tensor]:
        """Return a function from a context to values that are broadcastable to (R, K, M).

        Raises:
            UserError: if a mapping lacks the layer, or an array does not fit or is not finite; also
                raised by the returned function.
        """
        if isinstance(values, Mapping):
            if self.layer.name not in values:
                raise UserError(f"{name} has no numbers for the layer {self.layer.name}")
            values = values[self.layer.name]
        if callable(values):
            return lambda context: self.broadcast(values(context.required_info), name)
        fixed = self.broadcast(values, name)
        return lambda context: fixed


@dataclasses.dataclass(frozen=True, eq=False)
class Patch:
    """A change of a layer's output, restricted to some channels, cells and frames.

    Attributes:
        layer: name of the layer, see ``agents.layers.layers_named``.
        channels: indices of channels or units; all if None.
        cells: cells as (row from the top, column); all if None.
        steps: range (begin, end) of steps of an episode on which the patch acts; ``end`` is
            excluded, or None for no limit. All steps if None.
        levels: seeds of the levels on which the patch acts; all if None.
        conditions: further conditions, all of which must hold.
        words: pairs (name, value) of options that other packages define, as the user wrote them.
            ``interventions.patch_text.open_patches`` turns them into conditions, cells and so on.
        text: the patch in the command-line syntax; "" if it was created in Python.
        is_open: whether ``open_patches`` has applied the words and read the files they name.

    Example, with a subclass of ``interventions.patches``::

        >>> patch = parse_patch("zero@embedder.block2:5,steps=0:20")
        >>> assert patch.kind == "zero" and isinstance(patch, Patch)
        >>> assert patch.channels == (5,) and patch.steps == (0, 20)
    """

    kind: ClassVar[str]

    layer: str
    _: dataclasses.KW_ONLY
    channels: tuple[int, ...] | None = None
    cells: tuple[tuple[int, int], ...] | None = None
    steps: tuple[int, int | None] | None = None
    levels: tuple[int, ...] | None = None
    conditions: tuple[Condition, ...] = ()
    words: tuple[tuple[str, str], ...] = ()
    text: str = ""
    is_open: bool = False

    def bind(self, selection: Selection) -> PatchFn:
        """Return the patch function for a selection, with all constants precomputed.

        Raises:
            UserError: if the patch cannot be applied to the selection.
        """
        raise NotImplementedError

    @property
    def needs_info(self) -> bool:
        """Whether batch metadata is required, for example because values depend on it."""
        values = getattr(self, "value", None), getattr(self, "vector", None)
        return (self.steps is not None or self.levels is not None or bool(self.conditions)
                or any(map(callable, values)))

    @property
    def needs_reference(self) -> bool:
        """Whether the patch has a field ``reference`` and still lacks the reference set."""
        return getattr(self, "reference", self) is None

    def applies_to(self, info: BatchInfo) -> np.ndarray:
        """Return a mask of the rows on which the patch acts, bool (B,)."""
        acts = info.episode != PADDING
        if self.steps is not None:
            begin, end = self.steps
            acts = acts & (info.step >= begin)
            if end is not None:
                acts &= info.step < end
        if self.levels is not None:
            acts = acts & np.isin(info.level, self.levels)
        for condition in self.conditions:
            acts = acts & condition(info)
        return acts

    def select(self, policy: Policy, layer: Layer) -> Selection:
        """Return the entries that the patch changes.

        Raises:
            UserError: if the layer has no such channel or cell; the message gives the bounds.
        """
        if self.words and not self.is_open:
            raise UserError(f"the patch at {self.layer} has the option '{self.words[0][0]}', which "
                            "is not resolved; call interventions.patch_text.open_patches first")
        what = "channels" if layer.is_map else "units"
        for channel in self.channels or ():
            if not 0 <= channel < layer.shape[0]:
                raise UserError(f"{layer.name} has no {what[:-1]} {channel}: its {what} are "
                                f"numbered 0 to {layer.shape[0] - 1}")
        if self.cells is not None and not layer.is_map:
            raise UserError(f"{layer.name} has no cells: it is {layer.shape[0]} units; leave "
                            "cells and squares out, or name a layer with a map")
        for row, column in self.cells or ():
            if not (0 <= row < layer.shape[1] and 0 <= column < layer.shape[2]):
                raise UserError(f"{layer.name} has no cell {row}.{column}: its rows go from 0 to "
                                f"{layer.shape[1] - 1}, its columns to {layer.shape[2] - 1}")
        width = layer.shape[-1]
        cells = self.entry_cells and [row * width + column for row, column in self.entry_cells]
        return Selection(policy, layer, *(
            None if numbers is None else torch.tensor(numbers, dtype=torch.int64,
                                                      device=policy.device)
            for numbers in (self.channels, cells)))

    def overwrites(self, earlier: Patch, layer: Layer) -> bool:
        """Return whether the patch silently undoes an earlier patch of the same layer."""
        return False

    @property
    def entry_cells(self) -> tuple[tuple[int, int], ...] | None:
        """Cells that the patch may change, as in ``cells``."""
        return self.cells


@dataclasses.dataclass(frozen=True, eq=False)
class Apply(Patch):
    """Patch that replaces the selected entries by a function of them.

    Attributes:
        function: maps the output of the layer, float32 (R, *shape), to values of the same shape.
            If channels or cells are selected, it maps only these entries (R, K, M); M is 1 for
            units.
    """

    kind: ClassVar[str] = "function"

    function: Callable[[Tensor], Tensor]

    def bind(self, selection: Selection) -> PatchFn:
        if selection.channels is not None or selection.cells is not None:
            return lambda entries, context: self.function(entries)
        return lambda entries, context: self.function(
            entries.reshape(-1, *selection.layer.shape)).reshape(entries.shape)
