"""Behaviour of an agent in mazes: episodes played to their end, exact probabilities, and which
features of a level predict whether the agent gets the cheese.

A killed run goes on after the last level that was done; more levels can be added to a finished one.
To compare agents, run it on each with an output folder of its own.
"""

from __future__ import annotations

import argparse
import dataclasses

import numpy as np
import pandas as pd

from agents.agent_file import load_agent
from agents.provenance import agent_sha256
from common.cli import Parser, set_up_logging, whole
from common.devices import resolve_compute
from common.errors import UserError, script_main
from common.files import versions
from common.progress import Progress
from common.results import ResultStore
from envs.procgen_env import EnvConfig
from maze.level.flags import add_agent_flags, add_output_flags, filters_of, levels_of
from maze.level.grid import FEATURES, FORK
from maze.level.regions import add_cheese_region_flag, cheese_region
from maze.level.state import GAME, WORLD_DIMS, game_of
from maze.studies.behaviour_files import BEHAVIOUR_FILES, paths_of, read_levels
from maze.studies.behaviour_report import draw_episodes, draw_regressions, report
from maze.studies.behaviour_rows import EXACT, GOT, of_tables
from maze.studies.episodes import check_entries, entries_of, playable, table_of
from maze.studies.prediction import FEWEST, check_outcomes, regressions
from stats.significance import share


def parser() -> Parser:
    flags = Parser(__doc__)
    add_agent_flags(flags, "agent to play", num_mazes=2000)
    add_cheese_region_flag(flags)
    flags.add_argument("--region", type=whole(1, max(WORLD_DIMS.values())), default=5,
                       help="rows of the top right region, for which of cheese and region is first")
    flags.add_argument("--exact", action="store_true",
                       help="also compute exact probabilities of reaching cheese and region, for "
                            "agents without memory")
    flags.add_argument("--regress", action="store_true",
                       help="also regress getting the cheese on the features of the forks")
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
    found = levels_of(args, edit)
    states = playable(found)
    game = game_of(states)
    num_forks = sum(state.grid.kind() == FORK for state in states)
    if args.regress and num_forks < FEWEST:
        raise UserError(f"--regress needs at least {FEWEST} forks; there are {num_forks}: take "
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
    entries = read_levels(store)
    check_entries(entries, states)
    missing = [number for number in range(len(states)) if number not in entries]
    with Progress(len(states), "level", len(states) - len(missing)) as progress:
        for entry in entries_of(policy, compute, states, missing, args.seed, args.exact,
                                args.region):
            store.append("levels", row=entry.row())
            entries[entry.number] = entry
            progress.update(progress.done + 1)
    chosen = [entries[number] for number in range(len(states))]
    table = table_of(chosen, states, args.region)
    store.write("paths", value=paths_of(chosen))
    store.write("episodes", value=table)
    notes = [f"{len(found) - len(states)} of {len(found)} levels were left out: they have not one "
             "cheese that can be reached."] if len(found) > len(states) else []
    predicted, reason = regressed(table, args)
    title = f"{args.agent_file.name}, {len(table)} {game.distribution_mode} levels"
    draw_episodes(store.file_of("episodes_figure"), table, title)
    if predicted is not None:
        store.write("regressions", value=predicted)
        draw_regressions(store.file_of("regressions_figure"), predicted, title)
    elif reason:
        notes.append(reason)
    rows = of_tables(table, predicted, store.settings())
    text = report(table, predicted, rows, what_was_run(args, title), notes, args.region, args.seed)
    store.write("report", value=text + "\n")
    value, low, high = share(table[GOT].sum(), len(table))
    print(f"{title}: got the cheese in {100 * value:.1f} % ({100 * low:.1f} to {100 * high:.1f})")
    for note in notes:
        print(note)
    print(f"wrote {store.file_of('report')}, {store.file_of('episodes').name} and "
          f"{store.file_of('paths').name} next to it")


def regressed(table: pd.DataFrame, args: argparse.Namespace) -> tuple[pd.DataFrame | None, str]:
    """The regressions on the forks, or why there are none, if they were asked for."""
    if not args.regress:
        return None, ""
    forks = table[table["kind"] == FORK]
    targets = {GOT: forks[GOT].to_numpy(np.float64)}
    if args.exact:
        targets[EXACT] = forks[EXACT].to_numpy(np.float64).clip(0, 1)  # but for rounding, it is
    try:
        for name, target in targets.items():
            check_outcomes(target, name)
    except UserError as error:  # an agent that always gets the cheese is a finding
        return None, f"There are no regressions: {error}."
    return regressions(forks[list(FEATURES)], targets, forks[GOT].to_numpy(), args.seed), ""


def what_was_run(args: argparse.Namespace, title: str) -> str:
    """A sentence on the run."""
    parts = [title]
    parts += [f"cheese put into the last {args.cheese_region} rows and columns"
              ] if args.cheese_region else []
    parts += [f"levels: {' '.join(args.levels)}"] if args.levels else [f"seed {args.seed}"]
    parts += [f"{name.replace('_', ' ')}: {value}" for name, value
              in dataclasses.asdict(filters_of(args)).items() if value is not None]
    return "; ".join(parts) + "."


if __name__ == "__main__":
    raise SystemExit(main())
