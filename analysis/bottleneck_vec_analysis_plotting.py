"""Draw the results of bottleneck_vec_analysis_precompute.py: the vectors from which simulations
start."""

from __future__ import annotations

from analysis.bottleneck_vectors.figures import figures
from analysis.bottleneck_vectors.files import BOTTLENECK_FILES
from analysis.parameters.config import BottleneckConfig
from analysis.parameters.flags import add_plotting_flags, add_sample_analysis_flags
from analysis.results.output import draw, figure_schema
from common.cli import Parser
from common.errors import script_main
from common.results import ResultStore
from common.step_results import StepResults
from generative.flags import samples_of

FIGURES = figure_schema("analysis/bottleneck_vec_analysis_plotting.py")


def parser() -> Parser:
    flags = Parser(__doc__)
    add_sample_analysis_flags(flags, "bottleneck", "bottleneck_vec_analysis_precomp")
    add_plotting_flags(flags, "bottleneck_vec_plots")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, _, parameters = parser().read(argv)
    output = args.output_dir or parameters.folders.bottleneck_plots
    ResultStore(output, FIGURES).check_replaceable()
    results = StepResults(args.precomp_dir or parameters.folders.bottleneck, BOTTLENECK_FILES,
                          parameters.get(BottleneckConfig).num_samples)
    samples = samples_of(args, parameters)
    draw(FIGURES, output, figures(results, samples, args.seed), results,
         {"samples": str(samples.path), "seed": args.seed})


if __name__ == "__main__":
    raise SystemExit(main())
