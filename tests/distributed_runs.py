"""Runs of train.py and train_gen_model.py for tests that compare one process with several, which
torchrun starts. The runs are shorter than those of the parameter sets in the files.

    torchrun tests/distributed_runs.py all FOLDER AGENT_FILE DATA_DIR  # and sums of gradients
    torchrun tests/distributed_runs.py agent|simulator FLAGS OF THE SCRIPT
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from unittest import mock

import torch
from conftest import tiny_config

import train
import train_gen_model
from common.distributed import Distributed, init_distributed
from common.signals import STOP_SIGNALS

UPDATES, BATCHES = 4, 6
STEPS_PER_UPDATE = 8 * 24


def agent_arguments(logdir: Path, teacher: Path) -> list[str]:
    """Return flags of train.py with a teacher, validation, and an agent file per update."""
    return ["--exp_name", "t", "--env_name", "fruitbot", "--param_name", "tiny", "--seed", "4",
            "--num_timesteps", str(UPDATES * STEPS_PER_UPDATE), "--val_interval", "3",
            "--num_checkpoints", str(UPDATES), "--teacher_file", str(teacher), "--precision",
            "float32", "--device", "cpu", "--num_threads", "1", "--logdir", str(logdir)]


def simulator_arguments(log_dir_base: Path, agent: Path, data: Path,
                        parameter_set: str = "tiny") -> list[str]:
    """Return flags of train_gen_model.py with weights by colour rarity, and a batch of odd size."""
    return ["--agent_file", str(agent), "--data_dir", str(data), "--log_dir_base",
            str(log_dir_base), "--interpreting_params_name", parameter_set,
            "--gen_mod_exp_name", "t", "--seed", "4", "--log_interval", "2", "--max_batches",
            str(BATCHES), "--batch_size", "3", "--image_rarity", "0.5", "--precision",
            "float32", "--device", "cpu"]


def train_agent(argv: list[str], recurrent: bool = True) -> int:
    """Run train.py with short rollouts and a small learning rate, because Adam amplifies rounding
    errors of gradients near 0. In some minibatches of a recurrent agent, one of two processes has
    no environment."""
    of_file = train.load_agent_config
    train.load_agent_config = lambda name: tiny_config(
        n_steps=24, learning_rate=1e-4, recurrent=recurrent)
    try:
        return train.main(argv)
    finally:
        train.load_agent_config = of_file


def make_all(folder: Path, agent: Path, data: Path) -> int:
    """Train a recurrent agent, a feed-forward one, and a simulator of each architecture, in the
    folders ``recurrent``, ``feed-forward``, ``simulator`` and ``spatial``."""
    return (train_agent(agent_arguments(folder / "recurrent", agent))
            or train_agent(agent_arguments(folder / "feed-forward", agent), recurrent=False)
            or train_gen_model.main(simulator_arguments(folder / "simulator", agent, data))
            or train_gen_model.main(simulator_arguments(folder / "spatial", agent, data,
                                                        "tiny-spatial")))


# Parameters by name: shape, and those of the two ranks that have a gradient.
GRADIENTS = {"small": ((3, 2, 5, 5), (0, 1)), "large": ((64, 32, 8, 8), (0, 1)),
             "small of one": ((4, 4), (1,)), "large of one": ((96, 32, 8, 8), (1,)),
             "large of none": ((512, 512), ())}


# Ways in which two ranks may exchange gradients.
WAYS = ("in memory", "on two machines", "in memory that one cannot see")
ROUNDS = 3


def parameters_of(rank: int, number: int) -> list[torch.nn.Parameter]:
    """Return the parameters of GRADIENTS, some in channels-last memory format, with gradients that
    differ between ranks and rounds."""
    generator = torch.Generator().manual_seed(10 * number + rank)
    parameters = []
    for shape, ranks in GRADIENTS.values():
        layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
        parameter = torch.nn.Parameter(torch.ones(shape).to(memory_format=layout))
        gradient = torch.randn(shape, generator=generator)
        if rank in ranks:
            (parameter * gradient).sum().backward()
        parameters.append(parameter)
    return parameters


def shares_memory() -> bool:
    """Whether this process has mapped shared memory for gradients."""
    return "/memfd:gradients" in Path("/proc/self/maps").read_text()


def sum_gradients(file: Path) -> bool:
    """Write the rank's sums of gradients by way and round, and whether it mapped shared memory, to
    a file named after the rank. Higher ranks write later.

    Returns:
        Whether the files of all ranks exist when this rank has left the group.
    """
    def refuse(*where):
        raise PermissionError

    found = {}
    with init_distributed() as world:
        for way in WAYS:
            if way == "on two machines":
                connected = Distributed(world.rank, world.world_size)
            else:
                connected = Distributed(world.rank, world.world_size, world.local_rank,
                                        world.world_size)
            unseen = way == "in memory that one cannot see" and world.rank == 1
            with (mock.patch("common.distributed.map_memory", refuse) if unseen
                  else contextlib.nullcontext()):
                for number in range(ROUNDS):
                    # The last round has fewer parameters.
                    parameters = parameters_of(world.rank, number)[number == ROUNDS - 1:]
                    connected.sum_gradients(parameters)
                    found[way, number] = [parameter.grad for parameter in parameters]
            found[way] = shares_memory()
            del connected
        files = [file.with_name(f"{file.name}{rank}") for rank in range(world.world_size)]
        time.sleep(world.rank)
        torch.save(found, files[world.rank])
    return all(each.exists() for each in files)


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    if what == "all":
        folder, *inputs = map(Path, words)
        # Training maps shared memory for gradients, too, so it comes second.
        is_done = sum_gradients(folder / "rank") and not make_all(folder, *inputs)
        for number in STOP_SIGNALS:  # torchrun sends them to ranks that take longer to exit
            os.kill(os.getpid(), number)
        raise SystemExit(not is_done)
    raise SystemExit(train_agent(words) if what == "agent" else train_gen_model.main(words))
