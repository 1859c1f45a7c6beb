"""Plot correlations between independent components of the agent's state at several lags
(cross-correlation) and their effects on each other in the simulator (cross-causation)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from analysis.influences.correlation import CORRELATION_FILES, Correlations
from analysis.influences.gradients import open_inputs, open_reader
from analysis.parameters import XplotsConfig, add_influence_flags
from analysis.state_maps import figure_schema, save_figures
from common.cli import Parser
from common.errors import script_main
from common.results import ResultStore

FIGURES = figure_schema("xcorr_and_xcaus_plots.py")


def parser() -> Parser:
    flags = Parser(__doc__)
    add_influence_flags(flags)
    flags.add_argument("--output_dir", type=Path, help="folder of the figures; "
                       "<save_dir>/cross_corr_and_causation_plots if not given")
    flags.add_argument("--data_output_dir", type=Path, help="folder of the matrices; "
                       "<save_dir>/cross_corr_and_causation_plot_data if not given")
    flags.add_argument("--no_causation", action="store_true",
                       help="plot only cross-correlation, which needs no saliency")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, _, parameters = parser().read(argv)
    plots = args.output_dir or parameters.folders.correlation_plots
    data = args.data_output_dir or parameters.folders.correlations
    figure_store, data_store = ResultStore(plots, FIGURES), ResultStore(data, CORRELATION_FILES)
    figure_store.check_replaceable()
    data_store.check_replaceable()
    inputs = open_inputs(args, parameters)
    influences = None if args.no_causation else open_reader(inputs, parameters).read(())
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


if __name__ == "__main__":
    raise SystemExit(main())
