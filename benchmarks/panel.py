"""Speed of the interpretability panel, with as many samples as were published.

4000 samples of 10 steps with 18 saliency types, and 20 000 recorded states. The numbers are
random, the pictures blurred noise whose strips are about as large as those of real samples; the
writer is the panel's own. Time is what the page itself measures in headless Chromium, from disk
and from a server.

    python -m benchmarks.panel                     three to five minutes on two cores, and 0.5 GB
    python -m benchmarks.panel --num_samples 400   fewer samples
    python -m benchmarks.panel --keep FOLDER       write the panel there and keep it
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from analysis.panel_files import (
    PanelContent,
    PanelFolder,
    PanelSample,
    PanelSteps,
    SaliencyType,
    SampleSet,
    panel_size,
    write_panel,
)
from tools.browser import SHOWN, opened_page, running_browser, served

NUM_SAMPLES, NUM_STEPS, NUM_TYPES, NUM_ICS, NUM_RECORDED = 4000, 10, 18, 16, 20_000
FRAME = 64
FRAME_NOISE, SALIENCY_NOISE = 7, 3  # pixels of the noise that is enlarged to a picture
OPENING_LIMIT = 2.0  # seconds
REPEATS = 20
# Ends when the picture of the step is on the canvas, which is drawn before the next frame.
STEPPING = """async (repeats) => {
    const times = []
    for (let i = 0; i < repeats; i++) {
        const label = i % 10 < 9 ? "forward one step" : "first step"
        const button = document.querySelector(`[aria-label="${label}"]`)
        const begin = performance.now()
        button.click()
        await new Promise(requestAnimationFrame)
        await new Promise((resolve) => setTimeout(resolve))
        times.push(performance.now() - begin)
    }
    return times
}"""
FILTERING = """async () => {
    const bound = document.querySelector('li[aria-label="filter 1"] input')
    const begin = performance.now()
    bound.value = '0.5'
    bound.dispatchEvent(new Event('input', { bubbles: true }))
    await new Promise(requestAnimationFrame)
    await new Promise((resolve) => setTimeout(resolve))
    return performance.now() - begin
}"""
# Milliseconds from the address being asked for; what is shown by now is drawn with this frame.
NOW = "() => new Promise(requestAnimationFrame).then(() => performance.now())"


def synthetic_content(num_samples: int) -> PanelContent:
    """A panel of random numbers and pictures."""
    rng = np.random.default_rng(0)
    rows = num_samples * NUM_STEPS
    walks = rng.normal(size=(num_samples, NUM_STEPS, NUM_ICS)).astype(np.float32).cumsum(axis=1)

    def sample(number: int) -> PanelSample:
        own = np.random.default_rng([1, number])
        pictures = [_noise(own, SALIENCY_NOISE) for _ in range(NUM_TYPES)]
        return PanelSample(
            _moving(_noise(own, FRAME_NOISE)),
            {index: _moving(picture) for index, picture in enumerate(pictures)},
            {index: own.normal(size=(NUM_STEPS, NUM_ICS)).astype(np.float32)
             for index in range(NUM_TYPES)})

    def scalars() -> np.ndarray:
        return rng.random(rows, dtype=np.float32)

    return PanelContent(
        "synthetic", (SampleSet("random", tuple(range(num_samples)), NUM_STEPS, None),),
        tuple(SaliencyType("value" if index == 0 else f"type_{index}", f"type {index}", (4,))
              for index in range(NUM_TYPES)),
        np.ones((num_samples, NUM_TYPES), dtype=bool), (FRAME, FRAME),
        PanelSteps(walks.reshape(rows, NUM_ICS) / 2, scalars(), scalars(), scalars(),
                   rng.integers(0, 9, rows, dtype=np.uint8),
                   rng.integers(0, 9, rows, dtype=np.uint8), scalars()),
        rng.integers(-1, 12, num_samples).astype(np.int16),
        rng.normal(size=(NUM_RECORDED, NUM_ICS)).astype(np.float32), 50 * NUM_RECORDED, sample)


def _noise(rng: np.random.Generator, size: int) -> np.ndarray:
    """A picture uint8 (FRAME, FRAME, 3)."""
    coarse = rng.integers(0, 256, (size, size, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((FRAME, FRAME), Image.Resampling.BILINEAR))


def _moving(picture: np.ndarray) -> np.ndarray:
    """A picture that moves sideways, uint8 (NUM_STEPS, FRAME, FRAME, 3)."""
    return np.stack([np.roll(picture, 5 * t, axis=1) for t in range(NUM_STEPS)])


def measure(address: str, how: str) -> None:
    """Print how fast the page opens and steps."""
    openings = []
    for _ in range(3):
        with running_browser() as browser, opened_page(browser, address) as page:
            openings.append(page.evaluate(NOW) / 1000)
            stepping = page.evaluate(STEPPING, REPEATS)
            begin = time.perf_counter()
            page.get_by_label("next sample").click()
            page.wait_for_selector(SHOWN)
            sample = time.perf_counter() - begin
            begin = time.perf_counter()
            chosen = page.get_by_role("combobox", name="Saliency", exact=True)
            chosen.select_option(index=NUM_TYPES - 1)
            page.wait_for_selector(SHOWN)
            of_type = time.perf_counter() - begin
            page.get_by_role("button", name="Add a filter").click()
            filtering = page.evaluate(FILTERING)
    print(f"{how}: opens in {min(openings):.2f} to {max(openings):.2f} s (limit "
          f"{OPENING_LIMIT:.0f} s); a step takes {statistics.median(stepping):.0f} ms (at most "
          f"{max(stepping):.0f}), another sample {1000 * sample:.0f} ms, another saliency type "
          f"{1000 * of_type:.0f} ms, a filter {filtering:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num_samples", type=int, default=NUM_SAMPLES)
    parser.add_argument("--keep", type=Path, help="folder to write the panel to")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = PanelFolder(args.keep or Path(temporary) / "panel")
        if not folder.page_file.exists():
            content = synthetic_content(args.num_samples)
            print(f"{panel_size(content) / 1e6:.0f} MB are expected", flush=True)
            begin = time.perf_counter()
            folder.path.mkdir(parents=True)
            write_panel(folder.path, content)
            print(f"written in {time.perf_counter() - begin:.0f} s")
        size = sum(path.stat().st_size for path in folder.path.rglob("*") if path.is_file())
        print(f"{size / 1e6:.0f} MB")
        measure(folder.page_file.absolute().as_uri(), "from disk")
        with served(folder.path) as address:
            measure(address, "from a server")


if __name__ == "__main__":
    main()
