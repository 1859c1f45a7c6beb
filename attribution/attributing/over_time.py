"""Attribution over time: how much each of the last steps adds to an output, and older memory.

Of an agent with a GRU, whose last steps are unrolled: the activations of a layer at all of them
are scaled together from zero, and the state that entered the first of them from the state in which
an episode starts. Everything adds up to the output minus what it is at the start of that path.

Letters in shape comments: B frames, L lags, 0 the last step; K outputs, C H W a layer, D hidden
state; n numbers of the stem's output.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from agents.networks import Policy, PolicyOutput
from attribution.attributing.integration import Attributor, Paths, gaps_of, scales_of


@dataclasses.dataclass(frozen=True)
class Window:
    """The last L steps before and with each of B frames.

    Attributes:
        activations: of the layer, 0 where an episode has no such step (B, L, C, H, W).
        is_there: whether it has, bool (B, L).
        entering: states that entered the earliest step there is (B, D).
    """

    activations: Tensor
    is_there: Tensor
    entering: Tensor


@dataclasses.dataclass(frozen=True)
class AttributionsOverTime:
    """Attributions of K outputs in B frames.

    Attributes:
        values: float32 (K, B, L, C, H, W).
        older: of the state that entered the earliest step, float32 (K, B).
        outputs, baselines, gaps, steps: as of ``integration.Attributions`` (K, B).
    """

    values: np.ndarray
    older: np.ndarray
    outputs: np.ndarray
    baselines: np.ndarray
    gaps: np.ndarray
    steps: np.ndarray


class AttributorOverTime(Attributor):
    """Attributes outputs of an agent with memory to the last steps of one layer.

    Args: as of :class:`Attributor`; the agent has memory, and paths begin at zero.
    """

    def __init__(self, policy: Policy, *args):
        super().__init__(policy, *args)
        self._initial = policy.initial_state().detach()

    def attribute_over_time(self, window: Window, actions: np.ndarray, deviations: np.ndarray,
                            hold_state: bool = False) -> AttributionsOverTime:
        """Attributions of all outputs.

        Args:
            actions: that were taken, (B,).
            deviations: of the outputs over many observations (K,), for the gaps.
            hold_state: leave the entering state as it is along the path.
        """
        shape = window.activations.shape[:2]  # (B, L)
        end = window.activations.flatten(0, 1).detach().requires_grad_()
        with torch.enable_grad():
            straight_end = self._stem(end)
        with torch.no_grad():
            straight_start = self._stem(torch.zeros_like(end[:1])).expand_as(straight_end)
        self._shape = straight_end.shape[1:]
        origin = window.entering if hold_state else self._initial.expand_as(window.entering)
        start = torch.cat([straight_start.reshape(shape[0], -1), origin], dim=1)
        line = torch.cat([(straight_end.detach() - straight_start).reshape(shape[0], -1),
                          window.entering - origin], dim=1)  # (B, L n + D)
        paths = Paths(start, line, (window.is_there,),
                      torch.from_numpy(actions).to(line.device))
        with torch.no_grad():
            baselines, outputs = (
                self._scalars(self._rest(points, paths.also_read), paths.actions).double()
                .cpu().numpy() for points in (start, start + line))
        gradients, steps = self._mean_gradients(paths, baselines, outputs,
                                                scales_of(outputs - baselines, deviations))
        units = window.entering.shape[1]
        older = (gradients[..., -units:] * line[:, -units:]).sum(dim=-1).cpu().numpy()
        values = []
        for each in gradients[..., :-units]:
            each = each.reshape(straight_end.shape)
            if self._stem:
                (each,) = torch.autograd.grad(straight_end, end, each, retain_graph=True)
            values.append((each * end.detach()).reshape(*shape, *self.cut.shape).cpu().numpy())
        found = np.stack(values)
        sums = found.reshape(*outputs.shape, -1).sum(axis=-1, dtype=np.float64) + older
        return AttributionsOverTime(found, older, outputs, baselines,
                                    gaps_of(sums, outputs, baselines, deviations),
                                    steps.astype(np.int16))

    def _rest(self, points: Tensor, also_read: tuple[Tensor, ...]) -> PolicyOutput:
        """Unroll the last steps; a step that is not there leaves the state as it is.

        Args:
            points: activations behind the stem and an entering state, (rows, L n + D).
            also_read: which steps are there (rows, L).
        """
        (is_there,) = also_read
        units = len(self._initial)
        activations = points[:, :-units].reshape(*is_there.shape, *self._shape)
        state = points[:, -units:]
        for lag in reversed(range(is_there.shape[1])):
            output = self._tail.finish(activations[:, lag], (state,))
            state = torch.where(is_there[:, lag, None], output.hidden_states, state)
        return output
