"""Figures of the bottleneck vectors."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar

from analysis.bottleneck_vectors import BOTTLENECK, draw_figures
from analysis.parameters import BottleneckConfig, PlottingOptions, SampleAnalysisOptions
from analysis.state_maps import plot
from common.options import command


@dataclasses.dataclass(frozen=True, kw_only=True)
class BottleneckPlotsOptions(PlottingOptions, SampleAnalysisOptions):
    """Draw the results of bottleneck_vec_analysis_precompute.py: the bottleneck vectors from which
    simulations start."""

    section: ClassVar[str] = BottleneckConfig.section


def plot_bottleneck_vectors(options: BottleneckPlotsOptions) -> Path:
    """Draw all figures, and return their folder."""
    return plot(BOTTLENECK, options, draw_figures)


main = command(BottleneckPlotsOptions, plot_bottleneck_vectors)

if __name__ == "__main__":
    raise SystemExit(main())
