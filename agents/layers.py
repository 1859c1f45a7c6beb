"""Layers of an agent: their names and shapes, and the positions of their cells in the frame.

A layer is a module of the policy whose output is one tensor, and its name is the module's path,
such as ``embedder.block2.res1.resadd``. If nested modules share an output (``embedder.block2.res1``
returns the output of its ``resadd``), the name is the path of the innermost module.

Letters in shape comments: U units.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from torch import nn

from agents.networks import Memory, Policy
from common.errors import UserError, nearest
from common.game_constants import FRAME_SIZE

CellMapping = Literal["published", "centred"]
PUBLISHED_SUFFIX = "_out"
ALL = "all"  # layer name that stands for every output between frame and heads
HEADS = ("fc_policy", "fc_value")
STATE = "hidden_state"
# Layers of a recurrent agent whose output enters the next step.
RECURRENT = ("gru", "lstm", "core", STATE)


@dataclasses.dataclass(frozen=True)
class Layer:
    """Named output of a policy.

    Attributes:
        name: path of the innermost module.
        shape: shape of the output for one frame: (C, H, W) for a map, (U,) for units.
        stride: pixels between neighbouring cells; None for units.
        first_pixel: centre of the receptive field of cell 0, where pixel i is at i, computed from
            kernel sizes, strides and paddings; None for units.
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
        """Number of cells per channel; 1 for units."""
        return math.prod(self.shape[1:])

    def cell(self, row: int, column: int, world_dim: int,
             mapping: CellMapping = "published") -> tuple[int, int]:
        """Return the cell that shows a square of the level's grid.

        If squares are smaller than cells, several squares share a cell. Squares beyond the
        outermost cells map to the nearest cell.

        Args:
            row: row of the square, from the bottom.
            column: column of the square, from the left.
            world_dim: number of squares per side of the grid.
            mapping: "published" assumes that cell i shows the pixels s i to s (i + 1) - 1, with
                stride s; "centred" selects the cell whose receptive field has its centre nearest
                to the centre of the square.

        Returns:
            Row of the cell from the top, and its column from the left.

        Raises:
            UserError: if the layer is not a map, or the square is outside the grid.
        """
        if self.stride is None or self.first_pixel is None:
            raise UserError(f"{self.name} has no cells: it is {self.shape[0]} units")
        if not (0 <= row < world_dim and 0 <= column < world_dim):
            raise UserError(f"there is no square {row}.{column}: rows and columns go from 0 to "
                            f"{world_dim - 1}")
        square = FRAME_SIZE / world_dim  # pixels per side
        cells = []
        for centre, size in zip(((world_dim - 1 - row + 0.5) * square, (column + 0.5) * square),
                                self.shape[1:]):
            if mapping == "published":
                cell = math.floor(centre / self.stride)
            else:  # pixel i has its centre at i + 0.5
                cell = round((centre - 0.5 - self.first_pixel) / self.stride)
            cells.append(min(max(cell, 0), size - 1))
        return cells[0], cells[1]


def all_layers(policy: Policy) -> tuple[Layer, ...]:
    """Return the layers of an agent in order of computation, one per output."""
    if policy.known_layers is not None:
        return policy.known_layers
    layers = []
    shape: tuple[int, ...] = (3, FRAME_SIZE, FRAME_SIZE)
    stride, first_pixel = 1, 0.0
    for name, module in policy.named_modules():
        match module:
            case nn.Conv2d() | nn.MaxPool2d() | nn.AvgPool2d():
                kernel, step, padding = (
                    int(value[0] if isinstance(value, tuple) else value)
                    for value in (module.kernel_size, module.stride, module.padding))
                first_pixel += ((kernel - 1) / 2 - padding) * stride
                stride *= step
                sizes = ((size + 2 * padding - kernel) // step + 1 for size in shape[1:])
                shape = (getattr(module, "out_channels", shape[0]), *sizes)
            case nn.Flatten():
                shape = (math.prod(shape),)
            case nn.Linear():
                shape = (module.out_features,)
            case Memory():
                shape = (policy.hidden_state_size,)
        in_memory = isinstance(module, nn.GRU | nn.LSTMCell)
        if isinstance(module, Memory) or not (any(module.children()) or in_memory):
            position = (stride, first_pixel) if len(shape) == 3 else (None, None)
            layers.append(Layer(name, shape, *position))
    return tuple(layers)


def find_layer(policy: Policy, name: str) -> Layer:
    """Find a layer by its name.

    The name of an enclosing module selects its last layer. The published names, which have the
    suffix ``_out``, are accepted, too.

    Raises:
        UserError: if there is no such layer; the message suggests a name or lists all.
    """
    layers = all_layers(policy)
    path = name.removesuffix(PUBLISHED_SUFFIX)
    matches = [layer for layer in layers if layer.name == path
               or (path and layer.name.startswith(f"{path}."))]
    if matches:
        return matches[-1]
    raise UserError(f"the agent has no layer '{name}'"
                    f"{nearest(name, [layer.name for layer in layers])}")


def layers_named(policy: Policy, name: str) -> tuple[Layer, ...]:
    """Return the layers that a name selects: one layer, or several for the name ``all``.

    ``all`` selects every layer except the heads and ``hidden_state``, whose output equals that of
    the preceding layer.

    Raises:
        UserError: see ``find_layer``.
    """
    if name == ALL:
        return tuple(layer for layer in all_layers(policy)
                     if layer.name not in (*HEADS, STATE))
    return (find_layer(policy, name),)
