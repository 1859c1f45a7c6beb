"""Attribution over time: how much each of the last steps, and older memory, adds to an output.

The last steps of an agent with a GRU are unrolled: the activations of a layer at all of them are
scaled together from zero, and the state that entered the first of them moves from the initial state
of an episode. The attributions sum to the output minus the output at the start of that path.

Letters in shape comments: B frames, L lags, 0 the last step; K outputs, C H W a layer, D hidden
state; n numbers of the stem's output.
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
        activations: of the layer; 0 before an episode's first step (B, L, C, H, W).
        exists: whether the episode has this step, bool (B, L).
        entering: states that entered the earliest existing step (B, D).
    """

    activations: Tensor
    exists: Tensor
    entering: Tensor


class IntegratedGradientsOverTime(LayerIntegratedGradients):
    """Attributes outputs of an agent with memory to the last steps of one layer.

    Args: see :class:`LayerIntegratedGradients`; the agent has memory, and paths begin at zero.
    """

    def __init__(self, policy: Policy, *args):
        super().__init__(policy, *args)
        self._initial = policy.initial_state().detach()

    def attribute_over_time(self, window: Window, actions: np.ndarray, deviations: np.ndarray,
                            hold_state: bool = False) -> Attributions:
        """Attribute all outputs to the steps of a window, with values (K, B, L, C, H, W).

        Args:
            actions: actions taken (B,).
            deviations: standard deviation of each output over many observations (K,), for the
                completeness errors.
            hold_state: hold the entering state fixed along the path.
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
        """Unroll the last steps; a step that does not exist leaves the state as it is.

        Args:
            points: activations behind the stem and an entering state (rows, L n + D).
            also_read: which steps exist (rows, L).
        """
        (exists,) = also_read
        units = len(self._initial)
        activations = points[:, :-units].reshape(*exists.shape, *self._shape)
        state = points[:, -units:]
        for lag in reversed(range(exists.shape[1])):
            output = self._tail.run_from(activations[:, lag], (state,))
            state = torch.where(exists[:, lag, None], output.hidden_states, state)
        return output
