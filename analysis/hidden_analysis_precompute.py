"""Analysis of the agent's hidden states in recorded episodes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from agents.provenance import check_agent
from agents.rollout_files import RolloutFolder
from analysis.hidden_states import analyse
from analysis.parameters import (
    AgentHiddenConfig,
    HiddenAnalysisOptions,
    PrecomputeOptions,
    TsneConfig,
)
from analysis.state_maps import StateMap
from analysis.steps import choose_samples, read_recorded_states, read_simulated_states
from common.errors import UserError
from common.options import command, option
from common.step_results import StepResults
from generative.config import SAMPLE_STARTS
from generative.flags import GeneratedDataOptions
from generative.sample_files import SampleFolder
from interventions.hidden_states_folder import hidden_state_results


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenStatesOptions(GeneratedDataOptions, PrecomputeOptions, HiddenAnalysisOptions):
    """Analyse the agent's hidden states in recorded episodes: outliers, principal and independent
    components, clusters, t-SNE and non-negative factors. Simulated states are projected onto the
    same principal components."""

    informed_or_random_init: str | None = option(
        None, "folder of simulated samples to use: informed or random start vectors",
        choices=SAMPLE_STARTS, key=".informed_or_random_init")


def analyse_hidden_states(options: HiddenStatesOptions) -> StepResults:
    """Compute and store the analysis, and return its results."""
    agent_h = options.parameters.get(AgentHiddenConfig)
    tsne_seed = options.parameters.get(TsneConfig).tsne_seed
    data_dir, seed = options.parameters.common.data_dir, options.seed
    results = hidden_state_results(
        options.directions_folder, agent_h.num_episodes,
        agent_h.num_generated_samples if options.generated_samples else None)
    results.check_new(options.overwrite)

    recording = RolloutFolder(Path(data_dir))
    simulated, samples, sample_numbers = None, None, []
    if options.generated_samples:
        samples = SampleFolder(options.generated_data / agent_h.informed_or_random_init)
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
                        f"{data_dir} have {units}; take samples of the same agent")
    print(f"{len(states)} states of {agent_h.num_episodes} episodes, "
          f"{0 if simulated is None else len(simulated)} simulated ones", flush=True)
    results.start({
        "parameters": dataclasses.asdict(agent_h), "seed": seed, "tsne_seed": tsne_seed,
        "data_dir": data_dir, "recording_sha256": recording.sha256(options.check_contents),
        "agent_sha256": agent, "states": len(states),
        "generated_samples": str(samples.path) if samples else None,
        "generated_numbers": sample_numbers})
    analyse(states, simulated, agent_h, StateMap(agent_h, seed, tsne_seed, results))
    results.finish()
    return results


main = command(HiddenStatesOptions, analyse_hidden_states)

if __name__ == "__main__":
    raise SystemExit(main())
