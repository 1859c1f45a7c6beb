"""Classes of squares, and images of worlds that consist of them.

In Procgen, a level is a grid of squares, and all squares of a class are drawn from one sprite. A
*world* is therefore a grid of class probabilities, and its image follows from a *template* per
class: the colours within a square, at ``RESOLUTION`` positions per side. Colours are interpolated
between these positions, so images are differentiable with respect to the probabilities and to the
camera's position. Because the camera's position is continuous, templates are sharper than pixels.

Letters in shape comments: R positions per side of a template, S pixels per side of an image.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.game_constants import FRAME_SIZE
from generative.sprites import RESOLUTION, Sprites, SpriteStates, most_voted

_UNREADABLE = 0.1  # root mean squared error above which a square is not recognised
_VISIBLE = 0.35  # share of a square that must be in view for it to be recognised
_LIKE_SPRITE = 0.21  # root mean squared error below which an object is recognised
OVERLAP = 0.02  # share of a square by which Procgen's sprites extend beyond it on all sides


@dataclasses.dataclass(frozen=True)
class World:
    """Static surroundings of the views in a simulation.

    Attributes:
        squares: probabilities of the classes (B, n, n, K), row 0 at the top.
            Class numbers, int64 (B, n, n), stand for certain classes.
        corner: position of the world's top left corner in the last initial frame, in pixels to the
            right and down from the frame's top left corner (B, 2).
        seeds: seeds of what lies beyond the world, int64 (B,).
        origin: number of squares to the right and down by which the world has moved on since the
            start, int64 (B, 2).
        places: distance of the centres of moving objects from the left edge of their square in the
            last initial frame, in squares (B, n, n), like the two fields below without meaning for
            other squares.
        velocities: their velocity to the right at that time, relative to the largest one of their
            class (B, n, n).
        looks: numbers of the looks of objects, see ``generative.sprites``; larger numbers start
            again at 0, int64 (B, n, n).
        clock: the game's time in the last initial frame, which selects the images of objects, int64
            (B,).
    """

    squares: Tensor
    corner: Tensor
    seeds: Tensor
    origin: Tensor
    places: Tensor
    velocities: Tensor
    looks: Tensor
    clock: Tensor

    @classmethod
    def of(cls, squares: Tensor, corner: Tensor, **others: Tensor) -> World:
        """Create a world whose other fields are 0 unless they are given."""
        whole = torch.zeros_like(corner, dtype=torch.int64)
        field = corner.new_zeros(squares.shape[:3])
        return cls(squares, corner, **{
            "seeds": whole[:, 0], "origin": whole, "places": field, "velocities": field,
            "looks": field.long(), "clock": whole[:, 0], **others})

    def each(self, function: Callable[[Tensor], Tensor]) -> World:
        """Apply a function to every tensor, and return the results."""
        return World(*map(function, vars(self).values()))

    def as_probabilities(self, num_classes: int) -> World:
        """Return worlds with class probabilities instead of certain classes."""
        if self.squares.ndim == 4:
            return self
        return dataclasses.replace(self, squares=functional.one_hot(
            self.squares, num_classes).to(self.corner))

    def __getitem__(self, rows) -> World:
        """Select rows of the batch."""
        return self.each(lambda tensor: tensor[rows])

    def repeat(self, times: int) -> World:
        """Repeat the batch."""
        return self.each(lambda tensor: tensor.repeat(times, *[1] * (tensor.ndim - 1)))


def world_corner(phase: Tensor, num_squares: int, pixels_per_square: float) -> Tensor:
    """Compute the corner of a world whose middle square contains the centre of the view.

    Args:
        phase: cosine and sine of the camera's phase to the right and down, see
            ``generative.camera`` (B, 4).
        num_squares: n.

    Returns:
        Corner (B, 2), see ``World``.
    """
    cosine, sine = phase.unflatten(-1, (2, 2)).unbind(dim=-1)
    within = (torch.atan2(sine, cosine) / (2 * torch.pi)) % 1  # (B, 2), in squares
    return FRAME_SIZE / 2 - pixels_per_square * (num_squares // 2 + within)


def world_phase(world: World, pixels_per_square: float) -> Tensor:
    """Compute the camera's phase in the last initial frame (B, 4), the inverse of
    ``world_corner``."""
    angle = 2 * torch.pi / pixels_per_square * (FRAME_SIZE / 2 - world.corner)
    return torch.stack([angle.cos(), angle.sin()], dim=-1).flatten(1)


@dataclasses.dataclass(frozen=True)
class Scenery:
    """Drawn worlds.

    Attributes:
        image: colours at the resolution of the templates (B, 3, R · n, R · n).
        corner: see ``World`` (B, 2).
        first: coefficients of the view at the start (B, coefficients, 8, 8), from
            ``Simulator.scenery``; empty before.
        sprites: objects that move or change their look; None if no class stands for them.
        step: number of steps since the last initial frame.
    """

    image: Tensor
    corner: Tensor
    first: Tensor
    sprites: SpriteStates | None = None
    step: int = 0

    def at_step(self, step: int) -> Scenery:
        """Return the scenery after a number of steps."""
        return dataclasses.replace(self, step=step)


def full_precision(method: Callable) -> Callable:
    """Decorate a method of a module to run without autocast: colours and positions are exact."""
    @functools.wraps(method)
    def wrapped(self, *args, **kwargs):
        with torch.autocast(self.templates.device.type, enabled=False):
            return method(self, *args, **kwargs)
    return wrapped


class SquareImages(nn.Module):
    """Templates of K classes, and the images that they form.

    Args:
        num_classes: K.
        looks: numbers of looks of the last classes, which stand for objects, see
            ``generative.sprites``.
    """

    templates: Tensor

    def __init__(self, num_classes: int, pixels_per_square: float, looks: Sequence[int] = ()):
        super().__init__()
        self.pixels_per_square = pixels_per_square
        self.looks = tuple(looks)
        self.sprites = Sprites(num_classes, looks, pixels_per_square) if looks else None
        self.register_buffer("templates", torch.zeros(num_classes, RESOLUTION, RESOLUTION, 3))

    @full_precision
    def paint(self, world: World) -> Scenery:
        """Draw whole worlds at the resolution of the templates.

        Args:
            world: squares, as probabilities or as class numbers, int64 (B, n, n).
        """
        num = world.squares.shape[1]
        templates = self.templates.permute(0, 3, 1, 2).flatten(1)  # (K, 3·R·R)
        if world.squares.ndim == 3:
            painted = templates[world.squares]
        else:
            painted = world.squares.to(templates) @ templates
        image = painted.reshape(-1, num, num, 3, RESOLUTION, RESOLUTION).permute(0, 3, 1, 4, 2, 5)
        image = image.reshape(-1, 3, num * RESOLUTION, num * RESOLUTION)
        states = None if self.sprites is None else self._states(world)
        return Scenery(image, world.corner, image.new_empty(0), states)

    def _states(self, world: World) -> SpriteStates:
        assert self.sprites is not None
        return self.sprites.states(world.squares, world.places, world.velocities, world.looks,
                                   world.clock)

    @full_precision
    def view(self, scenery: Scenery, displacement: Tensor, size: int = FRAME_SIZE) -> Tensor:
        """Draw the view with its moving and animated objects, see ``forward``.

        If N is larger than B, each B of the N rows show one step, from ``scenery.step`` on.
        """
        static = self(scenery, displacement, size)
        if self.sprites is None or scenery.sprites is None:
            return static
        offset = displacement - scenery.corner.repeat(len(displacement) // len(scenery.corner), 1)
        return self.sprites.draw(static, scenery.sprites, offset, scenery.step)

    @full_precision
    def forward(self, scenery: Scenery, displacement: Tensor, size: int = FRAME_SIZE) -> Tensor:
        """Draw the static part of the scenery in view, (N, 3, S, S) in [0, 1].

        Args:
            scenery: B worlds; if N is larger, they are repeated.
            displacement: displacement of the camera in pixels to the right and down (N, 2).
            size: S, pixels per side of the central part of the view that is drawn.
        """
        image = scenery.image
        batch, length = len(image), image.shape[-1]
        offset = displacement.unflatten(0, (-1, batch)) - scenery.corner  # (N / B, B, 2)
        at = self._positions(offset, size) * (2 / (length - 1)) - 1  # (N / B, B, 2, S)
        right, down = at.to(image).transpose(0, 1).unbind(dim=2)  # (B, N / B, S)
        grid = torch.stack(torch.broadcast_tensors(right[:, :, None], down[..., None]), dim=-1)
        view = functional.grid_sample(image, grid.flatten(1, 2), padding_mode="border",
                                      align_corners=True)  # (B, 3, N / B · S, S)
        return view.unflatten(2, (-1, size)).permute(2, 0, 1, 3, 4).flatten(0, 1)

    @full_precision
    def crop(self, world: World, displacement: Tensor, size: int) -> Tensor:
        """Draw a small part of worlds with certain classes; see ``forward``, which needs more
        memory."""
        num = world.squares.shape[1]
        last = RESOLUTION * num - 1
        at = self._positions(displacement - world.corner, size).clamp(0, last)
        first = at.detach().floor().clamp(max=last - 1)
        weight, first = at - first, first.long()
        batch = torch.arange(len(displacement), device=displacement.device)[:, None, None]
        parts = []
        for down in (0, 1):
            for right in (0, 1):
                row, column = first[:, 1, :, None] + down, first[:, 0, None] + right
                classes = world.squares[batch, row // RESOLUTION, column // RESOLUTION].long()
                colours = self.templates[classes, row % RESOLUTION, column % RESOLUTION]
                shares = [part if more else 1 - part for part, more in (
                    (weight[:, 1, :, None], down), (weight[:, 0, None], right))]
                parts.append(colours * (shares[0] * shares[1])[..., None])
        return sum(parts[1:], parts[0]).permute(0, 3, 1, 2)

    @full_precision
    def first_views(self, world: World) -> Tensor:
        """Draw the views at the start of worlds with certain classes (B, 3, 64, 64); see ``view``,
        which needs more memory."""
        view = self.crop(world, torch.zeros_like(world.corner), FRAME_SIZE)
        if self.sprites is None:
            return view
        return self.sprites.draw(view, self._states(world), -world.corner, 0)

    def _positions(self, offset: Tensor, size: int) -> Tensor:
        """Return the positions of pixels in the world, in units of template positions.

        Args:
            offset: position of the view in the world, in pixels to the right and down (…, 2).
            size: S.

        Returns:
            Positions to the right and down (…, 2, S).
        """
        pixels = torch.arange(size, device=offset.device) + (FRAME_SIZE - size) / 2 + 0.5
        return (pixels + offset[..., None].float()) * (RESOLUTION / self.pixels_per_square) - 0.5

    @full_precision
    def errors(self, images: Tensor, corner: Tensor, num_squares: int,
               templates: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compare each square in images with templates.

        Args:
            images: images (B, 3, S, S) in [0, 1], centred on the view.
            corner: corner of a world, see ``World`` (B, 2).
            num_squares: n.
            templates: templates (K, R, R, 3); None for those of all classes.

        Returns:
            Mean squared error of each template (B, n, n, K), 0 where no pixel is visible; and the
            visible share of each square (B, n, n).
        """
        templates = self.templates if templates is None else templates
        size, num = images.shape[-1], RESOLUTION * num_squares
        pixels = torch.arange(size, device=images.device) + (FRAME_SIZE - size) / 2 + 0.5
        visible, looks = [], []
        for axis in (1, 0):
            at = (pixels - corner[:, axis, None]) * (RESOLUTION / self.pixels_per_square)
            place = at.floor().long()  # (B, S)
            inside = (place >= 0) & (place < num)
            place = place.clamp(0, num - 1)
            of_square = functional.one_hot(place // RESOLUTION, num_squares) * inside[..., None]
            visible.append(of_square.to(images.dtype).transpose(1, 2))  # (B, n, S)
            looks.append(place % RESOLUTION)
        results = []
        for image, rows, columns, y, x in zip(images, *visible, *looks):
            colours = templates[:, y][:, :, x]  # (K, S, S, 3)
            errors = (colours - image.permute(1, 2, 0)).square().mean(dim=-1)  # (K, S, S)
            results.append((rows @ errors @ columns.T).permute(1, 2, 0))
        counts = visible[0].sum(dim=-1)[:, :, None] * visible[1].sum(dim=-1)[:, None]  # (B, n, n)
        mean = torch.stack(results) / counts.clamp(min=1)[..., None]
        return mean, (counts / self.pixels_per_square ** 2).clamp(max=1)

    @full_precision
    def read(self, images: Tensor, corner: Tensor, num_squares: int,
             seeds: Tensor | None = None, objects: bool = True) -> tuple[World, Tensor]:
        """Recognise the squares in images.

        Args:
            images, corner, num_squares: see ``errors``.
            objects: whether the images show moving and animated objects, unlike rendered worlds.
            seeds: seeds of the world, int64 (B,), which also select the clock among those that fit
                the images; None for 0.

        Returns:
            World with the most similar class of each square, int64 (B, n, n); and whether a square
            is recognised, bool (B, n, n): at least a third of it is in view, and it looks like the
            class. Only the direction of velocities is known, so they are 1 or -1.
        """
        static, templates = len(self.templates), self.templates
        if self.sprites is not None and objects:
            still, still_classes, still_images = self.sprites.still_looks(self._empty)
            templates = torch.cat([templates, still])
        errors, visible = self.errors(images, corner, num_squares, templates)
        smallest, classes = errors.min(dim=-1)
        is_still = classes >= static
        known = (visible >= _VISIBLE) & (
            smallest < torch.where(is_still, _LIKE_SPRITE, _UNREADABLE) ** 2)
        world = World.of(classes, corner, **({} if seeds is None else {"seeds": seeds}))
        if self.sprites is None or not objects:
            return world, known
        which = (classes - static).clamp(min=0)
        if len(still_classes):
            classes = torch.where(is_still, still_classes[which], classes)
        votes = self.sprites.clock_votes(classes, still_images[which], is_still & known) if len(
            still_classes) else 0
        found = self.sprites.find(images, corner, num_squares, self._empty)
        is_found = ~known & (found.errors < _LIKE_SPRITE ** 2) & (
            found.errors <= functional.max_pool2d(-found.errors, (1, 3), 1, (0, 1)).neg())
        classes = torch.where(is_found, found.classes, classes)
        votes = votes + self.sprites.clock_votes(found.classes, found.images, is_found)
        return dataclasses.replace(
            world, squares=classes, places=torch.where(is_found, found.places, world.places),
            velocities=torch.where(is_found, found.directions, world.velocities),
            looks=torch.where(is_found, found.looks, world.looks),
            clock=most_voted(votes, world.seeds)), known | is_found

    @property
    def empty_class(self) -> int:
        """Class of empty squares, if there are classes of objects."""
        static = self.templates[:len(self.templates) - len(self.looks)]
        return int((static - self.templates[-1]).square().flatten(1).sum(dim=1).argmin())

    @property
    def _empty(self) -> Tensor:
        """Template (R, R, 3) of the classes of objects, which is that of an empty square."""
        return self.templates[-1]


class StaticSquares(SquareImages):
    """Images of squares for a static camera whose view is the world.

    Pixels never move within squares, so a pixel takes the colour of its place in the template
    without interpolation. Within OVERLAP of a border, it shows the brighter one of both squares,
    because nothing is drawn on free squares, which are black.
    """

    def read(self, images: Tensor, corner: Tensor, num_squares: int,
             seeds: Tensor | None = None, objects: bool = True) -> tuple[World, Tensor]:
        """Recognise the squares in images; see ``SquareImages.read``. All of them count as
        recognised, because they are wholly in view, and objects hide only parts of them."""
        world, known = super().read(images, corner, num_squares, seeds, objects)
        return world, torch.ones_like(known)

    @full_precision
    def paint(self, world: World) -> Scenery:
        """Draw the view (B, 3, 64, 64); see ``SquareImages.paint``."""
        squares = world.squares
        if squares.ndim == 3:
            squares = functional.one_hot(squares, len(self.templates)).to(self.templates)
        at = (torch.arange(FRAME_SIZE, device=squares.device) + 0.5) / self.pixels_per_square
        place = (at % 1 * RESOLUTION).long()
        colours = self.templates[:, place][:, :, place]  # (K, 64, 64, 3)
        near = [(at + shift).long().clamp(0, squares.shape[1] - 1)
                for shift in (-OVERLAP, OVERLAP)]
        images = [torch.einsum("byxk,kyxc->bcyx", squares[:, rows][:, :, columns].float(), colours)
                  for rows, columns in itertools.product(near, near)]
        return Scenery(functools.reduce(torch.maximum, images), world.corner,
                       squares.new_empty(0))

    def forward(self, scenery: Scenery, displacement: Tensor, size: int = FRAME_SIZE) -> Tensor:
        """Return the scenery's view; see ``SquareImages.forward``. The camera's position is
        ignored."""
        first = (FRAME_SIZE - size) // 2
        view = scenery.image[..., first:first + size, first:first + size]
        return view.repeat(len(displacement) // len(view), 1, 1, 1)

    def crop(self, world: World, displacement: Tensor, size: int) -> Tensor:
        return self(self.paint(world), displacement, size)


def square_images(num_classes: int, num_squares: int, pixels_per_square: float,
                  looks: Sequence[int] = ()) -> SquareImages:
    """Create images of squares: those for a static camera if the world is as large as the view."""
    kind = StaticSquares if is_view(num_squares, pixels_per_square) else SquareImages
    return kind(num_classes, pixels_per_square, looks)


def is_view(num_squares: int, pixels_per_square: float) -> bool:
    """Return whether a world is exactly as large as the view."""
    return math.isclose(num_squares * pixels_per_square, FRAME_SIZE)
