"""Train a PPO agent on a Procgen game."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import random
import shlex
from pathlib import Path

from agents.agent_file import agent_files, load_agent
from agents.config import add_env_flags, env_config, load_agent_config
from agents.run_folder import TrainSettings
from agents.training import RESUME_NAME, TrainingRun
from common.cli import (
    Parser,
    add_compute_flags,
    count,
    folder_name,
    seed,
    set_up_logging,
    threads,
    time_steps,
)
from common.config import load_settings
from common.devices import keep_freed_memory, resolve_compute
from common.distributed import Distributed, init_distributed
from common.errors import UserError, script_main
from common.files import sha256
from maze.level.regions import add_cheese_region_flag, cheese_region

# Flags that may differ when a run is resumed; all other flags are fixed by the run.
RESUMABLE = {"num_timesteps", "num_checkpoints", "val_interval", "num_threads", "precision",
             "device", "gpu_device", "log_level", "resume"}


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("--exp_name", type=folder_name, default="test",
                       help="name of the experiment's folder")
    add_env_flags(flags, of_agent=False)
    add_cheese_region_flag(flags, levels="training levels")
    add_cheese_region_flag(flags, "val_cheese_region", "validation levels")
    flags.add_argument("--param_name", default="easy-200",
                       help="parameter set in hyperparams/procgen/config.yml")
    flags.add_argument("--num_timesteps", type=time_steps, default=25_000_000,
                       help="number of environment steps to train for")
    flags.add_argument("--num_threads", type=threads, default=2,
                       help="number of threads that step the environments")
    flags.add_argument("--seed", type=seed, default=None,
                       help="seed of weights, levels and actions (default: random)")
    flags.add_argument("--num_checkpoints", type=count, default=1,
                       help="number of agent files to keep, evenly spaced")
    flags.add_argument("--agent_file", "--model_file", dest="model_file", default="",
                       help="agent file to start from")
    flags.add_argument("--keep_optimizer", action="store_true",
                       help="also start from the optimiser state in --agent_file")
    flags.add_argument("--teacher_file", default="",
                       help="agent file of a teacher for the first part of the run (kickstarting; "
                            "see kickstart_* in the parameter set)")
    flags.add_argument("--val_interval", type=count, default=1,
                       help="number of updates between validation rollouts on unseen levels")
    flags.add_argument("--logdir", type=Path, default=Path("logs"),
                       help="parent folder of runs, <logdir>/procgen/<env_name>/<exp_name>/")
    flags.add_argument("--resume", type=Path, metavar="RUN_FOLDER",
                       help="resume this run exactly where it was saved")
    add_compute_flags(flags)
    return flags


@script_main
def main(argv: list[str] | None = None) -> int:
    flags = parser()
    args = flags.parse_args(argv)
    set_up_logging(args.log_level)
    with init_distributed() as world:
        return train(args, flags.explicit(argv), world)


def train(args: argparse.Namespace, explicit: set[str], world: Distributed) -> int:
    """Train as the flags specify, and return the exit status.

    Args:
        args: parsed flags.
        explicit: names of the flags given on the command line.
        world: the group of training processes.
    """
    compute = resolve_compute(args.device, args.gpu_device, args.precision, world.local_rank)
    if args.resume:
        folder = args.resume
        settings = resumed_settings(args, explicit)
        compute = dataclasses.replace(compute, bfloat16=settings.precision == "bfloat16")
    else:
        run_seed = world.broadcast(random.randrange(10_000)) if args.seed is None else args.seed
        settings = TrainSettings(
            args.exp_name, args.param_name, env_config(args), load_agent_config(args.param_name),
            run_seed, args.num_timesteps, args.num_checkpoints, args.val_interval, args.model_file,
            compute.precision, args.num_threads, args.teacher_file, checksum(args.teacher_file),
            args.keep_optimizer, args.cheese_region, args.val_cheese_region)
        now = world.broadcast(datetime.datetime.now().strftime("%d-%m-%Y_%H-%M-%S"))
        experiment = args.logdir / "procgen" / args.env_name / args.exp_name
        folder = experiment / f"seed_{run_seed}_{now}"
    world.require_same({**vars(args), **dataclasses.asdict(settings)})

    keep_freed_memory()
    world.connect_gpus(compute.device)
    run = TrainingRun(folder, settings, compute,
                      cheese_region(settings.env, settings.cheese_region),
                      cheese_region(settings.env, settings.val_cheese_region), world)
    if world.is_main:
        print(f"training on {compute.device} in {compute.precision}{world.description}; writing to "
              f"{run.folder}", flush=True)
    status = run.train()
    if world.is_main:
        speed = f" at {run.steps_per_second:.0f} steps/s" if run.steps_per_second else ""
        print(f"{'finished' if run.finished else 'stopped'} after {run.timesteps} steps{speed}; "
              f"agent: {agent_files(run.folder)[-1]}")
        if not run.finished:
            print(f"to resume:\n    {world.launcher} train.py --resume "
                  f"{shlex.quote(str(run.folder))}")
    return status


def checksum(teacher_file: str) -> str:
    """Return the checksum of a teacher's file, or "" without a teacher.

    Raises:
        UserError: if the file is missing or not an agent file.
    """
    if not teacher_file:
        return ""
    load_agent(Path(teacher_file))
    return sha256(Path(teacher_file))


def resumed_settings(args, explicit: set[str]) -> TrainSettings:
    """Return the settings of the run to resume, updated by the flags in ``RESUMABLE``.

    Args:
        args: parsed flags.
        explicit: names of the flags given on the command line.

    Raises:
        UserError: if there is no run, or a flag was given that is not in ``RESUMABLE``.
    """
    if not (args.resume / RESUME_NAME).is_file():
        raise UserError(f"{args.resume} holds no run to resume: there is no {RESUME_NAME}")
    for name in sorted(explicit - RESUMABLE):
        raise UserError(f"--{name} cannot be changed when a run is resumed; leave it out")
    settings = load_settings(args.resume, TrainSettings)
    changes = {name: getattr(args, name) for name in explicit
               if name in {field.name for field in dataclasses.fields(settings)}}
    if changes.get("precision") == "auto":
        del changes["precision"]
    return dataclasses.replace(settings, **changes)


if __name__ == "__main__":
    raise SystemExit(main())
