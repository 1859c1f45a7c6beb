"""Draw how independent components of the agent's state go together some steps apart
(cross-correlation) and what they do to each other through the simulator (cross-causation)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from analysis.influences.correlation import lags_of
from analysis.influences.correlation_figures import CorrelationFigures, Correlations
from analysis.influences.files import CorrelationFolder
from analysis.influences.inputs import open_inputs, open_reader
from analysis.parameters.config import XplotsConfig
from analysis.parameters.flags import add_influence_flags
from analysis.results.output import draw_jobs, figure_schema
from common.cli import Parser
from common.errors import script_main
from common.results import ResultStore, Schema

FIGURES = figure_schema("xcorr_and_xcaus_plots.py")
DATA = Schema("matrices of xcorr_and_xcaus_plots.py", "xcorr_and_xcaus_plots.py",
              results=CorrelationFolder.FILES,
              flag="--data_output_dir", replaced=True)


def parser() -> Parser:
    flags = Parser(__doc__)
    add_influence_flags(flags)
    flags.add_argument("--output_dir", type=Path, help="folder of the figures; "
                       "<save_dir>/cross_corr_and_causation_plots if not given")
    flags.add_argument("--data_output_dir", type=Path, help="folder of the matrices; "
                       "<save_dir>/cross_corr_and_causation_plot_data if not given")
    flags.add_argument("--no_causation", action="store_true",
                       help="draw cross-correlation alone, which needs no saliency")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, _, parameters = parser().read(argv)
    plots = args.output_dir or parameters.folders.correlation_plots
    data = args.data_output_dir or parameters.folders.correlations
    figure_store, data_store = ResultStore(plots, FIGURES), ResultStore(data, DATA)
    figure_store.check_replaceable()
    data_store.check_replaceable()
    inputs = open_inputs(args, parameters)
    lags, left_out = lags_of(inputs.coordinates.ics.shape[1])
    if left_out:
        print(f"the samples have {inputs.coordinates.ics.shape[1]} steps, too few for "
              f"these lags, which are left out: {', '.join(map(str, left_out))}", flush=True)
    influences = None if args.no_causation else open_reader(inputs, parameters).read(())
    share = parameters.get(XplotsConfig).extrema_threshold
    found = Correlations.of(inputs, lags, influences, share)
    settings = {**inputs.description(), "lags": lags, "lags_left_out": left_out,
                "extrema_threshold": share,
                "saliency_step": None if influences is None else influences.step}
    with data_store.replace(settings) as temporary:
        found.save(CorrelationFolder(temporary))
    figures = CorrelationFigures(found, left_out)
    with figure_store.replace({**settings, "data": str(data)}) as temporary:
        draw_jobs(temporary, figures.jobs())
    print(f"wrote {len(list(data.glob('*.npy')))} matrices to {data} and {len(figures.jobs())} "
          f"figures to {plots}")
    largest = np.abs(found.cosines - np.eye(len(found.cosines))).max(initial=0)
    print(f"directions of different components have cosines of at most {largest:.2f} in size")


if __name__ == "__main__":
    raise SystemExit(main())
