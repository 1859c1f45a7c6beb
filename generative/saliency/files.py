"""Saliency on disk: files in the folder of a sample, written by saliency_experiments.py.

Layout, as published except for the files marked *; <function> is the name of a function::

    sample_00000/grad_ims_<function>.npy, grad_hx_<function>.npy, grad_env_h_<function>.npy,
                 grad_processed_ims_<function>.npy      see SaliencyArrays
    sample_00000/grad_processed_env_h_<function>.npy *  only with a spatial simulator
    sample_00000/effects_<function>.npy *               only of counterfactual maps
    sample_00000/sample_00000_saliency_<function>.mp4
    sample_00000/saliency_<function>.json *             settings; written last
    sample_00000/specificity.json *                     see ``Specificity``; also with the suffixes
                                                        below
    sample_00000/difference_00000.png *                 a step of ``run.write_demonstration``

The name of a function ends with ``_without_env_grads`` where gradients do not flow through the
action that enters the environment, and with ``_counterfactual`` for counterfactual maps. A function
is finished once its JSON file exists; published folders have no JSON files, see
``SaliencyFolder.finished``. Shards (``common.shards``) write the same files; joining them checks
that none is missing.

Letters in shape comments: E deterministic state of the environment, M maps of this state;
S simulated steps, B blocks of cells, K fillings of each.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.errors import UserError
from common.files import read_description
from common.results import ResultStore
from common.schemas import Array, Entry, File, Json, Npy, Schema
from common.shards import Shard, ShardNotes, first_difference, readable
from generative.saliency.gradients import suffix_of
from generative.sample_files import SampleFolder, stack


@dataclasses.dataclass(frozen=True)
class Specificity:
    """Similarity of the saliency maps of different functions in one sample.

    Files and code call it "specificity", although a high similarity means that the maps are
    unspecific.

    Attributes:
        functions: names of the functions in file names, all with the same suffix.
        correlations: map similarity at each step (T,), see ``gradients.specificity``; None where
            fewer than two functions have gradients.
    """

    functions: tuple[str, ...]
    correlations: tuple[float | None, ...]


_ARRAYS = {
    "images": Entry("sample_{:0>5}/grad_ims_{}.npy", Npy(Array(np.float32, "T C H W"))),
    "hidden_states": Entry("sample_{:0>5}/grad_hx_{}.npy", Npy(Array(np.float32, "T D"))),
    "env_h": Entry("sample_{:0>5}/grad_env_h_{}.npy", Npy(Array(np.float32, "T E"))),
    "processed": Entry("sample_{:0>5}/grad_processed_ims_{}.npy", Npy(Array(np.uint8, "T H W C"))),
    "processed_states": Entry("sample_{:0>5}/grad_processed_env_h_{}.npy",
                              Npy(Array(np.uint8, "M T H W C")), optional=True),
    "effects": Entry("sample_{:0>5}/effects_{}.npy", Npy(Array(np.float32, "S B K")),
                     optional=True)}
SALIENCY = Schema(
    "saliency", "saliency_experiments.py", items={
        **_ARRAYS,
        "description": Entry("sample_{:0>5}/saliency_{}.json", Json()),
        "specificity": Entry("sample_{:0>5}/specificity{}.json", Json(Specificity)),
        "video": Entry("sample_{:0>5}/sample_{:0>5}_saliency_{}.mp4", File()),
        "difference": Entry("sample_{:0>5}/difference_{:0>5}.png", File())},
    informative=("versions", "agent_file", "model_file"))
# Files in a folder of samples that later stages always read, and the videos next to them.
DATA_PATTERNS = tuple(entry.pattern() for name, entry in SALIENCY.items.items()
                      if name not in ("video", "difference") and not entry.optional)
VIDEO_PATTERN = "sample_*/*_saliency_*.mp4"


@dataclasses.dataclass(frozen=True)
class SaliencyArrays:
    """Saliency of one function in one sample.

    Attributes:
        images: gradient with respect to the images, float32 (T, C, H, W).
        hidden_states: gradient with respect to the agent's hidden states, float32 (T, D).
        env_h: gradient with respect to the environment's deterministic states, float32 (T, E).
        processed: rendering of ``images``, uint8 (T, H, W, C).
        processed_states: renderings of ``env_h``, one for each of ``gradients.STATE_MAPS``, uint8
            (M, T, H, W, C); None if the simulator is not spatial.
        effects: effects of filled blocks, float32 (S, B, K); None unless the maps are
            counterfactual, see ``saliency.counterfactual``.
    """

    images: np.ndarray
    hidden_states: np.ndarray
    env_h: np.ndarray
    processed: np.ndarray
    processed_states: np.ndarray | None = None
    effects: np.ndarray | None = None


class SaliencyFolder(ResultStore):
    """Reader and writer of the saliency in a folder of samples.

    Args:
        path: folder of samples; shards recorded in it are joined.
    """

    def __init__(self, path: Path):
        super().__init__(path, SALIENCY)
        self.samples = SampleFolder(path)

    def video_file(self, number: int, function: str) -> Path:
        return self.file_of("video", number, number, function)

    def description(self, number: int, function: str) -> dict:
        """Return the settings with which the saliency of a function in a sample was computed.

        The result is empty if the saliency is unfinished or published.
        """
        return read_description(self.file_of("description", number, function))

    def finished(self, numbers: Sequence[int]) -> dict[int, list[str]]:
        """Return the functions whose saliency is finished, by sample number.

        Published saliency has no description files. Therefore, if none of these samples has such a
        file, the functions whose arrays are complete count as finished.
        """
        described = {number: self._functions(number, "description") for number in numbers}
        if any(described.values()):
            return described
        return {number: [function for function in self._functions(number, "processed")
                         if all(entry.optional or self.has(field, number, function)
                                for field, entry in _ARRAYS.items())]
                for number in numbers}

    def _functions(self, number: int, name: str) -> list[str]:
        """List the functions for which a sample's folder has the file of schema entry ``name``."""
        pattern = self.file_of(name, number, "*")
        start, end = pattern.name.split("*")
        return sorted(path.name.removeprefix(start).removesuffix(end)
                      for path in pattern.parent.glob(pattern.name))

    def saliency(self, number: int, function: str) -> SaliencyArrays:
        """Read the saliency of a function in a sample.

        Raises:
            UserError: if a file is missing or damaged; the message names it.
        """
        return SaliencyArrays(**{field: self.read(field, number, function)
                                 for field, entry in _ARRAYS.items()
                                 if not entry.optional or self.has(field, number, function)})

    def stacked_field(self, field: str, function: str, numbers: Sequence[int]) -> np.ndarray:
        """Stack one field of several samples.

        Args:
            field: name of a field of ``SaliencyArrays``.
            function: name of the saliency function.

        Raises:
            UserError: see ``saliency``; or if the shapes of the samples differ.
        """
        return stack(self.path, {number: self.read(field, number, function) for number in numbers},
                     self.file_of(field, "", function).name)

    def is_finished(self, number: int, function: str, description: dict) -> bool:
        """Return whether the saliency of a function in a sample is finished.

        Args:
            function: name of the function.
            description: expected settings.

        Raises:
            UserError: if the saliency is finished, but was computed with other settings.
        """
        stored = self.description(number, function)
        key = first_difference(stored, description, SALIENCY.informative) if stored else None
        if key:
            raise UserError(f"the saliency of {self.file_of('description', number, function)} was "
                            f"computed with another {readable(key)}; give --overwrite to compute "
                            "it again")
        return bool(stored)

    def forget(self, number: int, function: str) -> None:
        """Mark the saliency of a function in a sample as unfinished.

        This deletes the description and the video of the saliency, and the sample's map similarity,
        which depends on it.
        """
        self.remove("description", number, function)
        self.remove("video", number, number, function)
        self.remove("specificity", number, suffix_of(function))

    def add(self, number: int, function: str, arrays: SaliencyArrays) -> None:
        """Write the arrays of a function in a sample without marking it as finished."""
        for field in _ARRAYS:
            if (array := getattr(arrays, field)) is not None:
                self.write(field, number, function, value=array)


class SharedSaliency:
    """Coordinator of shards that compute saliency in a sample folder, which other runs may share.

    Args:
        settings: settings of all shards, which determine the division of the work.
        files: description files that the shards write.
    """

    def __init__(self, folder: Path, settings: dict, files: Sequence[Path]):
        self._settings, self._files = settings, files
        key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]
        self.notes = ShardNotes(folder, f"_saliency_{key}")

    def begin(self, shard: Shard, overwrite: bool) -> None:
        """Register a shard, unless all files are finished and joined.

        Args:
            overwrite: register the shard in any case.

        Raises:
            FolderInUse, UserError: see ``ShardNotes.begin``.
        """
        if overwrite or self.notes.exist() or self._missing():
            self._lock = self.notes.begin(shard, self._settings,
                                          "join these shards, or run them again, first")

    def join(self) -> None:
        """Check that no file is missing, and remove the notes of the shards.

        Raises:
            UserError: if a shard or a file is missing; the message names it.
        """
        def check(*_) -> None:
            if self._missing():
                raise UserError(f"there is no file {self._missing()[0]}, though all shards have "
                                "finished; run them again")
        self.notes.join(check, lambda: not self._missing())

    def _missing(self) -> list[Path]:
        return [path for path in self._files if not path.exists()]
