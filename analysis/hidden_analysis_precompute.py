"""Analyse the hidden states of the agent in recorded episodes: outliers, principal and independent
components, clusters, t-SNE and non-negative factors; simulated states are projected beside them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from analysis.hidden_files import HiddenStatesFolder
from analysis.hidden_states import chosen_samples, recorded_states, simulated_states
from analysis.hidden_steps import analyse
from analysis.result_files import ResultWriter
from common.cli import Parser, count, seed
from common.errors import UserError, script_main
from common.files import sha256, versions
from common.rollout_files import RolloutFolder
from generative.cli import add_hidden_analysis_flags, parse
from generative.config import CLUSTERINGS, SAMPLE_STARTS
from generative.sample_files import SampleFolder


def parser() -> Parser:
    flags = Parser(__doc__)
    yaml = "; the parameter set's if not given"
    add_hidden_analysis_flags(flags)
    flags.add_argument("--generated_data_dir", help="folder with the folders of simulated samples, "
                       "from record_gen_samples.py" + yaml)
    flags.add_argument("--informed_or_random_init", choices=SAMPLE_STARTS,
                       help="which of these folders" + yaml)
    flags.add_argument("--n_clusters", type=count, help="number of clusters" + yaml)
    flags.add_argument("--clustering", choices=CLUSTERINGS,
                       help="method; hdbscan finds its own number of clusters" + yaml)
    flags.add_argument("--seed", type=seed, default=0,
                       help="of every random choice but those of t-SNE")
    flags.add_argument("--overwrite", action="store_true",
                       help="replace the results for this number of episodes")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, _, config = parse(parser(), argv)
    agent_h = config.analysis.agent_h
    folder = HiddenStatesFolder(
        args.precomp_dir or Path(config.analysis.save_dir) / "hx_analysis_precomp",
        agent_h.num_episodes,
        None if args.no_generated_samples else agent_h.num_generated_samples)
    if folder.settings_file.exists() and not args.overwrite:
        raise UserError(f"{folder.path} holds the results for {agent_h.num_episodes} episodes "
                        "already; choose another --precomp_dir, or give --overwrite")

    recording = RolloutFolder(Path(config.data_dir))
    simulated, samples, sample_numbers = None, None, []
    if not args.no_generated_samples:
        samples = SampleFolder(Path(config.generated_data_dir) / agent_h.informed_or_random_init)
        sample_numbers = chosen_samples(samples, agent_h.num_generated_samples)
        simulated = simulated_states(samples, sample_numbers)
    recorded = recorded_states(recording, agent_h.num_episodes)
    units = recorded.states.shape[1]
    if simulated is not None and simulated.shape[1] != units:
        raise UserError(f"the simulated states have {simulated.shape[1]} units, but those of "
                        f"{config.data_dir} have {units}; take samples of the same agent")
    print(f"{len(recorded.states)} states of {agent_h.num_episodes} episodes, "
          f"{0 if simulated is None else len(simulated)} simulated ones", flush=True)
    writer = ResultWriter(
        folder,
        {"parameters": dataclasses.asdict(agent_h), "seed": args.seed,
         "tsne_seed": config.analysis.tsne_seed, "data_dir": config.data_dir,
         "data_index_sha256": sha256(recording.index_file), "states": len(recorded.states),
         "generated_samples": str(samples.path) if samples else None,
         "generated_numbers": sample_numbers, "versions": versions()},
        lambda step, seconds: print(f"{step}: {seconds:.2f} s", flush=True))
    analyse(recorded.states, simulated, agent_h, args.seed, config.analysis.tsne_seed, writer)
    for path in writer.finish():
        print(f"wrote {path}")


if __name__ == "__main__":
    raise SystemExit(main())
