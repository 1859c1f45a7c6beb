"""Reading the three pages in the browser."""

from __future__ import annotations

import base64
import io
from urllib.parse import parse_qs, urlsplit

import numpy as np
from PIL import Image

from tools.browser import SHOWN


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
    """The view in the address, once it is written there: lists of texts by name."""
    page.wait_for_timeout(300)
    return parse_qs(urlsplit(page.url).fragment)


def parse_number(text):
    return float(text.replace("−", "-").replace("\u2009", ""))


def facts(page, row=0):
    """Texts about the frame by their titles, of one of several rows."""
    return page.locator(".facts").nth(row).evaluate("""(facts) => Object.fromEntries(
        [...facts.children].map((each) => [each.querySelector('dt').textContent,
            each.querySelector('dd').innerText.replace('−', '-').replace(/\\s+/g, ' ').trim()]))""")


def image_of(canvas):
    """All pixels of a canvas, float (H, W, 3)."""
    _, _, data = canvas.evaluate("(canvas) => canvas.toDataURL()").partition(",")
    image = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGBA")
    return np.asarray(image, float)[..., :3]


def colours(canvas, places):
    """Colours (n, 3) of a canvas at places (n, 2): across and down, from 0 to 1."""
    image = image_of(canvas)
    across, down = (np.asarray(places) * (image.shape[1], image.shape[0])).astype(int).T
    return image[down, across]


def pixels(canvas, size=64):
    """Colours of the middles of size x size equal parts of a canvas (size, size, 3)."""
    down, across = (np.indices((size, size)).reshape(2, -1) + 0.5) / size
    return colours(canvas, np.stack([across, down], axis=1)).reshape(size, size, 3)
