"""Count an agent's failures by cause in several conditions, see ``FailureCausesOptions``.

A killed run resumes after the last episode. Each shard plays the episodes of its own conditions;
--join then counts the failures.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from agents.episodes import PlayOptions, last_steps, side_by_side_films
from agents.failures import causes_of, unknown_hazards
from agents.reference_set import MIN_FRAMES
from agents.testbed import Condition, Testbed
from attribution.config import ANALYSES
from attribution.failures.causes import (
    PlayedLevelsOptions,
    agent_conditions,
    invisible_hazards,
    label_agents,
    match_controls,
    play_condition,
)
from attribution.failures.results import (
    ORIGINAL,
    blindness,
    discordant_levels,
    effects,
    failure_files,
    first_failures,
    label_words,
    plot_rates,
    rates,
    report,
)
from common.cli import controls_or_none, folder_name, from_zero, whole
from common.errors import UserError
from common.files import versions
from common.options import ShardOptions, command, option
from common.palette import DPI
from common.results import ResultStore
from common.shards import WHOLE
from common.tables import with_minus
from common.video import FRAMES_PER_SECOND, mark_action, write_video
from envs.objects import kind_label
from interventions.flags import REFERENCE_SIZE
from stats.effects import check_starts

LAST_STEPS = 150  # number of last steps of an episode shown in a film
NUM_FRAMES = 8  # last frames per failure in the figure of the original's failures


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailureCausesOptions(ShardOptions, PlayedLevelsOptions):
    """Count an agent's failures by cause in several conditions: the original agent, agents with
    ablated features, the original with invisible hazards, and random edits of the same size as
    controls. All conditions play the same levels with the same random draws."""

    agent_file: tuple[Path, ...] = option(
        help="the original agent, followed by edited agents from python -m attribution.edit_agent")
    labels: tuple[str, ...] | None = option(
        None, "names of the agents; if not given, the names of their files", type=folder_name)
    num_controls: int = option(20, "number of random edits of the same size per edited agent; "
                                   "claims need at least 19", type=controls_or_none)
    control_files: tuple[Path, ...] = option(
        (), "agents that are the controls of a single edited agent, instead of random edits: for "
            "an edit from attribution.choose_edits, the agents of the same search with random "
            "features (its --num_controls)", metavar="FILE")
    invisible: tuple[str, ...] = option(
        (), "hazards, such as saw; for each, the original agent also plays with this hazard "
            "invisible", metavar="HAZARD")
    num_films: int = option(
        2, "maximum number of films per condition; each shows a level that is failed either under "
           "the condition or by the original agent, but not both", type=from_zero)
    training_levels: bool = option(False, "play levels in the range of --start_level and "
                                          "--num_levels instead of levels outside it")
    reference_size: int = option(
        REFERENCE_SIZE, "number of frames, from other levels, on which the sizes of edits are "
                        "measured", type=whole(MIN_FRAMES, 10_000))
    output_dir: Path = option(ANALYSES / "causes", "folder to write to")


def count_failures(options: FailureCausesOptions) -> ResultStore:
    """Play the levels in all conditions, or in those of the shard, and write the counts; return
    their folder."""
    config = options.env_config(options.agent_file[0])
    if not options.training_levels:
        config = config.unseen_levels()
    check_starts(options.num_episodes, "--num_episodes")
    labels = label_agents(options.agent_file, options.labels)
    agents = agent_conditions(options.agent_file, labels, options.compute.device)
    testbed = options.testbed(agents[0], config)
    shown, controls = make_conditions(options, labels, agents, testbed)
    conditions = [*shown, *controls]
    settings = {condition.name: condition.settings for condition in conditions}
    store = ResultStore(options.output_dir, failure_files(config.env_name))
    store.open(
        {"env": vars(config), "num_episodes": options.num_episodes, "seed": options.seed,
         "precision": options.compute.precision, "reference_size": options.reference_size,
         "versions": versions(), "conditions": settings}, options.overwrite, options.shard,
        {"conditions": {name: made["agent_sha256"] for name, made in settings.items()}},
        options.join)
    for condition in options.shard.of(conditions):
        play_condition(store, condition, testbed)
    store.finish()
    if options.shard == WHOLE:
        write_report(store, shown, controls, testbed, options.num_films, (
            f"{labels[0]} and the conditions compared with it, on {options.num_episodes} levels of "
            f"{config.env_name} ({config.distribution_mode}"
            f"{', with backgrounds' if config.use_backgrounds else ''}), the same for all, "
            f"with the same random draws. {unknown_hazards(config.env_name)}").strip())
    return store


def write_report(store: ResultStore, shown: Sequence[Condition[float]],
                 controls: Sequence[Condition[float]], testbed: Testbed, num_films: int,
                 description: str) -> None:
    """Write tables, figures, films and the report, and print the failures by cause.

    Args:
        store: store with the episodes of all conditions.
        shown, controls: see ``make_conditions``.
        testbed: the levels.
        num_films: maximum number of films per condition.
        description: sentence on the agents and levels.
    """
    assert testbed.env is not None
    tables = write_tables(store, [*shown, *controls], testbed.env.env_name, testbed.seed)
    with store.file("figure") as path:
        plot_rates(tables[0], description).savefig(path, dpi=DPI)
    films = write_films(store, shown, testbed, num_films)
    failed = first_failures(store.read("episodes", ORIGINAL))
    if len(failed) and not store.has("last_frames"):
        with store.file("last_frames") as path:
            plot_last_frames(last_frames_of(shown[0], failed, testbed)).savefig(path, dpi=DPI)
    store.write("report", value=report(
        *tables, [str(film.relative_to(store.path)) for film in films],
        store.file_of("last_frames").name if len(failed) else "", description,
        describe_controls(controls)))
    failed_by = tables[0][~tables[0]["control"] & (tables[0]["failures"] > 0)]
    print(failed_by[["label", "cause", "failures", "levels"]].to_string(index=False))
    print(f"wrote {store.file_of('report')}, tables, figures and {len(films)} films")


def make_conditions(options: FailureCausesOptions, labels: Sequence[str],
                    agents: list[Condition[float]], testbed: Testbed
                    ) -> tuple[list[Condition[float]], list[Condition[float]]]:
    """Create the conditions to report, the original first, and the controls.

    Args:
        labels, agents: labels and conditions of the agents.
        testbed: the levels.
    """
    assert testbed.env is not None
    controls: list[Condition[float]] = []
    if options.control_files:
        if len(agents) != 2:
            raise UserError("--control_files are the controls of one edited agent, so --agent_file "
                            "needs the original and one edited agent")
        names = [f"control_{number:03d}_{labels[1]}"
                 for number in range(len(options.control_files))]
        controls = [dataclasses.replace(condition, name=name, control=True,
                                        pattern=agents[1].pattern)
                    for name, condition in zip(names, agent_conditions(
                        [options.agent_file[0], *options.control_files], [ORIGINAL, *names],
                        options.compute.device)[1:])]
    elif options.num_controls and len(agents) > 1:
        reference = testbed.reference(options.reference_size, options.seed)
        agents, controls = match_controls(agents, reference, options.num_controls, options.seed)
    pattern = controls[0].pattern if controls else None
    return [*agents, *invisible_hazards(options.invisible, testbed.env.env_name, agents[0],
                                        pattern)], controls


def write_tables(store: ResultStore, conditions: Sequence[Condition[float]], game: str,
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
    moved = {condition.name: math.nan if condition.value is None else condition.value
             for condition in conditions}
    tables = (
        rates(conditions, episodes, causes, seed),
        effects(conditions[1:], moved, episodes, causes, seed),
        blindness(edited, hidden, episodes, seed))
    for name, table in zip(("rates", "effects", "blindness"), tables):
        store.write(name, value=table)
    return tables


def write_films(store: ResultStore, shown: Sequence[Condition[float]], testbed: Testbed,
                number: int) -> list[Path]:
    """Write films of levels that are failed under exactly one of two conditions: the original and
    another condition.

    Args:
        store: open store with the episodes of the conditions.
        shown: the conditions, the original first.
        testbed: the levels.
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
                               (original["cause"][place], other["cause"][place]), testbed,
                               int(place))
    return films


def describe_controls(controls: Sequence[Condition[float]]) -> str:
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


def write_film(path: Path, conditions: Sequence[Condition[float]], causes: Sequence[str],
               testbed: Testbed, number: int) -> None:
    """Replay a level under each condition, and write a film of the last LAST_STEPS steps, side by
    side.

    Args:
        path: video file to write.
        conditions: the conditions.
        causes: cause of failure under each condition, or SOLVED, for the titles.
        testbed: the levels.
        number: number of the level.
    """
    films = {}
    for condition, cause in zip(conditions, causes):
        [episode] = testbed.episodes(condition, [number])
        assert testbed.env is not None
        films[f"{label_words(condition.label)}: {kind_label(cause)}"] = last_steps(
            testbed.env, episode.level_seed, episode.actions[:-1].tolist(), LAST_STEPS,
            condition.edit, condition.edit_every_step)
    write_video(path, side_by_side_films(films), FRAMES_PER_SECOND)


def last_frames_of(condition: Condition[float], failed: pd.DataFrame, testbed: Testbed
                   ) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Replay failed episodes, and return their last frames.

    Args:
        condition: the condition under which the episodes failed.
        failed: rows of the condition's table of episodes.
        testbed: the levels.

    Returns:
        For each episode: a title; its last T frames, at most NUM_FRAMES, uint8 (T, 64, 64, 3), each
        marked with the action taken in it; and the value estimates in these frames, float32 (T,).
    """
    testbed = dataclasses.replace(testbed, options=PlayOptions(), causes=False)
    episodes = {episode.number: episode
                for episode in testbed.episodes(condition, failed["level"].tolist())}
    endings = []
    for number, cause in zip(failed["level"], failed["cause"]):
        episode = episodes[number]
        end = len(episode.actions) - 1  # the terminal frame, which is black
        begin = max(0, end - NUM_FRAMES)
        endings.append((
            f"{kind_label(cause)}: level {episode.level_seed}, steps {begin} to {end - 1}",
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
            panel.set_title(with_minus(f"V {value:.1f}"), fontsize=8)
    return figure


main = command(FailureCausesOptions, count_failures)

if __name__ == "__main__":
    raise SystemExit(main())
