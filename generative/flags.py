"""Options of the scripts that train, measure or use a simulator."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from pathlib import Path
from typing import ClassVar

from agents.provenance import agent_sha256
from common.cli import count, folder_name, seed
from common.devices import Compute
from common.files import sha256
from common.options import (
    CheckContentsOptions,
    ParameterComputeOptions,
    ParameterOptions,
    option,
    redefine,
)
from generative.config import LR_DECAYS, SAMPLE_STARTS, SimulatorConfig
from generative.sample_files import SampleFolder
from generative.simulator import Simulator

# Flags of training. Scripts that do not train accept them, but most have no effect there.
TRAINING_FLAGS = ("gen_mod_exp_name", "log_dir_base", "epochs", "lr", "lr_decay",
                  "image_rarity", "open_loop_share", "log_interval", "save_interval",
                  *(f"loss_scale_{name}" for name in ("obs", "hx", "reward", "done", "kl")))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions(ParameterOptions, CheckContentsOptions):
    """Options of a script that reads recorded rollouts."""

    data_dir: str | None = option(
        None, "folder of recorded rollouts, <logdir>/data of record.py", key="data_dir")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSimulatorOptions(DataOptions, ParameterComputeOptions):
    """Options of train_gen_model.py, which all later scripts accept."""

    ignored: ClassVar[Collection[str]] = (
        "exp_name", "env_name", "start_level", "num_levels", "distribution_mode",
        "agent_param_name", "param_name", "num_threads", "loss_scale_act_log_probs",
        "loss_scale_gen_adv")

    agent_file: Path = option(help="agent inside the simulator")
    model_file: Path | None = option(None, "simulator file to start from")
    gen_mod_exp_name: str = option("dev", "name of the experiment's folder", type=folder_name,
                                   names=("--gen_mod_exp_name", "--tgm_exp_name"))
    log_dir_base: str | None = option(
        None, "simulators are written to <log_dir_base>/results/", key="log_dir_base")
    batch_size: int | None = option(None, "windows per batch", type=count,
                                    key="gen_model.batch_size")
    num_sim_steps: int | None = option(None, "number of simulated steps", type=count,
                                       key="gen_model.num_sim_steps")
    num_initializing_steps: int | None = option(
        None, "number of recorded frames from which a simulation starts", type=count,
        key="gen_model.num_init_steps")
    epochs: int | None = option(None, "number of passes over the training windows", type=count,
                                key="gen_model.epochs")
    lr: float | None = option(None, "learning rate", key="gen_model.lr")
    image_rarity: float | None = option(
        None, "0 to 1: how strongly errors at pixels of rare colours are upweighted",
        key="gen_model.image_rarity")
    open_loop_share: float | None = option(
        None, "0 to 1: share of the windows whose latents come from the prior",
        key="gen_model.open_loop_share")
    log_interval: int | None = option(None, "batches per row of the log", type=count,
                                      key="gen_model.log_interval")
    save_interval: int | None = option(None, "batches between checkpoints", type=count,
                                       key="gen_model.save_interval")
    lr_decay: str | None = option(
        None, "how the learning rate decays to 0 by the end of training", choices=LR_DECAYS,
        key="gen_model.lr_decay")
    seed: int = option(0, "seed of every random choice", type=seed)
    loss_scale_obs: float = option(1.0, "weight of the loss term for the image")
    loss_scale_hx: float = option(1.0, "weight of the loss term for the agent's state")
    loss_scale_reward: float = option(1.0, "weight of the loss term for the reward")
    loss_scale_done: float = option(1.0, "weight of the loss term for the terminal")
    loss_scale_kl: float = option(1.0, "weight of the loss term for the KL")

    def open_simulator(self, compute: Compute | None = None,
                       model_file: Path | None = None) -> Simulator:
        """Load a simulator with its agent, see ``generative.runs.open_simulator``.

        Args:
            compute: device and precision, if not those of the options.
            model_file: simulator file, if not that of the options.
        """
        from generative.runs import open_simulator  # imports TensorBoard, which is slow

        model_file = model_file or self.model_file
        assert model_file is not None
        return open_simulator(model_file, self.agent_file, self.parameters.get(SimulatorConfig),
                              compute or self.compute)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatorOptions(TrainSimulatorOptions):
    """Options of a script that uses a simulator; those of training have no effect."""

    hidden: ClassVar[Collection[str]] = TRAINING_FLAGS

    model_file: Path = redefine(TrainSimulatorOptions, "model_file", default=dataclasses.MISSING,
                                help="simulator file")
    batch_size: int = option(32, "samples per batch", type=count)

    @functools.cached_property
    def origin(self) -> dict[str, str]:
        """Names and digests of agent and simulator, for the settings of results."""
        return {"agent_file": self.agent_file.name, "agent_sha256": agent_sha256(self.agent_file),
                "model_file": self.model_file.name, "model_sha256": sha256(self.model_file)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratedDataOptions(ParameterOptions):
    """Options of a script that reads or writes folders of simulated samples."""

    generated_data_dir: str | None = option(
        None, "parent of the folders of simulated samples, from record_gen_samples.py",
        key="generated_data_dir")

    @property
    def generated_data(self) -> Path:
        """Parent of the folders of simulated samples."""
        return Path(self.parameters.common.generated_data_dir)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplesOptions(GeneratedDataOptions):
    """Options that select a folder of simulated samples."""

    samples_dir: Path | None = option(
        None, f"folder of samples to read; if not given, <generated_data_dir>/{SAMPLE_STARTS[0]}, "
              "or <generated_data_dir> if it holds samples")

    @property
    def samples(self) -> SampleFolder:
        """Folder of samples."""
        if self.samples_dir is not None:
            return SampleFolder(self.samples_dir)
        informed = self.generated_data / SAMPLE_STARTS[0]
        if not informed.is_dir() and (direct := SampleFolder(self.generated_data)).keys("sample"):
            return direct
        return SampleFolder(informed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomSamplesOptions(GeneratedDataOptions):
    """Options of a script that also reads samples with random starts."""

    random_samples_dir: Path | None = option(
        None, "folder of samples with random starts; "
              f"<generated_data_dir>/{SAMPLE_STARTS[1]} if not given")

    @property
    def random_samples(self) -> SampleFolder:
        """Folder of samples with random starts."""
        return SampleFolder(self.random_samples_dir or self.generated_data / SAMPLE_STARTS[1])
