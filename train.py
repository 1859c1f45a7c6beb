"""Train an agent, see ``TrainOptions``."""

from __future__ import annotations

import dataclasses
import datetime
import random
import shlex
from pathlib import Path

from agents.agent_file import agent_files, load_agent
from agents.config import GameOptions, load_agent_config
from agents.goal_places import coin_option, goal_edit, region_option
from agents.run_folder import TrainSettings
from agents.training import RESUME_NAME, TrainingRun
from common.cli import count, folder_name, seed, threads, time_steps
from common.config import load_settings
from common.devices import Compute, keep_freed_memory
from common.distributed import Distributed, run_in_group
from common.errors import UserError
from common.files import sha256
from common.options import ComputeOptions, command, option

# Flags that may differ when a run is resumed; all other flags are fixed by the run.
RESUMABLE = {"num_timesteps", "num_checkpoints", "val_interval", "num_threads", "precision",
             "device", "gpu_device", "log_level", "resume"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions(GameOptions, ComputeOptions):
    """Train a PPO agent on a Procgen game."""

    exp_name: str = option("test", "name of the experiment's folder", type=folder_name)
    env_name: str = option("coinrun", "one of Procgen's 16 games")
    distribution_mode: str = option("easy", "easy, hard, extreme, memory or exploration")
    cheese_region: int = region_option("training levels")
    val_cheese_region: int = region_option("validation levels")
    coin: str = coin_option()
    param_name: str = option("easy-200", "parameter set in hyperparams/procgen/config.yml")
    num_timesteps: int = option(25_000_000, "number of environment steps to train for",
                                type=time_steps)
    num_threads: int = option(2, "number of threads that step the environments", type=threads)
    seed: int | None = option(None, "seed of weights, levels and actions (default: random)",
                              type=seed)
    num_checkpoints: int = option(1, "number of agent files to keep, evenly spaced", type=count)
    agent_file: Path | None = option(None, "agent file to start from",
                                     names=("--agent_file", "--model_file"))
    keep_optimizer: bool = option(False, "also start from the optimiser state in --agent_file")
    teacher_file: Path | None = option(
        None, "agent file of a teacher for the first part of the run (kickstarting; see "
              "kickstart_* in the parameter set)")
    val_interval: int = option(
        1, "number of updates between validation rollouts on unseen levels", type=count)
    logdir: Path = option(
        Path("logs"), "parent folder of runs, <logdir>/procgen/<env_name>/<exp_name>/")
    resume: Path | None = option(None, "resume this run exactly where it was saved",
                                 metavar="RUN_FOLDER")


def train(options: TrainOptions) -> Path:
    """Train an agent, and return its file.

    Raises:
        Stopped: after a stop signal; the run can be resumed.
    """
    return agent_files(run_in_group(train_in, options).folder)[-1]


def train_in(world: Distributed, options: TrainOptions) -> tuple[TrainingRun, int]:
    """Train in a group of processes, and return the run and the exit status."""
    compute = options.compute_in(options.precision, world.local_rank)
    if options.resume:
        folder, settings = options.resume, resumed_settings(options.resume, options)
        compute = dataclasses.replace(compute, bfloat16=settings.precision == "bfloat16")
    else:
        settings = new_settings(options, compute, world)
        now = world.broadcast(datetime.datetime.now().strftime("%d-%m-%Y_%H-%M-%S"))
        folder = (options.logdir / "procgen" / options.env_name / options.exp_name
                  / f"seed_{settings.seed}_{now}")
    world.require_same({**options.values, **dataclasses.asdict(settings)})

    keep_freed_memory()
    world.connect_gpus(compute.device)
    run = TrainingRun(folder, settings, compute,
                      goal_edit(settings.env, settings.cheese_region, settings.coin),
                      goal_edit(settings.env, settings.val_cheese_region, settings.coin), world)
    if world.is_main:
        print(f"training on {compute.device} in {compute.precision}{world.description}; writing to "
              f"{run.folder}", flush=True)
    status = run.train()
    if world.is_main:
        speed = f" at {run.steps_per_second:.0f} steps/s" if run.steps_per_second else ""
        print(f"{'finished' if run.finished else 'stopped'} after {run.steps} steps{speed}; "
              f"agent: {agent_files(run.folder)[-1]}")
        if not run.finished:
            print(f"to resume:\n    {world.launcher} train.py --resume "
                  f"{shlex.quote(str(run.folder))}")
    return run, status


def new_settings(options: TrainOptions, compute: Compute, world: Distributed) -> TrainSettings:
    """Return the settings of a new run, equal in all processes."""
    drawn = world.broadcast(random.randrange(10_000)) if options.seed is None else options.seed
    return TrainSettings(
        options.exp_name, options.param_name, options.env_config(),
        load_agent_config(options.param_name), drawn, options.num_timesteps,
        options.num_checkpoints, options.val_interval, str(options.agent_file or ""),
        compute.precision, options.num_threads, str(options.teacher_file or ""),
        checksum(options.teacher_file), options.keep_optimizer, options.cheese_region,
        options.val_cheese_region, options.coin)


def checksum(teacher_file: Path | None) -> str:
    """Return the checksum of a teacher's file, or "" without a teacher.

    Raises:
        UserError: if the file is missing or not an agent file.
    """
    if teacher_file is None:
        return ""
    load_agent(teacher_file)
    return sha256(teacher_file)


def resumed_settings(folder: Path, options: TrainOptions) -> TrainSettings:
    """Return the settings of the run to resume, updated by the options in ``RESUMABLE``.

    Raises:
        UserError: if there is no run, or an option was given that is not in ``RESUMABLE``.
    """
    if not (folder / RESUME_NAME).is_file():
        raise UserError(f"{folder} holds no run to resume: there is no {RESUME_NAME}")
    options.require_only(RESUMABLE, "cannot be changed when a run is resumed; leave it out")
    settings = load_settings(folder, TrainSettings)
    changes = {name: getattr(options, name) for name in options.given
               if name in {field.name for field in dataclasses.fields(settings)}}
    if changes.get("precision") == "auto":
        del changes["precision"]
    return dataclasses.replace(settings, **changes)


main = command(TrainOptions, train)

if __name__ == "__main__":
    raise SystemExit(main())
