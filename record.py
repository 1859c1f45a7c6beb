"""Record rollouts of an agent, see ``RecordOptions``."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from agents.acting import ActionNoise, load_action_noise
from agents.agent_file import load_agent
from agents.config import load_agent_config
from agents.episodes import PlayOptions, play_episodes
from agents.goal_places import GoalEdit, GoalGameOptions, goal_described, words_of
from agents.patch import BatchInfo
from agents.provenance import agent_sha256
from agents.recording import (
    WORLD_INTERVAL,
    WorldRecorder,
    recording_settings,
    write_episodes,
)
from agents.reference_set import played_reference
from agents.rollout_files import (
    RolloutFolder,
    RolloutWriter,
    join_recording,
)
from common.cli import count, seed, share
from common.options import ComputeOptions, ShardOptions, command, option
from common.parameters import BASE_SET, PARAMETER_SET
from common.progress import with_progress
from envs.procgen_env import EnvConfig
from interventions.flags import (
    AlterFromOptions,
    PatchOptions,
    PlayedDirectionOptions,
    SwapOptions,
    patched_precision,
)
from interventions.patch_text import patch_list_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordOptions(GoalGameOptions, SwapOptions, PlayedDirectionOptions, AlterFromOptions,
                    PatchOptions, ShardOptions, ComputeOptions):
    """Record rollouts of an agent on real Procgen levels."""

    ignored: ClassVar = ("exp_name", "num_timesteps", "num_checkpoints", "num_threads")

    agent_file: Path = option(help="agent file to record", names=("--agent_file", "--model_file"))
    logdir: Path = option(Path("."), "folder of the recording, which is written to <logdir>/data/")
    num_episodes: int = option(10_000, "number of episodes to record", type=count)
    param_name: str = option("hard-rec-record", "parameter set whose n_envs is the number of "
                                                "episodes played at a time")
    seed: int = option(0, "seed of the levels and actions", type=seed)
    no_action_noise: bool = option(
        False, "do not apply the action noise of hyperparams/action_noise.yml")
    action_noise_share: float = option(
        1.0, "share of the episodes that are played with action noise", type=share,
        metavar="SHARE")
    interpreting_params_name: str = option(
        BASE_SET, "parameter set in hyperparams/interpreting_configs.yml that other scripts use "
                  "for this recording by default; record.py uses it only for swaps")
    positions: bool = option(False, "also record the player's position in squares: columns "
                                    "player_x and player_y")
    worlds: bool = option(
        False, "also record the player's position, and render the static objects around the view, "
               f"and list the moving ones, in every {WORLD_INTERVAL}th step; needed to train a "
               "simulator with worlds")
    no_videos: bool = option(False, "do not write sample_*.mp4 videos")
    overwrite: bool = option(False, "delete the previous contents of the data folder")

    def action_noise(self, game: str) -> tuple[ActionNoise | None, float]:
        """Return the action noise in a game, and the share of the episodes that have it."""
        noise = load_action_noise(game)
        has_noise = noise.enabled and not self.no_action_noise and self.action_noise_share > 0
        return (noise, self.action_noise_share) if has_noise else (None, 0.0)


def mixed_noise(noise: ActionNoise, noise_share: float) -> Callable[[Tensor, BatchInfo], Tensor]:
    """Return the action noise of ``PlayOptions.alter_logits`` for a share of the episodes, evenly
    spread over their numbers."""
    def apply(logits: Tensor, info: BatchInfo) -> Tensor:
        before, after = (np.floor((info.episode + more) * noise_share) for more in (0, 1))
        noisy = torch.from_numpy(after > before).to(logits.device)
        return torch.where(noisy[:, None], noise(logits.clone()), logits)
    return apply


def record(options: RecordOptions) -> RolloutFolder:
    """Record the episodes that the folder of the recording lacks, and return the folder."""
    folder = options.logdir / "data"
    if options.join:
        data = join_recording(folder, options.num_episodes)
        print(f"{options.num_episodes} episodes are in {data.path}")
        return data
    compute = options.compute_in(patched_precision(options.precision, options.patch_list))
    config, edit = options.game(options.agent_file)
    num_slots = load_agent_config(options.param_name).n_envs
    policy = load_agent(options.agent_file, compute.device)
    noise, noise_share = options.action_noise(config.env_name)
    worlds = WorldRecorder(config) if options.worlds else None
    positions = options.positions or options.worlds
    swap = options.open_swap(policy, options.alter_from_step)
    all_levels = config.draw_levels(options.num_episodes, options.seed)
    patches = options.open_patch_list(policy, config, lambda size, seed: played_reference(
        policy, compute, config, all_levels, size, seed, edit), edit)
    writer = RolloutWriter(folder, {
        **describe(options, config, edit, compute.precision),
        "swap": {**swap.description, "from_step": options.alter_from_step} if swap else None,
        **patches.metadata, **({"positions": True} if positions else {}),
        **({"worlds": WORLD_INTERVAL} if worlds else {}),
        PARAMETER_SET: options.interpreting_params_name,
    }, options.overwrite, options.shard, options.num_episodes)

    own_levels = options.shard.of(list(enumerate(all_levels)))
    levels = [(number, level) for number, level in own_levels if not writer.has(number)]
    if len(levels) < len(own_levels):
        print(f"{len(own_levels) - len(levels)} of {len(own_levels)} episodes are already recorded")
    started = time.monotonic()
    with patches.scope(policy, *([swap] if swap else [])):
        episodes = play_episodes(
            policy, compute, config, levels, options.seed, num_slots,
            PlayOptions(alter_logits=mixed_noise(noise, noise_share) if noise else None, edit=edit,
                        keep_positions=positions), worlds)
        frames, solved = write_episodes(writer, with_progress(episodes, len(levels), "episode"),
                                        not options.no_videos, worlds)
    writer.finish()
    rate = frames / (time.monotonic() - started)
    print(f"wrote {len(levels)} episodes, {frames} frames, to {writer.folder.path} at "
          f"{rate:.0f} steps/s")
    if levels:
        with_patches = f", with {patch_list_name(options.patch_list)}" if options.patch_list else ""
        print(f"{options.agent_file} on {words_of(config, edit)}, "
              f"{'with' if noise else 'no'} action noise{with_patches}: "
              f"success rate {100 * solved / len(levels):.1f} %, mean length "
              f"{frames / len(levels):.1f} frames"
              + ("; evaluate.py measures the agent without noise" if noise else ""))
    return writer.folder


def describe(options: RecordOptions, config: EnvConfig, edit: GoalEdit | None,
             precision: str) -> dict:
    """Return the settings of a recording that describe agent, game and action noise."""
    noise, noise_share = options.action_noise(config.env_name)
    settings = recording_settings(options.agent_file, agent_sha256(options.agent_file), config,
                                  options.seed, precision) | goal_described(edit)
    if noise:
        settings |= {"log_probs_of": "the policy with action noise", "action_noise": vars(noise)}
    return settings | ({"action_noise_share": noise_share} if noise and noise_share < 1 else {})


main = command(RecordOptions, record)

if __name__ == "__main__":
    raise SystemExit(main())
