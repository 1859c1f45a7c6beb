"""Figures of the bottleneck vectors."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from analysis.bottleneck_vectors import BOTTLENECK
from analysis.parameters import BottleneckConfig, PlottingOptions, SampleAnalysisOptions
from common.options import command


@dataclasses.dataclass(frozen=True, kw_only=True)
class BottleneckPlotsOptions(PlottingOptions, SampleAnalysisOptions):
    """Draw the results of bottleneck_vec_analysis_precompute.py: the bottleneck vectors from which
    simulations start."""

    section: ClassVar[str] = BottleneckConfig.section


main = command(BottleneckPlotsOptions, BOTTLENECK.plot)

if __name__ == "__main__":
    raise SystemExit(main())
