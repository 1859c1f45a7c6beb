"""The hidden states that are analysed: of recorded episodes and of simulated samples."""

from __future__ import annotations

import dataclasses

import numpy as np

from common.errors import UserError
from common.progress import with_progress
from common.rollout_files import RolloutFolder
from generative.sample_files import SampleFolder


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
        if not np.isfinite(states).all():
            raise UserError(f"{file.path} holds NaN or infinity; record this episode again")
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


def chosen_samples(folder: SampleFolder, num_samples: int) -> list[int]:
    """Numbers of the first ``num_samples`` samples.

    Raises:
        UserError: if there are fewer, saying how many.
    """
    numbers = folder.numbers()
    if len(numbers) < num_samples:
        raise UserError(f"{num_samples} simulated samples are asked for, but {folder.path} holds "
                        f"only {len(numbers)}; record more, or give --num_generated_samples "
                        f"{len(numbers)}")
    return numbers[:num_samples]


def simulated_states(folder: SampleFolder, numbers: list[int]) -> np.ndarray:
    """The states of samples, one below the other (M * T, D).

    Raises:
        UserError: naming a file that is missing, damaged or of another shape, or a sample whose
            states hold NaN.
    """
    states = folder.stacked_field("hidden_states", numbers)  # (M, T, D)
    for number, sample in zip(numbers, states):
        if not np.isfinite(sample).all():
            raise UserError(f"the hidden states of {folder.sample_folder(number)} hold NaN or "
                            "infinity; record this sample again")
    return states.reshape(-1, states.shape[-1])
