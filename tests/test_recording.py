"""record.py: what it writes is what happened."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import FLOAT32, bytes_of_files, read_video, record_arguments

import record
from agents.acting import load_action_noise, run_policy
from agents.agent_file import load_agent
from agents.rollout_files import STEP_COLUMNS, RolloutFolder
from common.video import mark_action
from envs.procgen_env import EnvConfig, ProcgenVectorEnv

EPISODES = range(12)


@pytest.fixture(scope="module")
def folder(recording):
    return RolloutFolder(recording / "data")


def test_files_have_the_published_layout(folder):
    for number in EPISODES:
        episode = folder.episode(number)
        length = len(episode.steps)
        assert episode.frames.shape == (length, 64, 64, 3) and episode.frames.dtype == np.uint8
        assert episode.hidden_states.shape == (length + 1, 64)
        assert episode.log_probs.shape == (length, 15)
        assert episode.hidden_states.dtype == episode.log_probs.dtype == np.float32
        header = folder.steps_file(number).read_text().splitlines()[0]
        assert header == "," + ",".join(STEP_COLUMNS)
    names = {path.name for path in folder.path.iterdir()}
    assert names == {"idx_to_episode.csv", "recording.json",
                     *(f"{stem}_{number:05d}{suffix}" for number in EPISODES for stem, suffix in (
                         ("episode", ""), ("data_gen_model", ".csv"), ("sample", ".mp4")))}


def test_videos_show_the_frames_and_the_actions(folder):
    for number in EPISODES[:2]:
        episode = folder.episode(number)
        video = read_video(folder.video_file(number))
        assert video.shape == (len(episode.frames), 192, 192, 3)
        shown = video.reshape(-1, 64, 3, 64, 3, 3).mean(axis=(2, 4))
        error = np.abs(shown - episode.frames)
        assert error[:, :50].mean() < 6  # above the mark of the action
        marks = [video[step, -38:, :38].astype(int) for step in range(len(video))]
        expected = [mark_action(np.zeros((192, 192, 3), np.uint8), action)[-38:, :38].astype(int)
                    for action in episode.steps["action"]]
        fits = [np.abs(mark - other).mean() for mark, other in zip(marks, expected)]
        others = [np.abs(mark - other).mean() for mark in marks for other in expected]
        assert np.mean(fits) < 0.9 * np.mean(others)


def test_steps_are_counted_through_the_whole_data_set(folder):
    index = folder.index()
    assert index["global_step"].tolist() == list(range(len(index)))
    steps = pd.concat([folder.steps(number) for number in EPISODES])
    assert steps["global_step"].tolist() == index["global_step"].tolist()
    assert steps["episode"].tolist() == index["episode"].tolist()
    for number in EPISODES:
        rows = folder.steps(number)
        assert rows["episode_step"].tolist() == list(range(len(rows)))
        assert rows["level_seed"].nunique() == 1


def test_last_row_alone_is_the_terminal_step(folder):
    rewards = 0.0
    for number in EPISODES:
        episode = folder.episode(number)
        assert episode.steps["done"].tolist() == [0] * (len(episode.steps) - 1) + [1]
        assert not episode.frames[-1].any()
        assert episode.frames[:-1].reshape(len(episode.steps) - 1, -1).any(axis=1).all()
        assert episode.steps["reward"].iloc[0] == 0
        rewards += episode.steps["reward"].abs().sum()
    assert rewards > 0


def test_stored_frames_give_the_stored_states_and_log_probabilities(folder, agent_path):
    policy = load_agent(agent_path)
    noise = load_action_noise("fruitbot")
    for number in EPISODES:
        episode = folder.episode(number)
        assert np.array_equal(episode.hidden_states[0], policy.init_hx.detach().numpy())
        frames = np.array(episode.frames)
        entering = torch.from_numpy(np.array(episode.hidden_states[:-1]))
        output = run_policy(policy, FLOAT32, frames, entering)
        np.testing.assert_allclose(output.hidden_states, episode.hidden_states[1:], atol=1e-4)
        np.testing.assert_allclose(output.values, episode.steps["value"], atol=1e-4)
        log_probs = torch.log_softmax(noise(output.logits), dim=-1)
        np.testing.assert_allclose(log_probs, episode.log_probs, atol=1e-4)
        assert not np.allclose(output.log_probs, episode.log_probs, atol=0.1)


def test_stored_actions_on_the_stored_level_give_the_stored_frames(folder):
    for number in EPISODES:
        episode = folder.episode(number)
        level = int(episode.steps["level_seed"].iloc[0])
        env = ProcgenVectorEnv(EnvConfig("fruitbot", "easy", level, 1), 1, seed=99)
        for row in episode.steps.itertuples():
            observation = env.observe()
            assert bool(observation.first[0]) == (row.episode_step == 0 or row.done == 1)
            if row.episode_step:
                assert observation.rewards[0] == row.reward
            if not row.done:
                assert np.array_equal(observation.frames[0], episode.frames[row.episode_step])
                env.act(np.array([row.action], dtype=np.int32))
        env.close()


def test_noise_flattens_the_policy_as_specified():
    logits = torch.tensor([[4.0, -4.0, 1.0, *[0.5] * 12]])
    altered = load_action_noise("coinrun")(logits)[0]
    assert altered.tolist() == pytest.approx(
        [0.8, -1.8, 0.7, 0.35, 0.35, 0.35, 0.35, 0.1, 0.35, *[-3.0] * 6])
    assert logits[0, 0] == 4.0
    elsewhere = load_action_noise("maze")(logits)[0]  # which key does what depends on the game
    assert elsewhere.tolist() == pytest.approx([2.8, -2.8, 0.7, *[0.35] * 12])


def test_without_noise_the_policy_itself_is_stored(agent_path, tmp_path):
    argv = record_arguments(agent_path, tmp_path, 2, "--no_action_noise", "--no_videos")
    assert record.main(argv) == 0
    folder = RolloutFolder(tmp_path / "data")
    assert folder.description()["log_probs_of"] == "the policy"
    assert not list(folder.path.glob("*.mp4"))
    episode = folder.episode(0)
    output = run_policy(load_agent(agent_path), FLOAT32, np.array(episode.frames),
                        torch.from_numpy(np.array(episode.hidden_states[:-1])))
    np.testing.assert_allclose(output.log_probs, episode.log_probs, atol=1e-4)


def test_recording_can_be_extended(folder, agent_path, tmp_path):
    assert record.main(record_arguments(agent_path, tmp_path, 5)) == 0
    assert RolloutFolder(tmp_path / "data").index()["episode"].max() == 4
    assert record.main(record_arguments(agent_path, tmp_path, 12)) == 0
    assert bytes_of_files(tmp_path / "data") == bytes_of_files(folder.path)
    assert RolloutFolder(tmp_path / "data").sha256() == folder.sha256()


def test_description_says_what_made_the_data(folder, agent_path):
    description = json.loads((folder.path / "recording.json").read_text())
    assert description["agent_file"] == agent_path.name
    assert description["env"]["env_name"] == "fruitbot"
    assert description["interpreting_params_name"] == "defaults"
    assert description["log_probs_of"] == "the policy with action noise"
    assert description["action_noise"]["scale"] == 0.7
    assert "torch" in description["versions"]
