"""Analysis of the bottleneck vectors."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from analysis.bottleneck_vectors import BOTTLENECK, compute
from analysis.parameters import BottleneckConfig, PrecomputeOptions, SampleAnalysisOptions
from analysis.state_maps import precompute
from common.options import command
from common.step_results import StepResults
from generative.flags import RandomSamplesOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class BottleneckOptions(RandomSamplesOptions, PrecomputeOptions, SampleAnalysisOptions):
    """Analyse the bottleneck vectors from which simulations start: principal components, clusters
    and t-SNE of the encoder's (informed) vectors compared with random ones, and uniformity tests of
    both."""

    section: ClassVar[str] = BottleneckConfig.section


def analyse_bottleneck_vectors(options: BottleneckOptions) -> StepResults:
    """Compute and store the analysis, and return its results."""
    return precompute(BOTTLENECK, options, compute)


main = command(BottleneckOptions, analyse_bottleneck_vectors)

if __name__ == "__main__":
    raise SystemExit(main())
