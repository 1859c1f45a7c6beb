"""Reader of joblib files that accepts only arrays of numbers and plain containers.

A joblib file is a pickle, and a pickle can call any function by name. This reader resolves the few
names that a file of weights needs to classes that only store their arguments, and rejects any other
name. The bytes of an array follow its pickled description in the file
(``joblib.numpy_pickle.NumpyArrayWrapper``).
"""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from common.errors import UserError
from common.files import MAX_REASON, check_nested, read_bytes

KINDS = "biuf"  # NumPy kinds: boolean, signed and unsigned integer, floating point


class _Refused(Exception):
    """Raised for an entry that is not accepted; the message names it, to complete a sentence."""


class _Inert:
    """Base class of stand-ins, which reject any pickled state."""

    __slots__ = ()

    def __setstate__(self, state):
        raise _Refused(f"a state for a {type(self).__name__.strip('_')}")


class _ArrayType(_Inert):
    """Stand-in for ``numpy.ndarray``, the class of each array."""

    __slots__ = ()


class _Dtype(_Inert):
    """Stand-in for ``numpy.dtype``: type code and byte order."""

    __slots__ = ("code", "order")
    order: Literal["<", ">", "|", "="]

    def __init__(self, code: str, align: bool = False, copy: bool = False):
        self.code, self.order = str(code), "="

    def __setstate__(self, state: tuple):
        order, details = state[1], state[2:5]
        if any(detail is not None for detail in details) or order not in ("<", ">", "|", "="):
            raise _Refused(f"an array of the type '{self.code}' with fields")
        self.order = order

    def resolved(self) -> np.dtype:
        if self.code[:1] not in KINDS or not self.code[1:].isdigit():
            raise _Refused(f"an array of the type '{self.code}', which is no number")
        return np.dtype(self.code).newbyteorder(self.order)


class _ArrayWrapper(_Inert):
    """Stand-in for joblib's description of an array, which the array's bytes follow."""

    __slots__ = ("dtype", "fortran_order", "is_padded", "shape")

    def __setstate__(self, state: dict):
        if state["subclass"] is not _ArrayType or not isinstance(state["dtype"], _Dtype):
            raise _Refused("an array of a class of its own")
        self.dtype, self.shape = state["dtype"].resolved(), tuple(map(int, state["shape"]))
        self.fortran_order = state["order"] == "F"
        self.is_padded = state.get("numpy_array_alignment_bytes") is not None  # since joblib 1.2

    def read(self, file: io.BytesIO) -> np.ndarray:
        if self.is_padded:
            file.read(file.read(1)[0])
        if min(self.shape, default=0) < 0:
            raise ValueError(f"an array of the shape {self.shape}")
        size = math.prod(self.shape) * self.dtype.itemsize
        content = file.read(size)
        if len(content) < size:
            raise EOFError
        order: Literal["C", "F"] = "F" if self.fortran_order else "C"
        array = np.frombuffer(content, self.dtype).reshape(self.shape, order=order)
        return array.astype(self.dtype.newbyteorder("="))


class _Scalar(_Inert):
    """Stand-in for a NumPy scalar, which is converted to a Python number."""

    __slots__ = ()

    def __new__(cls, dtype: _Dtype, content: bytes):
        return np.frombuffer(content, dtype.resolved(), count=1)[0].item()


class _Default(_Inert):
    """Stand-in for the default factory of a ``defaultdict``."""

    __slots__ = ()


class _Dictionary(dict):
    """Stand-in for a ``defaultdict``, without its default."""

    def __init__(self, default: type):
        super().__init__()

    def __setstate__(self, state):
        raise _Refused("a state for a dictionary")


_ACCEPTED = {
    ("joblib.numpy_pickle", "NumpyArrayWrapper"): _ArrayWrapper,
    ("numpy", "ndarray"): _ArrayType,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "scalar"): _Scalar,
    ("numpy._core.multiarray", "scalar"): _Scalar,
    ("collections", "defaultdict"): _Dictionary,
    ("builtins", "float"): _Default,
}


class _Unpickler(pickle._Unpickler):  # in Python, because the C version cannot read array bytes
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self._content = file

    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in _ACCEPTED:
            raise _Refused(f"'{module}.{name}'")
        return _ACCEPTED[module, name]

    def load_build(self):
        super().load_build()
        if isinstance(self.stack[-1], _ArrayWrapper):
            self.stack[-1] = self.stack[-1].read(self._content)

    dispatch[pickle.BUILD[0]] = load_build


def read_joblib(path: Path, what: str) -> dict:
    """Read an uncompressed joblib file that holds a dictionary.

    Args:
        path: the file.
        what: kind of file, for error messages.

    Returns:
        Content of the file: dictionaries, lists, tuples, text, numbers and arrays of numbers.

    Raises:
        UserError: if the file is missing, damaged, not a dictionary, or contains anything else,
            such as code; the message names the rejected entry.
    """
    content = read_bytes(path, what)
    try:
        loaded = _Unpickler(io.BytesIO(content)).load()
    except _Refused as error:
        raise UserError(f"the {what} {path} holds {error}; nothing but arrays of numbers is read "
                        "from such a file, because the rest of it could be code") from None
    except Exception as error:  # files of other formats can raise almost any exception
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON]
        raise UserError(f"the {what} {path} is truncated, compressed or no joblib file "
                        f"({reason})") from None
    if not isinstance(loaded, dict):
        raise UserError(f"the {what} {path} holds a {type(loaded).__name__}, not a dict")
    check_nested(loaded, path)
    return loaded
