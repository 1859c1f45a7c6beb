"""Procgen: environments, level states and the objects in them."""

from typing import TYPE_CHECKING

import common  # noqa: F401  selects matplotlib's backend before it is imported here
from common.exports import lazy_exports

if TYPE_CHECKING:
    from envs.level_state import LevelState
    from envs.objects import in_view, objects_of, removed, single_objects, undrawn
    from envs.procgen_env import EnvConfig, ProcgenVectorEnv, StateView

__all__ = [
    "EnvConfig", "LevelState", "ProcgenVectorEnv", "StateView", "in_view", "objects_of", "removed",
    "single_objects", "undrawn",
]
__getattr__, __dir__ = lazy_exports(__name__, {
    "envs.level_state": ["LevelState"],
    "envs.objects": ["in_view", "objects_of", "removed", "single_objects", "undrawn"],
    "envs.procgen_env": ["EnvConfig", "ProcgenVectorEnv", "StateView"]})
