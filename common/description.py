"""What made a folder: a JSON file in it, which also decides whether more may be added to it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from common.errors import UserError
from common.files import check_nested, read_bytes, save_json

# What an entry of a description stands for, where its name does not say it.
READABLE = {"data_index_sha256": "recording behind it", "agent_sha256": "agent",
            "model_sha256": "simulator", "num_steps": "number of steps"}


def read_description(path: Path) -> dict:
    """What stands in a description file; empty if there is none.

    Raises:
        UserError: if the file is damaged or holds no mapping.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_bytes(path))
    except (ValueError, RecursionError):
        raise UserError(f"{path} is damaged: it is not JSON") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it holds no mapping of names to values")
    check_nested(content, path)
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


def open_described_folder(path: Path, description: dict, what: str, flag: str, overwrite: bool,
                          informative: tuple[str, ...] = ("versions",)) -> None:
    """Make a folder, or go on with what it holds if that was made in the same way.

    Args:
        path: the description file; its folder is opened.
        description: what makes the contents.
        what: name of the contents, for messages: "a recording".
        flag: that chooses the folder, for messages.
        overwrite: throw away what the folder holds.
        informative: entries that may differ.

    Raises:
        UserError: if the folder holds anything else and ``overwrite`` is false.
    """
    folder = path.parent
    if overwrite and folder.exists():
        shutil.rmtree(folder)
    if folder.exists() and any(folder.iterdir()):
        found = read_description(path)
        way_out = f"choose another {flag}, or give --overwrite to throw it away"
        if not found:
            raise UserError(f"{folder} holds other data; {way_out}")
        key = first_difference(found, description, informative)
        if key:
            raise UserError(f"{folder} holds {what} with another {READABLE.get(key, key)}; "
                            f"{way_out}")
    folder.mkdir(parents=True, exist_ok=True)
    save_json(path, description)
