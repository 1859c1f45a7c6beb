"""Pictures of saliency: blue where a pixel raises the function, red where it lowers it.

Letters in shape comments: T steps, C H W an image.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy.ndimage import gaussian_filter

from common.video import enlarge, mark_action, side_by_side

PICTURE_SCALE = 4
FRAMES_PER_SECOND = 5
FULL_COLOUR_QUANTILE = 0.995
FRAME_SHARE = 0.35  # of the frame below the colours; the rest is white
POSITIVE, NEGATIVE = (20, 60, 255), (255, 40, 20)


def saliency_maps(gradients: np.ndarray, kernel_size: int, sigma: float) -> np.ndarray:
    """Sum gradients with respect to images over their channels and smooth them.

    Args:
        gradients: float32 (T, C, H, W).
        kernel_size: of the Gaussian, odd; in pixels.
        sigma: of the Gaussian, in pixels. Beyond a border the map is mirrored.

    Returns:
        float32 (T, H, W).
    """
    return gaussian_filter(gradients.sum(axis=1), sigma, radius=kernel_size // 2, mode="mirror",
                           axes=(1, 2))


def specificity(gradients: np.ndarray) -> np.ndarray:
    """Mean absolute Pearson correlation between the gradients of different functions.

    A map shows what its own function depends on only if this is well below 1; at 1 all functions
    have one map, up to sign and scale.

    Args:
        gradients: of the functions with respect to the images (F, T, C, H, W).

    Returns:
        float64 (T,); NaN where fewer than two functions depend on the images of a step.
    """
    found = np.full(gradients.shape[1], np.nan)
    for step, pixels in enumerate(np.moveaxis(gradients, 1, 0).reshape(gradients.shape[1],
                                                                       len(gradients), -1)):
        pixels = pixels[pixels.std(axis=1) > 0].astype(np.float64)
        if len(pixels) > 1:
            pairs = np.triu_indices(len(pixels), 1)
            found[step] = np.abs(np.corrcoef(pixels)[pairs]).mean()
    return found


def full_colour(*maps: np.ndarray) -> float:
    """The saliency that gets the full colour, one for all steps so that they can be compared.

    Only one pixel in 200 has a larger one. Steps on which nothing depends do not count.

    Args:
        maps: each (T, H, W).
    """
    steps = [step for each in maps for step in each if step.any()]
    full = float(np.quantile(np.abs(steps), FULL_COLOUR_QUANTILE)) if steps else 0.0
    return full or 1.0


def coloured(maps: np.ndarray, frames: np.ndarray, full: float) -> np.ndarray:
    """Saliency over the faint frames.

    Args:
        maps: (T, H, W).
        frames: uint8 (T, H, W, C).
        full: saliency of the full colour.

    Returns:
        uint8 (T, H, W, C).
    """
    strength = np.clip(maps / full, -1, 1)[..., None]  # (T, H, W, 1)
    faint = 255 - FRAME_SHARE * (255 - frames.astype(np.float32))
    colour = np.where(strength >= 0, np.float32(POSITIVE), np.float32(NEGATIVE))
    opacity = np.abs(strength)
    return (faint * (1 - opacity) + colour * opacity).round().astype(np.uint8)


def film(number: int, frames: np.ndarray, actions: np.ndarray,
         pictures: dict[str, np.ndarray]) -> Iterator[np.ndarray]:
    """A sample beside pictures of it, below their titles.

    Args:
        number: of the sample.
        frames: uint8 (T, H, W, C).
        actions: that entered the steps, drawn as arrows; -1 where it is not known (T,).
        pictures: uint8 (T, H, W, C), by title.
    """
    large = np.stack([enlarge(frame, PICTURE_SCALE) if action < 0
                      else mark_action(enlarge(frame, PICTURE_SCALE), action)
                      for frame, action in zip(frames, actions)])
    columns = {f"sample {number}": large}
    for title, picture in pictures.items():
        columns[title] = np.stack([enlarge(frame, PICTURE_SCALE) for frame in picture])
    return side_by_side({title: column[:, None] for title, column in columns.items()}, 1)
