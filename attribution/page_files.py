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
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

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
NUM_BINS = 24  # of a histogram
NUM_STRONGEST = 8  # steps per feature, one per episode


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


class PageAgent(Protocol):
    """An agent whose trajectories a page shows; arrays are read when they are written.

    Attributes:
        name: name of its file.
    """

    name: str

    def frames(self, trajectory: int) -> np.ndarray:
        """Read the frames of a trajectory, uint8 (T, 64, 64, 3)."""

    def attribution(self, layer: str, output: str, trajectory: int) -> Mapping[str, np.ndarray]:
        """Read what a row of the page shows.

        Returns:
            ``cells`` (T, H, W, F + 1), by feature, the residual last, in the output's unit; and
            optionally ``totals``, their sums over cells (T, F + 1), ``output`` and ``baseline``,
            G(a) and G(0), and ``gap``, the completeness error (T,).
        """

    def lags(self, layer: str, output: str) -> int:
        """Number of steps that attributions over time go back; 0 if there are none."""

    def memory(self, layer: str, output: str, trajectory: int) -> Mapping[str, np.ndarray]:
        """Read attributions over time: ``totals`` (T, L, F + 1), by lag and feature, the residual
        last; ``older``, of the memory before these steps, ``baseline``, G at the start of the path,
        and ``gap`` (T,)."""


@dataclasses.dataclass(frozen=True)
class PageExamples:
    """Observations that show a layer's features.

    Attributes:
        observation: number of the observation at each position; -1 for none, int32 (F, R, C).
        centre: pixel on which its patch is centred, down and right, float32 (F, R, C, 2).
        strength: activation there, float32 (F, R, C).
        shares: positions of the grid per cell of the layer; None for a legend's thumbnails.
    """

    observation: np.ndarray
    centre: np.ndarray
    strength: np.ndarray
    shares: float | None = None


@dataclasses.dataclass(frozen=True)
class PageLayer:
    """A layer, its features, and what is attributed to them.

    Attributes:
        name, path: short name, and name of the module.
        grid: H and W.
        first_pixel, stride: pixels on which cells are centred; None for units.
        num_features: F.
        stability: of each feature, see ``attribution.features``; NaN if unknown (F,).
        facts: facts about the features as a whole, by title.
        outputs: numbers of the outputs that are attributed to this layer.
        partial: whether a part of the network bypasses it.
        gradients: whether it is the frame itself, which has only gradients.
        objects: kinds of object that its features respond to; None if unknown. ``score``: object
            score of the layer, with its interval and its value by chance, [score, low, high,
            chance]; ``names``: kind that each feature is named after, or "" (F,); ``kinds``: for
            each feature a list of {"kind", "auc", "low_95", "high_95", "chance_high"}, best first.
        thumbnails, spatial: examples, if there are any.
        pictures: the observations that the examples refer to, uint8 (O, 64, 64, 3).
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
    objects: dict | None = None
    thumbnails: PageExamples | None = None
    spatial: tuple[PageExamples, ...] = ()
    pictures: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class PageOutput:
    """An output of the agent, or a quantity that is shown like one.

    Attributes:
        name: as in ``--outputs``.
        title: title for people.
        kind: one of ``KINDS``. Only attributions sum to the output minus its baseline; gradient
            times activation and the activations of features are shown in addition.
    """

    name: str
    title: str
    kind: str = ATTRIBUTION


@dataclasses.dataclass(frozen=True)
class PageContent:
    """Everything that a page shows.

    Attributes:
        experiment: name of the experiment.
        agents: the agents, mostly one.
        agent_of: number of the agent of each trajectory.
        game: game and mode, for people.
        outputs, layers: outputs and layers with attributions.
        steps: steps of all trajectories, one agent after the other.
        advantages: float32 (N,).
        unit: how rewards are scaled, and how well values predict returns; see ``page_contents``.
        bookmarks: [{"title", "why", "steps": [[trajectory, step, score]]}].
        labels: names of features, by layer and feature from 0.
        failures: [{"cause", "steps": [[trajectory, step]]}] of failed episodes; empty if unknown.
        reports: addresses of the sections of a report of checks relative to the page, by check.
        tolerance: accepted completeness error.
        remembers: whether the agent has a memory.
    """

    experiment: str
    agents: tuple[PageAgent, ...]
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

    def source(self, trajectory: int) -> tuple[PageAgent, int]:
        """Agent of a trajectory, and the trajectory's number among those of this agent."""
        number = self.agent_of[trajectory]
        return self.agents[number], trajectory - self.agent_of.index(number)

    def lags(self, layer: int, output: int) -> int:
        """Number of steps that attributions over time go back; 0 if the agents differ."""
        lags = {agent.lags(self.layers[layer].name, self.outputs[output].name)
                for agent in self.agents}
        return lags.pop() if len(lags) == 1 else 0


def write_page(path: Path, content: PageContent) -> None:
    """Write the page and its data into a folder."""
    folder = AttributionPageFolder(path)
    folder.copy_page()
    numbers = range(len(content.agent_of))

    def write_frames(trajectory: int) -> str:
        agent, number = content.source(trajectory)
        frames = agent.frames(number)
        for sheet, image in enumerate(_sheets(frames)):
            _write(folder.frames_file(trajectory, sheet), {"sheet": image})
        return _strip(frames)

    jobs = [(layer, output) for layer in range(len(content.layers))
            for output in content.layers[layer].outputs]
    # Reading, encoding and compressing all let other threads work.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        strips = list(pool.map(write_frames, numbers))
        work = pool.map(lambda job: _write_attributions(folder, content, *job), jobs)
        summaries = list(with_progress(work, len(jobs), "attribution"))
    _write(folder.data_file("strips"), {"strips": strips})
    for number, layer in enumerate(content.layers):
        if layer.pictures is not None:
            for sheet, image in enumerate(_sheets(layer.pictures)):
                _write(folder.observations_file(number, sheet), {"sheet": image})
            _write(folder.examples_file(number), {
                "thumbnails": _encode_examples(layer.thumbnails) if layer.thumbnails else None,
                "spatial": [_encode_examples(examples) for examples in layer.spatial]})
    _write(folder.data_file("steps"), encoded(
        **{name: getattr(content.steps, name) for name in ("episode", "row", "action", "earned",
                                                           "value")},
        level=content.steps.level.astype(np.uint32), ended=content.steps.ended.astype(np.uint8),
        advantage=content.advantages.astype(np.float32),
        probabilities=np.exp(content.steps.log_probs).astype(np.float32)))
    _write(folder.data_file("manifest"), _manifest(content, summaries))


def _write(file: Path, content: dict) -> None:
    file.write_bytes(data_script(file, content))


def _manifest(content: PageContent, summaries: list[dict]) -> dict:
    return {
        "format": FORMAT, "experiment": content.experiment,
        "agents": [agent.name for agent in content.agents],
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
            "stability": [None if np.isnan(value) else float(value) for value in layer.stability],
            "facts": layer.facts, "outputs": layer.outputs, "partial": layer.partial,
            "gradients": layer.gradients, "objects": layer.objects,
            "examples": layer.pictures is not None,
        } for layer in content.layers],
        "summaries": summaries,
        "unit": content.unit, "bookmarks": content.bookmarks, "failures": content.failures,
        "reports": content.reports,
        "labels": [[content.labels.get(layer.name, {}).get(feature, "")
                    for feature in range(layer.num_features)] for layer in content.layers],
        "tolerance": content.tolerance, "remembers": content.remembers}


def _write_attributions(folder: AttributionPageFolder, content: PageContent, layer: int,
                        output: int) -> dict:
    """Write the attributions of an output to a layer in all trajectories; return their summary."""
    names = content.layers[layer].name, content.outputs[output].name
    lags = content.lags(layer, output)
    peaks, gaps, totals = [], [], []
    for trajectory in range(len(content.agent_of)):
        agent, number = content.source(trajectory)
        arrays = agent.attribution(*names, number)
        cells, peak = quantise(arrays["cells"])
        exact = {name: arrays[name].astype(np.float32)
                 for name in ("totals", "output", "baseline", "gap") if name in arrays}
        _write(folder.attribution_file(layer, output, trajectory),
               packed(cells=cells, peak=peak, **exact))
        if lags:
            memory = agent.memory(*names, number)
            _write(folder.memory_file(layer, output, trajectory), packed(
                **{name: memory[name] for name in ("totals", "older", "baseline", "gap")}))
        largest = np.abs(arrays["cells"].astype(np.float32)).max(axis=(1, 2))
        peaks.append(largest if content.layers[layer].gradients else largest[:, :-1])
        gaps += [exact["gap"]] if "gap" in exact else []
        totals += [exact["totals"]] if "totals" in exact else []
    return _summary(content, layer, output, np.concatenate(peaks), *(
        np.concatenate(pieces) if pieces else None for pieces in (gaps, totals)))


def quantise(cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Convert cells (T, H, W, F + 1) to int8; also return the |cell| that is ``LEVELS`` (T,)."""
    cells = cells.astype(np.float32)
    peak = np.abs(cells).max(axis=(1, 2, 3))
    scale = np.where(peak > 0, LEVELS / np.where(peak > 0, peak, 1), 0)
    return np.rint(cells * scale[:, None, None, None]).astype(np.int8), peak


def _summary(content: PageContent, layer: int, output: int, peaks: np.ndarray,
             gaps: np.ndarray | None, totals: np.ndarray | None) -> dict:
    """Statistics of a layer and an output over all trajectories.

    Returns:
        ``scale``: |cell| that is drawn bright, the median over frames of the largest one; ``gaps``:
        quantiles of the completeness errors, and how many are above the tolerance; ``means`` of
        each feature's totals, the residual's last (F + 1,); ``strongest``: for each feature the
        [trajectory, step, total] with its largest |totals|; ``lags``; ``spread``: for each feature
        a histogram over frames of its largest |cell|.
    """
    largest = peaks.max(axis=1)
    features = () if totals is None else totals[:, :-1].T
    histograms = [np.histogram(peak, bins=NUM_BINS) for _, peak in zip(features, peaks.T)]
    return {
        "layer": layer, "output": output,
        "scale": float(np.median(largest)) or float(largest.max()) or 1.0,
        "gaps": None if gaps is None else {
            "median": float(np.median(gaps)), "most": float(np.quantile(gaps, 0.99)),
            "largest": float(gaps.max()), "above": int((gaps > content.tolerance).sum()),
            "steps": len(gaps)},
        "means": [] if totals is None else totals.mean(axis=0).astype(float).tolist(),
        "strongest": [[[*content.steps.place(step), float(feature[step])]
                       for step in best_of_episodes(np.abs(feature), content.steps, NUM_STRONGEST)]
                      for feature in features],
        "lags": content.lags(layer, output),
        "spread": [{"low": float(edges[0]), "high": float(edges[-1]), "counts": counts.tolist()}
                   for counts, edges in histograms]}


def _encode_examples(examples: PageExamples) -> dict:
    return {"grid": examples.observation.shape[1:], "shares": examples.shares,
            "arrays": packed(observation=examples.observation.astype(np.int32),
                             centre=examples.centre.astype(np.float32),
                             strength=examples.strength.astype(np.float32))}


def _sheets(frames: np.ndarray) -> Iterator[str]:
    """Encode frames (T, H, W, 3) as WebP sheets of TILES x TILES."""
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
    """Encode the middle columns of frames (T, H, W, 3) next to each other, in lines of
    STRIP_STEPS."""
    lines = -(-len(frames) // STRIP_STEPS)
    columns = frames[:, :, STRIP_COLUMNS]  # (T, H, c, 3)
    width = min(len(frames), STRIP_STEPS)
    filled = np.zeros((lines * width, *columns.shape[1:]), np.uint8)
    filled[:len(frames)] = columns
    _, height, wide, _ = columns.shape
    image = filled.reshape(lines, width, height, wide, 3).transpose(0, 2, 1, 3, 4)
    return _webp(image.reshape(lines * height, width * wide, 3))


def _webp(image: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "WEBP", quality=_QUALITY, method=_EFFORT)
    return letters(buffer.getvalue())
