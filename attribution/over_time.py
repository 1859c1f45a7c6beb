"""Attribution over time: contributions of each of the last steps and of older memory to an output.

The last steps of an agent with a GRU are unrolled. Along the integration path, the layer's
activations at all of these steps are scaled together from zero, and the hidden state that entered
the first of them moves from an episode's initial state to its actual value. The attributions sum to
the output minus the output at the start of the path.

Letters in shape comments: B frames, L lags (lag 0 is the last step), K outputs, C H W a layer, D
hidden state, n values of the stem's output.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from agents.networks import Policy, PolicyOutput
from attribution.integrated_gradients import (
    Attributions,
    LayerIntegratedGradients,
    Paths,
    completeness_errors,
)


@dataclasses.dataclass(frozen=True)
class Window:
    """The last L steps up to each of B frames.

    Attributes:
        activations: activations of the layer (B, L, C, H, W); 0 before an episode's first step.
        exists: whether the episode has the step, bool (B, L).
        entering: hidden states that entered the earliest existing step (B, D).
    """

    activations: Tensor
    exists: Tensor
    entering: Tensor


class IntegratedGradientsOverTime(LayerIntegratedGradients):
    """Attributes outputs of an agent with memory to the last steps of one layer.

    Args:
        policy: the agent, which must have memory.
        *args: further arguments of :class:`LayerIntegratedGradients`, without a baseline.
    """

    def __init__(self, policy: Policy, *args):
        super().__init__(policy, *args)
        self._initial = policy.initial_state().detach()

    def attribute_over_time(self, window: Window, actions: np.ndarray, deviations: np.ndarray,
                            hold_state: bool = False) -> Attributions:
        """Attribute all outputs to the steps of a window, with values (K, B, L, C, H, W).

        Args:
            window: last L steps of each of B frames.
            actions: actions taken (B,).
            deviations: standard deviation of each output over many observations (K,), for the
                completeness errors.
            hold_state: hold the entering hidden state fixed along the path.
        """
        shape = window.activations.shape[:2]  # (B, L)
        end = window.activations.flatten(0, 1).detach().requires_grad_()
        with torch.enable_grad():
            stem_end = self._stem(end)
        with torch.no_grad():
            stem_start = self._stem(torch.zeros_like(end[:1])).expand_as(stem_end)
        self._shape = stem_end.shape[1:]
        origin = window.entering if hold_state else self._initial.expand_as(window.entering)
        start = torch.cat([stem_start.reshape(shape[0], -1), origin], dim=1)
        line = torch.cat([(stem_end.detach() - stem_start).reshape(shape[0], -1),
                          window.entering - origin], dim=1)  # (B, L n + D)
        paths = Paths(start, line, (window.exists,), self._to_device(actions))
        with torch.no_grad():
            baselines, outputs = (
                self._scalars(self._run_tail(points, paths.also_read), paths.actions).double()
                .cpu().numpy() for points in (start, start + line))
        gradients, steps = self._mean_gradients(paths, baselines, outputs, deviations)
        units = window.entering.shape[1]
        older = (gradients[..., -units:] * line[:, -units:]).sum(dim=-1).cpu().numpy()
        pieces = []
        for gradient in gradients[..., :-units]:
            gradient = gradient.reshape(stem_end.shape)
            if self._stem:
                (gradient,) = torch.autograd.grad(stem_end, end, gradient, retain_graph=True)
            pieces.append((gradient * end.detach()).reshape(*shape, *self.bottleneck.shape)
                          .cpu().numpy())
        values = np.stack(pieces)
        sums = values.reshape(*outputs.shape, -1).sum(axis=-1, dtype=np.float64) + older
        return Attributions(values, outputs, baselines,
                            completeness_errors(sums, outputs, baselines, deviations), steps, older)

    def _run_tail(self, points: Tensor, also_read: tuple[Tensor, ...]) -> PolicyOutput:
        """Unroll the last steps; a step that does not exist leaves the hidden state unchanged.

        Args:
            points: outputs of the stem at each step, and the entering hidden state
                (rows, L n + D).
            also_read: one array: whether each step exists, bool (rows, L).
        """
        (exists,) = also_read
        units = len(self._initial)
        activations = points[:, :-units].reshape(*exists.shape, *self._shape)
        state = points[:, -units:]
        for lag in reversed(range(exists.shape[1])):
            output = self._tail.run_from(activations[:, lag], (state,))
            state = torch.where(exists[:, lag, None], output.hidden_states, state)
        return output
