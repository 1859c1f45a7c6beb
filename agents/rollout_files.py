"""Write and read recorded rollouts in ``<logdir>/data/``.

Layout, as published::

    data/episode_00000/{ob,hx,lp}.npy    frames, hidden states and log-probabilities, see
                                         ``EpisodeArrays``; frames are channels-first
    data/episode_00000/world_00008.png   optional rendered world of a row, see ``envs.wide_view``
    data/episode_00000/moving.csv        moving objects of these rows, see ``agents.world_files``
    data/data_gen_model_00000.csv        one row per frame, see STEP_COLUMNS; in some recordings
                                         also POSITION_COLUMNS, see below
    data/sample_00000.mp4                optional
    data/idx_to_episode.csv              global_step, episode: one row per frame, in order
    data/recording.json                  settings of the recording and, once it is complete,
                                         digests of its episodes, see ``agents.provenance``

POSITION_COLUMNS hold the player's position in squares, measured from the lower left corner of the
level: x to the right, y upwards. They are empty in the last row, whose frame shows no level.

Episodes are numbered in the order in which they start. When an episode ends, its folder is created,
which marks it as finished. Its CSV rows wait in ``.steps_00000.csv`` until all earlier episodes are
in the index, because only then are their global steps known. A killed process therefore loses no
finished episode and leaves none half-written in the index.

A recording can be divided among shards, see ``common.shards``. Each of K shards records every K-th
episode, and writes arrays, video and ``.steps_*.csv``. The first process that opens the folder
afterwards joins the shards, and writes CSVs, index and ``recording.json``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd

import agents.world_files as world_files
from agents.provenance import CONTENTS, check_agent, file_sha256, is_digest
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
from common.results import Entry, File, ResultStore, Schema
from common.shards import DIVIDED, WHOLE, Shard, ShardNotes, divided_number
from common.tables import read_table
from common.video import write_video

_STEP_KINDS = {"level_seed": int, "episode": int, "global_step": int, "episode_step": int,
               "done": bool, "reward": float, "value": float, "action": int}
STEP_COLUMNS = tuple(_STEP_KINDS)
POSITION_COLUMNS = ("player_x", "player_y")
FRAME_SHAPE = (3, FRAME_SIZE, FRAME_SIZE)
# Patterns of the files that are read from a data folder; videos are never read.
PATTERNS = ("recording.json", "idx_to_episode.csv", "data_gen_model_*.csv", "episode_*/*.*")
RECORDING = Schema("a recording", "record.py", {
    "index": Entry("idx_to_episode.csv", File()), "array": Entry(
        "episode_{:0>5}/{}.npy", File(), choices=("ob", "hx", "lp")),
    "steps": Entry("data_gen_model_{:0>5}.csv", File()),
    "waiting_steps": Entry(".steps_{:0>5}.csv", File()),  # until their global steps are known
    "video": Entry("sample_{:0>5}.mp4", File()),
    "world": Entry("episode_{:0>5}/world_{:0>5}.png", File()),
    "moving": Entry("episode_{:0>5}/moving.csv", File())},
    informative=("versions", PARAMETER_SET, CONTENTS), settings_name="recording.json",
    flag="--logdir")
_GLOBAL_STEP = 1 + STEP_COLUMNS.index("global_step")  # column number in an episode's CSV
_INDEX_HEADER = "global_step,episode\n"

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
    """Array files of one episode, from which any rows can be read.

    Attributes:
        frames: uint8 (L, 3, 64, 64).
        hidden_states: float32 (L + 1, D), see ``EpisodeArrays``.
        log_probs: float32 (L, A).
    """

    frames: ArrayFile
    hidden_states: ArrayFile
    log_probs: ArrayFile


class RolloutFolder(ResultStore):
    """File names and readers of one ``data`` folder.

    Args:
        path: path of the folder. Shards that recorded in it are joined first.
        joined: whether to join the shards; if False, only the file names can be used.

    Raises:
        UserError: see :func:`join_recording`.

    Example::

        >>> recording = RolloutFolder("recording")
        >>> episode = recording.episode(recording.finished()[0])
        >>> assert len(episode.hidden_states) == len(episode.frames) + 1 == len(episode.steps) + 1
    """

    def __init__(self, path: str | Path, joined: bool = True):
        super().__init__(Path(path), RECORDING)
        if joined and ShardNotes(self.path).exist():
            join_recording(self.path)

    @property
    def index_file(self) -> Path:
        return self.file_of("index")

    @property
    def description_file(self) -> Path:
        return self.settings_file

    def episode_folder(self, number: int) -> Path:
        return self.path / f"episode_{number:05d}"

    def steps_file(self, number: int) -> Path:
        return self.file_of("steps", number)

    def files_of(self, number: int) -> list[Path]:
        """Return the paths of an episode's arrays, CSV and worlds, which its digest covers."""
        folder = self.episode_folder(number)
        return [*(folder / f"{name}.npy" for name in ("ob", "hx", "lp")), self.steps_file(number),
                *world_files.files_of(folder)]

    def video_file(self, number: int) -> Path:
        return self.file_of("video", number)

    def description(self) -> dict:
        """Return the settings of the recording; empty for published data, which lacks them."""
        settings = self.schema.read_settings(self.description_file)
        return {name: value for name, value in settings.items() if name != CONTENTS}

    @property
    def game(self) -> str:
        """Name of the recorded game; "" if it is unknown."""
        return (self.description().get("env") or {}).get("env_name") or ""

    def stored_digests(self) -> tuple[dict, int]:
        """Return the digests in ``recording.json``, and its modification time in nanoseconds;
        ({}, 0) if it has none."""
        stored = read_description(self.description_file).get(CONTENTS)
        if not isinstance(stored, dict):
            return {}, 0
        return stored, self.description_file.stat().st_mtime_ns

    def digests(self, numbers: Iterable[int], stored: dict, stored_at: int
                ) -> dict[str, list[int | str]]:
        """Return size in bytes and digest of each episode, ``{number: [bytes, sha256]}``.

        Logs a warning for each episode that differs from its stored digest.

        Args:
            stored: stored digests. An episode's stored digest is returned if the total size of its
                files is unchanged and no file is newer than ``stored_at``; otherwise the files are
                read.
            stored_at: time when the digests were stored, in nanoseconds; -1 to read all files.
        """
        result: dict[str, list[int | str]] = {}
        for number in numbers:
            files, known = self.files_of(number), stored.get(str(number))
            stats = [path.stat() for path in files]
            size, newest = sum(s.st_size for s in stats), max(s.st_mtime_ns for s in stats)
            if known is None or not is_digest(known) or known[0] != size or newest > stored_at:
                known = [size, file_sha256(files)]
                if stored.get(str(number), known) != known:
                    logger.warning("%s: episode %d changed after the recording was finished",
                                   self.path, number)
            result[str(number)] = known
        return result

    def sha256(self, check_contents: bool = False) -> str:
        """Return the digest of the recording, computed from the digests of its episodes.

        If ``recording.json`` has no digests, it is computed from the index and ``recording.json``.

        Args:
            check_contents: read the files of all episodes, not only files whose size or time has
                changed.

        Raises:
            UserError: if the index or ``recording.json`` is damaged.
        """
        stored, stored_at = self.stored_digests()
        if stored:
            digests = self.digests(self.index()["episode"].unique(), stored,
                                   -1 if check_contents else stored_at)
            lines = [f"{number} {digest}\n" for number, (_, digest) in digests.items()]
        else:
            logger.warning("%s has no digests of its episodes, so changes of their contents will "
                           "not be noticed", self.path)
            files = [path for path in (self.index_file, self.description_file) if path.is_file()]
            lines = [file_sha256([path]) for path in files]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def check_agent(self, agent_file: Path) -> None:
        """Check that the recording was made with this agent; warn if its agent is unknown.

        Raises:
            UserError: if the recording was made with another agent.
        """
        check_agent(self.description().get("agent_sha256"), agent_file,
                    f"{self.path} was recorded", "record this agent with record.py")

    def index(self) -> pd.DataFrame:
        """Read the index of frames: columns global_step and episode, int64, in order.

        Raises:
            UserError: if the file is missing or damaged, or lists no frames.
        """
        if not self.index_file.is_file():
            raise UserError(f"{self.path} holds no recorded rollouts: there is no "
                            f"{self.index_file.name}; record.py writes them")
        index = read_table(self.index_file, {"global_step": int, "episode": int}).astype(np.int64)
        if not len(index):
            raise UserError(f"{self.index_file} lists no frames; if record.py is running, wait "
                            "until it has ended")
        return index

    def steps(self, number: int) -> pd.DataFrame:
        """Read the rows of an episode's CSV.

        Raises:
            UserError: if the file is missing or damaged.
        """
        return _read_steps(self.steps_file(number), read_bytes(self.steps_file(number)))

    def all_steps(self, numbers: Iterable[int]) -> pd.DataFrame:
        """Read and concatenate the rows of one or more episodes.

        Files with the same header are parsed together, 20 times as fast as one by one.

        Raises:
            UserError: if a file is missing or damaged.
        """
        numbers = list(numbers)
        contents = [read_bytes(self.steps_file(number)) for number in numbers]
        header = contents[0].partition(b"\n")[0] + b"\n"
        if all(content.startswith(header) and content.endswith(b"\n") for content in contents):
            with contextlib.suppress(UserError):  # reading them one by one names the damaged file
                return _read_steps(self.path, header + b"".join(
                    content[len(header):] for content in contents))
        return pd.concat([self.steps(number) for number in numbers], ignore_index=True)

    def array_files(self, number: int) -> EpisodeFiles:
        """Open the arrays of an episode as files from which any rows can be read.

        Raises:
            UserError: if a file is missing or truncated, or its type, number of rows or frame shape
                differs from ``EpisodeFiles``.
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
                raise UserError(f"{file.path} has {file.shape[0]} rows, but ob.npy has {length}, "
                                f"so it must have {rows}")
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

    def world_rows(self, number: int) -> list[int]:
        """Return the rows of an episode whose worlds were recorded, in ascending order."""
        return world_files.rows_of(self.episode_folder(number))

    def world(self, number: int, row: int) -> np.ndarray:
        """Read the world of a row of an episode, see ``agents.world_files``."""
        return world_files.read_world(self.episode_folder(number), row)

    def moving(self, number: int) -> pd.DataFrame:
        """Read the moving objects of an episode's worlds, see ``agents.world_files``."""
        return world_files.read_moving(self.episode_folder(number))

    def finished(self) -> list[int]:
        """Return the numbers of the episodes that have a folder, in ascending order."""
        return sorted(int(match[1]) for path in self.path.glob("episode_*")
                      if (match := re.fullmatch(r"episode_(\d{5,})", path.name)))


class RolloutWriter:
    """Writer that adds episodes to a data folder, safe against being killed at any moment.

    Args:
        path: the data folder; created if missing.
        description: settings of the recording. A recording with the same settings is resumed.

    Raises:
        UserError: if the folder contains a recording with other settings (see
            ``ResultStore.open``), or a finished episode is damaged.
    """

    def __init__(self, path: Path, description: dict, overwrite: bool = False,
                 shard: Shard = WHOLE, num_episodes: int = 0):
        self._is_whole, self._description = shard == WHOLE, description
        self.folder = RolloutFolder(path, joined=self._is_whole and not overwrite)
        self._stored_digests = ({}, 0) if overwrite else self.folder.stored_digests()
        self.folder.open(description, overwrite, shard, {"num_episodes": num_episodes}, needed=[
            ("index",), *(("steps", number) for number in range(num_episodes))])
        self._num_indexed, self._global_step = 0, 0
        self._digests: dict[str, list[int | str]] = {}
        if self._is_whole:
            with atomic_path(self.folder.index_file) as temporary:
                temporary.write_text(_INDEX_HEADER + self._place_finished(), encoding="utf-8")

    def has(self, number: int) -> bool:
        """Return whether an episode is complete on disk."""
        return self.folder.episode_folder(number).exists()

    def add(self, number: int, arrays: EpisodeArrays,
            video: Iterable[np.ndarray] | None = None,
            worlds: Mapping[int, world_files.RenderedWorld] | None = None,
            world_copies: Mapping[str, bytes] | None = None) -> None:
        """Store a finished episode.

        Args:
            arrays: the episode; ``steps`` may lack the columns episode and global_step.
            video: frames (H, W, C) of ``sample_<number>.mp4``, or None for no video.
            worlds: worlds by row.
            world_copies: contents of files of worlds by name, instead of ``worlds``.

        Raises:
            UserError: if the data folder was deleted.
        """
        self.folder.check()
        folder = self.folder
        with atomic_path(folder.file_of("waiting_steps", number)) as temporary:
            temporary.write_bytes(_numbered_csv(arrays.steps, number))
        if video is not None:
            write_video(folder.video_file(number), video)
        frames = np.ascontiguousarray(np.moveaxis(arrays.frames, -1, 1))
        with atomic_folder(folder.episode_folder(number)) as temporary:
            for name, array in (("ob", frames), ("hx", arrays.hidden_states),
                                ("lp", arrays.log_probs)):
                np.save(temporary / f"{name}.npy", array, allow_pickle=False)
            if worlds:
                world_files.write_worlds(temporary, worlds)
            world_files.copy_worlds(temporary, world_copies or {})
        if self._is_whole:
            append_or_nothing(folder.index_file, self._place_finished())

    def finish(self) -> None:
        """Mark the recording, or this shard of it, as finished; store the digests of the episodes
        unless it is a shard."""
        if self._is_whole:
            save_json(self.folder.description_file,
                      {**self._description, CONTENTS: self._digests})
        self.folder.finish()

    def _place_finished(self) -> str:
        """Write the CSVs of all finished episodes before the first unfinished one, and return their
        rows for the index."""
        rows = []
        while self.has(self._num_indexed):
            number = self._num_indexed
            length = _place_steps(self.folder, number, self._global_step)
            self.folder.file_of("waiting_steps", number).unlink(missing_ok=True)
            rows.append(_index_rows(number, self._global_step, length))
            self._digests |= self.folder.digests([number], *self._stored_digests)
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
    """Write the CSV of a finished episode if it is missing, and return the episode's length.

    Args:
        global_step: global step of the episode's first row.
        through: folder for temporary files, see ``atomic_path``.

    Raises:
        UserError: if the episode is damaged.
    """
    length = folder.array_files(number).log_probs.shape[0]
    steps_file, waiting = folder.steps_file(number), folder.file_of("waiting_steps", number)
    if not steps_file.exists():
        try:
            lines = read_bytes(waiting).splitlines(keepends=True)
        except UserError:
            if not steps_file.exists():  # otherwise another process has joined the shards
                raise
        else:
            rows = [line.split(b",", _GLOBAL_STEP + 1) for line in lines]
            if [cells[_GLOBAL_STEP:_GLOBAL_STEP + 1] for cells in rows[1:]] != [
                    [b"%d" % row] for row in range(length)]:
                raise UserError(f"{waiting} or its episode is damaged: the rows are not numbered "
                                f"from 0 to {length - 1}")
            for row, cells in enumerate(rows[1:], global_step):
                cells[_GLOBAL_STEP] = b"%d" % row
            with atomic_path(steps_file, through=through) as temporary:
                temporary.write_bytes(b"".join(map(b",".join, rows)))
    if read_bytes(steps_file).count(b"\n") != length + 1:
        raise UserError(f"{steps_file} or its episode is damaged: the table does not have one row "
                        f"for each of the {length} frames in ob.npy")
    return length


def join_recording(path: Path, num_episodes: int | None = None) -> RolloutFolder:
    """Join the shards of a recording, unless they are already joined.

    Raises:
        UserError: if a shard or an episode is missing, or a file is damaged (the message names
            it), or the shards have recorded another number of episodes.
    """
    folder = RolloutFolder(path, joined=False)

    def make(settings: dict, through: Path) -> None:
        numbers = range(divided_number(settings.pop(DIVIDED, {}), "num_episodes"))
        if num_episodes not in (None, len(numbers)):
            raise UserError(f"the shards in {path} have recorded {len(numbers)} episodes, not "
                            f"{num_episodes}; use --num_episodes {len(numbers)}")
        global_step = 0
        with (atomic_path(folder.index_file, through=through) as temporary,
              open(temporary, "w", encoding="utf-8") as index):
            index.write(_INDEX_HEADER)
            for number in numbers:
                length = _place_steps(folder, number, global_step, through)
                index.write(_index_rows(number, global_step, length))
                global_step += length
        digests = folder.digests(numbers, {}, 0)
        save_json(folder.description_file, {**settings, CONTENTS: digests}, through=through)
        for number in numbers:
            folder.file_of("waiting_steps", number).unlink(missing_ok=True)

    ShardNotes(path).join(make, lambda: folder.index_file.exists() and all(
        folder.steps_file(number).exists() for number in range(num_episodes or 0)))
    return folder


def _read_steps(path: Path, content: bytes) -> pd.DataFrame:
    """Parse the rows of an episode's CSV, including positions if it has them.

    Raises:
        UserError: if the CSV is damaged.
    """
    header = content.partition(b"\n")[0].rstrip(b"\r").split(b",")
    kinds = _STEP_KINDS | {name: float for name in POSITION_COLUMNS if name.encode() in header}
    return read_table(path, kinds, gaps=POSITION_COLUMNS, content=content)
