"""Model card of a training run: how its agents were made, in the run's folder."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from common.files import atomic_path, versions
from common.tables import markdown_escaped

if TYPE_CHECKING:
    from agents.training import TrainSettings

CARD_NAME = "model_card.md"


def save_model_card(folder: Path, settings: TrainSettings, timesteps: int,
                    wall_time: float) -> None:
    """Write the card of a run that has taken so many steps in so many seconds."""
    agent = settings.agent
    memory = f"GRU of {agent.hidden_state_size}" if agent.recurrent else "no memory"
    width = "" if agent.width == 1 else f" {agent.width} times as wide"
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    levels = settings.env.num_levels
    lines = [
        f"# {markdown_escaped(settings.exp_name)}: {settings.env.env_name}, "
        f"{settings.env.distribution_mode}",
        "",
        f"PPO, {agent.architecture}{width}, {memory}; "
        f"{f'{levels} levels from {settings.env.start_level}' if levels else 'all levels'}, "
        f"backgrounds {'on' if settings.env.use_backgrounds else 'off'}.{_cheese(settings)}",
        "",
        f"- {timesteps} of {settings.num_timesteps} environment steps in {wall_time / 60:.0f} "
        f"minutes, in {settings.precision}, seed {settings.seed}",
        f"- parameter set `{settings.param_name}`; all of its values are in `hyperparameters.yml`",
        f"- {_origin(settings)}",
        f"- {packages}",
        "",
        f"    {_command(settings)}",
        ""]
    with atomic_path(folder / CARD_NAME) as temporary:
        temporary.write_text("\n".join(lines))


def _cheese(settings: TrainSettings) -> str:
    """Where the cheese lay, if it was put somewhere."""
    def where(size: int) -> str:
        return f"in the last {size} rows and columns of the maze" if size else "anywhere"

    if not (settings.cheese_region or settings.val_cheese_region):
        return ""
    return (f" In training the cheese lay {where(settings.cheese_region)}, in validation "
            f"{where(settings.val_cheese_region)}.")


def _origin(settings: TrainSettings) -> str:
    """Which weights and which teacher the run had."""
    start = "random weights"
    if settings.model_file:
        start = f"the weights of `{Path(settings.model_file).name}`"
    if not settings.teacher_file:
        return f"from {start}, without a teacher"
    agent = settings.agent
    return (f"from {start}, **kickstarted** (Schmitt et al. 2018) from "
            f"`{Path(settings.teacher_file).name}` (sha256 `{settings.teacher_sha256}`) for the "
            f"first {100 * agent.kickstart_until:g} % of the run, in which the weight of the "
            f"cross-entropy fell linearly from {agent.kickstart_coef:g} to 0 and that of the "
            f"values from {agent.kickstart_value_coef:g}; plain PPO after that")


def _command(settings: TrainSettings) -> str:
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
    for name in ("model_file", "teacher_file"):
        if getattr(settings, name):
            flags[name] = Path(getattr(settings, name)).name
    words = [f"--{name} {shlex.quote(str(value))}" for name, value in flags.items()]
    if env.use_backgrounds:
        words.append("--use_backgrounds")
    return f"python train.py {' '.join(words)}"
