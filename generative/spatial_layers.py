"""Layers of the spatial architecture: the basis of image patches, residual blocks, the
convolutional GRU, the fine memory, and the correction of decoded images.

Letters in shape comments: N images or states of any kind, B batch, C H W an image (elsewhere, W is
the hidden channels), K coefficients of a patch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from generative.camera import NUM_PHASE_MAPS, PATCH, initialise

BLOCK = 2  # pixels per side of the blocks in which ``Refinement`` corrects images
_REFINED_WIDTH, _DETAIL = 32, 8  # channels in ``Refinement``


class PatchBasis(nn.Module):
    """Basis of whitened principal components of 8 x 8 image patches.

    Args:
        num: K, number of leading components to keep.
        image_channels: C, colour channels of an image.
    """

    mean: Tensor
    components: Tensor
    scale: Tensor

    def __init__(self, num: int, image_channels: int):
        super().__init__()
        size = image_channels * PATCH * PATCH
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("components", torch.eye(num, size))  # rows of length 1
        self.register_buffer("scale", torch.ones(num))  # standard deviation of each coefficient

    @torch.no_grad()
    def fit(self, images: Tensor) -> None:
        """Fit mean, components and scale to the patches of images (N, C, 64, 64) in [0, 1]."""
        patches = functional.pixel_unshuffle(images, PATCH).permute(0, 2, 3, 1).flatten(0, 2)
        self.mean.copy_(patches.mean(dim=0))
        centred = patches - self.mean
        variances, vectors = torch.linalg.eigh(centred.T @ centred / len(centred))  # ascending
        num = len(self.scale)
        self.components.copy_(vectors.flip(1)[:, :num].T)
        self.scale.copy_(variances.flip(0)[:num].clamp(min=1e-6).sqrt())

    def coefficients(self, images: Tensor) -> Tensor:
        """Compute the coefficients (N, K, 8, 8) of images (N, C, 64, 64) in [0, 1]."""
        patches = functional.pixel_unshuffle(images, PATCH)  # (N, C·64, 8, 8)
        weight = self.components / self.scale[:, None]
        bias = -weight @ self.mean
        return functional.conv2d(patches, weight[:, :, None, None], bias)

    def padded(self, coefficients: Tensor) -> Tensor:
        """Pad leading coefficients (N, up to K, 8, 8) with zeros to (N, K, 8, 8)."""
        missing = len(self.scale) - coefficients.shape[1]
        return functional.pad(coefficients, (0, 0, 0, 0, 0, missing))

    def images(self, coefficients: Tensor, with_mean: bool = True) -> Tensor:
        """Reconstruct images (N, C, 64, 64) from leading coefficients (N, up to K, 8, 8).

        Args:
            with_mean: add the mean patch; False for the difference between two images.
        """
        num = coefficients.shape[1]
        weight = (self.components[:num] * self.scale[:num, None]).T  # (C·64, K)
        patches = functional.conv2d(coefficients, weight[:, :, None, None],
                                    self.mean if with_mean else None)
        return functional.pixel_shuffle(patches.float(), PATCH)


class ResidualBlock(nn.Module):
    """Pre-activation residual block with group norm and two 3 x 3 convolutions.

    Args:
        width: W, channels of input and output (N, W, height, width).
    """

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.GroupNorm(8, width)
        self.conv1 = nn.Conv2d(width, width, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, padding=1)
        for parameter in self.conv2.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.silu(self.conv1(functional.silu(self.norm(x))))
        return x + self.conv2(hidden)


class ConvGRU(nn.Module):
    """Convolutional GRU with 3 x 3 kernels.

    Args:
        inputs: channels of the input.
        memory: channels of the memory.
    """

    def __init__(self, inputs: int, memory: int):
        super().__init__()
        self.gates = nn.Conv2d(inputs + memory, 2 * memory, kernel_size=3, padding=1)
        self.new = nn.Conv2d(inputs + memory, memory, kernel_size=3, padding=1)
        with torch.no_grad():
            self.gates.get_parameter("bias")[:memory] = -1.0  # at first, the memory changes slowly

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """Compute the next memory (N, memory, height, width) from the input x (N, inputs, height,
        width)."""
        update, reset = torch.sigmoid(self.gates(torch.cat([x, memory], dim=1)).float()).chunk(
            2, dim=1)
        new = torch.tanh(self.new(torch.cat([x, reset * memory], dim=1)).float())
        return update * new + (1 - update) * memory


class FineMemory(nn.Module):
    """Recurrent memory of blocks of 2 x 2 pixels, for objects that are smaller than a patch.

    It has two convolutions over the view and the memory, followed by a convolutional GRU. In one
    step, each block sees a neighbourhood of 22 x 22 pixels.

    Args:
        image_channels: C, colour channels of an image.
        memory: channels of the memory.
        conditions: size of the input that is the same for all blocks.
    """

    def __init__(self, image_channels: int, memory: int, conditions: int):
        super().__init__()
        pixels = image_channels * BLOCK**2
        self.conditions = nn.Linear(conditions, _REFINED_WIDTH)
        self.seen = nn.Conv2d(pixels + memory, _REFINED_WIDTH, kernel_size=5, padding=2)
        self.near = nn.Conv2d(_REFINED_WIDTH, _REFINED_WIDTH, kernel_size=3, padding=1)
        self.remember = ConvGRU(_REFINED_WIDTH, memory)

    def forward(self, images: Tensor, memory: Tensor, conditions: Tensor) -> Tensor:
        """Compute the next memory (N, memory, 32, 32).

        Args:
            images: view of the canvas (N, C, 64, 64).
            memory: memory (N, memory, 32, 32).
            conditions: input that is the same for all blocks (N, conditions).
        """
        blocks = torch.cat([functional.pixel_unshuffle(images, BLOCK), memory], dim=1).contiguous(
            memory_format=torch.channels_last)
        x = functional.silu(self.seen(blocks) + self.conditions(conditions)[:, :, None, None])
        return self.remember(functional.silu(self.near(x)), memory)


class Refinement(nn.Module):
    """Correction of decoded images by convolutions over blocks of 2 x 2 pixels.

    It is needed because a linear combination of patch components can neither be exactly black nor
    draw an edge between two patches, and because interpolation blurs sprites in a shifted image.

    Args:
        image_channels: C, colour channels of an image.
        width: W, hidden channels of the decoder.
        memory: channels of the fine memory.
    """

    def __init__(self, image_channels: int, width: int, memory: int):
        super().__init__()
        pixels = image_channels * BLOCK**2
        self.detail = nn.Conv2d(width, _DETAIL * (PATCH // BLOCK)**2, kernel_size=1)
        self.layers = nn.Sequential(
            nn.Conv2d(pixels + NUM_PHASE_MAPS + _DETAIL + memory, _REFINED_WIDTH, kernel_size=3,
                      padding=1), nn.SiLU(),
            nn.Conv2d(_REFINED_WIDTH, _REFINED_WIDTH, kernel_size=3, padding=1), nn.SiLU(),
            nn.Conv2d(_REFINED_WIDTH, pixels, kernel_size=3, padding=1))
        initialise(self.layers[-1], [0] * pixels)

    def forward(self, images: Tensor, maps: Tensor, x: Tensor, memory: Tensor) -> Tensor:
        """Return corrected images (N, C, 64, 64).

        Args:
            images: decoded images (N, C, 64, 64).
            maps: phase maps of the blocks (N, ``NUM_PHASE_MAPS``, 32, 32).
            x: hidden channels of the decoder (N, W, 8, 8).
            memory: fine memory (N, memory, 32, 32).
        """
        detail = functional.pixel_shuffle(self.detail(x), PATCH // BLOCK)
        blocks = functional.pixel_unshuffle(images, BLOCK).to(detail)
        seen = torch.cat([blocks, maps.to(detail), detail, memory.to(detail)], dim=1).contiguous(
            memory_format=torch.channels_last)
        return images + functional.pixel_shuffle(self.layers(seen).float(), BLOCK)
