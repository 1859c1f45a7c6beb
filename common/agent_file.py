"""Agent files ``model_<timesteps>.pth``: the published layout, read and written.

A file is a dict with ``model_state_dict`` and ``optimizer_state_dict``; ours also says how the
agent starts an episode. Architecture and widths are read off the tensors.
"""

from __future__ import annotations

import dataclasses
import pickle
import re
from pathlib import Path

import torch
from torch import Tensor

from common.errors import UserError
from common.files import save_tensors
from common.networks import ImpalaEmbedder, NatureEmbedder, Policy


@dataclasses.dataclass(frozen=True)
class AgentFile:
    """What a file holds: the policy, ready to use, and the optimiser's state."""

    policy: Policy
    optimizer_state: dict


def agent_file_name(timesteps: int) -> str:
    return f"model_{timesteps}.pth"


def agent_files(folder: Path) -> list[Path]:
    """The agent files in a run's folder, fewest time steps first."""
    found = {int(match[1]): path for path in folder.glob("model_*.pth")
             if (match := re.fullmatch(r"model_(\d+)\.pth", path.name))}
    return [found[timesteps] for timesteps in sorted(found)]


def load_tensors(path: Path, what: str) -> dict:
    """``torch.load`` of a trusted-by-nobody file: tensors only, and a clear error.

    Raises:
        UserError: if the file is missing, truncated, not a torch file or holds code.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no {what} {path}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError) as error:
        raise UserError(f"the {what} {path} is truncated or not a torch file of tensors "
                        f"({type(error).__name__})") from None
    if not isinstance(content, dict):
        raise UserError(f"the {what} {path} holds a {type(content).__name__}, not a dict")
    return content


def save_agent(path: Path, policy: Policy, optimizer_state: dict) -> None:
    """Write an agent file, atomically."""
    save_tensors(path, {"model_state_dict": policy.state_dict(),
                        "optimizer_state_dict": optimizer_state,
                        "learned_initial_state": policy.learned_initial_state})


def load_agent(path: Path, device: torch.device | str = "cpu") -> AgentFile:
    """Read an agent file, ours or a published one.

    A published recurrent agent starts its episodes from zeros, because it was trained that way.

    Raises:
        UserError: if the file is missing, truncated, or not an agent; a tensor that is
            missing, unknown or of the wrong shape is named.
    """
    content = load_tensors(path, "agent file")
    state = content.get("model_state_dict")
    if not isinstance(state, dict):
        raise UserError(f"{path} is not an agent file: it has no 'model_state_dict'")
    policy = _policy_like(state, bool(content.get("learned_initial_state", False)), path)
    _check_tensors(policy.state_dict(), state, path)
    policy.load_state_dict(state)
    return AgentFile(policy.to(device), content.get("optimizer_state_dict") or {})


def _policy_like(state: dict[str, Tensor], learned_initial_state: bool, path: Path) -> Policy:
    def width(key: str) -> int:
        if key not in state:
            raise UserError(f"the agent file {path} has no tensor '{key}'")
        return len(state[key])

    if "embedder.block1.conv.weight" in state:
        channels = tuple(width(f"embedder.block{k}.conv.weight") for k in (1, 2, 3))
        embedder = ImpalaEmbedder(width("embedder.fc.weight"), channels)
    elif "embedder.conv1.weight" in state:
        embedder = NatureEmbedder(width("embedder.fc.weight"))
    else:
        raise UserError(f"the agent file {path} has neither an IMPALA nor a Nature embedding "
                        "(no tensor 'embedder.block1.conv.weight' or 'embedder.conv1.weight')")
    recurrent = "gru.gru.weight_hh_l0" in state
    hidden = state["gru.gru.weight_hh_l0"].shape[-1] if recurrent else None
    return Policy(embedder, hidden, width("fc_policy.weight"), learned_initial_state)


def _check_tensors(expected: dict[str, Tensor], found: dict[str, Tensor], path: Path) -> None:
    for key in expected:
        if key not in found:
            raise UserError(f"the agent file {path} has no tensor '{key}'")
        if found[key].shape != expected[key].shape:
            raise UserError(f"in the agent file {path} the tensor '{key}' has the shape "
                            f"{tuple(found[key].shape)}, not {tuple(expected[key].shape)}")
    for key in found:
        if key not in expected:
            raise UserError(f"the agent file {path} has a tensor '{key}' that belongs to no "
                            "agent of this kind")
