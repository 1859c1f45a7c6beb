"""Comparison of gradients with correlations as tables, matrices and figures.

Layout of ``analysis/dyn_grad_comparison_data/``, of which the publication describes only the table.
In file names, c is the number of a behaviour, or ``all`` for all samples together, and k is a lag.
Matrices of gradients without paths through the environment have the suffix ``_without_env_grads``::

    jacobian_clust<c>_t-<k>.npy         mean gradients (I, J): one row per IC; one column per
                                        IC, then one per output
    jacobian_median_clust<c>_t-<k>.npy  median gradients (I, J)
    agreement_clust<c>_t-<k>.npy        ``Agreement.agreement`` (I, J)
    agreement.csv                       one row per tested pair, lag, group and kind of gradient,
                                        see TABLE_COLUMNS
    agreement_of_matrices.csv           one row per lag above 0, group and kind of gradient, see
                                        MATRIX_COLUMNS
    sample_ids.npy, behaviours.npy      numbers of the samples, and the behaviour of each, -1 for
                                        none (M,)

Letters in shape comments: K lags, I sources, J targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from analysis.figures import Figures
from analysis.heatmaps import (
    SHARE,
    ColourScale,
    Heatmap,
    Names,
    plot_matrices,
    signed_scale,
)
from analysis.influences.consistency import (
    ALL_SAMPLES,
    LEVEL,
    MEAN,
    MEDIAN,
    MIN_EFFECT,
    MIN_SAMPLES,
    Agreement,
    Group,
    file_stem,
)
from analysis.influences.gradients import OUTLIER, Influences
from common.results import ResultStore
from common.schemas import Array, Entry, Npy, Schema, Table
from generative.saliency.gradients import WITHOUT_ENV_GRADS

TABLE_COLUMNS = {
    "behaviour": "number of the behaviour, or all", "samples": "number of samples in the group",
    "env_grads": "with or without gradients through the action that enters the environment",
    "lag": "steps between source and target", "source": "name of an IC",
    "target": "name of an IC or of an output of the agent",
    "gradient": "mean gradient, in standard deviations of the recorded states per standard "
                "deviation of the source",
    "median_gradient": "median gradient, in the same unit",
    "outliers": "share of the samples whose gradient is more than ten times the median one",
    "steadiness": "share of the samples whose gradient has the sign of the median",
    "cross_correlation": "mean product of source and target",
    "signs_agree": "whether median gradient and cross-correlation have the same sign",
    "agreement": "share of the samples in which the gradient has the sign of the product of the "
                 "deviations of source and target from their medians",
    "p": "p-value of the agreement",
    "p_corrected": "p-value corrected for all pairs, lags and groups",
    "effect": "change of the target per standard deviation of the source, according to the median "
              "gradient, in standard deviations within the group",
    "explained": "median gradient times variance of the source, as a share of the covariance",
    "claimed": "whether the influence is claimed"}
MATRIX_COLUMNS = {
    "behaviour": "number of the behaviour, or all", "samples": "number of samples in the group",
    "env_grads": "with or without gradients through the action that enters the environment",
    "lag": "steps between source and target",
    "agreement": "share of the pairs of different ICs in which median gradient and "
                 "cross-correlation have the same sign",
    "p": "p-value of the agreement", "p_corrected": "p-value corrected for all lags and groups"}
_KINDS = {"behaviour": str, "env_grads": str, "source": str, "target": str, "samples": int,
          "lag": int, "signs_agree": bool, "claimed": bool}  # all other columns are floats


def _columns(names: Iterable[str]) -> Table:
    return Table({name: _KINDS.get(name, float) for name in names}, gaps=())


_MATRIX = Npy(Array(np.floating, "I J"))
COMPARISON_FILES = Schema(
    "matrices of dynamics_grads_consistency_plots.py",
    "analysis/dynamics_grads_consistency_plots.py", results={
        MEAN: Entry("jacobian_clust{}_t-{}{}.npy", _MATRIX),
        MEDIAN: Entry("jacobian_median_clust{}_t-{}{}.npy", _MATRIX),
        "agreement": Entry("agreement_clust{}_t-{}{}.npy", _MATRIX),
        "table": Entry("agreement.csv", _columns(TABLE_COLUMNS)),
        "matrix_table": Entry("agreement_of_matrices.csv", _columns(MATRIX_COLUMNS)),
        "sample_ids": Entry("sample_ids.npy", Npy(Array(np.int64, "M"))),
        "behaviours": Entry("behaviours.npy", Npy(Array(np.int64, "M")))},
    flag="--data_output_dir", replaced=True,
    setting_types={"samples_dir": str, "matrices_sha256": dict[str, str], "saliency_step": int,
                   "level": float, "min_samples": int})
WITH, WITHOUT = "with", "without"  # values of the column env_grads
SUFFIXES = {WITH: "", WITHOUT: WITHOUT_ENV_GRADS}  # suffixes of file names


class SignAgreementTable:
    """Agreement of gradients and correlations in all groups, as tables.

    Args:
        agreements: nested dict; ``agreements[kind][group]`` is the agreement in a group (the
            samples of one behaviour, or all samples). The kind is WITH (gradients pass through the
            environment) or, optionally, WITHOUT (they do not).
        influences: influences of either kind; only their lags, step, number of ICs and target
            names are used.
    """

    def __init__(self, agreements: Mapping[str, Mapping[Group, Agreement]],
                 influences: Influences):
        self._agreements, self._targets = agreements, influences.target_names
        self._lags, self._num_ics, self._step = (influences.lags, influences.num_ics,
                                                 influences.step)

    def save(self, folder: Path, numbers: Sequence[int], labels: np.ndarray | None) -> None:
        """Write tables and matrices into a folder.

        Args:
            numbers: numbers of the samples (M,).
            labels: behaviour of each sample, -1 for none (M,); None if behaviours are left out.
        """
        store = ResultStore(folder, COMPARISON_FILES)
        store.write("table", value=self.table())
        store.write("matrix_table", value=self.matrix_table())
        for kind, group, agreement in self._all():
            for name, matrices in ((MEAN, agreement.gradients), (MEDIAN, agreement.medians),
                                   ("agreement", agreement.agreement)):
                for lag in self._lags:
                    store.write(name, group, lag, SUFFIXES[kind], value=matrices[lag])
        no_behaviours = np.full(len(numbers), -1)
        store.write("sample_ids", value=np.array(numbers))
        store.write("behaviours", value=no_behaviours if labels is None else labels)

    def table(self) -> pd.DataFrame:
        """Return a table with one row per tested pair, lag, group and kind of gradient; for columns
        see ``TABLE_COLUMNS``."""
        parts = []
        for kind, group, agreement in self._all():
            lag, source, target = np.nonzero(agreement.tested)
            chosen = agreement.tested
            parts.append(pd.DataFrame({
                "behaviour": str(group), "samples": agreement.num_samples,
                "env_grads": kind, "lag": lag,
                "source": [f"IC {i}" for i in source], "target": np.array(self._targets)[target],
                "gradient": agreement.gradients[chosen],
                "median_gradient": agreement.medians[chosen],
                "outliers": agreement.outliers[chosen],
                "steadiness": agreement.steadiness[chosen],
                "cross_correlation": agreement.correlations[chosen],
                "signs_agree": agreement.signs_agree[chosen],
                "agreement": agreement.agreement[chosen], "p": agreement.p[chosen],
                "p_corrected": agreement.p_corrected[chosen],
                "effect": agreement.effects[chosen], "explained": agreement.explained[chosen],
                "claimed": agreement.claimed[chosen]}))
        return pd.concat(parts, ignore_index=True)[list(TABLE_COLUMNS)]

    def matrix_table(self) -> pd.DataFrame:
        """Return a table with one row per lag above 0, group and kind of gradient; for columns see
        ``MATRIX_COLUMNS``."""
        rows = [(str(group), agreement.num_samples, kind, lag,
                 agreement.matrix_agreement[lag], agreement.matrix_p[lag],
                 agreement.matrix_p_corrected[lag])
                for kind, group, agreement in self._all() for lag in self._lags if lag > 0]
        return pd.DataFrame(rows, columns=list(MATRIX_COLUMNS))

    def draw(self) -> Figures:
        """Yield a file name and a figure of gradients, correlations and agreements for each group
        and lag. Lag 0 is drawn only if there are outputs among the targets."""
        for group in self._agreements[WITH]:
            for lag in self._lags:
                if lag > 0 or len(self._targets) > self._num_ics:
                    yield f"{file_stem(group)}_t-{lag}.png", self._plot(group, lag)

    def summary(self) -> Iterator[str]:
        """Yield, for each kind of gradient, a line about claimed influences and one about
        outliers."""
        table = self.table()
        for kind, groups in self._agreements.items():
            name = f"{kind} gradients through the environment"
            yield f"{name}: {claims_summary(table[table['env_grads'] == kind])}"
            shares = groups[ALL_SAMPLES].outlier_samples
            yield (f"{name}: the gradients of a sample are more than {OUTLIER} times as large as "
                   "the median sample's in " + ", ".join(
                       f"{100 * shares[lag]:.3g} % of the samples at lag {lag}"
                       for lag in self._lags if lag > 0))

    def _all(self) -> Iterator[tuple[str, Group, Agreement]]:
        for kind, groups in self._agreements.items():
            for group, agreement in groups.items():
                yield kind, group, agreement

    def _plot(self, group: Group, lag: int) -> Figure:
        # ICs do not influence ICs of the same step.
        columns = np.arange(self._num_ics if lag == 0 else 0, len(self._targets))
        rows = {kind: groups[group] for kind, groups in self._agreements.items()}
        panels = []
        for kind, result in rows.items():
            through = f"{kind} environment gradients"
            marked = result.claimed[lag][:, columns]
            panels += [Heatmap(result.gradients[lag][:, columns], f"mean Jacobian,\n{through}"),
                       Heatmap(result.medians[lag][:, columns],
                               f"median Jacobian, {through};\n"
                               f"samples with outliers: {100 * result.outlier_samples[lag]:.3g} %"),
                       Heatmap(result.correlations[lag][:, columns], "cross-correlation"),
                       Heatmap(result.agreement[lag][:, columns],
                               f"agreement of signs, {through}\n"
                               f"influences claimed: {marked.sum()}", marked)]
        num = rows[WITH].num_samples
        of = (f"all {num} samples" if group == ALL_SAMPLES else
              f"behaviour {group} ({num} of the samples)")
        note = "too few samples for a test" if num < MIN_SAMPLES else (
            f"dot: influence claimed (agreement with corrected p ≤ {LEVEL}, median gradient and "
            f"correlation of equal sign, effect of at least {MIN_EFFECT} standard deviations)")
        names = [name.replace("IC ", "") for name in self._targets]
        scales = [signed_scale([panel.matrix for panel in panels[column::4]], label, lag > 0)
                  for column, label in enumerate((
                      "mean gradient (standard deviations)",
                      "median gradient (standard deviations)",
                      "mean product (standard deviations squared)"))]
        return plot_matrices(
            panels, Names(names[:self._num_ics], [names[i] for i in columns],
                          f"source: IC at step {self._step - lag}", f"target at step {self._step}"),
            [*scales, ColourScale(Normalize(0, 1), SHARE, "share of samples; chance: 0.5")], 4,
            f"{sum(result.claimed[lag][:, columns].sum() for result in rows.values())} influences "
            f"claimed at lag {lag}: {of}\n{note}")


def claims_summary(table: pd.DataFrame) -> str:
    """Format the numbers of tested and claimed influences. Influences of a component on itself are
    counted separately.

    Args:
        table: rows of ``agreement.csv``.
    """
    tested = table[table["samples"] >= MIN_SAMPLES]
    is_itself = tested["source"] == tested["target"]
    others, itself = tested[~is_itself], tested[is_itself]
    untested = len(table) - len(tested)
    if tested.empty:
        return (f"none of {untested} influences is tested, because a test needs at least "
                f"{MIN_SAMPLES} samples")
    return (f"{others['claimed'].sum()} of {len(others)} tested influences of a component on "
            f"others or on outputs are claimed ({itself['claimed'].sum()} of {len(itself)} on "
            "itself)" + (f"; {untested} in behaviours with fewer than {MIN_SAMPLES} samples are "
                         "not tested" if untested else ""))
