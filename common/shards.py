"""Work divided into shards: jobs that share a folder, on one machine or on several.

No two shards write files of the same name. Each shard keeps its state in its own folder inside the
shared one::

    .shards/2_of_3/shard.json    settings of the shard, and whether it has finished

Shards run in any order, in parallel or in sequence; a killed shard is run again. Each shard locks
only its state folder, so the same shard cannot run twice at the same time. When all shards have
finished, joining writes the files that depend on all of them and deletes the state folders.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TypeVar

from common.config import typed
from common.errors import UserError
from common.files import TEMPORARY_SUFFIX, read_description, save_json
from common.locks import LOCK_NAME, FolderLock

NOTES_NAME = ".shards"
_NOTE, _JOINING = "shard.json", "joining_"
_STATE = re.compile(r"(\d{1,6})_of_(\d{1,6})")  # name of the folder of a shard's state
DIVIDED = "divided"  # key of the settings that determine how the work is divided

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class Shard:
    """One of the parts into which work is divided.

    Attributes:
        part: number of this part, counted from 1.
        parts: number of parts.
    """

    part: int
    parts: int

    def __str__(self) -> str:
        return f"{self.part}/{self.parts}"

    def of(self, items: Sequence[Item], batch_size: int = 1) -> list[Item]:
        """Return the items of this shard: every ``parts``-th batch of ``batch_size`` consecutive
        items, from batch number ``part`` on."""
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


def is_note(path: PurePath) -> bool:
    """Return whether a relative path is that of a file in which a shard keeps its state."""
    return (len(path.parts) == 3 and path.parts[0].startswith(NOTES_NAME)
            and bool(_STATE.fullmatch(path.parts[1]) or path.parts[1].startswith(_JOINING))
            and (path.name in (_NOTE, LOCK_NAME) or path.parts[1].startswith(_JOINING)))


# Names that messages use for settings whose keys are not self-explanatory.
READABLE = {"agent_sha256": "agent",
            "recording_sha256": "source recording",
            "model_sha256": "simulator", "num_steps": "number of steps",
            "levels_sha256": "choice of levels", "matrices_sha256": "directions file",
            "bottleneck_vec_sha256": "bottleneck vector"}


def readable(key: str) -> str:
    """Return the name of a setting for messages: the key ``agent_sha256`` gives "agent"."""
    stem = key.removesuffix("_sha256")
    return READABLE.get(key, key if stem == key else stem.replace("_", " "))


def first_difference(found: dict, description: dict,
                     informative: Collection[str]) -> str | None:
    """Return the first key in which two descriptions (settings of a folder) differ, or None.

    Args:
        found: description read from a file.
        description: expected description.
        informative: keys whose values may differ, such as package versions.
    """
    expected = json.loads(json.dumps(description))  # convert tuples to lists as JSON does
    found, expected = ({**settings, **settings.get(DIVIDED, {})} for settings in (found, expected))
    for key in sorted((expected.keys() | found.keys()) - {DIVIDED, *informative}):
        if found.get(key) != expected.get(key):
            return key
    return None


def require_equal(found: dict, description: dict, informative: Collection[str], where: str,
                  way_out: str) -> None:
    """Raise UserError, which names the setting, if two descriptions differ.

    Args:
        found, description, informative: see ``first_difference``.
        where: beginning of the message, such as "data/ holds a recording".
        way_out: advice at the end of the message.
    """
    key = first_difference(found, description, informative)
    if key:
        raise UserError(f"{where} with another {readable(key)}; {way_out}")


@dataclasses.dataclass(frozen=True)
class _Note:
    """State of a shard, as stored.

    Attributes:
        settings: settings of the shard; those that determine how the work is divided are nested
            under the key DIVIDED.
        finished: whether the shard has written all its files.
        informative: names of settings in which shards may differ.
    """

    settings: dict[str, object]
    finished: bool
    informative: tuple[str, ...] = ("versions",)

    def __post_init__(self):
        if not isinstance(self.settings.get(DIVIDED, {}), dict):
            raise UserError(f"'{DIVIDED}' in the settings of a shard is not a mapping")


def divided_number(divided: Mapping[str, object], name: str) -> int:
    """Return a whole number from 0 among the settings that determine how work is divided.

    Raises:
        UserError: if the number is missing or another value.
    """
    number = divided.get(name)
    if type(number) is not int or number < 0:
        raise UserError(f"the shards are damaged: '{name}' is {number!r}, not a whole number; "
                        "run the shards again in another folder")
    return number


class ShardNotes:
    """State of the shards that share a folder, stored in a hidden subfolder.

    Args:
        folder: shared folder.
        of: suffix of the hidden subfolder, if several kinds of work in a folder have shards.
    """

    def __init__(self, folder: Path, of: str = ""):
        self.folder = Path(folder)
        self._path = self.folder / f"{NOTES_NAME}{of}"

    def exist(self) -> bool:
        """Return whether there are shards that have not been joined."""
        return self._path.is_dir()

    def begin(self, shard: Shard, settings: dict, way_out: str,
              informative: Collection[str] = ("versions",)) -> FolderLock:
        """Record that a shard has started.

        Args:
            settings: settings that determine the contents of the shard's files. Settings that
                determine how the work is divided are nested under the key DIVIDED.
            way_out: advice at the end of messages.
            informative: names of settings in which shards may differ, because they do not determine
                the contents of files.

        Returns:
            Lock of the shard's state folder.

        Raises:
            FolderInUse: if another process runs the same shard.
            UserError: if other shards in the folder have another number of parts or other settings.
        """
        def check() -> None:
            for other, note in self._read().items():
                if other.parts != shard.parts:
                    raise UserError(f"{self.folder} is divided into {other.parts} shards, but "
                                    f"--shard is {shard}; {way_out}")
                require_equal(note.settings, settings, informative,
                              f"{self.folder} holds shard {other}", way_out)
        check()
        own = self._folder_of(shard)
        is_new = not own.exists()
        own.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(own)
        save_json(own / _NOTE, {"settings": settings, "informative": list(informative),
                                "finished": False})
        try:
            check()  # again, for shards that have started in the meantime
        except UserError:
            if is_new:
                (own / _NOTE).unlink()
            raise
        return lock

    def any_settings(self) -> dict:
        """Return the settings of any shard that has started; empty if none has."""
        return next((note.settings for note in self._read().values()), {})

    def finish(self, shard: Shard) -> None:
        """Record that a shard has written all its files."""
        path = self._folder_of(shard) / _NOTE
        save_json(path, {**read_description(path), "finished": True})

    def settings(self) -> dict:
        """Return the settings of shard 1, after checking all shards.

        All shards must have finished and have the same settings. Informative settings, such as
        package versions, may differ; each shard stores their names.

        Raises:
            UserError: if shards are missing or unfinished, or have different settings; the message
                names them.
        """
        notes = self._read()
        if not notes:
            raise UserError(f"{self.folder} holds no shards that could be joined; run them with "
                            "--shard 1/N to N/N")
        parts = max(shard.parts for shard in notes)
        missing = [str(part) for part in itertools.islice(
            (part for part in (Shard(i + 1, parts) for i in range(parts))
             if part not in notes or not notes[part].finished), 11)]
        if missing:
            listed = ", ".join(missing[:10]) + (" and others" if len(missing) > 10 else "")
            raise UserError(f"{self.folder} lacks shards {listed}, which have not been run to the "
                            "end; run each of them with --shard")
        first = notes[Shard(1, parts)]
        for shard, note in notes.items():
            if shard.parts != parts or first_difference(note.settings, first.settings,
                                                        first.informative):
                raise UserError(f"shard {shard} in {self.folder} has other settings than shard 1; "
                                "delete the folder, and run the shards again")
        return dict(first.settings)

    def join(self, make: Callable[[dict, Path], None], is_joined: Callable[[], bool]) -> None:
        """Join the shards, unless they are joined already, and delete their state.

        Several processes may join at the same time, and each may be killed.

        Args:
            make: writes the joined files; called with the settings and a folder for temporary
                files. The contents must not depend on the process. Each file must be written to the
                temporary folder and then renamed. Files of shards may be deleted only after all
                joined files are written.
            is_joined: returns whether the joined files exist.

        Raises:
            UserError: if shards are missing or unfinished, see ``settings``.
        """
        if not self.exist() and is_joined():
            return
        try:
            settings = self.settings()
            make(settings, Path(tempfile.mkdtemp(prefix=_JOINING, dir=self._path)))
        except (FileNotFoundError, UserError):
            if self.exist() or not is_joined():  # otherwise another process has joined meanwhile
                raise
        self.remove()

    def remove(self) -> None:
        """Delete the state of all shards atomically, so that readers never see a part of it."""
        aside = self.folder / (f".joined_{socket.gethostname()}_{os.getpid()}{TEMPORARY_SUFFIX}")
        with contextlib.suppress(FileNotFoundError):  # another process has deleted it
            os.rename(self._path, aside)
        shutil.rmtree(aside, ignore_errors=True)

    def _folder_of(self, shard: Shard) -> Path:
        return self._path / f"{shard.part}_of_{shard.parts}"

    def _read(self) -> dict[Shard, _Note]:
        """Read the states of all shards that have started.

        Raises:
            UserError: if a state is damaged; the message names the file.
        """
        notes = {}
        for path in sorted(self._path.glob("*_of_*")):
            match = _STATE.fullmatch(path.name)
            if match and (note := read_description(path / _NOTE)):
                notes[Shard(int(match[1]), int(match[2]))] = typed(_Note, note, str(path / _NOTE))
        return notes
