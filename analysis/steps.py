"""Hidden states, actions, rewards and other step data of recorded episodes and simulated samples.

Letters in shape comments: M samples, T steps per sample, D hidden units.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pandas as pd

from agents.rollout_files import POSITION_COLUMNS, RolloutFolder
from common.errors import UserError
from common.progress import with_progress
from generative.sample_files import SampleFolder


def read_recorded_states(folder: RolloutFolder, num_episodes: int) -> np.ndarray:
    """Read the hidden states hx[1:] of the first ``num_episodes`` episodes, concatenated (rows, D).

    Row 0 of each episode is left out, because no action was computed from it.

    Raises:
        UserError: if there are fewer episodes, or if a file is missing, is damaged or contains NaN;
            the message names it.
    """
    check_episodes(folder, num_episodes)
    parts: list[np.ndarray] = []
    for number in with_progress(range(num_episodes), num_episodes, "episode"):
        file = folder.array_files(number).hidden_states
        states = file.rows(1, file.shape[0])
        if parts and states.shape[1] != parts[0].shape[1]:
            raise UserError(f"{file.path} has {states.shape[1]} hidden units, but the episodes "
                            f"before it {parts[0].shape[1]}")
        parts.append(states)
    return np.concatenate(parts)


def check_episodes(folder: RolloutFolder, num_episodes: int) -> None:
    """Raise if a recording has fewer than ``num_episodes`` episodes.

    Raises:
        UserError: if it has fewer; the message states their number.
    """
    available = folder.index()["episode"].nunique()
    if available < num_episodes:
        raise UserError(f"{num_episodes} episodes are asked for, but {folder.path} holds only "
                        f"{available}; record more, or give --num_episodes {available}")


@dataclasses.dataclass(frozen=True)
class RecordedSteps:
    """Recorded quantities at each row of ``read_recorded_states``; all arrays are (rows,).

    Attributes:
        entropy: entropy of the policy in nats.
        likeliest_action: most likely action.
        action: action taken.
        length: number of steps of the episode.
        part: relative position in the episode, 0 at its first step and 1 at its last.
        done: whether this is the last step of the episode.
        value: value estimate of the agent.
        rewarded: whether any step of the episode has a reward above 0.
        reward: reward of the step.
        episode: number of the episode.
        positions: player coordinates in cells, by column name; empty if they were not recorded. The
            position at the last step is unknown and replaced by the previous one.
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


def read_recorded_steps(folder: RolloutFolder, num_episodes: int) -> RecordedSteps:
    """Read the steps of the first ``num_episodes`` episodes.

    Raises:
        UserError: if there are fewer episodes, or if a file is missing or damaged; the message
            names it.
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


def read_recorded_positions(folder: RolloutFolder, num_episodes: int) -> dict[str, np.ndarray]:
    """Read ``RecordedSteps.positions`` of the first ``num_episodes`` episodes.

    Raises:
        UserError: if there are fewer episodes, or if a file is missing or damaged; the message
            names it.
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


ENDED = 0.5  # terminal probability above which an episode counts as ended


def choose_samples(folder: SampleFolder, num_samples: int, flag: str = "num_samples") -> list[int]:
    """Return the numbers of the first ``num_samples`` samples.

    Args:
        folder: folder of the samples.
        num_samples: number of samples.
        flag: name of the flag that sets ``num_samples``, for the error message.

    Raises:
        UserError: if there are fewer samples; the message states their number.
    """
    numbers = folder.numbers()
    if len(numbers) < num_samples:
        raise UserError(f"{num_samples} simulated samples are asked for, but {folder.path} holds "
                        f"only {len(numbers)}; record more, or give --{flag} {len(numbers)}")
    return numbers[:num_samples]


def read_simulated_states(folder: SampleFolder, field: str, numbers: Sequence[int]) -> np.ndarray:
    """Read the states of samples, concatenated (M * T, units).

    Args:
        folder: folder of the samples.
        field: name of the field, ``hidden_states`` or ``env_h``.
        numbers: numbers of the M samples.

    Raises:
        UserError: see ``SampleFolder.stacked``.
    """
    states = folder.stacked_field(field, numbers)  # (M, T, units)
    return states.reshape(-1, states.shape[-1])


@dataclasses.dataclass(frozen=True)
class SimulatedSteps:
    """Simulated quantities at each step of several samples; all arrays are (M * T,).

    Attributes:
        sample: number of the sample.
        step: step of the sample, from 0.
        value: value estimate of the agent.
        reward: predicted reward, in the unit of the recorded data.
        terminal: probability that the episode ends at this step.
        action: action that entered the step, -1 if unknown.
        num_samples: number of samples, M.
    """

    sample: np.ndarray
    step: np.ndarray
    value: np.ndarray
    reward: np.ndarray
    terminal: np.ndarray
    action: np.ndarray
    num_samples: int

    @property
    def num_steps(self) -> int:
        """Number of steps per sample, T."""
        return len(self.sample) // self.num_samples

    def by_sample(self, values: np.ndarray) -> np.ndarray:
        """Reshape a quantity of all steps (M * T,) to (M, T)."""
        return values.reshape(self.num_samples, -1)


def read_simulated_steps(folder: SampleFolder, numbers: Sequence[int]) -> SimulatedSteps:
    """Read the steps of simulated samples.

    Args:
        folder: folder of the samples.
        numbers: numbers of the samples.

    Raises:
        UserError: see ``SampleFolder.stacked``; also if the fields have different numbers of steps.
    """
    value, reward, terminal = (folder.stacked_field(field, numbers)
                               for field in ("values", "rewards", "terminals"))
    action = folder.stacked_field("actions", numbers)
    num_samples, num_steps = value.shape
    for name, array in (("rewards", reward), ("terminals", terminal), ("actions", action)):
        if array.shape != value.shape:
            raise UserError(f"the samples of {folder.path} have {num_steps} values each, but "
                            f"{array.shape[1]} {name}; record them again")
    return SimulatedSteps(
        sample=np.repeat(np.asarray(numbers), num_steps),
        step=np.tile(np.arange(num_steps), num_samples), value=value.ravel(),
        reward=reward.ravel(), terminal=terminal.ravel(), action=action.ravel(),
        num_samples=num_samples)
