"""Features of a layer: directions over its slots that its attributions are made of.

Non-negative matrix factorisation (Hilton et al. 2020, "Understanding RL vision", "Feature
directions") of the value's attributions in many observations: a row for the positive and one for
the negative part of each cell.

Letters in shape comments: O observations, C H W a layer, N rows, M slots, F features.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment
from sklearn.decomposition import NMF, non_negative_factorization
from sklearn.exceptions import ConvergenceWarning

from attribution.reduction import (
    Reducer,
    activations_in_slots,
    cells_first,
    nnls,
    num_slots,
    to_slots,
)
from common.errors import UserError

MAX_ROWS = 300_000  # that directions are fitted to
MAX_HELD_OUT = 100_000
HELD_OUT = 0.1  # at least, of all rows
ROWS_A_FEATURE = 10
OBSERVATIONS_A_FEATURE = 16
ATTRIBUTIONS, ACTIVATIONS = KINDS = ("attributions", "activations")
_MAX_ITERATIONS = 400
_MORE_ITERATIONS = 10  # behind the last one, which say how much was left to gain
# Streams of random numbers, beside the seed.
_ROWS, _HALVES = 0, 1


@dataclasses.dataclass(frozen=True)
class LayerSamples:
    """Activations of a layer, and attributions to it, in O observations.

    Attributes:
        name: of the layer, for messages.
        attributions: of the value, float32 (O, C, H, W).
        activations: float32 (O, C, H, W).
        episodes: that the observations are of (O,).
    """

    name: str
    attributions: np.ndarray
    activations: np.ndarray
    episodes: np.ndarray

    @property
    def signed(self) -> bool:
        """Whether an activation is ever negative."""
        return bool((self.activations < 0).any())


@dataclasses.dataclass(frozen=True)
class Features:
    """Features of a layer, those with most of the value's attribution first.

    Attributes:
        reducer: their directions (F, M).
        facts: how well they describe the layer, for the settings: numbers and lists of numbers by
            name, see ``attribution_files``.
    """

    reducer: Reducer
    facts: dict


class _Rows:
    """The rows that directions are fitted to, of which only some are ever in memory.

    Args:
        kind: one of ``KINDS``.
    """

    def __init__(self, held: LayerSamples, kind: str):
        self._held, self._kind = held, kind
        if kind == ATTRIBUTIONS:
            used = np.concatenate([(held.attributions > 0).any(axis=1),
                                   (held.attributions < 0).any(axis=1)])  # (2 O, H, W)
        else:
            used = (held.activations != 0).any(axis=1)
        self._cells = used[0].size
        self.numbers = np.flatnonzero(used)  # of the rows that are not all zero

    def episodes(self) -> np.ndarray:
        """Episode of each row (N,)."""
        return self._held.episodes[self.numbers // self._cells % len(self._held.episodes)]

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Rows (n, M)."""
        sign, rest = np.divmod(numbers, self._cells * len(self._held.episodes))
        frame, cell = np.divmod(rest, self._cells)
        activations, attributions = (
            array.reshape(*array.shape[:2], -1)[frame, :, cell]
            for array in (self._held.activations, self._held.attributions))  # (n, C)
        if self._kind == ACTIVATIONS:
            return activations_in_slots(activations, self._held.signed)
        parts = np.maximum(np.where(sign[:, None] == 0, attributions, -attributions), 0)
        return to_slots(parts, activations, self._held.signed)


def find_features(held: LayerSamples, number: int, seed: int, kind: str = ATTRIBUTIONS) -> Features:
    """Find the features of a layer.

    Args:
        number: F.
        seed: of the rows that are drawn.
        kind: of the rows, one of ``KINDS``; attributions as published.

    Raises:
        UserError: if the layer has fewer slots than features, or too few rows that are not zero,
            such as a layer that nothing reads.
    """
    rows = _Rows(held, kind)
    slots = num_slots(held.activations.shape[1], held.signed)
    _check(held, rows, number, slots, kind)
    drawn = np.random.default_rng([seed, _ROWS]).permutation(rows.numbers)
    num_fitted = min(MAX_ROWS, round((1 - HELD_OUT) * len(drawn)))
    fitted = np.sort(drawn[:num_fitted])
    held_out = rows.take(np.sort(drawn[num_fitted:num_fitted + MAX_HELD_OUT]))
    directions, facts = _factorise(rows.take(fitted), number, held.name, seed)
    halves = _halves(rows, held, number, seed)

    order, totals = _by_attribution(held, Reducer(directions, held.signed))
    reducer = Reducer(directions[order], held.signed)
    facts = {
        "rows": len(rows.numbers), "fitted_rows": len(fitted), **facts,
        "explained": explained(held_out, reducer.directions),
        **_facts_of_all(reducer, order, totals),
        "stability": None if halves is None else stability(reducer.directions, *halves)}
    return Features(reducer, facts)


def features_along(held: LayerSamples, directions: np.ndarray, names: Sequence[str], number: int
                   ) -> Features:
    """Features along directions that are known, such as those of independent components.

    A direction and its opposite are two features, as they lie in different slots.

    Args:
        directions: of the layer's channels, of any sign (k, C).
        names: of them (k,).
        number: F; those of all 2 k with the most of the value's attribution.

    Raises:
        UserError: if there are fewer, or too few rows that are not zero.
    """
    rows = _Rows(held, ATTRIBUTIONS)
    both = np.concatenate([directions, -directions])
    ends = activations_in_slots(both, True) if held.signed else np.maximum(both, 0)
    titles = np.array([f"{name} {sign}" for sign in "+−" for name in names])
    there = ends.sum(axis=1) > 0
    ends, titles = ends[there], titles[there]
    if number > len(ends):
        raise UserError(f"{len(directions)} components make {len(ends)} features of the layer "
                        f"{held.name}, not {number}; give fewer --nmf_features")
    _check(held, rows, number, number, ATTRIBUTIONS)
    ends = (ends / ends.sum(axis=1, keepdims=True)).astype(np.float32)
    chosen = _by_attribution(held, Reducer(ends, held.signed))[0][:number]
    order, totals = _by_attribution(held, Reducer(ends[chosen], held.signed))
    reducer = Reducer(ends[chosen[order]], held.signed)
    return Features(reducer, {
        "rows": len(rows.numbers), "names": titles[chosen[order]].tolist(),
        "explained": explained(rows.take(rows.numbers[:MAX_HELD_OUT]), reducer.directions),
        **_facts_of_all(reducer, order, totals), "stability": None})


def _facts_of_all(reducer: Reducer, order: np.ndarray, totals: dict) -> dict:
    return {"residual_share": totals["residual_share"],
            "attribution": totals["attribution"][order].tolist(),
            "largest_entry": reducer.directions.max(axis=1).tolist()}


def _check(held: LayerSamples, rows: _Rows, number: int, slots: int, kind: str) -> None:
    channels = held.activations.shape[1]
    of = f"{len(held.episodes)} observations of {channels} channels"
    if not held.attributions.any():
        raise UserError(f"the value's attribution to the layer {held.name} is zero everywhere in "
                        f"{of}: nothing behind it changes the value; choose another of --layers, "
                        "or a trained agent")
    if number > slots:
        raise UserError(f"the layer {held.name} has {slots} slots, which {number} features are too "
                        f"many for; give --nmf_features {slots} or fewer")
    if len(rows.numbers) < ROWS_A_FEATURE * number:
        raise UserError(f"the layer {held.name} has {len(rows.numbers)} rows of {kind} that are "
                        f"not zero in {of}, and {number} features need "
                        f"{ROWS_A_FEATURE * number}; give more --num_observations, or fewer "
                        "--nmf_features")


def _factorise(rows: np.ndarray, number: int, name: str, seed: int) -> tuple[np.ndarray, dict]:
    """Directions (F, M) of sum 1, and how the search for them went."""
    # NMF sets entries of its start below an absolute 1e-6 to 0, whatever the unit of the output.
    rows = np.asarray(rows / rows.mean(), np.float32)
    model = NMF(n_components=number, init="nndsvda", tol=1e-4, max_iter=_MAX_ITERATIONS,
                random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        weights = model.fit_transform(rows)
        found = model.components_
        facts = {"iterations": model.n_iter_, "converged": model.n_iter_ < _MAX_ITERATIONS}
        if not facts["converged"]:
            more, further, _ = non_negative_factorization(
                rows, weights.copy(), found.copy(), number, init="custom",
                max_iter=_MORE_ITERATIONS, tol=0)
            errors = [np.linalg.norm(rows - w @ h) for w, h in ((weights, found), (more, further))]
            facts["change"] = float(1 - errors[1] / errors[0])
    sums = found.sum(axis=1, dtype=np.float64, keepdims=True)
    if not (sums > 0).all():
        raise UserError(f"only {int((sums > 0).sum())} of {number} features of the layer {name} "
                        "are not zero; give fewer --nmf_features")
    return (found / sums).astype(np.float32), facts


def _by_attribution(held: LayerSamples, reducer: Reducer) -> tuple[np.ndarray, dict]:
    """Features by their summed |attribution|, largest first (F,), with these sums, in the value's
    unit, and the share of the residual in all."""
    sums, residual = np.zeros(len(reducer.directions)), 0.0
    for begin in range(0, len(held.episodes), 64):
        some = slice(begin, begin + 64)
        found, rest = reducer.attributions(cells_first(held.attributions[some]),
                                           cells_first(held.activations[some]))
        sums += np.abs(found).sum(axis=0)
        residual += np.abs(rest).sum()
    return np.argsort(-sums, kind="stable"), {
        "attribution": sums / len(held.episodes),
        "residual_share": float(residual / (residual + sums.sum()))}


def explained(rows: np.ndarray, directions: np.ndarray) -> float:
    """Share of the squares of rows (N, M) that directions explain."""
    rest = rows - nnls(rows, directions) @ directions
    return float(1 - (rest**2).sum() / (rows.astype(np.float64)**2).sum())


def _halves(rows: _Rows, held: LayerSamples, number: int,
            seed: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Directions of the two halves of the episodes, or None if there are too few rows."""
    rng = np.random.default_rng([seed, _HALVES])
    names = rng.permutation(np.unique(held.episodes))
    first = np.isin(rows.episodes(), names[:len(names) // 2])
    found = []
    for half in (rows.numbers[first], rows.numbers[~first]):
        if len(half) < ROWS_A_FEATURE * number:
            return None
        drawn = np.sort(rng.permutation(half)[:MAX_ROWS // 2])
        found.append(_factorise(rows.take(drawn), number, held.name, seed)[0])
    return found[0], found[1]


def stability(directions: np.ndarray, half: np.ndarray, other: np.ndarray) -> list[float]:
    """Cosine of each feature in one half of the episodes with itself in the other (F,).

    Args:
        directions: of all episodes (F, M); those of each half, too, which are matched to them by
            their cosines (Hungarian method).
    """
    matched = []
    for found in (half, other):
        _, columns = linear_sum_assignment(-_cosines(directions, found))
        matched.append(found[columns])
    return np.diag(_cosines(*matched)).tolist()


def _cosines(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """(F, F)."""
    some, others = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (some, others))
    return some @ others.T
