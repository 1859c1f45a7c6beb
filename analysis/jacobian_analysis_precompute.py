"""Analyse how the agent's independent components depend on earlier states of agent and environment:
principal components, clusters and t-SNE of the gradients that saliency_experiments.py took."""

from __future__ import annotations

from analysis.jacobians.files import JACOBIAN_FILES
from analysis.jacobians.steps import analyse, read_jacobians
from analysis.parameters.config import JacobianConfig, TsneConfig
from analysis.parameters.flags import add_precompute_flags, add_sample_analysis_flags
from analysis.results.output import description_of
from analysis.results.simulated_steps import chosen_samples
from common.cli import Parser
from common.errors import UserError, script_main
from common.step_results import StepResults
from generative.flags import samples_of
from generative.saliency.files import SaliencyFolder
from generative.saliency.gradients import DIRECTION, WITHOUT_ENV_GRADS, saliency_functions
from interventions.config import DirectionsConfig
from interventions.flags import add_direction_ids_flag, add_direction_type_flag


def parser() -> Parser:
    flags = Parser(__doc__)
    add_sample_analysis_flags(flags, "jacobian", "jacob_analysis_precomp")
    flags.add_argument("--grad_timestep", type=int, key="analysis.jacobian.grad_timestep",
                       help="step of the samples, from 0, with respect to whose states the "
                            "gradients are")
    add_direction_ids_flag(flags, "--direction_ids",
                           "numbers of the components, or a range: 0 to 16 ends before 16")
    add_direction_type_flag(flags)
    flags.add_argument("--without_env_grads", action="store_true",
                       help="take the gradients without those through the action that enters the "
                            "environment")
    add_precompute_flags(flags, "jacobian", "samples")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, _, parameters = parser().read(argv)
    jacobian, tsne_seed = parameters.get(JacobianConfig), parameters.get(TsneConfig).tsne_seed
    results = StepResults(args.precomp_dir or parameters.folders.jacobians, JACOBIAN_FILES,
                          jacobian.num_samples)
    results.check_new(args.overwrite)
    asked = parameters.get(DirectionsConfig)
    directions = saliency_functions([DIRECTION], asked.ids(), asked.direction_type)
    if not directions:
        raise UserError("there is nothing to do without components: see --direction_ids")
    functions = [direction.name + (WITHOUT_ENV_GRADS if args.without_env_grads else "")
                 for direction in directions]
    samples = samples_of(args, parameters)
    numbers = chosen_samples(samples, jacobian.num_samples)
    gradients = SaliencyFolder(samples.path)
    jacobians = read_jacobians(gradients, numbers, functions, jacobian.grad_timestep)
    print(f"gradients of {len(functions)} components in {len(numbers)} samples", flush=True)
    description = description_of(jacobian, args.seed, tsne_seed, samples, numbers)
    results.start({
        **description, "functions": functions,
        "saliency_made_by": gradients.description(numbers[0], functions[0])})
    analyse(jacobians, jacobian, args.seed, tsne_seed, results)
    results.finish()


if __name__ == "__main__":
    raise SystemExit(main())
