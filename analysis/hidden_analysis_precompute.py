"""Analyse the agent's hidden states in recorded episodes: outliers, principal and independent
components, clusters, t-SNE and non-negative factors. Simulated states are projected onto the
same principal components."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from agents.provenance import check_agent
from agents.rollout_files import RolloutFolder
from analysis.hidden_states import analyse
from analysis.parameters import (
    AgentHiddenConfig,
    TsneConfig,
    add_hidden_analysis_flags,
    add_precompute_flags,
)
from analysis.state_maps import StateMap
from analysis.steps import choose_samples, read_recorded_states, read_simulated_states
from common.cli import Parser
from common.errors import UserError, script_main
from generative.config import SAMPLE_STARTS
from generative.flags import add_generated_data_flag
from generative.sample_files import SampleFolder
from interventions.flags import directions_folder
from interventions.hidden_states_folder import hidden_state_results


def parser() -> Parser:
    flags = Parser(__doc__)
    add_hidden_analysis_flags(flags)
    add_generated_data_flag(flags)
    flags.add_argument("--informed_or_random_init", choices=SAMPLE_STARTS,
                       key="analysis.agent_h.informed_or_random_init",
                       help="folder of simulated samples to use: informed or random start vectors")
    add_precompute_flags(flags, AgentHiddenConfig.section, "episodes")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, _, parameters = parser().read(argv)
    agent_h, tsne_seed = parameters.get(AgentHiddenConfig), parameters.get(TsneConfig).tsne_seed
    common = parameters.common
    results = hidden_state_results(
        directions_folder(args, parameters), agent_h.num_episodes,
        None if args.no_generated_samples else agent_h.num_generated_samples)
    results.check_new(args.overwrite)

    recording = RolloutFolder(Path(common.data_dir))
    simulated, samples, sample_numbers = None, None, []
    if not args.no_generated_samples:
        samples = SampleFolder(Path(common.generated_data_dir) / agent_h.informed_or_random_init)
        sample_numbers = choose_samples(samples, agent_h.num_generated_samples,
                                        "num_generated_samples")
        simulated = read_simulated_states(samples, "hidden_states", sample_numbers)
    agent = recording.description().get("agent_sha256")
    if samples is not None:
        check_agent(samples.description().get("agent_sha256"), agent,
                    f"the samples in {samples.path} were recorded",
                    "take samples of the recorded agent, or give --no_generated_samples")
    states = read_recorded_states(recording, agent_h.num_episodes)
    units = states.shape[1]
    if simulated is not None and simulated.shape[1] != units:
        raise UserError(f"the simulated states have {simulated.shape[1]} units, but those of "
                        f"{common.data_dir} have {units}; take samples of the same agent")
    print(f"{len(states)} states of {agent_h.num_episodes} episodes, "
          f"{0 if simulated is None else len(simulated)} simulated ones", flush=True)
    results.start({
        "parameters": dataclasses.asdict(agent_h), "seed": args.seed, "tsne_seed": tsne_seed,
        "data_dir": common.data_dir, "recording_sha256": recording.sha256(args.check_contents),
        "agent_sha256": agent, "states": len(states),
        "generated_samples": str(samples.path) if samples else None,
        "generated_numbers": sample_numbers})
    analyse(states, simulated, agent_h, StateMap(agent_h, args.seed, tsne_seed, results))
    results.finish()


if __name__ == "__main__":
    raise SystemExit(main())
