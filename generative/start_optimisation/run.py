"""Run a search for starts: flags, inputs, resumable search, evaluation and result files.

``generative.optimise_start`` and ``analysis.feature_dreams`` differ only in their targets.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from agents.provenance import agent_sha256
from agents.replay import recorded_game
from agents.rollout_files import RolloutFolder
from common.cli import Parser, count, from_zero
from common.devices import Compute, resolve_compute
from common.errors import UserError
from common.files import sha256, versions
from common.parameters import PARAMETER_SET, ParameterSet
from common.results import ResultStore, Schema
from generative.config import SaliencyConfig, SimulatorConfig
from generative.dataset import RolloutDataset
from generative.flags import add_generated_data_flag, add_simulator_flags
from generative.runs import open_simulator
from generative.sample_files import SampleFolder, open_samples
from generative.simulator import Simulator
from generative.start_optimisation.evaluation import evaluate, plot, report
from generative.start_optimisation.objectives import (
    Objective,
    RecordedDensity,
    RecordedStarts,
    Target,
    drawn_windows,
    recorded_starts,
)
from generative.start_optimisation.prior_starts import PriorStarts, prior_starts
from generative.start_optimisation.search import (
    LEARNING_RATES,
    NOISE,
    VECTOR,
    SearchContext,
    SearchPlan,
    write_best_starts,
    write_starts,
)

STARTS_AT_A_TIME = 32


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
    ("diversity", weight, 1.0, "weight of the penalty on similarity among an objective's start "
     "vectors; not used in noise"),
    ("num_recorded", count, 2000, "maximum number of recorded starts, from which the density of "
     "starts and the scale of the targets are estimated"),
    ("best_of", count, None, "number of recorded starts that optimised starts are compared with; "
     "if not given, as many as the searches for an objective evaluate. Searches begin from the "
     "remaining ones, or from as many random samples of the prior"))


def add_search_flags(flags: Parser) -> None:
    """Add the flags of simulator and search, except those of the targets and the output folder."""
    add_simulator_flags(flags, "simulator file", model_file_required=True,
                        at_a_time=STARTS_AT_A_TIME)
    flags.set_defaults(precision="float32")  # gradients need full precision
    flags.add_argument("--step", type=from_zero,
                       help="simulated step at which a target is read, from 0; the last of the "
                            "parameter set's common_timesteps if not given")
    for name, kind, default, description in _NUMBERS:
        flags.add_argument(f"--{name}", type=kind, default=default, help=description)
    flags.add_argument("--search_space", choices=(NOISE, VECTOR),
                       help="search in the noise of the prior, or over start vectors; noise if the "
                            "simulator has a trained prior and the flag is not given")
    flags.add_argument("--learning_rate", type=float,
                       help="learning rate of Adam for the entries of unit vectors, or length of "
                            "the first steps in noise, relative to its norm; "
                            f"{LEARNING_RATES[VECTOR]} or {LEARNING_RATES[NOISE]} if not given")
    flags.add_argument("--penalty", type=weight, nargs="+", default=[1.0, 0.0],
                       help="one or several weights of the penalty, which grows with the "
                            "probability that the episode has ended and, for start vectors, with "
                            "the distance from the recorded starts; each weight has its own "
                            "output folder; 0: no penalty")
    flags.add_argument("--no_real_game", action="store_true",
                       help="do not replay the nearest recorded starts in the real game")
    add_generated_data_flag(flags)
    flags.add_argument("--no_videos", action="store_true", help="do not write videos")
    flags.add_argument("--overwrite", action="store_true",
                       help="delete the previous contents of the output folder")


@dataclasses.dataclass(frozen=True)
class FinishedSearch:
    """A search whose samples are all written.

    Attributes:
        context: inputs of the searches.
        store: result folder, open for writing.
        folders: sample folders by penalty.
        recording: rollouts that are replayed in the real game; None to leave this out.
    """

    context: SearchContext
    store: ResultStore
    folders: dict[float, SampleFolder]
    recording: RolloutFolder | None


Choice = Callable[[Simulator, Compute], tuple[Sequence[Target], Mapping]]
"""Function that returns targets, and settings on which they depend, to be saved with the folder."""


def run_search(args: argparse.Namespace, explicit: Collection[str], parameters: ParameterSet,
               folder: Path, schema: Schema, choose: Choice) -> FinishedSearch | int:
    """Search for starts that maximise or minimise targets, or resume the search.

    The rollouts of the optimised starts are written as samples.

    Args:
        args, explicit, parameters: parsed flags, see ``Parser.read``, with the aims in ``aims``.
        folder: output folder.
        schema: schema of the folder, with the entries of ``OPTIMISED_STARTS``.
        choose: function that chooses the targets, see ``Choice``.

    Returns:
        The finished search, or the exit status after a signal.

    Raises:
        UserError: if flags, simulator, agent and recording do not fit together.
    """
    common, saliency = parameters.common, parameters.get(SaliencyConfig)
    step = saliency.common_timesteps[-1] if args.step is None else args.step
    num_steps = saliency.num_sim_steps
    if "num_sim_steps" in explicit:
        num_steps = parameters.get(SimulatorConfig).num_sim_steps
    if step >= num_steps:
        raise UserError(f"there is no step {step}: the {num_steps} steps of a rollout are counted "
                        "from 0; see --step and --num_sim_steps")
    compute = resolve_compute(common.device, common.gpu_device, args.precision)
    simulator = open_simulator(args.model_file, args.agent_file, parameters.get(SimulatorConfig),
                               compute)
    has_prior = simulator.squares is not None and simulator.prior.is_trained
    space = args.search_space or (NOISE if has_prior else VECTOR)
    if space == NOISE and not has_prior:
        raise UserError("--search_space noise needs a simulator with worlds and a trained prior; "
                        "use --search_space vector")
    plan = SearchPlan(step, args.iterations, LEARNING_RATES[space] if args.learning_rate is None
                      else args.learning_rate, args.diversity)
    targets, target_settings = choose(simulator, compute)
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
    best_of = args.best_of or _equal_share(len(windows), args.num_starts, args.iterations)
    if not 0 < best_of <= len(windows) - args.num_starts:
        raise UserError(f"--best_of {best_of} leaves {len(windows) - best_of} of the "
                        f"{len(windows)} recorded starts to begin from; lower it or --num_starts, "
                        "or raise --num_recorded or record more")

    # As many as the searches for an objective evaluate, and as many as they may begin from.
    num_samples = 2 * (len(windows) - best_of) + args.num_starts * args.iterations
    names = [target.name for target in targets]
    settings = {
        "agent_file": args.agent_file.name, "agent_sha256": agent_sha256(args.agent_file),
        "model_file": args.model_file.name, "model_sha256": sha256(args.model_file),
        "simulator": simulator.config.described(), "data_dir": common.data_dir,
        "recording_sha256": dataset.folder.sha256(args.check_contents), "targets": names,
        "step": step,
        **target_settings, "num_recorded": len(windows), "num_steps": num_steps,
        "batch_size": args.batch_size, "seed": args.seed, "precision": compute.precision,
        **({"search_space": space, "num_prior_samples": num_samples} if has_prior else {}),
        "versions": versions()}
    store = ResultStore(folder, schema)
    store.open(settings, args.overwrite)
    arrays = store.compute("recorded", function=lambda: {**vars(recorded_starts(
        simulator, compute, dataset, windows, targets, step, args.batch_size)),
        "targets": np.array(names)})
    del arrays["targets"]
    starts, prior = RecordedStarts(**arrays), None
    if has_prior:
        prior = PriorStarts(**store.compute("prior", function=lambda: vars(prior_starts(
            simulator, compute, num_samples, targets, step, args.batch_size, args.seed))))
    objectives = tuple(Objective(target, aim) for aim in dict.fromkeys(args.aims)
                       for target in targets)
    context = SearchContext(
        simulator, compute, dataset, starts, best_of,
        RecordedDensity.fit(starts.vectors, starts.episodes), objectives, plan, args.num_starts,
        num_steps, space, prior)
    folders = {}
    for penalty in dict.fromkeys(args.penalty):
        folders[penalty] = open_samples(store.path / f"penalty_{penalty:g}", {
            **settings, PARAMETER_SET: args.interpreting_params_name,
            "orders": [objective.name for objective in objectives],
            "penalty": penalty, "num_starts": args.num_starts, "best_of": best_of,
            **dataclasses.asdict(plan), "recorded_sha256": sha256(store.file_of("recorded")),
            **({} if prior is None else {"samples_sha256": sha256(store.file_of("prior"))})})
        status = write_starts(context, folders[penalty], penalty, not args.no_videos)
        if status:
            print(f"stopped; run the same command again to resume {folders[penalty].path}")
            return status
    search = FinishedSearch(context, store, folders, recording)
    write_results(search, args)
    return search


def _equal_share(num_recorded: int, num_starts: int, iterations: int) -> int:
    """Return how many recorded starts are compared, so that they are as many as the searches for an
    objective evaluate; fewer if not enough would be left for the searches to begin from."""
    return num_recorded - max((num_recorded - num_starts * iterations) // 2, num_starts)


def write_results(search: FinishedSearch, args: argparse.Namespace) -> None:
    """Evaluate the optimised starts, and write tables, images, figure and report."""
    context, store, recording = search.context, search.store, search.recording
    starts, pairs, effects = evaluate(context, search.folders, recording, args.batch_size,
                                      args.seed)
    store.write("starts", value=starts)
    store.write("pairs", value=pairs)
    if effects is not None:
        store.write("effects", value=effects)
    for number, rows in starts[starts["best"]].groupby("order"):
        with store.file("picture", f"{number:03d}") as path:
            write_best_starts(context, path, [
                search.folders[row.penalty].sample(row.sample) for row in rows.itertuples()])
    with store.file("figure") as path:
        plot(path, starts)
    store.write("report", value=report(
        context, starts, pairs, effects, recording is not None))
