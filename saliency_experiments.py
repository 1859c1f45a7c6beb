"""Compute saliency in simulated samples, see ``SaliencyOptions``."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from pathlib import Path

from agents.outputs import VALUE
from agents.provenance import agent_digests
from agents.reference_set import game_name
from common.cli import OneText, count
from common.errors import Stopped, UserError
from common.files import versions
from common.options import ShardOptions, command, option, redefine
from common.shards import WHOLE
from envs.objects import action_labels
from generative.config import SaliencyConfig
from generative.flags import SamplesOptions, SimulatorOptions
from generative.saliency.counterfactual import CounterfactualMaps, report_effects
from generative.saliency.files import SaliencyFolder, SharedSaliency
from generative.saliency.gradients import (
    DIRECTION,
    FUNCTIONS,
    SaliencyFunction,
    checked_directions,
    saliency_functions,
)
from generative.saliency.run import (
    DIFFERENCE,
    SaliencyPlan,
    SampleSaliency,
    combine_samples,
    measure_specificity,
    write_demonstration,
    write_saliency,
)
from generative.sample_files import SampleFolder
from interventions.flags import DirectionIdsOptions, DirectionOptions

logger = logging.getLogger(__name__)

@dataclasses.dataclass(frozen=True, kw_only=True)
class SaliencyOptions(SimulatorOptions, SamplesOptions, DirectionIdsOptions, DirectionOptions,
                      ShardOptions):
    """Compute saliency in samples recorded by record_gen_samples.py: gradients, through the
    simulator, of the agent's value, of log-probabilities of actions and of projections of the
    hidden state, with respect to the frames and states of all steps.
    """

    batch_size: int = option(8, "samples per batch", type=count)
    # Gradients are differences of small numbers.
    precision: str = redefine(SimulatorOptions, "precision", default="float32")
    saliency_func_type: tuple[str, ...] | None = option(
        None, f"functions to differentiate: one or several of {', '.join(FUNCTIONS)} (all "
              f"directions of --direction_ids); {DIRECTION}_3 or {DIRECTION}_3_pca for direction "
              "3; or actions of the game, such as left or fire",
        key="analysis.saliency.func_type", metavar="FUNCTION")
    sample_ids: str | None = option(
        None, "sample numbers, or a range; '0 to 100' excludes 100",
        key="analysis.saliency.sample_ids", nargs="+", action=OneText, metavar="ID")
    common_timesteps: tuple[int, ...] | None = option(
        None, "simulated steps at which the functions are evaluated, from 0",
        key="analysis.saliency.common_timesteps", metavar="STEP")
    combine_samples_not_iterate: bool | None = option(
        None, "simulate a single sample from the mean of the samples' bottleneck vectors, or of "
              "their noise if they are random starts in worlds, in its own folder",
        key="analysis.saliency.combine_samples_not_iterate")
    without_env_grads: bool = option(
        False, "stop gradients at the action that enters the environment; the file names indicate "
               "this")
    difference_demo_sample_ids: str | None = option(
        None, "numbers of samples in which the saliency of the value with and without gradients "
              f"through the environment is compared, if {VALUE} is among the functions; '0 to 0' "
              "for none",
        key="analysis.saliency.difference_demo_sample_ids", nargs="+", action=OneText,
        metavar="ID")
    difference_demo_dir: Path | None = option(
        None, "folder of this comparison; demo_with_without_env_grads next to the samples if not "
              "given")
    counterfactual: bool = option(
        False, "compute counterfactual maps instead of gradients: fill each block of cells with "
               "what the prior puts there, given everything else; for simulators with worlds, and "
               "indicated by the file names")
    num_fillings: int = option(4, "fillings of each block of a counterfactual map", type=count)
    block_size: int = option(2, "side of these blocks in cells of 8 x 8 pixels", type=int,
                             choices=(1, 2, 4))
    no_videos: bool = option(False, "do not write videos")
    overwrite: bool = option(False, "recompute requested results that already exist")

    @functools.cached_property
    def settings(self) -> SaliencyConfig:
        """Parameters of saliency."""
        return self.parameters.get(SaliencyConfig)

    @functools.cached_property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the samples."""
        return tuple(self.settings.ids("sample_ids"))

    @functools.cached_property
    def plan(self) -> SaliencyPlan:
        """Functions, samples and other settings of the computation.

        Raises:
            UserError: if there is no function or no sample.
        """
        settings = self.settings
        functions = saliency_functions(settings.func_type, settings.ids("direction_ids"),
                                       settings.direction_type,
                                       action_labels(game_name(
                                           self.agent_file, self.parameters.common.data_dir)))
        if not functions or not self.numbers:
            needed = ("functions: see --direction_ids" if self.numbers
                      else "samples: see --sample_ids")
            raise UserError(f"there is nothing to do without {needed}")
        return SaliencyPlan(functions, settings.common_timesteps, settings.batch_size,
                            settings.perturbation_scale, settings.gaussian_kernel_size,
                            settings.sigma, self.without_env_grads, self.seed,
                            *(self.num_fillings, self.block_size) * self.counterfactual)

    @property
    def demonstrated(self) -> list[int]:
        """Numbers of the samples for the comparison with and without environment gradients."""
        if SaliencyFunction(VALUE) not in self.plan.functions or self.plan.suffix:
            return []
        return [number for number in self.settings.ids("difference_demo_sample_ids")
                if number in self.numbers]

    @property
    def demonstration(self) -> Path:
        """Folder of this comparison; by default, one per agent."""
        return (self.difference_demo_dir or
                self.samples.path.parent / self.parameters.folders.saliency_demonstration.name)


def saliency(options: SaliencyOptions) -> SaliencyFolder:
    """Compute saliency, and return the folder that holds it.

    Raises:
        Stopped: after a stop signal; the same call without ``overwrite`` resumes.
    """
    plan, samples, numbers = options.plan, options.samples, options.numbers
    samples.require(numbers)
    combined = options.settings.combine_samples_not_iterate
    if options.counterfactual and options.without_env_grads:
        raise UserError("counterfactual maps have no gradients, so --counterfactual and "
                        "--without_env_grads exclude each other; leave one of them out")
    if combined and (options.shard != WHOLE or options.join):
        raise UserError("--combine_samples_not_iterate simulates a single sample, which --shard "
                        "cannot split; leave one of them out")
    shared = shared_saliency(plan, samples.path, numbers, options.demonstration,
                             options.demonstrated, options.batch_size)
    if options.join:
        shared.join()
        report(options, SaliencyFolder(samples.path), numbers)
        return SaliencyFolder(samples.path)
    check_origin(samples, options)
    compute, simulator, projector, matrices = (options.compute, options.open_simulator(), None,
                                               None)
    if any(function.direction is not None for function in plan.functions):
        projector, matrices = options.load_projector(simulator.agent.policy, options.agent_file)
        projector = projector.on(compute.device)
        checked_directions(plan.functions, projector)
    description = {**options.origin, "precision": compute.precision, "versions": versions()}
    demonstrated: Sequence[int] = options.demonstrated
    if combined:
        samples = combine_samples(simulator, compute, samples, numbers, description,
                                  options.overwrite)
        numbers, demonstrated = (0,), ()
    computation = (CounterfactualMaps if options.counterfactual else SampleSaliency)(
        simulator, compute, plan, samples, description, matrices,
        projector.coordinates if projector else None)
    if options.shard != WHOLE:
        shared.begin(options.shard, options.overwrite)
    folder = SaliencyFolder(samples.path)
    write(options, computation, folder, numbers, demonstrated)
    if options.shard != WHOLE and shared.notes.exist():
        shared.notes.finish(options.shard)
    if computation.diverging:
        print(f"in {len(computation.diverging)} samples, such as sample "
              f"{min(computation.diverging)}, the agent's own actions do not lead to the recorded "
              "frames, which are shown below the saliency; were the samples recorded with other "
              "actions or in another precision?")
    return folder


def write(options: SaliencyOptions, computation: SampleSaliency, folder: SaliencyFolder,
          numbers: Sequence[int], demonstrated: Sequence[int]) -> None:
    """Compute and write the saliency and the comparison in the samples of the shard.

    Raises:
        Stopped: after a stop signal.
    """
    demonstration = SaliencyFolder(options.demonstration)
    for write_missing, to, chosen in ((write_saliency, folder, numbers),
                                      (write_demonstration, demonstration, demonstrated)):
        chosen = options.shard.of(chosen, options.batch_size)
        status = write_missing(computation, to, chosen, options.batch_size, not options.no_videos,
                               options.overwrite)
        if status:
            raise Stopped(status, "stopped; run the same command without --overwrite to resume")
        if to is folder:
            report(options, folder, chosen)
        elif chosen:
            print(f"{VALUE} in {len(chosen)} samples with and without gradients through the "
                  f"environment is in {to.path}")


def report(options: SaliencyOptions, folder: SaliencyFolder, numbers: Sequence[int]) -> None:
    """Print which saliency a folder holds, and how specific it is."""
    num_functions = len(options.plan.functions)
    print(f"saliency of {num_functions} function{'s' * (num_functions > 1)} in {len(numbers)} "
          f"samples is in {folder.path}")
    measure_specificity(folder, numbers, options.plan.suffix)
    if options.counterfactual and len(numbers):
        report_effects(folder, numbers, options.plan.functions)


def shared_saliency(plan: SaliencyPlan, folder: Path, numbers: Sequence[int],
                    demonstration: Path, demonstrated: Sequence[int],
                    batch_size: int) -> SharedSaliency:
    """Return the saliency files that all shards write together.

    Args:
        plan: settings of the saliency.
        folder: folder of the samples.
        numbers: numbers of the samples.
        demonstration: folder of the comparison of saliency with and without gradients through the
            environment.
        demonstrated: numbers of the compared samples.
        batch_size: number of samples per forward pass.
    """
    files = [SaliencyFolder(folder).file_of("description", number, plan.file_name(function))
             for number in numbers for function in plan.functions]
    files += [SaliencyFolder(demonstration).file_of("description", number, DIFFERENCE)
              for number in demonstrated]
    return SharedSaliency(folder, {
        **plan.settings, "functions": [function.name for function in plan.functions],
        "sample_ids": list(numbers), "difference_demo_sample_ids": list(demonstrated),
        "batch_size": batch_size}, files)


def check_origin(samples: SampleFolder, options: SaliencyOptions) -> None:
    """Raise UserError if samples belong to another simulator or agent; warn if neither is recorded.
    """
    description = samples.description()
    for key, flag, accepted in (
            ("model_sha256", "--model_file", {options.origin["model_sha256"]}),
            ("agent_sha256", "--agent_file", agent_digests(options.agent_file))):
        if description and description.get(key) not in accepted:
            name = description.get(key.replace("sha256", "file"))
            raise UserError(f"the samples in {samples.path} were recorded with another "
                            f"{flag} ({name}, which does not have the same contents)")
    if not description:
        logger.warning("%s does not name the simulator and the agent of its samples", samples.path)


main = command(SaliencyOptions, saliency)

if __name__ == "__main__":
    raise SystemExit(main())
