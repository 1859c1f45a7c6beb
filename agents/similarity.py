"""How alike two agents are: their policies, and the outputs of their layers.

Letters in shape comments: n pictures, F and G entries of two layers, A actions.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from agents.layers import all_layers
from agents.networks import Policy
from agents.reference_set import activations_of
from common.errors import UserError

LAYERS = ("resadd", "fc", "hidden_state")  # endings of those that are compared
_LOGITS, _VALUE = "fc_policy", "fc_value"


def linear_cka(x: Tensor, y: Tensor) -> float:
    """Linear centred kernel alignment of two sets of outputs on the same pictures.

    1 for the same up to rotation and one scale, 0 for unrelated ones (Kornblith et al. 2019,
    eq. 3). Few pictures of many entries make it larger.

    Args:
        x, y: (n, F) and (n, G).

    Returns:
        NaN if one of them never varies.
    """
    x, y = (each.double() - each.double().mean(dim=0) for each in (x, y))
    one, other = x @ x.T, y @ y.T  # (n, n)
    norms = one.norm() * other.norm()
    return float((one * other).sum() / norms) if norms > 0 else float("nan")


def similarity(policy: Policy, other: Policy, frames: np.ndarray, hidden_states: np.ndarray,
               of_other: np.ndarray) -> dict:
    """How alike two agents are on the same pictures.

    Args:
        frames: uint8 (n, H, W, 3), one an episode.
        hidden_states: that enter the agent at these frames (n, D).
        of_other: those that enter the other one.

    Returns:
        ``kl`` and ``kl_of_other``: mean of KL(agent ‖ other) and KL(other ‖ agent) in nats;
        ``same_action``: share of pictures with the same likeliest action; ``value_correlation``;
        ``cka``: by layer, see :func:`linear_cka`, of layers that both have.

    Raises:
        UserError: if the agents have other numbers of actions.
    """
    if policy.fc_policy.out_features != other.fc_policy.out_features:
        raise UserError(f"the agents have {policy.fc_policy.out_features} and "
                        f"{other.fc_policy.out_features} actions")
    theirs = {layer.name for layer in all_layers(other)}
    names = [layer.name for layer in all_layers(policy)
             if layer.name in theirs and layer.name.rpartition(".")[2] in LAYERS]
    ours, others = (activations_of(each, frames, [*names, _LOGITS, _VALUE], states)
                    for each, states in ((policy, hidden_states), (other, of_other)))
    p, q = (torch.log_softmax(each[_LOGITS].double(), dim=1) for each in (ours, others))  # (n, A)
    values = np.stack([each[_VALUE].double().flatten().cpu().numpy() for each in (ours, others)])
    return {"kl": float((p.exp() * (p - q)).sum(dim=1).mean()),
            "kl_of_other": float((q.exp() * (q - p)).sum(dim=1).mean()),
            "same_action": float((p.argmax(dim=1) == q.argmax(dim=1)).double().mean()),
            "value_correlation": float(np.corrcoef(values)[0, 1]),
            "cka": {name: linear_cka(ours[name].flatten(1), others[name].flatten(1))
                    for name in names}}
