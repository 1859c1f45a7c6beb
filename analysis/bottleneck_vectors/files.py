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

from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd

from common.array_folders import LABELS, MATRIX, VECTOR, ResultFolder
from common.files import atomic_path
from common.tables import read_table

_OUTCOMES = {"sum_of_reward": float, "ends": float, "mean_value": float, "cluster": int}
_TABLES = {"table": ("aux_lv", {"start": str, "sample": int, **_OUTCOMES}),
           "published_table": ("lv_inf_aux_data", _OUTCOMES)}


class BottleneckFolder(ResultFolder):
    """Names, writer and readers of the results for one number of samples."""

    script = "analysis/bottleneck_vec_analysis_precompute.py"
    kinds: ClassVar = {
        "principal": ("lv_inf_pca", MATRIX), "published_principal": ("pca_data_lv_inf", MATRIX),
        "components": ("pcomponents_lv_inf", MATRIX), "random": ("lv_rand_pca_projected", MATRIX),
        "published_random": ("pca_data_lv_rand_projected", MATRIX), "tsne": ("tsne_lv_inf", MATRIX),
        "random_tsne": ("tsne_lv_rand", MATRIX), "clusters": ("clusters_lv_inf", LABELS),
        "cluster_means": ("cluster_means_lv_inf", MATRIX), "mean": ("mu_lv_inf", VECTOR),
        "variances": ("pc_variances_lv_inf", VECTOR), "cosines": ("cosines_lv_inf", VECTOR),
        "random_cosines": ("cosines_lv_rand", VECTOR)}

    def file(self, name: str) -> Path:
        if name in _TABLES:
            return self.path / f"{_TABLES[name][0]}_{self.number}.csv"
        file, published = super().file(name), f"published_{name}"
        if published in self.kinds and not file.exists() and super().file(published).exists():
            return super().file(published)
        return file

    def read(self, name: str) -> np.ndarray | pd.DataFrame:
        """An array, or the auxiliary ``table`` or ``published_table``.

        Raises:
            UserError: if its file is missing or damaged.
        """
        if name not in _TABLES:
            return super().read(name)
        return read_table(self.file(name), _TABLES[name][1], written_by=self.script)

    def store(self, name: str, values: np.ndarray | pd.DataFrame) -> None:
        if name not in _TABLES:
            super().store(name, values)
            return
        with atomic_path(self.file(name)) as temporary:
            values.to_csv(temporary, index=False, columns=list(_TABLES[name][1]))
