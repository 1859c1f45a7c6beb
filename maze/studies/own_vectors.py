"""Arms that add to each level its own steering vector, and the flags that ask for them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from agents.layers import layers_named
from agents.networks import Policy
from agents.patch import BatchInfo
from common.cli import Parser
from common.errors import UserError
from interventions.patches import Add
from maze.level.state import MazeState
from maze.studies.vectors import CHEESE, LAYER, THINGS, TOP_RIGHT, Thing, differences

USUAL_COEFFICIENTS = {CHEESE.name: -1.0, TOP_RIGHT.name: 1.0}


def add_own_vector_flags(parser: Parser) -> None:
    """Flags for the arms of :func:`own_vectors`."""
    parser.add_argument("--vectors", nargs="+", choices=tuple(THINGS), default=[],
                        help="arms that add each level's own cheese vector or top right vector")
    parser.add_argument("--coefficients", nargs="+", type=float,
                        help="of --vectors, one each; -1 for cheese and 1 for top_right if not "
                             "given")
    parser.add_argument("--layer", default=LAYER, help="of --vectors")


def own_vectors(args: argparse.Namespace, policy: Policy,
                states: Sequence[MazeState]) -> dict[str, Add]:
    """The patches that the flags ask for, by name, such as "cheese -1".

    Args:
        states: all levels that may be looked at, by seeds that differ.

    Raises:
        UserError: if two levels have the same seed, there are not as many coefficients as vectors,
            an arm is asked for twice, or there is no such layer.
    """
    if args.vectors and len({state.level_seed for state in states}) < len(states):
        raise UserError("two of the levels have the same seed, and --vectors are told apart by "
                        "them; ask for one of them at a time")
    coefficients = args.coefficients or [USUAL_COEFFICIENTS[name] for name in args.vectors]
    if len(coefficients) != len(args.vectors):
        raise UserError(f"there are {len(coefficients)} --coefficients for {len(args.vectors)} "
                        "--vectors")
    arms = list(zip(args.vectors, coefficients))
    if len(set(arms)) < len(arms):
        raise UserError("a vector is asked for twice with the same coefficient")
    return {f"{name} {c:+g}": own_vector(policy, args.layer, THINGS[name], states, c)
            for name, c in arms}


def own_vector(policy: Policy, layer: str, thing: Thing, states: Sequence[MazeState],
               coefficient: float) -> Add:
    """A patch that adds to each level its own vector.

    Args:
        states: all levels that may be played, by seeds that differ.
    """
    [layer] = layers_named(policy, layer)
    vectors = dict(zip((state.level_seed for state in states),
                       differences(policy, [layer.name], thing, states)[layer.name]))

    def of_rows(rows: BatchInfo) -> np.ndarray:
        nothing = np.zeros(layer.shape, np.float32)  # of rows that fill a pass up
        return np.stack([vectors.get(level, nothing) for level in rows.level.tolist()])

    return Add(layer.name, vector=of_rows, coefficient=coefficient)
