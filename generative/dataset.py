"""Recorded rollouts as windows of consecutive frames.

Letters in shape comments: W frames of a window.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from agents.networks import Policy
from agents.rollout_files import FRAME_SHAPE, POSITION_COLUMNS, RolloutFolder
from common.errors import UserError


@dataclasses.dataclass(frozen=True)
class Windows:
    """One window (W, …), or a batch of windows with time first (W, B, …).

    Steps outside the episode have black frames, and zeros in all fields except ``terminals``,
    ``positions`` and the hidden state that follows the episode's last frame.

    Attributes:
        frames: recorded frames, uint8 (…, C, H, W).
        actions: actions taken at the frames, int64 (…,).
        rewards: recorded rewards, float32 (…,).
        values: values of the recorded agent, float32 (…,).
        terminals: 1 where the episode ends and, if ``terminal_absorbing`` of ``RolloutDataset`` is
            True, after its end, float32 (…,).
        hidden_states: the agent's hidden states before each frame and after the last frame,
            float32 (W + 1, …, D).
        positions: the player's position in squares of the level, x to the right and y up, float32
            (…, 2); NaN outside the episode and at terminal frames. None for recordings without
            positions.
        squares: classes of the squares of the world around the last initial frame, uint8
            (1, …, n, n); None without worlds, like the fields below.
        places, velocities, looks: fields of the world's objects, float16, float16 and uint8, see
            ``squares.World`` (1, …, n, n).
        clock: the game's time in the last initial frame, int64 (1, …).
        outcome_weights: weight of the window's loss of outcomes, float32 (1, …); None without
            worlds.
    """

    frames: Tensor
    actions: Tensor
    rewards: Tensor
    values: Tensor
    terminals: Tensor
    hidden_states: Tensor
    positions: Tensor | None = None
    squares: Tensor | None = None
    places: Tensor | None = None
    velocities: Tensor | None = None
    looks: Tensor | None = None
    clock: Tensor | None = None
    outcome_weights: Tensor | None = None

    def each(self, function: Callable[[Tensor], Tensor]) -> Windows:
        """Apply a function to every tensor, and return the results."""
        return Windows(**{name: function(tensor) for name, tensor in self.tensors().items()})

    def to(self, device: torch.device | str) -> Windows:
        """Return the windows on a device."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields by name, without those that are None."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


@dataclasses.dataclass(frozen=True)
class Split:
    """Division of the windows into two parts, which show different episodes.

    Attributes:
        train: numbers of the training windows, int64, ascending.
        held_out: numbers of the held-out windows, int64, ascending.
    """

    train: np.ndarray
    held_out: np.ndarray

    def among(self, numbers: np.ndarray) -> Split:
        """Return the split of the given window numbers, which may be repeated."""
        return Split(*(numbers[np.isin(numbers, part)] for part in (self.train, self.held_out)))


@dataclasses.dataclass(frozen=True)
class WindowPlace:
    """Position in the recorded data.

    Attributes:
        frame: number of a frame in the episode; for a window, its last initial frame.
    """

    episode: int
    frame: int


@dataclasses.dataclass(frozen=True)
class RecordedWorlds:
    """Worlds of a recording.

    Attributes:
        episodes, rows: number of the episode, and row in it, of each world, int64 (N,). The row
            is also the game's time.
        squares: classes, uint8 (N, n, n).
        places, velocities, looks: fields of objects, float16, float16 and uint8, see
            ``squares.World`` (N, n, n).
        positions: the player's position in squares, x to the right and y up, float32 (N, 2).
        moved: change of the position in the last step, float32 (N, 2).
    """

    episodes: np.ndarray
    rows: np.ndarray
    squares: np.ndarray
    places: np.ndarray
    velocities: np.ndarray
    looks: np.ndarray
    positions: np.ndarray
    moved: np.ndarray

    def __getitem__(self, chosen) -> RecordedWorlds:
        return RecordedWorlds(*(array[chosen] for array in vars(self).values()))

# Fields of ``Windows`` and of ``RecordedWorlds``.
_WORLD_FIELDS = {"squares": "squares", "places": "places", "velocities": "velocities",
                 "looks": "looks", "clock": "rows"}


class RolloutDataset:
    """Windows of a ``data`` folder; window i starts at row i of ``idx_to_episode.csv``.

    If the initial frames and the frame after them lie in one episode, the window holds the recorded
    frames, padded after the episode's end. If they straddle two episodes, the window shows only the
    second: its first frame is the last initial frame, and the initial frames before it are padding.
    No window starts at the last rows of the last episode, because no episode follows.

    Args:
        folder: ``data`` folder of this project or a published one.
        num_init_steps: I, number of initial frames.
        num_sim_steps: number of simulated steps; W is I + num_sim_steps - 1.
        terminal_absorbing: whether ``terminals`` stays 1 after an episode's end; False gives
            the published labels, which return to 0.

    Raises:
        UserError: if a file is missing, damaged, or inconsistent with other files (the message
            names it); or if the data is shorter than a window.
    """

    def __init__(self, folder: Path, num_init_steps: int, num_sim_steps: int,
                 terminal_absorbing: bool = True):
        self.folder = RolloutFolder(folder)
        self.num_init_steps = num_init_steps
        self.window_length = num_init_steps + num_sim_steps - 1
        self.terminal_absorbing = terminal_absorbing
        self._worlds: tuple[RecordedWorlds, np.ndarray, np.ndarray] | None = None
        self._read_steps(self._read_index())
        self._lay_out_windows()
        self._check_arrays()

    def _read_index(self) -> pd.DataFrame:
        index, path = self.folder.index(), self.folder.index_file
        if len(index) < self.window_length:
            raise UserError(f"{path} has {len(index)} frames, fewer than the "
                            f"{self.window_length} of a window")
        for column, steps in (("global_step", (1,)), ("episode", (0, 1))):
            numbers = index[column].to_numpy()
            gaps = np.flatnonzero(~np.isin(np.diff(numbers), steps))
            if len(gaps):
                raise UserError(f"{path} has a gap: after {column} {numbers[gaps[0]]} comes "
                                f"{numbers[gaps[0] + 1]}")
        self.episodes = index["episode"].unique()  # numbers on disk
        self._row_episode = index["episode"].to_numpy() - self.episodes[0]  # (N,), counted from 0
        self._lengths = np.bincount(self._row_episode)
        self._first_rows = self._lengths.cumsum() - self._lengths
        return index

    def check_agent(self, agent_file: Path, policy: Policy) -> None:
        """Check that an agent made the recording; only warn if the recording names no agent.

        Raises:
            UserError: if the recorded hidden states have another size, or the recording names
                another agent.
        """
        if self._hidden_size != policy.hidden_state_size:
            raise UserError(f"the hidden states in {self.folder.path} have {self._hidden_size} "
                            f"units, but those of the agent have {policy.hidden_state_size}; "
                            "record this agent with record.py")
        self.folder.check_agent(agent_file)

    def _steps_file(self, row: int) -> Path:
        """Return the CSV file of the episode to which a row of the index belongs."""
        return self.folder.steps_file(self.episodes[self._row_episode[row]])

    def _read_steps(self, index: pd.DataFrame) -> None:
        steps, num_rows = self.folder.all_steps(self.episodes), len(index)
        recorded, expected = (table[["global_step", "episode"]].to_numpy()
                              for table in (steps, index))
        shared = min(len(recorded), num_rows)
        wrong = np.flatnonzero((recorded[:shared] != expected[:shared]).any(axis=1))
        if len(wrong) or len(recorded) != num_rows:
            row = min([*wrong[:1], shared, num_rows - 1])
            raise UserError(f"{self._steps_file(row)} does not fit {self.folder.index_file.name}: "
                            f"from row {row} of the index on, the frames differ")
        is_last = np.isin(np.arange(num_rows), self._first_rows + self._lengths - 1)
        wrong = np.flatnonzero(steps["done"] != is_last)
        if len(wrong):
            raise UserError(f"{self._steps_file(wrong[0])}: 'done' must be 1 in the last row "
                            "and 0 in all others")
        self._actions = steps["action"].to_numpy(np.int64)  # (N,)
        self._rewards = steps["reward"].to_numpy(np.float32)
        self._values = steps["value"].to_numpy(np.float32)
        self._positions = None
        if set(POSITION_COLUMNS) <= set(steps):
            self._positions = steps[list(POSITION_COLUMNS)].to_numpy(np.float32)  # (N, 2)

    def _lay_out_windows(self) -> None:
        """Find the episode that each window shows, and the frame at which it begins."""
        num_rows, last_initial = len(self._row_episode), self.num_init_steps - 1
        rows = np.arange(num_rows)
        ends = self._first_rows + self._lengths
        straddles = rows + self.num_init_steps >= ends[self._row_episode]
        exists = ~straddles | (self._row_episode < len(self.episodes) - 1)
        self._length = int(exists.sum())  # rows without a next episode come last
        if self._length == 0:
            raise UserError(f"{self.folder.index_file} has a single episode of {num_rows} frames, "
                            f"which is too short for {self.num_init_steps} initial frames")
        straddles = straddles[:self._length]
        self._window_episode = self._row_episode[:self._length] + straddles
        within = rows[:self._length] - self._first_rows[self._row_episode[:self._length]]
        # Frame of the episode at position 0 of the window; negative if the episode starts later.
        self._offset = np.where(straddles, -last_initial, within)

    def _check_arrays(self) -> None:
        """Check every episode's files, so that damage is found before training."""
        self._files = [self.folder.array_files(number) for number in self.episodes.tolist()]
        self._hidden_size = self._files[0].hidden_states.shape[1]
        self._num_actions = self._files[0].log_probs.shape[1]
        for files, length in zip(self._files, self._lengths.tolist()):
            expected = ((files.frames, (length, *FRAME_SHAPE)),
                        (files.hidden_states, (length + 1, self._hidden_size)),
                        (files.log_probs, (length, self._num_actions)))
            for file, shape in expected:
                if file.shape != shape:
                    raise UserError(f"{file.path} has the shape {file.shape}, but "
                                    f"{self.folder.index_file.name} and the first episode require "
                                    f"{shape}")
        wrong = np.flatnonzero((self._actions < 0) | (self._actions >= self._num_actions))
        if len(wrong):
            raise UserError(f"{self._steps_file(wrong[0])} has the action "
                            f"{self._actions[wrong[0]]}, but lp.npy has only "
                            f"{self._num_actions} actions")

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Windows:
        """Read one window (W, …)."""
        return self.batch([number]).each(lambda tensor: tensor[:, 0])

    def batch(self, numbers: Sequence[int] | np.ndarray) -> Windows:
        """Read several windows, time first (W, B, …).

        Raises:
            UserError: if an episode's arrays are missing, damaged or hold NaN or infinity.
        """
        numbers = np.asarray(numbers, dtype=np.int64)  # (B,)
        episodes, offsets = self._window_episode[numbers], self._offset[numbers]
        lengths = self._lengths[episodes]
        position = offsets + np.arange(self.window_length)[:, None]  # (W, B), frame of the episode
        inside = (position >= 0) & (position < lengths)
        rows = np.where(inside, self._first_rows[episodes] + position, 0)
        ended = position >= lengths if self.terminal_absorbing else False
        terminals = (position == lengths - 1) | ended
        shape = (self.window_length, len(numbers))
        frames = np.zeros((*shape, *FRAME_SHAPE), np.uint8)
        hidden_states = np.zeros((shape[0] + 1, shape[1], self._hidden_size), np.float32)
        for b, (episode, offset) in enumerate(zip(episodes.tolist(), offsets.tolist())):
            files = self._files[episode]
            lead, begin = max(-offset, 0), max(offset, 0)
            for target, file in ((frames, files.frames), (hidden_states, files.hidden_states)):
                piece = file.rows(begin, begin + len(target) - lead)
                target[lead:lead + len(piece), b] = piece
        fields = {"actions": self._actions, "rewards": self._rewards, "values": self._values}
        arrays = {name: np.where(inside, values[rows], values.dtype.type(0))
                  for name, values in fields.items()}
        if self._positions is not None:
            arrays["positions"] = np.where(inside[..., None], self._positions[rows],
                                           np.float32(np.nan))
        if self._worlds is not None:
            worlds, of_window, weights = self._worlds
            arrays |= {name: getattr(worlds, field)[of_window[numbers]][None]
                       for name, field in _WORLD_FIELDS.items()}
            arrays["outcome_weights"] = weights[numbers][None]
        return Windows(**{name: torch.from_numpy(array) for name, array in {
            **arrays, "frames": frames, "hidden_states": hidden_states,
            "terminals": terminals.astype(np.float32)}.items()})

    def attach_worlds(self, worlds: RecordedWorlds, death_copies: int = 1,
                      coin_copies: int = 1) -> np.ndarray:
        """Add the squares of recorded worlds to the windows whose last initial frame has a world.

        Args:
            worlds: worlds of this recording.
            death_copies, coin_copies: copies of windows that end without and with a reward.

        Returns:
            Numbers of the windows that have a world, int64, repeated by their number of copies.
        """
        last = self.num_init_steps - 1
        number_of = {key: i for i, key in enumerate(zip(worlds.episodes.tolist(),
                                                        worlds.rows.tolist()))}
        places = zip(self.episodes[self._window_episode].tolist(), (self._offset + last).tolist())
        of_window = np.array([number_of.get(place, -1) for place in places], np.int64)
        chosen = np.flatnonzero(of_window >= 0)
        ends = (self._first_rows + self._lengths - 1)[self._window_episode]
        copies = np.where(self.end_inside, np.where(self._rewards[ends] > 0, coin_copies,
                                                    death_copies), 1)
        self._worlds = worlds, of_window, (1 / copies).astype(np.float32)
        return np.repeat(chosen, copies[chosen])

    @property
    def worlds(self) -> RecordedWorlds:
        """The worlds from ``attach_worlds``."""
        assert self._worlds is not None
        return self._worlds[0]

    @property
    def windows_with_worlds(self) -> np.ndarray:
        """Numbers of the windows whose last initial frame has a world, int64; see
        ``attach_worlds``."""
        assert self._worlds is not None
        return np.flatnonzero(self._worlds[1] >= 0)

    @property
    def end_inside(self) -> np.ndarray:
        """Whether the episode of each window ends after the last initial frame and before the end
        of the window, bool (windows,)."""
        position = self._lengths[self._window_episode] - 1 - self._offset
        return (position > self.num_init_steps - 1) & (position < self.window_length)

    @property
    def has_positions(self) -> bool:
        """Whether the player's positions were recorded."""
        return self._positions is not None

    def some_frames(self, windows: np.ndarray, number: int, seed: int) -> Tensor:
        """Read the last initial frames of random windows, without black frames.

        Returns:
            Frames in [0, 1] (N, C, H, W).
        """
        chosen = np.random.default_rng(seed).permutation(windows)[:number]
        frames = torch.cat([self.batch(chosen[begin:begin + 100]).frames[self.num_init_steps - 1]
                            for begin in range(0, len(chosen), 100)])
        return frames[frames.flatten(1).any(dim=1).bool()].float() / 255

    def place(self, number: int) -> WindowPlace:
        """Return the position of a window's last initial frame in the recorded data."""
        episode = self.episodes[self._window_episode[number]]
        return WindowPlace(int(episode), int(self._offset[number]) + self.num_init_steps - 1)

    def split(self, held_out_fraction: float, seed: int) -> Split:
        """Split the windows by the episode that they show, deterministically for a given seed.

        Args:
            held_out_fraction: share of the episodes to hold out, from 0 to 1; at least one
                episode is held out and at least one is kept.

        Raises:
            UserError: if there are fewer than two episodes.
        """
        shown = np.unique(self._window_episode)
        if len(shown) < 2:
            raise UserError(f"{self.folder.path} has windows of one episode only, so none can be "
                            "held out")
        num_held_out = min(max(round(held_out_fraction * len(shown)), 1), len(shown) - 1)
        chosen = np.random.default_rng(seed).permutation(shown)[:num_held_out]
        held_out = np.isin(self._window_episode, chosen)
        return Split(np.flatnonzero(~held_out), np.flatnonzero(held_out))

    def episodes_of(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the numbers on disk (B,) of the episodes that windows (B,) show."""
        return self.episodes[self._window_episode[numbers]]
