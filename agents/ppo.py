"""Proximal policy optimisation (Schulman et al. 2017) for feed-forward and recurrent agents.

Letters in shape comments: T steps of a rollout, N environments (of this process, where several
train together), H W C a frame, D hidden state.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from agents.acting import embed_frames
from agents.config import AgentConfig
from agents.kickstarting import Guidance, KickstartLosses, kickstart_losses
from agents.networks import Policy, PolicyOutput
from common.devices import Compute
from common.distributed import SINGLE, Distributed


class Rollout:
    """T steps of N environments, as tensors on the device.

    Attributes:
        frames: uint8 (T, N, H, W, C).
        masks: (T, N), 1 - done: 0 where the frame is the first of an episode.
        actions: int64 (T, N).
        log_probs: log-probability of the action taken (T, N).
        values: the agent's value estimates, and that of the frame after the last (T + 1, N).
        rewards: what each action earned, normalised if so configured (T, N).
        ended: 1 where the action ended its episode (T, N).
        hidden: state that enters the first step, before any reset (N, D).
    """

    def __init__(self, n_steps: int, n_envs: int, frame_shape: tuple[int, ...],
                 hidden_size: int, device: torch.device):
        size = (n_steps, n_envs)
        self.frames = torch.zeros((*size, *frame_shape), dtype=torch.uint8, device=device)
        self.masks = torch.zeros(size, device=device)
        self.actions = torch.zeros(size, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(size, device=device)
        self.values = torch.zeros((n_steps + 1, n_envs), device=device)
        self.rewards = torch.zeros(size, device=device)
        self.ended = torch.zeros(size, device=device)
        self.hidden = torch.zeros((n_envs, hidden_size), device=device)


def advantages(rewards: Tensor, values: Tensor, ended: Tensor, gamma: float, lmbda: float,
               use_gae: bool = True) -> Tensor:
    """Generalised advantage estimation (Schulman et al. 2016, equation 16).

    Args:
        rewards: (T, N).
        values: (T + 1, N).
        ended: (T, N), 1 where step t ended its episode.
        use_gae: if false, discounted return minus value (the same with lambda = 1).

    Returns:
        Advantages (T, N).
    """
    lmbda = lmbda if use_gae else 1.0
    result = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        going_on = 1 - ended[t]
        delta = rewards[t] + gamma * values[t + 1] * going_on - values[t]
        running = delta + gamma * lmbda * going_on * running
        result[t] = running
    return result


@dataclasses.dataclass(frozen=True)
class Losses:
    """Terms of the loss, and diagnostics of the update: means over frames.

    Attributes:
        approx_kl: from the policy that acted to the present one, (r - 1) - log r (Schulman 2020,
            "Approximating KL divergence").
        clip_fraction: share of frames whose ratio is outside the clip range.
    """

    policy: Tensor
    value: Tensor
    entropy: Tensor
    approx_kl: Tensor
    clip_fraction: Tensor

    def total(self, config: AgentConfig) -> Tensor:
        return (self.policy + config.value_coef * self.value
                - config.entropy_coef * self.entropy)


def ppo_losses(output: PolicyOutput, actions: Tensor, old_log_probs: Tensor, old_values: Tensor,
               advantage: Tensor, returns: Tensor, eps_clip: float) -> Losses:
    """Clipped surrogate, clipped value loss and entropy (Schulman et al. 2017, equations 7, 9)."""
    log_probs = output.log_probs
    taken = log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    ratio = torch.exp(taken - old_log_probs)
    clipped_ratio = ratio.clamp(1 - eps_clip, 1 + eps_clip)
    policy_loss = -torch.min(ratio * advantage, clipped_ratio * advantage).mean()

    clipped_values = old_values + (output.values - old_values).clamp(-eps_clip, eps_clip)
    value_loss = 0.5 * torch.max((output.values - returns) ** 2,
                                 (clipped_values - returns) ** 2).mean()

    entropy = -(log_probs.exp() * log_probs).sum(dim=-1).mean()
    with torch.no_grad():
        approx_kl = (ratio - 1 - (taken - old_log_probs)).mean()
        clip_fraction = (ratio != clipped_ratio).float().mean()
    return Losses(policy_loss, value_loss, entropy, approx_kl, clip_fraction)


def evaluate_rollout(policy: Policy, rollout: Rollout, envs: Tensor,
                     compute: Compute) -> PolicyOutput:
    """The training pass over whole environments: outputs of the present policy on their rollout.

    Args:
        envs: indices of the environments (B,).

    Returns:
        Outputs with leading dimensions (T, B), and gradients through all T steps. With
        unchanged weights they equal what the rollout computed.
    """
    frames = rollout.frames.index_select(1, envs)  # (T, B, H, W, C)
    embeddings = embed_frames(policy, frames.flatten(0, 1), compute)
    return policy.sequence(embeddings.unflatten(0, frames.shape[:2]), rollout.hidden[envs],
                           rollout.masks[:, envs])


def minibatches(config: AgentConfig, generator: torch.Generator,
                world: Distributed = SINGLE) -> Iterator[list[Tensor]]:
    """One pass over a rollout, as gradient steps made of micro-batches of indices.

    A recurrent agent is trained on whole environments; otherwise an index is t * N + n. The
    micro-batches of a gradient step hold at most ``mini_batch_size`` frames each (but at least
    one environment).

    Where several processes train, all draw the same gradient steps over all environments, and each
    takes what it has of them: more or less than others, or nothing.
    """
    frames_per_index = config.n_steps if config.recurrent else 1
    order = torch.randperm(_units(config), generator=generator)
    micro_batch = max(1, config.mini_batch_size // frames_per_index)
    own = world.local_slice(config.n_envs)
    for indices in order.chunk(config.mini_batch_per_epoch):
        steps, envs = indices // config.n_envs, indices % config.n_envs  # all steps 0 if recurrent
        mine = (envs >= own.start) & (envs < own.stop)
        indices = (steps * (own.stop - own.start) + envs - own.start)[mine]
        yield list(indices.split(micro_batch)) if len(indices) else []


def _units(config: AgentConfig) -> int:
    """The things that minibatches are made of: whole environments, or frames."""
    return config.n_envs * (1 if config.recurrent else config.n_steps)


@dataclasses.dataclass(frozen=True)
class UpdateSummary:
    """Means over all gradient steps of one update.

    Attributes:
        grad_norm: before it is clipped.
        explained_variance: share of the variance of the returns that the values of the rollout
            explain; NaN where the returns are all the same.
        distillation_loss, teacher_kl: see :class:`agents.kickstarting.KickstartLosses`; NaN without
            a teacher.
    """

    policy_loss: float
    value_loss: float
    entropy: float
    approx_kl: float
    clip_fraction: float
    distillation_loss: float
    teacher_kl: float
    grad_norm: float
    explained_variance: float


def update(policy: Policy, optimizer: torch.optim.Optimizer, rollout: Rollout,
           config: AgentConfig, compute: Compute, generator: torch.Generator,
           guidance: Guidance | None = None, world: Distributed = SINGLE) -> UpdateSummary:
    """Improve the policy on one rollout: ``epoch`` passes of ``mini_batch_per_epoch`` steps.

    Where several processes train, advantages are normalised over the environments of all, and a
    gradient step is the mean over the frames of all: gradients are weighted by the number of
    frames, added up, and then clipped.

    Args:
        rollout: of this process's environments.
        generator: of the minibatches, in the same state in all processes.
        guidance: a teacher's outputs for the rollout.
    """
    values, rewards, ended = (world.gather(own, config.n_envs, dim=1) for own in (
        rollout.values, rollout.rewards, rollout.ended))
    advantage = advantages(rewards, values, ended, config.gamma, config.lmbda, config.use_gae)
    returns = advantage + values[:-1]
    residual = returns - values[:-1]
    missing = torch.tensor(math.nan, device=compute.device)
    explained = 1 - residual.var() / returns.var() if returns.var() > 0 else missing
    if config.normalize_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    own = world.local_slice(config.n_envs)
    advantage, returns = advantage[:, own], returns[:, own]

    def losses_of(indices: Tensor) -> tuple[Losses, KickstartLosses | None]:
        if config.recurrent:
            output = evaluate_rollout(policy, rollout, indices, compute)

            def select(x: Tensor) -> Tensor:
                return x[:, indices]
        else:
            embeddings = embed_frames(policy, rollout.frames.flatten(0, 1)[indices], compute)
            output = policy.sequence(embeddings.unsqueeze(0),
                                     policy.initial_states(len(indices)), masks=None)

            def select(x: Tensor) -> Tensor:
                return x.flatten(0, 1)[indices].unsqueeze(0)
        losses = ppo_losses(output, select(rollout.actions), select(rollout.log_probs),
                            select(rollout.values[:-1]), select(advantage), select(returns),
                            config.eps_clip)
        if guidance is None:
            return losses, None
        return losses, kickstart_losses(output, select(guidance.log_probs),
                                        select(guidance.values))

    size = _units(config) // config.mini_batch_per_epoch  # of a minibatch of all processes
    parameters = list(policy.parameters())
    sums = torch.zeros(8, device=compute.device)
    steps = 0
    for _ in range(config.epoch):
        for micro_batches in minibatches(config, generator, world):
            optimizer.zero_grad(set_to_none=True)
            for indices in micro_batches:
                losses, kickstart = losses_of(indices.to(compute.device))
                total, distances = losses.total(config), (missing, missing)
                if kickstart is not None:
                    distances = kickstart.distillation, kickstart.kl
                    total = total + kickstart.total(guidance)
                share = len(indices) / size  # gradients of micro-batches are averaged
                (share * total).backward()
                with torch.no_grad():
                    sums[:7] += share * torch.stack([
                        losses.policy, losses.value, losses.entropy, losses.approx_kl,
                        losses.clip_fraction, *distances])
            world.sum_gradients(parameters)
            sums[7] += torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip_norm)
            optimizer.step()
            steps += 1
    sums[:7] = world.sum(sums[:7])
    return UpdateSummary(*(sums / steps).tolist(), explained_variance=float(explained))
