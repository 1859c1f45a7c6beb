"""Draw the results of jacobian_analysis_precompute.py: the gradients of components."""

from __future__ import annotations

from analysis.jacobians.figures import figures
from analysis.jacobians.files import JACOBIAN_FILES
from analysis.parameters.config import JacobianConfig
from analysis.parameters.flags import add_plotting_flags, add_sample_analysis_flags
from analysis.results.output import draw, figure_schema
from analysis.results.simulated_steps import chosen_samples, simulated_steps
from common.cli import Parser
from common.errors import script_main
from common.results import ResultStore
from common.step_results import StepResults
from generative.flags import samples_of

FIGURES = figure_schema("analysis/jacobian_analysis_plotting.py")


def parser() -> Parser:
    flags = Parser(__doc__)
    add_sample_analysis_flags(flags, "jacobian", "jacob_analysis_precomp")
    add_plotting_flags(flags, "jacob_plots")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, _, parameters = parser().read(argv)
    jacobian = parameters.get(JacobianConfig)
    output = args.output_dir or parameters.folders.jacobian_plots
    ResultStore(output, FIGURES).check_replaceable()
    results = StepResults(args.precomp_dir or parameters.folders.jacobians, JACOBIAN_FILES,
                          jacobian.num_samples)
    samples = samples_of(args, parameters)
    steps = simulated_steps(samples, chosen_samples(samples, jacobian.num_samples))
    draw(FIGURES, output,
         figures(results, samples, steps, jacobian.grad_timestep, args.seed), results,
         {"samples": str(samples.path), "seed": args.seed})


if __name__ == "__main__":
    raise SystemExit(main())
