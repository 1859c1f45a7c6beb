"""File formats and schemas of result folders.

``common.results`` and ``common.step_results`` write and read folders with these schemas.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pandas as pd

from common.config import check_entries, typed
from common.errors import UserError
from common.files import read_array, read_arrays, read_bytes, read_description, read_json
from common.tables import read_table

SETTINGS_NAME = "settings.json"
# Types of settings that have the same name in several kinds of folders.
_SETTING_TYPES: dict[str, object] = {
    **dict.fromkeys(("agent_sha256", "recording_sha256", "data_dir"), str | None),
    "seed": int | None, "env": dict | None}
_ENV_TYPES: dict[str, object] = {
    "env_name": str | None, "distribution_mode": str, "start_level": int, "num_levels": int,
    "use_backgrounds": bool}
_FAMILIES = (np.floating, np.integer, np.number, np.str_)  # types that are checked, not converted


class Format:
    """Base class of file formats, which write and read the value of an entry."""

    is_folder = False

    def file_names(self) -> tuple[str, ...]:
        """Return the names of the files in an entry's folder; () if an entry is a single file."""
        return ()

    def write(self, path: Path, value: Any) -> None:
        """Write a value to a temporary path."""
        raise NotImplementedError

    def read(self, path: Path, script: str) -> Any:
        """Read and check a value.

        Args:
            script: command that writes the file, for the message about a missing file.

        Raises:
            UserError: if the file is missing or damaged.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Array:
    """Type and shape of an array.

    Attributes:
        dtype: type that arrays are converted to when written. Arrays are not converted, but only
            checked, if this is ``np.str_`` or an abstract type such as ``np.floating``.
        dims: size or name of each dimension, separated by spaces; empty for a single number.
            Dimensions of the same name have the same size in all arrays of an entry.
        optional: whether the array may be missing.
        finite: whether NaN and infinity are errors.
    """

    dtype: type
    dims: str = ""
    optional: bool = False
    finite: bool = True

    def check(self, name: str, array: np.ndarray, sizes: dict[str, int]) -> None:
        """Raise if an array does not have this type and shape.

        Args:
            name: name of the array, for messages.
            sizes: known sizes of named dimensions, by name; sizes of this array are added.

        Raises:
            UserError: if type or shape differ or a value is not finite; the message names the
                array.
        """
        dims = self.dims.split()
        shape = " x ".join(map(str, array.shape)) or "a single number"
        expected = [int(dim) if dim.isdigit() else sizes.get(dim, dim) for dim in dims]
        fits = np.issubdtype(array.dtype, self.dtype) and array.ndim == len(dims)
        for dim, size in zip(dims, array.shape):
            fits &= size == (int(dim) if dim.isdigit() else sizes.setdefault(dim, size))
        if not fits:
            raise UserError(f"'{name}' holds {array.dtype} ({shape}), not {self.dtype.__name__} "
                            f"({' x '.join(map(str, expected)) or 'a single number'})")
        if self.finite and array.dtype.kind == "f" and not np.isfinite(array).all():
            raise UserError(f"'{name}' holds NaN or infinity")


class _Arrays(Format):
    """Declaration of named arrays; optional arrays may be None and are then omitted."""

    def __init__(self, fields: Mapping[str, Array]):
        self.fields = dict(fields)

    def converted(self, value: Mapping[str, np.ndarray | None]) -> dict[str, np.ndarray]:
        """Return the arrays that are not None, with their declared types.

        Raises:
            UserError: if an array is missing, unknown, or of another type or shape.
        """
        arrays = {}
        for name, array in value.items():
            if array is not None:
                field, arrays[name] = self.fields.get(name), np.asarray(array)
                if field is not None and field.dtype not in _FAMILIES:
                    arrays[name] = arrays[name].astype(field.dtype, copy=False)
        self.check(arrays)
        return arrays

    def check(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Raise UserError if an array is missing, unknown, or of another type or shape."""
        sizes: dict[str, int] = {}
        for name, field in self.fields.items():
            if name in arrays:
                field.check(name, arrays[name], sizes)
            elif not field.optional:
                raise UserError(f"it has no array '{name}'")
        unknown = set(arrays) - set(self.fields)
        if unknown:
            raise UserError(f"it has an unknown array '{min(unknown)}'")


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray], compressed: bool = False) -> None:
    """Write named arrays to a ``.npz`` file, not atomically.

    The content is serialised in memory first, because on a full disk ``np.savez`` leaves an open
    ``ZipFile``, which prints a traceback when it is deleted.
    """
    buffer = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(buffer, **arrays)
    path.write_bytes(buffer.getbuffer())


class Npz(_Arrays):
    """A ``.npz`` file of named arrays; values are mappings."""

    def write(self, path: Path, value: Mapping[str, np.ndarray | None]) -> None:
        save_arrays(path, self.converted(value))

    def read(self, path: Path, script: str) -> dict[str, np.ndarray]:
        arrays = read_arrays(path, "file", script)
        self.check(arrays)
        return arrays


@dataclasses.dataclass(frozen=True)
class Npy(Format):
    """A ``.npy`` file; values are arrays.

    Attributes:
        array: type and shape of the array.
    """

    array: Array

    def write(self, path: Path, value: np.ndarray) -> None:
        arrays = _Arrays({path.stem: self.array}).converted({path.stem: value})
        np.save(path, arrays[path.stem], allow_pickle=False)

    def read(self, path: Path, script: str) -> np.ndarray:
        array = read_array(path, script)
        self.array.check(path.stem, array, {})
        return array


class NpyFolder(_Arrays):
    """A folder of ``.npy`` files, one per array; values are mappings."""

    is_folder = True

    def file_names(self) -> tuple[str, ...]:
        return tuple(f"{name}.npy" for name in self.fields)

    def write(self, path: Path, value: Mapping[str, np.ndarray | None]) -> None:
        for name, array in self.converted(value).items():
            np.save(path / f"{name}.npy", array, allow_pickle=False)

    def read(self, path: Path, script: str) -> dict[str, np.ndarray]:
        arrays = {name: Npy(field).read(path / f"{name}.npy", script)
                  for name, field in self.fields.items()
                  if not field.optional or (path / f"{name}.npy").exists()}
        self.check(arrays)
        return arrays


@dataclasses.dataclass(frozen=True)
class Table(Format):
    """A CSV file; values are data frames. Only the declared columns are read. Writing a table that
    lacks one of them raises a ``ValueError``.

    Attributes:
        columns: type of each declared column, see ``common.tables.read_table``.
        gaps: columns that may have empty cells; None for all columns of type float.
        exact: write numbers with all digits; otherwise with six significant digits.
        whole: write only the declared columns.
    """

    columns: Mapping[str, type] = dataclasses.field(default_factory=dict)
    gaps: tuple[str, ...] | None = None
    exact: bool = False
    whole: bool = False

    def write(self, path: Path, value: pd.DataFrame) -> None:
        missing = set(self.columns) - set(value.columns)
        if missing:
            raise ValueError(f"the table has no column {min(missing)}")
        table = value[list(self.columns)] if self.whole else value
        table.to_csv(path, index=False, float_format=None if self.exact else "%.6g",
                     errors="backslashreplace")

    def read(self, path: Path, script: str) -> pd.DataFrame:
        gaps = self.gaps
        if gaps is None:
            gaps = tuple(name for name, kind in self.columns.items() if kind is float)
        return read_table(path, self.columns, gaps, script)


@dataclasses.dataclass(frozen=True)
class Json(Format):
    """A JSON file; values are mappings, lists or dataclasses.

    Attributes:
        cls: type of the values: dict, list or a dataclass.
        kinds: types of entries of a dict, see ``config.check_entries``.
        needed: keys that a dict must have.
    """

    cls: type = dict
    kinds: Mapping[str, object] = dataclasses.field(default_factory=dict)
    needed: tuple[str, ...] = ()

    def write(self, path: Path, value: Any) -> None:
        is_instance = dataclasses.is_dataclass(value) and not isinstance(value, type)
        content = dataclasses.asdict(value) if is_instance else value
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def read(self, path: Path, script: str) -> Any:
        content = read_json(path, script)
        if self.cls is dict:
            return check_entries(content, self.kinds, path.name, self.needed)
        if self.cls is list:
            if not isinstance(content, list):
                raise UserError("it is not a list")
            return content
        return typed(self.cls, content, path.name)


class Text(Format):
    """A UTF-8 text file; values are strings, in which surrogates, such as those of file names that
    are not UTF-8, are escaped."""

    def write(self, path: Path, value: str) -> None:
        path.write_text(value, encoding="utf-8", errors="backslashreplace")

    def read(self, path: Path, script: str) -> str:
        return read_bytes(path, written_by=script).decode(errors="replace")


class File(Format):
    """A file of any other kind, such as a figure or a video; values are bytes. Libraries that write
    such files themselves use ``ResultStore.file``."""

    def write(self, path: Path, value: bytes) -> None:
        path.write_bytes(value)

    def read(self, path: Path, script: str) -> bytes:
        return read_bytes(path, written_by=script)


@dataclasses.dataclass(frozen=True)
class Journal(Format):
    """A JSON Lines file to which rows are appended; values are lists of mappings.

    Attributes:
        fields: type of each field of a row: int, float, str, bool, list or dict.
    """

    fields: Mapping[str, type]

    def line(self, row: Mapping[str, Any]) -> str:
        """Format a row as one line of the file."""
        self._check(row)
        return json.dumps(dict(row), separators=(",", ":"), allow_nan=False) + "\n"

    def write(self, path: Path, value: list[Mapping[str, Any]]) -> None:
        path.write_text("".join(map(self.line, value)), encoding="utf-8")

    def read(self, path: Path, script: str) -> list[dict[str, Any]]:
        content = read_bytes(path, written_by=script)
        rows = []
        for number, line in enumerate(content[:content.rfind(b"\n") + 1].splitlines(), 1):
            try:
                row = json.loads(line)
                self._check(row)
            except (ValueError, AttributeError, RecursionError):
                raise UserError(f"line {number} is not a row of this file") from None
            rows.append(row)
        return rows

    def _check(self, row: Mapping[str, Any]) -> None:
        types = {name: type(value) for name, value in row.items()}
        if types != dict(self.fields):
            raise ValueError(f"{types} instead of {self.fields}")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A kind of file in a result folder.

    Attributes:
        path: relative path, with ``{}`` for each part of the item's key, or ``{:0>5}`` for a number
            padded with zeros.
        format: file format of the values.
        optional: whether a finished folder may lack this result.
        fallback: name of the entry that is read instead if a file of this entry is missing.
        choices: values that the last part of the key can have; empty for any.
    """

    path: str
    format: Format
    optional: bool = False
    fallback: str = ""
    choices: tuple[str, ...] = ()

    def read(self, path: Path, script: str) -> Any:
        """Read and check a file of this entry.

        Args:
            script: command that writes the file, for the message about a missing file.

        Raises:
            UserError: if the file is missing or damaged; the message names it.
        """
        try:
            return self.format.read(path, script)
        except UserError as error:
            if str(path) in str(error):
                raise
            raise UserError(f"{path} is damaged: {error}; delete it, so that it is written again"
                            ) from None

    def pattern(self) -> str:
        """Return a ``Path.glob`` pattern that includes the files of this entry. It may also match
        other files; use ``names`` to decide which files to delete."""
        return re.sub(r"({[^}]*})+", "*", self.path) + ("/*" if self.format.is_folder else "")

    def names(self, path: PurePath) -> bool:
        """Return whether a relative path is one that this entry gives to its files: numbers that
        are padded with zeros are numbers, and keys neither are hidden nor contain a slash."""
        return self._regex.fullmatch(path.as_posix()) is not None

    @functools.cached_property
    def _regex(self) -> re.Pattern[str]:
        *parts, last = re.split(r"({[^}]*})", self.path)
        last = re.escape(last)
        for place, part in reversed([*enumerate(parts)]):
            width = re.fullmatch(r"{:0>(\d+)}", part)
            if self.choices and place == len(parts) - 1:
                part = "|".join(map(re.escape, self.choices))
            elif width:
                part = rf"\d{{{width[1]}}}|[1-9]\d{{{width[1]},}}"
            elif part == "{}":
                before = parts[place - 1]  # the parts are texts and placeholders in turn
                begins_name = before.endswith("/") or (place == 1 and not before)
                part = r"(?!\.)[^/]*" if begins_name else "[^/]*"
            else:
                part = re.escape(part)
            last = f"(?:{part}){last}"
        inside = self.format.file_names()
        return re.compile(last + (f"/(?:{'|'.join(map(re.escape, inside))})" if inside else ""))


@dataclasses.dataclass(frozen=True)
class Schema:
    """The files of one kind of result folder.

    Attributes:
        what: name of the contents, for messages, such as "conditions".
        script: command that writes the folder, for messages.
        items: entries that are computed one by one and kept when a run is resumed.
        results: entries computed from the items; deleted when the folder is opened for writing.
        informative: settings in which a resumed run or another shard may differ.
        growing: name of a setting that maps keys of items to the settings of each item; keys may be
            added later. Empty if there is none.
        growing_items: names of the entries whose items have these keys; the settings of existing
            items must not change.
        settings_name: name of the settings file.
        flag: flag that chooses the folder, for messages.
        replaced: whether the folder has no items, and its results are replaced together.
        setting_types: types of the settings that are read back, see ``config.check_entries``.
    """

    what: str
    script: str
    items: Mapping[str, Entry] = dataclasses.field(default_factory=dict)
    results: Mapping[str, Entry] = dataclasses.field(default_factory=dict)
    informative: tuple[str, ...] = ("versions", "agent_file")
    growing: str = ""
    growing_items: tuple[str, ...] = ()
    settings_name: str = SETTINGS_NAME
    flag: str = "--output_dir"
    replaced: bool = False
    setting_types: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def read_settings(self, path: Path, needed: Collection[str] = ()) -> dict:
        """Read a settings file; return {} if it is missing.

        Args:
            needed: settings that an existing file must have.

        Raises:
            UserError: if the file is damaged, or a setting is missing or of another type; the
                message names it.
        """
        settings = read_description(path)
        check_entries(settings, {**_SETTING_TYPES, **self.setting_types}, path,
                      needed if settings else ())
        check_entries(settings.get("env") or {}, _ENV_TYPES, f"{path}, 'env'")
        return settings

    def entry(self, name: str) -> Entry:
        return self.items[name] if name in self.items else self.results[name]

    def names(self, path: PurePath) -> bool:
        """Return whether a relative path is one that this schema gives to a file."""
        entries = {"settings": Entry(self.settings_name, File()), **self.items, **self.results}
        return any(entry.names(path) for entry in entries.values())

    def with_keys(self, settings: Mapping[str, Any]) -> Schema:
        """Return the schema in which the ``growing`` keys in the settings of a folder are the only
        keys of the ``growing_items``."""
        known = settings.get(self.growing)
        if not self.growing or not isinstance(known, dict) or not known:
            return self
        return dataclasses.replace(self, items={
            name: dataclasses.replace(entry, choices=tuple(map(str, known)))
            if name in self.growing_items else entry for name, entry in self.items.items()})
