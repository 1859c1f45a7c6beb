"""Permanent edits of an agent, which weaken, remove or reverse directions in a layer's output.

An edit is a permanent forward hook on its layer, so every forward pass of the agent includes it,
and patches and activation caches see the edited output.

Letters in shape comments: M slots, F directions, R their rank.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from agents.layers import RECURRENT, all_layers
from agents.networks import Policy
from common.errors import UserError, nearest

_DEPENDENT = 1e-5  # singular values below this fraction of the largest count as 0


@dataclasses.dataclass(frozen=True, eq=False)
class Edit:
    """Edit of a layer's output: a' = a - s P a at every cell.

    P is the orthogonal projection onto the span of the directions.

    A direction for a layer with C channels has M = C or M = 2 C entries, called slots. With 2 C
    slots, the vector b = (max(a, 0), max(-a, 0)) is edited instead, and a' is the first half of
    b - s P b minus the second half.

    Attributes:
        directions: nonzero directions, one per row, float32 (F, M); only their span matters.
        strength: factor s; 1 removes the directions, 2 reverses them.

    Raises:
        UserError: if the directions are not a matrix, one of them is zero or not finite, or the
            strength is not finite.
    """

    layer: str
    directions: Tensor
    strength: float = 1.0

    def __post_init__(self):
        directions = self.directions
        if directions.ndim != 2 or not directions.numel() or not directions.any(dim=1).all():
            raise UserError(f"an edit of {self.layer} needs a matrix of nonzero directions, one "
                            f"per row, not the shape {tuple(directions.shape)}")
        if not torch.isfinite(directions).all() or not abs(self.strength) < float("inf"):
            raise UserError(f"an edit of {self.layer} holds NaN or infinity")

    @functools.cached_property
    def basis(self) -> Tensor:
        """Orthonormal columns that span the directions, float32 (M, R)."""
        directions = self.directions.double()
        directions = directions / directions.norm(dim=1, keepdim=True)
        _, sizes, rows = torch.linalg.svd(directions, full_matrices=False)
        return rows[sizes > _DEPENDENT * sizes[0]].T.float()

    def signed(self, channels: int) -> bool:
        """Return whether the directions have two slots for each of ``channels`` channels."""
        return self.directions.shape[1] == 2 * channels

    def back(self, channels: int) -> Tensor:
        """Return the columns of the basis, mapped from slots to channels, (C, R)."""
        if self.signed(channels):
            return self.basis[:channels] - self.basis[channels:]
        return self.basis

    def changed(self, values: Tensor, dim: int) -> Tensor:
        """Return the edited output of the layer.

        Args:
            values: output of the layer, of any shape with one channel dimension.
            dim: index of the channel dimension.
        """
        channels = values.shape[dim]
        exact = values if values.dtype == torch.float64 else values.float()
        basis, back = self.basis.to(exact), self.back(channels).to(exact)
        cells = exact.movedim(dim, -1)
        slots = (torch.cat([cells.relu(), (-cells).relu()], dim=-1) if self.signed(channels)
                 else cells)
        projected = (slots @ basis) @ back.T
        return (exact - self.strength * projected.movedim(-1, dim)).to(values.dtype)

    def _hook(self, _module, _inputs, output: Tensor) -> Tensor:
        """Apply the edit to maps (N, C, H, W) or units (…, C), as a forward hook."""
        return self.changed(output, 1 if output.ndim == 4 else -1)


def with_edits(policy: Policy, edits: Sequence[Edit]) -> Policy:
    """Return a copy of an agent with further edits, applied after its existing ones."""
    edited = copy.deepcopy(policy)
    for edit in edits:
        add_edit(edited, edit)
    return edited


def add_edit(policy: Policy, edit: Edit) -> None:
    """Add a permanent edit to an agent.

    Raises:
        UserError: if the agent has no such layer, the directions do not fit the layer, or the
            layer is the GRU or the hidden state of a recurrent agent.
    """
    num_channels = {layer.name: layer.shape[0] for layer in all_layers(policy)
                    if not (policy.recurrent and layer.name in RECURRENT)}
    if policy.recurrent and edit.layer in RECURRENT:
        raise UserError(f"edits of {edit.layer} are not supported, because its output enters the "
                        "next step; use a patch of compare_interventions.py, which acts at every "
                        "step")
    if edit.layer not in num_channels:
        raise UserError(f"the agent has no layer '{edit.layer}' to edit"
                        f"{nearest(edit.layer, num_channels)}")
    channels = num_channels[edit.layer]
    if edit.directions.shape[1] not in (channels, 2 * channels):
        raise UserError(f"the directions of an edit of {edit.layer} have "
                        f"{edit.directions.shape[1]} slots, but a layer with {channels} channels "
                        f"needs {channels}, or {2 * channels} for both signs")
    policy.get_submodule(edit.layer).register_forward_hook(edit._hook)
    policy.edits = (*policy.edits, edit)
