"""The attribution page on disk: the format of its data, and their writer.

Layout::

    index.html, attribution.js, attribution.css     the page, as `make web` built it
    settings.json                           what made the folder (common/results.py)
    data/manifest.js                        names and numbers of what there is
    data/steps.js                           every step of every trajectory, one after the other
    data/strips.js                          for each trajectory the middle columns of its frames
    data/frames_00000_000.js                a sheet of frames of a trajectory
    data/attribution_00_00_00000.js         of a layer, an output and a trajectory
    data/memory_00_00_00000.js              the same over the last steps, where that was computed
    data/examples_00.js                     examples of the features of a layer
    data/observations_00_000.js             a sheet of the observations that these are cut from

``common/page_files.py`` says how a file of data is read. Layers, outputs, trajectories and sheets
are numbered from 0. Tiles fill a sheet by rows. Cells of attributions are whole numbers from -127
to 127, of which 127 is the largest |cell| of the frame; totals are exact.

``web/attribution/lib/data.js`` is the reader.

Letters in shape comments: N steps of all trajectories, T steps of one, H W a layer's grid, F
features, O observations, R C a grid of examples, A actions.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from attribution.trajectories import Trajectories, best_of_episodes
from common.game_constants import ACTION_DIRECTIONS, ACTION_LABELS, FRAME_SIZE
from common.page_files import PageFolder, data_script, encoded, letters, packed
from common.progress import with_progress

FORMAT = 3  # that web/attribution/lib/data.js reads
TILES = 16  # of a sheet along both sides
STRIP_COLUMNS = slice(42, 44)  # of a frame, as published: a little ahead of the player
STRIP_STEPS = 4096  # in a line of a strip; WebP has no side above 16 383 pixels
LEVELS = 127  # of a quantised cell, on both sides of 0
_QUALITY, _EFFORT = 92, 2
ATTRIBUTION, PRODUCT, ACTIVATION = KINDS = ("attribution", "product", "activation")
NUM_PARTS = 24  # of a histogram
NUM_STRONGEST = 8  # steps of a feature, one an episode


class AttributionPageFolder(PageFolder):
    """Names in one folder."""

    PAGE = "attribution"

    def frames_file(self, trajectory: int, sheet: int) -> Path:
        return self.data_file(f"frames_{trajectory:05d}_{sheet:03d}")

    def attribution_file(self, layer: int, output: int, trajectory: int) -> Path:
        return self.data_file(f"attribution_{layer:02d}_{output:02d}_{trajectory:05d}")

    def memory_file(self, layer: int, output: int, trajectory: int) -> Path:
        return self.data_file(f"memory_{layer:02d}_{output:02d}_{trajectory:05d}")

    def examples_file(self, layer: int) -> Path:
        return self.data_file(f"examples_{layer:02d}")

    def observations_file(self, layer: int, sheet: int) -> Path:
        return self.data_file(f"observations_{layer:02d}_{sheet:03d}")


@dataclasses.dataclass(frozen=True)
class PageAttribution:
    """Attributions of an output to the features of a layer, along a trajectory.

    Attributes:
        cells: by feature, the residual last, in the output's unit, floating (T, H, W, F + 1).
        totals: their sums over cells, float32 (T, F + 1); None of gradients by the frame.
        output, baseline: G(a) and G(0), float32 (T,); None where there is none.
        gap: error of the integral, as a share, float32 (T,); likewise.
    """

    cells: np.ndarray
    totals: np.ndarray | None = None
    output: np.ndarray | None = None
    baseline: np.ndarray | None = None
    gap: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class PageMemory:
    """Attributions of an output to the features of a layer at the last L steps.

    Attributes:
        totals: by how many steps ago and by feature, the residual last, float32 (T, L, F + 1).
        older: of what was remembered before these steps, float32 (T,).
        baseline: G of the path's start, float32 (T,).
        gap: error of the integral, as a share, float32 (T,).
    """

    totals: np.ndarray
    older: np.ndarray
    baseline: np.ndarray
    gap: np.ndarray


@dataclasses.dataclass(frozen=True)
class PageExamples:
    """Observations that show a layer's features.

    Attributes:
        observation: number of the observation at each place; -1 for none, int32 (F, R, C).
        centre: pixel on which its patch is centred, down and right, float32 (F, R, C, 2).
        strength: of the activation there, float32 (F, R, C).
        shares: places of the grid a cell of the layer; None for a legend's pictures.
    """

    observation: np.ndarray
    centre: np.ndarray
    strength: np.ndarray
    shares: float | None = None


@dataclasses.dataclass(frozen=True)
class PageObjects:
    """Scores of a layer's features by kinds of object, see ``attribution.checking.object_files``.

    Attributes:
        score: object score of the layer, with its interval and what chance gives: [score, low,
            high, chance]; None for a number that there is not.
        names: of each feature the kind it is called by, "" for none (F,).
        kinds: of each feature [{"kind", "auc", "low_95", "high_95", "chance_high"}], best first
            (F,).
    """

    score: list[float | None]
    names: list[str]
    kinds: list[list[dict]]


@dataclasses.dataclass(frozen=True)
class PageLayer:
    """A layer, its features, and what is attributed to them.

    Attributes:
        name, path: short name, and that of the module.
        grid: H and W.
        first_pixel, stride: pixels on which cells are centred; None of units.
        num_features: F.
        stability: of each feature, see ``attribution.features``; NaN where unknown, (F,).
        facts: what is known of the features as a whole, by titles for people.
        outputs: numbers of the outputs that are attributed to this layer.
        partial: whether a part of the network goes around it.
        gradients: whether it is the frame itself, of whose pixels there are gradients alone.
        objects: what kinds of object its features go with; None where that is not known.
        thumbnails, spatial: examples; None and empty where there are none.
        pictures: the observations that the examples name, uint8 (O, 64, 64, 3).
    """

    name: str
    path: str
    grid: tuple[int, int]
    first_pixel: float | None
    stride: int | None
    num_features: int
    stability: np.ndarray
    facts: dict[str, float]
    outputs: tuple[int, ...]
    partial: bool = False
    gradients: bool = False
    objects: PageObjects | None = None
    thumbnails: PageExamples | None = None
    spatial: tuple[PageExamples, ...] = ()
    pictures: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class PageOutput:
    """An output that something is attributed to.

    Attributes:
        name: as in ``--outputs``.
        title: for people.
        kind: one of ``KINDS``. Only of an attribution, the output is its baseline and what its
            features add; gradient times activation, and the activations of features, are shown
            beside it.
    """

    name: str
    title: str
    kind: str = ATTRIBUTION


@dataclasses.dataclass(frozen=True)
class PageContent:
    """All that a page shows.

    Attributes:
        experiment: its name.
        agents: names of the agents' files; mostly one.
        agent_of: number of the agent that made each trajectory.
        game: and how it was played, for people.
        outputs, layers: what there is.
        steps: of all trajectories.
        advantages: float32 (N,).
        unit: of rewards and values, and how well they fit, for people; see ``contents``.
        bookmarks: [{"title", "why", "steps": [[trajectory, step, score]]}].
        labels: names of features by layer and feature, counted from 0.
        failures: [{"cause", "steps": [[trajectory, step]]}] of episodes that failed, by what ended
            them; empty where that is not known.
        reports: addresses of the sections of a report of checks, seen from the page, by the names
            of the checks.
        tolerance: of gaps, as a share.
        remembers: whether the agent has a memory.
        frames: reads the frames of a trajectory, uint8 (T, 64, 64, 3).
        attribution: reads those of a layer, an output and a trajectory, by their numbers.
        lags: steps that the attributions of a layer and an output go back to, 0 for none.
        memory: reads these, likewise.
    """

    experiment: str
    agents: tuple[str, ...]
    agent_of: tuple[int, ...]
    game: str
    outputs: tuple[PageOutput, ...]
    layers: tuple[PageLayer, ...]
    steps: Trajectories
    advantages: np.ndarray
    unit: dict
    bookmarks: list[dict]
    labels: dict[str, dict[int, str]]
    failures: list[dict]
    reports: dict[str, str]
    tolerance: float
    remembers: bool
    frames: Callable[[int], np.ndarray]
    attribution: Callable[[int, int, int], PageAttribution]
    lags: Callable[[int, int], int]
    memory: Callable[[int, int, int], PageMemory]

    @property
    def num_trajectories(self) -> int:
        return len(self.steps.bounds) - 1

    def place(self, step: int) -> tuple[int, int]:
        """Trajectory of a step, and its number there."""
        trajectory = int(self.steps.trajectory[step])
        return trajectory, int(step - self.steps.bounds[trajectory])


@dataclasses.dataclass(frozen=True)
class Summary:
    """Statistics of a layer and an output over all trajectories.

    Attributes:
        layer, output: numbers.
        scale: median over frames of the largest |cell| of a feature: that is drawn bright.
        gaps: median, 99 % quantile, largest, and how many are above the tolerance; None where
            there are none.
        means: of each feature's totals, the residual's last (F + 1,).
        strongest: for each feature [trajectory, step, total] of its largest |totals|.
        lags: steps that attributions go back to; 0 for none.
        spread: for each feature how many frames have which largest |cell| of it: {"low", "high",
            "counts"}; equal parts of that range.
    """

    layer: int
    output: int
    scale: float
    gaps: dict[str, float] | None
    means: list[float]
    strongest: list[list[list[float]]]
    lags: int
    spread: list[dict]


def write_page(path: Path, content: PageContent) -> None:
    """Write the page and its data into a folder."""
    folder = AttributionPageFolder(path)
    folder.copy_page()
    jobs = [(layer, output) for layer in range(len(content.layers))
            for output in content.layers[layer].outputs]

    def write_frames(trajectory: int) -> str:
        frames = content.frames(trajectory)
        for sheet, picture in enumerate(_sheets(frames)):
            file = folder.frames_file(trajectory, sheet)
            file.write_bytes(data_script(file, {"sheet": picture}))
        return _strip(frames)

    # Reading, encoding and compressing all let other threads work.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        strips = list(pool.map(write_frames, range(content.num_trajectories)))
        summaries = []
        work = pool.map(lambda job: _write_attributions(folder, content, *job), jobs)
        for summary in with_progress(work, len(jobs), "attribution"):
            summaries.append(summary)
    _write(folder.data_file("strips"), {"strips": strips})
    for number, layer in enumerate(content.layers):
        _write_examples(folder, number, layer)
    _write(folder.data_file("steps"), encoded(
        **{name: getattr(content.steps, name) for name in ("episode", "row", "action", "earned",
                                                           "value")},
        level=content.steps.level.astype(np.uint32), ended=content.steps.ended.astype(np.uint8),
        advantage=content.advantages.astype(np.float32),
        probabilities=np.exp(content.steps.log_probs).astype(np.float32)))
    _write(folder.data_file("manifest"), _manifest(content, summaries))


def _write(file: Path, content: dict) -> None:
    file.write_bytes(data_script(file, content))


def _manifest(content: PageContent, summaries: list[Summary]) -> dict:
    return {
        "format": FORMAT, "experiment": content.experiment, "agents": content.agents,
        "agent_of": content.agent_of, "game": content.game, "frame": FRAME_SIZE, "tiles": TILES,
        "levels": LEVELS,
        "strip": {"columns": STRIP_COLUMNS.stop - STRIP_COLUMNS.start, "steps": STRIP_STEPS},
        "actions": [{"name": name, "direction": direction}
                    for name, direction in zip(ACTION_LABELS, ACTION_DIRECTIONS, strict=True)],
        "outputs": [dataclasses.asdict(output) for output in content.outputs],
        "trajectories": np.diff(content.steps.bounds).tolist(),
        "layers": [{
            "name": layer.name, "path": layer.path, "grid": layer.grid,
            "first_pixel": layer.first_pixel, "stride": layer.stride,
            "num_features": layer.num_features,
            "stability": [None if np.isnan(each) else float(each) for each in layer.stability],
            "facts": layer.facts, "outputs": layer.outputs, "partial": layer.partial,
            "gradients": layer.gradients,
            "objects": None if layer.objects is None else dataclasses.asdict(layer.objects),
            "examples": layer.pictures is not None,
        } for layer in content.layers],
        "summaries": [dataclasses.asdict(summary) for summary in summaries],
        "unit": content.unit, "bookmarks": content.bookmarks, "failures": content.failures,
        "reports": content.reports,
        "labels": [[content.labels.get(layer.name, {}).get(feature, "")
                    for feature in range(layer.num_features)] for layer in content.layers],
        "tolerance": content.tolerance, "remembers": content.remembers}


def _write_attributions(folder: AttributionPageFolder, content: PageContent, layer: int,
                        output: int) -> Summary:
    """Write those of all trajectories, and sum them up."""
    peaks, gaps, totals = [], [], []
    for trajectory in range(content.num_trajectories):
        found = content.attribution(layer, output, trajectory)
        cells, peak = quantised(found.cells)
        exact = {name: getattr(found, name) for name in ("totals", "output", "baseline", "gap")}
        _write(folder.attribution_file(layer, output, trajectory), packed(
            cells=cells, peak=peak, **{name: array.astype(np.float32)
                                       for name, array in exact.items() if array is not None}))
        if content.lags(layer, output):
            _write(folder.memory_file(layer, output, trajectory),
                   packed(**vars(content.memory(layer, output, trajectory))))
        largest = np.abs(found.cells.astype(np.float32)).max(axis=(1, 2))
        peaks.append(largest if content.layers[layer].gradients else largest[:, :-1])
        if found.gap is not None:
            gaps.append(found.gap)
        if found.totals is not None:
            totals.append(found.totals)
    return _summary(content, layer, output, np.concatenate(peaks), *(
        np.concatenate(parts) if parts else None for parts in (gaps, totals)))


def quantised(cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cells (T, H, W, F + 1) as int8, and of each frame the |cell| that is ``LEVELS`` (T,)."""
    cells = cells.astype(np.float32)
    peak = np.abs(cells).max(axis=(1, 2, 3))
    scale = np.where(peak > 0, LEVELS / np.where(peak > 0, peak, 1), 0)
    return np.rint(cells * scale[:, None, None, None]).astype(np.int8), peak


def _summary(content: PageContent, layer: int, output: int, peaks: np.ndarray,
             gaps: np.ndarray | None, totals: np.ndarray | None) -> Summary:
    largest = peaks.max(axis=1)
    scale = float(np.median(largest)) or float(largest.max()) or 1.0
    features = () if totals is None else totals[:, :-1].T
    strongest = [[[*content.place(step), float(feature[step])]
                  for step in best_of_episodes(np.abs(feature), content.steps, NUM_STRONGEST)]
                 for feature in features]
    errors = None if gaps is None else {
        "median": float(np.median(gaps)), "most": float(np.quantile(gaps, 0.99)),
        "largest": float(gaps.max()), "above": int((gaps > content.tolerance).sum()),
        "steps": len(gaps)}
    return Summary(
        layer, output, scale, errors,
        [] if totals is None else totals.mean(axis=0).astype(float).tolist(), strongest,
        content.lags(layer, output), [_spread(peak) for _, peak in zip(features, peaks.T)])


def _spread(values: np.ndarray) -> dict:
    counts, edges = np.histogram(values, bins=NUM_PARTS)
    return {"low": float(edges[0]), "high": float(edges[-1]), "counts": counts.tolist()}


def _write_examples(folder: AttributionPageFolder, number: int, layer: PageLayer) -> None:
    if layer.pictures is None:
        return
    sheets = list(_sheets(layer.pictures))
    for sheet, picture in enumerate(sheets):
        _write(folder.observations_file(number, sheet), {"sheet": picture})
    _write(folder.examples_file(number), {
        "thumbnails": _examples(layer.thumbnails) if layer.thumbnails else None,
        "spatial": [_examples(examples) for examples in layer.spatial]})


def _examples(examples: PageExamples) -> dict:
    return {"grid": examples.observation.shape[1:], "shares": examples.shares,
            "arrays": packed(observation=examples.observation.astype(np.int32),
                             centre=examples.centre.astype(np.float32),
                             strength=examples.strength.astype(np.float32))}


def _sheets(frames: np.ndarray) -> Iterator[str]:
    """Frames (T, H, W, 3) in sheets of TILES x TILES, as letters of WebP files."""
    size = TILES * TILES
    for begin in range(0, len(frames), size):
        part = frames[begin:begin + size]
        rows = -(-len(part) // TILES)
        filled = np.zeros((rows * TILES, *part.shape[1:]), np.uint8)
        filled[:len(part)] = part
        height, width = part.shape[1:3]
        tiles = filled.reshape(rows, TILES, height, width, 3).swapaxes(1, 2)
        yield _webp(tiles.reshape(rows * height, TILES * width, 3))


def _strip(frames: np.ndarray) -> str:
    """The middle columns of frames (T, H, W, 3) beside each other, in lines of STRIP_STEPS."""
    lines = -(-len(frames) // STRIP_STEPS)
    columns = frames[:, :, STRIP_COLUMNS]  # (T, H, c, 3)
    width = min(len(frames), STRIP_STEPS)
    filled = np.zeros((lines * width, *columns.shape[1:]), np.uint8)
    filled[:len(frames)] = columns
    _, height, wide, _ = columns.shape
    picture = filled.reshape(lines, width, height, wide, 3).transpose(0, 2, 1, 3, 4)
    return _webp(picture.reshape(lines * height, width * wide, 3))


def _webp(picture: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "WEBP", quality=_QUALITY, method=_EFFORT)
    return letters(buffer.getvalue())
