"""Steering of an agent on mazes: vectors added to its layers, and their effects.

Effects at decision squares and over whole fields are compared with those of matched controls. A
killed run resumes after the last finished forks and gives the same results as an uninterrupted run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from agents.layers import find_layer, layers_named
from agents.networks import Policy
from common.cli import from_zero
from common.files import sha256
from common.options import command, option, redefine
from common.palette import BLUE, DPI, VERMILION
from common.progress import Progress
from common.results import ResultStore
from common.tables import with_minus
from envs.maze.state import MazeState, game_of
from interventions.flags import REFERENCE_SIZE
from interventions.vectors import SteeringVector, save_vectors
from maze.field.fields import reference_frames
from maze.options import AgentOptions, ExactOptions
from maze.studies.condition_groups import (
    Forks,
    GroupOptions,
    choose_forks,
    make_groups,
    parse_vectors,
)
from maze.studies.steering import (
    CHOOSING,
    CONTROL_KINDS,
    DECISION_OUTCOMES,
    DECISIONS,
    FIELDS,
    STEERING_FILES,
    ConditionGroup,
    Experiment,
    Measurements,
    VectorSource,
    compare_groups,
    decisions_table,
    field_outcomes,
    strongest,
)
from maze.studies.vectors import MEAN, VectorKind, mean_vectors
from stats.bootstrap import ClusterBootstrap
from stats.effects import Outcome, check_starts, claims_summary
from stats.forest_plot import plot_effects
from stats.report import Wording, report

WORDING = Wording("Steering vectors at decision squares", "controls",
                  "vectors that are no better than controls", " of each kind",
                  "Size of the change of the layer's output in a frame")
FIELD_WORDING = dataclasses.replace(WORDING, title="Steering vectors over whole fields")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SteeringOptions(GroupOptions, ExactOptions):
    """Steer an agent on mazes: add vectors to its layers and measure their effects."""

    num_fields: int = option(
        20, "number of forks whose whole fields are also measured; 0: none", type=from_zero)
    exact: bool = redefine(ExactOptions, "exact", help=(
        "also compute exact probabilities on these fields; needs an agent without memory"))
    num_vectors: int = option(10, "number of forks whose own vectors are written", type=from_zero)
    output_dir: Path = redefine(AgentOptions, "output_dir", default=Path("analysis/maze/steering"))


def steer(options: SteeringOptions) -> pd.DataFrame | None:
    """Measure the effects of steering vectors, write the results to ``options.output_dir``, and
    return the effects at decision squares; None for a dry run."""
    policy = options.load_agent()
    if options.num_fields:
        check_starts(options.num_fields, "--num_fields")
    kinds, given = parse_vectors(options, policy)
    groups = make_groups(options, policy, kinds, list(given))
    forks = choose_forks(options, kinds, groups)
    if options.dry_run:
        print("forks:", *(state.level_seed for state in forks.reported), "\nto choose on:",
              *(state.level_seed for state in forks.choosing), "\nconditions:",
              *(condition.name for group in groups for condition in group.conditions))
        return None
    store = open_store(options, groups, forks)
    experiment = prepare(options, policy, store, groups, kinds, given, forks)
    if forks.choosing:
        alone = dataclasses.replace(experiment, control_kinds=(), num_controls=0)
        groups = strongest(groups, measure(store, CHOOSING, alone, groups, forks.choosing))
    outcomes = field_outcomes(kinds[0] if len(kinds) == 1 else None, options.exact)
    measured = measure(store, DECISIONS, experiment, groups, forks.reported)
    chosen = forks.reported[:options.num_fields]
    fields = measure(store, FIELDS, experiment, groups, chosen, outcomes) if chosen else []
    return write_results(options, store, groups, forks, measured, fields, outcomes)


def open_store(options: SteeringOptions, groups: Sequence[ConditionGroup],
               forks: Forks) -> ResultStore:
    """Open the output folder."""
    return options.open_store(STEERING_FILES, {
        "vector": options.vector,
        "vector_sha256": [sha256(path) for path in map(Path, options.vector) if path.is_file()],
        "groups": [[group.name, *(list(condition.value or ()) for condition in group.conditions)]
                   for group in groups],
        "controls": options.controls, "num_controls": options.num_controls, "seed": options.seed,
        "num_sources": options.num_sources, "region": options.region, "exact": options.exact,
        "levels": [state.level_seed for state in forks.reported],
        "choosing": [state.level_seed for state in forks.choosing]}, states=forks.all)


def prepare(options: SteeringOptions, policy: Policy, store: ResultStore,
            groups: Sequence[ConditionGroup], kinds: Sequence[VectorKind],
            given: dict[str, SteeringVector], forks: Forks) -> Experiment:
    """Compute and write vectors, and return the experiment on them.

    Args:
        given: vectors of a file or a pair of levels, by layer.
    """
    layers = list(dict.fromkeys(layer.name for group in groups
                                for layer in layers_named(policy, group.layer)))
    fixed = {"given": given} if given else {}
    if MEAN in options.sources:
        fixed |= {VectorSource(kind, MEAN).fixed_name: mean_vectors(policy, layers, kind,
                                                                    forks.pool) for kind in kinds}
    own = {f"{kind.name}_{state.level_seed}": mean_vectors(policy, layers, kind, [state])
           for kind in kinds for state in forks.reported[:options.num_vectors]}
    for name, by_layer in {**own, **fixed}.items():
        save_vectors(store.file_of("vectors", name), list(by_layer.values()))
    reference = reference_frames(game_of(forks.all), {state.level_seed for state in forks.all},
                                 REFERENCE_SIZE, options.seed)
    std = {name: reference.std(policy, find_layer(policy, name)) for name in layers}
    return Experiment(policy, options.compute, forks.pool, fixed, std, options.controls,
                      options.num_controls, options.seed, options.region, options.exact)


def describe(options: SteeringOptions, forks: Forks) -> str:
    """Describe the run in sentences, for the report."""
    chosen_on = (f"Layer and coefficient were chosen on {len(forks.choosing)} other forks."
                 if forks.choosing else "The table contains every condition; none was selected.")
    return (f"{len(forks.reported)} forks of {game_of(forks.all).distribution_mode} mazes, one "
            "frame each, with the mouse at the decision square; agent "
            f"{options.agent_file.name}; vector "
            f"{'cheese and top_right' if options.compose else ' '.join(options.vector)}. "
            f"{forks.num_left_out} levels were left out because they are not forks, have no room "
            f"for a vector, or have no source level. {chosen_on}" + (
                " The interaction is the effect of both vectors together minus the sum of their "
                "single effects." if options.compose else ""))


def write_results(options: SteeringOptions, store: ResultStore,
                  groups: Sequence[ConditionGroup], forks: Forks,
                  measured: Sequence[Measurements], fields: Sequence[Measurements],
                  outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """Write tables, figures and report, and return the effects at decision squares.

    Args:
        measured: measurements at decision squares, by group of conditions.
        fields: measurements of whole fields; may be empty.
    """
    what = describe(options, forks)
    table = compare_groups(groups, measured, options.controls, options.num_controls,
                           DECISION_OUTCOMES, options.seed)
    store.write("table", value=decisions_table(groups, measured, [
        state.level_seed for state in forks.reported]))
    reports = [write_effects(store, "", table, DECISION_OUTCOMES, WORDING, what)]
    if fields:
        num_fields = min(options.num_fields, len(forks.reported))
        reports.append(write_effects(
            store, "field_", compare_groups(groups, fields, options.controls, options.num_controls,
                                            outcomes, options.seed), outcomes, FIELD_WORDING,
            f"The fields of {num_fields} of these forks. Holm's correction treats this table as "
            "a separate family."))
    single = [(group, result) for group, result in zip(groups, measured) if len(group.sources) == 1]
    if single and len(single[0][0].conditions) > 1:
        with store.file("curves") as temporary:
            plot_coefficients(temporary, single, what.partition(". ")[0], options.seed)
    store.write("report", value="\n".join(reports))
    print(f"{claims_summary(table)}\nwrote {store.file_of('report')}, from {len(forks.reported)} "
          f"forks; {forks.num_left_out} levels left out")
    return table


def measure(store: ResultStore, entry: str, experiment: Experiment,
            groups: Sequence[ConditionGroup], states: Sequence[MazeState],
            outcomes: Sequence[Outcome] = ()) -> list[Measurements]:
    """Return outcomes of forks under all conditions; missing ones are measured and written.

    Args:
        entry: entry of the schema: DECISIONS, FIELDS or CHOOSING.
        outcomes: outcomes of fields; empty to measure at decision squares.

    Returns:
        Measurements of each group, on all forks.
    """
    measured = []
    with Progress(len(groups) * len(states), "fork") as progress:
        for group in groups:
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
        prefix: prefix of the entries of the schema, "" or "field_".
        table: effects, from ``compare_groups``.
        what: sentences that describe the run.
    """
    store.write(f"{prefix}effects", value=table)
    with store.file(f"{prefix}figure") as temporary:
        plot_effects(temporary, table, outcomes, wording, what.partition(". ")[0])
    kinds = [text for kind, text in CONTROL_KINDS.items() if f"p_{kind}" in table]
    return report(table, outcomes, wording, f"{what} Controls: {', and '.join(kinds)}. A condition "
                  "is compared with each kind of controls separately; p (controls) is the largest "
                  "of these p-values.")


def plot_coefficients(path: Path, measured: Sequence[tuple[ConditionGroup, Measurements]],
                      title: str, seed: int) -> None:
    """Draw P(cheese), P(corner) and P(other) against the coefficient, with a row of panels for each
    group of conditions.

    The curves are means with 95 % intervals over forks, and medians; the shaded area is the range
    of the controls' means.

    Args:
        measured: groups of conditions that differ in the coefficient, with their measurements.
    """
    shown = [outcome for outcome in DECISION_OUTCOMES if outcome.name.startswith("p_")]
    figure = Figure(figsize=(4 * len(shown), 2.6 * len(measured) + 0.8), layout="constrained")
    panels = figure.subplots(len(measured), len(shown), squeeze=False, sharex=True, sharey=True)
    bootstrap = ClusterBootstrap(np.arange(len(measured[0][1].before)), seed)
    for row, (group, result) in zip(panels, measured):
        x = np.array([0.0, *((condition.value or ())[0] for condition in group.conditions)])
        before = np.broadcast_to(result.before, (len(result.after), 1, *result.before.shape))
        # (sets of vectors, 1 + conditions, forks, outcomes)
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
    result, place = measured[0][1], DECISION_OUTCOMES.index(shown[0])
    moved = (result.after - result.before)[0, :, :, place].mean(axis=1)
    most = abs(moved).argmax()
    figure.suptitle(with_minus(
        f"{measured[0][0].conditions[most].label} changes {shown[0].label} by {moved[most]:+.2f}, "
        f"the most of {len(moved)} coefficients\n") + title, fontsize=10)
    figure.savefig(path, dpi=DPI)


main = command(SteeringOptions, steer)

if __name__ == "__main__":
    raise SystemExit(main())
