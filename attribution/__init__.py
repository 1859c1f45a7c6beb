"""Attribution of an agent's outputs to the activations and features of its layers.

``from attribution import run`` gives the entry point of the package that was published with
"Understanding RL Vision".
"""

from typing import TYPE_CHECKING

import common  # noqa: F401  selects matplotlib's backend before it is imported here
from common.exports import lazy_exports

if TYPE_CHECKING:
    from attribution.in_frames import attribute_to_layer
    from attribution.published_run import run

__all__ = ["attribute_to_layer", "run"]
__getattr__, __dir__ = lazy_exports(__name__, {
    "attribution.in_frames": ["attribute_to_layer"],
    "attribution.published_run": ["run"]})
