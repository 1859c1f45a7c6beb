"""Passes of a policy that are resumed behind a layer.

Many patches of one layer are compared at the price of one pass up to that layer and of one rest of
a pass a patch. The order of computation is read off the policy's own code by ``torch.fx``, and its
own modules are called, so that scopes and hooks at later layers act as in a full pass.

Letters in shape comments: B pictures, P patched passes, D hidden state, … the layer's own shape.
"""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import torch
from torch import Tensor, fx, nn

from agents.layers import find_layer
from agents.networks import Memory, Policy, PolicyOutput, to_images
from common.devices import Compute
from common.errors import UserError


class CutPass:
    """One step of a policy, cut behind one layer.

    Resumed without a change, it equals the full pass of the same pictures bit for bit. With another
    number of pictures at a time, the kernels of convolutions may round differently.

    Args:
        compute: device, precision and layout; the embedder runs under its autocast, the rest in
            float32.
        layer: a name as in ``agents.layers``.

    Attributes:
        chain: names of the modules behind the layer that run one after the other, in order: each
            reads the output of the one before alone, and nothing else reads that.

    Raises:
        UserError: if the policy has no such layer.

    Example::

        half = CutPass(policy, compute, "embedder.block2.res1.resadd").begin(frames)
        patched = half.activations.clone()
        patched[:, 7] = 0
        output = half.rest(patched)
    """

    def __init__(self, policy: Policy, compute: Compute, layer: str):
        self.policy, self.compute, self.layer = policy, compute, find_layer(policy, layer)
        one_pass = _Pass(policy)
        rest = _Tracer().trace(one_pass)
        before = copy.deepcopy(rest)
        nodes = list(rest.nodes)
        place = [str(node.target) for node in nodes].index(f"policy.{self.layer.name}")
        self.batch_dim = int(isinstance(policy.get_submodule(self.layer.name), Memory))  # (T, B, D)
        behind = set(nodes[place + 1:])
        self._earlier = nodes[:place + 1]
        self._also_read = [node for node in nodes[:place] if behind & set(node.users)]

        copies = list(before.nodes)
        same = dict(zip(nodes, copies))
        copies[-1].args = (tuple(same[node] for node in (nodes[place], *self._also_read)),)
        for node in reversed(copies[place + 1:-1]):
            before.erase_node(node)
        self.chain = _chain(nodes[place])
        self._before = _Interpreter(one_pass, before, compute)
        self._rest = _Interpreter(one_pass, rest, compute)

    def begin(self, frames: np.ndarray | Tensor, entering: Tensor | None = None) -> HalfPass:
        """Run the pass up to and with the layer.

        Args:
            frames: uint8 (B, H, W, C).
            entering: hidden states that enter (B, D); None for those of an episode's start.
        """
        frames = torch.as_tensor(frames).to(self.compute.device)
        if entering is None:
            entering = self.policy.initial_states(len(frames))
        activations, *also_read = self._before.run(
            to_images(frames, self.compute.channels_last, self.compute.dtype),
            entering.to(self.compute.device))
        return HalfPass(self, activations.squeeze(0) if self.batch_dim else activations,
                        tuple(also_read))

    def finish(self, activations: Tensor, also_read: tuple[Tensor, ...]) -> PolicyOutput:
        """Run what lies behind the layer; see :meth:`HalfPass.rest`, which calls this."""
        if activations.ndim == 4 and self.compute.channels_last:
            activations = activations.contiguous(memory_format=torch.channels_last)
        if self.batch_dim:
            activations = activations.unsqueeze(0)
        known = dict.fromkeys(self._earlier)
        known |= zip(self._also_read, also_read)
        known[self._earlier[-1]] = activations
        return self._rest.run(initial_env=known)


@dataclasses.dataclass(frozen=True)
class HalfPass:
    """A pass of B pictures up to and with one layer.

    Attributes:
        cut: which policy and layer.
        activations: the layer's output (B, …), in the precision of the pass; not to be written to.
        also_read: other values that the rest of the pass reads, such as the sum that a residual
            unit adds to, and the hidden states that enter (B, …) each.
    """

    cut: CutPass
    activations: Tensor
    also_read: tuple[Tensor, ...]

    def rest(self, activations: Tensor | None = None,
             pictures: Tensor | None = None) -> PolicyOutput:
        """Resume the pass behind the layer.

        Args:
            activations: put in place of the layer's output (P, …); None for the output as it is.
            pictures: index of the picture that each row of ``activations`` belongs to, int64 (P,);
                None if row b belongs to picture b.

        Raises:
            UserError: if ``activations`` have not the layer's shape, or another number of rows
                than there are pictures.
        """
        if activations is None:
            activations = self.activations
        also_read = self.also_read
        if pictures is not None:
            also_read = tuple(value[pictures] for value in also_read)
        expected = (len(self.activations if pictures is None else pictures),
                    *self.activations.shape[1:])
        if tuple(activations.shape) != expected:
            raise UserError(f"a pass resumed behind {self.cut.layer.name} takes activations of "
                            f"shape {expected}, not {tuple(activations.shape)}")
        return self.cut.finish(activations.to(self.activations.dtype), also_read)


def _chain(node: fx.Node) -> tuple[str, ...]:
    """Names of the modules behind a node; see ``CutPass.chain``."""
    names = []
    while len(node.users) == 1:
        (user,) = node.users
        if user.op != "call_module" or user.all_input_nodes != [node]:
            break
        names.append(str(user.target).removeprefix("policy."))
        node = user
    return tuple(names)


class _Pass(nn.Module):
    """A whole step as one module. Constants that ``torch.fx`` finds become attributes of this
    module and not of the policy."""

    def __init__(self, policy: Policy):
        super().__init__()
        self.policy = policy

    def forward(self, images: Tensor, entering: Tensor) -> PolicyOutput:
        return self.policy.step(self.policy.embed(images).float(), entering)


class _Tracer(fx.Tracer):
    """Every layer is one node, the memory too; parameters read outside of layers are constants."""

    def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
        return isinstance(module, Memory) or not any(module.children())

    def getattr(self, attr: str, attr_val, parameter_proxy_cache):
        return attr_val


class _Interpreter(fx.Interpreter):
    """Runs a graph, the layers of the embedder in the precision of ``compute``."""

    def __init__(self, module: nn.Module, graph: fx.Graph, compute: Compute):
        super().__init__(module, graph=graph)
        self._compute = compute

    def call_module(self, target: str, args: tuple, kwargs: dict):
        if not target.startswith("policy.embedder."):
            return super().call_module(target, args, kwargs)
        with self._compute.autocast():
            return super().call_module(target, args, kwargs)
