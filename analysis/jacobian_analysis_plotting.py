"""Figures of the Jacobians of samples."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from analysis.jacobians import JACOBIANS
from analysis.parameters import JacobianConfig, PlottingOptions, SampleAnalysisOptions
from common.options import command


@dataclasses.dataclass(frozen=True, kw_only=True)
class JacobianPlotsOptions(PlottingOptions, SampleAnalysisOptions):
    """Draw the results of jacobian_analysis_precompute.py: gradients of independent components."""

    section: ClassVar[str] = JacobianConfig.section


main = command(JacobianPlotsOptions, JACOBIANS.plot)

if __name__ == "__main__":
    raise SystemExit(main())
