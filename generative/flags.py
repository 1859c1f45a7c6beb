"""Flags of the scripts that train, measure or use a simulator."""

from __future__ import annotations

import argparse
import logging
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
from common.parameters import ParameterSet
from generative.config import LR_DECAYS, SAMPLE_STARTS
from generative.sample_files import SampleFolder

# Loss terms of an older model.
_LOSSES_WITHOUT_EFFECT = ("act_log_probs", "gen_adv")

logger = logging.getLogger(__name__)


def add_simulator_flags(parser: Parser, model_file_help: str, model_file_required: bool,
                        at_a_time: int | None = None) -> None:
    """Add the flags of train_gen_model.py, which all later scripts accept.

    Args:
        at_a_time: default of ``--batch_size``; None for the parameter set's, as in training.
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
    if at_a_time:
        parser.add_argument("--batch_size", type=count, default=at_a_time,
                            help="samples per batch")
    else:
        parser.add_argument("--batch_size", type=count, key="gen_model.batch_size",
                            help="windows per batch")
    parser.add_argument("--num_sim_steps", type=count, key="gen_model.num_sim_steps",
                        help="number of simulated steps")
    parser.add_argument("--num_initializing_steps", type=count, key="gen_model.num_init_steps",
                        help="number of recorded frames from which a simulation starts")
    parser.add_argument("--epochs", type=count, key="gen_model.epochs",
                        help="number of passes over the training windows")
    parser.add_argument("--lr", type=float, key="gen_model.lr", help="learning rate")
    parser.add_argument("--lr_decay", choices=LR_DECAYS, key="gen_model.lr_decay",
                        help="how the learning rate decays to 0 by the end of training")
    parser.add_argument("--image_rarity", type=float, key="gen_model.image_rarity",
                        help="0 to 1: how strongly errors at pixels of rare colours are upweighted")
    parser.add_argument("--open_loop_share", type=float, key="gen_model.open_loop_share",
                        help="0 to 1: share of the windows whose latents come from the prior")
    parser.add_argument("--log_interval", type=count, key="gen_model.log_interval",
                        help="batches per row of the log")
    parser.add_argument("--save_interval", type=count, key="gen_model.save_interval",
                        help="batches between checkpoints")
    parser.add_argument("--seed", type=seed, default=0, help="seed of every random choice")
    for name, term in (("obs", "the image"), ("hx", "the agent's state"), ("reward", "the reward"),
                       ("done", "the terminal"), ("kl", "the KL")):
        parser.add_argument(f"--loss_scale_{name}", type=float, default=1.0,
                            help=f"weight of the loss term for {term}")
    for name in _LOSSES_WITHOUT_EFFECT:
        parser.add_argument(f"--loss_scale_{name}", type=float, default=0.0,
                            help=argparse.SUPPRESS)
    add_compute_flags(parser, in_parameter_set=True)
    add_published_flags(parser, ("exp_name", "env_name", "start_level", "num_levels",
                                 "distribution_mode", "agent_param_name", "param_name",
                                 "num_threads"))


def read_simulator_flags(parser: Parser, argv: list[str] | None
                         ) -> tuple[argparse.Namespace, set[str], ParameterSet]:
    """Parse the flags with ``Parser.read``, and warn about flags without effect."""
    args, explicit, parameters = parser.read(argv)
    for name in _LOSSES_WITHOUT_EFFECT:
        if getattr(args, f"loss_scale_{name}"):
            logger.warning("--loss_scale_%s has no effect: this model has no such loss", name)
    return args, explicit, parameters


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


def samples_of(args: argparse.Namespace, parameters: ParameterSet) -> SampleFolder:
    """Sample folder selected by the flags of ``add_samples_flags``."""
    return SampleFolder(args.samples_dir
                        or Path(parameters.common.generated_data_dir) / SAMPLE_STARTS[0])


def add_random_samples_flag(parser: Parser) -> None:
    """Add --random_samples_dir, for scripts that also read samples with random starts."""
    parser.add_argument("--random_samples_dir", type=Path, help="folder of samples with random "
                        f"starts; <generated_data_dir>/{SAMPLE_STARTS[1]} if not given")


def random_samples_of(args: argparse.Namespace, parameters: ParameterSet) -> SampleFolder:
    """Sample folder selected by the flag of ``add_random_samples_flag``."""
    return SampleFolder(args.random_samples_dir
                        or Path(parameters.common.generated_data_dir) / SAMPLE_STARTS[1])
