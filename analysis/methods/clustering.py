"""Groups of states that lie close together."""

from __future__ import annotations

import dataclasses
import logging
import warnings

import numpy as np
from hdbscan import HDBSCAN
from scipy.sparse import csr_matrix
from sklearn.cluster import AgglomerativeClustering, KMeans

from analysis.methods.neighbours import nearest_neighbours, nearest_rows, some_rows
from common.errors import UserError

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
    """Group rows by one of CLUSTERINGS of ``analysis.parameters.config``.

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
