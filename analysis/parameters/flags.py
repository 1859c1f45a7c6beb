"""Flags that several analyses share."""

from __future__ import annotations

from pathlib import Path

from analysis.parameters.config import CLUSTERINGS
from common.cli import (
    OneText,
    Parser,
    add_log_flag,
    add_parameter_set_flag,
    add_save_dir_flag,
    count,
    seed,
)
from generative.flags import add_data_flag, add_samples_flags
from interventions.flags import add_direction_folder_flag, add_direction_number_flag


def add_hidden_analysis_flags(parser: Parser) -> None:
    """The flags that the two scripts of the agent's hidden states share."""
    add_analysis_flags(parser)
    add_direction_folder_flag(parser)
    add_data_flag(parser)
    parser.add_argument("--num_episodes", type=count, key="analysis.agent_h.num_episodes",
                        help="recorded episodes")
    parser.add_argument("--num_generated_samples", type=count,
                        key="analysis.agent_h.num_generated_samples", help="simulated samples")
    parser.add_argument("--no_generated_samples", action="store_true",
                        help="work on the recorded states alone")


def add_sample_analysis_flags(parser: Parser, section: str, precomputed: str) -> None:
    """The flags that the scripts of an analysis of simulated samples share.

    Args:
        section: of the parameter set, below ``analysis``.
        precomputed: name of the folder of its arrays.
    """
    add_analysis_flags(parser)
    parser.add_argument("--precomp_dir", type=Path, help="folder of the precomputed arrays; "
                        f"<save_dir>/{precomputed} if not given")
    add_chosen_samples_flags(parser, section)


def add_chosen_samples_flags(parser: Parser, section: str) -> None:
    """The flags that choose simulated samples, and how many of them an analysis is of."""
    add_samples_flags(parser)
    parser.add_argument("--num_samples", type=count, key=f"analysis.{section}.num_samples",
                        help="simulated samples")


def add_influence_flags(parser: Parser) -> None:
    """The flags of the scripts that analyse influences between components."""
    add_analysis_flags(parser)
    add_direction_folder_flag(parser)
    add_direction_number_flag(parser)
    add_chosen_samples_flags(parser, "combined_agent_env_hx")
    parser.add_argument("--sample_ids", nargs="+", action=OneText, metavar="ID",
                        key="analysis.saliency.sample_ids",
                        help="numbers of the samples that are used, or a range: 0 to 100 ends "
                             "before 100")
    parser.add_argument("--common_timesteps", type=int, nargs="+", metavar="STEP",
                        key="analysis.saliency.common_timesteps",
                        help="the one simulated step at which the functions of the saliency were "
                             "read, from 0")
    parser.add_argument("--behaviours_dir", type=Path,
                        help="folder of the behaviours, found in --num_samples samples; "
                             "<save_dir>/combined_agent_env_hx_analysis_precomp if not given")
    parser.add_argument("--no_behaviours", action="store_true",
                        help="look at all samples together alone")


def add_story_flags(parser: Parser) -> None:
    """The flags of causal_stories.py that say where its inputs are."""
    add_analysis_flags(parser)
    add_direction_folder_flag(parser)
    add_direction_number_flag(parser)
    parser.add_argument("--samples_dir", type=Path, help="folder of the samples; the one that the "
                        "comparison was made of if not given")


def add_precompute_flags(parser: Parser, section: str, what: str) -> None:
    """The flags of the scripts that precompute an analysis.

    Args:
        section: of the parameter set, below ``analysis``.
        what: is counted in the names of the files: "episodes" or "samples".
    """
    parser.add_argument("--n_clusters", type=count, key=f"analysis.{section}.n_clusters",
                        help="number of clusters")
    parser.add_argument("--clustering", choices=CLUSTERINGS, key=f"analysis.{section}.clustering",
                        help="method; hdbscan finds its own number of clusters")
    parser.add_argument("--seed", type=seed, default=0,
                        help="of every random choice but those of t-SNE")
    parser.add_argument("--overwrite", action="store_true",
                        help=f"replace the results for this number of {what}")


def add_plotting_flags(parser: Parser, plots: str) -> None:
    """The flags of the scripts that draw an analysis.

    Args:
        plots: name of the folder of its figures.
    """
    parser.add_argument("--output_dir", type=Path,
                        help=f"folder to write to; <save_dir>/{plots} if not given")
    parser.add_argument("--seed", type=seed, default=0,
                        help="of what is drawn on top and of every choice of what is shown")


def add_analysis_flags(parser: Parser) -> None:
    """The flags of every analysis."""
    add_parameter_set_flag(parser)
    add_save_dir_flag(parser)
    add_log_flag(parser)
