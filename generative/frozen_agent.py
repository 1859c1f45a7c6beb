"""The frozen agent that acts on the simulated frames.

Letters in shape comments: E embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from agents.networks import Policy, PolicyOutput
from common.errors import UserError


class FrozenAgent(nn.Module):
    """A policy whose weights never change and whose state is never reset.

    GRU and heads run in float32 even under autocast, as in the agent's own training.

    Args:
        policy: a trained agent; it is frozen in place.
        hidden_size: D, size of the hidden state that the simulator was built for.
        num_actions: number of actions that the simulator was built for.

    Raises:
        UserError: if the policy has another hidden size or number of actions.
    """

    def __init__(self, policy: Policy, hidden_size: int, num_actions: int):
        super().__init__()
        sizes = (policy.hidden_state_size, policy.fc_policy.out_features)
        if sizes != (hidden_size, num_actions):
            raise UserError(f"the agent has {sizes[0]} hidden units and {sizes[1]} actions, but "
                            f"agent_hidden_size is {hidden_size} and action_space_size is "
                            f"{num_actions}")
        self.policy = policy.requires_grad_(False)
        self.train(False)

    def train(self, mode: bool = True) -> FrozenAgent:
        """Stay in evaluation mode for either value of ``mode``.

        Only recurrent layers without dropout stay in training mode, because cuDNN cannot compute
        gradients with respect to their input in evaluation mode. Their output is the same.
        """
        super().train(False)
        for module in self.policy.modules():
            if isinstance(module, nn.RNNBase) and not module.dropout:
                module.train(True)
        return self

    def sequence(self, images: Tensor, hidden: Tensor) -> PolicyOutput:
        """Return the agent's outputs (T, B, …) in T steps, computed at once.

        Args:
            images: images (T, B, C, H, W) in [0, 1]; an image expanded over T is embedded once.
            hidden: hidden state before the first step (B, D).
        """
        if images.stride(0) == 0:
            embedding = self.policy.embed(images[0]).float()  # (B, E)
            embeddings = embedding.expand(len(images), *embedding.shape)  # (T, B, E)
        else:
            embeddings = self.policy.embed(images.flatten(0, 1)).float().unflatten(
                0, images.shape[:2])  # (T, B, E)
        with torch.autocast(hidden.device.type, enabled=False):
            return self.policy.sequence(embeddings, hidden, masks=None)

    def step(self, image: Tensor, hidden: Tensor) -> PolicyOutput:
        """Return the agent's outputs (B, …) in one step.

        The returned state is the tensor from which log-probabilities and value are computed, so
        gradients with respect to it account for these outputs and for all later steps.

        Args:
            image: images (B, C, H, W) in [0, 1].
            hidden: hidden state before the step (B, D).
        """
        embedding = self.policy.embed(image).float()  # (B, E)
        with torch.autocast(hidden.device.type, enabled=False):
            return self.policy.step(embedding, hidden)
