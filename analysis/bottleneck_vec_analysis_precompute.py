"""Analyse the vectors from which simulations start: principal components, clusters and t-SNE of
those that the encoder gives, random ones beside them, and how far both are from uniform."""

from __future__ import annotations

from analysis.bottleneck_vectors.files import BOTTLENECK_FILES
from analysis.bottleneck_vectors.steps import analyse
from analysis.parameters.config import BottleneckConfig, TsneConfig
from analysis.parameters.flags import add_precompute_flags, add_sample_analysis_flags
from analysis.results.output import description_of
from analysis.results.simulated_steps import chosen_samples, simulated_steps
from common.cli import Parser
from common.errors import UserError, script_main
from common.step_results import StepResults
from generative.flags import add_random_samples_flag, random_samples_of, samples_of


def parser() -> Parser:
    flags = Parser(__doc__)
    add_sample_analysis_flags(flags, "bottleneck", "bottleneck_vec_analysis_precomp")
    add_random_samples_flag(flags)
    add_precompute_flags(flags, "bottleneck", "samples")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, _, parameters = parser().read(argv)
    bottleneck, tsne_seed = parameters.get(BottleneckConfig), parameters.get(TsneConfig).tsne_seed
    results = StepResults(args.precomp_dir or parameters.folders.bottleneck, BOTTLENECK_FILES,
                          bottleneck.num_samples)
    results.check_new(args.overwrite)
    starts = samples_of(args, parameters), random_samples_of(args, parameters)
    numbers = [chosen_samples(samples, bottleneck.num_samples) for samples in starts]
    informed, random = (samples.stacked_field("bottleneck_vec", of_start)
                        for samples, of_start in zip(starts, numbers))
    if informed.shape != random.shape:
        raise UserError(f"the vectors of {starts[0].path} have {informed.shape[1]} dimensions, but "
                        f"those of {starts[1].path} have {random.shape[1]}; take samples of the "
                        "same simulator")
    steps = tuple(simulated_steps(samples, of_start) for samples, of_start in zip(starts, numbers))
    print(f"{len(informed)} informed and {len(random)} random vectors", flush=True)
    description = description_of(bottleneck, args.seed, tsne_seed, starts[0],
                                 numbers[0])
    results.start({
        **description, "random_samples": str(starts[1].path),
        "random_samples_made_by": starts[1].description(), "random_sample_numbers": numbers[1]})
    analyse(informed, random, steps, bottleneck, args.seed, tsne_seed, results)
    results.finish()


if __name__ == "__main__":
    raise SystemExit(main())
