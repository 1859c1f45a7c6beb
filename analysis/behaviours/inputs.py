"""Features of the steps of simulated samples, in which behaviours are found, and the flags that say
where they are."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import numpy as np

from analysis.behaviours.steps import behaviour_features
from analysis.env_states.files import ENV_STATE_FILES
from analysis.parameters.config import BehavioursConfig, EnvHiddenConfig
from analysis.parameters.flags import add_sample_analysis_flags
from analysis.results.simulated_steps import chosen_samples
from common.cli import Parser, count
from common.errors import UserError
from common.files import sha256
from common.parameters import ParameterSet
from common.step_results import StepResults
from generative.flags import samples_of
from generative.sample_files import SampleFolder


@dataclasses.dataclass(frozen=True)
class BehaviourInputs:
    """Features of samples' steps.

    Attributes:
        features: of ``behaviour_features``, steps of one sample after another (M * T, F).
        samples: where they are from.
        numbers: of the samples (M,).
        env_file: the environment's principal coordinates.
    """

    features: np.ndarray
    samples: SampleFolder
    numbers: list[int]
    env_file: Path

    def description(self) -> dict:
        """The environment's part in what results are made of."""
        return {"env_coordinates": str(self.env_file),
                "env_coordinates_sha256": sha256(self.env_file)}


def add_behaviour_flags(parser: Parser, precomputed: str) -> None:
    """The flags of the scripts that find behaviours.

    Args:
        precomputed: name of the folder of a script's arrays.
    """
    add_sample_analysis_flags(parser, "combined_agent_env_hx", precomputed)
    parser.add_argument("--env_precomp_dir", type=Path,
                        help="folder of the environment's principal coordinates, from "
                             f"{ENV_STATE_FILES.script}; <save_dir>/env_analysis_precomp if not "
                             "given")
    parser.add_argument("--num_env_samples", type=count, key="analysis.env_h.num_samples",
                        help="samples that those were made of, which is in their names")


def read_inputs(args: argparse.Namespace, parameters: ParameterSet) -> BehaviourInputs:
    """Read what the flags name, and say how much it is.

    Raises:
        UserError: if samples or coordinates are missing, damaged, too few, or of other samples.
    """
    config = parameters.get(BehavioursConfig)
    samples = samples_of(args, parameters)
    numbers = chosen_samples(samples, config.num_samples)
    agent = samples.stacked_field("hidden_states", numbers)
    env_folder = StepResults(args.env_precomp_dir or parameters.folders.env_states,
                             ENV_STATE_FILES, parameters.get(EnvHiddenConfig).num_samples)
    env = env_coordinates(env_folder, samples, numbers, agent.shape[1], config.n_components_env)
    features = behaviour_features(agent, env, config.timestep_differences)
    print(f"{len(features)} steps of {len(numbers)} samples, {features.shape[1]} features",
          flush=True)
    return BehaviourInputs(features, samples, numbers, env_folder.file("principal"))


def env_coordinates(folder: StepResults, samples: SampleFolder, numbers: list[int],
                    num_steps: int, num_components: int) -> np.ndarray:
    """The first principal coordinates of the environment in samples (M, T, P).

    Raises:
        UserError: if they are missing, damaged, too few, or of other samples.
    """
    if folder.number < len(numbers):
        raise UserError(f"the environment's principal coordinates in {folder.path} are those of "
                        f"{folder.number} samples, fewer than the {len(numbers)} asked for; run "
                        f"{folder.schema.script} with more, or give --num_samples {folder.number}")
    rows = folder.read("principal", folder.number * num_steps)
    made_of = folder.settings()
    if made_of and (made_of["sample_numbers"][:len(numbers)] != numbers
                    or made_of["samples_made_by"] != samples.description()):
        raise UserError(f"{folder.file('principal')} was made of {made_of['samples']}, which does "
                        f"not hold the samples of {samples.path}; run {folder.schema.script} on "
                        "these")
    if rows.shape[1] < num_components:
        raise UserError(f"n_components_env is {num_components}, but {folder.file('principal')} has "
                        f"only {rows.shape[1]} principal components")
    return rows[:len(numbers) * num_steps, :num_components].reshape(len(numbers), num_steps, -1)
