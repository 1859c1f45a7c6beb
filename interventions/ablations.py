"""Ablations of independent components of the agent's hidden state, and their controls.

c is the coordinate of the state along a component: 0 on average over the recorded states, with
variance 1.

=========  =======================================================================================
mean       mean ablation: c = 0
resample   resample ablation: c follows the recorded states from a random one on, which is drawn
           once per level (in the simulator, once per start)
frozen     the ablation of the published experiment: the part of each step's change of the state
           along the component is removed, so c keeps the value that enters the first ablated step
=========  =======================================================================================

*Frozen* can hold a coordinate at a value far outside the recorded ones. Its effects then show that
the agent cannot play in such states, and not what the component does. So mean and resample ablation
are the standard, and *frozen* is kept for comparison with the publication.

A control moves the state in the same steps along a random direction (``Projector.turned``), each
time about as far as the ablation does on average, in standard deviations of the units:
towards the mean (mean), towards the coordinate of a recorded state (resample), or always in one
sense (frozen). The distance is that of a run with the ablation, because the network restores some
components and not others. Without it, components whose ablation moves the state far would be
compared with small changes.

Letters in shape comments: D hidden units, k independent components, R rows of a batch, N recorded
states.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from agents.layers import STATE
from agents.patch import Patch, PatchContext, PatchFn, Selection
from agents.testbed import Condition
from common.errors import UserError
from interventions.comparison import ConditionSet
from interventions.projector import Projector, Swap

MEAN, RESAMPLE, FROZEN = "mean", "resample", "frozen"
ABLATIONS = (MEAN, RESAMPLE, FROZEN)
_LABELS = {MEAN: "IC {} at its mean", RESAMPLE: "IC {} resampled", FROZEN: "IC {} frozen"}
_RATIO = 1.25 ** 2  # ratio of successive distances of controls


@dataclasses.dataclass(frozen=True, eq=False)
class SetCoordinate(Patch):
    """Set the coordinate of the hidden state along independent component 0 of a projector, or move
    it towards its target.

    Attributes:
        projector: the components.
        target: target of the coordinate, if there are no ``recorded`` coordinates.
        recorded: coordinates of N consecutive recorded states, (N,). The target follows them from a
            random one on, which ``seed`` and the row's level (in the simulator, its start)
            determine.
        distance: distance by which the state is moved along the component in the direction of the
            target, in standard deviations of the units; None to move it to the target.
        seed: seed of the draw.
    """

    kind: ClassVar[str] = "coordinate"

    layer: str = dataclasses.field(default=STATE, init=False)
    projector: Projector
    target: float = 0.0
    recorded: np.ndarray | None = None
    distance: float | None = None
    seed: int = 0

    @property
    def needs_info(self) -> bool:
        return True

    def bind(self, selection: Selection) -> PatchFn:
        projector = self.projector.on(selection.policy.device)
        direction, length = projector.directions("ica")[0], projector.lengths[0]

        def change(entries: Tensor, context: PatchContext) -> Tensor:
            now = projector.coordinates(entries.squeeze(2), "ica")[:, 0]
            missing = self._targets(context).to(now) - now
            if self.distance is not None:
                missing = missing.sign() * self.distance / length
            return entries + (missing[:, None] * direction)[:, :, None]

        return change

    def _targets(self, context: PatchContext) -> Tensor:
        """Return the target of each row, float64 (R,)."""
        info = context.required_info
        if self.recorded is None:
            return torch.full((len(info),), self.target, dtype=torch.float64)
        first = [np.random.default_rng([self.seed, int(number)]).integers(len(self.recorded))
                 for number in info.target]
        rows = (np.array(first, dtype=np.int64) + info.step) % len(self.recorded)
        return torch.from_numpy(self.recorded[rows].astype(np.float64))


def ablation_conditions(directions: Sequence[int], kinds: Sequence[str], num_controls: int,
                        projector: Projector, sources: np.ndarray | None, from_step: int,
                        seed: int) -> ConditionSet:
    """Return one condition per kind of ablation and component; their controls follow when the
    distances are known.

    The distances of controls are the powers of ``_RATIO``. Ablations of one kind whose distances
    have the same nearest power share controls, so they differ from them by at most a quarter.

    Args:
        directions: numbers of the components.
        kinds: kinds of ablation, from ABLATIONS.
        num_controls: number of controls of each ablation.
        projector: projector onto the components.
        sources: coordinates of the recorded states (N, k), needed for RESAMPLE.
        from_step: first step of an episode that is ablated, from 0.
        seed: seed of the resampled states.

    Raises:
        UserError: if a component does not exist or is given twice, or controls are requested for a
            projector with a single component.
    """
    projector.check_numbers(directions, "ica")
    if repeated := [number for number in directions if list(directions).count(number) > 1]:
        raise UserError(f"the component {repeated[0]} is given twice")
    turns = [projector.turned(turn) for turn in range(num_controls)]

    def patch_of(kind: str, turned: Projector, distance: float | None = None) -> Patch:
        """Return the patch that ablates component 0 of a projector, or its control."""
        steps, recorded = (from_step, None), None
        if kind == FROZEN and distance is None:
            return Swap(STATE, pairs=((0, None),), directions=turned, steps=steps)
        if kind == RESAMPLE:
            assert sources is not None
            to_turned = (turned.unmixing @ projector.mixing).double().cpu().numpy()[0]
            recorded = sources @ to_turned
        return SetCoordinate(projector=turned, target=math.inf if kind == FROZEN else 0.0,
                             recorded=recorded, distance=distance, seed=seed, steps=steps)

    ablations: list[Condition] = [
        Condition(f"ic_{number}_{'to_None' if kind == FROZEN else kind}",
                  _LABELS[kind].format(number), kind, False,
                  patches=[patch_of(kind, projector.reordered(number))],
                  settings={"ablation": kind, "component": number})
        for kind in kinds for number in directions]

    def with_controls(moved: Mapping[str, float]) -> list[Condition]:
        groups = {ablation.name: (ablation.pattern, rounded(moved[ablation.name]))
                  for ablation in ablations}
        controls: list[Condition] = [
            Condition(f"random_{turn:03d}_{kind}_{distance:g}", f"random {turn}",
                      f"{kind}, moved by {distance:g}", True,
                      patches=[patch_of(kind, turned, distance)],
                      settings={"ablation": kind, "turned_by_seed": turn, "distance": distance})
            for kind, distance in dict.fromkeys(groups.values())
            for turn, turned in enumerate(turns)]
        return [*(dataclasses.replace(ablation, pattern="{}, moved by {:g}".format(
            *groups[ablation.name])) for ablation in ablations), *controls]

    return ConditionSet(ablations, {STATE: projector.std},
                        {"resample_seed": seed} if RESAMPLE in kinds else {},
                        f"{num_controls} random directions, moved as far, as controls",
                        with_controls)


def rounded(distance: float) -> float:
    """Return the nearest power of ``_RATIO``, to three digits; 0 for 0."""
    power = distance and _RATIO ** round(math.log(distance, _RATIO))
    return float(f"{power:.3g}")
