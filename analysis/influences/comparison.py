"""The comparison of gradients with correlations as tables, matrices and figures.

Letters in shape comments: K lags, I sources, J targets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.colors import Normalize

from analysis.influences.consistency import (
    ALL_SAMPLES,
    LEVEL,
    MIN_EFFECT,
    MIN_SAMPLES,
    Agreement,
    Group,
    file_stem,
)
from analysis.influences.files import (
    AVERAGES,
    MATRIX_COLUMNS,
    MEAN,
    MEDIAN,
    TABLE_COLUMNS,
    ComparisonFolder,
)
from analysis.influences.gradients import OUTLIER, ic_name
from analysis.plotting.matrices import (
    SHARE,
    ColourScale,
    Heatmap,
    Names,
    plot_matrices,
    signed_scale,
)
from analysis.results.output import Job

WITH, WITHOUT = "with", "without"  # gradients through the environment, in the tables


@dataclasses.dataclass(frozen=True)
class SignAgreementTable:
    """Agreement of gradients and correlations in all groups, as tables.

    Attributes:
        found: agreements of each group, with gradients through the environment (False) and
            without (True).
        targets: names of the targets.
        lags: K of them.
        num_ics: I.
        step: at which the targets are read.
    """

    found: Mapping[bool, Mapping[Group, Agreement]]
    targets: Sequence[str]
    lags: Sequence[int]
    num_ics: int
    step: int

    @property
    def groups(self) -> list[Group]:
        return list(self.found[False])

    def save(self, folder: ComparisonFolder) -> None:
        """Write tables and matrices."""
        self.table().to_csv(folder.table_file, index=False, float_format="%.6g")
        self.matrix_table().to_csv(folder.matrix_table_file, index=False, float_format="%.6g")
        for without, groups in self.found.items():
            for group, agreement in groups.items():
                for lag in self.lags:
                    for average, matrices in ((MEAN, agreement.gradients),
                                              (MEDIAN, agreement.medians)):
                        np.save(folder.jacobian_file(group, lag, without, average), matrices[lag])
                    np.save(folder.agreement_file(group, lag, without), agreement.agreement[lag])

    def table(self) -> pd.DataFrame:
        """A row for each tested pair, lag, group and kind of gradient: see ``TABLE_COLUMNS``."""
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
        """A row for each lag above 0, group and kind of gradient: see ``MATRIX_COLUMNS``."""
        rows = [(str(group), agreement.num_samples, _variant(without), lag,
                 agreement.matrix_agreement[lag], agreement.matrix_p[lag],
                 agreement.matrix_p_corrected[lag])
                for without, group, agreement in self._all() for lag in self.lags if lag > 0]
        return pd.DataFrame(rows, columns=list(MATRIX_COLUMNS))

    def jobs(self) -> list[Job]:
        """Names of the figures' files, and what draws each: one a group and lag."""
        lags = [lag for lag in self.lags if lag > 0 or len(self.targets) > self.num_ics]
        return [(f"{file_stem(group)}_t-{lag}.png", lambda path, group=group, lag=lag:
                 self._plot(path, group, lag)) for group in self.groups for lag in lags]

    def summary(self) -> Iterator[str]:
        """Sentences on each kind of gradient: claimed influences, and samples with outliers."""
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

    def _plot(self, path: Path, group: Group, lag: int) -> None:
        # ICs do not influence ICs of their own step.
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
        plot_matrices(
            path, panels, Names(names[:self.num_ics], [names[i] for i in columns],
                                f"IC at step {self.step - lag}",
                                f"what it moves, at step {self.step}"),
            [*(signed_scale(matrices, f"{name} gradient (standard deviations)", lag > 0)
               for name, matrices in zip(AVERAGES, averages)),
             signed_scale([correlation], "mean product (standard deviations squared)", lag > 0),
             ColourScale(Normalize(0, 1), SHARE, "share of samples; chance: 0.5")], 4,
            f"Gradients and correlation {lag} step{'' if lag == 1 else 's'} apart: {of}\n{note}")


def claims_summary(table: pd.DataFrame) -> str:
    """Count tested and claimed influences, those of a component on itself apart.

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
