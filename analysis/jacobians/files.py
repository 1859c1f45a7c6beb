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

from typing import ClassVar

from common.array_folders import ResultFolder


class JacobiansFolder(ResultFolder):
    """Names and readers of the results for one number of samples."""

    script = "analysis/jacobian_analysis_precompute.py"
    stems: ClassVar[dict[str, str]] = {
        "clusters": "clusters_jacob", "cluster_means": "cluster_means_jacob",
        "tsne": "tsne_jacob", "per_sample": "clusters_per_sample", "principal": "pca_data_jacob",
        "components": "pcomponents_jacob", "mean": "mu_jacob", "variances": "pc_variances_jacob",
        "sizes": "sizes_jacob"}
