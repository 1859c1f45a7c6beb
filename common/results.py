"""Result folders: declared by a schema, resumable, divisible among jobs, and read with checks.

A package declares the files of an output folder as a :class:`Schema`, a table of entries, each with
a path and a format. A :class:`ResultStore` opens a folder of this schema, computes missing items,
and reads existing ones with checked types::

    SCORES = Schema("tracking scores", "python -m maze.channels", items={
        "scores": Entry("steps/{}.csv", Table({"channel": int, "score": float}))},
        results={"report": Entry("report.md", Text())})

    store = ResultStore(folder, SCORES)
    store.open({"agent_sha256": digest, "seed": 0}, overwrite=False)
    table = store.compute("scores", "forks", function=lambda: score(policy))
    store.write("report", value=summary(table))

An *item* appears under its final name only when it is complete, and is kept when a run is resumed.
A *result* is computed from the items. Opening the folder for writing deletes the results, so that
old results never appear next to new items. Every file is written atomically. A folder belongs to
the settings with which it was first opened; opening it with other settings is an error.

Folders of figures or of a page have no items. They are written and replaced as a whole, see
:meth:`ResultStore.replace`. Analyses that store arrays for several numbers of samples in one folder
use ``common.step_results``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from common.errors import UserError
from common.files import (
    append_or_nothing,
    atomic_folder,
    atomic_path,
    named_errors,
    read_bytes,
    read_description,
    save_json,
    temporary_path,
    versions,
)
from common.folders import foreign_file, free_path, remove_folder, replace_folder
from common.locks import LOCK_NAME, FolderLock, check_unlocked
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
from common.shards import (
    DIVIDED,
    NOTES_NAME,
    WHOLE,
    Shard,
    ShardNotes,
    is_note,
    require_equal,
)

__all__ = [
    "SETTINGS_NAME", "Array", "Entry", "File", "Format", "Journal", "Json", "Npy", "NpyFolder",
    "Npz", "ResultStore", "Schema", "Table", "Text"]


class ResultStore:
    """Reader and writer of a result folder.

    Methods select a file by the name of its entry in the schema, and a key: the values for the
    ``{}`` in the path of the entry.

    Args:
        path: the folder, which need not exist.
        schema: schema of the folder.

    Attributes:
        is_open: whether the folder was opened for writing; stays False for a shard if the results
            of all shards exist already.
    """

    def __init__(self, path: Path, schema: Schema):
        self.path, self.schema, self.is_open = Path(path), schema, False
        self._shard = WHOLE
        self._lock: FolderLock | None = None

    @property
    def settings_file(self) -> Path:
        return self.path / self.schema.settings_name

    def file_of(self, name: str, *key: object) -> Path:
        """Return the path of an item or result, which need not exist."""
        return self.path / self.schema.entry(name).path.format(*key)

    def has(self, name: str, *key: object) -> bool:
        """Return whether an item or result exists, and hence is complete."""
        return self.file_of(name, *key).exists()

    def keys(self, name: str) -> list[str]:
        """Return the keys of all existing items of an entry, as sorted strings. The entry's path
        must have one ``{}``."""
        before, after = re.split(r"{.*?}", self.schema.entry(name).path)
        paths = (str(path.relative_to(self.path)) for path in self.path.glob(before + "*" + after))
        return sorted(path[len(before):len(path) - len(after)] for path in paths
                      if not path[len(before):].startswith("."))

    def settings(self, *needed: str) -> dict:
        """Read the settings of the run that wrote the folder.

        Args:
            needed: settings that must be there.

        Raises:
            UserError: if the settings file is missing or damaged, or a setting is missing.
        """
        settings = self.schema.read_settings(self.settings_file, needed)
        if not settings:
            raise UserError(f"there is no file {self.settings_file}, which {self.schema.script} "
                            "writes")
        return settings

    def read(self, name: str, *key: object, form: Format | None = None) -> Any:
        """Read and check an item or a result.

        Args:
            name: name of the entry in the schema.
            key: values for the ``{}`` in the path of the entry.
            form: format to read with instead of the entry's, for example to read only a part.

        Raises:
            UserError: if the file is missing or damaged, or a result is read from a folder whose
                shards have not been joined.
        """
        path = self.file_of(name, *key)
        if name in self.schema.results and ShardNotes(self.path).exist():
            raise UserError(f"{self.path} holds shards that are not joined; run "
                            f"{self.schema.script} with --join")
        entry = self.schema.entry(name)
        if form is not None:
            entry = dataclasses.replace(entry, format=form)
        return entry.read(path, self.schema.script)

    # Writing

    def open(self, settings: dict, overwrite: bool = False, shard: Shard = WHOLE,
             divided: dict | None = None, join: bool = False,
             needed: Collection[tuple] = ()) -> None:
        """Create the folder, or resume with its existing items; results are deleted.

        A single process locks the folder and writes the settings immediately. A shard locks only
        its state folder, see ``common.shards``; the settings are written when shards are joined.

        Args:
            settings: everything that the items depend on, and further facts to store.
            overwrite: delete the previous contents of the folder; an error for shards.
            shard: part of the items that this process computes.
            divided: settings, such as the number of items, that determine which shard computes
                which item; only shards store them.
            join: join the shards, which must all have finished, and resume with their items.
            needed: entry and key of each item of this run. If any of them is missing, a shard
                computes its part even if the folder already has results.

        Raises:
            FolderInUse: if another process writes to the folder.
            UserError: if the folder holds other data, holds items computed with other settings, or
                is divided into another number of shards; or if ``overwrite`` is true and a file is
                not in the schema.
        """
        schema, growing, notes = self.schema, self.schema.growing, ShardNotes(self.path)
        before = {} if overwrite else read_description(self.settings_file).get(growing, {})
        known = {key: item_settings for key, item_settings in before.items()
                 if any(self.has(name, key) for name in schema.growing_items)}
        added = settings.get(growing, {})
        for key, item_settings in added.items():
            if known.get(key, item_settings) != json.loads(json.dumps(item_settings)):
                raise UserError(
                    f"{self.path} holds '{key}' of the {schema.what} with other settings; "
                    f"choose another {schema.flag}, or give --overwrite to delete it")
        if growing:
            settings = {**settings, growing: {**added, **known}}  # in the order of this run
        shard_settings = {**settings, DIVIDED: divided or {}}
        way_out = f"choose another {schema.flag}, or delete the folder"
        self.is_open, self._shard, self._lock = True, shard, None
        if overwrite and (join or shard != WHOLE):
            raise UserError(f"--overwrite would delete the files of other shards in {self.path}; "
                            f"leave it out, and {way_out}")
        if join:
            notes.join(lambda stored, through: self._join_settings(stored, shard_settings, through),
                       self.settings_file.exists)
        if shard == WHOLE:
            if notes.exist() and not overwrite:
                raise UserError(f"{self.path} holds shards that are not joined; run this with "
                                f"--join, or {way_out}")
            self._lock_whole(settings, overwrite)
        else:
            check_unlocked(self.path)
            stored = self._check_contents(settings, way_out)
            self.path.mkdir(parents=True, exist_ok=True)
            if (stored and not notes.exist() and known.keys() == added.keys()
                    and self._has_results() and all(self.has(*item) for item in needed)):
                self.is_open = False
                return
            self._lock = notes.begin(shard, shard_settings, way_out, sorted(self._informative))
        for entry in schema.results.values():
            for path in self.path.glob(entry.pattern()):
                if entry.names(path.relative_to(self.path)):
                    path.unlink()

    @property
    def _informative(self) -> set[str]:
        return {*self.schema.informative, self.schema.growing} - {""}

    def _lock_whole(self, settings: dict, overwrite: bool) -> None:
        """Lock the folder and write the settings."""
        what, flag = self.schema.what, self.schema.flag
        if overwrite and self.path.exists():
            lock = FolderLock(self.path)  # held until the folder is gone
            other = foreign_file(self.path, self.ownership())
            if other:
                raise UserError(f"{other} does not belong to {what}, and --overwrite deletes "
                                f"nothing else; move it elsewhere, or choose another {flag}")
            remove_folder(self.path)
            del lock
        way_out = f"choose another {flag}, or give --overwrite to delete it"
        self._check_contents(settings, way_out)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self.path)
        self._check_contents(settings, way_out)  # again: another process may have written them
        save_json(self.settings_file, settings)

    def _check_contents(self, settings: dict, way_out: str) -> dict:
        """Return the settings in the folder, which must equal ``settings``; {} for a new folder.

        Raises:
            UserError: if the folder holds other data, or items computed with other settings.
        """
        stored = read_description(self.settings_file)
        files = set(os.listdir(self.path)) if self.path.exists() else set()
        if not stored and files - {LOCK_NAME, NOTES_NAME} and not ShardNotes(self.path).exist():
            raise UserError(f"{self.path} holds other data; {way_out}")
        if stored:
            require_equal(stored, settings, self._informative,
                          f"{self.path} holds {self.schema.what}", way_out)
        return stored

    def _join_settings(self, stored: dict, settings: dict, through: Path) -> None:
        """Write the settings stored by the shards, which must equal the given settings.

        Args:
            through: folder for temporary files.
        """
        require_equal(stored, settings, self._informative, f"{self.path} holds shards",
                      "give --join with their flags")
        stored.pop(DIVIDED, None)
        save_json(self.settings_file, stored, through=through)

    def ownership(self) -> Callable[[PurePath], bool]:
        """Return the test by which files of the folder are deleted or replaced, given their path in
        the folder.

        A file is the folder's own if the settings of an output that was replaced as a whole list
        it, or if its name is one of the schema's, a lock or the state of a shard.
        """
        settings: dict = {}
        with contextlib.suppress(UserError):  # damaged settings list nothing
            settings = read_description(self.settings_file)
        files = settings.get("files")
        if self.schema.replaced and isinstance(files, list):
            listed = {self.schema.settings_name, *map(str, files)}
            return lambda path: path.as_posix() in listed
        schema = self.schema.with_keys(settings)
        return lambda path: (path.as_posix() == LOCK_NAME or is_note(path) or schema.names(path))

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
        """Yield a temporary path, which is renamed to the file's path if the block succeeds.

        Raises:
            UserError: if the folder was deleted.
        """
        self.check()
        through = self._lock.folder if self._lock is not None and self._shard != WHOLE else None
        with atomic_path(self.file_of(name, *key), through=through) as temporary:
            yield temporary

    def compute(self, name: str, *key: object, function: Callable[[], Any]) -> Any:
        """Return an item; compute and write it first if it is missing.

        The value is always read from the file, so the results of a resumed run are identical, to
        the last bit, to those of an uninterrupted run.

        Args:
            function: computes the item.

        Raises:
            UserError: if the file is damaged, or the folder was deleted.
        """
        if not self.has(name, *key):
            self.write(name, *key, value=function())
        return self.read(name, *key)

    def rows(self, name: str, *key: object) -> list[dict[str, Any]]:
        """Return the rows of a journal; create it if missing, and delete an incomplete last line.

        Raises:
            UserError: if the file is damaged, or the folder was deleted.
        """
        path = self.file_of(name, *key)
        if not path.exists():
            self.write(name, *key, value=[])
        content = read_bytes(path)
        length = content.rfind(b"\n") + 1
        if length < len(content):
            os.truncate(path, length)
        return self.read(name, *key)

    def append(self, name: str, *key: object, row: Mapping[str, Any]) -> None:
        """Append a row to a journal; ``rows`` must have been called before.

        Raises:
            UserError: if the folder was deleted.
        """
        self.check()
        form = self.schema.entry(name).format
        assert isinstance(form, Journal)
        append_or_nothing(self.file_of(name, *key), form.line(row))

    def remove(self, name: str, *key: object) -> None:
        """Delete an item or a result of the open folder, if it exists."""
        self.check()
        self.file_of(name, *key).unlink(missing_ok=True)

    def finish(self) -> None:
        """Record that this process has written all items of its shard; no effect without shards."""
        if self.is_open and self._shard != WHOLE:
            ShardNotes(self.path).finish(self._shard)

    def join(self, make: Callable[[dict], None]) -> None:
        """Compute the results from the items of all shards, unless the results exist.

        Args:
            make: writes the results; called with the ``divided`` settings given to ``open``.

        Raises:
            UserError: if a shard is missing or unfinished; the message names it.
        """
        def write(settings: dict, through: Path) -> None:
            make(settings.pop(DIVIDED, {}))
            save_json(self.settings_file, settings, through=through)

        ShardNotes(self.path).join(
            write, lambda: self.settings_file.exists() and self._has_results())

    def _has_results(self) -> bool:
        return all((self.path / entry.path).exists() for entry in self.schema.results.values()
                   if not entry.optional and "{" not in entry.path)

    def check(self) -> None:
        """Raise UserError if the open folder was deleted or moved."""
        if self._lock is not None:  # results of joined shards are written without opening
            self._lock.check()

    # Replacing the folder as a whole

    def check_replaceable(self) -> None:
        """Lock the folder against other writers while this object exists, and raise unless the
        folder is new, empty, or an earlier output of the same kind.

        The settings file names the kind of output and lists the files that were written. If the
        list is missing, as in older outputs, the folder may hold only files of the schema.

        Raises:
            FolderInUse: if another process is about to replace the folder.
            UserError: if the folder is a symbolic link, or holds other data or added files.
        """
        kind, other_folder = self.schema.what, f"choose another {self.schema.flag}"
        if self.path.is_symlink():
            raise UserError(f"{self.path} is a link, which cannot be replaced; {other_folder}")
        if self.path.exists() and any(self.path.iterdir()):
            settings = read_description(self.settings_file)
            if not settings:
                raise UserError(f"{self.path} holds other data; {other_folder}")
            made_by = str(settings.get("made_by", kind)).replace("clarity.", "attribution.")
            if made_by != kind:
                raise UserError(f"{self.path} holds the {made_by}, not the {kind}; {other_folder}")
            foreign = foreign_file(self.path, self.ownership())
            if foreign:
                raise UserError(f"{foreign} does not belong to the {kind} and would be deleted; "
                                f"move it elsewhere, or {other_folder}")
        if self._lock is None:
            self._lock = FolderLock(self.path, beside=True)

    @contextlib.contextmanager
    def replace(self, settings: dict) -> Iterator[Path]:
        """Yield a temporary folder that replaces an earlier output if the block succeeds.

        If the earlier output may no longer be replaced then, the new one is kept next to it.

        Args:
            settings: everything that the output depends on; stored in the settings file.

        Raises:
            UserError: if the folder may not be replaced, see ``check_replaceable``.
            OSError: if an earlier output cannot be deleted.
        """
        self.check_replaceable()
        temporary = temporary_path(Path(os.path.abspath(self.path)))
        try:
            with named_errors(self.path):
                temporary.mkdir()
                yield temporary
                files = sorted(str(path.relative_to(temporary)) for path in temporary.rglob("*")
                               if path.is_file())
                save_json(temporary / self.schema.settings_name, {
                    "made_by": self.schema.what, **settings, "versions": versions(),
                    "files": files})
            try:
                self.check_replaceable()
                replace_folder(self.path, temporary)
            except (UserError, OSError) as error:
                kept = free_path(Path(os.path.abspath(self.path)))
                os.rename(temporary, kept)
                raise UserError(f"{error}; the new output is in {kept}") from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            self._lock = None

