"""Tables of the loss over simulated steps, and comparisons of the simulator with baselines."""

from __future__ import annotations

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
    COMPARED_STEPS,
    IMAGE_MSE,
    OTHER_VALUES,
    PREDICTORS,
    RECORDED,
    SHUFFLED_ACTIONS,
    SIMULATOR,
    VALUE_CORRELATION,
    VALUES,
    LossOverTime,
)
from stats.association import correlation
from stats.bootstrap import ClusterBootstrap

_CONSTANT = 1e-6  # range up to which values count as constant


def table_of(result: LossOverTime, seed: int) -> pd.DataFrame:
    """Summarise a result in a table with one row per step, predictor and kind.

    Returns:
        The columns ``step`` (from 0, the step whose label is the last initial frame),
        ``predictor``, ``kind``, ``windows`` (number of windows in which the kind is measured at
        this step), ``mean`` and ``standard_deviation`` over these windows, and ``low_95`` and
        ``high_95``, the ends of the 95 % interval of the mean. Steps without such windows have no
        row. For some kinds, ``mean`` is another statistic:

        - ``value_correlation``, ``other_value_correlation``: Pearson's correlation over the
          windows; no row if the values on recorded or on predicted frames are constant.
        - ``psnr_of_mean_error``: PSNR in dB of the mean squared error.
        - ``psnr_margin``: mean PSNR of the simulator with the recorded actions minus that of the
          predictor, in dB, on the same windows.
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
        if kind in (VALUES, OTHER_VALUES):
            continue
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
    for name, kind, measures in ((VALUE_CORRELATION, VALUES, result.losses),
                                 (OTHER_VALUE_CORRELATION, OTHER_VALUES, result.fidelity)):
        rows += _value_correlations(name, {predictor: values for (predictor, of_kind), values
                                           in measures.items() if of_kind == kind},
                                    result.episodes, seed)
    return pd.DataFrame(rows, columns=["step", "predictor", "kind", "windows", "mean",
                                       "standard_deviation", "low_95", "high_95"])


def _value_correlations(name: str, values: dict[str, np.ndarray], episodes: np.ndarray,
                        seed: int) -> list[tuple]:
    """Correlate an agent's values on predicted frames with its values on recorded frames.

    Args:
        name: kind of the correlation in the table.
        values: values by predictor, including RECORDED (T, N).
        episodes: numbers of the episodes of the windows (N,).

    Returns:
        Rows of the table, see ``table_of``.
    """
    rows = []
    for predictor in [name for name in values if name != RECORDED]:
        counted = np.isfinite(values[predictor])  # (T, N)
        for step in np.flatnonzero(counted.any(axis=1)).tolist():
            mask = counted[step]
            recorded, predicted = (values[key][step, mask] for key in (RECORDED, predictor))
            if min(np.ptp(recorded), np.ptp(predicted)) > _CONSTANT:
                measured = correlation(recorded, predicted, episodes[mask],
                                       ClusterBootstrap(episodes[mask], seed))
                rows.append((step, predictor, name, mask.sum(), measured.value, np.nan,
                             measured.low, measured.high))
    return rows


def comparisons(result: LossOverTime, seed: int) -> list[dict]:
    """Compare the simulator's image loss with that of each other predictor in ``PREDICTORS``.

    Returns:
        One dict for each of these predictors, with the keys:

        - ``predictor``: name of the predictor.
        - ``steps``: steps in COMPARED_STEPS that any window reaches.
        - ``better``: number of these steps at which the simulator's mean image loss is lower.
        - ``clearly``: number of these steps at which the loss is lower and the 95 % interval of the
          paired difference excludes 0.
    """
    bootstrap = ClusterBootstrap(result.episodes, seed)
    steps = [step for step in COMPARED_STEPS
             if step < len(result.counted) and result.counted[step].any()]
    compared = []
    for predictor in PREDICTORS[1:]:
        gain = result.losses[predictor, "image"] - result.losses[SIMULATOR, "image"]  # (T, N)
        low = bootstrap.interval(gain, result.counted)[0, steps]
        compared.append({"predictor": predictor, "steps": steps,
                         "better": sum(bool(np.nanmean(gain[step]) > 0) for step in steps),
                         "clearly": int((low > 0).sum())})
    return compared
