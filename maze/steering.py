"""Steer an agent on mazes: add vectors to its layers and measure their effects.

Effects at decision squares and over whole fields are compared with those of matched controls. A
killed run resumes after the last finished forks and gives the same numbers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from agents.agent_file import load_agent
from agents.layers import ALL, find_layer, layers_named
from agents.networks import Policy
from agents.provenance import agent_sha256
from common.cli import Parser, count, from_zero, set_up_logging, whole
from common.devices import resolve_compute
from common.errors import UserError, script_main
from common.files import sha256, versions
from common.palette import BLUE, DPI, VERMILION
from common.progress import Progress
from common.results import ResultStore
from interventions.controls import OTHERS, PERMUTED
from interventions.flags import REFERENCE_SIZE
from interventions.vectors import SteeringVector, save_vectors, vectors_of_pairs
from maze.field.fields import reference_frames
from maze.level.flags import add_agent_flags, add_output_flags, check_num_mazes, levels_of
from maze.level.grid import FORK, kind_of
from maze.level.levels import chosen_levels
from maze.level.state import WORLD_DIMS, MazeState, game_of
from maze.studies.steering import (
    CHOOSING,
    CONTROL_KINDS,
    DECISION_OUTCOMES,
    DECISIONS,
    FIELDS,
    STEERING_FILES,
    Arms,
    Experiment,
    Measurements,
    VectorSource,
    compare_arms,
    decisions_table,
    field_outcomes,
    strongest,
)
from maze.studies.vectors import (
    CHEESE,
    FIXED,
    LAYER,
    MEAN,
    OWN,
    SOURCES,
    TOP_RIGHT,
    VECTOR_KINDS,
    VectorKind,
    draw_pool,
    mean_vectors,
    offset_source,
    pair_frames,
    source_level,
    vectors_of_file,
    vectors_of_pair,
)
from stats.bootstrap import ClusterBootstrap
from stats.effects import MIN_STARTS, Condition, Outcome
from stats.forest_plot import plot_effects
from stats.report import Wording, report

EACH = "each"  # value of --layers for every layer separately
COEFFICIENTS = (-1.0, -0.5, 0.5, 1.0, 2.0)
COMPOSED = (-1.0, 1.0)  # coefficients of the cheese and the top right vector
WORDING = Wording("Steering vectors at decision squares", "controls",
                  "vectors that are no better than controls", " of each kind",
                  "How far the layer's output is moved at a picture")
FIELD_WORDING = Wording("Steering vectors over whole fields", WORDING.controls, WORDING.alike,
                        WORDING.equal, WORDING.size)


def parser() -> Parser:
    flags = Parser(__doc__)
    add_agent_flags(flags, "agent to steer", num_mazes=400)
    flags.add_argument("--vector", nargs="+", default=[CHEESE.name], metavar="VECTOR",
                       help="cheese: level with the cheese minus level without it; top_right: "
                            "level with a path to the world's corner minus level without it; a "
                            "file <name>.npz; or two level files or seeds, the first minus the "
                            "second")
    flags.add_argument("--coefficients", nargs="+", type=float, metavar="C",
                       help=f"coefficients of the vectors, an arm each; {_join(COEFFICIENTS)} "
                            f"if not given")
    flags.add_argument("--layers", nargs="+", metavar="LAYER",
                       help=f"layers to add vectors to; {EACH}: every layer separately, {ALL}: all "
                            f"layers at once; {LAYER} if not given, or the layers of the file")
    flags.add_argument("--sources", nargs="+", default=[OWN], choices=SOURCES,
                       help="levels from which vectors are computed: the level itself; another "
                            "level with its cheese, or its maze's corner, at the same square; "
                            "another level with it at another square; the mean over many levels")
    flags.add_argument("--offsets", nargs="+", type=whole(1, max(WORLD_DIMS.values())), default=[],
                       metavar="SQUARES",
                       help="further sources: levels with the cheese, or the maze's corner, offset "
                            "by this many squares, in rows or columns, whichever is larger")
    flags.add_argument("--num_sources", type=count, default=100,
                       help="number of other levels from which vectors are computed")
    flags.add_argument("--compose", action="store_true",
                       help="add the cheese vector, the top right vector, and both, and measure "
                            "their interaction; --coefficients then takes one value per vector, by "
                            f"default {_join(COMPOSED)}")
    flags.add_argument("--controls", nargs="+", default=[PERMUTED], choices=tuple(CONTROL_KINDS),
                       help="; ".join(f"{kind}: {text}" for kind, text in CONTROL_KINDS.items()))
    flags.add_argument("--num_controls", type=whole(2, 1000), default=20,
                       help="number of controls of each kind; a claim needs at least 19")
    flags.add_argument("--choose_on", type=from_zero, default=0, metavar="FORKS",
                       help="number of further forks on which to choose the layer and coefficient "
                            "with the largest change of the log-odds; only these are reported, on "
                            "the other forks. 0: every arm is reported")
    flags.add_argument("--num_fields", type=from_zero, default=20,
                       help="number of forks whose whole fields are also measured; 0: none")
    flags.add_argument("--exact", action="store_true",
                       help="also compute exact probabilities on these fields; needs an agent "
                            "without memory")
    flags.add_argument("--region", type=whole(1, max(WORLD_DIMS.values())), default=5,
                       help="rows of the top right region, for exact probabilities")
    flags.add_argument("--num_vectors", type=from_zero, default=10,
                       help="number of forks whose own vectors are written")
    add_output_flags(flags, "steering")
    return flags


def _join(coefficients: Sequence[float]) -> str:
    return " ".join(f"{c:g}" for c in coefficients)


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    set_up_logging(args.log_level)
    check_num_mazes(args)
    if 0 < args.num_fields < MIN_STARTS:
        raise UserError(f"--num_fields must be 0 or at least {MIN_STARTS}")
    kinds = parse_kinds(args)
    compute = resolve_compute(args.device, args.gpu_device, args.precision)
    policy = load_agent(args.agent_file, compute.device)
    if args.exact and policy.recurrent:
        raise UserError("exact probabilities need an agent without memory: with a GRU the square "
                        "does not decide what it does; leave --exact out")
    fixed = {} if kinds else {"given": load_vectors(args, policy)}
    arms = make_arms(args, policy, kinds, list(fixed.get("given", ())))
    layers = list(dict.fromkeys(layer.name for group in arms
                                for layer in layers_named(policy, group.layer)))
    states, skipped = find_forks(args, kinds)
    env = game_of(states)
    pool = draw_pool(env, {state.level_seed for state in states}, args.num_sources, args.seed)
    states, without_source = with_sources(states, arms, pool, args.seed)
    skipped += without_source
    states, choosing = states[:len(states) - args.choose_on], states[len(states) - args.choose_on:]
    if len(states) < MIN_STARTS:
        raise UserError(f"{len(states)} forks are left, and a comparison needs at least "
                        f"{MIN_STARTS}; ask for more with --num_mazes, or take other --sources")
    if args.dry_run:
        for name, levels in (("forks", states), ("to choose on", choosing)):
            print(f"{name}: {', '.join(str(state.level_seed) for state in levels) or 'none'}")
        print("arms: " + ", ".join(arm.name for group in arms for arm in group.conditions))
        return
    store = ResultStore(args.output_dir, STEERING_FILES)
    files = [path for path in map(Path, args.vector) if path.is_file()]
    store.open({
        "agent_file": args.agent_file.name, "agent_sha256": agent_sha256(args.agent_file),
        "vector": args.vector, "vector_sha256": [sha256(path) for path in files],
        "groups": [[group.name, *(list(arm.value or ()) for arm in group.conditions)]
                   for group in arms],
        "controls": args.controls, "num_controls": args.num_controls, "seed": args.seed,
        "num_sources": args.num_sources, "region": args.region, "exact": args.exact,
        "precision": compute.precision, "levels": [state.level_seed for state in states],
        "choosing": [state.level_seed for state in choosing],
        "levels_sha256": hashlib.sha256(json.dumps(
            [state.grid.to_rows() for state in (*states, *choosing)]).encode()).hexdigest(),
        "versions": versions()}, args.overwrite)
    if MEAN in args.sources:
        fixed |= {VectorSource(kind, MEAN).fixed_name: mean_vectors(policy, layers, kind, pool)
                  for kind in kinds}
    write_vectors(store, policy, layers, kinds, states[:args.num_vectors], fixed)
    reference = reference_frames(env, {state.level_seed for state in (*states, *choosing)},
                                 REFERENCE_SIZE, args.seed)
    std = {name: reference.std(policy, find_layer(policy, name)) for name in layers}

    def experiment(control_kinds: Sequence[str], num_controls: int) -> Experiment:
        return Experiment(policy, compute, pool, fixed, std, control_kinds, num_controls,
                          args.seed, args.region, args.exact)

    what = (f"{len(states)} forks of {env.distribution_mode} mazes, one picture each, with the "
            f"mouse at the decision square; agent {args.agent_file.name}; vector "
            f"{'cheese and top_right' if args.compose else ' '.join(args.vector)}. "
            f"{skipped} levels were left out because they are no forks, or have no room or no "
            "source for a vector.")
    if args.compose:
        what += (" The interaction is the departure of both vectors together from the sum of what "
                 "each does alone.")
    if choosing:
        arms = strongest(arms, measure(store, CHOOSING, experiment((), 0), arms, choosing))
        what += f" Layer and coefficient were chosen on {len(choosing)} other forks."
    else:
        what += " Nothing was chosen: every arm that was run is in the table."

    def compare(measured: Sequence[Measurements], outcomes: Sequence[Outcome]) -> pd.DataFrame:
        return compare_arms(arms, measured, args.controls, args.num_controls, outcomes, args.seed)

    with_controls = experiment(args.controls, args.num_controls)
    outcomes = field_outcomes(kinds[0] if len(kinds) == 1 else None, args.exact)
    chosen = states[:args.num_fields]
    measured = measure(store, DECISIONS, with_controls, arms, states)
    fields = measure(store, FIELDS, with_controls, arms, chosen, outcomes) if chosen else []
    table = compare(measured, DECISION_OUTCOMES)
    store.write("table", value=decisions_table(arms, measured,
                                               [state.level_seed for state in states]))
    reports = [write_effects(store, "", table, DECISION_OUTCOMES, WORDING, what)]
    if fields:
        reports.append(write_effects(
            store, "field_", compare(fields, outcomes), outcomes, FIELD_WORDING,
            f"The fields of {len(chosen)} of these forks. This table is a family of its own in "
            "Holm's correction."))
    single = [(group, result) for group, result in zip(arms, measured) if len(group.sources) == 1]
    if single and len(single[0][0].conditions) > 1:
        with store.file("curves") as temporary:
            plot_coefficients(temporary, single, what.partition(". ")[0], args.seed)
    store.write("report", value="\n".join(reports))
    print("\n".join(summary(table, arms)))
    print(f"wrote {store.file_of('report')}, from {len(states)} forks; {skipped} levels left out")


def parse_kinds(args: argparse.Namespace) -> list[VectorKind]:
    """Return the kinds of the vectors; empty for a file or a pair.

    Raises:
        UserError: if flags are incompatible.
    """
    known = [VECTOR_KINDS[name] for name in args.vector if name in VECTOR_KINDS]
    if args.compose:
        if args.vector != [CHEESE.name] or args.sources != [OWN] or args.offsets or args.choose_on:
            raise UserError("--compose is of the own cheese and top right vectors of the levels; "
                            "leave out --vector, --sources, --offsets and --choose_on")
        if len(args.coefficients or COMPOSED) != 2:
            raise UserError("--compose takes two --coefficients, of the cheese and of the top "
                            f"right vector, not {len(args.coefficients)}")
        return [CHEESE, TOP_RIGHT]
    if known and len(args.vector) > 1:
        raise UserError(f"--vector takes {' or '.join(VECTOR_KINDS)}, a file, or two levels, not "
                        f"{' and '.join(args.vector)}; use --compose for both vectors")
    if not known and (args.sources != [OWN] or args.offsets or OTHERS in args.controls):
        raise UserError("the vector of a file or a pair is the same for all levels; leave out "
                        f"--sources, --offsets and --controls {OTHERS}")
    return known


def expand_layers(policy: Policy, names: Sequence[str], at_once: bool = False) -> list[str]:
    """Return the names of layers, with EACH replaced by every layer.

    Args:
        names: names of layers, EACH or ALL.
        at_once: whether to keep ALL, for all layers at once, instead of expanding it.

    Raises:
        UserError: if the agent does not have a layer.
    """
    return [expanded for name in names for expanded in (
        [ALL] if at_once and name == ALL else
        [layer.name for layer in layers_named(policy, ALL if name == EACH else name)])]


def load_vectors(args: argparse.Namespace, policy: Policy) -> dict[str, SteeringVector]:
    """Return the vectors of a file or a pair by layer.

    Raises:
        UserError: if the file or pair does not exist, or does not fit the agent.
    """
    layers = None if args.layers is None else expand_layers(policy, args.layers)
    if len(args.vector) == 1 and args.vector[0].endswith(".npz"):
        return vectors_of_file(policy, layers, Path(args.vector[0]))
    if len(args.vector) == 1 or any(name.endswith(".npz") for name in args.vector):
        raise UserError(f"--vector takes {', '.join(VECTOR_KINDS)}, one file <name>.npz, or two "
                        f"levels, not {' and '.join(args.vector)}")
    return vectors_of_pair(policy, layers or [LAYER], chosen_levels(
        args.vector, args.distribution_mode, args.use_backgrounds))


def make_arms(args: argparse.Namespace, policy: Policy, kinds: Sequence[VectorKind],
              given: Sequence[str]) -> list[Arms]:
    """Return the arms selected by the flags.

    Args:
        kinds: kinds of the vectors; empty for a file or a pair.
        given: layers of the vectors of a file or a pair.

    Raises:
        UserError: if the agent does not have a layer, or a layer, coefficient or source is
            repeated.
    """
    layers = expand_layers(policy, args.layers or given or [LAYER], at_once=True)
    coefficients: list[float] = args.coefficients or list(COMPOSED if args.compose
                                                          else COEFFICIENTS)
    sources = [FIXED] if not kinds else [*args.sources, *map(offset_source, args.offsets)]
    asked_for: tuple[list, ...] = layers, coefficients, sources
    for values in asked_for:
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None and not args.compose:
            raise UserError(f"{twice} is asked for twice")
    arms = []
    for layer in layers:
        at = f" at {layer}" if len(layers) > 1 else ""

        def condition(name: str, label: str, *values: float, layer=layer, at=at) -> Condition:
            return Condition(name.format(layer), label + at, "", value=values)

        if args.compose:
            one, other = coefficients
            arms.append(Arms(
                f"compose_{layer}", layer, tuple(VectorSource(kind, OWN) for kind in kinds),
                (condition(f"{CHEESE.name}_{{}}", f"cheese {one:+g}", one, 0.0),
                 condition(f"{TOP_RIGHT.name}_{{}}", f"top right {other:+g}", 0.0, other),
                 condition("both_{}", "both", one, other)),
                condition("interaction_{}", "interaction")))
            continue
        arms += [Arms(f"{source}_{layer}", layer,
                      (VectorSource(kinds[0] if kinds else None, source),),
                      tuple(condition(f"{source}_{{}}_{c:+g}", f"{source} {c:+g}", c)
                            for c in coefficients)) for source in sources]
    return arms


def find_forks(args: argparse.Namespace, kinds: Sequence[VectorKind]
               ) -> tuple[list[MazeState], int]:
    """Return forks with room for the vectors, mouse at the start, and the number of other levels.

    Raises:
        UserError: if --kind excludes forks, or too few levels are found.
    """
    if args.kind not in (None, FORK):
        raise UserError(f"only a fork has a decision square; leave out --kind '{args.kind}'")
    if args.levels is None:
        args.kind, args.num_mazes = FORK, args.num_mazes + args.choose_on
        if TOP_RIGHT in kinds and args.size is None:
            args.size = (3, WORLD_DIMS[args.distribution_mode] - 2)
    levels = levels_of(args)
    room = 1 if TOP_RIGHT in kinds else 0
    forks = [state.with_mouse(state.grid.start) for state in levels
             if kind_of(state.grid) == FORK and state.grid.margin >= room]
    if not forks:
        raise UserError(f"none of the {len(levels)} levels is a fork"
                        + " with room for a path to the world's corner" * room)
    return forks, len(levels) - len(forks)


def with_sources(states: Sequence[MazeState], arms: Sequence[Arms], pool: Sequence[MazeState],
                 seed: int) -> tuple[list[MazeState], int]:
    """Return the levels for which every source has a level, and the number of other levels."""
    sources = {(source.kind, source.source) for group in arms for source in group.sources
               if source.source not in (OWN, MEAN, FIXED)}
    kept = [state for state in states if all(
        source_level(kind, source, state, pool, seed) is not None
        for kind, source in sources if kind is not None)]
    return kept, len(states) - len(kept)


def write_vectors(store: ResultStore, policy: Policy, layers: Sequence[str],
                  kinds: Sequence[VectorKind], states: Sequence[MazeState],
                  fixed: Mapping[str, Mapping[str, SteeringVector]]) -> None:
    """Write the own vectors of some forks, and the vectors shared by all levels."""
    vectors = {f"{kind.name}_{state.level_seed}": vectors_of_pairs(
        policy, layers, *pair_frames([kind.pair(state)]),
        np.array([(state.level_seed, state.level_seed)]), kind.name, [state.distribution_mode])
        for kind in kinds for state in states}
    for name, by_layer in {**vectors, **fixed}.items():
        save_vectors(store.file_of("vectors", name), list(by_layer.values()))


def measure(store: ResultStore, entry: str, experiment: Experiment, arms: Sequence[Arms],
            states: Sequence[MazeState], outcomes: Sequence[Outcome] = ()) -> list[Measurements]:
    """Return the measurements of all arms on forks; missing ones are computed and written.

    Args:
        entry: entry of the schema: DECISIONS, FIELDS or CHOOSING.
        outcomes: outcomes of fields; empty to measure at decision squares.
    """
    measured = []
    with Progress(len(arms) * len(states), "fork") as progress:
        for group in arms:
            parts, number = [], 1 if outcomes else experiment.max_forks(group)
            for begin in range(0, len(states), number):
                some = states[begin:begin + number]

                def compute(group=group, some=some) -> dict[str, np.ndarray]:
                    return vars(experiment.over_field(group, some[0], outcomes) if outcomes
                                else experiment.at_decision_squares(group, some))

                parts.append(Measurements(**store.compute(entry, group.name, f"{begin:05d}",
                                                          function=compute)))
                progress.update(progress.done + len(some))
            measured.append(Measurements.concatenate(parts))
    return measured


def write_effects(store: ResultStore, prefix: str, table: pd.DataFrame,
                  outcomes: Sequence[Outcome], wording: Wording, what: str) -> str:
    """Write table and figure of effects, and return their section of the report.

    Args:
        prefix: prefix of the entries of the schema.
        table: effects, from ``compare_arms``.
        outcomes: outcomes in the table.
        wording: terms for figure and report.
        what: sentences that describe the run.
    """
    store.write(f"{prefix}effects", value=table)
    with store.file(f"{prefix}figure") as temporary:
        plot_effects(temporary, table, outcomes, f"{wording.title}\n{what.partition('. ')[0]}",
                     wording.controls)
    kinds = [text for kind, text in CONTROL_KINDS.items() if f"p_{kind}" in table]
    return report(table, outcomes, wording, f"{what} Controls: {', and '.join(kinds)}. An arm is "
                  "compared with each kind by itself, and p (controls) is the largest of them.")


def summary(table: pd.DataFrame, arms: Sequence[Arms]) -> list[str]:
    """Return a sentence per arm with medians at decision squares, or means for contrasts."""
    lines, contrasts = [], {group.contrast.name for group in arms if group.contrast}
    for arm, rows in table[~table["control"]].groupby("arm", sort=False):
        rows = rows.set_index("outcome")
        parts = [f"{label} " + (f"{rows['effect'][name]:+.3f}" if arm in contrasts else
                                f"{rows['median_unaltered'][name]:.3f} to "
                                f"{rows['median_altered'][name]:.3f}")
                 + " (claimed)" * bool(rows["claimed"][name])
                 for name, label in (("p_cheese", "P(cheese)"), ("p_corner", "P(corner)"),
                                     ("p_other", "P(other)"))]
        which = "means" if arm in contrasts else "medians"
        lines.append(f"{rows['label'].iloc[0]}: {which}: {', '.join(parts)}; mean log-odds "
                     f"{rows['effect']['log_odds']:+.3g} ({rows['low_95']['log_odds']:.3g} to "
                     f"{rows['high_95']['log_odds']:.3g})")
    return lines


def plot_coefficients(path: Path, measured: Sequence[tuple[Arms, Measurements]], title: str,
                      seed: int) -> None:
    """Draw P(cheese), P(corner) and P(other) against the coefficient, a row of panels per arms.

    The curves are means with 95 % intervals over forks and medians; the shaded area is the range of
    the controls' means.
    """
    shown = [outcome for outcome in DECISION_OUTCOMES if outcome.name.startswith("p_")]
    figure = Figure(figsize=(4 * len(shown), 2.6 * len(measured) + 0.8), layout="constrained")
    panels = figure.subplots(len(measured), len(shown), squeeze=False, sharex=True, sharey=True)
    bootstrap = ClusterBootstrap(np.arange(len(measured[0][1].before)), seed)
    for row, (group, result) in zip(panels, measured):
        x = np.array([0.0, *((arm.value or ())[0] for arm in group.conditions)])
        order = np.argsort(x)
        for axes, outcome in zip(row, shown):
            place = DECISION_OUTCOMES.index(outcome)
            after = result.after[..., place]  # (D, A, N)
            before = np.broadcast_to(result.before[:, place], (len(after), 1, after.shape[2]))
            values = np.concatenate([before, after], axis=1)[:, order]
            low, high = bootstrap.interval(values[0])
            means = values.mean(axis=2)
            axes.fill_between(x[order], means[1:].min(axis=0), means[1:].max(axis=0),
                              color="#DDDDDD", label=f"range of {len(means) - 1} controls' means")
            axes.errorbar(x[order], means[0], yerr=np.abs([low, high] - means[0]), color=BLUE,
                          marker="o", markersize=4, capsize=2, label="mean, 95 %")
            axes.plot(x[order], np.median(values[0], axis=1), "D--", color=VERMILION, markersize=4,
                      linewidth=0.8, label="median")
            axes.set_title(f"{group.name}\n{outcome.label}", fontsize=8)
            axes.set_ylim(-0.02, 1.02)
            axes.grid(alpha=0.3)
    for axes in panels[-1]:
        axes.set_xlabel("coefficient", fontsize=9)
    panels[0, 0].legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=DPI)


if __name__ == "__main__":
    raise SystemExit(main())
