"""Features of a layer: directions over its slots (channels by sign) into which its attributions are
decomposed, and dataset examples of each feature.

Directions are found by non-negative matrix factorisation of the value's attributions in many
observations, with one row for the positive and one for the negative part of each cell (Hilton et
al. 2020, "Understanding RL vision", "Feature directions"). As in the article's interface, a feature
has two kinds of example: one observation per position of the frame, and the observations in which
the feature is strongest. Only the index of the observation, a box in it, and the strength of the
feature at the box's centre are stored.

Letters in shape comments: O observations, C H W channels and grid of a layer, N rows (or patches of
a thumbnail), M slots, F features, R C rows and columns of positions (only in ``Examples``).
"""

from __future__ import annotations

import dataclasses
import math
import warnings

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist
from sklearn.decomposition import NMF, non_negative_factorization
from sklearn.exceptions import ConvergenceWarning

from attribution.layers import Bottleneck
from attribution.recordings import batches
from attribution.reduction import (
    Reducer,
    flatten_cells,
    nnls,
    split_activations,
    split_signs,
)
from common.errors import UserError
from common.game_constants import FRAME_SIZE

MAX_ROWS = 300_000  # maximum number of rows to which directions are fitted
MAX_HELD_OUT = 100_000
HELD_OUT = 0.1  # minimum held-out share of all rows
ROWS_PER_FEATURE = 10
SUBDIVISIONS = (0.25, 0.5, 1, 2)  # positions per cell of a layer, along each axis
REUSE = 0.1  # an observation is shown at most 1 / REUSE times as often as an average one
THUMBNAIL = 4  # patches of a thumbnail along each side
_PATCHES_PER_CELL = 4  # maximum number of patches of a thumbnail from one cell
ATTRIBUTIONS, ACTIVATIONS = KINDS = ("attributions", "activations")
_MAX_ITERATIONS = 400
_MORE_ITERATIONS = 10  # further iterations of a fit that has not converged, to measure the gain
_ROWS, _HALVES = 0, 1  # independent streams of random numbers; each is combined with the seed


@dataclasses.dataclass(frozen=True)
class LayerSamples:
    """Activations of a layer, and attributions to it, in O observations.

    Attributes:
        name: name of the layer, for messages.
        attributions: attributions of the value, float32 (O, C, H, W).
        activations: activations of the layer, float32 (O, C, H, W).
        episodes: episode of each observation (O,).
    """

    name: str
    attributions: np.ndarray
    activations: np.ndarray
    episodes: np.ndarray

    @property
    def signed(self) -> bool:
        """Whether any activation is negative."""
        return bool((self.activations < 0).any())


class _Rows:
    """Non-zero rows to which directions are fitted. Each cell gives one row of activations, or two
    rows of attributions: the positive and the negative part. ``take`` computes the rows.

    Args:
        samples: activations and attributions.
        kind: one of ``KINDS``.
        number: number of features F.
        slots: number of slots of the layer, which is the maximum number of features.

    Attributes:
        numbers: indices of the non-zero rows among all rows (N,).
        cells: number of cells of the layer.

    Raises:
        UserError: if all attributions are zero, or there are too few slots or rows for the
            features.
    """

    def __init__(self, samples: LayerSamples, kind: str, number: int, slots: int):
        self._samples, self._kind = samples, kind
        if kind == ATTRIBUTIONS:
            nonzero = np.concatenate([(samples.attributions > 0).any(axis=1),
                                      (samples.attributions < 0).any(axis=1)])  # (2 O, H, W)
        else:
            nonzero = (samples.activations != 0).any(axis=1)
        self.cells = nonzero[0].size
        self.numbers = np.flatnonzero(nonzero)
        if number > slots:
            raise UserError(f"the layer {samples.name} has {slots} slots, too few for {number} "
                            f"features; give --nmf_features {slots} or fewer")
        if len(self.numbers) < ROWS_PER_FEATURE * number or not samples.attributions.any():
            raise UserError(f"the layer {samples.name} has {len(self.numbers)} non-zero rows of "
                            f"{kind} in {len(samples.episodes)} observations, but {number} "
                            f"features need {ROWS_PER_FEATURE * number}; give more "
                            "--num_observations or fewer --nmf_features, or choose other --layers "
                            "if the value does not depend on this one")

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Return the rows with the given indices (n,) as an array (n, M)."""
        sign, index = np.divmod(numbers, self.cells * len(self._samples.episodes))
        frame, cell = np.divmod(index, self.cells)
        activations, attributions = (
            array.reshape(*array.shape[:2], -1)[frame, :, cell]
            for array in (self._samples.activations, self._samples.attributions))  # (n, C)
        if self._kind == ACTIVATIONS:
            return split_activations(activations, self._samples.signed)
        parts = np.maximum(np.where(sign[:, None] == 0, attributions, -attributions), 0)
        return split_signs(parts, activations, self._samples.signed)


def find_features(samples: LayerSamples, number: int, seed: int, kind: str = ATTRIBUTIONS
                  ) -> tuple[Reducer, dict]:
    """Find the features of a layer by non-negative matrix factorisation.

    Args:
        samples: activations and attributions.
        number: number of features F.
        seed: seed of the random draws of rows, and of the factorisation.
        kind: quantity to factorise: ``attributions``, as published, or ``activations``.

    Returns:
        Features in descending order of the value's |attribution|, and statistics of their fit:
        numbers and lists of numbers by name, see ``attribution.results``.

    Raises:
        UserError: if the layer has fewer slots than features, or too few non-zero rows, for example
            because the value does not depend on the layer.
    """
    rows = _Rows(samples, kind, number, samples.activations.shape[1] * (1 + samples.signed))
    drawn = np.random.default_rng([seed, _ROWS]).permutation(rows.numbers)
    num_fitted = min(MAX_ROWS, round((1 - HELD_OUT) * len(drawn)))
    fitted = np.sort(drawn[:num_fitted])
    held_out = rows.take(np.sort(drawn[num_fitted:num_fitted + MAX_HELD_OUT]))
    directions, fit = _factorise(rows.take(fitted), number, samples.name, seed)
    halves = _fit_halves(rows, samples, number, seed)
    order, facts = _rank(samples, directions)
    directions = directions[order]
    return Reducer(directions, samples.signed), {
        "rows": len(rows.numbers), "fitted_rows": len(fitted), **fit,
        "explained": explained(held_out, directions), **facts,
        "stability": None if halves is None else stability(directions, *halves)}


def features_along(samples: LayerSamples, components: np.ndarray, number: int
                   ) -> tuple[Reducer, dict]:
    """Convert independent components to features.

    A component and its opposite give two features, because they lie in different slots. In a layer
    without negative activations, their negative entries are dropped, as such slots do not exist.

    Args:
        samples: activations and attributions.
        components: k directions over the layer's channels, with entries of any sign (k, C).
        number: number F of the 2 k features to keep, those with the largest |attribution| of the
            value.

    Returns:
        The same as :func:`find_features`. The statistics lack facts about the factorisation; they
        also contain ``names``, such as "IC 0 +".

    Raises:
        UserError: if the components give fewer than ``number`` features, or there are too few
            non-zero rows.
    """
    both = np.concatenate([components, -components])
    directions = split_activations(both, True) if samples.signed else np.maximum(both, 0)
    names = np.array([f"IC {k} {sign}" for sign in "+−" for k in range(len(components))])
    nonzero = directions.sum(axis=1) > 0
    directions, names = directions[nonzero], names[nonzero]
    if number > len(directions):
        raise UserError(f"{len(components)} components give only {len(directions)} features of the "
                        f"layer {samples.name}, not {number}; give fewer --nmf_features")
    rows = _Rows(samples, ATTRIBUTIONS, number, number)
    directions = (directions / directions.sum(axis=1, keepdims=True)).astype(np.float32)
    chosen = _rank(samples, directions)[0][:number]
    order, facts = _rank(samples, directions[chosen])
    directions, names = directions[chosen[order]], names[chosen[order]]
    return Reducer(directions, samples.signed), {
        "rows": len(rows.numbers), "names": names.tolist(),
        "explained": explained(rows.take(rows.numbers[:MAX_HELD_OUT]), directions), **facts,
        "stability": None}


def _factorise(rows: np.ndarray, number: int, name: str, seed: int) -> tuple[np.ndarray, dict]:
    """Factorise rows (N, M); return directions (F, M), each with sum 1, and the statistics
    ``iterations``, ``converged`` and ``change``; see ``attribution.results``."""
    # NMF sets initial values below an absolute 1e-6 to 0, whatever the unit of the output.
    rows = np.asarray(rows / rows.mean(), np.float32)
    model = NMF(n_components=number, init="nndsvda", tol=1e-4, max_iter=_MAX_ITERATIONS,
                random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        weights = model.fit_transform(rows)
        directions = model.components_
        facts = {"iterations": model.n_iter_, "converged": model.n_iter_ < _MAX_ITERATIONS}
        if not facts["converged"]:
            later_weights, later, _ = non_negative_factorization(
                rows, weights.copy(), directions.copy(), number, init="custom",
                max_iter=_MORE_ITERATIONS, tol=0)
            errors = [np.linalg.norm(rows - w @ h)
                      for w, h in ((weights, directions), (later_weights, later))]
            facts["change"] = float(1 - errors[1] / errors[0])
    sums = directions.sum(axis=1, dtype=np.float64, keepdims=True)
    if not (sums > 0).all():
        raise UserError(f"only {int((sums > 0).sum())} of {number} features of the layer {name} "
                        "are not zero; give fewer --nmf_features")
    return (directions / sums).astype(np.float32), facts


def _rank(samples: LayerSamples, directions: np.ndarray) -> tuple[np.ndarray, dict]:
    """Return the order of features by descending |attribution| (F,), and the statistics
    ``residual_share``, ``attribution`` and ``largest_entry`` in this order; see
    ``attribution.results``."""
    reducer = Reducer(directions, samples.signed)
    sums = np.zeros(len(directions) + 1)
    for attributions, activations in zip(batches(samples.attributions),
                                         batches(samples.activations)):
        sums += np.abs(reducer.attributions(
            flatten_cells(attributions), flatten_cells(activations))).sum(axis=0)
    residual, sums = sums[-1], sums[:-1]
    order = np.argsort(-sums, kind="stable")
    return order, {
        "residual_share": float(residual / (residual + sums.sum())),
        "attribution": (sums / len(samples.episodes))[order].tolist(),
        "largest_entry": directions[order].max(axis=1).tolist()}


def explained(rows: np.ndarray, directions: np.ndarray) -> float:
    """Return the share of the sum of squares of rows (N, M) that is explained by non-negative
    combinations of directions (F, M)."""
    residuals = rows - nnls(rows, directions) @ directions
    return float(1 - (residuals**2).sum() / (rows.astype(np.float64)**2).sum())


def _fit_halves(rows: _Rows, samples: LayerSamples, number: int,
                seed: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Fit directions to each half of the episodes, (F, M) each; return None if there are too few
    rows."""
    rng = np.random.default_rng([seed, _HALVES])
    episodes = rng.permutation(np.unique(samples.episodes))
    of_rows = samples.episodes[rows.numbers // rows.cells % len(samples.episodes)]
    first = np.isin(of_rows, episodes[:len(episodes) // 2])
    fits = []
    for half in (rows.numbers[first], rows.numbers[~first]):
        if len(half) < ROWS_PER_FEATURE * number:
            return None
        drawn = np.sort(rng.permutation(half)[:MAX_ROWS // 2])
        fits.append(_factorise(rows.take(drawn), number, samples.name, seed)[0])
    return fits[0], fits[1]


def stability(directions: np.ndarray, half: np.ndarray, other: np.ndarray) -> list[float]:
    """Compute the cosine between each feature's directions in the two halves of the episodes.

    Args:
        directions: directions fitted to all episodes (F, M).
        half, other: directions fitted to each half (F, M); they are matched to ``directions`` by
            their cosines (Hungarian method).

    Returns:
        F cosines.
    """
    matched = [unordered[linear_sum_assignment(cdist(directions, unordered, "cosine"))[1]]
               for unordered in (half, other)]
    return (1 - np.diag(cdist(*matched, "cosine"))).tolist()


@dataclasses.dataclass(frozen=True)
class Examples:
    """Example observations of each feature.

    Attributes:
        observations: index of the observation that is shown at each of R x C positions in the
            layer, int32 (F, R, C); for a thumbnail, in each of its N patches, row by row (F, N).
        strengths: activation of the feature there, float32, with the same shape.
        boxes: box around the position in the observation, int32, with the same shape and a last
            dimension of 4: top, left, bottom, right in pixels of the frame, with exclusive ends.
            Every box has the size of a cell and is centred on its position; it may lie partly
            outside the frame.
    """

    observations: np.ndarray
    strengths: np.ndarray
    boxes: np.ndarray


def spatial_examples(activations: np.ndarray, bottleneck: Bottleneck,
                     subdivision: float) -> Examples:
    """Choose, for each feature and position, the observation in which the feature is strongest.

    With P positions and O observations, each observation is shown at no more than 10 P / O
    positions per feature (rounded up). If the feature is stronger in an observation at that many
    other positions, a position shows its next best observation instead.

    Args:
        activations: activations of the features (O, F, H, W).
        bottleneck: the layer.
        subdivision: positions per cell, along each axis; strengths between cells are interpolated.
    """
    sizes = activations.shape[2:]
    rows, columns = (max(1, round(size * subdivision)) for size in sizes)
    capacity = math.ceil(rows * columns / (REUSE * len(activations)))
    positions = [(np.arange(number) + 0.5) * size / number - 0.5  # 0 is the first cell's centre
                 for size, number in zip(sizes, (rows, columns))]
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
    """Choose, for each feature, at most 16 observations in which the feature is strongest. Each is
    shown at the cell in which the feature is strongest.

    At most four observations are shown at one cell; weaker ones move to their next best cell.
    Observations are arranged in reading order, by the rows of their cells, and within each row of
    the thumbnail by the columns of their cells.

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
        lines = np.arange(number) // THUMBNAIL
        ordered = by_row[np.lexsort((cell[by_row] % width, lines))]
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
        claims: strength of the claim of each of A rows to each of B columns (A, B).
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


def _interpolation(positions: np.ndarray, size: int) -> np.ndarray:
    """Compute linear interpolation weights of cells (positions, size), constant beyond the edge."""
    inside = np.clip(positions, 0, size - 1)
    return np.maximum(0, 1 - np.abs(inside[:, None] - np.arange(size))).astype(np.float32)


def _boxes(cells: np.ndarray, bottleneck: Bottleneck) -> np.ndarray:
    """Compute boxes around cells (…, 2), as in ``Examples``, int32 (…, 4)."""
    stride, first_pixel = bottleneck.layer.stride or FRAME_SIZE, bottleneck.layer.first_pixel or 0
    middles = first_pixel + stride * cells + 0.5  # the middle of pixel p is at p + 1/2
    corners = np.round(middles - stride / 2)
    return np.concatenate([corners, corners + stride], axis=-1).astype(np.int32)
