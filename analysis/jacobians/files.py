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

import numpy as np

from common.array_folders import LABELS, MATRIX, VECTOR, ResultFolder


class JacobiansFolder(ResultFolder):
    """Names and readers of the results for one number of samples."""

    script = "analysis/jacobian_analysis_precompute.py"
    kinds: ClassVar = {
        "clusters": ("clusters_jacob", LABELS), "cluster_means": ("cluster_means_jacob", MATRIX),
        "tsne": ("tsne_jacob", MATRIX), "per_sample": ("clusters_per_sample", LABELS),
        "principal": ("pca_data_jacob", MATRIX), "components": ("pcomponents_jacob", MATRIX),
        "mean": ("mu_jacob", VECTOR), "variances": ("pc_variances_jacob", VECTOR),
        "sizes": ("sizes_jacob", (np.floating, 3))}
