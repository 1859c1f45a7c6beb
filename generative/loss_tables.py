"""Tables of the loss over simulated steps: means with intervals, and comparisons of predictors.

Letters in shape comments: T simulated steps, N windows.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd

from generative.dataset import FRAME_SHAPE
from generative.fidelity import (
    MSE,
    OTHER_VALUE_CORRELATION,
    PSNR,
    PSNR_MARGIN,
    PSNR_OF_MEAN_ERROR,
    psnr,
)
from generative.loss_over_time import (
    ACTION_CONTROLS,
    PREDICTORS,
    RECORDED,
    SHUFFLED_ACTIONS,
    SIMULATOR,
    VALUE_CORRELATION,
    LossOverTime,
)
from stats.association import correlation
from stats.bootstrap import ClusterBootstrap

IMAGE_MSE = "image_mse"  # only in the table: mean squared error per colour value
COMPARED_STEPS = range(2, 11)
_CONSTANT = 1e-6  # range up to which values count as constant


def table_of(result: LossOverTime, seed: int) -> pd.DataFrame:
    """Summarise a result: a row for each step reached by a window, predictor and kind.

    Returns:
        The columns ``step`` (counted from 0, whose label is the last initial frame),
        ``predictor``, ``kind``, ``windows`` (number of windows that reach the step and show the
        object, if any), ``mean`` and ``standard_deviation`` over these windows, and ``low_95`` and
        ``high_95``, the ends of the mean's interval. For the kinds ``value_correlation`` and
        ``other_value_correlation``, the mean is Pearson's correlation over the windows; there is no
        row if one of the values is constant. For ``psnr_of_mean_error`` it is the PSNR in dB of the
        mean squared error, and for ``psnr_margin`` the mean difference in PSNR between the
        simulator with the recorded actions and the predictor, on the same windows.
    """
    bootstrap = ClusterBootstrap(result.episodes, seed)
    pixel_errors = {(predictor, IMAGE_MSE): loss * 2 / np.prod(FRAME_SHAPE)
                    for (predictor, kind), loss in result.losses.items() if kind == "image"}
    margins = {(predictor, PSNR_MARGIN): result.fidelity[SIMULATOR, PSNR]
               - result.fidelity[predictor, PSNR]
               for predictor in (SHUFFLED_ACTIONS, *ACTION_CONTROLS)
               if (predictor, PSNR) in result.fidelity}
    rows = []
    for (predictor, kind), loss in {**result.losses, **pixel_errors, **result.fidelity,
                                    **margins}.items():
        measured = np.isfinite(loss)
        num_windows = measured.sum(axis=1)  # (T,)
        low, high = bootstrap.interval(loss, measured)
        for step in np.flatnonzero(num_windows).tolist():
            values = loss[step, measured[step]].astype(np.float64)
            spread = values.std(ddof=1) if len(values) > 1 else np.nan
            rows.append((step, predictor, kind, num_windows[step], values.mean(), spread,
                         low[step], high[step]))
            if kind == MSE:  # a monotonic function maps the ends of the mean's interval
                rows.append((step, predictor, PSNR_OF_MEAN_ERROR, num_windows[step],
                             psnr(values.mean()), np.nan, psnr(high[step]), psnr(low[step])))
    for kind, values, counted in (
            (VALUE_CORRELATION, result.values, result.counted),
            (OTHER_VALUE_CORRELATION, result.other_values,
             np.isfinite(result.other_values.get(RECORDED, np.empty((0, 0)))))):
        rows += _value_correlations(kind, values, counted, result.episodes, seed)
    return pd.DataFrame(rows, columns=["step", "predictor", "kind", "windows", "mean",
                                       "standard_deviation", "low_95", "high_95"])


def _value_correlations(kind: str, values: dict[str, np.ndarray], counted: np.ndarray,
                        episodes: np.ndarray, seed: int) -> list[tuple]:
    """Rows of the table: correlations of an agent's values with its values on recorded frames."""
    rows = []
    for predictor in values:
        if predictor == RECORDED:
            continue
        for step in np.flatnonzero(counted.any(axis=1)).tolist():
            at = counted[step]
            pair = [values[name][step, at] for name in (RECORDED, predictor)]
            if min(map(np.ptp, pair)) > _CONSTANT:
                measured = correlation(pair[0], pair[1], episodes[at],
                                       ClusterBootstrap(episodes[at], seed))
                rows.append((step, predictor, kind, at.sum(), measured.value, np.nan,
                             measured.low, measured.high))
    return rows


@dataclasses.dataclass(frozen=True)
class BaselineComparison:
    """Comparison of the simulator's image loss with another predictor's.

    Attributes:
        predictor: the other predictor.
        steps: steps in COMPARED_STEPS that any window reaches.
        better: number of steps at which the simulator's mean image loss is lower.
        clearly: number of steps at which the 95 % interval of the paired difference lies entirely
            in the simulator's favour.
    """

    predictor: str
    steps: tuple[int, ...]
    better: int
    clearly: int


def comparisons(result: LossOverTime, seed: int) -> list[BaselineComparison]:
    """Compare the simulator's image loss with that of each other predictor."""
    bootstrap = ClusterBootstrap(result.episodes, seed)
    steps = [step for step in COMPARED_STEPS
             if step < len(result.counted) and result.counted[step].any()]
    compared = []
    for predictor in PREDICTORS[1:]:
        gain = result.losses[predictor, "image"] - result.losses[SIMULATOR, "image"]  # (T, N)
        better = sum(np.nanmean(gain[step]) > 0 for step in steps)
        clearly = (bootstrap.interval(gain, result.counted)[0, steps] > 0).sum()
        compared.append(BaselineComparison(predictor, tuple(steps), int(better), int(clearly)))
    return compared
