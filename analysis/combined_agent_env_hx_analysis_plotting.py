"""Draw the results of combined_agent_env_hx_analysis_precompute.py: maps of all behaviours, and
the frames, actions and values of each behaviour's samples."""

from __future__ import annotations

from analysis.behaviours import BEHAVIOUR_FILES, draw_figures
from analysis.parameters import BehavioursConfig, add_plotting_flags, add_sample_analysis_flags
from analysis.state_maps import SampleAnalysis, figure_schema, replace_figures
from common.cli import Parser
from common.errors import script_main

FIGURES = figure_schema("analysis/combined_agent_env_hx_analysis_plotting.py")


def parser() -> Parser:
    flags = Parser(__doc__)
    add_sample_analysis_flags(flags, "combined_agent_env_hx",
                              "combined_agent_env_hx_analysis_precomp")
    add_plotting_flags(flags, "combined_agent_env_hx_plots")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    analysis = SampleAnalysis(parser(), argv, BehavioursConfig, BEHAVIOUR_FILES, "behaviours")
    store, seed = analysis.output(FIGURES, "behaviour_plots"), analysis.args.seed
    figures = draw_figures(analysis.results, analysis.samples, analysis.read_steps(), seed)
    replace_figures(store, figures, analysis.results,
                    {"samples": str(analysis.samples.path), "seed": seed})


if __name__ == "__main__":
    raise SystemExit(main())
