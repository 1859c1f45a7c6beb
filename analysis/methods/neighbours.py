"""Nearest neighbours of rows: exact where there are few rows, approximate where there are many."""

from __future__ import annotations

import dataclasses

import numpy as np
from sklearn.neighbors import NearestNeighbors

from common.devices import give_numba_torchs_threads, num_jobs

EXACT_ROWS = 100_000  # up to so many, all distances are computed
APPROXIMATE_NEIGHBOURS = 30  # that the descent keeps of each row; fewer find worse ones


@dataclasses.dataclass(frozen=True)
class Neighbours:
    """The k nearest rows of each row, nearest first.

    Attributes:
        indices: (N, k).
        distances: Euclidean (N, k).
    """

    indices: np.ndarray
    distances: np.ndarray


def nearest_neighbours(rows: np.ndarray, k: int, seed: int,
                       exact_rows: int = EXACT_ROWS) -> Neighbours:
    """The nearest other rows of each row.

    Beyond ``exact_rows`` they are found by nearest-neighbour descent (Dong et al. 2011, from
    pynndescent), whose time grows like N log N.

    Args:
        rows: float32 (N, D), N above k.
    """
    if len(rows) <= exact_rows:
        found = NearestNeighbors(algorithm="brute", n_jobs=num_jobs(len(rows))).fit(rows)
        distances, indices = found.kneighbors(None, n_neighbors=k)
        return Neighbours(indices, distances.astype(np.float32))
    from pynndescent import NNDescent  # it takes seconds to compile

    kept = max(k + 1, APPROXIMATE_NEIGHBOURS)
    give_numba_torchs_threads()
    indices, distances = NNDescent(rows, n_neighbors=kept, random_state=seed).neighbor_graph
    found = _without_itself(indices, distances, np.arange(len(rows)), k)
    (lost,) = np.nonzero(~np.isfinite(found.distances).all(axis=1))
    if len(lost):  # rows for which the descent ended with too few
        exact = nearest_rows(rows[lost], rows, k + 1)
        exact = _without_itself(exact.indices, exact.distances, lost, k)
        found.indices[lost], found.distances[lost] = exact.indices, exact.distances
    return found


def nearest_rows(queries: np.ndarray, rows: np.ndarray, k: int) -> Neighbours:
    """The nearest ``rows`` (N, D) of each of the ``queries`` (Q, D), exact."""
    found = NearestNeighbors(algorithm="brute", n_jobs=num_jobs(len(rows))).fit(rows)
    distances, indices = found.kneighbors(queries, n_neighbors=k)
    return Neighbours(indices, distances.astype(np.float32))


def some_rows(num_rows: int, most: int, seed: int) -> np.ndarray:
    """Numbers of at most ``most`` rows, drawn by the seed, in ascending order."""
    if num_rows <= most:
        return np.arange(num_rows)
    return np.sort(np.random.default_rng(seed).choice(num_rows, most, replace=False))


def _without_itself(indices: np.ndarray, distances: np.ndarray, own: np.ndarray,
                    k: int) -> Neighbours:
    """The first k of each row's neighbours (N, > k) that are not the row itself, ``own`` (N,)."""
    order = np.argsort(indices == own[:, None], axis=1, kind="stable")[:, :k]
    return Neighbours(np.take_along_axis(indices, order, axis=1),
                      np.take_along_axis(distances, order, axis=1))
