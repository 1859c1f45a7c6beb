"""Compute saliency in samples recorded by record_gen_samples.py: gradients, through the simulator,
of the agent's value, of log-probabilities of actions and of projections of the hidden state, with
respect to the frames and states of all steps."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

from agents.outputs import VALUE
from agents.provenance import agent_digests, agent_sha256
from common.cli import OneText, Parser
from common.devices import resolve_compute
from common.errors import UserError, script_main
from common.files import sha256, versions
from common.shards import WHOLE, add_shard_flags
from generative.config import SaliencyConfig, SimulatorConfig
from generative.flags import (
    add_samples_flags,
    add_simulator_flags,
    open_directions,
    samples_of,
)
from generative.runs import open_simulator
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
from interventions.flags import (
    add_direction_flags,
    add_direction_ids_flag,
    add_direction_type_flag,
)

logger = logging.getLogger(__name__)

SAMPLES_AT_A_TIME = 8


def parser() -> Parser:
    flags = Parser(__doc__)
    add_simulator_flags(flags, "simulator file", model_file_required=True,
                        at_a_time=SAMPLES_AT_A_TIME)
    flags.set_defaults(precision="float32")  # gradients are differences of small numbers
    add_samples_flags(flags)
    flags.add_argument("--saliency_func_type", nargs="+", metavar="FUNCTION",
                       key="analysis.saliency.func_type",
                       help=f"functions to differentiate: one or several of {', '.join(FUNCTIONS)} "
                            f"(all directions of --direction_ids); {DIRECTION}_3 or "
                            f"{DIRECTION}_3_pca for direction 3")
    flags.add_argument("--sample_ids", nargs="+", action=OneText, metavar="ID",
                       key="analysis.saliency.sample_ids",
                       help="sample numbers, or a range; '0 to 100' excludes 100")
    add_direction_ids_flag(flags, "--direction_ids",
                           f"numbers of the directions that {DIRECTION} stands for, or a range "
                           "such as 0 to 16, which excludes 16")
    add_direction_type_flag(flags)
    flags.add_argument("--common_timesteps", type=int, nargs="+", metavar="STEP",
                       key="analysis.saliency.common_timesteps",
                       help="simulated steps at which the functions are evaluated, from 0")
    flags.add_argument("--combine_samples_not_iterate", action="store_true",
                       key="analysis.saliency.combine_samples_not_iterate",
                       help="simulate a single sample from the mean of the samples' bottleneck "
                            "vectors, or of their noise if they are random starts in worlds, in "
                            "its own folder")
    flags.add_argument("--without_env_grads", action="store_true",
                       help="stop gradients at the action that enters the environment; the file "
                            "names indicate this")
    flags.add_argument("--difference_demo_sample_ids", nargs="+", action=OneText, metavar="ID",
                       key="analysis.saliency.difference_demo_sample_ids",
                       help="numbers of samples in which the saliency of the value with and "
                            f"without gradients through the environment is compared, if {VALUE} "
                            "is among the functions; '0 to 0' for none")
    flags.add_argument("--difference_demo_dir", type=Path,
                       help="folder of this comparison; demo_with_without_env_grads next to the "
                            "samples if not given")
    add_direction_flags(flags)
    add_shard_flags(flags, "the samples")
    flags.add_argument("--no_videos", action="store_true", help="do not write videos")
    flags.add_argument("--overwrite", action="store_true",
                       help="recompute requested results that already exist")
    return flags


@script_main
def main(argv: list[str] | None = None) -> int:
    args, _, parameters = parser().read(argv)
    settings, common = parameters.get(SaliencyConfig), parameters.common
    samples = samples_of(args, parameters)
    numbers = settings.ids("sample_ids")
    functions = saliency_functions(settings.func_type, settings.ids("direction_ids"),
                                   settings.direction_type)
    if not functions or not numbers:
        needed = "functions: see --direction_ids" if numbers else "samples: see --sample_ids"
        raise UserError(f"there is nothing to do without {needed}")
    samples.require(numbers)
    if settings.combine_samples_not_iterate and (args.shard != WHOLE or args.join):
        raise UserError("--combine_samples_not_iterate simulates a single sample, which --shard "
                        "cannot split; leave one of them out")
    plan = SaliencyPlan(functions, settings.common_timesteps, settings.batch_size,
                        settings.perturbation_scale, settings.gaussian_kernel_size,
                        settings.sigma, args.without_env_grads, args.seed)
    demonstrated = []
    if SaliencyFunction(VALUE) in functions and not args.without_env_grads:
        demonstrated = [number for number in settings.ids("difference_demo_sample_ids")
                        if number in numbers]
    demonstration = (args.difference_demo_dir or  # by default, one folder per agent
                     samples.path.parent / parameters.folders.saliency_demonstration.name)
    shared = shared_saliency(plan, samples.path, numbers, demonstration, demonstrated,
                             args.batch_size)
    measured = f"saliency of {len(functions)} function{'s' * (len(functions) > 1)}"
    if args.join:
        shared.join()
        print(f"{measured} in {len(numbers)} samples is in {samples.path}")
        measure_specificity(SaliencyFolder(samples.path), numbers, args.without_env_grads)
        return 0
    origin = {"agent_file": args.agent_file.name, "agent_sha256": agent_sha256(args.agent_file),
              "model_file": args.model_file.name, "model_sha256": sha256(args.model_file)}
    check_origin(samples, origin, args.agent_file)

    compute = resolve_compute(common.device, common.gpu_device, args.precision)
    simulator = open_simulator(args.model_file, args.agent_file, parameters.get(SimulatorConfig),
                               compute)
    projector, matrices = None, None
    if any(function.direction is not None for function in functions):
        projector, matrices = open_directions(args, parameters, simulator, compute)
        checked_directions(functions, projector)
    description = {**origin, "precision": compute.precision, "versions": versions()}
    if settings.combine_samples_not_iterate:
        samples = combine_samples(simulator, compute, samples, numbers, description,
                                  args.overwrite)
        numbers, demonstrated = (0,), []

    saliency = SampleSaliency(simulator, compute, plan, samples, description, matrices,
                          projector.coordinates if projector else None)
    if args.shard != WHOLE:
        shared.begin(args.shard, args.overwrite)
    options = (args.batch_size, not args.no_videos, args.overwrite)
    for write, folder, chosen in (
            (write_saliency, samples.path, numbers),
            (write_demonstration, demonstration, demonstrated)):
        chosen = args.shard.of(chosen, args.batch_size)
        status = write(saliency, SaliencyFolder(folder), chosen, *options)
        if status:
            print("stopped; run the same command without --overwrite to resume")
            return status
        if write is write_saliency:
            print(f"{measured} in {len(chosen)} samples is in {folder}")
            measure_specificity(SaliencyFolder(folder), chosen, args.without_env_grads)
        elif chosen:
            print(f"{VALUE} in {len(chosen)} samples with and without gradients through the "
                  f"environment is in {folder}")
    if args.shard != WHOLE and shared.notes.exist():
        shared.notes.finish(args.shard)
    if saliency.diverging:
        print(f"in {len(saliency.diverging)} samples, such as sample {min(saliency.diverging)}, "
              "the agent's own actions do not lead to the recorded frames, which are shown below "
              "the saliency; were the samples recorded with other actions or in another precision?")
    return 0


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
        **dataclasses.asdict(plan), "functions": [function.name for function in plan.functions],
        "sample_ids": list(numbers), "difference_demo_sample_ids": list(demonstrated),
        "batch_size": batch_size}, files)


def check_origin(samples: SampleFolder, origin: dict, agent_file: Path) -> None:
    """Raise UserError if samples belong to another simulator or agent; warn if neither is recorded.

    Args:
        origin: expected origin of the samples, with the entry "model_sha256".
    """
    description = samples.description()
    for key, flag in (("model_sha256", "--model_file"), ("agent_sha256", "--agent_file")):
        accepted = (agent_digests(agent_file) if key == "agent_sha256" else {origin[key]})
        if description and description.get(key) not in accepted:
            name = description.get(key.replace("sha256", "file"))
            raise UserError(f"the samples in {samples.path} were recorded with another "
                            f"{flag} ({name}, which does not have the same contents)")
    if not description:
        logger.warning("%s does not name the simulator and the agent of its samples", samples.path)


if __name__ == "__main__":
    raise SystemExit(main())
