"""Fields of a level whose passes are resumed behind a layer, for many patches of that layer.

Letters in shape comments: n squares, F facings, R = F n rows (facing by facing), P patched passes,
C H W the maps of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from agents.networks import PolicyOutput
from interventions.partial_forward import PartialForward, Prefix
from maze.field.fields import NO_MEMORY, START, Field, frame_source
from maze.level.grid import Square
from maze.level.state import MazeState

PASSES_AT_A_TIME = 512


class CutLevel:
    """The pictures of a level, passed up to a layer.

    Args:
        squares: where the mouse is; agents with memory see each as at an episode's start.
        facings: of the mouse.

    Attributes:
        grid: of the level.
        squares: int64 (n, 2).
        facings: F of them.
        half: the R passes up to the layer.
    """

    def __init__(self, cut: PartialForward, state: MazeState, squares: Sequence[Square],
                 facings: Sequence[int] = (0,)):
        self.grid, self.squares = state.grid, np.array(squares, np.int64).reshape(-1, 2)
        self.facings = tuple(facings)
        self._memory = START if cut.policy.recurrent else NO_MEMORY
        source = frame_source(state)
        with torch.no_grad():
            halves = [cut.run_to(source(self.squares, np.full(len(self.squares), facing)))
                      for facing in self.facings]
        self.half = Prefix(cut, torch.cat([half.activations for half in halves]),
                           tuple(map(torch.cat, zip(*(half.also_read for half in halves)))))

    @torch.no_grad()
    def resume(self, activations: Tensor | None = None, rows: np.ndarray | None = None
               ) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities of the actions (P, 15) and values (P,).

        Args:
            activations: in place of the layer's output (P, C, H, W); as it is if not given.
            rows: which picture each belongs to (P,); all in order if not given.
        """
        output: PolicyOutput = self.half.run_from(
            activations, None if rows is None else torch.as_tensor(rows))
        return output.log_probs.float().cpu().numpy(), output.values.float().cpu().numpy()

    def fields(self, log_probs: np.ndarray, values: np.ndarray, chosen: np.ndarray | None = None,
               facings: Sequence[int] | None = None) -> tuple[Field, ...]:
        """Fields of each facing.

        Args:
            log_probs, values: facing by facing, (F k, 15) and (F k,).
            chosen: numbers of the k squares they are of; all if not given.
            facings: all if not given.
        """
        squares = self.squares if chosen is None else self.squares[chosen]
        facings = facings or self.facings
        parts = (np.split(each, len(facings)) for each in (log_probs, values))
        return tuple(Field(self.grid, squares, *part, facing, self._memory)
                     for facing, *part in zip(facings, *parts))
