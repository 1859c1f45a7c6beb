"""The prior over starts: a generative model of worlds, and of start vectors within them.

Both parts are flows: networks that transport Gaussian noise to data along straight lines (Lipman et
al. 2023, "Flow matching for generative modeling"). They predict the clean data at every time.

``WorldPrior`` generates the classes of the squares of a world, and the camera's phase and velocity.
Squares are categorical: the network predicts their class probabilities, is trained with the
cross-entropy, and moves towards the expected embedding (Dieleman et al. 2022, "Continuous diffusion
for categorical data"; Eijkelboom et al. 2024, "Variational flow matching"). It is conditional on a
mask: any squares can be given, and the network generates the others.

``StartPrior`` generates a start vector of the spatial architecture, given the view of the world.
With a static camera, the player can be anywhere in the view, so ``PlayerPrior`` draws its square
first.

Letters in shape comments: E embedding of a class, W channels.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from common.game_constants import FRAME_SIZE
from generative.camera import FASTEST, STATIC_PHASE, CameraState, moved_phase
from generative.config import GRID
from generative.prior_networks import (
    EMBEDDING,
    NUM_GLOBALS,
    PLAYER_CHANNELS,
    PlayerPrior,
    PriorNoise,
    StartPrior,
    ViewPrior,
    WorldPrior,
    with_player,
)
from generative.sprites import AFTER_TURN, CLOCK_PERIOD
from generative.squares import World

_BLOCK = 13  # squares per side of the blocks in which noise is drawn
BORDER_MARGIN = 8.0  # pixels between view and edge at which a world moves on
_WORLD_STEPS, _VIEW_WORLD_STEPS = 8, 32
_START_STEPS = 4
MANY_LOOKS = 2520  # divisible by the number of looks of any object, up to 10
TURNS = (0.47, 0.78, 0.94)  # shares of recorded enemies with at most 0, 1 and 2 turns


class Prior(nn.Module):
    """Prior over worlds and start vectors.

    Args:
        num_squares: n.
        num_classes: K.
        widths: channels of ``WorldPrior``.
        channels: V / 64.
        view_channels: number of coefficients of a cell of the view.
        start_width: channels of ``StartPrior``.
        is_view: whether worlds are the view of a static camera; see ``ViewPrior``.
    """

    trained: Tensor
    world_times: Tensor
    start_times: Tensor

    def __init__(self, num_squares: int, num_classes: int, widths: tuple[int, int, int],
                 channels: int, view_channels: int, start_width: int, is_view: bool = False):
        super().__init__()
        self.channels = channels
        kind = ViewPrior if is_view else WorldPrior
        self.worlds = kind(num_squares, num_classes, widths)
        self.player = PlayerPrior(num_squares, num_classes) if is_view else None
        self.starts = StartPrior(channels, view_channels + PLAYER_CHANNELS * is_view, start_width)
        self.register_buffer("trained", torch.zeros(()))
        world_steps = _VIEW_WORLD_STEPS if is_view else _WORLD_STEPS
        self.register_buffer("world_times", torch.arange(world_steps) / world_steps,
                             persistent=False)
        self.register_buffer("start_times", torch.arange(_START_STEPS) / _START_STEPS,
                             persistent=False)

    @property
    def is_trained(self) -> bool:
        return bool(self.trained)

    def noise(self, seeds: Tensor) -> PriorNoise:
        """Draw the noise of starts.

        Args:
            seeds: a seed per start, int64 (B,).
        """
        squares, places, _ = _parts(self.place_noise(seeds))
        others = []
        for seed in seeds.tolist():
            generator = _generator(seed)
            others.append((torch.randn(NUM_GLOBALS, generator=generator),
                           torch.randn(self.channels, GRID, GRID, generator=generator)))
        camera, vector = (torch.stack(part).to(self.trained.device) for part in zip(*others))
        return PriorNoise(squares, camera, vector, places)

    def vectors(self, noise: PriorNoise, world: World, view: Tensor, camera: Tensor) -> Tensor:
        """Generate start vectors (B, V) within worlds.

        Args:
            world: worlds with class probabilities.
            view: coefficients of their views (B, view_channels, 8, 8).
            camera: phase and velocity (B, NUM_GLOBALS).
        """
        if self.player is not None:
            square = self.player.sample(world.squares, noise.places)
            view = with_player(view, square, self.worlds.num_squares)
        return self.starts.sample(noise.vector, view, camera, self.start_times)

    def objects(self, noise: PriorNoise, seeds: Tensor) -> dict[str, Tensor]:
        """Return the fields of ``World`` that describe its objects apart from their squares."""
        _, _, looks = _parts(self.place_noise(seeds))
        return {**_motion(noise.places, looks), "looks": looks, "clock": seeds % CLOCK_PERIOD}

    def completed(self, world: World, known: Tensor, camera: Tensor,
                  noise: Tensor | None = None) -> World:
        """Generate the squares of a world that are not known.

        Args:
            world: squares, as probabilities where they are known.
            known: mask of the known squares, bool (B, n, n).
            camera: phase and velocity (B, NUM_GLOBALS).
            noise: noise of the squares, see ``place_noise``; None for that of the world's seeds.
        """
        if noise is None:
            noise = self.place_noise(world.seeds, world.origin)
        squares, places, looks = _parts(noise)
        squares, _ = self.worlds.sample(
            PriorNoise(squares, camera, camera, places), self.world_times, world.squares,
            known[:, None].to(camera), camera)
        new = {**_motion(places, looks), "looks": looks}
        return dataclasses.replace(world, squares=squares, **{
            name: torch.where(known, getattr(world, name), field) for name, field in new.items()})

    def continued(self, world: World, camera: CameraState, pixels_per_square: float) -> World:
        """Move worlds on whose edge has come near the view.

        They move by whole squares, until the camera is in the middle square. Known squares do not
        change, and new ones are generated given the others. Their noise depends only on the seed
        and the place.

        Args:
            camera: state of the camera after the step.
        """
        num = world.squares.shape[1]
        view = camera.displacement.detach() - world.corner.detach()  # its corner in the world
        last = num * pixels_per_square - FRAME_SIZE
        near = (view < BORDER_MARGIN) | (view > last - BORDER_MARGIN)
        rows = near.any(dim=-1).nonzero()[:, 0]
        if not len(rows):
            return world
        middle = ((view[rows] + FRAME_SIZE / 2) / pixels_per_square).floor().long()
        moved = middle - num // 2  # (rows, 2), to the right and down
        old = world[rows]
        places = torch.arange(num, device=moved.device)
        known = []
        sources = []
        for axis in (1, 0):
            source = places + moved[:, axis, None]
            known.append((source >= 0) & (source < num))
            sources.append(source.clamp(0, num - 1))
        batch = torch.arange(len(rows), device=moved.device)[:, None, None]
        probabilities = old.squares if old.squares.ndim == 4 else functional.one_hot(
            old.squares, self.worlds.num_classes).to(camera.phase)
        squares, places, velocities, looks = (
            field[batch, sources[0][:, :, None], sources[1][:, None]]
            for field in (probabilities, old.places, old.velocities, old.looks))
        given = known[0][:, :, None] & known[1][:, None]
        phase = moved_phase(camera.phase[rows], camera.displacement[rows], pixels_per_square)
        state = torch.cat([phase, camera.velocity[rows] / FASTEST], dim=-1)
        new = self.completed(World(squares, old.corner + pixels_per_square * moved, old.seeds,
                                   old.origin + moved, places, velocities, looks, old.clock), given,
                             state)
        if world.squares.ndim == 3:  # certain classes stay certain
            new = dataclasses.replace(new, squares=new.squares.argmax(dim=-1))
        return World(*(torch.index_copy(before, 0, rows, after.to(before))
                       for before, after in zip(vars(world).values(), vars(new).values())))

    def place_noise(self, seeds: Tensor, origin: Tensor | None = None) -> Tensor:
        """Draw the noise of squares, which depends only on seed and place.

        Args:
            seeds: seeds, int64 (B,).
            origin: place of the first square, to the right and down, int64 (B, 2); None for 0.

        Returns:
            Standard normal noise (B, E + 2, n, n): of the classes, of the places of objects, and of
            their looks.
        """
        num, fields = self.worlds.num_squares, []
        origin = seeds.new_zeros(len(seeds), 2) if origin is None else origin
        for seed, (x, y) in zip(seeds.tolist(), origin.tolist()):
            across = range(x // _BLOCK, (x + num - 1) // _BLOCK + 1)
            along = range(y // _BLOCK, (y + num - 1) // _BLOCK + 1)
            blocks = torch.cat([torch.cat([
                torch.randn(EMBEDDING + 2, _BLOCK, _BLOCK, generator=_generator(seed, column, row))
                for column in across], dim=2) for row in along], dim=1)
            fields.append(blocks[:, y - _BLOCK * along[0]:, x - _BLOCK * across[0]:][:, :num, :num])
        return torch.stack(fields).to(self.trained.device)


def _parts(noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parts of ``Prior.place_noise``: noise of the classes (B, E, n, n), noise of the
    places of objects (B, n, n), and numbers of their looks, int64 (B, n, n)."""
    looks = (_uniform(noise[:, -1]).abs() * MANY_LOOKS).long()
    return noise[:, :EMBEDDING], noise[:, EMBEDDING], looks


def _uniform(noise: Tensor) -> Tensor:
    """Map standard normal noise to uniform numbers from -1 to 1."""
    return torch.erf(noise / math.sqrt(2))


def _motion(noise: Tensor, looks: Tensor) -> dict[str, Tensor]:
    """Return places and velocities of objects, see ``World``.

    Places and directions are uniformly distributed, because objects walk to and fro. The speed
    depends on the number of turns, which the numbers of looks (B, n, n) select.

    Args:
        noise: standard normal noise (B, n, n).
    """
    uniform = _uniform(noise)
    turns = torch.bucketize(looks / MANY_LOOKS, torch.tensor(TURNS, device=looks.device))
    return {"places": uniform.abs(), "velocities": uniform.sign() * AFTER_TURN ** turns}


def _generator(*numbers: int) -> torch.Generator:
    """Return a generator that is seeded by whole numbers."""
    words = [number % 2 ** 32 for number in numbers]
    seed = np.random.SeedSequence(words).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(seed))


def static_globals(like: Tensor) -> Tensor:
    """Return phase and velocity of a static camera, in the shape of ``like`` (B, NUM_GLOBALS)."""
    return like.new_tensor((*STATIC_PHASE, 0.0, 0.0)).expand(like.shape)


def camera_globals(camera: CameraState) -> Tensor:
    """Return phase and velocity of the camera, as the prior represents them (B, NUM_GLOBALS)."""
    return torch.cat([camera.phase, camera.velocity / FASTEST], dim=-1)
