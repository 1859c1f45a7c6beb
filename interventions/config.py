"""Parameters of directions of the hidden state, and of swaps along them.

As published, they belong to the sections ``gen_model``, ``analysis.agent_h`` and
``analysis.saliency`` of ``hyperparams/interpreting_configs.yml``.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from common.parameters import id_list, one_of


@dataclasses.dataclass(frozen=True)
class SwapConfig:
    """Directions of the hidden space to remove, and directions that replace them.

    Attributes:
        swap_directions_from: directions to remove from each change of state; None for no swap.
        swap_directions_to: for each removed direction, the direction along which the same amount is
            added instead, or None to add nothing. None if ``swap_directions_from`` is None.
    """

    section: ClassVar[str] = "gen_model"

    swap_directions_from: tuple[int, ...] | None
    swap_directions_to: tuple[int | None, ...] | None


@dataclasses.dataclass(frozen=True)
class DirectionsConfig:
    """Directions of the hidden space that a script uses.

    Attributes:
        direction_type: "ica" or "pca".
        direction_ids: numbers of the directions as text, such as "3 7" or "0 to 16", which excludes
            16; see ``ids``.
    """

    section: ClassVar[str] = "analysis.saliency"

    direction_type: str
    direction_ids: str

    def __post_init__(self):
        one_of("direction_type", self.direction_type, ("ica", "pca"))
        self.ids()

    def ids(self) -> tuple[int, ...]:
        """Return the numbers of the directions."""
        return id_list(self.direction_ids, "direction_ids")


@dataclasses.dataclass(frozen=True)
class DirectionFilesConfig:
    """Results of hidden_analysis_precompute.py that define the directions.

    Attributes:
        num_episodes: number of recorded episodes that the directions were computed from; part of
            the file names.
    """

    section: ClassVar[str] = "analysis.agent_h"

    num_episodes: int
