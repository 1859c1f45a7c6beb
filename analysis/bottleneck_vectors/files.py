"""Files of the analysis of bottleneck vectors: names, writer and reader of
``analysis/bottleneck_vec_analysis_precomp/``.

Layout, as published but for the files marked *; N is the number of simulated samples of each kind,
and a row is a sample::

    lv_inf_pca_N                principal coordinates of the informed vectors (N, P)
    pcomponents_lv_inf_N        their principal components (P, V)
    lv_rand_pca_projected_N     coordinates of the random vectors along the same (N, P)
    tsne_lv_inf_N, tsne_lv_rand_N       places of both on one map (N, 2)
    clusters_lv_inf_N           cluster of each informed vector, -1 for none (N,)
    cluster_means_lv_inf_N      means of the principal coordinates (C, P)
    mu_lv_inf_N *               mean of the informed vectors (V,)
    pc_variances_lv_inf_N *     (P,)
    cosines_lv_inf_N *, cosines_lv_rand_N *     between pairs of vectors, at most a million
    aux_lv_N.csv *              one row a sample: start (informed_init or rand_init), sample,
                                sum_of_reward, ends, mean_value, cluster (-1 for none, and for
                                random ones)
    pca_data_lv_inf_N, pca_data_lv_rand_projected_N     the same as lv_inf_pca_N and as
                                lv_rand_pca_projected_N, for published scripts that read these
    lv_inf_aux_data_N.csv       for them, too: sum_of_reward, ends, mean_value and cluster of the
                                informed samples, one row each

All are ``.npy`` files but those called ``.csv``. How far the vectors are from uniform is in the
settings. Of a published folder the reader takes the coordinates by either name.
"""

from __future__ import annotations

import numpy as np

from common.schemas import Array, Entry, Npy, Schema, Table

_OUTCOMES = {"sum_of_reward": float, "ends": float, "mean_value": float, "cluster": int}
BOTTLENECK_FILES = Schema(
    "results for {} samples", "analysis/bottleneck_vec_analysis_precompute.py", items={
        "principal": Entry("lv_inf_pca_{}.npy", Npy(Array(np.floating, "N P")),
                           fallback="published_principal"),
        "published_principal": Entry("pca_data_lv_inf_{}.npy", Npy(Array(np.floating, "N P"))),
        "components": Entry("pcomponents_lv_inf_{}.npy", Npy(Array(np.floating, "P V"))),
        "random": Entry("lv_rand_pca_projected_{}.npy", Npy(Array(np.floating, "N P")),
                        fallback="published_random"),
        "published_random": Entry("pca_data_lv_rand_projected_{}.npy",
                                  Npy(Array(np.floating, "N P"))),
        "tsne": Entry("tsne_lv_inf_{}.npy", Npy(Array(np.floating, "N T"))),
        "random_tsne": Entry("tsne_lv_rand_{}.npy", Npy(Array(np.floating, "N T"))),
        "clusters": Entry("clusters_lv_inf_{}.npy", Npy(Array(np.integer, "N"))),
        "cluster_means": Entry("cluster_means_lv_inf_{}.npy", Npy(Array(np.floating, "C P"))),
        "mean": Entry("mu_lv_inf_{}.npy", Npy(Array(np.floating, "V"))),
        "variances": Entry("pc_variances_lv_inf_{}.npy", Npy(Array(np.floating, "P"))),
        "cosines": Entry("cosines_lv_inf_{}.npy", Npy(Array(np.floating, "pairs"))),
        "random_cosines": Entry("cosines_lv_rand_{}.npy", Npy(Array(np.floating, "pairs"))),
        "table": Entry("aux_lv_{}.csv", Table({"start": str, "sample": int, **_OUTCOMES}, gaps=(),
                                              exact=True, whole=True)),
        "published_table": Entry("lv_inf_aux_data_{}.csv", Table(_OUTCOMES, gaps=(), exact=True,
                                                                 whole=True))},
    settings_name="settings_{}.json", flag="--precomp_dir")
