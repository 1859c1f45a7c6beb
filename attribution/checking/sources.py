"""Features and activations of an agent that are checked."""

from __future__ import annotations

import numpy as np
import torch

from attribution.attributing.attribution_files import (
    ATTRIBUTION_SCRIPT,
    AttributionFolder,
    LayerFeatures,
)
from attribution.attributing.flags import Opened
from attribution.attributing.layers import Cut
from attribution.attributing.recordings import batches, check_finite_frames
from attribution.attributing.reduction import cells_first
from common.errors import UserError
from interventions.resumed import CutPass


def feature_activations(opened: Opened, cut: Cut, features: LayerFeatures,
                        places: np.ndarray) -> np.ndarray:
    """Activations of features in rows of the recording.

    Args:
        places: episode and row of each (O, 2).

    Returns:
        float32 (O, H, W, F).

    Raises:
        UserError: if one is not finite; its frame is named.
    """
    half, found = CutPass(opened.policy, opened.compute, cut.layer.name), []
    with torch.no_grad():
        for batch in batches(places):
            rows = opened.recording.rows(batch)
            held = half.begin(rows.frames, torch.from_numpy(rows.entering)).activations
            held = held.cpu().numpy().reshape(len(batch), *cut.shape)
            check_finite_frames(held, batch, f"activations of the layer {cut.name}")
            found.append(features.reducer.activations(cells_first(held)).astype(
                np.float32).reshape(len(batch), *cut.shape[1:], -1))
    return np.concatenate(found)


def check_attributions(attributions: AttributionFolder, opened: Opened) -> None:
    """See that attributions are of this agent and recording.

    Raises:
        UserError: if they are not.
    """
    found = attributions.settings()
    for key, what, accepted in (
            ("agent_sha256", "agent", opened.agents),
            ("recording_sha256", "recording", {opened.recording.sha256})):
        if found.get(key) not in accepted:
            raise UserError(f"the attributions in {attributions.path} are of another {what}: its "
                            f"checksum is {str(found.get(key))[:12]}, not "
                            f"{opened.description[key][:12]}; make them again with "
                            f"{ATTRIBUTION_SCRIPT}")
