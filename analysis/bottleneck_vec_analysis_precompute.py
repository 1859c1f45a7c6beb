"""Analyse the bottleneck vectors from which simulations start: principal components, clusters and
t-SNE of the encoder's (informed) vectors compared with random ones, and uniformity tests of both.
"""

from __future__ import annotations

from analysis.bottleneck_vectors import BOTTLENECK_FILES, analyse
from analysis.parameters import BottleneckConfig, add_precompute_flags, add_sample_analysis_flags
from analysis.state_maps import SampleAnalysis
from analysis.steps import choose_samples, read_simulated_steps
from common.cli import Parser
from common.errors import UserError, script_main
from generative.flags import add_random_samples_flag, random_samples_of


def parser() -> Parser:
    flags = Parser(__doc__)
    add_sample_analysis_flags(flags, "bottleneck", "bottleneck_vec_analysis_precomp")
    add_random_samples_flag(flags)
    add_precompute_flags(flags, "bottleneck", "samples")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    analysis = SampleAnalysis(parser(), argv, BottleneckConfig, BOTTLENECK_FILES, "bottleneck")
    analysis.results.check_new(analysis.args.overwrite)
    samples, random_samples = analysis.samples, random_samples_of(analysis.args,
                                                                  analysis.parameters)
    numbers = analysis.numbers
    random_numbers = choose_samples(random_samples, len(numbers))
    informed = samples.stacked_field("bottleneck_vec", numbers)
    random = random_samples.stacked_field("bottleneck_vec", random_numbers)
    if informed.shape != random.shape:
        raise UserError(f"the vectors of {samples.path} have {informed.shape[1]} dimensions, but "
                        f"those of {random_samples.path} have {random.shape[1]}; take samples of "
                        "the same simulator")
    steps = analysis.read_steps(), read_simulated_steps(random_samples, random_numbers)
    print(f"{len(informed)} informed and {len(random)} random vectors", flush=True)
    state_map = analysis.start(
        random_samples=str(random_samples.path),
        random_samples_made_by=random_samples.description(), random_sample_numbers=random_numbers)
    analyse(informed, random, steps, state_map)
    analysis.results.finish()


if __name__ == "__main__":
    raise SystemExit(main())
