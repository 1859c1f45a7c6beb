"""Measure how altered directions of the agent's hidden state, or patches of its layers, affect its
behaviour.

The same levels (or, with --in_simulator, the same simulated starts) are played with and without
each alteration, and with controls: alterations of random directions of equal size, or patches of
the same kind with random vectors, channels or cells. If patches are given, directions are altered
only if --directions, --ablations or --swaps is also given. A killed run resumes after its last
finished alteration; directions, patches and controls can be added to a finished run. With --scan,
every part of a layer is patched in turn, in single frames instead of whole runs.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from agents.agent_file import load_agent
from agents.config import add_env_flags, env_config
from agents.provenance import agent_sha256
from agents.rollout_files import RolloutFolder
from common.cli import Parser, add_compute_flags, add_parameter_set_flag, count, environments, seed
from common.devices import Compute, resolve_compute
from common.errors import UserError, script_main
from common.files import sha256
from common.parameters import ParameterSet
from common.results import ResultStore
from common.shards import add_shard_flags
from generative.config import RecordConfig, SaliencyConfig, SimulatorConfig
from generative.dataset import RolloutDataset
from generative.flags import add_data_flag
from generative.runs import open_simulator
from generative.sampling import SamplingPlan, simulated_starts
from interventions.ablations import RESAMPLE, ablation_conditions
from interventions.comparison import (
    COMPARISON,
    ConditionSet,
    Testbed,
    real_levels,
    run_comparison,
    write_joined_results,
)
from interventions.conditions import add_comparison_flags, patch_conditions, swap_conditions
from interventions.config import DirectionsConfig
from interventions.flags import (
    add_alter_from_flag,
    add_direction_flags,
    direction_episodes,
    directions_folder,
    patch_arms,
    patched_precision,
)
from interventions.hidden_states_folder import hidden_state_results
from interventions.projector import Projector
from interventions.scan_study import SCANNED, run_scan
from maze.level.patch_words import register_maze_words
from maze.level.regions import add_cheese_region_flag, cheese_region, region_described
from stats.effects import check_starts
from stats.report import DIRECTIONS, MIXED, PATCHES

NOT_WITH_SCAN = {"in_simulator", "patch", "patch_file", "directions", "ablations", "swaps",
                 "shard", "join"}


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("--agent_file", type=Path, required=True,
                       help="agent file whose hidden state or layers are altered")
    add_parameter_set_flag(flags)
    flags.add_argument("--num_episodes", type=count, default=400,
                       help="number of levels to play, or starts to simulate, per alteration")
    add_comparison_flags(flags)
    add_direction_flags(flags, "--num_direction_episodes")
    add_alter_from_flag(flags, default=1)
    add_env_flags(flags)
    add_cheese_region_flag(flags, of_agent=True)
    flags.add_argument("--training_levels", action="store_true",
                       help="play the levels of --start_level and --num_levels instead of unseen "
                            "levels")
    flags.add_argument("--num_envs", type=environments, default=64,
                       help="number of episodes played at a time")
    flags.add_argument("--in_simulator", action="store_true",
                       help="use simulated episodes instead of real levels")
    flags.add_argument("--model_file", type=Path, help="simulator file, for --in_simulator")
    add_data_flag(flags)
    flags.add_argument("--num_sim_steps", type=count, key="analysis.saliency.num_sim_steps",
                       help="number of simulated steps")
    flags.add_argument("--recording_rand_init", dest="rand_init", action="store_true",
                       key="record.rand_init",
                       help="simulate from random vectors instead of recorded frames")
    flags.add_argument("--batch_size", type=count, default=32,
                       help="number of simulations at a time")
    flags.add_argument("--output_dir", type=Path,
                       help="output folder; if not given, interventions, "
                            "interventions_in_simulator or scan in the parameter set's save_dir")
    flags.add_argument("--seed", type=seed, default=1,
                       help="seed of levels, actions, bootstrap and sign flips; its default "
                            "differs from that of record.py, so that effects are not measured on "
                            "the levels from which the directions were computed")
    flags.add_argument("--overwrite", action="store_true",
                       help="delete the previous contents of the output folder")
    add_shard_flags(flags, "the alterations")
    add_compute_flags(flags, in_parameter_set=True)
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, explicit, parameters = parser().read(argv)
    register_maze_words()
    if args.scan and (excluded := explicit & NOT_WITH_SCAN):
        raise UserError(f"--scan patches single frames of real levels; leave --{min(excluded)} out")
    folders = parameters.folders
    store = ResultStore(args.output_dir or (
        folders.scan if args.scan else folders.interventions_in_simulator if args.in_simulator
        else folders.interventions), SCANNED if args.scan else COMPARISON)
    if args.join:
        store.join(lambda notes: write_joined_results(store, notes))
        print(f"the results of all shards are joined in {store.path}")
        return
    arms = patch_arms(args)
    compute = resolve_compute(parameters.common.device, parameters.common.gpu_device,
                              patched_precision(args.precision, args.scan or arms))
    check_starts(args.num_episodes, "--num_episodes")
    if args.num_controls < 2:
        raise UserError("--num_controls must be at least 2, so that each control can be compared "
                        "with another one")
    policy = load_agent(args.agent_file, compute.device)
    if args.in_simulator:
        testbed = in_simulator(args, parameters, compute)
    else:
        env = env_config(args, args.agent_file)
        edit = cheese_region(env, args.cheese_region, args.agent_file)
        testbed = real_levels(
            policy, compute, env if args.training_levels else env.unseen_levels(),
            args.num_episodes, args.seed, args.num_envs, edit,
            {**region_described(edit), "from_step": args.alter_from_step})
    sets = []
    if not args.scan and (not arms or explicit & {"directions", "ablations", "swaps"}):
        sets = direction_sets(args, parameters, testbed, with_ablations=not arms or bool(
            explicit & {"directions", "ablations"}))
    references = args.reference_size, args.reference_seed
    settings = {
        "agent_file": args.agent_file.name, "agent_sha256": agent_sha256(args.agent_file),
        "num_episodes": args.num_episodes, "seed": args.seed, "precision": compute.precision}
    if args.scan:
        run_scan(store, args.scan, testbed, compute, references, settings, args.overwrite)
        return
    wording = DIRECTIONS if not arms else MIXED if sets else PATCHES
    if arms:
        sets.append(patch_conditions(arms, testbed, references, args.num_controls, args.seed,
                                     args.patch_controls, args.control_vectors))
    where, acts = testbed.description
    if wording != PATCHES and not args.in_simulator:
        acts += f", altered from step {args.alter_from_step} on"
    run_comparison(store, testbed, sets, settings,
                   f"{args.agent_file.name} on {args.num_episodes} {where}, the same for every "
                   f"alteration; {acts}", wording, args.overwrite, args.shard)


def direction_sets(args: argparse.Namespace, parameters: ParameterSet, testbed: Testbed,
                   with_ablations: bool) -> list[ConditionSet]:
    """Return the ablations and swaps of independent components that the flags specify, with their
    controls."""
    folder = directions_folder(args, parameters)
    number = direction_episodes(args, parameters, "--num_direction_episodes")
    projector, matrices = Projector.load_for(testbed.policy.hidden_state_size, folder, number,
                                             args.agent_file)
    directions = parameters.get(DirectionsConfig).ids() if with_ablations else ()
    digests: dict[str, Any] = {"matrices_sha256": matrices}
    sources = None
    if directions and RESAMPLE in args.ablations:
        results = hidden_state_results(folder, number)
        sources = results.read("sources")
        digests["sources_sha256"] = sha256(results.file("sources"))
    from_step = 0 if args.in_simulator else args.alter_from_step
    sets = (
        ablation_conditions(directions, args.ablations, args.num_controls, projector, sources,
                            testbed, from_step, args.seed),
        swap_conditions(args.swaps, args.num_controls, projector, testbed.policy.device,
                        from_step))
    return [dataclasses.replace(each, settings={**each.settings, **digests})
            for each in sets if each.conditions]


def in_simulator(args: argparse.Namespace, parameters: ParameterSet,
                 compute: Compute) -> Testbed:
    """Return the testbed that the flags specify, which simulates the same starts each time.

    Raises:
        UserError: if a flag is missing or does not apply to the simulator.
    """
    if args.model_file is None:
        raise UserError("--in_simulator needs --model_file")
    if args.cheese_region:
        raise UserError("--cheese_region edits real levels, but the simulator starts from recorded "
                        "frames; give this flag to record.py instead")
    simulator = open_simulator(args.model_file, args.agent_file, parameters.get(SimulatorConfig),
                               compute)
    num_steps, data_dir = parameters.get(SaliencyConfig).num_sim_steps, parameters.common.data_dir
    plan = SamplingPlan(parameters.get(RecordConfig).rand_init, False, (), num_steps,
                        simulator.config.num_init_steps, False, args.seed)
    dataset = None
    if not plan.random_start:
        dataset = RolloutDataset(Path(data_dir), plan.num_init_steps, num_steps)
        dataset.check_agent(args.agent_file, simulator.agent.policy)
    return simulated_starts(
        simulator, compute, plan, dataset, args.num_episodes, args.batch_size,
        RolloutFolder(Path(data_dir)), {
            "model_file": args.model_file.name, "model_sha256": sha256(args.model_file),
            "data_dir": data_dir if dataset else None,
            "recording_sha256": dataset.folder.sha256(args.check_contents) if dataset else None})


if __name__ == "__main__":
    raise SystemExit(main())
