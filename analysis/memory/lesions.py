"""Lesions of an agent's memory: changes of the hidden state that enters a step.

Let h_t be the state that enters step t. A lesion lets the agent continue from another state:

=======  ==========================================================================================
reset    the initial state of an episode
swap     the state of another level at the same step; if no other level lasts that long, the last
         state of the longest one
delay    the state that the agent had ``delay`` steps earlier; before step ``delay``, the initial
         state
freeze   the state that entered the step before the lesion began, held at all later steps
copy     the unchanged state of the same episode; checks the implementation
=======  ==========================================================================================

A lesion acts once, or at every step from its first step on. A control rotates the change at random,
after scaling each unit by its standard deviation, and keeps the norm of the scaled change. If the
lesion acts at every step, all changes by a control instead have the mean norm of the lesion's
changes. Otherwise, each change would depend on the earlier ones, and the changes would grow. States
changed by a control are clipped to [-1, 1], the range of a GRU's states, or to the range of the
initial state if that is wider. The change is scaled up such that it keeps its norm after clipping.

*Open loop*: the agent sees recorded frames, and only its state differs. The effect is the
divergence KL(p || q) of the policy q with the lesion from the policy p without it. After a reset,
the policy at the k-th step depends on the last k frames only, so the divergence shows how much
older frames matter. *Closed loop*: the agent plays, and a lesion is passed as
``PlayOptions.alter_state``.

Letters in shape comments: N episodes or windows, L steps of an episode, R rows of a batch, D units
of the hidden state, E units of the embedding, A actions, K steps from the start of a lesion on, P
steps before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from agents.acting import embed_frames
from agents.networks import Policy
from agents.patch import BatchInfo
from agents.rollout_files import RolloutFolder
from common.devices import Compute
from common.errors import UserError

_SCALINGS = 20  # iterations that scale a change; its norm is then within 1 % of the target
RESET, SWAP, DELAY, FREEZE, COPY = "reset", "swap", "delay", "freeze", "copy"


@dataclasses.dataclass(frozen=True)
class Lesion:
    """Definition of a lesion, or of one of its controls.

    Attributes:
        kind: RESET, SWAP, DELAY, FREEZE or COPY.
        once: whether the lesion acts at a single step; otherwise it acts at all steps from a first
            one on.
        delay: age of the state that DELAY restores, in steps.
        control: seed of the random rotation of a control; None for the lesion itself.
    """

    kind: str
    once: bool = False
    delay: int = 0
    control: int | None = None

    @property
    def num_past(self) -> int:
        """Age of the oldest state that the lesion needs, in steps."""
        return 1 if self.kind == FREEZE else self.delay


class Donors:
    """Hidden states of whole episodes or windows, from which SWAP and COPY take states.

    Args:
        states: states that enter the L steps of each episode, (L, D) each.
        levels: level seed of each episode.
        first: step that the first state of each episode enters, by default 0; ``other`` is valid
            only if it is 0.
        seed: seed of the choice of donors.
    """

    def __init__(self, states: Sequence[Tensor], levels: np.ndarray,
                 first: np.ndarray | None = None, seed: int = 0):
        self._states, self._levels, self._seed = states, levels, seed
        self._first = np.zeros(len(states), int) if first is None else first
        self._orders: dict[tuple[int, int], np.ndarray] = {}

    def own(self, number: int, step: int) -> Tensor:
        """Return the state (D,) that enters step ``step`` of episode ``number``."""
        return self._states[number][step - self._first[number]]

    def other(self, number: int, level: int, step: int) -> Tensor:
        """Return a state (D,) of another level at the same step.

        The episodes of other levels are in a random order, which depends on ``number``. The state
        comes from the first of them that reaches this step. If no episode does, it is the last
        state of the longest one.

        Args:
            number: number of the episode that receives the state.
            level: level seed of this episode.
            step: step that the state enters.

        Raises:
            UserError: if there is no other level.
        """
        if (number, level) not in self._orders:
            order = np.random.default_rng([self._seed, number]).permutation(len(self._states))
            self._orders[number, level] = order[self._levels[order] != level]
        order = self._orders[number, level]
        if not len(order):
            raise UserError(f"cannot swap states: all episodes use level {level}; record or play "
                            "more levels")
        for donor in order:
            if step < len(self._states[donor]):
                return self._states[donor][step]
        return self._states[max(order, key=lambda donor: len(self._states[donor]))][-1]


class LesionedMemory:
    """Function for ``PlayOptions.alter_state`` that applies a lesion. Stateful: create a new
    instance per run.

    Args:
        lesion: the lesion.
        begin: first step of the lesion in each episode (N,), indexed by episode number.
        initial: initial state of an episode (D,).
        std: standard deviation of each unit (D,), for the rotation and for ``moved``.
        donors: states of all episodes, for SWAP and COPY.
        size: size of each change by a control, in the unit of ``moved``; None for the size of the
            change that the lesion would make.

    Attributes:
        moved: sum over the steps of each episode of the Euclidean norm of the change, in standard
            deviations of the units, float64 (N,).
        num_steps: number of changed steps of each episode, int64 (N,).
    """

    def __init__(self, lesion: Lesion, begin: np.ndarray, initial: Tensor, std: Tensor,
                 donors: Donors | None = None, size: float | None = None):
        self._lesion, self._begin, self._initial, self._donors = lesion, begin, initial, donors
        self._past = initial.repeat(len(begin), lesion.num_past + 1, 1)  # ring buffer (N, P + 1, D)
        self._frozen = initial.repeat(len(begin), 1)
        self._inverse, self._size = torch.where(std > 0, 1 / std, 0), size
        self._limit = max(1.0, float(initial.abs().max()))
        self._rotation = None if lesion.control is None else rotation(std, lesion.control)
        self.moved, self.num_steps = np.zeros(len(begin)), np.zeros(len(begin), np.int64)

    def __call__(self, hidden: Tensor, info: BatchInfo) -> Tensor:
        """Return the states (R, D) that enter the step instead of ``hidden`` (R, D).

        Args:
            info: metadata of the rows; ``episode`` selects entries of ``begin``.
        """
        episode, step = info.episode, info.step
        self._past[episode, step % self._past.shape[1]] = hidden
        first = self._begin[episode]
        rows = np.flatnonzero(step == first if self._lesion.once else step >= first)
        if not len(rows):
            return hidden
        before = hidden[rows]
        after = self._replacement(episode[rows], step[rows], info.level[rows])
        if self._rotation is not None:
            change = (after - before) @ self._rotation
            size = self._norm(change) if self._size is None else self._size
            after = self._moved_by(before, change, size)
        self.moved[episode[rows]] += self._norm(after - before)[:, 0].cpu().numpy()
        self.num_steps[episode[rows]] += 1
        result = hidden.clone()
        result[rows] = after
        return result

    def _norm(self, change: Tensor) -> Tensor:
        """Return the norms (R, 1) of changes (R, D), in standard deviations of the units."""
        return (change * self._inverse).norm(dim=1, keepdim=True)

    def _moved_by(self, before: Tensor, change: Tensor, size: float | Tensor) -> Tensor:
        """Return states (R, D) plus rescaled changes (R, D), clipped to the range of the agent's
        states. Each change is scaled such that its norm after clipping is ``size``."""
        moved, scale = self._norm(change), torch.ones_like(change[:, :1])
        for _ in range(_SCALINGS):
            scale = scale * torch.where(moved > 0, size / moved, 0)
            after = (before + scale * change).clamp(-self._limit, self._limit)
            moved = self._norm(after - before)
        return after

    def _replacement(self, episode: np.ndarray, step: np.ndarray, level: np.ndarray) -> Tensor:
        """Return the states (R, D) by which the lesion replaces the states of R episodes."""
        kind, past = self._lesion.kind, self._lesion.num_past
        if kind == RESET:
            return self._initial.expand(len(episode), -1)
        if kind in (SWAP, COPY):
            assert self._donors is not None
            rows = list(zip(episode.tolist(), level.tolist(), step.tolist()))
            if kind == COPY:
                return torch.stack([self._donors.own(number, step) for number, _, step in rows])
            return torch.stack([self._donors.other(*row) for row in rows])
        earlier = self._past[episode, (step - past) % self._past.shape[1]]
        earlier[torch.from_numpy(step < past)] = self._initial
        if kind == DELAY:
            return earlier
        begins = step == self._begin[episode]
        self._frozen[episode[begins]] = earlier[torch.from_numpy(begins)]
        return self._frozen[episode]


def rotation(std: Tensor, seed: int) -> Tensor:
    """Draw a random matrix (D, D) that rotates changes of a state (R, D).

    Changes are multiplied by it from the right. Only units that vary are rotated; changes of the
    others become 0. The norm of a change, in standard deviations of the units that vary, is kept.

    Args:
        std: standard deviation of each unit (D,).
        seed: seed of the draw.
    """
    varies = torch.nonzero(std > 0)[:, 0]
    normal = np.random.default_rng(seed).standard_normal((len(varies), len(varies)))
    q, r = np.linalg.qr(normal)
    q = q * np.sign(np.diag(r))  # uniform over all rotations and reflections (Mezzadri 2007)
    matrix = torch.zeros(len(std), len(std), device=std.device)
    scale = std[varies]
    matrix[varies[:, None], varies] = torch.from_numpy(q).to(std) / scale[:, None] * scale
    return matrix


@dataclasses.dataclass(frozen=True)
class Windows:
    """Recorded steps around the start of a lesion.

    Attributes:
        levels: level seed of each window (N,).
        begin: step at which a lesion starts (N,).
        actions: action that was taken in the last step of each window, int64 (N,).
        embeddings: embeddings of the frames of P steps before ``begin`` and of K steps from
            ``begin`` on (N, P + K, E).
        entering: state that enters the first of these steps (N, D).
        num_before: P, at least 1.
    """

    levels: np.ndarray
    begin: np.ndarray
    actions: np.ndarray
    embeddings: Tensor
    entering: Tensor
    num_before: int

    @property
    def first(self) -> np.ndarray:
        """First step of each window (N,)."""
        return self.begin - self.num_before


@torch.no_grad()
def read_states(policy: Policy, compute: Compute, folder: RolloutFolder, episode: int
                ) -> tuple[Tensor, Tensor]:
    """Run the agent on the frames of a recorded episode, without its terminal frame.

    Returns:
        Embeddings of the L frames (L, E), and the states that enter the steps (L, D).
    """
    frames = folder.array_files(episode).frames
    images = np.moveaxis(frames.rows(0, frames.shape[0] - 1), 1, -1)
    embeddings = embed_frames(policy, torch.from_numpy(images).to(compute.device), compute)
    initial = policy.initial_states(1)
    states = policy.sequence(embeddings[:, None], initial, None).hidden_states[:, 0]
    return embeddings, torch.cat([initial, states[:-1]])


def choose_windows(lengths: Sequence[int], num_before: int, num_steps: int, per_episode: int,
                   seed: int) -> list[np.ndarray]:
    """Draw the starts of windows at random, without replacement.

    Args:
        lengths: number of steps of each episode.
        num_before, num_steps: number of steps before the start (P), and from the start on (K).
        per_episode: maximum number of windows per episode.
        seed: seed of the draws.

    Returns:
        Ascending first steps of a lesion for each episode; empty if the episode is too short.
    """
    rng = np.random.default_rng(seed)
    return [np.sort(rng.permutation(np.arange(num_before, max(length - num_steps + 1, num_before))
                                    )[:per_episode]) for length in lengths]


@torch.no_grad()
def run_windows(policy: Policy, windows: Windows,
                alter: Callable[[Tensor, BatchInfo], Tensor] | None = None
                ) -> tuple[Tensor, Tensor, Tensor]:
    """Run the agent step by step on windows.

    Args:
        policy: the agent.
        windows: the windows.
        alter: lesion, see ``LesionedMemory``; the ``episode`` in the batch metadata that it gets is
            the index of the window. None for no lesion.

    Returns:
        Log-probabilities of the policy, float64 (N, K, A), and values, float64 (N, K), at the K
        steps from ``begin`` on; and the state that enters each step, as it is before ``alter``
        changes it (N, P + K, D).
    """
    hidden, log_probs, values, entering = windows.entering, [], [], []
    numbers = np.arange(len(windows.begin))
    for place in range(windows.embeddings.shape[1]):
        entering.append(hidden)
        if alter is not None:
            hidden = alter(hidden, BatchInfo(numbers, windows.first + place, windows.levels))
        output = policy.step(windows.embeddings[:, place], hidden)
        hidden = output.hidden_states
        if place >= windows.num_before:
            log_probs.append(torch.log_softmax(output.logits.double(), dim=-1))
            values.append(output.values.double())
    return torch.stack(log_probs, dim=1), torch.stack(values, dim=1), torch.stack(entering, dim=1)


def attribution_over_time(policy: Policy, windows: Windows, entering: Tensor,
                          mean: Tensor) -> np.ndarray:
    """Attribute the log-probability of the last step's action to this step's frame and the K frames
    before it.

    The attribution of a frame is the gradient with respect to its embedding times the embedding's
    deviation from the mean, summed over the units.

    Args:
        policy: the agent.
        windows: the windows.
        entering: states that enter all steps (N, P + K, D), from ``run_windows``.
        mean: mean embedding (E,).

    Returns:
        Absolute values, float64 (N, K + 1); column k belongs to the frame k steps earlier.
    """
    first = windows.num_before - 1
    embeddings = windows.embeddings[:, first:].transpose(0, 1).clone().requires_grad_()
    output = policy.sequence(embeddings, entering[:, first], None)
    actions = torch.from_numpy(windows.actions).to(embeddings.device)
    chosen = output.log_probs[-1].gather(1, actions[:, None])
    [gradient] = torch.autograd.grad(chosen.sum(), embeddings)
    values = (gradient * (embeddings.detach() - mean)).sum(dim=-1).abs()  # (K + 1, N)
    return values.flip(0).T.double().cpu().numpy()
