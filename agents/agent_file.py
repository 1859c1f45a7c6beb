"""Agent files ``model_<timesteps>.pth``: the published layouts, read and written.

A file is a dict with ``model_state_dict`` and ``optimizer_state_dict``; ours also stores how the
agent starts an episode. Other published files have the weights alone, under ``state_dict``, and
older recurrent ones have no ``init_hx``. Architecture and widths are inferred from the tensors.

The optimiser's state is that of an Adam over the parameters in the published order, which differs
from the order inside a running process and in ``resume.pth``. Published scripts load it into their
own optimiser, which refuses another number of parameters. Files of weights alone therefore hold
the state of an Adam that has not taken a step.

A file also holds facts of the training on which its values depend, see ``AgentOrigin``.

An edited agent has ``edits``: a list of (path of a layer, directions float32 (F, M), strength),
which become ``agents.edits.Edit`` hooks. ``edited_from`` is the digest of the agent before the
edit, also where an edit has changed the weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agents.edits import Edit, add_edit
from agents.networks import ClearEmbedder, Embedder, ImpalaEmbedder, NatureEmbedder, Policy
from common.errors import UserError
from common.files import checked_weights, load_tensors, save_tensors
from common.game_constants import FRAME_SIZE, NUM_ACTIONS

ADAM_EPS = 1e-5
_EDITS = "edits"
_PUBLISHED_ORDER = ("init_hx", "embedder", "fc_policy", "fc_value", "gru")


@dataclasses.dataclass(frozen=True)
class AgentOrigin:
    """Facts of an agent's training that its file holds; None if unknown.

    Attributes:
        reward_scale: factor between the game's rewards and those that the values predict; where
            training normalised rewards, the factor at its end, clipping included.
        use_backgrounds: whether the game drew background images.
        gamma, lmbda: discount and lambda of the advantages.
        edited_from: digest of the agent that this agent was edited from.
        env_name, distribution_mode: game and mode of the training levels.
        cheese_region: region of the cheese in them, see ``maze.level.regions``; 0 for everywhere.
    """

    reward_scale: float | None = None
    use_backgrounds: bool | None = None
    gamma: float | None = None
    lmbda: float | None = None
    edited_from: str | None = None
    env_name: str | None = None
    distribution_mode: str | None = None
    cheese_region: int | None = None


def agent_file_name(timesteps: int) -> str:
    return f"model_{timesteps}.pth"


def agent_files(folder: Path) -> list[Path]:
    """Return the agent files in a run's folder, in order of time steps."""
    files = {int(match[1]): path for path in folder.glob("model_*.pth")
             if (match := re.fullmatch(r"model_(\d+)\.pth", path.name))}
    return [files[timesteps] for timesteps in sorted(files)]


def save_agent(path: Path, policy: Policy, optimizer_state: dict | None = None,
               origin: AgentOrigin | None = None) -> None:
    """Write an agent file, atomically.

    Args:
        optimizer_state: state dict of an Adam over ``policy.parameters()``; without one, that of
            a new Adam is written.
        origin: facts of the training.
    """
    if not optimizer_state:
        optimizer_state = torch.optim.Adam(policy.parameters(), eps=ADAM_EPS).state_dict()
    names = [name for name, _ in policy.named_parameters()]
    order = [names.index(name) for name in _published_order(names)]
    save_tensors(path, {"model_state_dict": policy.state_dict(),
                        "optimizer_state_dict": reorder_adam(optimizer_state, order),
                        "learned_initial_state": policy.learned_initial_state,
                        **({_EDITS: [(edit.layer, edit.directions.cpu(), edit.strength)
                                     for edit in policy.edits]} if policy.edits else {}),
                        **{name: value for name, value in vars(origin or AgentOrigin()).items()
                           if value is not None}})


def _published_order(names: Iterable[str]) -> list[str]:
    """Names of parameters in the order of a published file's optimiser."""
    return sorted(names, key=lambda name: _PUBLISHED_ORDER.index(name.partition(".")[0]))


def load_agent(path: Path, device: torch.device | str = "cpu") -> Policy:
    """Read the policy of an agent file, ours or a published one.

    A published recurrent agent starts its episodes from zeros, because it was trained that way,
    whether its file has an ``init_hx`` or not.

    Raises:
        UserError: if the file is missing, truncated, or not an agent; a tensor that is
            missing, unknown or of the wrong shape is named, and so is an invalid edit.
    """
    content = load_tensors(path, "agent file")
    state = _weights_of(content)
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
    _add_edits(policy, content.get(_EDITS, []), path)
    return policy.to(device)


def _add_edits(policy: Policy, entries: object, path: Path) -> None:
    """Add the edits of a file to its agent.

    Raises:
        UserError: naming the entry that is invalid.
    """
    if not isinstance(entries, list):
        raise UserError(f"in the agent file {path} '{_EDITS}' is no list")
    for number, entry in enumerate(entries):
        try:
            match entry:
                case [str() as layer, Tensor() as directions, int() | float() as strength] if (
                        directions.is_floating_point()):
                    add_edit(policy, Edit(layer, directions.float(), float(strength)))
                case _:
                    raise UserError("it is not a layer's name, directions and a strength")
        except UserError as error:
            raise UserError(f"in the agent file {path} entry {number} of '{_EDITS}' cannot be: "
                            f"{error}") from None


def read_origin(path: Path) -> AgentOrigin:
    """Read the facts of an agent's training from its file.

    Raises:
        UserError: if the file is missing or damaged, or a value is invalid.
    """
    content = load_tensors(path, "agent file")
    facts = {field.name: content.get(field.name) for field in dataclasses.fields(AgentOrigin)}
    for name, value in facts.items():
        is_right = (isinstance(value, bool) if name == "use_backgrounds" else
                    isinstance(value, str) if name in (
                        "edited_from", "env_name", "distribution_mode") else
                    type(value) is int and value >= 0 if name == "cheese_region" else
                    isinstance(value, int | float) and 0 < value < math.inf)
        if value is not None and not is_right:
            raise UserError(f"in the agent file {path} '{name}' is not a value that it can have")
    return AgentOrigin(**facts)


def _weights_of(content: dict) -> Any:
    return content.get("model_state_dict", content.get("state_dict"))


def load_optimizer_state(path: Path, policy: Policy) -> dict[int, dict[str, Tensor]]:
    """Read Adam's moments from an agent file, ours or a published one.

    Args:
        policy: an agent of the kind in the file.

    Returns:
        ``state`` of the state dict of an Adam over ``policy.parameters()``: by position ``step``
        () and the moments ``exp_avg`` and ``exp_avg_sq``, in the parameter's shape. An ``init_hx``
        that the file lacks has no entry.

    Raises:
        UserError: if the file has no state, or one that does not fit its weights.
    """
    content = load_tensors(path, "agent file")
    weights, optimizer = _weights_of(content), content.get("optimizer_state_dict", {})
    count = num_adam_parameters(optimizer)
    if not count:
        raise UserError(f"the agent file {path} holds no state of an optimiser to go on with")
    shapes = {name: parameter.shape for name, parameter in policy.named_parameters()}
    names = _published_order(name for name in shapes if name in weights)
    if count != len(names):
        raise UserError(f"the optimiser's state in the agent file {path} is of {count} parameters; "
                        f"the agent has {len(names)}")
    moments = adam_moments(optimizer, {name: shapes[name] for name in names},
                           f"the agent file {path}")
    positions = {name: i for i, name in enumerate(shapes)}
    return {positions[name]: entry for name, entry in zip(names, moments, strict=True)
            if entry is not None}


def _policy_like(state: dict[str, Tensor], learned_initial_state: bool, path: Path) -> Policy:
    """Build a policy with the sizes of these tensors.

    Raises:
        UserError: if they are not those of an agent.
    """
    def width(key: str) -> int:
        if key not in state or not state[key].ndim:
            raise UserError(f"the agent file {path} has no tensor '{key}' that tells a width")
        return len(state[key])

    if "fc_policy.weight" in state and width("fc_policy.weight") != NUM_ACTIONS:
        raise UserError(f"the agent in {path} has {width('fc_policy.weight')} actions; Procgen's "
                        f"games have {NUM_ACTIONS}")
    reads_grid = "embedder.fc.weight"  # the layer whose width depends on the size of the frames
    embedder: Embedder
    if "embedder.block1.conv.weight" in state:
        c1, c2, c3 = (width(f"embedder.block{k}.conv.weight") for k in (1, 2, 3))
        for k, c in enumerate((c1, c2, c3), 1):  # a small file must not make a huge network
            _check_shape(state, f"embedder.block{k}.res1.conv1.weight", (c, c, 3, 3), path)
        embedder = ImpalaEmbedder(width("embedder.fc.weight"), (c1, c2, c3))
    elif "embedder.conv1.weight" in state:
        embedder = NatureEmbedder(width("embedder.fc.weight"))
    elif "embedder.conv1a.weight" in state:
        embedder, reads_grid = ClearEmbedder(width("embedder.fc.weight")), "embedder.fc1.weight"
    else:
        raise UserError(f"the agent file {path} has neither an IMPALA nor a Nature nor a clear "
                        "embedding (no tensor 'embedder.block1.conv.weight', "
                        "'embedder.conv1.weight' or 'embedder.conv1a.weight')")
    expected = embedder.get_parameter(reads_grid.removeprefix("embedder.")).shape
    if width(reads_grid) and state[reads_grid].shape != expected:
        raise UserError(f"the agent in {path} is for frames of another size than {FRAME_SIZE} x "
                        f"{FRAME_SIZE}: '{reads_grid}' has the shape "
                        f"{tuple(state[reads_grid].shape)}, not {tuple(expected)}")
    hidden = None
    if "gru.gru.weight_hh_l0" in state:
        hidden = width("gru.gru.weight_hh_l0") // 3
        _check_shape(state, "gru.gru.weight_hh_l0", (3 * max(hidden, 1), max(hidden, 1)), path)
    return Policy(embedder, hidden, learned_initial_state=learned_initial_state)


def reorder_adam(state_dict: dict, order: Sequence[int | None]) -> dict:
    """Return an Adam's state dict with its parameters in another order.

    Args:
        state_dict: state of an Adam with one group.
        order: position in ``state_dict`` of each parameter of the result; None for one that
            ``state_dict`` lacks, and that has no moments.
    """
    (group,) = state_dict["param_groups"]
    return {"state": {new: state_dict["state"][old] for new, old in enumerate(order)
                      if old in state_dict["state"]},
            "param_groups": [{**group, "params": list(range(len(order)))}]}


def num_adam_parameters(state_dict: Any) -> int:
    """Number of parameters in an Adam's state dict, read from a file; 0 if it is none.

    A state without any moments counts as none.
    """
    try:
        (group,) = dict(state_dict)["param_groups"]
        return len(group["params"]) if dict(state_dict["state"]) else 0
    except (KeyError, IndexError, TypeError, ValueError):
        return 0


def adam_moments(state_dict: dict, shapes: Mapping[str, torch.Size],
                 file: str) -> list[dict[str, Tensor] | None]:
    """Return the steps and moments in an Adam's state dict that was read from a file.

    Args:
        state_dict: state of an Adam with as many parameters as there are shapes.
        shapes: shapes of the parameters by name, in the file's order.
        file: name of the file, for messages.

    Returns:
        ``step`` () and the moments ``exp_avg`` and ``exp_avg_sq`` of each parameter, in its shape;
        None for one that has had no gradient.

    Raises:
        UserError: if one does not fit its parameter.
    """
    def entry(state: Any, name: str, shape: torch.Size) -> dict[str, Tensor]:
        try:
            moments = {"step": torch.as_tensor(state["step"], dtype=torch.float32),
                       **{key: state[key] for key in ("exp_avg", "exp_avg_sq")}}
            fits = all(torch.isfinite(tensor).all()
                       and tensor.shape == (() if key == "step" else shape)
                       for key, tensor in moments.items())
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError, AttributeError):
            fits = False
        if not fits:
            raise UserError(f"the optimiser's state in {file} does not fit the tensor '{name}'")
        return moments

    state = state_dict["state"]
    return [entry(state[number], name, shape) if number in state else None
            for number, (name, shape) in enumerate(shapes.items())]


def load_weights(policy: Policy, weights: dict[str, Tensor], path: Path) -> None:
    """Load weights into a policy.

    Raises:
        UserError: naming the file and the tensor that is missing, unknown or of another shape.
    """
    expected = policy.state_dict()
    for key, tensor in expected.items():
        _check_shape(weights, key, tuple(tensor.shape), path)
    for key in weights:
        if key not in expected:
            raise UserError(f"the agent file {path} has a tensor '{key}' that belongs to no "
                            "agent of this kind")
    policy.load_state_dict(weights)


def weights_sha256(policy: Policy) -> str:
    """Checksum of an agent's weights and edits, equal for an agent in memory and all its files."""
    digest = hashlib.sha256()
    for name, tensor in [*sorted(policy.state_dict().items()),
                         *((f"{edit.layer} {edit.strength!r}", edit.directions)
                           for edit in policy.edits)]:
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _check_shape(weights: dict[str, Tensor], key: str, shape: tuple[int, ...], path: Path) -> None:
    if key not in weights:
        raise UserError(f"the agent file {path} has no tensor '{key}'")
    if tuple(weights[key].shape) != shape:
        raise UserError(f"in the agent file {path} the tensor '{key}' has the shape "
                        f"{tuple(weights[key].shape)}, not {shape}")
