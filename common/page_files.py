"""Folders and data files of web pages that are opened from disk.

Browsers let a page that is opened from disk load classic scripts, but no modules or other files.
Each data file is therefore a script that calls ``panelData(name, content)`` with JSON; the page
loads it on demand. Arrays are stored as [type, text], or as [type, text, "gzip"] if compressed; the
text encodes the bytes of little-endian numbers, see ``letters``. Names chosen by a user are stored
as values, never as keys, and pages show them as text.

``web/shared/lib/data.js`` reads these files.
"""

from __future__ import annotations

import codecs
import gzip
import json
import shutil
import zlib
from pathlib import Path
from typing import ClassVar

import jinja2
import numpy as np

from common.errors import UserError
from common.schemas import Entry, File
from common.tables import with_minus

BUILT = Path(__file__).parents[1] / "web" / "built"
BITS, FIRST_LETTER = 15, 0x4000  # per character; all code points up to 0xBFFF are valid
_TYPES = {"float16": "<f2", "float32": "<f4", "int8": "i1", "int16": "<i2", "int32": "<i4",
          "uint8": "u1", "uint32": "<u4"}


class PageFolder:
    """Paths in the output folder of a web page.

    Args:
        path: the folder.

    Attributes:
        PAGE: name of the page in web/.
        FILES: entries of all files of the page, for its schema.
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
        """Copy the built page into the folder, and create the subfolder ``data``, which must not
        exist."""
        shutil.copytree(self.built(), self.path, dirs_exist_ok=True)
        self.data_file("").parent.mkdir()

    @classmethod
    def built(cls) -> Path:
        """Return the folder of the page built by ``make web``.

        Raises:
            UserError: if the page has not been built.
        """
        page = BUILT / cls.PAGE
        if not (page / "index.html").is_file():
            raise UserError(f"there is no built page in {page}; 'make web' builds it")
        return page


def templates(folder: Path) -> jinja2.Environment:
    """Return the HTML templates in a folder; they can include ``style.css`` and ``films.js``.
    Negative numbers in their texts have minus signs."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, Path(__file__).parent / "templates"]),
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        finalize=lambda value: with_minus(value) if type(value) is str else value)


def data_script(path: Path, content: dict) -> bytes:
    """Return the bytes of a data file: ASCII, or UTF-16 with a byte order mark.

    Args:
        path: path of the data file; the page requests it by its stem.
        content: JSON-serialisable data.
    """
    inside = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    text = f"panelData({json.dumps(path.stem)}, {inside});\n"
    if text.isascii():
        return text.encode("ascii")
    return codecs.BOM_UTF16_LE + text.encode("utf-16-le", "surrogatepass")


def encoded(**arrays: np.ndarray) -> dict[str, list[str]]:
    """Encode arrays by name as [type, text].

    The types are float16, float32, int8, int16, int32, uint8 and uint32; others raise a
    ``KeyError``.
    """
    return {name: [array.dtype.name, letters(_little_endian(array))]
            for name, array in arrays.items()}


def packed(**arrays: np.ndarray) -> dict[str, list[str]]:
    """Compress and encode large arrays by name as [type, text, "gzip"]; for types see ``encoded``.
    """
    return {name: [array.dtype.name, letters(_compressed(array)), "gzip"]
            for name, array in arrays.items()}


def _compressed(array: np.ndarray) -> bytes:
    if array.dtype != np.int8:
        return gzip.compress(_little_endian(array), mtime=0)
    # Sequences of 8-bit numbers rarely repeat. Huffman coding alone takes a tenth of the time of
    # the default strategy, and compressed attributions are 7 % smaller.
    codes = zlib.compressobj(wbits=16 + zlib.MAX_WBITS, strategy=zlib.Z_HUFFMAN_ONLY)
    return codes.compress(_little_endian(array)) + codes.flush()


def _little_endian(array: np.ndarray) -> bytes:
    return array.astype(_TYPES[array.dtype.name]).tobytes()


def letters(data: bytes) -> str:
    """Encode bytes as text with 15 bits per character, for a script in UTF-16. (Base64 has 6 bits.)

    The first two characters encode the number of bytes; the bits follow, padded with zeros.
    """
    bits = np.unpackbits(np.frombuffer(data, np.uint8))
    bits = np.pad(bits, (0, -len(bits) % BITS)).reshape(-1, BITS)
    codes = np.packbits(np.pad(bits, ((0, 0), (1, 0)))).view(">u2")
    size = [len(data) >> BITS, len(data) & (1 << BITS) - 1]
    return (np.concatenate([size, codes]) + FIRST_LETTER).astype("<u2").tobytes().decode(
        "utf-16-le")
