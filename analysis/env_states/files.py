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

from typing import ClassVar

from common.array_folders import LABELS, MATRIX, VECTOR, ResultFolder


class EnvStatesFolder(ResultFolder):
    """Names and readers of the results for one number of samples."""

    script = "analysis/env_h_analysis_precompute.py"
    kinds: ClassVar = {
        "principal": ("pca_data_env", MATRIX), "components": ("pcomponents_env", MATRIX),
        "clusters": ("clusters_env", LABELS), "cluster_means": ("cluster_means_env", MATRIX),
        "tsne": ("tsne_env", MATRIX), "mean": ("mu_env", VECTOR), "std": ("std_env", VECTOR),
        "variances": ("pc_variances_env", VECTOR)}
