"""Steer an agent on mazes: add vectors to its layers and measure their effects.

Effects at decision squares and over whole fields are compared with those of matched controls. A
killed run resumes after the last finished forks and gives the same results as an uninterrupted run.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from agents.layers import ALL, find_layer, layers_named
from agents.networks import Policy
from common.cli import Parser, count, from_zero, whole
from common.errors import UserError, script_main
from common.files import sha256
from common.palette import BLUE, DPI, VERMILION
from common.progress import Progress
from common.results import ResultStore
from interventions.controls import OTHERS, PERMUTED
from interventions.flags import REFERENCE_SIZE
from interventions.vectors import SteeringVector, save_vectors
from maze.field.fields import reference_frames
from maze.level.flags import add_agent_flags, add_output_flags, levels_of, open_store, start
from maze.level.grid import FORK, kind_of
from maze.level.levels import chosen_levels, draw_levels
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
    OFFSET,
    OWN,
    SOURCES,
    TOP_RIGHT,
    VECTOR_KINDS,
    VectorKind,
    mean_vectors,
    source_level,
    vectors_of_file,
    vectors_of_pair,
)
from stats.bootstrap import ClusterBootstrap
from stats.effects import Condition, Outcome, check_starts, claims_summary
from stats.forest_plot import plot_effects
from stats.report import Wording, report

EACH = "each"  # value of --layers for every layer separately
COEFFICIENTS = (-1.0, -0.5, 0.5, 1.0, 2.0)
COMPOSED = (-1.0, 1.0)  # coefficients of the cheese and the top right vector
WORDING = Wording("Steering vectors at decision squares", "controls",
                  "vectors that are no better than controls", " of each kind",
                  "Size of the change of the layer's output in a frame")
FIELD_WORDING = dataclasses.replace(WORDING, title="Steering vectors over whole fields")


def parser() -> Parser:
    flags = Parser(__doc__)
    add_agent_flags(flags, "agent to steer", num_mazes=400)
    flags.add_argument("--vector", nargs="+", default=[CHEESE.name], metavar="VECTOR",
                       help="cheese: activations with the cheese minus activations without it; "
                            "top_right: activations with a path to the world's corner minus "
                            "activations without it; a file <name>.npz; or two level files or "
                            "seeds: activations in the first minus activations in the second")
    flags.add_argument("--coefficients", nargs="+", type=float, metavar="C",
                       help=f"coefficients of the vectors, one arm each; {COEFFICIENTS} "
                            f"if not given")
    flags.add_argument("--layers", nargs="+", metavar="LAYER",
                       help=f"layers to add vectors to; {EACH}: every layer separately, {ALL}: all "
                            f"layers at once; {LAYER} if not given, or the layers of the file")
    flags.add_argument("--sources", nargs="+", default=[OWN], choices=SOURCES,
                       help="levels from which vectors are computed. own: the level itself; "
                            "same_square: another level whose cheese (for top_right: whose maze's "
                            "corner) is at the same square; other: another level whose cheese or "
                            "corner is at another square; mean: the mean over many levels")
    flags.add_argument("--offsets", nargs="+", type=whole(1, max(WORLD_DIMS.values())), default=[],
                       metavar="SQUARES",
                       help="further sources: levels whose cheese, or maze's corner, is this many "
                            "squares away in rows or in columns, whichever distance is larger")
    flags.add_argument("--num_sources", type=count, default=100,
                       help="number of other levels from which source levels are drawn, and over "
                            "which the mean is taken")
    flags.add_argument("--compose", action="store_true",
                       help="add the cheese vector, the top right vector, and both, and measure "
                            "their interaction; --coefficients then takes one value per vector, by "
                            f"default {COMPOSED}")
    flags.add_argument("--controls", nargs="+", default=[PERMUTED], choices=tuple(CONTROL_KINDS),
                       help="; ".join(f"{kind}: {text}" for kind, text in CONTROL_KINDS.items()))
    flags.add_argument("--num_controls", type=whole(2, 1000), default=20,
                       help="number of controls of each kind; a claim needs at least 19")
    flags.add_argument("--choose_on", type=from_zero, default=0, metavar="FORKS",
                       help="number of further forks on which to choose the layer and coefficient "
                            "with the largest change of the log-odds; only this arm is reported, "
                            "on the other forks. 0: every arm is reported")
    flags.add_argument("--num_fields", type=from_zero, default=20,
                       help="number of forks whose whole fields are also measured; 0: none")
    flags.add_argument("--exact", action="store_true",
                       help="also compute exact probabilities on these fields; needs an agent "
                            "without memory")
    flags.add_argument("--region", type=whole(1, max(WORLD_DIMS.values())), default=5,
                       help="number of rows and columns of the top right region, for exact "
                            "probabilities")
    flags.add_argument("--num_vectors", type=from_zero, default=10,
                       help="number of forks whose own vectors are written")
    add_output_flags(flags, "steering")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, compute, policy = start(parser(), argv)
    if args.num_fields:
        check_starts(args.num_fields, "--num_fields")
    kinds, fixed = parse_vectors(args, policy)
    arms = make_arms(args, policy, kinds, list(fixed.get("given", ())))
    layers = list(dict.fromkeys(layer.name for group in arms
                                for layer in layers_named(policy, group.layer)))
    forks, num_levels = find_forks(args, kinds)
    env = game_of(forks)
    pool = draw_levels(env, {state.level_seed for state in forks}, args.num_sources, args.seed)
    sources = {(source.kind, source.source) for group in arms for source in group.sources
               if source.kind is not None and source.source not in (OWN, MEAN)}
    forks = [state for state in forks if all(
        source_level(kind, source, state, pool, args.seed) for kind, source in sources)]
    states, choosing = forks[:len(forks) - args.choose_on], forks[len(forks) - args.choose_on:]
    check_starts(len(states), "--num_mazes")
    if args.dry_run:
        print("forks:", *(state.level_seed for state in states), "\nto choose on:",
              *(state.level_seed for state in choosing), "\narms:",
              *(arm.name for group in arms for arm in group.conditions))
        return
    store = open_store(STEERING_FILES, args, compute, {
        "vector": args.vector,
        "vector_sha256": [sha256(path) for path in map(Path, args.vector) if path.is_file()],
        "groups": [[group.name, *(list(arm.value or ()) for arm in group.conditions)]
                   for group in arms],
        "controls": args.controls, "num_controls": args.num_controls, "seed": args.seed,
        "num_sources": args.num_sources, "region": args.region, "exact": args.exact,
        "levels": [state.level_seed for state in states],
        "choosing": [state.level_seed for state in choosing]}, states=forks)
    if MEAN in args.sources:
        fixed |= {VectorSource(kind, MEAN).fixed_name: mean_vectors(policy, layers, kind, pool)
                  for kind in kinds}
    own = {f"{kind.name}_{state.level_seed}": mean_vectors(policy, layers, kind, [state])
           for kind in kinds for state in states[:args.num_vectors]}
    for name, by_layer in {**own, **fixed}.items():
        save_vectors(store.file_of("vectors", name), list(by_layer.values()))
    reference = reference_frames(env, {state.level_seed for state in forks}, REFERENCE_SIZE,
                                 args.seed)
    std = {name: reference.std(policy, find_layer(policy, name)) for name in layers}
    experiment = Experiment(policy, compute, pool, fixed, std, args.controls, args.num_controls,
                            args.seed, args.region, args.exact)
    chosen_on = "The table contains every arm; no arm was selected."
    if choosing:
        alone = dataclasses.replace(experiment, control_kinds=(), num_controls=0)
        arms = strongest(arms, measure(store, CHOOSING, alone, arms, choosing))
        chosen_on = f"Layer and coefficient were chosen on {len(choosing)} other forks."
    what = (f"{len(states)} forks of {env.distribution_mode} mazes, one frame each, with the "
            f"mouse at the decision square; agent {args.agent_file.name}; vector "
            f"{'cheese and top_right' if args.compose else ' '.join(args.vector)}. "
            f"{num_levels - len(forks)} levels were left out because they are not forks, have no "
            f"room for a vector, or have no source level. {chosen_on}" + (
                " The interaction is the effect of both vectors together minus the sum of their "
                "single effects." if args.compose else ""))
    outcomes = field_outcomes(kinds[0] if len(kinds) == 1 else None, args.exact)
    measured = measure(store, DECISIONS, experiment, arms, states)
    chosen = states[:args.num_fields]
    fields = measure(store, FIELDS, experiment, arms, chosen, outcomes) if chosen else []
    table = compare_arms(arms, measured, args.controls, args.num_controls, DECISION_OUTCOMES,
                         args.seed)
    store.write("table", value=decisions_table(arms, measured,
                                               [state.level_seed for state in states]))
    reports = [write_effects(store, "", table, DECISION_OUTCOMES, WORDING, what)]
    if fields:
        reports.append(write_effects(
            store, "field_", compare_arms(arms, fields, args.controls, args.num_controls,
                                          outcomes, args.seed), outcomes, FIELD_WORDING,
            f"The fields of {len(chosen)} of these forks. Holm's correction treats this table as "
            "a separate family."))
    single = [(group, result) for group, result in zip(arms, measured) if len(group.sources) == 1]
    if single and len(single[0][0].conditions) > 1:
        with store.file("curves") as temporary:
            plot_coefficients(temporary, single, what.partition(". ")[0], args.seed)
    store.write("report", value="\n".join(reports))
    print(f"{claims_summary(table)}\nwrote {store.file_of('report')}, from {len(states)} forks; "
          f"{num_levels - len(forks)} levels left out")


def parse_vectors(args: argparse.Namespace, policy: Policy
                  ) -> tuple[list[VectorKind], dict[str, dict[str, SteeringVector]]]:
    """Determine the steering vectors from the flags.

    Args:
        args: the parsed flags.
        policy: the agent.

    Returns:
        Kinds of the vectors, empty for a file or a pair of levels; and a dict that maps ``"given"``
        to the vectors of the file or pair by layer, or an empty dict if there are kinds.

    Raises:
        UserError: if flags are incompatible, a file or level does not exist, or a vector does not
            fit the agent.
    """
    if args.compose:
        if args.vector != [CHEESE.name] or args.sources != [OWN] or args.offsets or args.choose_on:
            raise UserError("--compose uses each level's own cheese and top right vectors; leave "
                            "out --vector, --sources, --offsets and --choose_on")
        if len(args.coefficients or COMPOSED) != 2:
            raise UserError("--compose takes two --coefficients, of the cheese and of the top "
                            f"right vector, not {len(args.coefficients)}")
        return [CHEESE, TOP_RIGHT], {}
    first, *others = args.vector
    if first in VECTOR_KINDS and not others:
        return [VECTOR_KINDS[first]], {}
    if args.sources != [OWN] or args.offsets or OTHERS in args.controls:
        raise UserError("the vector of a file or a pair is the same for all levels; leave out "
                        f"--sources, --offsets and --controls {OTHERS}")
    layers = None if args.layers is None else [
        layer.name for name in args.layers
        for layer in layers_named(policy, ALL if name == EACH else name)]
    if first.endswith(".npz") and not others:
        return [], {"given": vectors_of_file(policy, layers, Path(first))}
    if len(args.vector) != 2 or any(name in VECTOR_KINDS or name.endswith(".npz")
                                    for name in args.vector):
        raise UserError(f"--vector takes {' or '.join(VECTOR_KINDS)}, one file <name>.npz, or two "
                        f"levels, not {' and '.join(args.vector)}; use --compose for both vectors")
    return [], {"given": vectors_of_pair(policy, layers or [LAYER], chosen_levels(
        args.vector, args.distribution_mode, args.use_backgrounds))}


def make_arms(args: argparse.Namespace, policy: Policy, kinds: Sequence[VectorKind],
              given: Sequence[str]) -> list[Arms]:
    """Return the conditions (arms) selected by the flags, grouped by layer and source of vectors.

    Args:
        args: the parsed flags.
        policy: the agent.
        kinds: kinds of the vectors; empty for a file or a pair of levels.
        given: layers of the vectors of a file or a pair.

    Raises:
        UserError: if the agent does not have a layer, or a layer, coefficient or source is
            repeated.
    """
    layers = [named for name in args.layers or given or [LAYER] for named in (
        [ALL] if name == ALL else
        [layer.name for layer in layers_named(policy, ALL if name == EACH else name)])]
    coefficients: list[float] = args.coefficients or [
        *(COMPOSED if args.compose else COEFFICIENTS)]
    offsets = [f"{OFFSET}{squares}" for squares in args.offsets]
    sources = [*args.sources, *offsets] if kinds else [FIXED]
    for values in (layers, sources, () if args.compose else coefficients):
        if len(set(values)) < len(values):
            raise UserError(f"one of {' '.join(map(str, values))} is given twice")
    arms = []
    for layer in layers:
        at = f" at {layer}" if len(layers) > 1 else ""
        if args.compose:
            one, other = coefficients
            arms.append(Arms(
                f"compose_{layer}", layer, tuple(VectorSource(kind, OWN) for kind in kinds),
                (Condition(f"{CHEESE.name}_{layer}", f"cheese {one:+g}{at}", "", value=(one, 0.0)),
                 Condition(f"{TOP_RIGHT.name}_{layer}", f"top right {other:+g}{at}", "",
                           value=(0.0, other)),
                 Condition(f"both_{layer}", f"both{at}", "", value=(one, other))),
                Condition(f"interaction_{layer}", f"interaction{at}", "")))
        else:
            arms += [Arms(f"{source}_{layer}", layer,
                          (VectorSource(kinds[0] if kinds else None, source),),
                          tuple(Condition(f"{source}_{layer}_{c:+g}", f"{source} {c:+g}{at}", "",
                                          value=(c,)) for c in coefficients))
                     for source in sources]
    return arms


def find_forks(args: argparse.Namespace, kinds: Sequence[VectorKind]
               ) -> tuple[list[MazeState], int]:
    """Return the forks, among the levels that the flags select, on which the vectors can be
    computed. The top right vector needs a maze that does not fill the world.

    Args:
        args: the parsed flags. Without ``--levels``, they are modified so that only suitable forks
            are drawn: ``kind`` and, if necessary, ``size`` are set, and ``choose_on`` is added to
            ``num_mazes``.
        kinds: kinds of the vectors.

    Returns:
        The forks, with the mouse at the start; and the number of levels that the flags select.

    Raises:
        UserError: if --kind excludes forks, no level is a suitable fork, or too few levels are
            found.
    """
    if args.kind not in (None, FORK):
        raise UserError(f"only a fork has a decision square; leave out --kind '{args.kind}'")
    if args.levels is None:
        args.kind, args.num_mazes = FORK, args.num_mazes + args.choose_on
        if TOP_RIGHT in kinds and args.size is None:
            args.size = (3, WORLD_DIMS[args.distribution_mode] - 2)
    levels = levels_of(args)
    forks = [state.with_mouse(state.grid.start) for state in levels
             if kind_of(state.grid) == FORK and (state.grid.margin or TOP_RIGHT not in kinds)]
    if not forks:
        raise UserError(f"none of the {len(levels)} levels is a fork with room for the vector")
    return forks, len(levels)


def measure(store: ResultStore, entry: str, experiment: Experiment, arms: Sequence[Arms],
            states: Sequence[MazeState], outcomes: Sequence[Outcome] = ()) -> list[Measurements]:
    """Return outcomes of forks under all conditions; missing ones are measured and written.

    Args:
        store: open store of the results.
        entry: entry of the schema: DECISIONS, FIELDS or CHOOSING.
        experiment: agent, vectors and controls.
        arms: groups of conditions.
        states: the forks.
        outcomes: outcomes of fields; empty to measure at decision squares.

    Returns:
        Measurements of each group, on all forks.
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
        store: open store of the results.
        prefix: prefix of the entries of the schema, "" or "field_".
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
                  "compared with each kind of controls separately; p (controls) is the largest of "
                  "these p-values.")


def plot_coefficients(path: Path, measured: Sequence[tuple[Arms, Measurements]], title: str,
                      seed: int) -> None:
    """Draw P(cheese), P(corner) and P(other) against the coefficient, with a row of panels for each
    group of arms.

    The curves are means with 95 % intervals over forks, and medians; the shaded area is the range
    of the controls' means.

    Args:
        path: file to write.
        measured: groups of arms that differ in the coefficient, with their measurements.
        title: title of the figure.
        seed: seed of the bootstrap.
    """
    shown = [outcome for outcome in DECISION_OUTCOMES if outcome.name.startswith("p_")]
    figure = Figure(figsize=(4 * len(shown), 2.6 * len(measured) + 0.8), layout="constrained")
    panels = figure.subplots(len(measured), len(shown), squeeze=False, sharex=True, sharey=True)
    bootstrap = ClusterBootstrap(np.arange(len(measured[0][1].before)), seed)
    for row, (group, result) in zip(panels, measured):
        x = np.array([0.0, *((arm.value or ())[0] for arm in group.conditions)])
        before = np.broadcast_to(result.before, (len(result.after), 1, *result.before.shape))
        # (sets of vectors, 1 + arms, forks, outcomes)
        after = np.concatenate([before, result.after], axis=1)[:, x.argsort()]
        x.sort()
        for axes, outcome in zip(row, shown):
            values = after[..., DECISION_OUTCOMES.index(outcome)]
            own, *controls = values.mean(axis=2)
            axes.fill_between(x, np.min(controls, axis=0), np.max(controls, axis=0),
                              color="#DDDDDD", label=f"range of {len(controls)} controls' means")
            axes.errorbar(x, own, yerr=np.abs(bootstrap.interval(values[0]) - own), color=BLUE,
                          marker="o", markersize=4, capsize=2, label="mean, 95 %")
            axes.plot(x, np.median(values[0], axis=1), "D--", color=VERMILION, markersize=4,
                      linewidth=0.8, label="median")
            axes.set(title=f"{group.name}\n{outcome.label}", xlabel="coefficient",
                     ylim=(-0.02, 1.02))
            axes.grid(alpha=0.3)
    panels[0, 0].legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=DPI)


if __name__ == "__main__":
    raise SystemExit(main())
