"""Find behaviours: clusters of the agent's and the environment's states and of their changes, on a
t-SNE map; a sample shows the behaviour that most of its first steps are in."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from analysis.behaviours.files import BehavioursFolder
from analysis.behaviours.steps import analyse, behaviour_features
from analysis.env_states.files import EnvStatesFolder
from analysis.parameters.config import BehavioursConfig, EnvHiddenConfig, TsneConfig
from analysis.parameters.flags import add_precompute_flags, add_sample_analysis_flags
from analysis.results.output import check_results, description_of, finish, reporting_writer
from analysis.results.simulated_steps import chosen_samples
from common.cli import Parser, count
from common.errors import UserError, script_main
from common.files import sha256
from generative.flags import samples_of
from generative.sample_files import SampleFolder


def parser() -> Parser:
    flags = Parser(__doc__)
    add_sample_analysis_flags(flags, "combined_agent_env_hx",
                              "combined_agent_env_hx_analysis_precomp")
    flags.add_argument("--env_precomp_dir", type=Path,
                       help="folder of the environment's principal coordinates, from "
                            f"{EnvStatesFolder.script}; <save_dir>/env_analysis_precomp if not "
                            "given")
    flags.add_argument("--num_env_samples", type=count, key="analysis.env_h.num_samples",
                       help="samples that those were made of, which is in their names")
    add_precompute_flags(flags, "combined_agent_env_hx", "samples")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, _, parameters = parser().read(argv)
    behaviours, tsne_seed = parameters.get(BehavioursConfig), parameters.get(TsneConfig).tsne_seed
    folder = BehavioursFolder(args.precomp_dir or parameters.folders.behaviours,
                              behaviours.num_samples)
    check_results(folder, "samples", args.overwrite)
    samples = samples_of(args, parameters)
    numbers = chosen_samples(samples, behaviours.num_samples)
    agent = samples.stacked_field("hidden_states", numbers)
    env_folder = EnvStatesFolder(args.env_precomp_dir or parameters.folders.env_states,
                                 parameters.get(EnvHiddenConfig).num_samples)
    env = env_coordinates(env_folder, samples, numbers, agent.shape[1],
                          behaviours.n_components_env)
    features = behaviour_features(agent, env, behaviours.timestep_differences)
    print(f"{len(features)} steps of {len(numbers)} samples, {features.shape[1]} features",
          flush=True)
    description = description_of(behaviours, args.seed, tsne_seed, samples,
                                 numbers)
    env_file = env_folder.file("principal")
    writer = reporting_writer(folder, {**description, "env_coordinates": str(env_file),
                                       "env_coordinates_sha256": sha256(env_file)})
    analyse(features, len(numbers), behaviours, args.seed, tsne_seed, writer)
    finish(writer)


def env_coordinates(folder: EnvStatesFolder, samples: SampleFolder, numbers: list[int],
                    num_steps: int, num_components: int) -> np.ndarray:
    """The first principal coordinates of the environment in samples (M, T, P).

    Raises:
        UserError: if they are missing, damaged, too few, or of other samples.
    """
    if folder.number < len(numbers):
        raise UserError(f"the environment's principal coordinates in {folder.path} are those of "
                        f"{folder.number} samples, fewer than the {len(numbers)} asked for; run "
                        f"{folder.script} with more, or give --num_samples {folder.number}")
    rows = folder.read_finite("principal", folder.number * num_steps)
    made_of = folder.settings()
    if made_of and (made_of["sample_numbers"][:len(numbers)] != numbers
                    or made_of["samples_made_by"] != samples.description()):
        raise UserError(f"{folder.file('principal')} was made of {made_of['samples']}, which does "
                        f"not hold the samples of {samples.path}; run {folder.script} on these")
    if rows.shape[1] < num_components:
        raise UserError(f"n_components_env is {num_components}, but {folder.file('principal')} has "
                        f"only {rows.shape[1]} principal components")
    return rows[:len(numbers) * num_steps, :num_components].reshape(len(numbers), num_steps, -1)


if __name__ == "__main__":
    raise SystemExit(main())
