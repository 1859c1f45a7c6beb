"""Command-line flags of the scripts that work with a simulator, in both published generations."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from common.cli import (
    Parser,
    add_compute_flags,
    add_published_flags,
    count,
    from_zero,
    seed,
    set_up_logging,
)
from generative.config import (
    CLUSTERINGS,
    SAMPLE_STARTS,
    InterpretingConfig,
    load_interpreting_config,
)
from generative.sample_files import SampleFolder

# Where the YAML has the value of a flag.
_OVERRIDES = {
    "device": ("device",), "gpu_device": ("gpu_device",), "data_dir": ("data_dir",),
    "log_dir_base": ("log_dir_base",),
    "log_interval": ("gen_model", "log_interval"), "save_interval": ("gen_model", "save_interval"),
    "epochs": ("gen_model", "epochs"), "batch_size": ("gen_model", "batch_size"),
    "lr": ("gen_model", "lr"), "num_sim_steps": ("gen_model", "num_sim_steps"),
    "num_initializing_steps": ("gen_model", "num_init_steps"),
    "generated_data_dir": ("generated_data_dir",), "rand_init": ("record", "rand_init"),
    "num_samples": ("record", "max_samples"),
    "swap_directions_from": ("gen_model", "swap_directions_from"),
    "swap_directions_to": ("gen_model", "swap_directions_to"),
    **{flag: ("analysis", "saliency", key) for flag, key in (
        ("saliency_func_type", "func_type"), ("saliency_direction_type", "direction_type"),
        *((key, key) for key in ("direction_ids", "common_timesteps", "sample_ids",
                                 "difference_demo_sample_ids", "combine_samples_not_iterate")))},
    "save_dir": ("analysis", "save_dir"),
    "num_direction_episodes": ("analysis", "agent_h", "num_episodes"),
    **{name: ("analysis", "agent_h", name) for name in (
        "informed_or_random_init", "num_episodes", "num_generated_samples")},
    "num_env_samples": ("analysis", "env_h", "num_samples"),
    "num_behaviour_samples": ("analysis", "combined_agent_env_hx", "num_samples"),
}
# Flags that mean a key of the section of the analysis whose script takes them.
_OF_AN_ANALYSIS = ("num_samples", "num_epi_paths", "n_clusters", "clustering", "grad_timestep")
# Names of terms of an older model.
_LOSSES_WITHOUT_EFFECT = ("act_log_probs", "gen_adv")

logger = logging.getLogger(__name__)


class OneText(argparse.Action):
    """Joins the words of a flag, as in ``--sample_ids 0 to 100``."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, " ".join(values))


def add_simulator_flags(parser: Parser, model_file_help: str, model_file_required: bool,
                        at_a_time: int | None = None) -> None:
    """The flags of train_gen_model.py, which every later script takes, too.

    Args:
        at_a_time: default of ``--batch_size`` where it is not the parameter set's, which is that
            of training.
    """
    yaml = "; the parameter set's if not given"
    parser.add_argument("--agent_file", type=Path, required=True, help="the agent inside")
    parser.add_argument("--model_file", type=Path, required=model_file_required,
                        help=model_file_help)
    parser.add_argument("--interpreting_params_name", default="defaults",
                        help="parameter set in hyperparams/interpreting_configs.yml")
    parser.add_argument("--gen_mod_exp_name", "--tgm_exp_name", default="dev",
                        help="name of the experiment's folder")
    parser.add_argument("--data_dir", help="recorded rollouts, <logdir>/data of record.py" + yaml)
    parser.add_argument("--log_dir_base", help="simulators are written to <log_dir_base>/results/"
                        + yaml)
    parser.add_argument("--batch_size", type=count, default=at_a_time,
                        help="samples at a time" if at_a_time else "windows at a time" + yaml)
    parser.add_argument("--num_sim_steps", type=count, help="simulated steps" + yaml)
    parser.add_argument("--num_initializing_steps", type=count,
                        help="frames from which a simulation starts" + yaml)
    parser.add_argument("--epochs", type=count, help="passes through the windows" + yaml)
    parser.add_argument("--lr", type=float, help="learning rate" + yaml)
    parser.add_argument("--log_interval", type=count, help="batches a row of the log" + yaml)
    parser.add_argument("--save_interval", type=count, help="batches between checkpoints" + yaml)
    parser.add_argument("--seed", type=seed, default=0, help="of every random choice")
    for name, term in (("obs", "the image"), ("hx", "the agent's state"), ("reward", "the reward"),
                       ("done", "the terminal"), ("kl", "the KL")):
        parser.add_argument(f"--loss_scale_{name}", type=float, default=1.0,
                            help=f"factor of the loss of {term}")
    for name in _LOSSES_WITHOUT_EFFECT:
        parser.add_argument(f"--loss_scale_{name}", type=float, default=0.0,
                            help="of an older model; no effect here")
    add_compute_flags(parser)
    add_published_flags(parser, ("exp_name", "env_name", "start_level", "num_levels",
                                 "distribution_mode", "agent_param_name", "param_name",
                                 "num_threads"))


def add_direction_flags(parser: Parser, num_episodes_flag: str = "--num_episodes") -> None:
    """The flags that say where directions of the hidden space are.

    Args:
        num_episodes_flag: its name where ``--num_episodes`` means other episodes.
    """
    parser.add_argument("--precomputed_analysis_data_path", type=Path,
                        default=Path("analysis/hx_analysis_precomp"),
                        help="folder of the matrices that define the directions, from "
                             "hidden_analysis_precompute.py")
    add_direction_number_flag(parser, num_episodes_flag)


def add_direction_number_flag(parser: Parser, name: str = "--num_episodes") -> None:
    """The flag that says which directions of a folder are meant."""
    parser.add_argument(name, type=count,
                        help="recorded episodes that the directions were found in, which stands "
                             "in the names of their files; the parameter set's if not given")


def direction(text: str) -> int | None:
    """The number of a direction, or None, as an argparse type."""
    return None if text.lower() == "none" else int(text)


def add_swap_flags(parser: Parser, num_episodes_flag: str = "--num_episodes") -> None:
    """The flags that alter the agent's hidden state; see ``add_direction_flags``."""
    yaml = "; the parameter set's if not given"
    parser.add_argument("--swap_directions_from", type=int, nargs="+", metavar="DIRECTION",
                        help="directions of the hidden space to take out of every change of the "
                             "agent's state" + yaml)
    parser.add_argument("--swap_directions_to", type=direction, nargs="+", metavar="DIRECTION",
                        help="for each of them the direction that gets the same amount instead, "
                             "or None" + yaml)
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


def add_hidden_analysis_flags(parser: Parser) -> None:
    """The flags that the two scripts of the agent's hidden states share."""
    yaml = "; the parameter set's if not given"
    _add_analysis_flags(parser, "hx_analysis_precomp")
    parser.add_argument("--data_dir", help="recorded rollouts, <logdir>/data of record.py" + yaml)
    parser.add_argument("--num_episodes", type=count, help="recorded episodes" + yaml)
    parser.add_argument("--num_generated_samples", type=count, help="simulated samples" + yaml)
    parser.add_argument("--no_generated_samples", action="store_true",
                        help="work on the recorded states alone")


def add_sample_analysis_flags(parser: Parser, precomputed: str) -> None:
    """The flags that the scripts of an analysis of simulated samples share.

    Args:
        precomputed: name of the folder of its arrays.
    """
    yaml = "; the parameter set's if not given"
    _add_analysis_flags(parser, precomputed)
    parser.add_argument("--generated_data_dir", help="folder with the folders of simulated "
                        "samples, from record_gen_samples.py" + yaml)
    parser.add_argument("--samples_dir", type=Path, help="folder of samples to read; "
                        f"<generated_data_dir>/{SAMPLE_STARTS[0]} if not given")
    parser.add_argument("--num_samples", type=count, help="simulated samples" + yaml)


def samples_of(args: argparse.Namespace, config: InterpretingConfig) -> SampleFolder:
    """The folder of samples that the flags of ``add_sample_analysis_flags`` mean."""
    return SampleFolder(args.samples_dir or Path(config.generated_data_dir) / SAMPLE_STARTS[0])


def add_influence_flags(parser: Parser) -> None:
    """The flags of the scripts that look at what components do to components."""
    yaml = "; the parameter set's if not given"
    add_sample_analysis_flags(parser, "hx_analysis_precomp")
    add_direction_number_flag(parser)
    parser.add_argument("--sample_ids", nargs="+", action=OneText, metavar="ID",
                        help="numbers of the samples that are used, or a range: 0 to 100 ends "
                             "before 100" + yaml)
    parser.add_argument("--common_timesteps", type=int, nargs="+", metavar="STEP",
                        help="the one simulated step at which the functions of the saliency were "
                             "read, from 0" + yaml)
    parser.add_argument("--behaviours_dir", type=Path,
                        help="folder of the behaviours, found in --num_samples samples; "
                             "<save_dir>/combined_agent_env_hx_analysis_precomp if not given")
    parser.add_argument("--no_behaviours", action="store_true",
                        help="look at all samples together alone")


def add_story_flags(parser: Parser) -> None:
    """The flags of causal_stories.py that say what lies where."""
    _add_analysis_flags(parser, "hx_analysis_precomp")
    add_direction_number_flag(parser)
    parser.add_argument("--samples_dir", type=Path, help="folder of the samples; the one that the "
                        "comparison was made of if not given")


def add_random_samples_flag(parser: Parser) -> None:
    """The flag of the scripts that also look at samples with random starts."""
    parser.add_argument("--random_samples_dir", type=Path, help="folder of samples with random "
                        f"starts; <generated_data_dir>/{SAMPLE_STARTS[1]} if not given")


def random_samples_of(args: argparse.Namespace, config: InterpretingConfig) -> SampleFolder:
    """The folder that ``add_random_samples_flag`` means."""
    return SampleFolder(args.random_samples_dir
                        or Path(config.generated_data_dir) / SAMPLE_STARTS[1])


def add_precompute_flags(parser: Parser, what: str) -> None:
    """The flags of the scripts that precompute an analysis.

    Args:
        what: the number of which stands in the names of the files: "episodes" or "samples".
    """
    yaml = "; the parameter set's if not given"
    parser.add_argument("--n_clusters", type=count, help="number of clusters" + yaml)
    parser.add_argument("--clustering", choices=CLUSTERINGS,
                        help="method; hdbscan finds its own number of clusters" + yaml)
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


def _add_analysis_flags(parser: Parser, precomputed: str) -> None:
    parser.add_argument("--interpreting_params_name", default="defaults",
                        help="parameter set in hyperparams/interpreting_configs.yml")
    parser.add_argument("--save_dir", help="where the folders of all analyses are; the parameter "
                        "set's if not given")
    parser.add_argument("--precomp_dir", type=Path, help="folder of the precomputed arrays; "
                        f"<save_dir>/{precomputed} if not given")
    parser.add_argument("--log_level", default="info",
                        help="debug, info, warning, error, or a number as in Python's logging")


def parse(flags: Parser, argv: list[str] | None, analysis: str | None = None,
          own: frozenset[str] = frozenset()
          ) -> tuple[argparse.Namespace, set[str], InterpretingConfig]:
    """What every script begins with: its flags, which of them were given, the parameter set.

    Args:
        analysis: section of the YAML that an analysis' flags mean.
        own: flags that mean something else to the script than to the parameter set.

    Raises:
        UserError: see ``interpreting_config``.
    """
    args, explicit = flags.parse_args(argv), flags.explicit(argv)
    set_up_logging(args.log_level)
    return args, explicit, interpreting_config(args, explicit - own, analysis)


def interpreting_config(args: argparse.Namespace, explicit: set[str],
                        analysis: str | None = None) -> InterpretingConfig:
    """The parameter set that was asked for, with the flags that stand on the command line.

    Args:
        explicit: their names, from ``Parser.explicit``.
        analysis: see ``parse``.

    Raises:
        UserError: see ``load_interpreting_config``.
    """
    overrides: dict = {}
    places = dict(_OVERRIDES)
    if analysis:
        places |= {flag: ("analysis", analysis, flag) for flag in _OF_AN_ANALYSIS}
    for flag, (*sections, key) in places.items():
        if flag in explicit:
            place = overrides
            for section in sections:
                place = place.setdefault(section, {})
            place[key] = getattr(args, flag)
    for name in _LOSSES_WITHOUT_EFFECT:
        if getattr(args, f"loss_scale_{name}", 0):
            logger.warning("--loss_scale_%s has no effect: this model has no such loss", name)
    return load_interpreting_config(args.interpreting_params_name, overrides)
