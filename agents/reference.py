"""Reference sets of pictures that an agent meets on levels of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import numpy as np

from agents.episodes import play_episodes
from common.devices import Compute
from common.env import EnvConfig, LevelEdit
from common.errors import UserError
from common.networks import Policy
from common.progress import with_progress
from interventions.reference import ReferenceSet

_SLOTS = 16


def played_reference(policy: Policy, compute: Compute, env: EnvConfig, measured: Collection[int],
                     size: int, seed: int, edit: LevelEdit | None = None) -> ReferenceSet:
    """One picture of each of ``size`` levels, at a random step of an episode of the agent.

    Args:
        policy: the agent, without patches.
        measured: seeds of the levels that are measured, of which none is used.
        seed: of levels, actions and steps.
        edit: of every level, as in the episodes that are measured.

    Raises:
        UserError: if the mode has no other levels.
    """
    anywhere = dataclasses.replace(env, start_level=0, num_levels=0)
    if len(anywhere.levels) < size + len(measured):
        raise UserError(f"the mode {env.distribution_mode} has one level alone, so there are no "
                        "others for a reference set")
    measured = set(measured)
    drawn = anywhere.draw_levels(size + len(measured), seed)
    levels = list(enumerate([level for level in drawn if level not in measured][:size]))
    frames, hidden_states = [], []
    episodes = play_episodes(policy, compute, env, levels, seed, _SLOTS, edit=edit)
    for episode in sorted(with_progress(episodes, size, "reference episode"),
                          key=lambda episode: episode.number):
        step = np.random.default_rng([seed, episode.number, 1]).integers(max(episode.length, 1))
        frames.append(episode.frames[step])
        hidden_states.append(episode.hidden_states[step])
    return ReferenceSet(np.stack(frames), np.stack(hidden_states),
                        {"of": "episodes on other levels", "seed": seed})
