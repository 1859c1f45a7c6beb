"""Reference sets: frames from which means and standard deviations of activations are computed.

The frames come from levels other than those on which a study measures effects.

Letters in shape comments: n frames of the set; C channels and P cells of a layer, *shape a layer's
shape for one frame.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from agents.agent_file import read_origin
from agents.episodes import Episode, PlayOptions, play_episodes
from agents.hooks import cached, disabled
from agents.layers import Layer
from agents.networks import Policy, to_images
from agents.rollout_files import EpisodeArrays, RolloutFolder
from common.devices import Compute
from common.errors import UserError
from common.progress import with_progress
from envs.procgen_env import EnvConfig, LevelEdit

FRAMES_PER_BATCH = 256
MIN_FRAMES = 2
_NUM_SLOTS = 16


@torch.no_grad()
def activations_of(policy: Policy, frames: np.ndarray | Tensor, layers: Sequence[str],
                   hidden_states: np.ndarray | Tensor | None = None) -> dict[str, Tensor]:
    """Compute activations of layers on frames, without patches and in float32.

    Args:
        frames: uint8 (n, H, W, 3).
        layers: names of the layers.
        hidden_states: states that enter the agent at these frames (n, D); the initial state if
            not given.

    Returns:
        Activations (n, *shape) by name, on the policy's device.
    """
    frames = torch.as_tensor(frames)
    if hidden_states is None:
        hidden_states = policy.initial_states(len(frames))
    hidden_states = torch.as_tensor(hidden_states, device=policy.device)
    with (disabled(policy), cached(policy, layers, on=policy.device) as activations,
          torch.autocast(policy.device.type, enabled=False)):
        for batch, states in zip(frames.split(FRAMES_PER_BATCH),
                                 hidden_states.split(FRAMES_PER_BATCH)):
            policy.step(policy.embed(to_images(batch.to(policy.device))), states)
    return dict(activations)


class ReferenceSet:
    """Frames from which the mean and standard deviation of a layer's activations are computed.

    Args:
        frames: uint8 (n, H, W, 3), n at least 2.
        hidden_states: states that enter the agent at these frames (n, D); by default the initial
            state, which in a GRU differs strongly from later states.
        description: origin of the frames, for metadata.

    Raises:
        UserError: if there are fewer than two frames.
    """

    def __init__(self, frames: np.ndarray, hidden_states: np.ndarray | None = None,
                 description: dict | None = None):
        if len(frames) < MIN_FRAMES:
            raise UserError(f"a reference set needs at least {MIN_FRAMES} frames, not "
                            f"{len(frames)}")
        self.frames, self.hidden_states = frames, hidden_states
        self.description = {**(description or {}), "pictures": len(frames)}
        self._moments: WeakKeyDictionary[Policy, dict] = WeakKeyDictionary()

    def mean(self, policy: Policy, layer: Layer) -> Tensor:
        """Return the mean of each unit over the frames, in the layer's shape."""
        return self._of(policy, layer)[0]

    def std(self, policy: Policy, layer: Layer) -> Tensor:
        """Return the standard deviation of each unit over the frames, in the layer's shape."""
        return self._of(policy, layer)[1]

    def rms(self, policy: Policy, layer: Layer) -> float:
        """Return the root mean square of the activations, over all frames and units."""
        return self._of(policy, layer)[2]

    def channel_means(self, policy: Policy, layer: Layer) -> Tensor:
        """Return the mean of each channel over frames and cells (C, 1)."""
        return self.mean(policy, layer).reshape(layer.shape[0], -1).mean(dim=1, keepdim=True)

    def channel_stds(self, policy: Policy, layer: Layer) -> Tensor:
        """Return the standard deviation of each channel over frames and cells (C, 1)."""
        # Law of total variance: mean variance of the cells plus variance of their means.
        mean, std = (values.reshape(layer.shape[0], -1) for values in (
            self.mean(policy, layer), self.std(policy, layer)))
        variance = std.square().mean(dim=1) + mean.var(dim=1, correction=0)
        return variance.sqrt().unsqueeze(1)

    def drawn(self, number: int, size: int, seed: int) -> np.ndarray:
        """Return frames drawn with replacement, uint8 (size, H, W, 3).

        Args:
            number: number of the level or simulation that the frames are drawn for.
            size: number of frames.
            seed: seed; together with ``number`` it determines the draw.
        """
        rng = np.random.default_rng([seed, number])
        return self.frames[rng.integers(len(self.frames), size=size)]

    def _of(self, policy: Policy, layer: Layer) -> tuple[Tensor, Tensor, float]:
        moments = self._moments.setdefault(policy, {})
        if layer.name not in moments:
            values = activations_of(policy, self.frames, [layer.name],
                                    self.hidden_states)[layer.name].double()
            moments[layer.name] = (values.mean(dim=0).float(),
                                   values.std(dim=0, correction=0).float(),
                                   float(values.square().mean().sqrt()))
        return moments[layer.name]


def recorded_reference(folder: RolloutFolder, without: Collection[int], size: int,
                       seed: int) -> ReferenceSet:
    """Create a reference set from random frames of a recording.

    Args:
        without: numbers of the measured episodes, which are excluded.
        size: number of frames; each is drawn from a random episode, without its terminal frame.

    Raises:
        UserError: if the recording is missing or damaged, or has no episodes left.
    """
    episodes = sorted(set(folder.finished()) - set(without))
    if not episodes:
        raise UserError(f"simulations start from all episodes of {folder.path}, so none is left "
                        "for a reference set; record more episodes, or simulate fewer")
    rng = np.random.default_rng(seed)
    chosen = map(folder.episode, map(int, sorted(rng.choice(episodes, size))))
    return _reference(((episode, rng.integers(max(len(episode.frames) - 1, 1)))
                       for episode in chosen), {"of": "episodes of the recording", "seed": seed})


def played_reference(policy: Policy, compute: Compute, env: EnvConfig, measured: Collection[int],
                     size: int, seed: int, edit: LevelEdit | None = None) -> ReferenceSet:
    """Create a reference set by playing one episode per level and drawing a random frame of each.

    Args:
        policy: the agent, without patches.
        env: the game; its range of levels is ignored.
        measured: seeds of the measured levels, which are excluded.
        size: number of levels and frames.
        seed: seed of levels, actions and steps.
        edit: edit of every level, as in the measured episodes.

    Raises:
        UserError: if the game has too few levels that are not measured.
    """
    anywhere = dataclasses.replace(env, start_level=0, num_levels=0)
    if len(anywhere.levels) < size + len(measured):
        raise UserError(f"the mode {env.distribution_mode} has only one level, so none is left for "
                        "a reference set")
    excluded = set(measured)
    drawn = anywhere.draw_levels(size + len(excluded), seed)
    levels = list(enumerate([level for level in drawn if level not in excluded][:size]))
    return _reference(random_steps(policy, compute, env, levels, seed, "reference", edit),
                      {"of": "episodes on other levels", "seed": seed})


def _reference(steps: Iterable[tuple[Episode | EpisodeArrays, int]],
               description: dict) -> ReferenceSet:
    """Create a reference set from one step of each episode.

    Args:
        steps: pairs of an episode and the number of a step.
        description: settings that the reference set depends on.
    """
    frames, hidden_states = zip(*((episode.frames[step], episode.hidden_states[step])
                                  for episode, step in steps))
    return ReferenceSet(np.stack(frames), np.stack(hidden_states), description)


def random_steps(policy: Policy, compute: Compute, env: EnvConfig,
                 levels: Sequence[tuple[int, int]], seed: int, what: str,
                 edit: LevelEdit | None = None) -> Iterator[tuple[Episode, int]]:
    """Play one episode on each level; then yield each with a random step before its terminal step.

    Args:
        levels: pairs of episode number and level seed.
        what: kind of episode, for the progress bar.
        edit: optional edit of every level before it is played.

    Yields:
        Episode and step, sorted by episode number.
    """
    episodes = play_episodes(policy, compute, env, levels, seed, _NUM_SLOTS,
                             PlayOptions(edit=edit))
    for episode in sorted(with_progress(episodes, len(levels), f"{what} episode"),
                          key=lambda episode: episode.number):
        yield episode, int(np.random.default_rng([seed, episode.number, 1]).integers(
            max(episode.length, 1)))


def game_name(agent_file: Path, data_dir: str | Path) -> str:
    """Return the game of an agent as its file says, or else as its recording says, or ""."""
    return read_origin(agent_file).env_name or RolloutFolder(Path(data_dir)).game
