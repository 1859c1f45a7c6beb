"""Speed of the simulator's training and data reading, compared with a plain variant.

The plain variant is a direct transcription of the algorithm: it computes in float32 on contiguous
tensors, one time step at a time, and uses the default memory settings of the C library. The
agreement of both variants is checked. They are measured alternately, because the speed of a machine
drifts, and in separate processes.

    python -m benchmarks.simulator           everything, about three minutes on two cores
    python -m benchmarks.simulator reading   one part: training, architectures, reading, memory
                                             or following
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import torch
from torch import Tensor

import generative.networks
import record
from agents.provenance import agent_sha256
from benchmarks.harness import (
    AGENT,
    Candidate,
    cost_apart,
    cost_of,
    measure_in_turns,
    medians,
    run_parts,
    run_script,
    say,
    seconds_of,
)
from common.devices import Compute, keep_freed_memory, resolve_compute
from common.parameters import ParameterSet
from generative.batches import AlignedBatch, align
from generative.config import SimulatorConfig, TrainingConfig
from generative.dataset import RolloutDataset, Windows
from generative.losses import LossScales, SimulatorLosses, measure, simulator_losses
from generative.networks import LatentSampler
from generative.runs import PROGRESS_NAME, SimulatorRunSettings
from generative.simulator import Simulation, Simulator, stack
from generative.training import SimulatorTraining

NUM_EPISODES = 60
NUM_STEPS = 32
BATCH_SIZES = (16, 2)
MEMORY_LIMIT = 12  # GB for a batch of 28 windows of 28 steps
REPEATS = 5
PLAIN = Compute(torch.device("cpu"), bfloat16=False, channels_last=False)


def settings_for(parameter_set: str, recording: Path, batch_size: int | None = None,
                 num_steps: int | None = None, **changes) -> SimulatorRunSettings:
    """Return the settings of a training run on a recording, without saving before the end.

    Args:
        batch_size, num_steps: values that override the parameter set.
        changes: further settings to replace.
    """
    overrides = {"batch_size": batch_size, "num_sim_steps": num_steps}
    parameters = ParameterSet(parameter_set, {
        "gen_model.save_interval": 10**9,
        **{f"gen_model.{key}": value for key, value in overrides.items() if value}})
    settings = SimulatorRunSettings("benchmark", str(AGENT), agent_sha256(AGENT), "",
                                    str(recording / "data"), 0, "", 0,
                                    parameters.get(SimulatorConfig),
                                    parameters.get(TrainingConfig), LossScales())
    return dataclasses.replace(settings, **changes)


def plain_transposed_conv(layer: torch.nn.ConvTranspose2d, x: Tensor) -> Tensor:
    return layer(x[:, :, None, None])


def as_plain():
    """Return a context that computes the decoder's first layer as a transposed convolution."""
    return mock.patch.object(generative.networks, "_transposed_conv_of_one_pixel",
                             plain_transposed_conv)


def step_by_step(simulator: Simulator, batch: AlignedBatch, draw: LatentSampler) -> Simulation:
    """Run the plain training pass: one time step after another."""
    predicted = simulator.start_from(simulator.encode(batch.initial_images), draw)
    start = dataclasses.replace(predicted, agent_hidden=batch.first_hidden)
    with as_plain():
        steps = simulator.imagine(start, draw, len(batch.actions),
                                  true_actions=batch.actions, true_images=batch.images)
    return stack(predicted, steps)


class PlainTraining(SimulatorTraining):
    """A training run with the plain training pass and an unfused optimiser."""

    def __init__(self, folder: Path, settings: SimulatorRunSettings):
        super().__init__(folder, settings, PLAIN)
        self.optimizer = torch.optim.Adam(self.simulator.trainable_parameters(),
                                          lr=settings.training.lr, foreach=False)

    def _forward(self, windows: AlignedBatch, generator: torch.Generator, num: int
                 ) -> tuple[SimulatorLosses, dict[str, Tensor]]:
        simulation = step_by_step(self.simulator, windows, LatentSampler("sample", generator))
        losses = simulator_losses(simulation, windows, self.settings.simulator,
                                  self.settings.loss_scales)
        return losses, measure(simulation, losses, simulation.start.bottleneck_vec)


def some_batch(dataset: RolloutDataset, batch_size: int) -> Windows:
    return dataset.batch(np.random.default_rng(0).permutation(len(dataset))[:batch_size])


class Training:
    """A variant of training; a call with a batch size takes a step and returns its seconds."""

    def __init__(self, is_plain: bool, recording: Path, folder: Path):
        settings = settings_for("defaults", recording, 16, NUM_STEPS)
        if is_plain:
            self.run: SimulatorTraining = PlainTraining(folder, settings)
        else:
            keep_freed_memory()
            self.run = SimulatorTraining(folder, settings, resolve_compute("cpu"))
        self.windows = {size: some_batch(self.run.dataset, size) for size in BATCH_SIZES}

    def __call__(self, size: int) -> float:
        return cost_of(self.run.one_batch, self.windows[size]).seconds


def measure_training(recording: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        candidates = {name: Candidate(Training, name == "plain", recording, Path(folder) / name)
                      for name in ("ours", "plain")}
        seconds = {}
        for size in BATCH_SIZES:
            seconds[size] = medians(measure_in_turns(candidates, REPEATS, size))
            report_training(size, **seconds[size])
        for candidate in candidates.values():
            candidate.close()
        training = Training(False, recording, Path(folder) / "shares")
        simulator = training.run.simulator
        check_same_mathematics(simulator, align(training.windows[2], simulator.config))
        report_shares(training.run, align(training.windows[16], simulator.config),
                      seconds[16]["ours"])


ARCHITECTURE_SETS = {"vector": "demo", "spatial": "spatial"}  # parameter set of each architecture
ARCHITECTURE_BATCH = (16, 16)  # windows and steps
IMAGINED_STEPS = 32


class Architecture:
    """An architecture of the simulator; a call returns the seconds of its work.

    A call with 0 takes a training step; a call with another number imagines one sample of so many
    steps on one thread.
    """

    def __init__(self, name: str, recording: Path, folder: Path):
        keep_freed_memory()
        settings = settings_for(ARCHITECTURE_SETS[name], recording, *ARCHITECTURE_BATCH)
        self.run = SimulatorTraining(folder, settings, resolve_compute("cpu"))
        self.windows = some_batch(self.run.dataset, ARCHITECTURE_BATCH[0])

    def __call__(self, imagined_steps: int) -> float:
        work = functools.partial(self._imagine, imagined_steps) if imagined_steps else (
            functools.partial(self.run.one_batch, self.windows))
        return cost_of(work).seconds

    @torch.no_grad()
    def _imagine(self, num_steps: int) -> None:
        simulator, draw = self.run.simulator, LatentSampler("mode")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        with self.run.compute.autocast():
            simulator.imagine(simulator.start_from(simulator.random_vectors(1), draw), draw,
                              num_steps)
        torch.set_num_threads(threads)


def measure_architectures(recording: Path) -> None:
    """Compare training and imagination of the two architectures."""
    with tempfile.TemporaryDirectory() as folder:
        candidates = {name: Candidate(Architecture, name, recording, Path(folder) / name)
                      for name in ARCHITECTURE_SETS}
        for what, steps, frames in (("training", 0, math.prod(ARCHITECTURE_BATCH)),
                                    ("imagination on one core", IMAGINED_STEPS, IMAGINED_STEPS)):
            rates = {name: frames / seconds for name, seconds in medians(
                measure_in_turns(candidates, REPEATS, steps)).items()}
            say(f"architectures, {what}: " + ", ".join(
                f"{name} (set {ARCHITECTURE_SETS[name]}) {rate:.0f} frames/s"
                for name, rate in rates.items())
                + f", ratio {rates['spatial'] / rates['vector']:.2f}")
        for candidate in candidates.values():
            candidate.close()


def check_same_mathematics(simulator: Simulator, batch: AlignedBatch) -> None:
    """Check that both training passes give the same losses, in float32 without sampling."""
    draw = LatentSampler("mode")
    with torch.no_grad():
        ours, plain = (simulator_losses(simulation, batch, simulator.config).means()
                       for simulation in (simulator(batch, draw),
                                          step_by_step(simulator, batch, draw)))
    for name, loss in ours.items():
        torch.testing.assert_close(loss, plain[name], rtol=1e-4, atol=1e-5,
                                   msg=functools.partial("loss of {}: {}".format, name))
    largest = max(float((loss - plain[name]).abs() / plain[name].abs().clamp(min=1e-6))
                  for name, loss in ours.items())
    say(f"training: losses of both variants agree to {largest:.1e} in float32")


def report_training(batch_size: int, ours: float, plain: float) -> None:
    frames = batch_size * NUM_STEPS
    say(f"training, batch {batch_size} x {NUM_STEPS}: ours ({resolve_compute('cpu').precision}) "
        f"{frames / ours:.0f} frames/s ({ours:.2f} s per step), plain {frames / plain:.0f} "
        f"frames/s ({plain:.2f} s), ratio {plain / ours:.2f}")


def report_shares(run: SimulatorTraining, batch: AlignedBatch, seconds: float) -> None:
    """Print the share of each part in the time of a training step, forward plus backward."""
    simulator, draw = run.simulator, LatentSampler("sample")
    frames = batch.images.flatten(0, 1)  # (T*B, C, H, W)
    with torch.no_grad(), run.compute.autocast():
        simulation = simulator(batch, draw)
    images = simulation.images.requires_grad_()
    simulation.raw_images.requires_grad_()

    def cell() -> Tensor:
        h, z = simulation.start.env_h, simulation.start.z
        embedding_inputs = simulator.cell.embedding_input(embeddings).unflatten(
            0, batch.actions.shape)
        total = torch.zeros(())
        for action_input, embedding_input in zip(
                simulator.cell.action_input(simulation.actions), embedding_inputs):
            h = simulator.cell.advance(z, action_input, h)
            z = draw(simulator.cell.posterior_logits(h, embedding_input))
            total = total + simulator.cell.prior_logits(h).sum() + z.sum()
        return total

    with torch.no_grad(), run.compute.autocast():
        embeddings = simulator.frame_embedding(frames)
    parts: dict[str, Callable[[], Tensor]] = {
        "encoder": lambda: simulator.encode(batch.initial_images).sum(),
        "frame embedding": lambda: simulator.frame_embedding(frames).sum(),
        "cell": cell,
        "decoder": lambda: sum(output.sum() for output in simulator.decoder(
            simulation.env_h.flatten(0, 1), simulation.z.flatten(0, 1))),
        "agent": lambda: simulator.agent.sequence(images,
                                                  batch.first_hidden).hidden_states.sum(),
        "losses": lambda: simulator_losses(simulation, batch, simulator.config).total}
    shares = {name: seconds_of(functools.partial(_forward_and_backward, run, part))
              for name, part in parts.items()}
    shares["optimiser"] = seconds_of(lambda: _optimise(run))
    shares["the rest"] = max(seconds - sum(shares.values()), 0)
    text = ", ".join(f"{name} {100 * part / seconds:.0f} %" for name, part in shares.items())
    say(f"  where the time goes: {text}")


def _forward_and_backward(run: SimulatorTraining, part: Callable[[], Tensor]) -> None:
    run.optimizer.zero_grad(set_to_none=True)
    with run.compute.autocast():
        scalar = part()
    scalar.backward()


def _optimise(run: SimulatorTraining) -> None:
    for parameter in run.simulator.trainable_parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.nn.utils.clip_grad_norm_(run.simulator.trainable_parameters(),
                                   run.settings.training.gradient_norm_limit)
    run.optimizer.step()


def measure_reading(recording: Path) -> None:
    dataset = RolloutDataset(recording / "data", 3, NUM_STEPS)
    order = np.random.default_rng(0).permutation(len(dataset))
    batches = [order[begin:begin + 16] for begin in range(0, min(len(order), 1600) - 15, 16)]

    def read() -> None:
        for numbers in batches:
            dataset.batch(numbers)

    read()  # warm-up: brings the files into the cache
    windows = 16 * len(batches)
    say(f"reading: {windows / seconds_of(read):.0f} windows/s in one process")


def measure_memory(recording: Path) -> None:
    """Measure the peak memory of training on batches of 28 windows of 28 steps.

    Raises:
        SystemExit: if it reaches MEMORY_LIMIT.
    """
    peak = cost_apart(large_steps, recording).memory
    say(f"memory: {peak:.2f} GB at its peak with batch 28 x 28, of {MEMORY_LIMIT} allowed")
    if peak >= MEMORY_LIMIT:
        raise SystemExit("too much memory")


def large_steps(recording: Path) -> None:
    """Take two training steps; only the second includes the optimiser's state in its memory."""
    keep_freed_memory()
    settings = settings_for("defaults", recording, 28, 28)
    with tempfile.TemporaryDirectory() as folder:
        run = SimulatorTraining(Path(folder), settings, resolve_compute("cpu"))
        for _ in range(2):
            run.one_batch(some_batch(run.dataset, 28))
        if run.log is not None:
            run.log.close()


def measure_following(recording: Path) -> None:
    """Compare the loss curves of training in bfloat16 and in float32."""
    curves = {}
    for bfloat16 in (False, True):
        compute = Compute(torch.device("cpu"), bfloat16)
        settings = settings_for("demo", recording, precision=compute.precision, max_batches=60)
        with tempfile.TemporaryDirectory() as folder:
            run = SimulatorTraining(Path(folder), settings, compute)
            run.train()
            curves[compute.precision] = pd.read_csv(Path(folder) / PROGRESS_NAME)["loss"]
    for precision, losses in curves.items():
        say(f"following, {precision}: mean loss of ten batches each "
            + ", ".join(f"{loss:.1f}" for loss in losses))
    difference = (curves["bfloat16"] / curves["float32"] - 1).abs().max()
    say(f"following: largest difference {100 * difference:.2f} %")


@contextlib.contextmanager
def recorded(*more: str) -> Iterator[tuple[Path]]:
    """Yield a folder with episodes of the shipped agent."""
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(None):
            run_script(record.main, "--model_file", AGENT, "--logdir", folder, "--num_episodes",
                       NUM_EPISODES, "--no_videos", "--log_level", "error", *more)
        yield (Path(folder),)


PARTS = {"training": measure_training, "architectures": measure_architectures,
         "reading": measure_reading, "memory": measure_memory, "following": measure_following}

if __name__ == "__main__":
    run_parts(__doc__, PARTS, recorded("--distribution_mode", "hard", "--positions"))
