"""The runs of an arm of a comparison on real levels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from torch import Tensor

from agents.episodes import Episode, PlayOptions, play_episodes
from agents.hooks import ActivePatches, patched
from agents.networks import Policy
from agents.patch import Patch
from common.devices import Compute
from common.progress import with_progress
from envs.procgen_env import EnvConfig, LevelEdit
from interventions.alterations import Runner
from interventions.files import ArmRuns
from interventions.patch_text import warn_of_unused


def real_levels(policy: Policy, compute: Compute, env: EnvConfig,
                levels: Sequence[tuple[int, int]], seed: int, num_slots: int,
                edit: LevelEdit | None = None) -> Runner:
    """Plays the same levels in every arm, with actions drawn from the policy itself.

    Args:
        levels, seed, num_slots, edit: see ``play_episodes``.
    """
    def run(patches: Sequence[Patch], std: Mapping[str, Tensor]) -> ArmRuns:
        with patched(policy, patches, std) as scope:
            episodes = play_episodes(policy, compute, env, levels, seed, num_slots,
                                     PlayOptions(edit=edit, keep_frames=False))
            runs = played(with_progress(episodes, len(levels), "episode"), scope)
        warn_of_unused(scope)
        return runs
    return run


def played(episodes: Iterable[Episode], scope: ActivePatches) -> ArmRuns:
    """The runs of one arm on real levels, in the order of the episodes' numbers."""
    episodes = sorted(episodes, key=lambda episode: episode.number)
    # The last row is no step of the agent's; the reward of a step is in the row after it.
    return ArmRuns(
        np.array([episode.level_seed for episode in episodes], dtype=np.int64),
        np.array([episode.length for episode in episodes]),
        np.array([episode.level_complete for episode in episodes], dtype=np.float32),
        *(np.concatenate(parts) for parts in zip(*(
            (episode.actions[:-1], episode.values[:-1], episode.rewards[1:])
            for episode in episodes))),
        *map(np.array, scope.total_change()))
