"""Parameters of the count of failures by cause: the section ``failure_causes`` of
``hyperparams/interpreting_configs.yml``."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from common.errors import UserError
from common.parameters import positive


@dataclasses.dataclass(frozen=True)
class FailureCausesConfig:
    """Features to take out, hazards to make invisible, and numbers of levels and controls."""

    section: ClassVar[str] = "failure_causes"

    hazards: tuple[str, ...]
    choosing_episodes: int
    layer: str
    feature: int
    invisible: tuple[str, ...]
    num_episodes: int
    num_controls: int
    num_films: int
    reference_size: int

    def __post_init__(self):
        positive(self, "choosing_episodes", "num_episodes", "reference_size")
        if min(self.feature, self.num_films, self.num_controls) < 0 or self.num_controls == 1:
            raise UserError("feature and num_films must not be negative, and num_controls must be "
                            "0 or at least 2")
