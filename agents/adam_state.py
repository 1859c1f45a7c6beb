"""The state of an Adam in a checkpoint, whose parameters have another order than in the process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from common.errors import UserError


def in_order(state_dict: dict, order: Sequence[int | None]) -> dict:
    """An Adam's state dict with its parameters in another order.

    Args:
        state_dict: of an Adam with one group.
        order: for each parameter of the result its position in ``state_dict``; None for one that
            ``state_dict`` has not, and that has no moments.
    """
    (group,) = state_dict["param_groups"]
    return {"state": {new: state_dict["state"][old] for new, old in enumerate(order)
                      if old in state_dict["state"]},
            "param_groups": [{**group, "params": list(range(len(order)))}]}


def num_parameters(state_dict: object) -> int:
    """Number of parameters in an Adam's state dict, read from a file; 0 if it is none.

    An entry without any moments counts as none: there is nothing to go on with.
    """
    try:
        (group,) = dict(state_dict)["param_groups"]
        return len(group["params"]) if dict(state_dict["state"]) else 0
    except (KeyError, IndexError, TypeError, ValueError):
        return 0


def moments(state_dict: dict, shapes: Mapping[str, torch.Size], file: str) -> list[dict | None]:
    """Steps and moments in an Adam's state dict that was read from a file.

    Args:
        state_dict: of an Adam with as many parameters as there are shapes.
        shapes: of the parameters, by name, in the file's order.
        file: to name in errors.

    Returns:
        For each parameter ``step`` () and the moments ``exp_avg`` and ``exp_avg_sq``, in its
        shape; None for one that has had no gradient.

    Raises:
        UserError: if one does not fit its parameter.
    """
    return [_entry(state_dict["state"][i], name, shape, file) if i in state_dict["state"] else None
            for i, (name, shape) in enumerate(shapes.items())]


def _entry(found: object, name: str, shape: torch.Size, file: str) -> dict[str, Tensor]:
    try:
        entry = {"step": torch.as_tensor(found["step"], dtype=torch.float32),
                 **{key: found[key] for key in ("exp_avg", "exp_avg_sq")}}
        fits = all(torch.isfinite(tensor).all() and tensor.shape == (() if key == "step" else shape)
                   for key, tensor in entry.items())
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError, AttributeError):
        fits = False
    if not fits:
        raise UserError(f"the optimiser's state in {file} does not fit the tensor '{name}'")
    return entry
