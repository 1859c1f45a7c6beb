"""Write and read recorded rollouts in ``<logdir>/data/``.

Layout, as published::

    data/episode_00000/{ob,hx,lp}.npy    frames uint8 (L, 3, 64, 64), states (L + 1, D), (L, A)
    data/data_gen_model_00000.csv        one row per frame, see STEP_COLUMNS; in some recordings
                                         with the player's position in cells, POSITION_COLUMNS: x
                                         to the right, y upwards from the lower left corner of the
                                         level; empty in the last row, whose frame shows no level
    data/sample_00000.mp4                optional
    data/idx_to_episode.csv              global_step, episode: one row per frame, in order
    data/recording.json                  settings of the recording and, once it is complete,
                                         digests of its episodes, see ``agents.provenance``

Episodes are numbered in the order in which they start. When an episode ends, its folder is created,
which marks it as finished; its rows stay in ``.steps_00000.csv`` until all earlier episodes are in
the index, because only then are their global steps known. A killed process therefore loses no
finished episode and leaves none half-written in the index.

A recording can be divided among shards, see ``common.shards``. Each shard records every N-th
episode: arrays, videos and waiting rows. CSVs, index and ``recording.json`` are written when the
shards are joined, by the first process that opens the folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from agents.provenance import CONTENTS, EpisodeDigests, check_agent, file_sha256
from common.errors import UserError
from common.files import (
    ArrayFile,
    append_or_nothing,
    atomic_folder,
    atomic_path,
    open_array,
    read_bytes,
    read_description,
    save_json,
)
from common.game_constants import FRAME_SIZE
from common.parameters import PARAMETER_SET
from common.shards import WHOLE, Shard, ShardNotes, SharedFolder
from common.tables import read_table
from common.video import write_video

_STEP_KINDS = {"level_seed": int, "episode": int, "global_step": int, "episode_step": int,
               "done": bool, "reward": float, "value": float, "action": int}
STEP_COLUMNS = tuple(_STEP_KINDS)
POSITION_COLUMNS = ("player_x", "player_y")
FRAME_SHAPE = (3, FRAME_SIZE, FRAME_SIZE)
# Files of a data folder that readers use.
PATTERNS = ("recording.json", "idx_to_episode.csv", "data_gen_model_*.csv", "episode_*/*.npy")
_NUMBERED = b",level_seed,"  # start of a CSV with an index column; earlier versions wrote none
_GLOBAL_STEP = 1 + STEP_COLUMNS.index("global_step")  # column number in such a CSV
_INDEX_HEADER = "global_step,episode\n"
_ALL_PATTERNS = (*PATTERNS, "sample_*.mp4", ".steps_*.csv")

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class EpisodeArrays:
    """Arrays of one episode. On disk, frames are stored channels-first, as published.

    Attributes:
        frames: uint8 (L, 64, 64, 3).
        hidden_states: float32 (L + 1, D): row t enters the agent at frame t, row t + 1 leaves it.
        log_probs: float32 (L, A).
        steps: one row per frame, columns STEP_COLUMNS, in some recordings also POSITION_COLUMNS.
    """

    frames: np.ndarray
    hidden_states: np.ndarray
    log_probs: np.ndarray
    steps: pd.DataFrame


@dataclasses.dataclass(frozen=True)
class EpisodeFiles:
    """Array files of one episode; frames are stored as (L, 3, 64, 64)."""

    frames: ArrayFile
    hidden_states: ArrayFile
    log_probs: ArrayFile


class RolloutFolder:
    """File names and readers of one ``data`` folder.

    Args:
        path: path of the folder. Shards that recorded in it are joined first.
        joined: if False, shards are not joined, so that only the file names can be used.

    Raises:
        UserError: if a shard is missing.
    """

    def __init__(self, path: Path, joined: bool = True):
        self.path = Path(path)
        if joined and ShardNotes(self.path).exist():
            join_recording(self.path)

    @property
    def index_file(self) -> Path:
        return self.path / "idx_to_episode.csv"

    @property
    def description_file(self) -> Path:
        return self.path / "recording.json"

    def episode_folder(self, number: int) -> Path:
        return self.path / f"episode_{number:05d}"

    def waiting_steps_file(self, number: int) -> Path:
        """Return the file of an episode's rows, used until their global steps are known."""
        return self.path / f".steps_{number:05d}.csv"

    def steps_file(self, number: int) -> Path:
        return self.path / f"data_gen_model_{number:05d}.csv"

    def files_of(self, number: int) -> list[Path]:
        """Return the files of an episode that readers use."""
        folder = self.episode_folder(number)
        return [*(folder / f"{name}.npy" for name in ("ob", "hx", "lp")), self.steps_file(number)]

    def video_file(self, number: int) -> Path:
        return self.path / f"sample_{number:05d}.mp4"

    def description(self) -> dict:
        """Return the settings of the recording; empty for published data, which lacks them."""
        description = read_description(self.description_file)
        description.pop(CONTENTS, None)
        return description

    def digests(self, check_contents: bool = False) -> EpisodeDigests:
        """Return the digests of the episodes, based on the stored digests in ``recording.json``.

        Args:
            check_contents: read all files, instead of trusting stored digests.
        """
        stored = read_description(self.description_file).get(CONTENTS)
        stored_at = self.description_file.stat().st_mtime_ns if stored else 0
        return EpisodeDigests(self.path, self.files_of, stored, stored_at, check_contents)

    def sha256(self, check_contents: bool = False) -> str:
        """Return the digest of the recording.

        Args:
            check_contents: read all files, not only files whose size or time has changed.

        Raises:
            UserError: if the recording is damaged.
        """
        if CONTENTS in read_description(self.description_file):
            digests = self.digests(check_contents)
            return digests.total(digests.of(self.index()["episode"].unique()))
        logger.warning("%s has no digests of its episodes, so that changes of their contents will "
                       "not be noticed", self.path)
        files = [path for path in (self.index_file, self.description_file) if path.is_file()]
        return hashlib.sha256("".join(file_sha256([path]) for path in files).encode()).hexdigest()

    def check_agent(self, agent_file: Path) -> None:
        """Check that the recording was made with this agent; warn if its agent is unknown.

        Raises:
            UserError: if the recording was made with another agent.
        """
        check_agent(self.description().get("agent_sha256"), agent_file,
                    f"{self.path} was recorded", "record this one with record.py")

    def index(self) -> pd.DataFrame:
        """Read the index of frames: columns global_step and episode, int64, in order.

        Raises:
            UserError: if the file is missing or damaged.
        """
        if not self.index_file.is_file():
            raise UserError(f"{self.path} holds no recorded rollouts: there is no "
                            f"{self.index_file.name}; record.py writes them")
        return read_table(self.index_file, {"global_step": int, "episode": int}).astype(np.int64)

    def steps(self, number: int) -> pd.DataFrame:
        """Read the rows of an episode's CSV.

        Raises:
            UserError: if the file is missing or damaged.
        """
        content = read_bytes(self.steps_file(number))
        return _read_steps(self.steps_file(number), content)

    def all_steps(self, numbers: Iterable[int]) -> pd.DataFrame:
        """Read and concatenate the rows of several episodes.

        Files with the same header are parsed together, which is 20 times as fast.

        Raises:
            UserError: if a file is missing or damaged.
        """
        numbers = list(numbers)
        contents = [read_bytes(self.steps_file(number)) for number in numbers]
        header = contents[0].partition(b"\n")[0] if contents else b""
        bodies = [content[len(header) + 1:] for content in contents
                  if content.startswith(header + b"\n") and content.endswith(b"\n")]
        if len(bodies) == len(contents):
            try:
                return _read_steps(self.path, header + b"\n" + b"".join(bodies))
            except UserError:
                pass  # read the files one by one, so that the error names the file
        return pd.concat([self.steps(number) for number in numbers], ignore_index=True)

    def array_files(self, number: int) -> EpisodeFiles:
        """Open the arrays of an episode as files from which any rows can be read.

        Raises:
            UserError: if a file is missing, truncated, or differs in type or shape from
                ``EpisodeArrays``.
        """
        folder = self.episode_folder(number)
        files = EpisodeFiles(open_array(folder / "ob.npy", np.uint8, 4),
                             open_array(folder / "hx.npy", np.float32, 2),
                             open_array(folder / "lp.npy", np.float32, 2))
        length = files.frames.shape[0]
        if files.frames.shape[1:] != FRAME_SHAPE:
            raise UserError(f"{files.frames.path} has the shape {files.frames.shape}, not "
                            f"{(length, *FRAME_SHAPE)}")
        for file, rows in ((files.hidden_states, length + 1), (files.log_probs, length)):
            if file.shape[0] != rows:
                raise UserError(f"{file.path} has {file.shape[0]} rows, not {rows}, as the "
                                f"{length} of ob.npy ask for")
        return files

    def episode(self, number: int) -> EpisodeArrays:
        """Read a whole episode.

        Raises:
            UserError: see ``array_files`` and ``steps``.
        """
        files = self.array_files(number)
        frames, hidden_states, log_probs = (
            file.rows(0, file.shape[0])
            for file in (files.frames, files.hidden_states, files.log_probs))
        return EpisodeArrays(np.moveaxis(frames, 1, -1), hidden_states, log_probs,
                             self.steps(number))

    def finished(self) -> list[int]:
        """Return the numbers of the episodes that have a folder, in ascending order."""
        return sorted(int(match[1]) for path in self.path.glob("episode_*")
                      if (match := re.fullmatch(r"episode_(\d{5,})", path.name)))


class RolloutWriter:
    """Writer that adds episodes to a data folder and may be killed at any moment.

    Args:
        path: the data folder; created if missing.
        description: settings of the recording. A recording with the same settings is resumed.
        overwrite: delete the previous contents of the folder.
        shard: shard that this process records.
        num_episodes: total number of episodes of all shards.

    Raises:
        UserError: if the folder cannot be used (see ``SharedFolder``), or a finished episode is
            damaged.
    """

    def __init__(self, path: Path, description: dict, overwrite: bool = False,
                 shard: Shard = WHOLE, num_episodes: int = 0):
        self._is_whole, self._description = shard == WHOLE, description
        self.folder = RolloutFolder(path, joined=self._is_whole and not overwrite)
        self._stored_digests = self.folder.digests()
        self._shared = SharedFolder(
            self.folder.description_file, description, _ALL_PATTERNS, "a recording", "--logdir",
            overwrite, ("versions", PARAMETER_SET, CONTENTS), shard=shard,
            divided={"num_episodes": num_episodes},
            is_done=lambda: all(self.has(number) and self.folder.steps_file(number).exists()
                                for number in range(num_episodes)))
        _check_finished(self.folder, self.folder.finished() if self._is_whole else
                        [number for number in shard.of(range(num_episodes)) if self.has(number)])
        self._num_indexed, self._global_step = 0, 0
        self._digests: dict[str, list[int | str]] = {}
        if self._is_whole:
            with atomic_path(self.folder.index_file) as temporary:
                temporary.write_text(_INDEX_HEADER + self._place_finished())

    def has(self, number: int) -> bool:
        """Return whether an episode is complete on disk."""
        return self.folder.episode_folder(number).exists()

    def add(self, number: int, arrays: EpisodeArrays,
            video: Iterable[np.ndarray] | None = None) -> None:
        """Store a finished episode.

        Args:
            arrays: the episode; ``steps`` may lack the columns episode and global_step.
            video: frames (H, W, C) of ``sample_<number>.mp4``, or None for no video.

        Raises:
            UserError: if the data folder was deleted.
        """
        self._shared.check()
        folder = self.folder
        with atomic_path(folder.waiting_steps_file(number)) as temporary:
            temporary.write_bytes(_numbered_csv(arrays.steps, number))
        if video is not None:
            write_video(folder.video_file(number), video)
        frames = np.ascontiguousarray(np.moveaxis(arrays.frames, -1, 1))
        files = {"ob": frames, "hx": arrays.hidden_states, "lp": arrays.log_probs}
        size = sum(array.nbytes for array in files.values())
        with atomic_folder(folder.episode_folder(number), size) as temporary:
            for name, array in files.items():
                np.save(temporary / f"{name}.npy", array, allow_pickle=False)
        if self._is_whole:
            rows = self._place_finished()
            if rows:
                append_or_nothing(folder.index_file, rows)

    def finish(self) -> None:
        """Record that this process has written all its episodes."""
        if self._is_whole:
            save_json(self.folder.description_file,
                      {**self._description, CONTENTS: self._digests})
        self._shared.finish()

    def _place_finished(self) -> str:
        """Write the CSVs of episodes up to the first missing one; returns their index rows."""
        rows = []
        while self.has(self._num_indexed):
            number = self._num_indexed
            length = _place_steps(self.folder, number, self._global_step)
            self.folder.waiting_steps_file(number).unlink(missing_ok=True)
            rows.append(_index_rows(number, self._global_step, length))
            self._digests |= self._stored_digests.of([number])
            self._num_indexed, self._global_step = number + 1, self._global_step + length
        return "".join(rows)


def _index_rows(number: int, global_step: int, length: int) -> str:
    return "".join(f"{global_step + i},{number}\n" for i in range(length))


def _numbered_csv(steps: pd.DataFrame, number: int) -> bytes:
    """Format the rows of an episode as a CSV whose global steps start at 0."""
    steps = steps.assign(done=steps["done"].astype(int), episode=number,
                         global_step=np.arange(len(steps)))
    columns = [*STEP_COLUMNS, *(name for name in POSITION_COLUMNS if name in steps)]
    return steps[columns].to_csv().encode()


def _place_steps(folder: RolloutFolder, number: int, global_step: int,
                 through: Path | None = None) -> int:
    """Write the CSV of a finished episode if it is missing; returns the episode's length.

    Args:
        through: passed to ``atomic_path``.

    Raises:
        UserError: if the episode is damaged.
    """
    length = folder.array_files(number).log_probs.shape[0]
    if folder.steps_file(number).exists():
        return length
    waiting = folder.waiting_steps_file(number)
    try:
        content = read_bytes(waiting)
    except UserError:
        if folder.steps_file(number).exists():  # another process has joined the shards
            return length
        raise
    if not content.startswith(_NUMBERED):  # written by an earlier version, or damaged
        content = _numbered_csv(_read_steps(waiting, content, leave_out=("episode", "global_step")),
                                number)
    header, *lines = content.splitlines(keepends=True)
    rows = [line.split(b",", _GLOBAL_STEP + 1) for line in lines]
    if [cells[_GLOBAL_STEP:_GLOBAL_STEP + 1] for cells in rows] != [
            [b"%d" % row] for row in range(length)]:
        raise UserError(f"{waiting} is damaged, or its episode is: its rows are not numbered from "
                        f"0 to {length - 1}")
    for row, cells in enumerate(rows):
        cells[_GLOBAL_STEP] = b"%d" % (global_step + row)
    with atomic_path(folder.steps_file(number), through=through) as temporary:
        temporary.write_bytes(header + b"".join(map(b",".join, rows)))
    return length


def join_recording(path: Path, num_episodes: int | None = None) -> RolloutFolder:
    """Join the shards of a recording; does nothing if they are already joined.

    Args:
        num_episodes: expected number of episodes.

    Raises:
        UserError: if a shard or an episode is missing, or a file is damaged (the message names
            it), or the shards have recorded another number of episodes.
    """
    folder = RolloutFolder(path, joined=False)

    def make(settings: dict, through: Path) -> None:
        numbers = range(settings.pop("divided")["num_episodes"])
        if num_episodes not in (None, len(numbers)):
            raise UserError(f"the shards in {path} have recorded {len(numbers)} episodes, not "
                            f"{num_episodes}; give the --num_episodes that they had")
        global_step = 0
        with (atomic_path(folder.index_file, through=through) as temporary,
              open(temporary, "w") as index):
            index.write(_INDEX_HEADER)
            for number in numbers:
                length = _place_steps(folder, number, global_step, through)
                index.write(_index_rows(number, global_step, length))
                global_step += length
        digests = EpisodeDigests(path, folder.files_of).of(numbers)
        save_json(folder.description_file, {**settings, CONTENTS: digests}, through=through)
        for number in numbers:
            folder.waiting_steps_file(number).unlink(missing_ok=True)

    ShardNotes(path).join(make, lambda: folder.index_file.exists() and all(
        folder.steps_file(number).exists() for number in range(num_episodes or 0)))
    return folder


def _check_finished(folder: RolloutFolder, numbers: Sequence[int]) -> None:
    """Check the sizes of finished episodes without reading their arrays.

    Raises:
        UserError: if a file is missing or damaged; the message names it.
    """
    shapes = set()
    for number in numbers:
        files = folder.array_files(number)
        shapes.add((files.hidden_states.shape[1], files.log_probs.shape[1]))
        steps_file = folder.steps_file(number)
        if not steps_file.exists():
            steps_file = folder.waiting_steps_file(number)
        rows, length = read_bytes(steps_file).count(b"\n") - 1, files.frames.shape[0]
        if rows != length or len(shapes) > 1:
            what = (f"{rows} rows, not {length}, as ob.npy" if rows != length
                    else "states or actions of another size than the episodes before it")
            raise UserError(f"{steps_file} is damaged, or its episode is: it has {what}")


def _read_steps(path: Path, content: bytes, leave_out: tuple[str, ...] = ()) -> pd.DataFrame:
    """Parse the rows of an episode's CSV, including positions if it has them.

    Raises:
        UserError: if the CSV is damaged.
    """
    header = content.partition(b"\n")[0].rstrip(b"\r").split(b",")
    kinds = {name: kind for name, kind in _STEP_KINDS.items() if name not in leave_out}
    kinds |= {name: float for name in POSITION_COLUMNS if name.encode() in header}
    return read_table(path, kinds, gaps=POSITION_COLUMNS, content=content)
