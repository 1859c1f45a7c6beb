"""Layers of an agent: their names, shapes, and where their cells lie in the picture.

A layer is a module of the policy whose output is one tensor, and its name is the path to it, such
as ``embedder.block2.res1.resadd``. An output that has several names (``embedder.block2.res1`` is
its last addition) goes by the innermost one.

Letters in shapes: C channels and H W cells of a map, U units.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Literal

from torch import nn

from agents.networks import Memory, Policy
from common.errors import UserError, nearest
from common.game_constants import FRAME_SIZE

CellMapping = Literal["published", "centred"]
PUBLISHED_SUFFIX = "_out"
ALL = "all"  # as a layer's name: every output between picture and heads
HEADS = ("fc_policy", "fc_value")
STATE = "hidden_state"


@dataclasses.dataclass(frozen=True)
class Layer:
    """One output of the policy.

    Attributes:
        name: path of the innermost module that gives it.
        shape: of the output for one picture: (C, H, W) of a map, (U,) of units.
        stride: pixels from a cell to the next; None for units.
        first_pixel: on which pixel the field of view of a map's cell 0 is centred, by kernels,
            strides and paddings; None for units.
    """

    name: str
    shape: tuple[int, ...]
    stride: int | None = None
    first_pixel: float | None = None

    @property
    def is_map(self) -> bool:
        return self.stride is not None

    @property
    def num_cells(self) -> int:
        """Cells of a channel; 1 of units."""
        return math.prod(self.shape[1:])

    def cell(self, row: int, column: int, world_dim: int,
             mapping: CellMapping = "published") -> tuple[int, int]:
        """The cell that shows a square of a world of ``world_dim`` squares a side.

        Squares of a finer world than the map share cells, and squares beyond the last cell have
        the last one.

        Args:
            row: of the square, from the bottom.
            column: from the left.
            mapping: "published" takes cell i to look at the pixels from s i to s (i + 1) - 1, s
                its stride; "centred" takes the cell whose field of view has its centre nearest to
                that of the square.

        Returns:
            Row from the top and column from the left.

        Raises:
            UserError: if the layer has no cells, or the world has no such square.
        """
        if not self.is_map:
            raise UserError(f"{self.name} has no cells: it is {self.shape[0]} units")
        if not (0 <= row < world_dim and 0 <= column < world_dim):
            raise UserError(f"there is no square {row}.{column}: rows and columns go from 0 to "
                            f"{world_dim - 1}")
        square = FRAME_SIZE / world_dim  # pixels a side
        begins = (world_dim - 1 - row + 0.5) * square, (column + 0.5) * square
        if mapping == "published":
            cells = (math.floor(pixel / self.stride) for pixel in begins)
        else:  # the middle of a square lies half a pixel before the number of the pixel there
            cells = (round((pixel - 0.5 - self.first_pixel) / self.stride) for pixel in begins)
        return tuple(min(max(cell, 0), size - 1) for cell, size in zip(cells, self.shape[1:]))


def all_layers(policy: Policy) -> tuple[Layer, ...]:
    """Every layer of an agent in order of computation, one entry an output."""
    layers = []
    shape, stride, first_pixel = (3, FRAME_SIZE, FRAME_SIZE), 1, 0.0
    for name, module in policy.named_modules():
        match module:
            case nn.Conv2d() | nn.MaxPool2d() | nn.AvgPool2d():
                kernel, step, padding = (value[0] if isinstance(value, tuple) else value for value
                                         in (module.kernel_size, module.stride, module.padding))
                first_pixel += ((kernel - 1) / 2 - padding) * stride
                stride *= step
                sizes = ((size + 2 * padding - kernel) // step + 1 for size in shape[1:])
                shape = (getattr(module, "out_channels", shape[0]), *sizes)
            case nn.Flatten():
                shape, stride, first_pixel = (math.prod(shape),), None, None
            case nn.Linear():
                shape = (module.out_features,)
            case Memory():
                shape = (policy.hidden_state_size,)
        if isinstance(module, Memory) or not (any(module.children()) or isinstance(module, nn.GRU)):
            layers.append(Layer(name, shape, stride, first_pixel))
    return tuple(layers)


def find_layer(policy: Policy, name: str) -> Layer:
    """The layer of a name: its own, that of a module around it, or the published one with
    ``_out`` behind.

    Raises:
        UserError: if there is none, naming the nearest one.
    """
    layers = all_layers(policy)
    path = name.removesuffix(PUBLISHED_SUFFIX)
    found = [layer for layer in layers if layer.name == path
             or (path and layer.name.startswith(f"{path}."))]
    if found:
        return found[-1]
    if re.fullmatch(r"gru(\.gru)?", path):
        if policy.recurrent:
            raise UserError("'gru.gru' gives several tensors and is no layer; the state that "
                            "leaves the GRU is the layer 'gru'")
        raise UserError(f"the agent has no GRU, so it has no layer '{path}'; the vector that its "
                        f"heads read is the layer '{STATE}'")
    raise UserError(f"the agent has no layer '{name}'"
                    f"{nearest(name, [layer.name for layer in layers])}")


def layers_named(policy: Policy, name: str) -> tuple[Layer, ...]:
    """The layers that a patch means: one, or for ``all`` each but the heads and ``hidden_state``,
    which is the output of the layer before it.

    Raises:
        UserError: see ``find_layer``.
    """
    if name == ALL:
        return tuple(layer for layer in all_layers(policy)
                     if layer.name not in (*HEADS, STATE))
    return (find_layer(policy, name),)
