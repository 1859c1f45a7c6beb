"""Draw the results of bottleneck_vec_analysis_precompute.py: the bottleneck vectors from which
simulations start."""

from __future__ import annotations

from analysis.bottleneck_vectors import BOTTLENECK_FILES, draw_figures
from analysis.parameters import BottleneckConfig, add_plotting_flags, add_sample_analysis_flags
from analysis.state_maps import SampleAnalysis, figure_schema, replace_figures
from common.cli import Parser
from common.errors import script_main

FIGURES = figure_schema("analysis/bottleneck_vec_analysis_plotting.py")


def parser() -> Parser:
    flags = Parser(__doc__)
    add_sample_analysis_flags(flags, "bottleneck", "bottleneck_vec_analysis_precomp")
    add_plotting_flags(flags, "bottleneck_vec_plots")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    analysis = SampleAnalysis(parser(), argv, BottleneckConfig, BOTTLENECK_FILES, "bottleneck")
    store, seed = analysis.output(FIGURES, "bottleneck_plots"), analysis.args.seed
    figures = draw_figures(analysis.results, analysis.samples, seed)
    replace_figures(store, figures, analysis.results,
                    {"samples": str(analysis.samples.path), "seed": seed})


if __name__ == "__main__":
    raise SystemExit(main())
