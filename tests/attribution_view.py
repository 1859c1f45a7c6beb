"""Reading the attribution page in the browser, and what it should draw, computed from the files."""

import re

import numpy as np
from attribution_run import (
    NUM_FEATURES,
    hues,
)
from page_data import picture_of, read_script

from attribution.page_files import LEVELS, TILES
from tools.browser import SHOWN

MAP, UNITS = "block3", "embedder.relufc"
VALUE, RIGHT = "value", "log-probability of anything right"
GAMMA, LAMBDA = 0.999, 0.95
WIDE = {"viewport": {"width": 1500, "height": 1100}}
GAIN = 0.3  # if the address names none
RES = NUM_FEATURES  # number of the residual
DIM = 0.6  # of the frame behind an attribution


def show(page, fragment):
    """Another view: of the map's layer, if it names none."""
    text = fragment if "layer=" in fragment else f"layer={MAP}&{fragment}"
    page.evaluate("""(fragment) => new Promise((resolve) => {
        addEventListener('hashchange', () => setTimeout(resolve), { once: true })
        if (location.hash === `#${fragment}`) resolve()
        location.hash = fragment
    })""", text)
    page.wait_for_selector(SHOWN)


def said(page):
    """What the frame is, as numbers: trajectory and frame, from 1."""
    label = page.locator(".picture canvas").first.get_attribute("aria-label")
    return tuple(map(int, re.search(r"trajectory (\d+), frame (\d+)", label).groups()))


def facts(page):
    return page.evaluate("""() => Object.fromEntries(
        [...document.querySelectorAll('.facts > div')].map((each) => [
            each.querySelector('dt').textContent,
            each.querySelector('dd').innerText.replace('−', '-').replace(/\\s+/g, ' ').trim()]))""")


def parse_number(text):
    return float(text.replace("−", "-").replace("\u2009", ""))


def row(page, index=0):
    return page.locator(".row").nth(index)


def pixels(canvas, size=64):
    """Colours of the middles of size x size equal parts of a canvas, uint8 (size, size, 3)."""
    found = canvas.evaluate("""(canvas, size) => {
        const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data
        const found = []
        for (let i = 0; i < size; i++) for (let j = 0; j < size; j++) {
            const at = 4 * (Math.floor((i + 0.5) * canvas.height / size) * canvas.width
                            + Math.floor((j + 0.5) * canvas.width / size))
            found.push(data[at], data[at + 1], data[at + 2])
        }
        return found
    }""", size)
    return np.array(found, dtype=float).reshape(size, size, 3)


def picture(page, index=0, kind=0):
    """Of a row: its chart is the first canvas."""
    return row(page, index).locator("canvas").nth(1 + kind)


class Reference:
    """What the page should draw, computed here from the attributions' own files."""

    def __init__(self, run, folder):
        self.run, self.folder, self.steps = run, folder, run.steps
        self.manifest = read_script(folder.data_file("manifest"))
        self.layer = next(each for each in self.manifest["layers"] if each["name"] == MAP)

    def frame(self, trajectory, step):
        sheet = read_script(self.folder.frames_file(trajectory, step // TILES**2))["sheet"]
        image = picture_of(sheet)
        i, j = divmod(step % TILES**2, TILES)
        return image[64 * i:64 * i + 64, 64 * j:64 * j + 64].astype(float)

    def scale(self, output):
        """Median over all frames of the largest |cell| of a feature."""
        cells = [self.run.read("attributions", MAP, output, number).cells
                 for number in range(len(self.steps.bounds) - 1)]
        return np.median(np.abs(np.concatenate(cells)[..., :-1].astype(float)).max(axis=(1, 2, 3)))

    def picture(self, output, trajectory, step, kind, on=None, gain=GAIN, smoothing=0.5,
                overlay=True):
        cells = self.run.read("attributions", MAP, output, trajectory).cells[step]
        factor = gain / self.scale(output)
        return self.painted(cells, factor, trajectory, step, kind, on, smoothing, overlay)

    def painted(self, cells, factor, trajectory, step, kind, on=None, smoothing=1.0,
                overlay=True, stride=8):
        """Cells (H, W, F + 1), times a factor, in colours over a frame."""
        cells = cells.astype(float)
        unit = np.abs(cells).max() / LEVELS  # cells are whole numbers of this
        cells = np.rint(cells / unit) * unit
        res = cells.shape[-1] - 1
        colours = np.concatenate([hues(res), np.ones((1, 3))]) if res else np.ones((1, 3))
        mask = np.ones(res + 1) if on is None else np.isin(range(res + 1), on)
        mask[res] = mask[res] * (on is not None)
        cells = cells * mask * factor
        if kind == "signed":
            total = cells.sum(axis=-1, keepdims=True)
            colour = np.where(total > 0, [0.08, 0.24, 1], [0.88, 0.13, 0.04])
            rgb = np.abs(total) * colour
        else:
            part = {"positive": np.maximum(cells, 0), "negative": np.maximum(-cells, 0),
                    "combined": np.abs(cells)}[kind]
            rgb = part @ colours
        if smoothing:
            spread = np.zeros_like(rgb)
            size = len(rgb)
            for i in range(size):
                for j in range(size):
                    for y in range(size):
                        for x in range(size):
                            distance = np.hypot(y - i, x - j)
                            if distance <= 7:
                                spread[y, x] += rgb[i, j] * np.exp(-distance / smoothing)
            rgb = spread
        # Cell i of block3 is centred on pixel 8 i, so it has the pixels from 8 i - 4 to 8 i + 3.
        cell = np.floor(np.arange(64) / stride + 0.5).astype(int)
        lengths = np.linalg.norm(rgb, axis=-1, keepdims=True)
        own = np.where(lengths > 0, rgb / np.maximum(lengths, 1e-30), 0)
        bright = np.minimum(lengths, 1)
        size = len(rgb)
        inside = np.where(cell < size, cell, 0)
        shown = (cell < size)[:, None, None] * (cell < size)[None, :, None]
        bright = bright[inside][:, inside] * shown
        own = own[inside][:, inside]
        grey = DIM * (self.frame(trajectory, step) @ [0.299, 0.587, 0.114])[..., None] * overlay
        return 255 * bright * own + (1 - bright) * grey


def table_of(page, index=0):
    """Numbers of a row by their titles."""
    content = row(page, index).locator(".views .table")
    return {line.locator("th").text_content(): parse_number(line.locator("td").text_content())
            for line in content.locator("tr").all()}


def tile_of(image, line=0):
    """The middles of the pixels of the observation in a picture of all rows (64, 64, 3)."""
    at = np.round(16 + (np.arange(64) + 0.5) * 5).astype(int)
    return np.asarray(image, float)[line * (320 + 48 + 16) + 48 + at][:, at]
