"""Convert a recording to a single HDF5 file, and back, see ``Hdf5Options``.

A group ``episode_00000`` holds the arrays of one episode, whose rows are described in
``agents.episodes.Episode``: ``frames`` (L, 64, 64, 3), ``hidden_states`` (L + 1, D), ``log_probs``
(L, A), and a dataset for each column of the table of steps (``action``, ``reward``, ``done``,
``value``, …). ``worlds`` holds the bytes of the files of rendered worlds. The attribute
``recording`` of the file is ``recording.json``. A recording that is converted and converted back
has the same bytes in every file except videos.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import agents.world_files as world_files
from agents.rollout_files import (
    POSITION_COLUMNS,
    STEP_COLUMNS,
    EpisodeArrays,
    RolloutFolder,
    RolloutWriter,
)
from common.errors import UserError
from common.files import atomic_path, read_bytes
from common.options import LogOptions, command, option
from common.progress import with_progress

_NUMBERED = ("episode", "global_step")  # columns that follow from the order of the episodes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hdf5Options(LogOptions):
    """Convert a recording (a folder) to an HDF5 file, or such a file to a recording."""

    source: Path = option(help="data folder of a recording, or an HDF5 file", names=("source",))
    output: Path = option(help="HDF5 file, or data folder, to write")
    overwrite: bool = option(False, "replace the output")


def convert(options: Hdf5Options) -> Path:
    """Write the output, and return its path."""
    if options.source.is_dir():
        return to_hdf5(options.source, options.output, options.overwrite)
    return from_hdf5(options.source, options.output, options.overwrite)


def to_hdf5(folder: Path, path: Path, overwrite: bool = False) -> Path:
    """Write a recording to an HDF5 file.

    Raises:
        UserError: if the recording is incomplete or damaged, or the file exists.
    """
    h5py, recording = _h5py(), RolloutFolder(folder)
    if path.exists() and not overwrite:
        raise UserError(f"{path} exists; --overwrite replaces it")
    numbers = recording.index()["episode"].unique().tolist()
    with atomic_path(path) as temporary, h5py.File(temporary, "w") as file:
        if recording.description_file.is_file():
            file.attrs["recording"] = json.dumps(recording.description())
        for number in with_progress(numbers, len(numbers), "episode"):
            arrays, group = recording.episode(number), file.create_group(f"episode_{number:05d}")
            for name in ("frames", "hidden_states", "log_probs"):
                group.create_dataset(name, data=getattr(arrays, name), compression="gzip",
                                     compression_opts=1, shuffle=name != "frames")
            for column in (*STEP_COLUMNS, *POSITION_COLUMNS):
                if column in arrays.steps and column not in _NUMBERED:
                    group.create_dataset(column, data=arrays.steps[column].to_numpy())
            for world in world_files.files_of(recording.episode_folder(number)):
                group.create_dataset(f"worlds/{world.name}", data=np.frombuffer(
                    read_bytes(world), np.uint8))
    print(f"wrote {path}: {len(numbers)} episodes")
    return path


def from_hdf5(path: Path, folder: Path, overwrite: bool = False) -> Path:
    """Write the recording in an HDF5 file to a data folder.

    Raises:
        UserError: if the file is missing, damaged or has other contents, or the folder holds
            another recording.
    """
    h5py = _h5py()
    if not path.is_file():
        raise UserError(f"there is no HDF5 file {path}")
    try:
        with h5py.File(path) as file:
            names = sorted(name for name in file if name.startswith("episode_"))
            if not names:
                raise UserError(f"{path} has no groups episode_00000, …; python -m "
                                "agents.import_frames reads frames and actions of other programs")
            writer = RolloutWriter(folder, json.loads(file.attrs.get("recording", "{}")),
                                   overwrite)
            for number, name in enumerate(with_progress(names, len(names), "episode")):
                if not writer.has(number):
                    arrays, worlds = _read_episode(file[name])
                    writer.add(number, arrays, world_copies=worlds)
            writer.finish()
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read as a recording in HDF5: {error}") from None
    print(f"wrote {folder}: {len(names)} episodes")
    return folder


def _read_episode(group: Any) -> tuple[EpisodeArrays, dict[str, bytes]]:
    steps = pd.DataFrame({column: group[column][:] for column in (*STEP_COLUMNS, *POSITION_COLUMNS)
                          if column in group})
    worlds = {name: group["worlds"][name][:].tobytes() for name in group.get("worlds", ())}
    return EpisodeArrays(group["frames"][:], group["hidden_states"][:], group["log_probs"][:],
                         steps), worlds


def _h5py() -> Any:
    try:
        import h5py
    except ImportError:
        raise UserError("HDF5 files need h5py: pip install h5py") from None
    return h5py


main = command(Hdf5Options, convert)

if __name__ == "__main__":
    raise SystemExit(main())
