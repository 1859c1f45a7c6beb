"""Trajectories: consecutive episodes of a recording, one step after the other.

A recording has one row a frame, with the reward that arrived *with* the frame, and its episodes end
in a terminal row, which shows no level and is no step. A step here is a frame that was acted on,
with what its action earned.

Letters in shape comments: N steps of all trajectories, A actions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from agents.rollout_files import RolloutFolder
from common.errors import UserError
from common.files import atomic_path, read_arrays

IN_ORDER, FAILURES = CHOICES = ("in_order", "failures")
WHAT = "trajectories file"


@dataclasses.dataclass(frozen=True)
class Trajectories:
    """Steps of several trajectories below each other.

    Attributes:
        trajectory: number of the trajectory, ascending, int32 (N,).
        episode, row: of the recording, int32 (N,).
        level: seed of the level, int64 (N,).
        action: that was taken, int16 (N,).
        earned: reward that the action earned, float32 (N,).
        ended: whether the action ended its episode, bool (N,).
        value: estimate at the step, float32 (N,).
        next_value: estimate at the next row of the episode; 0 where there is none, float32 (N,).
        log_probs: of the policy, float32 (N, A).
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
        """Where trajectories begin, and the end of the last: int64 (trajectories + 1,)."""
        starts = np.flatnonzero(np.diff(self.trajectory, prepend=-1))
        return np.append(starts, len(self))

    def part(self, number: int) -> Trajectories:
        """One of the trajectories."""
        rows = slice(*self.bounds[number:number + 2])
        return Trajectories(*(getattr(self, field.name)[rows]
                              for field in dataclasses.fields(self)))


_KINDS = {"trajectory": "int32", "episode": "int32", "row": "int32", "level": "int64",
          "action": "int16", "earned": "float32", "ended": "bool", "value": "float32",
          "next_value": "float32", "log_probs": "float32"}


def chosen_episodes(folder: RolloutFolder, episodes: Sequence[int] = (),
                    choose: str = IN_ORDER) -> list[int]:
    """The episodes that trajectories are made of, in their order.

    Args:
        episodes: the numbers that are wanted; empty for all.
        choose: ``in_order``; or ``failures``, those without a reward first.

    Raises:
        UserError: if the recording has no such episode, or none at all.
    """
    there = folder.index()["episode"].unique().tolist()
    if not there:
        raise UserError(f"{folder.path} holds no finished episode; record.py writes them")
    for number in episodes:
        if number not in there:
            raise UserError(f"{folder.path} holds no episode {number}; it has {there[0]} to "
                            f"{there[-1]}")
    wanted = list(episodes) or there
    if choose == FAILURES:
        steps = folder.all_steps(wanted)
        rewards = steps.groupby("episode")["reward"].sum()
        wanted.sort(key=lambda number: rewards[number] > 0)  # keeps the order among equals
    return wanted


def gather_trajectories(folder: RolloutFolder, num_trajectories: int, num_steps: int,
                        episodes: Sequence[int] = (), choose: str = IN_ORDER) -> Trajectories:
    """Consecutive episodes of a recording as trajectories of ``num_steps`` steps at most.

    A trajectory is cut at ``num_steps``, and the next one begins with the next episode. With fewer
    episodes than are needed there are fewer trajectories, and the last one is shorter.

    Args:
        episodes, choose: see ``chosen_episodes``.

    Raises:
        UserError: if the recording is missing or damaged, or has no such episode.
    """
    parts, number, length = [], 0, 0
    for episode in chosen_episodes(folder, episodes, choose):
        if number == num_trajectories:
            break
        part = _steps_of(folder, episode, num_steps - length)
        parts.append({"trajectory": np.full(len(part["row"]), number), **part})
        length += len(part["row"])
        if length == num_steps:
            number, length = number + 1, 0
    joined = {name: np.concatenate([part[name] for part in parts]).astype(kind)
              for name, kind in _KINDS.items()}
    return Trajectories(**joined)


def _steps_of(folder: RolloutFolder, episode: int, most: int) -> dict[str, np.ndarray]:
    """The first steps of an episode, by the fields of ``Trajectories``."""
    steps, log_probs = folder.steps(episode), folder.array_files(episode).log_probs
    length = len(steps) - 1  # the terminal row is no step
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


def save_trajectories(path: Path, trajectories: Trajectories) -> None:
    """Write ``trajectories.npz``, atomically: an array a field."""
    with atomic_path(path) as temporary:
        np.savez(temporary, **vars(trajectories))


def read_trajectories(path: Path) -> Trajectories:
    """Read ``trajectories.npz``.

    Raises:
        UserError: if the file is missing or damaged.
    """
    found = read_arrays(path, WHAT)
    sizes = {len(array) for array in found.values() if array.ndim}
    if found.keys() != _KINDS.keys() or len(sizes) != 1 or any(
            found[name].dtype != kind or found[name].ndim != 1 + (name == "log_probs")
            for name, kind in _KINDS.items()):
        raise UserError(f"the {WHAT} {path} does not hold the arrays of trajectories; make it "
                        "again with attribution.attribute")
    return Trajectories(**found)


def best_of_episodes(scores: np.ndarray, steps: Trajectories, most: int) -> np.ndarray:
    """Of every episode the step with the highest score, if that is above 0; of these the ``most``
    highest, highest first, as numbers of steps.

    Args:
        scores: (N,).
    """
    new = (np.diff(steps.episode, prepend=-1) != 0) | (np.diff(steps.trajectory, prepend=-1) != 0)
    starts = np.flatnonzero(new)
    best = np.array([begin + int(np.argmax(scores[begin:end]))
                     for begin, end in zip(starts, [*starts[1:], len(scores)])], dtype=int)
    best = best[scores[best] > 0]
    return best[np.argsort(-scores[best], kind="stable")][:most]


def spikes(steps: Trajectories) -> np.ndarray:
    """By how much the value of a step stands out from its neighbours', |V_t - (V_{t-1} + V_{t+1})
    / 2|; 0 where an episode or trajectory begins, ends or is cut. float64 (N,)."""
    values = steps.value.astype(np.float64)
    found = np.zeros(len(values))
    inner = ((steps.episode[2:] == steps.episode[:-2])
             & (steps.trajectory[2:] == steps.trajectory[:-2]))
    found[1:-1] = np.where(inner, np.abs(values[1:-1] - (values[:-2] + values[2:]) / 2), 0)
    return found


def failures(steps: Trajectories, most: int) -> np.ndarray:
    """Last steps of episodes that ended and brought no reward, in order."""
    ends = np.flatnonzero(steps.ended)
    brought = np.array([steps.earned[(steps.episode == steps.episode[end])
                                     & (steps.trajectory == steps.trajectory[end])].sum()
                        for end in ends])
    return ends[~(brought > 0)][:most]
