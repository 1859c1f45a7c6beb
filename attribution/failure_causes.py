"""Count an agent's failures by cause in several arms: the original agent, agents with ablated
features, the original with invisible hazards, and random edits of the same size as controls. All
arms play the same levels with the same random draws.

A killed run resumes after the last episode. Each shard plays the episodes of its own arms; --join
then counts the failures.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from agents.config import add_env_flags, env_config
from agents.episodes import last_steps, side_by_side_films
from agents.failures import causes_of, unknown_hazards
from agents.reference_set import MIN_FRAMES, played_reference
from attribution.failures.causes import (
    Levels,
    Run,
    agent_conditions,
    invisible_hazards,
    label_agents,
    match_controls,
    play_condition,
    run_of,
)
from attribution.failures.results import (
    ORIGINAL,
    blindness,
    discordant_levels,
    effects,
    failure_files,
    first_failures,
    plot_rates,
    rates,
    report,
)
from common.cli import (
    Parser,
    add_compute_flags,
    controls_or_none,
    count,
    environments,
    folder_name,
    from_zero,
    seed,
    set_up_logging,
    whole,
)
from common.devices import resolve_compute
from common.errors import UserError, script_main
from common.files import versions
from common.palette import DPI
from common.results import ResultStore
from common.shards import WHOLE, add_shard_flags
from common.video import FRAMES_PER_SECOND, mark_action, write_video
from interventions.flags import REFERENCE_SIZE
from stats.effects import Condition, check_starts

LAST_STEPS = 150  # number of last steps of an episode shown in a film
NUM_FRAMES = 8  # last frames per failure in the figure of the original's failures


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("--agent_file", type=Path, nargs="+", required=True,
                       help="the original agent, followed by edited agents from python -m "
                            "attribution.edit_agent")
    flags.add_argument("--labels", nargs="+", type=folder_name,
                       help="names of the agents; if not given, the names of their files")
    flags.add_argument("--num_episodes", type=count, default=1000,
                       help="number of levels that every arm plays, one episode each")
    flags.add_argument("--num_controls", type=controls_or_none, default=20,
                       help="number of random edits of the same size per edited agent; claims need "
                            "at least 19")
    flags.add_argument("--control_files", type=Path, nargs="+", default=[], metavar="FILE",
                       help="agents that are the controls of a single edited agent, instead of "
                            "random edits: for an edit from attribution.choose_edits, the agents "
                            "of the same search with random features (its --num_controls)")
    flags.add_argument("--invisible", nargs="+", default=[], metavar="HAZARD",
                       help="hazards, such as saw; for each, the original agent also plays with "
                            "this hazard invisible")
    flags.add_argument("--num_films", type=from_zero, default=2,
                       help="maximum number of films per arm; each shows a level that either the "
                            "arm or the original agent fails, but not both")
    add_env_flags(flags)
    flags.add_argument("--training_levels", action="store_true",
                       help="play levels in the range of --start_level and --num_levels instead of "
                            "levels outside it")
    flags.add_argument("--num_envs", type=environments, default=64,
                       help="number of episodes played in parallel")
    flags.add_argument("--reference_size", type=whole(MIN_FRAMES, 10_000), default=REFERENCE_SIZE,
                       help="number of frames, from other levels, on which the sizes of edits are "
                            "measured")
    flags.add_argument("--seed", type=seed, default=0,
                       help="seed of levels, actions, controls and confidence intervals")
    flags.add_argument("--output_dir", type=Path, default=Path("analysis/attribution/causes"),
                       help="folder to write to")
    flags.add_argument("--overwrite", action="store_true",
                       help="delete the previous contents of the folder")
    add_shard_flags(flags, "the arms")
    add_compute_flags(flags)
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    set_up_logging(args.log_level)
    compute = resolve_compute(args.device, args.gpu_device, "float32"
                              if args.precision == "auto" else args.precision)
    config = env_config(args, args.agent_file[0])
    if not args.training_levels:
        config = config.unseen_levels()
    check_starts(args.num_episodes, "--num_episodes")
    levels = Levels(config, compute, list(enumerate(config.draw_levels(
        args.num_episodes, args.seed))), args.seed, args.num_envs)
    labels = label_agents(args.agent_file, args.labels)
    shown, controls = make_conditions(args, labels, levels)
    conditions = [*shown, *controls]
    settings = {condition.name: condition.settings for condition in conditions}
    store = ResultStore(args.output_dir, failure_files(config.env_name))
    store.open(
        {"env": vars(config), "num_episodes": args.num_episodes, "seed": args.seed,
         "precision": compute.precision, "reference_size": args.reference_size,
         "versions": versions(), "arms": settings}, args.overwrite, args.shard,
        {"arms": {name: made["agent_sha256"] for name, made in settings.items()}}, args.join)
    for condition in args.shard.of(conditions):
        play_condition(store, condition, levels)
    store.finish()
    if args.shard != WHOLE:
        return
    description = (
        f"{labels[0]} and the arms compared with it, on {args.num_episodes} levels of "
        f"{config.env_name} ({config.distribution_mode}"
        f"{', with backgrounds' if config.use_backgrounds else ''}), the same for every arm, "
        f"with the same random draws. {unknown_hazards(config.env_name)}").strip()
    tables = write_tables(store, conditions, config.env_name, args.seed)
    with store.file("figure") as path:
        plot_rates(tables[0], description).savefig(path, dpi=DPI)
    films = write_films(store, shown, levels, args.num_films)
    failed = first_failures(store.read("episodes", ORIGINAL))
    if len(failed) and not store.has("last_frames"):
        with store.file("last_frames") as path:
            plot_last_frames(last_frames_of(shown[0], failed, levels)).savefig(path, dpi=DPI)
    store.write("report", value=report(
        *tables, [str(film.relative_to(store.path)) for film in films],
        store.file_of("last_frames").name if len(failed) else "", description,
        describe_controls(controls)))
    failed_by = tables[0][~tables[0]["control"] & (tables[0]["failures"] > 0)]
    print(failed_by[["label", "cause", "failures", "levels"]].to_string(index=False))
    print(f"wrote {store.file_of('report')}, tables, figures and {len(films)} films")


def make_conditions(args: argparse.Namespace, labels: Sequence[str], levels: Levels
                    ) -> tuple[list[Condition[Run]], list[Condition[Run]]]:
    """Create the conditions to report, the original first, and the controls.

    Args:
        args: the parsed flags.
        labels: labels of the agents.
        levels: the levels, and settings for playing them.
    """
    config = levels.config
    controls: list[Condition[Run]] = []
    agents = agent_conditions(args.agent_file, labels, levels.compute.device)
    if args.control_files:
        if len(agents) != 2:
            raise UserError("--control_files are the controls of one edited agent, so --agent_file "
                            "needs the original and one edited agent")
        names = [f"control_{number:03d}_{labels[1]}" for number in range(len(args.control_files))]
        controls = [dataclasses.replace(condition, name=name, control=True,
                                        pattern=agents[1].pattern)
                    for name, condition in zip(names, agent_conditions(
                        [args.agent_file[0], *args.control_files], [ORIGINAL, *names],
                        levels.compute.device)[1:])]
    elif args.num_controls and len(agents) > 1:
        reference = played_reference(
            run_of(agents[0]).policy, levels.compute, config, [seed for _, seed in levels.levels],
            args.reference_size, args.seed)
        agents, controls = match_controls(agents, reference, args.num_controls, args.seed)
    pattern = controls[0].pattern if controls else None
    return [*agents, *invisible_hazards(args.invisible, config.env_name, agents[0],
                                        pattern)], controls


def write_tables(store: ResultStore, conditions: Sequence[Condition[Run]], game: str,
                 seed: int
                 ) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Compute and write the tables ``rates``, ``effects`` and ``blindness``, and return them.

    Args:
        store: open store with the episodes of all conditions.
        conditions: all conditions, the original first.
        game: name of the game.
        seed: seed of the bootstraps.
    """
    causes = causes_of(game)
    episodes = {condition.name: store.read("episodes", condition.name) for condition in conditions}
    hidden = {condition.settings["invisible"]: condition.name for condition in conditions
              if "invisible" in condition.settings}
    edited = [condition for condition in conditions[1:]
              if not condition.control and condition.name not in hidden.values()]
    moved = {condition.name: run_of(condition).moved for condition in conditions}
    tables = (
        rates(conditions, episodes, causes, seed),
        effects(conditions[1:], moved, episodes, causes, seed),
        blindness(edited, hidden, episodes, seed))
    for name, table in zip(("rates", "effects", "blindness"), tables):
        store.write(name, value=table)
    return tables


def write_films(store: ResultStore, shown: Sequence[Condition[Run]], levels: Levels,
                number: int) -> list[Path]:
    """Write films of levels that are failed under exactly one of two conditions: the original and
    another condition.

    Args:
        store: open store with the episodes of the conditions.
        shown: the conditions, the original first.
        levels: settings for playing levels.
        number: maximum number of films per condition.

    Returns:
        Paths of the films.
    """
    original, films = store.read("episodes", ORIGINAL), []
    for condition in shown[1:]:
        other = store.read("episodes", condition.name)
        for place in discordant_levels(original, other, number):
            level = int(original["level_seed"][place])
            films.append(store.file_of("film", condition.name, level))
            if not films[-1].exists():
                with store.file("film", condition.name, level) as path:
                    write_film(path, (shown[0], condition),
                               (original["cause"][place], other["cause"][place]), levels,
                               (int(place), level))
    return films


def describe_controls(controls: Sequence[Condition[Run]]) -> str:
    """Describe the controls and their sizes for the report; return an empty string if there are
    none."""
    far = sum(not control.matched for control in controls)
    if controls and not controls[0].settings.get("strengths"):
        return "The controls are the agents of --control_files."
    return "" if not controls else (
        "The controls have the entries of the edit's directions at permuted channels, and a "
        "strength at which their change of the layer's output has the same mean size.") + (
        f" At the edit's own strength, {far} of {len(controls)} would differ in size by more than "
        "a quarter; no closer ones were found." if far else "")


def write_film(path: Path, conditions: Sequence[Condition[Run]], causes: Sequence[str],
               levels: Levels, level: tuple[int, int]) -> None:
    """Replay a level under each condition, and write a film of the last LAST_STEPS steps, side by
    side.

    Args:
        path: video file to write.
        conditions: the conditions.
        causes: cause of failure under each condition, or SOLVED, for the titles.
        levels: settings for playing levels.
        level: number and seed of the level.
    """
    films = {}
    for condition, cause in zip(conditions, causes):
        run = run_of(condition)
        [episode] = levels.play(condition, [level])()
        films[f"{condition.label}: {cause}"] = last_steps(
            levels.config, level[1], episode.actions[:-1].tolist(), LAST_STEPS, run.edit,
            run.edit_every_step)
    write_video(path, side_by_side_films(films), FRAMES_PER_SECOND)


def last_frames_of(condition: Condition[Run], failed: pd.DataFrame, levels: Levels
                   ) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Replay failed episodes, and return their last frames.

    Args:
        condition: the condition under which the episodes failed.
        failed: rows of the condition's table of episodes.
        levels: settings for playing levels.

    Returns:
        For each episode: a title; its last T frames, at most NUM_FRAMES, uint8 (T, 64, 64, 3), each
        marked with the action taken in it; and the value estimates in these frames, float32 (T,).
    """
    again = list(zip(failed["level"].tolist(), failed["level_seed"].tolist()))
    episodes = {episode.number: episode
                for episode in levels.play(condition, again, keep_frames=True)()}
    endings = []
    for (number, level), cause in zip(again, failed["cause"]):
        episode = episodes[number]
        end = len(episode.actions) - 1  # the terminal frame, which is black
        begin = max(0, end - NUM_FRAMES)
        endings.append((
            f"{cause}: level {level}, steps {begin} to {end - 1}",
            np.stack([mark_action(episode.frames[step], episode.actions[step])
                      for step in range(begin, end)]), episode.values[begin:end]))
    return endings


def plot_last_frames(endings: Sequence[tuple[str, np.ndarray, np.ndarray]]) -> Figure:
    """Plot the result of ``last_frames_of``, one row per episode."""
    figure = Figure(figsize=(1.3 * NUM_FRAMES, 1.9 * len(endings)), layout="constrained")
    for part, (title, frames, values) in zip(
            figure.subfigures(len(endings), squeeze=False).flat, endings):
        part.suptitle(title, x=0.01, ha="left", fontsize=9)
        panels = part.subplots(1, NUM_FRAMES)
        for panel in panels:
            panel.axis("off")
        for panel, frame, value in zip(panels, frames, values):
            panel.imshow(frame, interpolation="nearest")
            panel.set_title(f"V {value:.1f}", fontsize=8)
    return figure


if __name__ == "__main__":
    raise SystemExit(main())
