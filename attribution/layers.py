"""Layers that an agent's outputs can be attributed to.

Attributions to a layer sum to the difference between an output and its baseline if the layer is a
*bottleneck*: every path from this step's frame to the two heads passes through it. Whether a layer
is a bottleneck is tested on the traced network.

Letters in shape comments: C channels and H x W cells of a layer; a layer of units counts as a map
of one cell.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import nn

from agents.layers import HEADS, STATE, Layer, all_layers, find_layer
from agents.networks import ClearEmbedder, ImpalaEmbedder, Policy
from common.devices import Compute
from common.errors import UserError
from interventions.partial_forward import PartialForward

# Short names of layers per embedder; in other embedders, each ReLU with a spatial map has one.
_SHORT_NAMES = {
    ImpalaEmbedder: {"block1": "embedder.block1.res2.resadd",
                     "block2": "embedder.block2.res2.resadd", "block3": "embedder.relu3"},
    ClearEmbedder: {name: f"embedder.relu{name}" for name in ("1a", "2a", "2b", "3a", "4a")}}


@dataclasses.dataclass(frozen=True)
class Bottleneck:
    """A layer to which outputs are attributed.

    Attributes:
        name: short name for files and figures, such as "block3"; the layer's path if it has no
            short name.
        layer: the layer.
        bypassed: whether a part of the network bypasses the layer. Attributions ignore this part.
    """

    name: str
    layer: Layer
    bypassed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the activations of one frame: (C, H, W), or (C, 1, 1) for units."""
        return (*self.layer.shape, 1, 1) if len(self.layer.shape) == 1 else self.layer.shape


def short_names(policy: Policy) -> dict[str, str]:
    """Return the default layers for attribution, in order of computation, as a dict from a layer's
    short name to the path of its module."""
    if type(policy.embedder) in _SHORT_NAMES:
        return dict(_SHORT_NAMES[type(policy.embedder)])
    return {layer.name.rpartition(".")[2]: layer.name for layer in all_layers(policy)
            if layer.is_map and isinstance(policy.get_submodule(layer.name), nn.ReLU)}


def find_bottlenecks(policy: Policy, names: Sequence[str] | None = None,
                     allow_bypassed: bool = False) -> tuple[Bottleneck, ...]:
    """Find layers by name and test that they are bottlenecks.

    Args:
        policy: the agent.
        names: short names or paths, as in ``agents.layers``; None for all layers with short names.
        allow_bypassed: also accept layers that a part of the network bypasses.

    Returns:
        The layers, without repetitions.

    Raises:
        UserError: if a layer does not exist, is a head, or is bypassed without
            ``allow_bypassed``; the message suggests other names.
    """
    short = short_names(policy)
    by_path = {path: name for name, path in short.items()}
    bottlenecks, compute = [], Compute(policy.device, bfloat16=False)
    for name in dict.fromkeys(short if names is None else names):
        layer = find_layer(policy, short.get(name, name))
        if layer.name in HEADS:
            raise UserError(f"'{name}' is a head, on which only some outputs depend; the last "
                            f"layer on which all outputs depend is '{STATE}'")
        bypassed = PartialForward(policy, compute, layer.name).bypassed
        if bypassed and not allow_bypassed:
            raise UserError(f"a skip connection bypasses the layer '{name}', so attributions to it "
                            "do not sum to the change of an output; choose another, such as "
                            f"{', '.join(short)}, or give --allow_partial")
        bottlenecks.append(Bottleneck(by_path.get(layer.name, layer.name), layer, bypassed))
    return tuple(dict.fromkeys(bottlenecks))
