"""Matrices of cross-correlation and cross-causation, and the figures of them.

Letters in shape comments: K lags, I independent components (ICs).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import Normalize

from analysis.influences.consistency import ALL_SAMPLES, Group, file_stem
from analysis.influences.correlation import (
    Seriation,
    cosine_similarity,
    extreme_rows,
    mean_products,
    seriate,
)
from analysis.influences.files import AVERAGES, MEAN, MEDIAN, CorrelationFolder
from analysis.influences.gradients import OUTLIER, Influences, Inputs, outlier_share
from analysis.plotting.matrices import (
    SIGNED,
    ColourScale,
    Heatmap,
    Names,
    plot_matrices,
    signed_scale,
)
from analysis.results.output import Job

_ENDS = ("bottom", "top")
_PANELS_IN_A_ROW = 5


@dataclasses.dataclass(frozen=True)
class Correlations:
    """Matrices of cross-correlation and cross-causation.

    Attributes:
        lags: of the products, K of them.
        num_steps: of a sample.
        sizes: samples of each group: all, then the behaviours.
        products: mean products of each group (K, I, I).
        step: at which the gradients' targets are read, None without gradients.
        gradients: mean gradients of each group (lags 1 … step, I, I), rows the earlier ICs, and
            median ones, by average.
        outliers: share of the samples whose gradients are outliers, by group (lags 1 … step,).
        extremes: the same over the samples in which an IC is extreme, by IC and end.
        extreme_sizes: how many samples these are, by IC and end.
        share: of the samples, that is extreme at an end.
        seriation: of the ICs, by the products of all samples.
        cosines: of the angles between the ICs' directions (I, I).
    """

    lags: Sequence[int]
    num_steps: int
    sizes: dict[Group, int]
    products: dict[Group, np.ndarray]
    step: int | None
    gradients: dict[Group, dict[str, np.ndarray]]
    outliers: dict[Group, np.ndarray]
    extremes: dict[tuple[int, str], dict[str, np.ndarray]]
    extreme_sizes: dict[tuple[int, str], int]
    share: float
    seriation: Seriation
    cosines: np.ndarray

    @classmethod
    def of(cls, inputs: Inputs, lags: Sequence[int], influences: Influences | None,
           share: float) -> Correlations:
        """Compute them.

        Args:
            influences: on the ICs alone; None to leave gradients out.
            share: of the samples, at each end, in which an IC counts as extreme: by its
                coordinate at the step at which the gradients' targets are read.
        """
        ics = inputs.coordinates.ics
        rows = {ALL_SAMPLES: np.arange(len(ics)), **inputs.groups}
        products = {group: np.stack([mean_products(ics[chosen], ics[chosen], lag)
                                     for lag in lags]) for group, chosen in rows.items()}
        gradients, outliers, extremes, extreme_sizes = {}, {}, {}, {}
        if influences is not None:
            earlier = influences.gradients[:, 1:]  # at lag 0 they are the identity
            gradients = {group: _averages(earlier[chosen]) for group, chosen in rows.items()}
            outliers = {group: outlier_share(np.linalg.norm(earlier[chosen], axis=(2, 3)))
                        for group, chosen in rows.items()}
            for component in range(ics.shape[2]):
                found = extreme_rows(ics[:, influences.step, component], share)
                for end in _ENDS:
                    chosen = getattr(found, end)
                    extremes[component, end] = _averages(earlier[chosen])
                    extreme_sizes[component, end] = len(chosen)
        return cls(lags, ics.shape[1], {group: len(chosen) for group, chosen in rows.items()},
                   products, None if influences is None else influences.step, gradients, outliers,
                   extremes, extreme_sizes, share, seriate(products[ALL_SAMPLES]),
                   cosine_similarity(inputs.projector.directions("ica").numpy()))

    def save(self, folder: CorrelationFolder) -> None:
        """Write all matrices."""
        for group, matrices in self.products.items():
            for lag, matrix in zip(self.lags, matrices):
                np.save(folder.correlation_file(group, lag), matrix)
        for average in AVERAGES:
            for group, averages in self.gradients.items():
                for lag, matrix in enumerate(averages[average], start=1):
                    np.save(folder.causation_file(group, lag, average), matrix)
            for (component, end), averages in self.extremes.items():
                for lag, matrix in enumerate(averages[average], start=1):
                    np.save(folder.extreme_file(component, end, lag, average), matrix)
        np.save(folder.order_file, self.seriation.order)
        np.save(folder.cosine_file, self.cosines)


class CorrelationFigures:
    """The figures.

    Args:
        left_out: lags that the samples are too short for.
    """

    def __init__(self, found: Correlations, left_out: Sequence[int]):
        self.found = found
        ics = [str(i) for i in range(len(found.cosines))]
        self._products = Names(ics, ics, "IC at t", "IC at t + k")
        self._gradients = Names(ics, ics, "IC that is moved, k steps earlier",
                                f"IC that moves, at step {found.step}")
        self._too_short = (f"; {found.num_steps} steps a sample are too few for k = "
                           f"{', '.join(map(str, left_out))}" if left_out else "")

    def jobs(self) -> list[Job]:
        """Names of the files, and what draws each."""
        found = self.found
        jobs: list[Job] = []
        for group in found.products:
            jobs.append((f"xcorr_{file_stem(group)}.png", lambda path, group=group:
                         self._plot_products(path, group)))
        for group in found.gradients:
            jobs.append((f"xcaus_{file_stem(group)}.png", lambda path, group=group:
                         self._plot_gradients(path, group)))
        for component in sorted({component for component, _ in found.extremes}):
            jobs.append((f"xcaus_ic_{component:02d}.png", lambda path, component=component:
                         self._plot_extremes(path, component)))
        return [*jobs, ("cosine_similarity_of_ics.png", self._plot_cosines)]

    def _plot_products(self, path: Path, group: Group) -> None:
        found, matrices = self.found, self.found.products[group]
        panels = [Heatmap(matrix, f"k = {lag} ({found.sizes[group] * (found.num_steps - lag)} "
                                "products)") for lag, matrix in zip(found.lags, matrices)]
        plot_matrices(path, panels, self._products, signed_scale(
            matrices, "mean product (standard deviations of the recorded states, squared)"),
            min(_PANELS_IN_A_ROW, len(panels)),
            f"Cross-correlation of {len(found.cosines)} independent components in "
            f"{self._of(group)}: mean products of coordinates k steps apart{self._too_short}\n"
            + self._order_note(group), found.seriation, tree=group == ALL_SAMPLES)

    def _plot_gradients(self, path: Path, group: Group) -> None:
        panels, scales = self._gradient_rows({"": self.found.gradients[group]})
        shares = ", ".join(f"{100 * share:.3g} %" for share in self.found.outliers[group])
        plot_matrices(path, panels, self._gradients, scales, len(panels) // len(AVERAGES),
                      f"Cross-causation in {self._of(group)}: mean and median gradient of an "
                      f"independent component at step {self.found.step}\nwith respect to one k "
                      "steps earlier, with gradients through the environment; "
                      f"{self._order_note(group)}\n"
                      f"samples whose gradients are more than {OUTLIER} times as large as the "
                      f"median sample's, by lag: {shares}",
                      self.found.seriation, tree=group == ALL_SAMPLES)

    def _plot_extremes(self, path: Path, component: int) -> None:
        found = self.found
        panels, scales = self._gradient_rows({f"{end}, ": found.extremes[component, end]
                                              for end in reversed(_ENDS)})
        number = found.extreme_sizes[component, "top"]
        plot_matrices(path, panels, self._gradients, scales, found.step,
                      f"Cross-causation where IC {component} is extreme at step {found.step}: the "
                      f"{number} highest (top) and the {number} lowest (bottom)\nof "
                      f"{found.sizes[ALL_SAMPLES]} samples, {100 * found.share:g} % at each end; "
                      "mean and median gradients; the order is that of all samples",
                      found.seriation, tree=False)

    def _gradient_rows(self, parts: dict[str, dict[str, np.ndarray]]
                       ) -> tuple[list[Heatmap], list[ColourScale]]:
        """A row of panels for each part and average, a column for each lag, and their scales: one
        for each average and lag, since gradients grow with the lag.

        Args:
            parts: matrices by average (lags, I, I), by the text before their titles.
        """
        panels, scales = [], []
        for average in AVERAGES:
            of_lags = [signed_scale([averages[average][lag] for averages in parts.values()],
                                    f"{average} gradient") for lag in range(self.found.step)]
            for what, averages in parts.items():
                panels += [Heatmap(matrix, f"{what}k = {lag}, {average}")
                           for lag, matrix in enumerate(averages[average], start=1)]
                scales += of_lags
        return panels, scales

    def _plot_cosines(self, path: Path) -> None:
        cosines = self.found.cosines
        ics = self._products.rows
        plot_matrices(path, [Heatmap(cosines, "")], Names(ics, ics, "IC", "IC"),
                      ColourScale(Normalize(-1, 1), SIGNED, "cosine"), 1,
                      f"Cosines of the angles between the directions\nof {len(cosines)} "
                      "independent components\nin the space of hidden units", self.found.seriation,
                      tree=False)

    def _of(self, group: Group) -> str:
        size = self.found.sizes[group]
        if group == ALL_SAMPLES:
            return f"all {size} samples"
        return f"the {size} samples of behaviour {group}" if size > 1 else (
            f"the one sample of behaviour {group}")

    def _order_note(self, group: Group) -> str:
        return ("components are in the order of the dendrogram" if group == ALL_SAMPLES else
                "components are in the order of all samples' dendrogram")


def _averages(gradients: np.ndarray) -> dict[str, np.ndarray]:
    """Mean and median over samples (M, …)."""
    return {MEAN: gradients.mean(axis=0, dtype=np.float64),
            MEDIAN: np.median(gradients, axis=0).astype(np.float64)}
