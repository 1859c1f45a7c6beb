"""``log.csv`` of a training run."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pandas as pd

from common.errors import UserError
from common.metrics_log import read_metrics
from envs.procgen_env import EpisodeStatistics

LOG_NAME = "log.csv"


@dataclasses.dataclass(frozen=True)
class LogRow:
    """One update. Rewards are raw game rewards, lengths environment steps, times seconds.

    The episode figures are over the last 40 episodes and empty before the first has ended.
    """

    timesteps: int
    wall_time: float
    num_episodes: int
    num_episodes_val: int
    max_episode_rewards: float
    mean_episode_rewards: float
    min_episode_rewards: float
    max_episode_len: float
    mean_episode_len: float
    min_episode_len: float
    mean_episode_value: float
    mean_policy_loss: float
    mean_value_loss: float
    mean_entropy_loss: float
    val_max_episode_rewards: float
    val_mean_episode_rewards: float
    val_min_episode_rewards: float
    val_max_episode_len: float
    val_mean_episode_len: float
    val_min_episode_len: float


COLUMNS = tuple(field.name for field in dataclasses.fields(LogRow))


def episode_figures(statistics: EpisodeStatistics, prefix: str = "") -> dict[str, float]:
    """Largest, mean and smallest recent return and length, under their column names."""
    figures = {}
    for name, values in (("episode_rewards", statistics.recent_returns),
                         ("episode_len", statistics.recent_lengths)):
        for kind, function in (("max", max), ("mean", lambda v: sum(v) / len(v)), ("min", min)):
            figures[f"{prefix}{kind}_{name}"] = (float(function(values)) if len(values)
                                                 else math.nan)
    return figures


def read_log(folder: Path) -> pd.DataFrame:
    """Read a run's ``log.csv``.

    Raises:
        UserError: if there is none, or it lacks the columns of a training log.
    """
    return read_metrics(folder / LOG_NAME, COLUMNS)


def newest_run(folder: Path) -> Path:
    """``folder`` itself if it is a run's, else the newest run in this experiment's folder.

    Raises:
        UserError: if there is neither.
    """
    if (folder / LOG_NAME).is_file():
        return folder
    logs = sorted(folder.glob(f"seed_*/{LOG_NAME}"), key=lambda path: path.stat().st_mtime)
    if not logs:
        raise UserError(f"{folder} is no training run: there is no {LOG_NAME} in it, nor in a "
                        "folder seed_* below it")
    return logs[-1].parent
