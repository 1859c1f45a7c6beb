"""Render episodes of an agent, see ``RenderOptions``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar

import numpy as np

from agents.agent_file import load_agent
from agents.episodes import Episode, PlayOptions, play_episodes
from agents.goal_places import GoalGameOptions, goal_described
from agents.provenance import agent_sha256
from agents.reference_set import played_reference
from common.cli import count, folder_name, frames_per_second, seed
from common.files import versions
from common.game_constants import FRAME_SIZE, PERSON_VIEW_SIZE
from common.options import ComputeOptions, command, option
from common.results import ResultStore
from common.video import (
    FRAMES_PER_SECOND,
    RENDERING,
    enlarge,
    mark_action,
    write_strip,
    write_video,
)
from interventions.flags import PatchOptions, patched_precision

STRIP_MOMENTS = 6
STRIP_HEIGHT = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class RenderOptions(GoalGameOptions, PatchOptions, ComputeOptions):
    """Render episodes of an agent as videos: a 512-pixel view, and the agent's own frames."""

    ignored: ClassVar = ("param_name", "num_timesteps", "num_checkpoints", "num_threads")

    agent_file: Path = option(help="agent file to render", names=("--agent_file", "--model_file"))
    vid_dir: Path | None = option(
        None, "folder for the videos (default: logs/videos/<env_name>/<exp_name>/)")
    num_eps: int = option(10, "number of episodes to render", type=count)
    tps: int = option(FRAMES_PER_SECOND, "environment steps per second in the videos",
                      type=frames_per_second)
    overwrite: bool = option(False, "delete an earlier rendering in the folder")
    strip: bool = option(
        False, "also write an image with several frames of each episode side by side")
    exp_name: str = option("render", "name of the default video folder", type=folder_name)
    seed: int = option(0, "seed of the levels and actions", type=seed)


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


def render(options: RenderOptions) -> Path:
    """Render episodes, and return the folder of the videos."""
    compute = options.compute_in(patched_precision(options.precision, options.patch_list))
    config, edit = options.game(options.agent_file)
    policy = load_agent(options.agent_file, compute.device)
    levels = list(enumerate(config.draw_levels(options.num_eps, options.seed)))
    measured = [level for _, level in levels]
    patches = options.open_patch_list(policy, config, lambda size, seed: played_reference(
        policy, compute, config, measured, size, seed, edit), edit)
    folder = options.vid_dir or Path("logs") / "videos" / config.env_name / options.exp_name
    store = ResultStore(folder, RENDERING)
    store.open({
        "agent_file": options.agent_file.name, "agent_sha256": agent_sha256(options.agent_file),
        "env": vars(config), **goal_described(edit), "seed": options.seed, "tps": options.tps,
        "precision": compute.precision, **patches.metadata, "versions": versions()},
        options.overwrite)
    with patches.scope(policy):
        for episode in play_episodes(policy, compute, config, levels, options.seed, 1,
                                     PlayOptions(edit=edit, keep_person_views=True)):
            write_episode(store, episode, options.tps, options.strip)
    print(f"wrote {2 * options.num_eps} videos to {folder}")
    return folder


main = command(RenderOptions, render)

if __name__ == "__main__":
    raise SystemExit(main())
