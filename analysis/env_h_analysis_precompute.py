"""Analysis of the states of the simulated environment."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from analysis.env_states import ENV_STATES
from analysis.parameters import EnvHiddenConfig, PrecomputeOptions, SampleAnalysisOptions
from common.options import command


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvStatesOptions(PrecomputeOptions, SampleAnalysisOptions):
    """Analyse the states of the simulated environment: principal components, clusters and t-SNE."""

    section: ClassVar[str] = EnvHiddenConfig.section


main = command(EnvStatesOptions, ENV_STATES.precompute)

if __name__ == "__main__":
    raise SystemExit(main())
