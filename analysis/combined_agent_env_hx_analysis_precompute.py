"""Find behaviours: clusters of the agent's and the environment's states and of their changes, on a
t-SNE map; a sample shows the behaviour that most of its first steps are in."""

from __future__ import annotations

from analysis.behaviours.files import BEHAVIOUR_FILES
from analysis.behaviours.inputs import add_behaviour_flags, read_inputs
from analysis.behaviours.steps import analyse
from analysis.parameters.config import BehavioursConfig, TsneConfig
from analysis.parameters.flags import add_precompute_flags
from analysis.results.output import description_of
from common.cli import Parser
from common.errors import script_main
from common.step_results import StepResults


def parser() -> Parser:
    flags = Parser(__doc__)
    add_behaviour_flags(flags, "combined_agent_env_hx_analysis_precomp")
    add_precompute_flags(flags, "combined_agent_env_hx", "samples")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, _, parameters = parser().read(argv)
    behaviours, tsne_seed = parameters.get(BehavioursConfig), parameters.get(TsneConfig).tsne_seed
    results = StepResults(args.precomp_dir or parameters.folders.behaviours, BEHAVIOUR_FILES,
                          behaviours.num_samples)
    results.check_new(args.overwrite)
    inputs = read_inputs(args, parameters)
    results.start({
        **description_of(behaviours, args.seed, tsne_seed, inputs.samples, inputs.numbers),
        **inputs.description()})
    analyse(inputs.features, len(inputs.numbers), behaviours, args.seed, tsne_seed, results)
    results.finish()


if __name__ == "__main__":
    raise SystemExit(main())
