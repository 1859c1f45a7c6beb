"""Flags of directions of the hidden state, and of swaps along them."""

from __future__ import annotations

import argparse
from pathlib import Path

from common.cli import OneText, Parser, add_save_dir_flag, count, from_zero, seed
from common.parameters import ParameterSet


def add_direction_flags(parser: Parser, num_episodes_flag: str = "--num_episodes") -> None:
    """The flags that say where directions of the hidden space are.

    Args:
        num_episodes_flag: its name where ``--num_episodes`` means other episodes.
    """
    add_save_dir_flag(parser)
    add_direction_folder_flag(parser)
    add_direction_number_flag(parser, num_episodes_flag)


def add_direction_folder_flag(parser: Parser) -> None:
    """The flag that chooses the folder with the matrices of directions."""
    parser.add_argument("--precomp_dir", "--precomputed_analysis_data_path", type=Path,
                        help="folder of hidden_analysis_precompute.py; "
                             "<save_dir>/hx_analysis_precomp if not given")


def add_direction_number_flag(parser: Parser, name: str = "--num_episodes") -> None:
    """The flag that says which directions of a folder are meant."""
    parser.add_argument(name, type=count, key="analysis.agent_h.num_episodes",
                        help="recorded episodes that the directions were computed from, which is "
                             "in the names of their files")


def add_direction_ids_flag(parser: Parser, name: str, help: str) -> None:
    """The flag that says which directions are meant."""
    parser.add_argument(name, nargs="+", action=OneText, metavar="ID", help=help,
                        key="analysis.saliency.direction_ids")


def add_direction_type_flag(parser: Parser) -> None:
    """The flag that says which kind of directions is meant."""
    parser.add_argument("--saliency_direction_type", choices=("ica", "pca"),
                        key="analysis.saliency.direction_type",
                        help="independent or principal components")


def directions_folder(args: argparse.Namespace, parameters: ParameterSet) -> Path:
    """The folder that ``add_direction_flags`` means."""
    return args.precomp_dir or parameters.folders.hidden_states


def direction(text: str) -> int | None:
    """The number of a direction, or None, as an argparse type."""
    return None if text.lower() == "none" else int(text)


def add_swap_flags(parser: Parser, num_episodes_flag: str = "--num_episodes") -> None:
    """The flags that alter the agent's hidden state; see ``add_direction_flags``."""
    parser.add_argument("--swap_directions_from", type=int, nargs="+", metavar="DIRECTION",
                        key="gen_model.swap_directions_from",
                        help="directions of the hidden space to take out of every change of the "
                             "agent's state")
    parser.add_argument("--swap_directions_to", type=direction, nargs="+", metavar="DIRECTION",
                        key="gen_model.swap_directions_to",
                        help="for each of them the direction that gets the same amount instead, "
                             "or None")
    parser.add_argument("--random_directions", type=seed, metavar="SEED",
                        help="swap in random directions of equal size instead, drawn by this seed")
    add_direction_flags(parser, num_episodes_flag)


def add_alter_from_flag(parser: Parser, default: int) -> None:
    """The flag that says when alterations in the real environment begin."""
    parser.add_argument("--alter_from_step", type=from_zero, default=default,
                        help="first step of an episode at which the hidden state is altered; 0 "
                             "alters the first change too, which comes from the learned first "
                             "state, far from all others, so that a direction that is taken out "
                             "stays there")
