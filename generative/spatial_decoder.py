"""Decoder of the spatial architecture: image, reward and outcome of a state.

The letters in shape comments are those of ``generative.spatial``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.game_constants import FRAME_SIZE
from generative.camera import (
    CROP,
    NUM_PHASE_MAPS,
    PATCH,
    initialise,
    near_player,
    phase_maps,
    shift,
)
from generative.config import GRID, SimulatorConfig
from generative.spatial import BLOCKS, SceneFeatures, split_state
from generative.spatial_layers import BLOCK, PatchBasis, Refinement, ResidualBlock
from generative.squares import Scenery, SquareImages

_HEAD_WIDTH = 128


class SpatialDecoder(nn.Module):
    """Decoder of image, reward and terminal from the state.

    Args:
        basis: basis of image patches, shared with encoder and cell.
        squares: images of the classes of squares; None without worlds.
    """

    def __init__(self, config: SimulatorConfig, basis: PatchBasis,
                 squares: SquareImages | None = None):
        super().__init__()
        self.config = config
        self._basis, self._squares = (basis,), (squares,)
        width = config.spatial_width
        self.from_view = nn.Conv2d(len(basis.scale), width, kernel_size=1)
        self.from_inside = nn.Conv2d(1, width, kernel_size=1, bias=False)
        self.from_memory = nn.Conv2d(config.memory_channels, width, kernel_size=1)
        self.from_fine = nn.Conv2d(config.fine_channels * (BLOCKS // GRID)**2, width,
                                   kernel_size=1) if config.fine_channels else None
        self.from_motion = nn.Linear(config.motion_dim, width)
        self.from_phase = nn.Sequential(nn.Conv2d(NUM_PHASE_MAPS, width, kernel_size=1), nn.SiLU(),
                                        nn.Conv2d(width, 2 * width, kernel_size=1))
        self.scene = SceneFeatures(config)
        self.changes = nn.Conv2d(self.scene.width, len(basis.scale), kernel_size=1)
        self.blocks = nn.Sequential(ResidualBlock(width), ResidualBlock(width))
        self.out = nn.Conv2d(width, len(basis.scale), kernel_size=1)
        self.refine = Refinement(config.image_channels, width, config.fine_channels or 0)
        self.outcome: nn.Module
        if squares is None:
            self.outcome = nn.Sequential(
                nn.Linear(5 * width + config.motion_dim, _HEAD_WIDTH), nn.SiLU(),
                nn.Linear(_HEAD_WIDTH, 2))
        else:
            self.keep = nn.Conv2d(self.scene.width, 1, kernel_size=1)
            initialise(self.keep, [3])
            self.outcome = OutcomeHead(config)
        for layer in (self.out, self.changes):
            initialise(layer, [0] * len(basis.scale))
        initialise(self.from_phase[-1], [0] * (2 * width))

    def forward(self, h: Tensor, z: Tensor, world: Scenery | None = None) -> tuple[Tensor, ...]:
        """Decode states.

        Args:
            h: states (N, H).
            z: ignored.
            world: static surroundings (N rows); None if the canvas is all that is known.

        Returns:
            Unclamped images (N, C, 64, 64), rewards (N,), logits of the terminal (N,) and, with a
            world, logits of a terminal without reward, a death (N,).
        """
        state, basis = split_state(h, self.config), self._basis[0]
        camera = state.camera
        displacement, motion, phase = camera.displacement, camera.motion, camera.phase
        if self.training:
            displacement, motion, phase = displacement.detach(), motion.detach(), phase.detach()
        scene = self.scene(state.canvas, state.scene)
        if world is None:
            view = basis.images(self.changes(scene) + basis.padded(state.canvas))
            inside = view.new_ones(len(view), 1, FRAME_SIZE, FRAME_SIZE)
            if self.config.pixels_per_square:
                view, inside = shift(view, displacement)
        else:
            view, inside = self._overlay(state.canvas, scene, world, displacement)
        x = (self.from_view(basis.coefficients(view))
             + self.from_inside(functional.avg_pool2d(inside, PATCH))
             + self.from_memory(state.memory) + self.from_motion(motion)[:, :, None, None])
        if self.from_fine is not None:
            x = x + self.from_fine(functional.pixel_unshuffle(state.fine, BLOCKS // GRID))
        cell_maps, block_maps = (
            phase_maps(phase, displacement, self.config.pixels_per_square or 0.0, size)
            for size in (GRID, FRAME_SIZE // BLOCK))
        gain, bias = self.from_phase(cell_maps).chunk(2, dim=1)
        x = self.blocks(x * (1 + gain) + bias)
        images = self.refine(view + basis.images(self.out(x), with_mean=False), block_maps, x,
                             state.fine)
        features = torch.cat([near_player(x), motion.to(x)], dim=-1)
        if world is not None:
            return images, *self.outcome(features, images)
        reward, terminal = self.outcome(features).float().unbind(dim=-1)
        return images, reward, terminal

    def _overlay(self, canvas: Tensor, scene: Tensor, world: Scenery,
                 displacement: Tensor) -> tuple[Tensor, Tensor]:
        """Draw a world and, over it, the objects of the canvas that are not part of it.

        Args:
            canvas: canvas of the state (N, canvas_channels, 8, 8).
            scene: features of canvas and scene (N, W / 2, 8, 8).
            displacement: displacement of the camera (N, 2).

        Returns:
            The view (N, C, 64, 64), and the fraction of each pixel inside the canvas
            (N, 1, 64, 64).
        """
        squares, basis = self._squares[0], self._basis[0]
        assert squares is not None
        static = world.first.repeat(len(canvas) // len(world.first), 1, 1, 1)
        objects = canvas - static[:, :canvas.shape[1]]
        objects = self.changes(scene) + basis.padded(objects * torch.sigmoid(self.keep(scene)))
        overlay, inside = shift(basis.images(objects, with_mean=False), displacement)
        return squares.view(world, displacement) + overlay * inside, inside


class OutcomeHead(nn.Module):
    """Head that tells a death, a coin and neither apart.

    Besides the decoder's features, it sees the pixels around the player.
    """

    def __init__(self, config: SimulatorConfig):
        super().__init__()
        side = CROP // 4
        self.see = nn.Sequential(
            nn.Conv2d(config.image_channels, 32, kernel_size=4, stride=4), nn.SiLU(),
            nn.Conv2d(32, 32, kernel_size=3, padding=1), nn.SiLU(), nn.Flatten(),
            nn.Linear(32 * side * side, _HEAD_WIDTH))
        self.features = nn.Linear(5 * config.spatial_width + config.motion_dim, _HEAD_WIDTH)
        self.out = nn.Sequential(nn.SiLU(), nn.Linear(_HEAD_WIDTH, _HEAD_WIDTH), nn.SiLU(),
                                 nn.Linear(_HEAD_WIDTH, 3))
        initialise(self.out[-1], [0, -4, -4])

    def forward(self, features: Tensor, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Predict the outcome of a step.

        Args:
            features: features of the decoder (N, 5 · W + motion_dim).
            images: decoded images (N, C, 64, 64).

        Returns:
            Rewards, logits of the terminal, and logits of a death, (N,) each.
        """
        reward, death, coin = self.judge(features, self.crop(images)).unbind(dim=-1)
        return (reward, torch.logaddexp(death, coin), death - functional.softplus(coin))

    @staticmethod
    def crop(images: Tensor) -> Tensor:
        """Cut the pixels around the player, in [0, 1], out of images (N, C, 64, 64)."""
        first = (FRAME_SIZE - CROP) // 2
        return images[:, :, first:first + CROP, first:first + CROP].clamp(0, 1)

    def judge(self, features: Tensor, crops: Tensor) -> Tensor:
        """Compute the reward, and the logits of death and coin; that of neither is 0 (N, 3)."""
        return self.out(self.features(features) + self.see(crops)).float()
