"""Speed of the simulator's training, compared with a plain variant.

The plain variant is a direct transcription of the algorithm: it computes in float32 on contiguous
tensors, one time step at a time, and uses the default memory settings of the C library. The
agreement of both variants is checked. The variants are measured alternately, because the speed of a
machine drifts, and in separate processes.

    python -m benchmarks.simulator           about three minutes on two cores
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import generative.networks
from agents.provenance import agent_sha256
from benchmarks.harness import AGENT, measure_apart, recorded, say, seconds_of
from common.devices import Compute, keep_freed_memory, resolve_compute
from common.distributed import SINGLE, Distributed
from common.parameters import ParameterSet
from generative.batches import AlignedBatch, align
from generative.config import SimulatorConfig, TrainingConfig
from generative.dataset import RolloutDataset, Windows
from generative.losses import LossScales, SimulatorLosses, measure, simulator_losses
from generative.networks import LatentSampler
from generative.runs import SimulatorRunSettings
from generative.simulator import Simulation, Simulator, stack
from generative.training import SimulatorTraining

NUM_EPISODES = 60
NUM_WORLD_EPISODES = 16
NUM_STEPS = 32
BATCH_SIZES = (16, 2)
REPEATS = 5
PLAIN = Compute(torch.device("cpu"), bfloat16=False, channels_last=False)


def settings_for(parameter_set: str, recording: Path, batch_size: int, num_steps: int,
                 **others: object) -> SimulatorRunSettings:
    """Return the settings for training on a recording and saving only at the end.

    Args:
        parameter_set: name of the parameter set.
        recording: folder whose subfolder ``data`` is the recording.
        batch_size, num_steps, others: values that replace those of the parameter set.
    """
    parameters = ParameterSet(parameter_set, {
        "gen_model.save_interval": 10**9, "gen_model.batch_size": batch_size,
        "gen_model.num_sim_steps": num_steps, **others})
    return SimulatorRunSettings("benchmark", str(AGENT), agent_sha256(AGENT), "",
                                str(recording / "data"), 0, "", 0,
                                parameters.get(SimulatorConfig), parameters.get(TrainingConfig),
                                LossScales())


def plain_transposed_conv(layer: torch.nn.ConvTranspose2d, x: Tensor) -> Tensor:
    return layer(x[:, :, None, None])


def step_by_step(simulator: Simulator, batch: AlignedBatch, draw: LatentSampler) -> Simulation:
    """Run the plain training pass: one time step after another, and a transposed convolution as
    the decoder's first layer."""
    predicted = simulator.start_from(simulator.encode(batch.initial_images), draw)
    start = dataclasses.replace(predicted, agent_hidden=batch.first_hidden)
    with mock.patch.object(generative.networks, "_transposed_conv_of_one_pixel",
                           plain_transposed_conv):
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
        losses = simulator_losses(simulation, windows, self.simulator.config)
        return losses, measure(simulation, losses, simulation.start.bottleneck_vec)


def some_batch(dataset: RolloutDataset, batch_size: int, world: Distributed = SINGLE) -> Windows:
    """Return this process's windows of a random batch of ``batch_size`` windows."""
    numbers = np.random.default_rng(0).permutation(len(dataset))[:batch_size]
    return dataset.batch(numbers[world.local_slice(batch_size)])


class Training:
    """A variant of training; a call takes a training step and returns its duration in seconds.

    Args:
        is_plain: whether to use the plain variant.
        recording: folder whose subfolder ``data`` is the recording.
        folder: folder of the training run.
        batch_size: number of windows of the batch.
    """

    def __init__(self, is_plain: bool, recording: Path, folder: Path, batch_size: int):
        settings = settings_for("defaults", recording, BATCH_SIZES[0], NUM_STEPS)
        if is_plain:
            self.run: SimulatorTraining = PlainTraining(folder, settings)
        else:
            keep_freed_memory()
            self.run = SimulatorTraining(folder, settings, resolve_compute("cpu"))
        self.windows = some_batch(self.run.dataset, batch_size)

    def __call__(self) -> float:
        return seconds_of(self.run.one_batch, self.windows)


def check_same_mathematics(simulator: Simulator, batch: AlignedBatch) -> None:
    """Check that both training passes give the same losses, in float32 without sampling."""
    draw = LatentSampler("mode")
    with torch.no_grad():
        ours, plain = (simulator_losses(simulation, batch, simulator.config).means()
                       for simulation in (simulator(batch, draw),
                                          step_by_step(simulator, batch, draw)))
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    say("training: losses of both variants agree in float32")


def report_shares(run: SimulatorTraining, batch: AlignedBatch, seconds: float) -> None:
    """Print the share of each part of the simulator in the duration of a training step. A part's
    share includes its forward and its backward pass.

    Args:
        run: the training run.
        batch: the batch of the step.
        seconds: duration of the step.
    """
    simulator, draw = run.simulator, LatentSampler("sample")
    frames = batch.images.flatten(0, 1)  # (num_steps * batch_size, 3, 64, 64)
    with torch.no_grad(), run.compute.autocast():
        simulation = simulator(batch, draw)
        embeddings = simulator.frame_embedding(frames)
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

    parts: dict[str, Callable[[], Tensor]] = {
        "encoder": lambda: simulator.encode(batch.initial_images).sum(),
        "frame embedding": lambda: simulator.frame_embedding(frames).sum(),
        "cell": cell,
        "decoder": lambda: sum(output.sum() for output in simulator.decoder(
            simulation.env_h.flatten(0, 1), simulation.z.flatten(0, 1))),
        "agent": lambda: simulator.agent.sequence(images,
                                                  batch.first_hidden).hidden_states.sum(),
        "losses": lambda: simulator_losses(simulation, batch, simulator.config).total}

    def forward_and_backward(part: Callable[[], Tensor]) -> None:
        run.optimizer.zero_grad(set_to_none=True)
        with run.compute.autocast():
            scalar = part()
        scalar.backward()

    shares = {name: seconds_of(forward_and_backward, part, repeats=3) / seconds
              for name, part in parts.items()}
    say("  where the time goes: "
        + ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items())
        + f", optimiser and the rest {100 * (1 - sum(shares.values())):.0f} %")


class WorldTraining(Training):
    """Training of the spatial architecture, with or without worlds.

    Args:
        has_worlds: whether the simulator has worlds.
        recording, folder: see ``Training``; the recording has worlds.
    """

    def __init__(self, has_worlds: bool, recording: Path, folder: Path):
        keep_freed_memory()
        settings = settings_for("demo", recording, BATCH_SIZES[0], NUM_STEPS // 2,
                                **({} if has_worlds else {"gen_model.world_squares": None}))
        self.run = SimulatorTraining(folder, settings, resolve_compute("cpu"))
        numbers = (self.run.dataset.windows_with_worlds if has_worlds
                   else np.arange(len(self.run.dataset)))
        self.windows = self.run.dataset.batch(
            np.random.default_rng(0).permutation(numbers)[:BATCH_SIZES[0]])


class Rollout:
    """Rollouts of the simulator of ``WorldTraining``, whose weights do not affect the speed; a call
    returns the durations of a batch of rollouts, and of sampling their surroundings, in seconds.
    """

    def __init__(self, has_worlds: bool, recording: Path, folder: Path):
        training = WorldTraining(has_worlds, recording, folder)
        self.compute, self.simulator = training.run.compute, training.run.simulator.eval()
        if has_worlds:
            self.simulator.prior.trained.fill_(1)
        batch = align(training.windows, self.simulator.config)
        self.images, self.draw = batch.initial_images, LatentSampler("mode")

    @torch.no_grad()
    def __call__(self) -> tuple[float, float]:
        with self.compute.autocast():
            vectors = self.simulator.encode(self.images)
            began = time.perf_counter()
            start = self.simulator.start_from(vectors, self.draw, images=self.images[-1])
            sampled = time.perf_counter()
            self.simulator.imagine(start, self.draw, NUM_STEPS)
        return time.perf_counter() - sampled, sampled - began


def report_worlds() -> None:
    """Print how much worlds slow down rollouts and training, and what a sampled world costs."""
    with recorded(NUM_WORLD_EPISODES, "--worlds") as recording:
        (with_worlds, sampling), (without, _) = measure_apart({
            name: (Rollout, name == "worlds", recording, recording / f"rollouts_{name}")
            for name in ("worlds", "none")}, REPEATS).values()
        say(f"{NUM_STEPS} steps of a sample: {with_worlds / without:.2f} times the time of a "
            f"simulator without worlds; sampling a world: {sampling / BATCH_SIZES[0]:.3f} s")
        trained, plain = measure_apart({
            name: (WorldTraining, name == "worlds", recording, recording / f"training_{name}")
            for name in ("worlds", "none")}, REPEATS).values()
        say(f"training in rendered worlds: {plain / trained:.2f} of the frames/s without worlds")


def main() -> None:
    report_worlds()
    with recorded(NUM_EPISODES) as recording:
        for size in BATCH_SIZES:
            ours, plain = measure_apart({
                name: (Training, name == "plain", recording, recording / name, size)
                for name in ("ours", "plain")}, REPEATS).values()
            frames = size * NUM_STEPS
            say(f"training, batch {size} x {NUM_STEPS}: ours ({resolve_compute('cpu').precision}) "
                f"{frames / ours:.0f} frames/s, plain {frames / plain:.0f} frames/s, ratio "
                f"{plain / ours:.2f}")
            training = Training(False, recording, recording / "shares", size)
            batch = align(training.windows, training.run.simulator.config)
            report_shares(training.run, batch, ours)
        check_same_mathematics(training.run.simulator, batch)


if __name__ == "__main__":
    main()
