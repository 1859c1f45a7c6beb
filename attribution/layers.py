"""Layers that an agent's outputs can be attributed to.

Attributions to a layer add up to an output if the layer is a *bottleneck*: every path from this
step's frame to both heads passes through it. Whether a layer is one is tested on the network
itself: with the layer's output held fixed, the outputs must not change with the frame.

Letters in shape comments: B frames, C channels and H W cells of a layer; a layer of units counts as
a map of one cell.
"""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import torch
from torch import nn

from agents.layers import HEADS, STATE, Layer, all_layers, find_layer
from agents.networks import ClearEmbedder, ImpalaEmbedder, Policy
from common.errors import UserError, nearest
from common.game_constants import FRAME_SIZE

# Short names of layers per embedder; in other embedders, each output of a ReLU has one.
_SHORT_NAMES = {
    ImpalaEmbedder: {"block1": "embedder.block1.res2.resadd",
                     "block2": "embedder.block2.res2.resadd", "block3": "embedder.relu3"},
    ClearEmbedder: {name: f"embedder.relu{name}" for name in ("1a", "2a", "2b", "3a", "4a")}}
_NUM_FRAMES = 2  # frames per batch; a layer is tested with two batches


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

    def centres(self) -> np.ndarray:
        """Return the centre of each cell's receptive field in pixels, float64 (H,), for both axes.

        Position 0 is the middle of the first pixel.

        Raises:
            UserError: if the layer consists of units, which have no position in the frame.
        """
        if self.layer.stride is None or self.layer.first_pixel is None:
            raise UserError(f"{self.name} has no cells: it is {self.shape[0]} units")
        return self.layer.first_pixel + self.layer.stride * np.arange(self.shape[1], dtype=float)


def short_names(policy: Policy) -> dict[str, str]:
    """Return the default layers for attribution: their paths by short name, in order of
    computation."""
    if type(policy.embedder) in _SHORT_NAMES:
        return dict(_SHORT_NAMES[type(policy.embedder)])
    paths = [layer.name for layer in all_layers(policy) if layer.is_map
             and isinstance(policy.get_submodule(layer.name), nn.ReLU)]
    return {path.rpartition(".")[2]: path for path in paths}


def find_bottlenecks(policy: Policy, names: list[str] | None = None,
                     allow_bypassed: bool = False) -> tuple[Bottleneck, ...]:
    """Find layers by name and test that they are bottlenecks.

    Args:
        policy: the agent.
        names: short names or paths, as in ``agents.layers``; None for all layers with short names.
        allow_bypassed: also accept layers that a part of the network bypasses.

    Returns:
        The layers, without repetitions.

    Raises:
        UserError: if a layer does not exist, is a head, or is bypassed; the message suggests the
            nearest names or bottlenecks.
    """
    short = short_names(policy)
    by_path = {path: name for name, path in short.items()}
    bottlenecks = []
    for name in dict.fromkeys(short if names is None else names):
        layer = _find_layer(policy, name, short)
        if layer.name in HEADS:
            raise UserError(f"'{name}' is a head, which only some outputs are read off; the last "
                            f"layer that all of them are read off is '{STATE}'")
        bypassed = not is_bottleneck(policy, layer)
        if bypassed and not allow_bypassed:
            raise UserError(
                f"a skip connection bypasses the layer '{name}', so attributions to it do not sum "
                "to an output; the nearest layers that are not bypassed are "
                f"{' and '.join(_nearest_bottlenecks(policy, layer))}; --allow_partial attributes "
                "to it nevertheless")
        bottlenecks.append(Bottleneck(by_path.get(layer.name, layer.name), layer, bypassed))
    return tuple(dict.fromkeys(bottlenecks))


def _find_layer(policy: Policy, name: str, short: dict[str, str]) -> Layer:
    try:
        return find_layer(policy, short.get(name, name))
    except UserError:
        if "." in name or name in ("gru", "gru.gru"):
            raise
        paths = [layer.name for layer in all_layers(policy)]
        raise UserError(f"the agent has no layer '{name}'{nearest(name, (*short, *paths))}"
                        ) from None


def is_bottleneck(policy: Policy, layer: Layer) -> bool:
    """Return whether every path from this step's frame to the heads passes through a layer.

    The test runs random frames in float64.
    """
    policy = copy.deepcopy(policy).to("cpu", torch.float64).eval()
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(2 * _NUM_FRAMES, 3, FRAME_SIZE, FRAME_SIZE, generator=generator,
                        dtype=torch.float64)
    states = torch.rand(_NUM_FRAMES, policy.hidden_state_size, generator=generator,
                        dtype=torch.float64)
    kept = []
    module = policy.get_submodule(layer.name)
    with torch.no_grad():
        hook = module.register_forward_hook(lambda _, inputs, output: kept.append(output))
        run = policy.step(policy.embed(images[:_NUM_FRAMES]), states)
        hook.remove()
        module.register_forward_hook(lambda _, inputs, output: kept[0])
        other = policy.step(policy.embed(images[_NUM_FRAMES:]), states)
    return (torch.allclose(run.logits, other.logits, rtol=1e-9, atol=1e-12)
            and torch.allclose(run.values, other.values, rtol=1e-9, atol=1e-12))


def _nearest_bottlenecks(policy: Policy, layer: Layer) -> list[str]:
    """Return the paths of the last bottleneck before a layer and the first one after it."""
    layers = all_layers(policy)
    index = layers.index(layer)
    nearest_layers = [next((other.name for other in side if is_bottleneck(policy, other)), None)
                      for side in (layers[:index][::-1], layers[index + 1:])]
    return [name for name in nearest_layers if name]
