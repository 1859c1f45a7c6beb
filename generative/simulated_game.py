"""The simulator as an environment: whatever plays the real game also plays in the simulator."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from common.devices import Compute
from generative.batches import EnvState
from generative.networks import Draw, LatentSampler, clamp_image
from generative.simulator import Simulator, Start
from generative.squares import World


@dataclasses.dataclass(frozen=True, eq=False)
class Frames:
    """B simulated episodes after a step.

    Attributes:
        state: state of the simulated environment.
        images: frames in [0, 1] (B, C, H, W).
        ends: largest probability so far that the episode ends (B,).
    """

    state: EnvState
    images: Tensor
    ends: Tensor


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
                        now if ends is None else torch.maximum(ends, now))
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
        return Frames(state, stacked("images"), stacked("ends"))
