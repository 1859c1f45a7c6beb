"""Cross-correlation and cross-causation of independent components (ICs): matrices and figures.

Layout of ``analysis/cross_corr_and_causation_plot_data/``, where c is the number of a behaviour, or
``all`` for all samples together, k a lag and i an IC. Files marked * are not in the publication::

    xcorr_hx_clust<c>_t+<k>.npy         mean products: rows ICs at t, columns ICs at t + k (I, I)
    xcaus_hx_clust<c>_t-<k>.npy *       mean gradients of the ICs at the saliency step (columns)
                                        with respect to ICs k steps earlier (rows) (I, I)
    xcaus_hx_ic<i>_<bottom|top>_t-<k>.npy *   mean gradients over samples in which IC i is extreme
    xcaus_median_hx_….npy *             medians instead of means, for all files xcaus_hx_…
    order_of_ics.npy *                  order of the ICs in the figures (I,)
    cosine_similarity_of_ics.npy *      cosine similarity of the ICs' directions (I, I)

Letters in shape comments: M samples, T steps, K lags, I ICs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from analysis.figures import Figures
from analysis.heatmaps import (
    SIGNED,
    ColourScale,
    Heatmap,
    Names,
    Seriation,
    plot_matrices,
    seriate,
    signed_scale,
)
from analysis.influences.consistency import (
    ALL_SAMPLES,
    AVERAGES,
    MEAN,
    MEDIAN,
    Group,
    file_stem,
    mean_products,
)
from analysis.influences.gradients import OUTLIER, Influences, Inputs, outlier_share
from common.errors import UserError
from common.results import ResultStore
from common.schemas import Array, Entry, Npy, Schema

MAX_LAG = 10
CORRELATION_FILES = Schema(
    "matrices of xcorr_and_xcaus_plots.py", "xcorr_and_xcaus_plots.py", results={
        "products": Entry("xcorr_hx_clust{}_t+{}.npy", Npy(Array(np.floating, "I I"))),
        MEAN: Entry("xcaus_hx_{}_t-{}.npy", Npy(Array(np.floating, "I I"))),
        MEDIAN: Entry("xcaus_median_hx_{}_t-{}.npy", Npy(Array(np.floating, "I I"))),
        "order": Entry("order_of_ics.npy", Npy(Array(np.integer, "I"))),
        "cosines": Entry("cosine_similarity_of_ics.npy", Npy(Array(np.floating, "I I")))},
    flag="--data_output_dir", replaced=True)


def lags_of(num_steps: int) -> tuple[list[int], list[int]]:
    """Return the lags from 0 to MAX_LAG below ``num_steps``, and the remaining lags."""
    lags = list(range(MAX_LAG + 1))
    return lags[:num_steps], lags[num_steps:]


def extreme_rows(values: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the rows with the lowest and with the highest values, each in
    ascending order of the value.

    Args:
        values: value of each row (M,).
        share: share of the rows at each end; at least one row is taken.

    Raises:
        UserError: if there are fewer than two rows, in which case both ends coincide.
    """
    if len(values) < 2:
        raise UserError("one sample alone has no extreme ones; take more samples")
    number = max(1, round(share * len(values)))
    order = np.argsort(values, kind="stable")
    return order[:number], order[-number:]


def cosine_similarity(directions: np.ndarray) -> np.ndarray:
    """Compute the cosine similarity (I, I) of directions (I, D)."""
    lengths = np.linalg.norm(directions, axis=1, keepdims=True)
    unit = directions / lengths
    return unit @ unit.T


_ENDS = ("bottom", "top")
_PANELS_IN_A_ROW = 5


@dataclasses.dataclass(frozen=True)
class Correlations:
    """Matrices of cross-correlation and cross-causation.

    Attributes:
        lags: lags of the mean products (K,).
        num_steps: number of steps per sample.
        sizes: number of samples in each group: all samples, then the behaviours.
        products: mean products of each group (K, I, I).
        step: step at which the gradients' targets are read; -1 without gradients.
        gradients: mean and median gradients, by group and average (lags 1 … step, I, I); rows are
            the earlier ICs.
        outliers: share of the samples whose gradients are outliers, by group (lags 1 … step,).
        extremes: mean and median gradients over the samples in which an IC is extreme, by (IC, end)
            and average (lags 1 … step, I, I).
        extreme_sizes: number of these samples, by (IC, end).
        share: share of the samples that counts as extreme at each end.
        seriation: order of the ICs according to the mean products over all samples.
        cosines: cosine similarity of the ICs' directions (I, I).
    """

    lags: Sequence[int]
    num_steps: int
    sizes: dict[Group, int]
    products: dict[Group, np.ndarray]
    step: int
    gradients: dict[Group, dict[str, np.ndarray]]
    outliers: dict[Group, np.ndarray]
    extremes: dict[tuple[int, str], dict[str, np.ndarray]]
    extreme_sizes: dict[tuple[int, str], int]
    share: float
    seriation: Seriation
    cosines: np.ndarray

    @classmethod
    def compute(cls, inputs: Inputs, lags: Sequence[int], influences: Influences | None,
           share: float) -> Correlations:
        """Compute all matrices.

        Args:
            inputs: samples, directions and behaviours.
            lags: lags of the mean products.
            influences: gradients with only ICs as targets; None to leave gradients out.
            share: share of the samples at each end that counts as extreme, by the coordinate of an
                IC at the step at which the gradients' targets are read.
        """
        ics = inputs.coordinates.ics
        rows: dict[Group, np.ndarray] = {ALL_SAMPLES: np.arange(len(ics)), **inputs.groups}
        products = {group: np.stack([mean_products(ics[chosen], ics[chosen], lag)
                                     for lag in lags]) for group, chosen in rows.items()}
        gradients: dict[Group, dict[str, np.ndarray]] = {}
        outliers: dict[Group, np.ndarray] = {}
        extremes: dict[tuple[int, str], dict[str, np.ndarray]] = {}
        extreme_sizes: dict[tuple[int, str], int] = {}
        if influences is not None:
            earlier = influences.gradients[:, 1:]  # lag 0 is left out: the identity
            gradients = {group: _averages(earlier[chosen]) for group, chosen in rows.items()}
            outliers = {group: outlier_share(np.linalg.norm(earlier[chosen], axis=(2, 3)))
                        for group, chosen in rows.items()}
            for component in range(ics.shape[2]):
                ends = extreme_rows(ics[:, influences.step, component], share)
                for end, chosen in zip(_ENDS, ends):
                    extremes[component, end] = _averages(earlier[chosen])
                    extreme_sizes[component, end] = len(chosen)
        return cls(lags, ics.shape[1], {group: len(chosen) for group, chosen in rows.items()},
                   products, -1 if influences is None else influences.step, gradients, outliers,
                   extremes, extreme_sizes, share, seriate(products[ALL_SAMPLES]),
                   cosine_similarity(inputs.projector.directions("ica").numpy()))

    def save(self, folder: Path) -> int:
        """Write all matrices into a folder; returns their number."""
        store = ResultStore(folder, CORRELATION_FILES)
        matrices = {store.file_of("products", group, lag): matrix
                    for group, products in self.products.items()
                    for lag, matrix in zip(self.lags, products)}
        averages_of = {f"clust{group}": averages for group, averages in self.gradients.items()}
        averages_of |= {f"ic{component}_{end}": averages
                        for (component, end), averages in self.extremes.items()}
        for name, averages in averages_of.items():
            matrices |= {store.file_of(average, name, lag): matrix for average in AVERAGES
                         for lag, matrix in enumerate(averages[average], start=1)}
        matrices[store.file_of("order")] = self.seriation.order
        matrices[store.file_of("cosines")] = self.cosines
        for path, matrix in matrices.items():
            np.save(path, matrix)
        return len(matrices)


class CorrelationFigures:
    """Figures of cross-correlation and cross-causation.

    Args:
        data: matrices to draw.
        left_out: lags for which the samples are too short.
    """

    def __init__(self, data: Correlations, left_out: Sequence[int]):
        self.data = data
        ics = [str(i) for i in range(len(data.cosines))]
        self._products = Names(ics, ics, "IC at t", "IC at t + k")
        self._gradients = Names(ics, ics, "IC that is moved, k steps earlier",
                                f"IC that moves, at step {data.step}")
        self._too_short = (f"; {data.num_steps} steps a sample are too few for k = "
                           f"{', '.join(map(str, left_out))}" if left_out else "")

    def draw(self) -> Figures:
        """Draw all figures."""
        for group in self.data.products:
            yield f"xcorr_{file_stem(group)}.png", self._plot_products(group)
        for group in self.data.gradients:
            yield f"xcaus_{file_stem(group)}.png", self._plot_gradients(group)
        for component in sorted({component for component, _ in self.data.extremes}):
            yield f"xcaus_ic_{component:02d}.png", self._plot_extremes(component)
        yield "cosine_similarity_of_ics.png", self._plot_cosines()

    def _plot_products(self, group: Group) -> Figure:
        data, matrices = self.data, self.data.products[group]
        panels = [Heatmap(matrix, f"k = {lag} ({data.sizes[group] * (data.num_steps - lag)} "
                                "products)") for lag, matrix in zip(data.lags, matrices)]
        return plot_matrices(panels, self._products, signed_scale(
            list(matrices), "mean product (standard deviations of the recorded states, squared)"),
            min(_PANELS_IN_A_ROW, len(panels)),
            f"Cross-correlation of {len(data.cosines)} independent components in "
            f"{self._of(group)}: mean products of coordinates k steps apart{self._too_short}\n"
            + self._order_note(group), data.seriation, tree=group == ALL_SAMPLES)

    def _plot_gradients(self, group: Group) -> Figure:
        panels, scales = self._gradient_rows({"": self.data.gradients[group]})
        shares = ", ".join(f"{100 * share:.3g} %" for share in self.data.outliers[group])
        return plot_matrices(
            panels, self._gradients, scales, len(panels) // len(AVERAGES),
            f"Cross-causation in {self._of(group)}: mean and median gradient of an "
            f"independent component at step {self.data.step}\nwith respect to one k "
            "steps earlier, with gradients through the environment; "
            f"{self._order_note(group)}\n"
            f"samples whose gradients are more than {OUTLIER} times as large as the "
            f"median sample's, by lag: {shares}",
            self.data.seriation, tree=group == ALL_SAMPLES)

    def _plot_extremes(self, component: int) -> Figure:
        data = self.data
        panels, scales = self._gradient_rows({f"{end}, ": data.extremes[component, end]
                                              for end in reversed(_ENDS)})
        number = data.extreme_sizes[component, "top"]
        return plot_matrices(
            panels, self._gradients, scales, data.step,
            f"Cross-causation where IC {component} is extreme at step {data.step}: the "
            f"{number} highest (top) and the {number} lowest (bottom)\nof "
            f"{data.sizes[ALL_SAMPLES]} samples, {100 * data.share:g} % at each end; "
            "mean and median gradients; the order is that of all samples",
            data.seriation, tree=False)

    def _gradient_rows(self, parts: dict[str, dict[str, np.ndarray]]
                       ) -> tuple[list[Heatmap], list[ColourScale]]:
        """Return panels, with one row per average and part and one column per lag, and the scale of
        each panel; scales differ between averages and lags, because gradients grow with the lag.

        Args:
            parts: matrices by title prefix and average (lags, I, I).
        """
        panels, scales = [], []
        for average in AVERAGES:
            of_lags = [signed_scale([averages[average][lag] for averages in parts.values()],
                                    f"{average} gradient") for lag in range(self.data.step)]
            for what, averages in parts.items():
                panels += [Heatmap(matrix, f"{what}k = {lag}, {average}")
                           for lag, matrix in enumerate(averages[average], start=1)]
                scales += of_lags
        return panels, scales

    def _plot_cosines(self) -> Figure:
        cosines = self.data.cosines
        ics = self._products.rows
        return plot_matrices(
            [Heatmap(cosines, "")], Names(ics, ics, "IC", "IC"),
            ColourScale(Normalize(-1, 1), SIGNED, "cosine"), 1,
            f"Cosines of the angles between the directions\nof {len(cosines)} "
            "independent components\nin the space of hidden units", self.data.seriation,
            tree=False)

    def _of(self, group: Group) -> str:
        size = self.data.sizes[group]
        if group == ALL_SAMPLES:
            return f"all {size} samples"
        return f"the {size} samples of behaviour {group}" if size > 1 else (
            f"the one sample of behaviour {group}")

    def _order_note(self, group: Group) -> str:
        return ("components are in the order of the dendrogram" if group == ALL_SAMPLES else
                "components are in the order of all samples' dendrogram")


def _averages(gradients: np.ndarray) -> dict[str, np.ndarray]:
    """Compute mean and median over samples (M, …), by average."""
    return {MEAN: gradients.mean(axis=0, dtype=np.float64),
            MEDIAN: np.median(gradients, axis=0).astype(np.float64)}
