"""Retargeting: a cell of some channels is set, as if the cheese were at the square it shows.

The level's cheese is taken away. Every square is a target of its own, also where several share a
cell of the map. Its outcome is the normalised path probability and, of agents without memory, the
exact probability of reaching it within the episode's steps. On the way to a target the mouse is
never behind it, so only the squares that are reached without passing it are looked at.

Letters in shape comments: R pictures of a level, K channels, C H W the maps of the layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from agents.acting import run_policy
from agents.layers import Layer
from interventions.partial_forward import PartialForward
from maze.field.fields import NO_MEMORY, Field, frame_source
from maze.field.outcomes import Chain, path_probability
from maze.level.grid import WALL, Grid, Square
from maze.level.state import MazeState
from maze.studies.cut_levels import PASSES_AT_A_TIME, CutLevel

CHANNELS, CELLS = "channels", "cells"  # kinds of controls
UNPATCHED, PATCHED = "unpatched", "patched"
MOVED_CHEESE = "cheese"  # the arm with the cheese itself at the target
COLUMNS = {"seed": int, "row": int, "column": int, "maze_dim": int, "steps": int,
           "off_corner_path": int, **{f"{what}_{when}": float for what in ("path", "exact")
                                      for when in (UNPATCHED, PATCHED)}}
CONTROL_COLUMNS = {"seed": int, "row": int, "column": int, "kind": str, "number": int,
                   "path": float}


@dataclasses.dataclass(frozen=True)
class Setting:
    """Values that a target's cell of some channels is set to.

    Attributes:
        channels: K.
        values: of each (K,).
        others: what the other cells of these channels become; None leaves them.
    """

    channels: tuple[int, ...]
    values: tuple[float, ...]
    others: float | None = None

    def apply(self, activations: Tensor, cell: tuple[int, int]) -> Tensor:
        """Activations (R, C, H, W) with it at a cell."""
        patched = activations.clone()
        chosen = list(self.channels)
        if self.others is not None:
            patched[:, chosen] = self.others
        patched[:, chosen, cell[0], cell[1]] = patched.new_tensor(self.values)
        return patched


@dataclasses.dataclass(frozen=True)
class _Job:
    """A target with a cell set for it, and the passes that tell what that does.

    Attributes:
        target: the square.
        squares: numbers of the squares that are looked at (k,).
        facings: of the mouse.
        setting: what is set.
        cell: where.
    """

    target: Square
    squares: np.ndarray
    facings: tuple[int, ...]
    setting: Setting
    cell: tuple[int, int]

    def rows(self, num_squares: int) -> np.ndarray:
        """Numbers of its pictures, facing by facing, in a level of so many squares."""
        return np.concatenate([self.squares + facing * num_squares for facing in self.facings])


def targets_of(grid: Grid, number: int | None, rng: np.random.Generator) -> list[Square]:
    """Squares that the mouse can walk to, without its own: all, or some at random, in order."""
    far = grid.distances(grid.mouse)
    found = [square for square in grid.squares() if far[square] > 0]
    if number is None or number >= len(found):
        return found
    return [found[place] for place in np.sort(rng.choice(len(found), number, replace=False))]


def before(grid: Grid, target: Square) -> np.ndarray:
    """Where the mouse can be before it is on a target: bool (W, W)."""
    cells = grid.cells.copy()
    cells[target] = WALL
    return dataclasses.replace(grid, cells=cells).distances(grid.mouse) >= 0


class Retargeted:
    """A level without its cheese, of which squares are made targets.

    Args:
        cut: at a layer with cells.
        layer: that layer.
        state: the level.
    """

    def __init__(self, cut: PartialForward, layer: Layer, state: MazeState):
        self.cut, self.layer = cut, layer
        self.state = state.with_cheese(None)
        self.grid = self.state.grid
        self.facings = (0,) if cut.policy.recurrent else (0, 1)
        self.level = CutLevel(cut, self.state, self.grid.squares(), self.facings)
        self._unpatched = self.level.fields(*self.level.resume())

    def cell(self, square: Square) -> tuple[int, int]:
        """The layer's cell that shows a square."""
        return self.layer.cell(*square, self.grid.world_dim)

    def table(self, targets: Sequence[Square], setting: Setting | None) -> pd.DataFrame:
        """Outcomes of each target; see COLUMNS.

        Args:
            setting: what is set at its cell. None: the cheese is put there instead.
        """
        unpatched = self._exact(self._unpatched, targets)
        after = self._with_cheese(targets) if setting is None else self._set(
            [_Job(target, self._before(target), self.facings, setting, self.cell(target))
             for target in targets])
        rows = []
        far = self.grid.distances(self.grid.mouse)
        for target, exact, fields in zip(targets, unpatched, after):
            rows.append({
                "seed": self.state.level_seed, "row": target.row, "column": target.column,
                "maze_dim": self.grid.maze_dim, "steps": far[target],
                "off_corner_path": self.grid.steps_off_corner_path(target),
                "path_unpatched": path_probability(self._unpatched[0], target),
                "path_patched": path_probability(fields[0], target),
                "exact_unpatched": exact, "exact_patched": self._exact(fields, [target])[0]})
        return pd.DataFrame(rows, columns=list(COLUMNS))

    def controls(self, targets: Sequence[Square], setting: Setting, others: Sequence[Setting],
                 rng: np.random.Generator) -> pd.DataFrame:
        """Path probabilities with other channels set at each target's cell, and with the same
        ones set at cells of other squares, as often; see CONTROL_COLUMNS."""
        jobs, rows = [], []
        for target in targets:
            on_path = np.array([self._number(square) for square
                                in self.grid.path(self.grid.mouse, target)[:-1]])
            cell = self.cell(target)
            cells = list(dict.fromkeys(map(self.cell, self.grid.squares())))
            elsewhere = [each for each in cells if each != cell] or [cell]
            draws = rng.integers(len(elsewhere), size=len(others))
            for number, (other, place) in enumerate(zip(others, draws)):
                for kind, what, where in ((CHANNELS, other, cell),
                                          (CELLS, setting, elsewhere[place])):
                    jobs.append(_Job(target, on_path, (0,), what, where))
                    rows.append({"seed": self.state.level_seed, "row": target.row,
                                 "column": target.column, "kind": kind, "number": number})
        found = [path_probability(fields[0], job.target)
                 for job, fields in zip(jobs, self._set(jobs))]
        return pd.DataFrame(rows).assign(path=found)[list(CONTROL_COLUMNS)]

    def _number(self, square: Square) -> int:
        return self._unpatched[0].row(square)

    def _before(self, target: Square) -> np.ndarray:
        """Numbers of the squares that the mouse can be on before a target."""
        return np.flatnonzero(before(self.grid, target)[tuple(self.level.squares.T)])

    def _exact(self, fields: tuple[Field, ...], targets: Sequence[Square]) -> np.ndarray:
        if fields[0].memory != NO_MEMORY:
            return np.full(len(targets), np.nan)
        return Chain.of(fields).reaching(targets, self.state.timeout - self.state.time)

    def _set(self, jobs: Sequence[_Job]) -> Iterator[tuple[Field, ...]]:
        """Fields of each job."""
        for some, rows in _batches(jobs, len(self.level.squares)):
            patched = torch.cat([job.setting.apply(self.level.half.activations[which], job.cell)
                                 for job, which in zip(some, rows)])
            log_probs, values = self.level.resume(patched, np.concatenate(rows))
            ends = np.cumsum([len(which) for which in rows])[:-1]
            for job, *outputs in zip(some, np.split(log_probs, ends), np.split(values, ends)):
                yield self.level.fields(*outputs, chosen=job.squares, facings=job.facings)

    def _with_cheese(self, targets: Sequence[Square]) -> Iterator[tuple[Field, ...]]:
        """Fields with the cheese at each target."""
        policy, compute = self.cut.policy, self.cut.compute
        for target in targets:
            moved = self.state.with_cheese(target)
            squares = self.level.squares[self._before(target)]
            frames = np.concatenate([frame_source(moved)(squares, np.full(len(squares), facing))
                                     for facing in self.facings])
            output = run_policy(policy, compute, frames, policy.initial_states(len(frames)))
            parts = (np.split(each.cpu().numpy(), len(self.facings))
                     for each in (output.log_probs, output.values))
            yield tuple(Field(moved.grid, squares, *part, facing, self._unpatched[0].memory)
                        for facing, *part in zip(self.facings, *parts))


def _batches(jobs: Sequence[_Job], num_squares: int
             ) -> Iterator[tuple[list[_Job], list[np.ndarray]]]:
    """Jobs with the numbers of their pictures, as many at a time as make a batch."""
    some, rows = [], []
    for job in jobs:
        some.append(job)
        rows.append(job.rows(num_squares))
        if sum(map(len, rows)) >= PASSES_AT_A_TIME:
            yield some, rows
            some, rows = [], []
    if some:
        yield some, rows
