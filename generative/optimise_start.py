"""Optimise start vectors of the simulator for targets, by gradients through the rollout.

Targets are outputs of the agent (value, log_prob_up, policy for all log-probabilities), directions
of its hidden state (hx_direction_3, hx_direction_3_pca, hx_direction for all of --direction_ids),
units (hidden_state:12, embedder.block3.res2.resadd:5; a layer name alone for all of its units), and
moves from one action to another (from_left_to_up). The same command resumes a killed run.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path

import numpy as np

from agents.provenance import agent_sha256
from agents.replay import recorded_game
from agents.rollout_files import RolloutFolder
from common.cli import Parser, count, from_zero
from common.devices import Compute, resolve_compute
from common.errors import UserError, script_main
from common.files import sha256, versions
from common.parameters import PARAMETER_SET, ParameterSet
from common.results import ResultStore
from generative.config import SaliencyConfig, SimulatorConfig
from generative.dataset import RolloutDataset
from generative.flags import (
    add_generated_data_flag,
    add_simulator_flags,
    open_directions,
)
from generative.runs import open_simulator
from generative.saliency.gradients import DIRECTION
from generative.sample_files import SampleFolder, open_samples
from generative.simulator import Simulator
from generative.start_optimisation.evaluation import evaluate, plot, report
from generative.start_optimisation.objectives import (
    AIMS,
    MAXIMISE,
    Objective,
    RecordedDensity,
    RecordedStarts,
    Target,
    drawn_windows,
    recorded_starts,
    targets_named,
)
from generative.start_optimisation.search import (
    OPTIMISED_STARTS,
    SearchContext,
    SearchPlan,
    write_best_starts,
    write_starts,
)
from interventions.flags import (
    add_direction_flags,
    add_direction_ids_flag,
    add_direction_type_flag,
)

STARTS_AT_A_TIME = 32
_CHOSEN = 4  # random stream; part of the generator's seed


def weight(text: str) -> float:
    """argparse type: a finite number of at least 0."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, not {text}")
    return value


# Flags with one number as their value: name, type, default and help.
_NUMBERS = (
    ("num_starts", count, 4, "starts per objective"),
    ("iterations", from_zero, 40, "optimiser steps"),
    ("learning_rate", float, 0.02, "learning rate of Adam, for the entries of the unit vectors"),
    ("diversity", weight, 1.0, "weight of the penalty on similarity among an objective's starts"),
    ("num_recorded", count, 2000, "maximum number of recorded starts, from which the density of "
     "starts and the scale of the targets are estimated"),
    ("best_of", count, 1000, "number of recorded starts that optimised starts are compared with; "
     "searches begin from the remaining ones"))


def parser() -> Parser:
    flags = Parser(__doc__)
    add_simulator_flags(flags, "simulator file", model_file_required=True,
                        at_a_time=STARTS_AT_A_TIME)
    flags.set_defaults(precision="float32")  # gradients need full precision
    flags.add_argument("--targets", nargs="+", default=["value"], metavar="TARGET",
                       help="one or several targets, see above")
    flags.add_argument("--num_targets", type=count,
                       help="number of targets to draw at random; all if not given")
    flags.add_argument("--aims", nargs="+", choices=AIMS, default=[MAXIMISE],
                       help="maximise the targets, minimise them, or both")
    flags.add_argument("--step", type=from_zero,
                       help="simulated step at which a target is read, from 0; the last of the "
                            "parameter set's common_timesteps if not given")
    for name, kind, default, description in _NUMBERS:
        flags.add_argument(f"--{name}", type=kind, default=default, help=description)
    flags.add_argument("--penalty", type=weight, nargs="+", default=[1.0, 0.0],
                       help="one or several weights of the penalty, which grows with the distance "
                            "from the recorded starts and with the probability that the episode "
                            "has ended; each weight has its own output folder; 0: no penalty")
    flags.add_argument("--no_real_game", action="store_true",
                       help="do not replay the nearest recorded starts in the real game")
    add_direction_ids_flag(flags, "--direction_ids", "directions that hx_direction stands for")
    add_direction_type_flag(flags)
    add_direction_flags(flags)
    flags.add_argument("--output_dir", type=Path,
                       help="output folder; <generated_data_dir>/made_to_order if not given")
    add_generated_data_flag(flags)
    flags.add_argument("--no_videos", action="store_true", help="do not write videos")
    flags.add_argument("--overwrite", action="store_true",
                       help="delete the previous contents of the output folder")
    return flags


@script_main
def main(argv: list[str] | None = None) -> int:
    args, explicit, parameters = parser().read(argv, data_flags=("data_dir",))
    common, saliency = parameters.common, parameters.get(SaliencyConfig)
    step = saliency.common_timesteps[-1] if args.step is None else args.step
    num_steps = saliency.num_sim_steps
    if "num_sim_steps" in explicit:
        num_steps = parameters.get(SimulatorConfig).num_sim_steps
    plan = SearchPlan(step, args.iterations, args.learning_rate, args.diversity)
    if step >= num_steps:
        raise UserError(f"there is no step {step}: the {num_steps} steps of a rollout are counted "
                        "from 0; see --step and --num_sim_steps")
    compute = resolve_compute(common.device, common.gpu_device, args.precision)
    simulator = open_simulator(args.model_file, args.agent_file, parameters.get(SimulatorConfig),
                               compute)
    targets, matrices = chosen_targets(args, parameters, simulator, compute)
    for target in targets:
        if step < target.first_step:
            raise UserError(f"the target {target.name} needs a step before it; --step must be at "
                            f"least {target.first_step}")
    dataset = RolloutDataset(Path(common.data_dir), simulator.config.num_init_steps, num_steps)
    dataset.check_agent(args.agent_file, simulator.agent.policy)
    recording = None if args.no_real_game else dataset.folder
    if recording is not None:
        recorded_game(recording)  # fails before the search, not after it
    windows = drawn_windows(dataset, args.num_recorded, step, args.seed)
    best_of = args.best_of if "best_of" in explicit else min(args.best_of, len(windows) // 2)
    if not 0 < best_of <= len(windows) - args.num_starts:
        raise UserError(f"--best_of {best_of} leaves {len(windows) - best_of} of the "
                        f"{len(windows)} recorded starts to begin from; lower it or --num_starts, "
                        "or raise --num_recorded or record more")

    names = [target.name for target in targets]
    settings = {
        "agent_file": args.agent_file.name, "agent_sha256": agent_sha256(args.agent_file),
        "model_file": args.model_file.name, "model_sha256": sha256(args.model_file),
        "simulator": dataclasses.asdict(simulator.config), "data_dir": common.data_dir,
        "recording_sha256": dataset.folder.sha256(args.check_contents), "targets": names,
        "step": step,
        "matrices_sha256": matrices, "num_recorded": len(windows), "num_steps": num_steps,
        "batch_size": args.batch_size, "seed": args.seed, "precision": compute.precision,
        "versions": versions()}
    store = ResultStore(args.output_dir or Path(common.generated_data_dir) / "made_to_order",
                        OPTIMISED_STARTS)
    store.open(settings, args.overwrite)
    arrays = store.compute("recorded", function=lambda: {**vars(recorded_starts(
        simulator, compute, dataset, windows, targets, step, args.batch_size)),
        "targets": np.array(names)})
    del arrays["targets"]
    starts = RecordedStarts(**arrays)
    objectives = tuple(Objective(target, aim) for aim in dict.fromkeys(args.aims)
                       for target in targets)
    context = SearchContext(
        simulator, compute, dataset, starts, best_of,
        RecordedDensity.fit(starts.vectors, starts.episodes), objectives, plan, args.num_starts,
        num_steps)
    folders = {}
    for penalty in dict.fromkeys(args.penalty):
        folders[penalty] = open_samples(store.path / f"penalty_{penalty:g}", {
            **settings, PARAMETER_SET: args.interpreting_params_name,
            "orders": [objective.name for objective in objectives],
            "penalty": penalty, "num_starts": args.num_starts, "best_of": best_of,
            **dataclasses.asdict(plan), "recorded_sha256": sha256(store.file_of("recorded"))})
        status = write_starts(context, folders[penalty], penalty, not args.no_videos)
        if status:
            print(f"stopped; run the same command again to resume {folders[penalty].path}")
            return status
    write_results(context, store, folders, recording, args)
    print(f"wrote {args.num_starts} starts for each of {len(objectives)} objectives and their "
          f"evaluation to {store.path}; read {store.file_of('report').name} first")
    return 0


def chosen_targets(args: argparse.Namespace, parameters: ParameterSet, simulator: Simulator,
                   compute: Compute) -> tuple[tuple[Target, ...], dict | None]:
    """Return the targets selected by the flags, and the checksums of the direction files (None if
    no target is a direction)."""
    settings, projector, matrices = parameters.get(SaliencyConfig), None, None
    if any(name.startswith(DIRECTION) for name in args.targets):
        projector, matrices = open_directions(args, parameters, simulator, compute)
    targets = targets_named(args.targets, simulator.agent.policy, settings.ids("direction_ids"),
                            settings.direction_type, projector)
    if args.num_targets is not None:
        if args.num_targets > len(targets):
            raise UserError(f"--num_targets is {args.num_targets}, but --targets names only "
                            f"{len(targets)}")
        drawn = np.random.default_rng([args.seed, _CHOSEN]).permutation(len(targets))
        targets = tuple(targets[number] for number in sorted(drawn[:args.num_targets]))
    return targets, matrices


def write_results(context: SearchContext, store: ResultStore, folders: dict[float, SampleFolder],
                  recording: RolloutFolder | None, args: argparse.Namespace) -> None:
    """Evaluate the optimised starts, and write tables, images, figure and report.

    Args:
        folders: sample folders by penalty.
        recording: rollouts that are replayed in the real game; None to leave this out.
    """
    starts, effects = evaluate(context, folders, recording, args.batch_size, args.seed)
    store.write("starts", value=starts)
    if effects is not None:
        store.write("effects", value=effects)
    for number, rows in starts[starts["best"]].groupby("order"):
        with store.file("picture", f"{number:03d}") as path:
            write_best_starts(context, path, [
                folders[row.penalty].sample(row.sample) for row in rows.itertuples()])
    with store.file("figure") as path:
        plot(path, starts)
    store.write("report", value=report(context, starts, effects, recording is not None))


if __name__ == "__main__":
    raise SystemExit(main())
