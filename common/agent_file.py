"""Agent files ``model_<timesteps>.pth``: the published layouts, read and written.

A file is a dict with ``model_state_dict`` and ``optimizer_state_dict``; ours also says how the
agent starts an episode. Other published files have the weights alone, under ``state_dict``, and
older recurrent ones have no ``init_hx``. Architecture and widths are read off the tensors.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from common.env import FRAME_SIZE, NUM_ACTIONS
from common.errors import UserError
from common.files import checked_weights, load_tensors, save_tensors
from common.networks import ImpalaEmbedder, NatureEmbedder, Policy


def agent_file_name(timesteps: int) -> str:
    return f"model_{timesteps}.pth"


def agent_files(folder: Path) -> list[Path]:
    """The agent files in a run's folder, fewest time steps first."""
    found = {int(match[1]): path for path in folder.glob("model_*.pth")
             if (match := re.fullmatch(r"model_(\d+)\.pth", path.name))}
    return [found[timesteps] for timesteps in sorted(found)]


def save_agent(path: Path, policy: Policy, optimizer_state: dict) -> None:
    """Write an agent file, atomically."""
    save_tensors(path, {"model_state_dict": policy.state_dict(),
                        "optimizer_state_dict": optimizer_state,
                        "learned_initial_state": policy.learned_initial_state})


def load_agent(path: Path, device: torch.device | str = "cpu") -> Policy:
    """Read the policy of an agent file, ours or a published one.

    A published recurrent agent starts its episodes from zeros, because it was trained that way,
    whether its file has an ``init_hx`` or not.

    Raises:
        UserError: if the file is missing, truncated, or not an agent; a tensor that is
            missing, unknown or of the wrong shape is named.
    """
    content = load_tensors(path, "agent file")
    state = content.get("model_state_dict", content.get("state_dict"))
    if not isinstance(state, dict):
        raise UserError(f"{path} is not an agent file: it has no 'model_state_dict', nor a "
                        "'state_dict'")
    checked_weights(state, f"the agent file {path}")
    learned_initial_state = content.get("learned_initial_state", False)
    if not isinstance(learned_initial_state, bool):
        raise UserError(f"in the agent file {path} 'learned_initial_state' is neither true nor "
                        "false")
    policy = _policy_like(state, learned_initial_state, path)
    if policy.recurrent and not policy.learned_initial_state:
        state = {"init_hx": torch.zeros(policy.hidden_state_size), **state}
    load_weights(policy, state, path)
    return policy.to(device)


def _policy_like(state: dict[str, Tensor], learned_initial_state: bool, path: Path) -> Policy:
    """A policy of the sizes that the tensors tell.

    Raises:
        UserError: if they tell none.
    """
    def width(key: str) -> int:
        if key not in state or not state[key].ndim:
            raise UserError(f"the agent file {path} has no tensor '{key}' that tells a width")
        return len(state[key])

    if "fc_policy.weight" in state and width("fc_policy.weight") != NUM_ACTIONS:
        raise UserError(f"the agent in {path} has {width('fc_policy.weight')} actions; Procgen's "
                        f"games have {NUM_ACTIONS}")
    if "embedder.block1.conv.weight" in state:
        channels = tuple(width(f"embedder.block{k}.conv.weight") for k in (1, 2, 3))
        for k, c in enumerate(channels, 1):  # or a small file could ask for a huge network
            _check_shape(state, f"embedder.block{k}.res1.conv1.weight", (c, c, 3, 3), path)
        embedder = ImpalaEmbedder(width("embedder.fc.weight"), channels)
    elif "embedder.conv1.weight" in state:
        embedder = NatureEmbedder(width("embedder.fc.weight"))
    else:
        raise UserError(f"the agent file {path} has neither an IMPALA nor a Nature embedding "
                        "(no tensor 'embedder.block1.conv.weight' or 'embedder.conv1.weight')")
    if state["embedder.fc.weight"].shape != embedder.fc.weight.shape:
        raise UserError(f"the agent in {path} is for frames of another size than {FRAME_SIZE} x "
                        f"{FRAME_SIZE}: 'embedder.fc.weight' has the shape "
                        f"{tuple(state['embedder.fc.weight'].shape)}, not "
                        f"{tuple(embedder.fc.weight.shape)}")
    hidden = None
    if "gru.gru.weight_hh_l0" in state:
        hidden = width("gru.gru.weight_hh_l0") // 3
        _check_shape(state, "gru.gru.weight_hh_l0", (3 * max(hidden, 1), max(hidden, 1)), path)
    return Policy(embedder, hidden, learned_initial_state=learned_initial_state)


def load_weights(policy: Policy, found: dict[str, Tensor], path: Path) -> None:
    """Put weights into a policy.

    Raises:
        UserError: naming the file and the tensor that is missing, unknown or of another shape.
    """
    expected = policy.state_dict()
    for key, tensor in expected.items():
        _check_shape(found, key, tuple(tensor.shape), path)
    for key in found:
        if key not in expected:
            raise UserError(f"the agent file {path} has a tensor '{key}' that belongs to no "
                            "agent of this kind")
    policy.load_state_dict(found)


def _check_shape(found: dict[str, Tensor], key: str, shape: tuple[int, ...], path: Path) -> None:
    if key not in found:
        raise UserError(f"the agent file {path} has no tensor '{key}'")
    if tuple(found[key].shape) != shape:
        raise UserError(f"in the agent file {path} the tensor '{key}' has the shape "
                        f"{tuple(found[key].shape)}, not {shape}")
