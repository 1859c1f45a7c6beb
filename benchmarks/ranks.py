"""Speed of training on two processes with one thread each, compared with one such process.

One process, two connected processes and two independent processes are measured alternately. The
independent processes give the upper limit of the machine, which is below twice the speed of one
process if they share a core or the memory bandwidth.

    python -m benchmarks.ranks               everything; three quarters of an hour on two cores
    python -m benchmarks.ranks hard          one part: hard, hard-rec or simulator
    python -m benchmarks.ranks hard --steps 256
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from unittest import mock

import torch
import torch.distributed as dist

from agents.agent_file import ADAM_EPS
from agents.config import AgentConfig, load_agent_config
from agents.networks import build_policy
from agents.ppo import Collector, Rollout, minibatches, update
from benchmarks.harness import Candidate, measure_in_turns, parser_of, say
from benchmarks.simulator import NUM_STEPS, recorded, settings_for
from common.devices import keep_freed_memory, resolve_compute
from common.distributed import Distributed, init_distributed
from envs.procgen_env import EnvConfig
from generative.runs import SimulatorRunSettings
from generative.training import SimulatorTraining

ENV = EnvConfig("coinrun", "hard")
BATCH_SIZE = 16
STEPS = 64  # steps per rollout
PREPARING = 3  # warm-up rounds, which allocate memory and prepare kernels
REPEATS = 3
BATCHES = 5  # batches of the simulator's training per measurement


@dataclasses.dataclass
class Clock:
    """Durations of a unit of work and of its parts, in seconds.

    Attributes:
        total: total duration.
        update: duration of the work after the rollout.
        waiting: waiting time for the slowest process.
        messages: duration of communication.
        optimiser: duration of gradient clipping and Adam, which are not divided among processes.
    """

    total: float = 0.0
    update: float = 0.0
    waiting: float = 0.0
    messages: float = 0.0
    optimiser: float = 0.0

    @contextlib.contextmanager
    def measured(self, name: str):
        start = time.perf_counter()
        yield
        setattr(self, name, getattr(self, name) + time.perf_counter() - start)


class TimedDistributed(Distributed):
    """``Distributed`` with separate timing of waiting and communication."""

    clock = Clock()

    @contextlib.contextmanager
    def _timed(self):
        with self.clock.measured("waiting"):
            dist.barrier()
        with self.clock.measured("messages"):
            yield

    def gather(self, own, num, dim=0):
        if not self.is_distributed:
            return own
        with self._timed():
            return super().gather(own, num, dim)

    def sum(self, tensor):
        if not self.is_distributed:
            return tensor
        with self._timed():
            return super().sum(tensor)

    def sum_gradients(self, parameters):
        if self.is_distributed:
            with self._timed():
                super().sum_gradients(parameters)


class TrainingProcess:
    """One process of a training; a call does a unit of work and returns its ``Clock``.

    Args:
        rank: rank of the process.
        size: world size.
        port: port of the rendezvous.
    """

    def __init__(self, rank: int, size: int, port: int):
        torch.set_num_threads(1)
        keep_freed_memory()
        os.environ.update(WORLD_SIZE=str(size), RANK=str(rank), LOCAL_RANK="0",
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        self._joined = init_distributed()  # kept alive as long as this object
        self._joined.__enter__()
        self.world = TimedDistributed(rank, size, rank, size)
        self.compute = resolve_compute("cpu")

    def __call__(self) -> Clock:
        self.go_on()
        self.world.clock = clock = Clock()
        clip = torch.nn.utils.clip_grad_norm_

        def timed_clip(*args):
            with clock.measured("optimiser"):
                return clip(*args)

        if self.world.is_distributed:
            dist.barrier()
        with (mock.patch.object(torch.nn.utils, "clip_grad_norm_", timed_clip),
              clock.measured("total")):
            self.work(clock)
        return clock

    def work(self, clock: Clock) -> None:
        """Do a unit of work."""
        raise NotImplementedError

    def go_on(self) -> None:
        """Do unmeasured work that restores the usual speed after a pause."""

    def time_optimiser(self, optimizer: torch.optim.Optimizer) -> None:
        step = optimizer.step

        def timed_step() -> None:
            with self.world.clock.measured("optimiser"):
                step()

        setattr(optimizer, "step", timed_step)  # noqa: B010  mypy rejects an assignment


class AgentTraining(TrainingProcess):
    """Process whose unit of work is a rollout and an update of the agent."""

    def __init__(self, config: AgentConfig, rank: int, size: int, port: int):
        super().__init__(rank, size, port)
        torch.manual_seed(0)
        self.config = config
        self.policy = self.compute.place(build_policy(
            config.architecture, config.hidden_state_size, config.recurrent,
            config.learned_initial_state))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=5e-4, eps=ADAM_EPS)
        self.time_optimiser(self.optimizer)
        self.worker = Collector(ENV, self.policy, self.compute, config.n_envs, 0, 0,
                             world=self.world)
        self.rollout = Rollout(config.n_steps, len(self.worker.hidden), (64, 64, 3),
                               config.hidden_state_size, self.compute.device)

    def work(self, clock: Clock) -> None:
        self.worker.play(self.config.n_steps, self.rollout, normalize=True)
        with clock.measured("update"):
            update(self.policy, self.optimizer, self.rollout, self.config, self.compute,
                   torch.Generator().manual_seed(0), world=self.world)


class SimulatorBatches(TrainingProcess):
    """Process whose unit of work is BATCHES training batches of the simulator.

    Each measurement follows an unmeasured batch: after a pause of seconds, while other processes
    are measured, a batch takes up to a fifth longer.
    """

    def __init__(self, settings: SimulatorRunSettings, folder: Path, rank: int, size: int,
                 port: int):
        super().__init__(rank, size, port)
        self.run = SimulatorTraining(folder, settings, self.compute, self.world)
        self.time_optimiser(self.run.optimizer)
        own = self.run._order[0][self.world.local_slice(settings.training.batch_size)]
        self.windows = self.run.dataset.batch(own)

    def go_on(self) -> None:
        self.run.one_batch(self.windows)

    def work(self, clock: Clock) -> None:
        with clock.measured("update"):
            for _ in range(BATCHES):
                self.run.one_batch(self.windows)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def work_together(processes: Sequence[Candidate]) -> list[Clock]:
    """Do a unit of work in all processes at the same time, and return their clocks."""
    futures = [process.begin() for process in processes]
    return [future.result() for future in futures]


def measure(name: str, make: type, args: tuple, unit: str, amount: int) -> tuple[Clock, Clock]:
    """Measure and print the speedup by two processes, and the causes of the remaining time.

    Args:
        name: name of the training, for the output.
        make: class of the process.
        args: arguments of the class before rank, size and port.
        unit: name of the items processed, in the plural.
        amount: number of items per unit of work.

    Returns:
        Median durations of a single process, and of the slower one of two connected processes.
    """
    port = free_port()
    one, other = Candidate(make, *args, 0, 1, 0), Candidate(make, *args, 0, 1, 0)
    two = [Candidate(make, *args, rank, 2, port) for rank in range(2)]
    turns = {"one": [one], "two": two, "unconnected": [one, other]}
    clocks = measure_in_turns({turn: functools.partial(work_together, processes)
                               for turn, processes in turns.items()}, REPEATS, warmup=PREPARING)
    for process in (one, other, *two):
        process.close()

    def typical(turn: str, number: int) -> Clock:
        return Clock(*(median(getattr(processes[number], field.name) for processes in clocks[turn])
                       for field in dataclasses.fields(Clock)))

    alone, first, second = typical("one", 0), typical("two", 0), typical("two", 1)
    together = max(first, second, key=lambda clock: clock.total)
    unconnected = median(max(clock.total for clock in processes)
                         for processes in clocks["unconnected"])
    say(f"{name}: one process {amount / alone.total:.1f} {unit}/s, two "
        f"{amount / together.total:.1f} {unit}/s, ratio {alone.total / together.total:.2f}; two "
        f"unconnected ones do {2 * alone.total / unconnected:.2f} times the work of one")
    lost = {"waiting for the other": mean([first.waiting, second.waiting]),
            "messages": mean([first.messages, second.messages]),
            "clipping and Adam, done twice": together.optimiser - alone.optimiser / 2,
            "cores that share": (unconnected - alone.total) / 2}
    rest = together.total - alone.total / 2
    lost["the rest"] = rest - sum(lost.values())
    say(f"  of {together.total:.2f} s, {rest:.2f} s are more than half of one process's: "
          + ", ".join(f"{what} {seconds:.2f} s" for what, seconds in lost.items()))
    return alone, together


def measure_agent(name: str, steps: int) -> None:
    config = dataclasses.replace(load_agent_config(name), n_steps=steps)
    alone, together = measure(f"{name}, {config.n_envs} x {steps}", AgentTraining, (config,),
                              "steps", config.n_envs * steps)
    if config.recurrent:
        bound = imbalance_bound(config)
        rollout = alone.total - alone.update
        say(f"  whole environments cannot be shared evenly: the update can be {bound:.2f} times "
            f"as fast at most, and was {alone.update / together.update:.2f}; all of it "
            f"{alone.total / (rollout / 2 + alone.update / bound):.2f} times at most")


def imbalance_bound(config: AgentConfig, passes: int = 1000) -> float:
    """Return an upper bound of the update's speedup by two processes for a recurrent agent.

    In each minibatch, a process waits for the one with more environments. The bound is a mean over
    random minibatches of ``passes`` epochs.
    """
    generator = torch.Generator().manual_seed(0)
    largest = total = 0
    for _ in range(passes):
        state = generator.get_state()
        counts = []
        for rank in range(2):
            generator.set_state(state)
            counts.append([sum(map(len, step))
                           for step in minibatches(config, generator, Distributed(rank, 2))])
        largest += sum(map(max, zip(*counts)))
        total += config.n_envs
    return total / largest


def measure_simulator(steps: int) -> None:
    with recorded() as (folder,):
        settings = settings_for("defaults", folder, BATCH_SIZE, NUM_STEPS)
        measure(f"simulator, batch {BATCH_SIZE} x {NUM_STEPS}", SimulatorBatches,
                (settings, folder / "run"), "frames", BATCHES * BATCH_SIZE * NUM_STEPS)


PARTS: dict[str, Callable[[int], None]] = {
    "hard": functools.partial(measure_agent, "hard"),
    "hard-rec": functools.partial(measure_agent, "hard-rec"), "simulator": measure_simulator}


def main() -> None:
    parser = parser_of(__doc__, tuple(PARTS))
    parser.add_argument("--steps", type=int, default=STEPS,
                        help=f"steps per rollout (default: {STEPS}, a quarter of the steps in the "
                             "parameter sets, so minibatches are a quarter as large and the cost "
                             "of communication weighs four times as much)")
    args = parser.parse_args()
    say(f"torch {torch.__version__}, {resolve_compute('cpu').precision}")
    for name, measure_part in PARTS.items():
        if args.part in (None, name):
            measure_part(args.steps)


if __name__ == "__main__":
    main()
