"""Analyse the vectors from which simulations start: principal components, clusters and t-SNE of
those that the encoder gives, random ones beside them, and how far both are from uniform."""

from __future__ import annotations

from pathlib import Path

from analysis.bottleneck_vectors.files import BottleneckFolder
from analysis.bottleneck_vectors.steps import analyse
from analysis.results.output import check_results, description_of, finish, reporting_writer
from analysis.results.simulated_steps import chosen_samples, finite_field, simulated_steps
from common.cli import Parser
from common.errors import UserError, script_main
from generative.cli import (
    add_precompute_flags,
    add_random_samples_flag,
    add_sample_analysis_flags,
    parse,
    random_samples_of,
    samples_of,
)


def parser() -> Parser:
    flags = Parser(__doc__)
    add_sample_analysis_flags(flags, "bottleneck_vec_analysis_precomp")
    add_random_samples_flag(flags)
    add_precompute_flags(flags, "samples")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, _, config = parse(parser(), argv, "bottleneck")
    bottleneck = config.analysis.bottleneck
    folder = BottleneckFolder(
        args.precomp_dir or Path(config.analysis.save_dir) / "bottleneck_vec_analysis_precomp",
        bottleneck.num_samples)
    check_results(folder, "samples", args.overwrite)
    starts = samples_of(args, config), random_samples_of(args, config)
    numbers = [chosen_samples(samples, bottleneck.num_samples) for samples in starts]
    informed, random = (finite_field(samples, "bottleneck_vec", of_start)
                        for samples, of_start in zip(starts, numbers))
    if informed.shape != random.shape:
        raise UserError(f"the vectors of {starts[0].path} have {informed.shape[1]} dimensions, but "
                        f"those of {starts[1].path} have {random.shape[1]}; take samples of the "
                        "same simulator")
    steps = tuple(simulated_steps(samples, of_start) for samples, of_start in zip(starts, numbers))
    print(f"{len(informed)} informed and {len(random)} random vectors", flush=True)
    description = description_of(bottleneck, args.seed, config.analysis.tsne_seed, starts[0],
                                 numbers[0])
    writer = reporting_writer(folder, {
        **description, "random_samples": str(starts[1].path),
        "random_samples_made_by": starts[1].description(), "random_sample_numbers": numbers[1]})
    analyse(informed, random, steps, bottleneck, args.seed, config.analysis.tsne_seed, writer)
    finish(writer)


if __name__ == "__main__":
    raise SystemExit(main())
