"""Figures of the states of the simulated environment."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar

from analysis.env_states import ENV_STATES, draw_figures
from analysis.parameters import EnvHiddenConfig, PlottingOptions, SampleAnalysisOptions
from analysis.state_maps import plot
from common.cli import count
from common.options import command, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvStatePlotsOptions(PlottingOptions, SampleAnalysisOptions):
    """Draw the results of env_h_analysis_precompute.py: the states of the simulated environment."""

    section: ClassVar[str] = EnvHiddenConfig.section

    num_epi_paths: int | None = option(
        None, "number of samples whose trajectories are drawn", type=count, key=".num_epi_paths")


def plot_env_states(options: EnvStatePlotsOptions) -> Path:
    """Draw all figures, and return their folder."""
    return plot(ENV_STATES, options, draw_figures)


main = command(EnvStatePlotsOptions, plot_env_states)

if __name__ == "__main__":
    raise SystemExit(main())
