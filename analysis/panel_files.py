"""The interpretability panel on disk: data format and writer.

Layout::

    index.html, panel.js, panel.css     the page, as built by `make web`
    settings.json                       settings that produced the folder (common/results.py)
    data/manifest.js                    JSON: experiment, agent and game; sets of samples, saliency
                                        types and maps, actions; frame size, sample shown first
    data/steps.js                       arrays of ``PanelContent.steps`` (R, …), ``has_saliency``,
                                        uint8 (N, F), and optionally ``behaviours``, int16 (N,)
    data/recorded.js                    ``coordinates`` of recorded states, float32 (S, k), and
                                        optionally the player's position, float32 (S,) per column
    data/gradients_00.js                ``gradients`` of saliency type 0 with respect to the
                                        coordinates, float32 (R, k); NaN for samples without
                                        this type
    data/frames_00000.js                ``frames`` of sample 0, a strip, and ``recorded`` frames
                                        from the same start, a strip or null
    data/pictures_00000.js              ``saliency``: saliency images of sample 0; for each saliency
                                        type, a list of strips (one per map), or null
    data/features.js                    only with sparse features: ``features``, a list of
                                        ``Feature`` (without ``examples``), strongest first
    data/feature_007.js                 ``examples`` of sparse feature 7: a strip, or null
    data/failure_00113.js               only with decisions: ``film`` of episode 113, an MP4 file

Data files are scripts (see ``common/page_files.py``). A strip is a WebP file with images side by
side; strips and films are encoded as text by ``common.page_files.letters``. The images show all
steps of a sample, or are examples.
Samples and saliency types are numbered from 0.

``web/panel/lib/data.js`` reads these files.

Letters in shape comments: R rows (all steps of sample 0, then of sample 1, and so on); S recorded
states; k independent components; F saliency types; M saliency maps of a type.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from common.game_constants import ACTION_DIRECTIONS
from common.page_files import PageFolder, data_script, encoded, letters
from common.progress import with_progress
from envs.objects import action_labels

FORMAT = 7  # version of the format; web/panel/lib/data.js expects this one
NOT_RECORDED = 255  # code of an action that a published sample does not store
NO_BEHAVIOUR = -1
# Measured on simulated frames: strips of 640 x 64 pixels take 10 kB (frames) and 3.5 kB (saliency),
# lossless 50 kB; the mean error is 1 of 256 levels for frames and 2 for saliency.
_FRAME_QUALITY, _SALIENCY_QUALITY = 95, 82
_EFFORT = 2  # encoder effort; the default of 4 saves 7 % and takes three times as long


class PanelFolder(PageFolder):
    """Folder of one panel, with the names of its files."""

    PAGE = "panel"

    def gradients_file(self, saliency_type: int) -> Path:
        return self.data_file(f"gradients_{saliency_type:02d}")

    def frames_file(self, sample: int) -> Path:
        return self.data_file(f"frames_{sample:05d}")

    def pictures_file(self, sample: int) -> Path:
        return self.data_file(f"pictures_{sample:05d}")

    def feature_file(self, feature: int) -> Path:
        return self.data_file(f"feature_{feature:03d}")

    def failure_file(self, failure: int) -> Path:
        return self.data_file(f"failure_{failure:05d}")


@dataclasses.dataclass(frozen=True)
class SaliencyType:
    """A function for which some of the samples have saliency.

    Attributes:
        title: name shown in the panel.
        steps: steps at which the function was evaluated, counted from 0; empty if they are
            unknown or if the function depends on all steps.
        counterfactual: whether it is a counterfactual map, which shows the function at each step up
            to the last of ``steps``, and has no gradients with respect to the hidden state.
    """

    name: str
    title: str
    steps: tuple[int, ...]
    counterfactual: bool = False


@dataclasses.dataclass(frozen=True)
class SampleSet:
    """Samples of one folder.

    Attributes:
        num_steps: number of steps per sample, T.
        unaltered: for samples recorded with swapped directions, name of the folder of samples with
            the same start vectors and without the swap; otherwise None.
        starts: number of the start of each sample, or None if unknown.
        variants: difference of each sample from others of its start, such as "world 2".
    """

    name: str
    numbers: tuple[int, ...]
    num_steps: int
    unaltered: str | None
    starts: tuple[int | None, ...]
    variants: tuple[str, ...]


Interval = tuple[float | None, float | None, float | None]
"""An estimate, and the limits of its 95 % interval; None if they were not computed."""


@dataclasses.dataclass(frozen=True)
class Dream:
    """Dream of a sparse feature: rollout simulated from the start that was optimised for it, see
    ``analysis/feature_dreams.py``.

    Attributes:
        step: simulated step at which the feature is read, from 0.
        score: z-score of the pre-TopK activation at this step, relative to the recorded starts.
        recorded_score: largest score of the recorded starts from which no search began.
        dreamed: whether the feature is active at this step of the rollout.
        active: whether it is active in the real game near the start; None if this was not tested.
        others_active: share of the starts of other features near which it is active, or None.
        sample: index of the sample in the panel; None if the panel does not show it.
    """

    step: int
    score: float
    recorded_score: float
    dreamed: bool
    active: bool | None
    others_active: float | None
    sample: int | None


@dataclasses.dataclass(frozen=True)
class Feature:
    """A sparse feature of the hidden state, see ``analysis/sparse_features.py``.

    Attributes:
        name: name, such as "not wall in view"; "" if the feature has none.
        label: label that the activation predicts best, or "" if no label could be tested.
        auc: AUC of the activation as a predictor of the label, with its interval.
        frequency: share of held-out states in which the feature is active.
        kl: KL divergence of the policy if the feature is ablated, in nats, with its interval.
        kl_control: median KL divergence of random directions.
        success: change of the success rate if the feature is ablated in the real game, with its
            interval.
        success_controls: smallest and largest change of the success rate by random directions.
        claimed: whether the change ``success`` is claimed.
        dream: dream of the feature; None if no start was optimised for it.
        examples: the n frames in which the feature is most active, uint8 (n, H, W, C); None if
            the feature is never active.
    """

    number: int
    name: str
    label: str
    auc: Interval
    frequency: float
    kl: Interval
    kl_control: float
    success: Interval
    success_controls: tuple[float | None, float | None]
    claimed: bool
    dream: Dream | None
    examples: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Failure:
    """A failed episode and its fatal decision, see ``analysis/decisions.py``.

    Attributes:
        number: number of the episode.
        cause: hazard that ended it.
        kind: class of the decision, one of ``analysis.decision_results.CLASSES``.
        before_end: steps from the fatal decision to the end; None if no state was savable.
        taken, best: labels of the action taken there, and of the best one; "" if there is none.
        taken_rate, best_rate: shares of continuations that are saved after them, or None.
        film: file with its last steps.
    """

    number: int
    cause: str
    kind: str
    before_end: int | None
    taken: str
    best: str
    taken_rate: float | None
    best_rate: float | None
    film: Path


Sample = tuple[np.ndarray, np.ndarray | None, dict[int, np.ndarray], dict[int, np.ndarray]]
"""A sample, as a tuple of four entries:

- frames, uint8 (T, H, W, C)
- recorded frames from the same start, uint8 (at most T, H, W, C); None without a recording
- saliency images by index of the saliency type, uint8 (M, T, H, W, C). The first map is with
  respect to the pixels; samples of a spatial simulator also have the maps ``gradients.STATE_MAPS``.
- gradients with respect to the coordinates by index of the saliency type, float32 (T, k)
"""


@dataclasses.dataclass(frozen=True)
class PanelContent:
    """Content of a panel.

    Attributes:
        agent: name of the agent, "" if unknown.
        game: game and distribution mode of the recording that the samples start from, "" if
            unknown.
        sets: sets of samples, with distinct names.
        maps: titles of the saliency maps; samples of a vector simulator have only the first.
        has_saliency: whether each sample has each saliency type, bool (N, F).
        frame: height and width of a frame, in pixels.
        steps: quantities at the steps of all samples, by name. ``coordinates`` of the hidden states
            are (R, k), all others (R,): ``rewards``, ``terminals`` and ``values``, as in
            ``SampleArrays``; ``entered`` (the action that led to each step, or NOT_RECORDED);
            ``answers`` (the agent's most likely actions); and ``probabilities`` (of these actions).
            Actions are uint8, all other arrays float32.
        behaviours: behaviour of each sample, NO_BEHAVIOUR for none, int16 (N,); or None.
        recorded: coordinates of the recorded states that are shown, float32 (S, k).
        num_recorded: number of all recorded states, of which S are shown.
        positions: player positions at the states in ``recorded``, float32 (S,) each, by column
            name; empty if they were not recorded.
        features: sparse features, strongest first; empty to show none.
        sample: function that reads a sample by its index, from 0 to N - 1.
        survives: whether each sample, and its recorded episode, probably goes on to its last step,
            bool (N,).
        failures: failed episodes with their fatal decisions; empty to show none.
    """

    experiment: str
    agent: str
    game: str
    sets: tuple[SampleSet, ...]
    types: tuple[SaliencyType, ...]
    maps: tuple[str, ...]
    has_saliency: np.ndarray
    frame: tuple[int, int]
    steps: dict[str, np.ndarray]
    behaviours: np.ndarray | None
    recorded: np.ndarray
    num_recorded: int
    positions: dict[str, np.ndarray]
    features: tuple[Feature, ...]
    sample: Callable[[int], Sample]
    survives: np.ndarray
    failures: tuple[Failure, ...] = ()

    @property
    def num_samples(self) -> int:
        return len(self.has_saliency)

    @property
    def num_ics(self) -> int:
        return self.steps["coordinates"].shape[1]

    @property
    def first_rows(self) -> np.ndarray:
        """Index of each sample's first row, followed by the number of rows (N + 1,)."""
        lengths = [of_set.num_steps for of_set in self.sets for _ in of_set.numbers]
        return np.concatenate([[0], np.cumsum(lengths)])


def write_panel(path: Path, content: PanelContent) -> None:
    """Write the page and its data.

    Raises:
        UserError: if the page has not been built.
    """
    folder = PanelFolder(path)
    folder.copy_page()
    for file, of_file in _whole_files(folder, content):
        file.write_bytes(data_script(file, of_file))
    for feature in content.features:
        file, examples = folder.feature_file(feature.number), feature.examples
        file.write_bytes(data_script(file, {
            "examples": None if examples is None else _strip(examples, _FRAME_QUALITY)}))
    for failure in content.failures:
        file = folder.failure_file(failure.number)
        file.write_bytes(data_script(file, {"film": letters(failure.film.read_bytes())}))
    rows = content.first_rows
    gradients = np.full((len(content.types), rows[-1], content.num_ics), np.nan, dtype=np.float32)

    def write_sample(number: int) -> None:
        frames, recorded, images, of_types = content.sample(number)
        file = folder.frames_file(number)
        file.write_bytes(data_script(file, {
            "frames": _strip(frames, _FRAME_QUALITY),
            "recorded": None if recorded is None else _strip(recorded, _FRAME_QUALITY)}))
        file = folder.pictures_file(number)
        file.write_bytes(data_script(file, {
            "saliency": [[_strip(of_map, _SALIENCY_QUALITY) for of_map in images[index]]
                         if index in images else None
                         for index in range(len(content.types))]}))
        for index, of_type in of_types.items():
            gradients[index, rows[number]:rows[number + 1]] = of_type

    # Reading and encoding both release the GIL.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        numbers = range(content.num_samples)
        for _ in with_progress(pool.map(write_sample, numbers), len(numbers), "sample"):
            pass
    for index, of_type in enumerate(gradients):
        file = folder.gradients_file(index)
        file.write_bytes(data_script(file, encoded(gradients=of_type)))


def _whole_files(folder: PanelFolder, content: PanelContent) -> Iterator[tuple[Path, dict]]:
    """Yield the paths and contents of the data files that cover all samples and saliency types."""
    samples_with = content.has_saliency.sum(axis=0)
    yield folder.data_file("manifest"), {
        "format": FORMAT, "experiment": content.experiment, "agent": content.agent,
        "game": content.game, "start": _opening_sample(content), "frame": content.frame,
        "sets": [dataclasses.asdict(of_set) for of_set in content.sets],
        "num_ics": content.num_ics, "not_recorded": NOT_RECORDED,
        "actions": [{"name": name, "direction": direction}
                    for name, direction in zip(
                        action_labels(content.game.partition(" ")[0]), ACTION_DIRECTIONS,
                        strict=True)],
        "saliency": [{**dataclasses.asdict(of_type), "samples": int(number)}
                     for of_type, number in zip(content.types, samples_with)],
        "maps": content.maps,
        "behaviours": content.behaviours is not None,
        "features": [feature.number for feature in content.features],
        "failures": [{name: value for name, value in vars(failure).items() if name != "film"}
                     for failure in content.failures],
        "recorded": {"shown": len(content.recorded), "of": content.num_recorded}
        | ({"positions": list(content.positions)} if content.positions else {})}
    behaviours = {} if content.behaviours is None else {"behaviours": content.behaviours}
    yield folder.data_file("steps"), encoded(
        **content.steps, **behaviours, has_saliency=content.has_saliency.astype(np.uint8))
    yield folder.data_file("recorded"), encoded(coordinates=content.recorded,
                                                **content.positions)
    if content.features:
        yield folder.data_file("features"), {"features": [
            {name: value for name, value in dataclasses.asdict(feature).items()
             if name != "examples"} for feature in content.features]}


def _opening_sample(content: PanelContent) -> int:
    """Return the sample that the panel opens on: of the samples with the most saliency types, and
    of the surviving ones among them if there are any, the one with the largest range of value
    estimates."""
    ranges = np.array([np.ptp(content.steps["values"][begin:end])
                       for begin, end in itertools.pairwise(content.first_rows)])
    counts = content.has_saliency.sum(axis=1)
    chosen = counts == counts.max(initial=0)
    if (chosen & content.survives).any():
        chosen &= content.survives
    return int(np.where(chosen, ranges, -1).argmax())


def _strip(images: np.ndarray, quality: int) -> str:
    """Encode images (T, H, W, C) side by side as one WebP file, as text from ``letters``."""
    buffer = io.BytesIO()
    Image.fromarray(np.concatenate(list(images), axis=1)).save(
        buffer, "WEBP", quality=quality, method=_EFFORT)
    return letters(buffer.getvalue())
