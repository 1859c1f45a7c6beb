"""Fit of the classes of squares, and of their templates, to recorded worlds."""

from __future__ import annotations

import numpy as np
import torch
from scipy.ndimage import distance_transform_edt

from common.errors import UserError
from common.game_constants import FRAME_SIZE, WORLD_SIZE
from generative.sprites import RESOLUTION
from generative.squares import OVERLAP, SquareImages, is_view, square_images

_SAME = 14.0  # root mean squared difference, of 255, of templates that belong to one class
_SIMILAR = 15.0  # the same for the templates of two classes of a key
_CLIP = 60.0  # difference at which single positions stop counting, because borders overlap
_FEWEST_SHARED = 10  # positions that two templates must share to be compared
_SMALLEST_SHARE = 0.08  # share of a key's levels that a class of the key must have


class TemplateFit:
    """Fit of classes and templates to worlds whose squares have known keys, level by level.

    Squares with equal keys of one level belong to one class. Levels in which a key looks alike
    share the class, so that the themes of a level become classes of their own. Add the worlds of
    all levels, then call ``finish``.

    Args:
        num_squares: n, squares per side of a world.
    """

    def __init__(self, pixels_per_square: float, num_squares: int):
        self.pixels_per_square, self.num_squares = pixels_per_square, num_squares
        self._sums: dict[tuple[int, int], np.ndarray] = {}  # by key and level, (R, R, 4)

    def add(self, level: int, world: np.ndarray, keys: np.ndarray, x: float, y: float) -> None:
        """Add a world.

        Args:
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
                inside &= abs(at % 1 - 0.5) < 0.5 - OVERLAP
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

    def nearest_keys(self, images: SquareImages) -> tuple[np.ndarray, np.ndarray]:
        """Find the key that looks most like each class, in any of the added levels.

        Returns:
            Keys, int64 (K,), and their root mean squared differences, of 255 (K,).
        """
        names = np.array([name for name, _ in self._sums])
        keys, differences = [], []
        for template in 255 * images.templates.cpu().numpy():
            full = np.concatenate([template, np.ones_like(template[..., :1])], axis=-1)
            distances = [_distance(sums, full) for sums in self._sums.values()]
            keys.append(names[int(np.argmin(distances))])
            differences.append(min(distances))
        return np.array(keys, np.int64), np.array(differences)


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
