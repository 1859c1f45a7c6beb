"""Observations that show a feature: one at each place of a picture, and the strongest ones.

As in the interface of Hilton et al. (2020), but as numbers: which observation, which box of it, and
how strong the feature is there.

Letters in shape comments: O observations, F features, H W cells of a layer, h w places of a
picture, n patches of a thumbnail.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from attribution.layers import Bottleneck
from common.errors import UserError

SUBDIVISIONS = (0.25, 0.5, 1, 2)  # places of a picture, as a multiple of the cells along a side
REUSE = 0.1  # places times this is how often observations would be shown with an equal share each
THUMBNAIL = 4  # patches along a side
_AT_ONE_CELL = 4  # observations of a thumbnail


@dataclasses.dataclass(frozen=True)
class Examples:
    """Observations at places.

    Attributes:
        observations: their numbers, int32 (F, h, w), or (F, n) of a thumbnail in the order in which
            it shows them, from left to right and then downwards.
        strengths: of the feature there, float32, of the same shape.
        boxes: int32 in the shape of ``observations`` and 4 behind it: top, left, bottom, right in
            pixels of the frame, the ends not included; as large as a cell's share of the frame,
            around its middle. They may lie partly outside the frame. Larger boxes are multiples of
            them around the same middle.
    """

    observations: np.ndarray
    strengths: np.ndarray
    boxes: np.ndarray


def spatial_examples(found: np.ndarray, bottleneck: Bottleneck, subdivision: float) -> Examples:
    """At each place of the layer's grid, made finer or coarser, the observation in which each
    feature is strongest there.

    No observation is shown more often than ten times its equal share, rounded up: where it has
    stronger claims elsewhere, a place gets its next best.

    Args:
        found: reduced activations (O, F, H, W).
        subdivision: places a cell, along each axis; strengths between cells are interpolated.
    """
    rows, columns = (max(1, round(size * subdivision)) for size in found.shape[2:])
    capacity = math.ceil(rows * columns / (REUSE * len(found)))
    places = [_places(size, number) for size, number in zip(found.shape[2:], (rows, columns))]
    weights = [_interpolation(place, size) for place, size in zip(places, found.shape[2:])]
    chosen, strengths = [], []
    for feature in range(found.shape[1]):
        claims = (weights[0] @ found[:, feature] @ weights[1].T).reshape(len(found), -1).T
        numbers = matched(claims, capacity)
        chosen.append(numbers.reshape(rows, columns))
        strengths.append(np.take_along_axis(claims, numbers[:, None], 1).reshape(rows, columns))
    cells = np.stack(np.meshgrid(*places, indexing="ij"), axis=-1)  # (h, w, 2)
    boxes = np.broadcast_to(_boxes(cells, bottleneck), (found.shape[1], rows, columns, 4))
    return Examples(np.stack(chosen).astype(np.int32), np.stack(strengths).astype(np.float32),
                    boxes)


def thumbnail_examples(found: np.ndarray, bottleneck: Bottleneck) -> Examples:
    """The observations in which each feature is strongest, at most 16, each at its strongest cell.

    At most four are shown at one cell; weaker ones move to their next best. They are ordered by the
    rows of their cells, and in each row of the picture by their columns.

    Args:
        found: reduced activations (O, F, H, W).
    """
    number = min(THUMBNAIL**2, len(found), found[0, 0].size * _AT_ONE_CELL)
    width = found.shape[3]
    chosen, strengths, cells = [], [], []
    for feature in range(found.shape[1]):
        claims = found[:, feature].reshape(len(found), -1)  # (O, H W)
        at = matched(claims, _AT_ONE_CELL)
        reached = np.where(at < 0, -np.inf, np.take_along_axis(claims, at[:, None], 1)[:, 0])
        strongest = np.argsort(-reached, kind="stable")[:number]
        by_row = strongest[np.lexsort((at[strongest] % width, at[strongest] // width))]
        lines = [by_row[begin:begin + THUMBNAIL] for begin in range(0, number, THUMBNAIL)]
        shown = np.concatenate([line[np.argsort(at[line] % width, kind="stable")]
                                for line in lines])
        chosen.append(shown)
        strengths.append(reached[shown])
        cells.append(np.stack(np.divmod(at[shown], width), axis=-1))
    return Examples(np.stack(chosen).astype(np.int32), np.stack(strengths).astype(np.float32),
                    _boxes(np.stack(cells), bottleneck))


def matched(claims: np.ndarray, capacity: int) -> np.ndarray:
    """An assignment of B to A in which the stronger claim wins.

    The stable matching (Gale and Shapley 1962). Of equal claims of one on several, that on the
    first counts as stronger, and of equal claims on one, that of the first.

    Args:
        claims: strengths (A, B).
        capacity: how many of A each of B takes.

    Returns:
        Number in B (A,); -1 for what gets none.
    """
    order = np.argsort(-claims, axis=1, kind="stable")
    tried = np.zeros(len(claims), np.int64)  # how many of its wishes each has been refused
    waiting = np.arange(len(claims))
    got = np.full(len(claims), -1)
    while len(waiting):
        got[waiting] = order[waiting, tried[waiting]]
        holders = np.flatnonzero(got >= 0)
        strengths = claims[holders, got[holders]]
        holders = holders[np.lexsort((holders, -strengths, got[holders]))]
        groups = got[holders]
        begins = np.searchsorted(groups, groups)  # of the group of each
        refused = holders[np.arange(len(holders)) - begins >= capacity]
        got[refused] = -1
        tried[refused] += 1
        waiting = refused[tried[refused] < claims.shape[1]]
    return got


def _places(size: int, number: int) -> np.ndarray:
    """Middles of equal shares of a row of cells, in cells (number,); 0 is the middle of the
    first."""
    return (np.arange(number) + 0.5) * size / number - 0.5


def _interpolation(places: np.ndarray, size: int) -> np.ndarray:
    """Weights of cells at places between them (places, size); beyond the edge the edge's."""
    inside = np.clip(places, 0, size - 1)
    return np.maximum(0, 1 - np.abs(inside[:, None] - np.arange(size))).astype(np.float32)


def _boxes(cells: np.ndarray, bottleneck: Bottleneck) -> np.ndarray:
    """Boxes around cells (…, 2) as of ``Examples``, int32 (…, 4)."""
    if not bottleneck.layer.is_map:
        raise UserError(f"{bottleneck.name} has no cells, so there are no examples of its features")
    # The middle of pixel p is at p + 1/2.
    middles = bottleneck.layer.first_pixel + bottleneck.layer.stride * cells + 0.5
    corners = np.round(middles - bottleneck.layer.stride / 2)
    return np.concatenate([corners, corners + bottleneck.layer.stride], axis=-1).astype(np.int32)
