"""Nearest neighbours, outliers, clusters and t-SNE maps of states.

Neighbours are exact for few rows and approximate for many. t-SNE starts from the first principal
components.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings

import numpy as np
from hdbscan import HDBSCAN
from openTSNE import TSNE as FastTSNE
from openTSNE.affinity import PerplexityBasedNN
from openTSNE.nearest_neighbors import PrecomputedNeighbors
from scipy.sparse import csr_matrix
from sklearn.cluster import AgglomerativeClustering, KMeans
from sklearn.manifold import TSNE
from sklearn.neighbors import NearestNeighbors

from common.devices import give_numba_torchs_threads, num_jobs
from common.errors import UserError

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


SMALLEST_K = 5
DEVIATIONS = 2


@dataclasses.dataclass(frozen=True)
class Outliers:
    """Which states are outliers.

    Attributes:
        mask: True for an outlier, bool (N,).
        ks: numbers of neighbours that voted.
    """

    mask: np.ndarray
    ks: tuple[int, ...]


def find_outliers(states: np.ndarray, max_k: int, seed: int) -> Outliers:
    """Vote on each state, once for every k = 5, 7, … below ``max_k``.

    A k votes against a state if the median of the distances to its k nearest neighbours lies
    beyond mean + 2 standard deviations of these medians. More than half of the votes decide. The
    published ``max_k`` of 6 leaves one k, 5.

    Args:
        states: standardised (N, D).

    Raises:
        UserError: if no k lies below ``max_k``, or there are too few states.
    """
    ks = tuple(range(SMALLEST_K, max_k, 2))
    if not ks:
        raise UserError(f"outlier_max_k must be above {SMALLEST_K}, not {max_k}")
    if len(states) <= ks[-1]:
        raise UserError(f"there are only {len(states)} states, too few for the {ks[-1]} nearest "
                        "neighbours of each; take more episodes or lower outlier_max_k")
    distances = nearest_neighbours(states, ks[-1], seed).distances  # (N, largest k), ascending
    votes = np.zeros(len(states), dtype=np.int64)
    for k in ks:
        medians = distances[:, k // 2].astype(np.float64)  # k is odd
        votes += medians > medians.mean() + DEVIATIONS * medians.std()
    return Outliers(2 * votes > len(ks), ks)


NO_CLUSTER = -1

FIT_ROWS = 30_000  # that agglomerative and hdbscan are fitted to; the rest join their nearest one
GRAPH_NEIGHBOURS = 10
KMEANS_STARTS = 4
# From whose distance hdbscan judges how dense it is around a row. Its own default, the smallest
# cluster's size, makes the time quadratic, and most of a t-SNE map noise.
DENSITY_NEIGHBOURS = 5

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Clusters:
    """A partition of rows.

    Attributes:
        labels: cluster of each row, from 0; NO_CLUSTER for rows that hdbscan calls noise (N,).
        means: of the members of each cluster, float32 (C, d).
        fitted_rows: to how many rows the method was fitted; the others were given the cluster of
            the nearest fitted row.
    """

    labels: np.ndarray
    means: np.ndarray
    fitted_rows: int


def find_clusters(rows: np.ndarray, method: str, num_clusters: int, seed: int,
                  fit_rows: int = FIT_ROWS) -> Clusters:
    """Group rows by one of CLUSTERINGS of ``analysis.parameters``.

    - ``agglomerative``: Ward's criterion, where only clusters are merged that touch in the graph
      of 10 nearest neighbours. Fitted to at most ``fit_rows`` rows.
    - ``hdbscan``: density (Campello et al. 2013), with trees (McInnes and Healy 2017), whose time
      grows like n log n in few dimensions. It finds its own number of clusters;
      ``num_clusters`` says how small they may be: a quarter of an even share, at least 5 rows.
      If it finds none, all rows are one cluster, with a warning. Fitted to at most ``fit_rows``
      rows.
    - ``kmeans``: the best of 4 starts. Fitted to all rows.

    Args:
        rows: float32 (N, d).

    Raises:
        UserError: if there are fewer rows than clusters.
    """
    if len(rows) < num_clusters:
        raise UserError(f"n_clusters is {num_clusters}, but there are only {len(rows)} states")
    chosen = np.arange(len(rows))
    if method == "kmeans":
        labels = KMeans(num_clusters, n_init=KMEANS_STARTS, random_state=seed).fit_predict(rows)
    else:
        chosen = some_rows(len(rows), max(fit_rows, num_clusters), seed)
        fit = {"agglomerative": _agglomerative, "hdbscan": _hdbscan}[method]
        fitted_labels = fit(rows[chosen], num_clusters, seed)
        labels = np.empty(len(rows), dtype=np.int64)
        labels[chosen] = fitted_labels
        rest = np.setdiff1d(np.arange(len(rows)), chosen, assume_unique=True)
        if len(rest):
            nearest = nearest_rows(rows[rest], rows[chosen], 1).indices[:, 0]
            labels[rest] = fitted_labels[nearest]
    return Clusters(labels.astype(np.int64), cluster_means(rows, labels), len(chosen))


def cluster_means(rows: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The mean of each cluster's members, float32 (C, d); rows of no cluster do not count."""
    return np.stack([rows[labels == cluster].mean(axis=0, dtype=np.float64)
                     for cluster in range(labels.max() + 1)]).astype(np.float32)


def _agglomerative(rows: np.ndarray, num_clusters: int, seed: int) -> np.ndarray:
    k = min(GRAPH_NEIGHBOURS, len(rows) - 1)
    found = nearest_neighbours(rows, k, seed)
    starts = np.arange(0, found.indices.size + 1, k)
    graph = csr_matrix((np.ones(found.indices.size), found.indices.ravel(), starts),
                       shape=(len(rows), len(rows)))
    model = AgglomerativeClustering(num_clusters, linkage="ward",
                                    connectivity=graph.maximum(graph.T))
    with warnings.catch_warnings():  # it joins the parts of a graph in pieces, as it should
        warnings.filterwarnings("ignore", "the number of connected components", UserWarning)
        return model.fit_predict(rows)


def _hdbscan(rows: np.ndarray, num_clusters: int, seed: int) -> np.ndarray:
    smallest = max(5, len(rows) // (4 * num_clusters))
    with warnings.catch_warnings():  # of scikit-learn, which renames an argument
        warnings.filterwarnings("ignore", "'force_all_finite' was renamed", FutureWarning)
        labels = HDBSCAN(min_cluster_size=smallest, min_samples=DENSITY_NEIGHBOURS,
                         algorithm="boruvka_kdtree").fit_predict(rows)
    if labels.max() == NO_CLUSTER:
        logger.warning("hdbscan finds no cluster of at least %d rows; all count as one cluster",
                       smallest)
        return np.zeros(len(rows), dtype=np.int64)
    return labels


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
