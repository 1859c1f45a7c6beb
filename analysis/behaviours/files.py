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

from typing import ClassVar

from common.array_folders import LABELS, MATRIX, VECTOR, ResultFolder

_WHAT = "combined_agent_env_hx"


class BehavioursFolder(ResultFolder):
    """Names and readers of the behaviours in one number of samples.

    A behaviour is a cluster of steps; a sample shows the one that most of its first steps are in.
    """

    script = "analysis/combined_agent_env_hx_analysis_precompute.py"
    kinds: ClassVar = {
        "clusters": (f"clusters_{_WHAT}", LABELS),
        "cluster_means": (f"cluster_means_{_WHAT}", MATRIX), "tsne": (f"tsne_{_WHAT}", MATRIX),
        "per_sample": ("clusters_per_sample", LABELS),
        "components": (f"pcomponents_{_WHAT}", MATRIX),
        "variances": (f"pc_variances_{_WHAT}", VECTOR), "principal": (f"pca_data_{_WHAT}", MATRIX),
        "mean": (f"mu_{_WHAT}", VECTOR), "std": (f"std_{_WHAT}", VECTOR)}

    @property
    def num_samples(self) -> int:
        return self.number
