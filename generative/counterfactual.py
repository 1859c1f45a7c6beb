"""Counterfactual simulations: what follows if a block of cells shows what could be there instead.

Every block of cells of the view is a hole, which the prior fills in several ways; see
``generative.filling``. A simulation from a filled start keeps the agent's hidden state and the
camera. The *effect* of a filling is an output in it minus the output in the simulation from the
start itself, k steps later.

Letters in shape comments: G starts, R rows (a filling of a hole of a start each), M holes,
K fillings of each, L lags.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from generative.config import GRID
from generative.filling import empty, fill, filled_start, squares_of_cells
from generative.simulator import Simulator, Start


def blocks_of_cells(size: int) -> Tensor:
    """Return the blocks of ``size`` x ``size`` cells of a view, bool (M, 8, 8), row by row; the
    size divides 8."""
    number = torch.arange(GRID) // size
    block = number[:, None] * (GRID // size) + number
    return block == torch.arange((GRID // size) ** 2)[:, None, None]


@torch.no_grad()
def filled_starts(simulator: Simulator, images: Tensor, start: Start, rows: Tensor, cells: Tensor,
                  seeds: Tensor | None) -> Start:
    """Fill holes in starts.

    Args:
        simulator: spatial simulator with worlds and a trained prior.
        images: initial frames in [0, 1] (I, G, C, 64, 64).
        start: their starts in worlds (G rows).
        rows: index of the start that has each hole, int64 (R,).
        cells: cells whose squares are generated, bool (R, 8, 8).
        seeds: seeds of the fillings, int64 (R,); None to empty the squares.

    Returns:
        Starts (R rows) with the agent's hidden state, the action and the camera of ``start``.
    """
    assert start.world is not None
    world, vectors = start.world[rows], start.bottleneck_vec[rows].float()
    hole = squares_of_cells(simulator, world, cells)
    given = simulator, images[:, rows], vectors, world, hole
    new, filled = empty(*given) if seeds is None else fill(*given, seeds)
    return dataclasses.replace(
        filled_start(simulator, new, filled, vectors), agent_hidden=start.agent_hidden[rows],
        action_logits=start.action_logits[rows], action=start.action[rows])


def variance_shares(effects: Tensor) -> Tensor:
    """Compute the share of the variance of effects that is due to the filling rather than the hole.

    It is the mean variance over the fillings of a hole, divided by the variance over all holes and
    fillings: near 1 if a map tells which filling was drawn rather than which block matters.

    Args:
        effects: effects (M, K, …).

    Returns:
        Shares (…); NaN where all effects are equal.
    """
    within = effects.var(dim=1, correction=0).mean(dim=0)
    return within / effects.flatten(0, 1).var(dim=0, correction=0)
