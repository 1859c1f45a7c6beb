"""Steering vectors for mazes, and the levels from which they are computed.

A vector is the difference of a layer's output between two versions of a maze, with the mouse at the
start: with and without the cheese, or with and without a path from the maze's corner to the corner
of the world. The vector is computed from the level on which it is added, or from other levels,
whose cheese or corner is at the same square, at any other square, or at a given distance
(:func:`source_level`).

Sources: *Understanding and controlling a maze-solving policy network* (2023), *Add a top-right
vector* (2023).

Symbols in shapes: N levels, followed by the layer's shape, which is written as dots (…).
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from agents.agent_file import weights_sha256
from agents.layers import find_layer, layers_named
from agents.networks import Policy
from agents.patch import BatchInfo
from agents.reference_set import activations_of
from common.errors import UserError
from common.options import Options, option
from envs.maze.grid import Grid, Square
from envs.maze.state import MazeState, check_seeds, game_of
from interventions.patches import Add
from interventions.vectors import SteeringVector, read_vectors, vectors_of_pairs
from maze.field.fields import frames_at

LAYER = "embedder.block2.res1.resadd"  # the published layer
OWN, SAME_SQUARE, OTHER, MEAN = "own", "same_square", "other", "mean"
SOURCES = (OWN, SAME_SQUARE, OTHER, MEAN)
FIXED = "fixed"  # source of a given vector, which is the same for all levels
OFFSET = "offset_"  # prefix of sources, before a distance in squares between cheeses or corners
Pair = tuple[MazeState, MazeState]
"""Two versions of a level whose activations are subtracted."""


def cheese_pair(state: MazeState) -> Pair:
    """Return the level with its cheese and without it, with the mouse at inner (0, 0).

    Raises:
        UserError: if there is not exactly one cheese, or the start is a wall or holds the cheese.
    """
    with_cheese = state.with_mouse(state.grid.start)
    with_cheese.grid.cheese  # noqa: B018  raises for none or several
    return with_cheese, with_cheese.with_cheese(None)


def top_right_pair(state: MazeState) -> Pair:
    """Return the level with and without a path to the world's corner, mouse at inner (0, 0).

    Raises:
        UserError: if the maze fills the world.
    """
    at_start = state.with_mouse(state.grid.start)
    return at_start.with_top_right_path(), at_start


@dataclasses.dataclass(frozen=True)
class VectorKind:
    """Kind of a steering vector, given by a change of the maze.

    Attributes:
        label: label of the changed level in tables.
        pair: maps a level to its versions with and without the cheese or path.
        place: maps a grid to the square of the cheese, or to the corner where the path begins.
        changed: index of the changed level in the pair.
        coefficient: usual coefficient of the vector on the level from which it is computed.
    """

    name: str
    label: str
    pair: Callable[[MazeState], Pair]
    place: Callable[[Grid], Square]
    changed: int
    coefficient: float


CHEESE = VectorKind("cheese", "the level without cheese", cheese_pair, lambda grid: grid.cheese, 1,
                    -1.0)
TOP_RIGHT = VectorKind("top_right", "the level with a path to the world's corner", top_right_pair,
                       lambda grid: grid.corner, 0, 1.0)
VECTOR_KINDS = {kind.name: kind for kind in (CHEESE, TOP_RIGHT)}


# ------------------------------------------------------------------------------- vectors of levels


def level_vectors(policy: Policy, layers: Sequence[str], kind: VectorKind,
                  states: Sequence[MazeState]) -> dict[str, np.ndarray]:
    """Compute the vector of each level.

    Args:
        layers: names of the layers.
        states: N levels for which ``kind.pair`` is defined.

    Returns:
        Vectors by layer, float32 (N, …).
    """
    frames, without = pair_frames([kind.pair(state) for state in states])
    activations = activations_of(policy, np.concatenate([frames, without]), layers)
    return {name: (values[:len(frames)] - values[len(frames):]).cpu().numpy()
            for name, values in activations.items()}


def pair_frames(pairs: Sequence[Pair]) -> tuple[np.ndarray, np.ndarray]:
    """Return frames of the first and of the second levels of pairs, uint8 (N, 64, 64, 3) each."""
    first, second = (frames_at(states, [state.grid.mouse for state in states])
                     for states in zip(*pairs))
    return first, second


def mean_vectors(policy: Policy, layers: Sequence[str], kind: VectorKind,
                 states: Sequence[MazeState]) -> dict[str, SteeringVector]:
    """Compute the mean vector over levels, by layer.

    For the top right vector, mazes that fill the world are left out, because they have no room for
    a path to the world's corner.

    Raises:
        UserError: if no level has room for the vector.
    """
    kept = [state for state in states if kind is CHEESE or state.grid.margin]
    if not kept:
        raise UserError(f"none of {len(states)} levels has room for a {kind.name} vector")
    return vectors_of_pairs(policy, layers, *pair_frames([kind.pair(state) for state in kept]),
                            np.array([(state.level_seed, state.level_seed) for state in kept]),
                            kind.name, sorted({state.distribution_mode for state in kept}))


def vectors_of_pair(policy: Policy, layers: Sequence[str],
                    states: Sequence[MazeState]) -> dict[str, SteeringVector]:
    """Compute the vector of two levels, by layer: the layer's output for the first minus that for
    the second.

    Raises:
        UserError: if there are not exactly two levels, or their modes or backgrounds differ.
    """
    if len(states) != 2:
        raise UserError(f"--vector takes two levels as a pair, not {len(states)}")
    one, other = states
    mode, seeds = game_of(states).distribution_mode, (one.level_seed, other.level_seed)
    return vectors_of_pairs(policy, layers, *pair_frames([(one, other)]), np.array([seeds]),
                            "{} - {}".format(*seeds), [mode])


def vectors_of_file(policy: Policy, layers: Sequence[str] | None,
                    path: Path) -> dict[str, SteeringVector]:
    """Read the vectors of a file, by layer.

    Args:
        layers: names of layers; None for all layers of the file.

    Raises:
        UserError: if the file is missing or damaged, belongs to another agent, or lacks a layer.
    """
    vectors, agent = read_vectors(path), weights_sha256(policy)
    chosen = [find_layer(policy, name) for name in layers or vectors]
    for layer in chosen:
        vector = vectors.get(layer.name, next(iter(vectors.values())))
        vector.check_for(agent, layer.name, layer.shape)
    return {layer.name: vectors[layer.name] for layer in chosen}


# ----------------------------------------------------------------------------------- source levels


def source_level(kind: VectorKind, source: str, target: MazeState, pool: Sequence[MazeState],
                 seed: int, draw: int = 0) -> MazeState | None:
    """Return the level from which the vector for a target is computed; None if the pool has none.

    For the cheese vector, this is a random level in which a suitable square is free, with the
    cheese moved there. For the top right vector, it is a random level whose maze does not fill the
    world and has its corner at a suitable square.

    Args:
        source: place of the cheese or corner relative to that of the target: OWN (the target
            itself), SAME_SQUARE, OTHER (any other square), or OFFSET followed by a distance in
            squares, which is the larger of the distances in rows and in columns.
        target: level on which the vector is used.
        seed: seed of the draw, combined with the target's seed and ``draw``.
        draw: index of the draw, if several levels are drawn for a target.
    """
    if source == OWN:
        return target
    rng = np.random.default_rng([seed, target.level_seed, zlib.crc32(source.encode()), draw])
    place = kind.place(target.grid)
    for number in rng.permutation(len(pool)):
        level = pool[number]
        if kind is CHEESE:
            squares = np.array([square for square in level.grid.squares()
                                if square != level.grid.start])
        else:
            squares = np.array([level.grid.corner] if level.grid.margin else []).reshape(-1, 2)
        offset = np.abs(squares - place).max(axis=1)
        fits = offset > 0 if source == OTHER else offset == (
            0 if source == SAME_SQUARE else int(source.removeprefix(OFFSET)))
        if fits.any():
            square = Square(*map(int, rng.choice(squares[fits])))
            return level.with_cheese(square) if kind is CHEESE else level
    return None


# ------------------------------------------------------- patches that add a level's own vector


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnVectorOptions(Options):
    """Options for patches that add each level's own vector."""

    vectors: tuple[str, ...] = option(
        (), "conditions that add each level's own cheese vector or top right vector",
        choices=tuple(VECTOR_KINDS))
    coefficients: tuple[float, ...] | None = option(
        None, "coefficients of --vectors, one each; if not given, -1 for cheese and 1 for "
              "top_right")
    layer: str = option(LAYER, "layer to which --vectors are added")

    def own_vectors(self, policy: Policy, states: Sequence[MazeState]) -> dict[str, Add]:
        """Return the patches by name, such as "cheese -1".

        Args:
            states: all levels that may be run, with different seeds.

        Raises:
            UserError: if two levels have the same seed, the numbers of coefficients and vectors
                differ, or the agent does not have the layer.
        """
        if self.vectors:
            check_seeds(states)
        coefficients = self.coefficients or [VECTOR_KINDS[name].coefficient
                                             for name in self.vectors]
        if len(coefficients) != len(self.vectors):
            raise UserError(f"there are {len(coefficients)} --coefficients for "
                            f"{len(self.vectors)} --vectors")
        return {f"{name} {c:+g}": own_vector(policy, self.layer, VECTOR_KINDS[name], states, c)
                for name, c in zip(self.vectors, coefficients)}


def own_vector(policy: Policy, layer_name: str, kind: VectorKind, states: Sequence[MazeState],
               coefficient: float) -> Add:
    """Return a patch that adds each level's own vector to the output of a layer.

    Args:
        states: all levels that may be played, with different seeds.
        coefficient: factor by which each vector is multiplied before it is added.
    """
    [layer] = layers_named(policy, layer_name)
    vectors = dict(zip((state.level_seed for state in states),
                       level_vectors(policy, [layer.name], kind, states)[layer.name]))
    nothing = np.zeros(layer.shape, np.float32)  # for rows that pad a batch

    def of_batch(info: BatchInfo) -> np.ndarray:
        return np.stack([vectors.get(level, nothing) for level in info.level.tolist()])

    return Add(layer.name, vector=of_batch, coefficient=coefficient)
