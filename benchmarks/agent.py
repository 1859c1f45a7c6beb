"""Speed of training, compared with a plain variant of the same algorithm, speed of recording, and
cost of kickstarting, hooks and scans.

The plain variant is a direct transcription of the algorithm: it computes in float32 on contiguous
tensors, runs the training pass one time step at a time, and uses the default memory settings of
the C library. Variants are measured alternately, because the speed of a machine drifts, and in
separate processes.

    python -m benchmarks.agent            everything, about fifteen minutes on two cores
    python -m benchmarks.agent training   one part: training, kickstarting, recording, hooks or scan

``hooks`` compares forward passes inside and outside a ``patched`` scope, on one thread. ``scan``
patches the 32 channels of each of four layers, one at a time, on 100 frames.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
import time
from unittest import mock

import numpy as np
import torch

import agents.ppo
import record
from agents.acting import run_policy
from agents.config import AgentConfig, load_agent_config
from agents.hooks import batch_info, patched
from agents.kickstarting import Teacher
from agents.networks import Policy, PolicyOutput, build_policy, to_images
from agents.patch import BatchInfo
from agents.ppo import Collector, Rollout, update
from benchmarks.harness import (
    AGENT,
    measure_apart,
    measure_in_turns,
    parts_to_measure,
    run_script,
    say,
    seconds_of,
)
from common.devices import Compute, keep_freed_memory, resolve_compute
from common.distributed import SINGLE, Distributed
from envs.procgen_env import EnvConfig, ProcgenVectorEnv
from interventions.patches import Zero
from interventions.scan import OUTCOMES, ScanFrames, parts_of, scan

CONFIG = dataclasses.replace(load_agent_config("easy"), recurrent=True)  # 64 envs x 256 steps
VAL_INTERVAL = 10
REPEATS = 2
PLAIN = Compute(torch.device("cpu"), bfloat16=False, channels_last=False)
FLOAT32 = Compute(torch.device("cpu"), bfloat16=False)
NUM_RECORDED = 300
HOOKED_FRAMES, HOOKED_REPEATS = 16, 150  # a batch size that is typical of playing episodes
SCANNED_FRAMES = 100
SCANNED_LAYERS = ("embedder.block2.res1.resadd", "embedder.block2.res2.resadd",
                  "embedder.block3.res1.resadd", "embedder.block3.res2.resadd")


def step_by_step(policy: Policy, rollout: Rollout, envs: torch.Tensor,
                 compute: Compute) -> PolicyOutput:
    """Run the plain training pass: one call of the policy per time step."""
    hidden, outputs = rollout.hidden[envs], []
    for frames, masks in zip(rollout.frames[:, envs], rollout.masks[:, envs]):
        output = policy(to_images(frames, compute.channels_last), hidden, masks)
        hidden = output.hidden_states
        outputs.append(output)
    return PolicyOutput(*(torch.stack([getattr(output, field.name) for output in outputs])
                          for field in dataclasses.fields(PolicyOutput)))


class Training:
    """A variant of training. A call collects a rollout, updates the policy on it, and returns both
    durations in seconds.

    Args:
        config: parameter set of the agent.
        mode: distribution mode of CoinRun.
        num_threads: number of threads of the environments.
        plain: whether to use the plain variant.
        taught: whether to train with a teacher of the student's size (kickstarting).
        world: processes that train together.
    """

    def __init__(self, config: AgentConfig, mode: str, num_threads: int, plain: bool = False,
                 taught: bool = False, world: Distributed = SINGLE):
        torch.manual_seed(0)
        self.config, self.plain, self.world = config, plain, world
        self.compute = PLAIN if plain else resolve_compute("cpu")
        if not plain:
            keep_freed_memory()

        def build() -> Policy:
            return self.compute.place(build_policy(
                config.architecture, config.hidden_state_size, config.recurrent,
                config.learned_initial_state))

        self.policy = build()
        self.teacher = Teacher(build(), config.n_envs, self.compute) if taught else None
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=5e-4, eps=1e-5)
        self.worker = Collector(EnvConfig("coinrun", mode), self.policy, self.compute,
                                config.n_envs, 0, num_threads, world=world)
        self.rollout = Rollout(config.n_steps, len(self.worker.hidden), (64, 64, 3),
                               self.policy.hidden_state_size, self.compute.device)

    def __call__(self) -> tuple[float, float]:
        start = time.perf_counter()
        self.worker.play(self.config.n_steps, self.rollout, normalize=True)
        middle = time.perf_counter()
        guidance = None
        if self.teacher is not None:
            guidance = self.teacher.follow(self.rollout.frames, self.rollout.masks, self.config, 0)
        with (mock.patch.object(agents.ppo, "evaluate_rollout", step_by_step) if self.plain
              else contextlib.nullcontext()):
            update(self.policy, self.optimizer, self.rollout, self.config, self.compute,
                   torch.Generator().manual_seed(0), guidance, self.world)
        return middle - start, time.perf_counter() - middle


def measure_training() -> None:
    """Compare the speed of training with that of the plain variant."""
    times = measure_apart({"ours": (Training, CONFIG, "easy", 2),
                           "plain": (Training, CONFIG, "easy", 2, True)}, REPEATS)
    steps, seconds = CONFIG.n_envs * CONFIG.n_steps, {}
    for name, (rollout, gradient) in times.items():
        # End to end; a validation rollout costs as much as a training rollout.
        seconds[name] = rollout * (1 + 1 / VAL_INTERVAL) + gradient
        say(f"training, {name}: {steps / seconds[name]:.0f} steps/s; rollout {rollout:.1f} s, "
            f"update {gradient:.1f} s for {steps} steps")
    say(f"training, ratio: {seconds['plain'] / seconds['ours']:.2f}")
    say(f"  stepping the environments is {100 * environment_seconds() / seconds['ours']:.1f} % of "
        f"the time, the update {100 * times['ours'][1] / seconds['ours']:.0f} %")


def environment_seconds() -> float:
    """Return the time that stepping the environments takes for one rollout, in seconds."""
    env = ProcgenVectorEnv(EnvConfig("coinrun", "easy"), CONFIG.n_envs, 0, 2)
    actions = np.random.RandomState(0).randint(0, 15, (CONFIG.n_steps, CONFIG.n_envs))

    def play() -> None:
        for step_actions in actions.astype(np.int32):
            env.act(step_actions)
            env.observe()

    return seconds_of(play)


def measure_kickstarting() -> None:
    """Compare training with and without a teacher."""
    times = measure_apart({"taught": (Training, CONFIG, "easy", 2, False, True),
                           "alone": (Training, CONFIG, "easy", 2)}, REPEATS)
    taught, alone = (CONFIG.n_envs * CONFIG.n_steps / sum(pair) for pair in times.values())
    say(f"kickstarting: {taught:.0f} steps/s with a teacher, {alone:.0f} steps/s without, ratio "
        f"{taught / alone:.2f}")


def measure_recording() -> None:
    """Measure the speed of recording, with and without videos."""
    with tempfile.TemporaryDirectory() as folder:
        for name, more in (("without videos", ["--no_videos"]), ("with videos", [])):
            print(f"recording {name}: ", end="", flush=True)
            run_script(record.main, "--agent_file", AGENT, "--logdir", f"{folder}/{name}",
                       "--num_episodes", NUM_RECORDED, "--log_level", "error", *more)


def random_frames(number: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (number, 64, 64, 3), dtype=np.uint8)


def measure_hooks() -> None:
    """Measure the cost of ``patched`` scopes per forward pass."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    policy = build_policy("impala", 256, recurrent=True, learned_initial_state=True)
    frames, hidden = random_frames(HOOKED_FRAMES), policy.initial_states(HOOKED_FRAMES)
    numbers = np.arange(HOOKED_FRAMES)
    info = BatchInfo(numbers, 0 * numbers, numbers)
    scopes = {"no scope": contextlib.nullcontext, "a scope without patches": lambda: patched(
        policy, []), "one channel patched": lambda: patched(
        policy, [Zero(SCANNED_LAYERS[0], channels=(5,))])}

    def forward(scope) -> float:
        with scope(), batch_info(policy, info):
            return seconds_of(run_policy, policy, FLOAT32, frames, hidden)

    seconds = measure_in_turns({name: functools.partial(forward, scope)
                                for name, scope in scopes.items()}, HOOKED_REPEATS)
    for name, duration in seconds.items():
        say(f"hooks, {name}: {1000 * duration:.2f} ms for {HOOKED_FRAMES} frames, "
            f"{100 * (duration / seconds['no scope'] - 1):+.1f} %")
    torch.set_num_threads(threads)


def measure_scan() -> None:
    """Measure the cost of a scan of channels."""
    policy = FLOAT32.place(build_policy("impala", 256, False, False))
    scanned = ScanFrames(random_frames(SCANNED_FRAMES), np.arange(SCANNED_FRAMES))
    value = OUTCOMES["value"]
    scan(policy, FLOAT32, parts_of(policy, SCANNED_LAYERS[:1], "layer"), scanned, value)  # warm-up
    parts = parts_of(policy, SCANNED_LAYERS, "channel")
    say(f"scan: {len(parts) * SCANNED_FRAMES} patched passes in "
        f"{seconds_of(scan, policy, FLOAT32, parts, scanned, value):.1f} s")


PARTS = {"training": measure_training, "kickstarting": measure_kickstarting,
         "recording": measure_recording, "hooks": measure_hooks, "scan": measure_scan}

if __name__ == "__main__":
    for measure in parts_to_measure(__doc__, PARTS).values():
        measure()
