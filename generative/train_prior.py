"""Training of the prior, see ``TrainPriorOptions``.

    python -m generative.train_prior --agent_file <agent> --model_file <simulator> \
        --data_dir <recording with --worlds> --output <folder>/model.pt

The simulator's other weights do not change. If the encoder is trained again, start vectors change:
then train the prior over start vectors again, with ``--num_world_batches 0``. A stopped run resumes
from the checkpoint next to ``--output``.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from common.cli import count, from_zero, output_file, seed
from common.cuda_graph import GraphedFunction
from common.devices import Compute
from common.errors import Stopped, UserError
from common.files import load_tensors, save_tensors
from common.options import ComputeOptions, OutputFileOptions, command, option
from common.progress import Progress
from common.signals import deferred_signals
from common.training import assign, restoring
from generative.batches import AlignedBatch, align, in_batches, true_phase
from generative.camera import FASTEST
from generative.config import GRID
from generative.dataset import RecordedWorlds, RolloutDataset
from generative.prior import static_globals
from generative.prior_losses import player_loss, start_loss, without_some_players, world_loss
from generative.prior_networks import NUM_GLOBALS, with_player
from generative.runs import open_for_export, save_changed_copy
from generative.simulator import Simulator
from generative.world_data import WORLDS_NAME, attach_worlds

_AVERAGE_DECAY = 0.999
_WARM_UP = 200  # batches in which the learning rate rises
_TAIL = 0.15  # last share of the batches, in which it falls to 0
_SECONDS_BETWEEN_SAVES = 300
_AT_A_TIME = 100
_LOG_INTERVAL = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainPriorOptions(OutputFileOptions, ComputeOptions):
    """Train the prior of a simulator with worlds, which generates starts and what lies beyond
    views."""

    agent_file: Path = option(help="agent inside the simulator")
    model_file: Path = option(help="simulator with worlds")
    data_dir: Path = option(help="recording with worlds, from record.py --worlds")
    num_world_batches: int = option(20000, "batches of worlds; 0 to keep the prior over worlds",
                                    type=from_zero)
    num_start_batches: int = option(8000, "batches of start vectors; 0 to keep their prior",
                                    type=from_zero)
    batch_size: int = option(32, "number of worlds or start vectors in a batch", type=count)
    lr: float = option(1e-3, "learning rate")
    seed: int = option(0, "seed of every random choice", type=seed)
    output: Path = option(help="simulator file to write", type=output_file)


def worlds_to_learn(worlds: RecordedWorlds, pixels_per_square: float | None) -> np.ndarray:
    """Return the numbers of the worlds on which the prior is trained (N,): all of them, or one per
    episode if the camera is static, because all others of the episode show the same squares."""
    if pixels_per_square:
        return np.arange(len(worlds.rows))
    return np.unique(worlds.episodes, return_index=True)[1]


def world_cameras(worlds: RecordedWorlds, pixels_per_square: float | None) -> Tensor:
    """Return phase and velocity of the camera in recorded worlds (N, NUM_GLOBALS)."""
    if not pixels_per_square:
        return static_globals(torch.empty(len(worlds.rows), NUM_GLOBALS))
    down = np.array([1, -1], np.float32)
    moved = torch.from_numpy(worlds.moved * down) * (pixels_per_square / FASTEST)
    angles = 2 * math.pi * torch.from_numpy(worlds.positions * down)
    return torch.cat([torch.stack([angles.cos(), angles.sin()], dim=-1).flatten(1), moved], dim=-1)


def _true_camera(batch: AlignedBatch, pixels_per_square: float | None) -> Tensor:
    """Return phase and velocity of the camera in the last initial frame (B, NUM_GLOBALS)."""
    assert batch.positions is not None
    if not pixels_per_square:
        return static_globals(batch.positions.new_empty(batch.positions.shape[1], NUM_GLOBALS))
    moved = (batch.positions[1] - batch.positions[0]).nan_to_num() * (pixels_per_square / FASTEST)
    return torch.cat([true_phase(batch), moved * moved.new_tensor([1, -1])], dim=-1)


def player_squares(positions: Tensor, num_squares: int) -> Tensor:
    """Return the numbers of the player's squares in the view of a static camera, int64 (B,).

    Args:
        positions: positions in squares, x to the right and y up (B, 2).
        num_squares: n.
    """
    right, up = positions.floor().long().clamp(0, num_squares - 1).unbind(dim=-1)
    return (num_squares - 1 - up) * num_squares + right


@dataclasses.dataclass
class EncodedWorlds:
    """Starts of N windows whose last initial frame has a world.

    Attributes:
        codes: standardised codes of the start vectors (N, V / 64, 8, 8).
        views: coefficients of the views, see ``StartPrior`` (N, view_channels, 8, 8).
        cameras: phase and velocity of the camera (N, NUM_GLOBALS).
        squares: classes of the squares, uint8 (N, n, n).
        players: number of the player's square in the view of a static camera, int64 (N,).
    """

    codes: Tensor
    views: Tensor
    cameras: Tensor
    squares: Tensor
    players: Tensor


@torch.no_grad()
def encoded_worlds(simulator: Simulator, compute: Compute, dataset: RolloutDataset
                   ) -> EncodedWorlds:
    """Encode all windows whose last initial frame has a world, and set the mean and scale of the
    prior to those of their codes."""
    config, prior, squares = simulator.config, simulator.prior, simulator.squares
    assert squares is not None
    parts = []
    for numbers in in_batches(dataset.windows_with_worlds, _AT_A_TIME):
        batch = align(dataset.batch(numbers).to(compute.device), config)
        assert batch.world is not None and batch.positions is not None
        with compute.autocast():
            vectors = simulator.encode(batch.initial_images).float()
            view = simulator.basis.coefficients(squares.first_views(batch.world)).float()
        player = torch.zeros(len(vectors), dtype=torch.int64, device=view.device)
        if prior.player is not None:
            player = player_squares(batch.positions[1], prior.worlds.num_squares)
            view = with_player(view, player, prior.worlds.num_squares)
        parts.append((vectors, view, _true_camera(batch, config.pixels_per_square),
                      batch.world.squares.byte(), player))
    vectors, *others = map(torch.cat, zip(*parts))
    codes = vectors.unflatten(1, (GRID, GRID, -1)).permute(0, 3, 1, 2)
    mean = codes.mean(dim=0)
    prior.starts.mean.copy_(mean)
    prior.starts.scale.copy_((codes - mean).square().mean(dim=(0, 2, 3)).sqrt()[:, None, None])
    return EncodedWorlds(prior.starts.standardise(vectors), *others)


class PriorTraining:
    """Training of one network of the prior, with a moving average of its weights.

    Args:
        loss: function of row numbers (B,) and a generator that returns the loss (). On a GPU, it
            must not synchronise.
        num_rows: number of rows of the data.
        batch_size: B.
        lr: learning rate, which rises at the beginning and falls to 0 at the end.
    """

    def __init__(self, network: nn.Module, loss: Callable[[Tensor, torch.Generator], Tensor],
                 num_rows: int, batch_size: int, num_batches: int, lr: float, seed: int):
        self.network, self._loss = network, loss
        self._num_rows, self._batch_size, self._num_batches = num_rows, batch_size, num_batches
        self._lr, self._seed, self.batches = lr, seed, 0
        device = next(network.parameters()).device
        self._generator = torch.Generator(device)
        is_graph = device.type == "cuda"  # a CUDA graph reads the learning rate from GPU memory
        self._optimizer = torch.optim.AdamW(
            network.parameters(), torch.zeros((), device=device), betas=(0.9, 0.99),
            weight_decay=0.01, fused=True, capturable=is_graph)
        self._run_step: Callable[[], tuple[Tensor, ...]] = self._step
        if is_graph:
            self._run_step = GraphedFunction(self._step, device, self._generator)
        self._average = [parameter.detach().clone() for parameter in network.parameters()]

    def state(self) -> dict:
        """Return everything that a resumed run needs."""
        return {"batches": self.batches, "average": self._average,
                "weights": [parameter.detach() for parameter in self.network.parameters()],
                "optimizer": self._optimizer.state_dict()}

    def load(self, state: dict) -> None:
        """Restore the result of ``state``, which may come from another device."""
        self.batches = state["batches"]
        assign(state["average"], self._average)
        assign(state["weights"], self.network.parameters())
        # The rest of the optimiser's state depends on the device.
        self._optimizer.load_state_dict({**self._optimizer.state_dict(),
                                         "state": state["optimizer"]["state"]})

    def train(self, save: Callable[[], None]) -> int:
        """Train until the end or a stop signal; the network then has the averaged weights.

        Returns:
            0, or 128 + the signal's number.
        """
        torch.set_flush_denormal(True)  # gradients of nearly certain squares are tiny
        self.network.requires_grad_(True).train()
        losses: list[Tensor] = []
        saved_at, status = time.monotonic(), 0
        with (deferred_signals("batch") as received,
              Progress(self._num_batches, "batch", self.batches) as progress):
            while self.batches < self._num_batches and not received:
                losses.append(self._one_batch())
                if self.batches % _LOG_INTERVAL == 0:
                    progress.update(self.batches, f"loss {torch.stack(losses).mean():.4g}")
                    losses = []
                if time.monotonic() - saved_at > _SECONDS_BETWEEN_SAVES:
                    save()
                    saved_at = time.monotonic()
            status = 128 + received[0] if received else 0
        torch.set_flush_denormal(False)
        save()
        assign(self._average, self.network.parameters())
        self.network.requires_grad_(False).eval()
        return status

    def _one_batch(self) -> Tensor:
        self._generator.manual_seed(hash((self._seed, self.batches)) % 2 ** 62)
        left = (self._num_batches - self.batches) / (_TAIL * self._num_batches)
        rate = self._lr * min(1.0, (self.batches + 1) / _WARM_UP, left)
        for group in self._optimizer.param_groups:
            group["lr"].fill_(rate)
        [loss] = self._run_step()
        self.batches += 1
        decay = min(_AVERAGE_DECAY, (1 + self.batches) / (10 + self.batches))
        torch._foreach_lerp_(self._average, [weight.detach() for weight
                                             in self.network.parameters()], 1 - decay)
        return loss

    def _step(self) -> tuple[Tensor]:
        """Take one optimiser step, and return the loss ()."""
        rows = torch.randint(self._num_rows, (self._batch_size,), device=self._generator.device,
                             generator=self._generator)
        loss = self._loss(rows, self._generator)
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self._optimizer.step()
        return (loss.detach(),)


def train_prior(options: TrainPriorOptions) -> Path:
    """Train the prior, and return the file of the simulator with it.

    Raises:
        Stopped: after a stop signal; the same call resumes.
    """
    options.check_output()
    _, simulator = open_for_export(options.model_file, options.agent_file, options.output,
                                   options.compute)
    config, squares = simulator.config, simulator.squares
    if squares is None or not config.world_squares:
        raise UserError(f"{options.model_file} has no worlds; train a simulator with worlds first")
    dataset = RolloutDataset(options.data_dir, config.num_init_steps, config.num_sim_steps)
    dataset.check_agent(options.agent_file, simulator.agent.policy)
    attach_worlds(options.output.parent / WORLDS_NAME, dataset, config.world_squares, squares)
    trainings = trainings_of(options, simulator, dataset)
    checkpoint = options.output.with_suffix(".training.pt")
    if checkpoint.exists():
        saved = load_tensors(checkpoint, "checkpoint of the prior")
        with restoring(checkpoint):
            for name, training in trainings.items():
                training.load(saved[name])

    def save() -> None:
        save_tensors(checkpoint, {name: training.state() for name, training in trainings.items()})

    for name, training in trainings.items():
        status = training.train(save)
        print(f"{name}: {training.batches} batches", flush=True)
        if status:
            raise Stopped(status, "stopped; run the same command again to resume")
    simulator.prior.trained.fill_(1)
    save_changed_copy(simulator, options.model_file, options.output)
    checkpoint.unlink()
    return options.output


def trainings_of(options: TrainPriorOptions, simulator: Simulator, dataset: RolloutDataset
                 ) -> dict[str, PriorTraining]:
    """Return the trainings of the priors over worlds and over starts, by name."""
    compute, prior, worlds = options.compute, simulator.prior, dataset.worlds
    pixels_per_square = simulator.config.pixels_per_square
    starts = encoded_worlds(simulator, compute, dataset) if options.num_start_batches else None
    learned = worlds_to_learn(worlds, pixels_per_square)
    known = torch.from_numpy(worlds.squares[learned]).to(compute.device)
    world_camera = world_cameras(worlds, pixels_per_square)[learned].to(compute.device)

    def loss_of_worlds(rows: Tensor, generator: torch.Generator) -> Tensor:
        with compute.autocast():
            squares, camera = world_loss(prior.worlds, known[rows].long(), world_camera[rows],
                                         generator, is_view=not pixels_per_square)
            return squares + camera

    def loss_of_starts(rows: Tensor, generator: torch.Generator) -> Tensor:
        assert starts is not None
        codes, views, cameras = starts.codes[rows], starts.views[rows], starts.cameras[rows]
        with compute.autocast():
            if prior.player is None:
                return start_loss(prior.starts, codes, views, cameras, generator)
            views = without_some_players(views, generator)
            return (start_loss(prior.starts, codes, views, cameras, generator)
                    + player_loss(prior.player, starts.squares[rows], starts.players[rows]))

    return {
        "worlds": PriorTraining(prior.worlds, loss_of_worlds, len(known), options.batch_size,
                                options.num_world_batches, options.lr, options.seed),
        "starts": PriorTraining(
            nn.ModuleList(filter(None, [prior.starts, prior.player])), loss_of_starts,
            len(starts.codes) if starts else 0, options.batch_size, options.num_start_batches,
            options.lr, options.seed)}


main = command(TrainPriorOptions, train_prior)

if __name__ == "__main__":
    raise SystemExit(main())
