"""Structural parameters of the simulator."""

from __future__ import annotations

import dataclasses

from common.errors import UserError


@dataclasses.dataclass(frozen=True)
class SimulatorConfig:
    """Sizes and loss weights; the defaults are the published ones.

    Attributes:
        num_init_steps: frames from which a simulation starts; at least 2, because the action
            taken at the last but one enters the first simulated step.
        num_sim_steps: simulated steps; the first one has the last initial frame as its label.
        stoch_discrete: K, classes of each latent variable.
        stoch_dim: S, latent variables of a step.
        env_h_stoch_size: size of z; must be ``stoch_dim * stoch_discrete``.
        agent_hidden_size: D, hidden state of the agent inside.
        action_space_size: A.
        deter_dim: H, deterministic state of the environment.
        initializer_rnn_hidden_size: GRU over the initial frames.
        layer_norm: whether the layers around the cell's GRU and the decoder's reward and terminal
            heads normalise; the GRU itself always does.
        hidden_dim: M, hidden layers of the cell.
        image_channels: C.
        cnn_depth: d, width of the image decoder.
        reward_decoder_layers: hidden layers of the reward head.
        terminal_decoder_layers: hidden layers of the terminal head.
        kl_weight: factor of the KL loss.
        kl_balance: share of the KL loss that trains the prior.
        bottleneck_loss_weight: factor of the bottleneck loss.
        bottleneck_vec_size: V, dimensions of the unit sphere's space.
        env_update_penalty_weight: factor of the norm of h's change.
    """

    num_init_steps: int = 3
    num_sim_steps: int = 32
    stoch_discrete: int = 32
    stoch_dim: int = 32
    env_h_stoch_size: int = 1024
    agent_hidden_size: int = 64
    action_space_size: int = 15
    deter_dim: int = 512
    initializer_rnn_hidden_size: int = 512
    layer_norm: bool = True
    hidden_dim: int = 1000
    image_channels: int = 3
    cnn_depth: int = 48
    reward_decoder_layers: int = 4
    terminal_decoder_layers: int = 4
    kl_weight: float = 12.0
    kl_balance: float = 0.8
    bottleneck_loss_weight: float = 100.0
    bottleneck_vec_size: int = 128
    env_update_penalty_weight: float = 0.5

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if field.type == "int" and getattr(self, field.name) < 1:
                raise UserError(f"{field.name} must be above 0, not {getattr(self, field.name)}")
        for name in ("kl_weight", "bottleneck_loss_weight", "env_update_penalty_weight"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} must not be negative, but is {getattr(self, name)}")
        if self.num_init_steps < 2:
            raise UserError("num_init_steps must be at least 2, not 1")
        if not 0 <= self.kl_balance <= 1:
            raise UserError(f"kl_balance must lie between 0 and 1, not {self.kl_balance}")
        if self.env_h_stoch_size != self.stoch_dim * self.stoch_discrete:
            raise UserError(f"env_h_stoch_size must be stoch_dim * stoch_discrete = "
                            f"{self.stoch_dim * self.stoch_discrete}, not {self.env_h_stoch_size}")

    @property
    def window_length(self) -> int:
        """Frames of a window of data."""
        return self.num_init_steps + self.num_sim_steps - 1
