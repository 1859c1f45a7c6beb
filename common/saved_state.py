"""Validation of a run's saved state before the run is resumed."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from common.errors import UserError

Check = Callable[[object, str], None]
"""Function that raises UserError if a value is invalid; takes the value and its name."""


def check_like(found, expected, where: str) -> None:
    """Raise if a saved value does not have the structure of an expected value.

    Mappings must have the same keys, lists the same length, and tensors the same type and shape.
    All other values must be numbers of the same type. Numbers and tensors must be finite. Integers
    outside tensors must not be negative.

    Args:
        found: saved value.
        expected: value with the expected structure. A function in place of a value is a ``Check``,
            which is called with the saved value.
        where: name of the value in messages, such as "resume.pth: 'timesteps'".

    Raises:
        UserError: if the structures differ; the message names the difference.
    """
    if callable(expected):
        expected(found, where)
    elif isinstance(expected, dict):
        if not isinstance(found, dict):
            raise UserError(f"{where} is not a mapping of names to values")
        for key in expected:
            if key not in found:
                raise UserError(f"{where} has no '{key}'")
            check_like(found[key], expected[key], f"{where}: '{key}'")
        for key in found:
            if key not in expected:
                raise UserError(f"{where} has an unknown '{key}'")
    elif isinstance(expected, Tensor):
        if not isinstance(found, Tensor) or (found.dtype, found.shape) != (expected.dtype,
                                                                           expected.shape):
            raise UserError(f"{where} is not a {expected.dtype} tensor of the shape "
                            f"{tuple(expected.shape)}")
        if found.is_floating_point() and not torch.isfinite(found).all():
            raise UserError(f"{where} holds NaN or infinity")
    elif isinstance(expected, list):
        if not isinstance(found, list) or len(found) != len(expected):
            raise UserError(f"{where} is not a list of {len(expected)} entries")
        for number, (item, like) in enumerate(zip(found, expected)):
            check_like(item, like, f"{where}[{number}]")
    elif type(found) is not type(expected) or not math.isfinite(found) or (
            isinstance(expected, int) and found < 0):
        raise UserError(f"{where} is not a valid {type(expected).__name__}")


def check_numbers(found, kind: type, limit: int, where: str) -> None:
    """Raise UserError unless ``found`` is a list of at most ``limit`` finite numbers of one type;
    integers must not be negative.

    Args:
        found: saved value.
        kind: type of the numbers, int or float.
        limit: maximum length of the list.
        where: name of the value, with which the message begins.
    """
    if not isinstance(found, list) or len(found) > limit:
        raise UserError(f"{where} is not a list of at most {limit} numbers")
    check_like(found, [kind()] * len(found), where)


def check_generator(found, generator: torch.Generator, where: str) -> None:
    """Raise UserError unless ``found`` is a valid state of a random generator.

    Args:
        found: saved value.
        generator: a generator of the same kind.
        where: name of the value, with which the message begins.
    """
    check_like(found, generator.get_state(), where)
    try:
        torch.Generator(generator.device).set_state(found)
    except RuntimeError:
        raise UserError(f"{where} is not the state of a random generator") from None


def check_optimizer(found, optimizer: torch.optim.Adam, where: str) -> None:
    """Raise UserError unless ``found`` is a valid state of an optimiser.

    The saved hyperparameters must equal those of ``optimizer``, except for the learning rate. All
    except the learning rate may be missing, because older versions of torch lack some of them.

    Args:
        found: saved value.
        optimizer: optimiser that would load the state.
        where: name of the value, with which the message begins.
    """
    ours = optimizer.state_dict()
    if not isinstance(found, dict) or found.keys() != ours.keys():
        raise UserError(f"{where} is not the state of an optimiser")
    groups = found["param_groups"]
    if not isinstance(groups, list) or len(groups) != len(ours["param_groups"]):
        raise UserError(f"{where} has an unexpected number of parameter groups")
    for group, expected in zip(groups, ours["param_groups"]):
        if not isinstance(group, dict) or not {"lr", "params"} <= group.keys() <= expected.keys():
            raise UserError(f"{where} has missing or unknown settings")
        check_like(group["lr"], float(expected["lr"]), f"{where}: 'lr'")
        for key, value in group.items():
            if key != "lr" and (type(value) is not type(expected[key]) or value != expected[key]):
                raise UserError(f"{where} has another '{key}'")
    if found["state"] == {}:  # saved before the first step
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moment = torch.zeros((), dtype=torch.float32)
    check_like(found["state"], {
        number: {"step": moment, "exp_avg": parameter, "exp_avg_sq": parameter}
        for number, parameter in enumerate(parameters)}, f"{where}: 'state'")
