"""Behaviour of an agent in mazes: complete episodes, exact probabilities, and regressions.

Regressions on features of the levels predict whether the agent gets the cheese. A killed run
resumes after its last finished level; more levels can be added to a finished run. To compare
agents, run this script on each of them with a separate output folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from agents.goal_places import cheese_region, region_option
from agents.networks import Policy
from common.errors import UserError
from common.options import command, option, redefine
from common.palette import BLUE, COLOURS, DPI, VERMILION
from common.progress import Progress
from common.results import ResultStore
from common.tables import markdown_escaped, markdown_table
from envs.maze.grid import FEATURES, FORK, KINDS, describe, kind_of
from envs.maze.state import GAME, MazeState, check_seeds, game_of
from envs.procgen_env import EnvConfig
from maze.options import AgentOptions, ExactOptions, MazeOptions, RegionOptions
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
    mean_interval,
    paths_of,
    play_levels,
    read_levels,
)
from maze.studies.prediction import (
    ALL,
    FOLDS,
    NUM_SUBSETS,
    RESAMPLINGS,
    SET,
    SETS,
    SINGLE,
    regressions,
)
from stats.forest_plot import forest_plot
from stats.report import bold, format_interval
from stats.significance import LEVEL, share

_MODELS = {  # models in the report: title and explanation
    SINGLE: ("Which features predict it", "Logistic regression on one feature alone."),
    SET: ("Sets of features", "L1 logistic regression (penalty of weight 1) on standardised "
          f"features; intervals of coefficients from fits to {RESAMPLINGS} bootstrap resamples of "
          "the levels. VIF: variance inflation factor, empty if the feature is a linear function "
          "of the others. Sets: "
          + "; ".join(f"{name}: {', '.join(members)}" for name, members in SETS.items()) + "."),
    ALL: ("Signs over subsets of the features", f"L1 logistic regressions on {NUM_SUBSETS} random "
          f"subsets of the {len(FEATURES)} features. Of the subsets that contain a feature: share "
          "in which its coefficient is positive, and share in which it is negative; otherwise it "
          "is 0. VIF: given all other features.")}
_BINS = 10  # bins of exact probabilities


@dataclasses.dataclass(frozen=True, kw_only=True)
class BehaviourOptions(ExactOptions):
    """Behaviour of an agent in mazes: complete episodes, exact probabilities, and regressions."""

    num_mazes: int = redefine(MazeOptions, "num_mazes", default=2000)
    cheese_region: int = region_option()
    region: int = redefine(RegionOptions, "region", help=(
        "number of rows and columns of the top right region; the report gives the shares of "
        "episodes in which the mouse reaches the cheese or the region first"))
    regress: bool = option(
        False, "also fit regressions of getting the cheese on the features of forks")
    output_dir: Path = redefine(AgentOptions, "output_dir", default=Path("analysis/maze/behaviour"))

    @property
    def selection(self) -> dict[str, Any]:
        """Options that select the levels, as in a report."""
        return {"seed": self.seed, "levels": list(self.levels) if self.levels else None,
                "cheese region": self.cheese_region, **dataclasses.asdict(self.filters)}


def measure_behaviour(options: BehaviourOptions) -> pd.DataFrame | None:
    """Play all levels, write the results to ``options.output_dir``, and return the table of
    episodes; None for a dry run."""
    policy = options.load_agent()
    edit = cheese_region(EnvConfig(GAME, options.distribution_mode), options.cheese_region)
    chosen = options.choose_levels(edit)
    states = [state for state in chosen if kind_of(state.grid) in KINDS]
    if not states:
        raise UserError(f"none of {len(chosen)} levels has exactly one reachable cheese; choose "
                        "other levels")
    check_seeds(states)
    if options.dry_run:
        print(*(f"{state.level_seed}: {describe(state.grid)}" for state in states), sep="\n")
        return None
    game = game_of(states)
    store = options.open_store(BEHAVIOUR_FILES, {
        "distribution_mode": game.distribution_mode, "use_backgrounds": game.use_backgrounds,
        "levels": options.levels, "start_level": options.start_level,
        "num_levels": options.num_levels, "filters": dataclasses.asdict(options.filters),
        "cheese_region": options.cheese_region, "region": options.region, "exact": options.exact,
        "seed": options.seed})
    levels = play_missing(options, policy, store, states)
    table = episodes_table(levels, states, options.region)
    store.write("paths", value=paths_of(levels))
    notes = [f"{len(chosen) - len(states)} of {len(chosen)} levels were left out, because they do "
             "not have exactly one reachable cheese."] if len(chosen) > len(states) else []
    title = f"{options.agent_file.name}, {len(table)} {game.distribution_mode} levels"
    write_results(options, store, table, title, notes)
    return table


def play_missing(options: BehaviourOptions, policy: Policy, store: ResultStore,
                 states: Sequence[MazeState]) -> list[dict]:
    """Play the levels that the store lacks, and return all levels' results."""
    played = read_levels(store, states)
    missing = [number for number in range(len(states)) if number not in played]
    with Progress(len(states), "level", len(states) - len(missing)) as progress:
        for level in play_levels(policy, options.compute, states, missing, options.seed,
                                 options.exact, options.region):
            store.append("levels", row=level)
            played[level["number"]] = level
            progress.update(progress.done + 1)
    return [played[number] for number in range(len(states))]


def write_results(options: BehaviourOptions, store: ResultStore, table: pd.DataFrame, title: str,
                  notes: Sequence[str]) -> None:
    """Write the table of episodes, regressions, figures and report.

    Args:
        title: agent and levels, for figures and report.
        notes: sentences on excluded levels.
    """
    store.write("episodes", value=table)
    with store.file("episodes_figure") as temporary:
        draw_episodes(temporary, table, title)
    predicted = None
    if options.regress:
        try:
            predicted = fit_regressions(table, options.seed)
        except UserError as error:  # not a failure: the agent may always get the cheese
            notes = [*notes, f"There are no regressions: {error}."]
    if predicted is not None:
        store.write("regressions", value=predicted)
        with store.file("regressions_figure") as temporary:
            draw_regressions(temporary, predicted, title)
    what = "; ".join([title, *(f"{name}: {value}" for name, value in options.selection.items()
                               if value)])
    store.write("report", value=report(table, predicted, what, notes, options.region,
                                       options.seed))
    print(f"{title}: got the cheese in {100 * table[GOT].mean():.1f} %", *notes,
          f"wrote {store.file_of('report')}, {store.file_of('episodes').name} and "
          f"{store.file_of('paths').name} next to it", sep="\n")


def fit_regressions(table: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Fit all regressions on the forks of a table of episodes; see ``prediction.regressions``.

    The targets are whether the agent got the cheese and, if every fork has it, the exact
    probability of getting it.

    Args:
        table: table of episodes, from ``episodes_table``.
        seed: seed of folds, bootstrap, sign flips and subsets.

    Raises:
        UserError: if there are too few forks with one of the outcomes.
    """
    forks = table[table["kind"] == FORK]
    targets = {GOT: forks[GOT].to_numpy(np.float64)}
    exact = forks[EXACT_CHEESE].to_numpy(np.float64)
    if np.isfinite(exact).all():
        targets[EXACT_CHEESE] = exact.clip(0, 1)  # removes rounding errors
    return regressions(forks[list(FEATURES)], targets, forks[GOT].to_numpy(), seed)


def report(table: pd.DataFrame, regressions: pd.DataFrame | None, what: str,
           notes: Sequence[str], region: int, seed: int) -> str:
    """Return the report as Markdown.

    Args:
        table: table of episodes, from ``episodes_table``.
        regressions: table of regressions, from ``prediction.regressions``, or None.
        what: description of the run.
        notes: sentences on excluded levels and missing regressions.
        region: number of rows and columns of the top right region.
    """
    lines = ["# Behaviour of the agent in mazes", "", f"{markdown_escaped(what)}.", "",
             *(f"{note}\n" for note in notes), "## How often it gets the cheese", "",
             "Episodes are played to their end, at most 500 steps. The game itself reports whether "
             f"the cheese was reached. The region is the last {region} rows and columns. Cheese "
             "first: share of episodes in which the mouse reached the cheese before any other "
             "square of the region. Shares have Wilson's 95 % interval; means over levels have a "
             "bootstrap interval.", ""]
    lines += markdown_table(
        ("levels", "episodes", PLAYED_LABEL, EXACT_LABEL, "cheese first", "region first", "neither",
         "P(cheese) at the decision square", "steps"),
        [(name, str(len(group)), format_interval(*share(group[GOT].sum(), len(group)), ".3f"),
          _mean(group[EXACT_CHEESE], seed),
          *(f"{(group['first'] == first).mean():.3f}" for first in (CHEESE, REGION, NEITHER)),
          _mean(group["p_cheese"], seed), f"{group['steps'].mean():.1f}")
         for name, group in group_levels(table).items()])
    if regressions is not None:
        lines += ["## Regressions", "", f"Scores are from {FOLDS}-fold cross-validation over "
                  "levels; features are standardised on the training folds. Gains over the base "
                  "rate are paired, with a bootstrap interval over levels and a sign-flip p after "
                  "Holm's correction for all gains in this report. **Bold**: the interval lies "
                  f"above 0 and p (Holm) <= {LEVEL}. The second target is the exact probability; "
                  "its scores are expected values over episodes, without sampling noise.", ""]
        for (model, target), part in regressions.groupby(["model", "target"], sort=False):
            lines += _regression_lines(part, *_MODELS[model], TARGET_LABELS[target])
    return "\n".join(lines)


def _regression_lines(part: pd.DataFrame, title: str, explanation: str, target: str) -> list[str]:
    """Format the numbers of one kind of model and one target as a Markdown section.

    The table of the section has a row per feature and a column per quantity.

    Args:
        part: rows of the table of regressions.
        title, explanation: title and explanation of the kind of model.
    """
    feature = part["feature"].where(part["model"] != SINGLE, "-")
    cells = part.assign(text=list(map(_number, part.itertuples())), feature=feature)
    rows = pd.MultiIndex.from_frame(cells[["features", "feature"]].drop_duplicates())
    names = part["quantity"].unique()
    wide = cells.pivot(index=["features", "feature"], columns="quantity", values="text").fillna("")
    wide = wide.reindex(rows)[names]
    return [f"### {title}: {target}", "", explanation, "", *markdown_table(
        ("features", "feature", *(name.replace("_", " ") for name in names)),
        [(*index, *row) for index, row in zip(wide.index, wide.to_numpy())])]


def _number(row: Any) -> str:
    """Format a row of the table of regressions; claimed gains are bold."""
    if np.isnan(row.value):
        return ""
    base = f"; base {row.base:.3f}" if np.isfinite(row.base) else ""
    return bold(format_interval(row.value, row.low_95, row.high_95, ".3f") + base, _beats(row))


def _beats(row: Any) -> bool:
    """Return whether a row of the table of regressions is a claimed (significant) gain."""
    return row.low_95 > 0 and row.p_holm <= LEVEL


def _mean(values: pd.Series, seed: int) -> str:
    known = values.dropna()
    return format_interval(*mean_interval(known, seed), ".3f") if len(known) else "-"


def draw_episodes(path: Path, table: pd.DataFrame, title: str) -> None:
    """Draw success rates, with Wilson's intervals, by kind of level and place of the cheese, by
    size of the maze, and by exact probability, from a table of episodes."""
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    by_group, by_size, by_exact = figure.subplots(1, 3)
    sizes = {f"{size} rows": rows for size, rows in table.groupby("maze_dim")}
    for axes, groups in ((by_group, group_levels(table)), (by_size, sizes)):
        forest_plot(axes, _shares(groups), [f"{name} ({len(rows)})"
                                            for name, rows in groups.items()],
                    [{"color": BLUE}] * len(groups), "value")
        axes.set(xlabel=f"share of episodes that {PLAYED_LABEL} (95 % interval)", xlim=(0, 1.02))
    exact = table[table[EXACT_CHEESE].notna()]
    bins = exact.groupby((exact[EXACT_CHEESE] * _BINS).astype(int).clip(upper=_BINS - 1))
    shares = _shares(dict(list(bins)))
    by_exact.plot([0, 1], [0, 1], color="black", linewidth=0.8)
    by_exact.errorbar(bins[EXACT_CHEESE].mean(), shares["value"],
                      np.array([shares["value"] - shares["low_95"],
                                shares["high_95"] - shares["value"]]), fmt="o", color=BLUE)
    by_exact.set(xlabel=f"{EXACT_LABEL}, in {_BINS} bins" if len(exact) else
                 "no exact probabilities were computed", ylabel=f"share that {PLAYED_LABEL}")
    rate = format_interval(*share(table[GOT].sum(), len(table)), ".2f")
    figure.suptitle(f"The share of all episodes that {PLAYED_LABEL} is {rate}\n{title}")
    figure.savefig(path, dpi=DPI)


def _shares(groups: Mapping[Any, pd.DataFrame]) -> pd.DataFrame:
    """Return the success rate of each group of episodes, with its 95 % interval."""
    return pd.DataFrame([share(rows[GOT].sum(), len(rows)) for rows in groups.values()],
                        columns=["value", "low_95", "high_95"], dtype=float)


def draw_regressions(path: Path, table: pd.DataFrame, title: str) -> None:
    """Draw, for each target, the gains of single features over the base rate and the coefficients
    of the sets of features."""
    targets = list(table["target"].unique())
    figure = Figure(figsize=(17, 5.2 * len(targets)), layout="constrained")
    for panels, target in zip(figure.subplots(len(targets), 3, squeeze=False), targets):
        numbers = table[table["target"] == target].set_index(["model", "quantity"]).sort_index(
            kind="stable")
        for axes, quantity in zip(panels, ("accuracy_gain", "log_loss_gain")):
            rows = numbers.loc[(SINGLE, quantity)].sort_values("value", ascending=False)
            forest_plot(axes, rows, rows["features"].str.replace("_", " "), [
                {"color": VERMILION if _beats(row) else BLUE} for row in rows.itertuples()],
                "value")
            axes.set(xlabel=f"{quantity.replace('_', ' ')} over the base rate (red: significant "
                     "after Holm)", title=f"{TARGET_LABELS[target]}: one feature alone")
        rows = numbers.loc[(SET, "coefficient")]
        colours = dict(zip(rows["features"].unique(), COLOURS))
        names = (rows["features"] + ": " + rows["feature"]).str.replace("_", " ")
        forest_plot(panels[2], rows, names, [
            {"color": colours[name]} for name in rows["features"]], "value")
        panels[2].set(xlabel="coefficient, features standardised (95 % interval)",
                      title=f"{TARGET_LABELS[target]}: sets, L1")
        for axes in panels:
            axes.axvline(0, color="black", linewidth=0.8)
    gains = table[(table["model"] == SINGLE) & (table["quantity"] == "log_loss_gain")]
    better = sum(map(_beats, gains.itertuples()))
    figure.suptitle(f"{better} of {len(gains)} single features predict better than the base rate "
                    f"(log loss)\n{title}")
    figure.savefig(path, dpi=DPI)


main = command(BehaviourOptions, measure_behaviour)

if __name__ == "__main__":
    raise SystemExit(main())
