"""Figures of the behaviours."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar

from analysis.behaviours import BEHAVIOURS, draw_figures
from analysis.parameters import BehavioursConfig, PlottingOptions, SampleAnalysisOptions
from analysis.state_maps import plot
from common.options import command


@dataclasses.dataclass(frozen=True, kw_only=True)
class BehaviourPlotsOptions(PlottingOptions, SampleAnalysisOptions):
    """Draw the results of combined_agent_env_hx_analysis_precompute.py: maps of all behaviours, and
    the frames, actions and values of each behaviour's samples."""

    section: ClassVar[str] = BehavioursConfig.section


def plot_behaviours(options: BehaviourPlotsOptions) -> Path:
    """Draw all figures, and return their folder."""
    return plot(BEHAVIOURS, options, draw_figures)


main = command(BehaviourPlotsOptions, plot_behaviours)

if __name__ == "__main__":
    raise SystemExit(main())
