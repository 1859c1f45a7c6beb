"""Draw the results of jacobian_analysis_precompute.py: gradients of independent components."""

from __future__ import annotations

from analysis.jacobians import JACOBIAN_FILES, draw_figures
from analysis.parameters import JacobianConfig, add_plotting_flags, add_sample_analysis_flags
from analysis.state_maps import SampleAnalysis, figure_schema, replace_figures
from common.cli import Parser
from common.errors import script_main

FIGURES = figure_schema("analysis/jacobian_analysis_plotting.py")


def parser() -> Parser:
    flags = Parser(__doc__)
    add_sample_analysis_flags(flags, "jacobian", "jacob_analysis_precomp")
    add_plotting_flags(flags, "jacob_plots")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    analysis = SampleAnalysis(parser(), argv, JacobianConfig, JACOBIAN_FILES, "jacobians")
    store, seed = analysis.output(FIGURES, "jacobian_plots"), analysis.args.seed
    figures = draw_figures(analysis.results, analysis.samples, analysis.read_steps(),
                           analysis.config.grad_timestep, seed)
    replace_figures(store, figures, analysis.results,
                    {"samples": str(analysis.samples.path), "seed": seed})


if __name__ == "__main__":
    raise SystemExit(main())
