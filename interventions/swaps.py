"""Configured swaps of directions of the agent's hidden state.

Simulator and real environment share one definition: a patch of the state after a step. Both store
the altered states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import cast

import torch

from common.errors import UserError
from interventions.config import SwapConfig
from interventions.patches import ChangeState
from interventions.projector import DirectionType, Projector


@dataclasses.dataclass(frozen=True)
class Swap:
    """A swap of directions in every change of the agent's state.

    Attributes:
        name: name for folders, such as ``10_5_to_12_None``.
        patch: patch of the agent that applies the swap.
        description: settings of the swap, for metadata.
    """

    name: str
    patch: ChangeState
    description: dict


def swap_name(taken: Sequence[int], put: Sequence[int | None]) -> str:
    """Return the name of a swap for file names, such as ``10_5_to_12_None``."""
    return "_".join(map(str, (*taken, "to", *put)))


def configured_name(swap: SwapConfig, random_directions: int | None) -> str | None:
    """Return the name of the configured swap, or None if there is none; see ``open_swap``."""
    if not swap.swap_directions_from:
        return None
    name = swap_name(swap.swap_directions_from, swap.swap_directions_to or ())
    return name if random_directions is None else f"random_{random_directions}_{name}"


def open_swap(swap: SwapConfig, kind: str, load: Callable[[], tuple[Projector, dict[str, str]]],
              device: torch.device | str, random_directions: int | None,
              from_step: int = 0) -> Swap | None:
    """Return the configured swap, or None if there is none.

    Args:
        swap: configured directions.
        kind: type of the directions: "ica" or "pca".
        load: function that reads the directions, see ``Projector.load_for``; called only if there
            is a swap.
        device: device of the states.
        random_directions: seed of random directions that replace the independent components, see
            ``Projector.turned``; None for the components themselves.
        from_step: first step of an episode that is altered, from 0.

    Raises:
        UserError: if the matrices are missing, damaged, or belong to another agent; there is no
            such direction; or random directions are requested without a swap of independent
            components.
    """
    taken, put = list(swap.swap_directions_from or ()), list(swap.swap_directions_to or ())
    name = configured_name(swap, random_directions)
    if name is None:
        if random_directions is not None:
            raise UserError("--random_directions says in which directions to swap, so it needs "
                            "--swap_directions_from and --swap_directions_to")
        return None
    projector, matrices = load()
    description = {"from": taken, "to": put, "direction_type": kind, "matrices_sha256": matrices}
    if random_directions is not None:
        if kind != "ica":
            raise UserError("--random_directions replaces independent components, but "
                            f"direction_type is {kind}; choose ica")
        projector = projector.turned(random_directions)
        description["random_directions"] = random_directions
    step = projector.swapped_step(taken, put, cast(DirectionType, kind), device)
    return Swap(name, ChangeState(step, steps=(from_step, None)), description)
