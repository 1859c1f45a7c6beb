"""Train a simulator, see ``SimulatorTrainingOptions``."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

from agents.provenance import agent_sha256
from common.cli import from_zero
from common.config import load_settings
from common.devices import Compute, keep_freed_memory
from common.distributed import Distributed, run_in_group
from common.errors import UserError
from common.options import command, option
from generative.config import SimulatorConfig, TrainingConfig
from generative.flags import TrainSimulatorOptions
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatorTrainingOptions(TrainSimulatorOptions):
    """Train a simulator of the environment, which contains the frozen agent, on recorded rollouts.
    """

    transfer_from: Path | None = option(
        None, "simulator file of another game or agent, from which weights of the same shape are "
              "taken, except those of squares")
    max_batches: int = option(0, "stop after this number of batches; 0: after the last epoch",
                              type=from_zero)
    resume: Path | None = option(None, "resume this run exactly where it was saved",
                                 metavar="RUN_FOLDER")


def train_simulator(options: SimulatorTrainingOptions) -> Path:
    """Train a simulator, and return its file.

    Raises:
        Stopped: after a stop signal; the run can be resumed.
    """
    return run_in_group(train_in, options).newest_checkpoint


def train_in(world: Distributed, options: SimulatorTrainingOptions
             ) -> tuple[SimulatorTraining, int]:
    """Train in a group of processes, and return the run and the exit status."""
    compute = options.compute_in(options.precision, world.local_rank)
    start_file = options.model_file
    if options.resume:
        folder, settings = options.resume, resumed_settings(options.resume, options)
        compute = dataclasses.replace(compute, bfloat16=settings.precision == "bfloat16")
        start_file = checkpoints(folder)[-1]
    else:
        if options.model_file and options.transfer_from:
            raise UserError("give --model_file, for a simulator of this agent, or --transfer_from, "
                            "for another one")
        if options.model_file:
            check_agent_inside(run_of(options.model_file), options.agent_file)
        folder = world.broadcast(new_run_folder(options.parameters.common.log_dir_base,
                                                options.gen_mod_exp_name))
        settings = new_settings(options, compute)
    world.require_same({**options.values, **dataclasses.asdict(settings)})

    keep_freed_memory()
    world.connect_gpus(compute.device)
    run = SimulatorTraining(folder, settings, compute, world)
    if world.is_main:
        train = run.dataset.split(settings.training.held_out_fraction, settings.seed).train
        save_training_episodes(run.folder, run.dataset, train, start_file)
        print(f"training on {compute.device} in {compute.precision}{world.description}, "
              f"{run.num_steps} batches; writing to {run.folder}", flush=True)
    status = run.train()
    if world.is_main:
        print(f"{'finished' if run.finished else 'stopped'} after {run.steps} batches; "
              f"simulator: {run.newest_checkpoint}")
        if not run.finished:
            print(f"to resume:\n    {world.launcher} train_gen_model.py --agent_file "
                  f"{shlex.quote(settings.agent_file)} --resume {shlex.quote(str(run.folder))}")
    return run, status


def new_settings(options: SimulatorTrainingOptions, compute: Compute) -> SimulatorRunSettings:
    """Return the settings of a new run."""
    parameters = options.parameters
    return SimulatorRunSettings(
        options.gen_mod_exp_name, str(options.agent_file), agent_sha256(options.agent_file),
        str(options.model_file or ""), parameters.common.data_dir, options.seed, compute.precision,
        options.max_batches, parameters.get(SimulatorConfig), parameters.get(TrainingConfig),
        LossScales(*(getattr(options, f"loss_scale_{field.name}")
                     for field in dataclasses.fields(LossScales))),
        transfer_from=str(options.transfer_from or ""))


def resumed_settings(folder: Path, options: SimulatorTrainingOptions) -> SimulatorRunSettings:
    """Return the settings of the run to resume, updated by the options in ``RESUMABLE``.

    Raises:
        UserError: if there is no run, or an option was given that is not in ``RESUMABLE``.
    """
    if not checkpoints(folder):
        raise UserError(f"{folder} holds no run to resume: there is no checkpoint in it")
    options.require_only(RESUMABLE, "cannot be changed when a run is resumed; leave it out")
    settings = load_settings(folder, SimulatorRunSettings)
    check_agent_inside(settings, options.agent_file)
    changes = {name: getattr(options, name) for name in ("data_dir", "max_batches", "precision")
               if name in options.given}
    if changes.get("precision") == "auto":
        del changes["precision"]
    training = {name: getattr(options, name) for name in ("epochs", "lr", "log_interval",
                                                          "save_interval") if name in options.given}
    return dataclasses.replace(settings, agent_file=str(options.agent_file), **changes,
                               training=dataclasses.replace(settings.training, **training))


main = command(SimulatorTrainingOptions, train_simulator)

if __name__ == "__main__":
    raise SystemExit(main())
