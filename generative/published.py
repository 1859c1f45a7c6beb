"""Simulator files in the published layout. No other module knows its keys.

Files of the spatial architecture, which has no published layout, have an entry ``architecture``
and use our tensor names. The following describes files of the vector architecture.

A file is a dict with ``gen_model_state_dict``; it does not contain the agent. Published files have
two sets of weights that no computation reads: a second decoder (``conv_out.*``) and a head
``decoder.vecobs.*``. Our networks lack them, but the published code rejects a file without them.
``save_published`` therefore writes them, too: from its argument ``unused`` if it is given, and as
zeros otherwise. Unlike random values, zeros give equal simulators equal files and cannot be
mistaken for trained weights.

``optimizer_state_dict`` is the state of an Adam optimiser over all tensors of the layout in their
order, without the agent, as in the published code. The unused weights have no moments. In a running
process, the optimiser has the used weights only, in the order of
``Simulator.trainable_parameters``.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agents.agent_file import adam_moments, num_adam_parameters, reorder_adam
from agents.networks import Policy
from common.errors import UserError
from common.files import checked_weights, load_tensors, save_tensors
from generative.config import SimulatorConfig
from generative.networks import Head
from generative.simulator import Simulator

logger = logging.getLogger(__name__)

_KEY, _OPTIMIZER, _ARCHITECTURE = "gen_model_state_dict", "optimizer_state_dict", "architecture"
_VECOBS_LAYERS = 4  # hidden layers of the unused head, independent of the other heads

_STEPPER = "agent_env_stepper."
_GRU = f"{_STEPPER}gru.layers.0."
_DECODER = f"{_STEPPER}decoder."
_SECOND_DECODER = "conv_out."

# Parts of published keys in the order of a published file, level by level; numbers are ascending,
# and other parts stay in torch's order.
_ORDER = (
    "conv_in", "encoder", "bottleneck_vec_converter_env", "bottleneck_vec_converter_agent_h",
    "bottleneck_vec_converter_action", "conv_out", "agent_env_stepper",
    "image_embedder", "rnn", "mlp_out", "bottleneck_mlp",
    "conv1", "conv2", "normalize1", "normalize2", "conv_sc",
    "z_mlp", "a_mlp", "in_norm", "gru", "prior_mlp_h", "prior_norm", "prior_mlp", "post_mlp_h",
    "post_mlp_e", "post_norm", "post_mlp", "decoder",
    "weight_ih", "weight_hh", "ln_reset", "ln_update", "ln_newval",
    "image", "reward", "terminal", "vecobs")

# Pairs of our prefix and the published one; the first match counts.
_PREFIXES = (
    (r"encoder\.blocks\.(\d)\.norm", r"encoder.image_embedder.nets.\1.normalize"),
    (r"encoder\.blocks\.(\d)\.skip", r"encoder.image_embedder.nets.\1.conv_sc"),
    (r"encoder\.blocks\.(\d)\.conv", r"encoder.image_embedder.nets.\1.conv"),
    (r"encoder\.gru\.", "encoder.rnn."),
    (r"encoder\.mlp\.", "encoder.mlp_out."),
    (r"encoder\.to_vec\.", "encoder.bottleneck_mlp."),
    (r"env_converter\.", "bottleneck_vec_converter_env.nets."),
    (r"hidden_converter\.", "bottleneck_vec_converter_agent_h.nets."),
    (r"action_converter\.", "bottleneck_vec_converter_action.nets."),
    (r"frame_embedding\.layers\.", "conv_in.encoder_image.model."),
    (r"cell\.z_in\.", f"{_STEPPER}z_mlp."),
    (r"cell\.action_in\.", f"{_STEPPER}a_mlp."),
    (r"cell\.in_norm\.", f"{_STEPPER}in_norm."),
    (r"cell\.gru\.from_input\.", f"{_GRU}weight_ih."),
    (r"cell\.gru\.from_hidden\.", f"{_GRU}weight_hh."),
    (r"cell\.gru\.reset_norm\.", f"{_GRU}ln_reset."),
    (r"cell\.gru\.update_norm\.", f"{_GRU}ln_update."),
    (r"cell\.gru\.new_norm\.", f"{_GRU}ln_newval."),
    (r"cell\.prior_hidden\.", f"{_STEPPER}prior_mlp_h."),
    (r"cell\.prior_norm\.", f"{_STEPPER}prior_norm."),
    (r"cell\.prior_out\.", f"{_STEPPER}prior_mlp."),
    (r"cell\.posterior_hidden\.", f"{_STEPPER}post_mlp_h."),
    (r"cell\.posterior_embedding\.", f"{_STEPPER}post_mlp_e."),
    (r"cell\.posterior_norm\.", f"{_STEPPER}post_norm."),
    (r"cell\.posterior_out\.", f"{_STEPPER}post_mlp."),
    (r"decoder\.image\.linear\.", f"{_DECODER}image.model.0."),
    # Model 1 of the published layout is a reshape.
    *((rf"decoder\.image\.layers\.{number}\.", f"{_DECODER}image.model.{number + 2}.")
      for number in (0, 2, 4, 6)),
    (r"decoder\.(reward|terminal)\.", rf"{_DECODER}\1.model.model."),
)


@dataclasses.dataclass(frozen=True)
class PublishedSimulator:
    """Contents of a simulator file.

    Attributes:
        unused: tensors of the file that no computation reads, by published key.
        moments: ``state`` of the state dict of an Adam optimiser over
            ``simulator.trainable_parameters()``; None if the file has no state for this number of
            parameters.
        more: further entries of the file.
    """

    simulator: Simulator
    unused: dict[str, Tensor]
    moments: dict[int, dict[str, Tensor]] | None
    more: dict


def published_name(name: str) -> str:
    """Return the published key of a tensor of ``Simulator``.

    Raises:
        KeyError: if the published layout has no such tensor.
    """
    for pattern, replacement in _PREFIXES:
        renamed, count = re.subn("^" + pattern, replacement, name)
        if count:
            return renamed
    raise KeyError(name)


def load_published(path: Path, config: SimulatorConfig, policy: Policy) -> PublishedSimulator:
    """Read a simulator file of this project or a published one.

    Args:
        config: sizes that the simulator was trained with, which are not in the file.
        policy: agent that the simulator was trained with.

    Raises:
        UserError: if the file is missing, truncated, not a simulator file, or of another
            architecture; if a tensor is missing, unknown or of the wrong shape (the message names
            it); or if the agent does not fit.
    """
    tensors, more = _weights(path)
    architecture = more.pop(_ARCHITECTURE, "vector")
    if architecture != config.architecture:
        raise UserError(f"the simulator in {path} has the architecture '{architecture}', not "
                        f"'{config.architecture}'")
    simulator = Simulator(config, policy)
    own = {_file_name(simulator, name): tensor
           for name, tensor in _own_tensors(simulator).items()}
    shapes = {**_unused_shapes(simulator), **{key: tensor.shape for key, tensor in own.items()}}
    problems = [f"there is no tensor '{key}'" for key in own if key not in tensors]
    problems += [f"a simulator of these sizes has no tensor '{key}'"
                 for key in tensors if key not in shapes]
    problems += [f"the tensor '{key}' has the shape {tuple(tensor.shape)}, not "
                 f"{tuple(shapes[key])}" for key, tensor in tensors.items()
                 if key in shapes and tensor.shape != shapes[key]]
    if problems:
        raise UserError(f"the simulator file {path} does not fit: {problems[0]}")
    with torch.no_grad():
        for key, tensor in own.items():
            tensor.copy_(tensors[key])
    unused = {key: tensor for key, tensor in tensors.items() if key not in own}
    adam = _moments(simulator, more.pop(_OPTIMIZER, None), path)
    return PublishedSimulator(simulator, unused, adam, more)


def transfer(path: Path, simulator: Simulator) -> None:
    """Copy the weights of a simulator of another game or agent that have the same shape, except
    those of squares. The prior still counts as untrained.

    Raises:
        UserError: if the file is not a simulator file, or no weight fits.
    """
    tensors, _ = _weights(path)
    own = {_file_name(simulator, name): tensor for name, tensor in _own_tensors(simulator).items()
           if not name.startswith(("squares.", "prior.trained"))}
    fitting = [key for key in own if key in tensors and tensors[key].shape == own[key].shape]
    if not fitting:
        raise UserError(f"no weight of the simulator in {path} fits this one")
    with torch.no_grad():
        for key in fitting:
            own[key].copy_(tensors[key])
    logger.info("took %d of %d tensors from %s", len(fitting), len(own), path)


def published_state(simulator: Simulator,
                    unused: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the weights of a simulator on the CPU with every key of the published layout.

    The keys of a spatial simulator, which has no published layout, are its own tensor names.

    Args:
        unused: unused tensors from ``load_published``; missing tensors are zeros.
    """
    state = {_file_name(simulator, name): tensor.detach().cpu()
             for name, tensor in _own_tensors(simulator).items()}
    if simulator.config.is_spatial:
        return state
    zeros = {key: torch.zeros(shape) for key, shape in _unused_shapes(simulator).items()}
    return _in_published_order({**state, **zeros, **(unused or {})})


def _in_published_order(layout: dict) -> dict:
    """Return a mapping whose keys are sorted as in a published file."""
    def place(key: str) -> list[int]:
        return [int(part) if part.isdigit() else _ORDER.index(part) if part in _ORDER else 0
                for part in key.split(".")]

    return {key: layout[key] for key in sorted(layout, key=place)}


def save_published(path: Path, simulator: Simulator, unused: dict[str, Tensor] | None = None,
                   optimizer_state: dict | None = None, more: dict | None = None) -> None:
    """Write a simulator file, atomically.

    Args:
        unused: see ``published_state``.
        optimizer_state: state dict of an Adam optimiser over ``simulator.trainable_parameters()``;
            None writes the state of a new optimiser.
        more: further entries of the file.
    """
    state = published_state(simulator, unused)
    names = _trained_names(simulator)
    if not optimizer_state:
        optimizer_state = torch.optim.Adam(map(simulator.get_parameter, names)).state_dict()
    positions = {_file_name(simulator, name): i for i, name in enumerate(names)}
    is_spatial = simulator.config.is_spatial
    keys = positions if is_spatial else state
    save_tensors(path, {**(more or {}), _KEY: state,
                        **({_ARCHITECTURE: simulator.config.architecture} if is_spatial else {}),
                        _OPTIMIZER: reorder_adam(optimizer_state, [*map(positions.get, keys)])})


def _file_name(simulator: Simulator, name: str) -> str:
    """Return the key under which a file stores a tensor of ``Simulator``."""
    return name if simulator.config.is_spatial else published_name(name)


def _trained_names(simulator: Simulator) -> list[str]:
    """Return the names of all parameters except the agent's and the prior's, in order. Unlike
    ``simulator.trainable_parameters()``, the result is the same for a frozen simulator."""
    return [name for name, _ in simulator.named_parameters()
            if not name.startswith(("agent.", "prior."))]


def _moments(simulator: Simulator, optimizer: Any, path: Path) -> dict | None:
    """Return ``PublishedSimulator.moments``, given the file's optimiser state."""
    shapes = {_file_name(simulator, name): simulator.get_parameter(name).shape
              for name in _trained_names(simulator)}
    positions = {key: i for i, key in enumerate(shapes)}
    layout = shapes
    if not simulator.config.is_spatial:
        layout = _in_published_order({**shapes, **_unused_shapes(simulator)})
    if num_adam_parameters(optimizer) == len(shapes):  # our older, shorter layout
        layout = shapes
    elif num_adam_parameters(optimizer) != len(layout):
        return None
    adam = adam_moments(optimizer, layout, f"the simulator file {path}")
    return {positions[key]: entry for key, entry in zip(layout, adam, strict=True)
            if entry is not None and key in positions}


def save_compact(path: Path, source: Path) -> None:
    """Copy a simulator file, keeping only the used weights, in half precision.

    ``load_published`` can read the copy; the published code cannot.

    Raises:
        UserError: if ``source`` is missing, truncated, or not a simulator file.
    """
    tensors, more = _weights(source)
    unused = (_SECOND_DECODER, f"{_DECODER}vecobs.")
    architecture = {key: more[key] for key in (_ARCHITECTURE,) if key in more}
    save_tensors(path, {**architecture, _KEY: {
        key: tensor.to(torch.float16) for key, tensor in tensors.items()
        if not key.startswith(unused)}})


def is_compact(path: Path) -> bool:
    """Return whether a file contains only weights in float16, as written by ``save_compact``.

    Raises:
        UserError: if it is not a simulator file.
    """
    tensors, more = _weights(path)
    return not more.keys() - {_ARCHITECTURE} and all(
        tensor.dtype == torch.float16 for tensor in tensors.values())


def _weights(path: Path) -> tuple[dict[str, Tensor], dict]:
    """Read the tensors of a simulator file, and its further entries."""
    more = load_tensors(path, "simulator file")
    tensors = more.pop(_KEY, None)
    if not isinstance(tensors, dict):
        raise UserError(f"{path} is not a simulator file: it has no '{_KEY}'")
    return checked_weights(tensors, f"the simulator file {path}"), more


def _own_tensors(simulator: Simulator) -> dict[str, Tensor]:
    """Return the tensors of a simulator except the agent's, by name."""
    return {name: tensor for name, tensor in simulator.state_dict().items()
            if not name.startswith("agent.")}


def _unused_shapes(simulator: Simulator) -> dict[str, torch.Size]:
    """Return the shapes of the published tensors that no computation reads, by published key."""
    config = simulator.config
    if config.is_spatial:
        return {}
    decoder = {published_name(name).removeprefix(_DECODER): tensor.shape
               for name, tensor in _own_tensors(simulator).items() if name.startswith("decoder.")}
    with torch.device("meta"):  # shapes only
        vecobs = Head(config.deter_dim + config.env_h_stoch_size, _VECOBS_LAYERS,
                      simulator.agent.policy.hidden_state_size, config.layer_norm)
    vecobs_shapes = {f"vecobs.model.model.{name}": tensor.shape
                     for name, tensor in vecobs.state_dict().items()}
    return {**{_SECOND_DECODER + name: shape for name, shape in {**decoder,
                                                                **vecobs_shapes}.items()},
            **{_DECODER + name: shape for name, shape in vecobs_shapes.items()}}
