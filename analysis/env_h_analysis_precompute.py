"""Analyse the states of the simulated environment: principal components, clusters and t-SNE."""

from __future__ import annotations

from analysis.env_states.files import ENV_STATE_FILES
from analysis.parameters.config import EnvHiddenConfig, TsneConfig
from analysis.parameters.flags import add_precompute_flags, add_sample_analysis_flags
from analysis.results.output import description_of
from analysis.results.simulated_steps import chosen_samples, simulated_states
from analysis.results.steps import map_states
from common.cli import Parser
from common.errors import script_main
from common.step_results import StepResults
from generative.flags import samples_of


def parser() -> Parser:
    flags = Parser(__doc__)
    add_sample_analysis_flags(flags, "env_h", "env_analysis_precomp")
    add_precompute_flags(flags, "env_h", "samples")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, _, parameters = parser().read(argv)
    env_h, tsne_seed = parameters.get(EnvHiddenConfig), parameters.get(TsneConfig).tsne_seed
    results = StepResults(args.precomp_dir or parameters.folders.env_states, ENV_STATE_FILES,
                          env_h.num_samples)
    results.check_new(args.overwrite)
    samples = samples_of(args, parameters)
    numbers = chosen_samples(samples, env_h.num_samples)
    states = simulated_states(samples, "env_h", numbers)
    print(f"{len(states)} states of {len(numbers)} samples", flush=True)
    results.start(description_of(env_h, args.seed, tsne_seed,
                                                     samples, numbers))
    map_states(states, "unit of the environment's state", env_h, args.seed,
               tsne_seed, results)
    results.finish()


if __name__ == "__main__":
    raise SystemExit(main())
