"""Partial forward passes: run a policy up to a layer once, then resume from there for many patches.

The order of computation is traced from the policy's own code by ``torch.fx``, and its own modules
are called, so that patches and hooks at later layers act as in a full forward pass.

Letters in shape comments: B frames, P patched passes, D hidden units, H W C a frame; … stands for
the layer's own shape.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses

import numpy as np
import torch
from torch import Tensor, fx, nn

from agents.layers import find_layer
from agents.networks import Memory, Policy, PolicyOutput, to_images
from common.devices import Compute
from common.errors import UserError, shortened


class PartialForward:
    """One step of a policy, split after one layer.

    A pass that is resumed with unchanged activations equals the full forward pass of the same
    frames bit for bit. With another batch size, convolution kernels may round differently.

    Args:
        policy: policy to run.
        compute: device, precision and memory layout; the embedder runs under its autocast,
            everything else in float32.
        layer: name of the layer, as in ``agents.layers``.

    Attributes:
        chain: names of the modules that follow the layer in sequence. Each of them reads only the
            output of its predecessor, which no other module reads.
        bypassed: whether later modules also read the frame, or the output of an earlier module.
            Reading the recurrent states before the step does not count.

    Raises:
        UserError: if the policy has no such layer.

    Example::

        prefix = PartialForward(policy, compute, "embedder.block2.res1.resadd").run_to(frames)
        patched = prefix.activations.clone()
        patched[:, 7] = 0
        output = prefix.run_from(patched)
    """

    def __init__(self, policy: Policy, compute: Compute, layer: str):
        self.policy, self.compute, self.layer = policy, compute, find_layer(policy, layer)
        step = _Step(policy)
        try:
            after = _Tracer(f"policy.{self.layer.name}").trace(step)
        except Exception as error:  # the code of a wrapped module can be anything
            if policy.known_layers is None:
                raise
            raise UserError("the wrapped module cannot be run in parts, because torch.fx cannot "
                            f"trace it: {shortened(str(error))}") from error
        after.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
        before = copy.deepcopy(after)
        nodes = list(after.nodes)
        place = [str(node.target) for node in nodes].index(f"policy.{self.layer.name}")
        module = policy.get_submodule(self.layer.name)
        self.batch_dim = int(isinstance(module, Memory) and not module.one_step)  # (T, B, D)
        later = set(nodes[place + 1:])
        self._earlier = nodes[:place + 1]
        self._also_read = [node for node in nodes[:place] if later & set(node.users)]
        from_frame = {nodes[0]}
        for node in nodes[:place]:
            if from_frame & set(node.all_input_nodes):
                from_frame.add(node)
        self.bypassed = bool(from_frame & set(self._also_read))

        copies = list(before.nodes)
        same = dict(zip(nodes, copies))
        copies[-1].args = (tuple(same[node] for node in (nodes[place], *self._also_read)),)
        for node in reversed(copies[place + 1:-1]):
            before.erase_node(node)
        self.chain = _chain(nodes[place])
        self._before = _Interpreter(step, before, compute)
        self._after = _Interpreter(step, after, compute)

    def run_to(self, frames: np.ndarray | Tensor, entering: Tensor | None = None) -> Prefix:
        """Run the policy up to and including the layer.

        Args:
            frames: uint8 (B, H, W, C), or images.
            entering: recurrent states before the step (B, D); by default initial states.

        Returns:
            The layer's output, and everything else needed to resume the pass.
        """
        frames = torch.as_tensor(frames).to(self.compute.device)
        if entering is None:
            entering = self.policy.initial_states(len(frames))
        activations, *also_read = self._before.run(
            to_images(frames, self.compute.channels_last, self.compute.dtype),
            entering.to(self.compute.device))
        return Prefix(self, activations.squeeze(0) if self.batch_dim else activations,
                        tuple(also_read))

    def run_from(self, activations: Tensor, also_read: tuple[Tensor, ...]) -> PolicyOutput:
        """Run the modules after the layer; called by :meth:`Prefix.run_from`.

        Args:
            activations: output of the layer (P, …).
            also_read: see ``Prefix.also_read``; (P, …) each.
        """
        if activations.ndim == 4 and self.compute.channels_last:
            activations = activations.contiguous(memory_format=torch.channels_last)
        if self.batch_dim:
            activations = activations.unsqueeze(0)
        known = dict.fromkeys(self._earlier)
        known |= zip(self._also_read, also_read)
        known[self._earlier[-1]] = activations
        return self._after.run(initial_env=known)


@dataclasses.dataclass(frozen=True)
class Prefix:
    """Results of a forward pass of B frames up to and including a layer.

    Attributes:
        forward: partial forward pass that these results belong to.
        activations: output of the layer (B, …), in the precision of the pass; do not modify it.
        also_read: other values that later modules read, (B, …) each, such as the input of a
            residual block and the recurrent states before the step.
    """

    forward: PartialForward
    activations: Tensor
    also_read: tuple[Tensor, ...]

    def run_from(self, activations: Tensor | None = None,
                 frames: Tensor | None = None) -> PolicyOutput:
        """Run the modules after the layer.

        Args:
            activations: replacement of the layer's output (P, …); by default the output itself.
            frames: index of the frame of each row of ``activations``, int64 (P,); by default row b
                belongs to frame b.
        """
        if activations is None:
            activations = self.activations
        also_read = self.also_read
        if frames is not None:
            also_read = tuple(value[frames] for value in also_read)
        return self.forward.run_from(activations.to(self.activations.dtype), also_read)


def _chain(node: fx.Node) -> tuple[str, ...]:
    """Return the names of the modules after a node; see ``PartialForward.chain``."""
    names = []
    while len(node.users) == 1:
        (user,) = node.users
        if user.op != "call_module" or user.all_input_nodes != [node]:
            break
        names.append(str(user.target).removeprefix("policy."))
        node = user
    return tuple(names)


class _Step(nn.Module):
    """Module that runs a whole step of a policy.

    ``torch.fx`` stores constants as attributes of the module that it traces. This module protects
    the policy from them.
    """

    def __init__(self, policy: Policy):
        super().__init__()
        self.policy = policy

    def forward(self, images: Tensor, entering: Tensor) -> PolicyOutput:
        return self.policy.step(self.policy.embed(images).float(), entering)


class _Tracer(fx.Tracer):
    """Tracer that treats all layers, including the memory, as leaf modules, and parameters outside
    layers as constants.

    Args:
        layer: path of a layer, which is a leaf even if it has parts, and is not hidden in one.
    """

    def __init__(self, layer: str):
        super().__init__()
        self._layer = layer

    def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
        if qualified_name == self._layer or not any(module.children()):
            return True
        return isinstance(module, Memory) and not self._layer.startswith(f"{qualified_name}.")

    def getattr(self, attr: str, attr_val, parameter_proxy_cache):
        return attr_val


class _Interpreter(fx.Interpreter):
    """Interpreter that runs the layers of the embedder in the precision of ``compute``."""

    def __init__(self, module: nn.Module, graph: fx.Graph, compute: Compute):
        super().__init__(module, graph=graph)
        self._compute = compute

    def call_module(self, target, args: tuple, kwargs: dict):
        in_embedder = str(target).startswith("policy.embedder.")
        with self._compute.autocast() if in_embedder else contextlib.nullcontext():
            return super().call_module(target, args, kwargs)
