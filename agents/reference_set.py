"""A reference set: pictures of other levels, over which means and spreads of activations are taken.

Letters in shape comments: n pictures of the set, C channels and P cells of a layer, D hidden state.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from agents.hooks import cached, disabled
from agents.layers import Layer
from agents.networks import Policy, to_images
from agents.rollout_files import RolloutFolder
from common.errors import UserError

PICTURES_A_PASS = 256
MIN_PICTURES = 2


@torch.no_grad()
def activations_of(policy: Policy, frames: np.ndarray | Tensor, layers: Sequence[str],
                   hidden_states: np.ndarray | Tensor | None = None) -> dict[str, Tensor]:
    """Outputs of layers on frames, of the network without patches and in float32.

    Args:
        frames: uint8 (n, H, W, 3).
        layers: their names.
        hidden_states: that enter the agent at these frames (n, D); that of an episode's start if
            not given.

    Returns:
        By name, (n, *shape), where the policy is.
    """
    frames = torch.as_tensor(frames)
    if hidden_states is None:
        hidden_states = policy.initial_states(len(frames))
    hidden_states = torch.as_tensor(hidden_states, device=policy.device)
    with (disabled(policy), cached(policy, layers, on=policy.device) as activations,
          torch.autocast(policy.device.type, enabled=False)):
        for some, entering in zip(frames.split(PICTURES_A_PASS),
                                  hidden_states.split(PICTURES_A_PASS)):
            policy.step(policy.embed(to_images(some.to(policy.device))), entering)
    return dict(activations)


class ReferenceSet:
    """Pictures to compare activations with: of levels that are not those measured.

    Args:
        frames: uint8 (n, H, W, 3), n at least 2.
        hidden_states: that enter the agent at these frames (n, D); that of an episode's start if
            not given, which is far from the later ones of an agent with a GRU.
        description: where they come from, for metadata.

    Raises:
        UserError: if there are fewer than two, or not as many states.
    """

    def __init__(self, frames: np.ndarray, hidden_states: np.ndarray | None = None,
                 description: dict | None = None):
        if len(frames) < MIN_PICTURES:
            raise UserError(f"a reference set needs at least {MIN_PICTURES} pictures, not "
                            f"{len(frames)}")
        if hidden_states is not None and len(hidden_states) != len(frames):
            raise UserError(f"a reference set of {len(frames)} pictures has "
                            f"{len(hidden_states)} hidden states")
        self.frames, self.hidden_states = frames, hidden_states
        self.description = {**(description or {}), "pictures": len(frames)}
        self._moments: WeakKeyDictionary[Policy, dict] = WeakKeyDictionary()

    def mean(self, policy: Policy, layer: Layer) -> Tensor:
        """Mean of each unit over the pictures, of the layer's shape."""
        return self._of(policy, layer)[0]

    def std(self, policy: Policy, layer: Layer) -> Tensor:
        """Standard deviation of each unit, of the layer's shape."""
        return self._of(policy, layer)[1]

    def rms(self, policy: Policy, layer: Layer) -> float:
        """Root mean square of all the layer's units."""
        return self._of(policy, layer)[2]

    def channel_means(self, policy: Policy, layer: Layer) -> Tensor:
        """Mean of each channel over pictures and cells (C, 1)."""
        return self.mean(policy, layer).reshape(layer.shape[0], -1).mean(dim=1, keepdim=True)

    def channel_stds(self, policy: Policy, layer: Layer) -> Tensor:
        """Standard deviation of each channel over pictures and cells (C, 1)."""
        # Of all values: the mean variance of the cells and the variance of their means.
        mean, std = (values.reshape(layer.shape[0], -1) for values in (
            self.mean(policy, layer), self.std(policy, layer)))
        variance = std.square().mean(dim=1) + mean.var(dim=1, correction=0)
        return variance.sqrt().unsqueeze(1)

    def drawn(self, number: int, size: int, seed: int) -> np.ndarray:
        """Pictures drawn for one target, with replacement: uint8 (size, H, W, 3).

        Args:
            number: of the target, such as its level seed; with ``seed`` decides the draw.
        """
        rng = np.random.default_rng([seed, number])
        return self.frames[rng.integers(len(self.frames), size=size)]

    def _of(self, policy: Policy, layer: Layer) -> tuple[Tensor, Tensor, float]:
        found = self._moments.setdefault(policy, {})
        if layer.name not in found:
            values = activations_of(policy, self.frames, [layer.name],
                                    self.hidden_states)[layer.name].double()
            found[layer.name] = (values.mean(dim=0).float(),
                                 values.std(dim=0, correction=0).float(),
                                 float(values.square().mean().sqrt()))
        return found[layer.name]


def recorded_reference(folder: RolloutFolder, without: Collection[int], size: int,
                       seed: int) -> ReferenceSet:
    """Random pictures of a recording.

    Args:
        without: numbers of episodes whose pictures are measured, of which none is used.

    Raises:
        UserError: if the recording is missing or damaged, or has no other episodes.
    """
    episodes = sorted(set(folder.finished()) - set(without))
    if not episodes:
        raise UserError(f"all episodes of {folder.path} are simulated from, so it has none left "
                        "for a reference set; record more, or simulate fewer")
    rng = np.random.default_rng(seed)
    frames, hidden_states = [], []
    for number in sorted(rng.choice(episodes, size)):
        episode = folder.episode(int(number))
        step = rng.integers(max(len(episode.frames) - 1, 1))
        frames.append(episode.frames[step])
        hidden_states.append(episode.hidden_states[step])
    return ReferenceSet(np.stack(frames), np.stack(hidden_states),
                        {"of": "episodes of the recording", "seed": seed})
