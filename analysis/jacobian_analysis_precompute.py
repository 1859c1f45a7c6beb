"""Analysis of the Jacobians of samples."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from analysis.jacobians import JACOBIANS, GradientOptions, compute
from analysis.parameters import JacobianConfig, PrecomputeOptions
from analysis.state_maps import precompute
from common.options import command
from common.step_results import StepResults


@dataclasses.dataclass(frozen=True, kw_only=True)
class JacobiansOptions(GradientOptions, PrecomputeOptions):
    """Analyse how the agent's independent components depend on earlier states of agent and
    environment: principal components, clusters and t-SNE of the gradients from
    saliency_experiments.py."""

    section: ClassVar[str] = JacobianConfig.section


def analyse_jacobians(options: JacobiansOptions) -> StepResults:
    """Compute and store the analysis, and return its results."""
    return precompute(JACOBIANS, options, compute)


main = command(JacobiansOptions, analyse_jacobians)

if __name__ == "__main__":
    raise SystemExit(main())
