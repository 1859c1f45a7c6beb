"""Behaviours: clusters of the states of agent and environment and of their changes.

A published README calls this script sml_analysis_precompute.py, for the sensorimotor loop.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar

from agents.provenance import check_agent
from agents.rollout_files import RolloutFolder
from analysis.behaviours import BEHAVIOURS, EnvCoordinatesOptions
from analysis.parameters import BehavioursConfig, PrecomputeOptions
from common.options import command, option
from common.step_results import StepResults


@dataclasses.dataclass(frozen=True, kw_only=True)
class BehavioursOptions(EnvCoordinatesOptions, PrecomputeOptions):
    """Find behaviours: clusters, on a t-SNE map, of the agent's and the environment's states and of
    the changes of these states. A sample shows the behaviour that is most common among its first
    steps."""

    section: ClassVar[str] = BehavioursConfig.section

    agent_env_data_dir: Path | None = option(
        None, "folder of recorded rollouts; if given, the samples must be of the recorded agent")


def find_behaviours(options: BehavioursOptions) -> StepResults:
    """Compute and store the analysis, and return its results."""
    if options.agent_env_data_dir is not None:
        recorded = RolloutFolder(options.agent_env_data_dir).description().get("agent_sha256")
        check_agent(options.samples.description().get("agent_sha256"), recorded,
                    f"the samples in {options.samples.path} were recorded",
                    f"take samples of the agent of {options.agent_env_data_dir}")
    return BEHAVIOURS.precompute(options)


main = command(BehavioursOptions, find_behaviours)

if __name__ == "__main__":
    raise SystemExit(main())
