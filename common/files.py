"""Writing files so that nothing half-written is ever found under its final name."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import platform
import shutil
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

from common.errors import UserError

TEMPORARY_SUFFIX = ".partial"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None)  # None: numpy's, which has no number


@contextlib.contextmanager
def named_errors(path: Path, size: int | None = None) -> Iterator[None]:
    """Say in an ``OSError`` of the body which file could not be written and what it needs.

    Args:
        size: bytes that it takes, if that is known.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        there = next(parent for parent in path.absolute().parents if parent.exists())
        needs = "" if size is None else f"it needs {size / 1e6:.2f} MB, and "
        raise OSError(
            error.errno or errno.ENOSPC, f"{error.strerror or error}; {needs}"
            f"{shutil.disk_usage(there).free / 1e6:.2f} MB are free", str(path)) from error


@contextlib.contextmanager
def atomic_path(path: Path, size: int | None = None) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; rename it to ``path`` if the body succeeds.

    The temporary name keeps the suffix of the final one, so writers that choose a format by
    suffix work. On failure the temporary file is removed and ``path`` is left as it was.

    Args:
        size: bytes that the file will have, if that is known.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}{TEMPORARY_SUFFIX}{path.suffix}")
    try:
        with named_errors(path, size):
            yield temporary
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path, size: int | None = None) -> Iterator[Path]:
    """Yield a temporary folder beside ``path``; rename it to ``path`` if the body succeeds.

    A leftover of an earlier, killed attempt is removed first. ``path`` must not exist.

    Args:
        size: bytes that its files will have together, if that is known.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}{TEMPORARY_SUFFIX}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        with named_errors(path, size):
            yield temporary
            os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def unnamed_file(folder: Path, patterns: Iterable[str]) -> Path | None:
    """The first file below a folder that no pattern of ``Path.glob`` names, or None.

    What a killed writer left under a temporary name does not count.
    """
    named = {path for pattern in patterns for path in folder.glob(pattern)}
    for path in sorted(folder.rglob("*")):
        temporary = any(part.startswith(".") and TEMPORARY_SUFFIX in part
                        for part in path.relative_to(folder).parts)
        if path not in named and not temporary and (path.is_symlink() or not path.is_dir()):
            return path
    return None


def remove_folder(path: Path) -> None:
    """Delete a folder, whole or not at all.

    Raises:
        UserError: if it is a link.
        PermissionError: if any of it may not be deleted; all of it is still there then.
    """
    if path.is_symlink():
        raise UserError(f"{path} is a link, which is not deleted; choose another folder, or "
                        "remove the link")
    for folder, _, _ in os.walk(path):
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, "its contents may not be deleted", folder)
    aside = path.with_name(f".{path.name}.removed{TEMPORARY_SUFFIX}")
    shutil.rmtree(aside, ignore_errors=True)  # of a run that was killed in the next line but one
    os.rename(path, aside)
    shutil.rmtree(aside)


def save_tensors(path: Path, content: dict) -> None:
    """``torch.save``, atomically. Goes through memory, so that a full disk is an ``OSError``."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with atomic_path(path, buffer.tell()) as temporary:
        temporary.write_bytes(buffer.getbuffer())


def append_or_nothing(path: Path, text: str) -> None:
    """Add text to the end of a file; on a full disk the file stays as it was."""
    length = path.stat().st_size
    try:
        with named_errors(path, len(text)), open(path, "a") as file:
            file.write(text)
    except OSError:
        os.truncate(path, length)
        raise


def save_json(path: Path, content: dict) -> None:
    """Write a mapping as indented JSON, atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")


def read_array(path: Path, dtype: type | None = None, dimensions: int | None = None,
               written_by: str = "") -> np.ndarray:
    """Read a ``.npy`` file.

    Args:
        dtype, dimensions: that it must have, if given.
        written_by: script that a missing file comes from, for the message.

    Raises:
        UserError: if the file is missing, damaged or holds something else.
    """
    try:
        array = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        source = f"; {written_by} writes it" if written_by else ""
        raise UserError(f"there is no file {path}{source}") from None
    except (ValueError, EOFError):
        raise UserError(f"{path} is damaged: it is not a numpy array") from None
    if (dtype is not None and array.dtype != dtype) or dimensions not in (None, array.ndim):
        raise UserError(f"{path} holds {array.dtype} in {array.ndim} dimensions, not "
                        f"{np.dtype(dtype)} in {dimensions}")
    return array


def sha256(path: Path) -> str:
    """Checksum of a file's contents."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the numbers."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__),
             "numpy": np.__version__}
    for name in ("procgen", "procgen-mirror", "gym3", "scipy", "scikit-learn", "openTSNE",
                 "pynndescent", "hdbscan"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
