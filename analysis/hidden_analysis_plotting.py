"""Figures of the agent's hidden states."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from agents.rollout_files import RolloutFolder
from analysis.hidden_states import draw_figures
from analysis.parameters import AgentHiddenConfig, HiddenAnalysisOptions, PlottingOptions
from analysis.state_maps import figure_schema, replace_figures
from analysis.steps import read_recorded_steps
from common.cli import count
from common.options import command, option
from common.results import ResultStore
from envs.objects import action_labels
from interventions.hidden_states_folder import hidden_state_results

FIGURES = figure_schema("analysis/hidden_analysis_plotting.py")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenStatePlotsOptions(PlottingOptions, HiddenAnalysisOptions):
    """Draw the results of hidden_analysis_precompute.py: the agent's hidden states."""

    num_epi_paths: int | None = option(None, "number of episodes whose trajectories are drawn",
                                       type=count, key=".num_epi_paths")


def plot_hidden_states(options: HiddenStatePlotsOptions) -> Path:
    """Draw all figures, and return their folder."""
    parameters = options.parameters
    agent_h, data_dir = parameters.get(AgentHiddenConfig), parameters.common.data_dir
    store = ResultStore(options.output_dir or parameters.folders.hidden_state_plots, FIGURES)
    store.check_replaceable()
    num_samples = agent_h.num_generated_samples if options.generated_samples else None
    results = hidden_state_results(options.directions_folder, options.direction_episodes,
                                   num_samples)
    recording = RolloutFolder(Path(data_dir))
    steps = read_recorded_steps(recording, results.number)
    figures = draw_figures(results, steps, action_labels(recording.game), agent_h.num_epi_paths,
                           options.seed)
    replace_figures(store, figures, results, {
        "num_generated_samples": num_samples, "num_epi_paths": agent_h.num_epi_paths,
        "data_dir": data_dir, "seed": options.seed})
    return store.path


main = command(HiddenStatePlotsOptions, plot_hidden_states)

if __name__ == "__main__":
    raise SystemExit(main())
