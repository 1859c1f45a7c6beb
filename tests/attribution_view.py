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
ABOVE = 99  # default percentile, below which cells are not drawn
PALETTE = ("fb3401", "f4d730", "3177e7", "1bff81", "b9affe", "ce5a4a", "7bcc98", "bd689c")
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
    """Return the canvas of an image in a row; the first canvas of the row is the observation or, in
    rows after the first, its chart."""
    return row(page, index).locator("canvas").nth(1 + kind)


def table_of(page, index=0):
    """Return the numbers of a row by title."""
    return {line.locator("th").text_content(): parse_number(line.locator("td").text_content())
            for line in row(page, index).locator(".chart .table tr").all()}


def tile_of(image, line=0):
    """Return the observation in an image of all rows, read at pixel centres (64, 64, 3)."""
    at = np.round(16 + (np.arange(64) + 0.5) * 5).astype(int)
    return np.asarray(image, float)[line * (320 + 48 + 16) + 48 + at][:, at]


def smoothed(rgb, smoothing):
    """Smooth colours of cells (H, W, C) with exponential weights, up to a distance of 7 cells."""
    places = np.indices(rgb.shape[:2]).reshape(2, -1).T
    distance = np.linalg.norm(places[:, None] - places, axis=-1)
    weights = np.where(distance <= 7, np.exp(-distance / smoothing), 0)
    return (weights @ rgb.reshape(-1, rgb.shape[-1])).reshape(rgb.shape)


class Reference:
    """Expected drawings of the page, computed from the files of the attributions."""

    def __init__(self, run, folder):
        self.run, self.folder, self.steps = run, folder, run.steps
        self.manifest = read_script(folder.data_file("manifest"))

    def frame(self, trajectory, step):
        sheet = read_script(self.folder.frames_file(trajectory, step // TILES**2))["sheet"]
        i, j = divmod(step % TILES**2, TILES)
        return picture_of(sheet)[64 * i:64 * i + 64, 64 * j:64 * j + 64].astype(float)

    def picture(self, output, trajectory, step, kind, **settings):
        """Return the image of an output at MAP."""
        cells = [self.run.read("attributions", MAP, output, number).cells
                 for number in range(len(self.steps.bounds) - 1)]
        return self.painted(cells, trajectory, step, kind, **settings)

    def painted(self, frames, trajectory, step, kind, on=None, gain=1.0, smoothing=0, above=ABOVE,
                overlay=True, stride=8, palette="apart"):
        """Return the image of cells at a step, drawn over the frame.

        Args:
            frames: cells of each trajectory (T, H, W, F + 1).
        """
        cells = frames[trajectory][step].astype(np.float32)
        unit = float(np.abs(cells).max()) / LEVELS  # quantisation step of the cells
        cells = np.rint(cells / np.float32(unit)).astype(float) * unit
        res = cells.shape[-1] - 1
        sizes = np.concatenate([np.abs(each.astype(np.float32)) for each in frames])
        sizes = sizes[..., :-1] if res else sizes
        mask = np.ones(res + 1, bool) if on is None else np.isin(range(res + 1), on)
        mask[res] &= on is not None
        usual = np.median(sizes.max(axis=(1, 2)), axis=0)[mask[:sizes.shape[-1]]]
        full = max(np.abs(cells[..., mask]).max(), usual.max(initial=0)) / gain
        least = np.percentile(sizes, above) if above else 0
        cells = np.where(mask & (np.abs(cells) >= least), cells, 0) / full
        colours = np.ones((res + 1, 3))
        if palette == "hues":
            colours[:res] = hues(res) / hues(res).max(axis=1, keepdims=True)
        elif res:
            colours[:res] = [[int(word[i:i + 2], 16) / 255 for i in (0, 2, 4)]
                             for word in PALETTE[:res]]
        if kind == "signed":
            total = cells.sum(axis=-1, keepdims=True)
            strength = np.abs(total)
            rgb = strength * np.where(total > 0, [0.08, 0.24, 1], [0.88, 0.13, 0.04])
        else:
            part = {"positive": np.maximum(cells, 0), "negative": np.maximum(-cells, 0),
                    "combined": np.abs(cells)}[kind]
            strength, rgb = part.sum(axis=-1, keepdims=True), part @ colours
        drawn = np.concatenate([rgb, strength], axis=-1)
        if smoothing:
            drawn = smoothed(drawn, smoothing)
        # Cell i of block3 is centred on pixel 8 i, so it covers the pixels 8 i - 4 to 8 i + 3.
        cell = np.floor(np.arange(64) / stride + 0.5).astype(int)
        inside = cell < len(drawn)
        cell = np.where(inside, cell, 0)
        drawn = drawn[cell][:, cell] * np.outer(inside, inside)[..., None]
        strength = drawn[..., 3:]
        own = np.where(strength > 0, drawn[..., :3] / np.maximum(strength, 1e-30), 0)
        opacity = np.minimum(np.sqrt(strength), 1)
        grey = DIM * (self.frame(trajectory, step) @ [0.299, 0.587, 0.114])[..., None] * overlay
        return 255 * opacity * own + (1 - opacity) * grey
