"""Folder locks, which let only one process at a time write to a run or a recording."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
import weakref
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TextIO

from common.errors import UserError
from common.files import named_errors

LOCK_NAME = ".lock"
_IN_USE = (errno.EACCES, errno.EAGAIN)
_NOT_REGULAR = (errno.ELOOP, errno.ENXIO, errno.EISDIR)  # raised for a link, a socket, a folder
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

logger = logging.getLogger(__name__)


class FolderInUse(UserError):
    """Raised if another process has locked a folder."""


class FolderLock:
    """Lock on a folder against other processes, held for the lifetime of the object.

    The lock belongs to the process, which may lock the folder again. The system releases it when
    the process ends; the lock file that a killed process leaves is harmless.

    Args:
        folder: existing folder; or, with ``beside``, a folder that need not exist.
        beside: put the lock file next to the folder, which may then be replaced as a whole, and
            create the folder's parents.

    Raises:
        FolderInUse: if another process has locked the folder; the message names process and host.
        UserError: if the lock file is not a regular file.
    """

    def __init__(self, folder: Path, beside: bool = False):
        self.folder = folder
        path = folder.resolve()
        if beside:
            path.parent.mkdir(parents=True, exist_ok=True)
        path = path.with_name(f".{path.name}{LOCK_NAME}") if beside else path / LOCK_NAME
        file = _lock_files.get(path)
        if file is None or not file.is_there():
            file = _lock_files[path] = _LockFile(path, folder)
        self._file = file

    def check(self) -> None:
        """Raise if the locked folder no longer exists under its path.

        Raises:
            UserError: if the folder was deleted or moved.
        """
        if not self._file.is_there():
            raise UserError(f"{self.folder} was deleted or moved while this process was writing "
                            "to it, so the process stops")


def open_lock(path: Path, create: bool = True) -> TextIO:
    """Open a lock file without following links or blocking on pipes.

    Args:
        create: create a missing file and open it for writing; otherwise open it for reading only.

    Raises:
        UserError: if the path is not a regular file, or the file has several hard links.
        FileNotFoundError: if the file is missing and ``create`` is false.
    """
    try:
        number = os.open(path, os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                         | (os.O_RDWR | os.O_CREAT if create else os.O_RDONLY), 0o666)
    except OSError as error:
        if error.errno not in _NOT_REGULAR:
            raise
    else:
        status = os.fstat(number)
        if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:  # 0: deleted by its owner
            return os.fdopen(number, "r+" if create else "r")
        os.close(number)
    raise UserError(f"{path} is a link, a pipe or a folder, not a lock file; delete it")


class _LockFile:
    """The lock file of a folder, deleted together with the folder's last :class:`FolderLock`."""

    def __init__(self, path: Path, folder: Path):
        self._path = path
        while True:
            self._file = open_lock(self._path)
            _lock(self._file, folder)
            if self.is_there():  # otherwise its previous owner has deleted it meanwhile
                break
        with named_errors(self._path):
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
            self._file.flush()
        # Unlike weakref.finalize, Finalize also runs when a process of multiprocessing ends.
        Finalize(self, _release, (self._path, self._file), exitpriority=0)

    def is_there(self) -> bool:
        """Return whether the file still exists under its path."""
        return _is_at(self._file, self._path)


# Lock files of this process, by path.
_lock_files: weakref.WeakValueDictionary[Path, _LockFile] = weakref.WeakValueDictionary()


def check_unlocked(folder: Path) -> None:
    """Raise if another process has locked a folder, without locking it.

    Raises:
        FolderInUse: if the folder is locked; the message names process and host.
        UserError: if the lock file is not a regular file.
    """
    if folder.resolve() / LOCK_NAME in _lock_files:
        return
    with contextlib.suppress(FileNotFoundError), open_lock(folder / LOCK_NAME, False) as file:
        _lock(file, folder, fcntl.LOCK_SH)


def _lock(file: TextIO, folder: Path, kind: int = fcntl.LOCK_EX) -> None:
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _IN_USE:
            file.seek(0)
            raise FolderInUse(f"{file.read() or 'another process'} is using {folder}; wait until "
                              "it has ended, or choose another folder") from None
        if error.errno not in UNSUPPORTED:
            raise
        logger.warning("%s is on a file system without locks; make sure that no other process "
                       "writes to it", folder)


def _is_at(file: TextIO, path: Path) -> bool:
    """Return whether a path refers to an open file."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _release(path: Path, file: TextIO) -> None:
    with contextlib.suppress(OSError):
        if _is_at(file, path):
            path.unlink()
    file.close()


def claim_folder(folder: Path, marker: str) -> FolderLock:
    """Create and lock a folder for a new run.

    Its name is that of ``folder``, or has a suffix _2, _3, … if another process has locked the
    folder or an earlier run has used it.

    Args:
        marker: name of a file that exists in the folders of earlier runs.
    """
    number, path = 1, folder
    while True:
        path.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FolderInUse):
            lock = FolderLock(path)
            if not (path / marker).exists():
                return lock
        number += 1
        path = folder.with_name(f"{folder.name}_{number}")
