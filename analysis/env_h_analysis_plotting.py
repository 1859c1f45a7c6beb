"""Figures of the states of the simulated environment."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from analysis.env_states import ENV_STATES
from analysis.parameters import EnvHiddenConfig, PlottingOptions, SampleAnalysisOptions
from common.cli import count
from common.options import command, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvStatePlotsOptions(PlottingOptions, SampleAnalysisOptions):
    """Draw the results of env_h_analysis_precompute.py: the states of the simulated environment."""

    section: ClassVar[str] = EnvHiddenConfig.section

    num_epi_paths: int | None = option(
        None, "number of samples whose trajectories are drawn", type=count, key=".num_epi_paths")


main = command(EnvStatePlotsOptions, ENV_STATES.plot)

if __name__ == "__main__":
    raise SystemExit(main())
