"""Speed and size of features, attributions, checks, failure causes and optimised starts, for the
shipped agent of CoinRun. ``benchmarks.pages`` measures the pages themselves.

    python -m benchmarks.attributions                    everything, about 40 minutes
    python -m benchmarks.attributions loop               one part, see below
    python -m benchmarks.attributions --num_frames 512   smaller: measure on 512 frames

features     feature computation on three layers
attribution  attribution of the value at each of three layers
outputs      attribution of the value and the policy's 15 outputs at block3, compared with the value
             only
export       page of the attributions of the value at three layers and of the policy at block3
demo         attribution stages of the preset demo on its small recording, and its page
loop         plain loop (one output, one node and 64 frames at a time, recomputing the layers before
             the bottleneck each time), compared with our implementation with the same nodes
causes       playing of levels with and without attribution of failures, alternately; goal: 80 % of
             the speed
checks       all checks of the value's attributions to two layers; goal: 1 000 frames in 10 minutes
starts       search for an optimised start with the shipped simulator; goal: 5 seconds

Candidates are compared within one run. Processor time is more reliable than wall time if other
processes run on the machine.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

import record
from agents.agent_file import load_agent
from agents.episodes import PlayOptions, play_episodes
from agents.hooks import cached
from agents.networks import Policy, to_images
from agents.outputs import POLICY, VALUE, Output, outputs_named
from attribution import attribute, checks, features, page
from attribution.checking.agent_checks import CHECKS
from attribution.failures.causes import attribute_failures
from attribution.integrated_gradients import Integration, LayerIntegratedGradients
from attribution.layers import Bottleneck, find_bottlenecks
from attribution.recordings import RecordedFrames, Recording, batches
from benchmarks.harness import (
    AGENT,
    SIMULATOR,
    Cost,
    cost_apart,
    measure_in_turns,
    parser_of,
    run_script,
    say,
    size_of,
)
from common.devices import Compute, resolve_compute
from envs.procgen_env import EnvConfig
from generative import optimise_start

FLOAT32 = Compute(torch.device("cpu"), bfloat16=False)
LAYERS = ("block1", "block2", "block3")
NUM_FRAMES, TRAJECTORY_STEPS, EPISODE_FRAMES = 4096, 512, 60
LOOP_FRAMES = 128  # frames for the plain loop, which is slow
NUM_LEVELS, ROUNDS, NUM_SLOTS = 256, 3, 64  # sizes of the part "causes"
CHECKED_FRAMES = 1000
NUM_STARTS = (1, 5)  # numbers of starts; the difference in cost gives the cost per start


class Scripts:
    """Runner of scripts on a recording, each in a separate process; prints their costs.

    Args:
        folder: folder for the results.
        data: folder of the recording.
    """

    def __init__(self, folder: Path, data: Path):
        self.folder, self.data = folder, data
        self._inputs = ("--agent_file", AGENT, "--data_dir", data)

    def _run(self, name: str, main: Callable, *argv: object) -> Cost:
        cost = cost_apart(functools.partial(run_script, main), *self._inputs, *argv)
        say(f"{name}: {cost}")
        return cost

    def features(self, name: str, folder: str, layers: tuple[str, ...], number: int) -> Cost:
        return self._run(f"{name}: features of {', '.join(layers)}", features.main, "--device",
                         "cpu", "--layers", *layers, "--num_observations", number, "--output_dir",
                         self.folder / folder / "features")

    def attribute(self, name: str, folder: str, trajectories: int, steps: int, *more: object,
                  output: str = "attribution") -> Cost:
        return self._run(name, attribute.main, "--device", "cpu", "--features_dir",
                         self.folder / folder / "features", "--num_trajectories", trajectories,
                         "--num_steps", steps, "--output_dir", self.folder / folder / output, *more)

    def page(self, name: str, folder: str) -> Cost:
        path = self.folder / folder
        cost = self._run(name, page.main, "--features_dir", path / "features",
                         "--attribution_dir", path / "attribution", "--output_dir", path / "page")
        say(f"{name}: {size_of(path / 'page'):.1f} MB")
        return cost

    def checks(self, name: str, folder: str, number: int, *more: object) -> Cost:
        path = self.folder / folder
        return self._run(name, checks.main, "--device", "cpu", "--features_dir", path / "features",
                         "--attribution_dir", path / "attribution", "--num_frames", number,
                         "--output_dir", path / "_".join(["checks", *map(str, more)]),
                         *(("--checks", *more) if more else ()))

    def optimise(self, number: int) -> Cost:
        return self._run(f"{number} starts", optimise_start.main, "--model_file", SIMULATOR,
                         "--interpreting_params_name", "demo", "--targets", "value", "--penalty",
                         "1", "--num_recorded", "64", "--num_starts", number, "--no_real_game",
                         "--no_videos", "--output_dir", self.folder / f"starts_{number}")


def measure_scripts(scripts: Scripts, parts: tuple[str, ...], num_frames: int) -> None:
    """Measure the parts features, attribution, outputs and export, which share features."""
    layers = LAYERS if {"features", "attribution", "export"} & set(parts) else LAYERS[-1:]
    scripts.features("features", "whole", layers, num_frames)

    def attribute_whole(name: str, *argv: str, output: str = "attribution") -> Cost:
        return scripts.attribute(name, "whole", num_frames // TRAJECTORY_STEPS, TRAJECTORY_STEPS,
                                 *argv, output=output)

    if {"attribution", "export"} & set(parts):
        for layer in LAYERS:
            attribute_whole(f"attribution of the value, {layer}", "--layers", layer)
    if "outputs" in parts:
        one, many = (attribute_whole(f"block3, {' and '.join(outputs)}", "--layers", "block3",
                                     "--outputs", *outputs, output="_".join(outputs)).cpu
                     for outputs in ((VALUE,), (VALUE, POLICY)))
        say(f"16 outputs take {many / one:.1f} times as long as one")
    if "export" in parts:
        attribute_whole("block3, policy", "--layers", "block3", "--outputs", POLICY)
        scripts.page("export", "whole")


def measure_demo(scripts: Scripts) -> None:
    """Measure the attribution stages of the preset demo, except for the recording."""
    layers = ("block2", "block3")
    total = sum(cost.cpu for cost in (
        scripts.features("demo", "demo", layers, 512),
        scripts.attribute("demo: attribution", "demo", 2, 128, "--layers", *layers),
        scripts.page("demo: page", "demo")))
    say(f"demo: {total:.0f} s of processor time in all")


def plain_loop(policy: Policy, bottleneck: Bottleneck, outputs: tuple[Output, ...],
               frames: RecordedFrames, integration: Integration) -> np.ndarray:
    """Compute the attributions of K outputs on B frames (K, B, C, H, W) with the plain loop."""
    images, entering, actions = map(torch.from_numpy,
                                    (frames.frames, frames.entering, frames.actions))
    name = bottleneck.layer.name
    module = policy.get_submodule(name)
    attributions = []
    for output in outputs:
        of_output = []
        for batch in torch.arange(len(images)).split(64):
            total = torch.zeros(())
            for place, weight in zip(*integration.nodes(integration.steps)):
                def scaled(_, inputs, activations, place=place):
                    return (place * activations.detach()).requires_grad_()

                hook = module.register_forward_hook(scaled)
                with cached(policy, [name], graph=True) as activations:
                    step = policy.step(policy.embed(to_images(images[batch])), entering[batch])
                hook.remove()
                point = activations[name]
                (gradient,) = torch.autograd.grad(output(step, actions[batch]).sum(), point)
                total = total + weight * gradient * point.detach() / place
            of_output.append(total)
        attributions.append(torch.cat(of_output).numpy())
    return np.stack(attributions)


def with_cpu_time(work: Callable[[], np.ndarray]) -> tuple[np.ndarray, float]:
    """Call a function; return its result and its processor time in seconds."""
    start = time.process_time()
    return work(), time.process_time() - start


def measure_loop(scripts: Scripts) -> None:
    policy = load_agent(AGENT)
    policy.requires_grad_(False)
    recording = Recording(scripts.data, policy, AGENT)
    frames = recording.read(recording.observations(LOOP_FRAMES, 0))
    integration = Integration(tolerance=None)
    pieces = [RecordedFrames(*(array[batch] for array in vars(frames).values()))
              for batch in batches(np.arange(len(frames.frames)))]
    totals = np.zeros(2)
    for name, of_outputs in (*((layer, (VALUE,)) for layer in LAYERS),
                             ("block3", (VALUE, POLICY))):
        (bottleneck,) = find_bottlenecks(policy, [name])
        outputs = outputs_named(of_outputs)
        attributor = LayerIntegratedGradients(policy, FLOAT32, bottleneck, outputs, integration)

        def ours(attributor=attributor, outputs=outputs) -> np.ndarray:
            return np.concatenate([attributor.attribute(
                attributor.run_prefix(piece.frames, piece.entering), piece.actions,
                np.ones(len(outputs))).values for piece in pieces], axis=1)

        ours()  # warm-up: prepares kernels
        fast, seconds = with_cpu_time(ours)
        plain, longer = with_cpu_time(functools.partial(plain_loop, policy, bottleneck, outputs,
                                                        frames, integration))
        # Single cells differ if rounding decides whether a unit is active.
        assert np.abs(fast - plain).sum() < 1e-3 * np.abs(plain).sum()
        say(f"{len(frames.frames)} frames, {len(outputs)} outputs at {name}: {seconds:.2f} s of "
            f"processor time, plain loop {longer:.2f} s, {longer / seconds:.1f} times as long")
        if len(outputs) == 1:
            totals += seconds, longer
    say(f"the value at three layers: the plain loop takes {totals[1] / totals[0]:.1f} times as "
        "long")


def measure_causes() -> None:
    policy, config = load_agent(AGENT), EnvConfig("coinrun", "hard").unseen_levels()
    play = functools.partial(
        play_episodes, policy, resolve_compute("cpu", 0, "auto"), config,
        list(enumerate(config.draw_levels(NUM_LEVELS, 0))), 0, NUM_SLOTS,
        PlayOptions(keep_frames=False))

    def rate(lengths: Callable[[], Iterator[int]]) -> float:
        """Return the environment steps per second of processor time."""
        start = time.process_time()
        return sum(lengths()) / (time.process_time() - start)

    rates = measure_in_turns({
        "evaluation": lambda: rate(lambda: (episode.length for episode in play())),
        "with causes": lambda: rate(lambda: (
            outcome.length for _, outcome in attribute_failures(config, play)))},
        ROUNDS, warmup=0)
    plain, with_causes = map(max, rates.values())
    say(f"{NUM_LEVELS} levels, steps per second of processor time: {plain:.0f}, and with causes "
        f"{with_causes:.0f}, {100 * with_causes / plain:.0f} % (goal 80 %)")


def measure_checks(scripts: Scripts, num_frames: int) -> None:
    scripts.features("checks", "checked", ("block2", "block3"), 512)
    scripts.attribute("checks: attribution", "checked", 4, num_frames // 4)
    for check in CHECKS:
        scripts.checks(f"{num_frames} frames, {check}", "checked", num_frames, check)
    scripts.checks(f"{num_frames} frames, all checks (goal {0.6 * num_frames:.0f} s)", "checked",
                   num_frames)


def measure_starts(scripts: Scripts) -> None:
    one, more = map(scripts.optimise, NUM_STARTS)
    number = NUM_STARTS[1] - NUM_STARTS[0]
    say(f"a start: {(more.seconds - one.seconds) / number:.1f} s, "
        f"{(more.cpu - one.cpu) / number:.1f} s of processor time (goal 5 s)")


PARTS = ("features", "attribution", "outputs", "export", "demo", "loop", "causes", "checks",
         "starts")


def main() -> None:
    parser = parser_of(__doc__, PARTS)
    parser.add_argument("--num_frames", type=int,
                        help=f"number of frames to measure on (default: {NUM_FRAMES}; checks: "
                             f"{CHECKED_FRAMES})")
    parser.add_argument("--data_dir", type=Path,
                        help="recording of the agent; by default a new one is made")
    args = parser.parse_args()
    parts, num_frames = (args.part,) if args.part else PARTS, args.num_frames or NUM_FRAMES
    torch.manual_seed(0)
    say(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as name:
        scripts = Scripts(Path(name), args.data_dir or Path(name) / "data")
        if args.data_dir is None and parts != ("causes",):
            cost_apart(functools.partial(run_script, record.main), "--model_file", AGENT,
                       "--distribution_mode", "hard", "--logdir", name, "--num_episodes",
                       num_frames // EPISODE_FRAMES + 40, "--no_videos", "--no_action_noise")
        if set(parts) & set(PARTS[:4]):
            measure_scripts(scripts, parts, num_frames)
        for part, measure in (
                ("demo", lambda: measure_demo(scripts)), ("loop", lambda: measure_loop(scripts)),
                ("causes", measure_causes),
                ("checks", lambda: measure_checks(scripts, args.num_frames or CHECKED_FRAMES)),
                ("starts", lambda: measure_starts(scripts))):
            if part in parts:
                measure()


if __name__ == "__main__":
    main()
