"""Files of a training run: settings, ``log.csv`` and the model card."""

from __future__ import annotations

import dataclasses
import math
import shlex
from pathlib import Path

import pandas as pd

from agents.config import AgentConfig
from common.errors import UserError
from common.files import atomic_path, versions
from common.metrics_log import read_metrics
from common.tables import markdown_escaped
from envs.coin import END, coin_words
from envs.procgen_env import DISPLAY_OPTIONS, EnvConfig
from envs.rewards import EpisodeStatistics

LOG_NAME = "log.csv"
CARD_NAME = "model_card.md"
# Columns of log.csv, which has one row per update. Rewards are raw game rewards, lengths are in
# environment steps, times in seconds. Statistics are over the last 40 episodes; their cells are
# empty before the first episode has ended.
COLUMNS = (
    "timesteps", "wall_time", "num_episodes", "num_episodes_val",
    "max_episode_rewards", "mean_episode_rewards", "min_episode_rewards",
    "max_episode_len", "mean_episode_len", "min_episode_len",
    "mean_episode_value", "mean_policy_loss", "mean_value_loss", "mean_entropy_loss",
    "val_max_episode_rewards", "val_mean_episode_rewards", "val_min_episode_rewards",
    "val_max_episode_len", "val_mean_episode_len", "val_min_episode_len")


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """Settings of a training run. The results do not depend on ``num_threads``.

    Attributes:
        exp_name: name of the experiment, for the folder and titles.
        env: game and training levels; validation uses ``env.unseen_levels()``.
        seed: seed of the weights, the levels drawn, the actions and the minibatches.
        num_timesteps: number of environment steps; the learning rate falls to 0 at the end.
        num_checkpoints: number of agent files kept, evenly spaced.
        val_interval: number of updates between two validation rollouts.
        model_file: agent file whose weights the run starts from, or "".
        teacher_file: agent file of a teacher (kickstarting), or "".
        teacher_sha256: checksum of the teacher's file, or "".
        keep_optimizer: also start from the optimiser state in ``model_file``.
        precision: float32 or bfloat16.
        cheese_region, val_cheese_region: size of the region in which the cheese is placed in
            training and in validation, 0 for anywhere; maze only.
        coin: place of the coin in training and in validation; CoinRun only.

    Raises:
        UserError: if ``keep_optimizer`` is true without a ``model_file``.
    """

    exp_name: str
    param_name: str
    env: EnvConfig
    agent: AgentConfig
    seed: int
    num_timesteps: int
    num_checkpoints: int
    val_interval: int
    model_file: str
    precision: str
    num_threads: int
    teacher_file: str = ""
    teacher_sha256: str = ""
    keep_optimizer: bool = False
    cheese_region: int = 0
    val_cheese_region: int = 0
    coin: str = END

    def __post_init__(self):
        if self.keep_optimizer and not self.model_file:
            raise UserError("--keep_optimizer needs an --agent_file with the optimiser's state")


def episode_figures(statistics: EpisodeStatistics, prefix: str = "") -> dict[str, float]:
    """Return maximum, mean and minimum of the recent returns and lengths, by column name; NaN
    before the first episode has ended.

    Args:
        statistics: returns and lengths of the recent episodes.
        prefix: prefix of the column names, "val_" for validation.
    """
    columns = {}
    for name, values in (("episode_rewards", statistics.recent_returns),
                         ("episode_len", statistics.recent_lengths)):
        for kind, function in (("max", max), ("mean", lambda v: sum(v) / len(v)), ("min", min)):
            columns[f"{prefix}{kind}_{name}"] = (float(function(values)) if len(values)
                                                 else math.nan)
    return columns


def read_log(folder: Path) -> pd.DataFrame:
    """Read a run's ``log.csv``.

    Raises:
        UserError: if the file is missing, or lacks the columns of a training log.
    """
    return read_metrics(folder / LOG_NAME, COLUMNS)


def newest_run(folder: Path) -> Path:
    """Return ``folder`` if it contains a ``log.csv``; otherwise its subfolder ``seed_*`` with the
    newest ``log.csv``.

    Raises:
        UserError: if the folder contains no run.
    """
    if (folder / LOG_NAME).is_file():
        return folder
    logs = sorted(folder.glob(f"seed_*/{LOG_NAME}"), key=lambda path: path.stat().st_mtime)
    if not logs:
        raise UserError(f"{folder} is not a training run: neither the folder nor a folder seed_* "
                        f"inside contains {LOG_NAME}")
    return logs[-1].parent


def save_model_card(folder: Path, settings: TrainSettings, timesteps: int,
                    wall_time: float) -> None:
    """Write the model card of a run after ``timesteps`` steps in ``wall_time`` seconds."""
    agent, env = settings.agent, settings.env
    memory = f"GRU of {agent.hidden_state_size}" if agent.recurrent else "no memory"
    width = "" if agent.width == 1 else f" {agent.width} times as wide"
    levels = f"{env.num_levels} levels from {env.start_level}" if env.num_levels else "all levels"
    cheese = ""
    if settings.cheese_region or settings.val_cheese_region:
        training, validation = (
            f"in the last {size} rows and columns of the maze" if size else "anywhere"
            for size in (settings.cheese_region, settings.val_cheese_region))
        cheese = f" In training the cheese lay {training}, in validation {validation}."
    if settings.coin != END:
        cheese = f" Levels have {coin_words(settings.coin)}."
    origin = "from random weights"
    if settings.model_file:
        origin = f"from the weights of `{Path(settings.model_file).name}`"
    if settings.teacher_file:
        origin += (
            f", **kickstarted** (Schmitt et al. 2018) from `{Path(settings.teacher_file).name}` "
            f"(sha256 `{settings.teacher_sha256}`) for the first {100 * agent.kickstart_until:g} % "
            "of the run, in which the weight of the cross-entropy fell linearly from "
            f"{agent.kickstart_coef:g} to 0, and the weight of the value distance from "
            f"{agent.kickstart_value_coef:g} to 0; plain PPO after that")
    else:
        origin += ", without a teacher"
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    with atomic_path(folder / CARD_NAME) as temporary:
        temporary.write_text("\n".join([
            f"# {markdown_escaped(settings.exp_name)}: {env.env_name}, {env.distribution_mode}",
            "",
            f"PPO, {agent.architecture}{width}, {memory}; {levels}, "
            f"backgrounds {'on' if env.use_backgrounds else 'off'}.{cheese}",
            "",
            f"- {timesteps} of {settings.num_timesteps} environment steps in {wall_time / 60:.0f} "
            f"minutes, in {settings.precision}, seed {settings.seed}",
            f"- parameter set `{settings.param_name}`; all of its values are in "
            "`hyperparameters.yml`",
            f"- {origin}",
            f"- {packages}",
            "",
            f"    {_command(settings)}",
            ""]))


def _command(settings: TrainSettings) -> str:
    """Return the command that repeats the run."""
    env = settings.env
    flags = {"exp_name": settings.exp_name, "env_name": env.env_name,
             "distribution_mode": env.distribution_mode, "start_level": env.start_level,
             "num_levels": env.num_levels, "param_name": settings.param_name,
             "num_timesteps": settings.num_timesteps, "seed": settings.seed,
             "num_checkpoints": settings.num_checkpoints, "val_interval": settings.val_interval,
             "precision": settings.precision}
    for name in ("cheese_region", "val_cheese_region"):
        if getattr(settings, name):
            flags[name] = getattr(settings, name)
    if settings.coin != END:
        flags["coin"] = settings.coin
    for name in ("model_file", "teacher_file"):
        if getattr(settings, name):
            flags[name] = Path(getattr(settings, name)).name
    words = [f"--{name} {shlex.quote(str(value))}" for name, value in flags.items()]
    words += [f"--{name}" for name, is_given in (("use_backgrounds", env.use_backgrounds),
                                                 ("keep_optimizer", settings.keep_optimizer))
              if is_given]
    words += [f"--{'no_' if name == 'center_agent' else ''}{name}" for name in DISPLAY_OPTIONS
              if name in vars(env)]
    return f"python train.py {' '.join(words)}"
