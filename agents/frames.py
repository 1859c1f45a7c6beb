"""Frames and images: the one place that checks and converts what users pass as frames.

*Frames* are uint8 (…, 64, 64, 3), as Procgen renders and recordings store them. *Images* are
float32 (…, 3, 64, 64) in [0, 1], the input of networks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from common.game_constants import FRAME_SIZE

_FRAME, _IMAGE = (FRAME_SIZE, FRAME_SIZE, 3), (3, FRAME_SIZE, FRAME_SIZE)
_TOLERANCE = 1e-3  # of the range of floats, for resized or averaged frames
_LEADING = {1: "N", 2: "B, N"}


def as_images(frames: Any, num_leading: int | None = None) -> Tensor:
    """Check frames, and convert them to images.

    Args:
        frames: array or tensor of the shape (…, 64, 64, 3) or (…, 3, 64, 64), either uint8 from 0
            to 255 or float from 0 to 1.
        num_leading: required number of leading dimensions; None for any.

    Returns:
        Float32 (…, 3, 64, 64) in [0, 1], on the device of a tensor and with its gradient.

    Raises:
        UserError: if type, shape or range are not as expected; the message gives both.

    Example::

        >>> frames = recording.episode(0).frames  # uint8 (L, 64, 64, 3)
        >>> images = as_images(frames)
        >>> assert torch.equal(as_images(frames / 255), images) and images.max() <= 1
    """
    images = frames if isinstance(frames, Tensor) else _tensor(frames)
    shape, leading = tuple(images.shape), "…"
    if num_leading is not None:
        leading = _LEADING[num_leading]
    if shape[-3:] not in (_FRAME, _IMAGE) or num_leading not in (None, len(shape) - 3):
        expected = " or ".join(f"({leading}, {', '.join(map(str, size))})"
                               for size in (_FRAME, _IMAGE))
        raise UserError(f"frames must have the shape {expected}, not {shape}")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise UserError("frames must be uint8 from 0 to 255, or float from 0 to 1, not "
                        f"{str(images.dtype).removeprefix('torch.')}")
    if images.is_floating_point():
        images = images.float()
        _check_range(images)
    else:
        images = images.float() / 255
    return images if shape[-3:] == _IMAGE else images.movedim(-1, -3)


def as_frames(frames: Any) -> np.ndarray:
    """Check frames, and convert them to uint8 (…, 64, 64, 3), for display or storage.

    Args:
        frames: see ``as_images``; floats are rounded.

    Raises:
        UserError: see ``as_images``.

    Example::

        >>> frames = recording.episode(0).frames
        >>> images = as_images(frames)  # float32 (L, 3, 64, 64)
        >>> assert np.array_equal(as_frames(images), frames)
    """
    return to_frames(as_images(frames))


def to_frames(images: Tensor) -> np.ndarray:
    """Convert images (…, 3, 64, 64), clamped to [0, 1], to frames, without checks."""
    images = images.detach().float().clamp(0, 1)
    return (images * 255).round().byte().movedim(-3, -1).cpu().numpy()


def _tensor(frames: Any) -> Tensor:
    """Convert an array, or a nested sequence of arrays or numbers."""
    array = np.asarray(frames)
    if array.dtype.kind not in "biuf":
        raise UserError("frames must be uint8 from 0 to 255, or float from 0 to 1, not "
                        f"{array.dtype}")
    if array.dtype.kind == "u" and array.dtype != np.uint8:  # torch has no other unsigned types
        array = array.astype(np.int64)
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()  # torch warns about the former and rejects the latter
    return torch.from_numpy(array)


def _check_range(images: Tensor) -> None:
    """Raise UserError unless all numbers lie between 0 and 1."""
    if not images.numel():
        return
    low, high = (float(bound) for bound in images.detach().aminmax())
    if not (low >= -_TOLERANCE and high <= 1 + _TOLERANCE):
        advice = ""
        if low < 0:
            advice = "; undo the normalisation by mean and standard deviation"
        elif high <= 255:
            advice = "; frames from 0 to 255 must be uint8, or be divided by 255"
        raise UserError(f"float frames must lie between 0 and 1, not between {low:g} and "
                        f"{high:g}{advice}")
