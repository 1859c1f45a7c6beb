"""Analyse the states of the simulated environment: principal components, clusters and t-SNE."""

from __future__ import annotations

from analysis.env_states import ENV_STATE_FILES, analyse
from analysis.parameters import EnvHiddenConfig, add_precompute_flags, add_sample_analysis_flags
from analysis.state_maps import SampleAnalysis
from analysis.steps import read_simulated_states
from common.cli import Parser
from common.errors import script_main


def parser() -> Parser:
    flags = Parser(__doc__)
    add_sample_analysis_flags(flags, "env_h", "env_analysis_precomp")
    add_precompute_flags(flags, "env_h", "samples")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    analysis = SampleAnalysis(parser(), argv, EnvHiddenConfig, ENV_STATE_FILES, "env_states")
    analysis.results.check_new(analysis.args.overwrite)
    states = read_simulated_states(analysis.samples, "env_h", analysis.numbers)
    print(f"{len(states)} states of {len(analysis.numbers)} samples", flush=True)
    analyse(states, analysis.start())
    analysis.results.finish()


if __name__ == "__main__":
    raise SystemExit(main())
