"""Analyse the states of the simulated environment: principal components, clusters and t-SNE."""

from __future__ import annotations

from pathlib import Path

from analysis.env_states.files import EnvStatesFolder
from analysis.results.output import check_results, description_of, finish, reporting_writer
from analysis.results.simulated_steps import chosen_samples, simulated_states
from analysis.results.steps import map_states
from common.cli import Parser
from common.errors import script_main
from generative.cli import add_precompute_flags, add_sample_analysis_flags, parse, samples_of


def parser() -> Parser:
    flags = Parser(__doc__)
    add_sample_analysis_flags(flags, "env_analysis_precomp")
    add_precompute_flags(flags, "samples")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, _, config = parse(parser(), argv, "env_h")
    env_h = config.analysis.env_h
    folder = EnvStatesFolder(
        args.precomp_dir or Path(config.analysis.save_dir) / "env_analysis_precomp",
        env_h.num_samples)
    check_results(folder, "samples", args.overwrite)
    samples = samples_of(args, config)
    numbers = chosen_samples(samples, env_h.num_samples)
    states = simulated_states(samples, "env_h", numbers)
    print(f"{len(states)} states of {len(numbers)} samples", flush=True)
    writer = reporting_writer(folder, description_of(env_h, args.seed, config.analysis.tsne_seed,
                                                     samples, numbers))
    map_states(states, "unit of the environment's state", env_h, args.seed,
               config.analysis.tsne_seed, writer)
    finish(writer)


if __name__ == "__main__":
    raise SystemExit(main())
