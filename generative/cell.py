"""The environment's recurrent cell: a recurrent state-space model with discrete latents.

After Hafner et al. (2021), "Mastering Atari with discrete world models", section 2, with a
layer-norm GRU. Under autocast the matrix products run in its precision; what they give is float32
again before it is normalised, added up over time or drawn from.

Letters in shape comments: B batch (or any leading dimensions), S latent variables, K classes of
each, H deterministic state, M hidden layer, A actions, E frame embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from generative.config import SimulatorConfig
from generative.encoder import EMBEDDING_SIZE

NORM_EPS = 1e-3


def norm_layer(size: int, layer_norm: bool) -> nn.Module:
    """Layer norm, or nothing where the configuration does without."""
    return nn.LayerNorm(size, eps=NORM_EPS) if layer_norm else nn.Identity()


class LayerNormGRUCell(nn.Module):
    """One step of a GRU whose three gates are layer-normalised, without other biases."""

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__()
        self.from_input = nn.Linear(input_size, 3 * hidden_size, bias=False)
        self.from_hidden = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.reset_norm = nn.LayerNorm(hidden_size, eps=NORM_EPS)
        self.update_norm = nn.LayerNorm(hidden_size, eps=NORM_EPS)
        self.new_norm = nn.LayerNorm(hidden_size, eps=NORM_EPS)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """Input (B, M) and state (B, H) to the next state (B, H)."""
        reset_x, update_x, new_x = self.from_input(x).float().chunk(3, dim=-1)
        reset_h, update_h, new_h = self.from_hidden(h).float().chunk(3, dim=-1)
        reset = torch.sigmoid(self.reset_norm(reset_x + reset_h))
        update = torch.sigmoid(self.update_norm(update_x + update_h))
        new = torch.tanh(self.new_norm(new_x + reset * new_h))
        return update * new + (1 - update) * h


class EnvironmentCell(nn.Module):
    """The parts of one environment step.

    They are separate methods because a pass whose actions and frames are known in advance runs
    ``action_input``, ``embedding_input`` and ``prior_logits`` for all steps at once and leaves
    only ``advance`` and ``posterior_logits`` in its loop.
    """

    def __init__(self, config: SimulatorConfig):
        super().__init__()
        z_size, hidden, deter = config.env_h_stoch_size, config.hidden_dim, config.deter_dim
        self.latent_shape = (config.stoch_dim, config.stoch_discrete)
        self.z_in = nn.Linear(z_size, hidden)
        self.action_in = nn.Linear(config.action_space_size, hidden, bias=False)
        self.in_norm = norm_layer(hidden, config.layer_norm)
        self.gru = LayerNormGRUCell(hidden, deter)
        self.prior_hidden = nn.Linear(deter, hidden)
        self.prior_norm = norm_layer(hidden, config.layer_norm)
        self.prior_out = nn.Linear(hidden, z_size)
        self.posterior_hidden = nn.Linear(deter, hidden)
        self.posterior_embedding = nn.Linear(EMBEDDING_SIZE, hidden, bias=False)
        self.posterior_norm = norm_layer(hidden, config.layer_norm)
        self.posterior_out = nn.Linear(hidden, z_size)

    def action_input(self, action: Tensor) -> Tensor:
        """One-hot actions (B, A) to their share (B, M) of the GRU's input."""
        return self.action_in(action).float()

    def embedding_input(self, embedding: Tensor) -> Tensor:
        """Frame embeddings (B, E) to their share (B, M) of the posterior's hidden layer."""
        return self.posterior_embedding(embedding).float()

    def advance(self, z: Tensor, action_input: Tensor, h: Tensor) -> Tensor:
        """One-hot z (B, S, K), ``action_input`` (B, M) and h (B, H) to the next h (B, H)."""
        x = functional.elu(self.in_norm(self.z_in(z.flatten(-2)).float() + action_input))  # (B, M)
        return self.gru(x, h)

    def prior_logits(self, h: Tensor) -> Tensor:
        """h (B, H) to the logits (B, S, K) of z without having seen the frame."""
        hidden = functional.elu(self.prior_norm(self.prior_hidden(h).float()))
        return self.prior_out(hidden).float().unflatten(-1, self.latent_shape)

    def posterior_logits(self, h: Tensor, embedding_input: Tensor) -> Tensor:
        """h (B, H) and ``embedding_input`` (B, M) to the logits (B, S, K) given the frame."""
        hidden = self.posterior_hidden(h).float() + embedding_input
        hidden = functional.elu(self.posterior_norm(hidden))
        return self.posterior_out(hidden).float().unflatten(-1, self.latent_shape)
