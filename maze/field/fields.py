"""Vector fields: an agent's policy and value with the mouse on each free square of a level.

Fields can be subtracted, for example with and without a patch, or with the two facings.

Letters in shape comments: n squares; F facings; R = F n frames (all squares with the first facing,
then all with the next); P resumed forward passes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from agents.acting import run_policy
from agents.hooks import batch_info
from agents.networks import Policy, PolicyOutput
from agents.patch import BatchInfo
from agents.reference_set import ReferenceSet
from common.devices import Compute
from common.errors import UserError
from common.game_constants import ACTION_DIRECTIONS
from envs.maze.grid import CHEESE, WALL, Grid, Square
from envs.maze.levels import draw_levels
from envs.maze.state import MazeState, draw
from envs.procgen_env import EnvConfig
from interventions.partial_forward import PartialForward, Prefix
from maze.field.stamps import Stamps

FrameSource = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Function from squares of the mouse, world (row, column), (n, 2), and its facings (n,) to frames
of a level, uint8 (n, 64, 64, 3)."""

LEFT, DOWN, UP, RIGHT, STAY = range(5)
DIRECTIONS = ("left", "down", "up", "right", "stay")
STEPS = ((0, -1), (-1, 0), (1, 0), (0, 1))  # (row, column) steps left, down, up, right
NO_MEMORY, START, WALKED = "none", "start", "walked"
MEMORIES = (START, WALKED)


# Direction in which each action moves the mouse, as an index in DIRECTIONS; diagonals move it
# sideways.
_GROUPS = np.array([(LEFT, (DOWN, STAY, UP)[1 + up], RIGHT)[1 + right]
                    for right, up in ACTION_DIRECTIONS])


def grouped(log_probs: np.ndarray) -> np.ndarray:
    """Sum the probabilities of all actions that move the mouse in the same direction.

    Args:
        log_probs: log-probabilities of the actions (n, A).

    Returns:
        Log-probabilities of left, down, up, right, stay, float64 (n, 5).
    """
    return np.stack([np.logaddexp.reduce(log_probs[:, group == _GROUPS].astype(np.float64), axis=1)
                     for group in range(len(DIRECTIONS))], axis=1)


@dataclasses.dataclass(frozen=True, eq=False)
class Field:
    """Policy and value of an agent on squares of a level.

    Attributes:
        grid: the level; episodes start at its mouse's square.
        squares: free squares without cheese, world (row, column), int64 (n, 2).
        log_probs: log-probabilities of the actions, float32 (n, A).
        values: outputs of the value head, float32 (n,).
        facing: facing of the mouse: 0 for left, 1 for right.
        memory: recurrent state at each square: ``start``, the state at an episode's first step;
            ``walked``, the state after walking there from the mouse's square of ``grid``; ``none``
            for agents without memory.
    """

    grid: Grid
    squares: np.ndarray
    log_probs: np.ndarray
    values: np.ndarray
    facing: int
    memory: str

    @functools.cached_property
    def log_groups(self) -> np.ndarray:
        """Log-probabilities of left, down, up, right, stay, float64 (n, 5)."""
        return grouped(self.log_probs)

    @functools.cached_property
    def probs(self) -> np.ndarray:
        """Probabilities of left, down, up, right, stay, which add up to 1, float64 (n, 5)."""
        probs = np.exp(self.log_groups)
        return probs / probs.sum(axis=1, keepdims=True)

    @functools.cached_property
    def is_open(self) -> np.ndarray:
        """Whether left, down, up and right lead to a free square or the cheese, bool (n, 4)."""
        around = np.pad(self.grid.is_free, 1)  # nothing is free outside the world
        neighbours = self.squares[:, None] + np.array(STEPS) + 1  # (n, 4, 2)
        return around[neighbours[..., 0], neighbours[..., 1]]

    @functools.cached_property
    def effective_probs(self) -> np.ndarray:
        """``probs`` with moves into walls counted as stay, float64 (n, 5)."""
        moves = self.probs[:, :STAY] * self.is_open
        return np.column_stack([moves, 1 - moves.sum(axis=1)])

    @property
    def components(self) -> np.ndarray:
        """Arrows (right, up) for left, down, up and right, float64 (n, 4, 2). The length of an
        arrow is the probability of moving in its direction."""
        directions = np.array([(column, row) for row, column in STEPS])
        return self.probs[:, :STAY, None] * directions

    @property
    def arrows(self) -> np.ndarray:
        """Net arrows: P(right) - P(left) and P(up) - P(down), float64 (n, 2)."""
        return self.components.sum(axis=1)

    @functools.cached_property
    def _rows(self) -> dict[tuple[int, int], int]:
        return {(row, column): number
                for number, (row, column) in enumerate(self.squares.tolist())}

    def row(self, square: Square) -> int:
        """Return the index of a square in the arrays of the field.

        Raises:
            UserError: if the field lacks the square: a wall, the cheese, or an unreachable square.
        """
        row = self._rows.get((square[0], square[1]))
        if row is None:
            raise UserError(f"the field does not include {Square(*square)}: it is a wall, the "
                            "cheese, or unreachable")
        return row

    def map(self, values: np.ndarray) -> np.ndarray:
        """Arrange values of the squares (n,) as a map of the W x W squares of the world, float64
        (W, W); NaN elsewhere."""
        world = np.full(self.grid.cells.shape, np.nan)
        world[tuple(self.squares.T)] = values
        return world


@dataclasses.dataclass(frozen=True, eq=False)
class Difference:
    """Difference of two fields on their common squares.

    Attributes:
        squares: common squares, world (row, column), int64 (n, 2).
        probs: changes of P(left), P(down), P(up), P(right), P(stay), float64 (n, 5).
        arrows: changes of the net arrows (right, up), float64 (n, 2).
        components: changes of the arrow of each direction, float64 (n, 4, 2).
        values: changes of the values, float64 (n,).
    """

    squares: np.ndarray
    probs: np.ndarray
    arrows: np.ndarray
    components: np.ndarray
    values: np.ndarray

    @property
    def total_variation(self) -> np.ndarray:
        """Total variation distance of the five probabilities at each square, (n,)."""
        return np.abs(self.probs).sum(axis=1) / 2

    @property
    def mean_total_variation(self) -> float:
        """Mean of ``total_variation`` over the squares."""
        return float(self.total_variation.mean())

    @property
    def published_size(self) -> float:
        """Euclidean norm, over all squares, of the changes of the four movement probabilities,
        divided by 2 n.

        ``procgen-tools`` prints this number. It shrinks as 1 / sqrt(n); use it only for comparison
        with published numbers.
        """
        return float(np.linalg.norm(self.probs[:, :STAY]) / (2 * len(self.squares)))


def difference(original: Field, patched: Field) -> Difference:
    """Subtract ``original`` from ``patched``.

    Raises:
        UserError: if the attribute ``memory`` of the fields differs.
    """
    if original.memory != patched.memory:
        raise UserError("fields that were computed with different memories "
                        f"({original.memory} and {patched.memory}) cannot be subtracted")
    here = {tuple(square) for square in patched.squares.tolist()}
    common = [square for square in original.squares.tolist() if tuple(square) in here]
    before, after = ([field.row(square) for square in common] for field in (original, patched))

    return Difference(np.array(common), *(
        getattr(patched, name)[after].astype(np.float64) - getattr(original, name)[before]
        for name in ("probs", "arrows", "components", "values")))


def direction_between(square: Square, neighbour: Square) -> int:
    """Return the direction from a square to a neighbour: LEFT, DOWN, UP or RIGHT."""
    return STEPS.index((neighbour[0] - square[0], neighbour[1] - square[1]))


def stamp_frames(state: MazeState) -> FrameSource:
    """Return a source of frames that are composed from stored images of cells, without Procgen.

    It supports only levels that have no background image and whose view does not follow the mouse.
    """
    stamps = Stamps.of(state.distribution_mode)
    return lambda squares, facing: stamps.frames(state.grid, squares, facing)


def drawn_frames(state: MazeState) -> FrameSource:
    """Return a source of frames that Procgen renders; slower, but it supports any level."""
    def frames(squares: np.ndarray, facing: np.ndarray) -> np.ndarray:
        return draw([state.with_grid(dataclasses.replace(
            state.grid, mouse=Square(*square), facing=int(side)))
            for square, side in zip(squares.tolist(), facing)])
    return frames


def frame_source(state: MazeState) -> FrameSource:
    """Return the fastest source of frames that supports a level."""
    stamped = state.distribution_mode != "memory" and not state.use_backgrounds
    return stamp_frames(state) if stamped else drawn_frames(state)


def frames_at(states: Sequence[MazeState], squares: Sequence[Square]) -> np.ndarray:
    """Return a frame of each level, with the mouse on the level's square in ``squares`` and with
    facing 0, uint8 (n, 64, 64, 3)."""
    return np.concatenate([frame_source(state)(np.array([square]), np.zeros(1, np.int64))
                           for state, square in zip(states, squares, strict=True)])


def vector_field(policy: Policy, compute: Compute, state: MazeState, *, facing: int = 0,
                 memory: str = START, frames: FrameSource | None = None) -> Field:
    """Compute the field of an agent on a level.

    Active patches apply. In the batch metadata that they read, the step of a frame is the distance
    of its square from the mouse of ``state`` (0 if unreachable), and the episode is the index of
    the square.

    Args:
        policy: agent, on the device of ``compute``.
        state: the level; episodes start at its mouse's square.
        facing: facing of the mouse: 0 for left, 1 for right.
        memory: hidden state of a recurrent agent on each square: ``start``, the state at the start
            of an episode, or ``walked``, the state after walking to the square. With ``walked``,
            the field leaves out unreachable squares, such as those behind the cheese.
        frames: source of the frames; by default :func:`frame_source` of the level.
    """
    grid = state.grid
    frames = frames or frame_source(state)
    squares = np.array(grid.squares(without_cheese=True)).reshape(-1, 2)  # (n, 2)
    steps = _without_cheese(grid).distances(grid.mouse)[tuple(squares.T)]  # (n,)

    def run(chosen: np.ndarray, facings: np.ndarray, hidden: Tensor) -> PolicyOutput:
        rows = BatchInfo(chosen, np.maximum(steps[chosen], 0),
                         np.full(len(chosen), state.level_seed), squares[chosen], facings)
        with batch_info(policy, rows):
            return run_policy(policy, compute, frames(squares[chosen], facings), hidden)

    entering = policy.initial_states(len(squares))  # (n, D)
    everywhere = np.arange(len(squares))
    if policy.recurrent and memory == WALKED:
        everywhere = np.flatnonzero(steps >= 0)
        _walk(grid, squares, steps, entering, run)
    output = run(everywhere, np.full(len(everywhere), facing), entering[everywhere])
    return Field(grid, squares[everywhere], output.log_probs.cpu().numpy(),
                 output.values.cpu().numpy(), facing, memory if policy.recurrent else NO_MEMORY)


def both_facings(policy: Policy, compute: Compute, state: MazeState, *,
                 memory: str = START, frames: FrameSource | None = None) -> tuple[Field, ...]:
    """Compute the fields with facing 0 and 1; see :func:`vector_field`."""
    return tuple(vector_field(policy, compute, state, facing=facing, memory=memory, frames=frames)
                 for facing in (0, 1))


def fields_by_facing(grid: Grid, squares: np.ndarray, log_probs: np.ndarray, values: np.ndarray,
                     facings: Sequence[int], memory: str) -> tuple[Field, ...]:
    """Split the outputs of a batch into one field per facing.

    Args:
        squares: squares of each field, world (row, column), (n, 2).
        log_probs: log-probabilities of the actions, float32 (F n, A): all squares with the first
            facing, then all with the next.
        values: values in the same order, float32 (F n,).
        memory: memory of the fields, as in :class:`Field`.
    """
    parts = zip(facings, np.split(log_probs, len(facings)), np.split(values, len(facings)))
    return tuple(Field(grid, squares, logs, value, facing, memory)
                 for facing, logs, value in parts)


class ResumedField:
    """Forward passes of a level's frames up to a layer, which can be resumed from there.

    Recurrent agents are in the state in which episodes start.

    Args:
        forward: forward pass of the agent, split at the layer.

    Attributes:
        squares: squares of the mouse, int64 (n, 2).
        facings: the F facings of the mouse.
        memory: as in :class:`Field`.
        prefix: the R forward passes up to the layer.
    """

    def __init__(self, forward: PartialForward, state: MazeState, squares: Sequence[Square],
                 facings: Sequence[int] = (0,)):
        self.grid, self.squares = state.grid, np.array(squares, np.int64).reshape(-1, 2)
        self.facings = tuple(facings)
        self.memory = START if forward.policy.recurrent else NO_MEMORY
        source = frame_source(state)
        with torch.no_grad():
            prefixes = [forward.run_to(source(self.squares, np.full(len(self.squares), facing)))
                      for facing in self.facings]
        self.prefix = Prefix(forward, torch.cat([prefix.activations for prefix in prefixes]),
                             tuple(map(torch.cat, zip(*(prefix.also_read for prefix in prefixes)))))

    @torch.no_grad()
    def resume(self, activations: Tensor | None = None, rows: np.ndarray | None = None
               ) -> tuple[np.ndarray, np.ndarray]:
        """Resume the forward passes; return log-probabilities (P, A) and values (P,), float32.

        Args:
            activations: replacement of the layer's output (P, C, H, W); by default the output
                itself.
            rows: index of the frame of each resumed pass (P,); by default all frames in order.
        """
        output = self.prefix.run_from(activations, None if rows is None else torch.as_tensor(rows))
        return output.log_probs.float().cpu().numpy(), output.values.float().cpu().numpy()


def _without_cheese(grid: Grid) -> Grid:
    """Return the grid with the cheese as a wall, because an episode ends there and the mouse cannot
    pass it."""
    return dataclasses.replace(grid, cells=np.where(grid.cells == CHEESE, WALL, grid.cells))


def _walk(grid: Grid, squares: np.ndarray, steps: np.ndarray, entering: Tensor,
          run: Callable[[np.ndarray, np.ndarray, Tensor], PolicyOutput]) -> None:
    """Compute the recurrent states after walking from the mouse to each square.

    Args:
        grid: the level, with the mouse where the episode starts.
        squares: squares to walk to, world (row, column), (n, 2).
        steps: number of steps from the mouse to each square (n,), -1 if unreachable.
        entering: recurrent states on arrival (n, D), modified in place.
        run: function that runs the agent, given indices of squares, facings and recurrent states.
    """
    passable = _without_cheese(grid)
    rows = {tuple(square): row for row, square in enumerate(squares.tolist())}
    before = np.full(len(squares), -1)  # row of the previous square of the walk
    sides = np.full(len(squares), grid.facing)  # the mouse's facing on arrival
    for distance in range(1, steps.max() + 1):
        reached = np.flatnonzero(steps == distance)
        for row in reached:
            path = passable.path(grid.mouse, Square(*squares[row].tolist()))
            before[row] = rows[path[-2]]
            moved = direction_between(path[-2], path[-1])
            sides[row] = {LEFT: 0, RIGHT: 1}.get(moved, sides[before[row]])
        seen = np.unique(before[reached])
        leaving = torch.zeros_like(entering)
        leaving[seen] = run(seen, sides[seen], entering[seen]).hidden_states
        entering[reached] = leaving[before[reached]]


def reference_frames(env: EnvConfig, without: Collection[int], size: int,
                     seed: int) -> ReferenceSet:
    """Draw a reference set: one frame per random maze level, the mouse on a random free square.

    Args:
        without: seeds of measured levels, which are excluded.
        size: number of frames and levels.
    """
    rng = np.random.default_rng(seed)
    frames = [frame_source(state)(rng.permutation(state.grid.squares(without_cheese=True))[:1],
                                  np.zeros(1, np.int64))
              for state in draw_levels(env, without, size, seed)]
    return ReferenceSet(np.concatenate(frames), description={
        "of": "levels that are not measured, the mouse anywhere", "seed": seed})
