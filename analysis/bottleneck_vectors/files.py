"""Files of the analysis of bottleneck vectors: names, writer and reader of
``analysis/bottleneck_vec_analysis_precomp/``.

Layout, as published but for the files marked *; N is the number of simulated samples of each kind,
and a row is a sample::

    lv_inf_pca_N                principal coordinates of the informed vectors (N, P)
    pcomponents_lv_inf_N        their principal components (P, V)
    lv_rand_pca_projected_N     coordinates of the random vectors along the same (N, P)
    tsne_lv_inf_N, tsne_lv_rand_N       places of both on one map (N, 2)
    clusters_lv_inf_N           cluster of each informed vector, -1 for none (N,)
    cluster_means_lv_inf_N      means of the first principal coordinates (C, p)
    mu_lv_inf_N *               mean of the informed vectors (V,)
    pc_variances_lv_inf_N *     (P,)
    cosines_lv_inf_N *, cosines_lv_rand_N *     between pairs of vectors, at most a million
    aux_lv_N.csv *              one row a sample: start (informed_init or rand_init), sample,
                                sum_of_reward, ends, mean_value, cluster (-1 for none, and for
                                random ones)

All are ``.npy`` files but the last. How far the vectors are from uniform is in the settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd

from common.array_folders import ResultFolder
from common.files import atomic_path
from common.tables import read_table

_TABLE = "table"
_COLUMNS = {"start": str, "sample": int, "sum_of_reward": float, "ends": float,
            "mean_value": float, "cluster": int}


class BottleneckFolder(ResultFolder):
    """Names, writer and readers of the results for one number of samples."""

    script = "analysis/bottleneck_vec_analysis_precompute.py"
    stems: ClassVar[dict[str, str]] = {
        "principal": "lv_inf_pca", "components": "pcomponents_lv_inf",
        "random": "lv_rand_pca_projected", "tsne": "tsne_lv_inf", "random_tsne": "tsne_lv_rand",
        "clusters": "clusters_lv_inf", "cluster_means": "cluster_means_lv_inf",
        "mean": "mu_lv_inf", "variances": "pc_variances_lv_inf", "cosines": "cosines_lv_inf",
        "random_cosines": "cosines_lv_rand"}

    def file(self, name: str) -> Path:
        return self.path / f"aux_lv_{self.number}.csv" if name == _TABLE else super().file(name)

    def read(self, name: str) -> np.ndarray | pd.DataFrame:
        """An array, or the auxiliary ``table``.

        Raises:
            UserError: if its file is missing or damaged.
        """
        if name != _TABLE:
            return super().read(name)
        return read_table(self.file(name), _COLUMNS, written_by=self.script)

    def store(self, name: str, values: np.ndarray | pd.DataFrame) -> None:
        if name != _TABLE:
            super().store(name, values)
            return
        with atomic_path(self.file(name)) as temporary:
            values.to_csv(temporary, index=False, columns=list(_COLUMNS))
