"""Speed of the attribution page in headless Chromium, and the memory it takes.

Two pages: 8 trajectories of 512 steps, with three layers of IMPALA's sizes, their activations, and
a second output at the last layer; and 32 trajectories of 1 000 steps with the value alone. The
numbers are random, about as sparse as real ones; the writer is the page's own. Times are what the
page itself measures, from disk; of a step also the time that the processor spent on the page's
thread, which other work on the machine changes less.

    python -m benchmarks.attribution_page                  both pages, two minutes on two cores
    python -m benchmarks.attribution_page steps            one of them: steps or long
    python -m benchmarks.attribution_page --keep FOLDER    write the pages there and keep them
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image
from playwright.sync_api import Browser, CDPSession, Page

from attribution.feature_examples import SUBDIVISIONS
from attribution.feature_examples import THUMBNAIL as THUMBNAIL_SIDE
from attribution.page_files import (
    ACTIVATION,
    AttributionPageFolder,
    PageContent,
    PageExamples,
    PageLayer,
    PageOutput,
    write_page,
)
from attribution.trajectories import Trajectories
from tools.browser import opened_page, running_browser

NUM_FEATURES, NUM_OBSERVATIONS, NUM_ACTIONS = 8, 256, 15
GRIDS = {"block1": (32, 2), "block2": (16, 4), "block3": (8, 8)}  # cells along a side, and stride
STEPS_OF_AN_EPISODE = 64
FRAME_NOISE = 7  # numbers along a side that are enlarged to a frame
REPEATS = 120
VIEW = {"viewport": {"width": 1500, "height": 1100}}
# Ends when the pictures of the step are on their canvases, which are drawn before the next frame.
STEPPING = """async (repeats) => {
    const times = []
    const button = document.querySelector('[aria-label="forward one frame"]')
    for (let i = 0; i < repeats; i++) {
        const begin = performance.now()
        button.click()
        await new Promise(requestAnimationFrame)
        await new Promise((resolve) => setTimeout(resolve))
        times.push(performance.now() - begin)
    }
    return times
}"""
CHOOSING = """async ([name, number]) => {
    const begin = performance.now()
    document.querySelectorAll(`input[name=${name}]`)[number].click()
    do await new Promise(requestAnimationFrame)
    while (document.querySelector('main').getAttribute('aria-busy') === 'true')
    await new Promise(requestAnimationFrame)
    return performance.now() - begin
}"""
# Frames a second that are seen to change while the page plays.
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
NOW = "() => new Promise(requestAnimationFrame).then(() => performance.now())"


@dataclasses.dataclass(frozen=True)
class Size:
    """How large a page is.

    Attributes:
        trajectories, steps: how many, and steps of each.
        others: outputs at the last layer beside the value.
    """

    trajectories: int
    steps: int
    others: int


SIZES = {"steps": Size(8, 512, 1), "long": Size(32, 1000, 0)}


def synthetic_content(size: Size) -> PageContent:
    """A page of random numbers and pictures."""
    rng = np.random.default_rng(0)
    total = size.trajectories * size.steps
    outputs = (PageOutput("value", "value"),
               *(PageOutput(f"logit_{number}", f"logit {number}") for number in range(size.others)),
               PageOutput("activations", "activation of the features", ACTIVATION))
    last = len(outputs) - 1
    layers = tuple(
        PageLayer(name, name, (side, side), 0, stride, NUM_FEATURES, np.ones(NUM_FEATURES),
                  {"observations": NUM_OBSERVATIONS},
                  tuple(range(len(outputs))) if name == "block3" else (0, last),
                  **_examples(rng, side, stride))
        for name, (side, stride) in GRIDS.items())
    cells = {name: _cells(rng, side) for name, (side, _) in GRIDS.items()}
    pictures = np.stack([_noise(rng) for _ in range(16)])
    place = np.arange(total)
    steps = Trajectories(
        *(each.astype(np.int32) for each in (
            place // size.steps, place // STEPS_OF_AN_EPISODE, place % STEPS_OF_AN_EPISODE)),
        rng.integers(0, 2**31, total), rng.integers(0, NUM_ACTIONS, total).astype(np.int16),
        np.zeros(total, np.float32), place % STEPS_OF_AN_EPISODE == STEPS_OF_AN_EPISODE - 1,
        rng.normal(size=total).astype(np.float32), rng.normal(size=total).astype(np.float32),
        np.log(rng.dirichlet(np.ones(NUM_ACTIONS), total)).astype(np.float32))

    class SyntheticAgent:
        name = "model.pth"

        def frames(self, trajectory: int) -> np.ndarray:
            picture = pictures[trajectory % len(pictures)]
            return np.stack([np.roll(picture, t, axis=1) for t in range(size.steps)])

        def attribution(self, layer: str, output: str, trajectory: int) -> dict[str, np.ndarray]:
            number = [each.name for each in outputs].index(output)
            own = np.roll(cells[layer], 7 * trajectory + 3 * number, axis=0)
            own = np.concatenate([own] * -(-size.steps // len(own)))[:size.steps]
            totals = own.sum(axis=(1, 2), dtype=np.float32)
            if number == last:
                return {"cells": np.abs(own), "totals": np.abs(totals)}
            baseline = np.full(size.steps, 5, np.float32)
            return {"cells": own, "totals": totals, "output": baseline + totals.sum(axis=1),
                    "baseline": baseline, "gap": np.full(size.steps, 0.002, np.float32)}

        def lags(self, layer: str, output: str) -> int:
            return 0

        def memory(self, layer: str, output: str, trajectory: int) -> dict[str, np.ndarray]:
            return {}

    return PageContent(
        "synthetic", (SyntheticAgent(),), (0,) * size.trajectories, "no game", outputs, layers,
        steps,
        rng.normal(size=total).astype(np.float32),
        {"reward_scale": 1.0, "gamma": 0.999, "lmbda": 0.95, "slope": 1.0, "r2": 0.5,
         "off": False}, [], {name: {} for name in GRIDS}, [], {}, 0.01, True)


def _cells(rng: np.random.Generator, side: int) -> np.ndarray:
    """Attributions of 64 steps (64, side, side, F + 1): few large ones, and many small ones."""
    shape = (64, side, side, NUM_FEATURES + 1)
    return (rng.normal(size=shape) * rng.exponential(size=shape)**2 / 40).astype(np.float32)


def _noise(rng: np.random.Generator) -> np.ndarray:
    """A picture uint8 (64, 64, 3)."""
    coarse = rng.integers(0, 256, (FRAME_NOISE, FRAME_NOISE, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((64, 64), Image.Resampling.BILINEAR))


def _examples(rng: np.random.Generator, side: int, stride: int) -> dict:
    def of(rows: int, shares: float | None) -> PageExamples:
        shape = (NUM_FEATURES, rows, rows)
        return PageExamples(rng.integers(0, NUM_OBSERVATIONS, shape),
                            rng.integers(0, 64, (*shape, 2)).astype(np.float32),
                            rng.random(shape, dtype=np.float32), shares)

    return {"thumbnails": of(THUMBNAIL_SIDE, None),
            "spatial": tuple(of(round(side * share), share) for share in SUBDIVISIONS),
            "pictures": np.stack([_noise(rng) for _ in range(NUM_OBSERVATIONS)])}


def memory_of(browser: Browser) -> float:
    """Megabytes of the processes that show pages, their share of what is shared included."""
    session = browser.new_browser_cdp_session()
    found = session.send("SystemInfo.getProcessInfo")["processInfo"]
    sizes = []
    for process in found:
        if process["type"] == "renderer":
            lines = Path(f"/proc/{process['id']}/smaps_rollup").read_text().splitlines()
            sizes.append(int(next(line.split()[1] for line in lines if line.startswith("Pss:"))))
    return max(sizes) * 1024 / 1e6


def processor_time(session: CDPSession) -> float:
    """Seconds that the page's thread has worked."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return next(each["value"] for each in metrics if each["name"] == "TaskDuration")


def stepping(page: Page, where: str) -> None:
    """Print how long a step takes."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.evaluate(STEPPING, 10)
    begin = processor_time(session)
    times = page.evaluate(STEPPING, REPEATS)
    spent = (processor_time(session) - begin) / REPEATS
    print(f"  a step at {where}: median {np.median(times):.0f} ms, 95 % "
          f"{np.quantile(times, 0.95):.0f} ms (limit 25); {1000 * spent:.1f} ms of processor "
          "time", flush=True)


def measure(folder: AttributionPageFolder, size: Size) -> None:
    """Print how fast a page opens and works, and the memory it takes."""
    address = folder.page_file.absolute().as_uri()
    openings = []
    for _ in range(3):
        with running_browser() as browser, opened_page(browser, address, **VIEW) as page:
            openings.append(page.evaluate(NOW) / 1000)
            memory = memory_of(browser)
    print(f"  opens in {min(openings):.2f} to {max(openings):.2f} s, then {memory:.0f} MB")
    with running_browser() as browser, opened_page(browser, address, **VIEW) as page:
        for number, layer in enumerate(GRIDS):
            page.evaluate(CHOOSING, ["layer", number])
            stepping(page, layer)
        page.evaluate(CHOOSING, ["layer", 1])
        page.evaluate("location.hash = location.hash + '&speed=30'")
        page.wait_for_timeout(300)
        print(f"  plays {page.evaluate(PLAYING, 3):.1f} frames/s of 30")
        times = [page.evaluate(CHOOSING, ["trajectory", number])
                 for number in range(1, size.trajectories)]
        print(f"  another trajectory: median {np.median(times):.0f} ms, longest {max(times):.0f} "
              "ms (limit 400)")
        times = [page.evaluate(CHOOSING, ["layer", number]) for number in (0, 2, 1)]
        print(f"  another layer: {', '.join(f'{each:.0f}' for each in times)} ms (limit 400)")
        page.evaluate(CHOOSING, ["layer", 0])
        for number in range(size.trajectories):
            page.evaluate(CHOOSING, ["trajectory", number])
        most = memory_of(browser)
        page.context.new_cdp_session(page).send("HeapProfiler.collectGarbage")
        page.wait_for_timeout(500)
        print(f"  after all trajectories at two layers it holds {memory_of(browser):.0f} MB (limit "
              f"600), and {most:.0f} MB with what the browser has not yet collected")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", choices=SIZES, help="both of them if not given")
    parser.add_argument("--keep", type=Path, help="folder to write the pages to")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for name in SIZES if args.page is None else (args.page,):
            size = SIZES[name]
            folder = AttributionPageFolder((args.keep or Path(temporary)) / name)
            print(f"{size.trajectories} trajectories of {size.steps} steps", flush=True)
            if not folder.page_file.exists():
                begin = time.perf_counter()
                folder.path.mkdir(parents=True)
                write_page(folder.path, synthetic_content(size))
                print(f"  written in {time.perf_counter() - begin:.0f} s")
            files = [path for path in folder.path.rglob("*") if path.is_file()]
            print(f"  {sum(path.stat().st_size for path in files) / 1e6:.0f} MB")
            measure(folder, size)


if __name__ == "__main__":
    main()
