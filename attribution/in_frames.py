"""Attribute an agent's outputs in given frames, for interactive use.

``python -m attribution.attribute`` attributes and stores outputs along recorded trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from agents.frames import as_images
from agents.networks import Policy
from agents.outputs import TAKEN, VALUE, outputs_named
from attribution.integrated_gradients import Attributions, Integration, LayerIntegratedGradients
from attribution.layers import find_bottlenecks
from common.devices import Compute
from common.errors import UserError


def attribute_to_layer(policy: Policy, frames: Any, layer: str, *,
                       outputs: Sequence[str] = (VALUE,), hidden_states: Any = None,
                       actions: Sequence[int] | np.ndarray | None = None,
                       tolerance: float = 0.01) -> Attributions:
    """Attribute outputs of an agent to a layer's activations, by integrated gradients.

    See ``attribution.integrated_gradients`` for the method; the baseline is zero.

    Args:
        policy: the agent; gradients of its parameters are switched off.
        frames: B frames, see ``agents.frames.as_images``.
        layer: short name (block1, block2 or block3 of IMPALA) or path of a layer that every path
            from frame to outputs passes through.
        outputs: names of K outputs, see ``agents.outputs.output_names``.
        hidden_states: states that enter the agent at these frames (B, D); None for initial states.
        actions: actions taken (B,), for the output ``taken``.
        tolerance: relative completeness error above which paths are refined.

    Returns:
        ``values``: attributions, float32 (K, B, C, H, W), which sum to ``outputs - baselines``
        (K, B) up to the relative completeness errors, ``errors``.

    Raises:
        UserError: if there is no such layer or output, or the arguments do not fit together.

    Example::

        >>> frames = recording.episode(0).frames[:2]
        >>> result = attribute_to_layer(policy, frames, "block2", outputs=["value"])
        >>> change = result.values.sum(axis=(2, 3, 4)), result.outputs - result.baselines
    """
    images, scalars = as_images(frames, 1), outputs_named(outputs)
    if actions is None:
        if TAKEN in outputs:
            raise UserError(f"the output '{TAKEN}' needs the actions")
        actions = np.zeros(len(images), np.int64)
    entering = (policy.initial_states(len(images)).cpu().numpy() if hidden_states is None
                else np.asarray(torch.as_tensor(hidden_states).detach().cpu(), np.float32))
    expected = (len(images), policy.hidden_state_size)
    if entering.shape != expected or len(actions) != len(images):
        raise UserError(f"{len(images)} frames need hidden states of the shape {expected} and as "
                        f"many actions, not {entering.shape} and {len(actions)}")
    [bottleneck] = find_bottlenecks(policy, [layer])
    attributor = LayerIntegratedGradients(policy, Compute(policy.device, bfloat16=False),
                                          bottleneck, scalars, Integration(tolerance=tolerance))
    prefix, taken = attributor.run_prefix(images, entering), np.asarray(actions, np.int64)
    return attributor.attribute(prefix, taken, attributor.outputs_at(prefix, taken).std(axis=1))
