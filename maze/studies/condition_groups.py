"""Options of steering vectors on mazes: vectors, groups of conditions, and the forks on which
they can be computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from agents.layers import ALL, layers_named
from agents.networks import Policy
from common.cli import count, from_zero, whole
from common.errors import UserError
from common.options import option, redefine
from envs.maze.grid import FORK, kind_of
from envs.maze.levels import chosen_levels, draw_levels
from envs.maze.state import WORLD_DIMS, MazeState, game_of
from interventions.controls import OTHERS, PERMUTED
from interventions.vectors import SteeringVector
from maze.options import MazeOptions, region
from maze.studies.steering import CONTROL_KINDS, ConditionGroup, VectorSource
from maze.studies.vectors import (
    CHEESE,
    FIXED,
    LAYER,
    MEAN,
    OFFSET,
    OWN,
    SOURCES,
    TOP_RIGHT,
    VECTOR_KINDS,
    VectorKind,
    source_level,
    vectors_of_file,
    vectors_of_pair,
)
from stats.effects import Condition, check_starts

EACH = "each"  # value of --layers for every layer separately
COEFFICIENTS = (-1.0, -0.5, 0.5, 1.0, 2.0)
COMPOSED = (-1.0, 1.0)  # coefficients of the cheese and the top right vector


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupOptions(MazeOptions):
    """Options for the vectors that are added, and their controls."""

    num_mazes: int = redefine(MazeOptions, "num_mazes", default=400)
    vector: tuple[str, ...] = option(
        (CHEESE.name,), "cheese: activations with the cheese minus activations without it; "
                        "top_right: activations with a path to the world's corner minus "
                        "activations without it; a file <name>.npz; or two level files or seeds: "
                        "activations in the first minus activations in the second",
        metavar="VECTOR")
    coefficients: tuple[float, ...] | None = option(
        None, f"coefficients of the vectors, one condition each; {COEFFICIENTS} if not given",
        metavar="C")
    layers: tuple[str, ...] | None = option(
        None, f"layers to add vectors to; {EACH}: every layer separately, {ALL}: all layers at "
              f"once; {LAYER} if not given, or the layers of the file", metavar="LAYER")
    sources: tuple[str, ...] = option(
        (OWN,), "levels from which vectors are computed. own: the level itself; same_square: "
                "another level whose cheese (for top_right: whose maze's corner) is at the same "
                "square; other: another level whose cheese or corner is at another square; mean: "
                "the mean over many levels", choices=SOURCES)
    offsets: tuple[int, ...] = option(
        (), "further sources: levels whose cheese, or maze's corner, is this many squares away in "
            "rows or in columns, whichever distance is larger", type=region, metavar="SQUARES")
    num_sources: int = option(
        100, "number of other levels from which source levels are drawn, and over which the mean "
             "is taken", type=count)
    compose: bool = option(
        False, "add the cheese vector, the top right vector, and both, and measure their "
               "interaction; --coefficients then takes one value per vector, by default "
               f"{COMPOSED}")
    controls: tuple[str, ...] = option(
        (PERMUTED,), "; ".join(f"{kind}: {text}" for kind, text in CONTROL_KINDS.items()),
        choices=tuple(CONTROL_KINDS))
    num_controls: int = option(
        20, "number of controls of each kind; a claim needs at least 19", type=whole(2, 1000))
    choose_on: int = option(
        0, "number of further forks on which to choose the layer and coefficient with the largest "
           "change of the log-odds; only this condition is reported, on the other forks. 0: every "
           "condition is reported", type=from_zero, metavar="FORKS")


def parse_vectors(options: GroupOptions, policy: Policy
                  ) -> tuple[list[VectorKind], dict[str, SteeringVector]]:
    """Determine the steering vectors of the options.

    Returns:
        Kinds of the vectors, empty for a file or a pair of levels; and the vectors of the file or
        pair by layer, empty if there are kinds.

    Raises:
        UserError: if options are incompatible, a file or level does not exist, or a vector does not
            fit the agent.
    """
    if options.compose:
        if (options.vector != (CHEESE.name,) or options.sources != (OWN,) or options.offsets
                or options.choose_on):
            raise UserError("--compose uses each level's own cheese and top right vectors; leave "
                            "out --vector, --sources, --offsets and --choose_on")
        coefficients = options.coefficients or COMPOSED
        if len(coefficients) != 2:
            raise UserError("--compose takes two --coefficients, of the cheese and of the top "
                            f"right vector, not {len(coefficients)}")
        return [CHEESE, TOP_RIGHT], {}
    first, *others = options.vector
    if first in VECTOR_KINDS and not others:
        return [VECTOR_KINDS[first]], {}
    if options.sources != (OWN,) or options.offsets or OTHERS in options.controls:
        raise UserError("the vector of a file or a pair is the same for all levels; leave out "
                        f"--sources, --offsets and --controls {OTHERS}")
    layers = None if options.layers is None else [
        layer.name for name in options.layers
        for layer in layers_named(policy, ALL if name == EACH else name)]
    if first.endswith(".npz") and not others:
        return [], vectors_of_file(policy, layers, Path(first))
    if len(options.vector) != 2 or any(name in VECTOR_KINDS or name.endswith(".npz")
                                       for name in options.vector):
        raise UserError(f"--vector takes {' or '.join(VECTOR_KINDS)}, one file <name>.npz, or two "
                        f"levels, not {' and '.join(options.vector)}; use --compose for both "
                        "vectors")
    return [], vectors_of_pair(policy, layers or [LAYER], chosen_levels(
        options.vector, options.distribution_mode, options.use_backgrounds))


def make_groups(options: GroupOptions, policy: Policy, kinds: Sequence[VectorKind],
                given: Sequence[str]) -> list[ConditionGroup]:
    """Return the conditions of the options, grouped by layer and source of vectors.

    Args:
        kinds: kinds of the vectors; empty for a file or a pair of levels.
        given: layers of the vectors of a file or a pair.

    Raises:
        UserError: if the agent does not have a layer, or a layer, coefficient or source is
            repeated.
    """
    layers = [named for name in options.layers or given or [LAYER] for named in (
        [ALL] if name == ALL else
        [layer.name for layer in layers_named(policy, ALL if name == EACH else name)])]
    coefficients = options.coefficients or (COMPOSED if options.compose else COEFFICIENTS)
    offsets = [f"{OFFSET}{squares}" for squares in options.offsets]
    sources = [*options.sources, *offsets] if kinds else [FIXED]
    for values in (layers, sources, () if options.compose else coefficients):
        if len(set(values)) < len(values):
            raise UserError(f"one of {' '.join(map(str, values))} is given twice")
    groups = []
    for layer in layers:
        at = f" at {layer}" if len(layers) > 1 else ""
        if options.compose:
            one, other = coefficients
            groups.append(ConditionGroup(
                f"compose_{layer}", layer, tuple(VectorSource(kind, OWN) for kind in kinds),
                (Condition(f"{CHEESE.name}_{layer}", f"cheese {one:+g}{at}", "", value=(one, 0.0)),
                 Condition(f"{TOP_RIGHT.name}_{layer}", f"top right {other:+g}{at}", "",
                           value=(0.0, other)),
                 Condition(f"both_{layer}", f"both{at}", "", value=(one, other))),
                Condition(f"interaction_{layer}", f"interaction{at}", "")))
        else:
            groups += [ConditionGroup(
                f"{source}_{layer}", layer, (VectorSource(kinds[0] if kinds else None, source),),
                tuple(Condition(f"{source}_{layer}_{c:+g}", f"{source} {c:+g}{at}", "",
                                value=(c,)) for c in coefficients)) for source in sources]
    return groups


@dataclasses.dataclass(frozen=True)
class Forks:
    """Levels of a study of steering vectors.

    Attributes:
        reported: forks on which effects are reported, with the mouse at the start.
        choosing: forks on which layer and coefficient are chosen.
        pool: other levels, from which vectors are computed.
        num_left_out: number of selected levels that are not used.
    """

    reported: list[MazeState]
    choosing: list[MazeState]
    pool: list[MazeState]
    num_left_out: int

    @property
    def all(self) -> list[MazeState]:
        """Forks on which effects are measured."""
        return self.reported + self.choosing


def choose_forks(options: GroupOptions, kinds: Sequence[VectorKind],
                 groups: Sequence[ConditionGroup]) -> Forks:
    """Choose the forks on which all vectors can be computed.

    Raises:
        UserError: if --kind excludes forks, or too few levels are suitable forks.
    """
    forks, num_levels = find_forks(options, kinds)
    pool = draw_levels(game_of(forks), {state.level_seed for state in forks}, options.num_sources,
                       options.seed)
    sources = {(source.kind, source.source) for group in groups for source in group.sources
               if source.kind is not None and source.source not in (OWN, MEAN)}
    forks = [state for state in forks if all(
        source_level(kind, source, state, pool, options.seed) for kind, source in sources)]
    end = len(forks) - options.choose_on
    check_starts(len(forks[:end]), "--num_mazes")
    return Forks(forks[:end], forks[end:], pool, num_levels - len(forks))


def find_forks(options: GroupOptions, kinds: Sequence[VectorKind]) -> tuple[list[MazeState], int]:
    """Return the forks with room for the vectors, and the number of levels that were selected.

    The top right vector needs a maze that does not fill the world. Without ``levels``, only
    suitable forks are drawn, those of ``choose_on`` in addition to ``num_mazes``.

    Returns:
        The forks, with the mouse at the start; and the number of levels.

    Raises:
        UserError: see :func:`choose_forks`.
    """
    if options.kind not in (None, FORK):
        raise UserError(f"only a fork has a decision square; leave out --kind '{options.kind}'")
    if options.levels is None:
        size = options.size
        if TOP_RIGHT in kinds and size is None:
            size = (3, WORLD_DIMS[options.distribution_mode] - 2)
        options = dataclasses.replace(options, kind=FORK, size=size,
                                      num_mazes=options.num_mazes + options.choose_on)
    levels = options.choose_levels()
    forks = [state.with_mouse(state.grid.start) for state in levels
             if kind_of(state.grid) == FORK and (state.grid.margin or TOP_RIGHT not in kinds)]
    if not forks:
        raise UserError(f"none of the {len(levels)} levels is a fork with room for the vector")
    return forks, len(levels)
