"""Comparison of gradients with correlations as tables, matrices and figures.

Layout of ``analysis/dyn_grad_comparison_data/``, of which the publication describes only the table;
c is the number of a behaviour, or ``all`` for all samples together, and k a lag::

    jacobian_clust<c>_t-<k>.npy         mean gradients: rows ICs, columns ICs, then outputs (I, J)
    jacobian_clust<c>_t-<k>_without_env_grads.npy
    jacobian_median_clust<c>_t-<k>.npy, …   median gradients (I, J)
    agreement_clust<c>_t-<k>.npy, …     share of the samples in which the signs agree (I, J)
    agreement.csv                       one row per pair, lag, group and kind of gradient, see
                                        TABLE_COLUMNS
    agreement_of_matrices.csv           one row per lag, group and kind of gradient, see
                                        MATRIX_COLUMNS
    sample_ids.npy, behaviours.npy      numbers of the samples, and the behaviour of each, -1 for
                                        none (M,)

Letters in shape comments: M samples, K lags, I sources, J targets.
"""

from __future__ import annotations

import dataclasses
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
    AVERAGES,
    LEVEL,
    MEAN,
    MEDIAN,
    MIN_EFFECT,
    MIN_SAMPLES,
    Agreement,
    Group,
    file_stem,
)
from analysis.influences.gradients import OUTLIER, ic_name
from common.results import ResultStore
from common.schemas import Array, Entry, Npy, Schema, Table
from generative.saliency.gradients import WITHOUT_ENV_GRADS

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
    flag="--data_output_dir", replaced=True)
WITH, WITHOUT = "with", "without"  # values of the column env_grads


@dataclasses.dataclass(frozen=True)
class SignAgreementTable:
    """Agreement of gradients and correlations in all groups, as tables.

    Attributes:
        found: agreement of each group, with gradients through the environment under the key False,
            without them under the key True.
        targets: names of the targets (J,).
        lags: lags (K,).
        num_ics: number of ICs, I.
        step: step at which the targets are read.
    """

    found: Mapping[bool, Mapping[Group, Agreement]]
    targets: Sequence[str]
    lags: Sequence[int]
    num_ics: int
    step: int

    def save(self, folder: Path, numbers: Sequence[int], labels: np.ndarray | None) -> None:
        """Write tables and matrices into a folder.

        Args:
            folder: folder to write to.
            numbers: numbers of the samples (M,).
            labels: behaviour of each sample, -1 for none (M,); None if behaviours are left out.
        """
        store = ResultStore(folder, COMPARISON_FILES)
        store.write("table", value=self.table())
        store.write("matrix_table", value=self.matrix_table())
        for without, group, agreement in self._all():
            for name, matrices in ((MEAN, agreement.gradients), (MEDIAN, agreement.medians),
                                   ("agreement", agreement.agreement)):
                for lag in self.lags:
                    np.save(store.file_of(name, group, lag, WITHOUT_ENV_GRADS if without else ""),
                            matrices[lag])
        no_behaviours = np.full(len(numbers), -1)
        store.write("sample_ids", value=np.array(numbers))
        store.write("behaviours", value=no_behaviours if labels is None else labels)

    def table(self) -> pd.DataFrame:
        """Return a table with one row per tested pair, lag, group and kind of gradient; for columns
        see ``TABLE_COLUMNS``."""
        parts = []
        for without, group, agreement in self._all():
            lag, source, target = np.nonzero(agreement.tested)
            chosen = agreement.tested
            parts.append(pd.DataFrame({
                "behaviour": str(group), "samples": agreement.num_samples,
                "env_grads": _variant(without), "lag": lag,
                "source": [ic_name(i) for i in source], "target": np.array(self.targets)[target],
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
        rows = [(str(group), agreement.num_samples, _variant(without), lag,
                 agreement.matrix_agreement[lag], agreement.matrix_p[lag],
                 agreement.matrix_p_corrected[lag])
                for without, group, agreement in self._all() for lag in self.lags if lag > 0]
        return pd.DataFrame(rows, columns=list(MATRIX_COLUMNS))

    def draw(self) -> Figures:
        """Draw one figure per group and lag."""
        for group in self.found[False]:
            for lag in self.lags:
                if lag > 0 or len(self.targets) > self.num_ics:
                    yield f"{file_stem(group)}_t-{lag}.png", self._plot(group, lag)

    def summary(self) -> Iterator[str]:
        """Yield sentences about claimed influences and outliers for each kind of gradient."""
        table = self.table()
        for without, groups in self.found.items():
            name = f"{_variant(without)} gradients through the environment"
            yield f"{name}: {claims_summary(table[table['env_grads'] == _variant(without)])}"
            shares = groups[ALL_SAMPLES].outlier_samples
            yield (f"{name}: the gradients of a sample are more than {OUTLIER} times as large as "
                   "the median sample's in " + ", ".join(
                       f"{100 * shares[lag]:.3g} % of the samples at lag {lag}"
                       for lag in self.lags if lag > 0))

    def _all(self) -> Iterator[tuple[bool, Group, Agreement]]:
        for without, groups in self.found.items():
            for group, agreement in groups.items():
                yield without, group, agreement

    def _plot(self, group: Group, lag: int) -> Figure:
        # ICs do not influence ICs of the same step.
        columns = np.arange(self.num_ics if lag == 0 else 0, len(self.targets))
        rows = [(without, groups[group]) for without, groups in self.found.items()]
        panels: list[Heatmap | None] = []
        for without, found in rows:
            through = f"{_variant(without)} environment gradients"
            marked = found.claimed[lag][:, columns]
            panels += [Heatmap(found.gradients[lag][:, columns], f"mean Jacobian,\n{through}"),
                       Heatmap(found.medians[lag][:, columns],
                               f"median Jacobian, {through};\n"
                               f"samples with outliers: {100 * found.outlier_samples[lag]:.3g} %"),
                       Heatmap(found.correlations[lag][:, columns], "cross-correlation"),
                       Heatmap(found.agreement[lag][:, columns],
                             f"agreement of signs, {through}\ninfluences claimed: {marked.sum()}",
                             marked)]
        averages = [[getattr(found, name)[lag][:, columns] for _, found in rows]
                    for name in ("gradients", "medians")]
        correlation = rows[0][1].correlations[lag][:, columns]
        num = rows[0][1].num_samples
        of = f"all {num} samples" if group == ALL_SAMPLES else (
            f"behaviour {group}, {num} sample{'s' if num > 1 else ''}")
        note = ("the sample is too few for a test" if num < 2 else "too few samples for a test"
                ) if num < MIN_SAMPLES else (
            f"dot: influence claimed (agreement with corrected p ≤ {LEVEL}, median gradient and "
            "correlation of one sign, "
            f"effect of at least {MIN_EFFECT} standard deviations)")
        names = [name.replace("IC ", "") for name in self.targets]
        return plot_matrices(
            panels, Names(names[:self.num_ics], [names[i] for i in columns],
                                f"IC at step {self.step - lag}",
                                f"what it moves, at step {self.step}"),
            [*(signed_scale(matrices, f"{name} gradient (standard deviations)", lag > 0)
               for name, matrices in zip(AVERAGES, averages)),
             signed_scale([correlation], "mean product (standard deviations squared)", lag > 0),
             ColourScale(Normalize(0, 1), SHARE, "share of samples; chance: 0.5")], 4,
            f"Gradients and correlation {lag} step{'' if lag == 1 else 's'} apart: {of}\n{note}")


def claims_summary(table: pd.DataFrame) -> str:
    """Format the number of tested and claimed influences, with a component's influence on itself
    counted separately.

    Args:
        table: rows of ``agreement.csv``.
    """
    tested = table[table["samples"] >= MIN_SAMPLES]
    is_itself = tested["source"] == tested["target"]
    others, itself = tested[~is_itself], tested[is_itself]
    untested = len(table) - len(tested)
    if tested.empty:
        return (f"none of {untested} influences is tested, because that takes at least "
                f"{MIN_SAMPLES} samples")
    return (f"{others['claimed'].sum()} of {len(others)} tested influences of a component on "
            f"others or on answers are claimed ({itself['claimed'].sum()} of {len(itself)} on "
            "itself)" + (f"; {untested} in behaviours with fewer than {MIN_SAMPLES} samples are "
                         "not tested" if untested else ""))


def _variant(without: bool) -> str:
    return WITHOUT if without else WITH
