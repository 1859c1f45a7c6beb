"""The attribution page on disk: format and writer of its data files.

Layout::

    index.html, attribution.js, attribution.css     the page, as built by `make web`
    settings.json                   settings of the folder (common/results.py)
    data/manifest.js                ``PageContent`` without arrays, and statistics of attributions;
                                    see ``_manifest`` and ``summarise``
    data/steps.js                   episode, row, level, action, earned, ended, value and advantage
                                    of all steps (N,); probabilities of the actions (N, A)
    data/strips.js                  strips: for each trajectory, an image of two columns of each
                                    frame (STRIP_COLUMNS)
    data/frames_00000_000.js        sheet: frames of a trajectory
    data/attribution_00_00_00000.js attributions of an output to a layer in a trajectory: cells,
                                    int8 (T, H, W, F + 1), and peak, the |cell| stored as 127 (T,).
                                    For layers: totals, the sums over cells (T, F + 1); with
                                    integrated gradients also output, baseline (the output at
                                    the baseline of the activations), and gap (the completeness
                                    error), each (T,). For the frame itself: output (T,)
    data/memory_00_00_00000.js      attributions over time, for layers and outputs for which all
                                    trajectories have them: totals (T, L, F + 1); older, the
                                    attribution to the hidden state before the L steps; baseline,
                                    the output at the start of the integration path; and gap, the
                                    completeness error, each (T,)
    data/examples_00.js             thumbnails and spatial: examples of the features of a layer, see
                                    ``PageExamples``; seen, see ``PageLayer``
    data/observations_00_000.js     sheet: observations from which examples are cropped

``common/page_files.py`` documents how data files are loaded. Numbers in file names count layers,
outputs, trajectories and sheets from 0, in this order. A sheet is an image of TILES x TILES frames,
row by row. Cells are quantised to integers from -127 to 127, where 127 is the largest |cell| of the
frame; totals are exact. The last of F + 1 entries is the residual.

The page reads the files with ``web/attribution/lib/data.js``.

Letters in shape comments: N steps of all trajectories, T steps of one trajectory, H W grid of a
layer, F features, L steps of attributions over time, O observations, R C grid of examples, A
actions.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from attribution.page_statistics import LEVELS, quantise, sample_sizes, summarise
from attribution.results import ACTIVATIONS
from attribution.trajectories import Trajectories
from common.game_constants import ACTION_DIRECTIONS, FRAME_SIZE
from common.page_files import PageFolder, data_script, encoded, letters, packed
from common.progress import with_progress
from envs.objects import action_labels

FORMAT = 5  # version that web/attribution/lib/data.js reads
TILES = 16  # tiles along each side of a sheet
STRIP_COLUMNS = slice(42, 44)  # columns of a frame, as published: a little ahead of the player
STRIP_STEPS = 4096  # steps per line of a strip; WebP is limited to 16 383 pixels per side
_QUALITY, _EFFORT = 92, 2  # settings of the WebP encoder
ATTRIBUTION, PRODUCT, ACTIVATION = KINDS = ("attribution", "product", "activation")
PRODUCTS = "gradient_activation:"  # prefix of an output's name
_TITLES = {
    "value": "value", "taken": "log-probability of the action taken",
    "action": "log-probability of the most likely action",
    "leftwards": "mean log-probability of going left",
    "jumping_up": "log-probability of jumping up",
    "jumping_right": "log-probability of jumping right",
    "log_prob_other": "log-probability of other keys",
    "log_prob_still": "log-probability of no direction",
    ACTIVATIONS: "activation of the features"}
_PREFIXES = {"log_prob_any_": "log-probability of anything ", "log_prob_": "log-probability of ",
             "logit_sum_": "sum of logits: "}
MAX_NAME = 60  # maximum length of a feature's name


class AttributionPageFolder(PageFolder):
    """Folder of an attribution page."""

    PAGE = "attribution"

    def frames_file(self, trajectory: int, sheet: int) -> Path:
        return self.data_file(f"frames_{trajectory:05d}_{sheet:03d}")


class PageAgent(Protocol):
    """An agent whose trajectories a page shows. Arrays are read only when the page is written.

    Attributes:
        name: name of the agent on the page.
    """

    name: str

    def frames(self, trajectory: int) -> np.ndarray:
        """Read the frames of a trajectory, uint8 (T, 64, 64, 3)."""

    def attribution(self, layer: str, output: str, trajectory: int) -> Mapping[str, np.ndarray]:
        """Read the attributions of an output to a layer along a trajectory.

        ``output`` can also name gradient times activation of an output, or the activations, which
        the page shows like attributions.

        Returns:
            Arrays by name; all but ``cells`` are optional:

            - ``cells``: attributions per cell and feature in the output's unit, the residual last
              (T, H, W, F + 1); for the frame itself, gradients (T, H, W, 1)
            - ``totals``: sums of ``cells`` over cells (T, F + 1)
            - ``output``: the output (T,)
            - ``baseline``: the output at the baseline of the layer's activations (T,)
            - ``gap``: completeness error (T,)
        """

    def lags(self, layer: str, output: str) -> int:
        """Return the number of lags L in the attributions of an output to a layer at the current
        and earlier steps (see ``memory``), or 0 without them."""

    def memory(self, layer: str, output: str, trajectory: int) -> Mapping[str, np.ndarray]:
        """Read the attributions over time of an output to a layer along a trajectory.

        Returns:
            Arrays by name:

            - ``totals``: attributions by lag and feature, the residual last (T, L, F + 1)
            - ``older``: attribution to the hidden state before the L steps (T,)
            - ``baseline``: the output at the start of the integration path (T,)
            - ``gap``: completeness error (T,)
        """


@dataclasses.dataclass(frozen=True)
class PageExamples:
    """Dataset examples of a layer's features.

    Attributes:
        observation: index in ``PageLayer.pictures`` of the observation shown at each position,
            int32 (F, R, C); -1 for none.
        centre: row and column of the centre of the shown part of the observation, in pixels,
            float32 (F, R, C, 2).
        strength: activation of the feature at the position, float32 (F, R, C).
        shares: positions per cell of the layer along each axis; None for thumbnails of the legend.
    """

    observation: np.ndarray
    centre: np.ndarray
    strength: np.ndarray
    shares: float | None = None


@dataclasses.dataclass(frozen=True)
class PageLayer:
    """A layer, its features, and the outputs attributed to them.

    Attributes:
        name: short name.
        path: path of the module, or a description of the frame itself.
        grid: H and W, in cells.
        first_pixel, stride: centre of the first cell and distance between cells, in pixels; None
            for units.
        num_features: number of features F.
        stability: stability of each feature, see ``attribution.results``; NaN if unknown (F,).
        facts: statistics of the layer and of all its features, by title.
        outputs: indices in ``PageContent.outputs`` of the outputs attributed to this layer.
        partial: whether a part of the network bypasses the layer.
        gradients: whether the layer is the frame itself, which has only gradients.
        objects: dict of scores of the features as detectors of objects; None if unknown. ``score``:
            object score of the layer with its interval and chance level, [score, low, high,
            chance]; ``names``: kind of object after which each feature is named, or "" (F,);
            ``kinds``: for each feature, a list of {"kind", "auc", "low_95", "high_95",
            "chance_high"}, best first.
        thumbnails: dataset examples for the legend, if any.
        spatial: dataset examples by position, for several numbers of positions per cell.
        pictures: observations to which the examples refer, uint8 (O, 64, 64, 3); None if there are
            no examples.
        seen: episode, row and level of each observation, and its trajectory and step, -1 for
            observations that no trajectory contains, int32 (O, 5).
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
    seen: np.ndarray | None = None


def title_of(output: str, labels: Sequence[str]) -> str:
    """Return the human-readable title of an output; labels: names of the actions in the game."""
    if output in _TITLES:
        return _TITLES[output]
    for prefix, words in _PREFIXES.items():
        if output.startswith(prefix):
            return words + output.removeprefix(prefix)
    if output.startswith(PRODUCTS):
        return f"gradient × activation: {title_of(output.removeprefix(PRODUCTS), labels)}"
    number = output.removeprefix("logit_")
    return f"logit of {labels[int(number)]}" if number.isdigit() else output


def kind_of(output: str) -> str:
    """Return the kind of an output, see ``PageOutput.kind``."""
    return ACTIVATION if output == ACTIVATIONS else (
        PRODUCT if output.startswith(PRODUCTS) else ATTRIBUTION)


@dataclasses.dataclass(frozen=True)
class PageOutput:
    """An output of the agent, or a quantity that is shown like one.

    Attributes:
        name: name, as passed to ``PageAgent.attribution``.
        title: human-readable title.
        kind: ``attribution`` (for the frame itself: gradient), ``product`` (gradient times
            activation) or ``activation``. Only attributions to layers sum to the output minus its
            baseline.
    """

    name: str
    title: str
    kind: str = ATTRIBUTION


@dataclasses.dataclass(frozen=True)
class PageContent:
    """Content of an attribution page.

    Attributes:
        experiment: name of the experiment.
        agents: the agents, one or two.
        agent_of: index of each trajectory's agent in ``agents``.
        game: human-readable game and mode.
        outputs, layers: outputs and layers with attributions.
        steps: steps of all trajectories, grouped by agent.
        advantages: advantage of each step, float32 (N,).
        unit: dict of the settings of the advantages (``reward_scale``, ``gamma`` and ``lmbda``) and
            of the calibration of the values, see ``trajectories.Calibration``: ``slope`` of returns
            on values with ``slope_low_95`` and ``slope_high_95``, ``r2``, and ``off``, whether
            units seem to differ. NaN is replaced with None.
        bookmarks: lists of notable steps, [{"title", "why", "steps": [[trajectory, step, score]]}];
            scores may be None.
        labels: names of features, by short name of the layer and number of the feature, from 0.
        failures: last steps of failed episodes by cause, [{"cause", "steps": [[trajectory,
            step]]}]; empty if unknown.
        reports: URL of each check's section in the report, relative to the page, by the name of the
            check.
        tolerance: accepted completeness error.
        remembers: whether the agents are recurrent.
        start: numbers of the ``layer``, ``trajectory`` and ``step`` that the page shows first, and
            of the ``feature`` that it isolates, or None.
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
    start: dict[str, int | None]

    def source(self, trajectory: int) -> tuple[PageAgent, int]:
        """Return the agent of a trajectory, and the number of the trajectory among the trajectories
        of this agent."""
        number = self.agent_of[trajectory]
        return self.agents[number], trajectory - self.agent_of.index(number)

    def lags(self, layer: int, output: int) -> int:
        """Return the number of steps L of the attributions of an output to a layer over time; 0
        without such attributions, or if the agents differ in L.

        Args:
            layer, output: indices in ``layers`` and ``outputs``.
        """
        lags = {agent.lags(self.layers[layer].name, self.outputs[output].name)
                for agent in self.agents}
        return lags.pop() if len(lags) == 1 else 0


def write_page(path: Path, content: PageContent) -> None:
    """Write the page and its data.

    Args:
        path: folder to write to.
        content: content of the page.
    """
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
    # Reading, encoding and compressing all release the GIL.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        strips = list(pool.map(write_frames, numbers))
        work = pool.map(lambda job: _write_attributions(folder, content, *job), jobs)
        summaries = list(with_progress(work, len(jobs), "attribution"))
    _write(folder.data_file("strips"), {"strips": strips})
    for number, layer in enumerate(content.layers):
        if layer.pictures is not None and layer.seen is not None:
            for sheet, image in enumerate(_sheets(layer.pictures)):
                _write(folder.data_file(f"observations_{number:02d}_{sheet:03d}"),
                       {"sheet": image})
            _write(folder.data_file(f"examples_{number:02d}"), {
                "thumbnails": _encode_examples(layer.thumbnails) if layer.thumbnails else None,
                "spatial": [_encode_examples(examples) for examples in layer.spatial],
                "seen": packed(seen=layer.seen)})
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
                    for name, direction in zip(
                        action_labels(content.game.partition(",")[0]), ACTION_DIRECTIONS,
                        strict=True)],
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
        "tolerance": content.tolerance, "remembers": content.remembers, "start": content.start}


def _write_attributions(folder: AttributionPageFolder, content: PageContent, layer: int,
                        output: int) -> dict:
    """Write the attributions of an output to a layer in all trajectories.

    Args:
        folder: folder of the page.
        content: content of the page.
        layer, output: indices of the layer and the output in the content.

    Returns:
        ``layer``, ``output``, their ``lags``, and the result of ``summarise``.
    """
    names = content.layers[layer].name, content.outputs[output].name
    place = f"{layer:02d}_{output:02d}"  # in the names of the files
    lags = content.lags(layer, output)
    peaks, gaps, totals, sizes = [], [], [], []
    for trajectory in range(len(content.agent_of)):
        agent, number = content.source(trajectory)
        arrays = agent.attribution(*names, number)
        cells, peak = quantise(arrays["cells"])
        exact = {name: arrays[name].astype(np.float32)
                 for name in ("totals", "output", "baseline", "gap") if name in arrays}
        _write(folder.data_file(f"attribution_{place}_{trajectory:05d}"),
               packed(cells=cells, peak=peak, **exact))
        if lags:
            memory = agent.memory(*names, number)
            _write(folder.data_file(f"memory_{place}_{trajectory:05d}"), packed(
                **{name: memory[name] for name in ("totals", "older", "baseline", "gap")}))
        largest = np.abs(arrays["cells"].astype(np.float32)).max(axis=(1, 2))
        peaks.append(largest if content.layers[layer].gradients else largest[:, :-1])
        sizes.append(sample_sizes(arrays["cells"], content.layers[layer].gradients))
        gaps += [exact["gap"]] if "gap" in exact else []
        totals += [exact["totals"]] if "totals" in exact else []
    return {"layer": layer, "output": output, "lags": lags, **summarise(
        content.steps, content.tolerance, np.concatenate(sizes), np.concatenate(peaks), *(
            np.concatenate(pieces) if pieces else None for pieces in (gaps, totals)))}


def _encode_examples(examples: PageExamples) -> dict:
    return {"grid": examples.observation.shape[1:], "shares": examples.shares,
            "arrays": packed(observation=examples.observation.astype(np.int32),
                             centre=examples.centre.astype(np.float32),
                             strength=examples.strength.astype(np.float32))}


def _sheets(frames: np.ndarray) -> Iterator[str]:
    """Yield frames, uint8 (T, height, width, 3), as WebP sheets of TILES x TILES frames."""
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
    """Encode the columns STRIP_COLUMNS of frames, uint8 (T, height, width, 3), side by side, with
    STRIP_STEPS frames per line, as a WebP image."""
    lines = -(-len(frames) // STRIP_STEPS)
    columns = frames[:, :, STRIP_COLUMNS]  # (T, height, columns, 3)
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
