"""Measure the effects of interventions on an agent, see ``ComparisonOptions``.

The same levels (or, with --in_simulator, the same simulated starts) are played with and without
each alteration, and with controls: alterations of random directions of equal size, or patches of
the same kind with random vectors, channels or cells. If patches are given, directions are altered
only if --directions, --ablations or --swaps is also given. A killed run resumes after its last
finished alteration; directions, patches and controls can be added to a finished run. With --scan,
every part of a layer is patched in turn, in single frames instead of whole runs.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from agents.agent_file import load_agent
from agents.episodes import PlayOptions
from agents.goal_places import GoalGameOptions, goal_described
from agents.provenance import agent_sha256
from agents.reference_set import recorded_reference
from agents.rollout_files import RolloutFolder
from agents.testbed import Testbed
from common.cli import count, environments, seed
from common.devices import Compute
from common.errors import UserError
from common.files import sha256
from common.options import ParameterComputeOptions, ShardOptions, command, option, redefine
from common.results import ResultStore
from envs.coin import END
from generative.config import RecordConfig, SaliencyConfig, SimulatorConfig
from generative.dataset import RolloutDataset
from generative.flags import DataOptions
from generative.runs import open_simulator
from generative.sampling import Sampler, SamplingPlan
from generative.simulated_game import SimulatedGame
from interventions.ablations import RESAMPLE, ablation_conditions
from interventions.comparison import (
    COMPARISON,
    ConditionSet,
    run_comparison,
    write_joined_results,
)
from interventions.conditions import ConditionOptions, patch_conditions, swap_conditions
from interventions.config import DirectionsConfig
from interventions.flags import AlterFromOptions, PlayedDirectionOptions, patched_precision
from interventions.hidden_states_folder import hidden_state_results
from interventions.scan_study import SCANNED, run_scan
from stats.effects import check_starts
from stats.report import DIRECTIONS, MIXED, PATCHES

NOT_WITH_SCAN = {"in_simulator", "patch", "patch_file", "directions", "ablations", "swaps",
                 "shard", "join"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparisonOptions(ConditionOptions, PlayedDirectionOptions, AlterFromOptions,
                        GoalGameOptions, DataOptions, ShardOptions, ParameterComputeOptions):
    """Measure how altered directions of the agent's hidden state, or patches of its layers, affect
    its behaviour."""

    agent_file: Path = option(help="agent file whose hidden state or layers are altered")
    num_episodes: int = option(
        400, "number of levels to play, or starts to simulate, per alteration", type=count)
    alter_from_step: int = redefine(AlterFromOptions, "alter_from_step", default=1)
    training_levels: bool = option(
        False, "play the levels of --start_level and --num_levels instead of unseen levels")
    num_envs: int = option(64, "number of episodes played at a time", type=environments)
    in_simulator: bool = option(False, "use simulated episodes instead of real levels")
    model_file: Path | None = option(None, "simulator file, for --in_simulator")
    num_sim_steps: int | None = option(None, "number of simulated steps", type=count,
                                       key="analysis.saliency.num_sim_steps")
    recording_rand_init: bool | None = option(
        None, "simulate from random vectors instead of recorded frames", key="record.rand_init")
    batch_size: int = option(32, "number of simulations at a time", type=count)
    output_dir: Path | None = option(
        None, "output folder; if not given, interventions, interventions_in_simulator or scan in "
              "the parameter set's save_dir")
    seed: int = option(
        1, "seed of levels, actions, bootstrap and sign flips; its default differs from that of "
           "record.py, so that effects are not measured on the levels from which the directions "
           "were computed", type=seed)
    overwrite: bool = option(False, "delete the previous contents of the output folder")

    @property
    def store(self) -> ResultStore:
        """The output folder."""
        folders = self.parameters.folders
        return ResultStore(self.output_dir or (
            folders.scan if self.scan else folders.interventions_in_simulator if self.in_simulator
            else folders.interventions), SCANNED if self.scan else COMPARISON)


def compare(options: ComparisonOptions) -> ResultStore:
    """Play with all alterations, or with those of the shard, or scan parts; return the folder of
    the results."""
    if options.scan and (excluded := options.given & NOT_WITH_SCAN):
        raise UserError(f"--scan patches single frames of real levels; leave --{min(excluded)} out")
    store = options.store
    if options.join:
        store.join(lambda notes: write_joined_results(store, notes))
        print(f"the results of all shards are joined in {store.path}")
        return store
    compute = options.compute_in(patched_precision(
        options.precision, [options.scan] if options.scan else options.patch_lists))
    check_starts(options.num_episodes, "--num_episodes")
    if options.num_controls < 2:
        raise UserError("--num_controls must be at least 2, so that each control can be compared "
                        "with another one")
    testbed, about = (in_simulator if options.in_simulator else on_real_levels)(options, compute)
    sets = direction_sets(options, testbed) if options.alters_directions else []
    settings = {
        **about, "agent_file": options.agent_file.name,
        "agent_sha256": agent_sha256(options.agent_file),
        "num_episodes": options.num_episodes, "seed": options.seed, "precision": compute.precision}
    if options.scan:
        run_scan(store, options.scan, testbed, compute, options.references, settings,
                 options.overwrite)
        return store
    wording = DIRECTIONS if not options.patch_lists else MIXED if sets else PATCHES
    if options.patch_lists:
        sets.append(patch_conditions(options, testbed, options.seed))
    where, acts = "simulated starts", f"{about.get('num_steps')} steps of most likely actions"
    if testbed.env is not None:
        where = f"real levels of {testbed.env.env_name} ({testbed.env.distribution_mode})"
        acts = "actions drawn from the policy"
    if wording != PATCHES and not options.in_simulator:
        acts += f", altered from step {options.alter_from_step} on"
    run_comparison(store, testbed, sets, settings,
                   f"{options.agent_file.name} on {options.num_episodes} {where}, the same for "
                   f"every alteration; {acts}", wording, options.overwrite, options.shard)
    return store


def direction_sets(options: ComparisonOptions, testbed: Testbed) -> list[ConditionSet]:
    """Return the requested ablations and swaps of independent components, with their controls."""
    projector, matrices = options.load_projector(testbed.policy, options.agent_file)
    directions = (options.parameters.get(DirectionsConfig).ids() if options.ablates_directions
                  else ())
    digests: dict[str, Any] = {"matrices_sha256": matrices}
    sources = None
    if directions and RESAMPLE in options.ablations:
        results = hidden_state_results(options.directions_folder, options.direction_episodes)
        sources = results.read("sources")
        digests["sources_sha256"] = sha256(results.file("sources"))
    from_step = 0 if options.in_simulator else options.alter_from_step
    sets = (
        ablation_conditions(directions, options.ablations, options.num_controls, projector, sources,
                            from_step, options.seed),
        swap_conditions([options.make_swap(pairs, from_step).opened(testbed.policy)
                         for pairs in options.swaps], options.num_controls, projector.std))
    return [dataclasses.replace(conditions, settings={**conditions.settings, **digests})
            for conditions in sets if conditions.conditions]


def on_real_levels(options: ComparisonOptions, compute: Compute) -> tuple[Testbed, dict]:
    """Return a testbed of real levels, and its settings."""
    env, edit = options.game(options.agent_file)
    if not options.training_levels:
        env = env.unseen_levels()
    levels = env.draw_levels(options.num_episodes, options.seed)
    return Testbed(load_agent(options.agent_file, compute.device), compute, env, levels,
                   options.seed, options.num_envs, edit), {
        "where": "real levels", "env": vars(env), **goal_described(edit),
        "from_step": options.alter_from_step}


def in_simulator(options: ComparisonOptions, compute: Compute) -> tuple[Testbed, dict]:
    """Return a testbed of simulated starts, and its settings.

    Raises:
        UserError: if an option is missing or does not apply to the simulator.
    """
    if options.model_file is None:
        raise UserError("--in_simulator needs --model_file")
    for flag, place in (("cheese_region", options.cheese_region), ("coin", options.coin)):
        if place not in (None, 0, END):
            raise UserError(f"--{flag} edits real levels, but the simulator starts from recorded "
                            "frames; give this flag to record.py instead")
    parameters = options.parameters
    simulator = open_simulator(options.model_file, options.agent_file,
                               parameters.get(SimulatorConfig), compute)
    num_steps, data_dir = parameters.get(SaliencyConfig).num_sim_steps, parameters.common.data_dir
    plan = SamplingPlan(parameters.get(RecordConfig).rand_init, False, (), num_steps,
                        simulator.config.num_init_steps, False, options.seed)
    dataset = None
    if not plan.random_start:
        dataset = RolloutDataset(Path(data_dir), plan.num_init_steps, num_steps)
        dataset.check_agent(options.agent_file, simulator.agent.policy)
    sampler = Sampler(simulator, compute, plan, dataset, options.num_episodes)
    return Testbed(
        simulator.agent.policy, compute, SimulatedGame(simulator, compute, sampler.begin),
        range(options.num_episodes), options.seed, options.batch_size,
        options=PlayOptions(greedy=True, max_steps=num_steps - 1, keep_frames=False),
        draw_reference=functools.partial(recorded_reference, RolloutFolder(Path(data_dir)),
                                         sampler.episodes)), {
        "where": "the simulator", **plan.settings(simulator),
        "model_file": options.model_file.name, "model_sha256": sha256(options.model_file),
        "data_dir": data_dir if dataset else None,
        "recording_sha256": dataset.folder.sha256(options.check_contents) if dataset else None}


main = command(ComparisonOptions, compare)

if __name__ == "__main__":
    raise SystemExit(main())
