"""Hooks: patch layers of an agent, or cache their activations, inside a ``with`` block.

For example, halve the output of an IMPALA block and cache the hidden state that the heads read::

    with patched(policy, {"embedder.block2": lambda output: 0.5 * output}) as patches, \\
            cached(policy, ["hidden_state"]) as cache:
        run_policy(policy, compute, frames, hidden)
    cache["hidden_state"]  # (N, D)
    patches.changes()      # list with the size of the change

To patch only some channels, cells, steps or levels, pass a list of ``Patch`` objects instead of the
mapping (``interventions.patches`` defines the types). Patches of steps or levels need batch
metadata; ``with batch_info(policy, info)`` attaches it.

Blocks can be nested in any order. Patches of one output are applied in
the given order, patches of outer blocks first. Then the output is cached, as the rest of the
network receives it; ``before=True`` caches it before the patches. When a block ends, even by an
exception, its hooks are removed.

Letters in shape comments are defined in ``agents.patch``; N is the number of frames in all forward
passes of a block.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from agents.layers import RECURRENT, STATE, Layer, find_layer, layers_named
from agents.networks import Policy
from agents.patch import PADDING, Apply, BatchInfo, Patch, PatchContext
from common.errors import UserError

_ATTRIBUTE = "_hook_stack"  # attribute of a policy while blocks are active


@dataclasses.dataclass(frozen=True)
class ChangeSize:
    """Mean size of the change of a layer's output by a patch, over the frames on which it acted.

    Attributes:
        pictures: number of these frames; stored files use this name, too.
        in_std: Euclidean norm of the change after the change of each unit is divided by the unit's
            standard deviation; units that do not vary are left out. None if no standard deviations
            were given.
        norm: Euclidean norm of the change.
        relative: norm of the change divided by the norm of the layer's whole output before this
            patch, or 0 if the latter is 0.
    """

    layer: str
    pictures: int
    in_std: float | None
    norm: float
    relative: float


class _BoundPatch:
    """A patch bound to one layer of a policy, with running sums of the size of its change."""

    def __init__(self, patch: Patch, policy: Policy, layer: Layer, std: np.ndarray | Tensor | None):
        self.patch, self.layer, self._units = patch, layer, math.prod(layer.shape)
        self._selection = patch.select(policy, layer)
        self._function = patch.bind(self._selection)
        self._std = None if std is None else self._selection.broadcast(
            std, "the standard deviations")
        # Indices of the selected entries, for writing; None for all channels and cells.
        parts = self._selection.channels, self._selection.cells
        self._entries = None
        if any(part is not None for part in parts):
            sizes = layer.shape[0], layer.num_cells
            channels, cells = (
                torch.arange(size, device=policy.device) if part is None else part
                for part, size in zip(parts, sizes))
            self._entries = channels[:, None], cells
        self.num_frames = 0
        # On the device and in float64, to avoid synchronisation and rounding errors.
        self._sums = torch.zeros(3, dtype=torch.float64, device=policy.device)

    def __call__(self, output: Tensor, info: BatchInfo | None, state: Tensor | None) -> Tensor:
        """Return the patched output (…, *shape); the input tensor is not modified.

        Args:
            info: batch metadata of the B rows of the output; None if the forward pass has none.
            state: recurrent state that enters the step (B, D), for the layer ``hidden_state`` only.
        """
        chosen = self._chosen_rows(info, output.numel() // self._units)
        if chosen is not None and not len(chosen):
            return output
        flat = output.reshape(-1, self.layer.shape[0], self.layer.num_cells)  # (B, C, P)
        index = None
        if chosen is not None:
            info = info[chosen] if info is not None else None
            index = torch.from_numpy(chosen).to(output.device)
            state = None if state is None else state[index]
        patched_rows = flat if index is None else flat[index]  # (R, C, P)
        before = self._selection.take(patched_rows).float()  # (R, K, M)
        after = self._function(before, PatchContext(info, state)).expand_as(before)
        self._measure(before, after, patched_rows)
        after = after.to(output.dtype)
        if index is None and self._entries is None:
            return after.reshape(output.shape)
        result = output.clone()
        if index is None:
            index = torch.arange(len(flat), device=output.device)
        where = ((index,) if self._entries is None
                 else (index[:, None, None], *self._entries))
        result.view(flat.shape)[where] = after
        return result

    def _chosen_rows(self, info: BatchInfo | None, batch_size: int) -> np.ndarray | None:
        """Return the indices of the rows of a batch to change, int64; None for all rows.

        Args:
            info: metadata of the rows; None if the forward pass has none.
            batch_size: number of rows B.

        Raises:
            UserError: if the patch needs batch metadata and none was given.
        """
        if info is None:
            if self.patch.needs_info:
                raise UserError(f"the patch of {self.layer.name} needs metadata of each frame "
                                "(such as step, level or square), which this forward pass does "
                                "not have; run it inside batch_info")
            return None
        _check_size(info, batch_size)
        acts = self.patch.applies_to(info)
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
        self.num_frames += len(delta)

    def size(self) -> ChangeSize:
        norm, relative, in_std = (self._sums / max(self.num_frames, 1)).tolist()
        return ChangeSize(self.layer.name, self.num_frames, None if self._std is None else in_std,
                          norm, relative)


class ActivePatches:
    """Patches of one ``with patched(...)`` block, in the order in which they are applied.

    Attributes:
        layers: names of the patched layers.
        need_info: whether a patch requires batch metadata.
    """

    def __init__(self, bound: Sequence[_BoundPatch]):
        self._bound = bound
        self._has_run = False
        self.layers = {patch.layer.name for patch in bound}
        self.need_info = any(patch.patch.needs_info for patch in bound)

    def changes(self) -> list[ChangeSize]:
        """Return the change sizes so far, per patch and layer, in the order of the patches."""
        return [bound.size() for bound in self._bound]

    def total_change(self) -> tuple[float, float, float]:
        """Return the sums of ``in_std``, ``norm`` and ``relative`` over ``changes``.

        The sum of ``in_std`` is NaN unless ``patched`` received the standard deviations of all
        patched layers.
        """
        sizes = np.array([(size.in_std, size.norm, size.relative) for size in self.changes()],
                         dtype=float)
        in_std, norm, relative = sizes.reshape(-1, 3).sum(axis=0)
        return float(in_std), float(norm), float(relative)

    def never_applied(self) -> list[Patch]:
        """Return the patches that have not acted on any frame; [] before the first forward pass."""
        if not self._has_run:
            return []
        acted = {bound.patch for bound in self._bound if bound.num_frames}
        return list(dict.fromkeys(bound.patch for bound in self._bound
                                  if bound.patch not in acted))

    def apply(self, layer: str, output: Tensor, info: BatchInfo | None,
              state: Tensor | None) -> Tensor:
        """Apply the patches of a layer to its output (…, *shape).

        Args:
            output: output of the layer for B rows.
            info: batch metadata (B rows); None if the forward pass has none.
            state: recurrent state that enters the step (B, D), for the layer ``hidden_state`` only.
        """
        self._has_run = True
        for patch in self._bound:
            if patch.layer.name == layer:
                output = patch(output, info, state)
        return output


class ActivationCache(Mapping):
    """Cached activations by layer name, as passed to ``cached``.

    ``cache[name]`` holds all frames, (N, *shape), concatenated over the forward passes, without
    padding rows. With ``graph``, it is the unchanged output of a single forward pass.

    Args:
        layers: layers by the names that were passed to ``cached``.
        graph: keep the original tensors with their autograd graph instead of copies.
        before: cache outputs before patches are applied.

    Attributes:
        layers: module paths of the cached layers.
    """

    def __init__(self, layers: Mapping[str, Layer], device: torch.device | str, graph: bool,
                 before: bool):
        self.before = before
        self._named, self._device, self._graph = layers, device, graph
        self._shapes = {layer.name: layer.shape for layer in layers.values()}
        self._calls: dict[str, list[list[Tensor]]] = {name: [] for name in self._shapes}
        self.layers = set(self._shapes)

    def __getitem__(self, name: str) -> Tensor:
        """Return all outputs of a layer, (N, *shape); see the class for ``graph``.

        Args:
            name: name of the layer, as passed to ``cached``.

        Raises:
            ValueError: if the layer has not run yet, or if it has run several times and ``graph``
                is true, because outputs with a graph are not concatenated.
        """
        calls = self.calls(name)
        if not calls or (self._graph and len(calls) > 1):
            raise ValueError(f"{name} has run {len(calls)} times; see `calls`")
        return calls[0] if len(calls) == 1 else torch.cat(calls)

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)

    def calls(self, name: str) -> list[Tensor]:
        """Return the outputs of a layer, one tensor per forward pass.

        Args:
            name: name of the layer, as passed to ``cached``.
        """
        return [chunks[0] if len(chunks) == 1 else torch.cat(chunks)
                for chunks in self._calls[self._named[name].name]]

    def add(self, layer: str, output: Tensor, info: BatchInfo | None, is_continued: bool) -> None:
        """Store an output.

        Args:
            is_continued: whether the output is a further chunk of the previous batch.
        """
        if not self._graph:
            output = output.detach().reshape(-1, *self._shapes[layer])
            if info is not None and len(info) == len(output):
                output = output[torch.from_numpy(info.episode != PADDING)]
            output = output.to(self._device, copy=True)
        calls = self._calls[layer]
        if is_continued and calls:
            calls[-1].append(output)
        else:
            calls.append([output])


class _HookStack:
    """Active blocks of one policy, outermost first, and the metadata of the current batch.

    A block holds the patches or the cache of one ``patched`` or ``cached`` context manager.
    """

    def __init__(self, policy: Policy):
        self.policy = policy
        self.blocks: list[ActivePatches | ActivationCache] = []
        self.info: BatchInfo | None = None
        self.is_continued = False  # whether the current chunk continues a batch
        self._num_entered = 0  # number of active ``with`` blocks of this module
        self._hooks: dict[str, RemovableHandle] = {}
        self._num_blocks: Counter[str] = Counter()  # number of blocks by layer

    @classmethod
    def of(cls, policy: Policy) -> _HookStack | None:
        """Return the stack of a policy, or None outside of all ``with`` blocks of this module."""
        return policy.__dict__.get(_ATTRIBUTE)

    @classmethod
    @contextlib.contextmanager
    def entered(cls, policy: Policy) -> Iterator[_HookStack]:
        """Yield the stack of a policy, which exists until the last ``with`` block ends."""
        stack = policy.__dict__.setdefault(_ATTRIBUTE, cls(policy))
        stack._num_entered += 1
        try:
            yield stack
        finally:
            stack._num_entered -= 1
            if not stack._num_entered:
                policy.__dict__.pop(_ATTRIBUTE, None)

    @classmethod
    @contextlib.contextmanager
    def pushed(cls, policy: Policy, block: ActivePatches | ActivationCache) -> Iterator[None]:
        """Activate the patches or the cache of one block inside the ``with`` block."""
        with cls.entered(policy) as stack:
            stack.blocks.append(block)
            for layer in block.layers:
                stack._num_blocks[layer] += 1
                if layer not in stack._hooks:
                    stack._hooks[layer] = policy.get_submodule(layer).register_forward_hook(
                        functools.partial(stack._hook, layer))
            try:
                yield
            finally:
                stack.blocks = [other for other in stack.blocks if other is not block]
                stack._num_blocks.subtract(block.layers)
                for layer in block.layers:
                    if not stack._num_blocks[layer]:
                        stack._hooks.pop(layer).remove()

    def _hook(self, layer: str, module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        blocks = [block for block in self.blocks if layer in block.layers]
        caches = [block for block in blocks if isinstance(block, ActivationCache)]
        for cache in caches:
            if cache.before:
                cache.add(layer, output, self.info, self.is_continued)
        for block in blocks:
            if isinstance(block, ActivePatches):
                if layer in RECURRENT and output.ndim == 3 and len(output) > 1:
                    raise UserError(
                        f"a patch of {layer} changes the state that enters the next step, so the "
                        f"agent must run step by step, not {len(output)} steps at once")
                output = block.apply(layer, output, self.info,
                                     inputs[0] if layer == STATE else None)
        for cache in caches:
            if not cache.before:
                cache.add(layer, output, self.info, self.is_continued)
        return output


@contextlib.contextmanager
def patched(policy: Policy, patches: Sequence[Patch] | Mapping[str, Callable[[Tensor], Tensor]],
            std: Mapping[str, np.ndarray | Tensor] | None = None) -> Iterator[ActivePatches]:
    """Apply patches to every forward pass of a policy inside the ``with`` block.

    Args:
        patches: mapping from layer names to functions, which map the layer's output (R, *shape),
            float32, to values of the same shape; or a list of ``Patch`` objects. Patches of the
            same output are applied in the given order.
        std: standard deviations of the layers' units, by layer name, as arrays that broadcast to
            the layer's shape, such as ``ReferenceSet.std``. ``ChangeSize.in_std`` needs them.

    Raises:
        UserError: if a patch does not fit the policy, or two patches set the same entries.

    Example::

        >>> with patched(policy, {"embedder.block2": lambda output: 0.5 * output}) as patches:
        ...     values = policy(recording.episode(0).frames[:8]).values
        >>> assert patches.changes()[0].pictures == 8
    """
    if isinstance(patches, Mapping):
        patches = [Apply(layer, function) for layer, function in patches.items()]
    pairs = [(patch, layer) for patch in patches for layer in layers_named(policy, patch.layer)]
    for number, (patch, layer) in enumerate(pairs):
        if any(layer == other_layer and patch.overwrites(other, layer)
               for other, other_layer in pairs[:number]):
            raise UserError(f"two patches set the same entries of {layer.name}; to let the second "
                            "replace the first, give it 'override'")
    with disabled(policy):  # patches precompute their values on the unpatched network
        block = ActivePatches([_BoundPatch(patch, policy, layer, (std or {}).get(layer.name))
                               for patch, layer in pairs])
    with _HookStack.pushed(policy, block):
        yield block


@contextlib.contextmanager
def cached(policy: Policy, layers: Sequence[str], *, before: bool = False,
           on: torch.device | str = "cpu", graph: bool = False) -> Iterator[ActivationCache]:
    """Cache the activations of layers inside the ``with`` block.

    Args:
        layers: layer names, as accepted by ``find_layer``.
        before: cache outputs before patches are applied, instead of after.
        on: device of the copies.
        graph: keep the original tensors instead of copies, without reshaping them, so that
            gradients can be computed.

    Example::

        >>> with cached(policy, ["embedder.block2", "hidden_state"]) as cache:
        ...     output = policy(recording.episode(0).frames[:8])
        >>> assert cache["embedder.block2"].shape == (8, 32, 16, 16)
    """
    cache = ActivationCache({name: find_layer(policy, name) for name in layers}, on, graph, before)
    with _HookStack.pushed(policy, cache):
        yield cache


@contextlib.contextmanager
def _temporarily(policy: Policy, **values: object) -> Iterator[None]:
    """Set attributes of the policy's hook stack inside the ``with`` block."""
    with _HookStack.entered(policy) as stack:
        before = {name: getattr(stack, name) for name in values}
        vars(stack).update(values)
        try:
            yield
        finally:
            vars(stack).update(before)


def batch_info(policy: Policy, info: BatchInfo) -> contextlib.AbstractContextManager[None]:
    """Attach batch metadata to all forward passes inside the ``with`` block.

    Args:
        info: metadata of each row of the batch.
    """
    return _temporarily(policy, info=info)


def chunk_of_batch(policy: Policy, begin: int, end: int,
                   batch_size: int) -> contextlib.AbstractContextManager[None]:
    """Declare that forward passes inside the ``with`` block process only a part of a batch.

    They receive only this part of the metadata, and caches join the parts of a batch.

    Args:
        begin, end: first row of the part, and the row after its last.
        batch_size: number of rows of the whole batch.

    Raises:
        UserError: if the attached metadata does not have one row per row of the batch.
    """
    stack = _HookStack.of(policy)
    info = None if stack is None else stack.info
    if info is not None:
        _check_size(info, batch_size)
        info = info[begin:end]
    return _temporarily(policy, info=info, is_continued=begin > 0)


def disabled(policy: Policy) -> contextlib.AbstractContextManager[None]:
    """Disable patches and caches of outer ``with`` blocks. Inner blocks stay active."""
    return _temporarily(policy, blocks=[], info=None, is_continued=False)


def active_patches(policy: Policy) -> list[ActivePatches]:
    """Return the active patches of a policy, one entry per enclosing ``patched`` block with any
    patches, outermost first."""
    stack = _HookStack.of(policy)
    return [] if stack is None else [block for block in stack.blocks
                                     if isinstance(block, ActivePatches) and block.layers]


def refuse_patches(policy: Policy, where: str) -> None:
    """Raise UserError if any patch is active.

    Args:
        where: name of the operation that does not support patches, for the message.
    """
    if active_patches(policy):
        raise UserError(f"{where} does not support patches; leave the `patched` block first")


def _check_size(info: BatchInfo, batch_size: int) -> None:
    if len(info) != batch_size:
        raise UserError(f"got metadata for {len(info)} frames, but the batch has {batch_size}")
