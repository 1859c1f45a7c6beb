"""Options of studies and scripts: dataclasses from which command-line flags are derived.

A script is a function of its options, which a notebook calls in the same way:

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class RecordOptions(ComputeOptions):
        '''Record how an agent plays.'''

        agent_file: Path = option(help="agent that plays")
        num_episodes: int = option(100, "number of episodes", type=count)

    def record(options: RecordOptions) -> Recording: ...

    main = command(RecordOptions, record)

Every field is a flag of the same name, those of base classes last. A ``bool`` field is a switch;
if its default is True, the flag is ``--no_<name>``. A ``tuple`` field takes several arguments.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from common.cli import (
    DATA_FLAGS,
    Parser,
    check_output,
    from_zero,
    recorded_set,
    set_up_logging,
)
from common.devices import PRECISIONS, Compute, resolve_compute
from common.errors import Stopped, UserError, nearest, script_main
from common.parameters import BASE_SET, INTERPRETING_CONFIG_FILE, ParameterSet
from common.shards import WHOLE, Shard, shard

_OPTION = "option"  # key of a field's metadata
_REQUIRED: Any = dataclasses.MISSING

_PLAIN = (str, Path, numbers.Real)  # types of values that are converted as texts of flags are

T = TypeVar("T", bound="Options")


@dataclasses.dataclass(frozen=True)
class _Flag:
    """Arguments of ``option``."""

    help: str
    type: Callable[[str], Any] | None
    choices: Sequence[Any] | None
    key: str | None
    names: tuple[str, ...]
    others: dict[str, Any]


def option(default: Any = _REQUIRED, help: str = "", *,
           type: Callable[[str], Any] | None = None, choices: Sequence[Any] | None = None,
           key: str | None = None, names: Sequence[str] = (), **others: Any) -> Any:
    """Define a field of ``Options``.

    Args:
        default: value if the option is not given; without one, the option is required.
        help: text of ``--help``; empty for an option that exists only for compatibility with
            published commands, and is hidden.
        type: function that converts and checks a text, like an argparse type; by default, the type
            of the field.
        choices: allowed values.
        key: dotted name of the parameter of the parameter set that the option overrides; the
            default should then be None. A name that begins with a dot is one of a parameter in
            ``ParameterOptions.section``.
        names: names of the flag, such as ``("--seed", "--random_seed")``; by default, two dashes
            and the name of the field.
        others: further arguments of ``argparse.ArgumentParser.add_argument``.
    """
    flag = _Flag(help or argparse.SUPPRESS, type, choices, key, tuple(names), others)
    return dataclasses.field(default=default, metadata={_OPTION: flag})


def redefine(base: type[Options], name: str, **changes: Any) -> Any:
    """Define a field like that of a base class, with some other arguments of ``option``."""
    [field] = (field for field in dataclasses.fields(base) if field.name == name)
    flag = field.metadata[_OPTION]
    default = changes.pop("default", field.default)
    known = {key: changes.pop(key) for key in vars(flag) if key in changes}
    return dataclasses.field(default=default, metadata={_OPTION: dataclasses.replace(
        flag, **known, others={**flag.others, **changes})})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Base class of all options. The first paragraph of a subclass's docstring is the description
    of its script.

    Values are converted and checked as those of flags are: paths can be strings, and tuples any
    sequences or single values.

    Attributes:
        hidden: names of the options that ``--help`` does not show.
        ignored: flags without effect that published commands pass; ``docs/differences.md`` lists
            them. They are not fields.
        given: names of the options that were given in the call or on the command line.

    Raises:
        UserError: if a value is not allowed; the message names the option.
    """

    hidden: ClassVar[Collection[str]] = ()
    ignored: ClassVar[Collection[str]] = ()

    given: frozenset[str] = dataclasses.field(init=False, repr=False, compare=False)

    def __new__(cls, **values: Any):
        options = super().__new__(cls)
        object.__setattr__(options, "given", frozenset(values))
        return options

    def __post_init__(self):
        for field, flag, kind in self._fields():
            value = getattr(self, field.name)
            if value is None:
                continue
            if _is_tuple(kind):
                items = (value,) if isinstance(value, _PLAIN) else value
                value = tuple(_checked(field.name, flag, _item_type(kind), item) for item in items)
            else:
                value = _checked(field.name, flag, kind, value)
            object.__setattr__(self, field.name, value)

    @property
    def values(self) -> dict[str, Any]:
        """Values of all options by name."""
        return {field.name: getattr(self, field.name) for field, _, _ in self._fields()}

    def require_only(self, names: Collection[str], reason: str) -> None:
        """Raise UserError if an option was given that is not among ``names``."""
        if others := self.given - set(names):
            raise UserError(f"--{min(others)} {reason}")

    @classmethod
    @functools.cache
    def _fields(cls) -> list[tuple[dataclasses.Field, _Flag, Any]]:
        """Return the fields with their flags and types, those of base classes last."""
        kinds = typing.get_type_hints(cls)
        own: dict[str, None] = {}
        for kind in cls.__mro__:
            for name in vars(kind).get("__annotations__", ()):
                own.setdefault(name, None)
        by_name = {field.name: field for field in dataclasses.fields(cls)}
        return [(by_name[name], _in_section(cls, by_name[name].metadata[_OPTION]),
                 _without_none(kinds[name]))
                for name in own if name in by_name and _OPTION in by_name[name].metadata]


def _in_section(options: type[Options], flag: _Flag) -> _Flag:
    """Return the flag with the full name of its parameter."""
    if flag.key is None or not flag.key.startswith("."):
        return flag
    assert issubclass(options, ParameterOptions)
    return dataclasses.replace(flag, key=options.section + flag.key)


def _without_none(kind: Any) -> Any:
    """Return the type ``X`` of ``X | None``; other types are unchanged."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        parts = [part for part in typing.get_args(kind) if part is not types.NoneType]
        return parts[0] if len(parts) == 1 else kind
    return kind


def _is_tuple(kind: Any) -> bool:
    return typing.get_origin(kind) is tuple


def _item_type(kind: Any) -> Any:
    """Return the type of the items of a tuple type, or the type itself."""
    return _without_none(typing.get_args(kind)[0]) if _is_tuple(kind) else kind


def _checked(name: str, flag: _Flag, kind: Any, value: Any) -> Any:
    """Convert and check a value, or an item of a tuple."""
    if kind is bool:
        if not isinstance(value, bool):
            raise UserError(f"{name}: must be True or False, not {value!r}")
        return value
    if isinstance(value, _PLAIN):
        try:
            value = (flag.type or kind)(str(value))
        except argparse.ArgumentTypeError as error:
            raise UserError(f"{name}: {error}") from None
        except ValueError:
            raise UserError(f"{name}: invalid value {value!r}") from None
    if flag.choices is not None and value not in flag.choices:
        raise UserError(f"unknown {name} '{value}'{nearest(str(value), map(str, flag.choices))}")
    return value


def parser_of(options: type[Options]) -> Parser:
    """Create the parser of a script's flags."""
    parser = Parser(inspect.getdoc(options).partition("\n\n")[0])  # type: ignore[union-attr]
    for field, flag, kind in options._fields():
        _add_flag(parser, field, flag, kind, field.name in options.hidden)
    for name in _ignored(options):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    return parser


def _add_flag(parser: Parser, field: dataclasses.Field, flag: _Flag, kind: Any,
              is_hidden: bool) -> None:
    """Add the flag of a field."""
    names = flag.names or (f"--{field.name}",)
    settings: dict[str, Any] = {"help": flag.help, **flag.others}
    if is_hidden:
        settings["help"] = argparse.SUPPRESS
    elif flag.key is not None:
        settings["help"] += " (default: from the parameter set)"
    if kind is bool:
        if field.default is True and not flag.names:
            names = (f"--no_{field.name}",)
        settings.setdefault("action", f"store_{field.default is not True}".lower())
        settings["default"] = field.default
    else:
        settings["type"] = flag.type or _item_type(kind)
        if flag.choices is not None:
            settings["choices"] = flag.choices
        if _is_tuple(kind) and "action" not in settings:
            settings.setdefault("nargs", "+")
        if field.default is not _REQUIRED:
            settings["default"] = field.default
        if settings.get("action") == "append":
            settings["default"] = list(field.default)  # type: ignore[arg-type]
    if names[0].startswith("-"):
        settings["dest"] = field.name
        if field.default is _REQUIRED:
            settings["required"] = True
    parser.add_argument(*names, **settings)


def _ignored(options: type[Options]) -> list[str]:
    """Return the names of ``Options.ignored`` of a class and its base classes."""
    names = (name for kind in options.__mro__ for name in vars(kind).get("ignored", ()))
    return list(dict.fromkeys(names))


def parse(options: type[T], argv: list[str] | None) -> T:
    """Parse a command line.

    Args:
        argv: command-line arguments; None for those of this process.

    Raises:
        UserError: see ``Options``.
    """
    parser = parser_of(options)
    values = vars(parser.parse_args(argv))
    positional = {action.dest for action in parser._actions if not action.option_strings}
    given = (parser.explicit(argv) | positional) - {*_ignored(options)}
    return options(**{name: values[name] for name in given})


def command(options: type[T], function: Callable[[T], Any]) -> Callable[..., int]:
    """Return the ``main(argv=None)`` of a script, which calls a function with its options.

    See ``common.errors.script_main`` for the treatment of errors. ``main.options`` is the class of
    the options, and ``main.function`` the function.
    """
    @script_main
    def main(argv: list[str] | None = None) -> int:
        parsed = parse(options, argv)
        if isinstance(parsed, LogOptions):
            set_up_logging(parsed.log_level)
        try:
            function(parsed)
        except Stopped as stop:
            print(stop, end="\n" * bool(str(stop)))
            return stop.status
        return 0
    main.options, main.function = options, function  # type: ignore[attr-defined]
    return main


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogOptions(Options):
    """Options of logging."""

    log_level: str = option("info", "logging level: debug, info, warning, error, or a number as in "
                                    "Python's logging")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeOptions(LogOptions):
    """Options of the device and its precision."""

    device: str | None = option("auto", "device to compute on; auto: a GPU if available",
                                choices=("auto", "gpu", "cpu"))
    gpu_device: int | None = option(0, "index of the GPU", type=from_zero)
    precision: str = option("auto", "precision of the convolutions; auto: bfloat16 if the hardware "
                                    "supports it", choices=PRECISIONS)

    @functools.cached_property
    def compute(self) -> Compute:
        """Device and precision.

        Raises:
            UserError: if there is no such device.
        """
        return self.compute_in(self.precision)

    def compute_in(self, precision: str, local_rank: int = 0) -> Compute:
        """Return the device and another precision; see ``resolve_compute``."""
        assert self.device is not None and self.gpu_device is not None
        return resolve_compute(self.device, self.gpu_device, precision, local_rank)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterOptions(Options):
    """Options of a script that uses a parameter set; options with a ``key`` override its values.

    Attributes:
        inputs: options that are input folders.
        section: section of the parameter set that keys beginning with a dot belong to.
    """

    inputs: ClassVar[Sequence[str]] = tuple(DATA_FLAGS)
    section: ClassVar[str] = ""

    interpreting_params_name: str | None = option(
        None, f"parameter set in hyperparams/{INTERPRETING_CONFIG_FILE.name}; if not given, the "
              f"one recorded with the data, if any, else {BASE_SET}")

    @functools.cached_property
    def parameters(self) -> ParameterSet:
        """Parameter set with the values of the options. The choice of the set is logged.

        Raises:
            UserError: if the parameter set does not exist or has an unknown key, or the recording's
                description is damaged.
        """
        keys = {field.name: flag.key for field, flag, _ in self._fields()
                if flag.key is not None}
        overrides = {key: value for name, key in keys.items()
                     if (value := getattr(self, name)) is not None}
        folders = [(Path(getattr(self, name)), below) for name, below in DATA_FLAGS.items()
                   if name in self.inputs and getattr(self, name, None) is not None]
        name = self.interpreting_params_name
        if name is None:
            name = recorded_set([path / below if (path / below).is_dir() else path
                                 for path, below in folders])
        return ParameterSet(name, overrides)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterComputeOptions(ParameterOptions, ComputeOptions):
    """Options of a script whose parameter set names the default device."""

    device: str | None = redefine(ComputeOptions, "device", default=None, key="device")
    gpu_device: int | None = redefine(ComputeOptions, "gpu_device", default=None, key="gpu_device")

    def compute_in(self, precision: str, local_rank: int = 0) -> Compute:
        """Return the device and another precision; see ``resolve_compute``."""
        common = self.parameters.common
        return resolve_compute(common.device, common.gpu_device, precision, local_rank)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveDirOptions(ParameterOptions):
    """Options of a script that reads or writes the default folders of analyses."""

    save_dir: str | None = option(None, "folder that contains the folders of all analyses",
                                  key="analysis.save_dir")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckContentsOptions(Options):
    """Options of a script that computes the digest of a recording."""

    check_contents: bool = option(False, "read every file of the recording to detect changes, not "
                                         "only files whose size or modification time changed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputFileOptions(Options):
    """Options of a script that writes one file, whose path is an option with ``output_file`` as its
    type.

    Attributes:
        output_option: name of this option.
    """

    output_option: ClassVar[str] = "output"

    overwrite: bool = option(False, "replace the output file even if this script did not write it")

    def check_output(self, is_own: Callable[[Path], bool] = lambda path: False) -> None:
        """Raise if the file exists, unless the script wrote it; see ``common.cli.check_output``."""
        check_output(getattr(self, self.output_option), is_own, self.overwrite,
                     f"--{self.output_option}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardOptions(Options):
    """Options of a script whose work can be divided."""

    shard: Shard = option(WHOLE, "process only the I-th of N parts of the work, counted from 1, so "
                                 "that several jobs can share it", type=shard, metavar="I/N")
    join: bool = option(False, "only join the files of all shards, which must have finished, into "
                               "those of a single run")
