"""Choices that pass gradients: latent draws, actions, the clamp of an image.

Letters in shape comments: B windows of a batch, S latent variables, K classes of each, A actions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Draw = Callable[[Tensor], Tensor]
"""Logits (…, S, K) to a choice of S one-hot variables (…, S, K) with gradients."""


@dataclasses.dataclass(frozen=True)
class LatentSampler:
    """Choice of z from its logits.

    Attributes:
        how: ``sample`` draws each variable from its distribution, ``mode`` takes its most
            likely class.
        generator: source of the random numbers, on the device of the logits; None for torch's
            own.
        part: which windows of a batch the logits are of, and how many the batch has: a window then
            gets the draws that it gets among all of them. None where they are of a whole batch.
    """

    how: Literal["sample", "mode"] = "sample"
    generator: torch.Generator | None = None
    part: tuple[slice, int] | None = None

    def __post_init__(self):
        if self.how not in ("sample", "mode"):
            raise ValueError(f"how must be 'sample' or 'mode', not {self.how!r}")

    def __call__(self, logits: Tensor) -> Tensor:
        """Choose S one-hot variables.

        The gradient is that of the probabilities (straight-through; Hafner et al. 2021,
        "Mastering Atari with discrete world models", algorithm 1).

        Args:
            logits: (…, S, K), unnormalised; (B, S, K) where they are a part of a batch.

        Returns:
            One-hot (…, S, K).
        """
        probs = torch.softmax(logits, dim=-1)  # (…, S, K)
        if self.how == "mode":
            classes = logits.argmax(dim=-1)  # (…, S)
        else:
            own, num = self.part or (slice(None), len(probs))
            batch = probs.new_ones(num, *probs.shape[1:])  # the draws of the others do not matter
            batch[own] = probs.detach()
            # The draw of torch.multinomial without its checks, for which a GPU has to wait.
            race = torch.empty_like(batch).exponential_(generator=self.generator)
            classes = (batch / race).argmax(dim=-1)[own]
        return straight_through(functional.one_hot(classes, probs.shape[-1]).to(probs), probs)


class PresetDraw:
    """Draws each variable from its distribution, with random numbers that are known in advance.

    What a row of the batch gets therefore does not depend on the rows beside it, as it does with
    a generator.

    Args:
        uniform: in [0, 1), one for each variable of each draw, in order: (draws, B, S).
    """

    def __init__(self, uniform: Tensor):
        self._uniform = iter(uniform)

    def __call__(self, logits: Tensor) -> Tensor:
        """Choose S one-hot variables (B, S, K), as ``LatentSampler`` does."""
        probs = torch.softmax(logits, dim=-1)  # (B, S, K)
        passed = probs.cumsum(dim=-1) <= next(self._uniform).unsqueeze(-1)
        classes = passed.sum(dim=-1).clamp(max=probs.shape[-1] - 1)  # (B, S)
        return straight_through(functional.one_hot(classes, probs.shape[-1]).to(probs), probs)


def straight_through(value: Tensor, gradient_of: Tensor) -> Tensor:
    """``value`` in the forward pass, the gradient of ``gradient_of`` in the backward pass."""
    return value + (gradient_of - gradient_of.detach())


def most_likely_action(log_probs: Tensor) -> Tensor:
    """The arg-max as a one-hot (…, A) whose gradient is that of the log-probabilities (…, A)."""
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
    """Clamp to [0, 1] with gradient 1 everywhere."""
    return _ClampWithGradientOne.apply(image)
