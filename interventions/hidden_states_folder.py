"""Files of the analysis of the agent's hidden states, in ``analysis/hx_analysis_precomp/``.

The layout is as published, except for the file marked *. N is the number of recorded episodes, M
the number of simulated samples. Rows are the states ``hx[1:]`` of all episodes, concatenated.
Letters in shapes: D hidden units, P principal components, k independent components, C clusters, F
NMF factors, T steps of a sample::

    hx_mu_N, hx_std_N                               mean and standard deviation of units (D,)
    hx_outlier_mask_N                               bool (rows,), True for a state that is kept,
                                                    False for an outlier
    hx_outlier_retention_fraction                   share of the rows that are kept ()
    pcomponents_N                                   principal components (P, D)
    pc_loading_variances_N, pc_singular_values_N    variances and singular values (P,)
    hx_pca_N                                        principal coordinates (rows, P)
    gen_hx_projected_realN_genM                     principal coordinates of simulated states
                                                    (M * T, P)
    ica_unmixing_matrix_hx_N, ica_mixing_matrix_hx_N    ICA matrices (k, k)
    ica_source_signals_hx_N                         independent coordinates (rows, k)
    clusters_hx_N                                   cluster of each row, -1 for none (rows,)
    cluster_means_hx_N                              cluster means in principal coordinates (C, P)
    tsne_hx_N                                       t-SNE embedding (rows, 2)
    nmf_hx_N, nmf_components_hx_N                   NMF weights (rows, F) and factors (F, D)
    nmf_min_per_dim_hx_N                            minimum of each unit, subtracted before the
                                                    NMF (D,)
    settings_N.json *                               settings, and details of each step, such as
                                                    convergence

All files except the last are ``.npy`` files. A folder can hold results for several N. In older
folders, whose ``settings_N.json`` has no step ``kept``, the mask is True for outliers; no script
reads the mask from a folder.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from common.schemas import Array, Entry, Npy, NpyFolder, Schema
from common.step_results import STEP_SETTINGS, StepResults

MATRIX_ARRAYS = NpyFolder({
    "mean": Array(np.floating, "D"), "std": Array(np.floating, "D"),
    "components": Array(np.floating, "P D"), "variances": Array(np.floating, "P"),
    "unmixing": Array(np.floating, "K K"), "mixing": Array(np.floating, "K K")})
MATRICES = {name: Entry(f"{file}_{{}}.npy", Npy(MATRIX_ARRAYS.fields[name])) for name, file in {
    "mean": "hx_mu", "std": "hx_std", "components": "pcomponents",
    "variances": "pc_loading_variances", "unmixing": "ica_unmixing_matrix_hx",
    "mixing": "ica_mixing_matrix_hx"}.items()}
HIDDEN_STATE_FILES = Schema(
    "results for {} episodes", "analysis/hidden_analysis_precompute.py", items={
        **MATRICES,
        "kept": Entry("hx_outlier_mask_{}.npy", Npy(Array(np.bool_, "N"))),
        "retention": Entry("hx_outlier_retention_fraction.npy", Npy(Array(np.floating))),
        "singular_values": Entry("pc_singular_values_{}.npy", Npy(Array(np.floating, "P"))),
        "principal": Entry("hx_pca_{}.npy", Npy(Array(np.floating, "N P"))),
        "generated": Entry("gen_hx_projected_real{}_gen{}.npy", Npy(Array(np.floating, "M P"))),
        "sources": Entry("ica_source_signals_hx_{}.npy", Npy(Array(np.floating, "N K"))),
        "clusters": Entry("clusters_hx_{}.npy", Npy(Array(np.integer, "N"))),
        "cluster_means": Entry("cluster_means_hx_{}.npy", Npy(Array(np.floating, "C P"))),
        "tsne": Entry("tsne_hx_{}.npy", Npy(Array(np.floating, "N T"))),
        "nmf": Entry("nmf_hx_{}.npy", Npy(Array(np.floating, "N F"))),
        "nmf_components": Entry("nmf_components_hx_{}.npy", Npy(Array(np.floating, "F D"))),
        "nmf_min": Entry("nmf_min_per_dim_hx_{}.npy", Npy(Array(np.floating, "D")))},
    settings_name="settings_{}.json", flag="--precomp_dir", setting_types=STEP_SETTINGS)


def hidden_state_results(path: Path, num_episodes: int,
                         num_samples: int | None = None) -> StepResults:
    """Return the store of the results for a number of episodes.

    Args:
        path: results folder.
        num_episodes: number of recorded episodes.
        num_samples: number of simulated samples, part of the file name of ``generated``.
    """
    return StepResults(path, HIDDEN_STATE_FILES, num_episodes, num_samples)


def matrix_files(folder: Path, num_episodes: int) -> dict[str, Path]:
    """Return the files of the matrices of ``Projector``, by attribute name."""
    results = hidden_state_results(folder, num_episodes)
    return {name: results.file(name) for name in MATRICES}
