"""Integrated gradients of an agent's outputs from a baseline of a layer's activations.

Sundararajan et al. (2017), "Axiomatic attribution for deep networks", equation 1, at a hidden
layer: attr = (a - a0) * integral over t of dG/da at a0 + t (a - a0). G is the rest of the network,
from the layer to one scalar output; a0 is zero, or the mean activations. What entered the step from
memory is held fixed along the path. The sum of the attributions of a frame is G(a) - G(a0), but for
the error of the integral, which is its *gap*.

Letters in shape comments: B frames, K outputs, S nodes of an integral, C H W a layer (units have
one cell), D hidden state.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from clarity.attributing.layers import Cut
from common.devices import Compute
from common.errors import UserError
from common.networks import Policy, PolicyOutput
from common.outputs import Output
from interventions.resumed import CutPass

GAUSS, RIGHT = RULES = ("gauss", "right")
MAX_STEPS = 256
FLOOR = 0.1  # of an output's deviation: smaller differences do not make a gap look larger
_NUMBERS_A_PASS = 2**21  # of a layer's activations: what fits into the caches


@dataclasses.dataclass(frozen=True)
class Integration:
    """How a path is integrated.

    Attributes:
        steps: S, nodes of a path at first.
        rule: "gauss", the nodes of Gauss and Legendre; or "right", the right ends of equal parts,
            as published.
        tolerance: gap above which a frame is done again with twice the nodes, up to MAX_STEPS;
            None to do nothing again.
    """

    steps: int = 16
    rule: str = GAUSS
    tolerance: float | None = 0.01

    def nodes(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Places on the path, in [0, 1], and their weights, whose sum is 1: float64 (S,) each."""
        if self.rule == RIGHT:
            return np.arange(1, steps + 1) / steps, np.full(steps, 1 / steps)
        places, weights = np.polynomial.legendre.leggauss(steps)
        return (places + 1) / 2, weights / 2

    def refinements(self) -> list[int]:
        """The numbers of nodes of all attempts, the first one included."""
        if self.tolerance is None:
            return [self.steps]
        return list(itertools.takewhile(
            lambda steps: steps <= max(MAX_STEPS, self.steps),
            (self.steps * 2**times for times in itertools.count())))


@dataclasses.dataclass(frozen=True)
class Attributions:
    """Attributions of K outputs in B frames.

    Attributes:
        values: float32 (K, B, C, H, W), in the unit of each output.
        outputs: G(a), float64 (K, B).
        baselines: G(a0), float64 (K, B).
        gaps: float64 (K, B); see :func:`gaps_of`.
        steps: nodes that were used, int16 (K, B).
    """

    values: np.ndarray
    outputs: np.ndarray
    baselines: np.ndarray
    gaps: np.ndarray
    steps: np.ndarray


def gaps_of(sums: np.ndarray, outputs: np.ndarray, baselines: np.ndarray,
            deviations: np.ndarray) -> np.ndarray:
    """Errors of integrals (K, B): |sum of attributions - (G(a) - G(a0))|, as a share of
    |G(a) - G(a0)| or of a tenth of the output's deviation, whichever is larger.

    Args:
        sums, outputs, baselines: (K, B).
        deviations: of the outputs over many observations (K,).
    """
    change = outputs - baselines
    scale = np.maximum(np.abs(change), FLOOR * deviations[:, None])
    return np.abs(sums - change) / np.maximum(scale, np.finfo(np.float32).tiny)


class Attributor:
    """Attributes outputs of an agent to one layer.

    The part of the network before the layer runs once a frame, all outputs share the passes of the
    part behind it, and of this part the modules at whose outputs the path is still a straight line
    run once a frame, too.

    Args:
        policy: its parameters need no gradients, and get none.
        compute: in float32, because in bfloat16 sums do not come out.
        cut: the layer.
        outputs: K of them.
        integration: how.
        baseline: a0 (C, H, W); None for zero.

    Raises:
        UserError: if the precision is another.
    """

    def __init__(self, policy: Policy, compute: Compute, cut: Cut, outputs: Sequence[Output],
                 integration: Integration, baseline: np.ndarray | None = None):
        if compute.bfloat16:
            raise UserError("attributions are computed in float32, because in bfloat16 they do "
                            "not add up to the output; give --precision float32")
        policy.requires_grad_(False)
        self.cut, self.outputs, self.integration = cut, tuple(outputs), integration
        self._compute = compute
        self._head = CutPass(policy, compute, cut.layer.name)
        self._baseline = None if baseline is None else torch.as_tensor(
            np.asarray(baseline, np.float32).reshape(cut.layer.shape)).to(compute.device)
        names = _straight(policy, self._head.chain, from_zero=baseline is None)
        self._stem = nn.Sequential(*map(policy.get_submodule, names))
        self._tail = CutPass(policy, compute, names[-1]) if names else self._head

    def begin(self, frames: np.ndarray, entering: np.ndarray) -> Beginning:
        """Run the part of the network before the layer.

        Args:
            frames: uint8 (B, H, W, C).
            entering: hidden states that enter (B, D).
        """
        with torch.no_grad():
            half = self._head.begin(frames, torch.from_numpy(entering))
        return Beginning(half.activations, half.also_read)

    def outputs_at(self, begun: Beginning, actions: np.ndarray) -> np.ndarray:
        """The outputs of frames, float64 (K, B).

        Args:
            actions: that were taken, (B,).
        """
        with torch.no_grad():
            return self._scalars(self._head.finish(begun.activations, begun.also_read),
                                 torch.from_numpy(actions).to(self._compute.device)
                                 ).double().cpu().numpy()

    def attribute(self, begun: Beginning, actions: np.ndarray,
                  deviations: np.ndarray) -> Attributions:
        """Attributions of all outputs in some frames.

        Args:
            actions: that were taken, (B,).
            deviations: of the outputs over many observations (K,), for the gaps.
        """
        taken = torch.from_numpy(actions).to(self._compute.device)
        baselines = self.outputs_at(Beginning(
            self._start(begun.activations), begun.also_read), actions)
        outputs = self.outputs_at(begun, actions)
        found = None
        again = np.arange(len(actions))  # frames that are to be done
        for steps in self.integration.refinements():
            rows = torch.from_numpy(again).to(self._compute.device)
            values = self._integrate(begun.rows(rows), taken[rows], steps)  # (K, b, …)
            sums = values.double().flatten(2).sum(dim=-1).cpu().numpy()
            gaps = gaps_of(sums, outputs[:, again], baselines[:, again], deviations)
            values = values.cpu().numpy().reshape(*gaps.shape, *self.cut.shape)
            if found is None:
                found = Attributions(values, outputs, baselines, gaps,
                                     np.full(gaps.shape, steps, np.int16))
            else:  # only what was not good enough, so that an output does not depend on others
                k, b = np.nonzero(found.gaps[:, again] > self.integration.tolerance)
                for array, new in ((found.values, values), (found.gaps, gaps)):
                    array[k, again[b]] = new[k, b]
                found.steps[k, again[b]] = steps
            if self.integration.tolerance is None:
                break
            again = np.flatnonzero((found.gaps > self.integration.tolerance).any(axis=0))
            if not len(again):
                break
        return found

    def _start(self, activations: Tensor) -> Tensor:
        """The baseline of each frame (B, …)."""
        if self._baseline is None:
            return torch.zeros_like(activations)
        return self._baseline.expand_as(activations)

    def _scalars(self, output: PolicyOutput, actions: Tensor) -> Tensor:
        """(K, rows)."""
        return torch.stack([scalar(output, actions) for scalar in self.outputs])

    def _integrate(self, begun: Beginning, actions: Tensor, steps: int) -> Tensor:
        """Integrals with some number of nodes, float32 (K, B, …)."""
        places, weights = (torch.from_numpy(each).float().to(self._compute.device)
                           for each in self.integration.nodes(steps))
        start = self._start(begun.activations)
        end = begun.activations.detach().requires_grad_()
        with torch.no_grad():
            straight_start = self._stem(start)
        with torch.enable_grad():
            straight_end = self._stem(end)
        line = straight_end.detach() - straight_start
        sums = [torch.zeros_like(line) for _ in self.outputs]
        many = max(1, _NUMBERS_A_PASS // line.numel())  # nodes a pass
        for some, weight in zip(places.split(many), weights.split(many)):
            self._add_gradients(sums, straight_start, line, begun.also_read, actions, some, weight)
        change = (end - start).detach()
        if not self._stem:
            return torch.stack(sums) * change
        return torch.stack([
            torch.autograd.grad(straight_end, end, total, retain_graph=True)[0] * change
            for total in sums])

    def _add_gradients(self, sums: list[Tensor], start: Tensor, line: Tensor,
                       also_read: tuple[Tensor, ...], actions: Tensor, places: Tensor,
                       weights: Tensor) -> None:
        """Add gradients at some nodes (s,) to the weighted sums of each output (B, …)."""
        shape = (len(places), *[1] * line.ndim)
        points = (start + places.view(shape) * line).flatten(0, 1).requires_grad_()  # (s B, …)
        with torch.enable_grad():
            output = self._tail.finish(points, tuple(
                value.repeat(len(places), *[1] * (value.ndim - 1)) for value in also_read))
            scalars = self._scalars(output, actions.repeat(len(places)))  # (K, s B)
        for number, total in enumerate(sums):
            (gradient,) = torch.autograd.grad(scalars[number].sum(), points,
                                              retain_graph=number + 1 < len(sums))
            total += (gradient.unflatten(0, shape[:1] + line.shape[:1])
                      * weights.view(shape)).sum(dim=0)


@dataclasses.dataclass(frozen=True)
class Beginning:
    """What the part of the network before a layer gives.

    Attributes:
        activations: of the layer (B, …).
        also_read: what the rest of the network reads beside them, such as entering states (B, …).
    """

    activations: Tensor
    also_read: tuple[Tensor, ...]

    def rows(self, numbers: Tensor) -> Beginning:
        """The same for some frames."""
        return Beginning(self.activations[numbers],
                         tuple(value[numbers] for value in self.also_read))


def _straight(policy: Policy, chain: Sequence[str], from_zero: bool) -> list[str]:
    """The first modules of a chain that map a straight path of a layer's activations to a straight
    path.

    Affine maps always do. A ReLU does on a path from zero, on which no activation changes its
    sign; a max-pool does if, beside what is proportional to the place on the path, all cells of a
    channel have the same constant.
    """
    constant = 0 if from_zero else 2  # 0: none; 1: one a channel; 2: any
    names = []
    for name in chain:
        module = policy.get_submodule(name)
        match module:
            case nn.Conv2d() | nn.Linear():
                constant = 1 if constant == 0 and isinstance(module, nn.Conv2d) else 2
            case nn.Flatten():
                constant = constant and 2
            case nn.ReLU() if constant == 0:
                pass
            case nn.MaxPool2d() if constant < 2:
                pass
            case _:
                break
        names.append(name)
    return names
