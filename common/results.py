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
a run with other settings is refused. A folder of figures or of a page has no items: it is written
and replaced as a whole, see :meth:`ResultStore.replace`. Analyses that store arrays for several
numbers of samples next to each other use ``common.step_results``.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import (
    append_or_nothing,
    atomic_folder,
    atomic_path,
    read_bytes,
    read_description,
    remove_folder,
    save_json,
    unnamed_file,
    versions,
)
from common.schemas import (
    SETTINGS_NAME,
    Array,
    Entry,
    File,
    Format,
    Journal,
    Json,
    Npy,
    NpyFolder,
    Npz,
    Schema,
    Table,
    Text,
)
from common.shards import WHOLE, Shard, ShardNotes, SharedFolder

__all__ = [
    "SETTINGS_NAME", "Array", "Entry", "File", "Format", "Journal", "Json", "Npy", "NpyFolder",
    "Npz", "ResultStore", "Schema", "Table", "Text"]


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
        before, after = re.split(r"{.*?}", self.schema.entry(name).path)
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

    def read(self, name: str, *key: object, form: Format | None = None) -> Any:
        """Read and check an item or a result.

        Args:
            form: format of the part that is needed; by default everything is read.

        Raises:
            UserError: if the file is missing or damaged, or the folder holds shards that have not
                been joined yet.
        """
        path = self.file_of(name, *key)
        if name in self.schema.results and ShardNotes(self.path).exist():
            raise UserError(f"{self.path} holds shards that are not joined; run "
                            f"{self.schema.script} with --join")
        try:
            return (form or self.schema.entry(name).format).read(path, self.schema.script)
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
                     if any(self.has(name, key) for name in schema.growing_items)}
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
        form = self.schema.entry(name).format
        assert isinstance(form, Journal)
        append_or_nothing(self.file_of(name, *key), form.line(row))

    def remove(self, name: str, *key: object) -> None:
        """Delete a file of the open folder, if it is there."""
        self.check()
        self.file_of(name, *key).unlink(missing_ok=True)

    def finish(self) -> None:
        """Record that this process has written all its items."""
        if self._shared is not None:
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
                   if not entry.optional and "{" not in entry.path)

    def check(self) -> None:
        """Raise UserError if the open folder was deleted or moved."""
        if self._shared is not None:  # results of joined shards are written without a lock
            self._shared.check()

    # Replacing the folder as a whole

    def check_replaceable(self) -> None:
        """Raise unless the folder is new, empty, or an earlier output of the same kind.

        Settings name the kind and the files that were written. Those of older outputs do not; such
        a folder may hold files of the schema only.

        Raises:
            UserError: if the folder is a link, holds anything else, or holds files that were added
                later.
        """
        kind, other_folder = self.schema.what, f"choose another {self.schema.flag}"
        if self.path.is_symlink():
            raise UserError(f"{self.path} is a link, which cannot be replaced; {other_folder}")
        if not self.path.exists() or not any(self.path.iterdir()):
            return
        settings = read_description(self.settings_file)
        if not settings:
            raise UserError(f"{self.path} holds other data; {other_folder}")
        kind_there = settings.get("made_by", kind).replace("clarity.", "attribution.")
        if kind_there != kind:
            raise UserError(f"{self.path} holds the {kind_there}, not the {kind}; {other_folder}")
        patterns = self.schema.patterns()
        if "files" in settings:
            patterns = (self.schema.settings_name, *map(glob.escape, settings["files"]))
        foreign = unnamed_file(self.path, patterns)
        if foreign:
            raise UserError(f"{foreign} does not belong to the {kind} and would be deleted; move "
                            f"it elsewhere, or {other_folder}")

    @contextlib.contextmanager
    def replace(self, settings: dict) -> Iterator[Path]:
        """Yield a hidden folder that replaces an earlier output if the body succeeds.

        Args:
            settings: everything that the output depends on, which is stored with it.
        """
        with atomic_folder(self.path) as temporary:
            yield temporary
            files = sorted(str(path.relative_to(temporary)) for path in temporary.rglob("*")
                           if path.is_file())
            save_json(temporary / self.schema.settings_name, {
                "made_by": self.schema.what, **settings, "versions": versions(), "files": files})
            if self.path.exists():
                self.check_replaceable()
                remove_folder(self.path)
