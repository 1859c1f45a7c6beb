"""Observations that show a feature: one per position of the frame, and the strongest ones.

As in the interface of Hilton et al. (2020), but as numbers: which observation, which box in it, and
how strong the feature is there.

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
THUMBNAIL = 4  # patches along a side
_PATCHES_PER_CELL = 4  # of a thumbnail


@dataclasses.dataclass(frozen=True)
class Examples:
    """Observations at positions.

    Attributes:
        observations: their numbers, int32 (F, R, C); of a thumbnail (F, N) in the order in which
            it shows them, from left to right and then downwards.
        strengths: strength of the feature there, float32, of the same shape.
        boxes: int32, the same shape and 4: top, left, bottom, right in pixels of the frame,
            exclusive. A box has the size of a cell and may lie partly outside the frame; larger
            boxes are multiples of it around the same middle.
    """

    observations: np.ndarray
    strengths: np.ndarray
    boxes: np.ndarray


def spatial_examples(activations: np.ndarray, bottleneck: Bottleneck,
                     subdivision: float) -> Examples:
    """Choose, for each feature and position, the observation in which the feature is strongest.

    No observation is shown more often than ten times its equal share, rounded up; a position whose
    strongest observation is taken by stronger ones gets its next best.

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
    """Choose the observations in which each feature is strongest, at most 16, each at its
    strongest cell.

    At most four are shown at one cell; weaker ones move to their next best. They are ordered by the
    rows of their cells, and in each row of the thumbnail by their columns.

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
    """Match A to B so that the stronger claim wins (Gale and Shapley 1962).

    Of equal claims of one A on several B, the first B is preferred, and of equal claims on one B,
    the first A.

    Args:
        claims: strengths (A, B).
        capacity: maximum number of A per B.

    Returns:
        Index of the B of each A (A,); -1 if it has none.
    """
    order = np.argsort(-claims, axis=1, kind="stable")
    refusals = np.zeros(len(claims), np.int64)  # per A
    proposing = np.arange(len(claims))
    match = np.full(len(claims), -1)
    while len(proposing):
        match[proposing] = order[proposing, refusals[proposing]]
        matched = np.flatnonzero(match >= 0)
        strengths = claims[matched, match[matched]]
        matched = matched[np.lexsort((matched, -strengths, match[matched]))]
        groups = match[matched]
        rank = np.arange(len(matched)) - np.searchsorted(groups, groups)  # within each B
        refused = matched[rank >= capacity]
        match[refused] = -1
        refusals[refused] += 1
        proposing = refused[refusals[refused] < claims.shape[1]]
    return match


def _positions(size: int, number: int) -> np.ndarray:
    """Middles of equal parts of a row of cells, in cells (number,); 0 is the middle of the
    first cell."""
    return (np.arange(number) + 0.5) * size / number - 0.5


def _interpolation(positions: np.ndarray, size: int) -> np.ndarray:
    """Weights of cells at positions between them (positions, size), constant beyond the edge."""
    inside = np.clip(positions, 0, size - 1)
    return np.maximum(0, 1 - np.abs(inside[:, None] - np.arange(size))).astype(np.float32)


def _boxes(cells: np.ndarray, bottleneck: Bottleneck) -> np.ndarray:
    """Boxes around cells (…, 2), see ``Examples``: int32 (…, 4)."""
    stride, first_pixel = bottleneck.layer.stride, bottleneck.layer.first_pixel
    if stride is None or first_pixel is None:
        raise UserError(f"{bottleneck.name} has no cells, so there are no examples of its features")
    middles = first_pixel + stride * cells + 0.5  # the middle of pixel p is at p + 1/2
    corners = np.round(middles - stride / 2)
    return np.concatenate([corners, corners + stride], axis=-1).astype(np.int32)
