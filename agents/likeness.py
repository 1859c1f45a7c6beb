"""How alike two agents are, on frames of episodes that one of them plays."""

from __future__ import annotations

import numpy as np
import torch

from agents.acting import embed_frames
from agents.networks import Policy
from agents.reference import random_steps
from agents.similarity import similarity
from common.devices import Compute
from envs.procgen_env import EnvConfig, LevelEdit


def likeness(policy: Policy, other: Policy, compute: Compute, env: EnvConfig, num_levels: int,
             seed: int, edit: LevelEdit | None = None) -> dict:
    """The agents' similarity on one frame of each level, at a random step of an episode that
    ``policy`` plays. Each agent has the memory of the steps before.

    Args:
        seed: of levels, actions and steps.
        edit: of every level before it is played.

    Returns:
        See ``agents.similarity.similarity``.

    Raises:
        UserError: if the agents have other numbers of actions.
    """
    levels = list(enumerate(env.draw_levels(num_levels, seed)))
    frames, states, of_other = [], [], []
    for episode, step in random_steps(policy, compute, env, levels, seed, "compared", edit):
        frames.append(episode.frames[step])
        states.append(episode.hidden_states[step])
        of_other.append(_state_after(other, compute, episode.frames[:step]))
    return similarity(policy, other, np.stack(frames), np.stack(states), np.stack(of_other))


@torch.no_grad()
def _state_after(policy: Policy, compute: Compute, frames: np.ndarray) -> np.ndarray:
    """The state of an agent (D,) after the first frames of an episode, uint8 (T, H, W, 3)."""
    state = policy.initial_states(1)
    if policy.recurrent and len(frames):
        embeddings = embed_frames(policy, torch.as_tensor(frames).to(compute.device), compute)
        state = policy.sequence(embeddings.unsqueeze(1), state, None).hidden_states[-1]
    return state[0].cpu().numpy()


def described(alike: dict) -> str:
    """The measures in a line."""
    layers = ", ".join(f"{name} {value:.3f}" for name, value in alike["cka"].items())
    return (f"KL {alike['kl']:.3f} and {alike['kl_of_other']:.3f} nats, the same likeliest action "
            f"in {100 * alike['same_action']:.1f} %, correlation of values "
            f"{alike['value_correlation']:.3f}; CKA: {layers}")
