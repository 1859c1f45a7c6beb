"""Tracking scores of channels, with cheese, mouse or a wall put at every square of levels.

Letters in shape comments: Q squares of a level, C H W the maps of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from agents.acting import run_policy
from agents.hooks import cached
from agents.layers import Layer
from agents.networks import Policy
from common.devices import Compute
from common.progress import with_progress
from interventions.tracking import SCORES, Tracker
from maze.field.fields import frame_source
from maze.level.grid import WALL, Square
from maze.level.state import MazeState

CHEESE, MOUSE, A_WALL = "cheese", "mouse", "wall"
THINGS = (CHEESE, MOUSE, A_WALL)
CHOOSING, REPORTING = "choosing", "reporting"  # sets of levels
PUBLISHED, CENTRED = "published", "centred"  # how squares are mapped to cells
_SEEN = ((CHEESE, PUBLISHED), (CHEESE, CENTRED), (MOUSE, PUBLISHED), (A_WALL, PUBLISHED))
COLUMNS = {"set": str, "layer": str, "thing": str, "mapping": str, "channel": int,
           **dict.fromkeys(SCORES, float), "at": float, "elsewhere": float,
           **{f"{name}_threshold": float for name in SCORES}, "tracks": bool, "num_levels": int,
           "num_squares": int}


def pictures_with(thing: str, state: MazeState) -> tuple[np.ndarray, np.ndarray, list[Square]]:
    """A level with a thing at each of its squares, and without it.

    The cheese is put at every free square but the mouse's, in a level without other cheese; a wall
    likewise. The mouse is put at every free square; as there is no picture without it, those are
    compared with their mean.

    Returns:
        Frames with the thing uint8 (Q, 64, 64, 3), without it (1, 64, 64, 3), or (0, 64, 64, 3) of
        the mouse, and the squares.
    """
    bare = state.with_cheese(None)
    grid = bare.grid
    at_start = np.array([grid.mouse]), np.array([grid.facing])
    without = frame_source(bare)(*at_start)
    if thing == MOUSE:
        squares = grid.squares()
        frames = frame_source(bare)(np.array(squares), np.full(len(squares), grid.facing))
        return frames, without[:0], squares
    squares = [square for square in grid.squares() if square != grid.mouse]
    edited = (bare.with_cheese(square) if thing == CHEESE else bare.with_cells({square: WALL})
              for square in squares)
    return np.concatenate([frame_source(one)(*at_start) for one in edited]), without, squares


def score(policy: Policy, compute: Compute, layers: Sequence[Layer], states: Sequence[MazeState],
          name: str, seed: int) -> pd.DataFrame:
    """Tracking scores of all channels of layers, for each thing.

    Args:
        layers: maps.
        states: levels, of which each has at least 3 free squares.
        name: of the set of levels.
        seed: of the permutations.

    Returns:
        A row for each layer, thing, mapping of squares to cells, and channel; see COLUMNS.
    """
    trackers = {(layer.name, *seen): Tracker(seed) for layer in layers for seen in _SEEN}
    for state in with_progress(states, len(states), "level"):
        for thing in THINGS:
            for layer, maps, without, squares in _maps(policy, compute, layers, thing, state):
                for mapping in (PUBLISHED, CENTRED):
                    if (thing, mapping) in _SEEN:
                        cells = [layer.cell(*square, state.grid.world_dim, mapping)
                                 for square in squares]
                        trackers[layer.name, thing, mapping].add(maps, without, np.array(cells))
    tables = []
    for (layer, thing, mapping), tracker in trackers.items():
        found = tracker.result()
        tables.append(found.table().assign(
            set=name, layer=layer, thing=thing, mapping=mapping, num_levels=found.num_levels,
            num_squares=found.num_squares))
    return pd.concat(tables, ignore_index=True)[list(COLUMNS)]


def _maps(policy: Policy, compute: Compute, layers: Sequence[Layer], thing: str, state: MazeState
          ) -> Iterator[tuple[Layer, np.ndarray, np.ndarray, list[Square]]]:
    """Of each layer the maps (Q, C, H, W), and those without the thing (C, H, W)."""
    frames, without, squares = pictures_with(thing, state)
    frames = np.concatenate([frames, without])
    with cached(policy, [layer.name for layer in layers]) as activations:
        run_policy(policy, compute, frames, policy.initial_states(len(frames)))
    for layer in layers:
        maps = activations[layer.name].float().numpy()
        yield (layer, maps[:len(squares)],
               maps[-1] if len(without) else maps.mean(axis=0), squares)


def choose(scores: pd.DataFrame, num: int) -> list[tuple[str, int]]:
    """The channels that track the cheese in a set of levels, as layer and channel: those above all
    thresholds by chance, in which cheese stands out more than a wall does, best contrast first.

    Args:
        scores: from :func:`score`, of one set.
        num: the most of a layer.
    """
    keys = ["layer", "channel"]
    published = scores[scores["mapping"] == PUBLISHED]
    cheese, wall = (published[published["thing"] == thing].set_index(keys)
                    for thing in (CHEESE, A_WALL))
    found = cheese[cheese["tracks"] & (cheese["contrast"] > wall["contrast"].reindex(cheese.index))]
    found = found.sort_values("contrast", ascending=False, kind="stable")
    return found.groupby("layer", sort=False).head(num).index.tolist()
