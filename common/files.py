"""Atomic writing of files, and checked reading of tensors and arrays.

Incomplete files never appear under their final names; their temporary names are unique, so that two
writers of the same file never mix their contents. Text is written as UTF-8. On any file, however
damaged, readers raise only ``UserError`` or ``OSError``. They read regular files only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import io
import itertools
import json
import math
import os
import platform
import re
import shutil
import socket
import stat
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from common.errors import UserError

TEMPORARY_SUFFIX = ".partial"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None)  # None: numpy's error without errno
MAX_DEPTH = 50  # nesting of JSON and tensors; files of this project have fewer than ten levels
MAX_ENTRIES, MAX_WEIGHT = 10_000_000, 1e6
MAX_REASON = 200  # characters that an error message quotes from a library's message


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Add file name and free space to the message of a "disk full" error raised in the block.

    Args:
        path: file that the block writes.

    Raises:
        OSError: if the block raises one.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        there = next(parent for parent in path.absolute().parents if parent.exists())
        number = error.errno or errno.ENOSPC
        raise OSError(number, f"{os.strerror(number)}; "
                      f"{shutil.disk_usage(there).free / 1e6:.2f} MB are free", str(path)
                      ) from error


# Host and process namespace, by which processes recognise the temporary files of their host.
_HOST = zlib.crc32(socket.gethostname().encode() + (
    os.readlink("/proc/self/ns/pid").encode() if os.path.exists("/proc/self/ns/pid") else b""))
_temporary_numbers = itertools.count(1)
_tidied: set[tuple[int, str]] = set()  # process, and folder in which it has looked for leftovers


def temporary_path(path: Path, folder: Path | None = None) -> Path:
    """Return a hidden path with the suffix of ``path`` that no other writer uses.

    The first call in a folder deletes what killed processes of this host have left there.

    Args:
        folder: folder of the temporary path, by default that of ``path``.
    """
    folder = folder or path.parent
    if (place := (os.getpid(), str(folder.absolute()))) not in _tidied:
        _tidied.add(place)
        _remove_leftovers(folder)
    token = f"{_HOST:08x}_{os.getpid()}_{next(_temporary_numbers)}"
    return folder / f".{path.stem}{TEMPORARY_SUFFIX}_{token}{path.suffix}"


def _remove_leftovers(folder: Path) -> None:
    """Delete temporary files and folders of processes of this host that no longer exist."""
    pattern = re.compile(rf"\..*{re.escape(TEMPORARY_SUFFIX)}_{_HOST:08x}_(\d{{1,10}})_\d+(\..*)?")
    for name in os.listdir(folder):
        match = pattern.fullmatch(name)
        if match is None or _is_running(int(match[1])):
            continue
        with contextlib.suppress(OSError):  # another process may delete it, too
            path = folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # it belongs to another user
        pass
    return True


@contextlib.contextmanager
def atomic_path(path: Path, through: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path next to ``path``; rename it to ``path`` if the block succeeds.

    The folder of ``path`` is created if it is missing. The temporary name keeps the suffix, by
    which some writers choose the format. On failure the temporary file is removed and ``path``
    remains unchanged.

    Args:
        path: file to write.
        through: folder for the temporary file, on the same file system; by default the folder of
            ``path``.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path, through)
    try:
        with named_errors(path):
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            yield temporary
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder next to ``path``; rename it to ``path`` if the block succeeds.

    Args:
        path: folder to write; it must not exist when the block ends.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path)
    try:
        with named_errors(path):
            temporary.mkdir()
            yield temporary
            os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def save_tensors(path: Path, content: dict) -> None:
    """Write a file with ``torch.save``, atomically.

    The content is serialised in memory first, so that a full disk raises an ``OSError``.
    """
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with atomic_path(path) as temporary:
        temporary.write_bytes(buffer.getbuffer())


def append_or_nothing(path: Path, text: str) -> None:
    """Append text to an existing file, which remains unchanged if writing fails."""
    length = path.stat().st_size
    try:
        with named_errors(path), open(path, "a", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        os.truncate(path, length)
        raise


def save_json(path: Path, content: dict | list, through: Path | None = None) -> None:
    """Write ``content`` as indented JSON, atomically (see ``atomic_path``)."""
    with atomic_path(path, through=through) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_bytes(path: Path, what: str = "file", written_by: str = "") -> bytes:
    """Read a regular file; pipes and devices are rejected because reading them could block.

    Args:
        what: kind of file, for messages.
        written_by: script that writes the file, for the message about a missing file.

    Raises:
        UserError: if there is no regular file at this path.
    """
    with open_regular(path, what, written_by) as file:
        content = file.read()
    if content is None:  # a file of the kernel that is waiting for data
        raise UserError(f"there is no {what} {path}")
    return content


def open_regular(path: Path, what: str = "file", written_by: str = "") -> BinaryIO:
    """Open a regular file to read. Arguments and errors are those of ``read_bytes``."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if stat.S_ISREG(os.fstat(number).st_mode):
            return os.fdopen(number, "rb")
        os.close(number)
    source = f"; {written_by} writes it" if written_by else ""
    raise UserError(f"there is no {what} {path}{source}")


def read_json(path: Path, written_by: str = "") -> Any:
    """Read a JSON file. See ``read_bytes`` for ``written_by``.

    Raises:
        UserError: if the file is missing, is not JSON, or exceeds the limits of ``check_nested``.
    """
    try:
        content = json.loads(read_bytes(path, written_by=written_by))
    except (ValueError, RecursionError):
        raise UserError(f"{path} is damaged: it is not JSON") from None
    check_nested(content, path)
    return content


def read_description(path: Path) -> dict:
    """Read the JSON file that describes a folder; return an empty mapping if it is missing.

    Raises:
        UserError: if the file is damaged or does not hold a mapping.
    """
    if not path.is_file():
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it does not hold a mapping of names to values")
    return content


def check_nested(content: Any, path: Path) -> list:
    """Check the nesting and size of untrusted content.

    Args:
        content: contents of a file: nested mappings, lists, tuples and sets.
        path: the file, for the message.

    Returns:
        All values at all levels, including the containers and the keys of mappings.

    Raises:
        UserError: if there are more than MAX_DEPTH levels or MAX_ENTRIES values, or an integer does
            not fit into 64 bits.
    """
    waiting, values = [(content, 0)], []
    while waiting:
        value, depth = waiting.pop()
        values.append(value)
        if depth > MAX_DEPTH:
            raise UserError(f"{path} is nested more than {MAX_DEPTH} deep")
        if len(values) > MAX_ENTRIES:
            raise UserError(f"{path} has more than {MAX_ENTRIES} entries")
        if isinstance(value, dict):
            waiting += ((item, depth + 1) for pair in value.items() for item in pair)
        elif isinstance(value, list | tuple | set):
            waiting += ((item, depth + 1) for item in value)
        elif isinstance(value, int) and abs(value) >= 2**63:
            raise UserError(f"{path} holds a whole number of more than 64 bits")
    return values


def load_tensors(path: Path, what: str, content: bytes | None = None) -> dict:
    """Load an untrusted torch file that holds only tensors and plain values.

    Tensors are loaded to the CPU.

    Args:
        what: kind of file, for messages.
        content: content of the file, if it was read before.

    Raises:
        UserError: if the file is missing, truncated, damaged or not a torch file, contains code or
            anything other than a dict, exceeds the limits of ``check_nested``, or holds a tensor
            that is sparse, nested, quantised, without data, or larger than its stored data
            (expanded).
    """
    content = read_bytes(path, what) if content is None else content
    file = io.BytesIO(content)  # errors raised from here on are about the contents
    try:
        if zipfile.is_zipfile(file):  # torch does not verify the checksums
            damaged = zipfile.ZipFile(file).testzip()
            if damaged is not None:
                raise ValueError(damaged)
        file.seek(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # files of other kinds raise almost any exception
        raise UserError(f"the {what} {path} is truncated or not a torch file of tensors "
                        f"({type(error).__name__})") from None
    if not isinstance(loaded, dict):
        raise UserError(f"the {what} {path} holds a {type(loaded).__name__}, not a dict")
    for tensor in check_nested(loaded, path):
        if isinstance(tensor, torch.Tensor) and (
                tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_nested
                or tensor.is_quantized or tensor.untyped_storage().nbytes()
                < tensor.numel() * tensor.element_size()):
            raise UserError(f"the {what} {path} holds a tensor of the shape "
                            f"{tuple(tensor.shape)} that is sparse, quantised, expanded or without "
                            "data")
    return loaded


def checked_weights(state, where: str) -> dict[str, torch.Tensor]:
    """Check the weights of a network and return them by name.

    Args:
        state: weights by name, read from a file by ``load_tensors``.
        where: name of the file in messages, such as "the agent file x.pth".

    Raises:
        UserError: if an entry is not a floating-point tensor, is empty, or holds NaN or an absolute
            value above MAX_WEIGHT; the message names the entry.
    """
    for name, tensor in state.items():
        if not (isinstance(name, str) and isinstance(tensor, torch.Tensor) and tensor.numel()
                and tensor.is_floating_point()):
            raise UserError(f"in {where} the entry '{name}' is not a tensor of weights")
        if not (tensor.detach().float().abs() <= MAX_WEIGHT).all():
            raise UserError(f"in {where} the tensor '{name}' holds NaN, infinity or an absolute "
                            f"value above {MAX_WEIGHT:.0e}; use an undamaged file")
    return state


@dataclasses.dataclass(frozen=True)
class ArrayFile:
    """An array on disk whose rows are read on demand.

    Unlike a memory map, it keeps no file descriptor open (a data set has more files than a process
    may open), and it returns contiguous arrays.

    Attributes:
        path: path of the ``.npy`` file.
        dtype: type of the array.
        shape: shape of the array; the first dimension counts the rows.
        offset: bytes before the first row.
    """

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    def rows(self, begin: int, end: int) -> np.ndarray:
        """Read the rows from ``begin`` to ``end`` - 1, or to the last row if there are fewer.

        Returns:
            Array (rows, *shape[1:]).

        Raises:
            UserError: if the file was truncated or deleted, or these rows hold NaN or infinity.
        """
        row_size = math.prod(self.shape[1:])
        count = max(min(end, self.shape[0]) - begin, 0) * row_size
        try:
            values = np.fromfile(self.path, self.dtype, count,
                                 offset=self.offset + begin * row_size * self.dtype.itemsize)
        except FileNotFoundError:
            raise UserError(f"there is no file {self.path}") from None
        if values.size != count:
            raise UserError(f"{self.path} has become shorter while it was in use")
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise UserError(f"{self.path} holds NaN or infinity; record this episode again")
        return values.reshape(-1, *self.shape[1:])


def open_array(path: Path, dtype: type, dimensions: int) -> ArrayFile:
    """Open a ``.npy`` file of numbers in C order; only its header and size are checked.

    Args:
        dtype, dimensions: required type, which may be abstract such as ``np.floating``, and number
            of dimensions.

    Raises:
        UserError: if the file is missing or damaged, or holds an array of another type, number of
            dimensions or order.
    """
    array, is_by_rows = _array_header(path, "")
    if not np.issubdtype(array.dtype, dtype) or len(array.shape) != dimensions or not is_by_rows:
        raise UserError(f"{path} holds {array.dtype} in {len(array.shape)} dimensions, not "
                        f"{dtype.__name__} in {dimensions} dimensions and C order")
    return array


def _array_header(path: Path, written_by: str) -> tuple[ArrayFile, bool]:
    """Read the header of a ``.npy`` file of numbers.

    Args:
        written_by: script that writes the file, for the message about a missing file; may be "".

    Returns:
        Type, shape and position of the array in the file; and whether its rows are contiguous.

    Raises:
        UserError: if the file is missing or damaged.
    """
    path = Path(path)
    with open_regular(path, written_by=written_by) as file:
        try:
            version = np.lib.format.read_magic(file)
            read = {(1, 0): np.lib.format.read_array_header_1_0,
                    (2, 0): np.lib.format.read_array_header_2_0}[version]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                shape, is_by_columns, dtype = read(file)
            if dtype.kind not in "biuf" or not dtype.isnative or min(shape, default=0) < 0:
                raise ValueError(f"it holds {dtype} in the shape {shape}")
            size, offset = os.fstat(file.fileno()).st_size, file.tell()
            if size != offset + math.prod(shape) * dtype.itemsize:
                raise ValueError(f"its size is {size} bytes")
        except OSError:
            raise
        except Exception as error:  # damaged headers, read as Python literals, raise anything
            reason = " ".join(str(error).split())[:MAX_REASON]
            raise UserError(f"{path} is damaged: it is truncated or not a numpy array of numbers "
                            f"({reason})") from None
    return ArrayFile(path, dtype, shape, offset), not is_by_columns


def read_array(path: Path, written_by: str = "") -> np.ndarray:
    """Read a ``.npy`` file of numbers. See ``read_bytes`` for ``written_by``.

    Raises:
        UserError: if the file is missing or damaged.
    """
    _array_header(path, written_by)  # checks the size before memory is allocated
    return np.load(path, allow_pickle=False)


def read_arrays(path: Path, what: str, written_by: str = "",
                max_size: int = 0) -> dict[str, np.ndarray]:
    """Read a ``.npz`` file written by ``np.savez``.

    See ``read_bytes`` for ``what`` and ``written_by``.

    Args:
        max_size: largest number of bytes to which a compressed file may expand; 0 rejects
            compressed files.

    Returns:
        Arrays of numbers or text by name.

    Raises:
        UserError: if the file is missing, damaged or compressed, or holds Python objects.
    """
    content = read_bytes(path, what, written_by)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
            is_compressed = any(entry.compress_type for entry in entries)
            if (sum(entry.file_size for entry in entries) > max(max_size, len(content))
                    or (is_compressed and not max_size) or archive.testzip()):
                raise ValueError("an entry is damaged or compressed")
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except Exception as error:  # files of other kinds raise almost any exception
        raise UserError(f"the {what} {path} is truncated or not a .npz file of arrays "
                        f"({type(error).__name__})") from None


def sha256(path: Path, what: str = "file") -> str:
    """Return the SHA-256 digest of a file's contents, in hexadecimal.

    Args:
        what: kind of file, for messages.

    Raises:
        UserError: if the file is missing.
    """
    return hashlib.sha256(read_bytes(path, what)).hexdigest()


def is_sha256(value: object) -> bool:
    """Return whether a value read from a file has the form of a SHA-256 digest."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect numerical results."""
    result = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("numpy", "procgen", "procgen-mirror", "gym3", "scipy", "scikit-learn", "openTSNE",
                 "pynndescent", "hdbscan", "numba", "llvmlite", "pandas"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            result[name] = metadata.version(name)
    return result
