"""Filled starts: what could be in a part of recorded frames instead of what is there.

A *hole* is a set of squares of a world, and a *filling* is what the prior generates there, given
all other squares. The new squares are painted into all initial frames, which are encoded again, so
that both parts of a start change: the world, and the code of the cells that the hole touches.
Everything else stays: the other squares, the code of the other cells, and the camera.

Letters in shape comments: I initial frames, B starts, C H W an image, V bottleneck vector, n
squares per side of a world.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor
from torch.nn import functional

from common.errors import UserError
from common.game_constants import FRAME_SIZE
from generative.camera import PATCH, frame_edges, phase_between
from generative.config import GRID
from generative.networks import LatentSampler, on_unit_sphere
from generative.prior import camera_globals
from generative.simulator import Simulator, Start
from generative.spatial import SpatialEncoder, SpatialStart, split_state
from generative.squares import Scenery, SquareImages, World
from generative.start_worlds import check_prior

_MODE = LatentSampler("mode")
_PLAYER = 0.8  # half of the side of the square that contains the player, in squares
_REACH = 4  # squares that the camera moves within the initial frames, at most
_UNLIKE = 0.08  # difference to the colours of the world from which pixels show the player


@torch.no_grad()
def fill(simulator: Simulator, images: Tensor, vectors: Tensor, world: World, hole: Tensor,
         seeds: Tensor) -> tuple[Tensor, World]:
    """Generate the squares of holes again, in the world and in the initial frames.

    Pixels of the player are kept. Simulate the result from ``filled_start``.

    Args:
        simulator: spatial simulator with worlds and a trained prior.
        images: initial frames in [0, 1] (I, B, C, 64, 64).
        vectors: their bottleneck vectors (B, V).
        world: their worlds (B rows).
        hole: squares to generate, bool (B, n, n).
        seeds: seeds of the fillings, int64 (B,).

    Returns:
        Bottleneck vectors (B, V), and worlds with the same seeds as before.

    Raises:
        UserError: if the simulator has no worlds, or its prior is not trained.
    """
    filled = generate(simulator, vectors, world, hole, seeds)
    world = world.as_probabilities(filled.squares.shape[-1])
    return repaint(simulator, images, vectors, world, hole, filled), filled


@torch.no_grad()
def generate(simulator: Simulator, vectors: Tensor, world: World, hole: Tensor, seeds: Tensor
             ) -> World:
    """Generate the squares of holes again, in the world alone; see ``fill``."""
    world = world.as_probabilities(len(check_worlds(simulator).templates))
    start = filled_start(simulator, vectors, world)
    camera = camera_globals(split_state(start.env_h, simulator.config).camera)
    sampled = simulator.prior.completed(dataclasses.replace(world, seeds=seeds), ~hole, camera)
    certain = functional.one_hot(sampled.squares.argmax(dim=-1), sampled.squares.shape[-1])
    return dataclasses.replace(sampled, seeds=world.seeds, squares=torch.where(
        hole[..., None], certain.to(world.squares), world.squares))


@torch.no_grad()
def empty(simulator: Simulator, images: Tensor, vectors: Tensor, world: World, hole: Tensor
          ) -> tuple[Tensor, World]:
    """Empty holes instead of filling them; see ``fill``. Empty squares are black if the game has no
    backgrounds."""
    squares = check_worlds(simulator)
    world = world.as_probabilities(len(squares.templates))
    nothing = functional.one_hot(torch.tensor(squares.empty_class, device=hole.device),
                                 world.squares.shape[-1]).to(world.squares)
    emptied = dataclasses.replace(world, squares=torch.where(hole[..., None], nothing,
                                                             world.squares))
    return repaint(simulator, images, vectors, world, hole, emptied), emptied


def repaint(simulator: Simulator, images: Tensor, vectors: Tensor, world: World, hole: Tensor,
            filled: World) -> Tensor:
    """Return the bottleneck vectors (B, V) of initial frames with other squares in holes.

    Args:
        images, vectors, world, hole: see ``fill``; the world with probabilities.
        filled: worlds with other squares in the holes.
    """
    painted = paint(simulator, images, world, hole, filled)
    return with_cells(vectors, simulator.encode(painted).float(),
                      touched_cells(simulator, world, hole))


def check_worlds(simulator: Simulator) -> SquareImages:
    """Return the images of the squares of a simulator that can fill holes.

    Raises:
        UserError: if the simulator has no worlds, or its prior is not trained.
    """
    if simulator.squares is None:
        raise UserError("this simulator has no worlds, so it cannot fill holes in them")
    check_prior(simulator)
    return simulator.squares


def filled_start(simulator: Simulator, vectors: Tensor, world: World,
                 recorded: Tensor | None = None) -> Start:
    """Predict the start of a simulation from vectors (B, V) in a world, with the camera of recorded
    frames.

    Args:
        recorded: bottleneck vectors of the recorded frames (B, V); None if ``vectors`` are these.
    """
    start = simulator.start_from(vectors, _MODE, world=world)
    if recorded is None or not isinstance(simulator.env_converter, SpatialStart):
        return start
    own, kept = (split_state(state, simulator.config) for state in (
        start.env_h, simulator.start_from(recorded, _MODE, world=world).env_h))
    return dataclasses.replace(start, env_h=dataclasses.replace(own, camera=kept.camera).flat())


def square_edges(simulator: Simulator, world: World) -> Tensor:
    """Return the left and upper edges of the columns and rows of worlds in the last initial frame,
    in pixels (B, 2, n)."""
    assert simulator.squares is not None
    places = torch.arange(world.squares.shape[1], device=world.corner.device)
    return world.corner[:, :, None] + simulator.squares.pixels_per_square * places


def squares_of_cells(simulator: Simulator, world: World, cells: Tensor) -> Tensor:
    """Return the squares that cells of the view touch, bool (B, n, n).

    Args:
        cells: cells of the 8 x 8 grid, bool (B, 8, 8).
    """
    assert simulator.squares is not None
    overlap = _overlap(square_edges(simulator, world), simulator.squares.pixels_per_square)
    return torch.einsum("byr,byx,bxc->brc", overlap[:, 1], cells.to(overlap), overlap[:, 0]) > 0


def touched_cells(simulator: Simulator, world: World, hole: Tensor) -> Tensor:
    """Return the cells of the view that squares (B, n, n) touch, bool (B, 8, 8)."""
    assert simulator.squares is not None
    overlap = _overlap(square_edges(simulator, world), simulator.squares.pixels_per_square)
    return torch.einsum("byr,brc,bxc->byx", overlap[:, 1], hole.to(overlap), overlap[:, 0]) > 0


def _overlap(edges: Tensor, size: float) -> Tensor:
    """Return whether the cells of a row or column touch squares, 0 or 1 (B, 2, 8, n)."""
    first = PATCH * torch.arange(GRID, device=edges.device)[:, None]
    inside = torch.minimum(edges[:, :, None] + size, first + PATCH) - torch.maximum(
        edges[:, :, None], first)
    return (inside > 1e-3).to(edges)


def paint(simulator: Simulator, images: Tensor, world: World, hole: Tensor, filled: World
          ) -> Tensor:
    """Paint filled holes into initial frames.

    Args:
        images, world, hole: see ``fill``.
        filled: worlds with filled holes, as probabilities.

    Returns:
        Frames (I, B, C, 64, 64); pixels outside the holes are unchanged.
    """
    squares = simulator.squares
    assert squares is not None
    displacements = initial_displacements(simulator, images, world)  # (I, B, 2)
    before, after = (squares.paint(_near_view(simulator, part)) for part in (world, filled))
    return paint_scenery(simulator, images, displacements, world.corner, hole, before, after)


def paint_scenery(simulator: Simulator, images: Tensor, displacements: Tensor, corner: Tensor,
                  hole: Tensor, before: Scenery, after: Scenery) -> Tensor:
    """Paint filled holes into initial frames; see ``paint``.

    Args:
        displacements: displacements of the camera, see ``initial_displacements`` (I, B, 2).
        corner: corners of the worlds that the holes belong to (B, 2).
        before, after: drawn worlds.
    """
    squares = simulator.squares
    assert squares is not None
    pixels = torch.arange(FRAME_SIZE, device=images.device) + 0.5
    first, batch = 1 - len(images), torch.arange(len(hole), device=hole.device)[:, None, None]
    old, new = (squares.view(scenery.at_step(first), displacements.flatten(0, 1)).unflatten(
        0, displacements.shape[:2]) for scenery in (before, after))  # (I, B, C, 64, 64)
    frames = []
    for frame, moved, own, other in zip(images, displacements, old, new):
        place = (pixels + moved[..., None] - corner[..., None]) / squares.pixels_per_square
        place = place.floor().long()  # (B, 2, 64)
        known = (place >= 0) & (place < hole.shape[1])
        right, down = place.clamp(0, hole.shape[1] - 1).unbind(dim=1)
        inside = hole[batch, down[:, :, None], right[:, None]] & (
            known[:, 1, :, None] & known[:, 0, None])  # (B, 64, 64)
        shown = inside[:, None] & ~_player(simulator, frame, own)
        frames.append(torch.where(shown, other.to(frame), frame))
    return torch.stack(frames)


@torch.no_grad()
def initial_images(simulator: Simulator, image: Tensor, start: Start) -> Tensor:
    """Draw initial frames of starts that do not come from frames, with a constant velocity.

    Args:
        image: last initial frames, as the first simulated step shows them (B, C, 64, 64).
        start: starts in worlds (B rows).

    Returns:
        Frames (I, B, C, 64, 64) in [0, 1], the last of them ``image``.
    """
    squares, world = simulator.squares, start.world
    assert squares is not None and world is not None
    velocity = split_state(start.env_h, simulator.config).camera.velocity.float()
    scenery, frames = squares.paint(_near_view(simulator, world)), [image]
    player = _player(simulator, image, squares.view(scenery, torch.zeros_like(velocity)))
    for step in range(-1, -simulator.config.num_init_steps, -1):
        view = squares.view(scenery.at_step(step), step * velocity).to(image)
        frames.insert(0, torch.where(player, image, view))
    return torch.stack(frames)


def _near_view(simulator: Simulator, world: World) -> World:
    """Return the part of worlds that initial frames can show, which takes less time to draw."""
    assert simulator.squares is not None
    size, num = simulator.squares.pixels_per_square, world.squares.shape[1]
    margin = max(num // 2 - math.ceil(FRAME_SIZE / size / 2) - _REACH, 0)
    part = slice(margin, num - margin)
    return dataclasses.replace(world, corner=world.corner + size * margin, **{
        name: getattr(world, name)[:, part, part]
        for name in ("squares", "places", "velocities", "looks")})


def _player(simulator: Simulator, frame: Tensor, view: Tensor) -> Tensor:
    """Return the pixels that show the player, bool (B, 1, 64, 64): those that differ from the
    colours of the world (B, C, 64, 64), if the camera follows the player only in the middle."""
    differs = (frame - view).abs().amax(dim=1, keepdim=True) > _UNLIKE
    if not simulator.config.pixels_per_square:
        return differs
    pixels = torch.arange(FRAME_SIZE, device=frame.device) + 0.5 - FRAME_SIZE / 2
    near = pixels.abs() < _PLAYER * simulator.config.pixels_per_square
    return differs & near[:, None] & near


def initial_displacements(simulator: Simulator, images: Tensor, world: World) -> Tensor:
    """Estimate the displacement of the camera in initial frames (I, B, C, 64, 64), relative to the
    last one, in pixels to the right and down (I, B, 2).

    The phases of the frames give the motions between them up to whole squares. Of the candidates
    near a motion without acceleration, the one is taken at which the world looks most like the
    frame.
    """
    result = images.new_zeros(len(images), images.shape[1], 2)
    encoder, squares = simulator.encoder, simulator.squares
    if not simulator.config.pixels_per_square or not isinstance(encoder, SpatialEncoder):
        return result
    assert squares is not None
    size, scenery = squares.pixels_per_square, squares.paint(_near_view(simulator, world))
    phases = torch.stack([encoder.phase(frame_edges(frame.float())) for frame in images])
    turned = phase_between(phases[-1], phases).unflatten(-1, (2, 2))
    within = torch.atan2(turned[..., 1], turned[..., 0]) * (size / (2 * math.pi))  # (I, B, 2)
    shifts = size * torch.tensor([-1.0, 0, 1], device=images.device)
    grid = torch.stack(torch.meshgrid(shifts, shifts, indexing="ij"), dim=-1).flatten(0, 1)
    for number in range(len(images) - 2, -1, -1):
        later = result[number + 1:number + 3]
        expected = 2 * later[0] - later[1] if len(later) > 1 else later[0]
        nearest = within[number] + size * ((expected - within[number]) / size).round()
        candidates = nearest + grid[:, None]  # (9, B, 2)
        views = squares(scenery, candidates.flatten(0, 1)).unflatten(0, candidates.shape[:2])
        errors = (views - images[number]).square().mean(dim=(2, 3, 4))  # (9, B)
        best = errors.argmin(dim=0)
        result[number] = candidates[best, torch.arange(len(best), device=best.device)]
    return result


def with_cells(vectors: Tensor, others: Tensor, cells: Tensor) -> Tensor:
    """Replace the code of cells in bottleneck vectors (B, V) by that in others (B, V).

    The last channel is kept, because it carries the camera's velocity and phase, and the scale of
    the code; see ``SpatialEncoder``.

    Args:
        cells: cells to replace, bool (B, 8, 8).
    """
    own, new = (part.unflatten(1, (GRID, GRID, -1)) for part in (vectors, others))
    scale = own[..., -1:].mean(dim=(1, 2), keepdim=True) / new[..., -1:].mean(
        dim=(1, 2), keepdim=True)
    mixed = torch.where(cells[..., None], scale * new, own)
    mixed = torch.cat([mixed[..., :-1], own[..., -1:]], dim=-1)
    return on_unit_sphere(mixed.flatten(1))
