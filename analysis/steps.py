"""Step data (hidden states, actions, rewards, …) of recorded episodes and simulated samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pandas as pd

from agents.rollout_files import POSITION_COLUMNS, RolloutFolder
from common.errors import UserError
from common.progress import with_progress
from envs.objects import action_labels
from generative.sample_files import SampleFolder


def read_recorded_states(folder: RolloutFolder, num_episodes: int) -> np.ndarray:
    """Read the hidden states of the first ``num_episodes`` episodes, concatenated (rows, D).

    Row 0 of ``hx.npy`` of each episode is left out, because it is the state before the first step,
    from which no action was computed.

    Raises:
        UserError: if there are fewer episodes, if a file is missing, is damaged or contains NaN
            (the message names it), or if the episodes differ in the number of hidden units.
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
    """Raise UserError if a recording has fewer than ``num_episodes`` episodes; the message states
    how many it has."""
    available = folder.index()["episode"].nunique()
    if available < num_episodes:
        raise UserError(f"{num_episodes} episodes are requested, but {folder.path} holds only "
                        f"{available}; record more, or give --num_episodes {available}")


def read_recorded_steps(folder: RolloutFolder, num_episodes: int) -> pd.DataFrame:
    """Read the steps of the first ``num_episodes`` episodes, one row per row of
    ``read_recorded_states``.

    Returns:
        Table with the columns of the recording's tables, and these further columns:

        - entropy: entropy of the policy in nats
        - likeliest_action: most likely action
        - length: number of steps of the episode, including the terminal step
        - part: relative position in the episode, 0 at its first step and 1 at its last
        - rewarded: whether any step of the episode has a reward above 0

        If positions were recorded, the unknown position at the last step of an episode is replaced
        by the previous one.

    Raises:
        UserError: if there are fewer episodes, if a file is missing or damaged (the message names
            it), or if tables and arrays differ in length.
    """
    check_episodes(folder, num_episodes)
    numbers = range(num_episodes)
    files = [folder.array_files(number).log_probs for number in numbers]
    log_probs = np.concatenate([file.rows(0, file.shape[0]) for file in files])
    steps = folder.all_steps(numbers)
    if len(steps) != len(log_probs):
        raise UserError(f"the tables of {folder.path} have {len(steps)} rows for {len(log_probs)} "
                        "recorded steps; record these episodes again")
    steps["episode"] = np.repeat(numbers, [file.shape[0] for file in files])
    episodes = steps.groupby("episode")
    length = episodes["reward"].transform("size")
    return steps.assign(
        entropy=-(np.exp(log_probs) * log_probs).sum(axis=1),
        likeliest_action=log_probs.argmax(axis=1), length=length,
        part=episodes.cumcount() / np.maximum(length - 1, 1), done=steps["done"] > 0,
        rewarded=episodes["reward"].transform("max") > 0, **_positions(steps))


def read_recorded_positions(folder: RolloutFolder, num_episodes: int) -> dict[str, np.ndarray]:
    """Read the player's positions at the steps of the first ``num_episodes`` episodes, by column
    name, (rows,) each; empty if they were not recorded.

    The unknown position at the last step of an episode is replaced by the previous one.

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


ENDED = 0.5  # terminal probability above which an episode counts as ended


def choose_samples(folder: SampleFolder, num_samples: int, flag: str = "num_samples") -> list[int]:
    """Return the numbers of the first ``num_samples`` samples.

    Args:
        flag: name of the flag that sets ``num_samples``, for the error message.

    Raises:
        UserError: if there are fewer samples; the message states their number.
    """
    numbers = folder.numbers()
    if len(numbers) < num_samples:
        raise UserError(f"{num_samples} simulated samples are requested, but {folder.path} holds "
                        f"only {len(numbers)}; record more, or give --{flag} {len(numbers)}")
    return numbers[:num_samples]


def read_simulated_states(folder: SampleFolder, field: str, numbers: Sequence[int]) -> np.ndarray:
    """Read the states of samples, concatenated (M * T, units).

    Args:
        field: ``hidden_states`` for the states of the agent, ``env_h`` for those of the
            environment.
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
        step: step of the sample, from 0.
        value: value estimate of the agent.
        reward: predicted reward, in the unit of the recorded data.
        terminal: probability that the episode ends at this step.
        action: action that led to the step, -1 if unknown.
        num_samples: number of samples, M.
        action_labels: names of the actions in the game.
    """

    sample: np.ndarray
    step: np.ndarray
    value: np.ndarray
    reward: np.ndarray
    terminal: np.ndarray
    action: np.ndarray
    num_samples: int
    action_labels: tuple[str, ...]

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
        numbers: numbers of the M samples.

    Raises:
        UserError: see ``SampleFolder.stacked``; also if the fields have different numbers of steps.
    """
    value, reward, terminal, action = (folder.stacked_field(field, numbers)
                                       for field in ("values", "rewards", "terminals", "actions"))
    num_samples, num_steps = value.shape
    for array in (reward, terminal, action):
        if array.shape != value.shape:
            raise UserError(f"the samples of {folder.path} have {num_steps} values each, but "
                            f"{array.shape[1]} rewards, terminals or actions; record them again")
    return SimulatedSteps(
        sample=np.repeat(np.asarray(numbers), num_steps),
        step=np.tile(np.arange(num_steps), num_samples), value=value.ravel(),
        reward=reward.ravel(), terminal=terminal.ravel(), action=action.ravel(),
        num_samples=num_samples, action_labels=action_labels(folder.game))
