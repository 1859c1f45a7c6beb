"""Integrated gradients of an agent's outputs with respect to a layer's activations.

Sundararajan et al. (2017), "Axiomatic attribution for deep networks", equation 1, at a hidden
layer: attr = (a - a0) * integral over t from 0 to 1 of dG/da at a0 + t (a - a0). G is the rest of
the network, from the layer's activations a to one scalar output; the baseline a0 is zero, or the
mean activations. The agent's hidden state before the frame is held fixed along the path.
Completeness: the attributions of a frame sum to G(a) - G(a0), up to the error of the numerical
integral, which is the *completeness error* (Captum: convergence delta).

Letters in shape comments: B frames, K outputs, S nodes of an integral, P paths or segments, L steps
of attributions over time, C H W channels and grid of a layer (a layer of units has one cell), D
hidden units.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from agents.networks import Policy, PolicyOutput
from agents.outputs import Output
from attribution.layers import Bottleneck
from common.devices import Compute
from common.errors import UserError
from interventions.partial_forward import PartialForward, Prefix

GAUSS_LEGENDRE, RIEMANN_RIGHT = RULES = ("gauss", "right")
MAX_STEPS = 256
# Completeness errors are relative to at least this share of the output's standard deviation.
FLOOR = 0.1
# Paths are refined until their error is below _TARGET times the tolerance, so that errors do not
# cluster just below the tolerance. Segments with an error below _NEGLIGIBLE times this limit are
# not refined.
_TARGET, _NEGLIGIBLE = 0.5, 0.25
_ACTIVATIONS_PER_BATCH = 2**20  # chosen to fit into the caches


@dataclasses.dataclass(frozen=True)
class Integration:
    """Numerical integration along a path.

    Attributes:
        steps: initial number S of nodes per path.
        rule: "gauss" for Gauss-Legendre nodes, or "right" for the right Riemann sum, as published.
        tolerance: accepted completeness error. Paths are refined, to at most MAX_STEPS nodes, until
            their error is below half this value; None for no refinement.
    """

    steps: int = 16
    rule: str = GAUSS_LEGENDRE
    tolerance: float | None = 0.01

    def nodes(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions of ``steps`` nodes on the path, in [0, 1], and their weights, with
        sum 1; float64 (S,) each."""
        if self.rule == RIEMANN_RIGHT:
            return np.arange(1, steps + 1) / steps, np.full(steps, 1 / steps)
        positions, weights = np.polynomial.legendre.leggauss(steps)
        return (positions + 1) / 2, weights / 2


# One node, at the end of the path: gradient times activation.
GRADIENT_ACTIVATION = Integration(1, RIEMANN_RIGHT, None)


@dataclasses.dataclass(frozen=True)
class Attributions:
    """Attributions of K outputs in B frames.

    Attributes:
        values: attributions in the unit of each output, float32 (K, B, C, H, W); over time
            (K, B, L, C, H, W).
        outputs: G(a), float64 (K, B).
        baselines: G(a0), float64 (K, B).
        errors: completeness errors, float64 (K, B); see :func:`completeness_errors`.
        steps: number of nodes per path, int16 (K, B).
        older: in attributions over time, the attribution to the hidden state before the earliest
            step, float32 (K, B); otherwise None.
    """

    values: np.ndarray
    outputs: np.ndarray
    baselines: np.ndarray
    errors: np.ndarray
    steps: np.ndarray
    older: np.ndarray | None = None

    def integral(self, number: int) -> dict[str, np.ndarray]:
        """Return the arrays of the output with index ``number``, (B,) each, by their names in files
        (see ``attribution.results``): all except ``values``."""
        older = {} if self.older is None else {"older": self.older[number]}
        return {"output": self.outputs[number], "baseline": self.baselines[number],
                "gap": self.errors[number], "steps": self.steps[number], **older}


def completeness_errors(sums: np.ndarray, outputs: np.ndarray, baselines: np.ndarray,
                        deviations: np.ndarray) -> np.ndarray:
    """Compute relative completeness errors (K, B).

    The error is |sum of attributions - (G(a) - G(a0))|, divided by |G(a) - G(a0)| or a tenth of the
    output's standard deviation, whichever is larger.

    Args:
        sums: sums of the attributions of each frame (K, B).
        outputs, baselines: G(a) and G(a0), (K, B).
        deviations: standard deviation of each output over many observations (K,).
    """
    change = outputs - baselines
    return np.abs(sums - change) / _error_scales(change, deviations)


def _error_scales(change: np.ndarray, deviations: np.ndarray) -> np.ndarray:
    """Compute the denominators of the completeness errors (K, B)."""
    return np.maximum(np.maximum(np.abs(change), FLOOR * deviations[:, None]),
                      np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Paths:
    """Straight paths between outputs of the stem of :class:`LayerIntegratedGradients`, one per
    frame.

    Attributes:
        start: start points (B, …).
        line: end points minus start points (B, …).
        also_read: other inputs of the rest of the network, such as hidden states (B, …).
        actions: actions taken, int64 (B,).
    """

    start: Tensor
    line: Tensor
    also_read: tuple[Tensor, ...]
    actions: Tensor

    def at(self, path: np.ndarray, positions: np.ndarray
           ) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """Return points on paths as a batch (P S, …), and their ``also_read`` and ``actions``.

        Args:
            path: indices of paths (P,).
            positions: positions of S points on each of these paths, from 0 to 1 (P, S).
        """
        rows = torch.from_numpy(path).to(self.line.device)
        shares = torch.from_numpy(positions).to(self.line).reshape(
            *positions.shape, *[1] * (self.line.ndim - 1))
        points = (self.start[rows, None] + shares * self.line[rows, None]).flatten(0, 1)
        rows = rows.repeat_interleave(positions.shape[1])
        return points, tuple(value[rows] for value in self.also_read), self.actions[rows]


@dataclasses.dataclass(frozen=True)
class _Segments:
    """Segments of paths.

    Attributes:
        path: index of each segment's path (P,).
        low, high: ends of each segment on its path, in [0, 1] (P,).
        low_output, high_output: outputs at these ends (K, P).
        active: whether each output is integrated over the segment, bool (K, P).
    """

    path: np.ndarray
    low: np.ndarray
    high: np.ndarray
    low_output: np.ndarray
    high_output: np.ndarray
    active: np.ndarray

    def sum_by_path(self, numbers: np.ndarray, num_paths: int) -> np.ndarray:
        """Sum values of segments (K, P) over the segments of each path (K, num_paths)."""
        return np.stack([np.bincount(self.path, row, num_paths) for row in numbers]).astype(
            numbers.dtype)


class LayerIntegratedGradients:
    """Attributes outputs of an agent to the activations of one layer, by integrated gradients.

    The part of the network before the layer runs once per frame, and all outputs share the forward
    passes of the part after it. The modules directly after the layer that map a straight path to a
    straight path form the *stem*; they run only at the two ends of each path.

    Args:
        policy: the agent; gradients of its parameters are switched off.
        compute: device and precision; must be float32, because attributions in bfloat16 do not sum
            to the change of the output from the baseline.
        bottleneck: the layer.
        outputs: K outputs.
        integration: settings of the numerical integration.
        baseline: a0 (C, H, W); None for zero.

    Raises:
        UserError: if the precision is not float32.

    Example::

        attributor = LayerIntegratedGradients(policy, compute, bottleneck, outputs, Integration())
        prefix = attributor.run_prefix(frames, states)
        values = attributor.attribute(prefix, actions, deviations).values
    """

    def __init__(self, policy: Policy, compute: Compute, bottleneck: Bottleneck,
                 outputs: Sequence[Output], integration: Integration,
                 baseline: np.ndarray | None = None):
        if compute.bfloat16:
            raise UserError("attributions are computed in float32, because in bfloat16 they do "
                            "not sum to the change of the output from the baseline; give "
                            "--precision float32")
        policy.requires_grad_(False)
        self.bottleneck, self.outputs, self.integration = bottleneck, tuple(outputs), integration
        self._head = PartialForward(policy, compute, bottleneck.layer.name)
        self._baseline = None if baseline is None else torch.as_tensor(
            np.asarray(baseline, np.float32).reshape(bottleneck.layer.shape)).to(compute.device)
        names = _straight_modules(policy, self._head.chain, from_zero=baseline is None)
        self._stem = nn.Sequential(*map(policy.get_submodule, names))
        self._tail = PartialForward(policy, compute, names[-1]) if names else self._head

    def run_prefix(self, frames: np.ndarray | Tensor, entering: np.ndarray) -> Prefix:
        """Run the part of the network up to the layer.

        Args:
            frames: uint8 frames (B, height, width, 3), or images.
            entering: hidden states before these frames were seen, float32 (B, D).

        Returns:
            Activations of the layer (B, C, H, W), or (B, C) for units; and the other inputs of the
            part of the network after it.
        """
        with torch.no_grad():
            return self._head.run_to(frames, torch.from_numpy(entering))

    def outputs_at(self, prefix: Prefix, actions: np.ndarray) -> np.ndarray:
        """Compute the outputs from given activations of the layer, float64 (K, B).

        Args:
            prefix: activations of the layer, and the other inputs of the part of the network after
                it.
            actions: actions taken, for outputs that depend on them (B,).
        """
        with torch.no_grad():
            output = self._head.run_from(prefix.activations, prefix.also_read)
            return self._scalars(output, torch.from_numpy(actions).to(output.logits.device)
                                 ).double().cpu().numpy()

    def attribute(self, prefix: Prefix, actions: np.ndarray,
                  deviations: np.ndarray) -> Attributions:
        """Attribute all outputs in a batch of frames.

        The result for a frame and output does not depend on the other frames and outputs. The
        gradient has most of its kinks near the start of a path, where activations are smaller than
        biases. A path whose completeness error is too large is therefore divided, nearer to the
        baseline than to the frame, and each segment is integrated separately. The error of a
        segment follows from the outputs at its ends; segments with too large an error are divided
        again.

        Args:
            prefix: activations of the layer, and the other inputs of the part of the network after
                it.
            actions: actions taken (B,).
            deviations: standard deviation of each output over many observations (K,), for the
                completeness errors.
        """
        end = prefix.activations
        start = torch.zeros_like(end) if self._baseline is None else self._baseline.expand_as(end)
        result = self._attribute(start, end, prefix.also_read, actions, deviations)
        return dataclasses.replace(result, values=result.values[:, :, 0])

    def _attribute(self, start: Tensor, end: Tensor, also_read: tuple[Tensor, ...],
                   actions: np.ndarray, deviations: np.ndarray, states: Tensor | None = None
                   ) -> Attributions:
        """Attribute all outputs to the layer at L steps, with values (K, B, L, C, H, W).

        Args:
            start, end: activations of the layer at both ends of the paths (B L, …).
            also_read: see :class:`Paths`.
            actions, deviations: see :meth:`attribute`.
            states: hidden states at both ends, if they are a part of the paths (2, B, D).
        """
        end = end.detach().requires_grad_()
        with torch.enable_grad():
            stem_end = self._stem(end)
        with torch.no_grad():
            ends = [self._stem(start), stem_end.detach()]
        if states is not None:
            ends = [torch.cat([point.reshape(len(state), -1), state], dim=1)
                    for point, state in zip(ends, states)]
        paths = Paths(ends[0], ends[1] - ends[0], also_read,
                      torch.from_numpy(actions).to(end.device))
        with torch.no_grad():
            baselines, outputs = (
                self._scalars(self._run_tail(point, also_read), paths.actions).double().cpu()
                .numpy() for point in ends)
        gradients, steps = self._mean_gradients(paths, baselines, outputs, deviations)
        older = None
        if states is not None:
            units = states.shape[2]
            older = (gradients[..., -units:] * paths.line[:, -units:]).sum(dim=-1).cpu().numpy()
            gradients = gradients[..., :-units]
        pieces = []
        for gradient in gradients:
            gradient = gradient.reshape(stem_end.shape)
            if self._stem:
                (gradient,) = torch.autograd.grad(stem_end, end, gradient, retain_graph=True)
            pieces.append((gradient * (end - start)).detach().cpu().numpy())
        values = np.stack(pieces).reshape(*outputs.shape, -1, *self.bottleneck.shape)
        sums = values.reshape(*outputs.shape, -1).sum(axis=-1, dtype=np.float64)
        errors = completeness_errors(sums if older is None else sums + older, outputs, baselines,
                                     deviations)
        return Attributions(values, outputs, baselines, errors, steps, older)

    def _scalars(self, output: PolicyOutput, actions: Tensor) -> Tensor:
        """Compute the attributed outputs (K, rows)."""
        return torch.stack([scalar(output, actions) for scalar in self.outputs])

    def _run_tail(self, points: Tensor, also_read: tuple[Tensor, ...]) -> PolicyOutput:
        """Run the part of the network after the stem on points of paths (rows, …)."""
        return self._tail.run_from(points, also_read)

    def _mean_gradients(self, paths: Paths, baselines: np.ndarray, outputs: np.ndarray,
                        deviations: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Compute mean gradients along paths (K, B, …), and the numbers of nodes, int16 (K, B).

        Args:
            paths: paths of B frames.
            baselines, outputs: outputs at the starts and ends of the paths (K, B).
            deviations: see :meth:`attribute`.
        """
        num = outputs.shape[1]
        means = torch.stack([torch.zeros_like(paths.line)] * len(self.outputs))
        errors, steps = np.zeros(outputs.shape), np.zeros(outputs.shape, np.int64)
        allowed = np.inf if self.integration.tolerance is None else (
            _TARGET * self.integration.tolerance * _error_scales(outputs - baselines, deviations))
        segments = _Segments(np.arange(num), np.zeros(num), np.ones(num), baselines, outputs,
                             np.ones(outputs.shape, bool))
        nodes = self.integration.steps
        fewer = max(1, nodes // 2)  # nodes per segment of a divided path
        while len(segments.path):
            sums, changes = self._integrate(paths, segments, nodes)
            wrong = np.where(segments.active,
                             changes - (segments.high_output - segments.low_output), 0)
            too_large = ((np.abs(errors + segments.sum_by_path(wrong, num))
                          > allowed)[:, segments.path]
                         & (np.abs(wrong) > np.broadcast_to(
                             _NEGLIGIBLE * allowed, errors.shape)[:, segments.path])
                         & segments.active)
            planned = steps + segments.sum_by_path(
                np.where(too_large, 2 * fewer, nodes) * segments.active, num)
            too_large &= (planned <= MAX_STEPS)[:, segments.path]
            kept = segments.active & ~too_large
            for mean, segment_sums, is_kept in zip(means, sums, torch.from_numpy(kept)):
                mean.index_add_(0, torch.from_numpy(segments.path)[is_kept].to(mean.device),
                                segment_sums[is_kept.to(mean.device)])
            errors += segments.sum_by_path(np.where(kept, wrong, 0), num)
            steps += segments.sum_by_path(kept * nodes, num)
            segments, nodes = self._divide(paths, segments, too_large), fewer
        return means, steps.astype(np.int16)

    def _integrate(self, paths: Paths, segments: _Segments,
                   nodes: int) -> tuple[Tensor, np.ndarray]:
        """Integrate the gradients over segments (K, P, …); also return the changes of the outputs
        that the integrals predict, float64 (K, P)."""
        nodes_in_unit, weights = self.integration.nodes(nodes)
        lengths = segments.high - segments.low
        positions = segments.low[:, None] + lengths[:, None] * nodes_in_unit  # (P, S)
        weights = lengths[:, None] * weights
        per_batch = max(1, _ACTIVATIONS_PER_BATCH // (paths.line[0].numel() * nodes))
        sums = torch.cat([
            self._weighted_gradients(paths, segments.path[begin:begin + per_batch],
                                     positions[begin:begin + per_batch],
                                     weights[begin:begin + per_batch])
            for begin in range(0, len(positions), per_batch)], dim=1)
        line = paths.line[torch.from_numpy(segments.path)]
        changes = torch.stack([(row * line).double().flatten(1).sum(dim=-1) for row in sums])
        return sums, changes.cpu().numpy()

    def _weighted_gradients(self, paths: Paths, path: np.ndarray, positions: np.ndarray,
                            weights: np.ndarray) -> Tensor:
        """Compute weighted sums (K, P, …) of gradients at positions (P, S) of paths (P,)."""
        points, also_read, actions = paths.at(path, positions)
        points.requires_grad_()
        with torch.enable_grad():
            scalars = self._scalars(self._run_tail(points, also_read), actions)  # (K, P S)
        sums = []
        for number, scalar in enumerate(scalars):
            (gradient,) = torch.autograd.grad(scalar.sum(), points,
                                              retain_graph=number + 1 < len(scalars))
            weight = torch.from_numpy(weights).to(gradient).reshape(
                *weights.shape, *[1] * (gradient.ndim - 1))
            sums.append((gradient.unflatten(0, weights.shape) * weight).sum(dim=1))
        return torch.stack(sums)

    def _divide(self, paths: Paths, segments: _Segments, too_large: np.ndarray) -> _Segments:
        """Divide segments into two where ``too_large`` (K, P) is true for any output."""
        some = too_large.any(axis=0)
        path, low, high = segments.path[some], segments.low[some], segments.high[some]
        if not len(path):
            return _Segments(path, low, high, *[too_large[:, :0]] * 3)
        middle = low + (high - low) * np.where(low == 0, 0.25, 0.5)
        with torch.no_grad():
            points, also_read, actions = paths.at(path, middle[:, None])
            outputs = self._scalars(self._run_tail(points, also_read),
                                    actions).double().cpu().numpy()
        active = too_large[:, some]
        return _Segments(np.concatenate([path, path]), np.concatenate([low, middle]),
                         np.concatenate([middle, high]),
                         np.concatenate([segments.low_output[:, some], outputs], axis=1),
                         np.concatenate([outputs, segments.high_output[:, some]], axis=1),
                         np.concatenate([active, active], axis=1))


class IntegratedGradientsOverTime(LayerIntegratedGradients):
    """Attributes outputs of a recurrent agent to a layer's activations at the last L steps and to
    the hidden state before them.

    The steps are unrolled; lag 0 is the last one. Along the integration path, the layer's
    activations at all of these steps are scaled together from zero to their actual values, and the
    hidden state before the first of them moves from an episode's initial state to its actual value.
    The attributions to activations and hidden state sum to the output minus the output at the start
    of the path.

    Args:
        policy: the agent, which must have memory.
        *args: further arguments of :class:`LayerIntegratedGradients`, except ``baseline``.
    """

    def __init__(self, policy: Policy, *args):
        super().__init__(policy, *args)
        self._initial = policy.initial_state().detach()

    def attribute_over_time(self, activations: Tensor, exists: Tensor, entering: Tensor,
                            actions: np.ndarray, deviations: np.ndarray) -> Attributions:
        """Attribute all outputs in each of B frames to the last L steps, the frame's own step
        first, with values (K, B, L, C, H, W).

        Args:
            activations: activations of the layer by lag (B, L, C, H, W), or (B, L, C) for units; 0
                before an episode's first step.
            exists: whether the episode has the step, bool (B, L).
            entering: hidden states that entered the earliest existing step (B, D).
            actions: actions taken (B,).
            deviations: standard deviation of each output over many observations (K,), for the
                completeness errors.
        """
        end = activations.flatten(0, 1)
        states = torch.stack([self._initial.expand_as(entering), entering])
        return self._attribute(torch.zeros_like(end), end, (exists,), actions, deviations, states)

    def _run_tail(self, points: Tensor, also_read: tuple[Tensor, ...]) -> PolicyOutput:
        """Unroll the last steps, and return the output at lag 0. A step that does not exist leaves
        the hidden state unchanged.

        Args:
            points: outputs of the stem at each step, with n units each, and the entering state
                (rows, L n + D).
            also_read: one array: whether each step exists, bool (rows, L).
        """
        (exists,) = also_read
        units = len(self._initial)
        activations = points[:, :-units].reshape(*exists.shape, *self._tail.layer.shape)
        state = points[:, -units:]
        for lag in reversed(range(exists.shape[1])):
            output = self._tail.run_from(activations[:, lag], (state,))
            state = torch.where(exists[:, lag, None], output.hidden_states, state)
        return output


def _straight_modules(policy: Policy, chain: Sequence[str], from_zero: bool) -> list[str]:
    """Return the names of the first modules after a layer that map straight paths of its
    activations to straight paths.

    Affine maps always do. A ReLU does on a path from zero, on which no activation changes its sign.
    A max-pool does if, in each channel, all cells have the same constant term in addition to the
    term that is proportional to the position on the path.

    Args:
        policy: the agent.
        chain: names of the modules that are applied to the layer's output, one after another.
        from_zero: whether the paths start at zero activations.
    """
    constant = 0 if from_zero else 2  # constant term: 0: none; 1: one per channel; 2: any
    edited = {edit.layer for edit in policy.edits}  # edits by sign have a kink at 0
    names = []
    for name in chain:
        if name in edited:
            break
        module = policy.get_submodule(name)
        match module:
            case nn.Conv2d() | nn.Linear():
                constant = 1 if constant == 0 and isinstance(module, nn.Conv2d) else 2
            case nn.Flatten():
                constant = constant and 2
            case _ if not ((isinstance(module, nn.ReLU) and constant == 0)
                           or (isinstance(module, nn.MaxPool2d) and constant < 2)):
                break
        names.append(name)
    return names
