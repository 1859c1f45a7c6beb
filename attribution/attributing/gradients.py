"""Plain gradients of an agent's outputs by the frame it sees.

Simonyan et al. (2013), "Deep inside convolutional networks", section 3. They say how an output
changes when a pixel gets a little brighter. They are no attributions: they start from no baseline
and add up to nothing, so that there is no gap to speak of.

Letters in shape comments: B frames, K outputs, H W pixels, D hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from agents.networks import Policy, to_images
from agents.outputs import Output
from attribution.attributing.recordings import Rows
from common.devices import Compute


def frame_gradients(policy: Policy, compute: Compute, outputs: Sequence[Output],
                    rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of outputs by frames, with what is remembered held fixed.

    Args:
        policy: its parameters need no gradients.
        compute: in float32.
        outputs: K of them.
        rows: B frames with the states that enter and the actions taken.

    Returns:
        Gradients float32 (K, B, H, W, 3), in units of the output a brightness from 0 to 1; and the
        outputs, float32 (K, B).
    """
    frames, entering, actions = (torch.from_numpy(each).to(compute.device)
                                 for each in (rows.frames, rows.entering, rows.actions))
    images = to_images(frames, compute.channels_last).requires_grad_()
    with torch.enable_grad():
        run = policy.step(policy.embed(images), entering)
        scalars = torch.stack([output(run, actions) for output in outputs])
    gradients = [torch.autograd.grad(scalar.sum(), images, retain_graph=True)[0]
                 for scalar in scalars]
    return (torch.stack(gradients).permute(0, 1, 3, 4, 2).contiguous().cpu().numpy(),
            scalars.detach().cpu().numpy())
