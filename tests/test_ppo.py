"""The update: advantages, losses, accumulation, learning."""

import numpy as np
import pytest
import torch
from conftest import FLOAT32, tiny_config, tiny_policy

from agents.networks import PolicyOutput
from agents.ppo import Collector, Rollout, advantages, minibatches, ppo_losses, update
from common.devices import Compute
from envs.procgen_env import EnvConfig, ProcgenVectorEnv
from envs.rewards import EpisodeStatistics, RewardNormalizer


def test_advantages_equal_the_direct_sum():
    rng = np.random.RandomState(0)
    n_steps, gamma, lmbda = 9, 0.97, 0.8
    rewards, values = rng.randn(n_steps, 2), rng.randn(n_steps + 1, 2)
    ended = np.zeros((n_steps, 2))
    ended[3, 0] = ended[8, 1] = 1
    expected = np.zeros((n_steps, 2))
    for n in range(2):
        for t in range(n_steps):
            weight = 1.0
            for k in range(t, n_steps):  # sum of (gamma lambda)^(k - t) delta_k, to the end
                follow = 0.0 if ended[k, n] else values[k + 1, n]
                expected[t, n] += weight * (rewards[k, n] + gamma * follow - values[k, n])
                weight *= gamma * lmbda
                if ended[k, n]:
                    break
    tensors = (torch.from_numpy(x) for x in (rewards, values, ended))
    np.testing.assert_allclose(advantages(*tensors, gamma, lmbda).numpy(), expected, atol=1e-12)


def test_without_gae_the_advantage_is_the_discounted_return_minus_the_value():
    rewards = torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.float64)
    values = torch.tensor([[0.5], [0.25], [0.125], [8.0]], dtype=torch.float64)
    result = advantages(rewards, values, torch.zeros(3, 1), 0.5, 0.3, use_gae=False)
    expected = [1 + 1 + 1 + 1 - 0.5, 2 + 2 + 2 - 0.25, 4 + 4 - 0.125]
    assert result.squeeze(1).tolist() == pytest.approx(expected)


def test_losses_are_the_clipped_ones():
    probs = np.array([[0.5, 0.5], [0.9, 0.1], [0.4, 0.6]])
    output = PolicyOutput(torch.log(torch.tensor(probs)), values=torch.tensor([1.0, 0.0, 0.0]),
                          hidden_states=torch.empty(0))
    losses = ppo_losses(output, actions=torch.tensor([0, 0, 0]),
                        old_log_probs=torch.log(torch.tensor([0.25, 0.9, 0.8])),
                        old_values=torch.zeros(3), advantage=torch.tensor([1.0, -3.0, -2.0]),
                        returns=torch.tensor([2.0, 1.0, 0.0]), eps_clip=0.2)
    # The first ratio is 2, clipped to 1.2; the second is 1; the third is 0.5, clipped to 0.8.
    assert losses["policy_loss"].item() == pytest.approx(-(1.2 * 1 + 1 * -3 + 0.8 * -2) / 3)
    # The first value is clipped to 0.2, whose error is the larger one.
    assert losses["value_loss"].item() == pytest.approx(0.5 * (1.8**2 + 1 + 0) / 3)
    entropy = -(probs * np.log(probs)).sum() / 3
    assert losses["entropy"].item() == pytest.approx(entropy)


@pytest.mark.parametrize("recurrent", [True, False])
def test_every_index_is_used_once_an_epoch_within_the_memory_limit(recurrent):
    config = tiny_config(recurrent=recurrent, mini_batch_size=64)
    steps = list(minibatches(config, torch.Generator().manual_seed(0)))
    assert len(steps) == config.mini_batch_per_epoch
    units = 8 if recurrent else 8 * 32
    parts = [part for step in steps for part in step]
    assert sorted(torch.cat(parts).tolist()) == list(range(units))
    frames = 32 if recurrent else 1
    assert max(len(part) * frames for part in parts) == 64


@pytest.mark.parametrize("recurrent", [True, False])
def test_accumulation_does_not_change_the_update(recurrent):
    """The optimiser is plain gradient descent, because Adam hides a wrong scale of the gradient."""
    results = []
    for mini_batch_size in (4096, 64):
        config = tiny_config(recurrent=recurrent, mini_batch_size=mini_batch_size,
                             mini_batch_per_epoch=2)
        policy = tiny_policy(recurrent=recurrent, architecture="nature")
        worker = Collector(EnvConfig("fruitbot", "easy"), policy, FLOAT32, 8, 5, 2)
        rollout = Rollout(32, 8, (64, 64, 3), policy.hidden_state_size, FLOAT32.device)
        worker.play(32, rollout, normalize=True)
        before = torch.cat([p.detach().flatten().clone() for p in policy.parameters()])
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
        summary = update(policy, optimizer, rollout, config, FLOAT32,
                         torch.Generator().manual_seed(0))
        after = torch.cat([p.detach().flatten() for p in policy.parameters()])
        results.append((after - before, summary))
    (whole, whole_summary), (parts, parts_summary) = results
    assert whole.norm() > 1e-3
    assert (whole - parts).norm() < 1e-3 * whole.norm()
    for name, tolerance in (("value_loss", 1e-4), ("grad_norm", 1e-3)):
        assert parts_summary[name] == pytest.approx(whole_summary[name], rel=tolerance)


def test_rollout_holds_what_the_environments_did():
    """Repeating the stored actions in the same environments gives the same rollout."""
    env_config, policy = EnvConfig("fruitbot", "easy"), tiny_policy()
    worker = Collector(env_config, policy, FLOAT32, 4, 11, 2)
    rollout = Rollout(150, 4, (64, 64, 3), 64, FLOAT32.device)
    worker.play(150, rollout, normalize=True)
    again = ProcgenVectorEnv(env_config, 4, 11)
    normalizer = RewardNormalizer(4)
    for t in range(150):
        observation = again.observe()
        assert np.array_equal(rollout.frames[t], observation.frames)
        assert np.array_equal(rollout.masks[t], 1 - observation.first)
        again.act(rollout.actions[t].numpy().astype(np.int32))
        after = again.observe()
        assert np.array_equal(rollout.ended[t], after.first)
        np.testing.assert_allclose(rollout.rewards[t], normalizer(after.rewards, after.first))
    assert rollout.ended.sum() > 3 and rollout.rewards.any()
    with torch.no_grad():  # the frame after the last step also has a value
        images = torch.from_numpy(after.frames).permute(0, 3, 1, 2).float() / 255
        hidden = torch.where(rollout.ended[-1:].T > 0, policy.init_hx, worker.hidden)
        last = policy(images, hidden, torch.ones(4)).values
    torch.testing.assert_close(rollout.values[150], last, atol=1e-4, rtol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("recurrent", [False, True])
def test_a_gpu_that_repeats_steps_acts_as_with_single_ones(recurrent, bfloat16, monkeypatch):
    """The weights change after the steps have been captured."""
    compute = Compute(torch.device("cuda", 0), bfloat16)
    rollouts = []
    for graphed in (True, False):
        if not graphed:
            monkeypatch.setattr("agents.ppo.GraphedFunction", lambda function, device: function)
        policy = compute.place(tiny_policy(recurrent=recurrent))
        worker = Collector(EnvConfig("fruitbot", "easy"), policy, compute, 16, 5, 2)
        for _ in range(2):
            rollout = Rollout(32, 16, (64, 64, 3), policy.hidden_state_size, compute.device)
            worker.play(32, rollout)
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter *= 1.1
        rollouts.append(rollout)
    torch.testing.assert_close(vars(rollouts[0]), vars(rollouts[1]))


@pytest.mark.parametrize("normalize_adv", [True, False])
def test_update_is_one_clipped_step_down_the_specified_loss(normalize_adv):
    config = tiny_config(recurrent=False, mini_batch_per_epoch=1, gamma=0.9, lmbda=0.7,
                         entropy_coef=0.3, value_coef=0.8, normalize_adv=normalize_adv,
                         grad_clip_norm=0.05)
    policy = tiny_policy(recurrent=False, architecture="nature")
    worker = Collector(EnvConfig("fruitbot", "easy"), policy, FLOAT32, 8, 5, 2)
    rollout = Rollout(32, 8, (64, 64, 3), policy.hidden_state_size, FLOAT32.device)
    worker.play(32, rollout)

    advantage = advantages(rollout.rewards, rollout.values, rollout.ended, 0.9, 0.7)
    returns = advantage + rollout.values[:-1]
    if normalize_adv:
        advantage = (advantage - advantage.mean()) / advantage.std()
    images = rollout.frames.flatten(0, 1).permute(0, 3, 1, 2).float() / 255
    output = policy(images, torch.zeros(256, 0), torch.ones(256))
    log_probs = output.log_probs
    # Before the first step the ratio is 1 and nothing is clipped.
    surrogate = (torch.exp(log_probs[range(256), rollout.actions.flatten()]
                           - rollout.log_probs.flatten()) * advantage.flatten()).mean()
    value_loss = 0.5 * ((output.values - returns.flatten()) ** 2).mean()
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    gradients = torch.autograd.grad(-surrogate + 0.8 * value_loss - 0.3 * entropy,
                                    list(policy.parameters()))
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    assert norm > 0.05
    expected = [parameter.detach() - 0.1 * 0.05 / norm * gradient
                for parameter, gradient in zip(policy.parameters(), gradients)]

    update(policy, torch.optim.SGD(policy.parameters(), lr=0.1), rollout, config, FLOAT32,
           torch.Generator())
    for parameter, value in zip(policy.parameters(), expected):
        torch.testing.assert_close(parameter.detach(), value, atol=2e-6, rtol=1e-4)


def test_rewards_are_divided_by_the_deviation_of_the_discounted_return():
    rng = np.random.RandomState(0)
    normalizer = RewardNormalizer(4)
    returns, seen = np.zeros(4), []
    for _ in range(300):
        rewards = rng.randn(4).astype(np.float32) * 3
        first = rng.rand(4) < 0.1
        result = normalizer(rewards, first)
        returns = returns * 0.99 + rewards
        seen.append(returns.copy())
        returns[first] = 0
    np.testing.assert_allclose(result, np.clip(rewards / np.std(seen), -10, 10), rtol=1e-3)
    assert normalizer(np.full(4, 1e9, np.float32), first).max() <= 10


def test_episode_statistics_count_whole_episodes():
    statistics = EpisodeStatistics(2)
    for rewards, first in (([1, 5], [0, 0]), ([2, 5], [1, 0]), ([7, 5], [0, 1]), ([1, 0], [1, 0])):
        statistics.update(np.array(rewards, np.float32), np.array(first, bool))
    assert statistics.num_episodes == 3
    assert statistics.recent_returns.tolist() == [3, 15, 8]
    assert statistics.recent_lengths.tolist() == [2, 3, 2]
    for _ in range(100):
        statistics.update(np.ones(2, np.float32), np.ones(2, bool))
    assert len(statistics.recent_returns) == 40
