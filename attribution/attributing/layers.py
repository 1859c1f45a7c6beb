"""Layers that an agent's outputs can be attributed to.

A *cut* is a layer through which every path from this step's frame to both heads goes, so that
attributions to it add up to an output. Whether a layer is one is found out from the network itself:
with the layer's output held fixed, the outputs must not change when the frame does.

Letters in shape comments: B frames, C channels and H W cells of a layer; units are a map of one
cell.
"""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import torch
from torch import Tensor, nn

from agents.layers import HEADS, STATE, Layer, all_layers, find_layer
from agents.networks import ClearEmbedder, ImpalaEmbedder, Policy, PolicyOutput
from common.errors import UserError, nearest
from common.game_constants import FRAME_SIZE

# Short names of layers by the kind of embedder; of other kinds, each map behind a ReLU is one.
_SHORT = {ImpalaEmbedder: {"block1": "embedder.block1.res2.resadd",
                           "block2": "embedder.block2.res2.resadd", "block3": "embedder.relu3"},
          ClearEmbedder: {name: f"embedder.relu{name}" for name in ("1a", "2a", "2b", "3a", "4a")}}
_NUM_FRAMES = 2  # that a cut is tried on


@dataclasses.dataclass(frozen=True)
class Cut:
    """A layer to attribute outputs to.

    Attributes:
        name: short one, for files and figures: "block3"; the path of a layer that has none.
        layer: the layer.
        partial: whether a part of the network goes around it, so that attributions leave that
            part out.
    """

    name: str
    layer: Layer
    partial: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W); units are (C, 1, 1)."""
        return (*self.layer.shape, 1, 1) if len(self.layer.shape) == 1 else self.layer.shape

    def centres(self) -> np.ndarray:
        """The pixel on which the field of view of each cell is centred: float64 (H,), the same
        along both axes, counted from the middle of the first pixel.

        Raises:
            UserError: if the layer is units, which have no place in the picture.
        """
        if not self.layer.is_map:
            raise UserError(f"{self.name} has no cells: it is {self.shape[0]} units")
        return self.layer.first_pixel + self.layer.stride * np.arange(self.shape[1], dtype=float)


def short_names(policy: Policy) -> dict[str, str]:
    """Paths of the layers that are attributed to by default, by their short names, in order of
    computation."""
    if type(policy.embedder) in _SHORT:
        return dict(_SHORT[type(policy.embedder)])
    paths = [layer.name for layer in all_layers(policy) if layer.is_map
             and isinstance(policy.get_submodule(layer.name), nn.ReLU)]
    return {path.rpartition(".")[2]: path for path in paths}


def find_cuts(policy: Policy, names: list[str] | None = None,
              allow_partial: bool = False) -> tuple[Cut, ...]:
    """The layers that names ask for, each once.

    Args:
        names: short ones or paths, as in ``agents.layers``; None for all with short names.
        allow_partial: whether a layer may be none that all information goes through.

    Raises:
        UserError: if there is no such layer, or it is no cut and must be one; the nearest are
            named.
    """
    short = short_names(policy)
    by_path = {path: name for name, path in short.items()}
    found = []
    for name in dict.fromkeys(short if names is None else names):
        layer = _layer(policy, name, short)
        if layer.name in HEADS:
            raise UserError(f"'{name}' is a head, which only some outputs are read off; the last "
                            f"layer that all of them are read off is '{STATE}'")
        partial = not is_cut(policy, layer)
        if partial and not allow_partial:
            raise UserError(
                f"a part of the network goes around the layer '{name}', so attributions to it do "
                f"not add up to an output; the nearest layers that everything goes through are "
                f"{' and '.join(_nearest_cuts(policy, layer))}; --allow_partial attributes to it "
                "all the same")
        found.append(Cut(by_path.get(layer.name, layer.name), layer, partial))
    return tuple(dict.fromkeys(found))


def _layer(policy: Policy, name: str, short: dict[str, str]) -> Layer:
    try:
        return find_layer(policy, short.get(name, name))
    except UserError:
        paths = [layer.name for layer in all_layers(policy)]
        if "." in name or name in ("gru", "gru.gru"):
            raise
        raise UserError(f"the agent has no layer '{name}'{nearest(name, (*short, *paths))}"
                        ) from None


def is_cut(policy: Policy, layer: Layer) -> bool:
    """Whether all that this step's frame says to the heads goes through a layer: on random frames,
    in float64."""
    policy = copy.deepcopy(policy).to("cpu", torch.float64).eval()
    generator = torch.Generator().manual_seed(0)
    pictures = torch.rand(2 * _NUM_FRAMES, 3, FRAME_SIZE, FRAME_SIZE, generator=generator,
                          dtype=torch.float64)
    hidden = torch.rand(_NUM_FRAMES, policy.hidden_state_size, generator=generator,
                        dtype=torch.float64)
    kept = []
    module = policy.get_submodule(layer.name)
    with torch.no_grad():
        hook = module.register_forward_hook(lambda _, inputs, output: kept.append(output))
        outputs = _step(policy, pictures[:_NUM_FRAMES], hidden)
        hook.remove()
        module.register_forward_hook(lambda _, inputs, output: kept[0])
        others = _step(policy, pictures[_NUM_FRAMES:], hidden)
    return (torch.allclose(outputs.logits, others.logits, rtol=1e-9, atol=1e-12)
            and torch.allclose(outputs.values, others.values, rtol=1e-9, atol=1e-12))


def _step(policy: Policy, images: Tensor, hidden: Tensor) -> PolicyOutput:
    return policy.step(policy.embed(images), hidden)


def _nearest_cuts(policy: Policy, layer: Layer) -> list[str]:
    """Paths of the last cut before a layer and the first one behind it."""
    layers = all_layers(policy)
    place = layers.index(layer)
    found = [next((other.name for other in some if is_cut(policy, other)), None)
             for some in (layers[:place][::-1], layers[place + 1:])]
    return [name for name in found if name]
