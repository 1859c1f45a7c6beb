"""Find behaviours: clusters of the agent's and the environment's states and of their changes on a
t-SNE map. A sample shows the behaviour that contains most of its first steps."""

from __future__ import annotations

from analysis.behaviours import BEHAVIOUR_FILES, add_behaviour_flags, analyse, read_features
from analysis.parameters import BehavioursConfig, add_precompute_flags
from analysis.state_maps import SampleAnalysis
from common.cli import Parser
from common.errors import script_main


def parser() -> Parser:
    flags = Parser(__doc__)
    add_behaviour_flags(flags, "combined_agent_env_hx_analysis_precomp")
    add_precompute_flags(flags, "combined_agent_env_hx", "samples")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    analysis = SampleAnalysis(parser(), argv, BehavioursConfig, BEHAVIOUR_FILES, "behaviours")
    analysis.results.check_new(analysis.args.overwrite)
    features, settings = read_features(analysis)
    analyse(features, len(analysis.numbers), analysis.start(**settings))
    analysis.results.finish()


if __name__ == "__main__":
    raise SystemExit(main())
