"""Speed of training and recording, compared with a plain variant of the same mathematics.

The plain variant computes in float32 on contiguous tensors and takes the training pass one time
step after the other, with the memory that the C library gives by default, as a direct
transcription of the algorithm would be run. The two are measured in turns, because machines differ
and drift, each in a process of its own.

    python -m benchmarks.agent            everything, about twelve minutes on two cores
    python -m benchmarks.agent wrappers   one part: wrappers, training, kickstarting, edits,
                                          recording or memory
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from unittest import mock

import numpy as np
import torch

import agents.acting
import agents.ppo
import record
from agents.agent_file import save_agent
from agents.config import load_agent_config
from agents.kickstarting import Teacher
from agents.networks import Policy, PolicyOutput, build_policy, to_images
from agents.ppo import Collector, Rollout, update
from benchmarks.measuring import Apart, peak_memory
from common.devices import Compute, keep_freed_memory, resolve_compute
from envs.procgen_env import EnvConfig, ProcgenVectorEnv
from envs.rewards import EpisodeStatistics, RewardNormalizer
from maze.level.regions import CheeseRegion

ENV = EnvConfig("coinrun", "easy")
CONFIG = dataclasses.replace(load_agent_config("easy"), recurrent=True)  # 64 envs x 256 steps
VAL_INTERVAL = 10
REPEATS = 2
EPISODE_STEPS = 20  # of a good agent in easy mazes whose cheese is in its corner
PLAIN = Compute(torch.device("cpu"), bfloat16=False, channels_last=False)


def step_by_step(policy: Policy, rollout: Rollout, envs: torch.Tensor,
                 compute: Compute) -> PolicyOutput:
    """The plain training pass: one call of the policy a time step."""
    hidden, outputs = rollout.hidden[envs], []
    for frames, masks in zip(rollout.frames[:, envs], rollout.masks[:, envs]):
        output = policy(to_images(frames, compute.channels_last), hidden, masks)
        hidden = output.hidden_states
        outputs.append(output)
    return PolicyOutput(*(torch.stack([getattr(output, field.name) for output in outputs])
                          for field in dataclasses.fields(PolicyOutput)))


class Contestant:
    """One variant of training; called, it plays a rollout, updates on it, and returns the seconds
    of both."""

    def __init__(self, plain: bool, taught: bool = False):
        torch.manual_seed(0)
        self.plain, self.compute = plain, PLAIN if plain else resolve_compute("cpu")
        if not plain:
            keep_freed_memory()
        self.policy = build_policy("impala", 64, True, True)
        layout = torch.channels_last if self.compute.channels_last else torch.contiguous_format
        self.policy.to(memory_format=layout)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=5e-4, eps=1e-5)
        self.worker = Collector(ENV, self.policy, self.compute, CONFIG.n_envs, 0, 2)
        self.rollout = Rollout(CONFIG.n_steps, CONFIG.n_envs, (64, 64, 3), 64, self.compute.device)
        self.teacher = Teacher(build_policy("impala", 64, True, True), CONFIG.n_envs,
                               self.compute) if taught else None

    def __call__(self) -> tuple[float, float]:
        start = time.perf_counter()
        self.worker.play(CONFIG.n_steps, self.rollout, normalize=True)
        middle = time.perf_counter()
        guidance = None
        if self.teacher is not None:
            guidance = self.teacher.follow(self.rollout.frames, self.rollout.masks, CONFIG, 0.0)
        with (mock.patch.object(agents.ppo, "evaluate_rollout", step_by_step) if self.plain
              else contextlib.nullcontext()):
            update(self.policy, self.optimizer, self.rollout, CONFIG, self.compute,
                   torch.Generator().manual_seed(0), guidance)
        return middle - start, time.perf_counter() - middle


def measure_training() -> None:
    ours, plain = Apart(Contestant, False), Apart(Contestant, True)
    for contestant in (ours, plain):
        contestant()  # memory is taken and kernels are prepared
    times = [(*ours(), *plain()) for _ in range(REPEATS)]
    medians = [median(column) for column in zip(*times)]
    steps, seconds = CONFIG.n_envs * CONFIG.n_steps, {}
    for name, (rollout, gradient) in {"ours": medians[:2], "plain": medians[2:]}.items():
        # End to end; a validation rollout costs what a training rollout does.
        seconds[name] = rollout * (1 + 1 / VAL_INTERVAL) + gradient
        print(f"training, {name}: {steps / seconds[name]:.0f} steps/s; rollout {rollout:.1f} s, "
              f"update {gradient:.1f} s for {steps} steps")
    print(f"training, ratio: {seconds['plain'] / seconds['ours']:.2f}")
    for contestant in (ours, plain):
        contestant.close()

    env_seconds = steps / raw_steps_per_second()
    print(f"  stepping the environments is {100 * env_seconds / seconds['ours']:.1f} % of the "
          f"time, the update {100 * medians[1] / seconds['ours']:.0f} %")


def measure_kickstarting() -> None:
    """An update with a teacher of the student's size beside one without."""
    contestants = {"with a teacher": Apart(Contestant, False, True),
                   "without": Apart(Contestant, False)}
    for contestant in contestants.values():
        contestant()
    times = [[sum(contestant()) for contestant in contestants.values()] for _ in range(REPEATS)]
    medians = [median(column) for column in zip(*times)]
    steps = CONFIG.n_envs * CONFIG.n_steps
    for name, seconds in zip(contestants, medians):
        print(f"kickstarting, {name}: {steps / seconds:.0f} steps/s")
    print(f"kickstarting, ratio: {medians[1] / medians[0]:.2f}")
    for contestant in contestants.values():
        contestant.close()


def measure_edits() -> None:
    """The time of moving the cheese of every new level, as a share of that of training."""
    worlds = [ProcgenVectorEnv(EnvConfig("maze", "easy"), 64, 0, 2, edit)
              for edit in (None, CheeseRegion(5))]
    times = []
    for _ in range(20):  # nobody acts, so all levels stay new, and each look edits them again
        for world in worlds:
            start = time.perf_counter()
            world.observe()
            times.append(time.perf_counter() - start)
    edit = (median(times[1::2]) - median(times[::2])) / 64
    contestant = Apart(Contestant, False)
    contestant()
    step = median(sum(contestant()) for _ in range(REPEATS)) / (CONFIG.n_envs * CONFIG.n_steps)
    contestant.close()
    print(f"edits: {1000 * edit:.2f} ms a level; training {1000 * step:.2f} ms a step, so "
          f"{100 * edit / (EPISODE_STEPS * step):.2f} % of it with episodes of {EPISODE_STEPS} "
          "steps")


def raw_steps_per_second(steps: int = 1000, num_envs: int = 64) -> float:
    from procgen import ProcgenGym3Env
    env = ProcgenGym3Env(num=num_envs, env_name="coinrun", distribution_mode="easy",
                         use_backgrounds=False, num_threads=2, rand_seed=0)
    actions = np.random.RandomState(0).randint(0, 15, (steps, num_envs)).astype(np.int32)
    start = time.perf_counter()
    for row in actions:
        env.act(row)
        env.observe()
    return steps * num_envs / (time.perf_counter() - start)


def wrapped_steps_per_second(steps: int = 1000, num_envs: int = 64) -> float:
    env = ProcgenVectorEnv(ENV, num_envs, 0, 2)
    normalizer, statistics = RewardNormalizer(num_envs), EpisodeStatistics(num_envs)
    actions = np.random.RandomState(0).randint(0, 15, (steps, num_envs)).astype(np.int32)
    start = time.perf_counter()
    for row in actions:
        env.act(row)
        observation = env.observe()
        statistics.update(observation.rewards, observation.first)
        normalizer(observation.rewards, observation.first)
    return steps * num_envs / (time.perf_counter() - start)


def measure_wrappers() -> None:
    pairs = [(raw_steps_per_second(), wrapped_steps_per_second()) for _ in range(7)]
    raw, wrapped = (median(column) for column in zip(*pairs))
    extra = median(raw / wrapped for raw, wrapped in pairs) - 1
    print(f"environments: raw {raw:.0f} steps/s, with statistics and normalised rewards "
          f"{wrapped:.0f} steps/s ({100 * extra:.1f} % more time)")


def measure_recording() -> None:
    with tempfile.TemporaryDirectory() as folder:
        agent = Path(folder) / "model_0.pth"
        torch.manual_seed(0)
        save_agent(agent, build_policy("impala", 64, True, True), {})
        for name, more in (("without videos", ["--no_videos"]), ("with videos", [])):
            print(f"recording {name}: ", end="", flush=True)
            record.main(["--model_file", str(agent), "--logdir", f"{folder}/{name}",
                         "--num_episodes", "300", "--log_level", "error", *more])


def measure_memory() -> None:
    """Peak memory of one update at the size of `hard-rec`, in a process of its own."""
    code = "from benchmarks.agent import one_large_update; one_large_update()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)


def one_large_update() -> None:
    keep_freed_memory()
    config = dataclasses.replace(load_agent_config("hard-rec"), epoch=1)
    compute = resolve_compute("cpu")
    policy = build_policy("impala", 64, True, True).to(memory_format=torch.channels_last)
    worker = Collector(EnvConfig("coinrun", "hard"), policy, compute, config.n_envs, 0, 2)
    rollout = Rollout(config.n_steps, config.n_envs, (64, 64, 3), 64, compute.device)
    worker.play(config.n_steps, rollout, normalize=True)
    update(policy, torch.optim.Adam(policy.parameters()), rollout, config, compute,
           torch.Generator().manual_seed(0))
    print(f"memory: {peak_memory():.2f} GB at its peak with {config.n_envs} x {config.n_steps}")


def main() -> None:
    parts = {"wrappers": measure_wrappers, "training": measure_training,
             "kickstarting": measure_kickstarting, "edits": measure_edits,
             "recording": measure_recording, "memory": measure_memory}
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=parts, help="measure this part only")
    chosen = parser.parse_args().part
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    for name, measure in parts.items():
        if chosen in (None, name):
            measure()


if __name__ == "__main__":
    main()
