"""Reference sets of pictures that an agent meets on levels of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from agents.episodes import Episode, PlayOptions, play_episodes
from agents.networks import Policy
from agents.reference_set import ReferenceSet
from common.devices import Compute
from common.errors import UserError
from common.progress import with_progress
from envs.procgen_env import EnvConfig, LevelEdit

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
    for episode, step in random_steps(policy, compute, env, levels, seed, "reference", edit):
        frames.append(episode.frames[step])
        hidden_states.append(episode.hidden_states[step])
    return ReferenceSet(np.stack(frames), np.stack(hidden_states),
                        {"of": "episodes on other levels", "seed": seed})


def random_steps(policy: Policy, compute: Compute, env: EnvConfig,
                 levels: Sequence[tuple[int, int]], seed: int, what: str,
                 edit: LevelEdit | None = None) -> Iterator[tuple[Episode, int]]:
    """An episode of the agent on each level, and a random step of it, in the order of numbers.

    Args:
        levels, edit: as in ``play_episodes``.
        seed: of actions and steps.
        what: kind of episode, for the progress bar.
    """
    episodes = play_episodes(policy, compute, env, levels, seed, _SLOTS,
                             PlayOptions(edit=edit))
    for episode in sorted(with_progress(episodes, len(levels), f"{what} episode"),
                          key=lambda episode: episode.number):
        yield episode, int(np.random.default_rng([seed, episode.number, 1]).integers(
            max(episode.length, 1)))
