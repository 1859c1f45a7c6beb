"""Networks of the prior over starts, which are flows; see ``generative.prior``.

Letters in shape comments: E embedding of a class, W channels.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from generative.config import GRID

EMBEDDING = 12  # E
NUM_GLOBALS = 6  # phase (cosine and sine, to the right and down) and velocity (right, down)
_EMBEDDING_NORM = 1.0
_TIME_FEATURES = 64
_HEADS = 4
_GUIDE_WIDTH = 160
_STRONGEST = 30.0  # largest weight of the evidence, at which squares are nearly certain
LAST_SHARPNESS = 8.0  # factor of the logits in the last step, so that squares are nearly certain
_VIEW_BLOCKS = 6
_RIVALS = 10.0  # factor of their weight, which is learned faster than others
_PLAYER_WIDTH = 32
_SMALLEST = 1e-12  # smallest uniform random number
_MARKS = 4  # marks of the player's square per side of a cell of the view
PLAYER_CHANNELS = _MARKS ** 2
_MOST_CERTAIN = 1 - 1e-6  # largest share of one square in the odds of all, for rounding


@dataclasses.dataclass(frozen=True)
class PriorNoise:
    """Noise from which the prior generates starts. All entries are standard normal.

    Attributes:
        squares: noise of the squares (B, E, n, n).
        globals: noise of phase and velocity (B, NUM_GLOBALS).
        vector: noise of the start vector (B, V / 64, 8, 8).
        places: noise of the places of moving objects within their squares; if the camera is static,
            of the player's square (B, n, n).
    """

    squares: Tensor
    globals: Tensor
    vector: Tensor
    places: Tensor


class _Residual(nn.Module):
    """Pre-activation residual block, whose second norm is modulated by an embedding (N, E)."""

    def __init__(self, inputs: int, outputs: int, embedding: int):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.modulation = nn.Linear(embedding, 2 * outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        for parameter in (*self.conv2.parameters(), *self.modulation.parameters()):
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        gain, bias = self.modulation(embedding)[:, :, None, None].chunk(2, dim=1)
        hidden = self.norm2(self.conv1(functional.silu(self.norm1(x)))) * (1 + gain) + bias
        return self.skip(x) + self.conv2(functional.silu(hidden))


class _Attention(nn.Module):
    """Self-attention over the positions of a map (N, W, height, width)."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.GroupNorm(8, width)
        self.inputs, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)
        for parameter in self.out.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        num, width, height, across = x.shape
        query, key, value = self.inputs(self.norm(x)).reshape(
            num, 3, _HEADS, -1, height * across).transpose(-1, -2).unbind(1)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return x + self.out(mixed.transpose(-1, -2).reshape(num, width, height, across))


class _TimeEmbedding(nn.Module):
    """Embedding of times (B,) in [0, 1] and of further conditions (B, conditions)."""

    def __init__(self, conditions: int, width: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(_TIME_FEATURES + conditions, width), nn.SiLU(),
                                    nn.Linear(width, width), nn.SiLU())

    def forward(self, time: Tensor, conditions: Tensor) -> Tensor:
        half = _TIME_FEATURES // 2
        rates = torch.exp(-math.log(1000) * torch.arange(half, device=time.device) / half) * 1000
        angles = time[:, None] * rates
        return self.layers(torch.cat([angles.cos(), angles.sin(), conditions], dim=-1))


class WorldPrior(nn.Module):
    """Flow over the classes of squares, and over phase and velocity of the camera.

    A U-Net whose first layer joins blocks of 2 x 2 squares.

    Args:
        num_squares: n.
        num_classes: K.
        widths: channels at full, half and quarter resolution.
    """

    embedding: Tensor
    position: Tensor
    strongest_in_samples = 8.0  # fewer squares contradict all others than with _STRONGEST

    def __init__(self, num_squares: int, num_classes: int, widths: tuple[int, int, int]):
        super().__init__()
        self.num_squares, self.num_classes = num_squares, num_classes
        padded = 4 * -(-num_squares // 8) * 2  # divisible by 8
        self._pad = padded - num_squares
        generator = torch.Generator().manual_seed(0)
        vectors = torch.randn(num_classes, EMBEDDING, generator=generator)
        self.register_buffer("embedding", _EMBEDDING_NORM * functional.normalize(vectors, dim=-1))
        line = torch.linspace(-1, 1, padded // 2)
        self.register_buffer("position", torch.stack(torch.meshgrid(line, line, indexing="ij")),
                             persistent=False)
        self._build(*widths)
        self.out = nn.Sequential(nn.GroupNorm(8, widths[0]), nn.SiLU(),
                                 nn.Conv2d(widths[0], 4 * num_classes, 3, padding=1))
        for parameter in self.out[-1].parameters():
            nn.init.zeros_(parameter)

    def _build(self, full: int, half: int, quarter: int) -> None:
        """Create the layers before ``out``."""
        guide = _GUIDE_WIDTH
        self.time = _TimeEmbedding(NUM_GLOBALS + 1, guide)
        self.inputs = nn.Conv2d(4 * (EMBEDDING + 1) + 2, full, 3, padding=1)
        self.down1, self.to_half = _Residual(full, full, guide), nn.Conv2d(full, half, 4, 2, 1)
        self.down2, self.attend2 = _Residual(half, half, guide), _Attention(half)
        self.to_quarter = nn.Conv2d(half, quarter, 3, 2, 1)
        self.middle1, self.attend3 = _Residual(quarter, quarter, guide), _Attention(quarter)
        self.middle2 = _Residual(quarter, quarter, guide)
        self.from_quarter, self.up2 = nn.Conv2d(quarter, half, 1), _Residual(2 * half, half, guide)
        self.attend4 = _Attention(half)
        self.from_half, self.up1 = nn.Conv2d(half, full, 1), _Residual(2 * full, full, guide)
        self.last = _Residual(full, full, guide)
        self.globals = nn.Sequential(nn.Linear(quarter + full + NUM_GLOBALS, guide), nn.SiLU(),
                                     nn.Linear(guide, NUM_GLOBALS))

    def forward(self, x: Tensor, known: Tensor, camera: Tensor, camera_known: Tensor, time: Tensor,
                strongest: float = _STRONGEST) -> tuple[Tensor, Tensor]:
        """Predict the clean data.

        Args:
            x: embeddings of the squares, noisy where they are not known (B, E, n, n).
            known: 1 for given squares, 0 for others (B, 1, n, n).
            camera: phase and velocity, noisy if they are not known (B, NUM_GLOBALS).
            camera_known: 1 if phase and velocity are given (B, 1).
            time: from 0 for noise to 1 for data (B,).
            strongest: largest weight of what a noisy square tells about itself.

        Returns:
            Logits of the classes (B, n, n, K), and phase and velocity (B, NUM_GLOBALS).
        """
        evidence = self._evidence(x, time, strongest)
        hidden, camera = self._hidden(torch.cat([x, known], dim=1), evidence, camera, camera_known,
                                      time)
        logits = functional.pixel_shuffle(self.out(hidden).float(), 2)
        logits = logits[:, :, :self.num_squares, :self.num_squares].permute(0, 2, 3, 1)
        return self._joint(logits + evidence, x, known), camera

    def _hidden(self, x: Tensor, evidence: Tensor, camera: Tensor, camera_known: Tensor,
                time: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the inputs of ``out``, and the clean phase and velocity; see ``forward``.

        Args:
            x: embeddings, and 1 for given squares (B, E + 1, n, n).
            evidence: see ``_evidence`` (B, n, n, K).
        """
        guide = self.time(time, torch.cat([camera, camera_known], dim=-1))
        x = self._joined(x)
        first = self.down1(self.inputs(x), guide)
        second = self.attend2(self.down2(self.to_half(first), guide))
        middle = self.middle2(self.attend3(self.middle1(self.to_quarter(second), guide)), guide)
        x = functional.interpolate(self.from_quarter(middle), size=second.shape[-2:])
        x = self.attend4(self.up2(torch.cat([x, second], dim=1), guide))
        x = functional.interpolate(self.from_half(x), size=first.shape[-2:])
        x = self.last(self.up1(torch.cat([x, first], dim=1), guide), guide)
        centre = self.num_squares // 4
        near = x[:, :, centre - 1:centre + 2, centre - 1:centre + 2].mean(dim=(2, 3))
        camera = self.globals(torch.cat([middle.mean(dim=(2, 3)), near, camera.to(x)], dim=-1))
        return x, camera.float()

    def _joint(self, logits: Tensor, x: Tensor, known: Tensor) -> Tensor:
        """Return the logits (B, n, n, K) of squares given those of all others; see ``forward``."""
        return logits

    def _joined(self, x: Tensor) -> Tensor:
        """Join blocks of 2 x 2 squares of maps (B, W, n, n), and append their positions."""
        x = functional.pixel_unshuffle(functional.pad(x, (0, self._pad, 0, self._pad)), 2)
        return torch.cat([x, self.position.expand(len(x), -1, -1, -1)], dim=1).contiguous(
            memory_format=torch.channels_last)

    def _evidence(self, x: Tensor, time: Tensor, strongest: float) -> Tensor:
        """Return the log-likelihood of each class given the noisy square alone (B, n, n, K).

        The network adds what the other squares tell. Without this term, rare classes hardly occur
        in samples, because the network would have to learn to react strongly to single squares.
        """
        with torch.autocast(x.device.type, enabled=False):
            similar = x.float().permute(0, 2, 3, 1) @ self.embedding.T
            strength = (time / (1 - time).square()).clamp(max=strongest)
            return similar * strength[:, None, None, None]

    def embed(self, squares: Tensor) -> Tensor:
        """Embed class numbers, int64 (B, n, n), or probabilities (B, n, n, K), as (B, E, n, n)."""
        if squares.ndim == 3:
            return self.embedding[squares].permute(0, 3, 1, 2)
        return (squares @ self.embedding).permute(0, 3, 1, 2)

    def euler_step(self, x: Tensor, known: Tensor, camera: Tensor, camera_known: Tensor,
                   time: Tensor, share: Tensor | float, sharpness: Tensor | float
                   ) -> tuple[Tensor, Tensor, Tensor]:
        """Move part of the way from noise to data; see ``forward`` for the other arguments.

        Args:
            share: share of the way that is left to go, in (0, 1].
            sharpness: factor of the logits.

        Returns:
            Embeddings and camera after the step, and class probabilities (B, n, n, K).
        """
        logits, predicted = self(x, known, camera, camera_known, time, self.strongest_in_samples)
        probabilities = (logits * sharpness).softmax(dim=-1)
        x = x + share * (self.embed(probabilities) - x)
        return x, camera + share * (predicted - camera), probabilities

    def sample(self, noise: PriorNoise, times: Tensor, squares: Tensor | None = None,
               known: Tensor | None = None, camera: Tensor | None = None
               ) -> tuple[Tensor, Tensor]:
        """Generate worlds with Euler steps.

        Args:
            noise: noise of squares and of the camera.
            times: times of the evaluations, ascending from 0 (steps,).
            squares: class probabilities of given squares (B, n, n, K).
            known: mask of the given squares (B, 1, n, n); None if none are given.
            camera: given phase and velocity (B, NUM_GLOBALS); None to generate them.

        Returns:
            Class probabilities (B, n, n, K), those of given squares unchanged; and phase, on unit
            circles, and velocity (B, NUM_GLOBALS).
        """
        x, state = noise.squares, noise.globals
        given = torch.zeros_like(x[:, :1]) if known is None else known
        clean = torch.zeros_like(x) if squares is None else self.embed(squares)
        camera_known = x.new_full((len(x), 1), float(camera is not None))
        for step, time in enumerate(times.tolist()):
            x = torch.where(given > 0, clean, x)
            state = state if camera is None else camera
            after = float(times[step + 1]) if step + 1 < len(times) else 1.0
            x, state, probabilities = self.euler_step(
                x, given, state, camera_known, x.new_full((len(x),), time),
                (after - time) / (1 - time), 1.0 if after < 1 else LAST_SHARPNESS)
        state = state if camera is None else camera
        phase = functional.normalize(state[:, :4].unflatten(-1, (2, 2)), dim=-1).flatten(1)
        state = torch.cat([phase, state[:, 4:]], dim=-1)
        if squares is not None:
            probabilities = torch.where(given.permute(0, 2, 3, 1) > 0, squares, probabilities)
        return probabilities, state


class ViewPrior(WorldPrior):
    """Prior over worlds that are the view of a static camera.

    Such levels are puzzles: all squares of a maze are connected, and there is one cheese.
    Therefore every block of squares attends to all others; and the logit of a class in a square
    falls with the odds of this class in all other squares, with a learned weight, which is 1 for an
    object that occurs once. Phase and velocity are always given.

    Args:
        num_squares, num_classes: see ``WorldPrior``.
        widths: channels; the second and third number are not used.
    """

    strongest_in_samples = _STRONGEST

    def _build(self, full: int, half: int, quarter: int) -> None:
        guide = _GUIDE_WIDTH
        self.time = _TimeEmbedding(self.num_classes, guide)
        self.inputs = nn.Conv2d(4 * (EMBEDDING + 1 + self.num_classes) + 2, full, 3, padding=1)
        self.blocks = nn.ModuleList(_Residual(full, full, guide) for _ in range(_VIEW_BLOCKS))
        self.attend = nn.ModuleList(_Attention(full) for _ in range(_VIEW_BLOCKS))
        self.rivals = nn.Parameter(torch.zeros(self.num_classes))  # weight of other squares

    def _hidden(self, x: Tensor, evidence: Tensor, camera: Tensor, camera_known: Tensor,
                time: Tensor) -> tuple[Tensor, Tensor]:
        odds = _log_odds(evidence).flatten(1, 2).logsumexp(dim=1)
        guide = self.time(time, odds / _STRONGEST)
        x = self._joined(torch.cat([x, evidence.softmax(dim=-1).permute(0, 3, 1, 2).to(x)], dim=1))
        x = self.inputs(x)
        for block, attend in zip(self.blocks, self.attend):
            x = attend(block(x, guide))
        return x, camera

    def _joint(self, logits: Tensor, x: Tensor, known: Tensor) -> Tensor:
        given = _STRONGEST * (x.float().permute(0, 2, 3, 1) @ self.embedding.T)
        odds = _log_odds(torch.where(known[:, 0, ..., None] > 0, given, logits)).flatten(1, 2)
        others = odds.logsumexp(dim=1, keepdim=True) + torch.log1p(
            -odds.softmax(dim=1).clamp(max=_MOST_CERTAIN))
        return logits - _RIVALS * self.rivals * others.unflatten(1, logits.shape[1:3])


def _log_odds(logits: Tensor) -> Tensor:
    """Return the log-odds of each class (…, K)."""
    itself = torch.eye(logits.shape[-1], dtype=torch.bool, device=logits.device)
    others = logits[..., None, :].masked_fill(itself, -math.inf).logsumexp(dim=-1)
    return (logits - others).clamp(-_STRONGEST, _STRONGEST)


class PlayerPrior(nn.Module):
    """Probabilities of the player's square, given the squares of the view of a static camera.

    Args:
        num_squares: n.
        num_classes: K.
    """

    def __init__(self, num_squares: int, num_classes: int):
        super().__init__()
        self.num_classes = num_classes
        self.place = nn.Parameter(torch.zeros(num_squares, num_squares))
        self.layers = nn.Sequential(
            nn.Conv2d(num_classes, _PLAYER_WIDTH, 3, padding=1), nn.SiLU(),
            nn.Conv2d(_PLAYER_WIDTH, _PLAYER_WIDTH, 3, padding=1), nn.SiLU(),
            nn.Conv2d(_PLAYER_WIDTH, 1, 1))

    def forward(self, squares: Tensor) -> Tensor:
        """Return the logits of all squares (B, n · n), given class probabilities (B, n, n, K)."""
        logits = self.layers(squares.permute(0, 3, 1, 2))[:, 0]
        return (logits.float() + self.place).flatten(1)

    def sample(self, squares: Tensor, noise: Tensor) -> Tensor:
        """Draw the player's square, as its number, int64 (B,).

        Args:
            squares: class probabilities (B, n, n, K).
            noise: standard normal noise (B, n, n).
        """
        uniform = torch.special.ndtr(noise.double()).clamp(_SMALLEST, 1 - _SMALLEST).flatten(1)
        return (self(squares) - (-uniform.log()).log()).argmax(dim=-1)


def with_player(view: Tensor, square: Tensor | None, num_squares: int) -> Tensor:
    """Append PLAYER_CHANNELS channels to the coefficients of a view (B, channels, 8, 8), which mark
    the player's square.

    Args:
        square: number of the square, int64 (B,); None if it is unknown, which marks no square.
        num_squares: n, squares per side of the view.
    """
    if square is None:
        return functional.pad(view, (0, 0, 0, 0, 0, PLAYER_CHANNELS))
    marks = functional.one_hot(square, num_squares ** 2).to(view).unflatten(1, (1, num_squares, -1))
    marks = functional.interpolate(marks, size=GRID * _MARKS, mode="nearest-exact")
    return torch.cat([view, functional.pixel_unshuffle(marks, _MARKS)], dim=1)


class StartPrior(nn.Module):
    """Flow over start vectors, given the view of the world and the camera.

    Args:
        channels: V / 64, numbers per cell of a start vector.
        view_channels: number of coefficients of a cell of the view; with a static camera, those
            from ``with_player``.
        width: W.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, channels: int, view_channels: int, width: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels, GRID, GRID))
        self.register_buffer("scale", torch.ones(channels, 1, 1))
        self.time = _TimeEmbedding(NUM_GLOBALS, width)
        self.inputs = nn.Conv2d(channels + view_channels, width, 3, padding=1)
        self.place = nn.Parameter(torch.zeros(width, GRID, GRID))
        self.blocks = nn.ModuleList(_Residual(width, width, width) for _ in range(4))
        self.attend = _Attention(width)
        self.out = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(),
                                 nn.Conv2d(width, channels, 3, padding=1))

    def forward(self, x: Tensor, view: Tensor, camera: Tensor, time: Tensor) -> Tensor:
        """Predict clean, standardised codes (B, V / 64, 8, 8).

        Args:
            x: noisy standardised codes (B, V / 64, 8, 8).
            view: coefficients of the view, without moving objects (B, view_channels, 8, 8).
            camera: phase and velocity (B, NUM_GLOBALS).
            time: from 0 for noise to 1 for data (B,).
        """
        guide = self.time(time, camera)
        hidden = self.inputs(torch.cat([x, view], dim=1)) + self.place
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, guide)
            if number == 1:
                hidden = self.attend(hidden)
        return self.out(hidden).float()

    def standardise(self, vectors: Tensor) -> Tensor:
        """Convert start vectors (B, V) to standardised codes (B, V / 64, 8, 8)."""
        code = vectors.unflatten(1, (GRID, GRID, -1)).permute(0, 3, 1, 2)
        return (code - self.mean) / self.scale

    def vectors(self, codes: Tensor) -> Tensor:
        """Convert standardised codes to unit vectors; the inverse of ``standardise``."""
        code = codes * self.scale + self.mean
        return functional.normalize(code.permute(0, 2, 3, 1).flatten(1), dim=-1)

    def sample(self, noise: Tensor, view: Tensor, camera: Tensor, times: Tensor) -> Tensor:
        """Generate start vectors (B, V) with Heun steps, the last one Euler.

        Args:
            noise: standard normal noise (B, V / 64, 8, 8).
            view, camera: see ``forward``.
            times: times of the steps, ascending from 0 (steps,).
        """
        x = noise
        ones = torch.ones(len(x), device=x.device)
        for step, time in enumerate(times.tolist()):
            after = float(times[step + 1]) if step + 1 < len(times) else 1.0
            velocity = (self(x, view, camera, time * ones) - x) / (1 - time)
            ahead = x + (after - time) * velocity
            if after < 1:
                next_velocity = (self(ahead, view, camera, after * ones) - ahead) / (1 - after)
                ahead = x + (after - time) * (velocity + next_velocity) / 2
            x = ahead
        return self.vectors(x)
