"""Read agent files of other programs: CleanRL, Stable-Baselines3 and train-procgen-pytorch.

No code in a file is run. The weights are found wherever they lie in a file, prefixes of wrappers
are removed from their names, and the names are translated to ours. An LSTM becomes an
``agents.networks.LstmMemory``; a head reads the output of its LSTM, and its other weights are 0.

- CleanRL: ``ppo_procgen``, ``ppg_procgen`` (without the auxiliary value head), and the networks of
  ``ppo_atari`` and ``ppo_atari_lstm`` for frames of Procgen.
- Stable-Baselines3 and sb3-contrib: ``CnnPolicy`` of PPO and A2C and ``CnnLstmPolicy`` of
  RecurrentPPO, as the zip archive that ``save`` writes or as a bare state dict.
- train-procgen-pytorch: our own names, except those of its Nature network.
"""

from __future__ import annotations

import dataclasses
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agents.file_kinds import file_kind, folder_kind, open_archive
from common.errors import UserError
from common.files import load_tensors, read_bytes
from common.game_constants import GAMES

WHAT = "agent file"
_ENTRIES = ("model_state_dict", "state_dict")  # of the weights in files of the published layout
_POLICY_FILE = "policy.pth"  # in a Stable-Baselines3 archive
_WRAPPER = re.compile(r"(^|\.)(module|_orig_mod)\.")  # DistributedDataParallel, torch.compile
_WRAP = "use agents.wrap in Python (docs/your_agent.md)"
_FACTS = {"gamma": "gamma", "lmbda": "lmbda", "gae_lambda": "lmbda", "env_name": "env_name",
          "env_id": "env_name", "distribution_mode": "distribution_mode",
          "use_backgrounds": "use_backgrounds", "reward_scale": "reward_scale"}

State = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that trains agents.

    Attributes:
        name: name for messages.
        mark: name of a tensor that identifies its agents.
        translate: function that maps the weights of an agent to ours.
        unused: beginnings of names of tensors that policy and value do not depend on.
        habits: values of ``AgentOrigin`` that the program uses unless told otherwise.
    """

    name: str
    mark: str
    translate: Callable[[State], State]
    unused: tuple[str, ...] = ()
    habits: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class _Weights(dict):
    """State dict that remembers which tensors were read."""

    def __init__(self, state: State):
        super().__init__(state)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(name)
        return super().__getitem__(name)


class _Unusable(Exception):
    """Raised with the reason why an agent cannot be converted."""


def read_content(path: Path) -> dict[str, Any]:
    """Read an agent file of this or another program in the layout of our files.

    Returns:
        Content with the weights under ``model_state_dict`` if they were recognised, facts about the
        training by the names of ``AgentOrigin``, and the ``Program`` under ``program``.

    Raises:
        UserError: if the file is missing or damaged, or of a kind that cannot be converted; the
            message names the kind.
    """
    if path.is_dir():
        raise UserError(f"{path} is {folder_kind(path)}")
    data, facts = read_bytes(path, WHAT), {}
    archive = open_archive(data)
    if archive is not None and _POLICY_FILE in archive.namelist():
        try:
            data, facts = archive.read(_POLICY_FILE), _facts_of_sb3(archive)
        except (zipfile.BadZipFile, ValueError, RuntimeError, NotImplementedError) as error:
            raise UserError(f"the {WHAT} {path} is truncated or damaged ({error})") from None
    try:
        content = load_tensors(path, WHAT, data)
    except UserError as error:
        kind = file_kind(data, path.name)
        raise UserError(f"{path} is {kind}" if kind else str(error)) from None
    if _is_ours(content):
        return content
    agents = [(name, state, program) for name, state in _state_dicts(content)
              if (program := _program_of(state))]
    agents = [agent for agent in agents if agent[0] in _ENTRIES] or agents
    if not agents:
        reason = next((reason for _, state in _state_dicts(content)
                       if (reason := _other_network(state))), None)
        if reason:
            raise UserError(f"{path} cannot be converted: {reason}")
        if _is_only_optimizer(content):
            raise UserError(f"{path} holds the state of an optimiser, but no agent: save the "
                            "agent's state_dict()")
        return content
    if len(agents) > 1:
        names = " and ".join(f"'{name}'" for name, _, _ in agents)
        raise UserError(f"{path} holds several agents, {names}; save only one of them")
    [(_, state, program)] = agents
    try:
        weights = program.translate(read := _Weights(state))
        left = [name for name in state if name not in read.read
                and not name.startswith(program.unused)]
        if left:
            raise _Unusable(f"it has a tensor '{left[0]}', which {program.name}'s networks do not "
                            f"have; {_WRAP}")
        if facts.pop("normalize_images", True) is False:
            weights["embedder.conv1.weight"] = weights["embedder.conv1.weight"] * 255
    except _Unusable as error:
        raise UserError(f"{path} is an agent of {program.name} that cannot be converted: "
                        f"{error}") from None
    except KeyError as error:
        raise UserError(f"{path} is an agent of {program.name} without the tensor "
                        f"{error}") from None
    except (IndexError, RuntimeError) as error:
        raise UserError(f"{path} is an agent of {program.name} with tensors of unexpected shapes "
                        f"({error})") from None
    return {"model_state_dict": weights, **_facts_of(content), **facts, "program": program}


def _is_ours(content: Mapping[Any, Any]) -> bool:
    """Return whether a file has our layout, or is meant to have it but is damaged."""
    for name in _ENTRIES:
        if name in content:
            state = content[name]
            return not isinstance(state, dict) or (
                any(str(key).startswith(("embedder.", "fc_")) for key in state)
                and "embedder.layers.0.weight" not in state)
    return False


def _is_only_optimizer(content: Mapping[Any, Any]) -> bool:
    """Return whether a file holds the state of an optimiser, and no other tensors."""
    optimizer = {"state", "param_groups"}
    if optimizer <= content.keys():
        return True
    parts = [part for part in content.values() if isinstance(part, Mapping)]
    others = [part for part in (content, *parts) if not optimizer <= part.keys()]
    return len(others) <= len(parts) and not any(
        isinstance(value, Tensor) for part in others for value in part.values())


def _state_dicts(content: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, State]]:
    """Yield the state dicts in a file with the names of their entries. The names of tensors have no
    prefixes, and tensors are float32."""
    if not isinstance(content, Mapping):
        return
    state = {key: value.float() for key, value in content.items() if isinstance(key, str)
             and isinstance(value, Tensor) and value.is_floating_point()}
    if len(state) >= 4:
        yield name, _without_prefixes(state)
    if depth < 2:
        for key, value in content.items():
            yield from _state_dicts(value, str(key), depth + 1)


def _without_prefixes(state: State) -> State:
    """Remove the names of wrappers, and first parts that all names share, as in ``agent.``."""
    while True:
        names = [_WRAPPER.sub(r"\1", name) for name in state]
        if _program_of(names) is None and len({name.partition(".")[0] for name in names}) == 1:
            names = [name.partition(".")[2] for name in names]
        if names == list(state) or not all(names):
            return state
        state = dict(zip(names, state.values()))


def _program_of(names: Mapping[str, Any] | Sequence[str]) -> Program | None:
    return next((program for program in PROGRAMS if program.mark in names), None)


def _facts_of(content: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the facts about the training in the dicts of a file, such as ``args``."""
    facts: dict[str, Any] = {}
    for entry in (content, *(value for value in content.values() if isinstance(value, Mapping))):
        for name, value in entry.items():
            known = _FACTS.get(name) if isinstance(name, str) else None
            if known == "env_name" and isinstance(value, str):
                game = re.sub(r"^.*procgen-|-v\d+$", "", value)
                facts |= {known: game} if game in GAMES else {}
            elif known and isinstance(value, {"distribution_mode": str, "use_backgrounds": bool}
                                      .get(known, float)) and (value or value is False):
                facts[known] = value
    return facts


def _facts_of_sb3(archive: zipfile.ZipFile) -> dict[str, Any]:
    """Return facts about the training in the JSON text of an archive; pickles in it stay closed."""
    try:
        data = json.loads(archive.read("data"))
        kwargs = data.get("policy_kwargs") or {}
        normalised = {"normalize_images": False} if kwargs.get("normalize_images") in (
            False, "False") else {}
        return {**_facts_of(data), **normalised}
    except (KeyError, ValueError, AttributeError, RecursionError):
        return {}


def _renamed(state: Mapping[str, Tensor], modules: Mapping[str, str]) -> State:
    """Return the weights and biases of modules, by our names of the modules."""
    return {f"{ours}.{own}": state[f"{other}.{own}"] for ours, other in modules.items()
            for own in ("weight", "bias")}


def _nature(state: State, convolutions: Sequence[str], fc: str) -> State:
    """Return the weights of a Nature embedder.

    Raises:
        _Unusable: if the network reads other frames than Procgen's.
    """
    first, linear = state[f"{convolutions[0]}.weight"], state[f"{fc}.weight"]
    channels = first.shape[1]
    if channels != 3:
        stacked = f"{channels // 3} stacked frames" if channels % 3 == 0 else (
            f"{channels} stacked grey frames" if channels > 1 else "grey frames")
        raise _Unusable(f"it reads {stacked}, and agents here read one frame in colour; {_WRAP}")
    if linear.shape[1] != 1024:
        size = "84x84" if linear.shape[1] == 3136 else "another size"
        raise _Unusable(f"it reads frames of {size}, and Procgen's have 64x64")
    return _renamed(state, {**{f"embedder.conv{k}": name for k, name in
                               enumerate(convolutions, start=1)}, "embedder.fc": fc})


def _with_lstms(state: State, lstms: Sequence[str], heads: Mapping[str, tuple[str, int]]) -> State:
    """Return the weights of an LSTM memory and of the heads that read it.

    Args:
        lstms: names of the LSTMs.
        heads: name of each head, and the number of the LSTM that it reads, by our name of the head.
    """
    if any(f"{name}.weight_hh_l1" in state for name in lstms):
        raise _Unusable(f"its LSTM has several layers; {_WRAP}")
    weights = {f"lstm.cells.{number}.{own}": state[f"{name}.{own}_l0"]
               for number, name in enumerate(lstms)
               for own in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    sizes = [state[f"{name}.weight_hh_l0"].shape[1] for name in lstms]
    for ours, (other, number) in heads.items():
        head = state[f"{other}.weight"]
        weights[f"{ours}.weight"] = head.new_zeros(len(head), 2 * sum(sizes))
        begin = sum(sizes[:number])
        weights[f"{ours}.weight"][:, begin:begin + sizes[number]] = head
        weights[f"{ours}.bias"] = state[f"{other}.bias"]
    return weights


def _from_cleanrl_impala(state: State) -> State:
    if state["network.0.conv.weight"].shape[1] != 3:
        raise _Unusable("it does not read frames in colour")
    modules = {"embedder.fc": "network.5"}
    for block in range(3):
        ours, other = f"embedder.block{block + 1}", f"network.{block}"
        modules[f"{ours}.conv"] = f"{other}.conv"
        modules |= {f"{ours}.res{unit + 1}.conv{conv + 1}": f"{other}.res_block{unit}.conv{conv}"
                    for unit in range(2) for conv in range(2)}
    return {**_renamed(state, modules), **_cleanrl_heads(state)}


def _cleanrl_heads(state: State) -> State:
    if "lstm.weight_ih_l0" in state:
        return _with_lstms(state, ["lstm"], {"fc_policy": ("actor", 0), "fc_value": ("critic", 0)})
    return _renamed(state, {"fc_policy": "actor", "fc_value": "critic"})


def _from_cleanrl_nature(state: State) -> State:
    return {**_nature(state, ("network.0", "network.2", "network.4"), "network.7"),
            **_cleanrl_heads(state)}


def _from_sb3(state: State) -> State:
    if any(name.startswith("mlp_extractor.") for name in state):
        raise _Unusable("its heads have hidden layers (net_arch), and heads here are linear; "
                        f"{_WRAP}")
    for name, tensor in state.items():
        if name.startswith("vf_features_extractor.") and not torch.equal(
                tensor, state[f"pi_{name[3:]}"]):
            raise _Unusable(f"policy and value have networks of their own; {_WRAP}")
    if "features_extractor.cnn.0.weight" not in state:
        raise _Unusable(f"its features_extractor is not Stable-Baselines3's NatureCNN; {_WRAP}")
    weights = _nature(state, [f"features_extractor.cnn.{k}" for k in (0, 2, 4)],
                      "features_extractor.linear.0")
    if "lstm_actor.weight_ih_l0" not in state:
        return {**weights, **_renamed(state, {"fc_policy": "action_net",
                                              "fc_value": "value_net"})}
    if "critic.weight" in state:
        raise _Unusable(f"its value does not read an LSTM (enable_critic_lstm=False); {_WRAP}")
    lstms = ["lstm_actor"] + ["lstm_critic"] * ("lstm_critic.weight_ih_l0" in state)
    return {**weights, **_with_lstms(state, lstms, {
        "fc_policy": ("action_net", 0), "fc_value": ("value_net", len(lstms) - 1)})}


def _from_train_procgen_nature(state: State) -> State:
    others = {name: state[name] for name in state
              if not name.startswith("embedder.layers.")}
    return {**_nature(state, [f"embedder.layers.{k}" for k in (0, 2, 4)], "embedder.layers.7"),
            **others}


def _ours(state: State) -> State:
    return {name: state[name] for name in state}


def _other_network(state: State) -> str | None:
    """Return what an agent with other names is, and what to do; None if it is not recognised."""
    if any(name.startswith(("q_net.", "q_network.", "quantile_net.")) for name in state):
        return "it is a Q-network, which has no policy"
    if "dist.linear.weight" in state and any(name.startswith("base.") for name in state):
        return ("it is an agent of the pytorch-a2c-ppo-acktr family (level replay, DrAC, IDAAC), "
                f"whose pooling pads frames differently; {_WRAP}")
    if any(name.startswith("mlp_extractor.") for name in state) or "actor.0.weight" in state:
        return "it reads vectors, not frames"
    if {"actor.weight", "critic.weight"} <= state.keys():
        return f"it is an actor-critic with a network that is not CleanRL's; {_WRAP}"
    return None


_CLEANRL = {"distribution_mode": "easy", "use_backgrounds": True}  # in ppo_procgen.py
PROGRAMS = (
    Program("CleanRL", "network.0.conv.weight", _from_cleanrl_impala, ("aux_critic.",), _CLEANRL),
    Program("CleanRL", "network.0.weight", _from_cleanrl_nature, ("aux_critic.",), _CLEANRL),
    Program("Stable-Baselines3", "action_net.weight", _from_sb3,
            ("pi_features_extractor.", "vf_features_extractor."),
            {"distribution_mode": "hard", "use_backgrounds": True}),  # defaults of Procgen
    Program("train-procgen-pytorch", "embedder.layers.0.weight", _from_train_procgen_nature),
    Program("train-procgen-pytorch", "fc_policy.weight", _ours))
