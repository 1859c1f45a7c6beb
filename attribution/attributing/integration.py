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
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from agents.networks import Policy, PolicyOutput
from agents.outputs import Output
from attribution.attributing.layers import Cut
from common.devices import Compute
from common.errors import UserError
from interventions.resumed import CutPass

GAUSS, RIGHT = RULES = ("gauss", "right")
MAX_STEPS = 256
FLOOR = 0.1  # of an output's deviation: smaller differences do not make a gap look larger
# Refinement goes on until a gap is below this share of the tolerance, so that gaps do not crowd
# below it, and parts of a path whose error is below another share of that are left as they are.
_AIM, _SMALL = 0.5, 0.25
_NUMBERS_A_PASS = 2**20  # of a layer's activations: what fits into the caches


@dataclasses.dataclass(frozen=True)
class Integration:
    """How a path is integrated.

    Attributes:
        steps: S, nodes of a path at first.
        rule: "gauss", the nodes of Gauss and Legendre; or "right", the right ends of equal parts,
            as published.
        tolerance: gap above which a path is refined, to at most MAX_STEPS nodes; None for no
            refinement.
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
    return np.abs(sums - change) / scales_of(change, deviations)


def scales_of(change: np.ndarray, deviations: np.ndarray) -> np.ndarray:
    """Denominators of the gaps (K, B)."""
    return np.maximum(np.maximum(np.abs(change), FLOOR * deviations[:, None]),
                      np.finfo(np.float32).tiny)


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
        """Attributions of all outputs in some frames; those of a frame and output depend neither
        on the other frames nor on the other outputs.

        Most kinks of a path lie near its start, where activations are smaller than biases. So a
        path whose gap is too large is cut, nearer to the baseline than to the frame, and each part
        is integrated by itself; since the outputs at both of its ends are known, so is its error,
        and the parts whose errors are too large are cut again.

        Args:
            actions: that were taken, (B,).
            deviations: of the outputs over many observations (K,), for the gaps.
        """
        start = Beginning(self._start(begun.activations), begun.also_read)
        baselines, outputs = (self.outputs_at(each, actions) for each in (start, begun))
        end = begun.activations.detach().requires_grad_()
        with torch.enable_grad():
            straight_end = self._stem(end)
        with torch.no_grad():
            straight_start = self._stem(start.activations)
        paths = Paths(straight_start, straight_end.detach() - straight_start, begun.also_read,
                       torch.from_numpy(actions).to(self._compute.device))
        gradients, steps = self._mean_gradients(
            paths, baselines, outputs, scales_of(outputs - baselines, deviations))
        change = (end - start.activations).detach()
        if self._stem:
            gradients = [torch.autograd.grad(straight_end, end, each, retain_graph=True)[0]
                         for each in gradients]
        values = np.stack([(each * change).cpu().numpy() for each in gradients])
        values = values.reshape(*outputs.shape, *self.cut.shape)
        sums = values.reshape(*outputs.shape, -1).sum(axis=-1, dtype=np.float64)
        return Attributions(values, outputs, baselines,
                            gaps_of(sums, outputs, baselines, deviations), steps.astype(np.int16))

    def _start(self, activations: Tensor) -> Tensor:
        """The baseline of each frame (B, …)."""
        if self._baseline is None:
            return torch.zeros_like(activations)
        return self._baseline.expand_as(activations)

    def _scalars(self, output: PolicyOutput, actions: Tensor) -> Tensor:
        """(K, rows)."""
        return torch.stack([scalar(output, actions) for scalar in self.outputs])

    def _rest(self, points: Tensor, also_read: tuple[Tensor, ...]) -> PolicyOutput:
        """The agent's output at points of paths (rows, …)."""
        return self._tail.finish(points, also_read)

    def _mean_gradients(self, paths: Paths, baselines: np.ndarray, outputs: np.ndarray,
                        scales: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Mean gradients along paths (K, B, …), and how many nodes they are means of (K, B).

        Args:
            baselines, outputs: at the starts and ends of the paths (K, B).
            scales: what errors are a share of (K, B).
        """
        num = outputs.shape[1]
        means = torch.stack([torch.zeros_like(paths.line)] * len(self.outputs))
        errors, steps = np.zeros(outputs.shape), np.zeros(outputs.shape, np.int64)
        aim = np.inf if self.integration.tolerance is None else (
            _AIM * self.integration.tolerance * scales)
        parts = _Parts(np.arange(num), np.zeros(num), np.ones(num), baselines, outputs,
                       np.ones(outputs.shape, bool))
        nodes = self.integration.steps
        fewer = max(1, nodes // 2)  # nodes of a part that was cut
        while len(parts.path):
            sums, found = self._integrate(paths, parts, nodes)
            wrong = np.where(parts.wanted, found - (parts.high_output - parts.low_output), 0)
            too_large = ((np.abs(errors + parts.by_path(wrong, num)) > aim)[:, parts.path]
                         & (np.abs(wrong) > np.broadcast_to(
                             _SMALL * aim, errors.shape)[:, parts.path]) & parts.wanted)
            planned = steps + parts.by_path(
                np.where(too_large, 2 * fewer, nodes) * parts.wanted, num)
            too_large &= (planned <= MAX_STEPS)[:, parts.path]
            kept = parts.wanted & ~too_large
            for total, part, which in zip(means, sums, torch.from_numpy(kept)):
                total.index_add_(0, torch.from_numpy(parts.path)[which].to(total.device),
                                 part[which.to(total.device)])
            errors += parts.by_path(np.where(kept, wrong, 0), num)
            steps += parts.by_path(kept * nodes, num)
            parts, nodes = self._cut(paths, parts, too_large), fewer
        return means, steps

    def _integrate(self, paths: Paths, parts: _Parts,
                   nodes: int) -> tuple[Tensor, np.ndarray]:
        """Integrals of the gradients over parts of paths (K, P, …), and what they say the outputs
        change by, float64 (K, P)."""
        places, weights = self.integration.nodes(nodes)
        lengths = parts.high - parts.low
        where = parts.low[:, None] + lengths[:, None] * places  # (P, S)
        weight = lengths[:, None] * weights
        sums = []
        many = max(1, _NUMBERS_A_PASS // (paths.line[0].numel() * nodes))  # parts a pass
        for begin in range(0, len(where), many):
            some = slice(begin, begin + many)
            sums.append(self._weighted_gradients(paths, parts.path[some], where[some],
                                                 weight[some]))
        joined = torch.cat(sums, dim=1)
        line = paths.line[torch.from_numpy(parts.path)]
        change = torch.stack([(each * line).double().flatten(1).sum(dim=-1) for each in joined])
        return joined, change.cpu().numpy()

    def _weighted_gradients(self, paths: Paths, path: np.ndarray, places: np.ndarray,
                            weights: np.ndarray) -> Tensor:
        """Weighted sums of gradients at places (P, S) on paths (P,): (K, P, …)."""
        points, also_read, actions = paths.at(path, places)
        points.requires_grad_()
        with torch.enable_grad():
            scalars = self._scalars(self._rest(points, also_read), actions)  # (K, P S)
        sums = []
        for number, scalar in enumerate(scalars):
            (gradient,) = torch.autograd.grad(scalar.sum(), points,
                                              retain_graph=number + 1 < len(scalars))
            weight = torch.from_numpy(weights).to(gradient).reshape(
                *weights.shape, *[1] * (gradient.ndim - 1))
            sums.append((gradient.unflatten(0, weights.shape) * weight).sum(dim=1))
        return torch.stack(sums)

    def _cut(self, paths: Paths, parts: _Parts, too_large: np.ndarray) -> _Parts:
        """The halves of those parts that are too coarse for some output (K, P)."""
        some = too_large.any(axis=0)
        path, low, high = parts.path[some], parts.low[some], parts.high[some]
        if not len(path):
            return _Parts(path, low, high, *[too_large[:, :0]] * 3)
        middle = low + (high - low) * np.where(low == 0, 0.25, 0.5)
        with torch.no_grad():
            points, also_read, actions = paths.at(path, middle[:, None])
            outputs = self._scalars(self._rest(points, also_read),
                                    actions).double().cpu().numpy()
        wanted = too_large[:, some]
        return _Parts(np.concatenate([path, path]), np.concatenate([low, middle]),
                      np.concatenate([middle, high]),
                      np.concatenate([parts.low_output[:, some], outputs], axis=1),
                      np.concatenate([outputs, parts.high_output[:, some]], axis=1),
                      np.concatenate([wanted, wanted], axis=1))


@dataclasses.dataclass(frozen=True)
class Paths:
    """Straight paths of B frames behind the stem.

    Attributes:
        start: their starts (B, …).
        line: ends minus starts (B, …).
        also_read: as in :class:`Beginning`.
        actions: that were taken, int64 (B,).
    """

    start: Tensor
    line: Tensor
    also_read: tuple[Tensor, ...]
    actions: Tensor

    def at(self, path: np.ndarray, places: np.ndarray
           ) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """Places (P, S) in [0, 1] on paths (P,), as one batch (P S, …), with what else is read and
        the actions."""
        rows = torch.from_numpy(path).to(self.line.device)
        where = torch.from_numpy(places).to(self.line).reshape(
            *places.shape, *[1] * (self.line.ndim - 1))
        points = (self.start[rows, None] + where * self.line[rows, None]).flatten(0, 1)
        rows = rows.repeat_interleave(places.shape[1])
        return points, tuple(value[rows] for value in self.also_read), self.actions[rows]


@dataclasses.dataclass(frozen=True)
class _Parts:
    """Parts of paths.

    Attributes:
        path: whose parts they are (P,).
        low, high: where they begin and end on it, in [0, 1] (P,).
        low_output, high_output: the outputs there (K, P).
        wanted: for which outputs (K, P).
    """

    path: np.ndarray
    low: np.ndarray
    high: np.ndarray
    low_output: np.ndarray
    high_output: np.ndarray
    wanted: np.ndarray

    def by_path(self, numbers: np.ndarray, num: int) -> np.ndarray:
        """Sums of numbers of parts (K, P) over each of the paths (K, num)."""
        return np.stack([np.bincount(self.path, each, num) for each in numbers]).astype(
            numbers.dtype)


@dataclasses.dataclass(frozen=True)
class Beginning:
    """Output of the part of the network before a layer.

    Attributes:
        activations: of the layer (B, …).
        also_read: what the rest of the network reads beside them, such as entering states (B, …).
    """

    activations: Tensor
    also_read: tuple[Tensor, ...]


def _straight(policy: Policy, chain: Sequence[str], from_zero: bool) -> list[str]:
    """The first modules of a chain that map a straight path of a layer's activations to a straight
    path.

    Affine maps always do. A ReLU does on a path from zero, on which no activation changes its
    sign; a max-pool does if, beside what is proportional to the place on the path, all cells of a
    channel have the same constant.
    """
    constant = 0 if from_zero else 2  # 0: none; 1: one a channel; 2: any
    bent = {edit.layer for edit in policy.edits}  # an edit of slots of both signs has a kink
    names = []
    for name in chain:
        if name in bent:
            break
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
