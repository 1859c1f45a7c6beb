"""How alike two agents are: CKA and divergences, on frames with each agent's own memory."""

import json

import numpy as np
import pytest
import torch
from conftest import FLOAT32, small_policy
from scipy.stats import ortho_group

import evaluate
from agents.agent_file import save_agent
from agents.episodes import play_episodes
from agents.similarity import compare_agents, linear_cka, similarity
from envs.procgen_env import EnvConfig


def test_cka_is_one_up_to_rotation_and_scale_and_small_for_unrelated_outputs():
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(size=(2000, 6)) * [5, 3, 2, 1, 1, 1])
    turned = 3 * x @ torch.tensor(ortho_group.rvs(6, random_state=0)) + 7
    assert linear_cka(x, turned) == pytest.approx(1)
    assert linear_cka(x, torch.tensor(rng.normal(size=(2000, 4)))) < 0.02
    # Kornblith et al., eq. 3, written out with covariances.
    y = x[:, :3] + torch.tensor(rng.normal(size=(2000, 3)))
    a, b = x - x.mean(dim=0), y - y.mean(dim=0)
    expected = (a.T @ b).norm() ** 2 / ((a.T @ a).norm() * (b.T @ b).norm())
    assert linear_cka(x, y) == pytest.approx(float(expected))
    assert np.isnan(linear_cka(x, torch.ones(2000, 2)))


def test_an_agent_is_like_itself_and_divergences_have_a_direction():
    policy, other = small_policy(), small_policy()
    frames = np.random.default_rng(0).integers(0, 256, (12, 64, 64, 3), np.uint8)
    states = policy.initial_states(12).detach().numpy()
    same = similarity(policy, other, frames, states, states)
    assert same["kl"] == pytest.approx(0, abs=1e-9) and same["same_action"] == 1
    assert "hidden_state" in same["cka"]
    np.testing.assert_allclose([*same["cka"].values()], 1)
    with torch.no_grad():
        other.fc_policy.bias[0] += 30  # never in doubt
    found = similarity(policy, other, frames, states, states)
    assert found["kl"] > 3 * found["kl_of_other"] > 0
    assert found["same_action"] < 1 and found["cka"]["hidden_state"] == pytest.approx(1)


def test_each_agent_has_the_memory_of_the_steps_before():
    policy, other = small_policy(), small_policy()
    with torch.no_grad():
        other.gru.gru.weight_hh_l0 *= 0.5
    env = EnvConfig("maze", "easy")
    found = compare_agents(policy, other, FLOAT32, env, 3, 0)
    frames, states, of_other = [], [], []
    levels = list(enumerate(env.draw_levels(3, 0)))
    for episode in sorted(play_episodes(policy, FLOAT32, env, levels, 0, 3),
                          key=lambda episode: episode.number):
        step = np.random.default_rng([0, episode.number, 1]).integers(max(episode.length, 1))
        state = other.initial_states(1)
        for frame in episode.frames[:step]:
            image = torch.as_tensor(frame).permute(2, 0, 1)[None] / 255
            state = other.step(other.embed(image), state).hidden_states
        frames.append(episode.frames[step])
        states.append(episode.hidden_states[step])
        of_other.append(state[0].detach().numpy())
    expected = similarity(policy, other, np.stack(frames), np.stack(states), np.stack(of_other))
    assert found["kl"] == pytest.approx(expected["kl"], rel=1e-3) and found["kl"] > 1e-4


def test_evaluate_says_how_alike_two_agents_are(tmp_path, capsys):
    for name, recurrent in (("one", False), ("other", True)):
        save_agent(tmp_path / f"{name}.pth", small_policy(recurrent=recurrent), {})
    assert evaluate.main([
        "--model_file", str(tmp_path / "one.pth"), "--env_name", "coinrun", "--num_episodes", "2",
        "--distribution_mode", "easy", "--device", "cpu", "--other_agent",
        str(tmp_path / "other.pth"), "--num_compared", "3", "--output",
        str(tmp_path / "found.json")]) == 0
    assert "same most likely action" in capsys.readouterr().out
    alike = json.loads((tmp_path / "found.json").read_text())["alike"]
    assert alike["kl"] > 0 and 0 < alike["cka"]["embedder.fc"] <= 1
