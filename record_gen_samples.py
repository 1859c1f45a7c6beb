"""Record rollouts in a simulator, see ``SampleOptions``."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import ClassVar

from agents.agent_file import agent_title
from agents.hooks import patched
from agents.reference_set import game_name, recorded_reference
from agents.rollout_files import RolloutFolder
from common.cli import count
from common.devices import Compute
from common.errors import Stopped
from common.files import versions
from common.game_constants import ACTION_NAMES
from common.options import ShardOptions, command, option
from common.parameters import PARAMETER_SET
from envs.objects import action_labels
from generative import sampling
from generative.config import RecordConfig, SaliencyConfig
from generative.dataset import RolloutDataset
from generative.flags import GeneratedDataOptions, SimulatorOptions
from generative.sample_files import SampleFolder, join_samples, open_samples
from generative.sampling import ALL_ACTIONS, Sampler, SamplingPlan, manual_actions
from generative.simulator import Simulator
from generative.start_worlds import prior_sha256
from interventions.flags import (
    DirectionOptions,
    PatchOptions,
    SwapOptions,
    patched_precision,
)
from interventions.patch_text import patch_list_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleOptions(SimulatorOptions, GeneratedDataOptions, SwapOptions, DirectionOptions,
                    PatchOptions, ShardOptions):
    """Record rollouts that a trained simulator generates, with the agent acting in it."""

    inputs: ClassVar = ("data_dir",)

    data_save_dir: Path | None = option(
        None, "alias of --generated_data_dir; takes precedence if both are given")
    num_samples: int | None = option(
        None, "number of starts to simulate from; each gives one sample, or one for each of "
              "several worlds and manual actions", type=count, key="record.max_samples")
    recording_rand_init: bool | None = option(
        None, "start from random vectors, or in random worlds if the simulator has worlds, instead "
              "of recorded frames", key="record.rand_init")
    use_recorded_actions: bool = option(
        False, "repeat the actions recorded after the initial frames, instead of the agent's own "
               "actions")
    manual_action: tuple[str, ...] = option(
        (), f"action that is taken at every step: one or several of {', '.join(ACTION_NAMES)}, "
            "names of the game's other actions (such as fire), their numbers 9 to 14, or "
            f"{ALL_ACTIONS} for all of them, with a video that arranges the samples by the "
            "direction of the action", metavar="ACTION")
    sample_latents: bool = option(
        False, "sample the latent variables instead of taking the most likely values")
    num_worlds: int = option(
        1, "number of samples per recorded start that differ in what lies beyond the view; like "
           "the next three flags, only for simulators with worlds", type=count)
    rendered_worlds: bool = option(
        False, "take what lies beyond the view from the game, instead of sampling it")
    sample_ends: bool = option(
        False, "draw the end of each episode from its predicted probability, and name the step in "
               "origin.json; the sample continues after it")
    sample_actions: bool = option(
        False, "let the agent sample its actions instead of taking the most likely ones")
    no_videos: bool = option(False, "do not write videos")
    overwrite: bool = option(False, "delete the previous contents of the output folders")

    @property
    def num_starts(self) -> int:
        """Number of starts to simulate from."""
        return self.parameters.get(RecordConfig).max_samples


def record_samples(options: SampleOptions) -> list[SampleFolder]:
    """Record rollouts, and return the folders of unaltered, swapped and patched samples.

    Raises:
        Stopped: after a stop signal; the same call resumes.
    """
    if options.join:
        return join(options)
    patch_list, data_dir = options.patch_list, options.parameters.common.data_dir
    compute = options.compute_in(patched_precision(options.precision, patch_list))
    simulator = options.open_simulator(compute)
    policy = simulator.agent.policy
    plan = make_plan(options, simulator.config.num_init_steps)
    dataset = None
    if not plan.random_start:
        dataset = RolloutDataset(Path(data_dir), plan.num_init_steps, plan.num_steps)
        dataset.check_agent(options.agent_file, policy)
    settings = describe(options, simulator, compute, plan, dataset)
    sampler = Sampler(simulator, compute, plan, dataset, options.num_starts)
    patches = options.open_patch_list(policy, None, lambda size, seed: recorded_reference(
        RolloutFolder(Path(data_dir)), sampler.episodes, size, seed))
    swap = options.open_swap(policy)
    descriptions: list[dict] = [{}]
    scopes: list[contextlib.AbstractContextManager] = [contextlib.nullcontext()]
    unaltered = {"unaltered": plan.folder_name}
    if swap:
        descriptions.append({"swap": {**swap.description, **unaltered}})
        scopes.append(patched(policy, [swap]))
    if patch_list:
        descriptions.append({**patches.metadata, **unaltered})
        scopes.append(patches.scope(policy))
    starts_a_batch = max(options.batch_size // plan.samples_per_start, 1)
    starts = options.shard.of(range(options.num_starts), starts_a_batch)
    folders = [open_samples(path, {**settings, **more}, options.overwrite, options.shard,
                            options.num_starts * plan.samples_per_start, starts_a_batch)
               for path, more in zip(folder_paths(options, plan), descriptions, strict=True)]
    for folder, scope in zip(folders, scopes):
        with scope:
            status = sampling.record_samples(sampler, folder, starts, starts_a_batch,
                                             not options.no_videos)
        if status:
            raise Stopped(status, f"stopped; run the same command again to resume {folder.path}")
        print(f"{len(starts) * plan.samples_per_start} samples of {plan.num_steps} steps are in "
              f"{folder.path}")
    for folder, what in zip(folders[1:], ["swap"] * bool(swap) + ["patches"] * bool(patch_list)):
        print(f"from the same starts: {folder.path} with the {what}, {folders[0].path} without")
    return folders


def join(options: SampleOptions) -> list[SampleFolder]:
    """Join the samples of all shards, and return their folders."""
    plan = make_plan(options)
    folders = [join_samples(path, options.num_starts * plan.samples_per_start)
               for path in folder_paths(options, plan)]
    for folder in folders:
        print(f"{len(folder.numbers())} samples are in {folder.path}")
    return folders


def describe(options: SampleOptions, simulator: Simulator, compute: Compute, plan: SamplingPlan,
             dataset: RolloutDataset | None) -> dict:
    """Return the settings of unaltered samples."""
    return {
        **plan.settings(simulator), **options.origin,
        "agent_file": agent_title(options.agent_file),
        "simulator": simulator.config.describe(),
        **({"prior_sha256": prior_sha256(simulator.prior)} if simulator.squares is not None
           else {}),
        "data_dir": options.parameters.common.data_dir if dataset else None,
        "recording_sha256": dataset.folder.sha256(options.check_contents) if dataset else None,
        "data_recording": dataset.folder.description() if dataset else None,
        "precision": compute.precision, "swap": None,
        PARAMETER_SET: options.parameters.name, "versions": versions()}


def folder_paths(options: SampleOptions, plan: SamplingPlan) -> list[Path]:
    """Return the folders of unaltered, swapped and patched samples to write.

    The last two are included if the options specify a swap of directions, and patches.
    """
    name, swap, patch_list = plan.folder_name, options.swap(), options.patch_list
    folder = options.data_save_dir or options.generated_data
    return [folder / name, *([folder / f"{name}_swapped_{swap.name}"] if swap else []),
            *([folder / f"{name}_patched_{patch_list_name(patch_list)}"] if patch_list else [])]


def make_plan(options: SampleOptions, trained_init_steps: int = 1) -> SamplingPlan:
    """Return the sampling plan.

    Args:
        trained_init_steps: number of initial frames with which the simulator was trained.
    """
    actions = options.manual_action and manual_actions(
        options.manual_action, action_labels(game_name(
            options.agent_file, options.parameters.common.data_dir)))
    saliency = options.parameters.get(SaliencyConfig)
    num_steps = saliency.num_sim_steps_manual_actions if actions else saliency.num_sim_steps
    return SamplingPlan(
        options.parameters.get(RecordConfig).rand_init, options.use_recorded_actions, actions,
        options.num_sim_steps or num_steps, options.num_initializing_steps or trained_init_steps,
        options.sample_latents, options.seed, options.num_worlds, options.rendered_worlds,
        options.sample_ends, options.sample_actions)


main = command(SampleOptions, record_samples)

if __name__ == "__main__":
    raise SystemExit(main())
