"""Work that is divided among jobs which share a folder, on one machine or on many.

Each shard writes files under names that no other shard writes, and keeps its state in a folder of
its own inside the shared one::

    .shards/2_of_3/shard.json    its settings, and whether it has finished

Shards run in any order, in parallel or one after the other; a killed shard is run again. A shard
locks only its own state folder, so no shard runs twice at once. When all shards have finished,
joining makes the files that need all of them and removes the state folders.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from common.errors import UserError
from common.files import (
    TEMPORARY_SUFFIX,
    read_description,
    remove_folder,
    save_json,
    unnamed_file,
)
from common.locks import LOCK_NAME, FolderLock, check_unlocked

NOTES_NAME = ".shards"
_NOTE = "shard.json"
_DIVIDED = "divided"  # among the settings, what decides which shard does what
_NOTE_PATTERN = f"{NOTES_NAME}*/*/*"

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class Shard:
    """A part of divided work.

    Attributes:
        part: number of the part, from 1.
        parts: number of parts.
    """

    part: int
    parts: int

    def __str__(self) -> str:
        return f"{self.part}/{self.parts}"

    def of(self, items: Sequence[Item], batch_size: int = 1) -> list[Item]:
        """Return the items of this shard: every ``parts``-th batch of a fixed division."""
        return [item for begin in range((self.part - 1) * batch_size, len(items),
                                        self.parts * batch_size)
                for item in items[begin:begin + batch_size]]


WHOLE = Shard(1, 1)


def shard(text: str) -> Shard:
    """argparse type: a shard such as 2/3."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"must be 1/4, 2/4, 3/4 or 4/4, for example, not {text}")
    return Shard(int(match[1]), int(match[2]))


def add_shard_flags(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --shard and --join to a script whose work can be divided.

    Args:
        what: what is divided: "the episodes".
    """
    parser.add_argument("--shard", type=shard, default=str(WHOLE), metavar="I/N",
                        help=f"do the I-th of N parts of {what}, counted from 1, for jobs that "
                             "run beside each other")
    parser.add_argument("--join", action="store_true",
                        help="when all shards have finished: turn what they wrote into the files "
                             "of one run, and do nothing else")


# Readable names of settings whose keys do not explain themselves.
READABLE = {"agent_sha256": "agent",
            "recording_sha256": "recording behind it",
            "model_sha256": "simulator", "num_steps": "number of steps",
            "levels_sha256": "choice of levels", "matrices_sha256": "directions file",
            "bottleneck_vec_sha256": "bottleneck vector"}


def readable(key: str) -> str:
    """Return the name of a setting for messages: a flag as it is, a digest in words."""
    plain = key.removesuffix("_sha256")
    return READABLE.get(key, key if plain == key else plain.replace("_", " "))


def first_difference(found: dict, description: dict, informative: tuple[str, ...]) -> str | None:
    """Return the first key in which settings differ from those that were read, or None.

    Args:
        informative: keys that may differ.
    """
    expected = json.loads(json.dumps(description))  # as it looks after a round trip
    for key in sorted((expected.keys() | found.keys()) - set(informative)):
        if found.get(key) != expected.get(key):
            return key
    return None


def open_described_folder(path: Path, description: dict, patterns: tuple[str, ...], what: str,
                          flag: str, overwrite: bool,
                          informative: tuple[str, ...] = ("versions",)) -> FolderLock:
    """Create a folder, or open it for resuming if it was made with the same settings.

    Args:
        path: the description file; its folder is opened.
        patterns: of ``Path.glob``, of all that such a folder may hold.
        description: what makes the contents.
        what: name of the contents, for messages: "a recording".
        flag: that chooses the folder, for messages.
        overwrite: throw away what the folder holds.
        informative: entries that may differ.

    Returns:
        The lock of the folder, to be kept while it is written to.

    Raises:
        FolderInUse: if another process is at work there.
        UserError: if the folder holds anything else and ``overwrite`` is false, or holds files
            that no such folder has.
    """
    folder = path.parent
    if overwrite and folder.exists():
        other = unnamed_file(folder, (LOCK_NAME, *patterns))
        if other:
            raise UserError(f"{other} is no part of {what}, and --overwrite deletes nothing else; "
                            f"move it elsewhere, or choose another {flag}")
        FolderLock(folder)  # nobody else may be at work there
        remove_folder(folder)
    way_out = f"choose another {flag}, or give --overwrite to throw it away"
    if folder.exists() and set(os.listdir(folder)) - {LOCK_NAME} and not read_description(path):
        raise UserError(f"{folder} holds other data; {way_out}")
    folder.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(folder)
    found = read_description(path)
    key = first_difference(found, description, informative) if found else None
    if key:
        raise UserError(f"{folder} holds {what} with another {readable(key)}; {way_out}")
    save_json(path, description)
    return lock


class ShardNotes:
    """State of the shards that work in a folder.

    Args:
        folder: shared folder.
        of: name of the work, if several are divided in one folder at the same time.
    """

    def __init__(self, folder: Path, of: str = ""):
        self.folder = Path(folder)
        self._path = self.folder / f"{NOTES_NAME}{of}"

    def exist(self) -> bool:
        """Return whether there are shards that are not joined yet."""
        return self._path.is_dir()

    def begin(self, shard: Shard, settings: dict, way_out: str,
              informative: Sequence[str] = ("versions",)) -> FolderLock:
        """Record that a shard has started.

        Args:
            settings: what it writes depends on.
            way_out: from a folder that holds other shards, for messages.
            informative: settings in which shards may differ.

        Returns:
            The lock of the shard's own notes.

        Raises:
            FolderInUse: if another process does the same shard.
            UserError: if other shards of the folder are of another number or other settings.
        """
        def check() -> None:
            for other, note in self._read().items():
                if other.parts != shard.parts:
                    raise UserError(f"{self.folder} holds shards of {other.parts}, to which "
                                    f"--shard {shard} does not belong; {way_out}")
                key = _difference(note["settings"], settings, informative)
                if key:
                    raise UserError(f"{self.folder} holds shard {other} with another "
                                    f"{readable(key)}; {way_out}")
        check()
        own = self._folder_of(shard)
        is_new = not own.exists()
        own.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(own)
        save_json(own / _NOTE, {"settings": settings, "informative": list(informative),
                                "finished": False})
        try:
            check()  # once more, for those that have begun in between
        except UserError:
            if is_new:
                (own / _NOTE).unlink()
            raise
        return lock

    def finish(self, shard: Shard) -> None:
        """Record that a shard has written all its files."""
        path = self._folder_of(shard) / _NOTE
        save_json(path, {**read_description(path), "finished": True})

    def settings(self) -> dict:
        """Settings of all shards, which have finished; of those of ``SharedFolder`` the ones that
        divide the work are under "divided".

        Raises:
            UserError: naming the shards that have not, or that differ from the others.
        """
        notes = self._read()
        if not notes:
            raise UserError(f"{self.folder} holds no shards that could be joined; run them with "
                            "--shard 1/N to N/N")
        parts = max(shard.parts for shard in notes)
        missing = [str(part) for part in (Shard(i + 1, parts) for i in range(parts))
                   if not notes.get(part, {}).get("finished")]
        if missing:
            named = ", ".join(missing[:10]) + (" and others" if len(missing) > 10 else "")
            one = len(missing) == 1
            raise UserError(f"{self.folder} lacks shard{'' if one else 's'} {named}, which "
                            f"{'has' if one else 'have'} not been run to the end; run "
                            f"{'it' if one else 'them'} with --shard {missing[0]}"
                            + ("" if one else " and so on"))
        first = notes[Shard(1, parts)]
        for shard, note in notes.items():
            if shard.parts != parts or _difference(note["settings"], first["settings"],
                                                   first["informative"]):
                raise UserError(f"shard {shard} in {self.folder} has other settings than the rest; "
                                "delete the folder, and run the shards again")
        return first["settings"]

    def join(self, make: Callable[[dict, Path], None], is_joined: Callable[[], bool]) -> None:
        """Join the shards, unless that is done already, and remove the notes.

        Several processes may join at once, and each may be killed.

        Args:
            make: gets the settings and a folder for temporary files of this process. It writes
                files of the same contents whoever calls it, by renaming, and deletes what it does
                not need any more when all are written.
            is_joined: whether the files are there.

        Raises:
            UserError: naming the shards that are missing; see ``settings``.
        """
        if not self.exist() and is_joined():
            return
        try:
            settings = self.settings()
            make(settings, Path(tempfile.mkdtemp(prefix="joining_", dir=self._path)))
        except (FileNotFoundError, UserError):
            if self.exist() or not is_joined():  # else another process has joined in between
                raise
        self.remove()

    def remove(self) -> None:
        """Remove the state of all shards at once, so that no reader sees a part of it."""
        aside = self.folder / (f".joined_{socket.gethostname()}_{os.getpid()}{TEMPORARY_SUFFIX}")
        with contextlib.suppress(FileNotFoundError):  # another process has done it
            os.rename(self._path, aside)
        shutil.rmtree(aside, ignore_errors=True)

    def _folder_of(self, shard: Shard) -> Path:
        return self._path / f"{shard.part}_of_{shard.parts}"

    def _read(self) -> dict[Shard, dict]:
        """Read the state of every shard that has started."""
        notes = {}
        for path in sorted(self._path.glob("*_of_*")):
            match = re.fullmatch(r"(\d{1,6})_of_(\d{1,6})", path.name)
            if match and (note := read_description(path / _NOTE)):
                notes[Shard(int(match[1]), int(match[2]))] = note
        return notes


def _difference(found: dict, settings: dict, informative: Sequence[str]) -> str | None:
    """Return the first key in which settings differ, if any; how work is divided comes last."""
    return (first_difference(found, settings, (*informative, _DIVIDED))
            or first_difference(found.get(_DIVIDED, {}), settings.get(_DIVIDED, {}), ()))


class SharedFolder:
    """A described folder that is written by one process, or by one for each shard.

    One process locks it and describes it at once, see ``open_described_folder``. Of shards each
    locks its own notes; the description file is written when they are joined.

    Args:
        path: the description file; its folder is opened.
        description: what makes the contents.
        patterns: of ``Path.glob``, of all that such a folder may hold.
        what: name of the contents, for messages: "a recording".
        flag: that chooses the folder, for messages.
        overwrite: throw away what the folder holds; not for shards.
        informative: entries of the description that may differ.
        shard: part of the work that this process does.
        divided: everything else that decides which shard does what, or that joining needs.
        is_done: returns whether the folder holds all results of joined shards.
        join: merge all shards and continue in this process.

    Attributes:
        is_open: whether anything can be left to write; False if shards are joined already.
        through: folder for temporary files that other shards also write; None for one process.

    Raises:
        FolderInUse: if another process is at work there, or does the same shard.
        UserError: if the folder holds anything else, or shards of another number or other settings.
    """

    def __init__(self, path: Path, description: dict, patterns: tuple[str, ...], what: str,
                 flag: str, overwrite: bool, informative: tuple[str, ...] = ("versions",),
                 shard: Shard = WHOLE, divided: dict | None = None,
                 is_done: Callable[[], bool] = lambda: False, join: bool = False):
        self._shard, self._notes, folder = shard, ShardNotes(path.parent), path.parent
        self.is_open, self.through, self._noted, self._lock = True, None, False, None
        way_out = f"choose another {flag}, or delete the folder"
        settings = {**description, _DIVIDED: divided or {}}
        if overwrite and (join or shard != WHOLE):
            raise UserError(f"--overwrite would throw away what shards have written to {folder}; "
                            f"leave it out, and {way_out}")
        if join:
            self._notes.join(lambda found, through: self._describe(
                path, found, settings, informative, through), path.exists)
        if shard == WHOLE:
            if self._notes.exist() and not overwrite:
                raise UserError(f"{folder} holds shards that are not joined; run this with --join, "
                                f"or {way_out}")
            self._lock = open_described_folder(path, description, (*patterns, _NOTE_PATTERN),
                                               what, flag, overwrite, informative)
            return
        found = read_description(path)
        check_unlocked(folder)
        holds = set(os.listdir(folder)) - {NOTES_NAME, LOCK_NAME} if folder.exists() else set()
        if holds and not found and not self._notes.exist():  # in this order: another may begin
            raise UserError(f"{folder} holds other data; {way_out}")
        key = first_difference(found, description, informative) if found else None
        if key:
            raise UserError(f"{folder} holds {what} with another {readable(key)}; "
                            f"{way_out}")
        folder.mkdir(parents=True, exist_ok=True)
        if found and not self._notes.exist() and is_done():
            self.is_open = False
            return
        self._noted = True
        self._lock = self._notes.begin(shard, settings, way_out, informative)
        self.through = self._lock.folder

    def _describe(self, path: Path, found: dict, asked: dict, informative: Sequence[str],
                  through: Path) -> None:
        """Write the settings of the shards, which must be the ones that were asked for."""
        key = _difference(found, asked, informative)
        if key:
            raise UserError(f"the shards in {path.parent} have another {readable(key)}; "
                            "give --join with their flags")
        save_json(path, {name: value for name, value in found.items() if name != _DIVIDED},
                  through=through)

    def check(self) -> None:
        """Raise if the folder is gone.

        Raises:
            UserError: if it was deleted or moved.
        """
        if self._lock is not None:
            self._lock.check()

    def finish(self) -> None:
        """Record that this process has written everything."""
        if self._noted:
            self._notes.finish(self._shard)
