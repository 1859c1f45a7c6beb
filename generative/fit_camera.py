r"""Training of the camera, see ``FitCameraOptions``.

Predicting the camera's motion takes a small part of a simulator's computations. This script first
runs the simulator on many windows, with the recorded motion of the camera, and stores the inputs of
the camera's networks: the start, the image of the canvas, and the memory near the player in each
step. Then it trains these networks on the stored inputs; all other networks stay unchanged. Run it
after a training run, or between two sessions of one.

    python -m generative.fit_camera --agent_file <agent> --model_file <simulator> \
        --data_dir <recording>/data --output <folder>/model.pt
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from common.cli import count, output_file, seed
from common.devices import Compute
from common.errors import UserError
from common.options import ComputeOptions, OutputFileOptions, command, option
from common.progress import with_progress
from generative.batches import align, in_batches, true_camera, true_phase
from generative.camera import Look, frame_edges, motion_costs, near_player, shift
from generative.config import SimulatorConfig
from generative.dataset import RolloutDataset
from generative.losses import camera_errors, until_first_terminal
from generative.networks import on_unit_sphere
from generative.runs import open_for_export, save_changed_copy
from generative.simulator import Simulator
from generative.spatial import SpatialCell, SpatialEncoder, SpatialStart, split_state
from generative.squares import World, world_phase
from generative.world_data import WORLDS_NAME, attach_worlds

_AT_A_TIME = 64  # windows per batch while their inputs are computed
_BATCH_SIZE = 128
_HELD_OUT = 256  # windows on which the drift is measured
_TRUE_CAMERA_SHARE = 0.3  # mean share of steps after which the recorded motion is substituted
_LARGEST = 3.0  # pixels; larger errors have no gradient


@dataclasses.dataclass(frozen=True)
class CameraWindows:
    """Inputs of the camera's networks in N windows, and their labels.

    Attributes:
        vectors: bottleneck vectors (N, V).
        costs: costs of motions between consecutive initial frames, see ``camera.motion_costs``
            (N, I - 1, NUM_MOTIONS).
        edges: edges in the initial frames, see ``camera.frame_edges`` (N, I, 2, 63).
        carried: velocity and phase that the vectors encode, minus the encoder's estimate (N, 6).
        world: images of the canvas (N, C, 64, 64), or classes of the squares of the world
            (N, n, n).
        corner: corner of the world, see ``squares.World`` (N, 2).
        near: memory near the player before each step, see ``camera.near_player``
            (N, T, 5 · memory_channels); no channels in simulators with worlds.
        actions: input actions of the steps, int64 (N, T).
        camera: recorded velocity of the camera (right, down), then its displacement (right, down)
            (N, T, 4).
        phase: recorded phase in the last initial frame, see ``batches.true_phase``; NaN where
            unknown (N, 4).
        counts: 1 before the first terminal step, 0 from this step on (N, T).
    """

    vectors: Tensor
    costs: Tensor
    edges: Tensor
    carried: Tensor
    world: Tensor
    corner: Tensor
    near: Tensor
    actions: Tensor
    camera: Tensor
    phase: Tensor
    counts: Tensor

    def rows(self, rows: Tensor) -> CameraWindows:
        """Select windows by their rows (B,), and convert float16 to float32."""
        selected = (tensor[rows] for tensor in vars(self).values())
        return CameraWindows(*(tensor.float() if tensor.dtype == torch.float16 else tensor
                               for tensor in selected))


class CameraTraining:
    """Training of the networks that estimate or predict the camera's motion.

    Args:
        simulator: a spatial simulator whose camera moves; trained in place.
        compute: device, and the precision in which the stored inputs are computed.
        freeze_encoder: do not train the encoder's estimates of phase and velocity, so that start
            vectors do not change.

    Raises:
        UserError: if the simulator is not spatial, or its camera stands still.
    """

    def __init__(self, simulator: Simulator, compute: Compute, freeze_encoder: bool = False):
        encoder, start, cell = simulator.encoder, simulator.env_converter, simulator.cell
        if not (isinstance(encoder, SpatialEncoder) and isinstance(start, SpatialStart)
                and isinstance(cell, SpatialCell) and encoder.moves):
            raise UserError("only a spatial simulator whose camera moves has a camera to train")
        self.simulator, self.compute = simulator, compute
        self.encoder, self.start, self.cell = encoder, start, cell
        estimators = [] if freeze_encoder else [encoder.phase, encoder.velocity]
        self.networks = nn.ModuleList([*estimators, start.motion, cell.camera])

    @torch.no_grad()
    def windows(self, dataset: RolloutDataset, numbers: np.ndarray, vector_noise: float = 0.0
                ) -> CameraWindows:
        """Compute the inputs of the camera's networks in recorded windows, and their labels.

        Args:
            numbers: numbers of the windows (N,).
            vector_noise: norm of noise added to every second bottleneck vector, as in training.
        """
        parts = [self._part(dataset.batch(batch), vector_noise)
                 for batch in in_batches(numbers, _AT_A_TIME)]
        return CameraWindows(*(torch.cat(tensors) for tensors in zip(*parts)))

    def _part(self, windows, vector_noise: float) -> list[Tensor]:
        """Compute the fields of ``CameraWindows`` for a batch of windows.

        Args:
            vector_noise: norm of noise added to every second bottleneck vector.
        """
        config: SimulatorConfig = self.simulator.config
        batch = align(windows.to(self.compute.device), config)
        camera = true_camera(batch, config.pixels_per_square or 0.0)  # (T, B, 4)
        costs = torch.stack([motion_costs(*pair)
                             for pair in itertools.pairwise(batch.initial_images)], dim=1)
        edges = torch.stack([frame_edges(images) for images in batch.initial_images], dim=1)
        with self.compute.autocast():
            vectors = self.simulator.encode(batch.initial_images)
            noise = functional.normalize(torch.randn_like(vectors), dim=-1)
            noise[::2] = 0
            vectors = on_unit_sphere(vectors + vector_noise * noise)
            h = self.start(vectors)[:, :config.deter_dim]
            if batch.world is None:
                world = self.simulator.basis.images(split_state(h, config).canvas).half()
                corner, near = h.new_zeros(len(h), 2), self._near(h, batch.actions, camera)
            else:
                world, corner = batch.world.squares.byte(), batch.world.corner
                near = h.new_zeros(len(h), len(camera), 0).half()
        carried = self.start.carried(vectors) - self.encoder.estimate_camera(costs, edges)
        counts = until_first_terminal(batch.terminals) * (1 - batch.terminals)
        return [*(tensor.half() for tensor in (vectors, costs, edges)), carried, world, corner,
                near, batch.actions.T, camera.transpose(0, 1),
                true_phase(batch), counts.T]

    def _near(self, h: Tensor, actions: Tensor, camera: Tensor) -> Tensor:
        """Compute the memory near the player before each step, float16 (B, T, …).

        Args:
            h: states before the first step (B, H).
            actions: input actions, int64 (T, B).
            camera: recorded motion of the camera (T, B, 4).
        """
        near, z = [], h.new_ones(len(h), 1, 1)
        everywhere = torch.ones(len(h), dtype=torch.bool, device=h.device)
        for motion, action in zip(camera, self.simulator.one_hot_actions(actions)):
            near.append(near_player(split_state(h, self.simulator.config).memory))
            h = self.cell.with_camera(self.cell.advance(z, action, h), motion, everywhere)
        return torch.stack(near, dim=1).half()

    def predict(self, windows: CameraWindows, known: Tensor) -> tuple[Tensor, Tensor]:
        """Predict the camera's motion.

        Args:
            windows: inputs of B windows, in float32.
            known: steps after which the recorded motion replaces the predicted one, bool (B, T).

        Returns:
            Velocity (right, down), then displacement (right, down) of the camera (B, T, 4); and its
            phase at the start, see ``batches.true_phase`` (B, 4).
        """
        estimate = self.encoder.estimate_camera(windows.costs, windows.edges)
        state = self.start.camera(windows.vectors, windows.carried + estimate)
        phase, predicted = state.phase, []
        squares = self.simulator.squares
        look: Look = functools.partial(shift, windows.world)
        if squares is not None:
            world = World.of(windows.world, windows.corner)

            def look_at_squares(displacement: Tensor, size: int) -> tuple[Tensor, Tensor]:
                view = squares.crop(world, displacement, size)
                return view, torch.ones_like(view[:, :1])
            look = look_at_squares
            state = dataclasses.replace(
                state, phase=world_phase(world, squares.pixels_per_square))
        actions = self.simulator.one_hot_actions(windows.actions)
        for t in range(known.shape[1]):
            near = windows.near[:, t] if windows.near.shape[2] else None
            state = self.cell.camera(look, near, state, actions[:, t])
            predicted.append(torch.cat([state.velocity, state.displacement], dim=-1))
            velocity, displacement = torch.where(
                known[:, t, None], windows.camera[:, t], predicted[-1]).split(2, dim=-1)
            state = dataclasses.replace(state, velocity=velocity, displacement=displacement)
        return torch.stack(predicted, dim=1), phase

    def train(self, windows: CameraWindows, num_batches: int, lr: float,
              generator: torch.Generator) -> None:
        """Train with Adam; the learning rate falls linearly to 0 in the second half.

        Args:
            num_batches: number of batches, each of randomly drawn windows.
            lr: initial learning rate.
        """
        self.networks.requires_grad_(True).train()
        optimizer = torch.optim.Adam(self.networks.parameters(), lr, betas=(0.9, 0.99))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda done: min(1.0, 2 * (1 - done / num_batches)))
        for _ in with_progress(range(num_batches), num_batches, "batch"):
            rows = torch.randperm(len(windows.actions), generator=generator)[:_BATCH_SIZE]
            batch = windows.rows(rows.sort().values)
            shares = 2 * _TRUE_CAMERA_SHARE * torch.rand(len(rows), 1, generator=generator)
            known = torch.rand(batch.actions.shape, generator=generator) < shares
            predicted, phase = self.predict(batch, known.to(batch.camera.device))
            errors = camera_errors(predicted.transpose(0, 1), batch.camera.transpose(0, 1)).T
            label = torch.where(batch.phase.isnan(), phase.detach(), batch.phase)
            loss = ((errors.clamp(max=_LARGEST) * batch.counts).mean()
                    + 0.1 * (phase - label).square().mean())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.networks.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        self.networks.requires_grad_(False).eval()

    @torch.no_grad()
    def drift(self, windows: CameraWindows) -> tuple[float, float]:
        """Compute the mean and median error of the displacement at the last step, in pixels.

        Windows whose episode has ended by then are excluded.
        """
        batch = windows.rows(torch.arange(len(windows.actions)))
        predicted, _ = self.predict(batch, torch.zeros_like(batch.actions, dtype=torch.bool))
        errors = torch.linalg.vector_norm((predicted - batch.camera)[:, -1, 2:], dim=-1)
        errors = errors[batch.counts[:, -1] > 0]
        return errors.mean().item(), errors.median().item()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitCameraOptions(OutputFileOptions, ComputeOptions):
    """Train only the camera's networks of a spatial simulator, much faster than with all networks.
    """

    agent_file: Path = option(help="agent inside the simulator")
    model_file: Path = option(help="spatial simulator")
    data_dir: Path = option(help="recording with the player's positions")
    num_windows: int = option(
        40000, "maximum number of training windows, about 35 kB of memory each", type=count)
    num_batches: int = option(5000, f"batches of {_BATCH_SIZE} windows", type=count)
    lr: float = option(1e-3, "learning rate")
    seed: int = option(0, "seed of every random choice", type=seed)
    output: Path = option(help="simulator file to write", type=output_file)


def fit_camera(options: FitCameraOptions) -> Path:
    """Train the camera's networks, and return the file of the simulator with them."""
    options.check_output()
    run, simulator = open_for_export(options.model_file, options.agent_file, options.output,
                                     options.compute)
    training = CameraTraining(simulator, options.compute, run.training.freeze_encoder)
    config = simulator.config
    dataset = RolloutDataset(options.data_dir, config.num_init_steps, config.num_sim_steps)
    if not dataset.has_positions:
        raise UserError(f"{options.data_dir} has no positions of the player; record it with "
                        "--positions")
    split = dataset.split(run.training.held_out_fraction, run.seed)
    if simulator.squares is not None and config.world_squares:
        _, numbers = attach_worlds(options.output.parent / WORLDS_NAME, dataset,
                                   config.world_squares, simulator.squares)
        split = split.among(numbers)
    order = np.random.default_rng(options.seed)
    torch.manual_seed(options.seed)
    held_out, windows = (
        training.windows(dataset, np.sort(order.permutation(numbers)[:most]), noise)
        for numbers, most, noise in (
            (split.held_out, _HELD_OUT, 0.0),
            (split.train, options.num_windows, run.training.vector_noise)))
    before = training.drift(held_out)
    training.train(windows, options.num_batches, options.lr,
                   torch.Generator().manual_seed(options.seed))
    after = training.drift(held_out)
    print(f"drift of the camera in {config.num_sim_steps} steps of held-out windows: mean "
          f"{before[0]:.2f}, median {before[1]:.2f} pixels before; {after[0]:.2f}, {after[1]:.2f} "
          "after")
    return save_changed_copy(simulator, options.model_file, options.output)


main = command(FitCameraOptions, fit_camera)

if __name__ == "__main__":
    raise SystemExit(main())
