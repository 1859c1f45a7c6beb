"""Use any module as an agent: ``wrap(module)`` has the interface of ``agents.networks.Policy``.

The *hidden state* of a wrapped agent is what its policy and value heads read, as in our own agents.
The heads are the linear layers that compute the module's outputs. They are found by running it. If
there are none, the hidden state is the outputs themselves, and the heads copy them. A module with
memory returns its new state, too; the hidden state is then this state, followed by what the heads
read if that is not a part of it.

Layers keep the module's own names, such as ``embedder.module.conv1``, or ``core.module.conv1`` in
a module with memory.

Letters in shape comments: S units of the module's state, F inputs of the heads.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from agents.layers import Layer
from agents.networks import Embedder, HiddenState, Memory, Policy
from common.errors import UserError, shortened
from common.game_constants import FRAME_SIZE, NUM_ACTIONS


class _Body(nn.Module):
    """A module without its heads, which maps images to what the heads read."""

    def __init__(self, module: nn.Module, channels_last: bool, scale: float):
        nn.Module.__init__(self)
        self.module, self.channels_last, self.scale = module, channels_last, scale
        self.read: Callable[[Tensor, Tensor], Tensor] = _join

    def run(self, images: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
        """Return the features (N, F), and the new state (N, S) of a module with memory."""
        frames = images * self.scale if self.scale != 1 else images
        logits, values, *state = self.module(
            frames.permute(0, 2, 3, 1) if self.channels_last else frames, *memory)
        return self.read(logits, values), *state


@dataclasses.dataclass(frozen=True)
class _Heads:
    """Linear layers that compute logits and values.

    Attributes:
        names: names of both in the module.
        layers: both layers.
        inputs: their inputs when the module was run, (2, F) each.
    """

    names: list[str]
    layers: list[nn.Linear]
    inputs: list[Tensor]

    @property
    def share(self) -> bool:
        """Whether both read the same features."""
        first, second = self.inputs
        return first.shape == second.shape and torch.equal(first, second)


def _join(logits: Tensor, values: Tensor) -> Tensor:
    """Concatenate two outputs (N, A) and (N, 1) or (N,)."""
    return torch.cat([logits, values.reshape(logits.shape[0], -1)], dim=-1)


def _first(features: Tensor, values: Tensor) -> Tensor:
    return features


class _WrappedEmbedder(_Body, Embedder):
    """A module without memory: images (N, C, H, W) to features (N, F)."""

    def forward(self, images: Tensor) -> Tensor:
        return self.run(images)[0]


class _FrameEmbedder(Embedder):
    """Embedder of a module with memory, which reads the images themselves."""

    def __init__(self):
        super().__init__(3 * FRAME_SIZE**2, {"flatten": nn.Flatten()})


class _WrappedMemory(_Body, Memory):
    """A module with memory. Its state is the module's state (S), and the features (F) unless they
    are a part of it."""

    name: ClassVar[str] = "core"
    one_step: ClassVar[bool] = True
    size: int
    keeps_features: bool = True

    def to_state(self, numbers: Tensor) -> Tensor:
        return numbers

    def clamp(self, states: Tensor) -> Tensor:
        return states

    def forward(self, x: Tensor, hidden: Tensor, masks: Tensor | None, initial: Tensor) -> Tensor:
        if isinstance(x, fx.Proxy):
            return self._step(x, hidden, torch.ones(1))
        if x.ndim == 2:
            return self._step(x, hidden, torch.ones(len(x), device=x.device))
        states = []
        for flat, mask in zip(x, torch.ones_like(x[..., 0]) if masks is None else masks):
            keep = mask.unsqueeze(-1)
            hidden = self._step(flat, keep * hidden + (1 - keep) * initial, mask)
            states.append(hidden)
        return torch.stack(states)  # (T, B, D)

    def _step(self, flat: Tensor, hidden: Tensor, mask: Tensor) -> Tensor:
        images = flat.unflatten(-1, (3, FRAME_SIZE, FRAME_SIZE))
        features, state = self.run(images, hidden[:, :self.size], mask)
        return torch.cat([state, features], dim=-1) if self.keeps_features else state


class WrappedPolicy(Policy):
    """Result of ``wrap``."""

    def to_state(self, numbers: Tensor) -> Tensor:
        return numbers

    def step(self, embeddings: Tensor, hidden: Tensor):
        if not self.recurrent:
            return super().step(embeddings, hidden)
        after = self.memory(embeddings, hidden, None, self.initial_state())
        return self._heads(self.hidden_state(hidden, after))


def wrap(module: nn.Module, *, state_size: int = 0, channels_last: bool = False,
         scale: float = 1.0) -> WrappedPolicy:
    """Use a module as an agent, wherever a policy is expected.

    The policy holds a copy of the module in evaluation mode. To use it in scripts, write a file
    ``my_agent.py`` that assigns it to ``agent``, and give ``--agent_file my_agent.py``.

    Args:
        module: maps frames (N, 3, 64, 64) to logits of Procgen's 15 actions (N, 15) and values (N,)
            or (N, 1). With ``state_size``, it maps frames, states (N, S) and masks (N,), which are
            0 where an episode begins, to logits, values and new states (N, S).
        state_size: size S of the module's state, which is 0 at the start of an episode; 0 for a
            module without memory.
        channels_last: whether the module reads frames (N, 64, 64, 3).
        scale: range of the module's frames: 1 for 0 to 1, 255 for 0 to 255.

    Raises:
        UserError: if the module fails on such inputs, or its outputs have other shapes.

    Example::

        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.conv = torch.nn.Conv2d(3, 8, 8, 4)
        ...         self.actor, self.critic = torch.nn.Linear(1800, 15), torch.nn.Linear(1800, 1)
        ...     def forward(self, frames):
        ...         x = self.conv(frames).relu().flatten(1)
        ...         return self.actor(x), self.critic(x)
        >>> output = wrap(Net())(recording.episode(0).frames[:8])
        >>> assert output.logits.shape == (8, 15) and output.hidden_states.shape == (8, 1800)
    """
    module = copy.deepcopy(module).eval().float()
    for part in module.modules():
        if getattr(part, "inplace", False):
            vars(part)["inplace"] = False  # it would overwrite the output of the layer before it
    body = (_WrappedMemory if state_size else _WrappedEmbedder)(module, channels_last, scale)
    body.read = _join
    inputs = _probe_inputs(module, state_size)
    heads = _find_heads(body, inputs)
    if heads and not _remove_heads(body, heads, inputs):
        heads = None
    with torch.no_grad():
        features, *state = body.run(*inputs)
    begin = 0
    if isinstance(body, _WrappedMemory):
        begin = next((place for place in range(state_size - features.shape[1] + 1) if torch.equal(
            state[0][:, place:place + features.shape[1]], features)), state_size)
        body.keeps_features = begin == state_size
        body.size, body.state_size = state_size, state_size + (
            features.shape[1] if body.keeps_features else 0)
        policy = WrappedPolicy(_FrameEmbedder(), None, learned_initial_state=False, memory=body)
        nn.init.zeros_(policy.init_hx)
    else:
        body.output_dim = features.shape[1]
        policy = WrappedPolicy(body, None, learned_initial_state=False)
    _set_heads(policy, heads, begin)
    policy = policy.to(inputs[0].device).eval()
    policy.known_layers = _measured_layers(policy, heads.layers if heads else [])
    return policy


def agent_script(path: Path) -> dict[str, Any]:
    """Run a Python file that defines an agent, and return its variables.

    Only files that the user names as the agent are run. ``agent`` is a module or a policy; facts
    about its training have the names of ``AgentOrigin``.

    Raises:
        UserError: if there is no such file, it fails, or does not define ``agent``.
    """
    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise UserError(f"there is no agent file {path}") from error
    return _run_script(path.resolve(), changed)


@functools.lru_cache(maxsize=8)
def _run_script(path: Path, changed: int) -> dict[str, Any]:
    sys.path.insert(0, str(path.parent))  # as if the file were run by itself
    try:
        variables = runpy.run_path(str(path), run_name="agent")
    except (Exception, SystemExit) as error:
        raise UserError(f"the agent file {path} failed: {type(error).__name__}: "
                        f"{shortened(str(error))}") from error
    finally:
        sys.path.remove(str(path.parent))
    agent = variables.get("agent")
    if not isinstance(agent, nn.Module):
        raise UserError(f"the agent file {path} does not define 'agent', a module; see "
                        "docs/your_agent.md")
    return {**variables, "agent": agent if isinstance(agent, Policy) else wrap(agent)}


def _probe_inputs(module: nn.Module, state_size: int) -> tuple[Tensor, ...]:
    """Return random images (2, C, H, W), and for a module with memory states and masks."""
    device = next((tensor.device for tensor in module.parameters()), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(2, 3, FRAME_SIZE, FRAME_SIZE, generator=generator)
    memory = (torch.rand(2, state_size, generator=generator), torch.ones(2)) if state_size else ()
    return tuple(tensor.to(device) for tensor in (images, *memory))


@torch.no_grad()
def _find_heads(body: _Body, inputs: tuple[Tensor, ...]) -> _Heads | None:
    """Find the linear layers that compute logits and values, and their inputs; None if there are
    none. Raise UserError unless the outputs are as ``wrap`` describes."""
    calls: list[tuple[str, nn.Linear, Tensor, Tensor]] = []
    hooks = [part.register_forward_hook(
        lambda part, args, output, name=name: calls.append((name, part, args[0], output)))
        for name, part in body.module.named_modules() if isinstance(part, nn.Linear)]
    outputs: list[Tensor] = []

    def read(logits: Tensor, values: Tensor) -> Tensor:
        outputs.extend([logits, values])
        return logits

    body.read = read
    expected = "logits (N, 15), values (N,) or (N, 1)" + (
        " and states (N, S)" if len(inputs) > 1 else "")
    try:
        _, *state = body.run(*inputs)
        shapes = [tuple(tensor.shape) for tensor in (*outputs, *state)]
    except Exception as error:
        raise UserError(f"the module does not map frames to {expected}: "
                        f"{type(error).__name__}: {error}") from error
    finally:
        body.read = _join
        for hook in hooks:
            hook.remove()
    logits, values = outputs
    if (shapes[0] != (2, NUM_ACTIONS) or shapes[1] not in ((2,), (2, 1))
            or [tuple(tensor.shape) for tensor in inputs[1:2]] != shapes[2:]):
        raise UserError(f"the module must return {expected}, not tensors of the shapes {shapes} "
                        "for N = 2")
    found = []
    for wanted in (logits, values):
        matching = [call for call in calls if call[2].ndim == 2 and torch.equal(
            call[3].reshape(-1), wanted.reshape(-1))]
        if len(matching) != 1:
            return None
        found += matching
    names, layers, entering, _ = map(list, zip(*found))
    return _Heads(names, layers, entering)


@torch.no_grad()
def _remove_heads(body: _Body, heads: _Heads, inputs: tuple[Tensor, ...]) -> bool:
    """Replace heads by identities, so that the module returns their inputs. Leave the module
    unchanged and return False if it does not."""
    replaced = list(zip(heads.names, heads.layers))[:1 if heads.share else 2]
    for name, _ in replaced:
        _set_module(body.module, name, nn.Identity())
    body.read = _first if heads.share else _join
    wanted = heads.inputs[0] if heads.share else torch.cat(heads.inputs, dim=-1)
    try:
        if torch.equal(body.run(*inputs)[0], wanted):
            return True
    except Exception:  # the user's code may fail in any way on inputs of other shapes
        pass
    for name, head in replaced:
        _set_module(body.module, name, head)
    body.read = _join
    return False


def _set_module(root: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(root.get_submodule(parent), own, module)


@torch.no_grad()
def _set_heads(policy: Policy, heads: _Heads | None, begin: int) -> None:
    """Set the policy's heads to those of the module, or to copies of the features; ``begin`` is the
    position of the features in the hidden state."""
    for number, ours in enumerate((policy.fc_policy, policy.fc_value)):
        nn.init.zeros_(ours.weight)
        nn.init.zeros_(ours.bias)
        weight = torch.eye(ours.out_features)
        if heads is not None:
            theirs = heads.layers[number]
            weight = theirs.weight
            if theirs.bias is not None:
                ours.bias.copy_(theirs.bias)
        ours.weight[:, begin:begin + weight.shape[1]] = weight
        begin += 0 if heads is not None and heads.share else weight.shape[1]


@torch.no_grad()
def _measured_layers(policy: Policy, heads: Sequence[nn.Module]) -> tuple[Layer, ...]:
    """Return the layers of a policy in the order of computation, by running it.

    A layer is a module that runs once and whose output no module inside it returns. Kernel, stride
    and padding give the positions of its cells; after an operation that is not a module, the cells
    are assumed to tile the frame. ``heads`` are heads of the module, which the policy's replace.
    """
    layers: dict[str, Layer | None] = {}
    outputs: list[Tensor] = []
    positions = {FRAME_SIZE: (1, 0.0)}  # stride and first pixel, by height of the map

    def position(size: int) -> tuple[int, float]:
        if size not in positions:
            stride = max(round(FRAME_SIZE / size), 1)
            positions[size] = stride, (stride - 1) / 2
        return positions[size]

    def hook(name: str, module: nn.Module, args: tuple, output: Any) -> None:
        copied = any(output is other for other in outputs) and not isinstance(module, HiddenState)
        if not isinstance(output, Tensor) or copied:
            return
        outputs.append(output)
        shape = tuple(output.shape[1 if len(output) == 2 else 2:])
        place: tuple[int, float] | tuple[None, None] = None, None
        if len(shape) == 3:
            if isinstance(module, nn.Conv2d | nn.MaxPool2d | nn.AvgPool2d):
                kernel, step, padding = (
                    int(value[0] if isinstance(value, tuple) else value)
                    for value in (module.kernel_size, module.stride, module.padding))
                stride, first = position(args[0].shape[-2])
                if shape[1] not in positions:
                    positions[shape[1]] = (stride * step,
                                           first + ((kernel - 1) / 2 - padding) * stride)
            place = position(shape[1])
        layers[name] = None if name in layers else Layer(name, shape, *place)

    handles = [module.register_forward_hook(
        lambda module, args, output, name=name: hook(name, module, args, output))
        for name, module in policy.named_modules() if name not in ("", "embedder")
        and not any(module is head for head in heads)]
    try:
        images = _probe_inputs(policy, 0)[0]
        policy.step(policy.embed(images), policy.initial_states(len(images)))
    finally:
        for handle in handles:
            handle.remove()
    return tuple(layer for layer in layers.values() if layer is not None and layer.shape)
