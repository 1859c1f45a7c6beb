"""The spatial architecture: encoder, cell and decoder whose state is a grid.

The state is a grid of 8 x 8 cells, each of which describes a patch of 8 x 8 pixels, and a few
global numbers. Part of the grid is the *canvas*: an image of the last initial frame. The canvas
stays the same in all steps. The cell predicts the motion of the camera and accumulates it in the
*displacement*. The canvas, shifted by the displacement, shows the part of the view that was visible
in the last initial frame, so static objects keep their shape. The rest of the grid is the memory of
two convolutional GRUs. The *scene* represents objects that move through the level; it has the
coordinates of the canvas, and changes the canvas before the shift. The *memory* represents the
player and newly revealed places; it has the coordinates of the view. A simulator can also have a
*fine memory* of blocks of 2 x 2 pixels of the view, for games whose objects are smaller than a
patch.

Image patches are represented in a basis of principal components that is fitted to the recording
when training starts (``PatchBasis.fit``). Encoder and start are initialised to pass the leading
components through, so that training starts from a linear code of the last initial frame.

In training mode, the camera's motion is learned from recorded positions only: the image loss has no
gradient with respect to the displacement and the motion memory. The camera's loss reaches earlier
steps and the start through the motion memory, but has no gradient with respect to the canvas, the
memory and earlier velocities. In evaluation mode everything is differentiable.

Letters in shape comments: N images or states of any kind, B batch, I initial frames, T simulated
steps, C H W an image (elsewhere, H is the state and W the hidden channels), K coefficients of a
patch (after S: classes of a latent variable), S latent variables, V bottleneck vector, A actions.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.game_constants import FRAME_SIZE
from generative.camera import (
    FASTEST,
    NUM_MOTIONS,
    PHASE_DIM,
    STATIC_PHASE,
    CameraMotion,
    CameraState,
    Look,
    PhaseEstimator,
    VelocityEstimator,
    cell_patterns,
    frame_edges,
    initialise,
    motion_costs,
    near_player,
    shift,
)
from generative.config import GRID, SimulatorConfig
from generative.networks import on_unit_sphere
from generative.spatial_layers import (
    BLOCK,
    ConvGRU,
    FineMemory,
    PatchBasis,
    ResidualBlock,
)
from generative.squares import Scenery, SquareImages

NUM_CELLS = GRID * GRID
BLOCKS = FRAME_SIZE // BLOCK  # per side
NUMBLOCKS = BLOCKS * BLOCKS
_NUM_CAMERA = 5  # the last numbers of the state: velocity, displacement, started
_SMALLEST_SCALE = 0.25  # lower limit of the code's scale, see ``SpatialStart``
_MOTION_WIDTH = 256


@dataclasses.dataclass(frozen=True)
class SpatialState:
    """Parts of the environment's state; the numbers of channels are in ``SimulatorConfig``.

    Attributes:
        canvas: leading coefficients of the patches of the last initial frame
            (B, canvas_channels, 8, 8).
        memory: memory in coordinates of the view (B, memory_channels, 8, 8).
        scene: memory in coordinates of the canvas (B, scene_channels, 8, 8).
        fine: memory of blocks of 2 x 2 pixels of the view (B, fine_channels or 0, 32, 32).
    """

    canvas: Tensor
    memory: Tensor
    scene: Tensor
    fine: Tensor
    camera: CameraState

    def flat(self) -> Tensor:
        """Flatten the state to (B, H): channels of the cells, of the blocks, and camera state."""
        grid = torch.cat([self.canvas, self.memory, self.scene], dim=1).float()
        return torch.cat([*(parts.permute(0, 2, 3, 1).flatten(1) for parts in (grid, self.fine)),
                          *vars(self.camera).values()], dim=-1)


def split_state(env_h: Tensor, config: SimulatorConfig) -> SpatialState:
    """Split a flat state (B, H) into its parts; the inverse of ``SpatialState.flat``."""
    sizes = (config.canvas_channels, config.memory_channels, config.scene_channels)
    channels = config.fine_channels or 0
    grid, fine, *camera = env_h.split(
        [NUM_CELLS * sum(sizes), NUMBLOCKS * channels, config.motion_dim, PHASE_DIM, 2, 2, 1],
        dim=-1)
    cells = grid.unflatten(1, (GRID, GRID, sum(sizes))).permute(0, 3, 1, 2)
    blocks = fine.unflatten(1, (BLOCKS, BLOCKS, channels)).permute(0, 3, 1, 2)
    canvas, memory, scene = cells.split(sizes, dim=1)
    return SpatialState(canvas, memory, scene, blocks, CameraState(*camera))


def with_phase(env_h: Tensor, phase: Tensor, config: SimulatorConfig) -> Tensor:
    """Replace the camera's phase in states (B, H) by another one (B, 4)."""
    state = split_state(env_h, config)
    return dataclasses.replace(state, camera=dataclasses.replace(state.camera, phase=phase)).flat()


class SpatialEncoder(nn.Module):
    """Encoder of initial frames into unit vectors: a normalised code of V / 64 numbers per cell.

    The last channel of the code is initialised to about 1 in every cell. From its mean,
    ``SpatialStart`` recovers the norm that is lost in normalisation. The camera's velocity and
    phase are added to this channel as the coefficients of six fixed patterns, see
    ``camera.cell_patterns``.

    Args:
        basis: basis of image patches, shared with cell and decoder.
    """

    def __init__(self, config: SimulatorConfig, basis: PatchBasis):
        super().__init__()
        self._basis = (basis,)  # in a tuple because the simulator registers the module
        width, frames = config.spatial_width, config.num_init_steps * config.image_channels
        channels = config.bottleneck_vec_size // NUM_CELLS
        self.down = nn.Sequential(
            nn.Conv2d(frames, 32, kernel_size=4, stride=2, padding=1), nn.SiLU(),
            nn.Conv2d(32, 64, kernel_size=4, stride=2, padding=1), ResidualBlock(64), nn.SiLU(),
            nn.Conv2d(64, width, kernel_size=4, stride=2, padding=1))
        self.coefficients = nn.Conv2d(len(basis.scale), width, kernel_size=1)
        self.blocks = nn.Sequential(ResidualBlock(width), ResidualBlock(width))
        self.out = nn.Conv2d(width, channels, kernel_size=1)
        initialise(self.out, [0] * (channels - 1) + [1])
        self.moves = bool(config.pixels_per_square)
        if config.pixels_per_square:
            self.motion = nn.Sequential(
                nn.Linear((config.num_init_steps - 1) * NUM_MOTIONS, _MOTION_WIDTH), nn.SiLU(),
                nn.Linear(_MOTION_WIDTH, config.bottleneck_vec_size))
            self.phase = PhaseEstimator(config.pixels_per_square)
            self.velocity = VelocityEstimator(config.num_init_steps)
            initialise(self.motion[-1])

    def forward(self, images: Tensor) -> Tensor:
        """Encode images (I, B, C, H, W) in [0, 1] as unit vectors (B, V)."""
        frames = images.transpose(0, 1).flatten(1, 2)  # (B, I·C, H, W)
        coefficients = self._basis[0].coefficients(images[-1])  # (B, K, 8, 8)
        x = self.blocks(self.down(frames) + self.coefficients(coefficients))
        code = self.out(x).float()  # (B, V / 64, 8, 8)
        passed = code.shape[1] - 1
        code = code + functional.pad(coefficients[:, :passed].float(), (0, 0, 0, 0, 0, 1))
        if not self.moves:
            return on_unit_sphere(code.permute(0, 2, 3, 1).flatten(1))
        costs = torch.stack([motion_costs(*pair) for pair in itertools.pairwise(images)], dim=1)
        moved = self.motion((costs - costs.amin(dim=(1, 2), keepdim=True)).flatten(1)).float()
        # Scaled by the constant, by which ``SpatialStart`` divides.
        camera = code[:, -1].mean(dim=(1, 2))[:, None] * self._camera(images, costs)
        last = camera @ cell_patterns(code).flatten(1)
        code = code + functional.pad(last.unflatten(1, (1, GRID, GRID)), (0, 0, 0, 0, passed, 0))
        return on_unit_sphere(code.permute(0, 2, 3, 1).flatten(1) + moved)

    def estimate_camera(self, costs: Tensor, edges: Tensor) -> Tensor:
        """Estimate the camera's velocity and phase in the last initial frame (B, 6).

        The first two numbers are the velocity in units of FASTEST, the other four the phase, see
        ``camera.PhaseEstimator``.

        Args:
            costs: costs of NUM_MOTIONS candidate motions between consecutive initial frames, see
                ``camera.motion_costs`` (B, I - 1, NUM_MOTIONS).
            edges: edges in the initial frames, see ``camera.frame_edges`` (B, I, 2, 63).
        """
        phases = self.phase(edges)
        return torch.cat([self.velocity(costs, phases) / FASTEST, phases[:, -1]], dim=-1)

    def _camera(self, images: Tensor, costs: Tensor) -> Tensor:
        """Apply ``estimate_camera`` to images (I, B, C, 64, 64) and the costs of motions between
        them (B, I - 1, NUM_MOTIONS)."""
        with torch.autocast(costs.device.type, enabled=False):
            edges = torch.stack([frame_edges(frames) for frames in images], dim=1)
            return self.estimate_camera(costs, edges)


class SpatialStart(nn.Module):
    """Network that maps bottleneck vectors to the state before the first step.

    The encoder normalises its code, whose last channel is initialised to about 1. The network
    therefore divides a vector by the mean of its last channel. Vectors that do not come from the
    encoder can have any mean there, so the divisor has a lower limit.

    Args:
        basis: basis of image patches, shared with encoder, cell and decoder.
    """

    def __init__(self, config: SimulatorConfig, basis: PatchBasis):
        super().__init__()
        self.config = config
        self._basis = (basis,)
        width, channels = config.spatial_width, config.bottleneck_vec_size // NUM_CELLS
        self.inside = nn.Conv2d(channels, width, kernel_size=3, padding=1)
        self.blocks = nn.Sequential(ResidualBlock(width), ResidualBlock(width))
        self.sizes = [config.canvas_channels, config.memory_channels, config.scene_channels]
        self.out = nn.Conv2d(width, sum(self.sizes), kernel_size=1)
        initialise(self.out, [0] * self.out.out_channels)
        if config.fine_channels:
            self.fine = nn.Sequential(
                nn.Conv2d(config.image_channels * BLOCK**2, width, kernel_size=3, padding=1),
                nn.SiLU(), nn.Conv2d(width, config.fine_channels, kernel_size=3, padding=1),
                nn.Tanh())
        if config.pixels_per_square:
            self.motion = nn.Sequential(
                nn.Linear(config.bottleneck_vec_size, _MOTION_WIDTH), nn.SiLU(),
                nn.Linear(_MOTION_WIDTH, config.motion_dim + 2 + PHASE_DIM))
            initialise(self.motion[-1])

    def forward(self, vectors: Tensor) -> Tensor:
        """Map start vectors (B, V) to states, followed by the logits of z (B, H + S·K); these
        logits are 0."""
        h = self.state(vectors, self.camera(vectors, self.carried(vectors))).flat()
        return torch.cat([h, h.new_zeros(len(h), self.config.env_h_stoch_size)], dim=-1)

    def state(self, vectors: Tensor, camera: CameraState) -> SpatialState:
        """Map start vectors (B, V) to states with a given camera."""
        config, code = self.config, self._code(vectors)
        channels = code.shape[1]
        passed = min(channels - 1, config.canvas_channels)
        canvas, memory, scene = self.out(self.blocks(self.inside(code))).float().split(
            self.sizes, dim=1)
        canvas = canvas + functional.pad(
            code[:, :passed], (0, 0, 0, 0, 0, config.canvas_channels - passed))
        fine = canvas.new_zeros(len(canvas), 0, BLOCKS, BLOCKS)
        if config.fine_channels:
            fine = self.fine(functional.pixel_unshuffle(self._basis[0].images(canvas), BLOCK))
        return SpatialState(canvas, torch.tanh(memory), torch.tanh(scene), fine.float(), camera)

    def _code(self, vectors: Tensor) -> Tensor:
        """Recover the encoder's code before normalisation (B, V / 64, 8, 8) from vectors (B, V)."""
        channels = vectors.shape[1] // NUM_CELLS
        code = vectors.unflatten(1, (GRID, GRID, channels)).permute(0, 3, 1, 2)
        constant = code[:, -1:].mean(dim=(1, 2, 3), keepdim=True)  # (B, 1, 1, 1)
        unit = NUM_CELLS ** -0.5 * channels ** -0.5
        return code / constant.clamp(min=_SMALLEST_SCALE * unit)

    def carried(self, vectors: Tensor) -> Tensor:
        """Extract the camera's velocity and phase (B, 6) from vectors (B, V).

        The format is that of ``SpatialEncoder.estimate_camera``.
        """
        code = self._code(vectors)
        return code[:, -1].flatten(1) @ (cell_patterns(code).flatten(1).T / NUM_CELLS)

    def camera(self, vectors: Tensor, carried: Tensor) -> CameraState:
        """Compute the camera's state before the first step.

        Args:
            vectors: bottleneck vectors (B, V).
            carried: velocity, in units of FASTEST, and phase, from the method ``carried`` (B, 6).
        """
        if not self.config.pixels_per_square:
            sizes = (self.config.motion_dim, PHASE_DIM, 2, 2, 1)
            camera = CameraState(*(vectors.new_zeros(len(vectors), size) for size in sizes))
            if self.config.world_squares:
                for column, value in enumerate(STATIC_PHASE):
                    camera.phase[:, column] = value
            return camera
        motion, correction = self.motion(vectors * vectors.shape[1] ** 0.5).float().split(
            [self.config.motion_dim, 2 + PHASE_DIM], dim=-1)
        velocity, phase = (carried + correction).split([2, PHASE_DIM], dim=-1)
        still = torch.zeros_like(velocity)
        return CameraState(torch.tanh(motion), phase, FASTEST * velocity, still, still[:, :1])


class NoEmbedding(nn.Module):
    """Empty frame embedding; the spatial architecture has no posterior that needs one."""

    def forward(self, images: Tensor) -> Tensor:
        """Return empty embeddings (N, 0) of images (N, C, H, W)."""
        return images.new_zeros(len(images), 0)


def looking_at(canvas: Tensor, world: Scenery | None, basis: PatchBasis,
               squares: SquareImages | None) -> tuple[Look, Tensor]:
    """Return a function that draws static surroundings at a displacement, see ``camera.Look``, and
    the image of the canvas (B, C, 64, 64), which is empty if there is a world.

    Args:
        canvas: canvas of the state (B, canvas_channels, 8, 8).
        world: static surroundings; None to draw the canvas.
    """
    if world is None:
        image = basis.images(canvas)
        return functools.partial(shift, image), image
    assert squares is not None

    def look(displacement: Tensor, size: int) -> tuple[Tensor, Tensor]:
        view = squares(world, displacement, size)
        return view, torch.ones_like(view[:, :1])
    return look, canvas.new_empty(0)


class SceneFeatures(nn.Module):
    """Network that computes features (N, W / 2, 8, 8) of the canvas and the scene."""

    def __init__(self, config: SimulatorConfig):
        super().__init__()
        self.width = config.spatial_width // 2
        self.inputs = nn.Conv2d(config.canvas_channels + config.scene_channels, self.width,
                                kernel_size=1)
        self.block = ResidualBlock(self.width)

    def forward(self, canvas: Tensor, scene: Tensor) -> Tensor:
        return self.block(self.inputs(torch.cat([canvas, scene], dim=1)))


class SpatialCell(nn.Module):
    """Recurrent cell of the environment; same interface as ``generative.networks.EnvironmentCell``.

    Args:
        basis: basis of image patches, shared with encoder and decoder.
        squares: images of the classes of squares; None without worlds.
    """

    def __init__(self, config: SimulatorConfig, basis: PatchBasis,
                 squares: SquareImages | None = None):
        super().__init__()
        self.config = config
        self._basis, self._squares = (basis,), (squares,)
        self.latent_shape = (config.stoch_dim, config.stoch_discrete)
        width, memory = config.spatial_width, config.memory_channels
        if config.pixels_per_square:
            self.camera = CameraMotion(config, config.action_space_size)
        self.from_view = nn.Conv2d(len(basis.scale), width, kernel_size=1)
        self.from_memory = nn.Conv2d(memory, width, kernel_size=1)
        self.from_global = nn.Linear(config.action_space_size + config.motion_dim + memory, width)
        self.block = ResidualBlock(width)
        self.remember = ConvGRU(width, memory)
        self.scene_input = SceneFeatures(config)
        self.move_scene = ConvGRU(self.scene_input.width, config.scene_channels)
        self.fine = FineMemory(config.image_channels, config.fine_channels,
                               config.action_space_size) if config.fine_channels else None

    def action_input(self, action: Tensor) -> Tensor:
        """Return one-hot actions (…, A) unchanged."""
        return action

    def embedding_input(self, embedding: Tensor) -> Tensor:
        """Return empty frame embeddings (…, 0) unchanged."""
        return embedding

    def advance(self, z: Tensor, action_input: Tensor, h: Tensor,
                world: Scenery | None = None) -> Tensor:
        """Compute the next state.

        Args:
            z: ignored.
            action_input: one-hot actions (B, A).
            h: states (B, H).
            world: static surroundings; None if the canvas is all that is known.

        Returns:
            Next states (B, H).
        """
        state, basis = split_state(h, self.config), self._basis[0]
        memory, camera, view = state.memory, state.camera, basis.padded(state.canvas)
        look, shown = looking_at(state.canvas, world, basis, self._squares[0])
        if self.config.pixels_per_square:
            with torch.autocast(h.device.type, enabled=False):
                near = near_player(memory) if world is None else None
                camera = self.camera(look, near, camera, action_input)
        if self.config.pixels_per_square or world is not None:
            displacement = camera.displacement.detach() if self.training else camera.displacement
            squares = self._squares[0]
            shown = (look(displacement, FRAME_SIZE)[0] if world is None or squares is None
                     else squares.view(world, displacement))
            view = basis.coefficients(shown)
        motion = camera.motion.detach() if self.training else camera.motion
        everywhere = torch.cat([action_input, motion, memory.mean(dim=(2, 3))], dim=-1)
        x = self.block(self.from_view(view) + self.from_memory(memory)
                       + self.from_global(everywhere)[:, :, None, None])
        scene = self.move_scene(self.scene_input(state.canvas, state.scene), state.scene)
        fine = state.fine if self.fine is None else self.fine(shown, state.fine, action_input)
        return SpatialState(state.canvas, self.remember(x, memory), scene, fine, camera).flat()

    def camera_state(self, h: Tensor) -> Tensor:
        """Return the camera's motion in states (…, H).

        Returns:
            Velocity (right, down), then displacement (right, down) (…, 4).
        """
        return h[..., -_NUM_CAMERA:-1]

    def with_camera(self, h: Tensor, camera: Tensor, where: Tensor) -> Tensor:
        """Return states in which the camera's motion is replaced where ``where`` is True.

        Args:
            h: states (B, H).
            camera: new velocity and displacement, as from ``camera_state`` (B, 4).
            where: rows to replace, bool (B,).
        """
        known = torch.where(where[:, None], camera, self.camera_state(h))
        return torch.cat([h[:, :-_NUM_CAMERA], known, h[:, -1:]], dim=-1)

    def prior_logits(self, h: Tensor) -> Tensor:
        """Return zero logits (…, S, K), because the only latent variable has a single class."""
        return h.new_zeros(*h.shape[:-1], *self.latent_shape)

    def posterior_logits(self, h: Tensor, embedding_input: Tensor) -> Tensor:
        """Return zero logits (…, S, K), like the prior."""
        return self.prior_logits(h)
