"""A map of states in few dimensions: t-SNE started from the first principal components."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
from openTSNE import TSNE as FastTSNE
from openTSNE.affinity import PerplexityBasedNN
from openTSNE.nearest_neighbors import PrecomputedNeighbors
from sklearn.manifold import TSNE

from analysis.methods.neighbours import nearest_neighbours, nearest_rows, some_rows
from common.devices import num_jobs
from common.errors import UserError

PERPLEXITY = 30
# Rows that the map is fitted to; the others get places among them.
FIT_ROWS = 100_000
FIT_ROWS_3D = 20_000
PLACING_NEIGHBOURS = 10
START_STD = 1e-4  # of the first coordinate, as small as t-SNE needs it


@dataclasses.dataclass(frozen=True)
class Embedding:
    """Places of rows on the map.

    Attributes:
        places: float32 (N, c).
        fitted_rows: how many rows the map was fitted to; each of the others is placed at the median
            of the places of its 10 nearest fitted rows.
    """

    places: np.ndarray
    fitted_rows: int


def embed(principal: np.ndarray, num_components: int, seed: int,
          fit_rows: int | None = None) -> Embedding:
    """t-SNE (van der Maaten 2008) of principal coordinates, perplexity 30.

    One or two dimensions are computed by openTSNE, with interpolation (Linderman et al. 2019)
    from 10 000 rows on and a tree (Barnes-Hut) below; three by scikit-learn's tree.

    Args:
        principal: float32 (N, d), the first columns with the largest variance.
        num_components: dimensions of the map, 1 to 3.
        fit_rows: most rows to fit to; FIT_ROWS or, in three dimensions, FIT_ROWS_3D if None.

    Raises:
        UserError: if there are too few rows or columns, or more than three dimensions are asked
            for.
    """
    if num_components > 3:
        raise UserError(f"n_components_tsne is {num_components}, but t-SNE has at most 3")
    if principal.shape[1] < num_components or len(principal) < 5:
        raise UserError(f"t-SNE in {num_components} dimensions needs at least 5 states and as many "
                        f"principal components as dimensions, not {len(principal)} states and "
                        f"{principal.shape[1]} components")
    if fit_rows is None:
        fit_rows = FIT_ROWS if num_components < 3 else FIT_ROWS_3D
    chosen = some_rows(len(principal), fit_rows, seed)
    fit = _fit_fast if num_components < 3 else _fit_tree
    start = principal[chosen, :num_components].astype(np.float64)
    start = (start - start.mean(axis=0)) * (START_STD / start[:, 0].std())
    places = np.empty((len(principal), num_components), dtype=np.float32)
    places[chosen] = fit(principal[chosen], start, seed)
    rest = np.setdiff1d(np.arange(len(principal)), chosen, assume_unique=True)
    if len(rest):
        nearest = nearest_rows(principal[rest], principal[chosen], PLACING_NEIGHBOURS).indices
        places[rest] = np.median(places[chosen][nearest], axis=1)
    return Embedding(places, len(chosen))


def _fit_fast(rows: np.ndarray, start: np.ndarray, seed: int) -> np.ndarray:
    perplexity = _perplexity(len(rows))
    found = nearest_neighbours(rows, int(3 * perplexity), seed, exact_rows=len(rows))
    logging.getLogger("openTSNE").setLevel(logging.WARNING)  # it says which defaults it takes
    affinities = PerplexityBasedNN(
        perplexity=perplexity, n_jobs=num_jobs(len(rows)),
        knn_index=PrecomputedNeighbors(found.indices, found.distances))
    return np.asarray(FastTSNE(start.shape[1], n_jobs=num_jobs(len(rows)), random_state=seed).fit(
        affinities=affinities, initialization=start))


def _fit_tree(rows: np.ndarray, start: np.ndarray, seed: int) -> np.ndarray:
    return TSNE(start.shape[1], perplexity=_perplexity(len(rows)), init=start.astype(np.float32),
                random_state=seed, n_jobs=num_jobs(len(rows))).fit_transform(rows)


def _perplexity(num_rows: int) -> float:
    """PERPLEXITY, or what so few rows allow: it needs three times as many neighbours."""
    return min(PERPLEXITY, (num_rows - 1) / 3)
