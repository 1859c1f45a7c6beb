"""Speed of training with two processes of one thread each, compared with one such process.

One process, two connected processes and two independent processes are measured alternately. The
independent processes show the highest speed that the machine allows. This is less than twice the
speed of one process if the processes share a core or the memory bandwidth.

    python -m benchmarks.ranks               everything; three quarters of an hour on two cores
    python -m benchmarks.ranks hard          one part: hard, hard-rec or simulator

Agents train on rollouts of 64 steps, a quarter of the steps in their parameter sets. Their
minibatches are thus a quarter as large, and the cost of communication weighs four times as much.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import socket
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist

from agents.config import AgentConfig, load_agent_config
from benchmarks.agent import Training
from benchmarks.harness import (
    measure_in_turns,
    parts_to_measure,
    recorded,
    say,
    seconds_of,
    separate_process,
)
from benchmarks.simulator import NUM_STEPS, settings_for, some_batch
from common.devices import keep_freed_memory, resolve_compute
from common.distributed import Distributed, init_distributed
from generative.runs import SimulatorRunSettings
from generative.training import SimulatorTraining

BATCH_SIZE = 16
STEPS = 64  # steps per rollout
NUM_EPISODES = 60  # episodes of the simulator's recording
PREPARING = 3  # warm-up rounds, which allocate memory and prepare kernels
REPEATS = 3
BATCHES = 5  # batches of the simulator's training per measurement


class TrainingProcess:
    """One process of a training run. A call runs the work several times, first unmeasured and then
    measured, and returns the duration of the measured runs in seconds.

    Args:
        make: maps a world (the connected processes) to the function that does the work.
        unmeasured, measured: numbers of unmeasured and of measured runs per call.
        rank: rank of the process.
        size: world size.
        port: port of the rendezvous.
    """

    def __init__(self, make: Callable[[Distributed], Callable], unmeasured: int, measured: int,
                 rank: int, size: int, port: int):
        torch.set_num_threads(1)
        keep_freed_memory()
        os.environ.update(WORLD_SIZE=str(size), RANK=str(rank), LOCAL_RANK=str(rank),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        self._connection = init_distributed()  # kept alive as long as this object
        self._world = self._connection.__enter__()
        self._unmeasured, self._measured = unmeasured, measured
        self._work = make(self._world)

    def __call__(self) -> float:
        self._repeat(self._unmeasured)
        if self._world.is_distributed:
            dist.barrier()
        return seconds_of(self._repeat, self._measured)

    def _repeat(self, times: int) -> None:
        for _ in range(times):
            self._work()


def agent_training(config: AgentConfig, world: Distributed) -> Callable:
    """Return a function that collects a rollout and updates the agent on it."""
    return Training(config, "hard", 0, world=world)


def simulator_training(settings: SimulatorRunSettings, folder: Path, world: Distributed
                       ) -> Callable:
    """Return a function that trains the simulator on one batch."""
    run = SimulatorTraining(folder, settings, resolve_compute("cpu"), world)
    windows = some_batch(run.dataset, settings.training.batch_size, world)
    return functools.partial(run.one_batch, windows)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def slowest(calls: list[Callable[[], Future]]) -> float:
    """Call all processes at the same time, and return the longest of their durations in seconds.

    Args:
        calls: for each process, a function that starts the work and returns a future of its
            duration.
    """
    futures = [call() for call in calls]
    return max(future.result() for future in futures)


def measure(name: str, make: Callable[[Distributed], Callable], repeats: tuple[int, int],
            unit: str, amount: int) -> None:
    """Measure and print the speedup of training by two processes.

    Args:
        name: name of what is trained, for the output.
        make: see ``TrainingProcess``.
        repeats: numbers of unmeasured and of measured runs per call; see ``TrainingProcess``.
        unit: name of the items processed, in the plural.
        amount: number of items per measurement.
    """
    port = free_port()
    worlds = (0, 1, 0), (0, 1, 0), (0, 2, port), (1, 2, port)
    with contextlib.ExitStack() as stack:
        one, other, *two = (stack.enter_context(
            separate_process(TrainingProcess, make, *repeats, *world)) for world in worlds)
        turns = {"alone": [one], "together": two, "unconnected": [one, other]}
        seconds = measure_in_turns({turn: functools.partial(slowest, calls)
                                    for turn, calls in turns.items()}, REPEATS, warmup=PREPARING)
    alone, together, unconnected = seconds.values()
    say(f"{name}: one process {amount / alone:.1f} {unit}/s, two {amount / together:.1f} "
        f"{unit}/s, ratio {alone / together:.2f}; two unconnected ones do "
        f"{2 * alone / unconnected:.2f} times the work of one")


def measure_agent(name: str) -> None:
    config = dataclasses.replace(load_agent_config(name), n_steps=STEPS)
    measure(f"{name}, {config.n_envs} x {STEPS}", functools.partial(agent_training, config),
            (0, 1), "steps", config.n_envs * STEPS)


def measure_simulator() -> None:
    # Each measurement follows an unmeasured batch, because the first batch after a pause, in which
    # other processes are measured, takes up to a fifth longer.
    with recorded(NUM_EPISODES) as folder:
        settings = settings_for("defaults", folder, BATCH_SIZE, NUM_STEPS)
        measure(f"simulator, batch {BATCH_SIZE} x {NUM_STEPS}",
                functools.partial(simulator_training, settings, folder / "run"), (1, BATCHES),
                "frames", BATCHES * BATCH_SIZE * NUM_STEPS)


PARTS: dict[str, Callable[[], None]] = {
    "hard": functools.partial(measure_agent, "hard"),
    "hard-rec": functools.partial(measure_agent, "hard-rec"), "simulator": measure_simulator}


if __name__ == "__main__":
    for measure_part in parts_to_measure(__doc__, PARTS).values():
        measure_part()
