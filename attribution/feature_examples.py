"""Dataset examples of features: one observation per position of the frame, and the observations in
which a feature is strongest.

As in the interface of Hilton et al. (2020), but stored as numbers: the observation, a box in it,
and the strength of the feature in the box.

Letters in shape comments: O observations, F features, H W cells of a layer, R C positions in the
frame, N patches of a thumbnail.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from attribution.layers import Bottleneck
from common.errors import UserError

SUBDIVISIONS = (0.25, 0.5, 1, 2)  # positions per cell of a layer, along each axis
REUSE = 0.1  # an observation is shown at most 1 / REUSE times as often as with equal shares
THUMBNAIL = 4  # patches of a thumbnail along each side
_PATCHES_PER_CELL = 4  # maximum number of patches of a thumbnail from one cell


@dataclasses.dataclass(frozen=True)
class Examples:
    """Example observations of each feature.

    Attributes:
        observations: number of the observation at each position, int32 (F, R, C); for a thumbnail
            (F, N), from left to right and then downwards. -1 for none.
        strengths: strength of the feature at each position, float32, with the same shape.
        boxes: box around each position, int32, with the same shape and a last dimension of 4: top,
            left, bottom, right in pixels of the frame, with exclusive ends. A box has the size of a
            cell and may lie partly outside the frame; larger boxes have the same centre.
    """

    observations: np.ndarray
    strengths: np.ndarray
    boxes: np.ndarray


def spatial_examples(activations: np.ndarray, bottleneck: Bottleneck,
                     subdivision: float) -> Examples:
    """Choose, for each feature and position, the observation in which the feature is strongest.

    Each observation is shown at most ten times as often as with equal shares, rounded up; if other
    positions with stronger activations exhaust this limit, a position gets its next best
    observation.

    Args:
        activations: activations of the features (O, F, H, W).
        bottleneck: the layer.
        subdivision: positions per cell, along each axis; strengths between cells are interpolated.
    """
    sizes = activations.shape[2:]
    rows, columns = (max(1, round(size * subdivision)) for size in sizes)
    capacity = math.ceil(rows * columns / (REUSE * len(activations)))
    positions = [_positions(size, number) for size, number in zip(sizes, (rows, columns))]
    vertical, horizontal = map(_interpolation, positions, sizes)
    chosen, strengths = [], []
    for feature in range(activations.shape[1]):
        claims = (vertical @ activations[:, feature] @ horizontal.T).reshape(
            len(activations), -1).T
        numbers = stable_matching(claims, capacity)
        chosen.append(numbers.reshape(rows, columns))
        strengths.append(np.take_along_axis(claims, numbers[:, None], 1).reshape(rows, columns))
    cells = np.stack(np.meshgrid(*positions, indexing="ij"), axis=-1)  # (R, C, 2)
    boxes = np.broadcast_to(_boxes(cells, bottleneck), (len(chosen), rows, columns, 4))
    return Examples(np.stack(chosen).astype(np.int32), np.stack(strengths).astype(np.float32),
                    boxes)


def thumbnail_examples(activations: np.ndarray, bottleneck: Bottleneck) -> Examples:
    """Choose at most 16 observations in which each feature is strongest, each at its strongest
    cell.

    At most four observations are shown at one cell; weaker ones move to their next best cell.
    Observations are ordered by the rows of their cells, and within each row of the thumbnail by the
    columns of their cells.

    Args:
        activations: activations of the features (O, F, H, W).
        bottleneck: the layer.
    """
    number = min(THUMBNAIL**2, len(activations), activations[0, 0].size * _PATCHES_PER_CELL)
    width = activations.shape[3]
    chosen, strengths, cells = [], [], []
    for feature in range(activations.shape[1]):
        claims = activations[:, feature].reshape(len(activations), -1)  # (O, H W)
        cell = stable_matching(claims, _PATCHES_PER_CELL)
        strength = np.where(cell < 0, -np.inf, np.take_along_axis(claims, cell[:, None], 1)[:, 0])
        strongest = np.argsort(-strength, kind="stable")[:number]
        by_row = strongest[np.lexsort((cell[strongest] % width, cell[strongest] // width))]
        lines = [by_row[begin:begin + THUMBNAIL] for begin in range(0, number, THUMBNAIL)]
        ordered = np.concatenate([line[np.argsort(cell[line] % width, kind="stable")]
                                  for line in lines])
        chosen.append(ordered)
        strengths.append(strength[ordered])
        cells.append(np.stack(np.divmod(cell[ordered], width), axis=-1))
    return Examples(np.stack(chosen).astype(np.int32), np.stack(strengths).astype(np.float32),
                    _boxes(np.stack(cells), bottleneck))


def stable_matching(claims: np.ndarray, capacity: int) -> np.ndarray:
    """Compute a stable matching of rows to columns, in which stronger claims win (Gale and Shapley
    1962).

    Ties are broken in favour of the first column or row.

    Args:
        claims: strength of each row's claim to each column (A, B).
        capacity: maximum number of rows per column.

    Returns:
        Index of the column matched to each row (A,); -1 without a match.
    """
    order = np.argsort(-claims, axis=1, kind="stable")
    refusals = np.zeros(len(claims), np.int64)  # per row
    proposing = np.arange(len(claims))
    match = np.full(len(claims), -1)
    while len(proposing):
        match[proposing] = order[proposing, refusals[proposing]]
        matched = np.flatnonzero(match >= 0)
        strengths = claims[matched, match[matched]]
        matched = matched[np.lexsort((matched, -strengths, match[matched]))]
        groups = match[matched]
        rank = np.arange(len(matched)) - np.searchsorted(groups, groups)  # within each column
        refused = matched[rank >= capacity]
        match[refused] = -1
        refusals[refused] += 1
        proposing = refused[refusals[refused] < claims.shape[1]]
    return match


def _positions(size: int, number: int) -> np.ndarray:
    """Divide a row of cells into equal parts; return their centres in cells (number,), where 0 is
    the centre of the first cell."""
    return (np.arange(number) + 0.5) * size / number - 0.5


def _interpolation(positions: np.ndarray, size: int) -> np.ndarray:
    """Compute linear interpolation weights of cells (positions, size), constant beyond the edge."""
    inside = np.clip(positions, 0, size - 1)
    return np.maximum(0, 1 - np.abs(inside[:, None] - np.arange(size))).astype(np.float32)


def _boxes(cells: np.ndarray, bottleneck: Bottleneck) -> np.ndarray:
    """Compute boxes around cells (…, 2), as in ``Examples``, int32 (…, 4)."""
    stride, first_pixel = bottleneck.layer.stride, bottleneck.layer.first_pixel
    if stride is None or first_pixel is None:
        raise UserError(f"{bottleneck.name} has no cells, so there are no examples of its features")
    middles = first_pixel + stride * cells + 0.5  # the middle of pixel p is at p + 1/2
    corners = np.round(middles - stride / 2)
    return np.concatenate([corners, corners + stride], axis=-1).astype(np.int32)
