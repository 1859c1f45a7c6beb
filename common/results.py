"""Results on disk: declared once, then computed, resumed, divided among jobs and read in one way.

A package declares the files of an output folder as a :class:`Schema`, a table of entries with a
path and a format each. A :class:`ResultStore` opens a folder of this schema, computes the items
that are missing, and reads what is there with its types checked::

    SCORES = Schema("tracking scores", "python -m maze.channels", items={
        "scores": Entry("steps/{}.csv", Table({"channel": int, "score": float}))},
        results={"report": Entry("report.md", Text())})

    store = ResultStore(folder, SCORES)
    store.open({"agent_sha256": digest, "seed": 0}, overwrite=False)
    table = store.compute("scores", "forks", function=lambda: score(policy))
    store.write("report", value=summary(table))

*Items* are complete under their final name and are kept when a run is resumed. *Results* are made
from the items; opening the folder removes them, so that no reader finds old results next to new
items. Every file is written atomically. A folder belongs to the settings that it was opened with:
a run with other settings is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd

from common.config import typed
from common.description import read_description
from common.errors import UserError
from common.files import (
    append_or_nothing,
    atomic_folder,
    atomic_path,
    read_array,
    read_arrays,
    read_bytes,
    read_json,
    save_json,
)
from common.shards import WHOLE, Shard, ShardNotes, SharedFolder
from common.tables import read_table

SETTINGS_NAME = "settings.json"
_FAMILIES = (np.floating, np.integer, np.number, np.str_)  # types that are checked, not made


class Format(Protocol):
    """How the value of an entry is written and read."""

    is_folder: bool

    def write(self, path: Path, value: Any) -> None:
        """Write a value to a temporary path."""

    def read(self, path: Path, script: str) -> Any:
        """Read and check a value.

        Args:
            script: command that writes a missing file, for the message.

        Raises:
            UserError: if the file is missing or damaged.
        """


@dataclasses.dataclass(frozen=True)
class Array:
    """Type and shape of an array.

    Attributes:
        dtype: type that is written. A family of types such as ``np.floating`` is only checked.
        dims: one word per dimension: a number, or a name. Dimensions of one name have one size in
            all arrays of an entry.
        optional: the array may be missing.
        finite: refuse NaN and infinity.
    """

    dtype: type
    dims: str = ""
    optional: bool = False
    finite: bool = True

    def check(self, name: str, array: np.ndarray, sizes: dict[str, int]) -> None:
        """Raise if an array does not fit.

        Args:
            sizes: sizes of the named dimensions so far; those of this array are added.

        Raises:
            UserError: naming the array.
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


class _Arrays:
    """Named arrays; entries that are None are left out if they are optional."""

    def __init__(self, fields: Mapping[str, Array]):
        self.fields = dict(fields)

    def converted(self, value: Mapping[str, np.ndarray | None]) -> dict[str, np.ndarray]:
        """Return the arrays that are not None, with their declared types.

        Raises:
            UserError: if one is missing, unknown, or does not fit.
        """
        arrays = {}
        for name, array in value.items():
            if array is not None:
                field, array = self.fields.get(name), np.asarray(array)
                is_family = field is None or field.dtype in _FAMILIES
                arrays[name] = array if is_family else array.astype(field.dtype, copy=False)
        self.check(arrays)
        return arrays

    def check(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Raise UserError if an array is missing, unknown, or does not fit."""
        sizes: dict[str, int] = {}
        for name, field in self.fields.items():
            if name in arrays:
                field.check(name, arrays[name], sizes)
            elif not field.optional:
                raise UserError(f"it has no array '{name}'")
        unknown = set(arrays) - set(self.fields)
        if unknown:
            raise UserError(f"it has an unknown array '{min(unknown)}'")


class Npz(_Arrays):
    """A ``.npz`` file of named arrays; values are mappings."""

    is_folder = False

    def write(self, path: Path, value: Mapping[str, np.ndarray | None]) -> None:
        np.savez(path, **self.converted(value))

    def read(self, path: Path, script: str) -> dict[str, np.ndarray]:
        if not path.exists():
            read_bytes(path, written_by=script)  # raises, and names the script
        arrays = read_arrays(path, "file")
        self.check(arrays)
        return arrays


class NpyFolder(_Arrays):
    """A folder of ``.npy`` files, one per array; values are mappings."""

    is_folder = True

    def write(self, path: Path, value: Mapping[str, np.ndarray | None]) -> None:
        for name, array in self.converted(value).items():
            np.save(path / f"{name}.npy", array, allow_pickle=False)

    def read(self, path: Path, script: str) -> dict[str, np.ndarray]:
        arrays = {name: read_array(path / f"{name}.npy", written_by=script)
                  for name, field in self.fields.items()
                  if not field.optional or (path / f"{name}.npy").exists()}
        self.check(arrays)
        return arrays


@dataclasses.dataclass(frozen=True)
class Npy:
    """A ``.npy`` file; values are arrays."""

    array: Array
    is_folder = False

    def write(self, path: Path, value: np.ndarray) -> None:
        arrays = _Arrays({"array": self.array}).converted({"array": value})
        np.save(path, arrays["array"], allow_pickle=False)

    def read(self, path: Path, script: str) -> np.ndarray:
        array = read_array(path, written_by=script)
        self.array.check("array", array, {})
        return array


@dataclasses.dataclass(frozen=True)
class Table:
    """A CSV file; values are data frames, of which the declared columns are read.

    Attributes:
        columns: type of each column that is read, see ``common.tables.read_table``.
        gaps: columns that may have empty cells; None for all columns of type float.
        exact: write numbers to the last bit, otherwise with six digits.
        whole: write the declared columns alone.
    """

    columns: Mapping[str, type] = dataclasses.field(default_factory=dict)
    gaps: tuple[str, ...] | None = None
    exact: bool = False
    whole: bool = False
    is_folder = False

    def write(self, path: Path, value: pd.DataFrame) -> None:
        missing = set(self.columns) - set(value.columns)
        if missing:
            raise ValueError(f"the table has no column {min(missing)}")
        table = value[list(self.columns)] if self.whole else value
        table.to_csv(path, index=False, float_format=None if self.exact else "%.6g")

    def read(self, path: Path, script: str) -> pd.DataFrame:
        gaps = self.gaps
        if gaps is None:
            gaps = tuple(name for name, kind in self.columns.items() if kind is float)
        return read_table(path, self.columns, gaps, script)


@dataclasses.dataclass(frozen=True)
class Json:
    """A JSON file; values are mappings, or dataclasses of the type ``cls``."""

    cls: type = dict
    is_folder = False

    def write(self, path: Path, value: Any) -> None:
        content = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
        path.write_text(json.dumps(content, indent=1) + "\n")

    def read(self, path: Path, script: str) -> Any:
        if not path.exists():
            read_bytes(path, written_by=script)
        content = read_json(path)
        if self.cls in (dict, list):
            if not isinstance(content, self.cls):
                raise UserError(f"it holds no {'mapping' if self.cls is dict else 'list'}")
            return content
        return typed(self.cls, content, path.name)


class Text:
    """A UTF-8 text file; values are strings."""

    is_folder = False

    def write(self, path: Path, value: str) -> None:
        path.write_text(value)

    def read(self, path: Path, script: str) -> str:
        return read_bytes(path, written_by=script).decode(errors="replace")


class File:
    """A file of any other kind, such as a figure or a video: see ``ResultStore.file``."""

    is_folder = False

    def write(self, path: Path, value: bytes) -> None:
        path.write_bytes(value)

    def read(self, path: Path, script: str) -> bytes:
        return read_bytes(path, written_by=script)


@dataclasses.dataclass(frozen=True)
class Journal:
    """A file of JSON lines that grows by one row at a time; values are lists of mappings.

    Attributes:
        fields: type of each field of a row, one of int, float, str, bool, list and dict.
    """

    fields: Mapping[str, type]
    is_folder = False

    def line(self, row: Mapping[str, Any]) -> str:
        self._check(row)
        return json.dumps(dict(row), separators=(",", ":"), allow_nan=False) + "\n"

    def write(self, path: Path, value: list[Mapping[str, Any]]) -> None:
        path.write_text("".join(map(self.line, value)))

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
        found = {name: type(value) for name, value in row.items()}
        if found != dict(self.fields):
            raise ValueError(f"{found} instead of {self.fields}")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A kind of file in a result folder.

    Attributes:
        path: relative path, with ``{}`` for each part of the item's key.
        format: how values are stored.
        optional: a finished folder may lack this result.
    """

    path: str
    format: Format
    optional: bool = False

    def pattern(self) -> str:
        """Pattern of ``Path.glob`` for the files of this entry."""
        return self.path.replace("{}", "*") + ("/*" if self.format.is_folder else "")


@dataclasses.dataclass(frozen=True)
class Schema:
    """The files of one kind of result folder.

    Attributes:
        what: name of the contents, for messages: "arms".
        script: command that writes them, for messages.
        items: computed one by one and kept when a run is resumed.
        results: made from the items; removed when the folder is opened for writing.
        informative: settings in which a resumed run or another shard may differ.
        growing: setting that maps the keys of items to what made each of them. More keys may be
            added later; an item that is there must have been made in the same way.
        growing_items: entry that these items belong to.
        settings_name: name of the settings file.
        flag: flag that chooses the folder, for messages.
    """

    what: str
    script: str
    items: Mapping[str, Entry]
    results: Mapping[str, Entry] = dataclasses.field(default_factory=dict)
    informative: tuple[str, ...] = ("versions", "agent_file")
    growing: str = ""
    growing_items: str = ""
    settings_name: str = SETTINGS_NAME
    flag: str = "--output_dir"

    def entry(self, name: str) -> Entry:
        return self.items[name] if name in self.items else self.results[name]

    def patterns(self) -> tuple[str, ...]:
        """Patterns of ``Path.glob`` for all files of such a folder."""
        return (self.settings_name, *(entry.pattern() for entries in (self.items, self.results)
                                      for entry in entries.values()))


class ResultStore:
    """Reads and writes the result folder of a schema.

    Args:
        path: the folder. It need not exist.
    """

    def __init__(self, path: Path, schema: Schema):
        self.path, self.schema = Path(path), schema
        self._shared: SharedFolder | None = None

    @property
    def settings_file(self) -> Path:
        return self.path / self.schema.settings_name

    def file_of(self, name: str, *key: object) -> Path:
        """Path of an item, whether it exists or not."""
        return self.path / self.schema.entry(name).path.format(*key)

    def has(self, name: str, *key: object) -> bool:
        """Whether an item is complete on disk."""
        return self.file_of(name, *key).exists()

    def keys(self, name: str) -> list[str]:
        """Keys of the items of an entry with one ``{}`` that are on disk, sorted."""
        before, _, after = self.schema.entry(name).path.partition("{}")
        found = (str(path.relative_to(self.path)) for path in self.path.glob(before + "*" + after))
        return sorted(text[len(before):len(text) - len(after)] for text in found
                      if not text[len(before):].startswith("."))

    def settings(self) -> dict:
        """Settings that the folder was made with.

        Raises:
            UserError: if they are missing or damaged.
        """
        found = read_description(self.settings_file)
        if not found:
            raise UserError(f"there is no file {self.settings_file}, which {self.schema.script} "
                            "writes")
        return found

    def read(self, name: str, *key: object) -> Any:
        """Read and check an item or a result.

        Raises:
            UserError: if the file is missing or damaged, or the folder holds shards that have not
                been joined yet.
        """
        path = self.file_of(name, *key)
        if name in self.schema.results and ShardNotes(self.path).exist():
            raise UserError(f"{self.path} holds shards that are not joined; run "
                            f"{self.schema.script} with --join")
        try:
            return self.schema.entry(name).format.read(path, self.schema.script)
        except UserError as error:
            if str(path) in str(error):
                raise
            raise UserError(f"{path} is damaged: {error}; delete it to have it made again"
                            ) from None

    # Writing

    def open(self, settings: dict, overwrite: bool = False, shard: Shard = WHOLE,
             divided: dict | None = None, join: bool = False,
             needed: Collection[tuple] = ()) -> None:
        """Create the folder, or resume with the items that it holds; results are removed.

        Args:
            settings: everything that the items depend on, and facts that are worth keeping.
            overwrite: delete what the folder holds.
            shard: part of the items that this process computes.
            divided: what else decides which shard computes which item.
            join: resume with the items of all shards, which must have finished.
            needed: entry and key of each item without which joined shards are not finished. Where
                items may be added to a folder, later shards must not stop at its results.

        Raises:
            FolderInUse: if another process writes to the folder.
            UserError: if the folder holds anything else, or was made with other settings.
        """
        schema, growing = self.schema, self.schema.growing
        known: dict = {}
        if growing:
            before = {} if overwrite else read_description(self.settings_file).get(growing, {})
            known = {key: made for key, made in before.items()
                     if self.has(schema.growing_items, key)}
            for key, made in settings[growing].items():
                if known.get(key, made) != json.loads(json.dumps(made)):
                    raise UserError(
                        f"{self.path} holds '{key}' of the {schema.what}, but made otherwise; "
                        f"choose another {schema.flag}, or give --overwrite to throw it away")
            is_whole = known.keys() == settings[growing].keys()
            settings = {**settings, growing: {**known, **settings[growing]}}
        else:
            is_whole = True
        self._shared = SharedFolder(
            self.settings_file, settings, schema.patterns(), schema.what, schema.flag, overwrite,
            (*schema.informative, *([growing] if growing else [])), shard, divided,
            lambda: is_whole and self._has_results() and all(self.has(*item) for item in needed),
            join)
        if self._shared.is_open:
            for entry in schema.results.values():
                for path in self.path.glob(entry.pattern()):
                    path.unlink()

    @property
    def is_open(self) -> bool:
        """Whether anything can be left to compute; False for a shard of results that are joined."""
        return self._shared is not None and self._shared.is_open

    def write(self, name: str, *key: object, value: Any) -> None:
        """Write an item or a result of the open folder.

        Raises:
            UserError: if the folder was deleted, or an array does not fit the schema.
        """
        path, form = self.file_of(name, *key), self.schema.entry(name).format
        if form.is_folder:
            self.check()
            with atomic_folder(path) as temporary:
                form.write(temporary, value)
        else:
            with self.file(name, *key) as temporary:
                form.write(temporary, value)

    @contextlib.contextmanager
    def file(self, name: str, *key: object) -> Iterator[Path]:
        """Yield a temporary path; the file appears under its name if the body succeeds.

        Raises:
            UserError: if the folder was deleted.
        """
        self.check()
        through = self._shared.through if self._shared is not None else None
        with atomic_path(self.file_of(name, *key), through=through) as temporary:
            yield temporary

    def compute(self, name: str, *key: object, function: Callable[[], Any]) -> Any:
        """Return an item, which is computed and written if it is missing.

        The value is read from the file in either case. A resumed run therefore has the same
        numbers, to the last bit, as a run that was never stopped.

        Raises:
            UserError: if the file is damaged, or the folder was deleted.
        """
        if not self.has(name, *key):
            self.write(name, *key, value=function())
        return self.read(name, *key)

    def rows(self, name: str, *key: object) -> list[dict[str, Any]]:
        """Rows of a journal so far. A line that a killed process left incomplete is removed.

        Raises:
            UserError: if the file is damaged, or the folder was deleted.
        """
        path = self.file_of(name, *key)
        if not path.exists():
            self.write(name, *key, value=[])
        content = read_bytes(path)
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)
        return self.read(name, *key)

    def append(self, name: str, *key: object, row: Mapping[str, Any]) -> None:
        """Add a row to a journal that ``rows`` has opened.

        Raises:
            UserError: if the folder was deleted.
        """
        self.check()
        append_or_nothing(self.file_of(name, *key), self.schema.entry(name).format.line(row))

    def remove(self, name: str, *key: object) -> None:
        """Delete a file of the open folder, if it is there."""
        self.check()
        self.file_of(name, *key).unlink(missing_ok=True)

    def finish(self) -> None:
        """Record that this process has written all its items."""
        self._shared.finish()

    def join(self, make: Callable[[dict], None]) -> None:
        """Make the results of the items that all shards have computed, unless they are there.

        Args:
            make: writes the results; called with what the shards were opened with as ``divided``.

        Raises:
            UserError: naming a shard that is missing.
        """
        def write(settings: dict, through: Path) -> None:
            make(settings.pop("divided"))
            save_json(self.settings_file, settings, through=through)

        ShardNotes(self.path).join(write, self._is_joined)

    def _is_joined(self) -> bool:
        return self.settings_file.exists() and self._has_results()

    def _has_results(self) -> bool:
        return all((self.path / entry.path).exists() for entry in self.schema.results.values()
                   if not entry.optional and "{}" not in entry.path)

    def check(self) -> None:
        """Raise UserError if the open folder was deleted or moved."""
        if self._shared is not None:  # results of joined shards are written without a lock
            self._shared.check()
