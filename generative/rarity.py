"""Weights of pixels by how rarely their colour occurs.

What matters to an agent may be small: a coin is 20 of 4 096 pixels. Their share of the squared
error is as small, so a simulator can leave them out. Where colours are few, as in Procgen without
backgrounds, a weight by the colour's rarity gives them more of it (after the rebalancing of colours
in Zhang, Isola and Efros 2016, "Colorful image colorization", section 2.2).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from common.progress import with_progress
from generative.dataset import RolloutDataset

_LEVELS = 8  # of each colour value
_FRAMES = 2000  # that are counted
_LARGEST = 30.0  # weight, before the scale: colours that hardly occur are noise


class PixelWeights:
    """Weights of pixels, 1 on average over the frames that were counted.

    Args:
        shares: of each colour among the pixels (levels³,), sum 1, on the device of the images.
        rarity: exponent; 0 weighs all pixels alike, 1 all colours.
    """

    def __init__(self, shares: Tensor, rarity: float):
        typical = shares.square().sum()  # mean share of a pixel's colour
        weights = (shares.clamp(min=1e-12) / typical).pow(-rarity).clamp(max=_LARGEST)
        self._weights = (weights / (weights * shares).sum()).float()

    def __call__(self, images: Tensor) -> Tensor:
        """Images (…, 3, H, W) in [0, 1] to weights (…, H, W)."""
        return self._weights[_colours((images * 255).round().long())]


def count_colours(dataset: RolloutDataset, windows: np.ndarray, seed: int) -> Tensor:
    """Shares (levels³,) of the colours in frames of the episodes that these windows show.

    Args:
        windows: their numbers.
        seed: of the choice of frames.
    """
    chosen = np.random.default_rng(seed).permutation(windows)[:_FRAMES]
    total = torch.zeros(_LEVELS ** 3, dtype=torch.float64)
    for begin in with_progress(range(0, len(chosen), 100), -(-len(chosen) // 100), "batch"):
        frames = dataset.batch(chosen[begin:begin + 100]).frames[dataset.num_init_steps - 1]
        total += torch.bincount(_colours(frames.long()).flatten(), minlength=len(total))
    return total / total.sum()


def _colours(values: Tensor) -> Tensor:
    """Colour values (…, 3, H, W) from 0 to 255 to the number of the colour (…, H, W)."""
    red, green, blue = (values * _LEVELS // 256).unbind(dim=-3)
    return (red * _LEVELS + green) * _LEVELS + blue
