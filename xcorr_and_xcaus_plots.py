"""Correlations and cross-causation between independent components of the agent's state."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from analysis.influences.correlation import CORRELATION_FILES, Correlations
from analysis.influences.gradients import open_inputs, open_reader
from analysis.parameters import InfluenceOptions, XplotsConfig
from analysis.state_maps import figure_schema, save_figures
from common.options import command, option
from common.results import ResultStore

FIGURES = figure_schema("xcorr_and_xcaus_plots.py")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrelationOptions(InfluenceOptions):
    """Plot correlations between independent components of the agent's state at several lags
    (cross-correlation) and their effects on each other in the simulator (cross-causation)."""

    output_dir: Path | None = option(None, "folder of the figures; "
                                           "<save_dir>/cross_corr_and_causation_plots if not given")
    data_output_dir: Path | None = option(
        None, "folder of the matrices; <save_dir>/cross_corr_and_causation_plot_data if not given")
    causation: bool = option(True, "plot only cross-correlation, which needs no saliency")


def plot_correlations(options: CorrelationOptions) -> Correlations:
    """Write figures and matrices, and return the matrices."""
    parameters = options.parameters
    plots = options.output_dir or parameters.folders.correlation_plots
    data = options.data_output_dir or parameters.folders.correlations
    figure_store, data_store = ResultStore(plots, FIGURES), ResultStore(data, CORRELATION_FILES)
    figure_store.check_replaceable()
    data_store.check_replaceable()
    inputs = open_inputs(options)
    influences = open_reader(inputs, parameters).read(()) if options.causation else None
    share = parameters.get(XplotsConfig).extrema_threshold
    correlations = Correlations(inputs, influences, share)
    settings = {**inputs.description(), "lags": correlations.lags,
                "lags_left_out": correlations.lags_left_out, "extrema_threshold": share,
                "saliency_step": correlations.step}
    with data_store.replace(settings) as temporary:
        correlations.save(temporary)
    with figure_store.replace({**settings, "data": str(data)}) as temporary:
        num_figures = save_figures(temporary, correlations.draw())
    print(f"wrote {num_figures} figures to {plots}, matrices to {data}")
    cosines = correlations.cosines
    largest = np.abs(cosines - np.eye(len(cosines))).max(initial=0)
    print("absolute cosines between directions of different components are at most "
          f"{largest:.2f}")
    return correlations


main = command(CorrelationOptions, plot_correlations)

if __name__ == "__main__":
    raise SystemExit(main())
