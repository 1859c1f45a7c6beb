"""Merging of edits into the weights of the module that reads the edited layer, and random edits of
the same size as controls.

A control permutes the M entries of each of the edit's directions, with the same permutation for all
directions. The strength of a control is chosen such that control and edit cause changes of the
layer with the same Euclidean norm, averaged over frames.

Letters in shape comments: N frames, C channels of the layer, M entries of a direction (C, or 2 C if
positive and negative activations have separate entries), F directions, R rank of an edit, O output
channels of a module, P cells.
"""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import torch
from torch import Tensor, nn

from agents.edits import Edit
from agents.layers import all_layers, find_layer
from agents.networks import L2Pool, Policy
from common.errors import UserError
from interventions.controls import NEAR

_NUM_DRAWN = 500  # number of tried permutations of the channels


def pool_behind(policy: Policy, layer: str) -> str:
    """Return the path of the L2 pool that reads a layer.

    The published edits project directions out of the output of this pool, because they change the
    weights of the convolution after the pool.

    Raises:
        UserError: if the next module of the embedder is not an L2 pool.
    """
    name, module = _module_behind(policy, layer)
    if not isinstance(module, L2Pool):
        raise UserError(f"{layer} is read by {name}, which is not an L2 pool; leave --behind_pool "
                        "out")
    return name


def in_weights(policy: Policy, edit: Edit) -> Policy:
    """Return a copy of an agent with an edit merged into its weights.

    The module that reads the layer has, for each of its outputs and each cell, a weight vector over
    the layer's channels. Each weight vector is multiplied by I - s P, with strength s and the
    projection P onto the edit's directions.

    Raises:
        UserError: if the layer is not read by a single linear module, or the edit depends on the
            sign of activations.
    """
    channels = find_layer(policy, edit.layer).shape[0]
    name, module = _module_behind(policy, edit.layer)
    if not isinstance(module, nn.Conv2d | nn.Linear):
        raise UserError(f"{edit.layer} is read by {name}, which is not a linear map, so weights "
                        "cannot express the edit; leave --in_weights out, or give --behind_pool if "
                        "it is an L2 pool")
    if edit.signed(channels):
        raise UserError(f"the features of {edit.layer} split activations by sign, which is not "
                        "linear, so weights cannot express the edit; leave --in_weights out")
    edited = copy.deepcopy(policy)
    weight = edited.get_parameter(f"{name}.weight")
    basis = edit.basis.to(weight)  # (C, R)
    with torch.no_grad():
        by_channel = weight.view(len(weight), channels, -1)  # (O, C, P)
        along = torch.einsum("ocp,cr->orp", by_channel, basis)
        by_channel -= edit.strength * torch.einsum("orp,cr->ocp", along, basis)
    return edited


def _module_behind(policy: Policy, layer: str) -> tuple[str, nn.Module]:
    """Return the name of the module of the embedder that reads a layer, and the module.

    If this module is a convolution or a linear module, no other module reads the layer, because a
    layer that a skip connection also reads is followed by a ReLU or a sum.
    """
    names = [candidate.name for candidate in all_layers(policy)
             if candidate.name.startswith("embedder.")]
    for name in names[names.index(layer) + 1:] if layer in names else []:
        module = policy.get_submodule(name)
        if not isinstance(module, nn.Flatten):  # flattening changes no values
            return name, module
    raise UserError(f"no single linear map of the embedder reads {layer}, so features cannot be "
                    "removed by changing weights; leave --in_weights out")


@dataclasses.dataclass(frozen=True)
class RandomEdit:
    """Random control of an edit: the edit's directions with permuted entries, and a strength at
    which it causes a change of the same size.

    Attributes:
        edit: the control, after rescaling.
        relative: size of the control's change before rescaling, divided by the size of the original
            edit's change. The strength of ``edit`` is the original strength divided by this
            ratio.
    """

    edit: Edit
    relative: float

    @property
    def near(self) -> bool:
        """Whether the size of the control's change before rescaling differs by at most a quarter
        from the size of the original edit's change."""
        return abs(self.relative - 1) <= NEAR


class ChangeSizes:
    """Computes the sizes of the changes that edits of a layer cause in given frames.

    Args:
        activations: activations of the layer (N, C, …).
        signed: whether the edits' directions have separate entries for positive and negative
            activations.
    """

    def __init__(self, activations: Tensor, signed: bool):
        self.channels = activations.shape[1]
        cells = activations.flatten(2).double() if activations.ndim > 2 else (
            activations.double().unsqueeze(2))  # (N, C, P)
        if signed:
            cells = torch.cat([cells.relu(), (-cells).relu()], dim=1)
        self._products = cells @ cells.mT  # (N, M, M)

    def of(self, edit: Edit) -> float:
        """Compute the Euclidean norm, over channels and cells, of the change that an edit causes,
        averaged over frames."""
        basis, back = edit.basis.double(), edit.back(self.channels).double()
        along = basis.T @ self._products @ basis  # (N, R, R)
        squares = (along * (back.T @ back)).sum(dim=(1, 2)).clamp(min=0)
        return abs(edit.strength) * float(squares.sqrt().mean())


def random_edits(edit: Edit, activations: Tensor, number: int, seed: int) -> list[RandomEdit]:
    """Draw random edits as controls of an edit.

    Controls whose change, before rescaling, differs in size by at most a quarter from that of the
    edit come first, in random order; then come all others, in ascending order of
    ``|log(relative)|``.

    Args:
        edit: the edit.
        activations: activations of its layer in some frames (N, C, …), without the edit.
        number: number of controls; with a larger number, further controls are appended to the same
            ones.
        seed: seed of the random permutations.

    Returns:
        ``number`` controls.

    Raises:
        UserError: if the edit changes nothing, or fewer than ``number`` permutations change
            anything.
    """
    sizes = ChangeSizes(activations, edit.signed(activations.shape[1]))
    size = sizes.of(edit)
    if not size:
        raise UserError(f"the edit of {edit.layer} changes nothing in {len(activations)} frames, "
                        "so no control can match its size; edit other features")
    rng = np.random.default_rng(seed)
    controls, seen = [], {edit.directions.numpy().tobytes()}
    for _ in range(_NUM_DRAWN):
        directions = edit.directions[:, torch.from_numpy(rng.permutation(
            edit.directions.shape[1]))]
        key = directions.numpy().tobytes()
        if key in seen:
            continue
        seen.add(key)
        control = dataclasses.replace(edit, directions=directions)
        relative = sizes.of(control) / size
        if relative:
            controls.append(RandomEdit(dataclasses.replace(
                control, strength=edit.strength / relative), relative))
    if len(controls) < number:
        raise UserError(f"{number} controls cannot be drawn for the edit of {edit.layer}: only "
                        f"{len(controls)} permutations of its channels change the layer; lower "
                        "--num_controls")
    controls.sort(key=lambda control: 0.0 if control.near else abs(np.log(control.relative)))
    return controls[:number]
