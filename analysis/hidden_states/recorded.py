"""The hidden states of recorded episodes, and the recorded quantities at each of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd

from agents.rollout_files import POSITION_COLUMNS, RolloutFolder
from common.errors import UserError
from common.progress import with_progress


@dataclasses.dataclass(frozen=True)
class RecordedStates:
    """States of several episodes, one below the other.

    Attributes:
        states: hx[1:] of each, the states that leave the agent (rows, D).
        lengths: rows of each episode (E,).
    """

    states: np.ndarray
    lengths: np.ndarray


def recorded_states(folder: RolloutFolder, num_episodes: int) -> RecordedStates:
    """The states of the first ``num_episodes`` episodes; row 0 of each made no action.

    Raises:
        UserError: if there are fewer, or naming a file that is missing, damaged or holds NaN.
    """
    check_episodes(folder, num_episodes)
    parts = []
    for number in with_progress(range(num_episodes), num_episodes, "episode"):
        file = folder.array_files(number).hidden_states
        states = file.rows(1, file.shape[0])
        if parts and states.shape[1] != parts[0].shape[1]:
            raise UserError(f"{file.path} has {states.shape[1]} hidden units, but the episodes "
                            f"before it {parts[0].shape[1]}")
        parts.append(states)
    return RecordedStates(np.concatenate(parts), np.array([len(part) for part in parts]))


def check_episodes(folder: RolloutFolder, num_episodes: int) -> None:
    """See that a recording has so many episodes.

    Raises:
        UserError: if it has fewer, saying how many.
    """
    available = folder.index()["episode"].nunique()
    if available < num_episodes:
        raise UserError(f"{num_episodes} episodes are asked for, but {folder.path} holds only "
                        f"{available}; record more, or give --num_episodes {available}")


@dataclasses.dataclass(frozen=True)
class RecordedSteps:
    """Recorded quantities at each row of ``RecordedStates``, all (rows,).

    Attributes:
        entropy: of the policy (nats).
        likeliest_action: of the policy.
        action: the one that was taken.
        length: steps of the episode.
        part: 0 at the first step of the episode, 1 at its last.
        done: whether this is the last step.
        value: the agent's.
        rewarded: whether any step of the episode brought a reward above 0.
        reward: of this step.
        episode: its number.
        positions: of the player in cells, by the names of their columns; empty where they were not
            recorded. That of the last step, which is not known, is the one before it.
    """

    entropy: np.ndarray
    likeliest_action: np.ndarray
    action: np.ndarray
    length: np.ndarray
    part: np.ndarray
    done: np.ndarray
    value: np.ndarray
    rewarded: np.ndarray
    reward: np.ndarray
    episode: np.ndarray
    positions: dict[str, np.ndarray]


def recorded_steps(folder: RolloutFolder, num_episodes: int) -> RecordedSteps:
    """The steps of the first ``num_episodes`` episodes.

    Raises:
        UserError: if there are fewer, or naming a file that is missing or damaged.
    """
    check_episodes(folder, num_episodes)
    numbers = range(num_episodes)
    log_probs = [_log_probs(folder, number) for number in numbers]
    steps = folder.all_steps(numbers)
    lengths = np.array([len(part) for part in log_probs])
    if len(steps) != lengths.sum():
        raise UserError(f"the tables of {folder.path} have {len(steps)} rows for {lengths.sum()} "
                        "recorded steps; record these episodes again")
    joined = np.concatenate(log_probs)
    reward = steps["reward"].to_numpy()
    starts = np.cumsum(lengths) - lengths
    rewarded = np.maximum.reduceat(reward, starts) > 0  # (E,)
    position = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    return RecordedSteps(
        entropy=-(np.exp(joined) * joined).sum(axis=1), likeliest_action=joined.argmax(axis=1),
        action=steps["action"].to_numpy(), length=np.repeat(lengths, lengths),
        part=position / np.maximum(np.repeat(lengths, lengths) - 1, 1),
        done=steps["done"].to_numpy() > 0, value=steps["value"].to_numpy(),
        rewarded=np.repeat(rewarded, lengths), reward=reward,
        episode=np.repeat(np.arange(num_episodes), lengths),
        positions=_positions(steps))


def recorded_positions(folder: RolloutFolder, num_episodes: int) -> dict[str, np.ndarray]:
    """``RecordedSteps.positions`` of the first ``num_episodes`` episodes.

    Raises:
        UserError: if there are fewer, or naming a file that is missing or damaged.
    """
    if not folder.description().get("positions"):
        return {}
    check_episodes(folder, num_episodes)
    return _positions(folder.all_steps(range(num_episodes)))


def _positions(steps: pd.DataFrame) -> dict[str, np.ndarray]:
    return {name: steps[name].ffill().to_numpy() for name in POSITION_COLUMNS if name in steps}


def _log_probs(folder: RolloutFolder, number: int) -> np.ndarray:
    file = folder.array_files(number).log_probs
    return file.rows(0, file.shape[0])
