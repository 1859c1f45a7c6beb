"""Swaps of directions of the agent's hidden state, as a user asks for them.

One definition for the simulator and for the real environment: both take the ``alter_hidden`` of a
``Swap``, and both store the altered states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from common.errors import UserError
from common.networks import HiddenChange
from interventions.config import SwapConfig
from interventions.projector import Projector


@dataclasses.dataclass(frozen=True)
class Swap:
    """A swap of directions in every change of the agent's state.

    Attributes:
        name: for folders, such as ``10_5_to_12_None``.
        alter_hidden: as ``play_episodes`` and ``Simulator.imagine`` take it.
        description: for the metadata.
    """

    name: str
    alter_hidden: HiddenChange
    description: dict


def swap_name(taken: Sequence[int], put: Sequence[int | None]) -> str:
    """The name of a swap, for files."""
    return "_".join(map(str, (*taken, "to", *put)))


def open_swap(swap: SwapConfig, kind: str, folder: Path, num_episodes: int, num_units: int,
              device: torch.device | str, random_directions: int | None) -> Swap | None:
    """The swap that a user asks for, or None if there is none.

    Args:
        kind: of the directions: "ica" or "pca".
        folder: of the matrices that define the directions.
        num_episodes: recorded episodes that they were computed from.
        num_units: of the agent.
        device: where the states are.
        random_directions: seed of random directions that take the place of the independent
            components, see ``Projector.turned``; None for the directions themselves.

    Raises:
        UserError: if the matrices are missing, damaged or another agent's, or there is no such
            direction; or if random directions are asked for where there is nothing to replace.
    """
    taken, put = list(swap.swap_directions_from or ()), list(swap.swap_directions_to or ())
    if not taken:
        if random_directions is not None:
            raise UserError("--random_directions says in which directions to swap, so it needs "
                            "--swap_directions_from and --swap_directions_to")
        return None
    projector, matrices = Projector.load_for(num_units, folder, num_episodes)
    name = swap_name(taken, put)
    description = {"from": taken, "to": put, "direction_type": kind, "matrices_sha256": matrices}
    if random_directions is not None:
        if kind != "ica":
            raise UserError("--random_directions replaces independent components, but "
                            f"direction_type is {kind}; choose ica")
        projector = projector.turned(random_directions)
        name = f"random_{random_directions}_{name}"
        description["random_directions"] = random_directions
    return Swap(name, projector.swapped_step(taken, put, kind, device), description)


class MeasuredChange:
    """A change of the hidden state that notes how far it moves.

    Args:
        change: of the states.
        std: standard deviations of the units (D,), where the states are.
    """

    def __init__(self, change: HiddenChange, std: Tensor):
        self._change, self._std = change, std
        self._total, self._count = 0.0, 0

    def __call__(self, entering: Tensor, leaving: Tensor) -> Tensor:
        altered = self._change(entering, leaving)
        moved = ((altered - leaving) / self._std).norm(dim=-1)  # (B,)
        self._total += float(moved.sum())
        self._count += len(moved)
        return altered

    @property
    def moved(self) -> float:
        """Mean Euclidean norm of the move of a state, in standard deviations of its units."""
        return self._total / max(self._count, 1)  # no step was altered if all runs were too short
