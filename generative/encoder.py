"""Networks from frames to the bottleneck vector, and from it to the start of a simulation.

Letters in shape comments: I initial frames, B batch, N frames of any kind, C H W a frame,
V bottleneck vector, E embedding (1024).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from common.game_constants import FRAME_SIZE

EMBEDDING_SIZE = 1024
_BLOCK_CHANNELS = (64, 64, 64, 128)


class DownBlock(nn.Module):
    """A residual block that halves the image: (N, C_in, H, H) to (N, C_out, H/2, H/2).

    Args:
        size: H of the input; the layer norms are over (C, H, H).
    """

    def __init__(self, in_channels: int, out_channels: int, size: int):
        super().__init__()
        self.norm1 = nn.LayerNorm((in_channels, size, size))
        self.conv1 = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1)
        self.norm2 = nn.LayerNorm((out_channels, size, size))
        self.activation = nn.LeakyReLU(0.01)
        self.conv2 = nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.skip = nn.Conv2d(in_channels, out_channels, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(self.norm1(x))
        out = self.conv2(self.activation(self.norm2(out)))
        return self.pool(out) + self.skip(self.pool(x))


class BottleneckEncoder(nn.Module):
    """Initial frames to a point on the unit sphere.

    Args:
        image_channels: C.
        rnn_hidden_size: of the GRU over the frames.
        vec_size: V.
    """

    def __init__(self, image_channels: int, rnn_hidden_size: int, vec_size: int):
        super().__init__()
        blocks, channels, size = [], image_channels, FRAME_SIZE
        for out_channels in _BLOCK_CHANNELS:
            blocks.append(DownBlock(channels, out_channels, size))
            channels, size = out_channels, size // 2
        self.blocks = nn.Sequential(*blocks)
        self.gru = nn.GRU(channels * size * size, rnn_hidden_size)
        self.mlp = nn.Sequential(nn.Linear(rnn_hidden_size, rnn_hidden_size), nn.ELU(),
                                 nn.Linear(rnn_hidden_size, rnn_hidden_size), nn.ELU())
        self.to_vec = nn.Linear(rnn_hidden_size, vec_size)

    def forward(self, images: Tensor) -> Tensor:
        """Images (I, B, C, H, W) in [0, 1] to bottleneck vectors (B, V) of length 1."""
        features = self.blocks(images.flatten(0, 1)).float().flatten(1)  # (I*B, 2048)
        outputs, _ = self.gru(features.unflatten(0, images.shape[:2]))  # (I, B, hidden)
        return on_unit_sphere(self.to_vec(self.mlp(outputs[-1])).float())


def on_unit_sphere(vectors: Tensor) -> Tensor:
    """Divide vectors (B, V) by their Euclidean norm, which counts as 1e-8 at least."""
    return vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp(min=1e-8)


class Converter(nn.Sequential):
    """linear, ELU, linear, ELU, linear; both hidden layers are (in + out) // 2 wide."""

    def __init__(self, in_size: int, out_size: int):
        hidden = (in_size + out_size) // 2
        super().__init__(nn.Linear(in_size, hidden), nn.ELU(), nn.Linear(hidden, hidden), nn.ELU(),
                         nn.Linear(hidden, out_size))

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_size) to (B, out_size), float32 under autocast too."""
        return super().forward(x).float()


class FrameEmbedding(nn.Module):
    """Frames for the posterior: images (N, C, 64, 64) in [0, 1] to embeddings (N, E)."""

    def __init__(self, image_channels: int):
        super().__init__()
        layers, channels = [], image_channels
        for out_channels in (32, 64, 128, 256):
            layers += [nn.Conv2d(channels, out_channels, kernel_size=4, stride=2), nn.ELU()]
            channels = out_channels
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images).flatten(1)
