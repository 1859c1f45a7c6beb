"""Advantages along trajectories, and the unit of rewards and values that they are computed in.

Letters in shape comments: N steps, R rows of a recording.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pandas as pd

from agents.agent_file import read_origin
from agents.run_folder import TrainSettings
from attribution.trajectories import Trajectories
from common.settings import SETTINGS_NAME, load_settings
from envs.rewards import RewardNormalizer, clipped_scale
from stats.bootstrap import ClusterBootstrap

GAMMA, LAMBDA = 0.999, 0.95  # of all published agents
AUTO, RAW = "auto", "raw"
SLOPES = (0.9, 1.11)  # outside, values and rewards have different units
MIN_ENDS = 5  # rewarded ends of episodes from which the unit of values is estimated


def advantages_of(steps: Trajectories, reward_scale: float, gamma: float = GAMMA,
                  lmbda: float = LAMBDA) -> np.ndarray:
    """Generalised advantage estimates (Schulman et al. 2016, equation 16).

    Nothing is handed on beyond the end of an episode or of a trajectory; the last step of a
    trajectory that cuts its episode is compared with the value of the next row of the recording.

    Args:
        reward_scale: rewards are multiplied by it.

    Returns:
        float64 (N,), in the unit of values.
    """
    going_on = 1.0 - steps.ended
    deltas = (reward_scale * steps.earned.astype(np.float64)
              + gamma * going_on * steps.next_value - steps.value)
    decay = gamma * lmbda * going_on
    decay[steps.bounds[1:] - 1] = 0
    result, running = np.empty(len(steps)), 0.0
    for t in reversed(range(len(steps))):
        running = deltas[t] + decay[t] * running
        result[t] = running
    return result


@dataclasses.dataclass(frozen=True)
class AdvantageSettings:
    """The unit that rewards are brought to, and how advantages are computed.

    Attributes:
        reward_scale: rewards are multiplied by it.
        gamma, lmbda: discount and lambda of the advantages.
    """

    reward_scale: float
    gamma: float
    lmbda: float


def find_advantage_settings(agent_file: Path, reward_scale: str | float,
                            rows: pd.DataFrame) -> AdvantageSettings:
    """Return the unit of an agent's values.

    The agent file decides; what it lacks is taken from the training run that it lies in. Runs of
    earlier versions normalised rewards without storing the factor, which is then estimated: see
    ``estimated_scale``.

    Args:
        reward_scale: ``auto`` for the above, ``raw`` for 1, or a number.
        rows: see ``calibration_of``.

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

    At the last step of an episode nothing but its reward is to come, so the value there is the
    reward in the unit of values: the estimate is the median of value by reward over such steps.
    With fewer than ``MIN_ENDS`` of them it is 1 or ``scale_of_rewards``, whichever brings the slope
    of returns on values nearer to 1.

    Args:
        rows: see ``calibration_of``.
    """
    rewards, values = rows["reward"].to_numpy(np.float64), rows["value"].to_numpy(np.float64)
    # What a row holds was earned before it, so a terminal row has the reward of the last step.
    ends = np.flatnonzero(rows["done"].to_numpy(bool) & (rewards > 0))
    ends = ends[ends > 0]
    estimate = float(np.median(values[ends - 1] / rewards[ends])) if len(ends) >= MIN_ENDS else 0.0
    if estimate > 0:
        return estimate
    normalised, slope = scale_of_rewards(rows), calibration_of(rows, 1.0, gamma).slope
    if not slope > 0:
        return normalised
    return min(1.0, normalised, key=lambda scale: abs(math.log(scale * slope)))


def scale_of_rewards(rows: pd.DataFrame) -> float:
    """The factor that training with this recording's rewards would put on them: 1 over the standard
    deviation of the running return, which is discounted by 0.99 and begins at 0 with each episode,
    clipped as training clips; 1 where nothing was ever earned.

    Args:
        rows: of a recording, with columns episode and reward (R,).
    """
    running, found = 0.0, np.empty(len(rows))
    rewards = rows["reward"].to_numpy(np.float64)
    starts = rows["episode"].diff().fillna(1).to_numpy() != 0
    for t, reward in enumerate(rewards):
        running = reward if starts[t] else running * RewardNormalizer.DISCOUNT + reward
        found[t] = running
    deviation = found[~starts].std() if (~starts).any() else 0.0  # a first row is of no action
    return clipped_scale(deviation, np.abs(rewards).max()) if deviation > 0 else 1.0


@dataclasses.dataclass(frozen=True)
class Calibration:
    """How the values of a recording go with the discounted returns that came.

    Attributes:
        slope: of the return on the value by least squares, through the origin: 1 where values are
            right on average and in the unit of the scaled rewards, whether they differ much or not;
            NaN where all are 0.
        low_95, high_95: interval of the slope by a cluster bootstrap over episodes; both are the
            slope where there are fewer than two episodes.
        r2: squared correlation of both; NaN where one of them does not differ.
        num_steps: that were compared.
    """

    slope: float
    low_95: float
    high_95: float
    r2: float
    num_steps: int

    @property
    def is_off(self) -> bool:
        """Whether values have another unit than rewards: the whole interval of the slope lies
        outside ``SLOPES``, or there is no slope."""
        return not (self.high_95 >= SLOPES[0] and self.low_95 <= SLOPES[1])


def calibration_of(rows: pd.DataFrame, reward_scale: float, gamma: float = GAMMA) -> Calibration:
    """Compare values with returns.

    Args:
        rows: of whole episodes of a recording, with columns episode, reward, value and done (R,).
        reward_scale: rewards are multiplied by it.
    """
    rewards = reward_scale * rows["reward"].to_numpy(np.float64)
    ends = rows["done"].to_numpy(bool)
    returns, to_come = np.empty(len(rows)), 0.0
    for t in reversed(range(len(rows))):
        to_come = 0.0 if ends[t] else to_come  # what its row holds was earned before it
        returns[t] = to_come
        to_come = rewards[t] + gamma * to_come
    values, returns = rows["value"].to_numpy(np.float64)[~ends], returns[~ends]
    squares = values @ values
    slope = float(values @ returns / squares) if squares > 0 else math.nan
    names, episode = np.unique(rows["episode"].to_numpy()[~ends], return_inverse=True)
    low = high = slope
    if squares > 0 and len(names) > 1:
        products, sizes = (np.bincount(episode, values * each) for each in (returns, values))
        low, high = ClusterBootstrap(episode, 0).interval_of(
            lambda draws: (draws @ products) / np.maximum(draws @ sizes, np.finfo(float).tiny))
    differ = len(values) > 1 and values.std() > 0 and returns.std() > 0
    return Calibration(slope, float(low), float(high),
                       float(np.corrcoef(values, returns)[0, 1] ** 2) if differ else math.nan,
                       len(values))
