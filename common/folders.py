"""Deletion and replacement of whole folders, which spare the files of others."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from common.errors import UserError
from common.files import TEMPORARY_SUFFIX, temporary_path


def is_temporary(path: Path) -> bool:
    """Return whether a relative path is that of a temporary file, or lies in a temporary folder."""
    return any(part.startswith(".") and TEMPORARY_SUFFIX in part for part in path.parts)


def foreign_file(folder: Path, is_own: Callable[[Path], bool]) -> Path | None:
    """Return the first file or link below a folder that is neither temporary nor recognised.

    Args:
        is_own: returns whether a file belongs to the folder, given its relative path.
    """
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if (path.is_symlink() or not path.is_dir()) and not is_temporary(name) and not is_own(name):
            return path
    return None


def make_hidden_folder(path: Path) -> None:
    """Create a folder unless it exists; a symbolic link of this name is removed first."""
    if path.is_symlink():
        path.unlink()
    path.mkdir(parents=True, exist_ok=True)


def remove_folder(path: Path) -> None:
    """Delete a folder completely or not at all; see ``set_aside`` for the errors."""
    with set_aside(path):
        pass


def replace_folder(path: Path, new: Path) -> None:
    """Delete a folder, if it exists, and rename another folder to its path.

    Raises:
        UserError, OSError: see ``set_aside``; then nothing is changed.
    """
    with set_aside(path) if path.exists() else contextlib.nullcontext():
        os.rename(new, path)


@contextlib.contextmanager
def set_aside(path: Path) -> Iterator[None]:
    """Rename a folder; delete it if the block succeeds, otherwise rename it back.

    Raises:
        UserError: if it is a symbolic link.
        PermissionError: if a part of the contents may not be deleted; then nothing is changed.
    """
    if path.is_symlink():
        raise UserError(f"{path} is a link, which is not deleted; choose another folder, or "
                        "remove the link")
    for folder, _, _ in os.walk(path):
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, "its contents may not be deleted", folder)
    aside = temporary_path(path)
    os.rename(path, aside)
    try:
        yield
    except BaseException:
        os.rename(aside, path)
        raise
    shutil.rmtree(aside)


def free_path(path: Path) -> Path:
    """Return the path, or the first of path_2, path_3, … that does not exist."""
    number, free = 1, path
    while free.exists() or free.is_symlink():
        number += 1
        free = path.with_name(f"{path.name}_{number}")
    return free
