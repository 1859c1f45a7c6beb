"""Speed of the interpretability panel and of the attribution page in headless Chromium.

    python -m benchmarks.pages                  everything; about five minutes and 0.5 GB
    python -m benchmarks.pages panel            one part: panel or attribution

The panel has 4 000 samples of 10 steps, 18 saliency types and 20 000 recorded states. The
attribution page has 8 trajectories of 512 steps, and attributions of the value to three layers with
the sizes of IMPALA's layers. The data are random, about as sparse as real data, and written by the
pages' export code. Durations are measured inside the pages, which are opened from disk.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from analysis.panel_files import (
    PanelContent,
    PanelFolder,
    SaliencyType,
    Sample,
    SampleSet,
    write_panel,
)
from attribution.page_files import (
    AttributionPageFolder,
    PageContent,
    PageLayer,
    PageOutput,
    write_page,
)
from attribution.trajectories import Trajectories
from benchmarks.harness import cost_of, parts_to_measure, say
from common.page_files import PageFolder
from tools.browser import opened_page, running_browser

FRAME = 64
NUM_ACTIONS = 15
NUM_SAMPLES, NUM_STEPS, NUM_TYPES, NUM_ICS, NUM_RECORDED = 4000, 10, 18, 16, 20_000
NUM_TRAJECTORIES, TRAJECTORY_STEPS, EPISODE_STEPS, NUM_FEATURES = 8, 512, 64, 8
GRIDS = {"block1": (32, 2), "block2": (16, 4), "block3": (8, 8)}  # cells along a side, and stride
REPEATS = 120
# Seconds since the URL was requested, measured when the current view is drawn.
NOW = "() => new Promise(requestAnimationFrame).then(() => performance.now() / 1000)"
# Durations in milliseconds; each ends when the step's images have been drawn on their canvases.
STEPPING = """async ([repeats, first, forward]) => {
    const times = []
    for (let i = 0; i < repeats; i++) {
        const button = document.querySelector(`[aria-label="${i % 10 < 9 ? forward : first}"]`)
        const begin = performance.now()
        button.click()
        await new Promise(requestAnimationFrame)
        await new Promise((resolve) => setTimeout(resolve))
        times.push(performance.now() - begin)
    }
    return times
}"""
# Number of frame changes per second while the attribution page plays.
PLAYING = """async (seconds) => {
    const shown = () => document.querySelector('.step b').textContent
    document.querySelector('[aria-label=play]').click()
    const begin = performance.now()
    let [count, last] = [0, shown()]
    while (performance.now() - begin < 1000 * seconds) {
        await new Promise(requestAnimationFrame)
        if (shown() !== last) count += 1
        last = shown()
    }
    document.querySelector('[aria-label=pause]').click()
    return count / seconds
}"""


def moving(rng: np.random.Generator, size: int, num_steps: int) -> np.ndarray:
    """Return frames of a noise image that moves sideways, uint8 (num_steps, FRAME, FRAME, 3). The
    noise is enlarged from (size, size, 3)."""
    coarse = rng.integers(0, 256, (size, size, 3), dtype=np.uint8)
    image = np.asarray(Image.fromarray(coarse).resize((FRAME, FRAME), Image.Resampling.BILINEAR))
    return np.stack([np.roll(image, 5 * t, axis=1) for t in range(num_steps)])


def panel_content() -> PanelContent:
    """Return the content of a panel with random numbers and images."""
    rng = np.random.default_rng(0)
    rows = NUM_SAMPLES * NUM_STEPS

    def sample(number: int) -> Sample:
        own = np.random.default_rng([1, number])
        return (
            moving(own, 7, NUM_STEPS), moving(own, 7, NUM_STEPS),
            {index: moving(own, 3, NUM_STEPS)[None] for index in range(NUM_TYPES)},
            {index: own.normal(size=(NUM_STEPS, NUM_ICS)).astype(np.float32)
             for index in range(NUM_TYPES)})

    steps: dict[str, np.ndarray] = {
        "coordinates": rng.normal(size=(rows, NUM_ICS)).astype(np.float32),
        **{name: rng.random(rows, dtype=np.float32)
           for name in ("rewards", "terminals", "values", "probabilities")},
        **{name: rng.integers(0, NUM_ACTIONS, rows, dtype=np.uint8)
           for name in ("entered", "answers")}}
    return PanelContent(
        "synthetic", "", "", (SampleSet("random", tuple(range(NUM_SAMPLES)), NUM_STEPS, None),),
        tuple(SaliencyType("value" if index == 0 else f"type_{index}", f"type {index}", (4,))
              for index in range(NUM_TYPES)), ("pixels",),
        np.ones((NUM_SAMPLES, NUM_TYPES), dtype=bool), (FRAME, FRAME),
        steps, rng.integers(-1, 12, NUM_SAMPLES).astype(np.int16),
        rng.normal(size=(NUM_RECORDED, NUM_ICS)).astype(np.float32), 50 * NUM_RECORDED, {}, (),
        sample)


class SyntheticAgent:
    """Agent of an attribution page with random frames and attributions."""

    name = "model.pth"

    def frames(self, trajectory: int) -> np.ndarray:
        return moving(np.random.default_rng(trajectory), 7, TRAJECTORY_STEPS)

    def attribution(self, layer: str, output: str, trajectory: int) -> dict[str, np.ndarray]:
        """Return random attributions of a trajectory, few of which are large; they do not depend
        on ``output``."""
        rng = np.random.default_rng(trajectory)
        side = GRIDS[layer][0]
        shape = (TRAJECTORY_STEPS, side, side, NUM_FEATURES + 1)
        cells = (rng.normal(size=shape) * rng.exponential(size=shape)**2 / 40).astype(np.float32)
        totals = cells.sum(axis=(1, 2))
        baseline = np.full(TRAJECTORY_STEPS, 5, np.float32)
        return {"cells": cells, "totals": totals, "output": baseline + totals.sum(axis=1),
                "baseline": baseline, "gap": np.full(TRAJECTORY_STEPS, 0.002, np.float32)}

    def lags(self, layer: str, output: str) -> int:
        return 0

    def memory(self, layer: str, output: str, trajectory: int) -> dict[str, np.ndarray]:
        return {}


def attribution_content() -> PageContent:
    """Return the content of an attribution page with random numbers and images."""
    rng = np.random.default_rng(0)
    total = NUM_TRAJECTORIES * TRAJECTORY_STEPS
    row = np.arange(total, dtype=np.int32)
    value, next_value, advantages = rng.normal(size=(3, total)).astype(np.float32)
    steps = Trajectories(
        row // TRAJECTORY_STEPS, row // EPISODE_STEPS, row % EPISODE_STEPS,
        rng.integers(0, 2**31, total), rng.integers(0, NUM_ACTIONS, total).astype(np.int16),
        np.zeros(total, np.float32), row % EPISODE_STEPS == EPISODE_STEPS - 1, value, next_value,
        np.log(rng.dirichlet(np.ones(NUM_ACTIONS), total)).astype(np.float32))
    layers = tuple(PageLayer(name, name, (side, side), 0, stride, NUM_FEATURES,
                             np.ones(NUM_FEATURES), {}, (0,))
                   for name, (side, stride) in GRIDS.items())
    unit = {"reward_scale": 1.0, "gamma": 0.999, "lmbda": 0.95, "slope": 1.0, "r2": 0.5,
            "off": False}
    return PageContent(
        "synthetic", (SyntheticAgent(),), (0,) * NUM_TRAJECTORIES, "no game",
        (PageOutput("value", "value"),), layers, steps, advantages, unit, [],
        {name: {} for name in GRIDS}, [], {}, 0.01, True,
        {"layer": 0, "trajectory": 0, "step": 0})


def measure_page(folder: PageFolder, unit: str) -> None:
    """Measure and print the opening time of a page and the duration of a step.

    Args:
        unit: word for a step in the labels of the page's buttons, "step" or "frame"; if it is
            "frame", the speed of playing is also measured.
    """
    address = f"{folder.page_file.absolute().as_uri()}#speed=30"
    openings = []
    for _ in range(3):
        with running_browser() as browser, opened_page(
                browser, address, viewport={"width": 1500, "height": 1100}) as page:
            openings.append(page.evaluate(NOW))
            times = page.evaluate(STEPPING, [REPEATS, f"first {unit}", f"forward one {unit}"])
            rate = page.evaluate(PLAYING, 3) if unit == "frame" else 0
    say(f"{folder.PAGE}: opens in {min(openings):.2f} to {max(openings):.2f} s; a step takes "
        f"{np.median(times):.0f} ms (95 %: {np.quantile(times, 0.95):.0f} ms)"
        + (f"; plays {rate:.1f} frames/s of 30" if rate else ""))


PARTS: dict[str, tuple] = {
    "panel": (PanelFolder, write_panel, panel_content, "step"),
    "attribution": (AttributionPageFolder, write_page, attribution_content, "frame")}


def main() -> None:
    for kind, write, content, unit in parts_to_measure(__doc__, PARTS).values():
        with tempfile.TemporaryDirectory() as name:
            folder = kind(Path(name))
            say(f"{folder.PAGE}: written in {cost_of(write, folder.path, content()).seconds:.0f} s")
            measure_page(folder, unit)


if __name__ == "__main__":
    main()
