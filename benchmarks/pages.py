"""Speed of the interpretability panel and of the attribution page in headless Chromium.

    python -m benchmarks.pages                  everything; five to seven minutes and 0.5 GB
    python -m benchmarks.pages steps            one part: panel, steps or long
    python -m benchmarks.pages --keep FOLDER    write the pages there and keep them
    python -m benchmarks.pages --num_samples 400 panel

``panel`` has 4 000 samples of 10 steps, 18 saliency types and 20 000 recorded states. The other
parts are attribution pages: ``steps`` has 8 trajectories of 512 steps, three layers of IMPALA's
sizes, their activations, and a second output at the last layer; ``long`` has 32 trajectories of
1 000 steps and the value only. The data are random, about as sparse as real data, and written by
the pages' export code. Durations are measured in the page, opened from disk, and for the panel also
from a server. For a step, the processor time of the page's thread is also reported, which other
work on the machine affects less.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from playwright.sync_api import Browser, CDPSession, Page

from analysis.panel_files import (
    PanelContent,
    PanelFolder,
    SaliencyType,
    Sample,
    SampleSet,
    write_panel,
)
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
from benchmarks.harness import cost_of, parser_of, say, size_of
from tools.browser import SHOWN, opened_page, running_browser, served

FRAME = 64
FRAME_NOISE, SALIENCY_NOISE = 7, 3  # side of the noise in pixels before it is enlarged
VIEW = {"viewport": {"width": 1500, "height": 1100}}
# Milliseconds since the URL was requested, measured when the current view is drawn.
NOW = "() => new Promise(requestAnimationFrame).then(() => performance.now())"
# Durations in milliseconds; each ends when the step's images have been drawn on their canvases.
STEPPING = """async ([repeats, forward, first]) => {
    const times = []
    for (let i = 0; i < repeats; i++) {
        const label = i % 10 < 9 ? forward : first
        const button = document.querySelector(`[aria-label="${label}"]`)
        const begin = performance.now()
        button.click()
        await new Promise(requestAnimationFrame)
        await new Promise((resolve) => setTimeout(resolve))
        times.push(performance.now() - begin)
    }
    return times
}"""


def opening_times(address: str, work: Callable[[Browser, Page], None], **context: object) -> str:
    """Open a page three times, call ``work`` on it, and return the opening times as text."""
    openings = []
    for _ in range(3):
        with running_browser() as browser, opened_page(browser, address, **context) as page:
            openings.append(page.evaluate(NOW) / 1000)
            work(browser, page)
    return f"opens in {min(openings):.2f} to {max(openings):.2f} s"


def noise(rng: np.random.Generator, size: int) -> np.ndarray:
    """Return an image of noise, enlarged from (size, size, 3) to uint8 (FRAME, FRAME, 3)."""
    coarse = rng.integers(0, 256, (size, size, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((FRAME, FRAME), Image.Resampling.BILINEAR))


def moving(picture: np.ndarray, num_steps: int, pixels: int) -> np.ndarray:
    """Return frames of an image moving sideways, uint8 (num_steps, FRAME, FRAME, 3)."""
    return np.stack([np.roll(picture, pixels * t, axis=1) for t in range(num_steps)])


# The panel

NUM_SAMPLES, NUM_STEPS, NUM_TYPES, NUM_ICS, NUM_RECORDED = 4000, 10, 18, 16, 20_000
OPENING_LIMIT = 2  # seconds
PANEL_REPEATS = 20
FILTERING = """async () => {
    const bound = document.querySelector('li[aria-label="filter 1"] input')
    const begin = performance.now()
    bound.value = '0.5'
    bound.dispatchEvent(new Event('input', { bubbles: true }))
    await new Promise(requestAnimationFrame)
    await new Promise((resolve) => setTimeout(resolve))
    return performance.now() - begin
}"""


def panel_content(num_samples: int) -> PanelContent:
    """Return the content of a panel with random numbers and images."""
    rng = np.random.default_rng(0)
    rows = num_samples * NUM_STEPS
    walks = rng.normal(size=(num_samples, NUM_STEPS, NUM_ICS)).astype(np.float32).cumsum(axis=1)

    def sample(number: int) -> Sample:
        own = np.random.default_rng([1, number])
        pictures = [noise(own, SALIENCY_NOISE) for _ in range(NUM_TYPES)]
        return (
            moving(noise(own, FRAME_NOISE), NUM_STEPS, 5),
            {index: moving(picture, NUM_STEPS, 5) for index, picture in enumerate(pictures)},
            {index: own.normal(size=(NUM_STEPS, NUM_ICS)).astype(np.float32)
             for index in range(NUM_TYPES)})

    def scalars() -> np.ndarray:
        return rng.random(rows, dtype=np.float32)

    return PanelContent(
        "synthetic", (SampleSet("random", tuple(range(num_samples)), NUM_STEPS, None),),
        tuple(SaliencyType("value" if index == 0 else f"type_{index}", f"type {index}", (4,))
              for index in range(NUM_TYPES)),
        np.ones((num_samples, NUM_TYPES), dtype=bool), (FRAME, FRAME),
        {"coordinates": walks.reshape(rows, NUM_ICS) / 2,
         **{name: scalars() for name in ("rewards", "terminals", "values", "probabilities")},
         **{name: rng.integers(0, 9, rows, dtype=np.uint8) for name in ("entered", "answers")}},
        rng.integers(-1, 12, num_samples).astype(np.int16),
        rng.normal(size=(NUM_RECORDED, NUM_ICS)).astype(np.float32), 50 * NUM_RECORDED, {}, sample)


def measure_panel(folder: Path, num_samples: int) -> None:
    """Measure and print the size, opening time and response times of the panel."""
    panel = PanelFolder(folder)
    if not panel.page_file.exists():
        content = panel_content(num_samples)
        panel.path.mkdir(parents=True)
        say(f"written in {cost_of(write_panel, panel.path, content).seconds:.0f} s")
    say(f"{size_of(panel.path):.0f} MB")
    with served(panel.path) as address:
        for where, at in (("from disk", panel.page_file.absolute().as_uri()),
                          ("from a server", address)):
            times: dict[str, list[float]] = {}

            def work(_: Browser, page: Page, times: dict = times) -> None:
                def choose_type() -> None:
                    chosen = page.get_by_role("combobox", name="Saliency", exact=True)
                    chosen.select_option(index=NUM_TYPES - 1)
                    page.wait_for_selector(SHOWN)

                def next_sample() -> None:
                    page.get_by_label("next sample").click()
                    page.wait_for_selector(SHOWN)

                times["step"] = page.evaluate(STEPPING, [PANEL_REPEATS, "forward one step",
                                                         "first step"])
                times["sample"] = [1000 * cost_of(next_sample).seconds]
                times["type"] = [1000 * cost_of(choose_type).seconds]
                page.get_by_role("button", name="Add a filter").click()
                times["filter"] = [page.evaluate(FILTERING)]

            opening = opening_times(at, work)
            say(f"{where}: {opening} (limit {OPENING_LIMIT} s); a step takes "
                f"{np.median(times['step']):.0f} ms (at most {max(times['step']):.0f}), another "
                f"sample {times['sample'][0]:.0f} ms, another saliency type "
                f"{times['type'][0]:.0f} ms, a filter {times['filter'][0]:.0f} ms")


# The attribution page

NUM_FEATURES, NUM_OBSERVATIONS, NUM_ACTIONS = 8, 256, 15
GRIDS = {"block1": (32, 2), "block2": (16, 4), "block3": (8, 8)}  # cells along a side, and stride
EPISODE_STEPS = 64
PAGE_REPEATS = 120
FORWARD = "forward one frame"
CHOOSING = """async ([name, number]) => {
    const begin = performance.now()
    document.querySelectorAll(`input[name=${name}]`)[number].click()
    do await new Promise(requestAnimationFrame)
    while (document.querySelector('main').getAttribute('aria-busy') === 'true')
    await new Promise(requestAnimationFrame)
    return performance.now() - begin
}"""
# Number of frame changes per second while the page plays.
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

@dataclasses.dataclass(frozen=True)
class Size:
    """Size of an attribution page.

    Attributes:
        trajectories: number of trajectories.
        steps: number of steps per trajectory.
        others: number of outputs at the last layer in addition to the value.
    """

    trajectories: int
    steps: int
    others: int


SIZES = {"steps": Size(8, 512, 1), "long": Size(32, 1000, 0)}


def page_content(size: Size) -> PageContent:
    """Return the content of an attribution page with random numbers and images."""
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
    pictures = np.stack([noise(rng, FRAME_NOISE) for _ in range(16)])
    place = np.arange(total, dtype=np.int32)
    steps = Trajectories(
        place // size.steps, place // EPISODE_STEPS, place % EPISODE_STEPS,
        rng.integers(0, 2**31, total), rng.integers(0, NUM_ACTIONS, total).astype(np.int16),
        np.zeros(total, np.float32), place % EPISODE_STEPS == EPISODE_STEPS - 1,
        rng.normal(size=total).astype(np.float32), rng.normal(size=total).astype(np.float32),
        np.log(rng.dirichlet(np.ones(NUM_ACTIONS), total)).astype(np.float32))

    class SyntheticAgent:
        name = "model.pth"

        def frames(self, trajectory: int) -> np.ndarray:
            return moving(pictures[trajectory % len(pictures)], size.steps, 1)

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
        steps, rng.normal(size=total).astype(np.float32),
        {"reward_scale": 1.0, "gamma": 0.999, "lmbda": 0.95, "slope": 1.0, "r2": 0.5,
         "off": False}, [], {name: {} for name in GRIDS}, [], {}, 0.01, True)


def _cells(rng: np.random.Generator, side: int) -> np.ndarray:
    """Draw attributions (64, side, side, NUM_FEATURES + 1) of 64 steps, few of which are large."""
    shape = (64, side, side, NUM_FEATURES + 1)
    return (rng.normal(size=shape) * rng.exponential(size=shape)**2 / 40).astype(np.float32)


def _examples(rng: np.random.Generator, side: int, stride: int) -> dict:
    def of(rows: int, shares: float | None) -> PageExamples:
        shape = (NUM_FEATURES, rows, rows)
        return PageExamples(rng.integers(0, NUM_OBSERVATIONS, shape),
                            rng.integers(0, 64, (*shape, 2)).astype(np.float32),
                            rng.random(shape, dtype=np.float32), shares)

    return {"thumbnails": of(THUMBNAIL_SIDE, None),
            "spatial": tuple(of(round(side * share), share) for share in SUBDIVISIONS),
            "pictures": np.stack([noise(rng, FRAME_NOISE) for _ in range(NUM_OBSERVATIONS)])}


def memory_of(browser: Browser) -> float:
    """Return the memory of the largest renderer process in megabytes (proportional set size)."""
    session = browser.new_browser_cdp_session()
    found = session.send("SystemInfo.getProcessInfo")["processInfo"]
    sizes = []
    for process in found:
        if process["type"] == "renderer":
            lines = Path(f"/proc/{process['id']}/smaps_rollup").read_text().splitlines()
            sizes.append(int(next(line.split()[1] for line in lines if line.startswith("Pss:"))))
    return max(sizes) * 1024 / 1e6


def processor_time(session: CDPSession) -> float:
    """Return the processor time of the page's thread so far, in seconds."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return next(each["value"] for each in metrics if each["name"] == "TaskDuration")


def stepping(page: Page, where: str) -> None:
    """Measure and print the duration of a step.

    Args:
        where: name of the layer shown, for the output.
    """
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.evaluate(STEPPING, [10, FORWARD, FORWARD])
    begin = processor_time(session)
    times = page.evaluate(STEPPING, [PAGE_REPEATS, FORWARD, FORWARD])
    spent = (processor_time(session) - begin) / PAGE_REPEATS
    say(f"  a step at {where}: median {np.median(times):.0f} ms, 95 % "
          f"{np.quantile(times, 0.95):.0f} ms (limit 25); {1000 * spent:.1f} ms of processor "
          "time")


def measure_page(path: Path, size: Size) -> None:
    """Measure and print the opening time, response times and memory of an attribution page."""
    folder = AttributionPageFolder(path)
    say(f"{size.trajectories} trajectories of {size.steps} steps")
    if not folder.page_file.exists():
        folder.path.mkdir(parents=True)
        cost = cost_of(write_page, folder.path, page_content(size))
        say(f"  written in {cost.seconds:.0f} s")
    say(f"  {size_of(folder.path):.0f} MB")
    address = folder.page_file.absolute().as_uri()
    memory: list[float] = []
    opening = opening_times(address, lambda browser, _: memory.append(memory_of(browser)), **VIEW)
    say(f"  {opening}, then {memory[-1]:.0f} MB")
    with running_browser() as browser, opened_page(browser, address, **VIEW) as page:
        for number, layer in enumerate(GRIDS):
            page.evaluate(CHOOSING, ["layer", number])
            stepping(page, layer)
        page.evaluate(CHOOSING, ["layer", 1])
        page.evaluate("location.hash = location.hash + '&speed=30'")
        page.wait_for_timeout(300)
        say(f"  plays {page.evaluate(PLAYING, 3):.1f} frames/s of 30")
        times = [page.evaluate(CHOOSING, ["trajectory", number])
                 for number in range(1, size.trajectories)]
        say(f"  another trajectory: median {np.median(times):.0f} ms, longest {max(times):.0f} "
              "ms (limit 400)")
        times = [page.evaluate(CHOOSING, ["layer", number]) for number in (0, 2, 1)]
        say(f"  another layer: {', '.join(f'{each:.0f}' for each in times)} ms (limit 400)")
        page.evaluate(CHOOSING, ["layer", 0])
        for number in range(size.trajectories):
            page.evaluate(CHOOSING, ["trajectory", number])
        most = memory_of(browser)
        page.context.new_cdp_session(page).send("HeapProfiler.collectGarbage")
        page.wait_for_timeout(500)
        say(f"  after all trajectories at two layers it holds {memory_of(browser):.0f} MB (limit "
              f"600), and {most:.0f} MB with what the browser has not yet collected")


PARTS = ("panel", *SIZES)


def main() -> None:
    parser = parser_of(__doc__, PARTS)
    parser.add_argument("--num_samples", type=int, default=NUM_SAMPLES,
                        help="number of samples in the panel")
    parser.add_argument("--keep", type=Path, help="folder in which to write and keep the pages")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for part in (args.part,) if args.part else PARTS:
            folder = (args.keep or Path(temporary)) / part
            if part == "panel":
                measure_panel(folder, args.num_samples)
            else:
                measure_page(folder, SIZES[part])


if __name__ == "__main__":
    main()
