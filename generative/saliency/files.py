"""Saliency on disk: names, writer and reader of what lies in the folder of a sample.

Layout, as published but for the files marked *, with the name of a function::

    sample_00000/grad_ims_<function>.npy, grad_hx_<function>.npy, grad_env_h_<function>.npy,
                 grad_processed_ims_<function>.npy      see SaliencyArrays
    sample_00000/sample_00000_saliency_<function>.mp4
    sample_00000/saliency_<function>.json *             what made them; written last
    sample_00000/specificity.json *                     see ``Specificity``
    sample_00000/difference_00000.png *                 a step of the difference demonstration

The name of a function ends with ``_without_env_grads`` where no gradients went through the action
that enters the environment. What has no JSON file is not finished. Shards, see ``common.shards``,
write the same files; joining them sees that none is missing.

Letters in shape comments: T steps, C H W an image, D agent hidden state, E deterministic state of
the environment.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from common.config import typed
from common.description import first_difference, read_description, readable
from common.errors import UserError
from common.files import atomic_path, check_finite, read_array, read_json, save_json
from common.shards import Shard, ShardNotes
from common.video import write_video
from generative.saliency.gradients import WITHOUT_ENV_GRADS
from generative.sample_files import SampleFolder

# Name on disk, type and dimensions of each field of SaliencyArrays.
_ARRAYS = {
    "images": ("grad_ims", np.float32, 4), "hidden_states": ("grad_hx", np.float32, 2),
    "env_h": ("grad_env_h", np.float32, 2), "processed": ("grad_processed_ims", np.uint8, 4),
}
_DESCRIPTION = "saliency_"  # begins the name of a description file
_INFORMATIVE = ("versions", "agent_file", "model_file")
# Files in a folder of samples that are read again, and the videos beside them.
DATA_PATTERNS = (*(f"sample_*/{name}_*.npy" for name, _, _ in _ARRAYS.values()),
                 "sample_*/saliency_*.json", "sample_*/specificity*.json")
VIDEO_PATTERN = "sample_*/*_saliency_*.mp4"


@dataclasses.dataclass(frozen=True)
class SaliencyArrays:
    """Saliency of one function in one sample.

    Attributes:
        images: gradient with respect to the images, float32 (T, C, H, W).
        hidden_states: with respect to the agent's states, float32 (T, D).
        env_h: float32 (T, E).
        processed: picture of ``images``, uint8 (T, H, W, C).
    """

    images: np.ndarray
    hidden_states: np.ndarray
    env_h: np.ndarray
    processed: np.ndarray


@dataclasses.dataclass(frozen=True)
class Specificity:
    """How alike the maps of different functions are in one sample.

    Attributes:
        functions: names of the functions' files, which end with the kind of gradient.
        correlations: mean |r| between their pixel gradients at each step, see
            ``pictures.specificity``; None where fewer than two functions have gradients (T,).
    """

    functions: tuple[str, ...]
    correlations: tuple[float | None, ...]


class SaliencyFolder:
    """Names and readers of the saliency in one folder of samples."""

    def __init__(self, path: Path):
        self.samples = SampleFolder(path)

    def array_file(self, number: int, function: str, field: str) -> Path:
        """The file of a field of ``SaliencyArrays``."""
        return self.samples.sample_folder(number) / f"{_ARRAYS[field][0]}_{function}.npy"

    def video_file(self, number: int, function: str) -> Path:
        folder = self.samples.sample_folder(number)
        return folder / f"{folder.name}_saliency_{function}.mp4"

    def difference_file(self, number: int, step: int) -> Path:
        return self.samples.sample_folder(number) / f"difference_{step:05d}.png"

    def description_file(self, number: int, function: str) -> Path:
        return self.samples.sample_folder(number) / f"{_DESCRIPTION}{function}.json"

    def specificity_file(self, number: int, without_env_grads: bool) -> Path:
        kind = WITHOUT_ENV_GRADS if without_env_grads else ""
        return self.samples.sample_folder(number) / f"specificity{kind}.json"

    def specificity(self, number: int, without_env_grads: bool) -> Specificity | None:
        """The specificity of a sample's maps; None if it was not measured.

        Raises:
            UserError: if the file is damaged.
        """
        path = self.specificity_file(number, without_env_grads)
        return typed(Specificity, read_json(path), str(path)) if path.exists() else None

    def description(self, number: int, function: str) -> dict:
        """Settings that made the saliency; empty if it is not finished, or published."""
        return read_description(self.description_file(number, function))

    def finished(self, numbers: Sequence[int]) -> dict[int, list[str]]:
        """The functions whose saliency is finished, by the numbers of samples.

        Published saliency has no description files; where none of these samples has any, what has
        all its arrays counts.
        """
        found = {number: sorted(
            path.stem.removeprefix(_DESCRIPTION) for path in
            self.samples.sample_folder(number).glob(f"{_DESCRIPTION}*.json"))
            for number in numbers}
        if any(found.values()):
            return found
        return {number: self._with_all_arrays(number) for number in numbers}

    def saliency(self, number: int, function: str) -> SaliencyArrays:
        """Saliency of a function in a sample.

        Raises:
            UserError: naming the file that is missing, damaged, of another type, or holds NaN or
                infinity.
        """
        return SaliencyArrays(**{field: self._read(number, function, field)
                                 for field in _ARRAYS})

    def gradients_of_images(self, number: int, function: str) -> np.ndarray:
        """Gradients with respect to a sample's images, float32 (T, C, H, W); errors as above."""
        return self._read(number, function, "images")

    def stacked_field(self, field: str, function: str, numbers: Sequence[int]) -> np.ndarray:
        """One field of several samples, with one dimension more in front.

        Raises:
            UserError: see ``saliency``; or if the shapes differ.
        """
        arrays = [self._read(number, function, field) for number in numbers]
        for number, array in zip(numbers, arrays):
            if array.shape != arrays[0].shape:
                raise UserError(f"{self.array_file(number, function, field)} has the shape "
                                f"{array.shape}, not {arrays[0].shape} as sample {numbers[0]}")
        return np.stack(arrays)

    def _with_all_arrays(self, number: int) -> list[str]:
        stem = _ARRAYS["processed"][0] + "_"
        names = sorted(path.stem.removeprefix(stem) for path in
                       self.samples.sample_folder(number).glob(f"{stem}*.npy"))
        return [name for name in names
                if all(self.array_file(number, name, field).exists() for field in _ARRAYS)]

    def _read(self, number: int, function: str, field: str) -> np.ndarray:
        path = self.array_file(number, function, field)
        _, dtype, dimensions = _ARRAYS[field]
        array = read_array(path, dtype, dimensions, "saliency_experiments.py")
        check_finite(array, path, "make this saliency again")
        return array


class SaliencyWriter:
    """Adds saliency to a folder of samples, file by file; survives being killed at any moment."""

    def __init__(self, path: Path):
        self.folder = SaliencyFolder(path)

    def has(self, number: int, function: str, description: dict) -> bool:
        """Whether the saliency of a function in a sample is finished.

        Raises:
            UserError: if it is, but was made in another way.
        """
        found = self.folder.description(number, function)
        if not found:
            return False
        key = first_difference(found, description, _INFORMATIVE)
        if key:
            raise UserError(f"{self.folder.description_file(number, function)} says that its "
                            f"saliency was made with another {readable(key)}; give --overwrite to "
                            "make it again")
        return True

    def forget(self, number: int, function: str) -> None:
        """Let a function in a sample count as not done."""
        self.folder.description_file(number, function).unlink(missing_ok=True)
        self.folder.video_file(number, function).unlink(missing_ok=True)
        self.folder.specificity_file(number, function.endswith(WITHOUT_ENV_GRADS)).unlink(
            missing_ok=True)

    def add(self, number: int, function: str, arrays: SaliencyArrays) -> None:
        """Store the arrays of a function in a sample, which does not finish it."""
        for field, (_, dtype, _) in _ARRAYS.items():
            with atomic_path(self.folder.array_file(number, function, field)) as temporary:
                np.save(temporary, getattr(arrays, field).astype(dtype, copy=False),
                        allow_pickle=False)

    def add_video(self, number: int, function: str, frames: Iterable[np.ndarray],
                  fps: int) -> None:
        """Write the video of a function in a sample from frames (H, W, C)."""
        write_video(self.folder.video_file(number, function), frames, fps)

    def add_differences(self, number: int, frames: Iterable[np.ndarray]) -> None:
        """Write the pictures (H, W, C) of a sample's steps."""
        for step, frame in enumerate(frames):
            with atomic_path(self.folder.difference_file(number, step)) as temporary:
                Image.fromarray(frame).save(temporary)

    def add_specificity(self, number: int, without_env_grads: bool, found: Specificity) -> None:
        """Store the specificity of a sample's maps."""
        save_json(self.folder.specificity_file(number, without_env_grads),
                  dataclasses.asdict(found))

    def finish(self, number: int, function: str, description: dict) -> None:
        """Let a function in a sample count as done."""
        save_json(self.folder.description_file(number, function), description)


class SharedSaliency:
    """Saliency that shards take in a folder of samples; others may be taken there at the time.

    Args:
        folder: of the samples.
        settings: of all shards, which decide who does what.
        files: description files that all of them write together.
    """

    def __init__(self, folder: Path, settings: dict, files: Sequence[Path]):
        self._settings, self._files = settings, files
        key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]
        self._notes = ShardNotes(folder, f"_saliency_{key}")

    def begin(self, shard: Shard, overwrite: bool) -> None:
        """Note that a shard is at work, unless all is there and joined.

        Raises:
            FolderInUse, UserError: see ``ShardNotes.begin``.
        """
        if overwrite or self._notes.exist() or not self._are_there():
            self._lock = self._notes.begin(shard, self._settings, "join or repeat those first")

    def finish(self, shard: Shard) -> None:
        """Note that a shard has written all its pieces."""
        if self._notes.exist():
            self._notes.finish(shard)

    def join(self) -> None:
        """See that all is there, and remove the notes.

        Raises:
            UserError: naming the shards or the file that are missing.
        """
        self._notes.join(self._check, self._are_there)

    def _are_there(self) -> bool:
        return all(path.exists() for path in self._files)

    def _check(self, *_) -> None:
        for path in self._files:
            if not path.exists():
                raise UserError(f"there is no file {path}, though all shards have finished; run "
                                "them again")
