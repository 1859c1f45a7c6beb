"""Parser of command-line flags, and types of their values."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from common.errors import UserError, nearest, shortened
from common.files import read_description
from common.parameters import (
    BASE_SET,
    INTERPRETING_CONFIG_FILE,
    PARAMETER_SET,
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
    """Argument parser that shows defaults in ``--help`` and rejects abbreviated flags."""

    def __init__(self, description: str):
        super().__init__(description=description, allow_abbrev=False,
                         formatter_class=_HelpFormatter)

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
