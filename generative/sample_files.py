"""Simulated rollouts on disk: writer and reader of a folder of samples.

Layout, as published but for the files marked *::

    sample_00000/ims.npy              frames
    sample_00000/rews.npy, dones.npy, agent_values.npy, agent_hs.npy, agent_logprobs.npy,
                 env_hs.npy, bottleneck_vec.npy      see SampleArrays
    sample_00000/actions.npy *        actions that entered the steps
    sample_00000/origin.json *        where the sample starts and which action was forced
    videos/sample_00000.mp4
    videos/start_00000.mp4 *          nine samples of one start, one for each direction
    recording.json *                  what made the samples

A sample gets its folder at once, so what lies under its final name is complete. Samples can be
recorded by shards, see ``common.shards``: ``recording.json`` follows when they are joined, by
whoever opens the folder first.

Letters in shape comments: T simulated steps, H W C a frame, D agent hidden state, A actions, E
deterministic state of the environment, V bottleneck vector.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from common.config import typed
from common.description import read_description
from common.errors import UserError
from common.files import atomic_folder, check_finite, read_array, save_json
from common.shards import WHOLE, Shard, ShardNotes, SharedFolder
from common.video import write_video

_ORIGIN_NAME = "origin.json"
# Name on disk, type and dimensions of each field of SampleArrays.
_ARRAYS = {
    "frames": ("ims", np.uint8, 4), "rewards": ("rews", np.float32, 1),
    "terminals": ("dones", np.float32, 1), "values": ("agent_values", np.float32, 1),
    "hidden_states": ("agent_hs", np.float32, 2), "log_probs": ("agent_logprobs", np.float32, 2),
    "env_h": ("env_hs", np.float32, 2), "bottleneck_vec": ("bottleneck_vec", np.float32, 1),
    "actions": ("actions", np.int64, 1),
}
# Everything of a folder of samples that is read again.
PATTERNS = ("recording.json", f"sample_*/{_ORIGIN_NAME}",
            *(f"sample_*/{name}.npy" for name, _, _ in _ARRAYS.values()))
_ALL_PATTERNS = ("recording.json", "sample_*/*", "videos/*.mp4")  # saliency lies beside the arrays


@dataclasses.dataclass(frozen=True)
class SampleArrays:
    """One sample; or several of them, with one dimension more in front.

    Attributes:
        frames: uint8 (T, H, W, C).
        rewards: in the unit of the recorded data, float32 (T,).
        terminals: probability that the episode ends, float32 (T,).
        values: the agent's, float32 (T,).
        hidden_states: states that leave the agent, float32 (T, D).
        log_probs: the agent's, of its actions, float32 (T, A).
        env_h: float32 (T, E).
        bottleneck_vec: float32 (V,).
        actions: that entered the steps, int64 (T,). The one the agent answers a step with
            enters the next step, if it acts by itself.
    """

    frames: np.ndarray
    rewards: np.ndarray
    terminals: np.ndarray
    values: np.ndarray
    hidden_states: np.ndarray
    log_probs: np.ndarray
    env_h: np.ndarray
    bottleneck_vec: np.ndarray
    actions: np.ndarray


@dataclasses.dataclass(frozen=True)
class SampleOrigin:
    """Where a sample comes from.

    Attributes:
        start: number of its start; samples of a folder with the same one differ in nothing but
            the manual action.
        window: of the recorded data; None for a random start, as the next two.
        episode: of the recorded data.
        frame: of that episode, which the first simulated step shows.
        manual_action: name of the action that entered every step, or None.
    """

    start: int
    window: int | None
    episode: int | None
    frame: int | None
    manual_action: str | None


class SampleFolder:
    """Names and readers of one folder of samples.

    Args:
        path: the folder. Shards that recorded in it are joined.
        joined: False for the names alone, whatever the folder holds.

    Raises:
        UserError: if a shard is missing.
    """

    def __init__(self, path: Path, joined: bool = True):
        self.path = Path(path)
        if joined and ShardNotes(self.path).exist():
            join_samples(self.path)

    @property
    def description_file(self) -> Path:
        return self.path / "recording.json"

    def sample_folder(self, number: int) -> Path:
        return self.path / f"sample_{number:05d}"

    def video_file(self, number: int) -> Path:
        return self.path / "videos" / f"sample_{number:05d}.mp4"

    def directions_video_file(self, start: int) -> Path:
        return self.path / "videos" / f"start_{start:05d}.mp4"

    def description(self) -> dict:
        """Settings that made the samples; empty for published ones, which do not store them."""
        return read_description(self.description_file)

    def numbers(self) -> list[int]:
        """The samples that are there, in ascending order.

        Raises:
            UserError: if there is none.
        """
        found = sorted(int(match[1]) for path in self.path.glob("sample_*")
                       if (match := re.fullmatch(r"sample_(\d+)", path.name)))
        if not found:
            raise UserError(f"{self.path} holds no samples; record_gen_samples.py writes them")
        return found

    def check(self, numbers: Sequence[int]) -> None:
        """Refuse numbers of samples that are not there.

        Raises:
            UserError: naming the first.
        """
        there = self.numbers()
        absent = sorted(set(numbers) - set(there))
        if absent:
            more = f" and lacks {len(absent) - 1} more" if len(absent) > 1 else ""
            raise UserError(f"{self.path} has no sample {absent[0]}{more}; its {len(there)} lie "
                            f"between {there[0]} and {there[-1]}, see --sample_ids")

    def sample(self, number: int) -> SampleArrays:
        """One sample.

        A published one has no ``actions.npy``; its actions are all -1.

        Raises:
            UserError: naming the file that is missing, damaged, holds NaN or infinity, or does not
                fit the others.
        """
        arrays = SampleArrays(**{field: self._read(number, field) for field in _ARRAYS
                                 if field != "actions"}, actions=self._actions(number))
        for field in dataclasses.fields(SampleArrays):
            array = getattr(arrays, field.name)
            if field.name != "bottleneck_vec" and len(array) != len(arrays.frames):
                raise UserError(f"{self._array_file(number, field.name)} has {len(array)} steps, "
                                f"but ims.npy has {len(arrays.frames)}")
        return arrays

    def stacked(self, numbers: Sequence[int] | None = None) -> SampleArrays:
        """Several samples, all that are there if not said otherwise.

        Raises:
            UserError: see ``numbers`` and ``sample``; or if their shapes differ.
        """
        numbers = self.numbers() if numbers is None else numbers
        samples = [self.sample(number) for number in numbers]
        return SampleArrays(**{
            field: self._stack(numbers, field, [getattr(sample, field) for sample in samples])
            for field in _ARRAYS})

    def stacked_field(self, field: str, numbers: Sequence[int] | None = None) -> np.ndarray:
        """One field of ``stacked``, without reading the other files."""
        numbers = self.numbers() if numbers is None else numbers
        read = self._actions if field == "actions" else lambda number: self._read(number, field)
        return self._stack(numbers, field, [read(number) for number in numbers])

    def origin(self, number: int) -> SampleOrigin:
        """Where a sample comes from; published ones do not say.

        Raises:
            UserError: if the file is missing or damaged.
        """
        path = self.sample_folder(number) / _ORIGIN_NAME
        content = read_description(path)
        if not content:
            raise UserError(f"there is no file {path}")
        return typed(SampleOrigin, content, str(path))

    def _array_file(self, number: int, field: str) -> Path:
        return self.sample_folder(number) / f"{_ARRAYS[field][0]}.npy"

    def _read(self, number: int, field: str) -> np.ndarray:
        path = self._array_file(number, field)
        _, dtype, dimensions = _ARRAYS[field]
        array = read_array(path, dtype, dimensions)
        check_finite(array, path, "record this sample again")
        return array

    def _actions(self, number: int) -> np.ndarray:
        if self._array_file(number, "actions").exists():
            return self._read(number, "actions")
        return np.full(len(self._read(number, "frames")), -1, dtype=np.int64)

    def _stack(self, numbers: Sequence[int], field: str, arrays: list[np.ndarray]) -> np.ndarray:
        for number, array in zip(numbers, arrays):
            if array.shape != arrays[0].shape:
                raise UserError(f"{self._array_file(number, field)} has the shape {array.shape}, "
                                f"not {arrays[0].shape} as sample {numbers[0]}")
        return np.stack(arrays)


class SampleWriter:
    """Adds samples to a folder; survives being killed at any moment.

    Args:
        path: the folder of samples; made if missing.
        description: what makes the samples. If the folder already holds some it must be the
            same, and the recording goes on.
        overwrite: throw away what the folder holds.
        shard: which one this process records.
        num_samples: of all shards together.
        batch_size: samples that a shard gets together.

    Raises:
        UserError: see ``SharedFolder``.
    """

    def __init__(self, path: Path, description: dict, overwrite: bool = False,
                 shard: Shard = WHOLE, num_samples: int = 0, batch_size: int = 1):
        self.folder = SampleFolder(path, joined=shard == WHOLE and not overwrite)
        self._shared = SharedFolder(
            self.folder.description_file, description, _ALL_PATTERNS, "samples",
            "--data_save_dir", overwrite, ("versions", "data_dir", "agent_file", "model_file"),
            shard, {"num_samples": num_samples, "batch_size": batch_size},
            is_done=lambda: all(map(self.has, range(num_samples))))

    def has(self, number: int) -> bool:
        """Whether a sample is complete on disk."""
        return self.folder.sample_folder(number).exists()

    def add(self, number: int, arrays: SampleArrays, origin: SampleOrigin) -> None:
        """Store a sample.

        Raises:
            UserError: if the folder of samples was deleted.
        """
        self._shared.check()
        size = sum(getattr(arrays, field).nbytes for field in _ARRAYS)
        with atomic_folder(self.folder.sample_folder(number), size) as temporary:
            for field, (name, dtype, _) in _ARRAYS.items():
                array = getattr(arrays, field).astype(dtype, copy=False)
                np.save(temporary / f"{name}.npy", array, allow_pickle=False)
            save_json(temporary / _ORIGIN_NAME, dataclasses.asdict(origin))

    def add_video(self, number: int, frames: Iterable[np.ndarray], fps: int) -> None:
        """Write the video of a sample from frames (H, W, C)."""
        write_video(self.folder.video_file(number), frames, fps)

    def add_directions_video(self, start: int, frames: Iterable[np.ndarray], fps: int) -> None:
        """Write the video of the nine samples of a start from frames (H, W, C)."""
        write_video(self.folder.directions_video_file(start), frames, fps)

    def finish(self) -> None:
        """Note that all samples of this process are there."""
        self._shared.finish()


def join_samples(path: Path, num_samples: int | None = None) -> SampleFolder:
    """Make one folder of samples of what shards have recorded in it; nothing if it is one.

    Args:
        num_samples: that it should have.

    Raises:
        UserError: naming a shard or a sample that is missing; or if shards have recorded another
            number of samples.
    """
    folder = SampleFolder(path, joined=False)

    def make(settings: dict, through: Path) -> None:
        number = settings.pop("divided")["num_samples"]
        if num_samples not in (None, number):
            raise UserError(f"the shards in {path} have recorded {number} samples, not "
                            f"{num_samples}; give the --num_samples that they had")
        folder.check(range(number))
        save_json(folder.description_file, settings, through=through)

    ShardNotes(path).join(make, lambda: folder.description_file.exists() and all(
        folder.sample_folder(number).exists() for number in range(num_samples or 0)))
    return folder
