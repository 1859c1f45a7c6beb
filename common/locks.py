"""Locks on folders: one process at a time writes to a run or a recording."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
import weakref
from pathlib import Path
from typing import TextIO

from common.errors import UserError

LOCK_NAME = ".lock"
_IN_USE = (errno.EACCES, errno.EAGAIN)
_NOT_REGULAR = (errno.ELOOP, errno.ENXIO, errno.EISDIR)  # a link, a socket, a folder
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

logger = logging.getLogger(__name__)


class FolderInUse(UserError):
    """Raised if another process works in a folder."""


class FolderLock:
    """Keeps other processes out of a folder for the lifetime of the object.

    The lock belongs to the whole process, which may lock its own folder again. The system releases
    it when the process ends; a killed process leaves the file, which does no harm.

    Args:
        folder: existing folder.

    Raises:
        FolderInUse: naming the process and the host.
        UserError: if its lock is no regular file.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        held = _held.get(folder.resolve())
        if held is None or not held.is_there():
            held = _held[folder.resolve()] = _LockFile(folder)
        self._file = held

    def check(self) -> None:
        """Raise if the folder is not the one that was locked any more.

        Raises:
            UserError: if it was deleted or moved.
        """
        if not self._file.is_there():
            raise UserError(f"{self.folder} was deleted or moved while this process was at work "
                            "in it, which cannot go on")


def open_lock(path: Path, create: bool = True) -> TextIO:
    """Open a lock file for reading and writing, without following a link or waiting for a pipe.

    Args:
        create: make a missing file.

    Raises:
        UserError: if the path is anything but a regular file with one name.
        FileNotFoundError: if there is none and ``create`` is false.
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
    """The locked file of a folder; deleted when the last :class:`FolderLock` of it is gone."""

    def __init__(self, folder: Path):
        self._path = folder / LOCK_NAME
        while True:
            self._file = open_lock(self._path)
            _lock(self._file, folder)
            if self.is_there():  # else its owner has deleted it in between
                break
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._file.flush()
        weakref.finalize(self, _release, self._path, self._file)

    def is_there(self) -> bool:
        return _is_at(self._file, self._path)


_held: weakref.WeakValueDictionary[Path, _LockFile] = weakref.WeakValueDictionary()


def check_unlocked(folder: Path) -> None:
    """Raise if another process has locked a folder; does not lock it.

    Raises:
        FolderInUse: naming the process and the host.
        UserError: if its lock is no regular file.
    """
    if folder.resolve() in _held:
        return
    with contextlib.suppress(FileNotFoundError), open_lock(folder / LOCK_NAME, False) as file:
        _lock(file, folder, fcntl.LOCK_SH)


def _lock(file: TextIO, folder: Path, kind: int = fcntl.LOCK_EX) -> None:
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _IN_USE:
            file.seek(0)
            raise FolderInUse(f"{file.read() or 'another process'} is at work in {folder}; wait "
                              "until it has ended, or choose another folder") from None
        if error.errno not in UNSUPPORTED:
            raise
        logger.warning("%s is on a file system without locks: see that no other process writes "
                       "there", folder)


def _is_at(file: TextIO, path: Path) -> bool:
    """Whether an open file is the one that a path names."""
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
    """Create and lock a folder for a new run: ``folder``, or ``folder`` with a suffix _2, _3, …

    Args:
        marker: name of a file that marks the folder of an existing run, which is skipped.
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
