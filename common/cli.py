"""Command-line flags that several scripts share."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NoReturn

from common.devices import PRECISIONS
from common.errors import UserError, nearest, shortened
from common.files import read_description
from common.parameters import (
    BASE_SET,
    INTERPRETING_CONFIG_FILE,
    PARAMETER_SET,
    ParameterSet,
    parameter_sets,
)
from common.shards import ShardNotes

# Flags for input folders whose ``recording.json`` may name a parameter set, in the order in which
# they are searched. Each flag is mapped to the subfolder that contains this file, if it exists.
DATA_FLAGS = {"samples_dir": "", "generated_data_dir": "informed_init", "data_dir": "",
              "agent_env_data_dir": ""}

MAX_VALUE = 400  # characters of a message about flags, which quotes their values

logger = logging.getLogger(__name__)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Formatter that appends the default of a flag to its help text, unless the text has it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_empty = action.default in (None, "", [], ())
        if action.nargs == 0 or is_empty or "(default:" in str(action.help):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Argument parser that shows defaults in ``--help`` and rejects abbreviated flags.

    A flag may override a parameter of the parameter set: pass the parameter's dotted name to
    ``add_argument``, for example ``key="gen_model.lr"``.
    """

    def __init__(self, description: str):
        self._keys: dict[str, str] = {}  # dotted names of parameters, by attribute of the flag
        super().__init__(description=description, allow_abbrev=False,
                         formatter_class=_HelpFormatter)

    def add_argument(self, *names: str, key: str | None = None, **options) -> argparse.Action:
        """Add a flag; ``key`` is the dotted name of the parameter that the flag overrides."""
        if key is not None:
            options["help"] += " (default: from the parameter set)"
        action = super().add_argument(*names, **options)
        if key is not None:
            self._keys[action.dest] = key
        return action

    def hide(self, *names: str) -> None:
        """Hide from ``--help`` flags that exist only for compatibility with published commands.

        Args:
            names: attributes of the flags in the parsed namespace.
        """
        for action in self._actions:
            if action.dest in names:
                action.help = argparse.SUPPRESS

    def error(self, message: str) -> NoReturn:
        """Print usage and message, without the middle of long values, and exit with status 2."""
        super().error(shortened(message, MAX_VALUE))

    def explicit(self, argv: list[str] | None) -> set[str]:
        """Return the names of the flags given on the command line, without "--".

        Args:
            argv: command-line arguments; None for those of this process.
        """
        words = {word.partition("=")[0] for word in (sys.argv[1:] if argv is None else argv)}
        return {action.dest for action in self._actions if words & set(action.option_strings)}

    def read(self, argv: list[str] | None, data_flags: Collection[str] = tuple(DATA_FLAGS)
             ) -> tuple[argparse.Namespace, set[str], ParameterSet]:
        """Parse the flags of a script that uses a parameter set.

        Without --interpreting_params_name, the parameter set is the one recorded with the data
        given on the command line; if none is recorded, it is ``defaults``. The choice is logged.

        Args:
            argv: command-line arguments; None for those of this process.
            data_flags: keys of DATA_FLAGS that are inputs of the script.

        Returns:
            The parsed flags, the names of the flags given on the command line, and the parameter
            set with the values of these flags.

        Raises:
            UserError: if the parameter set does not exist or has an unknown key, the recording's
                description is damaged, or --log_level is invalid.
        """
        args, explicit = self.parse_args(argv), self.explicit(argv)
        set_up_logging(args.log_level)
        if PARAMETER_SET not in explicit and data_flags:
            folders = [Path(getattr(args, name)) / below for name, below in DATA_FLAGS.items()
                       if name in data_flags and name in explicit]
            args.interpreting_params_name = recorded_set(folders)
        overrides = {key: getattr(args, name) for name, key in self._keys.items()
                     if name in explicit}
        return args, explicit, ParameterSet(args.interpreting_params_name, overrides)


def recorded_set(folders: Sequence[Path]) -> str:
    """Return the name of the parameter set to use, and log the reason for the choice.

    The name comes from the first folder that records one. The default is BASE_SET.

    Raises:
        UserError: if the recorded set does not exist; the message names the file.
    """
    for folder in folders:
        file = folder / "recording.json"
        description = read_description(file) or ShardNotes(folder).any_settings()
        name = description.get(PARAMETER_SET)
        if name is None:  # recordings of earlier versions
            continue
        if name not in parameter_sets():
            raise UserError(f"{file} names the parameter set '{name}', which "
                            f"{INTERPRETING_CONFIG_FILE.name} does not have"
                            f"{nearest(str(name), parameter_sets())}; choose one with "
                            "--interpreting_params_name")
        return _chosen(name, f"with which {folder} was recorded")
    if not folders:
        return _chosen(BASE_SET, "because no set and no data are given")
    verb = "name" if len(folders) > 1 else "names"
    return _chosen(BASE_SET, f"because {' and '.join(map(str, folders))} {verb} none")


def _chosen(name: str, reason: str) -> str:
    """Log the choice of a parameter set, and return its name."""
    if os.environ.get("RANK", "0") == "0":  # one of several training processes reports it
        logger.info("parameters: set %s, %s", name, reason)
    return name


class OneText(argparse.Action):
    """argparse action: join a flag's arguments with spaces, as in ``--sample_ids 0 to 100``."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, " ".join(values))


class OnOff(argparse.Action):
    """argparse action: a flag and its opposite, such as ``--use_x`` and ``--no_x``."""

    def __call__(self, parser, namespace, values, option_string=None):
        value = not str(option_string).startswith("--no_")
        if getattr(namespace, self.dest) is (not value):
            parser.error(f"{' and '.join(self.option_strings)} exclude each other")
        setattr(namespace, self.dest, value)


def whole(low: int, high: int) -> Callable[[str], int]:
    """Return an argparse type for integers from ``low`` to ``high``, both included."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be a whole number from {low} to {high}, not "
                                             f"{text}")
        return value

    return number


def share(text: str) -> float:
    """argparse type: a number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must lie between 0 and 1, not {text}")
    return value


def controls_or_none(text: str) -> int:
    """Argparse type for a number of controls: 0, or at least 2, so that each control can be
    compared with others."""
    value = whole(0, 1000)(text)
    if value == 1:
        raise argparse.ArgumentTypeError("must be 0, or at least 2, so that a control has others "
                                         "to be compared with")
    return value


# The upper bounds far exceed useful values; they keep a typo from exhausting memory or time.
count = whole(1, 10**7)
from_zero = whole(0, 10**7)
time_steps = whole(1, 10**12)
environments = whole(1, 4096)
threads = whole(0, 512)
frames_per_second = whole(1, 1000)
seed = whole(0, 2**32 - 1)  # accepted by every random generator in use


def folder_name(text: str) -> str:
    """argparse type: relative folder name without '..'."""
    parts = Path(text).parts
    if not parts or Path(text).is_absolute() or ".." in parts:
        raise argparse.ArgumentTypeError(f"must be the name of a folder, not '{text}'")
    return text


def output_file(text: str) -> Path:
    """argparse type: path of an output file, which must be new or a regular file."""
    path = Path(text)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise argparse.ArgumentTypeError(f"must be a file to write, but {text} is a folder, a link,"
                                         " a pipe or a device")
    return path


def add_output_file_flag(parser: argparse.ArgumentParser, flag: str = "--output",
                         **options) -> None:
    """Add --overwrite and the flag for a script's only output file; see ``check_output``."""
    parser.add_argument(flag, type=output_file, **options)
    parser.add_argument("--overwrite", action="store_true",
                        help=f"replace the {flag} file even if this script did not write it")


def check_output(path: Path | None, is_own: Callable[[Path], bool], overwrite: bool,
                 flag: str = "--output") -> None:
    """Raise if a script would replace a file that it did not write, unless ``overwrite`` is set.

    Args:
        path: output file; None if nothing is written.
        is_own: returns whether the script wrote an existing file; a ``UserError`` counts as False.
        overwrite: whether any existing file may be replaced.
        flag: flag that chooses the output file, for the message.

    Raises:
        UserError: if the file exists, was not written by this script, and ``overwrite`` is False.
    """
    if path is None or overwrite or not path.exists():
        return
    with contextlib.suppress(UserError):
        if is_own(path):
            return
    raise UserError(f"{path} exists, and this script did not write it; choose another {flag}, or "
                    "give --overwrite to replace it")


def add_check_contents_flag(parser: argparse.ArgumentParser) -> None:
    """Add --check_contents, which computes a recording's digest from the contents of all files."""
    parser.add_argument("--check_contents", action="store_true",
                        help="read every file of the recording to detect changes, not only files "
                             "whose size or modification time changed")


def add_compute_flags(parser: Parser, in_parameter_set: bool = False) -> None:
    """Add --device, --gpu_device, --precision and --log_level.

    Args:
        in_parameter_set: whether the parameter set provides the default device.
    """
    device, index = ("device", "gpu_device") if in_parameter_set else (None, None)
    parser.add_argument("--device", default="auto", choices=("auto", "gpu", "cpu"), key=device,
                        help="device to compute on; auto: a GPU if available")
    parser.add_argument("--gpu_device", type=from_zero, default=0, key=index,
                        help="index of the GPU")
    parser.add_argument("--precision", default="auto", choices=PRECISIONS,
                        help="precision of the convolutions; auto: bfloat16 if the hardware "
                             "supports it")
    add_log_flag(parser)


def add_log_flag(parser: argparse.ArgumentParser) -> None:
    """Add --log_level."""
    parser.add_argument("--log_level", default="info",
                        help="logging level: debug, info, warning, error, or a number as in "
                             "Python's logging")


def add_parameter_set_flag(parser: argparse.ArgumentParser) -> None:
    """Add --interpreting_params_name."""
    parser.add_argument("--interpreting_params_name", default=BASE_SET,
                        help="parameter set in hyperparams/interpreting_configs.yml; if not given, "
                             "the one recorded with the data, if any")


def add_save_dir_flag(parser: Parser) -> None:
    """Add --save_dir."""
    parser.add_argument("--save_dir", key="analysis.save_dir",
                        help="folder that contains the folders of all analyses")


def add_published_flags(parser: argparse.ArgumentParser, names: tuple[str, ...]) -> None:
    """Add flags without effect that published commands pass; ``docs/differences.md`` lists them.

    Args:
        names: names of the flags, without "--".
    """
    for name in names:
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)


def set_up_logging(log_level: str) -> None:
    """Log messages from a level upwards to stderr, without level or time.

    Args:
        log_level: name of the level, or its number in Python's logging.

    Raises:
        UserError: if the level is unknown.
    """
    is_number = re.fullmatch("[0-9]{1,4}", log_level)
    level = int(log_level) if is_number else logging.getLevelName(log_level.upper())
    if not isinstance(level, int):
        raise UserError(f"unknown --log_level '{log_level}'; use debug, info, warning, error or "
                        "a number")
    logging.basicConfig(level=level, stream=sys.stderr, format="%(message)s", force=True)
