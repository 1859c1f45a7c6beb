"""Vectors that steer an agent on mazes, and the levels that they are made of.

A vector is the difference that one thing in a maze makes at a layer, with the mouse at the start:
the cheese, or a path from the maze's corner to that of the world. It is used on the level it was
made of, or on others, by where the thing lies there.

Letters in shape comments: N levels, … a layer's shape.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from agents.agent_file import weights_sha256
from agents.layers import find_layer
from agents.networks import Policy
from agents.reference_set import activations_of
from common.errors import UserError
from envs.procgen_env import EnvConfig
from interventions.vectors import SteeringVector, read_vectors, vectors_of_pairs
from maze.field.fields import frame_source
from maze.level.grid import Grid, Square
from maze.level.state import MazeState, stock_state

LAYER = "embedder.block2.res1.resadd"  # the published one
OWN, SAME_SQUARE, OTHER, MEAN = "own", "same_square", "other", "mean"
SOURCES = (OWN, SAME_SQUARE, OTHER, MEAN)
FIXED = "fixed"  # the source of a vector that is the same for all levels because it was given
_OFFSET = "offset_"
Pair = tuple[MazeState, MazeState]


def cheese_pair(state: MazeState) -> Pair:
    """Return the level with its cheese and without it, with the mouse at inner (0, 0).

    Raises:
        UserError: unless the level has exactly one cheese, which is elsewhere.
    """
    with_cheese = state.with_mouse(state.grid.start)
    with_cheese.grid.cheese  # noqa: B018  refuses none and several
    return with_cheese, with_cheese.with_cheese(None)


def top_right_pair(state: MazeState) -> Pair:
    """Return the level with a path to the world's corner and without it, with the mouse at inner
    (0, 0).

    Raises:
        UserError: as ``MazeState.with_top_right_path``.
    """
    at_start = state.with_mouse(state.grid.start)
    return at_start.with_top_right_path(), at_start


@dataclasses.dataclass(frozen=True)
class Thing:
    """A thing in a maze that a vector is about.

    Attributes:
        name: of the vector.
        label: of the levels that lack it, or have it, for tables.
        pair: the level with it, and without.
        place: where it lies.
        changed: which of the pair is not the level as it is: 0 the one with it, 1 the other.
    """

    name: str
    label: str
    pair: Callable[[MazeState], Pair]
    place: Callable[[Grid], Square]
    changed: int


CHEESE = Thing("cheese", "the level without cheese", cheese_pair, lambda grid: grid.cheese, 1)
TOP_RIGHT = Thing("top_right", "the level with a path to the world's corner", top_right_pair,
                  lambda grid: grid.corner, 0)
THINGS = {thing.name: thing for thing in (CHEESE, TOP_RIGHT)}


def offset_source(squares: int) -> str:
    """The source of vectors of levels where the thing lies so many squares off, in rows or
    columns, whichever are more."""
    return f"{_OFFSET}{squares}"


def pool_of(env: EnvConfig, without: set[int], size: int, seed: int) -> list[MazeState]:
    """Levels that vectors of other levels are made of.

    Args:
        without: seeds of levels that are measured, of which none is used.
    """
    seeds = [number for number in env.draw_levels(size + len(without), seed)
             if number not in without]
    return [stock_state(env.distribution_mode, number, env.use_backgrounds)
            for number in seeds[:size]]


def source_level(thing: Thing, source: str, target: MazeState, pool: Sequence[MazeState],
                 seed: int, draw: int = 0) -> MazeState | None:
    """The level that the vector for a target is made of; None if the pool has none.

    The cheese is put where it is wanted, in a random level in which that square is free. For the
    path to the world's corner, the level is one whose own corner lies there.

    Args:
        source: OWN, SAME_SQUARE, OTHER (the thing lies elsewhere), or ``offset_source``.
        seed: with the target's seed and the draw, decides which.
        draw: number of the level, where several are drawn for a target.
    """
    if source == OWN:
        return target
    rng = np.random.default_rng([seed, target.level_seed, zlib.crc32(source.encode()), draw])
    place = thing.place(target.grid)
    for number in rng.permutation(len(pool)):
        level = pool[number]
        if thing is CHEESE:
            squares = np.array([square for square in level.grid.squares()
                                if square != level.grid.start])
        else:
            squares = np.array([level.grid.corner] if level.grid.margin else []).reshape(-1, 2)
        off = np.abs(squares - place).max(axis=1)
        wanted = off > 0 if source == OTHER else off == (
            0 if source == SAME_SQUARE else int(source.removeprefix(_OFFSET)))
        if wanted.any():
            square = Square(*map(int, rng.choice(squares[wanted])))
            return level.with_cheese(square) if thing is CHEESE else level
    return None


def pictures_of(states: Sequence[MazeState], squares: Sequence[Square]) -> np.ndarray:
    """Frames with the mouse on a square of each level, facing as at its start:
    uint8 (N, 64, 64, 3)."""
    return np.concatenate([frame_source(state)(np.array([square]), np.zeros(1, np.int64))
                           for state, square in zip(states, squares)])


def pairs_of_pictures(pairs: Sequence[Pair]) -> tuple[np.ndarray, np.ndarray]:
    """Pictures of pairs of levels, the mouse where it is: uint8 (N, 64, 64, 3) each."""
    return tuple(pictures_of(states, [state.grid.mouse for state in states])
                 for states in zip(*pairs))


def differences(policy: Policy, layers: Sequence[str], thing: Thing,
                states: Sequence[MazeState]) -> dict[str, np.ndarray]:
    """The vector of each level at each layer, float32 (N, …)."""
    shown, lacking = pairs_of_pictures([thing.pair(state) for state in states])
    found = activations_of(policy, np.concatenate([shown, lacking]), layers)
    return {name: (values[:len(shown)] - values[len(shown):]).cpu().numpy()
            for name, values in found.items()}


def mean_vectors(policy: Policy, layers: Sequence[str], thing: Thing,
                 states: Sequence[MazeState]) -> dict[str, SteeringVector]:
    """The mean of the vectors of levels, by layer; levels that cannot have the thing are left out.

    Raises:
        UserError: if none can.
    """
    pairs, kept = [], []
    for state in states:
        try:
            pairs.append(thing.pair(state))
            kept.append(state)
        except UserError:
            continue
    if not pairs:
        raise UserError(f"none of {len(states)} levels can have a {thing.name} vector")
    return vectors_of_pairs(policy, layers, *pairs_of_pictures(pairs),
                            [(state.level_seed, state.level_seed) for state in kept], thing.name,
                            sorted({state.distribution_mode for state in kept}))


def vectors_of_pair(policy: Policy, layers: Sequence[str],
                    states: Sequence[MazeState]) -> dict[str, SteeringVector]:
    """The vector of a custom pair, by layer: the first level's pictures minus the second's.

    Raises:
        UserError: if there are not two levels of one mode.
    """
    if len(states) != 2:
        raise UserError(f"--vector takes two levels as a pair, not {len(states)}")
    one, other = states
    if one.distribution_mode != other.distribution_mode:
        raise UserError(f"a pair needs two levels of one mode, not of {one.distribution_mode} and "
                        f"{other.distribution_mode}")
    seeds = one.level_seed, other.level_seed
    return vectors_of_pairs(policy, layers, *pairs_of_pictures([(one, other)]), np.array([seeds]),
                            "{} - {}".format(*seeds), [one.distribution_mode])


def vectors_of_file(policy: Policy, layers: Sequence[str] | None,
                    path: Path) -> dict[str, SteeringVector]:
    """The vectors of a file, by layer.

    Args:
        layers: those wanted; None for all that the file has.

    Raises:
        UserError: if the file is missing or damaged, is of another agent, or lacks a layer.
    """
    found = read_vectors(path)
    agent = weights_sha256(policy)
    wanted = [find_layer(policy, name) for name in layers or found]
    for layer in wanted:
        vector = found.get(layer.name, next(iter(found.values())))
        vector.check_for(agent, layer.name, layer.shape)
    return {layer.name: found[layer.name] for layer in wanted}


def repeated(vectors: Mapping[str, SteeringVector], number: int) -> dict[str, np.ndarray]:
    """The same vector for each of some levels, (N, …) by layer."""
    return {name: np.repeat(each.vector[None], number, axis=0) for name, each in vectors.items()}
