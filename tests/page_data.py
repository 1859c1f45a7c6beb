"""Reader of the data of pages, for tests: written by hand, without the project's writer."""

import codecs
import io
import json
from pathlib import Path

import numpy as np
from PIL import Image


def read_script(path: Path) -> dict:
    """The content that a file of data gives to its page."""
    data = path.read_bytes()
    text = data.decode("utf-16" if data.startswith(codecs.BOM_UTF16_LE) else "ascii")
    begin = f'panelData("{path.stem}", '
    assert text.startswith(begin) and text.endswith(");\n")
    return json.loads(text[len(begin):-3])


def bytes_of(letters: str) -> bytes:
    """Bytes from letters that hold 15 bits each, behind two that hold their number."""
    codes = [ord(letter) - 0x4000 for letter in letters]
    assert all(0 <= code < 1 << 15 for code in codes)
    bits = "".join(f"{code:015b}" for code in codes)
    size, bits = int(bits[:30], 2), bits[30:]
    assert len(bits) - 15 < 8 * size <= len(bits) and "1" not in bits[8 * size:]
    return bytes(int(bits[at:at + 8], 2) for at in range(0, 8 * size, 8))


def array_of(pair: list[str]) -> np.ndarray:
    return np.frombuffer(bytes_of(pair[1]), np.dtype(pair[0]).newbyteorder("<"))


def picture_of(letters: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(bytes_of(letters))).convert("RGB"))
