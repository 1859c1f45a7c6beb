"""Similarity of the policies, values and activations of two agents.

Letters in shape comments: n frames, F and G entries of two layers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from agents.acting import embed_frames
from agents.layers import HEADS, all_layers
from agents.networks import Policy
from agents.reference_set import activations_of, random_steps
from common.devices import Compute
from envs.procgen_env import EnvConfig, LevelEdit

LAYERS = ("resadd", "fc", "hidden_state")  # last parts of the names of compared layers


def linear_cka(x: Tensor, y: Tensor) -> float:
    """Compute the linear centred kernel alignment (Kornblith et al. 2019, eq. 3) of activations.

    It is 1 if the activations are equal up to translation, rotation and scale, and 0 if they are
    uncorrelated. It is biased upwards if there are few frames and many entries.

    Args:
        x, y: activations (n, F) and (n, G).

    Returns:
        Alignment between 0 and 1; NaN if ``x`` or ``y`` is constant.
    """
    x, y = (values.double() - values.double().mean(dim=0) for values in (x, y))
    gram_x, gram_y = x @ x.T, y @ y.T  # (n, n)
    norms = gram_x.norm() * gram_y.norm()
    return float((gram_x * gram_y).sum() / norms) if norms > 0 else float("nan")


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Compute KL(p ‖ q) in nats (…) from log-probabilities (…, A)."""
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def similarity(policy: Policy, other: Policy, frames: np.ndarray, hidden_states: np.ndarray,
               other_states: np.ndarray) -> dict:
    """Compare two agents on the same frames.

    Args:
        frames: uint8 (n, H, W, 3), one per episode.
        hidden_states: states that enter the agent at these frames (n, D).
        other_states: states that enter the other agent (n, D of that agent).

    Returns:
        Measures by name:

        - ``kl``, ``kl_of_other``: mean of KL(agent ‖ other) and of KL(other ‖ agent), in nats.
        - ``same_action``: fraction of frames with the same most likely action.
        - ``value_correlation``: correlation of the values.
        - ``cka``: :func:`linear_cka` by layer name, for the layers of both agents whose names end
          in one of ``LAYERS``.
    """
    other_layers = {layer.name for layer in all_layers(other)}
    names = [layer.name for layer in all_layers(policy)
             if layer.name in other_layers and layer.name.rpartition(".")[2] in LAYERS]
    ours, theirs = (activations_of(agent, frames, [*names, *HEADS], states)
                    for agent, states in ((policy, hidden_states), (other, other_states)))
    policy_head, value_head = HEADS
    p, q = (torch.log_softmax(outputs[policy_head].double(), dim=1)
            for outputs in (ours, theirs))  # (n, A)
    values = np.stack([outputs[value_head].double().flatten().cpu().numpy()
                       for outputs in (ours, theirs)])
    return {"kl": float(kl_divergence(p, q).mean()),
            "kl_of_other": float(kl_divergence(q, p).mean()),
            "same_action": float((p.argmax(dim=1) == q.argmax(dim=1)).double().mean()),
            "value_correlation": float(np.corrcoef(values)[0, 1]),
            "cka": {name: linear_cka(ours[name].flatten(1), theirs[name].flatten(1))
                    for name in names}}


def compare_agents(policy: Policy, other: Policy, compute: Compute, env: EnvConfig,
                   num_levels: int, seed: int, edit: LevelEdit | None = None) -> dict:
    """Compare two agents on one frame per level, from a random step of an episode of ``policy``.

    The hidden state of each agent results from the preceding frames of the episode.

    Args:
        seed: seed of levels, actions and steps.
        edit: edit of every level before it is played.

    Returns:
        Measures as returned by :func:`similarity`.
    """
    levels = list(enumerate(env.draw_levels(num_levels, seed)))
    frames, states, other_states = [], [], []
    for episode, step in random_steps(policy, compute, env, levels, seed, "compared", edit):
        frames.append(episode.frames[step])
        states.append(episode.hidden_states[step])
        other_states.append(_state_after(other, compute, episode.frames[:step]))
    return similarity(policy, other, np.stack(frames), np.stack(states), np.stack(other_states))


@torch.no_grad()
def _state_after(policy: Policy, compute: Compute, frames: np.ndarray) -> np.ndarray:
    """Return an agent's hidden state (D,) after the first T frames (T, H, W, 3) of an episode."""
    state = policy.initial_states(1)
    if policy.recurrent and len(frames):
        embeddings = embed_frames(policy, torch.as_tensor(frames).to(compute.device), compute)
        state = policy.sequence(embeddings.unsqueeze(1), state, None).hidden_states[-1]
    return state[0].cpu().numpy()


def format_similarity(measures: dict) -> str:
    """Format the measures of :func:`similarity` as one line."""
    layers = ", ".join(f"{name} {value:.3f}" for name, value in measures["cka"].items())
    return (f"KL {measures['kl']:.3f} and {measures['kl_of_other']:.3f} nats, same most likely "
            f"action in {100 * measures['same_action']:.1f} %, correlation of values "
            f"{measures['value_correlation']:.3f}; CKA: {layers}")
