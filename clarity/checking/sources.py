"""Features and activations of an agent that are checked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from clarity.attributing.clarity_files import (
    ATTRIBUTION_SCRIPT,
    FEATURES_SCRIPT,
    AttributionFolder,
    FeaturesFolder,
    LayerFeatures,
)
from clarity.attributing.flags import Opened
from clarity.attributing.layers import Cut
from clarity.attributing.recordings import batches, check_finite_frames
from clarity.attributing.reduction import cells_first
from common.errors import UserError
from interventions.resumed import CutPass


def features_of(path: Path, cut: Cut, opened: Opened) -> LayerFeatures:
    """The features of a layer of an agent.

    Raises:
        UserError: if they are missing, damaged, or of another agent or layer.
    """
    features = FeaturesFolder(path, cut.name).read()
    found, ours = features.settings.get("agent_sha256"), opened.description["agent_sha256"]
    if found != ours:
        raise UserError(f"the features in {path / cut.name} are of the agent {str(found)[:12]}, "
                        f"and this one is {ours[:12]}; find its own with {FEATURES_SCRIPT}")
    if (features.settings.get("layer") != cut.layer.name
            or features.mean_activations.shape != cut.shape):
        raise UserError(f"the features in {path / cut.name} are of the layer "
                        f"{features.settings.get('layer')}, not of {cut.layer.name}; find them "
                        f"again with {FEATURES_SCRIPT}")
    return features


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
    for key, what in (("agent_sha256", "agent"), ("recording_sha256", "recording")):
        if found.get(key) != opened.description[key]:
            raise UserError(f"the attributions in {attributions.path} are of another {what}: its "
                            f"checksum is {str(found.get(key))[:12]}, not "
                            f"{opened.description[key][:12]}; make them again with "
                            f"{ATTRIBUTION_SCRIPT}")
