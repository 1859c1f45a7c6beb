"""Measure the effects of altered directions of the agent's hidden state on its behaviour.

The same levels (or, with --in_simulator, the same simulated starts) are played with and without
each alteration, and with alterations of random directions of equal size. A killed run goes on
after its last alteration; more directions or controls can be added to a finished one.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path

from agents.arms import real_levels
from common.agent_file import load_agent
from common.cli import (
    Parser,
    add_compute_flags,
    add_env_flags,
    add_parameter_set_flag,
    count,
    env_config,
    environments,
    seed,
)
from common.devices import Compute, resolve_compute
from common.errors import UserError, script_main
from common.files import sha256, versions
from common.networks import Policy
from common.parameters import ParameterSet
from generative.arms import simulated_starts
from generative.config import RecordConfig, SaliencyConfig, SimulatorConfig
from generative.dataset import RolloutDataset
from generative.flags import add_data_flag
from generative.runs import open_simulator
from generative.sampling import SamplingPlan
from interventions.alterations import UNALTERED, Runner, all_alterations, patch_of
from interventions.config import DirectionFilesConfig, DirectionsConfig
from interventions.effects import check_starts
from interventions.files import InterventionsFolder
from interventions.flags import (
    add_alter_from_flag,
    add_direction_flags,
    add_direction_ids_flag,
    directions_folder,
)
from interventions.layers import STATE
from interventions.projector import Projector
from interventions.results import write_results
from maze.level.regions import add_cheese_region_flag, cheese_region, region_described


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("--agent_file", type=Path, required=True,
                       help="agent whose state is altered")
    add_parameter_set_flag(flags)
    flags.add_argument("--num_episodes", type=count, default=400,
                       help="levels to play, or starts to simulate, for each alteration")
    add_direction_ids_flag(flags, "--directions", "independent components to take out, one at a "
                           "time: ids, or a range such as 0 to 16")
    flags.add_argument("--swaps", nargs="+", default=[], metavar="FROM:TO",
                       help="further alterations: 10:12 puts what component 10 would have changed "
                            "into 12; 10:12,5:None does two at once")
    flags.add_argument("--num_controls", type=count, default=20,
                       help="random alterations of each kind; with fewer than 19 nothing can be "
                            "claimed")
    add_direction_flags(flags, "--num_direction_episodes")
    add_alter_from_flag(flags, default=1)
    add_env_flags(flags)
    add_cheese_region_flag(flags)
    flags.add_argument("--training_levels", action="store_true",
                       help="play the levels of --start_level and --num_levels instead of those "
                            "outside")
    flags.add_argument("--num_envs", type=environments, default=64,
                       help="episodes played at a time")
    flags.add_argument("--in_simulator", action="store_true",
                       help="simulate instead of playing real levels")
    flags.add_argument("--model_file", type=Path, help="simulator file, for --in_simulator")
    add_data_flag(flags)
    flags.add_argument("--num_sim_steps", type=count, key="analysis.saliency.num_sim_steps",
                       help="simulated steps")
    flags.add_argument("--recording_rand_init", dest="rand_init", action="store_true",
                       key="record.rand_init",
                       help="simulate from random vectors instead of recorded frames")
    flags.add_argument("--batch_size", type=count, default=32, help="simulations at a time")
    flags.add_argument("--output_dir", type=Path,
                       help="<save_dir of the parameter set>/interventions if not given, or "
                            "interventions_in_simulator")
    flags.add_argument("--seed", type=seed, default=1,
                       help="of levels, actions, bootstrap and sign flips; not 0, as in "
                            "record.py, so that the levels are not those that the directions "
                            "were found on")
    flags.add_argument("--overwrite", action="store_true",
                       help="throw away what the output folder holds")
    add_compute_flags(flags, in_parameter_set=True)
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, _, parameters = parser().read(argv)
    common = parameters.common
    compute = resolve_compute(common.device, common.gpu_device, args.precision)
    check_starts(args.num_episodes)
    if args.num_controls < 2:
        raise UserError("--num_controls must be at least 2, so that a control has others to be "
                        "compared with")
    policy = load_agent(args.agent_file, compute.device)
    projector, matrices = Projector.load_for(
        policy.hidden_state_size, directions_folder(args, parameters),
        parameters.get(DirectionFilesConfig).num_episodes)
    alterations = all_alterations(parameters.get(DirectionsConfig).ids(), args.swaps,
                                  args.num_controls)
    from_step = 0 if args.in_simulator else args.alter_from_step
    patches = {each.arm.name: [patch_of(each, projector, compute, from_step)]
               for each in alterations}

    if args.in_simulator:
        run, description = in_simulator(args, parameters, compute)
    else:
        run, description = in_reality(args, policy, compute)
    folders = parameters.folders
    folder = InterventionsFolder(args.output_dir or (
        folders.interventions_in_simulator if args.in_simulator else folders.interventions))
    folder.open({
        **description, "agent_file": args.agent_file.name, "agent_sha256": sha256(args.agent_file),
        "num_episodes": args.num_episodes, "seed": args.seed, "precision": compute.precision,
        "matrices_sha256": matrices, "versions": versions(),
        "arms": {each.arm.name: {"from": each.taken, "to": each.put, "turned_by_seed": each.turn}
                 for each in alterations}}, args.overwrite)

    begin = time.perf_counter()
    for number, (arm, of_arm) in enumerate({UNALTERED: [], **patches}.items()):
        if not folder.has(arm):
            started = time.perf_counter()
            folder.add(arm, run(of_arm, {STATE: projector.std}))
            print(f"{arm} ({number} of {len(patches)} alterations): "
                  f"{time.perf_counter() - started:.1f} s", flush=True)
    print(f"all runs: {time.perf_counter() - begin:.0f} s", flush=True)

    where = f"real levels of {args.env_name} ({args.distribution_mode})"
    acts = f"actions drawn from the policy, altered from step {args.alter_from_step} on"
    if args.in_simulator:
        where = "simulated starts"
        acts = f"{folder.runs(UNALTERED).lengths[0]} steps of most likely actions"
    table = write_results(
        folder, [each.arm for each in alterations], args.in_simulator, args.seed,
        f"{args.agent_file.name} on {args.num_episodes} {where}, the same for every alteration; "
        f"{acts}; {args.num_controls} random directions of equal size as controls")
    claimed = table[table["claimed"] & ~table["control"]]
    for row in claimed.itertuples():
        print(f"{row.label}: {row.outcome} {row.unaltered:.3g} to {row.altered:.3g} (change "
              f"{row.effect:+.3g}, 95 % interval {row.low_95:.3g} to {row.high_95:.3g})")
    print(f"{len(claimed)} of {(~table['control']).sum()} effects are claimed; wrote "
          f"{folder.report_file}, {folder.figure_file.name}, {folder.effects_file.name} and "
          f"{folder.divergence_file.name}")


def in_reality(args: argparse.Namespace, policy: Policy, compute: Compute) -> tuple[Runner, dict]:
    """Runs on real levels, and what makes them."""
    env = env_config(args) if args.training_levels else env_config(args).unseen_levels()
    levels = list(enumerate(env.draw_levels(args.num_episodes, args.seed)))
    edit = cheese_region(env, args.cheese_region)
    run = real_levels(policy, compute, env, levels, args.seed, args.num_envs, edit)
    return run, {"where": "real levels", "env": vars(env), **region_described(edit),
                 "from_step": args.alter_from_step}


def in_simulator(args: argparse.Namespace, parameters: ParameterSet,
                 compute: Compute) -> tuple[Runner, dict]:
    """Runs in the simulator, and what makes them."""
    if args.model_file is None:
        raise UserError("--in_simulator needs --model_file")
    if args.cheese_region:
        raise UserError("--cheese_region edits real levels; the simulator starts from recorded "
                        "frames: record them with it")
    simulator = open_simulator(args.model_file, args.agent_file, parameters.get(SimulatorConfig),
                               compute)
    num_steps, data_dir = parameters.get(SaliencyConfig).num_sim_steps, parameters.common.data_dir
    plan = SamplingPlan(parameters.get(RecordConfig).rand_init, False, (), num_steps,
                        simulator.config.num_init_steps, False, args.seed)
    dataset = None
    if not plan.random_start:
        dataset = RolloutDataset(Path(data_dir), plan.num_init_steps, num_steps)
    run = simulated_starts(simulator, compute, plan, dataset, args.num_episodes, args.batch_size)
    return run, {
        "where": "the simulator", **dataclasses.asdict(plan), "model_file": args.model_file.name,
        "model_sha256": sha256(args.model_file), "data_dir": data_dir if dataset else None,
        "data_index_sha256": sha256(dataset.folder.index_file) if dataset else None}


if __name__ == "__main__":
    raise SystemExit(main())
