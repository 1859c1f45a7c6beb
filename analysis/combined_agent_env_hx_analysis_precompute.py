"""Behaviours: clusters of the states of agent and environment and of their changes."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from analysis.behaviours import BEHAVIOURS, EnvCoordinatesOptions, compute
from analysis.parameters import BehavioursConfig, PrecomputeOptions
from analysis.state_maps import precompute
from common.options import command
from common.step_results import StepResults


@dataclasses.dataclass(frozen=True, kw_only=True)
class BehavioursOptions(EnvCoordinatesOptions, PrecomputeOptions):
    """Find behaviours: clusters, on a t-SNE map, of the agent's and the environment's states and of
    the changes of these states. A sample shows the behaviour that is most common among its first
    steps."""

    section: ClassVar[str] = BehavioursConfig.section


def find_behaviours(options: BehavioursOptions) -> StepResults:
    """Compute and store the analysis, and return its results."""
    return precompute(BEHAVIOURS, options, compute)


main = command(BehavioursOptions, find_behaviours)

if __name__ == "__main__":
    raise SystemExit(main())
