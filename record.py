"""Record rollouts of an agent on real Procgen levels."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from agents.acting import ActionNoise, load_action_noise
from agents.agent_file import load_agent
from agents.config import add_env_flags, env_config, load_agent_config
from agents.episodes import FRAMES_PER_BATCH, Episode, PlayOptions, play_episodes
from agents.patch import BatchInfo
from agents.provenance import agent_sha256
from agents.reference_set import played_reference
from agents.rollout_files import (
    POSITION_COLUMNS,
    EpisodeArrays,
    RolloutWriter,
    join_recording,
)
from agents.world_files import RenderedWorld
from common.cli import Parser, add_compute_flags, add_published_flags, count, seed, share
from common.devices import resolve_compute
from common.errors import script_main
from common.files import versions
from common.parameters import BASE_SET, PARAMETER_SET
from common.progress import with_progress
from common.shards import WHOLE, add_shard_flags
from common.video import enlarge, mark_action
from envs.level_state import LevelState
from envs.objects import moving_objects
from envs.procgen_env import EnvConfig
from envs.wide_view import WorldView
from interventions.config import DirectionsConfig, SwapConfig
from interventions.flags import (
    add_alter_from_flag,
    add_patch_flags,
    add_swap_flags,
    direction_episodes,
    directions_folder,
    open_arm,
    open_swap,
    patch_arm,
    patched_precision,
)
from interventions.patch_text import arm_name
from interventions.projector import Projector
from maze.level.patch_words import register_maze_words
from maze.level.regions import (
    add_cheese_region_flag,
    cheese_region,
    region_described,
    words_of,
)

VIDEO_SCALE = 3
# Steps between two recorded worlds of an episode; odd, so that objects that alternate between two
# images show both.
WORLD_INTERVAL = 7
MAX_UNWRITTEN = 64  # finished episodes kept in memory while writing is slower than playing


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("--agent_file", "--model_file", dest="agent_file", type=Path,
                       required=True, help="agent file to record")
    flags.add_argument("--logdir", type=Path, default=Path("."),
                       help="folder of the recording, which is written to <logdir>/data/")
    flags.add_argument("--num_episodes", type=count, default=10_000,
                       help="number of episodes to record")
    add_env_flags(flags)
    add_cheese_region_flag(flags, of_agent=True)
    flags.add_argument("--param_name", default="hard-rec-record",
                       help="parameter set whose n_envs is the number of episodes played at a "
                            "time")
    flags.add_argument("--seed", type=seed, default=0, help="seed of the levels and actions")
    flags.add_argument("--no_action_noise", action="store_true",
                       help="do not apply the action noise of hyperparams/action_noise.yml")
    flags.add_argument("--action_noise_share", type=share, default=1.0, metavar="SHARE",
                       help="share of the episodes that are played with action noise")
    add_swap_flags(flags, "--num_direction_episodes")
    add_alter_from_flag(flags, default=0)
    flags.add_argument("--interpreting_params_name", default=BASE_SET,
                       help="parameter set in hyperparams/interpreting_configs.yml that other "
                            "scripts use for this recording by default; record.py uses it only "
                            "for swaps")
    flags.add_argument("--positions", action="store_true",
                       help="also record the player's position in squares: columns player_x and "
                            "player_y")
    flags.add_argument("--worlds", action="store_true",
                       help="also record the player's position, and render the static objects "
                            "around the view, and list the moving ones, in every "
                            f"{WORLD_INTERVAL}th step; needed to train a simulator with worlds")
    flags.add_argument("--no_videos", action="store_true", help="do not write sample_*.mp4 videos")
    flags.add_argument("--overwrite", action="store_true",
                       help="delete the previous contents of the data folder")
    add_shard_flags(flags, "the episodes")
    add_patch_flags(flags)
    add_compute_flags(flags)
    add_published_flags(flags, ("exp_name", "num_timesteps", "num_checkpoints", "num_threads"))
    return flags


def steps_table(episode: Episode) -> pd.DataFrame:
    """Return the rows of an episode's CSV without the columns episode and global_step."""
    return pd.DataFrame({
        "level_seed": episode.level_seed, "episode_step": np.arange(len(episode.actions)),
        "done": episode.dones.astype(int), "reward": episode.rewards, "value": episode.values,
        "action": episode.actions, **dict(zip(POSITION_COLUMNS, episode.positions.T))})


def write_episode(writer: RolloutWriter, episode: Episode, with_video: bool,
                  worlds: dict[int, RenderedWorld]) -> None:
    """Write an episode, its worlds by row, and a video of its enlarged frames with the actions
    marked."""
    video = None
    if with_video:
        video = (mark_action(enlarge(frame, VIDEO_SCALE), action)
                 for frame, action in zip(episode.frames, episode.actions))
    writer.add(episode.number, EpisodeArrays(episode.frames, episode.hidden_states,
                                             episode.log_probs, steps_table(episode)), video,
               worlds)


class WorldRecorder:
    """Callback of ``play_episodes`` that renders the world of every WORLD_INTERVAL-th row.

    Args:
        config: the game.

    Raises:
        UserError: if worlds of the game cannot be rendered.
    """

    def __init__(self, config: EnvConfig):
        self._view = WorldView(config)
        self._worlds: dict[int, dict[int, RenderedWorld]] = {}  # by episode and row

    def __call__(self, number: int, row: int, state_of: Callable[[], bytes | None]) -> None:
        if row % WORLD_INTERVAL or (data := state_of()) is None:
            return
        state = LevelState.parse(data)
        if not self._worlds:
            self._view.check(state)
        self._worlds.setdefault(number, {})[row] = RenderedWorld(
            self._view.draw(state), moving_objects(state))

    def take(self, number: int) -> dict[int, RenderedWorld]:
        """Return the worlds of an episode by row, and forget them."""
        return self._worlds.pop(number, {})


def mixed_noise(noise: ActionNoise, noise_share: float) -> Callable[[Tensor, BatchInfo], Tensor]:
    """Return the action noise of ``PlayOptions.alter_logits`` for a share of the episodes, evenly
    spread over their numbers."""
    def apply(logits: Tensor, info: BatchInfo) -> Tensor:
        before, after = (np.floor((info.episode + more) * noise_share) for more in (0, 1))
        noisy = torch.from_numpy(after > before).to(logits.device)
        return torch.where(noisy[:, None], noise(logits.clone()), logits)
    return apply


@script_main
def main(argv: list[str] | None = None) -> None:
    args, _, parameters = parser().read(argv, data_flags=())
    if args.join:
        data = join_recording(args.logdir / "data", args.num_episodes)
        print(f"{args.num_episodes} episodes are in {data.path}")
        return
    register_maze_words()
    arm = patch_arm(args)
    compute = resolve_compute(args.device, args.gpu_device, patched_precision(args.precision, arm))
    config = env_config(args, args.agent_file)
    edit = cheese_region(config, args.cheese_region, args.agent_file)
    num_slots = load_agent_config(args.param_name).n_envs
    if args.shard != WHOLE:  # a shard then ends with fewer half-empty batches
        num_slots = min(num_slots, FRAMES_PER_BATCH)
    policy = load_agent(args.agent_file, compute.device)
    game_noise = load_action_noise(config.env_name)
    noise_share = 0.0 if args.no_action_noise or not game_noise.enabled else args.action_noise_share
    noise = game_noise if noise_share else None
    worlds = WorldRecorder(config) if args.worlds else None
    positions = args.positions or args.worlds
    swap = open_swap(parameters.get(SwapConfig), parameters.get(DirectionsConfig).direction_type,
                     lambda: Projector.load_for(
                         policy.hidden_state_size, directions_folder(args, parameters),
                         direction_episodes(args, parameters, "--num_direction_episodes"),
                         args.agent_file),
                     compute.device, args.random_directions, args.alter_from_step)
    all_levels = config.draw_levels(args.num_episodes, args.seed)
    patches = open_arm(arm, args, policy, config, lambda size, seed: played_reference(
        policy, compute, config, all_levels, size, seed, edit), edit)
    writer = RolloutWriter(args.logdir / "data", {
        "agent_file": args.agent_file.name,
        "agent_sha256": agent_sha256(args.agent_file),
        "env": vars(config), **region_described(edit), "seed": args.seed,
        "precision": compute.precision,
        "log_probs_of": "the policy with action noise" if noise else "the policy",
        "action_noise": vars(noise) if noise else None,
        **({"action_noise_share": noise_share} if noise and noise_share < 1 else {}),
        "swap": {**swap.description, "from_step": args.alter_from_step} if swap else None,
        **patches.metadata, **({"positions": True} if positions else {}),
        **({"worlds": WORLD_INTERVAL} if worlds else {}),
        PARAMETER_SET: args.interpreting_params_name, "versions": versions(),
    }, args.overwrite, args.shard, args.num_episodes)

    own_levels = args.shard.of(list(enumerate(all_levels)))
    levels = [(number, level) for number, level in own_levels if not writer.has(number)]
    num_finished = len(own_levels) - len(levels)
    if num_finished:
        print(f"{num_finished} of {len(own_levels)} episodes are already recorded")
    started, frames, solved = time.monotonic(), 0, 0
    episodes = play_episodes(policy, compute, config, levels, args.seed, num_slots,
                             PlayOptions(
                                 alter_logits=mixed_noise(noise, noise_share) if noise else None,
                                 edit=edit, keep_positions=positions), worlds)
    pool = ThreadPoolExecutor(1)  # writes episodes while the agent plays
    pending: list[Future] = []
    try:
        with patches.scope(policy, *([swap.patch] if swap else [])):
            for episode in with_progress(episodes, len(levels), "episode"):
                pending.append(pool.submit(write_episode, writer, episode, not args.no_videos,
                                           worlds.take(episode.number) if worlds else {}))
                while len(pending) > MAX_UNWRITTEN or (pending and pending[0].done()):
                    pending.pop(0).result()
                frames += len(episode.actions)
                solved += episode.level_complete
        for future in pending:
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)
    writer.finish()
    rate = frames / (time.monotonic() - started)
    print(f"wrote {len(levels)} episodes, {frames} frames, to {writer.folder.path} at "
          f"{rate:.0f} steps/s")
    if levels:
        with_patches = f", with {arm_name(arm)}" if arm else ""
        print(f"{args.agent_file} on {words_of(config, edit)}, "
              f"{'with' if noise else 'no'} action noise{with_patches}: "
              f"success rate {100 * solved / len(levels):.1f} %, mean length "
              f"{frames / len(levels):.1f} frames"
              + ("; evaluate.py measures the agent without noise" if noise else ""))


if __name__ == "__main__":
    raise SystemExit(main())
