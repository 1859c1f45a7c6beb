"""Kickstarting (Schmitt et al. 2018, "Kickstarting deep reinforcement learning"): the policy of a
teacher as a second target of PPO, with a weight that falls to 0.

The teacher sees every frame of the student's rollouts and keeps a memory of its own; it takes no
action. Its outputs for a rollout are computed once and serve all passes over that rollout.

Letters in shape comments: T steps of a rollout, N environments, H W C a frame, A actions, D the
teacher's hidden state.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from agents.acting import embed_frames
from agents.config import AgentConfig
from agents.networks import Policy, PolicyOutput
from common.devices import Compute


@dataclasses.dataclass(frozen=True)
class Guidance:
    """A teacher's outputs for a rollout, and the weights of the losses on them.

    Attributes:
        log_probs: the teacher's log-probabilities (T, N, A).
        values: the teacher's value estimates (T, N).
        policy_weight: of the distillation loss in the total loss.
        value_weight: of half the squared difference of values.
    """

    log_probs: Tensor
    values: Tensor
    policy_weight: float
    value_weight: float


@dataclasses.dataclass(frozen=True)
class KickstartLosses:
    """Distances from student to teacher: means over frames.

    Attributes:
        distillation: cross-entropy from the teacher's policy to the student's.
        kl: KL divergence from the teacher's policy to the student's, in nats: the same less the
            entropy of the teacher's.
        value: half the squared difference of their values.
    """

    distillation: Tensor
    kl: Tensor
    value: Tensor

    def total(self, guidance: Guidance) -> Tensor:
        return (guidance.policy_weight * self.distillation
                + guidance.value_weight * self.value)


def kickstart_losses(output: PolicyOutput, teacher_log_probs: Tensor,
                     teacher_values: Tensor) -> KickstartLosses:
    """Losses of kickstarting on the student's own states (Schmitt et al. 2018, equation 4).

    Args:
        output: of the student, with any leading dimensions.
        teacher_log_probs: (…, A).
        teacher_values: (…,).
    """
    probabilities = teacher_log_probs.exp()
    distillation = -(probabilities * output.log_probs).sum(dim=-1).mean()
    entropy = -(probabilities * teacher_log_probs).sum(dim=-1).mean()
    value = 0.5 * ((output.values - teacher_values) ** 2).mean()
    return KickstartLosses(distillation, distillation.detach() - entropy, value)


class Teacher:
    """A frozen agent that follows the student's environments.

    Args:
        policy: of any architecture and width, with a memory or without.
        num_envs: N of the student's rollouts.
        compute: where and in which precision to run it.
    """

    def __init__(self, policy: Policy, num_envs: int, compute: Compute):
        layout = torch.channels_last if compute.channels_last else torch.contiguous_format
        self.policy = policy.to(compute.device, memory_format=layout).requires_grad_(False)
        self.compute = compute
        self.hidden = policy.initial_states(num_envs)  # (N, D)

    @torch.no_grad()
    def follow(self, frames: Tensor, masks: Tensor, config: AgentConfig,
               progress: float) -> Guidance:
        """Run on a rollout that begins where the last one ended.

        Args:
            frames: uint8 (T, N, H, W, C).
            masks: (T, N); 0 where a frame is the first of its episode.
            config: has the weights at the start of the run.
            progress: share of the run that is done.
        """
        embeddings = embed_frames(self.policy, frames.flatten(0, 1), self.compute)
        output = self.policy.sequence(embeddings.unflatten(0, masks.shape), self.hidden, masks)
        self.hidden = output.hidden_states[-1].clone()
        remaining = remaining_weight(config, progress)
        return Guidance(output.log_probs, output.values, config.kickstart_coef * remaining,
                        config.kickstart_value_coef * remaining)


def remaining_weight(config: AgentConfig, progress: float) -> float:
    """The part of the weights that is left after a share of the run: from 1 linearly to 0."""
    if progress >= config.kickstart_until:
        return 0.0
    return 1 - progress / config.kickstart_until
