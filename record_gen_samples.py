"""Record rollouts that a trained simulator generates, with the agent acting in it."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path

from agents.agent_file import agent_title
from agents.hooks import patched
from agents.patch import Patch
from agents.provenance import agent_sha256
from agents.reference_set import recorded_reference
from agents.rollout_files import RolloutFolder
from common.cli import Parser, count
from common.devices import resolve_compute
from common.errors import script_main
from common.files import sha256, versions
from common.game_constants import ACTION_NAMES
from common.parameters import PARAMETER_SET, ParameterSet
from common.shards import add_shard_flags
from generative.config import RecordConfig, SaliencyConfig, SimulatorConfig
from generative.dataset import RolloutDataset
from generative.flags import (
    add_generated_data_flag,
    add_simulator_flags,
    open_directions,
)
from generative.runs import open_simulator
from generative.sample_files import join_samples, open_samples
from generative.sampling import (
    ALL_ACTIONS,
    Sampler,
    SamplingPlan,
    manual_actions,
    record_samples,
)
from generative.start_worlds import prior_sha256
from interventions.config import DirectionsConfig, SwapConfig
from interventions.flags import (
    add_patch_flags,
    add_swap_flags,
    configured_name,
    open_arm,
    open_swap,
    patch_arm,
    patched_precision,
)
from interventions.patch_text import arm_name
from maze.level.patch_words import register_maze_words

SAMPLES_AT_A_TIME = 32


def parser() -> Parser:
    flags = Parser(__doc__)
    add_simulator_flags(flags, "simulator file", model_file_required=True,
                        at_a_time=SAMPLES_AT_A_TIME)
    add_generated_data_flag(flags)
    flags.add_argument("--data_save_dir", type=Path,
                       help="alias of --generated_data_dir; takes precedence if both are given")
    flags.add_argument("--num_samples", type=count, key="record.max_samples",
                       help="number of starts to simulate from; each gives one sample, or one for "
                            "each of several worlds and manual actions")
    flags.add_argument("--recording_rand_init", dest="rand_init", action="store_true",
                       key="record.rand_init",
                       help="start from random vectors, or in random worlds if the simulator has "
                            "worlds, instead of recorded frames")
    flags.add_argument("--use_recorded_actions", action="store_true",
                       help="repeat the actions recorded after the initial frames, instead of the "
                            "agent's own actions")
    flags.add_argument("--manual_action", nargs="+", default=[], metavar="ACTION",
                       help="action that is taken at every step: one or several of "
                            f"{', '.join(ACTION_NAMES)}, or {ALL_ACTIONS} for all of them, with "
                            "a video that arranges the samples by the direction of the action")
    add_swap_flags(flags)
    add_patch_flags(flags)
    flags.add_argument("--sample_latents", action="store_true",
                       help="sample the latent variables instead of taking the most likely values")
    flags.add_argument("--num_worlds", type=count, default=1,
                       help="number of samples per recorded start that differ in what lies beyond "
                            "the view; like the next three flags, only for simulators with worlds")
    flags.add_argument("--rendered_worlds", action="store_true",
                       help="take what lies beyond the view from the game, instead of sampling it")
    flags.add_argument("--sample_ends", action="store_true",
                       help="draw the end of each episode from its predicted probability, and name "
                            "the step in origin.json; the sample continues after it")
    flags.add_argument("--sample_actions", action="store_true",
                       help="let the agent sample its actions instead of taking the most likely "
                            "ones")
    flags.add_argument("--no_videos", action="store_true", help="do not write videos")
    flags.add_argument("--overwrite", action="store_true",
                       help="delete the previous contents of the output folders")
    add_shard_flags(flags, "the starts")
    return flags


@script_main
def main(argv: list[str] | None = None) -> int:
    args, explicit, parameters = parser().read(argv, data_flags=("data_dir",))
    common, max_samples = parameters.common, parameters.get(RecordConfig).max_samples
    register_maze_words()
    arm, save_dir = patch_arm(args), args.data_save_dir or Path(common.generated_data_dir)
    if args.join:
        plan = make_plan(args, explicit, parameters)
        for name in folder_names(args, parameters, plan, arm):
            samples = join_samples(save_dir / name, max_samples * plan.samples_per_start)
            print(f"{len(samples.numbers())} samples are in {samples.path}")
        return 0
    compute = resolve_compute(common.device, common.gpu_device,
                              patched_precision(args.precision, arm))
    simulator = open_simulator(args.model_file, args.agent_file, parameters.get(SimulatorConfig),
                               compute)
    plan = make_plan(args, explicit, parameters, simulator.config.num_init_steps)
    dataset = None
    if not plan.random_start:
        dataset = RolloutDataset(Path(common.data_dir), plan.num_init_steps, plan.num_steps)
        dataset.check_agent(args.agent_file, simulator.agent.policy)
    description = {
        **plan.settings(simulator),
        "agent_file": agent_title(args.agent_file), "agent_sha256": agent_sha256(args.agent_file),
        "model_file": args.model_file.name, "model_sha256": sha256(args.model_file),
        "simulator": simulator.config.described(),
        **({"prior_sha256": prior_sha256(simulator.prior)} if simulator.squares is not None
           else {}),
        "data_dir": common.data_dir if dataset else None,
        "recording_sha256": dataset.folder.sha256(args.check_contents) if dataset else None,
        "data_recording": dataset.folder.description() if dataset else None,
        "precision": compute.precision, "swap": None,
        PARAMETER_SET: args.interpreting_params_name, "versions": versions()}

    policy = simulator.agent.policy
    sampler = Sampler(simulator, compute, plan, dataset, max_samples)
    patches = open_arm(arm, args, policy, None, lambda size, seed: recorded_reference(
        RolloutFolder(Path(common.data_dir)), sampler.episodes, size, seed))
    swap = open_swap(parameters.get(SwapConfig), parameters.get(DirectionsConfig).direction_type,
                     lambda: open_directions(args, parameters, simulator, compute),
                     compute.device, args.random_directions)
    unaltered = {"unaltered": plan.folder_name}
    descriptions: list[dict] = [{}]
    scopes: list[contextlib.AbstractContextManager] = [contextlib.nullcontext()]
    if swap:
        descriptions.append({"swap": {**swap.description, **unaltered}})
        scopes.append(patched(policy, [swap.patch]))
    if arm:
        descriptions.append({**patches.metadata, **unaltered})
        scopes.append(patches.scope(policy))
    starts_a_batch = max(args.batch_size // plan.samples_per_start, 1)
    starts = args.shard.of(range(max_samples), starts_a_batch)
    folders = [open_samples(save_dir / name, {**description, **more}, args.overwrite, args.shard,
                            max_samples * plan.samples_per_start, starts_a_batch)
               for name, more in zip(folder_names(args, parameters, plan, arm), descriptions,
                                     strict=True)]
    for folder, scope in zip(folders, scopes):
        with scope:
            status = record_samples(sampler, folder, starts, starts_a_batch,
                                    not args.no_videos)
        if status:
            print(f"stopped; run the same command again to resume {folder.path}")
            return status
        print(f"{len(starts) * plan.samples_per_start} samples of {plan.num_steps} steps are in "
              f"{folder.path}")
    for folder, what in zip(folders[1:], ["swap"] * bool(swap) + ["patches"] * bool(arm)):
        print(f"from the same starts: {folder.path} with the {what}, {folders[0].path} without")
    return 0


def folder_names(args: argparse.Namespace, parameters: ParameterSet, plan: SamplingPlan,
                 arm: Sequence[Patch]) -> list[str]:
    """Return the names of the folders of unaltered, swapped and patched samples to write.

    A folder of swapped samples is included if the flags or parameters specify a swap of directions,
    and a folder of patched samples if ``arm`` holds patches.
    """
    swapped = configured_name(parameters.get(SwapConfig), args.random_directions)
    return [plan.folder_name, *([f"{plan.folder_name}_swapped_{swapped}"] if swapped else []),
            *([f"{plan.folder_name}_patched_{arm_name(arm)}"] if arm else [])]


def make_plan(args: argparse.Namespace, explicit: set[str], parameters: ParameterSet,
              trained_init_steps: int = 1) -> SamplingPlan:
    """Return the sampling plan that the flags and the parameter set specify.

    Args:
        args: parsed flags.
        explicit: names of the flags given on the command line.
        parameters: parameter set with the values of these flags.
        trained_init_steps: number of initial frames with which the simulator was trained.
    """
    actions = manual_actions(args.manual_action)
    saliency, config = parameters.get(SaliencyConfig), parameters.get(SimulatorConfig)
    num_steps = saliency.num_sim_steps_manual_actions if actions else saliency.num_sim_steps
    if "num_sim_steps" in explicit:
        num_steps = config.num_sim_steps
    num_init_steps = trained_init_steps
    if "num_initializing_steps" in explicit:
        num_init_steps = config.num_init_steps
    return SamplingPlan(parameters.get(RecordConfig).rand_init, args.use_recorded_actions, actions,
                        num_steps, num_init_steps, args.sample_latents, args.seed, args.num_worlds,
                        args.rendered_worlds, args.sample_ends, args.sample_actions)


if __name__ == "__main__":
    raise SystemExit(main())
