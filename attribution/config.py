"""Folder of the attribution scripts, and parameters of the pipeline's attribution stages: the
sections ``attribution`` and ``failure_causes`` of ``hyperparams/interpreting_configs.yml``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar

ANALYSES = Path("analysis") / "attribution"  # contains the default folder of each script


@dataclasses.dataclass(frozen=True)
class AttributionConfig:
    """Size of the recording, layers and outputs to attribute, and checks of the attributions.

    Attributes:
        num_episodes: number of recorded episodes.
        num_observations: number of frames from which features are found.
        nmf_features: number of features per layer.
        num_trajectories, num_steps: number of trajectories, and of steps per trajectory.
        layers: short names of the layers; None for all layers with short names.
        outputs: names of the outputs.
        num_masked: number of frames whose objects are used to name the features.
        checks: names of the checks, as in ``attribution.checks --checks``.
        num_checked: number of frames in which attributions are checked.
        num_maps: number of pairs of a frame and an object whose effect is predicted by the agent
            alone and through the simulator; 0 for no comparison.
        compare_activations: whether to also find features by factorising activations instead of
            attributions, and score them for comparison.
    """

    section: ClassVar[str] = "attribution"

    num_episodes: int
    num_observations: int
    nmf_features: int
    num_trajectories: int
    num_steps: int
    layers: tuple[str, ...] | None
    outputs: tuple[str, ...]
    num_masked: int
    checks: tuple[str, ...]
    num_checked: int
    num_maps: int
    compare_activations: bool


@dataclasses.dataclass(frozen=True)
class FailureCausesConfig:
    """Features to ablate, hazards to make invisible, and numbers of levels and controls.

    Attributes:
        hazards: names of the hazards to which edits should blind the agent; hazards that the game
            does not have are ignored.
        choosing_episodes: number of candidate levels on which these edits are chosen.
        layer, feature: short name of the layer and number of the feature, from 0, to ablate if the
            game has none of the hazards.
        invisible: names of the hazards that are made invisible, each in a condition of its own;
            hazards that the game does not have are ignored.
        num_episodes: number of levels that are played under every condition.
        num_controls: number of random edits of the same size per edited agent.
        num_films: maximum number of films per condition.
        reference_size: number of frames on which the sizes of edits are measured.
    """

    section: ClassVar[str] = "failure_causes"

    hazards: tuple[str, ...]
    choosing_episodes: int
    layer: str
    feature: int
    invisible: tuple[str, ...]
    num_episodes: int
    num_controls: int
    num_films: int
    reference_size: int
