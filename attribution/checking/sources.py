"""Features and activations of an agent that are checked."""

from __future__ import annotations

import numpy as np
import torch

from attribution.context import AttributionContext
from attribution.layers import Bottleneck
from attribution.recordings import batches, check_finite_frames
from attribution.reduction import cells_first
from attribution.results import (
    ATTRIBUTION_SCRIPT,
    AttributionFolder,
    LayerFeatures,
)
from common.errors import UserError
from interventions.resumed import CutPass


def feature_activations(context: AttributionContext, bottleneck: Bottleneck,
                        features: LayerFeatures,
                        places: np.ndarray) -> np.ndarray:
    """Activations of features in rows of the recording.

    Args:
        places: episode and row of each (O, 2).

    Returns:
        float32 (O, H, W, F).

    Raises:
        UserError: if one is not finite; its frame is named.
    """
    half, found = CutPass(context.policy, context.compute, bottleneck.layer.name), []
    with torch.no_grad():
        for batch in batches(places):
            rows = context.recording.read(batch)
            held = half.begin(rows.frames, torch.from_numpy(rows.entering)).activations
            held = held.cpu().numpy().reshape(len(batch), *bottleneck.shape)
            check_finite_frames(held, batch, f"activations of the layer {bottleneck.name}")
            found.append(features.reducer.activations(cells_first(held)).astype(
                np.float32).reshape(len(batch), *bottleneck.shape[1:], -1))
    return np.concatenate(found)


def check_attributions(attributions: AttributionFolder, context: AttributionContext) -> None:
    """See that attributions are of this agent and recording.

    Raises:
        UserError: if they are not.
    """
    found = attributions.settings()
    for key, what, accepted in (
            ("agent_sha256", "agent", context.agents),
            ("recording_sha256", "recording", {context.recording.sha256})):
        if found.get(key) not in accepted:
            raise UserError(f"the attributions in {attributions.path} are of another {what}: its "
                            f"checksum is {str(found.get(key))[:12]}, not "
                            f"{context.provenance[key][:12]}; make them again with "
                            f"{ATTRIBUTION_SCRIPT}")
