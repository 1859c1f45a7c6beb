"""Draw the results of env_h_analysis_precompute.py: the states of the simulated environment."""

from __future__ import annotations

from analysis.env_states.figures import figures
from analysis.env_states.files import ENV_STATE_FILES
from analysis.parameters.config import EnvHiddenConfig
from analysis.parameters.flags import add_plotting_flags, add_sample_analysis_flags
from analysis.results.output import draw, figure_schema
from analysis.results.simulated_steps import chosen_samples, simulated_steps
from common.cli import Parser, count
from common.errors import UserError, script_main
from common.results import ResultStore
from common.step_results import StepResults
from generative.flags import samples_of

FIGURES = figure_schema("analysis/env_h_analysis_plotting.py")


def parser() -> Parser:
    flags = Parser(__doc__)
    add_sample_analysis_flags(flags, "env_h", "env_analysis_precomp")
    flags.add_argument("--num_epi_paths", type=count, key="analysis.env_h.num_epi_paths",
                       help="samples whose paths are drawn")
    add_plotting_flags(flags, "env_plots")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, _, parameters = parser().read(argv)
    env_h = parameters.get(EnvHiddenConfig)
    output = args.output_dir or parameters.folders.env_state_plots
    ResultStore(output, FIGURES).check_replaceable()
    if env_h.num_epi_paths > env_h.num_samples:
        raise UserError(f"num_epi_paths is {env_h.num_epi_paths}, more than the "
                        f"{env_h.num_samples} samples")
    results = StepResults(args.precomp_dir or parameters.folders.env_states, ENV_STATE_FILES,
                          env_h.num_samples)
    samples = samples_of(args, parameters)
    steps = simulated_steps(samples, chosen_samples(samples, env_h.num_samples))
    draw(FIGURES, output, figures(results, samples, steps, env_h.num_epi_paths, args.seed), results,
         {"samples": str(samples.path), "num_epi_paths": env_h.num_epi_paths, "seed": args.seed})


if __name__ == "__main__":
    raise SystemExit(main())
