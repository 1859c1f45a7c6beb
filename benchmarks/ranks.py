"""Speed of training on two processes of one thread each, compared with one process of one thread.

One process, two connected ones, and two that know nothing of each other are measured in turns. The
last say what the machine gives two processes: two threads of one core, and the memory that cores
share, are less than twice one.

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
STEPS = 64  # of a rollout
PREPARING = 3  # pieces of work until memory is taken and kernels are prepared
REPEATS = 3
BATCHES = 5  # in a piece of the simulator's training


@dataclasses.dataclass
class Clock:
    """Seconds of a piece of work, and what of them went into connecting the processes.

    Attributes:
        total: all of it.
        update: the part behind the rollout.
        waiting: until the slowest process was there, too.
        messages: for the messages themselves.
        optimiser: for what every process does in full, clipping and Adam.
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
    """Processes whose waiting and messages are timed separately."""

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
    """One process of a training; called, it does a piece of work and returns its ``Clock``.

    Args:
        rank, size: among how many connected ones.
        port: where they meet.
    """

    def __init__(self, rank: int, size: int, port: int):
        torch.set_num_threads(1)
        keep_freed_memory()
        os.environ.update(WORLD_SIZE=str(size), RANK=str(rank), LOCAL_RANK="0",
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        self._joined = init_distributed()  # kept, for it ends with this object
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
        """Do a piece of work."""
        raise NotImplementedError

    def go_on(self) -> None:
        """Do what must be done, after a pause, to be as fast as without."""

    def time_optimiser(self, optimizer: torch.optim.Optimizer) -> None:
        step = optimizer.step

        def timed_step() -> None:
            with self.world.clock.measured("optimiser"):
                step()

        setattr(optimizer, "step", timed_step)  # noqa: B010  which mypy would refuse as a method


class AgentTraining(TrainingProcess):
    """A rollout and an update of a parameter set."""

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
    """Batches of the simulator's training, after one that is not counted: after a pause of seconds,
    while others are measured, a batch takes up to a fifth longer."""

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
    """Do a piece of work in each process at the same time."""
    futures = [process.begin() for process in processes]
    return [future.result() for future in futures]


def measure(name: str, make: type, args: tuple, unit: str, amount: int) -> tuple[Clock, Clock]:
    """Print how much faster two processes are, and where the rest of the time goes.

    Args:
        make, args: class of the process, and its arguments before its rank.
        unit, amount: what a piece of work consists of.

    Returns:
        Medians of one process and of the slower one of two.
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
    """How much faster two processes can be with the minibatches of a recurrent agent, where each
    waits for the one that has more environments of it: a mean over random minibatches."""
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
                        help=f"steps of a rollout (default: {STEPS}, a quarter of the parameter "
                             "sets': minibatches are a quarter as large, and messages weigh four "
                             "times as much)")
    args = parser.parse_args()
    say(f"torch {torch.__version__}, {resolve_compute('cpu').precision}")
    for name, measure_part in PARTS.items():
        if args.part in (None, name):
            measure_part(args.steps)


if __name__ == "__main__":
    main()
