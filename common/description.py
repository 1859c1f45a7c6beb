"""Description of a folder: a JSON file that says what made it; only the same may add to it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from common.errors import UserError
from common.files import read_json, remove_folder, save_json, unnamed_file
from common.locks import LOCK_NAME, FolderLock

# Plain names of the entries whose keys do not explain themselves.
READABLE = {"agent_sha256": "agent",
            "recording_sha256": "recording behind it",
            "model_sha256": "simulator", "num_steps": "number of steps",
            "levels_sha256": "choice of levels", "matrices_sha256": "directions file",
            "bottleneck_vec_sha256": "bottleneck vector"}


def readable(key: str) -> str:
    """The name of an entry in messages: that of a flag as it is, that of a digest in words."""
    plain = key.removesuffix("_sha256")
    return READABLE.get(key, key if plain == key else plain.replace("_", " "))


def read_description(path: Path) -> dict:
    """Read a description file; empty if there is none.

    Raises:
        UserError: if the file is damaged or holds no mapping.
    """
    if not path.is_file():
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it holds no mapping of names to values")
    return content


def first_difference(found: dict, description: dict, informative: tuple[str, ...]) -> str | None:
    """The first key in which a description differs from one that was read, or None.

    Args:
        informative: entries that may differ.
    """
    expected = json.loads(json.dumps(description))  # as it looks after a round trip
    for key in sorted((expected.keys() | found.keys()) - set(informative)):
        if found.get(key) != expected.get(key):
            return key
    return None


def open_described_folder(path: Path, description: dict, patterns: tuple[str, ...], what: str,
                          flag: str, overwrite: bool,
                          informative: tuple[str, ...] = ("versions",)) -> FolderLock:
    """Make a folder, or go on with what it holds if that was made in the same way.

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
