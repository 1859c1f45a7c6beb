"""Figures of the Jacobians of samples."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar

from analysis.jacobians import JACOBIANS, draw_figures
from analysis.parameters import JacobianConfig, PlottingOptions, SampleAnalysisOptions
from analysis.state_maps import plot
from common.options import command


@dataclasses.dataclass(frozen=True, kw_only=True)
class JacobianPlotsOptions(PlottingOptions, SampleAnalysisOptions):
    """Draw the results of jacobian_analysis_precompute.py: gradients of independent components."""

    section: ClassVar[str] = JacobianConfig.section


def plot_jacobians(options: JacobianPlotsOptions) -> Path:
    """Draw all figures, and return their folder."""
    return plot(JACOBIANS, options, draw_figures)


main = command(JacobianPlotsOptions, plot_jacobians)

if __name__ == "__main__":
    raise SystemExit(main())
