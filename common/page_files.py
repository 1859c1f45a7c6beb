"""Pages that open from disk: where they are built, and the scripts that hold their data.

A page that is opened from disk may read neither files nor modules, only classic scripts. So every
file of data is one, which calls ``panelData(name, content)`` with JSON, and the page adds it to
itself when it needs it. Arrays in it are [type, letters of their little-endian numbers], or [type,
letters of a gzip file of these, "gzip"]; see ``letters``. Names that a user chose are values there,
never keys, and pages show them as text.

``web/shared/lib/data.js`` is the reader.
"""

from __future__ import annotations

import codecs
import gzip
import json
import shutil
import zlib
from pathlib import Path
from typing import ClassVar

import numpy as np

from common.errors import UserError
from common.schemas import Entry, File

BUILT = Path(__file__).parents[1] / "web" / "built"
BITS, FIRST_LETTER = 15, 0x4000  # in a letter of packed bytes; the letters up to 0xBFFF all exist
_TYPES = {"float32": "<f4", "int8": "i1", "int16": "<i2", "int32": "<i4", "uint8": "u1",
          "uint32": "<u4"}


class PageFolder:
    """Names in the folder of a page.

    Attributes:
        PAGE: its name in web/.
        FILES: entries of all its files, for its schema.
    """

    PAGE: ClassVar[str]
    FILES: ClassVar = {"pages": Entry("{}.html", File()), "scripts": Entry("{}.js", File()),
                       "styles": Entry("{}.css", File()), "data": Entry("data/{}.js", File())}

    def __init__(self, path: Path):
        self.path = Path(path)

    @property
    def page_file(self) -> Path:
        return self.path / "index.html"

    def data_file(self, name: str) -> Path:
        return self.path / "data" / f"{name}.js"

    def copy_page(self) -> None:
        """Put the built page into the folder, which may be there, and a folder for its data."""
        shutil.copytree(self.built(), self.path, dirs_exist_ok=True)
        self.data_file("").parent.mkdir()

    @classmethod
    def built(cls) -> Path:
        """Folder of the page as ``make web`` built it.

        Raises:
            UserError: if it is not there.
        """
        page = BUILT / cls.PAGE
        if not (page / "index.html").is_file():
            raise UserError(f"there is no built page in {page}; 'make web' builds it")
        return page


def data_script(path: Path, content: dict) -> bytes:
    """A file of data: plain ASCII, or UTF-16 with the mark that tells browsers so.

    Args:
        path: of the file, whose name without ending the page asks for.
        content: that JSON can hold.
    """
    inside = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    text = f"panelData({json.dumps(path.stem)}, {inside});\n"
    if text.isascii():
        return text.encode("ascii")
    return codecs.BOM_UTF16_LE + text.encode("utf-16-le", "surrogatepass")


def encoded(**arrays: np.ndarray) -> dict[str, list[str]]:
    """Arrays by name, of one of the types that pages read, as [type, letters]."""
    return {name: [array.dtype.name, letters(_little_endian(array))]
            for name, array in arrays.items()}


def packed(**arrays: np.ndarray) -> dict[str, list[str]]:
    """The same as [type, letters, "gzip"], compressed: for large arrays."""
    return {name: [array.dtype.name, letters(_compressed(array)), "gzip"]
            for name, array in arrays.items()}


def _compressed(array: np.ndarray) -> bytes:
    if array.dtype != np.int8:
        return gzip.compress(_little_endian(array), mtime=0)
    # Numbers cut to eight bits hardly ever come in the same order twice: without the search for
    # that, attributions are 7 % smaller, and take a tenth of the time.
    codes = zlib.compressobj(wbits=16 + zlib.MAX_WBITS, strategy=zlib.Z_HUFFMAN_ONLY)
    return codes.compress(_little_endian(array)) + codes.flush()


def _little_endian(array: np.ndarray) -> bytes:
    return array.astype(_TYPES[array.dtype.name]).tobytes()


def letters(data: bytes) -> str:
    """Bytes as text, for scripts in UTF-16: 15 bits a letter, where base64 has 6 in 8.

    The first two letters are the number of bytes, then come their bits, filled up with zeros.
    """
    bits = np.unpackbits(np.frombuffer(data, np.uint8))
    bits = np.pad(bits, (0, -len(bits) % BITS)).reshape(-1, BITS)
    codes = np.packbits(np.pad(bits, ((0, 0), (1, 0)))).view(">u2")
    size = [len(data) >> BITS, len(data) & (1 << BITS) - 1]
    return (np.concatenate([size, codes]) + FIRST_LETTER).astype("<u2").tobytes().decode(
        "utf-16-le")
