"""Files of the analysis of Jacobians: names and reader of ``analysis/jacob_analysis_precomp/``.

Layout, as published but for the files marked *; N is the number of simulated samples, and a row is
a sample::

    clusters_jacob_N                cluster of each sample, -1 for none (N,)
    cluster_means_jacob_N           means of the principal coordinates (C, P)
    tsne_jacob_N                    (N, 2)
    clusters_per_sample_N           the same as clusters_jacob_N, for what reads the clusters of
                                    samples by this name
    pca_data_jacob_N *              principal coordinates (N, P)
    pcomponents_jacob_N *           principal components (P, F)
    mu_jacob_N *                    mean of the features (F,); see ``analysis.jacobians.steps``
    pc_variances_jacob_N *          (P,)
    sizes_jacob_N *                 root mean square of the gradient of each component with respect
                                    to the agent's and to the environment's state (N, 2, k)

All are ``.npy`` files.
"""

from __future__ import annotations

import numpy as np

from common.schemas import Array, Entry, Npy, Schema

JACOBIAN_FILES = Schema(
    "results for {} samples", "analysis/jacobian_analysis_precompute.py", items={
        "clusters": Entry("clusters_jacob_{}.npy", Npy(Array(np.integer, "N"))),
        "cluster_means": Entry("cluster_means_jacob_{}.npy", Npy(Array(np.floating, "C P"))),
        "tsne": Entry("tsne_jacob_{}.npy", Npy(Array(np.floating, "N T"))),
        "per_sample": Entry("clusters_per_sample_{}.npy", Npy(Array(np.integer, "N"))),
        "principal": Entry("pca_data_jacob_{}.npy", Npy(Array(np.floating, "N P"))),
        "components": Entry("pcomponents_jacob_{}.npy", Npy(Array(np.floating, "P F"))),
        "mean": Entry("mu_jacob_{}.npy", Npy(Array(np.floating, "F"))),
        "variances": Entry("pc_variances_jacob_{}.npy", Npy(Array(np.floating, "P"))),
        "sizes": Entry("sizes_jacob_{}.npy", Npy(Array(np.floating, "N 2 K")))},
    settings_name="settings_{}.json", flag="--precomp_dir")
