"""Films of an agent on mazes, with several lists of patches (arms) side by side.

All arms play the same levels with the same random numbers; the first arm is the unpatched agent. A
killed run resumes after its last finished film.
"""

from __future__ import annotations

import functools

import numpy as np
import pandas as pd

from agents.episodes import PlayOptions, play_episodes, side_by_side_films, small_film
from agents.hooks import patched
from common.cli import Parser, count, frames_per_second
from common.errors import UserError, script_main
from common.progress import with_progress
from common.results import Entry, File, Json, Schema, Table
from common.video import FRAMES_PER_SECOND, write_gif, write_video
from interventions.flags import add_patch_flags, open_arm, patch_arms
from maze.field.fields import reference_frames
from maze.field.results import UNPATCHED
from maze.level.flags import add_agent_flags, add_output_flags, levels_of, open_store, start
from maze.level.patch_words import register_maze_words
from maze.level.state import MazeState, as_played, game_of
from maze.studies.vectors import add_own_vector_flags, own_vectors

FILM_FILES = Schema(
    "films", "python -m maze.rollouts", items={
        "film": Entry("film_{}.mp4", File()), "gif": Entry("film_{}.gif", File()),
        "facts": Entry("level_{}.json", Json(list))},
    results={"episodes": Entry("episodes.csv", Table(exact=True))})


def parser() -> Parser:
    flags = Parser(__doc__)
    add_agent_flags(flags, "agent to play", num_mazes=5)
    add_own_vector_flags(flags)
    add_patch_flags(flags)
    flags.add_argument("--max_steps", type=count, default=150,
                       help="maximum number of steps in a film")
    flags.add_argument("--tps", type=frames_per_second, default=FRAMES_PER_SECOND,
                       help="environment steps per second in the films")
    flags.add_argument("--gif", action="store_true",
                       help="also write films as animated GIFs, which documents can show")
    add_output_flags(flags, "rollouts")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, compute, policy = start(parser(), argv)
    register_maze_words()
    patches = patch_arms(args)
    if not patches and not args.vectors:
        raise UserError("films compare arms with the unpatched agent; give --vectors, --patch or "
                        "--patch_file")
    states = levels_of(args)
    seeds = [state.level_seed for state in states]
    env, edit = game_of(states), functools.partial(as_played, states)
    steered = own_vectors(args, policy, states)
    if args.dry_run:
        print(f"levels: {', '.join(map(str, seeds))}\n"
              f"arms: {', '.join([UNPATCHED, *steered, *patches])}")
        return
    reference = functools.cache(functools.partial(reference_frames, env, set(seeds)))
    opened = {name: open_arm(arm, args, policy, env, reference, edit)
              for name, arm in patches.items()}
    arms = {UNPATCHED: (), **{name: (patch,) for name, patch in steered.items()},
            **{name: tuple(arm.patches) for name, arm in opened.items()}}
    store = open_store(FILM_FILES, args, compute, {
        "arms": [*arms], "layer": args.layer if steered else None, "seed": args.seed,
        "patches": [arm.metadata for arm in opened.values()], "max_steps": args.max_steps,
        "tps": args.tps}, states=states)

    def film(number: int, state: MazeState) -> list[dict]:
        """Play a level with each list of patches (arm), and write the film.

        Returns one row of ``episodes.csv`` per arm.
        """
        films, rows = {}, []
        for name, arm in arms.items():
            with patched(policy, arm):
                [episode] = play_episodes(
                    policy, compute, env, [(number, state.level_seed)], args.seed, 1,
                    PlayOptions(edit=edit, keep_person_views=True, keep_positions=True))
            films[name] = small_film(episode, args.max_steps)
            rows.append({"level": state.level_seed, "arm": name,
                         "cheese": bool(episode.level_complete), "steps": episode.length,
                         "return": episode.total_reward,
                         "squares": len(np.unique(episode.positions[:-1], axis=0))})
        write_video(store.file_of("film", state.level_seed), side_by_side_films(films),
                    args.tps)
        if args.gif:
            write_gif(store.file_of("gif", state.level_seed), side_by_side_films(films),
                      args.tps)
        return rows

    rows = []
    for number, state in with_progress(enumerate(states), len(states), "film"):
        if not all(store.has(entry, state.level_seed)
                   for entry in ("film", "facts", *(["gif"] if args.gif else []))):
            store.check()
            store.write("facts", state.level_seed, value=film(number, state))
        rows += store.read("facts", state.level_seed)
    table = pd.DataFrame(rows)
    store.write("episodes", value=table)
    means = table.groupby("arm", sort=False)[["cheese", "steps"]].mean()
    print(f"{means}\nwrote {len(states)} films to {args.output_dir}")


if __name__ == "__main__":
    raise SystemExit(main())
