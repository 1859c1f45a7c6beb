"""The frozen agent that acts on the simulated frames.

Letters in shape comments: T steps, B batch, C H W an image, D agent hidden state, A actions.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from agents.networks import Policy, PolicyOutput
from common.errors import UserError


@dataclasses.dataclass(frozen=True)
class AgentOutput:
    """Outputs of the agent on images; leading dimensions are those of the images.

    Attributes:
        hidden_states: states that leave the step (…, D), the input of both heads.
        log_probs: of the actions (…, A).
        values: (…,).
    """

    hidden_states: Tensor
    log_probs: Tensor
    values: Tensor


class FrozenAgent(nn.Module):
    """A policy whose weights never change and whose state is never masked.

    Args:
        policy: a trained agent; it is frozen in place.
        hidden_size: D that the simulator was built for.
        num_actions: A that the simulator was built for.

    Raises:
        UserError: if the policy has other sizes.
    """

    def __init__(self, policy: Policy, hidden_size: int, num_actions: int):
        super().__init__()
        found = (policy.hidden_state_size, policy.fc_policy.out_features)
        if found != (hidden_size, num_actions):
            raise UserError(f"the agent has {found[0]} hidden units and {found[1]} actions, but "
                            f"agent_hidden_size is {hidden_size} and action_space_size is "
                            f"{num_actions}")
        self.policy = policy.requires_grad_(False)
        self.train(False)

    def train(self, mode: bool = True) -> FrozenAgent:
        """Stay in evaluation mode, whatever is asked.

        Only the kernel of a GRU is left in training mode: without dropout that changes no
        number, but cuDNN refuses to compute gradients of its input in evaluation mode.
        """
        super().train(False)
        if self.policy.recurrent:
            self.policy.gru.gru.train(True)
        return self

    def sequence(self, images: Tensor, hidden: Tensor) -> AgentOutput:
        """Run T steps at once.

        Args:
            images: (T, B, C, H, W) in [0, 1].
            hidden: state that enters the first step (B, D).
        """
        embeddings = self.policy.embed(images.flatten(0, 1)).float()  # (T*B, E)
        return self._remember(embeddings.unflatten(0, images.shape[:2]), hidden)

    def unmoved(self, image: Tensor, num_steps: int, hidden: Tensor) -> AgentOutput:
        """Run T steps that all show the same image (B, C, H, W); see ``sequence``."""
        embeddings = self.policy.embed(image).float()  # (B, E)
        return self._remember(embeddings.expand(num_steps, *embeddings.shape), hidden)

    def _remember(self, embeddings: Tensor, hidden: Tensor) -> AgentOutput:
        with _full_precision(hidden):
            return _agent_output(self.policy.sequence(embeddings, hidden, masks=None))

    def step(self, image: Tensor, hidden: Tensor) -> AgentOutput:
        """Run one step.

        The returned state is the tensor from which log-probabilities and value are computed, so
        a gradient with respect to it counts both them and all later steps.

        Args:
            image: (B, C, H, W) in [0, 1].
            hidden: state that enters the step (B, D).
        """
        embedding = self.policy.embed(image).float()  # (B, E)
        with _full_precision(hidden):
            return _agent_output(self.policy.step(embedding, hidden))


def _full_precision(tensor: Tensor) -> torch.autocast:
    """GRU and heads compute in float32, as where the agent was trained."""
    return torch.autocast(tensor.device.type, enabled=False)


def _agent_output(output: PolicyOutput) -> AgentOutput:
    return AgentOutput(output.hidden_states, output.log_probs, output.values)
