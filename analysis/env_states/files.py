"""Files of the analysis of the environment's states: names and reader of
``analysis/env_analysis_precomp/``.

Layout, as published but for the files marked *; N is the number of simulated samples, and rows are
the steps of sample 0, then of sample 1, and so on::

    pca_data_env_N                  principal coordinates (rows, P)
    pcomponents_env_N               principal components (P, E)
    clusters_env_N                  cluster of each row, -1 for none (rows,)
    cluster_means_env_N             means of the principal coordinates (C, P)
    tsne_env_N                      (rows, 2)
    mu_env_N *, std_env_N *         mean and standard deviation of units (E,)
    pc_variances_env_N *            (P,)

All are ``.npy`` files.
"""

from __future__ import annotations

import numpy as np

from common.schemas import Array, Entry, Npy, Schema

ENV_STATE_FILES = Schema(
    "results for {} samples", "analysis/env_h_analysis_precompute.py", items={
        "principal": Entry("pca_data_env_{}.npy", Npy(Array(np.floating, "N P"))),
        "components": Entry("pcomponents_env_{}.npy", Npy(Array(np.floating, "P E"))),
        "clusters": Entry("clusters_env_{}.npy", Npy(Array(np.integer, "N"))),
        "cluster_means": Entry("cluster_means_env_{}.npy", Npy(Array(np.floating, "C P"))),
        "tsne": Entry("tsne_env_{}.npy", Npy(Array(np.floating, "N T"))),
        "mean": Entry("mu_env_{}.npy", Npy(Array(np.floating, "E"))),
        "std": Entry("std_env_{}.npy", Npy(Array(np.floating, "E"))),
        "variances": Entry("pc_variances_env_{}.npy", Npy(Array(np.floating, "P")))},
    settings_name="settings_{}.json", flag="--precomp_dir")
