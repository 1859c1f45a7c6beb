"""Advantages along trajectories, and the scale of rewards relative to values.

Letters in shape comments: N steps, R rows of a recording.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pandas as pd

from agents.agent_file import read_origin
from agents.training import TrainSettings
from attribution.trajectories import Trajectories
from common.config import SETTINGS_NAME, load_settings
from envs.rewards import RewardNormalizer, clipped_scale
from stats.bootstrap import ClusterBootstrap

GAMMA, LAMBDA = 0.999, 0.95  # values of all published agents
AUTO, RAW = "auto", "raw"
SLOPES = (0.9, 1.11)  # slopes outside this range mean that values and rewards differ in unit
MIN_ENDS = 5  # number of rewarded ends of episodes needed to estimate the unit of values


def advantages_of(steps: Trajectories, reward_scale: float, gamma: float = GAMMA,
                  lmbda: float = LAMBDA) -> np.ndarray:
    """Compute generalised advantage estimates (Schulman et al. 2016, equation 16).

    Nothing is propagated across the end of an episode or a trajectory. If a trajectory cuts off its
    last episode, the last step is bootstrapped from the value of the recording's next row.

    Args:
        steps: the trajectories.
        reward_scale: factor applied to the rewards.
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

    They are read from the agent file; missing values are taken from the training run whose folder
    contains the file. Runs of earlier versions normalised rewards without storing the factor, which
    is then estimated with :func:`estimated_scale`.

    Args:
        agent_file: the agent.
        reward_scale: ``auto`` to determine the factor as above, ``raw`` for 1, or a number.
        rows: rows of a recording; see :func:`calibration_of`.

    Raises:
        UserError: if the agent file or the run's settings are damaged.
    """
    origin = read_origin(agent_file)
    gamma, lmbda, scale = origin.gamma, origin.lmbda, origin.reward_scale
    if (agent_file.parent / SETTINGS_NAME).is_file():
        agent = load_settings(agent_file.parent, TrainSettings).agent
        gamma = agent.gamma if gamma is None else gamma
        lmbda = agent.lmbda if lmbda is None else lmbda
        scale = 1.0 if scale is None and not agent.normalize_rew else scale
    gamma = GAMMA if gamma is None else gamma
    if reward_scale == AUTO:
        scale = estimated_scale(rows, gamma) if scale is None else scale
    else:
        scale = 1.0 if reward_scale == RAW else float(reward_scale)
    return AdvantageSettings(scale, gamma, LAMBDA if lmbda is None else lmbda)


def estimated_scale(rows: pd.DataFrame, gamma: float = GAMMA) -> float:
    """Estimate the factor between rewards and values from a recording.

    At the last step of an episode, only its reward is still to come, so the value of this step is
    the reward in the unit of values. The estimate is the median ratio of value to reward over
    rewarded last steps. With fewer than ``MIN_ENDS`` such steps, it is 1 or
    :func:`normalising_scale`, whichever brings the slope of returns on values closer to 1.

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

    The factor is 1 over the standard deviation of the running return, which is discounted by 0.99
    and starts at 0 in each episode; it is clipped as in training, and 1 if there was no reward.

    Args:
        rows: rows of a recording, with the columns episode and reward (R,).
    """
    running, returns = 0.0, np.empty(len(rows))
    rewards = rows["reward"].to_numpy(np.float64)
    starts = rows["episode"].diff().fillna(1).to_numpy() != 0
    for t, reward in enumerate(rewards):
        running = reward if starts[t] else running * RewardNormalizer.DISCOUNT + reward
        returns[t] = running
    deviation = returns[~starts].std() if (~starts).any() else 0.0  # without first rows
    return clipped_scale(deviation, np.abs(rewards).max()) if deviation > 0 else 1.0


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Calibration of a recording's values: how well they predict the discounted returns.

    Attributes:
        slope: least-squares slope through the origin of the returns on the values: 1 if values are
            right on average and have the unit of the scaled rewards; NaN if all values are 0.
        low_95, high_95: 95 % interval of the slope by a cluster bootstrap over episodes; equal to
            the slope if there are fewer than two episodes.
        r2: squared correlation of values and returns; NaN if either is constant.
    """

    slope: float
    low_95: float
    high_95: float
    r2: float

    @property
    def is_off(self) -> bool:
        """Whether values and rewards have different units: the whole interval of the slope lies
        outside ``SLOPES``, or there is no slope."""
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
