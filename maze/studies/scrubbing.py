"""Causal scrubbing in mazes: channels resampled from levels with the same or another cheese square.

In a source level, the cheese is moved to the same square as in the target level or to another one,
and the mouse to a random free square. The outcomes measure the change of the target level's field
on a sample of its squares and at the decision square.

Symbols in shapes: B squares of a level, k sources, P forward passes, M outcomes.
"""

from __future__ import annotations

import functools
from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from common.results import Entry, File, Schema, Table, Text
from envs.maze.grid import Square
from envs.maze.state import MazeState, stock_state
from envs.procgen_env import EnvConfig
from interventions.partial_forward import PartialForward
from interventions.resampling import Target, draw_sources
from maze.field.fields import STAY, ResumedField, frames_at, grouped
from maze.field.outcomes import decision_steps
from maze.studies.channels import NOTHING_NAME
from maze.studies.retargeting import JUDGED_COLUMNS

# Outcomes of the change of a field, by name; "there" is the decision square.
OUTCOMES = {"total_variation": "mean total variation of the field",
            "published_size": "published norm of the field's change",
            "decision_variation": "total variation at the decision square",
            "cheese_change": "absolute change of P(cheese) there",
            "direction_changed": "most likely direction changed there"}
POOL_SIZE = 400  # levels that sources are drawn from
_TRIES = 200  # maximum number of draws per source

CONDITION_COLUMNS = {"channels": str, "feature": str, "outcome": str,
                     **dict.fromkeys(("mean", "low_95", "high_95"), float)}
CONTRAST_COLUMNS = {**JUDGED_COLUMNS, "supported": bool}
SCRUBBING_FILES = Schema(
    "scrubbed levels", "python -m maze.scrubbing", items={
        "sets": Entry("sets.csv", Table(
            {"set": str, "channels": str, "moved": float, "matched": bool}, exact=True,
            whole=True)),
        "levels": Entry("levels/{}_{}.csv", Table(
            {"seed": int, "set": str, "channels": str, "feature": str,
             **dict.fromkeys(OUTCOMES, float)}, exact=True, whole=True))},
    results={"conditions": Entry("conditions.csv", Table(CONDITION_COLUMNS, exact=True)),
             "contrasts": Entry("contrasts.csv", Table(CONTRAST_COLUMNS, exact=True)),
             "report": Entry("report.md", Text()), "figure": Entry("scrubbing.png", File()),
             "table": Entry("scrubbing.csv", Table(exact=True)),
             "nothing": Entry(NOTHING_NAME, Text(), optional=True)})


class SourcePool:
    """Pool of levels from which sources are drawn.

    Args:
        without: seeds of the target levels, which are excluded.
    """

    def __init__(self, env: EnvConfig, without: Collection[int], seed: int):
        self._seeds = [number for number in env.draw_levels(POOL_SIZE + len(without), seed)
                       if number not in without][:POOL_SIZE]
        self._state = functools.cache(lambda number: stock_state(
            env.distribution_mode, number, env.use_backgrounds).with_cheese(None))

    def frames(self, cheese: Square, same: bool, num: int, rng: np.random.Generator) -> np.ndarray:
        """Draw frames of source levels, uint8 (num, 64, 64, 3).

        Args:
            cheese: square of the target's cheese.
            same: whether the cheese of the sources is at this square, rather than at other squares.
            num: number of frames, one per source level.

        Raises:
            UserError: if too few sources are found.
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
        return cheese, frames_at([state.with_mouse(mouse).with_cheese(cheese)], [mouse])[0]


def make_target(forward: PartialForward, state: MazeState, pool: SourcePool, num_sources: int,
                num_squares: int | None, seed: int) -> Target:
    """Prepare a fork as a target of scrubbing, with the outcomes OUTCOMES.

    Args:
        forward: forward pass of the agent, split at the layer of the channels.
        pool: levels from which sources are drawn.
        num_sources: number of sources with the cheese at the same square, and number of sources
            with the cheese at other squares.
        num_squares: maximum number of random squares of the field; None for all squares. The
            published norm of the whole field is estimated from these squares.
        seed: seed of sources and squares, combined with the level's seed.

    Raises:
        UserError: if the level is not a fork, or too few sources are found.
    """
    rng, grid = np.random.default_rng([seed, state.level_seed]), state.grid
    to_cheese, _ = decision_steps(grid)
    free = grid.squares(without_cheese=True)
    chosen = np.arange(len(free))
    if num_squares is not None and num_squares < len(free):
        chosen = np.sort(rng.choice(len(free), num_squares, replace=False))
    field = ResumedField(forward, state,
                         [grid.decision_square(), *(free[place] for place in chosen)])
    with torch.no_grad():
        same, other = (forward.run_to(pool.frames(grid.cheese, is_same, num_sources, rng)
                                      ).activations for is_same in (True, False))
    before = _probs(field.resume()[0])  # (1 + B, 5)

    def measure(activations: Tensor) -> np.ndarray:
        num, num_rows = len(activations), len(before)
        log_probs, _ = field.resume(activations.flatten(0, 1), np.tile(np.arange(num_rows), num))
        after = _probs(log_probs).reshape(num, num_rows, -1)
        change = after - before  # (k, 1 + B, 5)
        variation = np.abs(change).sum(axis=2) / 2
        squared = np.square(change[:, 1:, :STAY]).sum(axis=2).mean(axis=1)
        return np.stack([variation[:, 1:].mean(axis=1), np.sqrt(squared / len(free)) / 2,
                         variation[:, 0], np.abs(change[:, 0, to_cheese]),
                         after[:, 0].argmax(axis=1) != before[0].argmax()], axis=1)

    return Target(state.level_seed, field.prefix.activations, same, other, measure)


def _probs(log_probs: np.ndarray) -> np.ndarray:
    """Return P(left), P(down), P(up), P(right), P(stay) (P, 5) from log-probabilities (P, 15)."""
    probs = np.exp(grouped(log_probs))
    return probs / probs.sum(axis=1, keepdims=True)
