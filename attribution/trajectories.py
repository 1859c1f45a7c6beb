"""Trajectories (concatenated episodes of a recording), advantages and steps of interest along them,
and the scale of rewards relative to values.

A recording has one row per frame, with the reward that arrived *with* the frame. Each episode ends
with a terminal row, which does not show the level and is not a step. Here, a step is a frame in
which the agent acted, with the reward of its action.

Letters in shape comments: N steps of all trajectories, A actions, R rows of a recording.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from agents.agent_file import read_origin
from agents.rollout_files import RolloutFolder
from agents.training import TrainSettings
from common.config import SETTINGS_NAME, load_settings
from common.errors import UserError
from common.results import Array
from envs.rewards import RewardNormalizer, clipped_scale
from stats.bootstrap import ClusterBootstrap

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
        log_probs: log-probabilities of all actions, float32 (N, A).
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
        """Return the steps of the trajectory with a given number."""
        rows = slice(*self.bounds[number:number + 2])
        return Trajectories(**{name: array[rows] for name, array in vars(self).items()})

    def place(self, step: int) -> tuple[int, int]:
        """Return the number of a step's trajectory, and the step's number in this trajectory.

        Args:
            step: index of the step among all N steps.
        """
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
        episodes: numbers of episodes; empty for all, in the order of the recording.
        choose: ``in_order`` to keep this order, or ``failures`` to move episodes without a positive
            total reward to the front.

    Raises:
        UserError: if the recording has no episodes, or lacks one of ``episodes``.
    """
    recorded = folder.index()["episode"].unique().tolist()
    missing = set(episodes) - set(recorded)
    if missing or not recorded:
        raise UserError(f"{folder.path} has {len(recorded)} finished episodes"
                        + (f", but lacks {sorted(missing)}" if missing else "")
                        + "; record episodes with record.py")
    selected = list(episodes) or recorded
    if choose == FAILURES:
        rewards = folder.all_steps(selected).groupby("episode")["reward"].sum()
        selected.sort(key=lambda number: rewards[number] > 0)  # a stable sort
    return selected


def gather_trajectories(folder: RolloutFolder, num_trajectories: int, num_steps: int,
                        episodes: Sequence[int] = (), choose: str = IN_ORDER) -> Trajectories:
    """Concatenate episodes of a recording into trajectories.

    A trajectory is cut off after ``num_steps`` steps, and the next one begins with the next
    episode. If the recording has too few episodes, there are fewer trajectories, and the last one
    is shorter.

    Args:
        folder: the recording.
        num_trajectories, num_steps: maximum numbers of trajectories and of steps per trajectory.
        episodes, choose: see :func:`select_episodes`.

    Raises:
        UserError: if the recording is missing, empty or damaged, or lacks one of the given
            episodes.
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
    """Read the first steps of an episode, at most ``most``, as fields of :class:`Trajectories`."""
    steps, log_probs = folder.steps(episode), folder.array_files(episode).log_probs
    length = len(steps) - 1  # the terminal row is not a step
    if length < 1 or not steps["done"].iloc[-1] or steps["done"].iloc[:-1].any():
        raise UserError(f"{folder.steps_file(episode)} is not a whole episode: done must be set in "
                        "its last row, and in no other")
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
    """Return the steps with the highest positive scores, at most one per episode and trajectory.

    Args:
        scores: score of each step (N,).
        steps: trajectories with the N scored steps.
        most: maximum number of returned steps.

    Returns:
        Indices of the steps with the highest scores, in descending order of score.
    """
    table = pd.DataFrame({"trajectory": steps.trajectory, "episode": steps.episode,
                          "score": scores})
    best = table[table["score"] > 0].sort_values("score", ascending=False, kind="stable")
    return best.drop_duplicates(["trajectory", "episode"]).index.to_numpy()[:most]


def value_spikes(steps: Trajectories) -> np.ndarray:
    """Compute how far each step's value deviates from the values of its neighbours, float64 (N,).

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
    """Return the indices of the last steps of episodes that ended without a reward, in ascending
    order, for at most the first ``most`` such episodes."""
    rewards = pd.Series(steps.earned).groupby([steps.trajectory, steps.episode]).transform("sum")
    return np.flatnonzero(steps.ended & ~(rewards.to_numpy() > 0))[:most]


GAMMA, LAMBDA = 0.999, 0.95  # as in the training of all published agents
AUTO, RAW = "auto", "raw"
SLOPES = (0.9, 1.11)  # slopes outside this range mean that values and rewards differ in unit
MIN_ENDS = 5  # number of rewarded ends of episodes needed to estimate the unit of values


def advantages_of(steps: Trajectories, reward_scale: float, gamma: float = GAMMA,
                  lmbda: float = LAMBDA) -> np.ndarray:
    """Compute generalised advantage estimates (Schulman et al. 2016, equation 16).

    Advantages are not propagated across the end of an episode or a trajectory. If a trajectory cuts
    off its last episode, the last step is bootstrapped from the value of the recording's next row.

    Args:
        steps: the trajectories.
        reward_scale: factor that converts rewards to the unit of values.
        gamma, lmbda: discount and lambda.

    Returns:
        Advantages in the unit of values, float64 (N,).
    """
    continues = 1.0 - steps.ended
    deltas = (reward_scale * steps.earned.astype(np.float64)
              + gamma * continues * steps.next_value - steps.value)
    decay = gamma * lmbda * continues
    decay[steps.bounds[1:] - 1] = 0
    advantages, running = np.empty(len(steps)), 0.0
    for t in reversed(range(len(steps))):
        running = deltas[t] + decay[t] * running
        advantages[t] = running
    return advantages


@dataclasses.dataclass(frozen=True)
class AdvantageSettings:
    """Settings for computing advantages.

    Attributes:
        reward_scale: factor that converts rewards to the unit of values.
        gamma, lmbda: discount and lambda.
    """

    reward_scale: float
    gamma: float
    lmbda: float


def find_advantage_settings(agent_file: Path, reward_scale: str | float,
                            rows: pd.DataFrame) -> AdvantageSettings:
    """Determine the settings for computing an agent's advantages.

    They are read from the agent file. A missing ``gamma`` or ``lmbda`` is taken from the training
    run whose folder contains the file, or from GAMMA or LAMBDA if there is no such run. A missing
    ``reward_scale`` is 1 if this run did not normalise rewards; otherwise, it is estimated with
    :func:`estimated_scale`.

    Args:
        agent_file: the agent.
        reward_scale: ``auto`` to determine the factor as above, ``raw`` for 1, or a number.
        rows: rows of a recording; see :func:`calibration_of`.

    Raises:
        UserError: if the agent file or the run's settings are damaged.
    """
    origin, run = read_origin(agent_file), None
    if (agent_file.parent / SETTINGS_NAME).is_file():
        run = load_settings(agent_file.parent, TrainSettings).agent
    gamma, lmbda = origin.gamma, origin.lmbda
    if gamma is None:
        gamma = run.gamma if run else GAMMA
    if lmbda is None:
        lmbda = run.lmbda if run else LAMBDA
    if reward_scale != AUTO:
        scale = 1.0 if reward_scale == RAW else float(reward_scale)
    elif origin.reward_scale is not None:
        scale = origin.reward_scale
    else:
        scale = 1.0 if run and not run.normalize_rew else estimated_scale(rows, gamma)
    return AdvantageSettings(scale, gamma, lmbda)


def estimated_scale(rows: pd.DataFrame, gamma: float = GAMMA) -> float:
    """Estimate the factor that converts rewards to the unit of values, from a recording.

    At the last step of an episode, only the reward of this step is still to come, so the value at
    this step is the reward in the unit of values. The estimate is the median ratio of value to
    reward over rewarded last steps. With fewer than ``MIN_ENDS`` such steps, or if the median is
    not positive, it is 1 or :func:`normalising_scale`, whichever brings the slope of returns on
    values closer to 1. If the slope is not positive either, it is :func:`normalising_scale`.

    Args:
        rows: rows of a recording; see :func:`calibration_of`.
        gamma: discount of the returns.
    """
    rewards, values = rows["reward"].to_numpy(np.float64), rows["value"].to_numpy(np.float64)
    # A row holds the reward of the previous step, so a terminal row holds that of the last step.
    ends = np.flatnonzero(rows["done"].to_numpy(bool) & (rewards > 0))
    ends = ends[ends > 0]
    estimate = float(np.median(values[ends - 1] / rewards[ends])) if len(ends) >= MIN_ENDS else 0.0
    if estimate > 0:
        return estimate
    normalised, slope = normalising_scale(rows), calibration_of(rows, 1.0, gamma).slope
    if not slope > 0:
        return normalised
    return min(1.0, normalised, key=lambda scale: abs(math.log(scale * slope)))


def normalising_scale(rows: pd.DataFrame) -> float:
    """Compute the factor by which training would normalise this recording's rewards.

    The factor is 1 over the standard deviation of the running return, clipped as in training. The
    running return is discounted by 0.99 and starts again in each episode. If it is constant, for
    example without any reward, the factor is 1.

    Args:
        rows: rows of a recording, with the columns episode and reward (R,).
    """
    running, returns = 0.0, np.empty(len(rows))
    rewards = rows["reward"].to_numpy(np.float64)
    starts = rows["episode"].diff().fillna(1).to_numpy() != 0
    for t, reward in enumerate(rewards):
        running = reward if starts[t] else running * RewardNormalizer.DISCOUNT + reward
        returns[t] = running
    # The first row of each episode is excluded.
    deviation = returns[~starts].std() if (~starts).any() else 0.0
    return clipped_scale(deviation, np.abs(rewards).max()) if deviation > 0 else 1.0


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Calibration of a recording's values: how well they predict the discounted returns.

    Attributes:
        slope: slope of the least-squares line through the origin that predicts returns from values.
            It is 1 if values are right on average and have the unit of the scaled rewards, and NaN
            if all values are 0.
        low_95, high_95: 95 % interval of the slope by a cluster bootstrap over episodes; equal to
            the slope if there are fewer than two episodes, or the slope is NaN.
        r2: squared correlation of values and returns; NaN if either is constant.
    """

    slope: float
    low_95: float
    high_95: float
    r2: float

    @property
    def is_off(self) -> bool:
        """Whether values and rewards seem to have different units: the whole interval of the slope
        lies outside ``SLOPES``, or there is no slope."""
        return not (self.high_95 >= SLOPES[0] and self.low_95 <= SLOPES[1])


def calibration_of(rows: pd.DataFrame, reward_scale: float, gamma: float = GAMMA) -> Calibration:
    """Compute the calibration of values by regressing returns on them.

    Args:
        rows: rows of whole episodes of a recording, with the columns episode, reward, value and
            done (R,).
        reward_scale: factor applied to the rewards.
        gamma: discount of the returns.
    """
    rewards = reward_scale * rows["reward"].to_numpy(np.float64)
    ends = rows["done"].to_numpy(bool)
    returns, to_come = np.empty(len(rows)), 0.0
    for t in reversed(range(len(rows))):
        to_come = 0.0 if ends[t] else to_come  # a row's reward belongs to the previous step
        returns[t] = to_come
        to_come = rewards[t] + gamma * to_come
    values, returns = rows["value"].to_numpy(np.float64)[~ends], returns[~ends]
    squares = values @ values
    slope = float(values @ returns / squares) if squares > 0 else math.nan
    names, episode = np.unique(rows["episode"].to_numpy()[~ends], return_inverse=True)
    low = high = slope
    if squares > 0 and len(names) > 1:
        products, sizes = (np.bincount(episode, values * other) for other in (returns, values))
        low, high = ClusterBootstrap(episode, 0).interval_of(
            lambda draws: (draws @ products) / np.maximum(draws @ sizes, np.finfo(float).tiny))
    vary = len(values) > 1 and values.std() > 0 and returns.std() > 0
    return Calibration(slope, float(low), float(high),
                       float(np.corrcoef(values, returns)[0, 1] ** 2) if vary else math.nan)
