"""Trajectories: concatenated consecutive episodes of a recording, and steps of interest in them.

A recording has one row per frame, with the reward that arrived *with* the frame. Each episode ends
with a terminal row, which does not show the level and is not a step. Here, a step is a frame in
which the agent acted, with the reward of its action.

Letters in shape comments: N steps of all trajectories, A actions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from agents.rollout_files import RolloutFolder
from common.errors import UserError
from common.results import Array

IN_ORDER, FAILURES = CHOICES = ("in_order", "failures")


@dataclasses.dataclass(frozen=True)
class Trajectories:
    """Steps of several trajectories, concatenated.

    Attributes:
        trajectory: number of the trajectory, ascending, int32 (N,).
        episode, row: episode and row of the frame in the recording, int32 (N,).
        level: seed of the level, int64 (N,).
        action: action taken, int16 (N,).
        earned: reward of the action, float32 (N,).
        ended: whether the action ended its episode, bool (N,).
        value: value estimate at the step, float32 (N,).
        next_value: value estimate at the episode's next step; 0 at its last step, float32 (N,).
        log_probs: log-probabilities of the actions, float32 (N, A).
    """

    trajectory: np.ndarray
    episode: np.ndarray
    row: np.ndarray
    level: np.ndarray
    action: np.ndarray
    earned: np.ndarray
    ended: np.ndarray
    value: np.ndarray
    next_value: np.ndarray
    log_probs: np.ndarray

    def __len__(self) -> int:
        return len(self.row)

    @property
    def bounds(self) -> np.ndarray:
        """Index of the first step of each trajectory, and the total number of steps, int64
        (trajectories + 1,)."""
        starts = np.flatnonzero(np.diff(self.trajectory, prepend=-1))
        return np.append(starts, len(self))

    @property
    def num_trajectories(self) -> int:
        return len(self.bounds) - 1

    @property
    def frame_ids(self) -> np.ndarray:
        """Episode and row of each step, int32 (N, 2)."""
        return np.stack([self.episode, self.row], axis=1)

    def part(self, number: int) -> Trajectories:
        """Return the trajectory with a given number."""
        rows = slice(*self.bounds[number:number + 2])
        return Trajectories(**{name: array[rows] for name, array in vars(self).items()})

    def place(self, step: int) -> tuple[int, int]:
        """Return the trajectory of a step, and the step's number in it."""
        trajectory = int(self.trajectory[step])
        return trajectory, int(step - self.bounds[trajectory])


FIELDS = {"trajectory": Array(np.int32, "N"), "episode": Array(np.int32, "N"),
          "row": Array(np.int32, "N"), "level": Array(np.int64, "N"),
          "action": Array(np.int16, "N"), "earned": Array(np.float32, "N", finite=False),
          "ended": Array(bool, "N"), "value": Array(np.float32, "N", finite=False),
          "next_value": Array(np.float32, "N", finite=False),
          "log_probs": Array(np.float32, "N A", finite=False)}


def select_episodes(folder: RolloutFolder, episodes: Sequence[int] = (),
                    choose: str = IN_ORDER) -> list[int]:
    """Return the numbers of the episodes for trajectories, in order.

    Args:
        folder: the recording.
        episodes: numbers of episodes; empty for all.
        choose: ``in_order``, or ``failures`` for episodes without a reward first.

    Raises:
        UserError: if the recording has no episodes, or lacks one of the given ones.
    """
    recorded = folder.index()["episode"].unique().tolist()
    if not recorded:
        raise UserError(f"{folder.path} holds no finished episode; record.py writes them")
    for number in episodes:
        if number not in recorded:
            raise UserError(f"{folder.path} holds no episode {number}; it has {recorded[0]} to "
                            f"{recorded[-1]}")
    selected = list(episodes) or recorded
    if choose == FAILURES:
        rewards = folder.all_steps(selected).groupby("episode")["reward"].sum()
        selected.sort(key=lambda number: rewards[number] > 0)  # a stable sort
    return selected


def gather_trajectories(folder: RolloutFolder, num_trajectories: int, num_steps: int,
                        episodes: Sequence[int] = (), choose: str = IN_ORDER) -> Trajectories:
    """Concatenate consecutive episodes of a recording into trajectories.

    A trajectory is cut off after ``num_steps`` steps, and the next one begins with the next
    episode. If the recording has too few episodes, there are fewer trajectories, and the last one
    is shorter.

    Args:
        folder: the recording.
        num_trajectories, num_steps: maximum numbers of trajectories and of steps per trajectory.
        episodes, choose: see :func:`select_episodes`.

    Raises:
        UserError: if the recording is missing or damaged, or lacks one of the given episodes.
    """
    parts, number, length = [], 0, 0
    for episode in select_episodes(folder, episodes, choose):
        if number == num_trajectories:
            break
        steps = _read_steps(folder, episode, num_steps - length)
        parts.append({"trajectory": np.full(len(steps["row"]), number), **steps})
        length += len(steps["row"])
        if length == num_steps:
            number, length = number + 1, 0
    return Trajectories(**{
        name: np.concatenate([part[name] for part in parts]).astype(field.dtype)
        for name, field in FIELDS.items()})


def _read_steps(folder: RolloutFolder, episode: int, most: int) -> dict[str, np.ndarray]:
    """Read at most ``most`` first steps of an episode, as fields of :class:`Trajectories`."""
    steps, log_probs = folder.steps(episode), folder.array_files(episode).log_probs
    length = len(steps) - 1  # the terminal row is not a step
    if length < 1 or not steps["done"].iloc[-1] or steps["done"].iloc[:-1].any():
        raise UserError(f"{folder.steps_file(episode)} is no whole episode: its last row, and no "
                        "other, must be done")
    size = min(length, most)
    column = {name: steps[name].to_numpy() for name in ("value", "action", "reward", "done")}
    ended = column["done"][1:size + 1]
    return {"episode": np.full(size, episode), "row": np.arange(size),
            "level": np.full(size, steps["level_seed"].iloc[0]),
            "action": column["action"][:size], "earned": column["reward"][1:size + 1],
            "ended": ended, "value": column["value"][:size],
            "next_value": np.where(ended, 0, column["value"][1:size + 1]),
            "log_probs": log_probs.rows(0, size)}


def best_of_episodes(scores: np.ndarray, steps: Trajectories, most: int) -> np.ndarray:
    """Return the highest-scoring step of each episode, if its score is positive.

    Args:
        scores: score of each step (N,).
        steps: the steps.
        most: maximum number of returned steps.

    Returns:
        Indices of the steps with the highest scores, in descending order of score.
    """
    new = (np.diff(steps.episode, prepend=-1) != 0) | (np.diff(steps.trajectory, prepend=-1) != 0)
    starts = np.flatnonzero(new)
    best = np.array([begin + int(np.argmax(scores[begin:end]))
                     for begin, end in zip(starts, [*starts[1:], len(scores)])], dtype=int)
    best = best[scores[best] > 0]
    return best[np.argsort(-scores[best], kind="stable")][:most]


def value_spikes(steps: Trajectories) -> np.ndarray:
    """Compute how far each step's value deviates from its neighbours, float64 (N,).

    The deviation is |V_t - (V_{t-1} + V_{t+1}) / 2|; it is 0 at the first and the last step of an
    episode in a trajectory.
    """
    values = steps.value.astype(np.float64)
    spikes = np.zeros(len(values))
    inner = ((steps.episode[2:] == steps.episode[:-2])
             & (steps.trajectory[2:] == steps.trajectory[:-2]))
    spikes[1:-1] = np.where(inner, np.abs(values[1:-1] - (values[:-2] + values[2:]) / 2), 0)
    return spikes


def failed_ends(steps: Trajectories, most: int) -> np.ndarray:
    """Return the indices of the last steps of at most ``most`` episodes that ended without a
    reward, in order."""
    ends = np.flatnonzero(steps.ended)
    rewards = np.array([steps.earned[(steps.episode == steps.episode[end])
                                     & (steps.trajectory == steps.trajectory[end])].sum()
                        for end in ends])
    return ends[~(rewards > 0)][:most]
