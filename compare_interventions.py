"""Count what altering directions of the agent's hidden state does to its behaviour.

The same levels (or, with --in_simulator, the same simulated starts) are played with and without
each alteration, and with alterations of random directions of equal size. A killed run goes on
behind its last alteration; more directions or controls can be added to a finished one.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from agents.episodes import Episode, play_episodes
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
from common.files import atomic_path, sha256, versions
from common.networks import HiddenChange, Policy
from common.parameters import ParameterSet
from common.progress import with_progress
from generative.config import RecordConfig, SaliencyConfig, SimulatorConfig
from generative.dataset import RolloutDataset
from generative.flags import add_data_flag
from generative.runs import open_simulator
from generative.sampling import Sampler, SamplingPlan
from interventions.config import DirectionFilesConfig, DirectionsConfig
from interventions.effects import (
    Arm,
    check_starts,
    chosen_outcomes,
    compare,
    divergence_over_time,
)
from interventions.figure import plot_effects
from interventions.files import ArmRuns, InterventionsFolder
from interventions.flags import (
    add_alter_from_flag,
    add_direction_flags,
    add_direction_ids_flag,
    direction,
    directions_folder,
)
from interventions.projector import Projector
from interventions.report import report
from interventions.swaps import MeasuredChange, swap_name

UNALTERED = "unaltered"
Runner = Callable[[HiddenChange | None], ArmRuns]  # an alteration, or None, to what it does


@dataclasses.dataclass(frozen=True)
class Alteration:
    """An arm and what makes it.

    Attributes:
        taken, put: see ``Projector.swap``.
        turn: seed of the random directions (``Projector.turned``), None for the directions.
    """

    arm: Arm
    taken: list[int]
    put: list[int | None]
    turn: int | None


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
                        "held against")
    policy = load_agent(args.agent_file, compute.device)
    projector, matrices = Projector.load_for(
        policy.hidden_state_size, directions_folder(args, parameters),
        parameters.get(DirectionFilesConfig).num_episodes)
    alterations = all_alterations(parameters.get(DirectionsConfig).ids(), args.swaps,
                                  args.num_controls)
    changes = {each.arm.name: change_of(each, projector, compute) for each in alterations}

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
    for number, (arm, change) in enumerate({UNALTERED: None, **changes}.items()):
        if not folder.has(arm):
            started = time.perf_counter()
            folder.add(arm, run(change))
            print(f"{arm} ({number} of {len(changes)} alterations): "
                  f"{time.perf_counter() - started:.1f} s", flush=True)
    print(f"all runs: {time.perf_counter() - begin:.0f} s", flush=True)
    write_results(folder, [each.arm for each in alterations], args)


def all_alterations(directions: tuple[int, ...], swaps: list[str],
                    num_controls: int) -> list[Alteration]:
    """Every direction taken out, every swap, and the controls of each pattern among them."""
    alterations = [_alteration([number], [None]) for number in directions]
    alterations += [_alteration(*_pairs(text)) for text in swaps]
    names = [each.arm.name for each in alterations]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"the alteration {name} is asked for twice")
    patterns = {each.arm.pattern: _renumbered(each.taken, each.put) for each in alterations}
    return alterations + [_alteration(taken, put, turn) for taken, put in patterns.values()
                          for turn in range(num_controls)]


def _alteration(taken: list[int], put: list[int | None], turn: int | None = None) -> Alteration:
    pattern = swap_name(*_renumbered(taken, put))
    if turn is not None:
        arm = Arm(f"random_{turn:03d}_{pattern}", f"random {turn}", pattern, control=True)
    else:
        label = ", ".join(f"IC {source} out" if target is None else f"IC {source} to {target}"
                          for source, target in zip(taken, put))
        arm = Arm(f"ic_{swap_name(taken, put)}", label, pattern, control=False)
    return Alteration(arm, taken, put, turn)


def _renumbered(taken: list[int], put: list[int | None]) -> tuple[list[int], list[int | None]]:
    """The same swap between directions numbered in the order in which they appear."""
    numbers = {None: None}
    for number in (*taken, *put):
        if number is not None:
            numbers.setdefault(number, len(numbers) - 1)
    return [numbers[number] for number in taken], [numbers[number] for number in put]


def _pairs(text: str) -> tuple[list[int], list[int | None]]:
    """The directions of ``10:12,5:None``."""
    try:
        pairs = [pair.split(":") for pair in text.split(",")]
        taken, put = [int(source) for source, _ in pairs], [direction(end) for _, end in pairs]
    except ValueError:
        raise UserError(f"--swaps takes pairs such as 10:12 or 10:12,5:None, not '{text}'"
                        ) from None
    if any(source == target for source, target in zip(taken, put)):
        raise UserError(f"--swaps {text} puts a direction back where it was, which alters nothing")
    return taken, put


def change_of(alteration: Alteration, projector: Projector, compute: Compute) -> MeasuredChange:
    """What an alteration does to the agent's state."""
    if alteration.turn is not None:
        projector = projector.turned(alteration.turn)
    step = projector.swapped_step(alteration.taken, alteration.put, "ica", compute.device)
    return MeasuredChange(step, projector.std.to(compute.device))


def in_reality(args: argparse.Namespace, policy: Policy, compute: Compute) -> tuple[Runner, dict]:
    """Plays real levels, with actions drawn from the policy itself."""
    env = env_config(args) if args.training_levels else env_config(args).unseen_levels()
    levels = list(enumerate(env.draw_levels(args.num_episodes, args.seed)))

    def run(change: MeasuredChange | None) -> ArmRuns:
        episodes = play_episodes(policy, compute, env, levels, args.seed, args.num_envs,
                                 alter_hidden=change, alter_from=args.alter_from_step,
                                 keep_frames=False)
        return played(with_progress(episodes, len(levels), "episode"), change)
    return run, {"where": "real levels", "env": vars(env), "from_step": args.alter_from_step}


def played(episodes: Iterable[Episode], change: MeasuredChange | None) -> ArmRuns:
    """The runs of one arm on real levels, in the order of the episodes' numbers."""
    episodes = sorted(episodes, key=lambda episode: episode.number)
    # The last row is no step of the agent's; the reward of a step stands in the row after it.
    return ArmRuns(
        np.array([episode.level_seed for episode in episodes], dtype=np.int64),
        np.array([episode.length for episode in episodes]),
        np.array([episode.level_complete for episode in episodes], dtype=np.float32),
        *(np.concatenate(parts) for parts in zip(*(
            (episode.actions[:-1], episode.values[:-1], episode.rewards[1:])
            for episode in episodes))),
        np.array(change.moved if change else 0.0))


def in_simulator(args: argparse.Namespace, parameters: ParameterSet,
                 compute: Compute) -> tuple[Runner, dict]:
    """Simulates with the agent's most likely actions and the most likely latents."""
    if args.model_file is None:
        raise UserError("--in_simulator needs --model_file")
    simulator = open_simulator(args.model_file, args.agent_file, parameters.get(SimulatorConfig),
                               compute)
    num_steps, data_dir = parameters.get(SaliencyConfig).num_sim_steps, parameters.common.data_dir
    plan = SamplingPlan(parameters.get(RecordConfig).rand_init, False, (), num_steps,
                        simulator.config.num_init_steps, False, args.seed)
    dataset = None
    if not plan.random_start:
        dataset = RolloutDataset(Path(data_dir), plan.num_init_steps, num_steps)
    Sampler(simulator, compute, plan, dataset).check(args.num_episodes)

    def run(change: MeasuredChange | None) -> ArmRuns:
        return simulated(Sampler(simulator, compute, plan, dataset, change), args.num_episodes,
                         args.batch_size, change)
    return run, {
        "where": "the simulator", **dataclasses.asdict(plan), "model_file": args.model_file.name,
        "model_sha256": sha256(args.model_file), "data_dir": data_dir if dataset else None,
        "data_index_sha256": sha256(dataset.folder.index_file) if dataset else None}


def simulated(sampler: Sampler, num_starts: int, batch_size: int,
              change: MeasuredChange | None) -> ArmRuns:
    """The runs of one arm in the simulator."""
    begins = range(0, num_starts, batch_size)
    samples = [sample.arrays for begin in with_progress(begins, len(begins), "batch")
               for sample in sampler.simulate(range(begin, min(begin + batch_size, num_starts)))]
    return ArmRuns(
        np.arange(num_starts),
        np.array([len(sample.values) for sample in samples]),
        np.array([sample.terminals.max() for sample in samples]),
        np.concatenate([sample.log_probs.argmax(axis=-1) for sample in samples]),
        np.concatenate([sample.values for sample in samples]),
        np.concatenate([sample.rewards for sample in samples]),
        np.array(change.moved if change else 0.0))


def write_results(folder: InterventionsFolder, arms: list[Arm], args: argparse.Namespace) -> None:
    """Compare what the folder holds; write tables, report and figure, and say what is claimed."""
    unaltered, runs = folder.runs(UNALTERED), {arm.name: folder.runs(arm.name) for arm in arms}
    table = compare(arms, runs, unaltered, args.in_simulator, args.seed)
    over_time = divergence_over_time(arms, runs, unaltered)
    where = f"real levels of {args.env_name} ({args.distribution_mode})"
    acts = f"actions drawn from the policy, altered from step {args.alter_from_step} on"
    if args.in_simulator:
        where, acts = "simulated starts", f"{unaltered.lengths[0]} steps of most likely actions"
    title = "Altered directions of the agent's hidden state"
    what = (f"{args.agent_file.name} on {args.num_episodes} {where}, the same for every "
            f"alteration; {acts}; {args.num_controls} random directions of equal size as controls")
    outcomes = chosen_outcomes(args.in_simulator)
    folder.save_table(folder.effects_file, table)
    folder.save_table(folder.divergence_file, over_time)
    with atomic_path(folder.report_file) as temporary:
        temporary.write_text(report(table, outcomes, title, f"{what}."))
    with atomic_path(folder.figure_file) as temporary:
        plot_effects(temporary, table, over_time, outcomes, f"{title}\n{what}")
    claimed = table[table["claimed"] & ~table["control"]]
    for row in claimed.itertuples():
        print(f"{row.label}: {row.outcome} {row.unaltered:.3g} to {row.altered:.3g} (change "
              f"{row.effect:+.3g}, 95 % interval {row.low_95:.3g} to {row.high_95:.3g})")
    print(f"{len(claimed)} of {(~table['control']).sum()} effects are claimed; wrote "
          f"{folder.report_file}, {folder.figure_file.name}, {folder.effects_file.name} and "
          f"{folder.divergence_file.name}")


if __name__ == "__main__":
    raise SystemExit(main())
