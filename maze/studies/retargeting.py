"""Retargeting: set a cell of some channels as if the cheese were at the square that the cell shows.

The level's cheese is removed. Every target is one square, even if several squares share a cell of
the map. The outcomes of a target are the normalised path probability and, for agents without
memory, the exact probability of reaching the target within the episode's steps. Before the mouse
reaches a target, it cannot be on squares behind the target, so the agent is run only on squares
that can be reached without passing the target.

Letters in shape comments: R frames of a level, K channels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from agents.acting import run_policy
from agents.layers import Layer
from common.results import Entry, File, Schema, Table, Text
from envs.maze.grid import WALL, Grid, Square
from envs.maze.state import MazeState
from interventions.partial_forward import PartialForward
from maze.field.fields import NO_MEMORY, Field, ResumedField, fields_by_facing, frame_source
from maze.field.outcomes import Chain, path_probability
from maze.studies.channels import NOTHING_NAME
from stats.bootstrap import ClusterBootstrap
from stats.effects import MIN_STARTS, Condition, Outcome, compare_conditions

PASSES_PER_BATCH = 512  # forward passes that are resumed together
CHANNELS, CELLS = "channels", "cells"  # kinds of controls
UNPATCHED, PATCHED = "unpatched", "patched"
MOVED_CHEESE = "cheese"  # the condition with the cheese itself at the target
ALL = "all"  # part that contains all targets
OUTCOME = Outcome("path", "path probability", probability=True)
_CONTROLS = {CHANNELS: "other channels at the same cell", CELLS: "the same channels at other cells"}
_BINS = {("off the corner's path", "off_corner_path"):
         ((0, 0), (1, 2), (3, 5), (6, 10), (11, 25), (26, 10**6)),
         ("rows of the maze", "maze_dim"): ((3, 7), (9, 11), (13, 15), (17, 21), (23, 31))}
_KEYS = {"seed": int, "row": int, "column": int}

TARGET_COLUMNS = {
    **_KEYS, "maze_dim": int, "steps": int, "off_corner_path": int,
    **{f"{what}_{when}": float for what in ("path", "exact") for when in (UNPATCHED, PATCHED)}}
CONTROL_COLUMNS = {**_KEYS, "kind": str, "number": int, "path": float}
PART_COLUMNS = {
    "by": str, "part": str, "outcome": str, "levels": int, "targets": int, **dict.fromkeys(
        (UNPATCHED, PATCHED, "effect", "low_95", "high_95", "ratio", "share_larger"), float)}
JUDGED_COLUMNS = {"condition": str, "control": bool, "outcome": str, **dict.fromkeys(
    ("unaltered", "altered", "effect", "low_95", "high_95", "p", "p_holm", "p_control"), float)}
RETARGETING_FILES = Schema(  # results of a condition are kept when another condition is run
    "retargeted mazes", "python -m maze.retargeting", items={
        "levels": Entry("{}/levels/{}.csv", Table(TARGET_COLUMNS, exact=True, whole=True)),
        "controls": Entry("{}/controls/{}.csv", Table(CONTROL_COLUMNS, exact=True, whole=True)),
        "parts": Entry("{}/parts.csv",
                       Table(PART_COLUMNS, ("low_95", "high_95", "ratio"), exact=True)),
        "effects": Entry("{}/effects.csv", Table(JUDGED_COLUMNS, (), exact=True)),
        "report": Entry("{}/report.md", Text()), "figure": Entry("{}/retargeting.png", File()),
        "targets": Entry("{}/targets.csv", Table(TARGET_COLUMNS, exact=True, whole=True)),
        "nothing": Entry(NOTHING_NAME, Text())})


@dataclasses.dataclass(frozen=True)
class CellPatch:
    """Patch that sets the target's cell in some channels.

    Attributes:
        channels: the K channels.
        values: value of the cell in each channel (K,).
        others: value of all other cells of these channels; None keeps them.
    """

    channels: tuple[int, ...]
    values: tuple[float, ...]
    others: float | None = None

    def apply(self, activations: Tensor, cell: tuple[int, int]) -> Tensor:
        """Return a copy of activations (R, C, H, W) with a cell (row from the top, column) set."""
        patched = activations.clone()
        chosen = list(self.channels)
        if self.others is not None:
            patched[:, chosen] = self.others
        patched[:, chosen, cell[0], cell[1]] = patched.new_tensor(self.values)
        return patched


@dataclasses.dataclass(frozen=True)
class _Trial:
    """A target and a patch to try for it.

    Attributes:
        squares: squares on which the agent is run, as indices in ``RetargetedLevel.field`` (k,).
        cell: cell that the patch sets, (row, column).
    """

    target: Square
    squares: np.ndarray
    facings: tuple[int, ...]
    patch: CellPatch
    cell: tuple[int, int]


def draw_targets(grid: Grid, number: int | None, rng: np.random.Generator) -> list[Square]:
    """Return squares that the mouse can reach, except its own, ordered by row, then column.

    Args:
        number: number of squares to draw at random; None for all.
    """
    steps = grid.distances(grid.mouse)
    squares = [square for square in grid.squares() if steps[square] > 0]
    if number is None or number >= len(squares):
        return squares
    return [squares[place] for place in np.sort(rng.choice(len(squares), number, replace=False))]


class RetargetedLevel:
    """A level without its cheese, on which targets are measured.

    Args:
        forward: forward pass of the agent, split at a convolutional layer.
        state: the level, with or without cheese.
    """

    def __init__(self, forward: PartialForward, layer: Layer, state: MazeState):
        self.forward, self.layer = forward, layer
        self.state = state.with_cheese(None)
        self.grid = self.state.grid
        self.facings = (0,) if forward.policy.recurrent else (0, 1)

    @functools.cached_property
    def field(self) -> ResumedField:
        """Forward passes of the level's frames up to the layer, resumed for each target."""
        return ResumedField(self.forward, self.state, self.grid.squares(), self.facings)

    @functools.cached_property
    def _unpatched(self) -> tuple[Field, ...]:
        return fields_by_facing(self.grid, self.field.squares, *self.field.resume(), self.facings,
                                self.field.memory)

    def cell(self, square: Square) -> tuple[int, int]:
        """Return the layer's cell that shows a square, as (row from the top, column)."""
        return self.layer.cell(*square, self.grid.world_dim)

    def measure_targets(self, targets: Sequence[Square], patch: CellPatch | None) -> pd.DataFrame:
        """Measure the outcomes of each target; see TARGET_COLUMNS.

        Args:
            patch: patch of the target's cell; None moves the cheese to the target instead.
        """
        unpatched = self._exact(self._unpatched, targets)
        after = self._with_cheese(targets) if patch is None else self._patched(
            [_Trial(target, self._before(target), self.facings, patch, self.cell(target))
             for target in targets])
        steps = self.grid.distances(self.grid.mouse)
        return pd.DataFrame([{
            "seed": self.state.level_seed, "row": target.row, "column": target.column,
            "maze_dim": self.grid.maze_dim, "steps": steps[target],
            "off_corner_path": self.grid.steps_off_corner_path(target),
            "path_unpatched": path_probability(self._unpatched[0], target),
            "path_patched": path_probability(fields[0], target),
            "exact_unpatched": exact, "exact_patched": self._exact(fields, [target])[0]}
            for target, exact, fields in zip(targets, unpatched, after)],
            columns=list(TARGET_COLUMNS))

    def measure_controls(self, targets: Sequence[Square], patch: CellPatch,
                         others: Sequence[CellPatch], rng: np.random.Generator) -> pd.DataFrame:
        """Measure path probabilities under controls; see CONTROL_COLUMNS.

        There are two kinds of controls, in equal numbers: patches of other channels at the
        target's cell, and the same patch at other cells that show free squares.

        Args:
            patch: patch of the target's cell.
            others: patches of other channels; their number is the number of controls of each kind.
            rng: random generator that draws the cells of the second kind.
        """
        trials, rows = [], []
        for target in targets:
            on_path = np.array([self._unpatched[0].row(square) for square
                                in self.grid.path(self.grid.mouse, target)[:-1]])
            cell = self.cell(target)
            elsewhere = [other for other in dict.fromkeys(map(self.cell, self.grid.squares()))
                         if other != cell] or [cell]
            draws = rng.integers(len(elsewhere), size=len(others))
            for number, (other, place) in enumerate(zip(others, draws)):
                for kind, tried, where in ((CHANNELS, other, cell),
                                           (CELLS, patch, elsewhere[place])):
                    trials.append(_Trial(target, on_path, (0,), tried, where))
                    rows.append((self.state.level_seed, *target, kind, number))
        paths = [path_probability(fields[0], trial.target)
                 for trial, fields in zip(trials, self._patched(trials))]
        return pd.DataFrame(rows, columns=list(CONTROL_COLUMNS)[:-1]).assign(path=paths)

    def _before(self, target: Square) -> np.ndarray:
        """Return the squares that the mouse can visit before a target, as indices in ``field``."""
        cells = self.grid.cells.copy()
        cells[target] = WALL
        reached = dataclasses.replace(self.grid, cells=cells).distances(self.grid.mouse) >= 0
        return np.flatnonzero(reached[tuple(self.field.squares.T)])

    def _exact(self, fields: Sequence[Field], targets: Sequence[Square]) -> np.ndarray:
        if fields[0].memory != NO_MEMORY:
            return np.full(len(targets), np.nan)
        return Chain.of(fields).reaching(targets, self.state.timeout - self.state.time)

    def _patched(self, trials: Sequence[_Trial]) -> Iterator[tuple[Field, ...]]:
        """Yield the fields of each trial, one per facing."""
        batch: list[tuple[_Trial, np.ndarray]] = []
        for number, trial in enumerate(trials, 1):
            first = np.array(trial.facings) * len(self.field.squares)  # frame of each facing
            batch.append((trial, np.add.outer(first, trial.squares).ravel()))
            sizes = [len(rows) for _, rows in batch]
            if sum(sizes) < PASSES_PER_BATCH and number < len(trials):
                continue
            patched = torch.cat([tried.patch.apply(self.field.prefix.activations[rows], tried.cell)
                                 for tried, rows in batch])
            outputs = self.field.resume(patched, np.concatenate([rows for _, rows in batch]))
            parts = (np.split(values, np.cumsum(sizes)[:-1]) for values in outputs)
            for (tried, _), log_probs, values in zip(batch, *parts):
                yield fields_by_facing(self.grid, self.field.squares[tried.squares], log_probs,
                                       values, tried.facings, self.field.memory)
            batch = []

    def _with_cheese(self, targets: Sequence[Square]) -> Iterator[tuple[Field, ...]]:
        """Yield the fields with the cheese at each target, one per facing."""
        policy, compute = self.forward.policy, self.forward.compute
        for target in targets:
            moved = self.state.with_cheese(target)
            squares = self.field.squares[self._before(target)]
            frames = np.concatenate([frame_source(moved)(squares, np.full(len(squares), facing))
                                     for facing in self.facings])
            output = run_policy(policy, compute, frames, policy.initial_states(len(frames)))
            yield fields_by_facing(moved.grid, squares, output.log_probs.cpu().numpy(),
                                   output.values.cpu().numpy(), self.facings, self.field.memory)


def means_by_part(targets: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Return means over groups of targets with 95 % intervals over levels; see PART_COLUMNS.

    There is one group with all targets, one per range of steps off the path to the corner, and one
    per range of the maze's number of rows. Empty groups are left out.
    """
    parts = [(ALL, ALL, np.ones(len(targets), bool))]
    for (name, column), bins in _BINS.items():
        for low, high in bins:
            label = (f"{low}" if low == high else f"{low} to {high}" if high < 10**6
                     else f"{low} or more")
            parts.append((name, label, targets[column].between(low, high).to_numpy()))
    rows = []
    for name, label, chosen in parts:
        part = targets[chosen]
        for outcome in ("path", "exact"):
            before, after = part[f"{outcome}_{UNPATCHED}"], part[f"{outcome}_{PATCHED}"]
            if before.isna().any() or not len(part):
                continue
            change = (after - before).to_numpy()
            ends = ClusterBootstrap(part["seed"].to_numpy(), seed).interval(
                change[None])[:, 0]
            rows.append((name, label, outcome, part["seed"].nunique(), len(part), before.mean(),
                         after.mean(), change.mean(), *ends, after.mean() / before.mean(),
                         (change > 0).mean()))
    return pd.DataFrame(rows, columns=list(PART_COLUMNS))


def compare_controls(targets: pd.DataFrame, controls: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Compare the patch's effect on path probabilities with the effects of both kinds of controls
    at the same targets.

    Bootstrap and sign flips treat the targets of a level as one unit.

    Args:
        targets: measurements of the targets, see TARGET_COLUMNS.
        controls: measurements under controls, see CONTROL_COLUMNS.

    Returns:
        The table of ``stats.effects.compare_conditions``; empty for fewer than 10 levels.
    """
    paths = controls.pivot(index=list(_KEYS), columns=["kind", "number"], values="path")
    own = targets.set_index(list(_KEYS)).loc[paths.index]
    levels = own.index.get_level_values("seed").to_numpy()
    if len(np.unique(levels)) < MIN_STARTS:
        return pd.DataFrame()
    conditions = []
    for kind, label in _CONTROLS.items():
        conditions.append(Condition(f"set, {kind}", f"against {label}", kind,
                                    value=own["path_patched"]))
        conditions += [Condition(f"{kind} {number}", label, kind, control=True,
                                 value=paths[kind][number]) for number in paths[kind].columns]
    after = np.stack([np.asarray(condition.value) for condition in conditions])[..., None]
    return compare_conditions(conditions, [OUTCOME], own["path_unpatched"].to_numpy()[:, None],
                              after, seed, levels)
