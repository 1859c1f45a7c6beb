"""Nearest neighbours, outliers, clusters and t-SNE maps of states.

Neighbours are exact for few rows and approximate for many. t-SNE is initialised with the first
principal components.

Letters in shape comments: D or d coordinates; Q queries; k neighbours, c dimensions of a t-SNE map.
"""

from __future__ import annotations

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

EXACT_ROWS = 100_000  # largest number of rows for which all distances are computed
APPROXIMATE_NEIGHBOURS = 30  # neighbours per row in the descent; fewer give a worse approximation


def nearest_neighbours(rows: np.ndarray, k: int, seed: int,
                       exact_rows: int = EXACT_ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Find the k nearest other rows of each row.

    Beyond ``exact_rows`` rows, the neighbours are found approximately by nearest-neighbour descent
    (Dong et al. 2011, from pynndescent), whose run time grows like N log N.

    Args:
        rows: rows to compare, float32 (N, D), with N above k.
        k: number of neighbours of each row.
        exact_rows: largest number of rows for which all distances are computed.

    Returns:
        Indices of the neighbours, nearest first, and Euclidean distances to them; (N, k) each.
    """
    if len(rows) <= exact_rows:
        return nearest_rows(None, rows, k)
    from pynndescent import NNDescent  # imported here because its compilation takes seconds

    kept = max(k + 1, APPROXIMATE_NEIGHBOURS)
    give_numba_torchs_threads()
    indices, distances = NNDescent(rows, n_neighbors=kept, random_state=seed).neighbor_graph
    indices, distances = _without_itself(indices, distances, np.arange(len(rows)), k)
    (lost,) = np.nonzero(~np.isfinite(distances).all(axis=1))
    if len(lost):  # rows for which the descent found too few neighbours
        exact = nearest_rows(rows[lost], rows, k + 1)
        indices[lost], distances[lost] = _without_itself(*exact, lost, k)
    return indices, distances


def nearest_rows(queries: np.ndarray | None, rows: np.ndarray,
                 k: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the exact k nearest rows of each query.

    Args:
        queries: points (Q, D); None for the rows themselves, each of which is then compared with
            all other rows.
        rows: rows to search (N, D).
        k: number of neighbours of each query.

    Returns:
        Indices of the neighbours, nearest first, and Euclidean distances to them; (Q, k) each.
    """
    fit = NearestNeighbors(algorithm="brute", n_jobs=num_jobs(len(rows))).fit(rows)
    distances, indices = fit.kneighbors(queries, n_neighbors=k)
    return indices, distances.astype(np.float32)


def some_rows(num_rows: int, most: int, seed: int) -> np.ndarray:
    """Return the ascending indices of all rows, or of ``most`` randomly drawn ones if ``num_rows``
    is larger."""
    if num_rows <= most:
        return np.arange(num_rows)
    return np.sort(np.random.default_rng(seed).choice(num_rows, most, replace=False))


def _without_itself(indices: np.ndarray, distances: np.ndarray, own: np.ndarray,
                    k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return indices and distances (N, k) of the first k neighbours of each row other than itself.

    Args:
        indices, distances: more than k neighbours of each row (N, > k).
        own: index of each row (N,).
    """
    order = np.argsort(indices == own[:, None], axis=1, kind="stable")[:, :k]
    return (np.take_along_axis(indices, order, axis=1),
            np.take_along_axis(distances, order, axis=1))


SMALLEST_K = 5
DEVIATIONS = 2


def find_outliers(states: np.ndarray, max_k: int,
                  seed: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """Find outliers by a vote over all odd numbers of neighbours k from 5 to below ``max_k``.

    For each k, a state gets a vote as an outlier if the median distance to its k nearest neighbours
    exceeds the mean of these medians over all states by more than 2 of their standard deviations. A
    state is an outlier if it gets more than half of the votes. The published ``max_k`` of 6 leaves
    only k = 5.

    Args:
        states: standardised states (N, D).
        max_k: exclusive upper bound of k, at least 6.

    Returns:
        True for outliers, bool (N,), and the values of k that took part in the vote.

    Raises:
        UserError: if there are no more states than the largest k.
    """
    ks = tuple(range(SMALLEST_K, max_k, 2))
    if len(states) <= ks[-1]:
        raise UserError(f"there are only {len(states)} states, too few for the {ks[-1]} nearest "
                        "neighbours of each; take more episodes or lower outlier_max_k")
    _, distances = nearest_neighbours(states, ks[-1], seed)  # (N, largest k), ascending
    votes = np.zeros(len(states), dtype=np.int64)
    for k in ks:
        medians = distances[:, k // 2].astype(np.float64)  # k is odd
        votes += medians > medians.mean() + DEVIATIONS * medians.std()
    return 2 * votes > len(ks), ks


NO_CLUSTER = -1

# Largest number of rows that agglomerative and hdbscan are fitted to; every other row gets the
# cluster of its nearest fitted row.
CLUSTER_FIT_ROWS = 30_000
GRAPH_NEIGHBOURS = 10
KMEANS_STARTS = 4
# Neighbours from which hdbscan estimates the density around a row. The default of hdbscan is the
# minimum cluster size, which leads to quadratic run time and labels most of a t-SNE map as noise.
DENSITY_NEIGHBOURS = 5

logger = logging.getLogger(__name__)


def find_clusters(rows: np.ndarray, method: str, num_clusters: int, seed: int,
                  fit_rows: int = CLUSTER_FIT_ROWS) -> tuple[np.ndarray, int]:
    """Cluster rows with a method from CLUSTERINGS of ``analysis.parameters``.

    - ``agglomerative``: Ward linkage, merging only clusters connected in the graph of 10 nearest
      neighbours. Fitted to at most ``fit_rows`` rows.
    - ``hdbscan``: density-based clustering (Campello et al. 2013), accelerated with trees (McInnes
      and Healy 2017). Fitted to n rows, at most ``fit_rows``; run time grows like n log n in few
      dimensions. The method determines the number of clusters itself; ``num_clusters`` sets the
      minimum cluster size, which is n / (4 num_clusters), rounded down, but at least 5 rows. If no
      cluster is found, all rows form one cluster, and a warning is logged.
    - ``kmeans``: best of 4 initialisations. Fitted to all rows.

    Args:
        rows: rows to cluster, float32 (N, d).
        fit_rows: largest number of rows to fit to.

    Returns:
        Cluster of each row from 0, NO_CLUSTER for rows that hdbscan labels as noise, int64 (N,);
        and the number of rows that the method was fitted to. Every other row has the cluster of its
        nearest fitted row.

    Raises:
        UserError: if there are fewer rows than clusters.
    """
    if len(rows) < num_clusters:
        raise UserError(f"n_clusters is {num_clusters}, but there are only {len(rows)} states")
    if method == "kmeans":
        model = KMeans(num_clusters, n_init=KMEANS_STARTS, random_state=seed)
        return model.fit_predict(rows).astype(np.int64), len(rows)
    chosen = some_rows(len(rows), max(fit_rows, num_clusters), seed)
    fit = {"agglomerative": _agglomerative, "hdbscan": _hdbscan}[method]
    labels = np.empty(len(rows), dtype=np.int64)
    labels[chosen] = fit(rows[chosen], num_clusters, seed)
    unfitted = np.setdiff1d(np.arange(len(rows)), chosen, assume_unique=True)
    if len(unfitted):
        nearest, _ = nearest_rows(rows[unfitted], rows[chosen], 1)
        labels[unfitted] = labels[chosen][nearest[:, 0]]
    return labels, len(chosen)


def cluster_means(rows: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Compute the mean of each cluster's members.

    Args:
        rows: rows to average (N, d).
        labels: cluster of each row, NO_CLUSTER for none (N,).

    Returns:
        Mean of each cluster, ordered by cluster number, float32 (clusters, d).
    """
    return np.stack([rows[labels == cluster].mean(axis=0, dtype=np.float64)
                     for cluster in range(labels.max() + 1)]).astype(np.float32)


def _agglomerative(rows: np.ndarray, num_clusters: int, seed: int) -> np.ndarray:
    k = min(GRAPH_NEIGHBOURS, len(rows) - 1)
    indices, _ = nearest_neighbours(rows, k, seed)
    graph = csr_matrix((np.ones(indices.size), indices.ravel(),
                        np.arange(0, indices.size + 1, k)), shape=(len(rows), len(rows)))
    model = AgglomerativeClustering(num_clusters, linkage="ward",
                                    connectivity=graph.maximum(graph.T))
    with warnings.catch_warnings():  # scikit-learn warns about a disconnected graph and connects it
        warnings.filterwarnings("ignore", "the number of connected components", UserWarning)
        return model.fit_predict(rows)


def _hdbscan(rows: np.ndarray, num_clusters: int, seed: int) -> np.ndarray:
    smallest = max(5, len(rows) // (4 * num_clusters))
    with warnings.catch_warnings():  # hdbscan uses an old argument name of scikit-learn
        warnings.filterwarnings("ignore", "'force_all_finite' was renamed", FutureWarning)
        labels = HDBSCAN(min_cluster_size=smallest, min_samples=DENSITY_NEIGHBOURS,
                         algorithm="boruvka_kdtree").fit_predict(rows)
    if labels.max() == NO_CLUSTER:
        logger.warning("hdbscan finds no cluster of at least %d rows; all rows are assigned to one "
                       "cluster", smallest)
        return np.zeros(len(rows), dtype=np.int64)
    return labels


PERPLEXITY = 30
# Largest number of rows that a t-SNE map is fitted to; every other row is placed by its neighbours.
FIT_ROWS = 100_000
FIT_ROWS_3D = 20_000
PLACING_NEIGHBOURS = 10
START_STD = 1e-4  # initial standard deviation of the first coordinate; t-SNE needs a small one


def embed(principal: np.ndarray, num_components: int, seed: int,
          fit_rows: int | None = None) -> tuple[np.ndarray, int]:
    """Compute a t-SNE map (van der Maaten 2008) of principal coordinates.

    The perplexity is 30, or a third of the number of other fitted rows if that is smaller.
    Two-dimensional maps are computed by openTSNE, which uses interpolation (Linderman et al. 2019)
    for 10 000 rows or more, and the Barnes-Hut approximation for fewer. Three-dimensional maps are
    computed by scikit-learn.

    Args:
        principal: principal coordinates in order of descending variance, float32 (N, d).
        num_components: number of dimensions of the map, c: 2 or 3.
        fit_rows: largest number of rows to fit to; None for 100 000 or, in three dimensions,
            20 000.

    Returns:
        Coordinates on the map, float32 (N, c), and the number of rows that it was fitted to. Every
        other row is placed at the median position of its 10 nearest fitted rows.

    Raises:
        UserError: if there are fewer than 5 rows, or fewer columns than dimensions.
    """
    if principal.shape[1] < num_components or len(principal) < 5:
        raise UserError(f"t-SNE in {num_components} dimensions needs at least 5 states and as many "
                        f"principal components as dimensions, not {len(principal)} states and "
                        f"{principal.shape[1]} components")
    if fit_rows is None:
        fit_rows = FIT_ROWS if num_components < 3 else FIT_ROWS_3D
    chosen = some_rows(len(principal), fit_rows, seed)
    start = principal[chosen, :num_components].astype(np.float64)
    start = (start - start.mean(axis=0)) * (START_STD / start[:, 0].std())
    places = np.empty((len(principal), num_components), dtype=np.float32)
    # t-SNE needs three times as many neighbours per row as the perplexity.
    perplexity = min(PERPLEXITY, (len(chosen) - 1) / 3)
    if num_components < 3:
        places[chosen] = _fit_fast(principal[chosen], start, perplexity, seed)
    else:
        model = TSNE(3, perplexity=perplexity, init=start.astype(np.float32), random_state=seed,
                     n_jobs=num_jobs(len(chosen)))
        places[chosen] = model.fit_transform(principal[chosen])
    unfitted = np.setdiff1d(np.arange(len(principal)), chosen, assume_unique=True)
    if len(unfitted):
        nearest, _ = nearest_rows(principal[unfitted], principal[chosen], PLACING_NEIGHBOURS)
        places[unfitted] = np.median(places[chosen][nearest], axis=1)
    return places, len(chosen)


def _fit_fast(rows: np.ndarray, start: np.ndarray, perplexity: float, seed: int) -> np.ndarray:
    indices, distances = nearest_neighbours(rows, int(3 * perplexity), seed, exact_rows=len(rows))
    logging.getLogger("openTSNE").setLevel(logging.WARNING)  # openTSNE logs its default settings
    affinities = PerplexityBasedNN(perplexity=perplexity, n_jobs=num_jobs(len(rows)),
                                   knn_index=PrecomputedNeighbors(indices, distances))
    return np.asarray(FastTSNE(start.shape[1], n_jobs=num_jobs(len(rows)), random_state=seed).fit(
        affinities=affinities, initialization=start))
