"""render.py, evaluate.py and their parts, including the similarity of two agents."""

import dataclasses
import json

import av
import numpy as np
import pytest
import scipy.stats
import torch
from conftest import FLOAT32, read_video, small_policy, tiny_policy
from PIL import Image
from scipy.stats import ortho_group

import evaluate
import render
from agents.agent_file import save_agent
from agents.episodes import UNFINISHED, PlayOptions, play_episodes
from agents.patch import Apply
from agents.similarity import compare_agents, linear_cka, similarity
from agents.testbed import Condition, Testbed
from common.video import enlarge
from envs.procgen_env import EnvConfig


def test_both_views_of_every_episode_are_rendered(agent_path, tmp_path, capsys):
    argv = ["--model_file", str(agent_path), "--vid_dir", str(tmp_path), "--num_eps", "1",
            "--env_name", "fruitbot", "--tps", "20", "--seed", "9", "--strip"]  # short episodes
    assert render.main(argv) == 0
    printed = capsys.readouterr().out
    config = EnvConfig("fruitbot", "easy")
    levels = list(enumerate(config.draw_levels(1, 9)))
    for episode in play_episodes(tiny_policy(), FLOAT32, config, levels, 9, 1):
        line = printed.splitlines()[episode.number]
        assert line.startswith(f"episode {episode.number}: level {episode.level_seed}, return")
        videos = [read_video(tmp_path / f"episode_{episode.number:05d}_{view}.mp4")
                  for view in ("person", "agent")]
        assert videos[0].shape == videos[1].shape
        assert videos[0].shape[1:] == (512, 512, 3)
        # The agent's view is its frame, enlarged; the action's mark is in the lower left corner.
        error = np.abs(videos[1][0].astype(int) - enlarge(episode.frames[0], 8))
        assert error[:400].mean() < 6
        assert error[-90:, :90].mean() > 20
        # The person's view is the same scene at a higher resolution.
        small = videos[0][0].reshape(64, 8, 64, 8, 3).mean((1, 3))
        assert np.abs(small - episode.frames[0])[:50].mean() < 20
        strip = np.asarray(Image.open(tmp_path / f"episode_{episode.number:05d}_strip.png"))
        assert strip.shape == (256, 6 * 256 + 5 * 8, 3)
        first = strip[:, :256].reshape(64, 4, 64, 4, 3).mean((1, 3))
        assert np.abs(first - episode.frames[0])[:50].mean() < 20
    with av.open(str(tmp_path / "episode_00000_agent.mp4")) as container:
        assert container.streams.video[0].average_rate == 20


def test_a_rendering_replaces_only_renderings(agent_path, tmp_path, capsys):
    argv = ["--model_file", str(agent_path), "--vid_dir", str(tmp_path / "videos"), "--num_eps",
            "1", "--env_name", "fruitbot"]
    mine = tmp_path / "videos" / "episode_00000_agent.mp4"
    mine.parent.mkdir()
    mine.write_text("mine")
    assert render.main(argv) == 2 and "holds other data" in capsys.readouterr().err
    assert mine.read_text() == "mine"
    mine.unlink()
    assert render.main(argv) == render.main(argv) == 0
    assert render.main([*argv, "--seed", "3"]) == 2 and "seed" in capsys.readouterr().err
    (mine.parent / "notes.txt").write_text("mine")
    assert render.main([*argv, "--seed", "3", "--overwrite"]) == 2
    assert "notes.txt does not belong to" in capsys.readouterr().err
    (mine.parent / "notes.txt").unlink()
    assert render.main([*argv, "--seed", "3", "--overwrite"]) == 0


def test_evaluation_counts_successes_on_unseen_levels(agent_path, tmp_path, monkeypatch, capsys):
    """In easy leaper, an untrained agent sometimes succeeds, which its reward of 10 shows. The
    expected numbers are computed from the episodes that were played."""
    episodes = []

    def play(*args, **kwargs):
        for episode in play_episodes(*args, **kwargs):
            episodes.append(episode)
            yield episode

    monkeypatch.setattr(evaluate, "play_episodes", play)
    argv = ["--model_file", str(agent_path), "--env_name", "leaper", "--num_episodes", "24",
            "--num_levels", "50", "--output", str(tmp_path / "result.json"), "--seed", "2"]
    assert evaluate.main(argv) == 0
    assert sorted(episode.number for episode in episodes) == list(range(24))
    levels = {episode.level_seed for episode in episodes}
    assert len(levels) == 24 and min(levels) >= 50
    solved = [episode.level_complete for episode in episodes]
    assert solved == [episode.rewards.sum() == 10 for episode in episodes]
    assert 0 < sum(solved) < 24
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["env"]["start_level"] == 50
    assert result["num_episodes"] == 24
    assert result["success_rate"] == sum(solved) / 24
    wilson = scipy.stats.binomtest(sum(solved), 24).proportion_ci(method="wilson")
    assert result["success_interval"] == pytest.approx(wilson, abs=1e-12)
    returns = [episode.rewards.sum() for episode in episodes]
    normal = scipy.stats.norm.interval(0.95, np.mean(returns), scipy.stats.sem(returns))
    assert result["mean_return"] == pytest.approx(np.mean(returns))
    assert result["return_interval"] == pytest.approx(normal)
    lengths = [len(episode.actions) - 1 for episode in episodes]  # the last action is not executed
    assert result["mean_length"] == pytest.approx(np.mean(lengths))
    assert (f"success rate {100 * sum(solved) / 24:.1f} % (95 % interval {100 * wilson.low:.1f} to "
            f"{100 * wilson.high:.1f}), mean return {np.mean(returns):.2f} ({normal[0]:.2f} to "
            f"{normal[1]:.2f}), mean length {np.mean(lengths):.1f} steps over 24 levels"
            in capsys.readouterr().out)


def test_episode_depends_on_its_number_and_level_alone():
    config = EnvConfig("fruitbot", "easy")
    levels = list(enumerate(config.draw_levels(6, 0)))
    together = {e.number: e for e in play_episodes(tiny_policy(), FLOAT32, config, levels, 0, 6)}
    (alone,) = play_episodes(tiny_policy(), FLOAT32, config, levels[4:5], 0, 1)
    for name in ("actions", "frames", "hidden_states", "log_probs", "values"):
        assert np.array_equal(getattr(alone, name), getattr(together[4], name)), name
    (other,) = play_episodes(tiny_policy(), FLOAT32, config, levels[4:5], 1, 1)
    assert not np.array_equal(other.actions[:10], alone.actions[:10])


def test_continuations_depend_on_state_actions_and_seed_alone():
    """Without a patch, conditions share forward passes; with one, each is played on its own."""
    testbed = Testbed(tiny_policy(), FLOAT32, EnvConfig("fruitbot", "easy"), [3, 5], num_slots=5,
                      options=PlayOptions(keep_frames=False, max_steps=12))
    states = testbed.states({1: [9, 2]})
    assert list(states) == [(1, 9), (1, 2)] and states[1, 9].step == 9
    [whole] = testbed.episodes(numbers=[1])
    replayed = dataclasses.replace(testbed, starts=[states[1, 2]])
    [rest] = replayed.episodes(Condition("replay", actions=whole.actions[2:-1]))
    assert rest.level_seed == 5 and whole.end == rest.end == UNFINISHED and rest.length == 12
    for name in ("actions", "values", "rewards", "hidden_states", "log_probs"):
        np.testing.assert_array_equal(getattr(rest, name)[1:10], getattr(whole, name)[3:12])

    trials = dataclasses.replace(testbed, starts=list(states.values()), num_repeats=3)
    conditions = [Condition(f"action {action}", actions=[action]) for action in (1, 7)]
    still = [dataclasses.replace(condition, patches=[Apply("gru", lambda output: output)])
             for condition in conditions]
    for together, alone in zip(trials.play(conditions), trials.play(still)):
        assert together.condition.actions == alone.condition.actions
        assert together.table.equals(alone.table)
        for one, other in zip(together.episodes, alone.episodes):
            np.testing.assert_array_equal(one.actions, other.actions)
            assert one.actions[0] == together.condition.actions[0]
    first, second = ([episode.actions[1:].tolist() for episode in played.episodes]
                     for played in trials.play([conditions[0], conditions[0]]))
    assert first == second and first[0] != first[1]  # other random numbers
    [other] = dataclasses.replace(trials, seed=1).play(conditions[:1])
    assert other.episodes[0].actions[1:].tolist() != first[0]


def test_drawn_levels_lie_in_the_range_and_are_distinct():
    config = EnvConfig("coinrun", "easy", start_level=10, num_levels=20)
    drawn = config.draw_levels(20, 0)
    assert sorted(drawn) == list(range(10, 30)) and config.draw_levels(25, 0)[:20] == drawn
    unseen = config.unseen_levels().draw_levels(1000, 0)
    assert min(unseen) >= 30 and len(set(unseen)) == 1000


# Similarity of two agents, on frames and with each agent's own memory

def test_cka_is_one_up_to_rotation_and_scale_and_small_for_unrelated_outputs():
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(size=(2000, 6)) * [5, 3, 2, 1, 1, 1])
    turned = 3 * x @ torch.tensor(ortho_group.rvs(6, random_state=0)) + 7
    assert linear_cka(x, turned) == pytest.approx(1)
    assert linear_cka(x, torch.tensor(rng.normal(size=(2000, 4)))) < 0.02
    # Linear CKA (Kornblith et al., 2019, eq. 3), computed from covariances.
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
        other.fc_policy.bias[0] += 30  # a nearly deterministic policy
    found = similarity(policy, other, frames, states, states)
    assert found["kl"] > 3 * found["kl_of_other"] > 0
    assert found["same_action"] < 1 and found["cka"]["hidden_state"] == pytest.approx(1)


def test_each_agent_has_the_memory_of_the_steps_before():
    policy, other = small_policy(), small_policy()
    with torch.no_grad():
        other.gru.gru.weight_hh_l0 *= 0.5
    env = EnvConfig("fruitbot", "easy")
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
