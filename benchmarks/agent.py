"""Speed of training and recording, compared with a plain variant of the same algorithm, and cost of
hooks.

The plain variant is a direct transcription of the algorithm: it computes in float32 on contiguous
tensors, runs the training pass one time step at a time, and uses the default memory settings of
the C library. Candidates are measured alternately, because the speed of a machine drifts, and in
separate processes.

    python -m benchmarks.agent            everything, about fifteen minutes on two cores
    python -m benchmarks.agent wrappers   one part: wrappers, training, kickstarting, edits,
                                          recording, memory, hooks or scan

``hooks`` compares forward passes with and without scopes of patches, on one thread. ``scan``
patches each of 32 channels of four layers on 100 frames; for comparison, one layer is also scanned
with full passes, which recompute the layers before the patched one each time.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from agents.acting import run_policy
from agents.agent_file import save_agent
from agents.config import load_agent_config
from agents.hooks import batch_info, patched
from agents.kickstarting import Teacher
from agents.layers import all_layers
from agents.networks import Policy, PolicyOutput, build_policy, to_images
from agents.patch import BatchInfo
from agents.ppo import Collector, Rollout, update
from benchmarks.harness import (
    Candidate,
    cost_apart,
    cost_of,
    measure_in_turns,
    medians,
    run_parts,
    run_script,
    say,
)
from common.devices import Compute, keep_freed_memory, resolve_compute
from envs.procgen_env import EnvConfig, ProcgenVectorEnv
from envs.rewards import EpisodeStatistics, RewardNormalizer
from interventions.patches import Zero
from interventions.scan import ScanFrames, parts_of, scan, value
from maze.level.regions import CheeseRegion

ENV = EnvConfig("coinrun", "easy")
CONFIG = dataclasses.replace(load_agent_config("easy"), recurrent=True)  # 64 envs x 256 steps
STEPS = CONFIG.n_envs * CONFIG.n_steps
VAL_INTERVAL = 10
REPEATS = 2
EPISODE_STEPS = 20  # episode length of a good agent in easy mazes with the cheese in the corner
PLAIN = Compute(torch.device("cpu"), bfloat16=False, channels_last=False)
FLOAT32 = Compute(torch.device("cpu"), bfloat16=False)
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
        plain: whether to use the plain variant.
        taught: whether to train with a teacher (kickstarting).
    """

    def __init__(self, plain: bool, taught: bool = False):
        torch.manual_seed(0)
        self.plain, self.compute = plain, PLAIN if plain else resolve_compute("cpu")
        if not plain:
            keep_freed_memory()
        self.policy = self.compute.place(build_policy("impala", 64, True, True))
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


def training_times(**variants: tuple) -> dict[str, tuple[float, float]]:
    """Measure the median duration of rollout and update of variants of training, in seconds.

    Args:
        variants: arguments of ``Training`` by name.
    """
    candidates = {name: Candidate(Training, *args) for name, args in variants.items()}
    times = measure_in_turns(candidates, REPEATS)
    for candidate in candidates.values():
        candidate.close()
    return {name: (median(rollout for rollout, _ in of_variant),
                   median(gradient for _, gradient in of_variant))
            for name, of_variant in times.items()}


def measure_training() -> None:
    times, seconds = training_times(ours=(False,), plain=(True,)), {}
    for name, (rollout, gradient) in times.items():
        # End to end; a validation rollout costs as much as a training rollout.
        seconds[name] = rollout * (1 + 1 / VAL_INTERVAL) + gradient
        say(f"training, {name}: {STEPS / seconds[name]:.0f} steps/s; rollout {rollout:.1f} s, "
            f"update {gradient:.1f} s for {STEPS} steps")
    say(f"training, ratio: {seconds['plain'] / seconds['ours']:.2f}")
    environments = STEPS / raw_steps_per_second()
    say(f"  stepping the environments is {100 * environments / seconds['ours']:.1f} % of the time, "
        f"the update {100 * times['ours'][1] / seconds['ours']:.0f} %")


def measure_kickstarting() -> None:
    """Compare training with and without a teacher of the student's size."""
    seconds = {name: sum(times) for name, times in training_times(
        taught=(False, True), alone=(False,)).items()}
    say(f"kickstarting, with a teacher: {STEPS / seconds['taught']:.0f} steps/s")
    say(f"kickstarting, without: {STEPS / seconds['alone']:.0f} steps/s")
    say(f"kickstarting, ratio: {seconds['alone'] / seconds['taught']:.2f}")


def measure_edits() -> None:
    """Measure the time of moving the cheese in every new level, as a share of the training time."""
    worlds = {name: ProcgenVectorEnv(EnvConfig("maze", "easy"), 64, 0, 2, edit)
              for name, edit in (("plain", None), ("edited", CheeseRegion(5)))}
    # No action is taken, so all levels remain new, and each observation edits them again.
    times = medians(measure_in_turns(
        {name: lambda world=world: cost_of(world.observe).seconds
         for name, world in worlds.items()}, 20, warmup=0))
    edit = (times["edited"] - times["plain"]) / 64
    step = sum(training_times(ours=(False,))["ours"]) / STEPS
    say(f"edits: {1000 * edit:.2f} ms per level; training {1000 * step:.2f} ms per step, so "
        f"{100 * edit / (EPISODE_STEPS * step):.2f} % of it with episodes of {EPISODE_STEPS} steps")


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
    rates = measure_in_turns({"raw": raw_steps_per_second, "wrapped": wrapped_steps_per_second}, 7,
                             warmup=0)
    extra = median(raw / wrapped for raw, wrapped in zip(*rates.values())) - 1
    raw, wrapped = medians(rates).values()
    say(f"environments: raw {raw:.0f} steps/s, with statistics and normalised rewards "
        f"{wrapped:.0f} steps/s ({100 * extra:.1f} % more time)")


def measure_recording() -> None:
    with tempfile.TemporaryDirectory() as folder:
        agent = Path(folder) / "model_0.pth"
        torch.manual_seed(0)
        save_agent(agent, build_policy("impala", 64, True, True), {})
        for name, more in (("without videos", ["--no_videos"]), ("with videos", [])):
            print(f"recording {name}: ", end="", flush=True)
            run_script(record.main, "--model_file", agent, "--logdir", f"{folder}/{name}",
                       "--num_episodes", "300", "--log_level", "error", *more)


def measure_memory() -> None:
    """Measure the peak memory of one update with the parameter set `hard-rec`."""
    config = load_agent_config("hard-rec")
    say(f"memory: {cost_apart(one_large_update).memory:.2f} GB at its peak with {config.n_envs} x "
        f"{config.n_steps}")


def one_large_update() -> None:
    keep_freed_memory()
    config = dataclasses.replace(load_agent_config("hard-rec"), epoch=1)
    compute = resolve_compute("cpu")
    policy = compute.place(build_policy("impala", 64, True, True))
    worker = Collector(EnvConfig("coinrun", "hard"), policy, compute, config.n_envs, 0, 2)
    rollout = Rollout(config.n_steps, config.n_envs, (64, 64, 3), 64, compute.device)
    worker.play(config.n_steps, rollout, normalize=True)
    update(policy, torch.optim.Adam(policy.parameters()), rollout, config, compute,
           torch.Generator().manual_seed(0))


def random_frames(number: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (number, 64, 64, 3), dtype=np.uint8)


def measure_hooks() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy = build_policy("impala", 256, recurrent=True, learned_initial_state=True)
    frames, hidden = random_frames(HOOKED_FRAMES), policy.initial_states(HOOKED_FRAMES)
    numbers = np.arange(HOOKED_FRAMES)
    info, layer, never = BatchInfo(numbers, 0 * numbers, numbers), SCANNED_LAYERS[0], (1000, None)
    patches = {"no scope": None, "a scope without patches": [],
               "one patch, not in force": [Zero(layer, steps=never)],
               "a patch on every layer, none in force": [
                   Zero(layer.name, steps=never) for layer in all_layers(policy)],
               "one channel patched": [Zero(layer, channels=(5,))]}

    def forward(of_scope: list | None) -> float:
        scope = contextlib.nullcontext() if of_scope is None else patched(policy, of_scope)
        with scope, batch_info(policy, info):
            return cost_of(run_policy, policy, FLOAT32, frames, hidden).cpu

    times = measure_in_turns({name: lambda of_scope=of_scope: forward(of_scope)
                              for name, of_scope in patches.items()}, HOOKED_REPEATS)
    plain = median(times["no scope"])
    for name, of_scope in times.items():
        ratios = [a / b - 1 for a, b in zip(of_scope, times["no scope"])]
        say(f"hooks, {name}: {1000 * median(of_scope):.2f} ms for {HOOKED_FRAMES} frames, "
            f"{100 * median(ratios):+.1f} % of a pass outside ({1000 * plain:.2f} ms)")
    torch.set_num_threads(threads)


def measure_scan() -> None:
    torch.manual_seed(0)
    policy = FLOAT32.place(build_policy("impala", 256, False, False))
    frames = random_frames(SCANNED_FRAMES)
    scanned = ScanFrames(frames, np.arange(SCANNED_FRAMES))
    scan(policy, FLOAT32, parts_of(policy, SCANNED_LAYERS[:1], "layer"), scanned, value)  # warm-up
    total = 0.0
    for layer in SCANNED_LAYERS:
        parts = parts_of(policy, [layer], "channel")
        cost = cost_of(scan, policy, FLOAT32, parts, scanned, value)
        total += cost.seconds
        say(f"scan, {layer}: {len(parts) * SCANNED_FRAMES} patched passes in {cost}")
    say(f"scan, all four layers: {total:.2f} s")
    images, hidden = to_images(torch.from_numpy(frames)), policy.initial_states(len(frames))

    @torch.no_grad()
    def full_passes() -> None:
        for part in parts_of(policy, SCANNED_LAYERS[:1], "channel"):
            assert part.channel is not None
            with patched(policy, [Zero(part.layer, channels=(part.channel,))]):
                policy.step(policy.embed(images), hidden)

    say(f"scan, {SCANNED_LAYERS[0]}, full passes: {cost_of(full_passes)}")


PARTS = {"wrappers": measure_wrappers, "training": measure_training,
         "kickstarting": measure_kickstarting, "edits": measure_edits,
         "recording": measure_recording, "memory": measure_memory, "hooks": measure_hooks,
         "scan": measure_scan}

if __name__ == "__main__":
    run_parts(__doc__, PARTS)
