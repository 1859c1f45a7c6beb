"""Access to the recorded frames for which attributions are computed.

A frame is identified by its episode and its row in the episode, together called its *frame id*.

Letters in shape comments: O observations, B frames, H W C a frame, D hidden units.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from agents.networks import Policy
from agents.provenance import check_agent
from agents.rollout_files import EpisodeFiles, RolloutFolder
from common.errors import UserError

_FRAMES_PER_BATCH = 64
_ALTERED = {"swap": "swapped directions of the hidden state", "patches": "patched layers"}
_AGAIN = "record this agent with record.py --no_action_noise --no_videos"


@dataclasses.dataclass(frozen=True)
class RecordedFrames:
    """A batch of recorded frames.

    Attributes:
        frames: frames, uint8 (B, H, W, C).
        entering: hidden states before these frames were seen, float32 (B, D).
        actions: recorded actions, which were taken in these frames, int64 (B,).
    """

    frames: np.ndarray
    entering: np.ndarray
    actions: np.ndarray


class Recording:
    """A recording of one agent whose hidden states and layers were not altered while it played.

    Args:
        path: data folder of the recording.
        policy: the agent.
        agent_file: file of the agent.
        check_contents: read all files for the checksum, not only files whose size or time has
            changed; see ``RolloutFolder.sha256``.

    Attributes:
        folder: the data folder.
        lengths: number of frames by episode, without the terminal row; episodes without frames are
            left out.
        description: content of ``recording.json``; empty without this file.
        sha256: checksum of the recording.

    Raises:
        UserError: if the recording is damaged, belongs to another agent, or was made with altered
            hidden states or layers; the message names the file.
    """

    def __init__(self, path: Path, policy: Policy, agent_file: Path, check_contents: bool = False):
        self.folder = RolloutFolder(path)
        self.description = self.folder.description()
        episodes = self.folder.index()["episode"].to_numpy()
        check_agent(self.description.get("agent_sha256"), agent_file,
                    f"{self.folder.path} was recorded", _AGAIN)
        for key, words in _ALTERED.items():
            if self.description.get(key):
                raise UserError(f"{self.folder.description_file} says that the agent was recorded "
                                f"with {words}; {_AGAIN}")
        self._files: dict[int, EpisodeFiles] = {}
        self.lengths: dict[int, int] = {}
        for number, length in zip(*(array.tolist() for array in np.unique(
                episodes, return_counts=True))):
            files = self._files[number] = self.folder.array_files(number)
            sizes = files.frames.shape[0], files.hidden_states.shape[1]
            if sizes != (length, policy.hidden_state_size):
                raise UserError(f"the arrays in {files.frames.path.parent} have {sizes[0]} frames "
                                f"and {sizes[1]} hidden units, but "
                                f"{self.folder.index_file.name} lists {length} frames, and the "
                                f"agent has {policy.hidden_state_size} hidden units; {_AGAIN}")
            if length > 1:
                self.lengths[number] = length - 1
        self._steps = self.folder.all_steps(self._files)
        self._first_rows = dict(zip(self._files, np.flatnonzero(np.diff(episodes, prepend=-1))))
        if len(self._steps) != len(episodes):
            raise UserError(f"the tables of the episodes in {self.folder.path} have "
                            f"{len(self._steps)} rows, but {self.folder.index_file.name} lists "
                            f"{len(episodes)}; {_AGAIN}")
        self.sha256 = self.folder.sha256(check_contents)

    @property
    def game(self) -> str | None:
        """Name of the game; None if the recording does not give it."""
        return self.folder.game or None

    def steps(self, episode: int) -> pd.DataFrame:
        """Return the table rows of an episode, including the terminal row."""
        first = self._first_rows[episode]
        return self._steps.iloc[first:first + self._files[episode].frames.shape[0]]

    def all_steps(self) -> pd.DataFrame:
        """Return the table rows of all episodes with frames, including terminal rows."""
        return pd.concat([self.steps(number) for number in self.lengths], ignore_index=True)

    def read(self, frame_ids: np.ndarray) -> RecordedFrames:
        """Read recorded frames with the hidden states before them and the actions taken in them.

        Args:
            frame_ids: episode and row of each frame (B, 2).
        """
        frames, entering, actions = [], [], []
        borders = np.flatnonzero(np.diff(frame_ids[:, 0])) + 1
        for ids in np.split(frame_ids, borders):  # one episode, which is read in one piece
            episode, rows = int(ids[0, 0]), ids[:, 1]
            if episode not in self._files or rows.min() < 0 or (
                    rows.max() >= self._files[episode].frames.shape[0]):
                raise UserError(f"{self.folder.path} has no row {rows.max()} of episode {episode}, "
                                "which the features or attributions name; give the recording from "
                                "which they were computed")
            begin, end = int(rows.min()), int(rows.max()) + 1
            files = self._files[episode]
            frames.append(files.frames.rows(begin, end)[rows - begin])
            entering.append(files.hidden_states.rows(begin, end)[rows - begin])
            actions.append(self.steps(episode)["action"].to_numpy(np.int64)[rows])
        return RecordedFrames(np.moveaxis(np.concatenate(frames), 1, -1),
                              np.concatenate(entering), np.concatenate(actions))

    def observations(self, number: int, seed: int) -> np.ndarray:
        """Draw non-terminal frames evenly from all episodes.

        Every episode contributes the same number of frames, up to a difference of 1, or all of its
        frames if it is shorter.

        Args:
            number: maximum number of frames.
            seed: seed of the random draws.

        Returns:
            Frame ids in ascending order, int32 (O, 2).
        """
        names = np.array(list(self.lengths))
        lengths = np.array([self.lengths[name] for name in names])
        rng = np.random.default_rng(seed)
        shares = _even_shares(lengths, min(number, lengths.sum()), rng.permutation(len(names)))
        return np.concatenate([np.stack([
            np.full(share, name), np.sort(rng.permutation(length)[:share])], axis=1)
            for name, length, share in zip(names, lengths, shares)]).astype(np.int32)


def _even_shares(lengths: np.ndarray, number: int, order: np.ndarray) -> np.ndarray:
    """Return how many of ``number`` frames to draw from each episode, as evenly as the lengths of
    the episodes permit. The first episodes in ``order`` get the remainder."""
    sizes = np.arange(lengths.max())
    # Number of episodes longer than each size.
    longer = len(lengths) - np.searchsorted(np.sort(lengths), sizes, "right")
    # The highest limit on the shares at which their sum is at most ``number``.
    low = np.searchsorted(np.cumsum(longer), number, "right")
    shares = np.minimum(lengths, low)
    unused = order[lengths[order] > low]
    shares[unused[:number - shares.sum()]] += 1
    return shares


def batches(values: np.ndarray) -> Iterator[np.ndarray]:
    """Yield consecutive parts of an array along its first axis, of at most 64 entries each."""
    for begin in range(0, len(values), _FRAMES_PER_BATCH):
        yield values[begin:begin + _FRAMES_PER_BATCH]


def concatenate(pieces: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Concatenate arrays with the same name along the first axis.

    Args:
        pieces: arrays by name, all with the same names.
    """
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def check_finite_frames(values: np.ndarray, frame_ids: np.ndarray, what: str) -> None:
    """Raise an error if a value is NaN or infinite.

    Args:
        values: values of the frames (B, …).
        frame_ids: episode and row of each frame (B, 2).
        what: name of the values for the message, such as "activations of the layer block1".

    Raises:
        UserError: if a value is not finite; the message names the first such frame.
    """
    finite = np.isfinite(values.reshape(len(values), -1)).all(axis=1)
    if not finite.all():
        episode, row = frame_ids[np.argmin(finite)]
        raise UserError(f"the {what} are NaN or infinite in row {row} of episode {episode}; the "
                        "agent's weights are too large, or the recording is damaged")
