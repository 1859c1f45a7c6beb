"""Draw the results of combined_agent_env_hx_analysis_precompute.py: all behaviours on maps, and
each with frames, actions and values of its samples."""

from __future__ import annotations

from analysis.behaviours.figures import figures
from analysis.behaviours.files import BEHAVIOUR_FILES
from analysis.parameters.config import BehavioursConfig
from analysis.parameters.flags import add_plotting_flags, add_sample_analysis_flags
from analysis.results.output import draw, figure_schema
from analysis.results.simulated_steps import chosen_samples, simulated_steps
from common.cli import Parser
from common.errors import script_main
from common.results import ResultStore
from common.step_results import StepResults
from generative.flags import samples_of

FIGURES = figure_schema("analysis/combined_agent_env_hx_analysis_plotting.py")


def parser() -> Parser:
    flags = Parser(__doc__)
    add_sample_analysis_flags(flags, "combined_agent_env_hx",
                              "combined_agent_env_hx_analysis_precomp")
    add_plotting_flags(flags, "combined_agent_env_hx_plots")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, _, parameters = parser().read(argv)
    num_samples = parameters.get(BehavioursConfig).num_samples
    output = args.output_dir or parameters.folders.behaviour_plots
    ResultStore(output, FIGURES).check_replaceable()
    results = StepResults(args.precomp_dir or parameters.folders.behaviours, BEHAVIOUR_FILES,
                          num_samples)
    samples = samples_of(args, parameters)
    steps = simulated_steps(samples, chosen_samples(samples, num_samples))
    draw(FIGURES, output, figures(results, samples, steps, args.seed), results,
         {"samples": str(samples.path), "seed": args.seed})


if __name__ == "__main__":
    raise SystemExit(main())
