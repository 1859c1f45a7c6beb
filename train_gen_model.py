"""Train a simulator of the environment, which contains the frozen agent, on recorded rollouts."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from pathlib import Path

from agents.provenance import agent_sha256
from common.cli import Parser, from_zero
from common.config import load_settings
from common.devices import keep_freed_memory, resolve_compute
from common.distributed import Distributed, init_distributed
from common.errors import UserError, script_main
from common.parameters import ParameterSet
from generative.config import SimulatorConfig, TrainingConfig
from generative.flags import TRAINING_FLAGS, add_simulator_flags
from generative.losses import LossScales
from generative.runs import (
    SimulatorRunSettings,
    check_agent_inside,
    checkpoints,
    new_run_folder,
    run_of,
    save_training_episodes,
)
from generative.training import SimulatorTraining

# Flags that may differ when a run is resumed; all other flags are fixed by the run.
RESUMABLE = {"resume", "agent_file", "data_dir", "max_batches", "epochs", "lr", "log_interval",
             "save_interval", "device", "gpu_device", "precision", "log_level"}


def parser() -> Parser:
    flags = Parser(__doc__)
    add_simulator_flags(flags, "simulator file to start from", model_file_required=False,
                        shown=TRAINING_FLAGS)
    flags.add_argument("--max_batches", type=from_zero, default=0,
                       help="stop after this number of batches; 0: after the last epoch")
    flags.add_argument("--resume", type=Path, metavar="RUN_FOLDER",
                       help="resume this run exactly where it was saved")
    return flags


@script_main
def main(argv: list[str] | None = None) -> int:
    args, explicit, parameters = parser().read(argv)
    with init_distributed() as world:
        return train(args, explicit, parameters, world)


def train(args: argparse.Namespace, explicit: set[str], parameters: ParameterSet,
          world: Distributed) -> int:
    """Train as the flags specify, and return the exit status.

    Args:
        args: parsed flags.
        explicit: names of the flags given on the command line.
        parameters: parameter set with the values of these flags.
        world: the group of training processes.
    """
    common = parameters.common
    compute = resolve_compute(common.device, common.gpu_device, args.precision, world.local_rank)
    if args.resume:
        folder = args.resume
        settings = resumed_settings(args, explicit)
        compute = dataclasses.replace(compute, bfloat16=settings.precision == "bfloat16")
    else:
        if args.model_file:
            check_agent_inside(run_of(args.model_file), args.agent_file)
        folder = world.broadcast(new_run_folder(common.log_dir_base, args.gen_mod_exp_name))
        settings = SimulatorRunSettings(
            args.gen_mod_exp_name, str(args.agent_file), agent_sha256(args.agent_file),
            str(args.model_file or ""), common.data_dir, args.seed, compute.precision,
            args.max_batches, parameters.get(SimulatorConfig), parameters.get(TrainingConfig),
            LossScales(*(getattr(args, f"loss_scale_{field.name}")
                         for field in dataclasses.fields(LossScales))))
    world.require_same({**vars(args), **dataclasses.asdict(settings)})

    keep_freed_memory()
    world.connect_gpus(compute.device)
    start_file = checkpoints(folder)[-1] if args.resume else args.model_file
    run = SimulatorTraining(folder, settings, compute, world)
    if world.is_main:
        train = run.dataset.split(settings.training.held_out_fraction, settings.seed).train
        save_training_episodes(run.folder, run.dataset, train, start_file)
        print(f"training on {compute.device} in {compute.precision}{world.description}, "
              f"{run.num_batches} batches; writing to {run.folder}", flush=True)
    status = run.train()
    if world.is_main:
        print(f"{'finished' if run.finished else 'stopped'} after {run.batches} batches; "
              f"simulator: {run.newest_checkpoint}")
        if not run.finished:
            print(f"to resume:\n    {world.launcher} train_gen_model.py --agent_file "
                  f"{shlex.quote(settings.agent_file)} --resume {shlex.quote(str(run.folder))}")
    return status


def resumed_settings(args: argparse.Namespace, explicit: set[str]) -> SimulatorRunSettings:
    """Return the settings of the run to resume, updated by the flags in ``RESUMABLE``.

    Args:
        args: parsed flags.
        explicit: names of the flags given on the command line.

    Raises:
        UserError: if there is no run, or a flag was given that is not in ``RESUMABLE``.
    """
    if not checkpoints(args.resume):
        raise UserError(f"{args.resume} holds no run to resume: there is no checkpoint in it")
    for name in sorted(explicit - RESUMABLE):
        raise UserError(f"--{name} cannot be changed when a run is resumed; leave it out")
    settings = load_settings(args.resume, SimulatorRunSettings)
    check_agent_inside(settings, args.agent_file)
    changes = {name: getattr(args, name) for name in ("data_dir", "max_batches", "precision")
               if name in explicit}
    if changes.get("precision") == "auto":
        del changes["precision"]
    training = {name: getattr(args, name) for name in ("epochs", "lr", "log_interval",
                                                       "save_interval") if name in explicit}
    return dataclasses.replace(settings, agent_file=str(args.agent_file), **changes,
                               training=dataclasses.replace(settings.training, **training))


if __name__ == "__main__":
    raise SystemExit(main())
