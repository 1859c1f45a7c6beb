"""Read and write agent files ``model_<timesteps>.pth`` in the published layouts.

A file is a dict with ``model_state_dict`` and ``optimizer_state_dict``; our files also store how
the agent starts an episode. Some published files contain only the weights, under ``state_dict``,
and older recurrent ones lack ``init_hx``. Architecture and widths are inferred from the tensors.

The optimiser state belongs to an Adam over the parameters in the published order, which differs
from the order in memory and in ``resume.pth``. Published scripts load it into their own optimiser,
which rejects a different number of parameters. Agents saved without an optimiser state therefore
get the state of an Adam that has not taken a step.

A file also stores facts about the training that its values depend on, see ``AgentOrigin``.

The file of an edited agent has an entry ``edits``: a list of (path of a layer, directions float32
(F, M), strength), which become ``agents.edits.Edit`` hooks. ``edited_from`` is the digest of the
agent before the edit; it is also set if the edit changed the weights.
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
    """Facts about an agent's training that its file stores; None if unknown.

    Attributes:
        reward_scale: factor from the game's rewards to the rewards that the values predict; if
            training normalised rewards, the factor at its end, clipping included.
        use_backgrounds: whether the game drew background images.
        gamma, lmbda: discount factor and lambda of the advantage estimates.
        edited_from: digest of the agent before it was edited.
        env_name, distribution_mode: game and mode of the training levels.
        cheese_region: region of the cheese in the training levels, see ``maze.level.regions``; 0
            for anywhere.
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
    """Return the agent files in a run's folder, sorted by time steps."""
    files = {int(match[1]): path for path in folder.glob("model_*.pth")
             if (match := re.fullmatch(r"model_(\d+)\.pth", path.name))}
    return [files[timesteps] for timesteps in sorted(files)]


def save_agent(path: Path, policy: Policy, optimizer_state: dict | None = None,
               origin: AgentOrigin | None = None) -> None:
    """Write an agent file, atomically.

    Args:
        optimizer_state: state dict of an Adam over ``policy.parameters()``; if None, the state of
            a new Adam is written.
        origin: facts about the training.
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
    """Sort parameter names in the order of a published file's optimiser state."""
    return sorted(names, key=lambda name: _PUBLISHED_ORDER.index(name.partition(".")[0]))


def load_agent(path: Path, device: torch.device | str = "cpu") -> Policy:
    """Load the policy from an agent file, ours or a published one.

    A published recurrent agent starts its episodes from zeros, because it was trained that way,
    whether or not its file has an ``init_hx``.

    Raises:
        UserError: if the file is missing, truncated, or not an agent file; or if a tensor is
            missing, unknown or of the wrong shape, or an edit is invalid; the message names it.
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
        UserError: if an entry is invalid; the message names it.
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
    """Read the facts about an agent's training from its file.

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
        policy: agent with the architecture of the agent in the file.

    Returns:
        Entry ``state`` of the state dict of an Adam over ``policy.parameters()``: for each
        parameter's position, ``step`` () and the moments ``exp_avg`` and ``exp_avg_sq`` in the
        parameter's shape. An ``init_hx`` that the file lacks has no entry.

    Raises:
        UserError: if the file has no optimiser state, or one that does not fit its weights.
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
    """Build a policy with the sizes of the given tensors.

    Raises:
        UserError: if the tensors do not belong to an agent.
    """
    def width(key: str) -> int:
        if key not in state or not state[key].ndim:
            raise UserError(f"the agent file {path} has no tensor '{key}' that tells a width")
        return len(state[key])

    if "fc_policy.weight" in state and width("fc_policy.weight") != NUM_ACTIONS:
        raise UserError(f"the agent in {path} has {width('fc_policy.weight')} actions; Procgen's "
                        f"games have {NUM_ACTIONS}")
    reads_grid = "embedder.fc.weight"  # layer whose input size depends on the frame size
    embedder: Embedder
    if "embedder.block1.conv.weight" in state:
        c1, c2, c3 = (width(f"embedder.block{k}.conv.weight") for k in (1, 2, 3))
        for k, c in enumerate((c1, c2, c3), 1):  # prevents huge networks from small files
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
        state_dict: state dict of an Adam with one parameter group.
        order: position in ``state_dict`` of each parameter of the result; None for a parameter
            that ``state_dict`` lacks, which gets no moments.
    """
    (group,) = state_dict["param_groups"]
    return {"state": {new: state_dict["state"][old] for new, old in enumerate(order)
                      if old in state_dict["state"]},
            "param_groups": [{**group, "params": list(range(len(order)))}]}


def num_adam_parameters(state_dict: Any) -> int:
    """Return the number of parameters in an Adam's state dict that was read from a file.

    The result is 0 if ``state_dict`` is not an Adam's state dict, or has no moments.
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
        state_dict: state dict of an Adam with as many parameters as there are shapes.
        shapes: shapes of the parameters by name, in the file's order.
        file: name of the file, for messages.

    Returns:
        ``step`` () and the moments ``exp_avg`` and ``exp_avg_sq`` of each parameter, in its shape;
        None for a parameter that has not had a gradient.

    Raises:
        UserError: if an entry does not fit its parameter.
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
        UserError: if a tensor is missing, unknown or of the wrong shape; the message names it.
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
    """Return the digest of an agent's weights and edits, which does not depend on its file."""
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
