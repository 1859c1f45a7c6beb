"""Hooks: patch layers of an agent, or cache their activations, inside a ``with`` block.

Halve the output of a residual block, and cache the hidden state that the heads then read::

    with patched(policy, {"embedder.block2": lambda output: 0.5 * output}) as scope, \\
            cached(policy, ["hidden_state"]) as cache:
        run_policy(policy, compute, frames, hidden)
    cache["hidden_state"]  # (N, D)
    scope.moved()          # size of the change

A patch can also act on some channels, cells, steps or levels only: a list of ``Patch`` objects
takes the place of the mapping (``interventions.patches`` has the types).

Scopes nest in any order. On one output, patches act in the order given, those of outer scopes
first; then it is recorded, so what is recorded is what the rest of the network gets. On leaving,
also by an exception, the hooks of a scope are gone, and outside of all scopes the policy has none.

Letters in shape comments: as in ``agents.hooks``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from agents.hooks import PADDING, Apply, Pass, Patch, Rows
from agents.layers import STATE, Layer, find_layer, layers_named
from agents.networks import Policy
from common.errors import UserError

_ATTRIBUTE = "_scopes"  # of a policy, as long as it has scopes
_CARRIED = ("gru", STATE)  # layers whose output enters the next step


@dataclasses.dataclass(frozen=True)
class Size:
    """Size of the change that a patch made to an output: means over the pictures it acted on.

    Attributes:
        layer: that it acted on.
        pictures: on which it acted.
        in_std: Euclidean norm of the change in standard deviations of the units, where those were
            given; units that do not vary are left out. None where they were not given.
        norm: Euclidean norm of the change.
        relative: the same, divided by the norm of the output before; 0 where that is 0.
    """

    layer: str
    pictures: int
    in_std: float | None
    norm: float
    relative: float


class _Placed:
    """A patch at one layer, and how far it has moved what it acted on."""

    def __init__(self, patch: Patch, policy: Policy, layer: Layer, std: np.ndarray | Tensor | None):
        self.patch, self.layer, self._units = patch, layer, math.prod(layer.shape)
        self._site = patch.place(policy, layer)
        self._change = patch.bind(self._site)
        self._std = None if std is None else self._site.of_shape(std, "the standard deviations")
        # Of the output's entries, for writing: of all channels and cells where one of them is not
        # all, or None where both are.
        parts = self._site.channels, self._site.cells
        self._entries = None
        if any(part is not None for part in parts):
            sizes = layer.shape[0], layer.num_cells
            channels, cells = (
                torch.arange(size, device=policy.device) if part is None else part
                for part, size in zip(parts, sizes))
            self._entries = channels[:, None], cells
        self.pictures = 0
        # On the device and in float64, so that nothing waits for it and nothing is rounded away.
        self._sums = torch.zeros(3, dtype=torch.float64, device=policy.device)

    def __call__(self, output: Tensor, rows: Rows | None, entering: Tensor | None) -> Tensor:
        """The output (…, *shape) to go on with; a new tensor if anything is changed."""
        chosen = self._chosen(rows, output.numel() // self._units)
        if chosen is not None and not len(chosen):
            return output
        flat = output.reshape(-1, self.layer.shape[0], self.layer.num_cells)  # (B, C, P)
        if chosen is not None:
            rows = rows[chosen]
            chosen = torch.from_numpy(chosen).to(output.device)
            entering = None if entering is None else entering[chosen]
        acted_on = flat if chosen is None else flat[chosen]  # (R, C, P)
        before = self._site.take(acted_on).float()  # (R, K, M)
        after = self._change(before, Pass(rows, entering)).expand_as(before)
        self._measure(before, after, acted_on)
        after = after.to(output.dtype)
        if chosen is None and self._entries is None:
            return after.reshape(output.shape)
        altered = output.clone()
        pictures = torch.arange(len(flat), device=output.device) if chosen is None else chosen
        where = ((pictures,) if self._entries is None
                 else (pictures[:, None, None], *self._entries))
        altered.view(flat.shape)[where] = after
        return altered

    def _chosen(self, rows: Rows | None, num: int) -> np.ndarray | None:
        """Numbers of the rows to change; None for all."""
        if rows is None:
            if self.patch.needs_rows:
                raise UserError(f"the patch of {self.layer.name} depends on whose pictures these "
                                "are (step, level, square or the like), but the pass does not "
                                "say so; run it inside rows_of_pass")
            return None
        _check_number(rows, num)
        acts = self.patch.in_force(rows)
        return None if acts.all() else np.flatnonzero(acts)

    @torch.no_grad()
    def _measure(self, before: Tensor, after: Tensor, output: Tensor) -> None:
        delta = (after - before).flatten(1)  # (R, K M)
        norm, whole = delta.norm(dim=-1), output.float().flatten(1).norm(dim=-1)  # (R,)
        sizes = [norm.sum(), torch.where(whole > 0, norm / whole, torch.zeros_like(norm)).sum()]
        if self._std is not None:
            std = self._std.flatten(1)
            in_std = torch.where(std > 0, delta / std, torch.zeros_like(delta))
            sizes.append(in_std.norm(dim=-1).sum())
        self._sums[:len(sizes)] += torch.stack(sizes).double()
        self.pictures += len(delta)

    def size(self) -> Size:
        norm, relative, in_std = (self._sums / max(self.pictures, 1)).tolist()
        return Size(self.layer.name, self.pictures, None if self._std is None else in_std, norm,
                    relative)


class Scope:
    """The patches of one scope, in order."""

    def __init__(self, placed: Sequence[_Placed]):
        self._placed = placed
        self._passes = 0
        self._by_layer: dict[str, list[_Placed]] = {}
        for each in placed:
            self._by_layer.setdefault(each.layer.name, []).append(each)

    @property
    def layers(self) -> Collection[str]:
        """Names of the patched layers."""
        return self._by_layer.keys()

    def moved(self) -> list[Size]:
        """Size of the changes that each patch has made so far, in the order of the patches; one
        for each layer of a patch of all."""
        return [placed.size() for placed in self._placed]

    def moved_in_std(self) -> float:
        """The sum of these sizes in standard deviations, which must have been given."""
        return self.total_moved()[0]

    def total_moved(self) -> tuple[float, float, float]:
        """The sums of these sizes: in standard deviations, which must have been given, as norms,
        and relative."""
        sizes = [(size.in_std, size.norm, size.relative) for size in self.moved()]
        return tuple(map(float, np.sum(sizes, axis=0))) if sizes else (0.0, 0.0, 0.0)

    def never_in_force(self) -> list[Patch]:
        """The patches that have not acted on any picture, although their layers ran."""
        if not self._passes:
            return []
        acted = {placed.patch for placed in self._placed if placed.pictures}
        return list(dict.fromkeys(placed.patch for placed in self._placed
                                  if placed.patch not in acted))

    def applied(self, layer: str, output: Tensor, rows: Rows | None,
                entering: Tensor | None) -> Tensor:
        """The output of a layer behind the patches of this scope."""
        self._passes += 1
        for placed in self._by_layer.get(layer, ()):
            output = placed(output, rows, entering)
        return output


class Activations(Mapping):
    """Outputs of layers by the names they were asked for.

    ``activations[name]`` has all pictures, (N, *shape), one pass behind the other. Empty rows of a
    pass are left out.
    """

    def __init__(self, layers: Mapping[str, Layer], device: torch.device | str, graph: bool):
        self._layers, self._device, self._graph = layers, device, graph
        self._innermost = {layer.name: layer for layer in layers.values()}
        self._calls: dict[str, list[list[Tensor]]] = {name: [] for name in self._innermost}

    def __getitem__(self, name: str) -> Tensor:
        """All outputs of a layer.

        Raises:
            ValueError: if there is none yet, or several of a graph, which cannot be joined without
                leaving it.
        """
        calls = self.calls(name)
        if not calls or (self._graph and len(calls) > 1):
            raise ValueError(f"{name} has run {len(calls)} times; see `calls`")
        return calls[0] if len(calls) == 1 else torch.cat(calls)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def calls(self, name: str) -> list[Tensor]:
        """The outputs of a layer, one a pass; pictures that went through it in pieces are one."""
        return [pieces[0] if len(pieces) == 1 else torch.cat(pieces)
                for pieces in self._calls[self._layers[name].name]]

    def add(self, name: str, output: Tensor, rows: Rows | None, goes_on: bool) -> None:
        """Keep an output: the tensor itself with a graph, else a copy (N, *shape).

        Args:
            name: of the innermost module.
            rows: of the pass, if they are known.
            goes_on: whether it is a further piece of the pictures of the last call.
        """
        layer, calls = self._innermost[name], self._calls[name]
        if not self._graph:
            output = output.detach().reshape(-1, *layer.shape)
            if rows is not None and len(rows) == len(output):
                output = output[torch.from_numpy(rows.episode != PADDING)]
            output = output.to(self._device, copy=True)
        if goes_on and calls:
            calls[-1].append(output)
        else:
            calls.append([output])


@dataclasses.dataclass(frozen=True, eq=False)
class _Recorder:
    """A scope that records."""

    activations: Activations
    layers: tuple[str, ...]
    before: bool


class _Stack:
    """The scopes of one policy that are active, outermost first, and the pass that is running."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.scopes: list[Scope | _Recorder] = []
        self.rows: Rows | None = None
        self.goes_on = False  # whether a further piece of the last pass's pictures is running
        self._hooks: dict[str, RemovableHandle] = {}
        self._users: Counter[str] = Counter()  # scopes, by layer

    @classmethod
    def of(cls, policy: Policy) -> _Stack | None:
        """That of a policy; None if no scope is active."""
        return policy.__dict__.get(_ATTRIBUTE)

    @contextlib.contextmanager
    def with_scope(self, scope: Scope | _Recorder) -> Iterator[None]:
        self.scopes.append(scope)
        for layer in scope.layers:
            self._users[layer] += 1
            if layer not in self._hooks:
                self._hooks[layer] = self.policy.get_submodule(layer).register_forward_hook(
                    functools.partial(self._ran, layer))
        try:
            yield
        finally:
            if not self.scopes or self.scopes[-1] is not scope:
                warnings.warn("a scope of patches or recordings was left before one that was "
                              "entered later; both end cleanly", stacklevel=4)
            self.scopes.remove(scope)
            self._users.subtract(scope.layers)
            for layer in scope.layers:
                if not self._users[layer]:
                    self._hooks.pop(layer).remove()
            if not self.scopes and not self._hooks:
                self.policy.__dict__.pop(_ATTRIBUTE, None)

    def _ran(self, layer: str, module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        """The hook of a layer."""
        here = [scope for scope in self.scopes if layer in scope.layers]
        recorders = [scope for scope in here if isinstance(scope, _Recorder)]
        for recorder in recorders:
            if recorder.before:
                recorder.activations.add(layer, output, self.rows, self.goes_on)
        for scope in here:
            if isinstance(scope, Scope):
                if layer in _CARRIED and output.ndim == 3 and len(output) > 1:
                    raise UserError(
                        f"a patch of {layer} changes what enters the next step, so it needs steps "
                        f"that run one by one, not a sequence of {len(output)} at once")
                output = scope.applied(layer, output, self.rows,
                                       inputs[0] if layer == STATE else None)
        for recorder in recorders:
            if not recorder.before:
                recorder.activations.add(layer, output, self.rows, self.goes_on)
        return output


def _stack_for(policy: Policy) -> _Stack:
    return policy.__dict__.setdefault(_ATTRIBUTE, _Stack(policy))


@contextlib.contextmanager
def patched(policy: Policy, patches: Sequence[Patch] | Mapping[str, Callable[[Tensor], Tensor]],
            std: Mapping[str, np.ndarray | Tensor] | None = None) -> Iterator[Scope]:
    """Apply patches to every forward pass of a policy inside the ``with`` block.

    Args:
        patches: functions by layer name, which map a layer's output (R, *shape) in float32 to
            values of the same shape; or ``Patch`` objects. Patches of one output are applied in
            this order.
        std: standard deviations of units by layer, arrays that broadcast to the layer's shape, in
            which ``Scope.moved`` measures; see ``ReferenceSet.std``.

    Raises:
        UserError: if a patch does not fit the policy, or two set the same entries.
    """
    if isinstance(patches, Mapping):
        patches = [Apply(layer, function) for layer, function in patches.items()]
    placed = [(patch, layer) for patch in patches for layer in layers_named(policy, patch.layer)]
    _check_set_once(placed)
    with outside_scopes(policy):  # what a patch computes beforehand is of the network as it is
        scope = Scope([_Placed(patch, policy, layer, (std or {}).get(layer.name))
                       for patch, layer in placed])
    with _stack_for(policy).with_scope(scope):
        yield scope


@contextlib.contextmanager
def cached(policy: Policy, layers: Sequence[str], *, before: bool = False,
           on: torch.device | str = "cpu", graph: bool = False) -> Iterator[Activations]:
    """Cache the activations of layers inside the ``with`` block.

    Args:
        layers: names as of ``find_layer``.
        before: record outputs as computed, not as patched.
        on: device of the copies.
        graph: keep the tensors themselves, of the shape in which the network has them, for
            gradients.
    """
    named = {name: find_layer(policy, name) for name in layers}
    activations = Activations(named, on, graph)
    names = tuple(dict.fromkeys(layer.name for layer in named.values()))
    with _stack_for(policy).with_scope(_Recorder(activations, names, before)):
        yield activations


@contextlib.contextmanager
def rows_of_pass(policy: Policy, rows: Rows) -> Iterator[None]:
    """Say whose the rows of the passes inside are, to every scope that is active."""
    stack = _Stack.of(policy)
    if stack is None:
        yield
        return
    outer, stack.rows = stack.rows, rows
    try:
        yield
    finally:
        stack.rows = outer


@contextlib.contextmanager
def piece_of_pass(policy: Policy, begin: int, end: int, number: int) -> Iterator[None]:
    """Say that what runs inside has only some of a pass's ``number`` pictures.

    Raises:
        UserError: if the pass is said to be of another number of pictures.
    """
    stack = _Stack.of(policy)
    if stack is None:
        yield
        return
    rows, stack.goes_on = stack.rows, begin > 0
    if rows is not None:
        _check_number(rows, number)
        stack.rows = rows[begin:end]
    try:
        yield
    finally:
        stack.rows, stack.goes_on = rows, False


@contextlib.contextmanager
def outside_scopes(policy: Policy) -> Iterator[None]:
    """Run passes as if no scope around were active; scopes inside work as always."""
    stack = _Stack.of(policy)
    if stack is None:
        yield
        return
    kept = stack.scopes, stack.rows, stack.goes_on
    stack.scopes, stack.rows, stack.goes_on = [], None, False
    try:
        yield
    finally:
        stack.scopes, stack.rows, stack.goes_on = kept


def refuse_patches(policy: Policy, where: str) -> None:
    """Refuse to run where patches have no meaning.

    Raises:
        UserError: if a patch is active.
    """
    stack = _Stack.of(policy)
    if stack is not None and any(isinstance(scope, Scope) and scope.layers
                                 for scope in stack.scopes):
        raise UserError(f"{where} takes no patches; leave the scope first")


def _check_number(rows: Rows, number: int) -> None:
    if len(rows) != number:
        raise UserError(f"a pass of {number} pictures is said to be of {len(rows)}")


def _check_set_once(placed: Sequence[tuple[Patch, Layer]]) -> None:
    """Refuse two patches that set the same entries of an output."""
    for number, (patch, layer) in enumerate(placed):
        for other, other_layer in placed[:number]:
            if layer == other_layer and patch.sets_over(other, layer):
                raise UserError(f"two patches set the same entries of {layer.name}; the second "
                                "one wins if it is given 'override'")
