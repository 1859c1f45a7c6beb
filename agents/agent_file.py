"""Read and write agent files ``model_<timesteps>.pth`` in the published layouts.

``agents.foreign_files`` converts files of other programs to these layouts.

A file is a dict with ``model_state_dict`` and ``optimizer_state_dict``; our files also have an
entry ``learned_initial_state``, see ``Policy``. Some published files contain only the weights,
under ``state_dict``, and older recurrent ones lack ``init_hx``. Architecture and widths are
inferred from the tensors.

The optimiser state is that of an Adam optimiser over the parameters in the published order, which
differs from the order of ``policy.parameters()`` and of ``resume.pth``. Published scripts load this
state into their own optimiser, which rejects a different number of parameters. Agents saved without
an optimiser state therefore get the state of an optimiser that has not taken a step.

A file also stores facts about the agent's training, see ``AgentOrigin``.

The file of an edited agent has an entry ``edits``, a list of tuples with the attributes ``layer``,
``directions`` and ``strength`` of each ``agents.edits.Edit``. ``edited_from`` is the digest of the
agent before its first edit; it is also set if an edit changed the weights.
"""

from __future__ import annotations

import copy
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
from agents.foreign_files import Program, read_content
from agents.networks import (
    ClearEmbedder,
    Embedder,
    ImpalaEmbedder,
    LstmMemory,
    NatureEmbedder,
    Policy,
)
from agents.wrapping import agent_script
from common.config import typed
from common.errors import UserError
from common.files import checked_weights, save_tensors
from common.game_constants import NUM_ACTIONS

ADAM_EPS = 1e-5
NEVER = -1e4  # logit of actions that an agent with a reduced action set does not have
_EDITS = "edits"
_PUBLISHED_ORDER = ("init_hx", "embedder", "fc_policy", "fc_value", "gru", "lstm")


@dataclasses.dataclass(frozen=True)
class AgentOrigin:
    """Facts about an agent's training, stored in the agent file. Unknown facts are None.

    Attributes:
        reward_scale: factor that converts the game's rewards to the rewards of training, whose
            discounted sum the values predict. If training normalised rewards, this is the factor
            when the file was written, see ``envs.rewards.clipped_scale``.
        use_backgrounds: whether the game drew background images.
        gamma, lmbda: discount factor and lambda of the advantage estimates.
        edited_from: digest of the agent before its first edit.
        env_name, distribution_mode: game and mode of the training levels.
        cheese_region: size of the region in which the cheese was placed in the training levels, see
            ``agents.goal_places``; 0 for anywhere.
        coin: place of the coin in the training levels, see ``envs.coin.place_of``.
    """

    reward_scale: float | None = None
    use_backgrounds: bool | None = None
    gamma: float | None = None
    lmbda: float | None = None
    edited_from: str | None = None
    env_name: str | None = None
    distribution_mode: str | None = None
    cheese_region: int | None = None
    coin: str | None = None


def agent_file_name(timesteps: int) -> str:
    """Return the name of the agent file written after ``timesteps`` environment steps."""
    return f"model_{timesteps}.pth"


def agent_title(path: Path) -> str:
    """Return an agent's name for titles: its file name, or its folder's name if the file is called
    model.pth."""
    return path.parent.name or path.name if path.name == "model.pth" else path.name


def agent_files(folder: Path) -> list[Path]:
    """Return the agent files in a run's folder, sorted by time steps."""
    files = {int(match[1]): path for path in folder.glob("model_*.pth")
             if (match := re.fullmatch(r"model_(\d+)\.pth", path.name))}
    return [files[timesteps] for timesteps in sorted(files)]


def save_agent(path: Path, policy: Policy, optimizer_state: dict | None = None,
               origin: AgentOrigin | None = None) -> None:
    """Write an agent file, atomically.

    Args:
        optimizer_state: state dict of an Adam optimiser over ``policy.parameters()``; if None, the
            state of a new optimiser is written.
        origin: facts about the training; if None, none are written.
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


def load_agent(path: str | Path, device: torch.device | str = "cpu",
               actions: Sequence[int] | None = None) -> Policy:
    """Load the policy from an agent file of this project or of another program.

    ``agents.foreign_files`` lists the programs. A Python file is run and must define the agent, see
    ``agents.wrapping.agent_script``. A published recurrent agent starts its episodes
    from a hidden state of zeros, because it was trained that way, even if its file has an
    ``init_hx``.

    Args:
        actions: Procgen's action of each output of the policy head, for an agent with a reduced
            action set; it then never takes the other actions.

    Raises:
        UserError: if the file is missing, truncated or not an agent file, if a tensor is missing,
            unknown, not finite or of the wrong shape, or if an edit is invalid.

    Example::

        >>> policy = load_agent("pretrained/coinrun_hard/model.pth")
        >>> output = policy(recording.episode(0).frames[:8])  # from initial hidden states
        >>> assert output.values.shape == (8,) and output.log_probs.shape == (8, 15)
    """
    path = Path(path)
    if path.suffix == ".py":
        return copy.deepcopy(agent_script(path)["agent"]).to(device)
    content = read_content(path)
    state = _weights_of(content)
    if not isinstance(state, dict):
        raise UserError(f"{path} is not an agent file: it has neither a 'model_state_dict' nor a "
                        "'state_dict', under which the weights are")
    checked_weights(state, f"the agent file {path}")
    if actions is not None:
        state = _with_all_actions(state, actions, path)
    learned_initial_state = content.get("learned_initial_state", False) is True
    policy = _policy_like(state, learned_initial_state, path)
    if policy.recurrent and not policy.learned_initial_state:
        state = {"init_hx": torch.zeros(policy.hidden_state_size), **state}
    load_weights(policy, state, path)
    try:
        for layer, directions, strength in content.get(_EDITS, []):
            add_edit(policy, Edit(str(layer), directions.float(), float(strength)))
    except (UserError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"the agent file {path} has an invalid edit: {error}") from None
    return policy.to(device)


def _with_all_actions(state: dict[str, Tensor], actions: Sequence[int], path: Path
                      ) -> dict[str, Tensor]:
    """Return weights whose policy head has an output for each action of Procgen."""
    head = state.get("fc_policy.weight"), state.get("fc_policy.bias")
    if any(tensor is None or len(tensor) != len(actions) for tensor in head):
        number = "no" if head[0] is None else len(head[0])
        raise UserError(f"{len(actions)} actions were given, but the policy head of {path} has "
                        f"{number} outputs")
    weight, bias = head
    assert weight is not None and bias is not None
    full = {"fc_policy.weight": weight.new_zeros(NUM_ACTIONS, *weight.shape[1:]),
            "fc_policy.bias": bias.new_full((NUM_ACTIONS,), NEVER)}
    full["fc_policy.weight"][list(actions)] = weight
    full["fc_policy.bias"][list(actions)] = bias
    return {**state, **full}


def usual_training(path: Path) -> tuple[str, Mapping[str, Any]]:
    """Return the name of the program that wrote an agent file, and the values of ``AgentOrigin``
    that it uses unless told otherwise. Both are empty for files of this project."""
    program = None if path.suffix == ".py" else read_content(path).get("program")
    return (program.name, program.habits) if isinstance(program, Program) else ("", {})


def read_origin(path: Path) -> AgentOrigin:
    """Read the facts about an agent's training from its file.

    Raises:
        UserError: if the file is missing or damaged, or a value is invalid.
    """
    content = agent_script(path) if path.suffix == ".py" else read_content(path)
    origin = typed(AgentOrigin, {field.name: content.get(field.name) for field in
                                 dataclasses.fields(AgentOrigin)}, f"the agent file {path}")
    for name in ("reward_scale", "gamma", "lmbda"):
        value = getattr(origin, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"the agent file {path}: '{name}' must be above 0, not {value}")
    return origin


def _weights_of(content: dict) -> Any:
    return content.get("model_state_dict", content.get("state_dict"))


def load_optimizer_state(path: Path, policy: Policy) -> dict[int, dict[str, Tensor]]:
    """Read Adam's moments from an agent file of this project or a published one.

    Args:
        policy: agent with the architecture of the agent in the file.

    Returns:
        Entry ``state`` of the state dict of an Adam optimiser over ``policy.parameters()``. It maps
        each parameter's position to ``step`` () and the moments ``exp_avg`` and ``exp_avg_sq``,
        which have the parameter's shape. Parameters without moments in the file have no entry.

    Raises:
        UserError: if the file is missing or damaged, has no optimiser state, or has one that does
            not fit its weights.
    """
    content = {} if path.suffix == ".py" else read_content(path)
    weights, optimizer = _weights_of(content) or {}, content.get("optimizer_state_dict", {})
    shapes = {name: parameter.shape for name, parameter in policy.named_parameters()}
    names = _published_order(name for name in shapes if name in weights)
    if num_adam_parameters(optimizer) != len(names):
        raise UserError(f"the agent file {path} has no optimiser state for its {len(names)} "
                        "parameters")
    moments = adam_moments(optimizer, {name: shapes[name] for name in names},
                           f"the agent file {path}")
    positions = {name: i for i, name in enumerate(shapes)}
    return {positions[name]: entry for name, entry in zip(names, moments, strict=True)
            if entry is not None}


def _policy_like(state: dict[str, Tensor], learned_initial_state: bool, path: Path) -> Policy:
    """Build an untrained policy whose architecture and sizes fit the tensors of a state dict.

    Raises:
        UserError: if the tensors do not belong to an agent.
    """
    try:
        size = len(state["embedder.fc.weight"])
        if "embedder.block1.conv.weight" in state:
            keys = [f"embedder.block{k}.res1.conv1.weight" for k in (1, 2, 3)]
            c1, c2, c3 = (state[key].shape[1] for key in keys)
            for key, c in zip(keys, (c1, c2, c3)):  # a tiny file must not allocate a huge network
                _check_shape(state, key, (c, c, 3, 3), path)
            embedder: Embedder = ImpalaEmbedder(size, (c1, c2, c3))
        elif "embedder.conv1a.weight" in state:
            embedder = ClearEmbedder(size)
        else:
            embedder = NatureEmbedder(size)
        hidden, memory = None, None
        if "lstm.cells.0.weight_hh" in state:
            keys = [key for key in state if re.fullmatch(r"lstm\.cells\.\d\.weight_hh", key)]
            for key in keys:
                width = state[key].shape[1]
                _check_shape(state, key, (4 * max(width, 1), max(width, 1)), path)
            memory = LstmMemory(size, [state[key].shape[1] for key in keys])
        if "gru.gru.weight_hh_l0" in state:
            hidden = state["gru.gru.weight_hh_l0"].shape[1]
            _check_shape(state, "gru.gru.weight_hh_l0", (3 * max(hidden, 1), max(hidden, 1)), path)
    except (KeyError, IndexError, TypeError) as error:
        reason = f"it has no tensor {error}" if isinstance(error, KeyError) else repr(error)
        raise UserError(f"{path} is not an IMPALA, Nature or clear agent: {reason}") from None
    return Policy(embedder, hidden, learned_initial_state=learned_initial_state, memory=memory)


def reorder_adam(state_dict: dict, order: Sequence[int | None]) -> dict:
    """Return the state dict of an Adam optimiser with its parameters in another order.

    Args:
        state_dict: state dict with one parameter group.
        order: position in ``state_dict`` of each parameter of the result; None for a parameter
            that ``state_dict`` lacks, which gets no moments.
    """
    (group,) = state_dict["param_groups"]
    return {"state": {new: state_dict["state"][old] for new, old in enumerate(order)
                      if old in state_dict["state"]},
            "param_groups": [{**group, "params": list(range(len(order)))}]}


def num_adam_parameters(state_dict: Any) -> int:
    """Return the number of parameters in the state dict of an Adam optimiser, read from a file.

    The result is 0 if ``state_dict`` is not such a state dict, or has no moments.
    """
    try:
        (group,) = dict(state_dict)["param_groups"]
        return len(group["params"]) if dict(state_dict["state"]) else 0
    except (KeyError, IndexError, TypeError, ValueError):
        return 0


def adam_moments(state_dict: dict, shapes: Mapping[str, torch.Size],
                 file: str) -> list[dict[str, Tensor] | None]:
    """Return the steps and moments in the state dict of an Adam optimiser, read from a file.

    Args:
        state_dict: state dict with as many parameters as there are shapes.
        shapes: shapes of the parameters by name, in the file's order.
        file: name of the file, for messages.

    Returns:
        For each parameter, a dict of ``step`` () and the moments ``exp_avg`` and ``exp_avg_sq``,
        which have the parameter's shape; None for a parameter without an entry, which has never had
        a gradient.

    Raises:
        UserError: if an entry does not fit its parameter or is not finite.
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
            raise UserError(f"the agent file {path} has a tensor '{key}', which agents of this "
                            "architecture do not have")
    policy.load_state_dict(weights)


def weights_sha256(policy: Policy) -> str:
    """Return the SHA-256 digest of an agent's weights and edits, independent of the file format."""
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
        reason = ""
        if key.startswith("fc_policy.") and tuple(weights[key].shape[1:]) == shape[1:]:
            number = len(weights[key])
            reason = (f"; a head of {number} actions acts in a reduced action set: name Procgen's "
                      "action of each output with --actions of python -m agents.import_policy")
        raise UserError(f"in the agent file {path} the tensor '{key}' has the shape "
                        f"{tuple(weights[key].shape)}, not {shape}{reason}")
