"""Recorded rollouts on disk: writer and reader of ``<logdir>/data/``.

Layout, as published::

    data/episode_00000/{ob,hx,lp}.npy    frames uint8 (L, 3, 64, 64), states (L + 1, D), (L, A)
    data/data_gen_model_00000.csv        one row a frame, see STEP_COLUMNS
    data/sample_00000.mp4                optional
    data/idx_to_episode.csv              global_step, episode: one row for every frame, in order
    data/recording.json                  what made the data

Episodes are numbered in the order in which they start. A finished one gets its folder at once
(that is what makes it finished), but its CSV and its place in the index only when all earlier
ones have theirs, because only then is its global step known. A kill at any moment therefore
loses no finished episode and leaves none half-written in the index.
"""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from common.errors import UserError
from common.files import atomic_folder, atomic_path, save_json
from common.video import write_video

STEP_COLUMNS = ("level_seed", "episode", "global_step", "episode_step", "done", "reward", "value",
                "action")


@dataclasses.dataclass(frozen=True)
class EpisodeArrays:
    """One episode as it lies on disk.

    Attributes:
        frames: uint8 (L, 3, 64, 64).
        hidden_states: float32 (L + 1, D): row t enters the agent at frame t, row t + 1 leaves.
        log_probs: float32 (L, A).
        steps: one row a frame, columns STEP_COLUMNS.
    """

    frames: np.ndarray
    hidden_states: np.ndarray
    log_probs: np.ndarray
    steps: pd.DataFrame


class RolloutFolder:
    """Names and readers of one ``data`` folder."""

    def __init__(self, path: Path):
        self.path = Path(path)

    @property
    def index_file(self) -> Path:
        return self.path / "idx_to_episode.csv"

    @property
    def description_file(self) -> Path:
        return self.path / "recording.json"

    def episode_folder(self, number: int) -> Path:
        return self.path / f"episode_{number:05d}"

    def steps_file(self, number: int) -> Path:
        return self.path / f"data_gen_model_{number:05d}.csv"

    def video_file(self, number: int) -> Path:
        return self.path / f"sample_{number:05d}.mp4"

    def description(self) -> dict:
        """What made the data; empty for a published data set, which does not say."""
        if not self.description_file.is_file():
            return {}
        return json.loads(self.description_file.read_text())

    def index(self) -> pd.DataFrame:
        """The columns global_step and episode of every frame, int64, in order.

        Raises:
            UserError: if the file is missing or damaged.
        """
        if not self.index_file.is_file():
            raise UserError(f"{self.path} holds no recorded rollouts: there is no "
                            f"{self.index_file.name}")
        index = _read_csv(self.index_file, self.index_file.read_bytes(),
                          ("global_step", "episode"))
        return index.astype(np.int64)

    def steps(self, number: int) -> pd.DataFrame:
        """The rows of an episode.

        Raises:
            UserError: if the file is missing or damaged.
        """
        path = self.steps_file(number)
        return _read_csv(path, _bytes_of(path), STEP_COLUMNS)

    def all_steps(self, numbers: Iterable[int]) -> pd.DataFrame:
        """The rows of several episodes below each other, as ``steps`` would give them.

        Files with the same header are parsed in one go, which takes a twentieth of the time.

        Raises:
            UserError: if a file is missing or damaged.
        """
        numbers = list(numbers)
        contents = [_bytes_of(self.steps_file(number)) for number in numbers]
        header = contents[0].partition(b"\n")[0] if contents else b""
        bodies = [content[len(header) + 1:] for content in contents
                  if content.startswith(header + b"\n") and content.endswith(b"\n")]
        if len(bodies) == len(contents):
            try:
                return _read_csv(self.path, header + b"\n" + b"".join(bodies), STEP_COLUMNS)
            except UserError:
                pass  # one by one, to name the file
        return pd.concat([self.steps(number) for number in numbers], ignore_index=True)

    def arrays(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Frames, hidden states and log-probabilities of an episode, memory-mapped.

        Raises:
            UserError: if a file is missing, truncated or of another type or shape than
                ``EpisodeArrays`` says.
        """
        folder = self.episode_folder(number)
        frames = _map_array(folder / "ob.npy", np.uint8, 4)
        hidden_states = _map_array(folder / "hx.npy", np.float32, 2)
        log_probs = _map_array(folder / "lp.npy", np.float32, 2)
        if len(hidden_states) != len(frames) + 1:
            raise UserError(f"{folder / 'hx.npy'} has {len(hidden_states)} rows, not one more "
                            f"than the {len(frames)} of ob.npy")
        if len(log_probs) != len(frames):
            raise UserError(f"{folder / 'lp.npy'} has {len(log_probs)} rows, not the "
                            f"{len(frames)} of ob.npy")
        return frames, hidden_states, log_probs

    def episode(self, number: int) -> EpisodeArrays:
        """An episode with its arrays memory-mapped."""
        return EpisodeArrays(*self.arrays(number), self.steps(number))


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None


def _read_csv(path: Path, content: bytes, columns: tuple[str, ...]) -> pd.DataFrame:
    """The given columns of a CSV, every value a finite number.

    Raises:
        UserError: naming the file.
    """
    try:
        table = pd.read_csv(io.BytesIO(content), usecols=columns)[list(columns)]
    except (ValueError, UnicodeDecodeError) as error:  # pandas' parser errors are ValueErrors
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is damaged: {reason}") from None
    for name in columns:
        if table[name].dtype == object:
            raise UserError(f"{path} is damaged: the column {name} holds something that is no "
                            "number")
        if not np.isfinite(table[name]).all():
            raise UserError(f"{path} is damaged: the column {name} has a missing or infinite "
                            "value")
    return table


def _map_array(path: Path, dtype: type, dimensions: int) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except (ValueError, EOFError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is truncated or not an array: {reason}") from None
    if array.dtype != dtype or array.ndim != dimensions:
        raise UserError(f"{path} holds {array.dtype} in {array.ndim} dimensions, not "
                        f"{np.dtype(dtype)} in {dimensions}")
    return array


class RolloutWriter:
    """Adds episodes to a data folder; survives being killed at any moment.

    Args:
        path: the data folder; made if missing.
        description: what makes the data. If the folder already holds a recording it must be
            the same, and the recording goes on.
        overwrite: throw away what the folder holds.

    Raises:
        UserError: if the folder holds anything else and ``overwrite`` is false.
    """

    def __init__(self, path: Path, description: dict, overwrite: bool = False):
        self.folder = RolloutFolder(path)
        path = self.folder.path
        if overwrite and path.exists():
            shutil.rmtree(path)
        if path.exists() and any(path.iterdir()):
            found = self.folder.description()
            if not found:
                raise UserError(f"{path} holds other data; choose another --logdir, or give "
                                "--overwrite to throw it away")
            expected = json.loads(json.dumps(description))  # as it looks after a round trip
            for key in sorted((expected.keys() | found.keys()) - {"versions"}):
                if found.get(key) != expected.get(key):
                    raise UserError(f"{path} holds a recording with another {key}; choose another "
                                    "--logdir, or give --overwrite to throw it away")
        path.mkdir(parents=True, exist_ok=True)
        save_json(self.folder.description_file, description)
        self._index_rows(first=True)

    def has(self, number: int) -> bool:
        """Whether an episode is complete on disk."""
        return self.folder.episode_folder(number).exists()

    def add(self, number: int, arrays: EpisodeArrays,
            video: Iterable[np.ndarray] | None = None) -> None:
        """Store a finished episode.

        Args:
            arrays: its contents; ``steps`` may lack the columns episode and global_step.
            video: frames (H, W, C) of ``sample_<number>.mp4``, or None for no video.
        """
        folder = self.folder
        with atomic_path(self._waiting_steps(number)) as temporary:
            arrays.steps.to_csv(temporary, index=False)
        if video is not None:
            write_video(folder.video_file(number), video)
        with atomic_folder(folder.episode_folder(number)) as temporary:
            for name, array in (("ob", arrays.frames), ("hx", arrays.hidden_states),
                                ("lp", arrays.log_probs)):
                np.save(temporary / f"{name}.npy", array, allow_pickle=False)
        self._index_rows()

    def _waiting_steps(self, number: int) -> Path:
        return self.folder.path / f".steps_{number:05d}.csv"

    def _index_rows(self, first: bool = False) -> None:
        """Bring CSVs and index up to the first episode that is still missing.

        The first call rebuilds the index from what is on disk; later ones append to it.
        """
        folder = self.folder
        if first:
            self.num_indexed, self._next_global_step = 0, 0
        rows = []
        while self.has(self.num_indexed):
            number = self.num_indexed
            if not folder.steps_file(number).exists():
                steps = pd.read_csv(self._waiting_steps(number))
                steps["episode"] = number
                steps["global_step"] = self._next_global_step + np.arange(len(steps))
                with atomic_path(folder.steps_file(number)) as temporary:
                    steps[list(STEP_COLUMNS)].to_csv(temporary)
            self._waiting_steps(number).unlink(missing_ok=True)
            length = len(folder.episode(number).log_probs)
            rows += [f"{self._next_global_step + i},{number}\n" for i in range(length)]
            self.num_indexed += 1
            self._next_global_step += length
        if first:
            with atomic_path(folder.index_file) as temporary:
                temporary.write_text("global_step,episode\n" + "".join(rows))
        elif rows:
            with open(folder.index_file, "a") as file:
                file.write("".join(rows))
