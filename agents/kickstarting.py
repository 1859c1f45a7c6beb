"""Kickstarting (Schmitt et al. 2018, "Kickstarting deep reinforcement learning"): distillation of
a teacher's policy as an auxiliary loss of PPO, with a weight that falls to 0.

The teacher sees every frame of the student's rollouts and keeps its own hidden state; it takes no
actions. Its outputs are computed once per rollout.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from agents.acting import embed_frames
from agents.config import AgentConfig
from agents.networks import Policy, PolicyOutput
from common.devices import Compute

KICKSTART_METRICS = ("distillation_loss", "teacher_kl")


@dataclasses.dataclass(frozen=True)
class Guidance:
    """A teacher's outputs for a rollout, and the weights of the kickstarting losses.

    Attributes:
        log_probs: the teacher's log-probabilities (T, N, A).
        values: the teacher's value estimates (T, N).
        policy_weight: weight of the distillation loss in the total loss.
        value_weight: weight of half the squared difference between student's and teacher's values.
    """

    log_probs: Tensor
    values: Tensor
    policy_weight: float
    value_weight: float


def kickstart_losses(output: PolicyOutput, teacher_log_probs: Tensor,
                     teacher_values: Tensor) -> dict[str, Tensor]:
    """Compute the kickstarting losses on the student's states (Schmitt et al. 2018, equation 4).

    Args:
        output: the student's outputs, with any leading dimensions.
        teacher_log_probs: the teacher's log-probabilities (…, A).
        teacher_values: the teacher's value estimates (…,).

    Returns:
        Means over frames, each (), by name:

        - ``distillation_loss``: cross-entropy from the teacher's policy to the student's.
        - ``teacher_kl``: KL(teacher ‖ student) in nats, without gradient.
        - ``value_distance``: half the squared difference between the two values.
    """
    probabilities = teacher_log_probs.exp()
    distillation_loss = -(probabilities * output.log_probs).sum(dim=-1).mean()
    entropy = -(probabilities * teacher_log_probs).sum(dim=-1).mean()
    value_distance = 0.5 * ((output.values - teacher_values) ** 2).mean()
    return {"distillation_loss": distillation_loss,
            "teacher_kl": distillation_loss.detach() - entropy, "value_distance": value_distance}


class Teacher:
    """Frozen teacher that is evaluated on the student's rollouts.

    Args:
        policy: teacher of any architecture and width, recurrent or feed-forward.
        num_envs: number of environments N of the student's rollouts.
    """

    def __init__(self, policy: Policy, num_envs: int, compute: Compute):
        self.policy = compute.place(policy).requires_grad_(False)
        self.compute = compute
        self.hidden = policy.initial_states(num_envs)  # (N, D)

    @torch.no_grad()
    def follow(self, frames: Tensor, masks: Tensor, config: AgentConfig,
               progress: float) -> Guidance:
        """Evaluate the teacher on a rollout that begins where the previous one ended.

        Args:
            frames: uint8 (T, N, H, W, C).
            masks: (T, N); 0 where a frame is the first of its episode.
            config: parameter set with the initial weights of the losses.
            progress: completed fraction of the run.
        """
        embeddings = embed_frames(self.policy, frames.flatten(0, 1), self.compute)
        output = self.policy.sequence(embeddings.unflatten(0, masks.shape), self.hidden, masks)
        self.hidden = output.hidden_states[-1].clone()
        remaining = remaining_weight(config, progress)
        return Guidance(output.log_probs, output.values, config.kickstart_coef * remaining,
                        config.kickstart_value_coef * remaining)


def remaining_weight(config: AgentConfig, progress: float) -> float:
    """Return the factor of the loss weights, which falls linearly from 1 to 0.

    It is 0 from ``kickstart_until`` on.
    """
    return 1 - progress / config.kickstart_until if progress < config.kickstart_until else 0.0
