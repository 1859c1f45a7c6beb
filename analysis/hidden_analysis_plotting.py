"""Draw the results of hidden_analysis_precompute.py: the agent's hidden states."""

from __future__ import annotations

from pathlib import Path

from agents.rollout_files import RolloutFolder
from analysis.hidden_states import draw_figures
from analysis.parameters import AgentHiddenConfig, add_hidden_analysis_flags, add_plotting_flags
from analysis.state_maps import figure_schema, replace_figures
from analysis.steps import read_recorded_steps
from common.cli import Parser, count
from common.errors import script_main
from common.results import ResultStore
from interventions.flags import direction_episodes, directions_folder
from interventions.hidden_states_folder import hidden_state_results

FIGURES = figure_schema("analysis/hidden_analysis_plotting.py")


def parser() -> Parser:
    flags = Parser(__doc__)
    add_hidden_analysis_flags(flags)
    flags.add_argument("--num_epi_paths", type=count, key="analysis.agent_h.num_epi_paths",
                       help="number of episodes whose trajectories are drawn")
    add_plotting_flags(flags, "hx_plots")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, _, parameters = parser().read(argv)
    agent_h, data_dir = parameters.get(AgentHiddenConfig), parameters.common.data_dir
    store = ResultStore(args.output_dir or parameters.folders.hidden_state_plots, FIGURES)
    store.check_replaceable()
    num_samples = None if args.no_generated_samples else agent_h.num_generated_samples
    results = hidden_state_results(directions_folder(args, parameters),
                                   direction_episodes(args, parameters), num_samples)
    steps = read_recorded_steps(RolloutFolder(Path(data_dir)), results.number)
    figures = draw_figures(results, steps, agent_h.num_epi_paths, args.seed)
    replace_figures(store, figures, results, {
        "num_generated_samples": num_samples, "num_epi_paths": agent_h.num_epi_paths,
        "data_dir": data_dir, "seed": args.seed})


if __name__ == "__main__":
    raise SystemExit(main())
