"""Linear layers that a recurrence applies at every step.

Left to autograd, the gradient of such a layer's weight is a sum of one small matrix product a
step, each of them as large as the weight. Here the steps are gathered first and the sum is one
product. With few windows in a batch, where those products are most of the recurrence's work, a
training step takes a tenth less time on a CPU (batch 2; none at 16), and under autocast the sum is
rounded once instead of at every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_Steps = list[tuple[Tensor, Tensor]]
"""Inputs (B, in) and gradients of the outputs (B, out), in the order of the backward pass."""


class RepeatedLinear(nn.Linear):
    """An ``nn.Linear`` whose steps within :func:`gathered_steps` share one weight gradient."""

    _weight: Tensor | None = None
    _steps: _Steps

    def forward(self, x: Tensor) -> Tensor:
        """(B, in) to (B, out)."""
        if self._weight is None:
            return super().forward(x)
        out = _Step.apply(x.to(self._weight.dtype), self._weight, self._steps)
        return out if self.bias is None else out + self.bias


@contextmanager
def gathered_steps(module: nn.Module) -> Iterator[None]:
    """Within it, every :class:`RepeatedLinear` of ``module`` gathers the steps it is applied to.

    The backward pass may come later. Where no gradients are recorded, nothing changes.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, RepeatedLinear)]
    try:
        for layer in layers:
            if torch.is_grad_enabled() and layer.weight.requires_grad:
                device = layer.weight.device.type
                dtype = (torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device)
                         else layer.weight.dtype)
                layer._steps = []
                layer._weight = _Weight.apply(layer.weight, dtype, layer._steps)
        yield
    finally:
        for layer in layers:
            layer._weight = None


class _Weight(torch.autograd.Function):
    """The weight in the precision of the steps; its gradient is made from all of them at once.

    Autograd runs ``backward`` here when it has run that of every step.
    """

    @staticmethod
    def forward(ctx, weight: Tensor, dtype: torch.dtype, steps: _Steps) -> Tensor:
        ctx.set_materialize_grads(False)  # the steps send nothing
        ctx.steps, ctx.dtype = steps, weight.dtype
        return weight.to(dtype, copy=True)

    @staticmethod
    def backward(ctx, _) -> tuple[Tensor | None, None, None]:
        if not ctx.steps:
            return None, None, None
        inputs, gradients = (torch.cat(tensors) for tensors in zip(*ctx.steps))
        ctx.steps.clear()
        return (gradients.T @ inputs).to(ctx.dtype), None, None


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, steps: _Steps) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.steps = steps
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        ctx.steps.append((x, gradient))
        return gradient @ weight, None, None
