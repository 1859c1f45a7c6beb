"""Cross-correlation and cross-causation of independent components (ICs): matrices and figures.

Layout of ``analysis/cross_corr_and_causation_plot_data/``, where c is the number of a behaviour, or
``all`` for all samples together, k a lag and i an IC. Files marked * are not in the publication::

    xcorr_hx_clust<c>_t+<k>.npy         mean products: rows ICs at t, columns ICs at t + k (I, I)
    xcaus_hx_clust<c>_t-<k>.npy *       mean gradients of the ICs at the saliency step (columns)
                                        with respect to ICs k steps earlier (rows) (I, I)
    xcaus_hx_ic<i>_<bottom|top>_t-<k>.npy *   mean gradients over the samples in which IC i is
                                        lowest or highest (I, I)
    xcaus_median_hx_*.npy *             median gradients, for each file xcaus_hx_*.npy (I, I)
    order_of_ics.npy *                  order of the ICs in the figures (I,)
    cosine_similarity_of_ics.npy *      cosine similarity of the ICs' directions (I, I)

Letters in shape comments: K lags, I ICs.
"""

from __future__ import annotations

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
    largest,
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


def extreme_rows(values: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the rows with the lowest and with the highest values, both in ascending
    order of the value.

    Args:
        values: value of each row (M,).
        share: share of the rows at each end; at least one row is taken.

    Raises:
        UserError: if there are fewer than two rows.
    """
    if len(values) < 2:
        raise UserError("at least two samples are needed to select extreme ones; take more samples")
    number = max(1, round(share * len(values)))
    order = np.argsort(values, kind="stable")
    return order[:number], order[-number:]


def cosine_similarity(directions: np.ndarray) -> np.ndarray:
    """Compute the cosine similarity (I, I) of directions (I, D)."""
    lengths = np.linalg.norm(directions, axis=1, keepdims=True)
    unit = directions / lengths
    return unit @ unit.T


_PANELS_IN_A_ROW = 5
_ORDER_NOTE = "components are ordered by the dendrogram of all samples"


class Correlations:
    """Matrices of cross-correlation and cross-causation, and their figures.

    Args:
        influences: gradients with only ICs as targets; None to leave out cross-causation.
        share: share of the samples at each end that counts as extreme. For each IC, samples are
            ordered by the coordinate of the IC at ``step``.

    Attributes:
        lags: lags of the mean products, at most MAX_LAG (K,).
        lags_left_out: lags up to MAX_LAG for which the samples are too short.
        step: step at which the gradients' targets are read; None without gradients.
        products: mean products (K, I, I), by group.
        gradients: nested dict; ``gradients[samples][average]`` is an array (step, I, I) of
            gradients at lags 1 to ``step``, with the earlier ICs as rows. ``samples`` is the name
            of a set of samples in file names, ``clust<c>`` or ``ic<i>_<bottom|top>``; ``average``
            is MEAN or MEDIAN. Empty without gradients.
        order, tree: order of the ICs and the dendrogram with this order, see ``seriate``.
        cosines: cosine similarity of the ICs' directions (I, I).
    """

    def __init__(self, inputs: Inputs, influences: Influences | None, share: float):
        ics = inputs.coordinates.ics
        self._num_steps, self._share = ics.shape[1], share
        self.lags = list(range(min(MAX_LAG + 1, self._num_steps)))
        self.lags_left_out = list(range(self._num_steps, MAX_LAG + 1))
        rows: dict[Group, np.ndarray] = {ALL_SAMPLES: np.arange(len(ics)), **inputs.groups}
        self._sizes = {group: len(chosen) for group, chosen in rows.items()}
        self.products = {group: np.stack([mean_products(ics[chosen], ics[chosen], lag)
                                          for lag in self.lags]) for group, chosen in rows.items()}
        self.step = None if influences is None else influences.step
        self.gradients: dict[str, dict[str, np.ndarray]] = {}
        self._outliers: dict[Group, np.ndarray] = {}
        if influences is not None:
            earlier = influences.gradients[:, 1:]  # lag 0 is left out: the identity
            samples = {f"clust{group}": chosen for group, chosen in rows.items()}
            for component in range(ics.shape[2]):
                lowest, highest = extreme_rows(ics[:, influences.step, component], share)
                samples |= {f"ic{component}_bottom": lowest, f"ic{component}_top": highest}
            self.gradients = {name: {
                MEAN: earlier[chosen].mean(axis=0, dtype=np.float64),
                MEDIAN: np.median(earlier[chosen], axis=0).astype(np.float64)}
                for name, chosen in samples.items()}
            self._outliers = {group: outlier_share(np.linalg.norm(earlier[chosen], axis=(2, 3)))
                              for group, chosen in rows.items()}
            self._num_extreme = len(lowest)
        self.order, self.tree = seriate(self.products[ALL_SAMPLES])
        self.cosines = cosine_similarity(inputs.projector.directions("ica").numpy())
        self._ics = [str(i) for i in range(ics.shape[2])]

    def save(self, folder: Path) -> None:
        """Write all matrices into a folder."""
        store = ResultStore(folder, CORRELATION_FILES)
        for group, products in self.products.items():
            for lag, matrix in zip(self.lags, products):
                store.write("products", group, lag, value=matrix)
        for name, averages in self.gradients.items():
            for average, matrices in averages.items():
                for lag, matrix in enumerate(matrices, start=1):
                    store.write(average, name, lag, value=matrix)
        store.write("order", value=self.order)
        store.write("cosines", value=self.cosines)

    def draw(self) -> Figures:
        """Yield file names and figures: correlations and gradients of each group, gradients of the
        samples with extreme values of each IC, and the cosines between ICs."""
        for group in self.products:
            yield f"xcorr_{file_stem(group)}.png", self._plot_products(group)
        if self.gradients:
            for group in self.products:
                yield f"xcaus_{file_stem(group)}.png", self._plot_gradients(group)
            for component in range(len(self.cosines)):
                yield f"xcaus_ic_{component:02d}.png", self._plot_extremes(component)
        panels, names = [Heatmap(self.cosines, "")], Names(self._ics, self._ics, "IC", "IC")
        yield "cosine_similarity_of_ics.png", plot_matrices(
            panels, names, [ColourScale(Normalize(-1, 1), SIGNED, "cosine")], 1,
            f"Directions of {len(self._ics)} independent components:\nlargest cosine of ICs "
            f"{largest(panels, names)}", (self.order, self.tree))

    def _plot_products(self, group: Group) -> Figure:
        matrices, number = self.products[group], self._sizes[group]
        panels = [Heatmap(matrix, f"k = {lag} ({number * (self._num_steps - lag)} products)")
                  for lag, matrix in zip(self.lags, matrices)]
        too_short = (f"; {self._num_steps} steps per sample are too few for k = "
                     f"{', '.join(map(str, self.lags_left_out))}" if self.lags_left_out else "")
        scale = signed_scale(matrices,
                             "mean product (standard deviations of the recorded states, squared)")
        names = Names(self._ics, self._ics, "IC at t", "IC at t + k")
        return plot_matrices(
            panels, names, [scale], min(_PANELS_IN_A_ROW, len(panels)),
            f"Largest of two components: {largest(panels, names)}\nCross-correlation of "
            f"{len(self._ics)} independent components in {self._of(group)}: mean products of "
            f"coordinates k steps apart{too_short}\n{_ORDER_NOTE}",
            (self.order, self.tree), tree=group == ALL_SAMPLES)

    def _plot_gradients(self, group: Group) -> Figure:
        shares = ", ".join(f"{100 * share:.3g} %" for share in self._outliers[group])
        return self._plot_averages(
            {"": self.gradients[f"clust{group}"]},
            f"Cross-causation in {self._of(group)}: mean and median gradient of an "
            f"independent component at step {self.step}\nwith respect to one k "
            f"steps earlier, with gradients through the environment; {_ORDER_NOTE}\n"
            f"samples whose gradients are more than {OUTLIER} times as large as the "
            f"median sample's, by lag: {shares}", tree=group == ALL_SAMPLES)

    def _plot_extremes(self, component: int) -> Figure:
        return self._plot_averages(
            {f"{end}, ": self.gradients[f"ic{component}_{end}"] for end in ("top", "bottom")},
            f"Cross-causation where IC {component} is extreme at step {self.step}: the "
            f"{self._num_extreme} highest (top) and the {self._num_extreme} lowest (bottom)\nof "
            f"{self._sizes[ALL_SAMPLES]} samples, {100 * self._share:g} % at each end; "
            f"mean and median gradients; {_ORDER_NOTE}")

    def _plot_averages(self, parts: dict[str, dict[str, np.ndarray]], title: str,
                       tree: bool = False) -> Figure:
        """Draw gradients, with one row per average and set of samples, and one column per lag.
        Scales differ between averages and lags, because gradients grow with the lag.

        Args:
            parts: nested dict; ``parts[prefix][average]`` is an array (lags, I, I) of gradients in
                one set of samples. Titles of matrices start with ``prefix``.
            tree: whether to draw the dendrogram.
        """
        panels, scales = [], []
        for average in AVERAGES:
            for what, averages in parts.items():
                for lag, matrix in enumerate(averages[average], start=1):
                    panels.append(Heatmap(matrix, f"{what}k = {lag}, {average}"))
                    scales.append(signed_scale([part[average][lag - 1] for part in parts.values()],
                                               f"{average} gradient"))
        names = Names(self._ics, self._ics, "source: IC k steps earlier",
                      f"target: IC at step {self.step}")
        medians = [panel for panel in panels if panel.title.endswith("median")]
        return plot_matrices(
            panels, names, scales, len(panels) // len(parts) // len(AVERAGES),
            f"Largest median gradient between two components: {largest(medians, names)}\n{title}",
            (self.order, self.tree), tree)

    def _of(self, group: Group) -> str:
        size = self._sizes[group]
        return (f"all {size} samples" if group == ALL_SAMPLES else
                f"behaviour {group} ({size} of the samples)")
