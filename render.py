"""Render episodes of an agent as videos: a 512-pixel view, and the agent's own frames."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from agents.agent_file import load_agent
from agents.config import add_env_flags, env_config
from agents.episodes import Episode, PlayOptions, play_episodes
from agents.provenance import agent_sha256
from agents.reference_set import played_reference
from common.cli import (
    Parser,
    add_compute_flags,
    add_published_flags,
    count,
    folder_name,
    frames_per_second,
    seed,
    set_up_logging,
)
from common.devices import resolve_compute
from common.errors import script_main
from common.files import versions
from common.game_constants import FRAME_SIZE, PERSON_VIEW_SIZE
from common.results import ResultStore
from common.video import (
    FRAMES_PER_SECOND,
    RENDERING,
    enlarge,
    mark_action,
    write_strip,
    write_video,
)
from interventions.flags import add_patch_flags, open_arm, patch_arm, patched_precision
from maze.level.patch_words import register_maze_words
from maze.level.regions import add_cheese_region_flag, cheese_region, region_described

STRIP_MOMENTS = 6
STRIP_HEIGHT = 256


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("--agent_file", "--model_file", dest="agent_file", type=Path,
                       required=True, help="agent file to render")
    flags.add_argument("--vid_dir", type=Path,
                       help="folder for the videos (default: logs/videos/<env_name>/<exp_name>/)")
    flags.add_argument("--num_eps", type=count, default=10, help="number of episodes to render")
    flags.add_argument("--tps", type=frames_per_second, default=FRAMES_PER_SECOND,
                       help="environment steps per second in the videos")
    flags.add_argument("--overwrite", action="store_true",
                       help="delete an earlier rendering in the folder")
    flags.add_argument("--strip", action="store_true",
                       help="also write an image with several frames of each episode side by side")
    flags.add_argument("--exp_name", type=folder_name, default="render",
                       help="name of the default video folder")
    add_env_flags(flags)
    add_cheese_region_flag(flags, of_agent=True)
    flags.add_argument("--seed", type=seed, default=0, help="seed of the levels and actions")
    add_patch_flags(flags)
    add_compute_flags(flags)
    add_published_flags(flags, ("param_name", "num_timesteps", "num_checkpoints", "num_threads"))
    return flags


def write_episode(store: ResultStore, episode: Episode, tps: int, with_strip: bool) -> None:
    """Write the videos of an episode, and print a one-line summary.

    Args:
        store: the open folder.
        tps: environment steps per second of the videos.
        with_strip: also write an image of several frames side by side.
    """
    views = {"person": episode.person_views,
             "agent": (enlarge(frame, PERSON_VIEW_SIZE // FRAME_SIZE)
                       for frame in episode.frames)}
    if with_strip:
        moments = np.linspace(0, episode.length - 1, STRIP_MOMENTS).round().astype(int)
        write_strip(store.file_of("strip", episode.number),
                    [[mark_action(episode.person_views[t], episode.actions[t])
                      for t in moments]], STRIP_HEIGHT)
    for view, frames in views.items():
        marked = (mark_action(frame, action)
                  for frame, action in zip(frames, episode.actions))
        write_video(store.file_of(view, episode.number), marked, tps)
    print(f"episode {episode.number}: level {episode.level_seed}, return "
          f"{episode.total_reward:g}, {episode.length} steps")


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    set_up_logging(args.log_level)
    register_maze_words()
    arm = patch_arm(args)
    compute = resolve_compute(args.device, args.gpu_device, patched_precision(args.precision, arm))
    config = env_config(args, args.agent_file)
    edit = cheese_region(config, args.cheese_region, args.agent_file)
    policy = load_agent(args.agent_file, compute.device)
    levels = list(enumerate(config.draw_levels(args.num_eps, args.seed)))
    measured = [level for _, level in levels]
    patches = open_arm(arm, args, policy, config, lambda size, seed: played_reference(
        policy, compute, config, measured, size, seed, edit), edit)
    folder = args.vid_dir or Path("logs") / "videos" / config.env_name / args.exp_name
    store = ResultStore(folder, RENDERING)
    store.open({
        "agent_file": args.agent_file.name, "agent_sha256": agent_sha256(args.agent_file),
        "env": vars(config), **region_described(edit), "seed": args.seed, "tps": args.tps,
        "precision": compute.precision, **patches.metadata, "versions": versions()},
        args.overwrite)
    with patches.scope(policy):
        for episode in play_episodes(policy, compute, config, levels, args.seed, 1,
                                     PlayOptions(edit=edit, keep_person_views=True)):
            write_episode(store, episode, args.tps, args.strip)
    print(f"wrote {2 * args.num_eps} videos to {folder}")


if __name__ == "__main__":
    raise SystemExit(main())
