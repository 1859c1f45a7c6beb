"""Helpers that read the attribution page in a browser, and a reference for its drawings."""

import re

import numpy as np
from attribution_run import NUM_FEATURES, hues
from page_view import go, parse_number, picture_of, read_script

from attribution.page_files import LEVELS, TILES

MAP, UNITS = "block3", "embedder.relufc"
VALUE, RIGHT = "value", "log-probability of anything right"
GAMMA, LAMBDA = 0.999, 0.95
WIDE = {"viewport": {"width": 1500, "height": 1100}}
GAIN = 0.3  # default of the page
RES = NUM_FEATURES  # index of the residual
DIM = 0.6  # brightness of the frame in the background


def show(page, fragment):
    """Show another view; the layer is MAP if the fragment names none."""
    go(page, fragment if "layer=" in fragment else f"layer={MAP}&{fragment}")


def shown_frame(page):
    """Return the numbers of the shown trajectory and frame, from 1."""
    label = page.locator(".picture canvas").first.get_attribute("aria-label")
    return tuple(map(int, re.search(r"trajectory (\d+), frame (\d+)", label).groups()))


def row(page, index=0):
    return page.locator(".row").nth(index)


def picture(page, index=0, kind=0):
    """Return the canvas of an image in a row; the first canvas of the row is its chart."""
    return row(page, index).locator("canvas").nth(1 + kind)


def table_of(page, index=0):
    """Return the numbers of a row by title."""
    return {line.locator("th").text_content(): parse_number(line.locator("td").text_content())
            for line in row(page, index).locator(".views .table tr").all()}


def tile_of(image, line=0):
    """Return the observation in an image of all rows, read at pixel centres (64, 64, 3)."""
    at = np.round(16 + (np.arange(64) + 0.5) * 5).astype(int)
    return np.asarray(image, float)[line * (320 + 48 + 16) + 48 + at][:, at]


def smoothed(rgb, smoothing):
    """Smooth colours of cells (H, W, 3) with exponential weights, up to a distance of 7 cells."""
    places = np.indices(rgb.shape[:2]).reshape(2, -1).T
    distance = np.linalg.norm(places[:, None] - places, axis=-1)
    weights = np.where(distance <= 7, np.exp(-distance / smoothing), 0)
    return (weights @ rgb.reshape(-1, 3)).reshape(rgb.shape)


class Reference:
    """Expected drawings of the page, computed from the files of the attributions."""

    def __init__(self, run, folder):
        self.run, self.folder, self.steps = run, folder, run.steps
        self.manifest = read_script(folder.data_file("manifest"))

    def frame(self, trajectory, step):
        sheet = read_script(self.folder.frames_file(trajectory, step // TILES**2))["sheet"]
        i, j = divmod(step % TILES**2, TILES)
        return picture_of(sheet)[64 * i:64 * i + 64, 64 * j:64 * j + 64].astype(float)

    def scale(self, output):
        """Return the median over frames of the largest |attribution| of any feature and cell."""
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
        """Return the image of cells (H, W, F + 1), times a factor, drawn over a frame."""
        cells = cells.astype(float)
        unit = np.abs(cells).max() / LEVELS  # quantisation step of the cells
        cells = np.rint(cells / unit) * unit
        res = cells.shape[-1] - 1
        hue = np.concatenate([hues(res), np.ones((1, 3))]) if res else np.ones((1, 3))
        mask = np.ones(res + 1) if on is None else np.isin(range(res + 1), on)
        mask[res] = mask[res] * (on is not None)
        cells = cells * mask * factor
        if kind == "signed":
            total = cells.sum(axis=-1, keepdims=True)
            rgb = np.abs(total) * np.where(total > 0, [0.08, 0.24, 1], [0.88, 0.13, 0.04])
        else:
            part = {"positive": np.maximum(cells, 0), "negative": np.maximum(-cells, 0),
                    "combined": np.abs(cells)}[kind]
            rgb = part @ hue
        if smoothing:
            rgb = smoothed(rgb, smoothing)
        # Cell i of block3 is centred on pixel 8 i, so it covers the pixels 8 i - 4 to 8 i + 3.
        cell = np.floor(np.arange(64) / stride + 0.5).astype(int)
        inside = cell < len(rgb)
        cell = np.where(inside, cell, 0)
        lengths = np.linalg.norm(rgb, axis=-1, keepdims=True)
        own = np.where(lengths > 0, rgb / np.maximum(lengths, 1e-30), 0)[cell][:, cell]
        bright = np.minimum(lengths, 1)[cell][:, cell] * np.outer(inside, inside)[..., None]
        grey = DIM * (self.frame(trajectory, step) @ [0.299, 0.587, 0.114])[..., None] * overlay
        return 255 * bright * own + (1 - bright) * grey
