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

The value at which *frozen* holds a coordinate can lie far outside the recorded ones. Its effects
then show that the agent cannot play in such states, and not what the component does. So mean and
resample ablation are the standard, and *frozen* is kept for comparison with the publication.

A control moves the state in the same steps along a random direction (``Projector.turned``), each
time by the mean distance by which the ablation moves it, in standard deviations of the units:
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
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from agents.layers import STATE
from agents.patch import Patch, PatchContext, PatchFn, Selection
from agents.testbed import Condition, Testbed
from common.errors import UserError
from interventions.comparison import ConditionSet, play_runs
from interventions.flags import swap_name
from interventions.patches import ChangeState
from interventions.projector import Projector

MEAN, RESAMPLE, FROZEN = "mean", "resample", "frozen"
ABLATIONS = (MEAN, RESAMPLE, FROZEN)
_LABELS = {MEAN: "IC {} at its mean", RESAMPLE: "IC {} resampled", FROZEN: "IC {} frozen"}
_WIDEST = 1.25 ** 2  # largest ratio of the distances of ablations that share controls


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
                        projector: Projector, sources: np.ndarray | None, testbed: Testbed,
                        from_step: int, seed: int) -> ConditionSet:
    """Return one condition per kind of ablation and component, then the controls. Each ablation is
    played once to measure its distance.

    Ablations of one kind share controls if their distances differ by at most a quarter from the
    geometric mean of the smallest and the largest of them, which is the controls' distance.

    Args:
        directions: numbers of the components.
        kinds: kinds of ablation, from ABLATIONS.
        num_controls: number of controls of each ablation.
        projector: projector onto the components.
        sources: coordinates of the recorded states (N, k), needed for RESAMPLE.
        testbed: where the ablations are played.
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
    std = {STATE: projector.std}

    def patch_of(kind: str, turned: Projector, distance: float | None = None) -> Patch:
        """Return the patch that ablates component 0 of a projector, or its control."""
        steps, recorded = (from_step, None), None
        if kind == FROZEN and distance is None:
            return ChangeState(turned.swapped_step([0], [None], "ica", testbed.policy.device),
                               steps=steps)
        if kind == RESAMPLE:
            assert sources is not None
            to_turned = (turned.unmixing @ projector.mixing).double().cpu().numpy()[0]
            recorded = sources @ to_turned
        return SetCoordinate(projector=turned, target=math.inf if kind == FROZEN else 0.0,
                             recorded=recorded, distance=distance, seed=seed, steps=steps)

    conditions: list[Condition] = []
    controls: list[Condition] = []
    for kind in kinds:
        patches = {number: patch_of(kind, projector.reordered(number)) for number in directions}
        distances = {number: float(play_runs(
            testbed, Condition(kind, patches=[patch]), std).moved)
            for number, patch in patches.items()}
        for place, (members, distance) in enumerate(groups_of(list(distances.values()))):
            pattern = f"{kind}, moved by {distance:.2f}"
            for number, patch in patches.items():
                if distances[number] in members:
                    name = swap_name([number], [None]) if kind == FROZEN else f"{number}_{kind}"
                    conditions.append(Condition(
                        f"ic_{name}", _LABELS[kind].format(number), pattern, patches=[patch],
                        settings={"ablation": kind, "component": number}))
            controls += [Condition(
                f"random_{turn:03d}_{kind}_{place}", f"random {turn}", pattern, True,
                patches=[patch_of(kind, turned, distance)],
                settings={"ablation": kind, "turned_by_seed": turn, "distance": distance})
                for turn, turned in enumerate(turns)]
    return ConditionSet([*conditions, *controls], std,
                        {"resample_seed": seed} if RESAMPLE in kinds else {},
                        f"{num_controls} random directions, moved as far, as controls")


def groups_of(distances: Sequence[float]) -> list[tuple[list[float], float]]:
    """Group distances, ascending, such that each differs by at most a quarter from the geometric
    mean of the smallest and the largest of its group.

    Returns:
        The members of each group, and that mean.
    """
    groups: list[list[float]] = []
    for distance in sorted(set(distances)):
        if groups and distance <= _WIDEST * groups[-1][0]:
            groups[-1].append(distance)
        else:
            groups.append([distance])
    return [(group, (group[0] * group[-1]) ** 0.5) for group in groups]
