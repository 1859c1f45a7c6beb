"""The simulator: its data set, networks, losses, training, files, sampling, saliency, evaluation,
and the search for start vectors."""

from typing import TYPE_CHECKING

import common  # noqa: F401  selects matplotlib's backend before it is imported here
from common.exports import lazy_exports

if TYPE_CHECKING:
    from generative.imagining import compute_saliency, imagine, load_simulator, random_starts

__all__ = ["compute_saliency", "imagine", "load_simulator", "random_starts"]
__getattr__, __dir__ = lazy_exports(__name__, {
    "generative.imagining": ["compute_saliency", "imagine", "load_simulator", "random_starts"]})
