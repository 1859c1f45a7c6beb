"""A patch: a change of a layer's output inside a scope, and the parts of the output it changes.

Letters in shape comments: B pictures of a pass, R of them that a patch changes, C channels and H W
cells of a map (units are channels with one cell), P = H W, K channels and M cells that a patch
changes.
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

PADDING = -1  # as the episode of a row that only fills a pass up
NO_LEVEL = -1  # as the level of a simulation


@dataclasses.dataclass(frozen=True)
class Rows:
    """The pictures of a pass: whose they are.

    Attributes:
        episode: number of the episode, or of the simulated start, int64 (B,); ``PADDING`` where a
            row is empty.
        step: of the episode, from 0, int64 (B,).
        level: seed of the level, int64 (B,); ``NO_LEVEL`` if there is none.
        square: where the player is, row from the bottom and column, int64 (B, 2), or None.
        facing: which way it faces, int64 (B,), or None.
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
        """The number by which a draw for a level is seeded: its seed, or the simulated start."""
        return np.where(self.level == NO_LEVEL, self.episode, self.level)

    def at_step(self, step: int) -> Rows:
        """The same episodes at one step."""
        return dataclasses.replace(self, step=np.full_like(self.episode, step))

    def padded(self, number: int) -> Rows:
        """The same rows and some empty ones behind them."""
        return Rows(*(None if values is None else np.concatenate(
            [values, np.full((number, *values.shape[1:]), PADDING, values.dtype)])
            for values in self._values()))

    def __getitem__(self, chosen: slice | np.ndarray) -> Rows:
        """Some of the rows: a slice, numbers, or a truth value each."""
        return Rows(*(None if values is None else values[chosen] for values in self._values()))

    def _values(self) -> list[np.ndarray | None]:
        return [getattr(self, field.name) for field in dataclasses.fields(self)]


Condition = Callable[[Rows], np.ndarray]
"""Rows to whether a patch is in force there, bool (B,)."""

Array = np.ndarray | Tensor
Values = float | Array | Mapping[str, float | Array] | Callable[[Rows], Array]
"""Numbers for the entries of a layer: one, an array that broadcasts to the layer's shape, such an
array for each layer by name, or a function of rows that gives one for each (R, *shape)."""


@dataclasses.dataclass(frozen=True)
class Pass:
    """Inputs of a change beside the entries it changes.

    Attributes:
        rows: the R pictures, or None where the caller did not say whose they are.
        entering: for the layer ``hidden_state`` the state that enters the step (R, D), else None.
    """

    rows: Rows | None
    entering: Tensor | None


Change = Callable[[Tensor, Pass], Tensor]
"""Entries (R, K, M) in float32, and their pass, to the entries to go on with."""


@dataclasses.dataclass(frozen=True)
class Site:
    """Where a patch acts: a layer of an agent, and entries of its output.

    Attributes:
        channels: int64 (K,), or None for all.
        cells: numbers of cells in reading order, int64 (M,), or None for all.
    """

    policy: Policy
    layer: Layer
    channels: Tensor | None
    cells: Tensor | None

    def take(self, values: Tensor) -> Tensor:
        """The entries (R, K, M) of outputs (R, C, P)."""
        if self.channels is not None:
            values = values[:, self.channels]
        return values if self.cells is None else values[:, :, self.cells]

    def of_shape(self, values: Array, what: str) -> Tensor:
        """The entries (R or 1, K, M) of an array that broadcasts to the layer's shape.

        Args:
            values: (*shape), or (R, *shape).
            what: they are, for messages.

        Raises:
            UserError: if it does not fit, or holds NaN or infinity.
        """
        values = torch.as_tensor(values, dtype=torch.float32, device=self.policy.device)
        shape = self.layer.shape
        lead = values.shape[:1] if values.ndim > len(shape) else (1,)
        try:
            whole = values.expand(*lead, *shape)
        except RuntimeError:
            raise UserError(f"{what} has the shape {tuple(values.shape)}, but "
                            f"{self.layer.name} has {shape}") from None
        if not torch.isfinite(values).all():
            raise UserError(f"{what} holds NaN or infinity")
        return self.take(whole.reshape(*lead, shape[0], -1))

    def values(self, values: Values, what: str) -> Callable[[Pass], Tensor | float]:
        """A function from a pass to numbers that broadcast with (R, K, M).

        Raises:
            UserError: see ``of_shape``; also from the function that is returned.
        """
        if isinstance(values, Mapping):
            if self.layer.name not in values:
                raise UserError(f"{what} has no numbers for the layer {self.layer.name}")
            values = values[self.layer.name]
        if callable(values):
            return lambda at: self.of_shape(values(at.rows), what)
        fixed = self.of_shape(values, what)
        return lambda at: fixed


@dataclasses.dataclass(frozen=True, eq=False)
class Patch:
    """A change of a layer's output: of some channels and cells, of some pictures.

    Attributes:
        layer: name of the layer, see ``agents.layers.layers_named``.
        channels: numbers of channels or units; all if None.
        cells: (row from the top, column) of cells; all if None.
        steps: first step of an episode at which it is in force, and the first at which it is no
            longer (None: to the end); all if None.
        levels: seeds of levels on which it is in force; all if None.
        conditions: further ones, all of which must hold.
        words: words of other rooms and their values, as written down, which
            ``interventions.patch_text.open_patches`` turns into conditions, cells and the like.
        written: the patch before it was opened, which is what it is called by; None if it never
            was.
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
    written: Patch | None = None

    def bind(self, site: Site) -> Change:
        """Make the change at a place, with all that it needs computed once.

        Raises:
            UserError: if it cannot be made there.
        """
        raise NotImplementedError

    @property
    def needs_rows(self) -> bool:
        """Whether a pass must say whose its rows are."""
        return self.steps is not None or self.levels is not None or bool(self.conditions)

    @property
    def wants_reference(self) -> bool:
        """Whether it still needs a reference set, to be put into its field ``reference``."""
        return False

    def in_force(self, rows: Rows) -> np.ndarray:
        """Where the patch acts, bool (B,)."""
        acts = rows.episode != PADDING
        if self.steps is not None:
            begin, end = self.steps
            acts = acts & (rows.step >= begin)
            if end is not None:
                acts &= rows.step < end
        if self.levels is not None:
            acts = acts & np.isin(rows.level, self.levels)
        for condition in self.conditions:
            acts = acts & condition(rows)
        return acts

    def place(self, policy: Policy, layer: Layer) -> Site:
        """The entries that the patch changes.

        Raises:
            UserError: if the layer has no such channel or cell; the bounds are named.
        """
        if self.words and self.written is None:
            raise UserError(f"the patch at {self.layer} has the word '{self.words[0][0]}', which "
                            "must be opened first (interventions.patch_text.open_patches)")
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
        return Site(policy, layer, _numbers(self.channels, policy), _numbers(
            self.entry_cells and [row * width + column for row, column in self.entry_cells],
            policy))

    def sets_over(self, earlier: Patch, layer: Layer) -> bool:
        """Whether it silently undoes an earlier patch of the same layer."""
        return False

    @property
    def entry_cells(self) -> tuple[tuple[int, int], ...] | None:
        """The cells that it may change."""
        return self.cells


@dataclasses.dataclass(frozen=True, eq=False)
class Apply(Patch):
    """Replace the selected entries by a function of them.

    Attributes:
        function: maps the output of the layer, float32 (R, *shape), to values of the same shape.
            If channels or cells are selected, it maps only those, (R, K, M); M is 1 for units.
    """

    kind: ClassVar[str] = "function"

    function: Callable[[Tensor], Tensor]

    def bind(self, site: Site) -> Change:
        if site.channels is not None or site.cells is not None:
            return lambda entries, at: self.function(entries)
        return lambda entries, at: self.function(
            entries.reshape(-1, *site.layer.shape)).reshape(entries.shape)


def _numbers(values: list[int] | tuple[int, ...] | None, policy: Policy) -> Tensor | None:
    return None if values is None else torch.tensor(values, dtype=torch.int64,
                                                            device=policy.device)
