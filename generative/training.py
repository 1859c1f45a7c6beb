"""Train a simulator: batches, metrics, checkpoints, videos, stopping and resuming.

A run is a pure function of its settings: on a CPU, a run that is stopped anywhere and resumed gives
the same weights and metrics as an uninterrupted run. Several processes (``common.distributed``)
share the windows of every batch and give the results of one process, up to the rounding of sums.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from agents.agent_file import load_agent
from agents.frames import to_frames
from agents.replay import recorded_game
from common.cuda_graph import GraphedFunction
from common.devices import Compute
from common.distributed import SINGLE, Distributed
from common.errors import NonFiniteLoss, UserError
from common.game_constants import pixels_per_square
from common.training import Run, assign, restoring
from common.video import side_by_side, write_video
from generative.batches import (
    AlignedBatch,
    BatchOrder,
    BatchReader,
    SpeedMeter,
    align,
    true_camera,
)
from generative.config import SimulatorConfig
from generative.dataset import RolloutDataset, Windows
from generative.losses import (
    PixelWeights,
    SimulatorLosses,
    count_colours,
    measure,
    simulator_losses,
)
from generative.networks import LatentSampler
from generative.published import load_published, save_published, transfer
from generative.runs import (
    PROGRESS_NAME,
    SimulatorRunSettings,
    checkpoint_name,
    checkpoints,
    columns_of,
    measures_of,
    prune_checkpoints,
    run_of,
)
from generative.simulator import Simulator, stack
from generative.squares import SquareImages
from generative.world_data import WORLDS_NAME, attach_worlds

VIDEO_WINDOWS = 4
VIDEO_SCALE = 2
VIDEO_FRAMES_PER_SECOND = 5
_BASIS_FRAMES = 3000  # frames that the basis of image patches is fitted to

logger = logging.getLogger(__name__)


class SimulatorTraining(Run):
    """A training run and its folder.

    Args:
        folder: the run's folder. If it holds checkpoints, the run resumes from the newest one;
            otherwise the run is new. If another new run uses the folder, a number is appended to
            the folder's name; the attribute ``folder`` is the folder in use.
        world: the group of training processes; each creates its own ``SimulatorTraining`` with the
            same folder, but only rank 0 writes to it.

    Raises:
        FolderInUse: if another process uses the folder.
        UserError: if the recording, the agent or the checkpoint to start from cannot be used, or
            there are more processes than windows in a batch.
    """

    unit = work = "batch"

    def __init__(self, folder: Path, settings: SimulatorRunSettings, compute: Compute,
                 world: Distributed = SINGLE):
        super().__init__(folder, compute, world, bool(checkpoints(folder)))
        self.settings = settings
        config, training = settings.simulator, settings.training
        self.dataset = RolloutDataset(Path(settings.data_dir), config.num_init_steps,
                                      config.num_sim_steps, training.terminal_absorbing)
        num_episodes = len(self.dataset.episodes)
        if settings.num_episodes not in (None, num_episodes):
            raise UserError(f"{settings.data_dir} has {num_episodes} episodes, but this run was "
                            f"started with {settings.num_episodes}, so other episodes would be "
                            "held out; restore the recording or start a new run")
        split = self.dataset.split(training.held_out_fraction, settings.seed)
        torch.manual_seed(settings.seed)
        policy = load_agent(Path(settings.agent_file))
        self.dataset.check_agent(Path(settings.agent_file), policy)
        saved = world.broadcast(checkpoints(folder))
        start_file = saved[-1] if saved else Path(settings.model_file)
        starts = bool(saved or settings.model_file)
        config = self._resolved(config, run_of(start_file) if starts else None)
        published = load_published(start_file, config, policy) if starts else None
        images: SquareImages | None = None
        if config.world_squares:
            images, numbers = attach_worlds(
                folder / WORLDS_NAME, self.dataset, config.world_squares,
                published.simulator.squares if published else None, training.death_copies,
                training.coin_copies)
            split = split.among(numbers)
            config = dataclasses.replace(config, square_classes=len(images.templates),
                                         object_looks=images.looks)
        self._order = BatchOrder(split.train, training.batch_size, settings.seed)
        self._held_out = BatchOrder(split.held_out, min(training.batch_size, len(split.held_out)),
                                    settings.seed)
        for name, order in (("windows", self._order), ("held-out windows", self._held_out)):
            if order.batch_size < world.world_size:
                raise UserError(f"{world.world_size} processes cannot share a batch of "
                                f"{order.batch_size} {name}; start fewer processes")
        self.num_steps = training.epochs * self._order.batches_per_epoch
        if settings.max_batches:
            self.num_steps = min(self.num_steps, settings.max_batches)

        simulator = published.simulator if published else Simulator(config, policy)
        if config.is_spatial and not published:
            simulator.basis.fit(self.dataset.some_frames(split.train, _BASIS_FRAMES,
                                                         settings.seed))
            if images is not None and simulator.squares is not None:
                simulator.squares.load_state_dict(images.state_dict())
        if settings.transfer_from and not published:
            transfer(Path(settings.transfer_from), simulator)
        self._unused = published.unused if published else {}
        self.settings = settings = dataclasses.replace(
            settings, simulator=simulator.config, num_episodes=num_episodes)
        self.simulator = simulator
        compute.place(simulator)
        self._parameters = simulator.trainable_parameters()
        if training.freeze_encoder:  # its parameters stay in the optimiser, without gradients
            simulator.encoder.requires_grad_(False)
        is_graph = compute.device.type == "cuda" and not world.is_distributed
        # A CUDA graph reads the learning rate from GPU memory.
        lr = torch.tensor(training.lr, device=compute.device) if is_graph else training.lr
        self.optimizer = torch.optim.Adam(self._parameters, lr=lr, fused=True, capturable=is_graph)
        # Moving average of the weights.
        self._average = _clone(self._parameters) if training.average_decay else None
        self._pixel_weights = None
        if training.image_rarity:
            shares = count_colours(self.dataset, split.train, settings.seed)
            self._pixel_weights = PixelWeights(shares.to(compute.device), training.image_rarity)
        self._generator = torch.Generator(compute.device).manual_seed(settings.seed)
        self._run_step: Callable[..., tuple[Tensor, ...]] = self._step
        if is_graph:
            self._run_step = GraphedFunction(self._step, compute.device, self._generator)
        self._unlogged: list[dict[str, Tensor]] = []  # metrics of the batches since the last row
        if saved and published:
            self._load_state({**self._on_device(published.more),
                              "optimizer_state_dict": published.moments}, start_file)
        self._open(settings, PROGRESS_NAME, columns_of(settings.simulator))
        if self.steps and world.is_main and not self._video.exists():
            self._write_video()  # the run was killed between a checkpoint and its video

    def _resolved(self, config: SimulatorConfig, first: SimulatorRunSettings | None
                  ) -> SimulatorConfig:
        """Fill in ``pixels_per_square`` from the recorded game, and ``square_classes`` and
        ``object_looks`` from ``first``, the settings of the simulator to start from."""
        if not config.is_spatial:
            return config
        if config.world_squares and config.square_classes is None and first:
            config = dataclasses.replace(config, square_classes=first.simulator.square_classes,
                                         object_looks=first.simulator.object_looks)
        scale = config.pixels_per_square
        if scale is None:
            game = recorded_game(self.dataset.folder)
            if game.center_agent:
                scale = pixels_per_square(game.env_name, game.distribution_mode)
            if scale is None:
                logger.warning("the camera in %s is assumed to stand still, because it does not "
                               "follow the player in both directions", game.env_name)
                scale = 0.0
        if scale and not self.dataset.has_positions:
            raise UserError(f"{self.dataset.folder.path} has no positions of the player, from "
                            "which the camera's motion is learned; record it with --positions")
        return dataclasses.replace(config, pixels_per_square=scale)

    def _load_state(self, state: dict, path: Path) -> None:
        """Restore the optimiser, the random numbers and the counters from the checkpoint ``path``.
        """
        if state.get("batches") == 0:  # stopped before the first step, so Adam has no moments
            state = {**state, "optimizer_state_dict": {}}
        with restoring(path):
            self.optimizer.load_state_dict({**self.optimizer.state_dict(),
                                            "state": state["optimizer_state_dict"]})
            if self._average is not None:  # the simulator in the checkpoint has the average
                assign(state["trained_weights"], self._parameters)
            self._generator.set_state(state["generator"])
            self._unlogged = state["unlogged"]
            self._resume(state["batches"], state["wall_time"], state.get("ranks", 1), path)

    @property
    def _metric_names(self) -> tuple[str, ...]:
        """Names of the logged metrics of a batch."""
        return "gradient_norm", *measures_of(self.settings.simulator)

    @contextlib.contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        """Use the averaged weights, if there are any, and evaluation mode inside the block."""
        self.simulator.eval()
        trained = None
        if self._average is not None:
            trained = _clone(self._parameters)
            assign(self._average, self._parameters)
        try:
            yield
        finally:
            if trained is not None:
                assign(trained, self._parameters)
            self.simulator.train()

    @property
    def epoch(self) -> int:
        """Number of complete epochs."""
        return self.steps // self._order.batches_per_epoch

    @property
    def newest_checkpoint(self) -> Path:
        return checkpoints(self.folder)[-1]

    def train(self) -> int:
        training = self.settings.training
        with contextlib.closing(BatchReader(
                self.dataset, self._order, self.steps, self.compute.device,
                self.world.local_slice(self._order.batch_size))) as reader:
            self._windows = iter(reader)
            self._speed = SpeedMeter(reader, training.batch_size
                                     * self.settings.simulator.num_sim_steps)
            return super().train()

    def _advance(self) -> str:
        """Train on a batch, and append a row to the log if it is due."""
        self._unlogged.append(self.one_batch(next(self._windows)))
        self.steps += 1
        self._speed.batches += 1
        if self.steps % self.settings.training.log_interval:
            return ""
        row = {**self._row(), **self._speed.since_last_call()}
        self._append(row)
        return f"loss {row['loss']:.4g}, held out {row['held_out_loss']:.4g}"

    @property
    def _is_checkpoint(self) -> bool:
        return self.steps % self.settings.training.save_interval == 0

    def _forward(self, windows: AlignedBatch, generator: torch.Generator, num: int
                 ) -> tuple[SimulatorLosses, dict[str, Tensor]]:
        """Run the training pass.

        Args:
            windows: this process's windows of a batch.
            num: number of windows in the whole batch.

        Returns:
            Losses of this process's windows, and metrics of the whole batch.
        """
        world, config, training = self.world, self.settings.simulator, self.settings.training
        own = world.local_slice(num)
        part = (own, num) if world.is_distributed else None
        acting = slice(-own.start % training.agent_every, None, training.agent_every)
        camera = forced = noise = None
        if config.is_spatial and config.pixels_per_square:
            camera = true_camera(windows, config.pixels_per_square)
        if self.simulator.training:
            if camera is not None and training.true_camera_share:
                chances = torch.rand(len(camera), num, device=self.compute.device,
                                     generator=generator)[:, own]
                forced = (camera, chances < training.true_camera_share)
            if training.vector_noise:
                noise = self._vector_noise(generator, num)[own]
        with self.compute.autocast():
            simulation = self.simulator(windows, LatentSampler("sample", generator, part),
                                        self._open_loop(num), vector_noise=noise,
                                        true_camera=forced, agent_windows=acting)
        weights = self._pixel_weights(windows.images) if self._pixel_weights else None
        vectors = world.gather_with_local_gradient(simulation.start.bottleneck_vec, num)
        losses = simulator_losses(simulation, windows, config, self.settings.loss_scales, weights,
                                  vectors, camera, acting)
        if training.until_end:
            losses = losses.until_end(windows.terminals)
        if not self.simulator.agent.policy.recurrent:  # the agent ignores its first hidden state
            losses = dataclasses.replace(losses, first_hidden=0 * losses.first_hidden)
        metrics = measure(simulation, losses, vectors)
        return losses, world.mean(metrics, self._share(num))

    def _vector_noise(self, generator: torch.Generator, num: int) -> Tensor:
        """Draw noise (num, V): rows of norm 0 and of norm ``vector_noise``, alternately."""
        noise = torch.randn(num, self.settings.simulator.bottleneck_vec_size,
                            device=self.compute.device, generator=generator)
        noise = noise * (self.settings.training.vector_noise
                         / torch.linalg.vector_norm(noise, dim=-1, keepdim=True))
        noise[::2] = 0
        return noise

    def _open_loop(self, num: int) -> Tensor | None:
        """Return a mask of this process's windows, True where latents are drawn from the prior.

        Args:
            num: number of windows in the whole batch.

        Returns:
            Mask, bool (B,); None if ``open_loop_share`` is 0.
        """
        share, own = self.settings.training.open_loop_share, self.world.local_slice(num)
        return (torch.arange(own.start, own.stop, device=self.compute.device) < share * num
                if share else None)

    def _share(self, num: int) -> float:
        """Return this process's share of a batch of ``num`` windows."""
        own = self.world.local_slice(num)
        return (own.stop - own.start) / num

    def one_batch(self, windows: Windows) -> dict[str, Tensor]:
        """Take one optimiser step and return the metrics of the whole batch by name, each ().

        Raises:
            NonFiniteLoss: if the gradient became infinite or NaN.
        """
        training = self.settings.training
        rate = training.lr_at(self.steps, self.num_steps)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        [values] = self._run_step(**windows.tensors())
        metrics = dict(zip(self._metric_names, values))
        norm = float(metrics["gradient_norm"])
        if not math.isfinite(norm):
            raise NonFiniteLoss(f"the gradient became {norm}, the loss "
                                f"{float(metrics['loss'])}, after {self.steps} batches; training "
                                f"stopped, and earlier checkpoints in {self.folder} were kept")
        if self._average is not None:
            # The decay is smaller at first, so that the average forgets the initial weights.
            decay = min(training.average_decay, (1 + self.steps) / (10 + self.steps))
            torch._foreach_lerp_(self._average, [parameter.detach() for parameter
                                                 in self._parameters], 1 - decay)
        return metrics

    def _step(self, **tensors: Tensor) -> tuple[Tensor]:
        """Take one optimiser step on the tensors of ``Windows``; return the metrics as a vector,
        in the order of ``_metric_names``."""
        windows, num = Windows(**tensors), self._order.batch_size
        losses, metrics = self._forward(align(windows, self.settings.simulator), self._generator,
                                        num)
        self.optimizer.zero_grad(set_to_none=True)
        losses.share_of_total(self._share(num)).backward()
        self.world.sum_gradients(self._parameters)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters,
                                              self.settings.training.gradient_norm_limit)
        self.optimizer.step()
        return (torch.stack([norm, *(metrics[name] for name in self._metric_names[1:])]),)

    @torch.no_grad()
    def _row(self) -> dict[str, float]:
        """Compute a row of the log: means since the last row, and metrics of a held-out batch."""
        number = self.steps // self.settings.training.log_interval
        num = self._held_out.batch_size
        own = self._held_out[number][self.world.local_slice(num)]
        windows = self.dataset.batch(own).to(self.compute.device)
        generator = torch.Generator(self.compute.device).manual_seed(number)
        with self._evaluation_mode():
            held_out = self._forward(align(windows, self.settings.simulator), generator, num)[1]
        means = {name: float(torch.stack([metrics[name] for metrics in self._unlogged]).mean())
                 for name in self._unlogged[0]}
        self._unlogged = []
        return {"batches": self.steps, "epoch": self.epoch, "wall_time": self.wall_time,
                **means, **{f"held_out_{name}": float(held_out[name])
                            for name in self._metric_names[1:]}}

    def _write_state(self) -> None:
        """Write a checkpoint and a video, and delete old checkpoints."""
        if self._lock is None:
            return
        self._lock.check()
        training = self.settings.training
        batch = self.steps % self._order.batches_per_epoch
        more = {"batches": self.steps, "wall_time": self.wall_time,
                "generator": self._generator.get_state(), "unlogged": self._unlogged,
                **({} if not self.world.is_distributed else {"ranks": self.world.world_size})}
        if self._average is not None:
            more["trained_weights"] = [parameter.detach().cpu().clone()
                                       for parameter in self._parameters]
        with self._evaluation_mode():
            save_published(self.folder / checkpoint_name(self.epoch, batch), self.simulator,
                           self._unused, self.optimizer.state_dict(), more)
        prune_checkpoints(self.folder, training.keep_newest, training.keep_hours)
        self._write_video()

    @property
    def _video(self) -> Path:
        return self.folder / "recons_v_preds" / f"batch_{self.steps:07d}.mp4"

    @torch.no_grad()
    def _write_video(self) -> None:
        """Write a video of held-out windows: recorded frames, their reconstruction, and imagination
        with the recorded actions."""
        config = self.settings.simulator
        windows = self.dataset.batch(self._held_out[0][:VIDEO_WINDOWS]).to(self.compute.device)
        batch = align(windows, config)
        draw = LatentSampler("mode")
        with self._evaluation_mode(), self.compute.autocast():
            reconstruction = self.simulator(batch, draw).images
            start = self.simulator.start_from(self.simulator.encode(batch.initial_images), draw,
                                              world=batch.world)
            steps = self.simulator.imagine(start, draw, true_actions=batch.actions)
        columns = {"truth": batch.images, "reconstruction": reconstruction,
                   "imagination": stack(start, steps).images}
        videos = {title: to_frames(images) for title, images in columns.items()}
        write_video(self._video, side_by_side(videos, VIDEO_SCALE), VIDEO_FRAMES_PER_SECOND)


def _clone(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]
