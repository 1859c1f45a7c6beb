"""Read YAML files into dataclasses, checking keys and types, and store the settings of a run."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import sys
import typing
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import yaml

from common.errors import UserError, nearest, shortened
from common.files import MAX_REASON, atomic_path, check_nested, read_bytes, versions

SETTINGS_NAME = "hyperparameters.yml"
Settings = TypeVar("Settings")
_given: dict[Path, dict] = {}  # see yaml_given
# libyaml reads a file 10 times as fast, but deep nesting in a file of others can crash it.
_TRUSTED = Path(__file__).parent.parent / "hyperparams"
_TrustedLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def typed(cls: type, values: object, source: str):
    """Build the dataclass ``cls`` from a mapping, checking every key and type.

    A key may be missing if its field has a default, because files of older runs may lack it.

    Args:
        cls: dataclass; its annotations are the expected types.
        values: values by name of the field.
        source: file or section that the values come from, for messages.

    Raises:
        UserError: if a key is unknown, missing or of the wrong type; the message names the key and
            the source.
    """
    types = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if not isinstance(values, dict):
        raise UserError(f"{source} must hold a mapping of names to values")
    for key in values:
        if key not in fields:
            raise UserError(f"{source}: unknown key '{key}'{nearest(str(key), fields)}")
    checked = {}
    for key, field in fields.items():
        if key in values:
            checked[key] = _of_type(values[key], types[key], f"{source}: '{key}'")
        elif field.default is dataclasses.MISSING:
            raise UserError(f"{source}: the key '{key}' is missing")
    return cls(**checked)


def check_entries(values: object, kinds: Mapping[str, object], source: str | Path,
                  needed: Collection[str] = ()) -> dict:
    """Check the types of some entries of a mapping read from a file, and return the mapping. Other
    entries are not checked.

    Args:
        values: the mapping.
        kinds: type by key, as in the annotations of ``typed``; for a nested mapping, its own
            ``kinds``, all of which it must have.
        source: file that the values come from, for messages.
        needed: keys that must not be missing.

    Raises:
        UserError: if an entry is missing or of another type; the message names it.
    """
    if not isinstance(values, dict):
        raise UserError(f"{source} must hold a mapping of names to values")
    for key in needed:
        if key not in values:
            raise UserError(f"{source}: the key '{key}' is missing")
    for key in kinds.keys() & values.keys():
        kind, what = kinds[key], f"{source}: '{key}'"
        if isinstance(kind, Mapping):
            check_entries(values[key], kind, what, kind)
        else:
            _of_type(values[key], kind, what)
    return values


def _of_type(value, kind, what: str):
    """Check the type of a value and return it; integers are converted to float if required.

    Args:
        kind: plain type, dataclass, optional type, tuple, dict with string keys, or object for any
            value.
        what: name of the value, for messages.

    Raises:
        UserError: if the value is of another type.
    """
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return value if isinstance(value, kind) else typed(kind, value, what)
    if type(None) in parts:  # X | None
        (kind,) = (part for part in parts if part is not type(None))
        return None if value is None else _of_type(value, kind, what)
    if origin is tuple:  # tuple[X, ...], a list in YAML
        if not isinstance(value, list | tuple):
            raise UserError(f"{what} must be a list, not {shortened(repr(value), 200)}")
        return tuple(_of_type(item, parts[0], what) for item in value)
    if origin is dict:  # dict[str, X]
        if not isinstance(value, dict):
            raise UserError(f"{what} must hold a mapping of names to values")
        return {key: _of_type(item, parts[1], f"{what}, '{key}'") for key, item in value.items()}
    if kind is object:
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise UserError(f"{what} must be a {kind.__name__}, not {shortened(repr(value), 200)}")
    return value


def read_yaml(path: Path) -> dict:
    """Read a YAML file whose top level is a mapping.

    Raises:
        UserError: if the file is missing, is not YAML, does not hold a mapping with string keys, or
            exceeds the limits of ``common.files.check_nested``.
    """
    if (given := _given.get(path.resolve())) is not None:
        sys.audit("open", str(path), "r", os.O_RDONLY)  # for hooks that record which files are read
        return copy.deepcopy(given)
    text = read_bytes(path)
    try:
        trusted = path.resolve().is_relative_to(_TRUSTED.resolve())
        content = yaml.load(text, _TrustedLoader if trusted else yaml.SafeLoader)
    except Exception as error:  # invalid values, such as dates, raise almost any exception
        reason = " ".join(str(error).split())[:MAX_REASON]
        raise UserError(f"{path} is not valid YAML: {reason}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UserError(f"{path} must hold a mapping of names to values")
    check_nested(content, path)
    return content


@contextlib.contextmanager
def yaml_given(contents: dict[Path, dict]) -> Iterator[None]:
    """Make ``read_yaml`` return the given contents inside the block, even if the files change.

    Args:
        contents: contents by path of the file.
    """
    given = {path.resolve(): content for path, content in contents.items()}
    _given.update(given)
    try:
        yield
    finally:
        for path in given:
            del _given[path]


def save_settings(folder: Path, settings) -> None:
    """Write the resolved settings of a run (a dataclass) and the package versions to the file
    SETTINGS_NAME in a folder."""
    with atomic_path(folder / SETTINGS_NAME) as temporary:
        text = yaml.safe_dump({**dataclasses.asdict(settings), "versions": versions()},
                              sort_keys=False)
        temporary.write_text(text, encoding="utf-8")


def load_settings(folder: Path, cls: type[Settings]) -> Settings:
    """Read the settings that :func:`save_settings` wrote.

    Raises:
        UserError: if the file is missing or does not match ``cls``; the message names the key.
    """
    path = folder / SETTINGS_NAME
    return typed(cls, {name: value for name, value in read_yaml(path).items()
                       if name != "versions"}, str(path))
