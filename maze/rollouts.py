"""Films of an agent on mazes, with several lists of patches (conditions) side by side.

All conditions play the same levels with the same random numbers; the first condition is the
unpatched agent. A killed run resumes after its last finished film.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from agents.episodes import PlayOptions, side_by_side_films, small_film
from agents.testbed import Condition, Testbed
from common.cli import count, frames_per_second
from common.errors import UserError
from common.options import command, option, redefine
from common.progress import with_progress
from common.results import Entry, File, Json, ResultStore, Schema, Table
from common.video import FRAMES_PER_SECOND, write_gif, write_video
from envs.maze.state import as_played, game_of
from interventions.flags import PatchOptions
from maze.field.fields import reference_frames
from maze.field.results import UNPATCHED
from maze.options import AgentOptions, MazeOptions
from maze.studies.vectors import OwnVectorOptions

FILM_FILES = Schema(
    "films", "python -m maze.rollouts", items={
        "film": Entry("film_{}.mp4", File()), "gif": Entry("film_{}.gif", File()),
        "facts": Entry("level_{}.json", Json(list))},
    results={"episodes": Entry("episodes.csv", Table(exact=True))})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutsOptions(OwnVectorOptions, PatchOptions, AgentOptions):
    """Films of an agent on mazes, with several lists of patches (conditions) side by side."""

    num_mazes: int = redefine(MazeOptions, "num_mazes", default=5)
    max_steps: int = option(150, "maximum number of steps in a film", type=count)
    tps: int = option(FRAMES_PER_SECOND, "environment steps per second in the films",
                      type=frames_per_second)
    gif: bool = option(False, "also write films as animated GIFs, which documents can show")
    output_dir: Path = redefine(AgentOptions, "output_dir", default=Path("analysis/maze/rollouts"))


def film_rollouts(options: RolloutsOptions) -> pd.DataFrame | None:
    """Write the films to ``options.output_dir``, and return the table of episodes, with a row per
    level and condition; None for a dry run."""
    policy = options.load_agent()
    patches = options.patch_lists
    if not patches and not options.vectors:
        raise UserError("films compare conditions with the unpatched agent; give --vectors, "
                        "--patch or --patch_file")
    states = options.choose_levels()
    seeds = [state.level_seed for state in states]
    env, edit = game_of(states), functools.partial(as_played, states)
    steered = options.own_vectors(policy, states)
    if options.dry_run:
        print(f"levels: {', '.join(map(str, seeds))}\n"
              f"conditions: {', '.join([UNPATCHED, *steered, *patches])}")
        return None
    reference = functools.cache(functools.partial(reference_frames, env, set(seeds)))
    opened = {name: options.open_patch_list(policy, env, reference, edit, patch_list)
              for name, patch_list in patches.items()}
    conditions: list[Condition] = [
        Condition(UNPATCHED),
        *(Condition(name, patches=[patch]) for name, patch in steered.items()),
        *(Condition(name, patches=result.patches) for name, result in opened.items())]
    store = options.open_store(FILM_FILES, {
        "conditions": [condition.name for condition in conditions],
        "layer": options.layer if steered else None, "seed": options.seed,
        "patches": [result.metadata for result in opened.values()], "max_steps": options.max_steps,
        "tps": options.tps}, states=states)
    testbed = Testbed(policy, options.compute, env, seeds, options.seed, 1, edit,
                      options=PlayOptions(keep_person_views=True, keep_positions=True))
    rows = []
    for number, state in with_progress(enumerate(states), len(states), "film"):
        if not all(store.has(entry, state.level_seed)
                   for entry in ("film", "facts", *(["gif"] if options.gif else []))):
            store.check()
            store.write("facts", state.level_seed,
                        value=film_level(options, store, conditions, testbed, number))
        rows += store.read("facts", state.level_seed)
    table = pd.DataFrame(rows)
    store.write("episodes", value=table)
    means = table.groupby("condition", sort=False)[["cheese", "steps"]].mean()
    print(f"{means}\nwrote {len(states)} films to {options.output_dir}")
    return table


def film_level(options: RolloutsOptions, store: ResultStore, conditions: Sequence[Condition],
               testbed: Testbed, number: int) -> list[dict]:
    """Play a level with each list of patches, and write the film.

    Returns one row of ``episodes.csv`` per condition.
    """
    films, rows, seed = {}, [], testbed.levels[number]
    for condition in conditions:
        [episode] = testbed.episodes(condition, [number])
        films[condition.name] = small_film(episode, options.max_steps)
        rows.append({"level": seed, "condition": condition.name,
                     "cheese": bool(episode.level_complete), "steps": episode.length,
                     "return": episode.total_reward,
                     "squares": len(np.unique(episode.positions[:-1], axis=0))})
    write_video(store.file_of("film", seed), side_by_side_films(films), options.tps)
    if options.gif:
        write_gif(store.file_of("gif", seed), side_by_side_films(films), options.tps)
    return rows


main = command(RolloutsOptions, film_rollouts)

if __name__ == "__main__":
    raise SystemExit(main())
