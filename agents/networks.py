"""The agent's networks: IMPALA, Nature or clear embedding, GRU memory, policy and value heads.

Every module is a named attribute that is created once, so a forward hook can reach every
activation, and the state-dict keys are those of the published files.

The *hidden state* of an agent is the vector that its policy and value heads read: the state of the
GRU, or the embedding in a feed-forward agent, which has no memory. All code that reads or changes
hidden states works for both kinds of agent.

Letters in shape comments: E embedding.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from agents.frames import as_images
from agents.pooling import halve
from common.errors import UserError
from common.game_constants import NUM_ACTIONS

ARCHITECTURES = ("impala", "nature", "clear")


class ResidualAdd(nn.Module):
    """Addition as a module, so that a hook can read and change the sum."""

    def forward(self, out: Tensor, x: Tensor) -> Tensor:
        return out + x


class ResidualUnit(nn.Module):
    """Residual unit on (N, C, H, W): relu, conv 3x3, relu, conv 3x3, plus the input."""

    def __init__(self, channels: int):
        super().__init__()
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(channels, channels, kernel_size=3, padding=1)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, kernel_size=3, padding=1)
        self.resadd = ResidualAdd()

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(self.relu1(x))
        out = self.conv2(self.relu2(out))
        return self.resadd(out, x)


class HalvingMaxPool(nn.MaxPool2d):
    """Max-pool 3x3, stride 2, padding 1, for images of even height and width.

    See :func:`agents.pooling.halve`.
    """

    def __init__(self):
        super().__init__(kernel_size=3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return halve(x)


class ImpalaBlock(nn.Module):
    """IMPALA block: conv 3x3, max-pool that halves height and width, two residual units."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1)
        self.maxpool = HalvingMaxPool()
        self.res1 = ResidualUnit(out_channels)
        self.res2 = ResidualUnit(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.res2(self.res1(self.maxpool(self.conv(x))))


class Embedder(nn.Sequential):
    """Base class of networks that map images in [0, 1] (N, C, H, W) to embeddings (N, E).

    Args:
        output_dim: size E of the embedding.
        layers: modules by name, in the order of computation.
        draw: function that fills a tensor with initial weights. Biases are 0.
    """

    def __init__(self, output_dim: int, layers: dict[str, nn.Module],
                 draw: Callable[[Tensor], object] = nn.init.xavier_uniform_):
        super().__init__(OrderedDict(layers))
        self.output_dim = output_dim
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                draw(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


class ImpalaEmbedder(Embedder):
    """The convolutional network of Espeholt et al. (2018), "IMPALA", figure 3.

    Args:
        output_dim: size E of the embedding.
        channels: numbers of channels of the three blocks.
    """

    def __init__(self, output_dim: int, channels: tuple[int, int, int] = (16, 32, 32)):
        super().__init__(output_dim, {
            "block1": ImpalaBlock(3, channels[0]),
            "block2": ImpalaBlock(channels[0], channels[1]),
            "block3": ImpalaBlock(channels[1], channels[2]),  # (N, C, 8, 8)
            "relu3": nn.ReLU(),
            "flatten": nn.Flatten(),
            "fc": nn.Linear(channels[2] * 8 * 8, output_dim),
            "relufc": nn.ReLU()})


class NatureEmbedder(Embedder):
    """The convolutional network of Mnih et al. (2015), "Human-level control", for 64x64 frames."""

    def __init__(self, output_dim: int = 512):
        super().__init__(output_dim, {
            "conv1": nn.Conv2d(3, 32, kernel_size=8, stride=4),
            "relu1": nn.ReLU(),
            "conv2": nn.Conv2d(32, 64, kernel_size=4, stride=2),
            "relu2": nn.ReLU(),
            "conv3": nn.Conv2d(64, 64, kernel_size=3, stride=1),
            "relu3": nn.ReLU(),  # (N, 64, 4, 4)
            "flatten": nn.Flatten(),
            "fc": nn.Linear(64 * 4 * 4, output_dim),
            "relufc": nn.ReLU()},
            functools.partial(nn.init.orthogonal_, gain=nn.init.calculate_gain("relu")))


class L2Pool(nn.AvgPool2d):
    """L2 pooling, sqrt(2x2 mean of squares + 1e-8): (N, C, H, W) to (N, C, H / 2, W / 2)."""

    def __init__(self):
        super().__init__(kernel_size=2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x.square()) + 1e-8).sqrt()


class ClearEmbedder(Embedder):
    """The convolutional network of Hilton et al. (2020), "Understanding RL Vision", for 64x64
    frames: few convolutions, no residual units, and L2 pooling over disjoint windows."""

    def __init__(self, output_dim: int = 512):
        super().__init__(output_dim, {
            "conv1a": nn.Conv2d(3, 16, kernel_size=7, padding=3),
            "relu1a": nn.ReLU(),
            "pool1": L2Pool(),  # (N, 16, 32, 32)
            "conv2a": nn.Conv2d(16, 32, kernel_size=5, padding=2),
            "relu2a": nn.ReLU(),
            "conv2b": nn.Conv2d(32, 32, kernel_size=5, padding=2),
            "relu2b": nn.ReLU(),
            "pool2": L2Pool(),  # (N, 32, 16, 16)
            "conv3a": nn.Conv2d(32, 32, kernel_size=5, padding=2),
            "relu3a": nn.ReLU(),
            "pool3": L2Pool(),  # (N, 32, 8, 8)
            "conv4a": nn.Conv2d(32, 32, kernel_size=5, padding=2),
            "relu4a": nn.ReLU(),
            "pool4": L2Pool(),  # (N, 32, 4, 4)
            "flatten": nn.Flatten(),
            "fc1": nn.Linear(32 * 4 * 4, 256),
            "relufc1": nn.ReLU(),
            "fc": nn.Linear(256, output_dim),
            "relufc": nn.ReLU()})


class Memory(nn.Module):
    """GRU whose state can be reset before any step, at the start of an episode.

    The inner module is also called ``gru``, because published files have ``gru.gru.*`` keys.

    Attributes:
        name: attribute of the policy that holds the memory.
        state_size: size D of the state.
        one_step: whether ``Policy.step`` calls the module without the dimension of time.
    """

    name: ClassVar[str] = "gru"
    one_step: ClassVar[bool] = False

    def __init__(self, input_dim: int, hidden_dim: int):
        super().__init__()
        self.state_size = hidden_dim
        self.gru = nn.GRU(input_dim, hidden_dim)

    def to_state(self, numbers: Tensor) -> Tensor:
        """Map real numbers (…, D) smoothly to the range of states."""
        return torch.tanh(numbers)

    def clamp(self, states: Tensor) -> Tensor:
        """Clamp states (…, D) to their range."""
        return states.clamp(-1, 1)

    def forward(self, x: Tensor, hidden: Tensor, masks: Tensor | None,
                initial: Tensor) -> Tensor:
        """Run the GRU for T steps.

        Args:
            x: inputs (T, B, E).
            hidden: state that enters the first step (B, D).
            masks: (T, B); 0 resets the state that enters a step to ``initial``. None for no
                resets.
            initial: initial state of an episode (D,).

        Returns:
            The state that leaves each step (T, B, D).
        """
        if masks is None:
            return self.gru(x, hidden.unsqueeze(0).contiguous())[0]
        keep = masks.unsqueeze(-1)  # (T, B, 1)
        starts = (masks == 0).any(dim=1).tolist()  # a segment begins where any state is reset
        borders = [0, *(t for t in range(1, len(starts)) if starts[t]), len(starts)]
        outputs = []
        for begin, end in itertools.pairwise(borders):
            hidden = keep[begin] * hidden + (1 - keep[begin]) * initial
            output, last = self.gru(x[begin:end], hidden.unsqueeze(0).contiguous())
            hidden = last[0]
            outputs.append(output)
        return torch.cat(outputs)


class LstmMemory(Memory):
    """One or several LSTMs that read the same embedding, with the interface of ``Memory``.

    The state is the outputs h of all LSTMs, followed by their cells c. The heads read the whole
    state; in agents from other programs their weights are 0 on all of it except the output of one
    LSTM.

    Args:
        sizes: number of units H of each LSTM.
    """

    name: ClassVar[str] = "lstm"

    def __init__(self, input_dim: int, sizes: Sequence[int]):
        nn.Module.__init__(self)
        self.sizes, self.state_size = tuple(sizes), 2 * sum(sizes)
        self.cells = nn.ModuleList(nn.LSTMCell(input_dim, size) for size in sizes)

    def to_state(self, numbers: Tensor) -> Tensor:
        outputs, cells = numbers.chunk(2, dim=-1)
        return torch.cat([torch.tanh(outputs), cells], dim=-1)  # cells are unbounded

    def clamp(self, states: Tensor) -> Tensor:
        outputs, cells = states.chunk(2, dim=-1)
        return torch.cat([outputs.clamp(-1, 1), cells], dim=-1)

    def forward(self, x: Tensor, hidden: Tensor, masks: Tensor | None,
                initial: Tensor) -> Tensor:
        states = []
        for step, inputs in enumerate(x):
            if masks is not None:
                keep = masks[step].unsqueeze(-1)
                hidden = keep * hidden + (1 - keep) * initial
            h, c = (part.split(self.sizes, dim=-1) for part in hidden.chunk(2, dim=-1))
            after = [cell(inputs, pair) for cell, *pair in zip(self.cells, h, c)]
            hidden = torch.cat([*(pair[0] for pair in after), *(pair[1] for pair in after)], dim=-1)
            states.append(hidden)
        return torch.stack(states)  # (T, B, D)


class HiddenState(nn.Module):
    """Identity on the hidden state that leaves a step, so that a hook can read and change it."""

    def forward(self, entering: Tensor, leaving: Tensor) -> Tensor:
        """Return ``leaving`` (…, D); ``entering`` (B, D) is an input for the hooks only."""
        return leaving


@dataclasses.dataclass(frozen=True)
class PolicyOutput:
    """Outputs of the agent; the leading dimensions are those of its input.

    Attributes:
        logits: the policy head's output (…, A).
        values: value estimates (…,).
        hidden_states: state that leaves the step (…, D), the input of both heads.
    """

    logits: Tensor
    values: Tensor
    hidden_states: Tensor

    @property
    def log_probs(self) -> Tensor:
        """Log-probabilities of the actions (…, A)."""
        return torch.log_softmax(self.logits, dim=-1)


class Policy(nn.Module):
    """Complete agent: embedder, optional GRU, policy head and value head.

    Args:
        embedder: network that maps images to embeddings.
        hidden_state_size: size D of the GRU's state, or None for a feed-forward agent, where D = E.
        num_actions: number of actions A.
        learned_initial_state: whether a GRU starts an episode from the trainable vector
            ``init_hx``; otherwise from zeros, as the published agents effectively did. A
            feed-forward agent has no such vector and ignores its initial state.
        memory: memory of a recurrent agent; by default a new GRU.

    Attributes:
        edits: permanent edits of layers, in order; ``agents.edits.add_edit`` adds them.
        known_layers: result of ``agents.layers.all_layers``, if it does not follow from the types
            of the modules, as for ``agents.wrap``.
    """

    known_layers: tuple | None = None

    def __init__(self, embedder: Embedder, hidden_state_size: int | None,
                 num_actions: int = NUM_ACTIONS, learned_initial_state: bool = True,
                 memory: Memory | None = None):
        super().__init__()
        self.edits: tuple = ()
        self.embedder = embedder
        self.learned_initial_state = learned_initial_state
        if hidden_state_size is not None and memory is None:
            memory = Memory(embedder.output_dim, hidden_state_size)
        self.recurrent = memory is not None
        self.hidden_state_size: int = (embedder.output_dim if memory is None
                                       else memory.state_size)
        if memory is not None:
            self._memory_name = memory.name
            setattr(self, memory.name, memory)
            self.init_hx = nn.Parameter(0.1 * torch.randn(self.hidden_state_size))
        self.hidden_state = HiddenState()
        self.fc_policy = nn.Linear(self.hidden_state_size, num_actions)
        self.fc_value = nn.Linear(self.hidden_state_size, 1)
        for head, gain in ((self.fc_policy, 0.01), (self.fc_value, 1.0)):
            nn.init.orthogonal_(head.weight, gain=gain)
            nn.init.zeros_(head.bias)

    @property
    def device(self) -> torch.device:
        return self.fc_value.weight.device

    @property
    def memory(self) -> Memory:
        """The memory of a recurrent agent."""
        return getattr(self, self._memory_name)

    def initial_state(self) -> Tensor:
        """Return the state in which an episode starts (D,)."""
        if self.recurrent and self.learned_initial_state:
            return self.init_hx
        return torch.zeros(self.hidden_state_size, device=self.device)

    def initial_states(self, num: int) -> Tensor:
        """Return the initial state for ``num`` environments (num, D), without gradient."""
        return self.initial_state().detach().expand(num, -1).clone()

    def to_state(self, numbers: Tensor) -> Tensor:
        """Output activation for networks that predict hidden states.

        It maps real numbers (…, D) smoothly to the range of hidden states: (-1, 1) for a GRU and
        for the outputs of an LSTM, and (0, inf) for an embedding, which ends in a ReLU.
        """
        return self.memory.to_state(numbers) if self.recurrent else functional.softplus(numbers)

    def clamp_states(self, states: Tensor) -> Tensor:
        """Clamp hidden states (…, D) to the range of a memory's states."""
        return self.memory.clamp(states) if self.recurrent else states

    def embed(self, images: Tensor) -> Tensor:
        """Embed images in [0, 1] (N, C, H, W) as (N, E), in the precision of autocast."""
        return self.embedder(images)

    def sequence(self, embeddings: Tensor, hidden: Tensor,
                 masks: Tensor | None) -> PolicyOutput:
        """Run T steps on embeddings.

        Args:
            embeddings: (T, B, E), float32.
            hidden: state that enters the first step (B, D); used only by a GRU.
            masks: (T, B), 1 - done: 0 where a step is the first of its episode; None if no step is.
        """
        states = embeddings
        if self.recurrent:
            states = self.memory(embeddings, hidden, masks, self.initial_state())  # (T, B, D)
        return self._heads(self.hidden_state(hidden, states))

    def step(self, embeddings: Tensor, hidden: Tensor) -> PolicyOutput:
        """Run one step on embeddings.

        The returned state is the tensor from which logits and values are computed, so a gradient
        with respect to it includes its effects on them and on all later steps.

        Args:
            embeddings: (B, E), float32.
            hidden: state that enters the step (B, D); used only by a GRU.
        """
        after = embeddings
        if self.recurrent:
            after = self.memory(embeddings.unsqueeze(0), hidden, None,
                                self.initial_state()).squeeze(0)
        return self._heads(self.hidden_state(hidden, after))

    def forward(self, frames: Tensor | np.ndarray, hidden: Tensor | np.ndarray | None = None,
                masks: Tensor | None = None) -> PolicyOutput:
        """Run one step.

        Args:
            frames: N frames, see ``agents.frames.as_images``.
            hidden: hidden states after the previous step (N, D); None for initial states.
            masks: 0 where an episode begins and 1 elsewhere (N,); None for 1 everywhere.

        Raises:
            UserError: if the frames have a wrong type, shape or range, or the sizes of the
                arguments do not fit together.
        """
        images = as_images(frames, 1).to(self.device)
        hidden = (self.initial_states(len(images)) if hidden is None
                  else torch.as_tensor(hidden, dtype=torch.float32, device=self.device))
        masks = torch.ones(len(images), device=self.device) if masks is None else masks
        size = tuple(hidden.shape) if self.recurrent else (len(hidden), self.hidden_state_size)
        if size != (len(images), self.hidden_state_size) or masks.shape != images.shape[:1]:
            raise UserError(f"{len(images)} frames need hidden states of the shape "
                            f"{(len(images), self.hidden_state_size)} and masks of the shape "
                            f"{(len(images),)}, not {tuple(hidden.shape)} and {tuple(masks.shape)}")
        embeddings = self.embed(images).float()
        output = self.sequence(embeddings.unsqueeze(0), hidden, masks.unsqueeze(0))
        return PolicyOutput(output.logits[0], output.values[0], output.hidden_states[0])

    def _heads(self, states: Tensor) -> PolicyOutput:
        return PolicyOutput(self.fc_policy(states), self.fc_value(states).squeeze(-1), states)


def build_policy(architecture: str, hidden_state_size: int, recurrent: bool,
                 learned_initial_state: bool, width: int = 1) -> Policy:
    """Build an untrained policy from the values of a parameter set.

    Nature and clear embeddings have size 512; IMPALA embeddings have size ``hidden_state_size``, or
    256 without a GRU, as in the published feed-forward agents. ``width`` multiplies the channels
    of the IMPALA blocks; it is 4 in the published agents for hard mazes.
    """
    if architecture == "nature":
        embedder: Embedder = NatureEmbedder()
    elif architecture == "clear":
        embedder = ClearEmbedder()
    else:
        embedder = ImpalaEmbedder(hidden_state_size if recurrent else 256,
                                  (16 * width, 32 * width, 32 * width))
    return Policy(embedder, hidden_state_size if recurrent else None,
                  learned_initial_state=learned_initial_state)


def blind_policy(logits: Sequence[float] | np.ndarray) -> Policy:
    """Return an agent that does not see: it draws every action from the same distribution.

    Args:
        logits: logits of the actions (A,).
    """
    policy = build_policy("nature", 64, recurrent=False, learned_initial_state=False)
    with torch.no_grad():
        policy.fc_policy.weight.zero_()
        policy.fc_value.weight.zero_()
        policy.fc_policy.bias[:] = torch.as_tensor(logits)
    return policy.eval()


def to_images(frames: Tensor, channels_last: bool = True,
              dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert uint8 frames (N, H, W, C) from Procgen to images in [0, 1] (N, C, H, W).

    The result has the channels-last memory layout of the frames, or is contiguous if
    ``channels_last`` is false. In bfloat16 the values equal float32 values cast by autocast. Images
    (N, C, H, W), which are floats, only get type and layout.
    """
    if frames.is_floating_point():
        layout = torch.channels_last if channels_last else torch.contiguous_format
        return frames.to(dtype).contiguous(memory_format=layout)
    images = frames.permute(0, 3, 1, 2).to(dtype).div_(255)
    return images if channels_last else images.contiguous()
