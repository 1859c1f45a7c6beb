"""Proximal policy optimisation (Schulman et al. 2017) for feed-forward and recurrent agents.

One iteration, from top to bottom: :meth:`Collector.play` collects a rollout, :func:`advantages`
and :func:`ppo_losses` are the formulas, and :func:`update` takes the gradient steps.

Letters in shape comments: B environments or frames of a minibatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from agents.acting import draw_actions, embed_frames, reset_hidden, run_policy
from agents.config import AgentConfig
from agents.kickstarting import KICKSTART_METRICS, Guidance, kickstart_losses
from agents.networks import Policy, PolicyOutput
from common.cuda_graph import GraphedFunction
from common.devices import Compute
from common.distributed import SINGLE, Distributed
from envs.procgen_env import EnvConfig, LevelEdit, ProcgenVectorEnv
from envs.rewards import EpisodeStatistics, RewardNormalizer

PPO_METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")


class Rollout:
    """T steps of N environments, as tensors on the device.

    Attributes:
        frames: uint8 (T, N, H, W, C).
        masks: (T, N), 1 - done: 0 where the frame is the first of an episode.
        actions: int64 (T, N).
        log_probs: log-probabilities of the actions taken (T, N).
        values: value estimates for all frames and the frame after the last step (T + 1, N).
        rewards: reward of each action, normalised if so configured (T, N).
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


class Collector:
    """Collector of rollouts: environments, and the policy's hidden state in each of them.

    Args:
        num_envs: total number of environments, which the processes share.
        seed: seed of levels and actions; the draws do not depend on the number of processes.
        edit: optional edit of new levels.
        world: the group of training processes.
    """

    def __init__(self, env_config: EnvConfig, policy: Policy, compute: Compute, num_envs: int,
                 seed: int, num_threads: int, edit: LevelEdit | None = None,
                 world: Distributed = SINGLE):
        self.policy, self.compute, self.world = policy, compute, world
        self.num_envs, self.own = num_envs, world.local_slice(num_envs)
        num_own = self.own.stop - self.own.start  # N
        self.env = ProcgenVectorEnv(env_config, num_own, seed, num_threads, edit)
        if world.is_distributed:
            # The levels of an environment depend on the number of environments in its vector, so
            # the initial states are taken from a vector of all environments.
            whole = ProcgenVectorEnv(env_config, num_envs, seed, num_threads)
            whole.observe()
            self.env.set_state(whole.get_state()[self.own])
            whole.close()
        self.generator = torch.Generator().manual_seed(seed)  # on the CPU: the same on any device
        self.hidden = policy.initial_states(num_own)  # (N, D)
        self.statistics = EpisodeStatistics(num_envs)
        self.normalizer = RewardNormalizer(num_envs)
        self.observation = self.env.observe()
        self._act: Callable[..., tuple[Tensor, ...]] = self._run_policy
        if compute.device.type == "cuda":
            self._act = GraphedFunction(self._run_policy, compute.device)

    def play(self, n_steps: int, rollout: Rollout | None = None, normalize: bool = False) -> None:
        """Take ``n_steps`` steps in every environment.

        Args:
            rollout: rollout to store the steps in; if None, they only update the episode
                statistics.
            normalize: store normalised rewards.
        """
        if rollout is not None:
            rollout.hidden.copy_(self.hidden)
        earned = torch.zeros(2, n_steps, len(self.hidden))  # rewards and ends of episodes
        for t in range(n_steps):
            frames, first = self._observed()
            draws = torch.rand(self.num_envs, generator=self.generator)[self.own]
            actions, log_probs, values, self.hidden = self._act(
                frames=frames, first=first, hidden=self.hidden,
                draws=draws.to(self.compute.device))
            self.env.act(actions.to("cpu", torch.int32).numpy())
            if rollout is not None:  # stored while the environments step
                rollout.frames[t] = frames
                rollout.masks[t] = 1 - first.float()
                rollout.actions[t] = actions
                rollout.log_probs[t] = log_probs
                rollout.values[t] = values
            self.observation = self.env.observe()
            earned[0, t] = torch.from_numpy(self.observation.rewards)
            earned[1, t] = torch.from_numpy(self.observation.first)
        all_rewards, all_ended = self.world.gather(earned, self.num_envs, dim=2).numpy()
        for t, (rewards, ended) in enumerate(zip(all_rewards, all_ended == 1)):
            self.statistics.update(rewards, ended)
            if rollout is not None:
                if normalize:
                    rewards = self.normalizer(rewards, ended)
                rollout.rewards[t] = torch.from_numpy(rewards[self.own])
                rollout.ended[t] = torch.from_numpy(ended[self.own])
        if rollout is not None:
            frames, first = self._observed()
            rollout.values[n_steps] = self._act(frames=frames, first=first, hidden=self.hidden,
                                                draws=torch.zeros_like(values))[2]

    def _observed(self) -> tuple[Tensor, Tensor]:
        """Return the frames (N, H, W, C) and the starts of episodes (N,), on the device."""
        return (torch.from_numpy(self.observation.frames).to(self.compute.device),
                torch.from_numpy(self.observation.first).to(self.compute.device))

    def _run_policy(self, frames: Tensor, first: Tensor, hidden: Tensor, draws: Tensor
                    ) -> tuple[Tensor, ...]:
        """Run the policy for one step, and draw actions.

        Args:
            frames, first: observations from :meth:`_observed`.
            hidden: states that leave the previous step (N, D).
            draws: uniform random numbers in [0, 1), (N,).

        Returns:
            Actions (N,), their log-probabilities (N,), values (N,), and the states that leave the
            step (N, D).
        """
        output = run_policy(self.policy, self.compute, frames,
                            reset_hidden(self.policy, hidden, first))
        actions = draw_actions(output.log_probs, draws)
        log_probs = output.log_probs.gather(1, actions.unsqueeze(1)).squeeze(1)
        return actions, log_probs, output.values, output.hidden_states


def advantages(rewards: Tensor, values: Tensor, ended: Tensor, gamma: float, lmbda: float,
               use_gae: bool = True) -> Tensor:
    """Compute generalised advantage estimates (Schulman et al. 2016, equation 16).

    Args:
        rewards: (T, N).
        values: value estimates of all frames and of the frame after the last step (T + 1, N).
        ended: (T, N), 1 where step t ended its episode.
        lmbda: lambda; 0 gives one-step temporal-difference errors, 1 Monte Carlo estimates.
        use_gae: if false, use the discounted return minus the value, which equals lambda = 1.

    Returns:
        Advantages (T, N).
    """
    lmbda = lmbda if use_gae else 1.0
    result = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        continues = 1 - ended[t]
        delta = rewards[t] + gamma * values[t + 1] * continues - values[t]
        running = delta + gamma * lmbda * continues * running
        result[t] = running
    return result


def ppo_losses(output: PolicyOutput, actions: Tensor, old_log_probs: Tensor, old_values: Tensor,
               advantage: Tensor, returns: Tensor, eps_clip: float) -> dict[str, Tensor]:
    """Compute policy loss, value loss and entropy of PPO (Schulman et al. 2017, equations 7, 9).

    Args:
        output: outputs of the current policy, with any leading dimensions (…).
        actions, old_log_probs, old_values, advantage, returns: values from the rollout, each (…,).
        eps_clip: half width of the clip range.

    Returns:
        Means over frames, each (), by the names in ``PPO_METRICS``. With the probability ratio r,
        ``approx_kl`` is KL(policy that acted ‖ current policy), estimated as (r - 1) - log r
        (Schulman 2020, "Approximating KL divergence"), and ``clip_fraction`` the fraction of
        frames in which r is outside the clip range; neither has a gradient.
    """
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
    return {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy,
            "approx_kl": approx_kl, "clip_fraction": clip_fraction}


def evaluate_rollout(policy: Policy, rollout: Rollout, envs: Tensor,
                     compute: Compute) -> PolicyOutput:
    """Run the current policy on all steps of some environments of a rollout, with gradients.

    Args:
        envs: indices of the environments (B,).

    Returns:
        Outputs with leading dimensions (T, B). With unchanged weights, they equal, up to rounding,
        the outputs computed during collection.
    """
    frames = rollout.frames.index_select(1, envs)  # (T, B, H, W, C)
    embeddings = embed_frames(policy, frames.flatten(0, 1), compute)
    return policy.sequence(embeddings.unflatten(0, frames.shape[:2]), rollout.hidden[envs],
                           rollout.masks[:, envs])


def minibatches(config: AgentConfig, generator: torch.Generator,
                world: Distributed = SINGLE) -> Iterator[list[Tensor]]:
    """Yield, for each gradient step of one epoch, a list of micro-batches of indices.

    For a recurrent agent, an index stands for an environment with all its steps; otherwise, index
    t * N + n stands for one frame. A micro-batch holds at most ``mini_batch_size`` frames, but at
    least one environment of a recurrent agent.

    If several processes train, all draw the same minibatches over all environments. Each process
    then uses the part that belongs to its own environments, which may be empty.

    Args:
        generator: random generator, in the same state in all processes.
        world: the group of training processes.
    """
    frames_per_index = config.n_steps if config.recurrent else 1
    order = torch.randperm(_num_indices(config), generator=generator)
    micro_batch_size = max(1, config.mini_batch_size // frames_per_index)
    own = world.local_slice(config.n_envs)
    for indices in order.chunk(config.mini_batch_per_epoch):
        steps, envs = indices // config.n_envs, indices % config.n_envs  # all steps 0 if recurrent
        is_own = (envs >= own.start) & (envs < own.stop)
        indices = (steps * (own.stop - own.start) + envs - own.start)[is_own]
        yield list(indices.split(micro_batch_size)) if len(indices) else []


def _num_indices(config: AgentConfig) -> int:
    """Return the number of indices in an epoch: environments if recurrent, frames otherwise."""
    return config.n_envs * (1 if config.recurrent else config.n_steps)


def update(policy: Policy, optimizer: torch.optim.Optimizer, rollout: Rollout,
           config: AgentConfig, compute: Compute, generator: torch.Generator,
           guidance: Guidance | None = None, world: Distributed = SINGLE) -> dict[str, float]:
    """Update the policy on one rollout: ``epoch`` passes of ``mini_batch_per_epoch`` steps.

    If several processes train, advantages are normalised over the environments of all processes,
    and a gradient step uses the mean over their frames: gradients are weighted by the number of
    frames, summed, and then clipped.

    Args:
        policy: the agent, which is updated in place.
        optimizer: optimiser of the policy's parameters.
        rollout: steps of this process's environments.
        generator: random generator of the minibatches, in the same state in all processes.
        guidance: a teacher's outputs for the rollout; None without a teacher.
        world: the group of training processes.

    Returns:
        Metrics by name. Means over all gradient steps: ``PPO_METRICS`` (see :func:`ppo_losses`);
        with a teacher, ``KICKSTART_METRICS``; and ``grad_norm``, the norm of the gradient before
        clipping. Before the update: ``explained_variance``, the fraction of the variance of the
        returns that the values of the rollout explain (NaN if the returns are constant).
    """
    values, rewards, ended = (world.gather(local, config.n_envs, dim=1) for local in (
        rollout.values, rollout.rewards, rollout.ended))
    advantage = advantages(rewards, values, ended, config.gamma, config.lmbda, config.use_gae)
    returns = advantage + values[:-1]
    variance = returns.var()
    explained_variance = (float(1 - (returns - values[:-1]).var() / variance) if variance > 0
                          else math.nan)
    if config.normalize_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    own = world.local_slice(config.n_envs)
    advantage, returns = advantage[:, own], returns[:, own]

    def select(x: Tensor, indices: Tensor) -> Tensor:
        """Select a minibatch from (T, N, …): (T, B, …) if recurrent, otherwise (1, B, …)."""
        return x[:, indices] if config.recurrent else x.flatten(0, 1)[indices].unsqueeze(0)

    parameters = list(policy.parameters())
    minibatch_size = _num_indices(config) // config.mini_batch_per_epoch  # total over all processes
    names = [*PPO_METRICS, *(KICKSTART_METRICS if guidance is not None else ())]
    totals = torch.zeros(len(names), device=compute.device)
    grad_norm = torch.zeros((), device=compute.device)
    steps = 0
    for _ in range(config.epoch):
        for micro_batches in minibatches(config, generator, world):
            optimizer.zero_grad(set_to_none=True)
            for indices in micro_batches:
                indices = indices.to(compute.device)
                if config.recurrent:
                    output = evaluate_rollout(policy, rollout, indices, compute)
                else:
                    embeddings = embed_frames(policy, rollout.frames.flatten(0, 1)[indices],
                                              compute)
                    output = policy.sequence(embeddings.unsqueeze(0),
                                             policy.initial_states(len(indices)), masks=None)
                metrics = ppo_losses(
                    output, select(rollout.actions, indices), select(rollout.log_probs, indices),
                    select(rollout.values[:-1], indices), select(advantage, indices),
                    select(returns, indices), config.eps_clip)
                loss = (metrics["policy_loss"] + config.value_coef * metrics["value_loss"]
                        - config.entropy_coef * metrics["entropy"])
                if guidance is not None:
                    distances = kickstart_losses(output, select(guidance.log_probs, indices),
                                                 select(guidance.values, indices))
                    metrics |= distances
                    loss = loss + (guidance.policy_weight * distances["distillation_loss"]
                                   + guidance.value_weight * distances["value_distance"])
                weight = len(indices) / minibatch_size  # gradients of micro-batches are averaged
                (weight * loss).backward()
                totals += weight * torch.stack([metrics[name].detach() for name in names])
            world.sum_gradients(parameters)
            grad_norm += torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip_norm)
            optimizer.step()
            steps += 1
    means = (world.sum(totals) / steps).tolist()
    return {**dict(zip(names, means)), "grad_norm": float(grad_norm / steps),
            "explained_variance": explained_variance}
