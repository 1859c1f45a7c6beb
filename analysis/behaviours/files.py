"""Files of the analysis of behaviours: reader and names of
``analysis/combined_agent_env_hx_analysis_precomp/``.

Layout, as published but for the files marked *; N is the number of simulated samples, and rows are
the steps of sample 0, then of sample 1, and so on::

    clusters_combined_agent_env_hx_N        cluster of each step, -1 for none (rows,)
    cluster_means_combined_agent_env_hx_N   means of the places on the map (C, 3)
    tsne_combined_agent_env_hx_N            places on the map (rows, 3)
    clusters_per_sample_N                   behaviour of each sample, -1 for none (N,)
    pcomponents_combined_agent_env_hx_N *, pc_variances_combined_agent_env_hx_N *,
    pca_data_combined_agent_env_hx_N *      principal components (P, D), variances (P,),
                                            coordinates (rows, P)
    mu_combined_agent_env_hx_N *, std_combined_agent_env_hx_N *    of what they are of (D,)

All are ``.npy`` files.
"""

from __future__ import annotations

import numpy as np

from common.schemas import Array, Entry, Npy, Schema

BEHAVIOUR_FILES = Schema(
    "results for {} samples", "analysis/combined_agent_env_hx_analysis_precompute.py", items={
        "clusters": Entry("clusters_combined_agent_env_hx_{}.npy", Npy(Array(np.integer, "N"))),
        "cluster_means": Entry("cluster_means_combined_agent_env_hx_{}.npy",
                               Npy(Array(np.floating, "C T"))),
        "tsne": Entry("tsne_combined_agent_env_hx_{}.npy", Npy(Array(np.floating, "N T"))),
        "per_sample": Entry("clusters_per_sample_{}.npy", Npy(Array(np.integer, "M"))),
        "components": Entry("pcomponents_combined_agent_env_hx_{}.npy",
                            Npy(Array(np.floating, "P D"))),
        "variances": Entry("pc_variances_combined_agent_env_hx_{}.npy",
                           Npy(Array(np.floating, "P"))),
        "principal": Entry("pca_data_combined_agent_env_hx_{}.npy", Npy(Array(np.floating, "N P"))),
        "mean": Entry("mu_combined_agent_env_hx_{}.npy", Npy(Array(np.floating, "D"))),
        "std": Entry("std_combined_agent_env_hx_{}.npy", Npy(Array(np.floating, "D")))},
    settings_name="settings_{}.json", flag="--precomp_dir")
