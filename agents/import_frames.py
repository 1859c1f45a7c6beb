"""Make a recording from frames and actions of another program, see ``ImportFramesOptions``.

A source is an ``.npz`` file, an HDF5 file, or a folder of such files, with these arrays (other
common names in brackets) in the convention of Gymnasium:

- ``frames`` [observations, obs, images]: (T, 64, 64, 3) or (T, 3, 64, 64), uint8 or floats in
  [0, 1]; T + 1 if the frame after the last action is included.
- ``actions`` [action]: (T,), Procgen's actions, 0 to 14.
- ``rewards`` [reward], optional: (T,), the reward of each action.
- ``ends`` [dones, done, terminals, terminated, terminations], optional: (T,), whether an action
  ended the episode. Without them, each file or group of an HDF5 file is one episode.
- ``seeds`` [level_seeds, level_seed, seed], optional: (T,) or one number, the seeds of the levels.

The agent watches the frames: its hidden states, values and log-probabilities are recorded as if it
had taken these actions, so that a simulator can be trained with it.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from agents.acting import FRAMES_PER_BATCH
from agents.agent_file import load_agent, weights_sha256
from agents.config import GameOptions
from agents.episodes import Run, play_episodes
from agents.frames import as_frames
from agents.recording import recording_settings, write_episodes
from agents.rollout_files import RolloutFolder, RolloutWriter
from common.errors import UserError
from common.game_constants import FRAME_SIZE, NUM_ACTIONS
from common.options import ComputeOptions, command, option
from common.progress import with_progress

_NAMES = {"frames": ("frames", "observations", "obs", "images"), "actions": ("actions", "action"),
          "rewards": ("rewards", "reward"),
          "ends": ("ends", "dones", "done", "terminals", "terminated", "terminations"),
          "seeds": ("seeds", "level_seeds", "level_seed", "seed")}
_BLACK = np.zeros((FRAME_SIZE, FRAME_SIZE, 3), np.uint8)

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportFramesOptions(GameOptions, ComputeOptions):
    """Make a recording from frames and actions of another program."""

    hidden: ClassVar = ("start_level", "num_levels")

    source: Path = option(help=".npz or HDF5 file, or a folder of such files", names=("source",))
    agent_file: Path = option(help="agent that watches the frames")
    output: Path = option(help="data folder of the recording to write")
    overwrite: bool = option(False, "delete previous contents of the output")


@dataclasses.dataclass(frozen=True)
class ForeignEpisode:
    """An episode of another program.

    Attributes:
        frames: uint8 (L, 64, 64, 3); the last one is black if the episode ended.
        actions: (L,) or (L - 1,), without the action in the last row.
        rewards: (L,), in the row of the frame that follows the action; 0 in the first row.
        ended: whether the game, rather than the recording, ended.
        seed: seed of the level; -1 if unknown.
    """

    frames: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    ended: bool
    seed: int


class _ReplayedGame:
    """Recorded frames as an environment, with the methods of ``agents.episodes.Game``; a level is
    the number of an episode."""

    is_simulated = False

    def __init__(self, episodes: Sequence[ForeignEpisode]):
        self._episodes = episodes
        self._places: dict[int, tuple[int, int]] = {}  # episode and row by slot

    def reset(self, slots: Sequence[int], levels: Sequence[int]) -> None:
        self._places |= {slot: (level, 0) for slot, level in zip(slots, levels)}

    def observe(self, slots: Sequence[int]) -> np.ndarray:
        return np.stack([self._episodes[number].frames[row]
                         for number, row in map(self._places.__getitem__, slots)])

    def step(self, slots: Sequence[int], actions: Sequence[int]) -> list[tuple[float, bool]]:
        results = []
        for slot in slots:
            number, row = self._places[slot]
            episode = self._episodes[number]
            self._places[slot] = number, row + 1
            results.append((float(episode.rewards[row + 1]), row + 2 == len(episode.frames)))
        return results

    def get_state(self, slot: int) -> tuple[int, int]:
        return self._places[slot]

    def set_state(self, slot: int, state: tuple[int, int]) -> None:
        self._places[slot] = state

    def result(self, slot: int) -> bool:
        return False

    def close(self) -> None:
        self._places.clear()


def import_frames(options: ImportFramesOptions) -> RolloutFolder:
    """Write the recording, and return it."""
    compute, env = options.compute, options.env_config(options.agent_file)
    policy = load_agent(options.agent_file, compute.device)
    episodes = list(read_episodes(options.source))
    cut = sum(not episode.ended for episode in episodes)
    if cut:
        logger.warning("%d of %d episodes do not say that they end; a simulator that is trained on "
                       "them takes their last frame for the end of the game", cut, len(episodes))
    writer = RolloutWriter(options.output, {**recording_settings(
        options.agent_file, weights_sha256(policy), env, 0, compute.precision),
        "imported_from": options.source.name}, options.overwrite)
    runs = [Run(number, number, episode.actions.tolist()) for number, episode in
            enumerate(episodes) if not writer.has(number)]
    played = (dataclasses.replace(episode, level_seed=episodes[episode.number].seed)
              for episode in play_episodes(policy, compute, _ReplayedGame(episodes), runs, 0,
                                           FRAMES_PER_BATCH))
    write_episodes(writer, with_progress(played, len(runs), "episode"), False, None)
    writer.finish()
    print(f"wrote {options.output}: {len(episodes)} episodes, "
          f"{sum(len(episode.frames) for episode in episodes)} frames")
    return writer.folder


def read_episodes(source: Path) -> Iterator[ForeignEpisode]:
    """Read the episodes in a file, or in the files of a folder in the order of their names.

    Raises:
        UserError: if there are none, or an array is missing or does not fit the others; the message
            names the file and the array.
    """
    if source.is_dir():
        files = sorted(path for path in source.iterdir()
                       if path.suffix in (".npz", ".h5", ".hdf5"))
        if not files:
            raise UserError(f"{source} has no .npz or HDF5 files")
    else:
        files = [source]
    for path in files:
        for arrays in _read_arrays(path):
            yield from _episodes_of(arrays, path)


def _read_arrays(path: Path) -> Iterator[Mapping[str, np.ndarray]]:
    """Yield the arrays of a file; those of each group of an HDF5 file that has frames."""
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                yield dict(file)
        elif path.suffix in (".h5", ".hdf5"):
            import h5py
            with h5py.File(path) as file:
                groups = [file, *(file[name] for name in sorted(file))]
                for group in groups:
                    if isinstance(group, h5py.Group) and _find(group, "frames") is not None:
                        yield {name: value[()] for name, value in group.items()
                               if isinstance(value, h5py.Dataset)}
        else:
            raise UserError(f"{path} is neither an .npz file nor an HDF5 file (.h5, .hdf5)")
    except ImportError:
        raise UserError("HDF5 files need h5py: pip install h5py") from None
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _find(arrays: Mapping[str, Any], wanted: str) -> Any:
    return next((arrays[name] for name in _NAMES[wanted] if name in arrays), None)


def _episodes_of(arrays: Mapping[str, np.ndarray], path: Path) -> Iterator[ForeignEpisode]:
    """Check arrays, and divide them into episodes."""
    frames, actions = (_find(arrays, name) for name in ("frames", "actions"))
    for name, array in (("frames", frames), ("actions", actions)):
        if array is None:
            raise UserError(f"{path} has no array {name} (nor {', '.join(_NAMES[name][1:])}), but "
                            f"{', '.join(arrays) or 'none'}")
    try:
        frames = as_frames(frames)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    actions, num = np.asarray(actions).reshape(-1), len(actions)
    if not (actions.dtype.kind in "iu" and num and actions.min() >= 0
            and actions.max() < NUM_ACTIONS):
        raise UserError(f"{path}: actions must be whole numbers from 0 to {NUM_ACTIONS - 1}")
    rewards, ends, seeds = (_find(arrays, name) for name in ("rewards", "ends", "seeds"))
    rewards = np.zeros(num, np.float32) if rewards is None else np.asarray(rewards, np.float32)
    ended = np.zeros(num, bool) if ends is None else np.asarray(ends).astype(bool).reshape(-1)
    seeds = np.broadcast_to(-1 if seeds is None else np.asarray(seeds).reshape(-1), num)
    for name, array in (("frames", frames), ("rewards", rewards), ("ends", ended)):
        if len(array) != num and not (name == "frames" and len(array) == num + 1):
            raise UserError(f"{path}: there are {num} actions, but {len(array)} {name}")
    borders = [0, *(np.flatnonzero(ended) + 1).tolist()]
    borders += [num] * (borders[-1] < num)
    for begin, end in itertools.pairwise(borders):
        is_end = bool(ended[end - 1])
        shown = frames[begin:end if is_end else end + 1]
        if is_end:
            shown = np.concatenate([shown, _BLACK[None]])
        if len(shown) < 2:
            raise UserError(f"{path} holds an episode of a single frame that does not end")
        yield ForeignEpisode(
            shown, actions[begin:end][:len(shown)],
            np.concatenate([[0], rewards[begin:end]])[:len(shown)].astype(np.float32), is_end,
            int(seeds[begin]))


main = command(ImportFramesOptions, import_frames)

if __name__ == "__main__":
    raise SystemExit(main())
