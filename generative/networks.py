"""Networks of the published architecture: encoder, recurrent cell, decoder and latent samplers.

The cell is a recurrent state-space model with discrete latents (Hafner et al. 2021, "Mastering
Atari with discrete world models", section 2) and a layer-norm GRU. Under autocast, matrix products
run in the precision of autocast. The cell converts their results to float32 before it normalises
them or accumulates them over time, and all logits of latents are float32.

Letters in shape comments: I initial frames, B batch (or any leading dimensions), N frames or
states, C H W a frame (elsewhere, H is the deterministic state), V bottleneck vector, E frame
embedding, S latent variables, K classes of each, M hidden layer of the cell, A actions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.game_constants import FRAME_SIZE
from generative.config import SimulatorConfig

Draw = Callable[[Tensor], Tensor]
"""Maps logits (…, S, K) to S one-hot variables (…, S, K) with straight-through gradients."""


@dataclasses.dataclass(frozen=True)
class LatentSampler:
    """Sampler that draws each latent variable from its logits, or takes its most likely class.

    Attributes:
        how: ``sample`` draws each variable from its distribution, ``mode`` takes its most
            likely class.
        generator: source of the random numbers, on the device of the logits; None for torch's
            default.
        part: slice of the batch's windows that the logits belong to, and number of windows in the
            batch, so that each window gets the same draws as in the whole batch. None if the logits
            are a whole batch.
    """

    how: Literal["sample", "mode"] = "sample"
    generator: torch.Generator | None = None
    part: tuple[slice, int] | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Choose S one-hot variables with straight-through gradients.

        Gradients pass to the probabilities unchanged (Hafner et al. 2021, "Mastering Atari with
        discrete world models", algorithm 1).

        Args:
            logits: unnormalised logits (…, S, K); (B, S, K) if they are a part of a batch.

        Returns:
            One-hot variables (…, S, K).
        """
        probs = torch.softmax(logits, dim=-1)  # (…, S, K)
        if self.how == "mode":
            classes = logits.argmax(dim=-1)  # (…, S)
        else:
            own, num = self.part or (slice(None), len(probs))
            batch = probs.new_ones(num, *probs.shape[1:])  # other windows' draws do not matter
            batch[own] = probs.detach()
            # The algorithm of torch.multinomial without its checks, which synchronise a GPU.
            race = torch.empty_like(batch).exponential_(generator=self.generator)
            classes = (batch / race).argmax(dim=-1)[own]
        return straight_through(functional.one_hot(classes, probs.shape[-1]).to(probs), probs)


class PresetDraw:
    """Sampler that draws each variable from its distribution, with given random numbers.

    Unlike with a generator, the draws of a row do not depend on the other rows of the batch.

    Args:
        uniform: random numbers in [0, 1), one for each latent variable in each call (calls, B, S).
    """

    def __init__(self, uniform: Tensor):
        self._uniform = iter(uniform)

    def __call__(self, logits: Tensor) -> Tensor:
        """Draw one-hot variables (B, S, K) with straight-through gradients from logits (B, S, K).

        Each call uses the next row of ``uniform``.
        """
        probs = torch.softmax(logits, dim=-1)  # (B, S, K)
        passed = probs.cumsum(dim=-1) <= next(self._uniform).unsqueeze(-1)
        classes = passed.sum(dim=-1).clamp(max=probs.shape[-1] - 1)  # (B, S)
        return straight_through(functional.one_hot(classes, probs.shape[-1]).to(probs), probs)


def straight_through(value: Tensor, gradient_of: Tensor) -> Tensor:
    """Return ``value``, a tensor without gradient, with the gradient of ``gradient_of``."""
    return value + (gradient_of - gradient_of.detach())


def most_likely_action(log_probs: Tensor) -> Tensor:
    """Return the arg-max as one-hot vectors (…, A), with the gradient of ``log_probs`` (…, A)."""
    best = functional.one_hot(log_probs.argmax(dim=-1), log_probs.shape[-1]).to(log_probs)
    return straight_through(best, log_probs)


class _ClampWithGradientOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clamp(0, 1)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


def clamp_image(image: Tensor) -> Tensor:
    """Clamp an image to [0, 1], with a gradient of 1 everywhere."""
    return _ClampWithGradientOne.apply(image)


EMBEDDING_SIZE = 1024
_BLOCK_CHANNELS = (64, 64, 64, 128)


class DownBlock(nn.Module):
    """A residual block that halves height and width: (N, C_in, H, H) to (N, C_out, H/2, H/2).

    Args:
        in_channels, out_channels: C_in and C_out.
        size: H, height and width of the input. The layer norms are over all channels and pixels.
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
    """Encoder of initial frames into bottleneck vectors on the unit sphere.

    Args:
        image_channels: C, colour channels of an image.
        rnn_hidden_size: hidden size of the GRU over the frames, and width of the MLP after it.
        vec_size: V, size of the bottleneck vectors.
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
        """Encode images (I, B, C, H, W) in [0, 1] as unit vectors (B, V)."""
        features = self.blocks(images.flatten(0, 1)).float().flatten(1)  # (I*B, 2048)
        outputs, _ = self.gru(features.unflatten(0, images.shape[:2]))  # (I, B, hidden)
        return on_unit_sphere(self.to_vec(self.mlp(outputs[-1])).float())


def on_unit_sphere(vectors: Tensor) -> Tensor:
    """Divide vectors (…, V) by their Euclidean norms, or by 1e-8 if a norm is smaller."""
    return vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp(min=1e-8)


class Converter(nn.Sequential):
    """MLP with two hidden ELU layers.

    Args:
        width: size of the hidden layers; None for (in_size + out_size) // 2, as published.
    """

    def __init__(self, in_size: int, out_size: int, width: int | None = None):
        hidden = width or (in_size + out_size) // 2
        super().__init__(nn.Linear(in_size, hidden), nn.ELU(), nn.Linear(hidden, hidden), nn.ELU(),
                         nn.Linear(hidden, out_size))

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, in_size) to (B, out_size), float32 even under autocast."""
        return super().forward(x).float()


class FrameEmbedding(nn.Module):
    """Network that embeds images (N, C, 64, 64) in [0, 1] as vectors (N, E) for the posterior."""

    def __init__(self, image_channels: int):
        super().__init__()
        layers, channels = [], image_channels
        for out_channels in (32, 64, 128, 256):
            layers += [nn.Conv2d(channels, out_channels, kernel_size=4, stride=2), nn.ELU()]
            channels = out_channels
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images).flatten(1)


NORM_EPS = 1e-3


def norm_layer(size: int, layer_norm: bool) -> nn.Module:
    """Return a layer norm, or the identity if ``layer_norm`` is False."""
    return nn.LayerNorm(size, eps=NORM_EPS) if layer_norm else nn.Identity()


class LayerNormGRUCell(nn.Module):
    """A GRU cell with layer-normalised gates; the only biases are those of the layer norms."""

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__()
        self.from_input = nn.Linear(input_size, 3 * hidden_size, bias=False)
        self.from_hidden = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.reset_norm = nn.LayerNorm(hidden_size, eps=NORM_EPS)
        self.update_norm = nn.LayerNorm(hidden_size, eps=NORM_EPS)
        self.new_norm = nn.LayerNorm(hidden_size, eps=NORM_EPS)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """Return the next state (B, H) from the input x (B, M) and the state h (B, H)."""
        reset_x, update_x, new_x = self.from_input(x).float().chunk(3, dim=-1)
        reset_h, update_h, new_h = self.from_hidden(h).float().chunk(3, dim=-1)
        reset = torch.sigmoid(self.reset_norm(reset_x + reset_h))
        update = torch.sigmoid(self.update_norm(update_x + update_h))
        new = torch.tanh(self.new_norm(new_x + reset * new_h))
        return update * new + (1 - update) * h


class EnvironmentCell(nn.Module):
    """Recurrent cell of the environment.

    The parts of a step are separate methods because a forward pass with known actions and frames
    runs ``action_input``, ``embedding_input`` and ``prior_logits`` for all steps at once. Its loop
    needs only ``advance``, ``posterior_logits`` and, for open-loop windows, ``prior_logits``.
    """

    def __init__(self, config: SimulatorConfig):
        super().__init__()
        z_size, hidden, deter = config.env_h_stoch_size, config.hidden_dim, config.deter_dim
        self.latent_shape = (config.stoch_dim, config.stoch_discrete)
        self.z_in = nn.Linear(z_size, hidden)
        self.action_in = nn.Linear(config.action_space_size, hidden, bias=False)
        self.in_norm = norm_layer(hidden, config.layer_norm)
        self.gru = LayerNormGRUCell(hidden, deter)
        self.prior_hidden = nn.Linear(deter, hidden)
        self.prior_norm = norm_layer(hidden, config.layer_norm)
        self.prior_out = nn.Linear(hidden, z_size)
        self.posterior_hidden = nn.Linear(deter, hidden)
        self.posterior_embedding = nn.Linear(EMBEDDING_SIZE, hidden, bias=False)
        self.posterior_norm = norm_layer(hidden, config.layer_norm)
        self.posterior_out = nn.Linear(hidden, z_size)

    def action_input(self, action: Tensor) -> Tensor:
        """Compute the term (B, M) that one-hot actions (B, A) add to the layer before the GRU."""
        return self.action_in(action).float()

    def embedding_input(self, embedding: Tensor) -> Tensor:
        """Compute the term (B, M) that frame embeddings (B, E) add to the posterior's hidden layer.
        """
        return self.posterior_embedding(embedding).float()

    def advance(self, z: Tensor, action_input: Tensor, h: Tensor) -> Tensor:
        """Compute the next state h (B, H) from one-hot z (B, S, K), ``action_input`` (B, M) and h.
        """
        x = functional.elu(self.in_norm(self.z_in(z.flatten(-2)).float() + action_input))  # (B, M)
        return self.gru(x, h)

    def prior_logits(self, h: Tensor) -> Tensor:
        """Compute the logits (B, S, K) of z given the state h (B, H)."""
        hidden = functional.elu(self.prior_norm(self.prior_hidden(h).float()))
        return self.prior_out(hidden).float().unflatten(-1, self.latent_shape)

    def posterior_logits(self, h: Tensor, embedding_input: Tensor) -> Tensor:
        """Compute the logits (B, S, K) of z given h (B, H) and ``embedding_input`` (B, M)."""
        hidden = self.posterior_hidden(h).float() + embedding_input
        hidden = functional.elu(self.posterior_norm(hidden))
        return self.posterior_out(hidden).float().unflatten(-1, self.latent_shape)


_HEAD_WIDTH = 400


class ImageDecoder(nn.Module):
    """Decoder of states (N, H + S·K) into images (N, C, 64, 64)."""

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


def _transposed_conv_of_one_pixel(layer: nn.Module, x: Tensor) -> Tensor:
    """Apply a transposed convolution to one-pixel images, (N, C_in) to (N, C_out, k, k).

    For one pixel, this is a matrix product, which is about fifteen times as fast on a CPU.
    """
    weight = layer.get_parameter("weight").permute(0, 2, 3, 1)  # (C_in, k, k, C_out)
    out = (x @ weight.flatten(1)).unflatten(1, weight.shape[1:])
    return (out + layer.get_parameter("bias")).permute(0, 3, 1, 2)  # channels last


class Head(nn.Sequential):
    """MLP with optionally layer-normalised hidden layers, (N, in_size) to (N, out_size)."""

    def __init__(self, in_size: int, hidden_layers: int, out_size: int, layer_norm: bool):
        layers = []
        for _ in range(hidden_layers):
            layers += [nn.Linear(in_size, _HEAD_WIDTH), norm_layer(_HEAD_WIDTH, layer_norm),
                       nn.ELU()]
            in_size = _HEAD_WIDTH
        super().__init__(*layers, nn.Linear(in_size, out_size))


class Decoder(nn.Module):
    """Decoder of image, reward and terminal from [h, z]."""

    def __init__(self, config: SimulatorConfig):
        super().__init__()
        in_size = config.deter_dim + config.env_h_stoch_size
        self.image = ImageDecoder(in_size, config.image_channels, config.cnn_depth)
        self.reward = Head(in_size, config.reward_decoder_layers, 1, config.layer_norm)
        self.terminal = Head(in_size, config.terminal_decoder_layers, 1, config.layer_norm)

    def forward(self, h: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Decode states.

        Args:
            h: deterministic states (N, H).
            z: one-hot latent variables (N, S, K).

        Returns:
            Images (N, C, 64, 64), nominally in [0, 1] but not clamped; rewards (N,) in the unit of
            the data; and logits of the terminal (N,).
        """
        features = torch.cat([h, z.flatten(-2)], dim=-1)  # (N, H + S·K)
        reward = self.reward(features).squeeze(-1).float()  # (N,)
        return self.image(features), reward, self.terminal(features).squeeze(-1).float()
