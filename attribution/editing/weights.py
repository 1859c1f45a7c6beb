"""Edits put into the weights of the map that reads a layer, where that is the same.

Letters in shape comments: C channels of the layer, O those of the map's output, P cells that a
channel has in the map's input.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from agents.edits import Edit
from agents.layers import all_layers, find_layer
from agents.networks import L2Pool, Policy
from common.errors import UserError

_SKIPPED = nn.Flatten  # which changes no number


def pool_behind(policy: Policy, layer: str) -> str:
    """The L2 pool that reads a layer: the published edits take directions out of its output,
    because they change the weights of the convolution behind it.

    Raises:
        UserError: if another module does.
    """
    name, module = _behind(policy, layer)
    if not isinstance(module, L2Pool):
        raise UserError(f"there is no L2 pool behind {layer}, but {name}; leave --behind_pool out")
    return name


def in_weights(policy: Policy, edit: Edit) -> Policy:
    """A copy of an agent whose weights do what an edit does.

    The map that alone reads the layer has, for each of its outputs and for each cell, a vector over
    the layer's channels: it is multiplied by I - s P.

    Raises:
        UserError: if no such map reads the layer, or the edit is none of channels.
    """
    channels = find_layer(policy, edit.layer).shape[0]
    name, module = _behind(policy, edit.layer)
    if not isinstance(module, nn.Conv2d | nn.Linear):
        pool = "; --behind_pool takes the features out behind that pool" if isinstance(
            module, L2Pool) else ""
        raise UserError(f"{edit.layer} is read by {name}, which is no linear map alone, so that "
                        f"the edit is none of weights{pool}; leave --in_weights out")
    if edit.signed(channels):
        raise UserError(f"the features of {edit.layer} are of activations of both signs, which "
                        "are no linear function of them, so that the edit is none of weights; "
                        "leave --in_weights out")
    edited = copy.deepcopy(policy)
    weight = edited.get_submodule(name).weight
    basis = edit.basis.to(weight)  # (C, R)
    with torch.no_grad():
        by_channel = weight.view(len(weight), channels, -1)  # (O, C, P)
        along = torch.einsum("ocp,cr->orp", by_channel, basis)
        by_channel -= edit.strength * torch.einsum("orp,cr->ocp", along, basis)
    return edited


def _behind(policy: Policy, layer: str) -> tuple[str, nn.Module]:
    """The next module of the embedder that reads a layer. Only a ReLU and a sum follow on outputs
    that residual units read as well, so a convolution or a linear map is the only reader."""
    names = [each.name for each in all_layers(policy) if each.name.startswith("embedder.")]
    behind = names[names.index(layer) + 1:] if layer in names else []
    for name in behind:
        module = policy.get_submodule(name)
        if not isinstance(module, _SKIPPED):
            return name, module
    raise UserError(f"{layer} is not read by one map of the embedder alone, so that an edit of it "
                    "is none of weights; leave --in_weights out")
