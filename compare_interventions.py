"""Measure the effects of altered directions of the agent's hidden state, or of patches of its
layers, on its behaviour.

The same levels (or, with --in_simulator, the same simulated starts) are played with and without
each alteration, and with controls: alterations of random directions of equal size, or patches of
the same kind with a part drawn at random. With patches, components are altered only if --directions
or --swaps is given, too. A killed run goes on after its last alteration; more directions, patches
or controls can be added to a finished one.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from agents.agent_file import load_agent
from agents.config import add_env_flags, env_config
from agents.layers import STATE
from agents.networks import Policy
from agents.patch import Array, Patch
from agents.provenance import agent_sha256
from agents.reference_set import ReferenceSet, played_reference, recorded_reference
from agents.rollout_files import RolloutFolder
from common.cli import Parser, add_compute_flags, add_parameter_set_flag, count, environments, seed
from common.devices import Compute, resolve_compute
from common.errors import UserError, script_main
from common.files import sha256, versions
from common.parameters import ParameterSet
from common.results import ResultStore
from common.shards import WHOLE, add_shard_flags
from envs.procgen_env import EnvConfig, LevelEdit
from generative.config import RecordConfig, SaliencyConfig, SimulatorConfig
from generative.dataset import RolloutDataset
from generative.flags import add_data_flag
from generative.runs import open_simulator
from generative.sampling import Sampler, SamplingPlan, simulated_starts
from interventions.comparison import Runner, comparison_store, real_levels, write_results
from interventions.conditions import (
    PatchedCondition,
    count_vector_levels,
    describe_unmatched,
    patch_conditions,
    standard_deviations,
    swap_conditions,
)
from interventions.config import DirectionFilesConfig, DirectionsConfig
from interventions.controls import KINDS
from interventions.flags import (
    add_alter_from_flag,
    add_direction_flags,
    add_direction_ids_flag,
    add_patch_flags,
    directions_folder,
    patch_arms,
    patched_precision,
)
from interventions.patch_text import Opening
from interventions.projector import Projector
from maze.level.patch_words import register_maze_words
from maze.level.regions import add_cheese_region_flag, cheese_region, region_described
from stats.effects import Condition, check_starts, claims_summary
from stats.report import DIRECTIONS, MIXED, PATCHES, Wording
from stats.study import BASELINE, measure_conditions

logger = logging.getLogger(__name__)


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
    flags.add_argument("--patch_controls", choices=KINDS,
                       help="kind of the controls of patches: the cells of a vector permuted, "
                            "random numbers of its norm, --control_vectors, other channels, other "
                            "cells; by default that of each kind of patch")
    flags.add_argument("--control_vectors", type=Path, nargs="+", default=[], metavar="FILE",
                       help="vectors of other pairs, for --patch_controls others")
    add_patch_flags(flags)
    add_direction_flags(flags, "--num_direction_episodes")
    add_alter_from_flag(flags, default=1)
    add_env_flags(flags)
    add_cheese_region_flag(flags, of_agent=True)
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
    add_shard_flags(flags, "the alterations")
    add_compute_flags(flags, in_parameter_set=True)
    return flags


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the runs are: on real levels, or in the simulator.

    Attributes:
        run: makes the runs of an arm.
        description: of what makes them.
        policy: that patches act on.
        env: the game; None in the simulator.
        levels: seeds of the levels that are played; none in the simulator.
        reference: size and seed to a reference set of other pictures.
        edit: of every level, if there is one.
    """

    run: Runner
    description: dict
    policy: Policy
    env: EnvConfig | None
    levels: Sequence[int]
    reference: Callable[[int, int], ReferenceSet]
    edit: LevelEdit | None = None


@dataclasses.dataclass(frozen=True)
class Compared:
    """Conditions of one kind.

    Attributes:
        conditions: interventions, then controls.
        std: standard deviations of the units of the layers that they change, by layer.
        settings: what made all of them.
        controls: name of the controls, for the report.
    """

    conditions: list[PatchedCondition]
    std: Mapping[str, Array]
    settings: dict
    controls: str


@script_main
def main(argv: list[str] | None = None) -> None:
    args, explicit, parameters = parser().read(argv)
    register_maze_words()
    folders = parameters.folders
    folder = comparison_store(args.output_dir or (
        folders.interventions_in_simulator if args.in_simulator else folders.interventions))
    if args.join:
        folder.join(lambda divided: print_claims(folder, write_results_of(folder, divided)))
        print(f"all arms are joined in {folder.path}")
        return
    common, asked = parameters.common, patch_arms(args)
    compute = resolve_compute(common.device, common.gpu_device,
                              patched_precision(args.precision, asked))
    check_starts(args.num_episodes, "--num_episodes")
    if args.num_controls < 2:
        raise UserError("--num_controls must be at least 2, so that a control has others to be "
                        "compared with")
    policy = load_agent(args.agent_file, compute.device)
    compared = []
    if not asked or explicit & {"directions", "swaps"}:
        with_ids = not asked or "directions" in explicit
        compared.append(of_directions(args, parameters, policy, compute, with_ids))
    place = (in_simulator(args, parameters, compute) if args.in_simulator
             else in_reality(args, policy, compute))
    wording = DIRECTIONS if not asked else MIXED if compared else PATCHES
    if asked:
        compared.append(of_patches(args, asked, place))
    conditions = [condition for each in compared for condition in each.conditions]
    std = {layer: values for each in reversed(compared) for layer, values in each.std.items()}
    results = {"arms": [{"name": each.name, "label": each.label, "pattern": each.pattern,
                         "control": each.control} for each in conditions],
               "simulated": args.in_simulator, "seed": args.seed,
               "what": where_and_how(args, wording, place, compared),
               "wording": dataclasses.asdict(wording)}
    folder.open({
        **place.description, "agent_file": args.agent_file.name,
        "agent_sha256": agent_sha256(args.agent_file), "num_episodes": args.num_episodes,
        "seed": args.seed, "precision": compute.precision,
        **{name: value for each in reversed(compared) for name, value in each.settings.items()},
        "versions": versions(), "arms": {each.name: each.settings for each in conditions}},
        args.overwrite, args.shard, results)
    measure_conditions(folder, "arm", [BASELINE, *conditions],
                       lambda each: vars(place.run(each.value or [], std)), args.shard)
    if args.shard == WHOLE:
        print_claims(folder, write_results_of(folder, results))


def where_and_how(args: argparse.Namespace, wording: Wording, place: Place,
                  compared: Sequence[Compared]) -> str:
    """A line on what is run, for report and figure."""
    where = f"real levels of {args.env_name} ({args.distribution_mode})"
    acts = "actions drawn from the policy"
    if wording != PATCHES:
        acts += f", altered from step {args.alter_from_step} on"
    if args.in_simulator:
        where = "simulated starts"
        acts = f"{place.description['num_steps']} steps of most likely actions"
    return (f"{args.agent_file.name} on {args.num_episodes} {where}, the same for every "
            f"alteration; {acts}; {'; '.join(each.controls for each in compared)}")


def write_results_of(folder: ResultStore, results: dict) -> pd.DataFrame:
    """``write_results`` from what all shards note."""
    arms = [Condition(**arm) for arm in results["arms"]]
    return write_results(folder, arms, results["simulated"], results["seed"], results["what"],
                         Wording(**results["wording"]))


def print_claims(folder: ResultStore, table: pd.DataFrame) -> None:
    """Say which effects are claimed, and where all of them are."""
    claimed = table[table["claimed"] & ~table["control"]]
    for row in claimed.itertuples():
        print(f"{row.label}: {row.outcome} {row.unaltered:.3g} to {row.altered:.3g} (change "
              f"{row.effect:+.3g}, 95 % interval {row.low_95:.3g} to {row.high_95:.3g})")
    written = [folder.file_of(name) for name in ("report", "figure", "effects", "divergence")]
    print(f"{claims_summary(table)}; wrote {written[0]}, {written[1].name}, {written[2].name} and "
          f"{written[3].name}")


def of_directions(args: argparse.Namespace, parameters: ParameterSet, policy: Policy,
                  compute: Compute, with_ids: bool) -> Compared:
    """Directions that are taken out, and swaps.

    Args:
        with_ids: whether ``--directions`` is meant, beside ``--swaps``.
    """
    projector, matrices = Projector.load_for(
        policy.hidden_state_size, directions_folder(args, parameters),
        parameters.get(DirectionFilesConfig).num_episodes, args.agent_file)
    conditions = swap_conditions(parameters.get(DirectionsConfig).ids() if with_ids else (),
                                 args.swaps, args.num_controls, projector, compute.device,
                                 0 if args.in_simulator else args.alter_from_step)
    return Compared(conditions, {STATE: projector.std}, {"matrices_sha256": matrices},
                    f"{args.num_controls} random directions of equal size as controls")


def of_patches(args: argparse.Namespace, asked: Mapping[str, Sequence[Patch]],
               place: Place) -> Compared:
    """Lists of patches."""
    reference = functools.cache(lambda: place.reference(args.reference_size, args.reference_seed))
    conditions = patch_conditions(
        asked, Opening(place.policy, place.env, reference, place.edit), args.num_controls,
        args.seed, args.patch_controls, args.control_vectors)
    controls = (f"{args.num_controls} controls of each list of patches"
                f"{describe_unmatched(conditions)}")
    seen = count_vector_levels(asked.values(), place.levels)
    if seen:
        controls += (f"; a vector was made on {seen} of these levels, so that they are no evidence "
                     "beyond them: another --seed draws others")
        logger.warning("a vector was made on %d of the levels that are played; another --seed "
                       "draws others", seen)
    return Compared(
        conditions, standard_deviations(conditions, place.policy, reference()),
        {"reference": reference().description, "patch_controls": args.patch_controls}, controls)


def in_reality(args: argparse.Namespace, policy: Policy, compute: Compute) -> Place:
    """Real levels."""
    env = env_config(args, args.agent_file)
    if not args.training_levels:
        env = env.unseen_levels()
    levels = list(enumerate(env.draw_levels(args.num_episodes, args.seed)))
    edit = cheese_region(env, args.cheese_region, args.agent_file)
    run = real_levels(policy, compute, env, levels, args.seed, args.num_envs, edit)
    seeds = [level for _, level in levels]
    return Place(
        run, {"where": "real levels", "env": vars(env), **region_described(edit),
              "from_step": args.alter_from_step}, policy, env, seeds,
        lambda size, seed: played_reference(policy, compute, env, seeds, size, seed, edit), edit)


def in_simulator(args: argparse.Namespace, parameters: ParameterSet,
                 compute: Compute) -> Place:
    """The simulator."""
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
        dataset.check_agent(args.agent_file, simulator.agent.policy)
    run = simulated_starts(simulator, compute, plan, dataset, args.num_episodes, args.batch_size)
    episodes = Sampler(simulator, compute, plan, dataset).episodes(args.num_episodes)
    return Place(run, {
        "where": "the simulator", **dataclasses.asdict(plan), "model_file": args.model_file.name,
        "model_sha256": sha256(args.model_file), "data_dir": data_dir if dataset else None,
        "recording_sha256": dataset.folder.sha256(args.check_contents) if dataset else None},
        simulator.agent.policy, None, [],
        lambda size, seed: recorded_reference(RolloutFolder(Path(data_dir)), episodes, size, seed))


if __name__ == "__main__":
    raise SystemExit(main())
