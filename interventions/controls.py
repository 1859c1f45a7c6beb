"""Random controls of patches: the same kind of change with random vectors, channels or cells.

========================================  =====================================================
patch                                     controls
========================================  =====================================================
add, project                              PERMUTED (default): vector with its cells permuted
                                          within each channel (units: permuted among each other);
                                          GAUSSIAN: Gaussian vector of the same norm; OTHERS:
                                          given vectors
zero, mean, multiply, … of some channels  CHANNELS (default): random sets of the same number of
                                          channels, whose change differs in size by at most a
                                          quarter, if there are enough such sets
zero, mean, multiply, … of some cells in  CELLS (default): the same change at other cells
all channels
set                                       CELLS (default if the patch names cells): the same values
                                          at other cells; CHANNELS (otherwise): other channels at
                                          the same cells, with the value rescaled to their standard
                                          deviations
swap                                      the same swap of random directions, see
                                          ``Projector.turned``
========================================  =====================================================

Each control is determined by the seed and its number, so that more controls can be added later.

Letters in shape comments: n reference frames, C channels and H W cells of a layer (units are
channels with one cell), P = H W, K channels and M cells that a patch changes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from agents.layers import Layer, layers_named
from agents.networks import Policy
from agents.patch import Array, BatchInfo, Patch, PatchContext
from agents.reference_set import ReferenceSet, activations_of
from common.errors import UserError
from interventions.patches import Add, Interchange, Project, SetTo
from interventions.projector import Swap

PERMUTED, GAUSSIAN, OTHERS = "permuted", "gaussian", "others"
CHANNELS, CELLS = "channels", "cells"
KINDS = (PERMUTED, GAUSSIAN, OTHERS, CHANNELS, CELLS)
_DIRECTIONS = "random directions"  # of swaps, which have no other controls
NEAR = 0.25  # largest relative difference in size of change for a matched set
_CANDIDATES = 20_000  # maximum number of candidate sets


@dataclasses.dataclass(frozen=True)
class Control:
    """One random control of a list of patches.

    Attributes:
        patches: one control per patch, in the same order.
        drawn: random choices for each patch, for metadata.
        matched: whether, for every patch, the size of the control's change differs by at most a
            quarter from that of the patch's change. Sizes are compared only for random sets of
            channels, except those of ``set``; all other controls count as matched.
    """

    patches: tuple[Patch, ...]
    drawn: tuple[dict, ...]
    matched: bool


def controls_of(policy: Policy, patches: Sequence[Patch], number: int, seed: int,
                reference: ReferenceSet | None = None, kind: str | None = None,
                others: Sequence[Mapping[str, Array] | Array] = ()) -> list[Control]:
    """Draw controls of patches that are applied together.

    Args:
        policy: agent that the patches belong to.
        patches: patches returned by ``interventions.patch_text.open_patches``.
        number: number of controls.
        seed: seed of the random draws.
        reference: frames on which the size of a change is measured; required for CHANNELS.
        kind: kind of the controls, one of KINDS; by default, each patch has its own default kind.
        others: vectors for OTHERS, at least ``number``: arrays of the layer's shape, or mappings
            from layer names to such arrays.

    Raises:
        UserError: if a patch cannot have such controls, or too few exist; the message suggests a
            remedy.
    """
    columns = []
    for place, patch in enumerate(patches):
        chosen = kind or _default(patch)
        seeds = np.random.SeedSequence([seed, place])
        if chosen in (PERMUTED, GAUSSIAN, OTHERS):
            columns.append(_vectors(policy, patch, chosen, number, seeds, others))
        elif chosen == _DIRECTIONS and isinstance(patch, Swap):
            columns.append([(dataclasses.replace(patch.pattern, random_directions=k),
                             {"random_directions": k}, True) for k in range(number)])
        elif chosen == CHANNELS:
            columns.append(_channels(policy, patch, number, seeds, reference))
        else:
            columns.append(_cells(policy, patch, number, seeds))
    return [Control(tuple(patch for patch, _, _ in row), tuple(drawn for _, drawn, _ in row),
                    all(matched for _, _, matched in row)) for row in zip(*columns)]


def matched_sets(sizes: np.ndarray, channels: Sequence[int], number: int,
                 seed: int | np.random.SeedSequence
                 ) -> tuple[list[tuple[int, ...]], np.ndarray, np.ndarray]:
    """Draw random sets of channels that match given channels in number and size of change.

    Sets exclude the given channels if there are enough other channels.

    Args:
        sizes: squared change of each channel in each frame, in standard deviations (n, C).
        channels: channels whose change is to be matched.
        number: number of sets.
        seed: seed of the random draws.

    Returns:
        The sets; the size of their changes (mean Euclidean norm over frames) divided by the size of
        the change of ``channels`` (number,), where 0 / 0 is 1; and whether each size differs by at
        most a quarter, bool (number,). If there are too few such sets, those most similar in size
        follow.

    Raises:
        UserError: if there are fewer than ``number`` sets.
    """
    rng = np.random.default_rng(seed)
    remaining = np.setdiff1d(np.arange(sizes.shape[1]), channels)
    pool = remaining if len(remaining) >= len(channels) else np.arange(sizes.shape[1])
    candidates = _sets(pool, len(channels), rng)
    candidates = candidates[(candidates != np.sort(channels)).any(axis=1)]
    if len(candidates) < number:
        raise UserError(f"{number} controls cannot be drawn for a patch of {len(channels)} of "
                        f"{sizes.shape[1]} channels: there are {len(candidates)} other sets of "
                        "this size; patch fewer channels, or use fewer --num_controls")

    def moved(sets: np.ndarray) -> np.ndarray:
        return np.concatenate([np.sqrt(sizes[:, part].sum(axis=2)).mean(axis=0)
                               for part in np.array_split(sets, -(-len(sets) // 1000))])

    own = moved(np.array([channels]))[0]
    changes = moved(candidates)
    near = np.abs(changes - own) <= NEAR * own
    order = np.argsort(np.where(near, 0, np.abs(changes - own)), kind="stable")[:number]
    relative = changes[order] / own if own else np.where(changes[order] > 0, np.inf, 1)
    return [tuple(map(int, candidates[i])) for i in order], relative, near[order]


def channel_sizes(policy: Policy, patch: Patch, layer: Layer,
                  reference: ReferenceSet) -> np.ndarray:
    """Compute the squared change of each channel in each reference frame, if the patch acts on all
    channels of the layer.

    Args:
        policy: the agent.
        patch: the patch; its cells are kept, but its channels, steps, levels and conditions are
            ignored.
        layer: the layer.
        reference: frames on which the change is measured.

    Returns:
        Squared Euclidean norm of each channel's change over the patch's cells, float64 (n, C). The
        change of each unit is divided by its standard deviation; constant units are left out.

    Raises:
        UserError: if the patch cannot act on the layer.
    """
    unrestricted = dataclasses.replace(patch, channels=None, steps=None, levels=None,
                                       conditions=())
    selection = unrestricted.select(policy, layer)
    outputs = activations_of(policy, reference.frames, [layer.name],
                             reference.hidden_states)[layer.name]
    before = selection.take(outputs.reshape(len(outputs), layer.shape[0], -1))  # (n, C, M)
    numbers = np.arange(len(outputs))
    context = PatchContext(BatchInfo(numbers, 0 * numbers, numbers), None)
    after = unrestricted.bind(selection)(before, context)
    std = selection.broadcast(reference.std(policy, layer), "the standard deviations")
    change = torch.where(std > 0, (after - before) / std, torch.zeros_like(before))
    return change.square().sum(dim=2).double().cpu().numpy()


def _default(patch: Patch) -> str:
    """Return the default kind of the controls of a patch."""
    if isinstance(patch, Swap):
        return _DIRECTIONS
    if isinstance(patch, Add | Project):
        return PERMUTED
    if patch.cells is not None and (isinstance(patch, SetTo) or patch.channels is None):
        return CELLS
    return CHANNELS


Drawn = Sequence[tuple[Patch, dict, bool]]  # control patch, its random choices, whether matched


def _vectors(policy: Policy, patch: Patch, kind: str, number: int, seeds: np.random.SeedSequence,
             others: Sequence[Mapping[str, Array] | Array]) -> Drawn:
    """Draw ``number`` controls of a patch with other vectors.

    Args:
        policy: the agent.
        patch: the patch.
        kind: PERMUTED, GAUSSIAN or OTHERS.
        number: number of controls.
        seeds: source of the seeds of the controls.
        others: vectors of the controls of kind OTHERS.

    Raises:
        UserError: if the patch has no vector, or there are fewer than ``number`` other vectors.
    """
    if not isinstance(patch, Add | Project):
        raise UserError(f"{patch.kind} at {patch.layer} has no vector, so it has no controls of "
                        f"the kind '{kind}'; omit the kind to use the default of {patch.kind}")
    if kind == OTHERS:
        if len(others) < number:
            raise UserError(f"{number} controls need as many other vectors, but there are "
                            f"{len(others)}; give more, or use fewer --num_controls")
        given: list[Any] = list(others[:number])
        return [(dataclasses.replace(patch, vector=vector), {"other vector": k}, True)
                for k, vector in enumerate(given)]
    change = {PERMUTED: _permuted, GAUSSIAN: _gaussian}[kind]
    layers = layers_named(policy, patch.layer)
    drawn = []
    for k, child in enumerate(seeds.spawn(number)):
        rng = np.random.default_rng(child)
        vectors = {}
        for layer in layers:
            vector: Any = patch.vector
            vector = vector[layer.name] if isinstance(vector, Mapping) else vector
            vectors[layer.name] = _changed(vector, change, patch, layer, int(rng.integers(2**63)))
        drawn.append((dataclasses.replace(patch, vector=vectors), {kind: k}, True))
    return drawn


def _changed(vector: float | Array | Callable[[BatchInfo], Array], change: Callable, patch: Patch,
             layer: Layer, seed: int) -> Any:
    """Change the entries of a vector within the patch, in the same way for all frames.

    Args:
        vector: the vector, or a function that returns the vectors of frames.
        change: maps entries (…, K, M) and a random generator to new entries.
        patch: patch that selects channels and cells.
        layer: layer of the vector.
        seed: seed of the random generator.

    Returns:
        The new vector, or a function of the same kind as ``vector``.

    Raises:
        UserError: if the patch changes only one entry.
    """
    if callable(vector):
        return lambda rows: _changed(vector(rows), change, patch, layer, seed)
    values = np.array(torch.as_tensor(vector, dtype=torch.float32).cpu())
    if isinstance(patch, Project) and layer.is_map and values.shape == layer.shape[:1]:
        shape, cells = layer.shape[:1], None  # one number per channel
    else:
        shape, cells = layer.shape, patch.cells
    lead = values.shape[:-len(shape)] if values.ndim > len(shape) else ()
    flat = np.broadcast_to(values, (*lead, *shape)).reshape(*lead, shape[0], -1).copy()
    channels = np.arange(shape[0]) if patch.channels is None else np.array(patch.channels)
    numbers = (np.arange(flat.shape[-1]) if cells is None else
               np.array([row * layer.shape[-1] + column for row, column in cells]))
    where = (..., channels[:, None], numbers)
    if len(channels) * len(numbers) < 2:
        raise UserError(f"the patch changes a single entry of {layer.name}, so its vector cannot "
                        "be permuted or redrawn; change more entries")
    flat[where] = change(flat[where], np.random.default_rng(seed))
    return flat.reshape(*lead, *shape)


def _permuted(entries: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Permute entries (…, K, M) within each channel, or among the channels if M is 1."""
    num_channels, num_cells = entries.shape[-2:]
    if num_cells == 1:
        return entries[..., rng.permutation(num_channels), :]
    order = rng.permuted(np.tile(np.arange(num_cells), (num_channels, 1)), axis=1)
    return np.take_along_axis(entries, np.broadcast_to(order, entries.shape), axis=-1)


def _gaussian(entries: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw standard normal entries, rescaled to the norm of the given entries (…, K, M)."""
    drawn = rng.standard_normal(entries.shape[-2:])
    norm = np.linalg.norm(entries, axis=(-2, -1), keepdims=True)
    return drawn / np.linalg.norm(drawn) * norm


def _channels(policy: Policy, patch: Patch, number: int, seeds: np.random.SeedSequence,
              reference: ReferenceSet | None) -> Drawn:
    """Draw ``number`` controls of a patch at other channels.

    Raises:
        UserError: if the patch does not name channels of a single layer, or is a projection, whose
            change of a channel depends on the other channels.
    """
    if isinstance(patch, Project):
        raise UserError(f"a projection at {patch.layer} has no controls of the kind '{CHANNELS}'; "
                        f"use '{PERMUTED}' or '{GAUSSIAN}'")
    layers = layers_named(policy, patch.layer)
    if patch.channels is None or len(layers) > 1 or (
            isinstance(patch, Interchange) and not patch.words):
        raise UserError(f"{patch.kind} at {patch.layer} names no channels of one layer, so no "
                        "other channels can be drawn as controls; name some, as in "
                        f"{patch.kind}@{layers[0].name}:7,8")
    assert reference is not None
    [layer] = layers
    if isinstance(patch, SetTo):
        return _set_channels(policy, patch, layer, number, seeds, reference)
    sets, _, near = matched_sets(channel_sizes(policy, patch, layer, reference),
                                        patch.channels, number, seeds)
    return [(dataclasses.replace(patch, channels=channels), {"channels": list(channels)},
             bool(matched)) for channels, matched in zip(sets, near)]


def _set_channels(policy: Policy, patch: SetTo, layer: Layer, number: int,
                  seeds: np.random.SeedSequence, reference: ReferenceSet) -> Drawn:
    """Draw ``number`` controls that set other channels.

    The value is rescaled to the standard deviations of these channels in the reference set.

    Raises:
        UserError: if the value differs between frames, or a channel of the patch never varies.
    """
    if callable(patch.value) or isinstance(patch.value, Mapping):
        raise UserError(f"the value that is set at {patch.layer} differs from frame to frame, "
                        f"so it has no controls of the kind '{CHANNELS}'; use '{CELLS}'")
    std = reference.channel_stds(policy, layer).flatten().cpu().numpy()  # (C,)
    own = list(patch.channels or ())
    if not std[own].all():
        raise UserError(f"a channel of {patch.layer} that is set never varies in the reference "
                        "set, so its value cannot be rescaled for other channels; use controls of "
                        f"the kind '{CELLS}'")
    value = np.broadcast_to(np.array(torch.as_tensor(patch.value).cpu(), np.float32), layer.shape)
    remaining = np.setdiff1d(np.flatnonzero(std), own)
    drawn = []
    for channels in _distinct(remaining, len(own), number, seeds, f"channels of {patch.layer}"):
        values = np.zeros(layer.shape, np.float32)
        ratio = (std[channels] / std[own]).reshape(-1, *[1] * (value.ndim - 1))
        values[channels] = value[own] * ratio
        drawn.append((dataclasses.replace(patch, channels=tuple(map(int, channels)), value=values),
                      {"channels": channels.tolist()}, True))
    return drawn


def _cells(policy: Policy, patch: Patch, number: int, seeds: np.random.SeedSequence) -> Drawn:
    """Draw ``number`` controls of a patch at other cells of the same layer.

    Raises:
        UserError: if the patch names no cells.
    """
    if patch.cells is None:
        raise UserError(f"{patch.kind} at {patch.layer} names no cells, so it has no controls of "
                        f"the kind '{CELLS}'; omit the kind to use the default of {patch.kind}")
    layer = layers_named(policy, patch.layer)[0]
    pool = np.array([cell for cell in np.ndindex(*layer.shape[1:]) if cell not in patch.cells])
    drawn = []
    for chosen in _distinct(np.arange(len(pool)), len(patch.cells), number, seeds,
                            f"cells of {patch.layer}"):
        cells = tuple(map(tuple, pool[chosen].tolist()))
        control = dataclasses.replace(patch, cells=cells)
        if isinstance(control, SetTo):
            control = dataclasses.replace(
                control, value=_moved(control.value, layer, patch.cells, cells))
        drawn.append((control, {"cells": pool[chosen].tolist()}, True))
    return drawn


def _moved(value: Any, layer: Layer, cells: Sequence[tuple[int, int]],
           new_cells: Sequence[tuple[int, int]]) -> Any:
    """Return values of a patch with those of some cells copied to as many other cells.

    Args:
        value: values as in ``SetTo``; numbers and functions that return numbers stay as they are.
        layer: layer of the patch.
        cells, new_cells: cells to copy from and to, as (row, column).
    """
    if callable(value):
        return lambda rows: _moved(value(rows), layer, cells, new_cells)
    if isinstance(value, Mapping):
        value = value[layer.name]
    array = np.array(torch.as_tensor(value, dtype=torch.float32).cpu())
    if not array.ndim:
        return value
    array = np.broadcast_to(array, (*array.shape[:-3], *layer.shape))
    result = array.copy()
    result[..., *np.transpose(new_cells)] = array[..., *np.transpose(cells)]
    return result


def _distinct(pool: np.ndarray, size: int, number: int, seeds: np.random.SeedSequence,
              what: str) -> np.ndarray:
    """Draw ``number`` distinct random sets, each of ``size`` entries of a pool: (number, size).

    Args:
        what: name of the entries, for the message.

    Raises:
        UserError: if there are fewer than ``number`` sets.
    """
    sets = _sets(pool, size, np.random.default_rng(seeds))
    if len(sets) < number:
        raise UserError(f"{number} controls need as many other sets of {size} {what}, but there "
                        f"are {len(sets)}; patch fewer of them, or use fewer --num_controls")
    return sets[:number]


def _sets(pool: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Return distinct sets of ``size`` entries of a pool, in random order.

    Returns:
        All sets, or a random sample if there are too many (number of sets, size). The entries of a
        set are ascending.
    """
    if math.comb(len(pool), size) <= _CANDIDATES:
        return rng.permutation(np.array(list(itertools.combinations(pool, size)), dtype=np.int64
                                        ).reshape(-1, size))
    drawn = np.sort(rng.permuted(np.tile(pool, (_CANDIDATES, 1)), axis=1)[:, :size], axis=1)
    return drawn[np.sort(np.unique(drawn, axis=0, return_index=True)[1])]
