"""Networks from the environment's state to image, reward and whether the episode ends.

Letters in shape comments: N states of any kind, H deterministic state, S·K latent, C channels,
d = cnn_depth.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from generative.cell import norm_layer
from generative.config import SimulatorConfig

_HEAD_WIDTH = 400


@dataclasses.dataclass(frozen=True)
class DecodedObservation:
    """Predictions of the decoder; the leading dimensions are those of its input.

    Attributes:
        images: (…, C, 64, 64), nominally in [0, 1] but not clamped.
        rewards: (…,), in the unit of the data.
        terminal_logits: (…,), before the sigmoid, which the loss needs for its precision.
    """

    images: Tensor
    rewards: Tensor
    terminal_logits: Tensor

    @property
    def terminals(self) -> Tensor:
        """Probability that the episode ends here (…,)."""
        return torch.sigmoid(self.terminal_logits)


class ImageDecoder(nn.Module):
    """(N, H + S·K) to images (N, C, 64, 64)."""

    def __init__(self, in_size: int, image_channels: int, depth: int):
        super().__init__()
        self.linear = nn.Linear(in_size, 32 * depth)
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(32 * depth, 4 * depth, kernel_size=5, stride=2), nn.ELU(),
            nn.ConvTranspose2d(4 * depth, 2 * depth, kernel_size=5, stride=2), nn.ELU(),
            nn.ConvTranspose2d(2 * depth, depth, kernel_size=6, stride=2), nn.ELU(),
            nn.ConvTranspose2d(depth, image_channels, kernel_size=6, stride=2))

    def forward(self, features: Tensor) -> Tensor:
        first, *later = self.layers
        x = _transposed_conv_of_one_pixel(first, self.linear(features))
        for layer in later:
            x = layer(x)
        return x.float() + 0.5


def _transposed_conv_of_one_pixel(layer: nn.ConvTranspose2d, x: Tensor) -> Tensor:
    """``layer`` on images of one pixel, (N, C_in) to (N, C_out, k, k).

    There it is a matrix product, and as such about fifteen times as fast on a CPU.
    """
    weight = layer.weight.permute(0, 2, 3, 1)  # (C_in, k, k, C_out), as it lies in memory
    out = (x @ weight.flatten(1)).unflatten(1, weight.shape[1:])
    return (out + layer.bias).permute(0, 3, 1, 2)  # channels last


class Head(nn.Sequential):
    """An MLP with layer-normalised hidden layers; (N, in_size) to (N, out_size)."""

    def __init__(self, in_size: int, hidden_layers: int, out_size: int, layer_norm: bool):
        layers = []
        for _ in range(hidden_layers):
            layers += [nn.Linear(in_size, _HEAD_WIDTH), norm_layer(_HEAD_WIDTH, layer_norm),
                       nn.ELU()]
            in_size = _HEAD_WIDTH
        super().__init__(*layers, nn.Linear(in_size, out_size))


class Decoder(nn.Module):
    """Image, reward and terminal from [h, z]."""

    def __init__(self, config: SimulatorConfig):
        super().__init__()
        in_size = config.deter_dim + config.env_h_stoch_size
        self.image = ImageDecoder(in_size, config.image_channels, config.cnn_depth)
        self.reward = Head(in_size, config.reward_decoder_layers, 1, config.layer_norm)
        self.terminal = Head(in_size, config.terminal_decoder_layers, 1, config.layer_norm)

    def forward(self, h: Tensor, z: Tensor) -> DecodedObservation:
        """h (N, H) and one-hot z (N, S, K)."""
        features = torch.cat([h, z.flatten(-2)], dim=-1)  # (N, H + S·K)
        return DecodedObservation(self.image(features), self.reward(features).squeeze(-1).float(),
                           self.terminal(features).squeeze(-1).float())
