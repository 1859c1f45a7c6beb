"""Files of the analysis of the agent's hidden states: writer and reader of
``analysis/hx_analysis_precomp/``.

Layout, as published but for the file marked *; N is the number of recorded episodes, M that of
simulated samples, and rows are the states ``hx[1:]`` of episode 0, then of episode 1, and so on::

    hx_mu_N, hx_std_N                               mean and standard deviation of units (D,)
    hx_outlier_mask_N                               bool (rows,), True for a state that is kept,
                                                    False for an outlier
    hx_outlier_retention_fraction                   share of the rows that are none ()
    pcomponents_N                                   principal components (P, D)
    pc_loading_variances_N, pc_singular_values_N    (P,)
    hx_pca_N                                        principal coordinates (rows, P)
    gen_hx_projected_realN_genM                     of the simulated states (M * T, P)
    ica_unmixing_matrix_hx_N, ica_mixing_matrix_hx_N    (k, k)
    ica_source_signals_hx_N                         independent coordinates (rows, k)
    clusters_hx_N                                   cluster of each row, -1 for none (rows,)
    cluster_means_hx_N                              means of the principal coordinates (C, P)
    tsne_hx_N                                       (rows, 2)
    nmf_hx_N, nmf_components_hx_N                   weights (rows, F) and factors (F, D)
    nmf_min_per_dim_hx_N                            what was subtracted before (D,)
    settings_N.json *                               what made them, and how each step went

All are ``.npy`` files but the last. Results of several N lie side by side. Folders that we wrote
before ``settings_N.json`` had a step ``kept`` have True for an outlier in the mask; no script reads
the mask from a folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np

from common.array_folders import LABELS, MATRIX, VECTOR, ResultFolder

MATRICES = {"mean": ("hx_mu", VECTOR), "std": ("hx_std", VECTOR),
            "components": ("pcomponents", MATRIX),
            "variances": ("pc_loading_variances", VECTOR),
            "unmixing": ("ica_unmixing_matrix_hx", MATRIX),
            "mixing": ("ica_mixing_matrix_hx", MATRIX)}


def matrix_files(folder: Path, num_episodes: int) -> dict[str, Path]:
    """The files of the projector, by its attributes."""
    files = HiddenStatesFolder(folder, num_episodes)
    return {name: files.file(name) for name in MATRICES}


class HiddenStatesFolder(ResultFolder):
    """Names and readers of the results for one number of episodes.

    Args:
        num_samples: simulated samples, in the name of the file of ``generated``; None without
            them.
    """

    script = "analysis/hidden_analysis_precompute.py"
    kinds: ClassVar = {
        **MATRICES, "kept": ("hx_outlier_mask", (np.bool_, 1)),
        "retention": ("hx_outlier_retention_fraction", (np.floating, 0)),
        "singular_values": ("pc_singular_values", VECTOR), "principal": ("hx_pca", MATRIX),
        "generated": ("gen_hx_projected", MATRIX), "sources": ("ica_source_signals_hx", MATRIX),
        "clusters": ("clusters_hx", LABELS), "cluster_means": ("cluster_means_hx", MATRIX),
        "tsne": ("tsne_hx", MATRIX), "nmf": ("nmf_hx", MATRIX),
        "nmf_components": ("nmf_components_hx", MATRIX), "nmf_min": ("nmf_min_per_dim_hx", VECTOR)}

    def __init__(self, path: Path, num_episodes: int, num_samples: int | None = None):
        super().__init__(path, num_episodes)
        self.num_samples = num_samples

    @property
    def num_episodes(self) -> int:
        return self.number

    def at(self, path: Path) -> HiddenStatesFolder:
        return HiddenStatesFolder(path, self.number, self.num_samples)

    def file(self, name: str) -> Path:
        if name == "generated":
            numbers = f"real{self.number}_gen{self.num_samples}"
            return self.path / f"{self.kinds[name][0]}_{numbers}.npy"
        if name == "retention":
            return self.path / f"{self.kinds[name][0]}.npy"
        return super().file(name)
