"""Agents: networks, agent files, hooks, recordings, PPO and training runs."""

from typing import TYPE_CHECKING

import common  # noqa: F401  selects matplotlib's backend before it is imported here
from common.exports import lazy_exports

if TYPE_CHECKING:
    from agents.agent_file import load_agent
    from agents.frames import as_frames, as_images
    from agents.hooks import cached, patched
    from agents.patch import Patch
    from agents.recording import record
    from agents.replay import level_states
    from agents.rollout_files import RolloutFolder
    from agents.testbed import Condition, Testbed, evaluate
    from agents.wrapping import wrap
    from common.devices import Compute

__all__ = [
    "Compute", "Condition", "Patch", "RolloutFolder", "Testbed", "as_frames", "as_images",
    "cached", "evaluate", "level_states", "load_agent", "patched", "record", "wrap",
]
__getattr__, __dir__ = lazy_exports(__name__, {
    "agents.agent_file": ["load_agent"],
    "agents.frames": ["as_frames", "as_images"],
    "agents.hooks": ["cached", "patched"],
    "agents.patch": ["Patch"],
    "agents.recording": ["record"],
    "agents.replay": ["level_states"],
    "agents.rollout_files": ["RolloutFolder"],
    "agents.testbed": ["Condition", "Testbed", "evaluate"],
    "agents.wrapping": ["wrap"],
    "common.devices": ["Compute"]})
