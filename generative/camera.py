"""The camera of the spatial architecture: its motion, and its position within a square.

Games are drawn from sprites of one square each. The size of a square need not be a whole number of
pixels, so the appearance of a square depends on where the pixels lie within it. A frame can
therefore not be computed from an earlier one by interpolation alone. The *phase* is the position of
the camera within a square. It is given by the cosine and sine of two angles, the first for the
position to the right and the second for the position down, where a full turn is one square. The
phase is estimated in the last initial frame and follows from the displacement afterwards.

Letters in shape comments: S pixels or patches per side.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from common.game_constants import FRAME_SIZE
from generative.config import GRID, SimulatorConfig

PATCH = FRAME_SIZE // GRID  # pixels per side of a cell's patch
CROP = 24  # pixels per side of the crop from which the camera's motion is predicted
FASTEST = 4.0  # pixels per step, the unit of velocities inside the networks
PHASE_DIM = 4  # cosine and sine of the phase to the right, and of the phase down
STATIC_PHASE = (-1.0, 0.0, -1.0, 0.0)  # of a static camera, above the middle of a square
NUM_PHASE_MAPS = 12  # channels of ``phase_maps``
_SHIFTS_X, _SHIFTS_Y = 3, 8  # largest motions, in pixels, that ``motion_costs`` compares
NUM_MOTIONS = (2 * _SHIFTS_X + 1) * (2 * _SHIFTS_Y + 1)
_HARMONICS = 3  # number of harmonics of the squares' frequency at which edges are measured
_MOTION_WIDTH = 128


def shift(images: Tensor, displacement: Tensor, size: int = FRAME_SIZE) -> tuple[Tensor, Tensor]:
    """Shift the camera over images, with bilinear interpolation and border padding.

    Args:
        images: images (N, C, 64, 64).
        displacement: displacement of the camera in pixels, to the right and down (N, 2).
        size: S, pixels per side of the central part that is returned.

    Returns:
        The view (N, C, S, S), and the fraction of each pixel that lies inside the image
        (N, 1, S, S).
    """
    pixels = torch.arange(FRAME_SIZE, device=images.device, dtype=torch.float32)
    first = (FRAME_SIZE - size) // 2

    def hats(by: Tensor) -> tuple[Tensor, Tensor]:
        at = pixels[first:first + size] + by[:, None]  # (N, S)
        clamped = at.clamp(0, FRAME_SIZE - 1)
        known = (1 - (at - clamped).abs()).clamp(min=0)
        return (1 - (clamped[:, :, None] - pixels).abs()).clamp(min=0), known

    (columns, known_x), (rows, known_y) = map(hats, displacement.float().unbind(dim=-1))
    inside = known_y[:, None, :, None] * known_x[:, None, None, :]
    with torch.autocast(images.device.type, enabled=False):
        view = rows[:, None] @ images.float() @ columns[:, None].transpose(-1, -2)
    return view, inside


Look = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""Maps a displacement (N, 2) and a size S to the view and the known fraction of its pixels, as
``shift`` does."""


def initialise(layer: nn.Module, bias: Sequence[float] = ()) -> None:
    """Multiply the weights of an output layer by 0.1, and set its biases to ``bias`` if given."""
    with torch.no_grad():
        layer.get_parameter("weight").mul_(0.1)
        if bias:
            layer.get_parameter("bias").copy_(torch.tensor(bias))


def motion_costs(before: Tensor, after: Tensor) -> Tensor:
    """Compare two consecutive frames at each candidate motion of the camera between them.

    The result is a cost volume (Fischer et al. 2015, "FlowNet", section 3) for one global motion.
    The frames are averaged over their colours. The player, in the middle, is excluded, because it
    does not move in the view.

    Args:
        before: first frame (B, C, 64, 64).
        after: next frame (B, C, 64, 64).

    Returns:
        Logarithms of mean squared errors, one for each motion (B, NUM_MOTIONS).
    """
    before, after = before.mean(dim=1), after.mean(dim=1)
    height, width = FRAME_SIZE - 2 * _SHIFTS_Y, FRAME_SIZE - 2 * _SHIFTS_X
    middle = after[:, _SHIFTS_Y:_SHIFTS_Y + height, _SHIFTS_X:_SHIFTS_X + width]
    counts = torch.ones(height, width, device=after.device)
    counts[height // 2 - 8:height // 2 + 8, width // 2 - 6:width // 2 + 6] = 0
    return torch.stack([
        ((before[:, y:y + height, x:x + width] - middle).square() * counts).sum(dim=(1, 2))
        for y in range(2 * _SHIFTS_Y + 1) for x in range(2 * _SHIFTS_X + 1)], dim=-1).div(
            counts.sum()).add(1e-4).log()


def cell_patterns(like: Tensor) -> Tensor:
    """Return six orthogonal patterns of 1 and -1 over the cells, with mean 0.

    Their coefficients encode the camera's velocity (the first two patterns) and phase (the last
    four).

    Args:
        like: any tensor on the device of the result.

    Returns:
        Patterns (6, 8, 8).
    """
    half = torch.ones(GRID, device=like.device)
    quarter = half.clone()
    half[:GRID // 2] = -1
    quarter.unflatten(0, (4, -1))[::2] = -1
    patterns = [pattern for wave in (half, quarter)
                for pattern in (wave.expand(GRID, GRID), wave[:, None].expand(GRID, GRID))]
    return torch.stack([*patterns, half * half[:, None], quarter * quarter[:, None]])


def moved_phase(phase: Tensor, displacement: Tensor, pixels_per_square: float) -> Tensor:
    """Compute the phase after the camera has moved.

    Args:
        phase: cosine and sine of the phase to the right, and of the phase down (…, 4).
        displacement: displacement in pixels to the right and down (…, 2). The leading dimensions of
            phase and displacement are broadcast.

    Returns:
        The phase at the displaced position (…, 4).
    """
    angle = 2 * math.pi / pixels_per_square * displacement
    cosine, sine = phase.unflatten(-1, (2, 2)).unbind(dim=-1)  # (N, 2)
    return torch.stack([cosine * angle.cos() - sine * angle.sin(),
                        sine * angle.cos() + cosine * angle.sin()], dim=-1).flatten(-2)


def phase_between(before: Tensor, after: Tensor) -> Tensor:
    """Compute the change from phase ``before`` to phase ``after``.

    Both phases and the result have four numbers (…, 4): cosine and sine of an angle to the right,
    then of an angle down.

    Returns:
        Cosines and sines of the differences of the angles (…, 4).
    """
    (cosine, sine), (next_cosine, next_sine) = (
        phase.unflatten(-1, (2, 2)).unbind(dim=-1) for phase in (before, after))
    return torch.stack([next_cosine * cosine + next_sine * sine,
                        next_sine * cosine - next_cosine * sine], dim=-1).flatten(-2)


def with_second_harmonic(phase: Tensor) -> Tensor:
    """Append the cosines and sines of the doubled angles to phases: (…, 4) to (…, 8)."""
    cosine, sine = phase.unflatten(-1, (2, 2)).unbind(dim=-1)
    double = torch.stack([cosine.square() - sine.square(), 2 * cosine * sine], dim=-1)
    return torch.cat([phase, double.flatten(-2)], dim=-1)


def phase_maps(phase: Tensor, displacement: Tensor, pixels_per_square: float,
               size: int = GRID) -> Tensor:
    """Compute maps of the phase at each patch's top left corner, and of the subpixel displacement.

    Args:
        phase: cosine and sine of the phase to the right, and of the phase down, in the last
            initial frame (N, 4).
        displacement: displacement since then in pixels to the right and down (N, 2).
        pixels_per_square: size of a square in pixels; 0 for a static camera, whose maps are 0.
        size: S, patches per side of the image.

    Returns:
        Maps (N, ``NUM_PHASE_MAPS``, S, S).
    """
    if not pixels_per_square:
        return phase.new_zeros(len(phase), NUM_PHASE_MAPS, size, size)
    corners = FRAME_SIZE // size * torch.arange(size, device=phase.device, dtype=phase.dtype)
    places = displacement[:, None] + corners[:, None]  # (N, S, 2)
    within = with_second_harmonic(moved_phase(phase[:, None], places, pixels_per_square))
    right, down = within.unflatten(-1, (2, 2, 2)).movedim(-2, 0)  # (N, S, harmonic, cos/sin)
    across = right.flatten(2).transpose(1, 2)[:, :, None].expand(-1, -1, size, -1)
    along = down.flatten(2).transpose(1, 2)[:, :, :, None].expand(-1, -1, -1, size)
    pixel = 2 * math.pi * displacement
    pixel = torch.cat([pixel.cos(), pixel.sin()], dim=-1)[:, :, None, None]
    return torch.cat([across, along, pixel.expand(-1, -1, size, size)], dim=1)


def frame_edges(images: Tensor) -> Tensor:
    """Measure vertical and horizontal edges in images (N, C, 64, 64).

    Returns:
        Mean absolute differences of neighbouring columns and of neighbouring rows, divided by their
        mean over the image (N, 2, 63).
    """
    edges = torch.stack([images.diff(dim=3).abs().mean(dim=(1, 2)),
                         images.diff(dim=2).abs().mean(dim=(1, 3))], dim=1)
    return edges / edges.mean(dim=-1, keepdim=True).clamp(min=1e-3)


class PhaseEstimator(nn.Module):
    """Estimator of the camera's phase from the edges in a frame.

    Most edges are borders of squares, so their positions reveal the phase.
    """

    waves: Tensor

    def __init__(self, pixels_per_square: float):
        super().__init__()
        places = torch.arange(FRAME_SIZE - 1) + 1.0
        frequency = 2 * math.pi / pixels_per_square if pixels_per_square else 0.0
        angles = frequency * torch.arange(1, _HARMONICS + 1)[:, None] * places  # (harmonics, 63)
        self.register_buffer("waves", torch.cat([angles.cos(), angles.sin()]), persistent=False)
        width = 2 * _MOTION_WIDTH
        self.out = nn.Sequential(
            nn.Linear(2 * (2 * _HARMONICS + FRAME_SIZE - 1), width), nn.SiLU(),
            nn.Linear(width, width), nn.SiLU(), nn.Linear(width, PHASE_DIM))

    def forward(self, edges: Tensor) -> Tensor:
        """Estimate phases from edges (…, 2, 63), see ``frame_edges``.

        Returns:
            Cosine and sine of the phase to the right, then of the phase down (…, 4).
        """
        waves = edges @ self.waves.T / 8  # (…, 2, 2 · harmonics)
        return self.out(torch.cat([waves, (edges + 0.05).log()], dim=-1).flatten(-2))


class VelocityEstimator(nn.Module):
    """Estimator of the camera's velocity at the last initial frame.

    Costs are matching errors at motions of whole pixels. They can be ambiguous, because
    neighbouring squares often look alike. Changes of the phase measure fractions of a pixel, but
    cannot distinguish motions that differ by whole squares. Where the last two frames are
    ambiguous, earlier frames help.

    Args:
        num_frames: I, number of initial frames.
    """

    def __init__(self, num_frames: int):
        super().__init__()
        inputs = (num_frames - 1) * (NUM_MOTIONS + 2 * PHASE_DIM) + PHASE_DIM
        width = 2 * _MOTION_WIDTH
        self.out = nn.Sequential(nn.Linear(inputs, width), nn.SiLU(),
                                 nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))
        initialise(self.out[-1])

    def forward(self, costs: Tensor, phases: Tensor) -> Tensor:
        """Estimate the velocity in pixels per step to the right and down (B, 2).

        Args:
            costs: costs from ``motion_costs`` between consecutive initial frames
                (B, I - 1, NUM_MOTIONS).
            phases: phases in the initial frames, from ``PhaseEstimator`` (B, I, 4).
        """
        costs = costs - costs.amin(dim=-1, keepdim=True)
        turned = with_second_harmonic(phase_between(phases[:, :-1], phases[:, 1:]))
        seen = torch.cat([costs, turned], dim=-1).flatten(1)
        return FASTEST * self.out(torch.cat([seen, phases[:, -1]], dim=-1))


@dataclasses.dataclass(frozen=True)
class CameraState:
    """Part of the environment's state that describes the camera.

    Attributes:
        motion: recurrent state of the GRU that predicts the camera's motion (B, motion_dim).
        phase: phase in the last initial frame, where a full turn is one square: cosine and sine of
            the camera's horizontal position, then of its vertical position (B, 4).
        velocity: motion of the camera in the last step, pixels to the right and down (B, 2).
        displacement: motion of the camera since the last initial frame, pixels to the right and
            down (B, 2).
        started: 0 before the first step, 1 afterwards (B, 1). The first step shows the last initial
            frame, so its velocity is not added to the displacement.
    """

    motion: Tensor
    phase: Tensor
    velocity: Tensor
    displacement: Tensor
    started: Tensor


def near_player(memory: Tensor) -> Tensor:
    """Concatenate the memory of the four cells around the player and the mean over all cells.

    Args:
        memory: memory of the cells (B, memory_channels, 8, 8).

    Returns:
        Concatenated memory (B, 5 · memory_channels).
    """
    middle = GRID // 2
    near = memory[:, :, middle - 1:middle + 1, middle - 1:middle + 1].flatten(1)
    return torch.cat([near, memory.mean(dim=(2, 3))], dim=-1)


class CameraMotion(nn.Module):
    """Predictor of the camera's motion, from the centre of the view, the memory and the action.

    In training mode, the only inputs that get gradients are the motion memory and, in the first
    step, the velocity predicted by ``generative.spatial.SpatialStart``. In simulators with worlds,
    the view shows all static objects, so the memory is no input, and the camera's networks do not
    depend on the others.

    Args:
        config: sizes of the networks, and pixels per square.
        num_actions: A, number of actions.
    """

    def __init__(self, config: SimulatorConfig, num_actions: int):
        super().__init__()
        assert config.pixels_per_square  # a camera that stands still needs no prediction
        self.pixels_per_square = config.pixels_per_square
        channels = config.image_channels + 1
        self.see = nn.Sequential(
            nn.Conv2d(channels, 48, kernel_size=4, stride=4), nn.SiLU(),
            nn.Conv2d(48, 48, kernel_size=3, padding=1), nn.SiLU(), nn.Flatten(),
            nn.Linear(48 * (CROP // 4) ** 2, _MOTION_WIDTH))
        near = 0 if config.world_squares else 5 * config.memory_channels
        self.recall = nn.Linear(
            near + config.motion_dim + 2 + 2 * PHASE_DIM + num_actions,
            _MOTION_WIDTH)
        self.mix = nn.Sequential(nn.SiLU(), nn.Linear(_MOTION_WIDTH, _MOTION_WIDTH), nn.SiLU())
        self.gru = nn.GRUCell(_MOTION_WIDTH, config.motion_dim)
        self.out = nn.Linear(_MOTION_WIDTH + config.motion_dim, 4)
        initialise(self.out, [0, 0, -3, -3])  # at first, a slowly decreasing velocity

    def forward(self, look: Look, near: Tensor | None, state: CameraState,
                action: Tensor) -> CameraState:
        """Predict the camera's next state.

        Args:
            look: function that draws the centre of the view.
            near: memory near the player, see ``near_player`` (B, 5 · memory_channels); None in
                simulators with worlds.
            state: the camera's state.
            action: one-hot action (B, A).
        """
        detach = torch.detach if self.training else (lambda tensor: tensor)
        before, velocity = detach(state.displacement), detach(state.velocity)
        crop = detach(torch.cat(look(before, CROP), dim=1))
        phase = moved_phase(detach(state.phase), before, self.pixels_per_square)
        recalled = self.recall(torch.cat([
            *([] if near is None else [detach(near)]), state.motion, velocity / FASTEST,
            with_second_harmonic(phase), action], dim=-1))
        x = self.mix(self.see(crop) + recalled)
        motion = self.gru(x, state.motion)
        gained, lost = self.out(torch.cat([x, motion], dim=-1)).chunk(2, dim=-1)
        moved = (1 - torch.sigmoid(lost)) * velocity + FASTEST * gained
        # The first step shows the last initial frame, to which the start's velocity belongs.
        moved = torch.where(state.started > 0, moved, state.velocity)
        return CameraState(motion, state.phase, moved, state.started * (before + moved),
                           torch.ones_like(state.started))
