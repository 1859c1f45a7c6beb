"""Flags of the scripts that train, measure or use a simulator."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path

from common.cli import (
    Parser,
    add_check_contents_flag,
    add_compute_flags,
    add_parameter_set_flag,
    add_published_flags,
    count,
    folder_name,
    seed,
)
from common.devices import Compute
from common.parameters import ParameterSet
from generative.config import LR_DECAYS, SAMPLE_STARTS
from generative.sample_files import SampleFolder
from generative.simulator import Simulator
from interventions.flags import direction_episodes, directions_folder
from interventions.projector import Projector

# Flags that override a parameter: name, parameter in the section gen_model, type and help.
_PARAMETERS = (
    ("num_sim_steps", "num_sim_steps", count, "number of simulated steps"),
    ("num_initializing_steps", "num_init_steps", count,
     "number of recorded frames from which a simulation starts"),
    ("epochs", "epochs", count, "number of passes over the training windows"),
    ("lr", "lr", float, "learning rate"),
    ("image_rarity", "image_rarity", float,
     "0 to 1: how strongly errors at pixels of rare colours are upweighted"),
    ("open_loop_share", "open_loop_share", float,
     "0 to 1: share of the windows whose latents come from the prior"),
    ("log_interval", "log_interval", count, "batches per row of the log"),
    ("save_interval", "save_interval", count, "batches between checkpoints"))
_LOSS_TERMS = {"obs": "the image", "hx": "the agent's state", "reward": "the reward",
               "done": "the terminal", "kl": "the KL"}
# Flags of training. Scripts that do not train accept them, but most have no effect there.
TRAINING_FLAGS = ("gen_mod_exp_name", "log_dir_base", "epochs", "lr", "lr_decay",
                  "image_rarity", "open_loop_share", "log_interval", "save_interval",
                  *(f"loss_scale_{name}" for name in _LOSS_TERMS))


def add_simulator_flags(parser: Parser, model_file_help: str, model_file_required: bool,
                        at_a_time: int | None = None, shown: Collection[str] = ()) -> None:
    """Add the flags of train_gen_model.py, which all later scripts accept.

    Args:
        parser: parser of the script.
        model_file_help: help text of ``--model_file``.
        model_file_required: whether ``--model_file`` must be given.
        at_a_time: default of ``--batch_size``; None for the parameter set's value, as in training.
        shown: flags in TRAINING_FLAGS that have an effect in this script; all others are hidden
            from ``--help``.
    """
    parser.add_argument("--agent_file", type=Path, required=True, help="agent inside the simulator")
    parser.add_argument("--model_file", type=Path, required=model_file_required,
                        help=model_file_help)
    add_parameter_set_flag(parser)
    parser.add_argument("--gen_mod_exp_name", "--tgm_exp_name", type=folder_name, default="dev",
                        help="name of the experiment's folder")
    add_data_flag(parser)
    parser.add_argument("--log_dir_base", key="log_dir_base",
                        help="simulators are written to <log_dir_base>/results/")
    parser.add_argument("--batch_size", type=count, default=at_a_time,
                        key=None if at_a_time else "gen_model.batch_size",
                        help="samples per batch" if at_a_time else "windows per batch")
    for name, parameter, kind, description in _PARAMETERS:
        parser.add_argument(f"--{name}", type=kind, key=f"gen_model.{parameter}", help=description)
    parser.add_argument("--lr_decay", choices=LR_DECAYS, key="gen_model.lr_decay",
                        help="how the learning rate decays to 0 by the end of training")
    parser.add_argument("--seed", type=seed, default=0, help="seed of every random choice")
    for name, term in _LOSS_TERMS.items():
        parser.add_argument(f"--loss_scale_{name}", type=float, default=1.0,
                            help=f"weight of the loss term for {term}")
    add_compute_flags(parser, in_parameter_set=True)
    parser.hide(*(name for name in TRAINING_FLAGS if name not in shown))
    add_published_flags(parser, ("exp_name", "env_name", "start_level", "num_levels",
                                 "distribution_mode", "agent_param_name", "param_name",
                                 "num_threads", "loss_scale_act_log_probs", "loss_scale_gen_adv"))


def add_data_flag(parser: Parser) -> None:
    """Add --data_dir, the folder of recorded rollouts."""
    parser.add_argument("--data_dir", key="data_dir",
                        help="folder of recorded rollouts, <logdir>/data of record.py")
    add_check_contents_flag(parser)


def add_generated_data_flag(parser: Parser) -> None:
    """Add --generated_data_dir, the parent of the sample folders."""
    parser.add_argument("--generated_data_dir", key="generated_data_dir",
                        help="parent of the folders of simulated samples, from "
                             "record_gen_samples.py")


def add_samples_flags(parser: Parser) -> None:
    """Add the flags that select a folder of simulated samples."""
    add_generated_data_flag(parser)
    parser.add_argument("--samples_dir", type=Path, help="folder of samples to read; "
                        f"<generated_data_dir>/{SAMPLE_STARTS[0]} if not given")


def open_directions(args: argparse.Namespace, parameters: ParameterSet, simulator: Simulator,
                    compute: Compute) -> tuple[Projector, dict]:
    """Return the projector onto the selected directions, and the checksums of the direction files.

    The directions are selected by the flags of ``add_direction_flags``.

    Raises:
        UserError: see ``Projector.load_for``.
    """
    projector, matrices = Projector.load_for(
        simulator.agent.policy.hidden_state_size, directions_folder(args, parameters),
        direction_episodes(args, parameters), args.agent_file)
    return projector.on(compute.device), matrices


def samples_of(args: argparse.Namespace, parameters: ParameterSet) -> SampleFolder:
    """Return the sample folder that the flags of ``add_samples_flags`` select."""
    return SampleFolder(args.samples_dir
                        or Path(parameters.common.generated_data_dir) / SAMPLE_STARTS[0])


def add_random_samples_flag(parser: Parser) -> None:
    """Add --random_samples_dir, for scripts that also read samples with random starts."""
    parser.add_argument("--random_samples_dir", type=Path, help="folder of samples with random "
                        f"starts; <generated_data_dir>/{SAMPLE_STARTS[1]} if not given")


def random_samples_of(args: argparse.Namespace, parameters: ParameterSet) -> SampleFolder:
    """Return the sample folder that the flag of ``add_random_samples_flag`` selects."""
    return SampleFolder(args.random_samples_dir
                        or Path(parameters.common.generated_data_dir) / SAMPLE_STARTS[1])
