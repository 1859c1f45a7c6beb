"""Steer an agent on mazes: add vectors at its layers, and count what they change at decision
squares and over whole fields, beside matched controls.

A killed run goes on after the last forks it finished, to the same numbers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from agents.agent_file import load_agent
from agents.layers import ALL, find_layer, layers_named
from agents.networks import Policy
from agents.provenance import agent_sha256
from common.cli import (
    Parser,
    count,
    from_zero,
    set_up_logging,
    whole,
)
from common.devices import resolve_compute
from common.errors import UserError, script_main
from common.files import sha256, versions
from common.progress import Progress
from common.results import ResultStore
from interventions.controls import OTHERS, PERMUTED
from interventions.flags import REFERENCE_SIZE
from interventions.vectors import save_vectors, vectors_of_pairs
from maze.field.fields import reference_frames
from maze.level.flags import add_agent_flags, add_output_flags, check_num_mazes, levels_of
from maze.level.grid import FORK, kind_of
from maze.level.levels import chosen_levels
from maze.level.state import WORLD_DIMS, MazeState, game_of
from maze.studies.results import CHOOSING_OF, DECISIONS_OF, FIELDS_OF, STEERING_FILES
from maze.studies.steering import (
    DECISIONS,
    Group,
    Measured,
    Study,
    Term,
    field_outcomes,
)
from maze.studies.steering_tables import (
    FIELD_WORDING,
    KINDS,
    WORDING,
    decisions_table,
    effects,
    plot_coefficients,
    strongest,
    summary,
    write_report,
)
from maze.studies.vectors import (
    CHEESE,
    FIXED,
    LAYER,
    MEAN,
    OWN,
    SOURCES,
    THINGS,
    TOP_RIGHT,
    Thing,
    mean_vectors,
    offset_source,
    pairs_of_pictures,
    pool_of,
    source_level,
    vectors_of_file,
    vectors_of_pair,
)
from stats.effects import MIN_STARTS, Outcome
from stats.forest_plot import plot_effects

EACH = "each"  # as a layer: every one of them, one after the other
COEFFICIENTS = (-1.0, -0.5, 0.5, 1.0, 2.0)
COMPOSED = (-1.0, 1.0)  # coefficients of the cheese and the top right vector


def parser() -> Parser:
    flags = Parser(__doc__)
    add_agent_flags(flags, "agent to steer", num_mazes=400)
    flags.add_argument("--vector", nargs="+", default=[CHEESE.name], metavar="VECTOR",
                       help="cheese: levels with minus without it; top_right: with a path to the "
                            "world's corner minus without; a file <name>.npz; or a pair: two level "
                            "files or seeds, the first minus the second")
    flags.add_argument("--coefficients", nargs="+", type=float, metavar="C",
                       help=f"that vectors are added with, an arm each; {_numbers(COEFFICIENTS)} "
                            f"if not given")
    flags.add_argument("--layers", nargs="+", metavar="LAYER",
                       help=f"where; {EACH}: every layer by itself, {ALL}: all layers at once; "
                            f"{LAYER} if not given, or those of the file")
    flags.add_argument("--sources", nargs="+", default=[OWN], choices=SOURCES,
                       help="levels that the vectors come from: the level itself; another one "
                            "where the cheese, or the maze's corner, is at the same square; one "
                            "where it is elsewhere; the mean of many")
    flags.add_argument("--offsets", nargs="+", type=whole(1, max(WORLD_DIMS.values())), default=[],
                       metavar="SQUARES",
                       help="further sources: levels where it is so many squares off, in rows or "
                            "columns, whichever are more")
    flags.add_argument("--num_sources", type=count, default=100,
                       help="other levels that vectors are made of")
    flags.add_argument("--compose", action="store_true",
                       help="the cheese vector, the top right vector, both, and their interaction; "
                            "--coefficients are then one of each, by default "
                            f"{_numbers(COMPOSED)}")
    flags.add_argument("--controls", nargs="+", default=[PERMUTED], choices=tuple(KINDS),
                       help="; ".join(f"{kind}: {text}" for kind, text in KINDS.items()))
    flags.add_argument("--num_controls", type=whole(2, 1000), default=20,
                       help="of each kind; fewer than 19 cannot support a claim")
    flags.add_argument("--choose_on", type=from_zero, default=0, metavar="FORKS",
                       help="further forks on which the layer and the coefficient that change the "
                            "log-odds most are chosen; only these are then reported, on the "
                            "others. 0: every arm is reported")
    flags.add_argument("--num_fields", type=from_zero, default=20,
                       help="forks whose whole fields are measured, too; 0: none")
    flags.add_argument("--exact", action="store_true",
                       help="of these also exact probabilities, of agents without memory")
    flags.add_argument("--region", type=whole(1, max(WORLD_DIMS.values())), default=5,
                       help="rows of the top right region, for exact probabilities")
    flags.add_argument("--num_vectors", type=from_zero, default=10,
                       help="forks whose own vectors are written")
    add_output_flags(flags, "steering")
    return flags


def _numbers(coefficients: Sequence[float]) -> str:
    return " ".join(f"{each:g}" for each in coefficients)


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    set_up_logging(args.log_level)
    check_num_mazes(args)
    if 0 < args.num_fields < MIN_STARTS:
        raise UserError(f"--num_fields must be 0 or at least {MIN_STARTS}")
    things = things_of(args)
    compute = resolve_compute(args.device, args.gpu_device, args.precision)
    policy = load_agent(args.agent_file, compute.device)
    if args.exact and policy.recurrent:
        raise UserError("exact probabilities need an agent without memory: with a GRU the square "
                        "does not decide what it does; leave --exact out")
    given = {} if things else {None: given_vectors(args, policy)}
    groups = groups_of(args, policy, things, list(given.get(None, ())))
    states, skipped = forks_of(args, things)
    env = game_of(states)
    pool = pool_of(env, {state.level_seed for state in states}, args.num_sources, args.seed)
    states, without_source = with_sources(states, groups, pool, args.seed)
    skipped += without_source
    states, choosing = states[:len(states) - args.choose_on], states[len(states) - args.choose_on:]
    check_numbers(args, states)
    if args.dry_run:
        for name, some in (("forks", states), ("to choose on", choosing)):
            print(f"{name}: {', '.join(str(state.level_seed) for state in some) or 'none'}")
        print(f"arms: {', '.join(arm for group in groups for arm in group.arms)}")
        return
    store = ResultStore(args.output_dir, STEERING_FILES)
    store.open(description(args, groups, states, choosing, compute.precision), args.overwrite)
    fixed = {**given, **{thing.name: mean_vectors(policy, layers_in(policy, groups), thing, pool)
                         for thing in things if MEAN in args.sources}}
    save_all_vectors(args, store, policy, groups, things, states, fixed)
    reference = reference_frames(env, {state.level_seed for state in (*states, *choosing)},
                                   REFERENCE_SIZE, args.seed)
    std = {name: reference.std(policy, find_layer(policy, name))
           for name in layers_in(policy, groups)}
    study = Study(policy, compute, pool, fixed, std, args.controls, args.num_controls, args.seed,
                  args.region, args.exact)
    what = (f"{len(states)} forks of {env.distribution_mode} mazes, one picture each, with the "
            f"mouse at the decision square; agent {args.agent_file.name}; vector "
            f"{'cheese and top_right' if args.compose else ' '.join(args.vector)}. "
            f"{skipped} levels were left out because they are no forks, or have no room or no "
            "source for a vector.")
    if args.compose:
        what += (" The interaction is the departure of both vectors together from the sum of what "
                 "each does alone.")
    if choosing:
        alone = Study(policy, compute, pool, fixed, std, (), 0, args.seed, args.region, args.exact)
        groups = strongest(groups, measured(store, CHOOSING_OF, alone, groups,
                                            choosing))
        what += f" Layer and coefficient were chosen on {len(choosing)} other forks."
    else:
        what += " Nothing was chosen: every arm that was run is in the table."
    found = measured(store, DECISIONS_OF, study, groups, states)
    table = effects(groups, found, args.controls, args.num_controls, DECISIONS, args.seed)
    parts = [(table, DECISIONS, WORDING, what)]
    if args.num_fields:
        wanted = field_outcomes(things[0] if len(things) == 1 else None, args.exact)
        some = states[:args.num_fields]
        of_fields = measured(store, FIELDS_OF, study, groups, some, wanted)
        parts.append((effects(groups, of_fields, args.controls, args.num_controls, wanted,
                              args.seed), wanted, FIELD_WORDING,
                      f"The fields of {len(some)} of these forks. This table is a family of its "
                      "own in Holm's correction."))
    write_results(store, groups, found, parts, states, args.seed)
    print("\n".join(summary(table, groups)))
    print(f"wrote {store.file_of('report')}, from {len(states)} forks; {skipped} levels left out")


def things_of(args: argparse.Namespace) -> list[Thing]:
    """The things that the vectors are about; none for a file or a pair.

    Raises:
        UserError: if flags exclude each other.
    """
    known = [THINGS[name] for name in args.vector if name in THINGS]
    if args.compose:
        if args.vector != [CHEESE.name] or args.sources != [OWN] or args.offsets or args.choose_on:
            raise UserError("--compose is of the own cheese and top right vectors of the levels; "
                            "leave out --vector, --sources, --offsets and --choose_on")
        if len(args.coefficients or COMPOSED) != 2:
            raise UserError("--compose takes two --coefficients, of the cheese and of the top "
                            f"right vector, not {len(args.coefficients)}")
        return [CHEESE, TOP_RIGHT]
    if known and len(args.vector) > 1:
        raise UserError(f"--vector takes {' or '.join(THINGS)}, a file, or two levels, not "
                        f"{' and '.join(args.vector)}; use --compose for both vectors")
    if not known and (args.sources != [OWN] or args.offsets or OTHERS in args.controls):
        raise UserError("the vector of a file or a pair is the same for all levels; leave out "
                        f"--sources, --offsets and --controls {OTHERS}")
    return known


def given_vectors(args: argparse.Namespace, policy: Policy) -> dict:
    """The vectors of a file or a pair, by layer.

    Raises:
        UserError: if there is no such file or pair, or it does not fit the agent.
    """
    layers = None if args.layers is None else [
        layer.name for name in args.layers
        for layer in layers_named(policy, ALL if name == EACH else name)]
    if len(args.vector) == 1 and args.vector[0].endswith(".npz"):
        return vectors_of_file(policy, layers, Path(args.vector[0]))
    if len(args.vector) == 1 or any(name.endswith(".npz") for name in args.vector):
        raise UserError(f"--vector takes {', '.join(THINGS)}, one file <name>.npz, or two levels, "
                        f"not {' and '.join(args.vector)}")
    return vectors_of_pair(policy, layers or [LAYER], chosen_levels(
        args.vector, args.distribution_mode, args.use_backgrounds))


def groups_of(args: argparse.Namespace, policy: Policy, things: Sequence[Thing],
              of_file: Sequence[str]) -> list[Group]:
    """The arms that are asked for.

    Args:
        of_file: layers of the vectors that were given.

    Raises:
        UserError: if the agent has no such layer, or something is asked for twice.
    """
    names = []
    for name in args.layers or of_file or [LAYER]:
        names += ([ALL] if name == ALL else
                  [layer.name for layer in layers_named(policy, ALL if name == EACH else name)])
    coefficients = args.coefficients or (COMPOSED if args.compose else COEFFICIENTS)
    sources = [FIXED] if not things else [*args.sources, *map(offset_source, args.offsets)]
    for each in (names, list(coefficients), sources):
        twice = next((value for value in each if each.count(value) > 1), None)
        if twice is not None and not args.compose:
            raise UserError(f"{twice} is asked for twice")
    groups = []
    for layer in names:
        at = f" at {layer}" if len(names) > 1 else ""
        if args.compose:
            one, other = coefficients
            groups.append(Group(
                f"compose_{layer}", layer, tuple(Term(thing, OWN) for thing in things),
                tuple(f"{name}_{layer}" for name in (CHEESE.name, TOP_RIGHT.name, "both")),
                (f"cheese {one:+g}{at}", f"top right {other:+g}{at}", f"both{at}"),
                ((one, 0.0), (0.0, other), (one, other)),
                (f"interaction_{layer}", f"interaction{at}")))
            continue
        for source in sources:
            groups.append(Group(
                f"{source}_{layer}", layer, (Term(things[0] if things else None, source),),
                tuple(f"{source}_{layer}_{c:+g}" for c in coefficients),
                tuple(f"{source} {c:+g}{at}" for c in coefficients),
                tuple((c,) for c in coefficients)))
    return groups


def forks_of(args: argparse.Namespace, things: Sequence[Thing]) -> tuple[list[MazeState], int]:
    """Forks that can have the things, the mouse at the start, and how many levels are none.

    Raises:
        UserError: if other levels are asked for, or too few are found.
    """
    if args.kind not in (None, FORK):
        raise UserError(f"only a fork has a decision square; leave out --kind '{args.kind}'")
    if args.levels is None:
        args.kind, args.num_mazes = FORK, args.num_mazes + args.choose_on
        if TOP_RIGHT in things and args.size is None:
            args.size = (3, WORLD_DIMS[args.distribution_mode] - 2)
    asked = levels_of(args)
    room = 1 if TOP_RIGHT in things else 0
    found = [state.with_mouse(state.grid.start) for state in asked
             if kind_of(state.grid) == FORK and state.grid.margin >= room]
    if not found:
        raise UserError(f"none of the {len(asked)} levels is a fork"
                        + " with room for a path to the world's corner" * room)
    return found, len(asked) - len(found)


def with_sources(states: Sequence[MazeState], groups: Sequence[Group], pool: Sequence[MazeState],
                 seed: int) -> tuple[list[MazeState], int]:
    """The levels for which every source has a level, and how many have none."""
    terms = {term for group in groups for term in group.terms
             if term.source not in (OWN, MEAN, FIXED)}
    kept = [state for state in states if all(
        source_level(term.thing, term.source, state, pool, seed) is not None for term in terms)]
    return kept, len(states) - len(kept)


def check_numbers(args: argparse.Namespace, states: Sequence[MazeState]) -> None:
    """See that there are enough forks.

    Raises:
        UserError: if there are not.
    """
    if len(states) < MIN_STARTS:
        raise UserError(f"{len(states)} forks are left, and a comparison needs at least "
                        f"{MIN_STARTS}; ask for more with --num_mazes, or take other --sources")


def description(args: argparse.Namespace, groups: Sequence[Group], states: Sequence[MazeState],
                choosing: Sequence[MazeState], precision: str) -> dict:
    """Description of the run, for settings.json."""
    files = [path for path in map(Path, args.vector) if path.is_file()]
    return {"agent_file": args.agent_file.name, "agent_sha256": agent_sha256(args.agent_file),
            "vector": args.vector, "vector_sha256": [sha256(path) for path in files],
            "groups": [[group.name, *map(list, group.coefficients)] for group in groups],
            "controls": args.controls, "num_controls": args.num_controls, "seed": args.seed,
            "num_sources": args.num_sources, "region": args.region, "exact": args.exact,
            "precision": precision, "levels": [state.level_seed for state in states],
            "choosing": [state.level_seed for state in choosing],
            "levels_sha256": hashlib.sha256(json.dumps(
                [state.grid.to_rows() for state in (*states, *choosing)]).encode()).hexdigest(),
            "versions": versions()}


def layers_in(policy: Policy, groups: Sequence[Group]) -> list[str]:
    """Names of all layers that vectors are added at."""
    return list(dict.fromkeys(layer.name for group in groups
                              for layer in layers_named(policy, group.layer)))


def save_all_vectors(args: argparse.Namespace, store: ResultStore, policy: Policy,
                     groups: Sequence[Group], things: Sequence[Thing],
                     states: Sequence[MazeState], fixed: dict) -> None:
    """Write the own vectors of the first forks, and those that all levels share."""
    layers = layers_in(policy, groups)
    for thing in things:
        for state in states[:args.num_vectors]:
            vectors = vectors_of_pairs(
                policy, layers, *pairs_of_pictures([thing.pair(state)]),
                [(state.level_seed, state.level_seed)], thing.name, [state.distribution_mode])
            save_vectors(store.file_of("vectors", f"{thing.name}_{state.level_seed}"),
                         list(vectors.values()))
    for name, vectors in fixed.items():
        save_vectors(store.file_of("vectors", f"{name}_mean" if name else "given"),
                     list(vectors.values()))


def measured(store: ResultStore, what: str, study: Study, groups: Sequence[Group],
             states: Sequence[MazeState], fields: Sequence[Outcome] = ()) -> list[Measured]:
    """Outcomes of the groups on forks, those that the folder lacks being computed.

    Args:
        what: where they are.
        fields: outcomes of fields; none for those of decision squares.
    """
    found = []
    with Progress(len(groups) * len(states), "fork") as progress:
        for group in groups:
            parts, at_a_time = [], 1 if fields else study.at_a_time(group)
            for begin in range(0, len(states), at_a_time):
                some = states[begin:begin + at_a_time]
                parts.append(Measured(**store.compute(
                    what, group.name, f"{begin:05d}",
                    function=lambda group=group, some=some: vars(
                        study.over_field(group, some[0], fields) if fields
                        else study.at_decision_squares(group, some)))))
                progress.update(progress.done + len(some))
            found.append(Measured.joined(parts))
    return found


def write_results(store: ResultStore, groups: Sequence[Group], found: Sequence[Measured],
                  parts: Sequence[tuple], states: Sequence[MazeState], seed: int) -> None:
    """Write tables, report and figures."""
    store.write("table", value=decisions_table(
        groups, found, [state.level_seed for state in states]))
    for (table, outcomes, wording, what), prefix in zip(parts, ("", "field_")):
        store.write(f"{prefix}effects", value=table)
        with store.file(f"{prefix}figure") as temporary:
            plot_effects(temporary, table, outcomes,
                         f"{wording.title}\n{what.partition('. ')[0]}", wording.controls)
    plain = [(group, each) for group, each in zip(groups, found) if len(group.terms) == 1]
    if plain and len(plain[0][0].coefficients) > 1:
        with store.file("curves") as temporary:
            plot_coefficients(temporary, *zip(*plain), parts[0][3].partition(". ")[0], seed)
    with store.file("report") as temporary:
        write_report(temporary, parts, [kind for kind in KINDS if f"p_{kind}" in parts[0][0]])


if __name__ == "__main__":
    raise SystemExit(main())
