"""Analysis of the Jacobians of samples."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from analysis.jacobians import JACOBIANS, GradientOptions
from analysis.parameters import JacobianConfig, PrecomputeOptions
from common.options import command


@dataclasses.dataclass(frozen=True, kw_only=True)
class JacobiansOptions(GradientOptions, PrecomputeOptions):
    """Analyse how the agent's independent components depend on earlier states of agent and
    environment: principal components, clusters and t-SNE of the gradients from
    saliency_experiments.py."""

    section: ClassVar[str] = JacobianConfig.section


main = command(JacobiansOptions, JACOBIANS.precompute)

if __name__ == "__main__":
    raise SystemExit(main())
