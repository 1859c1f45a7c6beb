"""Frames of a recording that attributions are of.

Letters in shape comments: O observations, B frames, D hidden state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from agents.networks import Policy
from agents.provenance import check_agent
from agents.rollout_files import EpisodeFiles, RolloutFolder
from common.errors import UserError

_FRAMES_A_PASS = 64
_ALTERED = {"swap": "swapped directions of the hidden state", "patches": "patched layers"}
_AGAIN = "record this agent with record.py --no_action_noise --no_videos"


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a recording.

    Attributes:
        frames: uint8 (B, H, W, C).
        entering: hidden states that enter (B, D).
        actions: that were taken, int64 (B,).
    """

    frames: np.ndarray
    entering: np.ndarray
    actions: np.ndarray


class Recording:
    """A recording of one agent without altered states.

    Args:
        path: the data folder.
        policy: the agent.
        agent_file: its file.
        check_contents: see ``RolloutFolder.sha256``.

    Raises:
        UserError: if the recording is damaged, of another agent, or of one whose states or layers
            were altered; the file is named.

    Attributes:
        lengths: frames of each episode, without its terminal row, by its number; only of those
            with any.
        description: its ``recording.json``.
        sha256: its digest.
    """

    def __init__(self, path: Path, policy: Policy, agent_file: Path, check_contents: bool = False):
        self.folder = RolloutFolder(path)
        self.description = self.folder.description()
        file = self.folder.description_file
        episodes = self.folder.index()["episode"].to_numpy()
        check_agent(self.description.get("agent_sha256"), agent_file,
                    f"{self.folder.path} was recorded", _AGAIN)
        for key, words in _ALTERED.items():
            if self.description.get(key):
                raise UserError(f"{file} says that the agent was recorded with {words}; {_AGAIN}")
        self._files: dict[int, EpisodeFiles] = {}
        self.lengths: dict[int, int] = {}
        for number, length in zip(*np.unique(episodes, return_counts=True)):
            files = self._files[int(number)] = self.folder.array_files(int(number))
            states = files.hidden_states
            if files.frames.shape[0] != length:
                raise UserError(f"{files.frames.path} has {files.frames.shape[0]} frames, not "
                                f"{length} as {self.folder.index_file.name} says; {_AGAIN}")
            if states.shape[1] != policy.hidden_state_size:
                raise UserError(f"the hidden states in {states.path} have {states.shape[1]} units, "
                                f"but those of the agent have {policy.hidden_state_size}; {_AGAIN}")
            if length > 1:
                self.lengths[int(number)] = int(length) - 1
        self._steps = self.folder.all_steps(self._files)
        self._first_rows = dict(zip(self._files, np.flatnonzero(
            np.diff(episodes, prepend=-1))))
        if len(self._steps) != len(episodes):
            raise UserError(f"the tables of the episodes in {self.folder.path} have "
                            f"{len(self._steps)} rows, not {len(episodes)} as "
                            f"{self.folder.index_file.name} says; {_AGAIN}")
        self.sha256 = self.folder.sha256(check_contents)

    @property
    def game(self) -> str | None:
        """Name of its game."""
        return (self.description.get("env") or {}).get("env_name")

    def steps(self, episode: int) -> pd.DataFrame:
        """The rows of an episode, the terminal one included."""
        first = self._first_rows[episode]
        return self._steps.iloc[first:first + self._files[episode].frames.shape[0]]

    def all_steps(self) -> pd.DataFrame:
        """The rows of all episodes with frames, terminal rows included."""
        return pd.concat([self.steps(number) for number in self.lengths], ignore_index=True)

    def rows(self, places: np.ndarray) -> Rows:
        """Rows of the recording.

        Args:
            places: episode and row of each (B, 2).
        """
        frames, entering, actions = [], [], []
        borders = np.flatnonzero(np.diff(places[:, 0])) + 1
        for some in np.split(places, borders):  # of one episode, read in one piece
            episode, at = int(some[0, 0]), some[:, 1]
            begin, end = int(at.min()), int(at.max()) + 1
            files = self._files[episode]
            frames.append(files.frames.rows(begin, end)[at - begin])
            entering.append(files.hidden_states.rows(begin, end)[at - begin])
            actions.append(self.steps(episode)["action"].to_numpy(np.int64)[at])
        return Rows(np.moveaxis(np.concatenate(frames), 1, -1), np.concatenate(entering),
                    np.concatenate(actions))

    def observations(self, number: int, seed: int) -> np.ndarray:
        """Frames drawn evenly from all episodes, never terminal ones.

        Every episode gives as many as every other, as long as it has that many.

        Args:
            number: at most how many.

        Returns:
            Episode and row of each, in order, int32 (O, 2).
        """
        names = np.array(list(self.lengths))
        lengths = np.array([self.lengths[name] for name in names])
        rng = np.random.default_rng(seed)
        shares = _even_shares(lengths, min(number, lengths.sum()), rng.permutation(len(names)))
        return np.concatenate([np.stack([
            np.full(share, name), np.sort(rng.permutation(length)[:share])], axis=1)
            for name, length, share in zip(names, lengths, shares)]).astype(np.int32)


def _even_shares(lengths: np.ndarray, number: int, order: np.ndarray) -> np.ndarray:
    """How many of ``number`` each gives that has ``lengths``: as equal as they allow; those that
    are first in ``order`` give what is left over."""
    low, high = 0, int(lengths.max())
    while low < high:  # the largest share that does not give too many
        middle = (low + high + 1) // 2
        low, high = (middle, high) if np.minimum(lengths, middle).sum() <= number else (
            low, middle - 1)
    shares = np.minimum(lengths, low)
    longer = order[lengths[order] > low]
    shares[longer[:number - shares.sum()]] += 1
    return shares


def batches(values: np.ndarray) -> Iterator[np.ndarray]:
    """Frames, or what belongs to them (B, …), as many at a time as run through a network."""
    for begin in range(0, len(values), _FRAMES_A_PASS):
        yield values[begin:begin + _FRAMES_A_PASS]


def check_finite_frames(values: np.ndarray, places: np.ndarray, what: str) -> None:
    """Refuse NaN and infinity, naming the first frame.

    Args:
        values: of the frames (B, …).
        places: episode and row of each (B, 2).
        what: they are, for the message: "activations of the layer block1".

    Raises:
        UserError: if a value is not finite.
    """
    good = np.isfinite(values.reshape(len(values), -1)).all(axis=1)
    if not good.all():
        episode, row = places[np.argmin(good)]
        raise UserError(f"the {what} are NaN or infinite in row {row} of episode {episode}; the "
                        "agent's weights are too large, or the recording is damaged")
