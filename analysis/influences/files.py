"""Files of the analyses of influences between components.

``analysis/cross_corr_and_causation_plot_data/``, with c a behaviour's number, or ``all`` for all
samples together, k a lag, i a component (IC)::

    xcorr_hx_clust<c>_t+<k>.npy         mean products: rows ICs at t, columns ICs at t + k (I, I)
    xcaus_hx_clust<c>_t-<k>.npy *       mean gradients of the ICs at the saliency step (columns)
                                        with respect to ICs k steps earlier (rows) (I, I)
    xcaus_hx_ic<i>_<bottom|top>_t-<k>.npy *   the same, over samples in which IC i is extreme
    xcaus_median_hx_….npy *             medians in the place of these means
    order_of_ics.npy *                  in the figures of all samples (I,)
    cosine_similarity_of_ics.npy *      of the directions (I, I)

``analysis/dyn_grad_comparison_data/``::

    jacobian_clust<c>_t-<k>.npy         mean gradients: rows ICs, columns ICs, then answers (I, J)
    jacobian_clust<c>_t-<k>_without_env_grads.npy
    jacobian_median_clust<c>_t-<k>.npy, …   medians
    agreement_clust<c>_t-<k>.npy, …     share of the samples in which signs agree (I, J)
    agreement.csv                       a row for each pair, lag and group: see TABLE_COLUMNS
    agreement_of_matrices.csv           a row for each lag and group: see MATRIX_COLUMNS
    sample_ids.npy, behaviours.npy      of the samples, -1 for no behaviour (M,)

Files marked * are ours; of the second folder only the table is spelt out by the publication.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd

from common.description import read_description
from common.errors import UserError
from common.files import read_array
from common.schemas import SETTINGS_NAME, Array, Entry, File, Npy, Table
from common.tables import read_table
from generative.saliency.gradients import WITHOUT_ENV_GRADS

MEAN, MEDIAN = AVERAGES = "mean", "median"  # over samples; the mean is published
_INFIX = {MEAN: "", MEDIAN: "_median"}  # in names of files
COMPARISON_SCRIPT = "analysis/dynamics_grads_consistency_plots.py"
TABLE_COLUMNS = {
    "behaviour": "its number, or all", "samples": "in it",
    "env_grads": "with or without gradients through the action that enters the environment",
    "lag": "steps between source and target", "source": "an IC", "target": "an IC or an answer",
    "gradient": "mean, in standard deviations of the recorded states for one of the source",
    "median_gradient": "median, likewise",
    "outliers": "share of the samples whose gradient is more than ten times the median one",
    "steadiness": "share of the samples whose gradient has the sign of the median",
    "cross_correlation": "mean product", "signs_agree": "of gradient and cross-correlation",
    "agreement": "share of the samples in which the gradient agrees with the deviations",
    "p": "of the agreement", "p_corrected": "for all pairs, lags and behaviours",
    "effect": "standard deviations of the target in these samples for one of the source, by the "
              "median gradient",
    "explained": "median gradient times variance of the source as a share of the covariance",
    "claimed": "whether the influence is claimed"}
MATRIX_COLUMNS = {
    "behaviour": "its number, or all", "samples": "in it", "env_grads": "with or without",
    "lag": "", "agreement": "share of the pairs of different ICs whose signs agree",
    "p": "of it", "p_corrected": "for all lags and behaviours"}
_KINDS = {"behaviour": str, "env_grads": str, "source": str, "target": str, "samples": int,
          "lag": int, "signs_agree": bool, "claimed": bool}  # all others are fractions


class CorrelationFolder:
    """Names of the matrices of cross-correlation and cross-causation."""

    FILES: ClassVar = {
        "correlations": Entry("xcorr_hx_clust{}.npy", File()),
        "gradients": Entry("xcaus_hx_{}.npy", File()),
        "median_gradients": Entry("xcaus_median_hx_{}.npy", File()),
        "order": Entry("order_of_ics.npy", File()),
        "cosines": Entry("cosine_similarity_of_ics.npy", File())}

    def __init__(self, path: Path):
        self.path = Path(path)

    def correlation_file(self, group: int | str, lag: int) -> Path:
        return self.path / f"xcorr_hx_clust{group}_t+{lag}.npy"

    def causation_file(self, group: int | str, lag: int, average: str = MEAN) -> Path:
        return self.path / f"xcaus{_INFIX[average]}_hx_clust{group}_t-{lag}.npy"

    def extreme_file(self, component: int, end: str, lag: int, average: str = MEAN) -> Path:
        return self.path / f"xcaus{_INFIX[average]}_hx_ic{component}_{end}_t-{lag}.npy"

    @property
    def order_file(self) -> Path:
        return self.path / "order_of_ics.npy"

    @property
    def cosine_file(self) -> Path:
        return self.path / "cosine_similarity_of_ics.npy"


class ComparisonFolder:
    """Names and readers of the comparison of gradients with correlations."""

    FILES: ClassVar = {
        "gradients": Entry("jacobian_clust{}.npy", File()),
        "median_gradients": Entry("jacobian_median_clust{}.npy", File()),
        "agreement": Entry("agreement_clust{}.npy", File()),
        "table": Entry("agreement.csv", Table()),
        "matrix_table": Entry("agreement_of_matrices.csv", Table()),
        "sample_ids": Entry("sample_ids.npy", Npy(Array(np.int64, "M"))),
        "behaviours": Entry("behaviours.npy", Npy(Array(np.int64, "M")))}

    def __init__(self, path: Path):
        self.path = Path(path)

    def jacobian_file(self, group: int | str, lag: int, without_env_grads: bool,
                      average: str = MEAN) -> Path:
        return self._matrix_file(f"jacobian{_INFIX[average]}", group, lag, without_env_grads)

    def agreement_file(self, group: int | str, lag: int, without_env_grads: bool) -> Path:
        return self._matrix_file("agreement", group, lag, without_env_grads)

    @property
    def table_file(self) -> Path:
        return self.path / "agreement.csv"

    @property
    def matrix_table_file(self) -> Path:
        return self.path / "agreement_of_matrices.csv"

    @property
    def sample_ids_file(self) -> Path:
        return self.path / "sample_ids.npy"

    @property
    def behaviours_file(self) -> Path:
        return self.path / "behaviours.npy"

    def settings(self) -> dict:
        """Settings that made the comparison.

        Raises:
            UserError: if it is missing or damaged.
        """
        found = read_description(self.path / SETTINGS_NAME)
        if not found:
            raise UserError(f"there is no file {self.path / SETTINGS_NAME}; {COMPARISON_SCRIPT} "
                            "writes it")
        return found

    def table(self) -> pd.DataFrame:
        """The rows of ``agreement.csv``; behaviours are text.

        Raises:
            UserError: if it is missing, damaged or holds NaN.
        """
        return _read(self.table_file, TABLE_COLUMNS)

    def matrix_table(self) -> pd.DataFrame:
        """The same of ``agreement_of_matrices.csv``."""
        return _read(self.matrix_table_file, MATRIX_COLUMNS)

    def sample_ids(self) -> np.ndarray:
        return read_array(self.sample_ids_file, np.int64, 1, COMPARISON_SCRIPT)

    def behaviours(self) -> np.ndarray:
        return read_array(self.behaviours_file, np.int64, 1, COMPARISON_SCRIPT)

    def _matrix_file(self, what: str, group: int | str, lag: int, without: bool) -> Path:
        return self.path / f"{what}_clust{group}_t-{lag}{WITHOUT_ENV_GRADS if without else ''}.npy"


def _read(path: Path, columns: Iterable[str]) -> pd.DataFrame:
    return read_table(path, {name: _KINDS.get(name, float) for name in columns},
                      written_by=COMPARISON_SCRIPT)
