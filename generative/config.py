"""Parameters of the simulator, its training, and simulations with it.

They are the sections ``gen_model``, ``record``, ``analysis.loss_over_time`` and
``analysis.saliency`` of ``hyperparams/interpreting_configs.yml``, which gives the meaning and unit
of each value.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from common.errors import UserError
from common.game_constants import FRAME_SIZE
from common.parameters import id_list, one_of, positive, tail_fraction

ARCHITECTURES = ("vector", "spatial")
GRID = 8  # cells per side of the spatial architecture's state
LR_DECAYS = ("none", "cosine", "tail")
_TAIL = 0.15  # share of the batches, at the end of training, over which "tail" decays
SAMPLE_STARTS = ("informed_init", "rand_init")  # folders of samples


def _within(config: object, low: float, high: float, *names: str) -> None:
    """Raise UserError if a field is neither None nor a finite number from ``low`` to ``high``.

    Args:
        names: names of the fields to check. The message names the first invalid one.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None and (not low <= value <= high or value == math.inf):
            raise UserError(f"{name} must lie between {low:g} and {high:g}, not {value}")


@dataclasses.dataclass(frozen=True)
class SimulatorConfig:
    """Sizes and loss weights; the defaults are the published ones.

    Attributes:
        num_init_steps: number of frames from which a simulation starts; at least 2, because the
            first simulated step takes the action at the second-to-last of them as input.
        num_sim_steps: number of simulated steps; the label of the first is the last initial frame.
        stoch_discrete: K, number of classes of each latent variable.
        stoch_dim: S, number of latent variables of a step.
        env_h_stoch_size: size of z; must be ``stoch_dim * stoch_discrete``.
        agent_hidden_size: D, size of the hidden state that the given agent must have; None takes
            the size from the agent.
        action_space_size: A, number of actions.
        deter_dim: H, size of the environment's deterministic state.
        initializer_rnn_hidden_size: hidden size of the GRU over the initial frames.
        layer_norm: whether the layers around the cell's GRU and the decoder's reward and terminal
            heads are layer-normalised; the GRU itself always is.
        hidden_dim: M, width of the cell's hidden layers.
        image_channels: C, colour channels of an image.
        cnn_depth: number of channels of the image decoder's last hidden layer; the other layers
            have 2, 4 and 32 times as many.
        reward_decoder_layers: number of hidden layers of the reward head.
        terminal_decoder_layers: number of hidden layers of the terminal head.
        kl_weight: weight of the KL loss.
        kl_balance: share of the KL loss that trains the prior.
        bottleneck_loss_weight: weight of the bottleneck loss.
        bottleneck_vec_size: V, size of the bottleneck vectors.
        env_update_penalty_weight: weight of the penalty on the norm of the change of the
            environment's deterministic state in a step.
        converter_width: width of the networks that compute the agent's first hidden state and
            action from the bottleneck vector; None for half the sum of their input and output
            sizes.
        architecture: ``vector``, the published one, or ``spatial`` (see ``generative.spatial``).
            The fields below apply to the latter only.
        patch_components: number of principal components that describe a patch of 8 x 8 pixels.
        canvas_channels: number of components of the last initial frame kept in each cell.
        memory_channels: number of memory channels of each cell.
        scene_channels: number of memory channels of each cell for objects that move through the
            level.
        fine_channels: number of memory channels of each block of 2 x 2 pixels of the view; None for
            no such memory.
        motion_dim: size of the memory of the camera's motion. ``deter_dim`` is the sum of this
            size, the 9 other numbers of the camera, and the channels of all cells and blocks.
        spatial_width: number of channels of the hidden layers.
        pixels_per_square: motion of the camera in pixels when the player moves by one square; 0
            for a static camera; None takes it from the recorded game when training starts.
        camera_loss_weight: weight of the camera's loss.
        world_squares: number of squares per side of the world, see ``generative.squares``, which
            fills the view of a static camera; None for a simulator that knows nothing beyond its
            canvas. The three fields below apply to worlds only.
        square_classes: number of classes of squares; None takes it from the recording when training
            starts.
        object_looks: numbers of looks of the last classes, which stand for objects that move or
            change their look, see ``generative.sprites``; None takes them from the recording.
        prior_widths: channels of the prior over worlds at full, half and quarter resolution (of
            which a static camera needs only the first), and of the prior over start vectors, see
            ``generative.prior``.
    """

    section: ClassVar[str] = "gen_model"

    num_init_steps: int = 3
    num_sim_steps: int = 32
    stoch_discrete: int = 32
    stoch_dim: int = 32
    env_h_stoch_size: int = 1024
    agent_hidden_size: int | None = None
    action_space_size: int = 15
    deter_dim: int = 512
    initializer_rnn_hidden_size: int = 512
    layer_norm: bool = True
    hidden_dim: int = 1000
    image_channels: int = 3
    cnn_depth: int = 48
    reward_decoder_layers: int = 4
    terminal_decoder_layers: int = 4
    kl_weight: float = 12.0
    kl_balance: float = 0.8
    bottleneck_loss_weight: float = 100.0
    bottleneck_vec_size: int = 128
    env_update_penalty_weight: float = 0.5
    converter_width: int | None = None
    architecture: str = "vector"
    patch_components: int = 64
    canvas_channels: int = 32
    memory_channels: int = 20
    scene_channels: int = 11
    fine_channels: int | None = None
    motion_dim: int = 55
    spatial_width: int = 96
    pixels_per_square: float | None = None
    camera_loss_weight: float = 120.0
    world_squares: int | None = None
    square_classes: int | None = None
    object_looks: tuple[int, ...] | None = None
    prior_widths: tuple[int, ...] = (64, 120, 160, 96)

    def __post_init__(self):
        one_of("architecture", self.architecture, ARCHITECTURES)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", "int | None") and value is not None and value < 1:
                raise UserError(f"{field.name} must be above 0, not {value}")
        _within(self, 0, math.inf, "kl_weight", "bottleneck_loss_weight",
                "env_update_penalty_weight", "camera_loss_weight", "pixels_per_square")
        _within(self, 0, 1, "kl_balance")
        if self.num_init_steps < 2:
            raise UserError("num_init_steps must be at least 2, not 1")
        if self.env_h_stoch_size != self.stoch_dim * self.stoch_discrete:
            raise UserError(f"env_h_stoch_size must be stoch_dim * stoch_discrete = "
                            f"{self.stoch_dim * self.stoch_discrete}, not {self.env_h_stoch_size}")
        if self.is_spatial:
            self._check_spatial_sizes()

    def _check_spatial_sizes(self) -> None:
        cells = GRID * GRID
        channels = self.canvas_channels + self.memory_channels + self.scene_channels
        blocks = (FRAME_SIZE // 2) ** 2
        size = cells * channels + blocks * (self.fine_channels or 0) + self.motion_dim + 9
        if self.deter_dim != size:
            raise UserError(f"deter_dim must be {cells} * (canvas_channels + memory_channels + "
                            f"scene_channels) + {blocks} * fine_channels + motion_dim + 9 = {size} "
                            f"in the spatial architecture, not {self.deter_dim}")
        if self.bottleneck_vec_size % cells or self.bottleneck_vec_size < 2 * cells:
            raise UserError(f"bottleneck_vec_size must be a multiple of {cells} from {2 * cells} "
                            "up in the spatial architecture, not "
                            f"{self.bottleneck_vec_size}")
        if self.spatial_width % 16:
            raise UserError(f"spatial_width must be a multiple of 16, not {self.spatial_width}")
        most = self.image_channels * (FRAME_SIZE // GRID) ** 2
        smallest = max(self.canvas_channels, self.bottleneck_vec_size // cells - 1)
        if not smallest <= self.patch_components <= most:
            raise UserError(f"patch_components must lie between {smallest}, the components in "
                            f"the canvas or the bottleneck vector, and {most}, not "
                            f"{self.patch_components}")
        if self.world_squares is not None and (
                self.world_squares % 2 == 0 or self.world_squares < 3):
            raise UserError("world_squares must be an odd number from 3 up, not "
                            f"{self.world_squares}")
        if self.world_squares and self.pixels_per_square and (
                self.world_squares * self.pixels_per_square < 1.01 * FRAME_SIZE):
            raise UserError(f"world_squares is {self.world_squares}, but so many squares of "
                            f"{self.pixels_per_square:g} pixels are no larger than the view")
        if len(self.prior_widths) != 4 or any(width < 8 or width % 8
                                              for width in self.prior_widths):
            raise UserError("prior_widths must be four multiples of 8")
        if (self.stoch_dim, self.stoch_discrete) != (1, 1):
            raise UserError("the spatial architecture has no latent variables: stoch_dim and "
                            "stoch_discrete must be 1")

    def describe(self) -> dict:
        """Return the fields by name, without those of worlds if there are none, so that settings
        saved before there were worlds compare equal."""
        fields = dataclasses.asdict(self)
        if self.world_squares is None:
            for name in ("world_squares", "square_classes", "object_looks", "prior_widths"):
                del fields[name]
        return fields

    @property
    def is_spatial(self) -> bool:
        return self.architecture == "spatial"

    @property
    def square_size(self) -> float:
        """Size of a square of the world in pixels, which a static camera determines."""
        assert self.world_squares is not None
        return self.pixels_per_square or FRAME_SIZE / self.world_squares

    @property
    def window_length(self) -> int:
        """Number of frames in a window of data."""
        return self.num_init_steps + self.num_sim_steps - 1


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Training parameters of a simulator.

    Attributes:
        log_interval: number of batches per row of the log.
        save_interval: number of batches between two checkpoints; a checkpoint is also written if
            the last one is 10 minutes old.
        keep_newest: number of newest checkpoints that are kept.
        keep_hours: interval in hours; of the older checkpoints, the first in every interval is
            kept.
        lr: initial learning rate.
        batch_size: number of windows per batch.
        epochs: number of passes over the training windows.
        held_out_fraction: share of the episodes that is held out for validation.
        terminal_absorbing: whether labels of the terminal stay 1 after an episode's end.
        lr_decay: ``none`` for a constant rate; ``cosine`` for half a cosine from ``lr`` down to 0
            at the end (Loshchilov and Hutter 2017, "SGDR"); ``tail`` for a linear decay to 0 over
            the last 15 % of the batches.
        image_rarity: exponent with which pixels are weighted by the rarity of their colour, see
            ``losses.PixelWeights``; 0 for equal weights.
        open_loop_share: share of a batch's windows in which the latents are drawn from the prior
            from the first step on, as in a simulation, so that training reduces the errors that
            accumulate over steps.
        gradient_norm_limit: largest gradient norm; larger gradients are scaled down to it.
        average_decay: decay per batch of the exponential moving average of the weights; 0 for no
            average. After n batches, the decay is at most (1 + n) / (10 + n). Checkpoints store the
            averaged weights, and the trained weights to resume from.
        until_end: whether the image loss is 0 from the terminal frame on, and the reward and
            terminal losses are 0 after it.
        agent_every: n; the agent acts, and its state has a loss, in every n-th window of a batch.
        vector_noise: norm of the noise on the bottleneck vectors of every second window.
        true_camera_share: probability, in each step and window of training, that the recorded
            motion of the camera replaces the predicted one. This matters because the image loss
            rewards blur where the camera is wrong.
        freeze_encoder: keep the encoder's weights, so that start vectors do not change.
        death_copies, coin_copies: number of times that a window in which the agent dies, or is
            rewarded and ends the episode, occurs in an epoch. The loss of the outcome is divided by
            this number, so that probabilities stay calibrated. Simulators with worlds only.
    """

    section: ClassVar[str] = "gen_model"

    log_interval: int
    save_interval: int
    keep_newest: int
    keep_hours: float
    lr: float
    batch_size: int
    epochs: int
    held_out_fraction: float
    terminal_absorbing: bool
    lr_decay: str = "none"
    image_rarity: float = 0.0
    open_loop_share: float = 0.0
    gradient_norm_limit: float = 100.0
    average_decay: float = 0.0
    until_end: bool = False
    agent_every: int = 1
    vector_noise: float = 0.0
    true_camera_share: float = 0.0
    freeze_encoder: bool = False
    death_copies: int = 1
    coin_copies: int = 1

    def __post_init__(self):
        positive(self, "log_interval", "save_interval", "keep_newest", "keep_hours", "lr",
                 "death_copies", "coin_copies", "gradient_norm_limit", "agent_every", "batch_size",
                 "epochs")
        one_of("lr_decay", self.lr_decay, LR_DECAYS)
        _within(self, 0, 1, "image_rarity", "open_loop_share", "held_out_fraction",
                "true_camera_share")
        _within(self, 0, math.inf, "vector_noise")
        _within(self, 0, 1 - 1e-9, "average_decay")

    def lr_at(self, batch: int, num_batches: int) -> float:
        """Return the learning rate at a batch, counted from 0, of ``num_batches`` batches."""
        if self.lr_decay == "none":
            return self.lr
        if self.lr_decay == "tail":
            return self.lr * min(1.0, (num_batches - batch) / (_TAIL * num_batches))
        return self.lr * (1 + math.cos(math.pi * batch / num_batches)) / 2


@dataclasses.dataclass(frozen=True)
class RecordConfig:
    """Parameters of the simulated samples.

    Attributes:
        rand_init: start from random vectors instead of recorded frames.
        max_samples: number of samples.
    """

    section: ClassVar[str] = "record"

    rand_init: bool
    max_samples: int


@dataclasses.dataclass(frozen=True)
class LossOverTimeConfig:
    """Parameters of the loss over simulated steps.

    Attributes:
        num_batches: number of batches of held-out windows.
    """

    section: ClassVar[str] = "analysis.loss_over_time"

    num_batches: int


@dataclasses.dataclass(frozen=True)
class SaliencyConfig:
    """Parameters of saliency: its samples, directions and functions.

    Attributes:
        num_sim_steps, num_sim_steps_manual_actions: number of steps of samples without and with
            manual actions.
        direction_type: "ica" or "pca".
        direction_ids: directions of the hidden state; text that ``ids`` parses.
        func_type: names of the functions whose gradients are computed.
        common_timesteps: steps, counted from 0, at which the functions are evaluated.
        sample_ids: samples to analyse; text that ``ids`` parses.
        difference_demo_sample_ids: samples for the comparison of gradients with and without the
            environment; text that ``ids`` parses.
        batch_size: number of copies of each sample: one unperturbed, the others with perturbed
            start vectors.
        perturbation_scale: standard deviation of the perturbation.
        combine_samples_not_iterate: analyse one simulation from the samples' mean start vector
            instead of each sample.
        gaussian_kernel_size, sigma: size and standard deviation of the smoothing kernel, in pixels.
        extrema_threshold: share of all steps, at each end of a component's range, shown as
            examples of extreme values.
    """

    section: ClassVar[str] = "analysis.saliency"

    num_sim_steps: int
    num_sim_steps_manual_actions: int
    direction_type: str
    direction_ids: str
    func_type: tuple[str, ...]
    common_timesteps: tuple[int, ...]
    sample_ids: str
    difference_demo_sample_ids: str
    batch_size: int
    perturbation_scale: float
    combine_samples_not_iterate: bool
    gaussian_kernel_size: int
    sigma: float
    extrema_threshold: float

    def __post_init__(self):
        positive(self, "num_sim_steps", "num_sim_steps_manual_actions", "batch_size",
                 "gaussian_kernel_size", "sigma")
        tail_fraction(self, "extrema_threshold")
        one_of("direction_type", self.direction_type, ("ica", "pca"))
        _within(self, 0, math.inf, "perturbation_scale")
        if self.gaussian_kernel_size % 2 == 0:
            raise UserError(f"gaussian_kernel_size must be odd, not {self.gaussian_kernel_size}")
        for name in ("func_type", "common_timesteps"):
            if not getattr(self, name):
                raise UserError(f"{name} must not be empty")
        if min(self.common_timesteps) < 0:
            raise UserError(f"common_timesteps must not be negative: {self.common_timesteps}")
        for name in ("direction_ids", "sample_ids", "difference_demo_sample_ids"):
            self.ids(name)

    def ids(self, name: str) -> tuple[int, ...]:
        """Parse the numbers in the field ``name``."""
        return id_list(getattr(self, name), name)
