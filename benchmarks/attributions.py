"""Speed and size of features, attributions and their page: the shipped agent of CoinRun, in
float32. ``benchmarks.attribution_page`` measures the page itself.

    python -m benchmarks.attributions                    everything, about 20 minutes
    python -m benchmarks.attributions loop               one part: features, attribution, outputs,
                                                        export, demo or loop
    python -m benchmarks.attributions --num_frames 512   in small: times are of as many frames

``features`` and ``attribution`` are the scripts on three layers, with the memory that they took.
``outputs``: the value and 15 outputs of the policy at block3, beside the value alone. ``export``:
the page of the value at three layers and the policy at block3. ``demo``: what the preset demo does
with its small recording, and its page. ``loop``: a
plain loop (one output, one node and 64 frames at a time, with the part before the layer computed
again at each) beside ours with as many nodes, on three layers and, for 16 outputs, on block3. Both
are measured in one run; processor time says more than wall time where other work is done beside it.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import record
from agents.agent_file import load_agent
from agents.hooks import cached
from agents.networks import Policy, to_images
from agents.outputs import POLICY, VALUE, Output, outputs_named
from attribution import attribute, features
from attribution import page as attribution_page
from attribution.integrated_gradients import Integration, LayerIntegratedGradients
from attribution.layers import Bottleneck, find_bottlenecks
from attribution.recordings import RecordedFrames, Recording, batches
from benchmarks.measuring import Apart, peak_memory
from common.devices import Compute

AGENT = Path("pretrained/coinrun_hard/model.pth")
FLOAT32 = Compute(torch.device("cpu"), bfloat16=False)
LAYERS = ("block1", "block2", "block3")
NUM_FRAMES, STEPS_OF_A_TRAJECTORY, FRAMES_AN_EPISODE = 4096, 512, 60
LOOP_FRAMES = 128  # on which the plain loop is measured, since it takes long
PARTS = ("features", "attribution", "outputs", "export", "demo", "loop")
SCRIPTS = {"features": features, "attribution": attribute, "page": attribution_page}


def run(module: str, arguments: list[str]) -> tuple[float, float, float]:
    """Seconds, processor seconds and gigabytes of a script."""
    start, cpu = time.perf_counter(), time.process_time()
    status = SCRIPTS[module].main(arguments)
    assert status == 0, f"{module} ended with {status}"
    return time.perf_counter() - start, time.process_time() - cpu, peak_memory()


def apart(module: str, arguments: list[str]) -> tuple[float, float, float]:
    """The same in a process of its own."""
    work = Apart(functools.partial, run)
    try:
        return work(module, arguments)
    finally:
        work.close()


def measure_script(name: str, module: str, arguments: list[str]) -> float:
    seconds, cpu, memory = apart(module, arguments)
    print(f"{name}: {seconds:.0f} s, {cpu:.0f} s of processor time, {memory:.1f} GB", flush=True)
    return cpu


def measure_page(name: str, agent: list[str], folder: Path) -> float:
    """Export the page of the features and attributions in a folder; returns processor seconds."""
    cpu = measure_script(name, "page", [
        *agent, "--features_dir", str(folder / "features"), "--attribution_dir",
        str(folder / "attribution"), "--output_dir", str(folder / "page")])
    size = sum(path.stat().st_size for path in (folder / "page").rglob("*") if path.is_file())
    print(f"{name}: {size / 1e6:.1f} MB", flush=True)
    return cpu


def measure_demo(agent: list[str], folder: Path) -> None:
    """The attribution stages of the preset demo, but for the recording."""
    layers = ["--layers", "block2", "block3"]
    total = measure_script("demo: features", "features", [
        *agent, "--device", "cpu", *layers, "--num_observations", "512", "--output_dir",
        str(folder / "features")])
    total += measure_script("demo: attribution", "attribution", [
        *agent, "--device", "cpu", *layers, "--features_dir", str(folder / "features"),
        "--num_trajectories", "2", "--num_steps", "128", "--output_dir",
        str(folder / "attribution")])
    total += measure_page("demo: page", agent, folder)
    print(f"demo: {total:.0f} s of processor time in all", flush=True)


def plain_loop(policy: Policy, bottleneck: Bottleneck, outputs: tuple[Output, ...],
               rows: RecordedFrames,
               integration: Integration) -> np.ndarray:
    """Attributions (K, B, C, H, W) by the plain loop."""
    frames, entering, actions = map(torch.from_numpy, (rows.frames, rows.entering, rows.actions))
    module = policy.get_submodule(bottleneck.layer.name)
    found = []
    for output in outputs:
        of_output = []
        for some in torch.arange(len(frames)).split(64):
            total = 0
            for place, weight in zip(*integration.nodes(integration.steps)):
                def scaled(_, inputs, activations, place=place):
                    return (place * activations.detach()).requires_grad_()

                hook = module.register_forward_hook(scaled)
                with cached(policy, [bottleneck.layer.name], graph=True) as kept:
                    run = policy.step(policy.embed(to_images(frames[some])), entering[some])
                hook.remove()
                point = kept[bottleneck.layer.name]
                (gradient,) = torch.autograd.grad(output(run, actions[some]).sum(), point)
                total = total + weight * gradient * point.detach() / place
            of_output.append(total)
        found.append(torch.cat(of_output).numpy())
    return np.stack(found)


def measured(work: Callable[[], np.ndarray]) -> tuple[np.ndarray, float]:
    """The result of some work, and its processor seconds."""
    start = time.process_time()
    return work(), time.process_time() - start


def measure_loop(data: Path) -> None:
    policy = load_agent(AGENT)
    policy.requires_grad_(False)
    recording = Recording(data, policy, AGENT)
    rows = recording.read(recording.observations(LOOP_FRAMES, 0))
    integration = Integration(tolerance=None)
    totals = np.zeros(2)
    for name, asked in (*((layer, (VALUE,)) for layer in LAYERS), ("block3", (VALUE, POLICY))):
        (bottleneck,) = find_bottlenecks(policy, [name])
        outputs = outputs_named(asked)
        attributor = LayerIntegratedGradients(policy, FLOAT32, bottleneck, outputs, integration)
        pieces = [RecordedFrames(*(each[some] for each in vars(rows).values()))
                  for some in batches(np.arange(len(rows.frames)))]

        def ours(attributor=attributor, pieces=pieces, outputs=outputs) -> np.ndarray:
            return np.concatenate([attributor.attribute(
                attributor.run_prefix(piece.frames, piece.entering), piece.actions,
                np.ones(len(outputs))).values for piece in pieces], axis=1)

        ours()  # kernels are prepared
        fast, seconds = measured(ours)
        plain, longer = measured(lambda bottleneck=bottleneck, outputs=outputs: plain_loop(
            policy, bottleneck, outputs, rows, integration))
        # Where rounding decides whether a unit is active, single cells differ.
        assert np.abs(fast - plain).sum() < 1e-3 * np.abs(plain).sum()
        print(f"{len(rows.frames)} frames, {len(outputs)} outputs at {name}: {seconds:.2f} s of "
              f"processor time, plain loop {longer:.2f} s, {longer / seconds:.1f} times as long",
              flush=True)
        if len(outputs) == 1:
            totals += seconds, longer
    print(f"the value at three layers: the plain loop takes {totals[1] / totals[0]:.1f} times as "
          "long", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=PARTS, help="all of them if not given")
    parser.add_argument("--num_frames", type=int, default=NUM_FRAMES)
    parser.add_argument("--data_dir", type=Path,
                        help="recording of the agent; one is made if not given")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = args.data_dir or folder / "data"
        if args.data_dir is None:
            assert record.main(["--model_file", str(AGENT), "--distribution_mode", "hard",
                                "--logdir", name, "--num_episodes",
                                str(args.num_frames // FRAMES_AN_EPISODE + 40), "--no_videos",
                                "--no_action_noise"]) == 0
        inputs = ["--agent_file", str(AGENT), "--data_dir", str(data)]
        agent = [*inputs, "--device", "cpu"]
        trajectories = ["--features_dir", str(folder / "features"), "--num_trajectories",
                        str(args.num_frames // STEPS_OF_A_TRAJECTORY), "--num_steps",
                        str(STEPS_OF_A_TRAJECTORY)]
        wanted = PARTS if args.part is None else (args.part,)
        if set(wanted) & {"features", "attribution", "outputs", "export"}:
            layers = LAYERS if set(wanted) - {"outputs", "demo", "loop"} else LAYERS[-1:]
            measure_script(f"features of {', '.join(layers)}", "features", [
                *agent, "--num_observations", str(args.num_frames), "--output_dir",
                str(folder / "features"), "--layers", *layers])
        if set(wanted) & {"attribution", "export"}:
            for layer in LAYERS:
                measure_script(f"attribution of the value, {layer}", "attribution", [
                    *agent, *trajectories, "--layers", layer, "--output_dir",
                    str(folder / "attribution")])
        if "outputs" in wanted:
            one, many = (measure_script(f"block3, {' and '.join(outputs)}", "attribution", [
                *agent, *trajectories, "--layers", "block3", "--outputs", *outputs, "--output_dir",
                str(folder / "_".join(outputs))]) for outputs in ((VALUE,), (VALUE, POLICY)))
            print(f"16 outputs take {many / one:.1f} times as long as one", flush=True)
        if "export" in wanted:
            measure_script("block3, policy", "attribution", [
                *agent, *trajectories, "--layers", "block3", "--outputs", POLICY, "--output_dir",
                str(folder / "attribution")])
            measure_page("export", inputs, folder)
        if "demo" in wanted:
            measure_demo(inputs, folder / "demo")
        if "loop" in wanted:
            measure_loop(data)


if __name__ == "__main__":
    main()
