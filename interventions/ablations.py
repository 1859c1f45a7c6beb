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

A control does the same with a random direction along which one standard deviation of the coordinate
is as many standard deviations of the units as along the component. Control and ablation therefore
move the state equally far. A control of *frozen* holds its coordinate at the value at which the
ablation would hold that of the component.

Letters in shape comments: D hidden units, k independent components, R rows of a batch, N recorded
states.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from agents.layers import STATE
from agents.patch import Patch, PatchContext, PatchFn, Selection
from common.errors import UserError
from interventions.comparison import ConditionSet, PatchedCondition
from interventions.flags import swap_name
from interventions.patches import ChangeState
from interventions.projector import Projector
from stats.effects import Condition

MEAN, RESAMPLE, FROZEN = "mean", "resample", "frozen"
ABLATIONS = (MEAN, RESAMPLE, FROZEN)
_LABELS = {MEAN: "IC {} at its mean", RESAMPLE: "IC {} resampled", FROZEN: "IC {} frozen"}
_WIDEST = 1.25 ** 2  # ratio of the lengths of components that share controls


@dataclasses.dataclass(frozen=True, eq=False)
class SetCoordinate(Patch):
    """Set the coordinate of the hidden state along independent component 0 of a projector.

    Attributes:
        projector: the components.
        recorded: coordinates of N consecutive recorded states, (N,). The coordinate follows them
            from a random one on, which ``seed`` and the row's level (in the simulator, its start)
            determine. None to set the coordinate to its mean, 0.
        seed: seed of the draw.
    """

    kind: ClassVar[str] = "coordinate"

    layer: str = dataclasses.field(default=STATE, init=False)
    projector: Projector
    recorded: np.ndarray | None = None
    seed: int = 0

    @property
    def needs_info(self) -> bool:
        return True

    def bind(self, selection: Selection) -> PatchFn:
        projector = self.projector.on(selection.policy.device)
        direction = projector.directions("ica")[0]

        def change(entries: Tensor, context: PatchContext) -> Tensor:
            now = projector.coordinates(entries.squeeze(2), "ica")[:, 0]
            target = torch.zeros_like(now)
            if self.recorded is not None:
                info = context.required_info
                first = [np.random.default_rng([self.seed, int(number)]).integers(
                    len(self.recorded)) for number in info.target]
                rows = (np.array(first, dtype=np.int64) + info.step) % len(self.recorded)
                target = torch.from_numpy(self.recorded[rows]).to(now)
            return entries + ((target - now)[:, None] * direction)[:, :, None]

        return change


def ablation_conditions(directions: Sequence[int], kinds: Sequence[str], num_controls: int,
                        projector: Projector, sources: np.ndarray | None,
                        device: torch.device | str, from_step: int, seed: int) -> ConditionSet:
    """Return one condition per kind of ablation and component, then the controls.

    Components whose lengths (``Projector.lengths``) differ by at most a quarter from their
    geometric mean share the controls of mean and resample ablation, which have this mean length.
    Each component has its own controls of *frozen*.

    Args:
        directions: numbers of the components.
        kinds: kinds of ablation, from ABLATIONS.
        num_controls: number of controls of each ablation.
        projector: projector onto the components.
        sources: coordinates of the recorded states (N, k), needed for RESAMPLE.
        device: device of the states.
        from_step: first step of an episode that is ablated, from 0.
        seed: seed of the resampled states.

    Raises:
        UserError: if a component does not exist or is given twice, or controls are requested for a
            projector with a single component.
    """
    projector.check_numbers(directions, "ica")
    if repeated := [number for number in directions if list(directions).count(number) > 1]:
        raise UserError(f"the component {repeated[0]} is given twice")
    lengths = projector.lengths.tolist()
    groups = length_groups([lengths[number] for number in directions])
    principal = None if sources is None else sources @ projector.mixing.double().numpy().T

    def patches(kind: str, turned: Projector, own: Projector | None = None) -> list[Patch]:
        """Return the patches that ablate component 0 of ``turned``; the value of *frozen* is that
        of component 0 of ``own``, if given."""
        steps = (from_step, None)
        if kind != FROZEN:
            recorded = None
            if kind == RESAMPLE:
                assert principal is not None
                recorded = principal @ turned.unmixing[0].double().numpy()
            return [SetCoordinate(projector=turned, recorded=recorded, seed=seed, steps=steps)]
        frozen = turned.swapped_step([0], [None], "ica", device)
        if own is None:
            return [ChangeState(frozen, steps=steps)]
        here, there = turned.on(device), own.on(device)

        def begin(entering: Tensor, leaving: Tensor) -> Tensor:
            missing = (there.coordinates(entering, "ica") - here.coordinates(leaving, "ica"))[:, :1]
            return leaving + missing * here.directions("ica")[:1]

        return [ChangeState(begin, steps=(from_step, from_step + 1)),
                ChangeState(frozen, steps=(from_step + 1, None))]

    conditions: list[PatchedCondition] = []
    controls: dict[str, PatchedCondition] = {}
    for kind, number in itertools.product(kinds, directions):
        own = projector.reordered(number)
        [(place, length)] = [(place, length) for place, (members, length) in enumerate(groups)
                             if lengths[number] in members]
        pattern = f"{kind} IC {number}" if kind == FROZEN else f"{kind} length {length:.2f}"
        name = swap_name([number], [None]) if kind == FROZEN else f"{number}_{kind}"
        settings = {"ablation": kind, "component": number}
        conditions.append(Condition(f"ic_{name}", _LABELS[kind].format(number), pattern, False,
                                    patches(kind, own), settings))
        for turn in range(num_controls):
            key = f"random_{turn:03d}_{kind}_{number if kind == FROZEN else place}"
            if key not in controls:
                turned = projector.turned_to_length(
                    lengths[number] if kind == FROZEN else length, turn)
                controls[key] = Condition(
                    key, f"random {turn}", pattern, True, patches(kind, turned, own),
                    {"ablation": kind, "turned_by_seed": turn, "length": length})
    return ConditionSet([*conditions, *controls.values()], {STATE: projector.std},
                        {"resample_seed": seed} if RESAMPLE in kinds else {},
                        f"{num_controls} random directions that move the state as far as controls")


def length_groups(lengths: Sequence[float]) -> list[tuple[list[float], float]]:
    """Group numbers, ascending, such that each differs by at most a quarter from the geometric
    mean of the smallest and the largest of its group.

    Returns:
        The members of each group, and that mean.
    """
    groups: list[list[float]] = []
    for length in sorted(set(lengths)):
        if groups and length <= _WIDEST * groups[-1][0]:
            groups[-1].append(length)
        else:
            groups.append([length])
    return [(group, (group[0] * group[-1]) ** 0.5) for group in groups]
