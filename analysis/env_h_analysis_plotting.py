"""Draw the results of env_h_analysis_precompute.py: the states of the simulated environment."""

from __future__ import annotations

from analysis.env_states import ENV_STATE_FILES, draw_figures
from analysis.parameters import EnvHiddenConfig, add_plotting_flags, add_sample_analysis_flags
from analysis.state_maps import SampleAnalysis, figure_schema, replace_figures
from common.cli import Parser, count
from common.errors import UserError, script_main

FIGURES = figure_schema("analysis/env_h_analysis_plotting.py")


def parser() -> Parser:
    flags = Parser(__doc__)
    add_sample_analysis_flags(flags, "env_h", "env_analysis_precomp")
    flags.add_argument("--num_epi_paths", type=count, key="analysis.env_h.num_epi_paths",
                       help="number of samples whose trajectories are drawn")
    add_plotting_flags(flags, "env_plots")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    analysis = SampleAnalysis(parser(), argv, EnvHiddenConfig, ENV_STATE_FILES, "env_states")
    store = analysis.output(FIGURES, "env_state_plots")
    num_paths, num_samples = analysis.config.num_epi_paths, analysis.config.num_samples
    if num_paths > num_samples:
        raise UserError(f"num_epi_paths is {num_paths}, more than the {num_samples} samples")
    seed = analysis.args.seed
    figures = draw_figures(analysis.results, analysis.samples, analysis.read_steps(), num_paths,
                           seed)
    replace_figures(store, figures, analysis.results, {
        "samples": str(analysis.samples.path), "num_epi_paths": num_paths, "seed": seed})


if __name__ == "__main__":
    raise SystemExit(main())
