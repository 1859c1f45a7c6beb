"""Parameters of the stages of ``attribution``: the section ``attribution`` of
``hyperparams/interpreting_configs.yml``."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from attribution.checking.agent_checks import CHECKS
from common.errors import UserError
from common.parameters import one_of, positive


@dataclasses.dataclass(frozen=True)
class AttributionConfig:
    """How much is recorded, which layers and outputs are attributed, and how that is checked."""

    section: ClassVar[str] = "attribution"

    num_episodes: int
    num_observations: int
    nmf_features: int
    num_trajectories: int
    num_steps: int
    layers: tuple[str, ...] | None
    outputs: tuple[str, ...]
    num_masked: int
    checks: tuple[str, ...]
    num_checked: int
    num_maps: int
    compare_activations: bool

    def __post_init__(self):
        positive(self, "num_episodes", "num_observations", "nmf_features", "num_trajectories",
                 "num_steps", "num_masked", "num_checked")
        if self.num_maps < 0:
            raise UserError(f"num_maps must not be negative, as {self.num_maps} is")
        if not self.outputs:
            raise UserError("outputs must name what is attributed, such as value")
        for check in self.checks:
            one_of("checks", check, CHECKS)
