"""Run a search for starts: options, inputs, resumable search, evaluation and result files.

``generative.optimise_start`` and ``analysis.feature_dreams`` differ only in their targets.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from agents.replay import recorded_game
from agents.rollout_files import RolloutFolder
from common.cli import count, from_zero
from common.devices import Compute
from common.errors import Stopped, UserError
from common.files import sha256, versions
from common.options import option, redefine
from common.parameters import PARAMETER_SET
from common.results import ResultStore, Schema
from generative.config import SaliencyConfig
from generative.dataset import RolloutDataset
from generative.flags import GeneratedDataOptions, SimulatorOptions
from generative.sample_files import SampleFolder, open_samples
from generative.simulator import Simulator
from generative.start_optimisation.evaluation import evaluate, plot, report
from generative.start_optimisation.objectives import (
    MAXIMISE,
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


def weight(text: str) -> float:
    """argparse type: a finite number of at least 0."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, not {text}")
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchOptions(SimulatorOptions, GeneratedDataOptions):
    """Options of simulator and search, except those of the targets and the output folder."""

    inputs: ClassVar = ("data_dir",)

    # Gradients need full precision.
    precision: str = redefine(SimulatorOptions, "precision", default="float32")
    step: int | None = option(
        None, "simulated step at which a target is read, from 0; the last of the parameter set's "
              "common_timesteps if not given", type=from_zero)
    num_starts: int = option(4, "starts per objective", type=count)
    iterations: int = option(40, "optimiser steps", type=from_zero)
    diversity: float = option(
        1.0, "weight of the penalty on similarity among an objective's start vectors; not used in "
             "noise", type=weight)
    num_recorded: int = option(
        2000, "maximum number of recorded starts, from which the density of starts and the scale "
              "of the targets are estimated", type=count)
    best_of: int | None = option(
        None, "number of recorded starts that optimised starts are compared with; if not given, as "
              "many as the searches for an objective evaluate. Searches begin from the remaining "
              "ones, or from as many random samples of the prior", type=count)
    search_space: str | None = option(
        None, "search in the noise of the prior, or over start vectors; noise if the simulator has "
              "a trained prior and the flag is not given", choices=(NOISE, VECTOR))
    learning_rate: float | None = option(
        None, "learning rate of Adam for the entries of unit vectors, or length of the first steps "
              f"in noise, relative to its norm; {LEARNING_RATES[VECTOR]} or "
              f"{LEARNING_RATES[NOISE]} if not given")
    penalty: tuple[float, ...] = option(
        (1.0, 0.0), "one or several weights of the penalty, which grows with the probability that "
                    "the episode has ended and, for start vectors, with the distance from the "
                    "recorded starts; each weight has its own output folder; 0: no penalty",
        type=weight)
    no_real_game: bool = option(
        False, "do not replay the nearest recorded starts in the real game")
    no_videos: bool = option(False, "do not write videos")
    overwrite: bool = option(False, "delete the previous contents of the output folder")

    @property
    def num_rollout_steps(self) -> int:
        """Number of steps of a rollout."""
        return self.num_sim_steps or self.parameters.get(SaliencyConfig).num_sim_steps

    @property
    def target_step(self) -> int:
        """Simulated step at which a target is read, from 0.

        Raises:
            UserError: if there is no such step.
        """
        step = (self.parameters.get(SaliencyConfig).common_timesteps[-1] if self.step is None
                else self.step)
        if step >= self.num_rollout_steps:
            raise UserError(f"there is no step {step}: the {self.num_rollout_steps} steps of a "
                            "rollout are counted from 0; see --step and --num_sim_steps")
        return step

    def space(self, has_prior: bool) -> str:
        """Return the space to search, given whether the simulator has a trained prior.

        Raises:
            UserError: if the prior is needed.
        """
        space = self.search_space or (NOISE if has_prior else VECTOR)
        if space == NOISE and not has_prior:
            raise UserError("--search_space noise needs a simulator with worlds and a trained "
                            "prior; use --search_space vector")
        return space

    def num_compared(self, num_windows: int) -> int:
        """Return with how many of the recorded starts optimised ones are compared.

        Raises:
            UserError: if too few are left to begin from.
        """
        best_of = self.best_of or _equal_share(num_windows, self.num_starts, self.iterations)
        if not 0 < best_of <= num_windows - self.num_starts:
            raise UserError(f"--best_of {best_of} leaves {num_windows - best_of} of the "
                            f"{num_windows} recorded starts to begin from; lower it or "
                            "--num_starts, or raise --num_recorded or record more")
        return best_of


@dataclasses.dataclass(frozen=True)
class FinishedSearch:
    """A search whose samples are all written.

    Attributes:
        folders: sample folders by penalty.
        recording: rollouts that are replayed in the real game; None to leave this out.
    """

    context: SearchContext
    store: ResultStore
    folders: dict[float, SampleFolder]
    recording: RolloutFolder | None


Choice = Callable[[Simulator, Compute], tuple[Sequence[Target], Mapping]]
"""Function that returns targets, and settings on which they depend, to be saved with the folder."""


def run_search(options: SearchOptions, folder: Path, schema: Schema, choose: Choice,
               aims: Sequence[str] = (MAXIMISE,)) -> FinishedSearch:
    """Search for starts that maximise or minimise targets, or resume the search.

    The rollouts of the optimised starts are written as samples.

    Args:
        schema: schema of the folder, with the entries of ``OPTIMISED_STARTS``.
        choose: function that chooses the targets, see ``Choice``.
        aims: whether targets are maximised, minimised, or both.

    Raises:
        Stopped: after a stop signal; the same call resumes.
        UserError: if options, simulator, agent and recording do not fit together.
    """
    step, num_steps, compute = options.target_step, options.num_rollout_steps, options.compute
    simulator = options.open_simulator()
    has_prior = simulator.squares is not None and simulator.prior.is_trained
    space = options.space(has_prior)
    targets, target_settings = choose(simulator, compute)
    for target in targets:
        if step < target.first_step:
            raise UserError(f"the target {target.name} needs a step before it; --step must be at "
                            f"least {target.first_step}")
    dataset = RolloutDataset(Path(options.parameters.common.data_dir),
                             simulator.config.num_init_steps, num_steps)
    dataset.check_agent(options.agent_file, simulator.agent.policy)
    recording = None if options.no_real_game else dataset.folder
    if recording is not None:
        recorded_game(recording)  # fails before the search, not after it
    windows = drawn_windows(dataset, options.num_recorded, step, options.seed)
    best_of = options.num_compared(len(windows))

    # As many as the searches for an objective evaluate, and as many as they may begin from.
    num_samples = 2 * (len(windows) - best_of) + options.num_starts * options.iterations
    names = [target.name for target in targets]
    settings = {
        **describe(options, simulator, dataset), "targets": names, "step": step,
        **target_settings, "num_recorded": len(windows), "num_steps": num_steps,
        "batch_size": options.batch_size, "seed": options.seed, "precision": compute.precision,
        **({"search_space": space, "num_prior_samples": num_samples} if has_prior else {}),
        "versions": versions()}
    store = ResultStore(folder, schema)
    store.open(settings, options.overwrite)
    arrays = store.compute("recorded", function=lambda: {**vars(recorded_starts(
        simulator, compute, dataset, windows, targets, step, options.batch_size)),
        "targets": np.array(names)})
    del arrays["targets"]
    starts, prior = RecordedStarts(**arrays), None
    if has_prior:
        prior = PriorStarts(**store.compute("prior", function=lambda: vars(prior_starts(
            simulator, compute, num_samples, targets, step, options.batch_size, options.seed))))
    plan = SearchPlan(step, options.iterations, LEARNING_RATES[space]
                      if options.learning_rate is None else options.learning_rate,
                      options.diversity)
    context = SearchContext(
        simulator, compute, dataset, starts, best_of,
        RecordedDensity.fit(starts.vectors, starts.episodes),
        tuple(Objective(target, aim) for aim in dict.fromkeys(aims)
              for target in targets),
        plan, options.num_starts, num_steps, space, prior)
    search = FinishedSearch(context, store, {
        penalty: write_samples(options, context, store, settings, penalty)
        for penalty in dict.fromkeys(options.penalty)}, recording)
    write_results(search, options.batch_size, options.seed)
    return search


def describe(options: SearchOptions, simulator: Simulator, dataset: RolloutDataset) -> dict:
    """Return the settings of a search that describe agent, simulator and recording."""
    return {
        **options.origin, "simulator": simulator.config.describe(),
        "data_dir": options.parameters.common.data_dir,
        "recording_sha256": dataset.folder.sha256(options.check_contents)}


def write_samples(options: SearchOptions, context: SearchContext, store: ResultStore,
                  settings: dict, penalty: float) -> SampleFolder:
    """Search with a weight of the penalty, write the samples, and return their folder.

    Raises:
        Stopped: after a stop signal.
    """
    folder = open_samples(store.path / f"penalty_{penalty:g}", {
        **settings, PARAMETER_SET: options.parameters.name,
        "orders": [objective.name for objective in context.objectives],
        "penalty": penalty, "num_starts": context.num_starts, "best_of": context.best_of,
        **dataclasses.asdict(context.plan), "recorded_sha256": sha256(store.file_of("recorded")),
        **({} if context.prior is None else {"samples_sha256": sha256(store.file_of("prior"))})})
    status = write_starts(context, folder, penalty, not options.no_videos)
    if status:
        raise Stopped(status, f"stopped; run the same command again to resume {folder.path}")
    return folder


def _equal_share(num_recorded: int, num_starts: int, iterations: int) -> int:
    """Return how many recorded starts are compared, so that they are as many as the searches for an
    objective evaluate; fewer if not enough would be left for the searches to begin from."""
    return num_recorded - max((num_recorded - num_starts * iterations) // 2, num_starts)


def write_results(search: FinishedSearch, batch_size: int, seed: int) -> None:
    """Evaluate the optimised starts, and write tables, images, figure and report."""
    context, store, recording = search.context, search.store, search.recording
    starts, pairs, effects = evaluate(context, search.folders, recording, batch_size, seed)
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
