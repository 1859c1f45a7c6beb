"""Alterations that are compared: each direction taken out, swaps, and their controls.

An alteration is text on the command line: ``10:12`` puts what direction 10 would have changed into
12, ``10:12,5:None`` does two at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from agents.patch import Patch
from common.devices import Compute
from common.errors import UserError
from interventions.files import ArmRuns
from interventions.flags import direction
from interventions.patches import ChangeState
from interventions.projector import Projector
from interventions.swaps import swap_name
from stats.effects import Arm

UNALTERED = "unaltered"
Runner = Callable[[Sequence[Patch], Mapping[str, Tensor]], ArmRuns]
"""The patches of an arm, perhaps none, and the standard deviations in which ``moved`` counts, by
layer, to the runs with them."""


@dataclasses.dataclass(frozen=True)
class Alteration:
    """An arm and what makes it.

    Attributes:
        taken, put: see ``Projector.swap``.
        turn: seed of the random directions (``Projector.turned``); None for the directions as
            they are.
    """

    arm: Arm
    taken: list[int]
    put: list[int | None]
    turn: int | None


def all_alterations(directions: tuple[int, ...], swaps: list[str],
                    num_controls: int) -> list[Alteration]:
    """Every direction taken out, every swap, and the controls of each pattern among them."""
    alterations = [_alteration([number], [None]) for number in directions]
    alterations += [_alteration(*_pairs(text)) for text in swaps]
    names = [each.arm.name for each in alterations]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"the alteration {name} is asked for twice")
    patterns = {each.arm.pattern: _renumbered(each.taken, each.put) for each in alterations}
    return alterations + [_alteration(taken, put, turn) for taken, put in patterns.values()
                          for turn in range(num_controls)]


def _alteration(taken: list[int], put: list[int | None], turn: int | None = None) -> Alteration:
    pattern = swap_name(*_renumbered(taken, put))
    if turn is not None:
        arm = Arm(f"random_{turn:03d}_{pattern}", f"random {turn}", pattern, control=True)
    else:
        label = ", ".join(f"IC {source} out" if target is None else f"IC {source} to {target}"
                          for source, target in zip(taken, put))
        arm = Arm(f"ic_{swap_name(taken, put)}", label, pattern, control=False)
    return Alteration(arm, taken, put, turn)


def _renumbered(taken: list[int], put: list[int | None]) -> tuple[list[int], list[int | None]]:
    """The same swap between directions numbered in the order in which they appear."""
    numbers = {None: None}
    for number in (*taken, *put):
        if number is not None:
            numbers.setdefault(number, len(numbers) - 1)
    return [numbers[number] for number in taken], [numbers[number] for number in put]


def _pairs(text: str) -> tuple[list[int], list[int | None]]:
    """The directions of ``10:12,5:None``."""
    try:
        pairs = [pair.split(":") for pair in text.split(",")]
        taken, put = [int(source) for source, _ in pairs], [direction(end) for _, end in pairs]
    except ValueError:
        raise UserError(f"--swaps takes pairs such as 10:12 or 10:12,5:None, not '{text}'"
                        ) from None
    if any(source == target for source, target in zip(taken, put)):
        raise UserError(f"--swaps {text} puts a direction back where it was, which alters nothing")
    return taken, put


def patch_of(alteration: Alteration, projector: Projector, compute: Compute,
             from_step: int) -> Patch:
    """The change that an alteration makes to the agent's state.

    Args:
        from_step: first step of an episode that is altered, from 0.
    """
    if alteration.turn is not None:
        projector = projector.turned(alteration.turn)
    step = projector.swapped_step(alteration.taken, alteration.put, "ica", compute.device)
    return ChangeState(step, steps=(from_step, None))
