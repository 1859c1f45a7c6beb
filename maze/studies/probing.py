"""Linear probes of layers for squares, cheese, mouse, and whether the cheese will be got.

Letters in shape comments: N levels, S squares of a level.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from agents.layers import Layer
from agents.networks import Policy
from agents.reference_set import activations_of
from common.devices import Compute
from common.errors import UserError
from common.progress import with_progress
from interventions.probes import probe
from maze.field.fields import both_facings, frame_source
from maze.field.outcomes import Chain
from maze.level.state import MazeState

SQUARES = 16  # of a level that are examples
FREE_CELL, CHEESE_CELL, MOUSE_CELL = "square is free", "cheese in the cell", "mouse in the cell"
GOT = "will get the cheese"
COLUMNS = {"layer": str, "target": str, "metric": str, "score": float, "low_95": float,
           "high_95": float, "base": float, "shuffled": float, "penalty": float, "num_levels": int}


def got_cheese(policy: Policy, compute: Compute, states: Sequence[MazeState],
               seed: int) -> np.ndarray | None:
    """Whether an episode of each level ends with the cheese, bool (N,): drawn with its exact
    probability, as playing the level once would. None for an agent with memory."""
    if policy.recurrent:
        return None
    exact = []
    for state in with_progress(states, len(states), "level"):
        chain = Chain.of(both_facings(policy, compute, state))
        exact.append(chain.reaching([state.grid.cheese], state.timeout - state.time)[0])
    return np.random.default_rng(seed).random(len(exact)) < np.array(exact)


def probes(policy: Policy, layers: Sequence[Layer], states: Sequence[MazeState],
           got: np.ndarray | None, seed: int, num_shuffles: int) -> pd.DataFrame:
    """Probes of each target by layer, trained, chosen and tested on different levels.

    The mouse is on a random free square, but for "will get the cheese", where it is at the start.
    Of each level 16 squares of the maze are examples for the three targets of cells (the cheese's
    and the mouse's square among them, and others at random): the channels of the cell that shows
    the square are read. Coordinates (R²) and "will get the cheese" are read from all entries.

    Args:
        layers: maps.
        got: from :func:`got_cheese`.
        seed: of squares, splits, shuffles and bootstrap.

    Returns:
        A row for each layer, target and metric; see COLUMNS.
    """
    rng = np.random.default_rng(seed)
    mice, picked = zip(*(_squares(state, rng) for state in states))
    frames = np.concatenate([
        frame_source(state)(np.array([mouse]), np.zeros(1, np.int64))
        for state, mouse in zip(states, mice)])
    at_start = np.concatenate([
        frame_source(state)(np.array([state.grid.mouse]), np.zeros(1, np.int64))
        for state in states])
    levels = np.arange(len(states))
    tables = []
    for layer in with_progress(layers, len(layers), "layer"):
        maps = activations_of(policy, frames, [layer.name])[layer.name].cpu().numpy()
        read = np.stack([maps[level][:, row, column] for level, squares in enumerate(picked)
                         for row, column in (layer.cell(*square, states[level].grid.world_dim)
                                             for square in squares)])
        of = np.repeat(levels, SQUARES)
        squares = [tuple(square) for each in picked for square in each]
        grids = [states[level].grid for level in of]
        targets = {
            FREE_CELL: (read, [grid.is_free[square] for grid, square in zip(grids, squares)], of),
            CHEESE_CELL: (read, [square == grid.cheese for grid, square in zip(grids, squares)],
                          of),
            MOUSE_CELL: (read, [square == mice[level] for level, square in zip(of, squares)], of)}
        for place, axis in enumerate(("row", "column")):
            targets[f"cheese's {axis}"] = (maps, [s.grid.cheese[place] for s in states], levels)
            targets[f"mouse's {axis}"] = (maps, [mouse[place] for mouse in mice], levels)
        if got is not None:
            starts = activations_of(policy, at_start, [layer.name])[layer.name].cpu().numpy()
            targets[GOT] = (starts, got, levels)
        for target, (activations, labels, level) in targets.items():
            try:
                found = probe(activations, np.array(labels, float if "'s " in target else bool),
                              level, seed, regression="'s " in target, num_shuffles=num_shuffles)
            except UserError as error:
                if target != GOT:
                    raise
                print(f"no probe of '{GOT}': {error}")  # an agent that always does, or never
                continue
            tables.append(found.scores.assign(layer=layer.name, target=target,
                                              penalty=found.penalty, num_levels=len(states)))
    return pd.concat(tables, ignore_index=True)[list(COLUMNS)]


def _squares(state: MazeState, rng: np.random.Generator) -> tuple[tuple, list[tuple]]:
    """A square for the mouse, and the squares of a level that are examples."""
    grid = state.grid
    free = grid.squares(without_cheese=True)
    mouse = free[rng.integers(len(free))]
    inside = [grid.world(row, column) for row, column in np.ndindex(grid.maze_dim, grid.maze_dim)]
    rest = [square for square in inside if square not in (mouse, grid.cheese)]
    more = rng.choice(len(rest), SQUARES - 2, replace=len(rest) < SQUARES - 2)
    squares = [grid.cheese, mouse, *(rest[number] for number in more)]
    # In random order: labels are shuffled between levels place by place.
    return mouse, [squares[place] for place in rng.permutation(SQUARES)]
