"""Causal scrubbing in mazes: channels of a level are resampled from levels whose cheese is at the
same square, or at another one.

The cheese of a source is put there; its mouse is on a random free square. The outcomes are sizes of
change of the level's field, of which some squares are looked at.

Letters in shape comments: B squares of a level, k sources, C H W the maps of the layer, M outcomes.
"""

from __future__ import annotations

import functools
from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from envs.procgen_env import EnvConfig
from interventions.partial_forward import PartialForward
from interventions.resampling import Target, draw_sources
from maze.field.fields import STAY, frame_source, grouped
from maze.field.outcomes import decision_steps
from maze.level.grid import Square
from maze.level.state import MazeState, stock_state
from maze.studies.cut_levels import CutLevel

OUTCOMES = {"total_variation": "mean total variation of the field",
            "published_size": "published norm of the field's change",
            "decision_variation": "total variation at the decision square",
            "cheese_change": "absolute change of P(cheese) there",
            "direction_changed": "most likely direction changed there"}
POOL = 400  # levels that sources are drawn from
_TRIES = 200  # for a source


class Sources:
    """Draws sources of levels.

    Args:
        env: the game.
        without: seeds of the targets, of which none is used.
        seed: of the levels.
    """

    def __init__(self, env: EnvConfig, without: Collection[int], seed: int):
        self._seeds = [number for number in env.draw_levels(POOL + len(without), seed)
                       if number not in without][:POOL]
        self._state = functools.cache(lambda number: stock_state(
            env.distribution_mode, number, env.use_backgrounds).with_cheese(None))

    def frames(self, cheese: Square, same: bool, num: int, rng: np.random.Generator) -> np.ndarray:
        """Frames of levels with the cheese at a square, or elsewhere, uint8 (num, 64, 64, 3).

        Raises:
            UserError: if too few levels have the square free.
        """
        return np.stack(draw_sources(
            lambda rng: self._propose(cheese if same else None, rng), cheese, same, num,
            _TRIES * num, rng))

    def _propose(self, cheese: Square | None,
                 rng: np.random.Generator) -> tuple[Square, np.ndarray] | None:
        state = self._state(self._seeds[rng.integers(len(self._seeds))])
        free = state.grid.squares()
        cheese = free[rng.integers(len(free))] if cheese is None else cheese
        if not state.grid.is_free[cheese]:
            return None
        others = [square for square in free if square != cheese]
        mouse = others[rng.integers(len(others))]
        edited = state.with_mouse(mouse).with_cheese(cheese)
        return cheese, frame_source(edited)(np.array([mouse]), np.zeros(1, np.int64))[0]


def target_of(cut: PartialForward, state: MazeState, sources: Sources, num_sources: int,
              num_squares: int | None, seed: int) -> Target:
    """A fork as a target of scrubbing; its outcomes are OUTCOMES.

    Args:
        num_squares: of the field that are looked at, drawn at random; all if None. The published
            norm is that of the whole field, as these squares have it.
        seed: of sources and squares, with the level's.

    Raises:
        UserError: if it is no fork, or sources are not found.
    """
    rng = np.random.default_rng([seed, state.level_seed])
    grid = state.grid
    try:
        to_cheese, _ = decision_steps(grid)
    except UserError as error:
        raise UserError(f"level {state.level_seed}: {error}") from None
    free = grid.squares(without_cheese=True)
    chosen = np.arange(len(free))
    if num_squares is not None and num_squares < len(free):
        chosen = np.sort(rng.choice(len(free), num_squares, replace=False))
    level = CutLevel(cut, state, [grid.decision_square(), *(free[number] for number in chosen)])
    try:
        found = [sources.frames(grid.cheese, same, num_sources, rng) for same in (True, False)]
    except UserError as error:
        raise UserError(f"level {state.level_seed}: {error}") from None
    with torch.no_grad():
        same, other = (cut.run_to(frames).activations for frames in found)
    before = _probs(level.resume()[0])  # (1 + B, 5)
    num_rows = len(before)

    def measure(activations: Tensor) -> np.ndarray:
        num = len(activations)
        log_probs, _ = level.resume(activations.flatten(0, 1), np.tile(np.arange(num_rows), num))
        after = _probs(log_probs).reshape(num, num_rows, -1)
        change = after - before  # (k, 1 + B, 5)
        variation = np.abs(change).sum(axis=2) / 2
        squared = np.square(change[:, 1:, :STAY]).sum(axis=2).mean(axis=1)
        return np.stack([variation[:, 1:].mean(axis=1), np.sqrt(squared / len(free)) / 2,
                         variation[:, 0], np.abs(change[:, 0, to_cheese]),
                         after[:, 0].argmax(axis=1) != before[0].argmax()], axis=1)

    return Target(state.level_seed, level.half.activations, same, other, measure)


def _probs(log_probs: np.ndarray) -> np.ndarray:
    """Probabilities of left, down, up, right, stay, (P, 15) to (P, 5)."""
    probs = np.exp(grouped(log_probs))
    return probs / probs.sum(axis=1, keepdims=True)
