"""Classes of squares, and images of worlds that consist of them.

In Procgen, a level is a grid of squares, and all squares of a class are drawn from one sprite. A
*world* is therefore a grid of class probabilities, and its image follows from a *template* per
class: the colours within a square, at ``RESOLUTION`` positions per side. Colours are interpolated
between these positions, so images are differentiable with respect to the probabilities and to the
camera's position. Because the camera's position is continuous, templates are sharper than pixels.

Letters in shape comments: B batch, n squares per side, K classes, R positions per side of a
template, S pixels per side of an image.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy.ndimage import distance_transform_edt
from torch import Tensor, nn
from torch.nn import functional

from common.errors import UserError
from common.game_constants import FRAME_SIZE, WORLD_SIZE
from generative.sprites import RESOLUTION, Sprites, SpriteStates, most_voted

_SAME = 14.0  # root mean squared difference, of 255, of templates that belong to one class
_SIMILAR = 15.0  # the same for the templates of two classes of a key
_CLIP = 60.0  # difference at which single positions stop counting, because borders overlap
_FEWEST_SHARED = 10  # positions that two templates must share to be compared
_SMALLEST_SHARE = 0.08  # share of a key's levels that a class of the key must have
_UNREADABLE = 0.1  # root mean squared error above which a square is not recognised
_VISIBLE = 0.35  # share of a square that must be in view for it to be recognised
_LIKE_SPRITE = 0.21  # root mean squared error below which an object is recognised
_OVERLAP = 0.02  # share of a square by which Procgen's sprites extend beyond it on all sides


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
        pixels_per_square: size of a square in pixels.

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
        pixels_per_square: size of a square in pixels.
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
    without interpolation. Within _OVERLAP of a border, it shows the brighter one of both squares,
    because nothing is drawn on free squares, which are black.
    """

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
                for shift in (-_OVERLAP, _OVERLAP)]
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


class TemplateFit:
    """Fit of classes and templates to worlds whose squares have known keys, level by level.

    Squares with equal keys of one level belong to one class. Levels in which a key looks alike
    share the class, so that the themes of a level become classes of their own. Add the worlds of
    all levels, then call ``finish``.

    Args:
        pixels_per_square: size of a square in pixels.
        num_squares: n, squares per side of a world.
    """

    def __init__(self, pixels_per_square: float, num_squares: int):
        self.pixels_per_square, self.num_squares = pixels_per_square, num_squares
        self._sums: dict[tuple[int, int], np.ndarray] = {}  # by key and level, (R, R, 4)

    def add(self, level: int, world: np.ndarray, keys: np.ndarray, x: float, y: float) -> None:
        """Add a world.

        Args:
            level: number of the level.
            world: image, uint8 (S, S, 3), where S is WORLD_SIZE, or FRAME_SIZE for a static camera.
            keys: keys of its squares (n, n), see ``envs.squares``.
            x, y: the position of the world's centre in squares.
        """
        size = len(world)
        if size not in (WORLD_SIZE, FRAME_SIZE) or world.shape != (size, size, 3):
            raise UserError(f"a world must have the shape {(WORLD_SIZE, WORLD_SIZE, 3)}, or "
                            f"{(FRAME_SIZE, FRAME_SIZE, 3)} for a static camera, not {world.shape}")
        offsets = (np.arange(size) + 0.5 - size / 2) / self.pixels_per_square
        places = []
        for position in (-y, x):
            at = position % 1 + self.num_squares // 2 + offsets
            inside = (at >= 0) & (at < self.num_squares)
            if is_view(self.num_squares, self.pixels_per_square):
                inside &= abs(at % 1 - 0.5) < 0.5 - _OVERLAP
            at = at[inside]
            places.append((inside, at.astype(np.int64), (at % 1 * RESOLUTION).astype(np.int64)))
        (rows, row, down), (columns, column, right) = places
        names, numbers = np.unique(keys, return_inverse=True)
        numbers = numbers.reshape(keys.shape)[row][:, column]
        flat = ((numbers * RESOLUTION + down[:, None]) * RESOLUTION + right).ravel()
        pixels = world[rows][:, columns].reshape(-1, 3)
        size = len(names) * RESOLUTION ** 2
        sums = np.stack([np.bincount(flat, pixels[:, c], size) for c in range(3)]
                        + [np.bincount(flat, minlength=size)], axis=-1)
        for name, part in zip(names.tolist(), sums.reshape(-1, RESOLUTION, RESOLUTION, 4)):
            self._sums[name, level] = self._sums.get((name, level), 0) + part

    def finish(self, images: SquareImages | None = None
               ) -> tuple[SquareImages, dict[tuple[int, int], int]]:
        """Return the images of all classes, and the class of each key of a level, by key and level.

        Args:
            images: images of given classes; None to fit them.
        """
        templates: list[np.ndarray] = []
        classes: dict[tuple[int, int], int] = {}
        if images is not None:
            given = [np.concatenate([255 * template, np.ones_like(template[..., :1])], axis=-1)
                     for template in images.templates.cpu().numpy()]
            return images, {key: int(np.argmin([_distance(sums, template) for template in given]))
                            for key, sums in self._sums.items()}
        for name in sorted({name for name, _ in self._sums}):
            levels = {level: sums for (other, level), sums in self._sums.items() if other == name}
            clusters, numbers = _clusters(levels)
            classes |= {(name, level): len(templates) + number for level, number in numbers.items()}
            templates += [_filled(sums) for sums in clusters]
        images = square_images(len(templates), self.num_squares, self.pixels_per_square)
        images.templates.copy_(torch.from_numpy(np.stack(templates) / 255))
        return images, classes


def _clusters(levels: dict[int, np.ndarray]) -> tuple[list[np.ndarray], dict[int, int]]:
    """Cluster levels by the mean colours of their sums (R, R, 4), the fullest levels first.

    Clusters of few levels are dissolved.

    Returns:
        Sum of each cluster, and the number of each level's cluster.
    """
    members: list[list[int]] = []
    sums: list[np.ndarray] = []
    for level in sorted(levels, key=lambda level: -int((levels[level][..., 3] > 0).sum())):
        distances = [_distance(levels[level], other) for other in sums]
        best = int(np.argmin(distances)) if distances else -1
        if best >= 0 and (distances[best] <= _SAME or not np.isfinite(distances[best])):
            sums[best] = sums[best] + levels[level]
            members[best].append(level)
        else:
            sums.append(levels[level])
            members.append([level])
    merged: list[int] = []  # clusters of few levels may have differed by chance
    for number, group in sorted(enumerate(members), key=lambda item: -len(item[1])):
        similar = [other for other in merged if _distance(sums[number], sums[other]) <= _SIMILAR]
        if similar:
            sums[similar[0]] = sums[similar[0]] + sums[number]
            members[similar[0]] = members[similar[0]] + group
        else:
            merged.append(number)
    sums, members = [sums[number] for number in merged], [members[number] for number in merged]
    fewest = min(_SMALLEST_SHARE * len(levels), max(map(len, members)))
    large = [number for number, group in enumerate(members) if len(group) >= fewest]
    kept = [sums[number] for number in large]
    numbers = {level: at for at, number in enumerate(large) for level in members[number]}
    for number, group in enumerate(members):
        if number not in large:
            best = int(np.argmin([_distance(sums[number], other) for other in kept]))
            kept[best] = kept[best] + sums[number]
            numbers |= dict.fromkeys(group, best)
    return kept, numbers


def _distance(first: np.ndarray, second: np.ndarray) -> float:
    """Return the root mean squared difference of two sums' mean colours; inf if they share fewer
    than _FEWEST_SHARED positions."""
    both = (first[..., 3] > 0) & (second[..., 3] > 0)
    if both.sum() < _FEWEST_SHARED:
        return np.inf
    means = (sums[both][:, :3] / sums[both][:, 3:] for sums in (first, second))
    squared = np.square(np.subtract(*means)).mean(axis=-1)
    return float(np.sqrt(np.minimum(squared, _CLIP ** 2).mean()))


def _filled(sums: np.ndarray) -> np.ndarray:
    """Return mean colours (R, R, 3); positions without data take those of the nearest one."""
    known = sums[..., 3] > 0
    nearest = distance_transform_edt(~known, return_distances=False, return_indices=True)
    means = sums[..., :3] / np.maximum(sums[..., 3:], 1)
    return means[tuple(nearest)]
