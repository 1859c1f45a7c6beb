"""Figures of the behaviours."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from analysis.behaviours import BEHAVIOURS
from analysis.parameters import BehavioursConfig, PlottingOptions, SampleAnalysisOptions
from common.options import command


@dataclasses.dataclass(frozen=True, kw_only=True)
class BehaviourPlotsOptions(PlottingOptions, SampleAnalysisOptions):
    """Draw the results of combined_agent_env_hx_analysis_precompute.py: maps of all behaviours, and
    the frames, actions and values of each behaviour's samples."""

    section: ClassVar[str] = BehavioursConfig.section


main = command(BehaviourPlotsOptions, BEHAVIOURS.plot)

if __name__ == "__main__":
    raise SystemExit(main())
