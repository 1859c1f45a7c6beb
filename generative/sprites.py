"""Objects of worlds that move or change their look, and the images that they form.

A class of squares may stand for an object. Its *sprite* is drawn over the static squares, where the
object is at the time. Sprites alternate between two images with the game's clock. Objects that move
walk along their row, and turn where a wall begins or the ground ends. They lose a quarter of their
speed at walls of two squares or more, and none elsewhere. So their places at all later steps follow
from the world.

Letters in shape comments: G classes of objects, J looks of all objects, M sprites per world, R
positions per side of a sprite, S pixels per side of an image.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from scipy.ndimage import distance_transform_edt
from torch import Tensor, nn
from torch.nn import functional

from common.game_constants import FRAME_SIZE, WORLD_SIZE

RESOLUTION = 16  # R
CLOCK_PERIOD = 10  # steps after which all sprites have the same images again
_MOST = 24  # M
_MOST_IN_VIEW = 10
_MOST_TURNS = 8  # turns of an object that are simulated
AFTER_TURN = 0.75  # share of its speed that an object keeps when it turns at a high wall
_NEAR_PLAYER = 1.4  # squares from the player's centre within which objects may be occluded
_DIFFERENT = 0.03  # difference from the background, of 1, from which a pixel shows an object
_VISIBLE = 0.4  # share of a sprite that must be in view for it to be recognised


@dataclasses.dataclass(frozen=True)
class SpriteStates:
    """The most probable objects of worlds.

    Attributes:
        weights: probability of the object (B, M).
        looks: number of its look, int64 (B, M).
        groups: number of its class among those of objects, int64 (B, M).
        rows: row of its centre, in squares from the top of the world (B, M).
        columns: column of its centre at the start, in squares from the left of the world (B, M).
        begins, ends: leftmost and rightmost column of its centre (B, M).
        kept: share of its speed that it keeps when it turns there (2, B, M).
        velocities: velocity to the right at the start, in squares per step (B, M).
        clock: the game's time at the start, int64 (B,).
    """

    weights: Tensor
    looks: Tensor
    groups: Tensor
    rows: Tensor
    columns: Tensor
    begins: Tensor
    ends: Tensor
    kept: Tensor
    velocities: Tensor
    clock: Tensor

    def after(self, times: Tensor) -> tuple[Tensor, Tensor]:
        """Return column and velocity (T, B, M) after numbers of steps, int64 (T,)."""
        columns, velocities = torch.broadcast_tensors(self.columns, self.velocities)
        left = times[:, None, None].to(columns).expand(-1, *columns.shape)
        for _ in range(_MOST_TURNS):
            goal = torch.where(velocities > 0, self.ends, self.begins)
            needed = (goal - columns) / torch.where(velocities == 0, 1, velocities)  # steps
            turns = (needed < left) & (velocities != 0)
            columns = torch.where(turns, goal, columns + velocities * left)
            left = torch.where(turns, left - needed, 0)
            kept = torch.where(velocities > 0, self.kept[1], self.kept[0])
            velocities = torch.where(turns, -kept * velocities, velocities)
        return columns, velocities


class Sprites(nn.Module):
    """Sprites of G classes of objects, the last of K classes of squares.

    Args:
        num_classes: K.
        looks: number of looks of each class of objects (G numbers).
    """

    images: Tensor
    speed: Tensor
    period: Tensor
    solid: Tensor
    counts: Tensor

    def __init__(self, num_classes: int, looks: Sequence[int], pixels_per_square: float):
        super().__init__()
        self.looks, self.pixels_per_square = tuple(looks), pixels_per_square
        self.first_class = num_classes - len(self.looks)
        # Two images of each look: colours, multiplied by the opacity, and opacity; facing left.
        self.register_buffer("images", torch.zeros(2 * sum(looks), 4, RESOLUTION, RESOLUTION))
        self.register_buffer("speed", torch.zeros(len(looks)))  # squares per step
        self.register_buffer("period", torch.ones(len(looks)))  # steps
        self.register_buffer("solid", torch.zeros(num_classes))  # 1 or 0
        self.register_buffer("counts", torch.tensor(self.looks), persistent=False)

    def states(self, squares: Tensor, places: Tensor, velocities: Tensor, looks: Tensor,
               clock: Tensor) -> SpriteStates:
        """Return the objects of worlds, see ``squares.World`` for the arguments."""
        num, device = squares.shape[1], squares.device
        if squares.ndim == 3:
            classes = squares
            of_class = torch.arange(len(self.looks), device=device) + self.first_class
            probabilities = (squares[..., None] == of_class).to(places)
        else:
            classes, probabilities = squares.argmax(dim=-1), squares[..., self.first_class:]
        flat = probabilities.flatten(1)
        chosen = flat.detach().topk(min(_MOST, flat.shape[1]), dim=1).indices  # (B, M)
        groups, square = chosen % len(self.looks), chosen // len(self.looks)

        def of_square(values: Tensor) -> Tensor:
            return values.flatten(1).gather(1, square)

        row, column = square // num, square % num
        solid = self.solid[classes] > 0
        first, last = map(of_square, self._ways(solid))
        high = functional.pad(solid & functional.pad(solid[:, :-1], (0, 0, 1, 0), value=True),
                              (1, 1), value=True).flatten(1)  # (B, n · (n + 2))
        at_end = [high.gather(1, row * (num + 2) + beside) for beside in (
            first.clamp(max=num + 1), last.clamp(min=-2) + 2)]
        moves = (self.speed[groups] > 0) & (first < last)
        centre = column + torch.where(self.speed[groups] > 0, of_square(places), 0.5)
        begins = torch.where(moves, first + 0.5, centre)
        ends = torch.where(moves, last + 0.5, centre)
        first_look = self.counts.cumsum(0) - self.counts
        return SpriteStates(
            flat.gather(1, chosen),
            first_look[groups] + of_square(looks) % self.counts[groups], groups,
            row + 0.5, centre.minimum(ends).maximum(begins), begins, ends,
            1 - (1 - AFTER_TURN) * torch.stack(at_end).to(centre),
            torch.where(moves, self.speed[groups] * of_square(velocities), 0), clock)

    @staticmethod
    def _ways(solid: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and last column of the ground in a row that contains each square.

        A square belongs to it if it is not solid, and the square below is.

        Args:
            solid: whether each square is solid, bool (B, n, n).

        Returns:
            Columns, int64 (B, n, n); the first is larger than the last outside such ground.
        """
        below = functional.pad(solid[:, 1:], (0, 0, 0, 1), value=True)
        ground, columns = ~solid & below, torch.arange(solid.shape[2], device=solid.device)
        first = torch.where(ground, 0, columns + 1).cummax(dim=-1).values
        last = torch.where(ground, len(columns) - 1, columns - 1).flip(-1).cummin(dim=-1).values
        return first, last.flip(-1)

    def draw(self, view: Tensor, states: SpriteStates, offset: Tensor, step: int) -> Tensor:
        """Draw objects over views.

        Args:
            view: static surroundings (N, 3, S, S); each B of the N rows show one step.
            states: objects of B worlds.
            offset: position of the view in the world, in pixels to the right and down (N, 2).
            step: number of steps from the start to the first B rows.

        Returns:
            Images (N, 3, S, S).
        """
        batch, size, device = len(states.clock), view.shape[-1], view.device
        times = step + torch.arange(len(view) // batch, device=device)  # (N / B,)
        right, velocities = states.after(times)  # (N / B, B, M)
        images = (states.clock + times[:, None])[..., None] // self.period[states.groups].long() % 2
        scale, centre = self.pixels_per_square, offset.unflatten(0, (-1, batch))
        at = torch.stack([right, states.rows.expand_as(right)], dim=-1)  # (N / B, B, M, 2)
        at = scale * at - centre[:, :, None]
        middle = FRAME_SIZE / 2
        inside = ((at - middle).abs().amax(dim=-1) < (size + scale) / 2).to(states.weights)
        near = (inside * states.weights).detach()
        chosen = near.topk(min(_MOST_IN_VIEW, near.shape[-1]), dim=-1).indices

        def among(values: Tensor) -> Tensor:
            return values.expand_as(near).gather(-1, chosen).flatten(0, 1)  # (N, M)

        position = torch.stack([among(at[..., 0]), among(at[..., 1])], dim=-1)  # (N, M, 2)
        pixels = torch.arange(size, device=device) + (FRAME_SIZE - size) / 2 + 0.5
        within = (pixels - position[..., None] + scale / 2) * (RESOLUTION / scale) - 0.5
        weights = (1 - (within[..., None] - torch.arange(RESOLUTION, device=device)).abs()).clamp(
            min=0)  # (N, M, 2, S, R)
        sprites = torch.stack([self.images, self.images.flip(-1)])[
            among((velocities > 0).long()), 2 * among(states.looks) + among(images)]
        sprites = sprites * (among(states.weights) * among(inside))[..., None, None, None]
        rows = weights[:, :, 1, None] @ sprites  # (N, M, 4, S, R)
        drawn = rows.permute(0, 2, 3, 1, 4).flatten(3) @ weights[:, :, 0].transpose(-1, -2).flatten(
            1, 2)[:, None]
        return view * (1 - drawn[:, 3:].clamp(max=1)) + drawn[:, :3]

    def still_looks(self, empty: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the looks of squares that hold an object that stands still.

        Args:
            empty: template of an empty square (R, R, 3).

        Returns:
            Templates (L, R, R, 3); their classes, int64 (L,); and their images, 0 or 1, int64 (L,).
        """
        group = torch.arange(len(self.looks), device=empty.device).repeat_interleave(self.counts)
        still = (self.speed[group] == 0).nonzero()[:, 0]
        sprites = torch.cat([self.images[2 * still], self.images[2 * still + 1]])  # (L, 4, R, R)
        classes = (group[still] + self.first_class).repeat(2)
        return (_over(sprites, empty), classes,
                torch.arange(2, device=empty.device).repeat_interleave(len(still)))

    def clock_votes(self, classes: Tensor, images: Tensor, counted: Tensor) -> Tensor:
        """Count the objects whose image fits each time of the clock, int64 (B, CLOCK_PERIOD).

        Args:
            classes: classes of squares, int64 (B, n, n).
            images: numbers of their images, 0 or 1, int64 (B, n, n).
            counted: squares with a recognised object, bool (B, n, n).
        """
        period = self.period[(classes - self.first_class).clamp(min=0)].long()
        times = torch.arange(CLOCK_PERIOD, device=classes.device)
        fits = times // period[..., None] % 2 == images[..., None]
        return (fits & counted[..., None]).flatten(1, 2).sum(dim=1)

    def find(self, images: Tensor, corner: Tensor, num_squares: int, empty: Tensor) -> Found:
        """Find objects that move in images, as if they stood before empty squares.

        Args:
            images: images (B, 3, S, S) in [0, 1], centred on the view.
            corner: corner of a world, see ``squares.World`` (B, 2).
            num_squares: n.
            empty: template of an empty square (R, R, 3).
        """
        batch, device, size = len(images), images.device, images.shape[-1]
        group = torch.arange(len(self.looks), device=device).repeat_interleave(self.counts)
        moving = (self.speed[group] > 0).nonzero()[:, 0]
        # All squares in view, at the resolution of the sprites.
        edge = (FRAME_SIZE - size) / 2
        first = ((edge - corner) / self.pixels_per_square).floor()  # (B, 2)
        shown = int(size / self.pixels_per_square) + 2
        steps = (torch.arange(shown * RESOLUTION, device=device) + 0.5) / RESOLUTION
        at = corner[..., None] + self.pixels_per_square * (first[..., None] + steps) - edge
        at = at * (2 / size) - 1  # (B, 2, shown · R)
        grid = torch.stack(torch.broadcast_tensors(at[:, 0, None], at[:, 1, :, None]), dim=-1)
        fine = functional.grid_sample(images, grid, align_corners=False, padding_mode="border")
        seen = ((grid.abs() <= 1).all(dim=-1)[:, None]).to(images)
        sprites = self.images.unflatten(0, (-1, 2))[moving]  # (looks, 2, 4, R, R)
        sprites = torch.stack([sprites, sprites.flip(-1)], dim=2).flatten(0, 2)
        kernels = _over(sprites, empty).permute(0, 3, 1, 2)  # (looks · 2 · 2, 3, R, R)
        errors = (_slide(seen * fine.square(), torch.ones_like(kernels[:1]))
                  - 2 * _slide(seen * fine, kernels)
                  + _slide(seen, kernels.square().sum(dim=1, keepdim=True)))
        errors[:, ~(sprites[:, 3] > 0).flatten(1).any(dim=1)] = torch.inf  # never observed
        visible = _slide(seen, torch.ones_like(kernels[:1, :1]))
        errors = errors / (3 * visible).clamp(min=1)  # (B, looks · 4, shown, positions)
        errors = torch.where(visible >= _VISIBLE * RESOLUTION ** 2, errors, torch.inf)
        # The centre of a sprite at position p is in the square of p + R / 2.
        errors = functional.pad(errors, (RESOLUTION // 2, RESOLUTION // 2 - 1), value=torch.inf)
        smallest, kind = errors.min(dim=1)
        smallest, position = smallest.unflatten(-1, (shown, RESOLUTION)).min(dim=-1)
        kind = kind.unflatten(-1, (shown, RESOLUTION)).gather(-1, position[..., None])[..., 0]
        look = moving[kind // 4]
        found = group[look]
        result = Found(smallest, found + self.first_class,
                       look - (self.counts.cumsum(0) - self.counts)[found], position / RESOLUTION,
                       torch.where(kind % 2 > 0, 1.0, -1.0), kind // 2 % 2)
        whole = []
        rows, columns = (first.long()[:, axis, None] + torch.arange(shown, device=device)
                         for axis in (1, 0))
        inside = ((rows >= 0) & (rows < num_squares))[:, :, None] & (
            (columns >= 0) & (columns < num_squares))[:, None]
        index = (rows.clamp(0, num_squares - 1)[:, :, None] * num_squares
                 + columns.clamp(0, num_squares - 1)[:, None]).flatten(1)
        for name, values in vars(result).items():
            fill = torch.inf if name == "errors" else 0
            target = values.new_full((batch, num_squares ** 2), fill)
            values = torch.where(inside, values, fill).flatten(1) if name == "errors" else (
                values.flatten(1))
            whole.append(target.scatter(1, index, values).unflatten(1, (num_squares, num_squares)))
        return Found(*whole)


@dataclasses.dataclass(frozen=True)
class Found:
    """The most similar moving object with its centre in each square.

    Attributes:
        errors: mean squared error; inf where none is in view (B, n, n).
        classes, looks, places: see ``squares.World`` (B, n, n).
        directions: 1 if it faces right, else -1 (B, n, n).
        images: number of its image, 0 or 1 (B, n, n).
    """

    errors: Tensor
    classes: Tensor
    looks: Tensor
    places: Tensor
    directions: Tensor
    images: Tensor


class SpriteFit:
    """Fit of sprites to frames and to images of the same view without objects.

    Args:
        groups: names of the kinds in each class of objects, see ``envs.objects.object_groups``.
    """

    def __init__(self, pixels_per_square: float, groups: Sequence[Sequence[str]]):
        self.pixels_per_square, self.groups = pixels_per_square, groups
        self._sums: dict[tuple[int, int, int], np.ndarray] = {}  # by group, look and image type
        self._seen: list[set[tuple[int, int]]] = [set() for _ in groups]  # row and image type
        self._speeds: list[list[float]] = [[] for _ in groups]

    def add(self, frame: np.ndarray, world: np.ndarray, objects: pd.DataFrame, x: float, y: float
            ) -> None:
        """Add a frame.

        Args:
            frame: the frame, uint8 (C, 64, 64).
            world: world around it, without objects, uint8 (WORLD_SIZE, WORLD_SIZE, C).
            objects: the objects, with the columns of ``MovingObject`` and ``row``.
            x, y: the player's position in squares.
        """
        scale, middle = self.pixels_per_square, slice(*((WORLD_SIZE + FRAME_SIZE * side) // 2
                                                        for side in (-1, 1)))
        colours = np.moveaxis(frame, 0, -1).astype(np.float64) / 255
        behind = world[middle, middle] / 255
        pixels = (np.arange(FRAME_SIZE) + 0.5 - FRAME_SIZE / 2) / scale  # in squares
        for thing in objects.itertuples():
            group = next(i for i, kinds in enumerate(self.groups) if thing.kind in kinds)
            self._seen[group].add((thing.row, thing.image_type))
            self._speeds[group].append(float(np.hypot(thing.vx, thing.vy)))
            right, down = pixels - (thing.x - x) + 0.5, pixels - (y - thing.y) + 0.5
            rows, columns = (np.flatnonzero((at >= 0) & (at < 1)) for at in (down, right))
            close = max(abs(thing.x - x), abs(thing.y - y)) < _NEAR_PLAYER
            if close or not (len(rows) and len(columns)):
                continue
            place = np.ix_(rows, columns)
            seen = abs(colours[place] - behind[place]).max(axis=-1, keepdims=True) > _DIFFERENT
            values = np.concatenate([np.ones_like(seen, np.float64), seen, colours[place],
                                     behind[place]], axis=-1)  # (rows, columns, 8)
            at = [(part * RESOLUTION).astype(int) for part in (down[rows], right[columns])]
            if thing.vx > 0:
                at[1] = RESOLUTION - 1 - at[1]
            sums = self._sums.setdefault((group, thing.image_theme, thing.image_type),
                                         np.zeros((RESOLUTION, RESOLUTION, 8)))
            np.add.at(sums, np.ix_(*at), values)

    @property
    def looks(self) -> tuple[int, ...]:
        """Number of looks of each group; 1 for groups without an observed object."""
        return tuple(1 + max((look for other, look, _ in self._sums if other == group), default=0)
                     for group in range(len(self.groups)))

    def finish(self, sprites: Sprites) -> None:
        """Set images, speeds and periods of sprites to the fitted ones."""
        first = 0
        for group, count in enumerate(self.looks):
            types = sorted({kind for _, kind in self._seen[group]})[:2]
            sprites.speed[group] = max(self._speeds[group], default=0.0)
            sprites.period[group] = next(
                (period for period in range(1, CLOCK_PERIOD) if all(
                    types.index(kind) == row // period % 2 for row, kind in self._seen[group]
                    if kind in types)), 1)
            for look in range(count):
                for number, kind in enumerate(types):
                    sums = self._sums.get((group, look, kind))
                    if sums is not None:
                        place = 2 * (first + look) + number
                        sprites.images[place] = torch.from_numpy(_sprite(sums))
            first += count


def _sprite(sums: np.ndarray) -> np.ndarray:
    """Return the sprite (4, R, R) of the sums (R, R, 8) of ``SpriteFit``."""
    known = sums[..., 0] > 0
    if known.any():  # positions without data take the values of the nearest one
        nearest = distance_transform_edt(~known, return_distances=False, return_indices=True)
        sums = sums[tuple(nearest)]
    means = sums / np.maximum(sums[..., :1], 1)
    opacity = means[..., 1:2]
    colours = means[..., 2:5] - (1 - opacity) * means[..., 5:]
    return np.concatenate([colours, opacity], axis=-1).transpose(2, 0, 1)


def most_voted(votes: Tensor, seeds: Tensor) -> Tensor:
    """Return the time with the most votes (B, CLOCK_PERIOD), int64 (B,); seeds (B,) break ties."""
    order = torch.arange(CLOCK_PERIOD, device=seeds.device)
    times = (seeds[:, None] + order) % CLOCK_PERIOD
    best = (CLOCK_PERIOD * votes.gather(1, times) - order).argmax(dim=1, keepdim=True)
    return times.gather(1, best)[:, 0]


def _over(sprites: Tensor, background: Tensor) -> Tensor:
    """Draw sprites (L, 4, R, R) over a background (R, R, 3), as (L, R, R, 3)."""
    colours = sprites.permute(0, 2, 3, 1)
    return colours[..., :3] + (1 - colours[..., 3:]) * background


def _slide(images: Tensor, kernels: Tensor) -> Tensor:
    """Correlate images with kernels at each row of squares and each column of positions."""
    return functional.conv2d(images, kernels, stride=(RESOLUTION, 1))
