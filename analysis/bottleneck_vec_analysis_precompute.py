"""Analysis of the bottleneck vectors."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from analysis.bottleneck_vectors import BOTTLENECK
from analysis.parameters import BottleneckConfig, PrecomputeOptions, SampleAnalysisOptions
from common.options import command
from generative.flags import RandomSamplesOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class BottleneckOptions(RandomSamplesOptions, PrecomputeOptions, SampleAnalysisOptions):
    """Analyse the bottleneck vectors from which simulations start: principal components, clusters
    and t-SNE of the encoder's (informed) vectors compared with random ones, and uniformity tests of
    both."""

    section: ClassVar[str] = BottleneckConfig.section


main = command(BottleneckOptions, BOTTLENECK.precompute)

if __name__ == "__main__":
    raise SystemExit(main())
