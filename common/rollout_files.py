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
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from common.errors import UserError
from common.files import append_or_nothing, atomic_folder, atomic_path, save_json
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
        try:
            return json.loads(self.description_file.read_text())
        except ValueError:
            raise UserError(f"{self.description_file} is damaged: it is not JSON") from None

    def index(self) -> pd.DataFrame:
        """The columns global_step and episode of every frame, int64, in order."""
        if not self.index_file.is_file():
            raise UserError(f"{self.path} holds no recorded rollouts: there is no "
                            f"{self.index_file.name}")
        return pd.read_csv(self.index_file).astype(np.int64)

    def steps(self, number: int) -> pd.DataFrame:
        """The rows of an episode."""
        return pd.read_csv(self.steps_file(number))[list(STEP_COLUMNS)]

    def episode(self, number: int) -> EpisodeArrays:
        """An episode with its arrays memory-mapped."""
        arrays = (np.load(self.episode_folder(number) / f"{name}.npy", mmap_mode="r",
                          allow_pickle=False) for name in ("ob", "hx", "lp"))
        return EpisodeArrays(*arrays, self.steps(number))


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
        rows, number, global_step = [], self.num_indexed, self._next_global_step
        while self.has(number):
            if not folder.steps_file(number).exists():
                steps = pd.read_csv(self._waiting_steps(number))
                steps["episode"] = number
                steps["global_step"] = global_step + np.arange(len(steps))
                with atomic_path(folder.steps_file(number)) as temporary:
                    steps[list(STEP_COLUMNS)].to_csv(temporary)
            self._waiting_steps(number).unlink(missing_ok=True)
            length = len(folder.episode(number).log_probs)
            rows += [f"{global_step + i},{number}\n" for i in range(length)]
            number, global_step = number + 1, global_step + length
        if first:
            with atomic_path(folder.index_file) as temporary:
                temporary.write_text("global_step,episode\n" + "".join(rows))
        elif rows:
            append_or_nothing(folder.index_file, "".join(rows))
        self.num_indexed, self._next_global_step = number, global_step
