"""Analyse how the agent's independent components depend on earlier states of agent and environment:
principal components, clusters and t-SNE of the gradients from saliency_experiments.py."""

from __future__ import annotations

from analysis.jacobians import JACOBIAN_FILES, analyse, read_jacobians
from analysis.parameters import JacobianConfig, add_precompute_flags, add_sample_analysis_flags
from analysis.state_maps import SampleAnalysis
from common.cli import Parser
from common.errors import UserError, script_main
from generative.saliency.files import SaliencyFolder
from generative.saliency.gradients import DIRECTION, WITHOUT_ENV_GRADS, saliency_functions
from interventions.config import DirectionsConfig
from interventions.flags import add_direction_ids_flag, add_direction_type_flag


def parser() -> Parser:
    flags = Parser(__doc__)
    add_sample_analysis_flags(flags, "jacobian", "jacob_analysis_precomp")
    flags.add_argument("--grad_timestep", type=int, key="analysis.jacobian.grad_timestep",
                       help="step of the samples whose states the gradients are taken with respect "
                            "to, counted from 0")
    add_direction_ids_flag(flags, "--direction_ids",
                           "numbers of the components, or a range: 0 to 16 ends before 16")
    add_direction_type_flag(flags)
    flags.add_argument("--without_env_grads", action="store_true",
                       help="use the gradients that do not pass through the action that enters the "
                            "environment")
    add_precompute_flags(flags, "jacobian", "samples")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    analysis = SampleAnalysis(parser(), argv, JacobianConfig, JACOBIAN_FILES, "jacobians")
    analysis.results.check_new(analysis.args.overwrite)
    directions = analysis.parameters.get(DirectionsConfig)
    functions = [function.name + (WITHOUT_ENV_GRADS if analysis.args.without_env_grads else "")
                 for function in saliency_functions([DIRECTION], directions.ids(),
                                                    directions.direction_type)]
    if not functions:
        raise UserError("there is nothing to do without components: see --direction_ids")
    numbers, gradients = analysis.numbers, SaliencyFolder(analysis.samples.path)
    jacobians = read_jacobians(gradients, numbers, functions, analysis.config.grad_timestep)
    print(f"gradients of {len(functions)} components in {len(numbers)} samples", flush=True)
    analyse(jacobians, analysis.start(
        functions=functions, saliency_made_by=gradients.description(numbers[0], functions[0])))
    analysis.results.finish()


if __name__ == "__main__":
    raise SystemExit(main())
