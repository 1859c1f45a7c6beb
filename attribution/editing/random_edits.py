"""Random edits of the same size: the controls of an edit.

A control has the entries of the edit's directions at other slots, the same ones for all of its
directions, and its strength is such that the mean over pictures of the norm of what it changes is
that of the edit.

Letters in shape comments: N pictures, C channels, M slots, F directions, R rank of an edit.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from agents.edits import Edit
from common.errors import UserError
from interventions.controls import NEAR

_DRAWN = 500  # permutations of the slots that are looked at


@dataclasses.dataclass(frozen=True)
class RandomEdit:
    """One control.

    Attributes:
        edit: it.
        relative: size of what it changes at the strength of the edit that it is a control of, as a
            share of that edit's; 1 / relative is by what its strength was multiplied.
    """

    edit: Edit
    relative: float

    @property
    def near(self) -> bool:
        """Whether its size is the edit's within a quarter, before the strength is changed."""
        return abs(self.relative - 1) <= NEAR


class ChangeSizes:
    """How much edits of one layer change, over some pictures.

    Args:
        activations: of the layer (N, C, …).
        signed: whether the slots are of signs.
    """

    def __init__(self, activations: Tensor, signed: bool):
        self.channels = activations.shape[1]
        cells = activations.flatten(2).double() if activations.ndim > 2 else (
            activations.double().unsqueeze(2))  # (N, C, P)
        if signed:
            cells = torch.cat([cells.relu(), (-cells).relu()], dim=1)
        self._products = cells @ cells.mT  # (N, M, M)

    def of(self, edit: Edit) -> float:
        """Mean over the pictures of the Euclidean norm of what it changes."""
        basis, back = edit.basis.double(), edit.back(self.channels).double()
        along = basis.T @ self._products @ basis  # (N, R, R)
        squares = (along * (back.T @ back)).sum(dim=(1, 2)).clamp(min=0)
        return abs(edit.strength) * float(squares.sqrt().mean())


def random_edits(edit: Edit, activations: Tensor, number: int, seed: int) -> list[RandomEdit]:
    """Draw controls of an edit; the first ones of a larger number are those of a smaller.

    Those whose size is that of the edit within a quarter come first, then the nearest ones.

    Args:
        activations: of its layer over some pictures (N, C, …), without the edit.

    Raises:
        UserError: if there are not so many other directions that change anything, or the edit
            changes nothing itself.
    """
    sizes = ChangeSizes(activations, edit.signed(activations.shape[1]))
    own = sizes.of(edit)
    if not own:
        raise UserError(f"the edit of {edit.layer} changes nothing in {len(activations)} pictures, "
                        "so it has no controls of its size; edit other features")
    rng = np.random.default_rng(seed)
    found, seen = [], {_key(edit.directions)}
    for _ in range(_DRAWN):
        directions = edit.directions[:, torch.from_numpy(rng.permutation(
            edit.directions.shape[1]))]
        if _key(directions) in seen:
            continue
        seen.add(_key(directions))
        drawn = dataclasses.replace(edit, directions=directions)
        relative = sizes.of(drawn) / own
        if relative:
            found.append(RandomEdit(dataclasses.replace(
                drawn, strength=edit.strength / relative), relative))
    if len(found) < number:
        raise UserError(f"{number} controls cannot be drawn for the edit of {edit.layer}: there "
                        f"are {len(found)} other directions that change anything; take fewer "
                        "--num_controls")
    return sorted(found, key=lambda each: 0.0 if each.near else abs(np.log(each.relative)))[:number]


def _key(directions: Tensor) -> bytes:
    return directions.numpy().tobytes()
