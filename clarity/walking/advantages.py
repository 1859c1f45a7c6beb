"""Advantages along trajectories, the unit of rewards they need, and whether values are in it.

Letters in shape comments: N steps, R rows of a recording.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pandas as pd

from clarity.walking.trajectories import Trajectories
from common.env import RewardNormalizer

GAMMA, LAMBDA = 0.999, 0.95  # of all published agents
AUTO, RAW = "auto", "raw"
SLOPES = (0.75, 1.33)  # outside, values and rewards have different units


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


def scale_of_rewards(rows: pd.DataFrame) -> float:
    """The factor that training puts on rewards: 1 over the deviation of the running return, which
    is discounted by 0.99 and begins at 0 with each episode; 1 where nothing was ever earned.

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
    return 1 / deviation if deviation > 0 else 1.0


@dataclasses.dataclass(frozen=True)
class Calibration:
    """How the values of a recording go with the discounted returns that came.

    Attributes:
        slope: of the return on the value by least squares, through the origin: 1 where values are
            right on average and in the unit of the scaled rewards, whether they differ much or not;
            NaN where all are 0.
        r2: squared correlation of both; NaN where one of them does not differ.
        num_steps: that were compared.
    """

    slope: float
    r2: float
    num_steps: int

    @property
    def is_off(self) -> bool:
        """Whether values seem to have another unit than rewards."""
        return not SLOPES[0] <= self.slope <= SLOPES[1]


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
    differ = len(values) > 1 and values.std() > 0 and returns.std() > 0
    return Calibration(float(values @ returns / squares) if squares > 0 else math.nan,
                       float(np.corrcoef(values, returns)[0, 1] ** 2) if differ else math.nan,
                       len(values))
