"""Analyse the hidden states of the agent in recorded episodes: outliers, principal and independent
components, clusters, t-SNE and non-negative factors; simulated states are projected beside them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from analysis.hidden_states.recorded import recorded_states
from analysis.hidden_states.steps import analyse
from analysis.results.output import check_results, finish, reporting_writer
from analysis.results.simulated_steps import chosen_samples, simulated_states
from common.cli import Parser
from common.errors import UserError, script_main
from common.files import sha256
from common.hidden_states_folder import HiddenStatesFolder
from common.rollout_files import RolloutFolder
from generative.cli import add_hidden_analysis_flags, add_precompute_flags, parse
from generative.config import SAMPLE_STARTS
from generative.sample_files import SampleFolder


def parser() -> Parser:
    flags = Parser(__doc__)
    yaml = "; the parameter set's if not given"
    add_hidden_analysis_flags(flags)
    flags.add_argument("--generated_data_dir", help="folder with the folders of simulated samples, "
                       "from record_gen_samples.py" + yaml)
    flags.add_argument("--informed_or_random_init", choices=SAMPLE_STARTS,
                       help="which of these folders" + yaml)
    add_precompute_flags(flags, "episodes")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, _, config = parse(parser(), argv, "agent_h")
    agent_h = config.analysis.agent_h
    folder = HiddenStatesFolder(
        args.precomp_dir or Path(config.analysis.save_dir) / "hx_analysis_precomp",
        agent_h.num_episodes,
        None if args.no_generated_samples else agent_h.num_generated_samples)
    check_results(folder, "episodes", args.overwrite)

    recording = RolloutFolder(Path(config.data_dir))
    simulated, samples, sample_numbers = None, None, []
    if not args.no_generated_samples:
        samples = SampleFolder(Path(config.generated_data_dir) / agent_h.informed_or_random_init)
        sample_numbers = chosen_samples(samples, agent_h.num_generated_samples,
                                        "num_generated_samples")
        simulated = simulated_states(samples, "hidden_states", sample_numbers)
    recorded = recorded_states(recording, agent_h.num_episodes)
    units = recorded.states.shape[1]
    if simulated is not None and simulated.shape[1] != units:
        raise UserError(f"the simulated states have {simulated.shape[1]} units, but those of "
                        f"{config.data_dir} have {units}; take samples of the same agent")
    print(f"{len(recorded.states)} states of {agent_h.num_episodes} episodes, "
          f"{0 if simulated is None else len(simulated)} simulated ones", flush=True)
    writer = reporting_writer(
        folder,
        {"parameters": dataclasses.asdict(agent_h), "seed": args.seed,
         "tsne_seed": config.analysis.tsne_seed, "data_dir": config.data_dir,
         "data_index_sha256": sha256(recording.index_file), "states": len(recorded.states),
         "generated_samples": str(samples.path) if samples else None,
         "generated_numbers": sample_numbers})
    analyse(recorded.states, simulated, agent_h, args.seed, config.analysis.tsne_seed, writer)
    finish(writer)


if __name__ == "__main__":
    raise SystemExit(main())
