"""The simulator as an environment: whatever plays the real game also plays in the simulator."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from agents.episodes import PlayOptions, Run, play_episodes
from agents.frames import as_images
from common.devices import Compute
from common.video import FULL_REWARD
from generative.batches import EnvState
from generative.networks import Draw, LatentSampler, clamp_image
from generative.simulator import Simulator, Start
from generative.squares import World
from generative.start_worlds import recorded_starts, rounded, world_seeds


@dataclasses.dataclass(frozen=True, eq=False)
class Frames:
    """B simulated episodes after a step.

    Attributes:
        state: state of the simulated environment.
        images: frames in [0, 1] (B, C, H, W).
        ends: largest probability so far that the episode ends (B,).
        now: probability that it ends at this step (B,).
    """

    state: EnvState
    images: Tensor
    ends: Tensor
    now: Tensor


MODE = LatentSampler("mode")
FrameState = tuple[Frames, int]
"""State of one simulated episode: a batch, and its row."""


class SimulatedGame:
    """Simulator as an environment, with the methods of ``agents.episodes.Game``.

    The simulator predicts the action that leads to the first frame, so ``reset`` takes a step.

    Args:
        simulator: simulator on the device of ``compute``.
        compute: device and precision.
        begin: function that maps the numbers of B starts to the starts of their simulations.
        draw: sampler of z. Runs are paired only if it does not depend on earlier draws.
    """

    is_simulated = True

    def __init__(self, simulator: Simulator, compute: Compute,
                 begin: Callable[[Sequence[int]], Start], draw: Draw = MODE):
        self._simulator, self._compute = simulator, compute
        self._begin, self._draw = begin, draw
        self._playing: dict[int, FrameState] = {}  # by slot

    def reset(self, slots: Sequence[int], levels: Sequence[int]) -> tuple[Tensor, list[float]]:
        """Begin simulations at starts with the given numbers; see ``Game.reset``."""
        start = self._begin(levels)
        rewards = self._advance(slots, EnvState(
            start.env_h, start.z, start.world), start.action)
        return start.agent_hidden, rewards

    def observe(self, slots: Sequence[int]) -> Tensor:
        """Return the current images (B, C, H, W)."""
        return torch.stack([frames.images[row] for frames, row in map(self.get_state, slots)])

    def step(self, slots: Sequence[int], actions: Sequence[int]) -> list[tuple[float, bool]]:
        """Take a step in each slot, and return its reward; episodes never end.

        Raises:
            ValueError: if the episodes are at different steps.
        """
        if not slots:
            return []
        before = self._batch(slots)
        inputs = self._simulator.one_hot_actions(
            torch.as_tensor(actions, device=self._compute.device))
        return [(reward, False) for reward in self._advance(slots, before.state, inputs,
                                                            before.ends)]

    def get_state(self, slot: int) -> FrameState:
        """Return the state of the episode in a slot."""
        return self._playing[slot]

    def set_state(self, slot: int, state: FrameState) -> None:
        """Continue in a slot from a state."""
        self._playing[slot] = state

    def result(self, slot: int) -> float:
        """Return the largest probability so far that the episode in a slot ends."""
        frames, row = self._playing[slot]
        return float(frames.ends[row])

    def close(self) -> None:
        """Forget all episodes."""
        self._playing.clear()

    @torch.no_grad()
    def _advance(self, slots: Sequence[int], state: EnvState, actions: Tensor,
                 ends: Tensor | None = None) -> list[float]:
        """Take a step with one-hot actions (B, A), and return the rewards."""
        with self._compute.autocast():
            state, predicted = self._simulator.advance(state, actions, self._draw)
            now = torch.sigmoid(predicted["terminal_logits"]).float()
        frames = Frames(state, clamp_image(predicted["raw_images"]),
                        now if ends is None else torch.maximum(ends, now), now)
        self._playing |= {slot: (frames, row) for row, slot in enumerate(slots)}
        return predicted["rewards"].float().tolist()

    def _batch(self, slots: Sequence[int]) -> Frames:
        """Return the episodes of the slots as one batch."""
        rows = [self._playing[slot] for slot in slots]
        whole, _ = rows[0]
        if rows == [(whole, row) for row in range(len(whole.ends))]:
            return whole
        steps = {frames.state.step for frames, _ in rows}
        if len(steps) > 1:
            raise ValueError(f"simulations are at different steps: {sorted(steps)}")

        def stacked(name: str) -> Tensor:
            """Stack a tensor of the rows, which a dotted name selects."""
            return torch.stack([operator.attrgetter(name)(frames)[row] for frames, row in rows])

        world = scenery = None
        if whole.state.world is not None:
            assert self._simulator.squares is not None
            world = World(**{field.name: stacked(f"state.world.{field.name}")
                             for field in dataclasses.fields(World)})
            scenery = dataclasses.replace(self._simulator.squares.paint(world),
                                          first=stacked("state.scenery.first"))
        state = EnvState(stacked("state.env_h"), stacked("state.z"), world, scenery, steps.pop())
        return Frames(state, stacked("images"), stacked("ends"), stacked("now"))


class RecordedStart(NamedTuple):
    """A recorded state from which a simulation starts.

    Attributes:
        frames: the last frames, as many as the simulator starts from, uint8 (I, H, W, C).
        hidden: hidden state that enters the agent at the last of them, float32 (D,).
        last_action: action that led to the last frame.
    """

    frames: np.ndarray
    hidden: np.ndarray
    last_action: int


@torch.no_grad()
def survival_of_actions(simulator: Simulator, compute: Compute, start: RecordedStart,
                        actions: Sequence[int], *, num_worlds: int, num_steps: int, seed: int,
                        number: int = 0) -> list[float]:
    """Force each action in a recorded state, and let the agent play on in sampled worlds.

    All actions have the same worlds and the same random draws.

    Args:
        start: the state.
        actions: the actions.
        num_worlds: number of worlds that continue the frames.
        num_steps: number of steps.
        seed, number: seeds of the worlds; actions of the agent are drawn with ``seed``.

    Returns:
        For each action, one minus the largest probability that the episode ends, averaged over
        worlds; a simulation with the reward of a coin counts as survived.
    """
    frames, hidden, last_action = start
    images = as_images(frames, 1).to(compute.device)[:, None]  # (I, 1, C, H, W)
    seeds = world_seeds([(seed, number, world) for world in range(num_worlds)])

    def begin(numbers: Sequence[int]) -> Start:
        rows = torch.tensor(list(numbers)) % num_worlds
        with compute.autocast():
            simulated = recorded_starts(
                simulator, simulator.encode(images).float().expand(len(rows), -1),
                images[-1].expand(len(rows), -1, -1, -1),
                torch.from_numpy(hidden).to(compute.device).expand(len(rows), -1),
                torch.full((len(rows),), last_action, device=compute.device),
                seeds[rows].to(compute.device))
        return simulated if simulated.world is None else dataclasses.replace(
            simulated, world=rounded(simulated.world))

    runs = [Run(place * num_worlds + world, place * num_worlds + world, [action], world)
            for place, action in enumerate(actions) for world in range(num_worlds)]
    rates = np.zeros(len(runs))
    for episode in play_episodes(
            simulator.agent.policy, compute, SimulatedGame(simulator, compute, begin), runs, seed,
            len(runs), PlayOptions(keep_outputs=False, keep_frames=False, max_steps=num_steps)):
        takes_coin = episode.total_reward >= FULL_REWARD / 2
        rates[episode.number] = 1 if takes_coin else 1 - episode.level_complete
    return rates.reshape(len(actions), num_worlds).mean(axis=1).tolist()
