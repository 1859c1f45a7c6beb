"""Time and memory of features, attributions, checks, failure causes and optimised starts, for the
shipped agent of CoinRun. ``benchmarks.pages`` measures the pages themselves.

    python -m benchmarks.attributions           everything, about 40 minutes
    python -m benchmarks.attributions loop      one part, see below

scripts      features of three layers, attribution of the value and of the policy's 15 outputs, the
             page, and each of the checks; goal for the checks: 1 000 frames in 10 minutes
loop         our implementation, compared with a plain loop over the same nodes (one node and 64
             frames at a time, recomputing the layers before the bottleneck each time)
causes       playing levels with and without attribution of failures, alternately; goal: at least
             80 % of the speed without attribution
starts       search for an optimised start with the shipped simulator; goal: 5 seconds per start

Candidates are compared within one run. Processor time is more reliable than wall time if other
processes run on the machine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from agents.agent_file import load_agent
from agents.episodes import PlayOptions, play_episodes
from agents.failures import attribute_failures
from agents.hooks import cached
from agents.networks import Policy, to_images
from agents.outputs import POLICY, VALUE, outputs_named
from attribution import attribute, checks, features, page
from attribution.checking.agent_checks import CHECKS
from attribution.integrated_gradients import Integration, LayerIntegratedGradients
from attribution.layers import find_bottlenecks
from attribution.recordings import RecordedFrames, Recording, batches
from benchmarks.harness import (
    AGENT,
    SIMULATOR,
    Cost,
    cost_apart,
    cost_of,
    measure_in_turns,
    parts_to_measure,
    recorded,
    run_script,
    say,
)
from common.devices import Compute, resolve_compute
from envs.procgen_env import EnvConfig
from generative import optimise_start

FLOAT32 = Compute(torch.device("cpu"), bfloat16=False)
LAYERS = ("block1", "block2", "block3")
NUM_EPISODES = 110  # episodes of the recording
NUM_FRAMES, TRAJECTORY_STEPS = 4096, 512
CHECKED_FRAMES = 1000
LOOP_FRAMES = 128  # frames for the plain loop, which is slow
NUM_LEVELS, ROUNDS, NUM_SLOTS = 256, 3, 64  # sizes of the part "causes"
NUM_STARTS = (1, 5)  # numbers of starts; the difference in cost gives the cost per start


def script_cost(name: str, main: Callable, *argv: object) -> Cost:
    """Run a script in a separate process, print its cost after ``name``, and return the cost."""
    cost = cost_apart(run_script, main, *argv)
    say(f"{name}: {cost}")
    return cost


def processor_time(work: Callable[[], object]) -> float:
    return cost_of(work).cpu


def measure_scripts(folder: Path) -> None:
    inputs = ("--agent_file", AGENT, "--data_dir", folder / "data", "--features_dir",
              folder / "features")
    attributions = "--attribution_dir", folder / "attribution"
    script_cost("features", features.main, *inputs[:4], "--layers", *LAYERS, "--num_observations",
                NUM_FRAMES, "--output_dir", inputs[-1], "--device", "cpu")
    for layer, output in (*((layer, VALUE) for layer in LAYERS), ("block3", POLICY)):
        script_cost(f"attribution of {output} to {layer}", attribute.main, *inputs, "--layers",
                    layer, "--outputs", output, "--num_trajectories",
                    NUM_FRAMES // TRAJECTORY_STEPS, "--num_steps", TRAJECTORY_STEPS,
                    "--output_dir", attributions[-1], "--device", "cpu")
    script_cost("page", page.main, *inputs, *attributions, "--output_dir", folder / "page")
    for check in CHECKS:
        script_cost(f"{CHECKED_FRAMES} frames, {check}", checks.main, *inputs, *attributions,
                    "--num_frames", CHECKED_FRAMES, "--checks", check, "--output_dir",
                    folder / check, "--device", "cpu")


def plain_loop(policy: Policy, layer: str, frames: RecordedFrames, integration: Integration
               ) -> np.ndarray:
    """Compute the attributions of the value on B frames with the plain loop.

    Args:
        policy: the agent.
        layer: name of the layer that the value is attributed to; its output has C channels of H x W
            cells.
        frames: the frames.
        integration: nodes and weights of the integration.

    Returns:
        Attributions (B, C, H, W).
    """
    images, entering = map(torch.from_numpy, (frames.frames, frames.entering))
    module = policy.get_submodule(layer)
    attributions = []
    for batch in torch.arange(len(images)).split(64):
        total = torch.zeros(())
        for place, weight in zip(*integration.nodes(integration.steps)):
            hook = module.register_forward_hook(
                lambda _, inputs, activations, place=place: (
                    place * activations.detach()).requires_grad_())
            with cached(policy, [layer], graph=True) as activations:
                step = policy.step(policy.embed(to_images(images[batch])), entering[batch])
            hook.remove()
            point = activations[layer]
            (gradient,) = torch.autograd.grad(step.values.sum(), point)
            total = total + weight * gradient * point.detach() / place
        attributions.append(total)
    return torch.cat(attributions).numpy()


def measure_loop(folder: Path) -> None:
    policy = load_agent(AGENT)
    policy.requires_grad_(False)
    recording = Recording(folder / "data", policy, AGENT)
    frames = recording.read(recording.observations(LOOP_FRAMES, 0))
    integration = Integration(tolerance=None)
    pieces = [RecordedFrames(*(array[batch] for array in vars(frames).values()))
              for batch in batches(np.arange(len(frames.frames)))]
    for bottleneck in find_bottlenecks(policy, [*LAYERS]):
        attributor = LayerIntegratedGradients(policy, FLOAT32, bottleneck, outputs_named((VALUE,)),
                                              integration)
        results: dict[str, np.ndarray] = {}

        def ours(attributor=attributor, results=results) -> None:
            results["ours"] = np.concatenate([attributor.attribute(
                attributor.run_prefix(piece.frames, piece.entering), piece.actions,
                np.ones(1)).values[0] for piece in pieces])

        def plain(layer=bottleneck.layer.name, results=results) -> None:
            results["plain"] = plain_loop(policy, layer, frames, integration)

        seconds = measure_in_turns({"ours": functools.partial(processor_time, ours),
                                    "plain": functools.partial(processor_time, plain)}, 1)
        # Single cells differ if rounding decides whether a unit is active.
        difference = np.abs(results["ours"] - results["plain"]).sum()
        assert difference < 1e-3 * np.abs(results["plain"]).sum()
        say(f"{len(frames.frames)} frames at {bottleneck.name}: {seconds['ours']:.2f} s of "
            f"processor time, plain loop {seconds['plain']:.2f} s, "
            f"{seconds['plain'] / seconds['ours']:.1f} times as long")


def measure_causes(_: Path) -> None:
    policy, config = load_agent(AGENT), EnvConfig("coinrun", "hard").unseen_levels()
    play = functools.partial(
        play_episodes, policy, resolve_compute("cpu", 0, "auto"), config,
        list(enumerate(config.draw_levels(NUM_LEVELS, 0))), 0, NUM_SLOTS,
        PlayOptions(keep_frames=False))
    # The levels and thus the episodes are the same.
    seconds = measure_in_turns({
        "evaluation": lambda: processor_time(lambda: list(play())),
        "with causes": lambda: processor_time(lambda: list(attribute_failures(config, play)))},
        ROUNDS, warmup=0)
    plain, with_causes = seconds.values()
    say(f"{NUM_LEVELS} levels: {plain:.1f} s of processor time, {with_causes:.1f} s with causes, "
        f"{100 * plain / with_causes:.0f} % of the speed (goal 80 %)")


def measure_starts(folder: Path) -> None:
    one, more = (script_cost(
        f"{number} starts", optimise_start.main, "--agent_file", AGENT, "--data_dir",
        folder / "data", "--model_file", SIMULATOR, "--interpreting_params_name", "demo",
        "--targets", "value", "--penalty", "1", "--num_recorded", "64", "--num_starts", number,
        "--no_real_game", "--no_videos", "--output_dir", folder / f"starts_{number}")
        for number in NUM_STARTS)
    number = NUM_STARTS[1] - NUM_STARTS[0]
    say(f"a start: {(more.seconds - one.seconds) / number:.1f} s, "
        f"{(more.cpu - one.cpu) / number:.1f} s of processor time (goal 5 s)")


PARTS = {"scripts": measure_scripts, "loop": measure_loop, "causes": measure_causes,
         "starts": measure_starts}


if __name__ == "__main__":
    selected = parts_to_measure(__doc__, PARTS)
    with recorded(NUM_EPISODES, "--no_action_noise") as data:
        for measure in selected.values():
            measure(data)
