"""Train a simulator of the environment, with the frozen agent inside, on recorded rollouts."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from pathlib import Path

from common.cli import Parser, from_zero
from common.devices import keep_freed_memory, resolve_compute
from common.errors import UserError, script_main
from common.files import sha256
from common.settings import load_settings
from generative.config import SimulatorConfig, TrainingConfig
from generative.flags import add_simulator_flags, read_simulator_flags
from generative.losses import LossScales
from generative.runs import SimulatorRunSettings, checkpoints, new_run_folder
from generative.training import SimulatorTraining

# Flags that may differ when a run is resumed; the others are fixed by the run.
RESUMABLE = {"resume", "agent_file", "data_dir", "max_batches", "epochs", "lr", "log_interval",
             "save_interval", "device", "gpu_device", "precision", "log_level"}


def parser() -> Parser:
    flags = Parser(__doc__)
    add_simulator_flags(flags, "simulator file to start from", model_file_required=False)
    flags.add_argument("--max_batches", type=from_zero, default=0,
                       help="end after so many batches; 0: when the epochs are over")
    flags.add_argument("--resume", type=Path, metavar="RUN_FOLDER",
                       help="continue this run exactly where it was saved")
    return flags


@script_main
def main(argv: list[str] | None = None) -> int:
    args, explicit, parameters = read_simulator_flags(parser(), argv)
    common = parameters.common
    compute = resolve_compute(common.device, common.gpu_device, args.precision)
    if args.resume:
        folder = args.resume
        settings = resumed_settings(args, explicit)
        compute = dataclasses.replace(compute, bfloat16=settings.precision == "bfloat16")
    else:
        folder = new_run_folder(common.log_dir_base, args.gen_mod_exp_name)
        settings = SimulatorRunSettings(
            args.gen_mod_exp_name, str(args.agent_file), sha256(args.agent_file, "agent file"),
            str(args.model_file or ""), common.data_dir, args.seed, compute.precision,
            args.max_batches, parameters.get(SimulatorConfig), parameters.get(TrainingConfig),
            LossScales(*(getattr(args, f"loss_scale_{field.name}")
                         for field in dataclasses.fields(LossScales))))

    keep_freed_memory()
    run = SimulatorTraining(folder, settings, compute)
    print(f"training on {compute.device} in {compute.precision}, {run.num_batches} batches; "
          f"writing to {run.folder}", flush=True)
    status = run.train()
    print(f"{'finished' if run.finished else 'stopped'} after {run.batches} batches; simulator: "
          f"{run.newest_checkpoint}")
    if not run.finished:
        print("to go on:\n    python train_gen_model.py --agent_file "
              f"{shlex.quote(settings.agent_file)} --resume {shlex.quote(str(run.folder))}")
    return status


def resumed_settings(args: argparse.Namespace, explicit: set[str]) -> SimulatorRunSettings:
    """The settings of the run to resume, with those flags that may change."""
    if not checkpoints(args.resume):
        raise UserError(f"{args.resume} holds no run to resume: there is no checkpoint in it")
    for name in sorted(explicit - RESUMABLE):
        raise UserError(f"--{name} cannot be changed when a run is resumed; leave it out")
    settings = load_settings(args.resume, SimulatorRunSettings)
    if sha256(args.agent_file, "agent file") != settings.agent_sha256:
        raise UserError(f"{args.agent_file} is not the agent of this run, which was "
                        f"{settings.agent_file}")
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
