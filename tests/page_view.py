"""Helpers that read the three pages in a browser, and their data without the project's code."""

from __future__ import annotations

import base64
import codecs
import io
import json
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
from PIL import Image

from tools.browser import SHOWN


def read_script(path: Path) -> dict:
    """Return the content of a data file of a page."""
    data = path.read_bytes()
    text = data.decode("utf-16" if data.startswith(codecs.BOM_UTF16_LE) else "ascii")
    begin = f'panelData("{path.stem}", '
    assert text.startswith(begin) and text.endswith(");\n")
    return json.loads(text[len(begin):-3])


def bytes_of(letters: str) -> bytes:
    """Decode bytes from letters of 15 bits each; the first two letters hold the number of bytes."""
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


def go(page, fragment):
    """Show another view and wait until it is drawn."""
    page.evaluate("""(fragment) => new Promise((resolve) => {
        addEventListener('hashchange', () => setTimeout(resolve), { once: true })
        if (location.hash === `#${fragment}`) resolve()
        location.hash = fragment
    })""", fragment)
    page.wait_for_selector(SHOWN)
    page.evaluate("document.activeElement.blur()")


def fragment_of(page):
    """Return the view in the address, once it is written there, as lists of texts by name."""
    page.wait_for_timeout(300)
    return parse_qs(urlsplit(page.url).fragment)


def parse_number(text):
    return float(text.replace("−", "-").replace("\u2009", ""))


def facts(page, row=0):
    """Return the texts about the frame in one of several rows, by title."""
    return page.locator(".facts").nth(row).evaluate("""(facts) => Object.fromEntries(
        [...facts.children].map((each) => [each.querySelector('dt').textContent,
            each.querySelector('dd').innerText.replace('−', '-').replace(/\\s+/g, ' ').trim()]))""")


def image_of(canvas):
    """Return all pixels of a canvas, float (H, W, 3)."""
    _, _, data = canvas.evaluate("(canvas) => canvas.toDataURL()").partition(",")
    image = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGBA")
    return np.asarray(image, float)[..., :3]


def colours(canvas, places):
    """Return the colours (n, 3) of a canvas at places (n, 2): across and down, from 0 to 1."""
    image = image_of(canvas)
    across, down = (np.asarray(places) * (image.shape[1], image.shape[0])).astype(int).T
    return image[down, across]


def pixels(canvas, size=64):
    """Return the colours at the centres of size x size equal parts of a canvas (size, size, 3)."""
    down, across = (np.indices((size, size)).reshape(2, -1) + 0.5) / size
    return colours(canvas, np.stack([across, down], axis=1)).reshape(size, size, 3)
