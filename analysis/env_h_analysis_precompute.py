"""Analysis of the states of the simulated environment."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from analysis.env_states import ENV_STATES, compute
from analysis.parameters import EnvHiddenConfig, PrecomputeOptions, SampleAnalysisOptions
from analysis.state_maps import precompute
from common.options import command
from common.step_results import StepResults


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvStatesOptions(PrecomputeOptions, SampleAnalysisOptions):
    """Analyse the states of the simulated environment: principal components, clusters and t-SNE."""

    section: ClassVar[str] = EnvHiddenConfig.section


def analyse_env_states(options: EnvStatesOptions) -> StepResults:
    """Compute and store the analysis, and return its results."""
    return precompute(ENV_STATES, options, compute)


main = command(EnvStatesOptions, analyse_env_states)

if __name__ == "__main__":
    raise SystemExit(main())
