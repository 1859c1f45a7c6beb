"""Interventions on the agent's layers and hidden state, their controls, and their effects."""

from typing import TYPE_CHECKING

import common  # noqa: F401  selects matplotlib's backend before it is imported here
from common.exports import lazy_exports

if TYPE_CHECKING:
    from interventions.conditions import compare_patches
    from interventions.patch_text import parse_patch
    from interventions.probes import probe
    from interventions.vectors import steering_vector

__all__ = ["compare_patches", "parse_patch", "probe", "steering_vector"]
__getattr__, __dir__ = lazy_exports(__name__, {
    "interventions.conditions": ["compare_patches"],
    "interventions.patch_text": ["parse_patch"],
    "interventions.probes": ["probe"],
    "interventions.vectors": ["steering_vector"]})
