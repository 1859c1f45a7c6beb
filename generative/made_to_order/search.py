"""Gradient ascent on the start vector, through the simulated rollout.

Several starts of an order share a batch. What is maximised, of each start::

    score - penalty * (excess + end),  score = sign * (target - mean) / deviation

with mean and deviation of the target over recorded starts, the excess of ``RecordedDensity``, and
the surprise, in nats, at an episode that has not ended by the step: the sum of -log(1 - P(end)).
Without it the search finds the black frames behind an episode's end. For all starts together less
diversity * ``vector_crowding``, which the simulator was trained with to spread its vectors.
Nothing is drawn: latents take their most likely class, actions are the agent's likeliest, and both
pass straight-through gradients. These are biased, so the vector that was best in the forward pass
is kept, not the last one.

Letters in shape comments: K starts, B rollouts, V bottleneck vector.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional

from agents.scopes import cached
from common.devices import Compute
from common.errors import UserError
from generative.encoder import on_unit_sphere
from generative.losses import vector_crowding
from generative.made_to_order.recorded_density import RecordedDensity
from generative.made_to_order.targets import Answers, Order
from generative.simulator import Imagination, Simulator
from generative.straight_through import Draw, LatentSampler


@dataclasses.dataclass(frozen=True)
class SearchPlan:
    """Settings of a search.

    Attributes:
        step: of the rollout, from 0, at which the target is read.
        iterations: steps of Adam.
        learning_rate: of Adam, for the entries of the vectors.
        diversity: factor of the crowding.
    """

    step: int
    iterations: int
    learning_rate: float
    diversity: float

    def __post_init__(self):
        if not 0 < self.learning_rate < float("inf"):
            raise UserError(f"--learning_rate must be above 0, not {self.learning_rate}")
        if not 0 <= self.diversity < float("inf"):
            raise UserError(f"--diversity must be a number from 0 up, not {self.diversity}")


@dataclasses.dataclass(frozen=True)
class Scale:
    """Mean and deviation of a target over recorded starts."""

    mean: float
    deviation: float

    def score(self, values, sign: float):
        """Values of the target in deviations from the mean, the better the larger."""
        return sign * (values - self.mean) / self.deviation


def rollout(simulator: Simulator, compute: Compute, vectors: Tensor, num_steps: int,
            layers: tuple[str, ...] = (), draw: Draw | None = None,
            ) -> tuple[Imagination, Answers]:
    """Simulate from vectors (B, V), with all that depends on them in the graph.

    Args:
        layers: whose units are recorded.
        draw: of the latents; the most likely ones if not given.
    """
    draw = draw or LatentSampler("mode")
    policy = simulator.agent.policy
    with compute.autocast(), cached(policy, layers, graph=True) as activations:
        imagination = simulator.imagine(simulator.start_from(vectors, draw, detached=False), draw,
                                        num_steps)
    return imagination, Answers.of(imagination.steps, activations, policy)


def search(simulator: Simulator, compute: Compute, order: Order, begin: Tensor, scale: Scale,
           density: RecordedDensity, penalty: float, plan: SearchPlan) -> Tensor:
    """The best vector on each start's way (K, V).

    Args:
        begin: vectors to begin from (K, V).
        penalty: factor of excess and end.

    Raises:
        UserError: if the target or its gradient is not finite.
    """
    free = begin.clone().to(compute.device).requires_grad_()
    adam = torch.optim.Adam([free], lr=plan.learning_rate)
    kept = on_unit_sphere(begin.to(compute.device))
    best = torch.full((len(begin),), -float("inf"), device=compute.device)
    for iteration in range(plan.iterations + 1):
        vectors = on_unit_sphere(free)
        with torch.set_grad_enabled(iteration < plan.iterations):
            imagination, answers = rollout(simulator, compute, vectors, plan.step + 1,
                                           order.target.layers)
            score = scale.score(order.target(answers, plan.step), order.sign)  # (K,)
            ends = torch.stack([functional.softplus(step.terminal_logits.float())
                                for step in imagination.steps]).sum(dim=0)  # (K,)
            worth = score - penalty * (density.excess(vectors) + ends)
        better = worth.detach() > best
        kept = torch.where(better.unsqueeze(-1), vectors.detach(), kept)
        best = torch.where(better, worth.detach(), best)
        if iteration == plan.iterations:
            break
        adam.zero_grad()
        (plan.diversity * vector_crowding(vectors) - worth.sum()).backward()
        if not (torch.isfinite(worth).all() and torch.isfinite(free.grad).all()):
            raise UserError(f"{order.name}: the target or its gradient holds NaN or infinity after "
                            f"{iteration} iterations; a smaller --learning_rate may help")
        adam.step()
        with torch.no_grad():
            free.copy_(on_unit_sphere(free))
    return kept
