"""Behaviour of an agent in mazes: complete episodes, exact probabilities, and regressions.

The regressions predict from features of a level whether the agent gets the cheese. A killed run
resumes after its last level; more levels can be added to a finished run. To compare agents, run
this script on each of them with a separate output folder.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from agents.agent_file import load_agent
from agents.provenance import agent_sha256
from common.cli import Parser, set_up_logging, whole
from common.devices import resolve_compute
from common.errors import UserError, script_main
from common.files import versions
from common.palette import BLUE, COLOURS, DPI, VERMILION
from common.progress import Progress
from common.results import ResultStore
from common.tables import markdown_escaped, markdown_table
from envs.procgen_env import EnvConfig
from maze.level.flags import add_agent_flags, add_output_flags, filters_of, levels_of
from maze.level.grid import FEATURES, FORK
from maze.level.regions import add_cheese_region_flag, cheese_region
from maze.level.state import GAME, WORLD_DIMS, game_of
from maze.studies.behaviour import (
    BEHAVIOUR_FILES,
    CHEESE,
    EXACT_CHEESE,
    EXACT_LABEL,
    GOT,
    NEITHER,
    PLAYED_LABEL,
    REGION,
    TARGET_LABELS,
    episodes_table,
    group_levels,
    make_findings,
    mean_interval,
    paths_of,
    play_levels,
    playable,
    read_levels,
)
from maze.studies.prediction import (
    ALL,
    FOLDS,
    MIN_LEVELS,
    NUM_SUBSETS,
    RESAMPLINGS,
    SET,
    SETS,
    SINGLE,
    check_outcomes,
    regressions,
)
from stats.claims import Finding
from stats.report import bold, format_interval
from stats.significance import LEVEL, share

_BINS = 10  # bins of exact probabilities

def parser() -> Parser:
    flags = Parser(__doc__)
    add_agent_flags(flags, "agent to play", num_mazes=2000)
    add_cheese_region_flag(flags)
    flags.add_argument("--region", type=whole(1, max(WORLD_DIMS.values())), default=5,
                       help="rows of the top right region; the report counts whether the mouse "
                            "reaches the cheese or the region first")
    flags.add_argument("--exact", action="store_true",
                       help="also compute exact probabilities of reaching cheese and region; needs "
                            "an agent without memory")
    flags.add_argument("--regress", action="store_true",
                       help="also fit regressions of getting the cheese on the features of forks")
    add_output_flags(flags, "behaviour")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    set_up_logging(args.log_level)
    compute = resolve_compute(args.device, args.gpu_device, args.precision)
    policy = load_agent(args.agent_file, compute.device)
    if args.exact and policy.recurrent:
        raise UserError("exact probabilities (--exact) need an agent without memory, and "
                        f"{args.agent_file} has a GRU; leave --exact out")
    edit = cheese_region(EnvConfig(GAME, args.distribution_mode), args.cheese_region)
    chosen = levels_of(args, edit)
    states = playable(chosen)
    game = game_of(states)
    num_forks = sum(state.grid.kind() == FORK for state in states)
    if args.regress and num_forks < MIN_LEVELS:
        raise UserError(f"--regress needs at least {MIN_LEVELS} forks; there are {num_forks}: take "
                        "more levels, or --kind fork")
    if args.dry_run:
        for state in states:
            grid = state.grid
            print(f"{state.level_seed}: {grid.maze_dim} x {grid.maze_dim} squares, cheese at "
                  f"{grid.cheese}, kind: {grid.kind()}")
        return
    store = ResultStore(args.output_dir, BEHAVIOUR_FILES)
    store.open({
        "agent_file": args.agent_file.name, "agent_sha256": agent_sha256(args.agent_file),
        "distribution_mode": game.distribution_mode, "use_backgrounds": game.use_backgrounds,
        "levels": args.levels, "start_level": args.start_level, "num_levels": args.num_levels,
        "filters": dataclasses.asdict(filters_of(args)), "cheese_region": args.cheese_region,
        "region": args.region, "exact": args.exact, "seed": args.seed,
        "precision": compute.precision, "versions": versions()}, args.overwrite)
    played = read_levels(store, states)
    missing = [number for number in range(len(states)) if number not in played]
    with Progress(len(states), "level", len(states) - len(missing)) as progress:
        for level in play_levels(policy, compute, states, missing, args.seed, args.exact,
                                 args.region):
            store.append("levels", row=level.row())
            played[level.number] = level
            progress.update(progress.done + 1)
    levels = [played[number] for number in range(len(states))]
    table = episodes_table(levels, states, args.region)
    store.write("paths", value=paths_of(levels))
    store.write("episodes", value=table)
    notes = [f"{len(chosen) - len(states)} of {len(chosen)} levels were left out: they have not "
             "one cheese that can be reached."] if len(chosen) > len(states) else []
    predicted, reason = fit_regressions(table, args)
    title = f"{args.agent_file.name}, {len(table)} {game.distribution_mode} levels"
    with store.file("episodes_figure") as temporary:
        draw_episodes(temporary, table, title)
    if predicted is not None:
        store.write("regressions", value=predicted)
        with store.file("regressions_figure") as temporary:
            draw_regressions(temporary, predicted, title)
    elif reason:
        notes.append(reason)
    rows = make_findings(table, predicted, store.settings())
    text = report(table, predicted, rows, describe_run(args, title), notes, args.region, args.seed)
    store.write("report", value=text + "\n")
    value, low, high = share(table[GOT].sum(), len(table))
    print(f"{title}: got the cheese in {100 * value:.1f} % ({100 * low:.1f} to {100 * high:.1f})")
    for note in notes:
        print(note)
    print(f"wrote {store.file_of('report')}, {store.file_of('episodes').name} and "
          f"{store.file_of('paths').name} next to it")


def fit_regressions(table: pd.DataFrame, args: argparse.Namespace
                    ) -> tuple[pd.DataFrame | None, str]:
    """Return the regressions on the forks and an empty text, or None and the reason.

    Without --regress the result is None and an empty text.
    """
    if not args.regress:
        return None, ""
    forks = table[table["kind"] == FORK]
    targets = {GOT: forks[GOT].to_numpy(np.float64)}
    if args.exact:
        exact = forks[EXACT_CHEESE].to_numpy(np.float64)
        targets[EXACT_CHEESE] = exact.clip(0, 1)  # removes rounding errors
    try:
        for name, target in targets.items():
            check_outcomes(target, name)
    except UserError as error:  # not a failure: the agent may always get the cheese
        return None, f"There are no regressions: {error}."
    return regressions(forks[list(FEATURES)], targets, forks[GOT].to_numpy(), args.seed), ""


def describe_run(args: argparse.Namespace, title: str) -> str:
    """Return a sentence that describes the run."""
    parts = [title]
    parts += [f"cheese put into the last {args.cheese_region} rows and columns"
              ] if args.cheese_region else []
    parts += [f"levels: {' '.join(args.levels)}"] if args.levels else [f"seed {args.seed}"]
    parts += [f"{name.replace('_', ' ')}: {value}" for name, value
              in dataclasses.asdict(filters_of(args)).items() if value is not None]
    return "; ".join(parts) + "."


def report(table: pd.DataFrame, regressions: pd.DataFrame | None, rows: Sequence[Finding],
           what: str, notes: Sequence[str], region: int, seed: int) -> str:
    """Return the report as Markdown.

    Args:
        table: table of episodes, from ``episodes_table``.
        regressions: table of regressions, from ``prediction.regressions``; None if there is none.
        rows: findings of this run.
        what: sentence that describes the run.
        notes: sentences on excluded levels and missing regressions.
        region: rows and columns of the top right region.
        seed: seed of the bootstrap.
    """
    lines = ["# Behaviour of the agent in mazes", "", markdown_escaped(what), "",
             *(f"{note}\n" for note in notes), "## How often it gets the cheese", "",
             "An episode is played to its end, at most 500 steps; whether it got the cheese is the "
             f"game's own flag. The region is the last {region} rows and columns. First: whether "
             "the mouse was at the cheese or on another square of the region first. Shares have "
             "Wilson's 95 % interval; means over levels have a bootstrap interval.", ""]
    lines += markdown_table(
        ("levels", "episodes", PLAYED_LABEL, EXACT_LABEL, "cheese first", "region first", "neither",
         "P(cheese) at the decision square", "steps"),
        [(name, str(len(group)), _with_ends(*share(group[GOT].sum(), len(group))),
          _mean(group[EXACT_CHEESE], seed),
          *(f"{(group['first'] == first).mean():.3f}" for first in (CHEESE, REGION, NEITHER)),
          _mean(group["p_cheese"], seed), f"{group['steps'].mean():.1f}")
         for name, group in group_levels(table).items()])
    if regressions is not None:
        lines += _regression_lines(regressions)
    lines += ["## Rows of the table of findings", "", "Filled by this run:", ""] if rows else []
    lines += markdown_table(
        ("row", "levels or target", "measure", "ours (95 %)", "base", "p (Holm)", "levels"),
        [(str(row.row), row.levels, row.measure, _with_ends(*_numbers(row)),
          _number(row.base), _number(row.p_holm), str(row.num_levels)) for row in rows]
    ) if rows else []
    return "\n".join(lines)


def _regression_lines(table: pd.DataFrame) -> list[str]:
    lines = [
        "## Which features predict it", "",
        f"Logistic regression on one feature alone. Scores by {FOLDS}-fold cross-validation over "
        "levels, standardised by the folds that are fitted; beside them what the base rate "
        "scores on the same levels. Gains are paired, with a bootstrap interval over levels and "
        "a sign-flip p after Holm's correction for all gains here. **Bold**: the interval lies "
        f"above 0 and p (Holm) <= {LEVEL}. The second target is the exact probability, so its "
        "scores are those expected of episodes, without the noise of playing them.", ""]
    for target, of_target in table.groupby("target", sort=False):
        single = of_target[of_target["model"] == SINGLE]
        order = single[single["quantity"] == "log_loss_gain"].sort_values(
            "value", ascending=False)["features"]
        lines += [f"Target: {TARGET_LABELS[target]}. Base rate: accuracy "
                  f"{_base(single, 'accuracy'):.3f}, log-loss {_base(single, 'log_loss'):.3f}.", ""]
        lines += markdown_table(
            ("feature", "accuracy", "gain", "log-loss", "gain", "coefficient"),
            [(name, *_score_cells(single[single["features"] == name]),
              _number(_one(single[single["features"] == name], "coefficient").value))
             for name in order])
    lines += ["## Sets of features", "",
              "L1 logistic regression (penalty of weight 1) on standardised features; intervals of "
              f"coefficients from fits to {RESAMPLINGS} draws of levels. VIF: variance inflation "
              "factor. Sets: " + "; ".join(f"{name}: {', '.join(members)}"
                                           for name, members in SETS.items()) + ".", ""]
    for target, of_target in table[table["model"] == SET].groupby("target", sort=False):
        lines += [f"Target: {TARGET_LABELS[target]}.", ""]
        rows = []
        for name, part in of_target.groupby("features", sort=False):
            intercept = _with_ends(*_numbers(_one(part, "intercept")))
            rows.append((name, "-", *_score_cells(part), intercept, ""))
            for row in part[part["quantity"] == "coefficient"].itertuples():
                vif = part[(part["quantity"] == "vif") & (part["feature"] == row.feature)]
                rows.append((name, row.feature, "", "", "", "", _with_ends(*_numbers(row)),
                             _inflation(vif["value"].iloc[0])))
        lines += markdown_table(("set", "feature", "accuracy", "gain", "log-loss", "gain",
                            "coefficient, or intercept (95 %)", "VIF"), rows)
    lines += ["## Signs over subsets of the features", "",
              f"Of {NUM_SUBSETS} random subsets of all {len(FEATURES)} features, those with a "
              "feature: share that gives it a positive and a negative coefficient (the rest: 0). "
              "VIF among all features.", ""]
    for target, of_target in table[table["model"] == ALL].groupby("target", sort=False):
        wide = of_target.pivot(index="feature", columns="quantity", values="value")
        lines += [f"Target: {TARGET_LABELS[target]}.", ""]
        lines += markdown_table(("feature", "positive", "negative", "VIF"), [
            (name, f"{wide.loc[name, 'share_positive']:.2f}",
             f"{wide.loc[name, 'share_negative']:.2f}", _inflation(wide.loc[name, "vif"]))
            for name in of_target["feature"].drop_duplicates()])
    return lines


def draw_episodes(path: Path, table: pd.DataFrame, title: str) -> None:
    """Draw success rates with Wilson's intervals by kind, by size and by exact probability."""
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    by_group, by_size, by_exact = figure.subplots(1, 3)
    groups = group_levels(table)
    _shares(by_group, list(groups.values()))
    by_group.set_yticks(range(len(groups)), [f"{name} ({len(rows)})"
                                             for name, rows in groups.items()], fontsize=8)
    by_group.invert_yaxis()
    sizes = dict(list(table.groupby("maze_dim")))
    _shares(by_size, list(sizes.values()))
    by_size.set_yticks(range(len(sizes)), [f"{size} rows ({len(rows)})"
                                           for size, rows in sizes.items()], fontsize=8)
    for axes in (by_group, by_size):
        axes.set_xlabel(f"share of episodes that {PLAYED_LABEL} (95 % interval)")
        axes.set_xlim(0, 1.02)
        axes.grid(axis="x", alpha=0.3)
    exact = table[table[EXACT_CHEESE].notna()]
    by_exact.plot([0, 1], [0, 1], color="black", linewidth=0.8)
    bins = np.minimum((exact[EXACT_CHEESE] * _BINS).astype(int), _BINS - 1)
    for _, rows in exact.groupby(bins):
        value, low, high = share(rows[GOT].sum(), len(rows))
        by_exact.plot([rows[EXACT_CHEESE].mean()] * 2, [low, high], color=BLUE, linewidth=1.4)
        by_exact.plot(rows[EXACT_CHEESE].mean(), value, "o", color=BLUE, markersize=5)
    by_exact.set_xlabel(f"{EXACT_LABEL}, in {_BINS} bins" if len(exact) else
                        "no exact probabilities were asked for")
    by_exact.set_ylabel(f"share that {PLAYED_LABEL}")
    figure.suptitle(title)
    figure.savefig(path, dpi=DPI)


def draw_regressions(path: Path, table: pd.DataFrame, title: str) -> None:
    """Draw gains of single features over the base rate and coefficients of sets, by target."""
    targets = list(table["target"].unique())
    figure = Figure(figsize=(17, 5.2 * len(targets)), layout="constrained")
    for panels, target in zip(figure.subplots(len(targets), 3, squeeze=False), targets):
        of_target = table[table["target"] == target]
        single = of_target[of_target["model"] == SINGLE]
        for axes, quantity in zip(panels, ("accuracy_gain", "log_loss_gain")):
            rows = single[single["quantity"] == quantity].sort_values("value", ascending=False)
            for place, row in enumerate(rows.itertuples()):
                colour = VERMILION if _beats(row) else BLUE
                axes.plot([row.low_95, row.high_95], [place] * 2, color=colour, linewidth=1.4)
                axes.plot(row.value, place, "o", color=colour, markersize=5)
            axes.set_yticks(range(len(rows)), rows["features"], fontsize=8)
            axes.set_xlabel(f"{quantity.removesuffix('_gain').replace('_', '-')}: gain over the "
                            "base rate (red: beats it after Holm)")
            axes.set_title(f"{TARGET_LABELS[target]}: one feature alone", fontsize=10)
        rows = of_target[(of_target["model"] == SET)
                         & (of_target["quantity"] == "coefficient")]
        colours = dict(zip(rows["features"].unique(), COLOURS))
        for place, row in enumerate(rows.itertuples()):
            panels[2].plot([row.low_95, row.high_95], [place] * 2, color=colours[row.features],
                           linewidth=1.4)
            panels[2].plot(row.value, place, "o", color=colours[row.features], markersize=5)
        panels[2].set_yticks(range(len(rows)), rows["features"] + ": " + rows["feature"],
                             fontsize=8)
        panels[2].set_xlabel("coefficient, features standardised (95 % interval)")
        panels[2].set_title(f"{TARGET_LABELS[target]}: sets, L1", fontsize=10)
        for axes in panels:
            axes.axvline(0, color="black", linewidth=0.8)
            axes.grid(axis="x", alpha=0.3)
            axes.invert_yaxis()
    figure.suptitle(title)
    figure.savefig(path, dpi=DPI)


def _shares(axes: Axes, groups: Sequence[pd.DataFrame]) -> None:
    """Draw the success rate of each group with its interval, from top to bottom."""
    for place, rows in enumerate(groups):
        value, low, high = share(rows[GOT].sum(), len(rows))
        axes.plot([low, high], [place] * 2, color=BLUE, linewidth=1.4)
        axes.plot(value, place, "o", color=BLUE, markersize=5)


def _beats(row: Any) -> bool:
    """Return whether a gain, given as a row of the table of regressions, is claimed."""
    return row.low_95 > 0 and row.p_holm <= LEVEL


def _one(part: pd.DataFrame, quantity: str) -> Any:
    """Return the only row of a quantity."""
    return next(part[part["quantity"] == quantity].itertuples())


def _base(part: pd.DataFrame, quantity: str) -> float:
    return part.loc[part["quantity"] == quantity, "base"].iloc[0]


def _score_cells(part: pd.DataFrame) -> list[str]:
    """Format accuracy, its gain, log-loss and its gain."""
    cells = []
    for name in ("accuracy", "log_loss"):
        gain = _one(part, f"{name}_gain")
        text = f"{gain.value:+.3f} ({gain.low_95:+.3f} to {gain.high_95:+.3f})"
        cells += [f"{_one(part, name).value:.3f}", bold(text, _beats(gain))]
    return cells


def _numbers(row: Any) -> tuple[float, float, float]:
    return row.value, row.low_95, row.high_95


def _with_ends(value: float, low: float, high: float) -> str:
    return f"{value:.3f}" if np.isnan(low) else format_interval(value, low, high, ".3f")


def _mean(values: pd.Series, seed: int) -> str:
    known = values.dropna()
    return _with_ends(*mean_interval(known, seed)) if len(known) else "-"


def _number(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.3g}"


def _inflation(value: float) -> str:
    return "given away by the others" if np.isnan(value) else f"{value:.3g}"


if __name__ == "__main__":
    raise SystemExit(main())
