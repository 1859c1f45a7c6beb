"""Parameters of directions of the hidden state, and of swaps along them.

A part of the sections ``gen_model``, ``analysis.agent_h`` and ``analysis.saliency`` of
``hyperparams/interpreting_configs.yml``, as published.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from common.errors import UserError
from common.parameters import id_list, one_of, positive


@dataclasses.dataclass(frozen=True)
class SwapConfig:
    """Directions of the hidden space to take out, and where to put the same amount back."""

    section: ClassVar[str] = "gen_model"

    swap_directions_from: tuple[int, ...] | None
    swap_directions_to: tuple[int | None, ...] | None

    def __post_init__(self):
        taken, put = self.swap_directions_from or (), self.swap_directions_to or ()
        if len(taken) != len(put):
            raise UserError(f"swap_directions_from has {len(taken)} directions, but "
                            f"swap_directions_to has {len(put)}")


@dataclasses.dataclass(frozen=True)
class DirectionsConfig:
    """Which directions of the hidden space are meant where a script takes some.

    The list of numbers is text; ``ids`` reads it.
    """

    section: ClassVar[str] = "analysis.saliency"

    direction_type: str
    direction_ids: str

    def __post_init__(self):
        one_of("direction_type", self.direction_type, ("ica", "pca"))
        self.ids()

    def ids(self) -> tuple[int, ...]:
        """The numbers of the directions."""
        return id_list(self.direction_ids, "direction_ids")


@dataclasses.dataclass(frozen=True)
class DirectionFilesConfig:
    """Which results of hidden_analysis_precompute.py define the directions.

    Attributes:
        num_episodes: recorded episodes that they were made of, in the names of their files.
    """

    section: ClassVar[str] = "analysis.agent_h"

    num_episodes: int

    def __post_init__(self):
        positive(self, "num_episodes")
